"""The collect flow: check the telemetry shards of one day, and put aside with a reason what cannot be used."""

from __future__ import annotations

import sys

from prefect import flow

from flows.artifacts import tell_artifacts
from flows.night import Run, run_stage
from flows.params import OneDay
from flows.shell import main
from tasks.steps import as_task


@flow(name="collect", persist_result=False)
async def collect(params: OneDay) -> Run:
    """Check the telemetry shards of one day, and put aside with a reason what cannot be used."""
    run = await run_stage(params.load(), params.day.isoformat(), as_task, "collect")
    await tell_artifacts(run, "collect")
    return run


if __name__ == "__main__":
    sys.exit(main(collect, OneDay, "collect"))
