"""The reduce flow: turn the accepted shards of one day into hours of devices, jobs and layers."""

from __future__ import annotations

import sys

from prefect import flow

from flows.artifacts import tell_artifacts
from flows.night import Run, run_stage
from flows.params import OneDay
from flows.shell import main
from tasks.steps import as_task


@flow(name="reduce", persist_result=False)
async def reduce(params: OneDay) -> Run:
    """Turn the accepted shards of one day into hours of devices, jobs and layers."""
    run = await run_stage(params.load(), params.day.isoformat(), as_task, "reduce")
    await tell_artifacts(run, "reduce")
    return run


if __name__ == "__main__":
    sys.exit(main(reduce, OneDay, "reduce"))
