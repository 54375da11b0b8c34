"""The publish flow: commit one day and write its reports, one object a table and day."""

from __future__ import annotations

import sys

from prefect import flow

from flows.artifacts import tell_artifacts
from flows.night import Run, run_stage
from flows.params import OneDay
from flows.shell import main
from tasks.steps import as_task


@flow(name="publish", persist_result=False)
async def publish(params: OneDay) -> Run:
    """Commit one day and write its reports, one object a table and day."""
    run = await run_stage(params.load(), params.day.isoformat(), as_task, "publish")
    await tell_artifacts(run, "publish")
    return run


if __name__ == "__main__":
    sys.exit(main(publish, OneDay, "publish"))
