"""The reconcile flow: give every cent of one day its address, and hold the ledger to its laws and to the witness."""

from __future__ import annotations

import sys

from prefect import flow

from flows.artifacts import tell_artifacts
from flows.night import Run, run_stage
from flows.params import OneDay
from flows.shell import main
from tasks.steps import as_task


@flow(name="reconcile", persist_result=False)
async def reconcile(params: OneDay) -> Run:
    """Give every cent of one day its address, and hold the ledger to its laws and to the witness."""
    run = await run_stage(params.load(), params.day.isoformat(), as_task, "reconcile")
    await tell_artifacts(run, "reconcile")
    return run


if __name__ == "__main__":
    sys.exit(main(reconcile, OneDay, "reconcile"))
