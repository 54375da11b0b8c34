"""What people see of a run in the Prefect UI: a page of text and a table of money. Data goes to Parquet, not here."""

from __future__ import annotations

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.night import NightFailed, Run
from tasks.summary import artifact_rows, artifact_text


async def tell_artifacts(run: Run, name: str) -> None:
    """Write a markdown and a table artifact; then raise when something of the run failed.

    Raises:
        NightFailed: a day, a bill or a source failed; carries failed, run. What did not fail stands.
    """
    await acreate_markdown_artifact(
        artifact_text(run), key=f"{name}-run", description="Stages, days, deliveries and failures"
    )
    await acreate_table_artifact(
        artifact_rows(run), key=f"{name}-money", description="Money by category in both ledgers"
    )
    if run.failed:
        told = "; ".join(f"{what}: {why}" for what, why in run.failed.items())
        raise NightFailed(
            f"{name} {run.last_day}: {len(run.failed)} failed, {_rest(run)}. {told}",
            failed=run.failed,
            run=run,
        )


def _rest(run: Run) -> str:
    """What became of what did not fail."""
    if run.causes:
        return "the rest is published"
    due = [stage["days"] for stage in run.stages if stage["stage"] == "plan"]
    nothing = "no day is published anew"
    return f"no day was due and {nothing}" if due and not any(due) else nothing
