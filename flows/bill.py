"""The bill flow: accept new bill deliveries, each whole or not at all."""

from __future__ import annotations

import sys

from prefect import flow

from flows.artifacts import tell_artifacts
from flows.night import Run, run_stage
from flows.params import Bills
from flows.shell import main
from tasks.steps import as_task


@flow(name="bill", persist_result=False)
async def bill(params: Bills = Bills()) -> Run:  # noqa: B008 - the default is the form of an unattended run
    """Accept new bill deliveries, each whole or not at all."""
    run = await run_stage(params.load(), params.day.isoformat() if params.day else None, as_task, "bill")
    await tell_artifacts(run, "bill")
    return run


if __name__ == "__main__":
    sys.exit(main(bill, Bills, "bill"))
