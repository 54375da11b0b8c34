"""The nightly flow: bills and shards in, every due day through reduce, reconcile and publish.

bills ──► ingest ─┐
shards ─► admit ──┴► plan ─► collect ─► reduce ─► reconcile ─► publish
"""

from __future__ import annotations

import sys

from prefect import flow

from flows.artifacts import tell_artifacts
from flows.night import Run, run_night
from flows.params import Nightly
from flows.shell import main
from tasks.steps import as_task


@flow(name="nightly", persist_result=False)
async def nightly(params: Nightly = Nightly()) -> Run:  # noqa: B008 - the default is the form of an unattended run
    """Take in new bills and telemetry, and publish every day that they change, up to one day."""
    run = await run_night(params.load(), params.newest, as_task)
    await tell_artifacts(run, "nightly")
    return run


if __name__ == "__main__":
    sys.exit(main(nightly, Nightly, "nightly"))
