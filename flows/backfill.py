"""The backfill flow: every stage for a range of days, computing only what the lake does not hold."""

from __future__ import annotations

import sys

from prefect import flow

from flows.artifacts import tell_artifacts
from flows.night import Run, run_night
from flows.params import Backfill
from flows.shell import main
from tasks.steps import as_task


@flow(name="backfill", persist_result=False)
async def backfill(params: Backfill) -> Run:
    """Run every stage for each due day of a range, oldest first; with recode, also days whose code changed."""
    first, last = params.first_day.isoformat(), params.last_day.isoformat()
    run = await run_night(params.load(), last, as_task, first_day=first, recode=params.recode)
    await tell_artifacts(run, "backfill")
    return run


if __name__ == "__main__":
    sys.exit(main(backfill, Backfill, "backfill"))
