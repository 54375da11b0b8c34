"""The tier flow: what lies in the checkpoint folders, where the policy wants it, and which moves pay. Nothing is moved.

folders ─► inventory ─┐
policy, prices ───────┴► plan ─► report_checkpoints__inventory, report_checkpoints__moves
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import sys
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from pydantic import Field, ValidationError, field_validator

from flows.params import OLDEST, Where
from flows.shell import hide_traces
from seedance.errors import SeedanceError
from tasks.errors import PipelineError
from tasks.io import show, show_tiers
from tasks.steps import as_task
from tasks.tier import plan_tiers


class Tier(Where):
    """A priced plan for checkpoint folders."""

    policy: str = Field(
        title="Policy file",
        description="Path of a tier policy (TOML), such as samples/tiers.toml.",
        min_length=1,
    )
    folder: str = Field(
        "",
        title="Checkpoint folder",
        description="A local folder or s3://bucket/prefix; the folders of the policy when empty.",
    )
    day: dt.date | None = Field(
        None, title="Day", description="UTC day to whose end ages are counted; today when empty. Not in the future."
    )

    @field_validator("day")
    @classmethod
    def _past(cls, day: dt.date | None) -> dt.date | None:
        today = dt.datetime.now(dt.UTC).date()
        if day is not None and day < OLDEST:
            raise ValueError(f"{day} lies before {OLDEST}, the oldest day that can be used")
        if day is not None and day > today:
            raise ValueError(f"{day} is in the future; the newest day that can be used is {today} (UTC)")
        return day

    @property
    def as_of(self) -> str:
        """The day that ages are counted to, YYYY-MM-DD."""
        return (self.day or dt.datetime.now(dt.UTC).date()).isoformat()


@flow(name="tier", persist_result=False)
async def tier(params: Tier) -> dict[str, Any]:
    """List checkpoint folders and price a plan that moves older checkpoints to cheaper classes. Nothing is moved."""
    folders = (params.folder,) if params.folder else ()
    facts: dict[str, Any] = await as_task(plan_tiers, params.load(), params.policy, folders, params.as_of)
    await acreate_markdown_artifact(
        show_tiers.markdown(facts), key="tier-plan", description="Checkpoints by tier, and what moving them would save"
    )
    await acreate_table_artifact(show_tiers.rows(facts), key="tier-money", description="Money of the moves, list price")
    return facts


def main() -> int:
    """Parse arguments, run the flow, print the plan; the exit status: 0, 1 when it failed, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m flows.tier", description=tier.__doc__)
    for name, facts in Tier.model_fields.items():
        parser.add_argument("--" + name, required=facts.is_required(), help=facts.description)
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    try:
        params = Tier(**{k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        for problem in error.errors():
            print(f"--{problem['loc'][0]}: {problem['msg']}, found {problem['input']!r}", file=sys.stderr)
        return 2
    try:
        params.load()  # a wrong settings file is told before a server is started
        hide_traces()
        plan = asyncio.run(_run(params))
    except (PipelineError, SeedanceError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if as_json:
            print(json.dumps({"failed": {"tier": f"{type(error).__name__}: {error}"}}, indent=1))
        return 1
    if as_json:
        print(json.dumps(plan, indent=1))
        return 0
    out = show.console()
    out.print(show_tiers.entry_table(plan))
    out.print(show_tiers.money_table(plan))
    for line in show_tiers.lines(plan):
        out.print(line)
    return 0


async def _run(params: Tier) -> dict[str, Any]:
    return await tier(params)


if __name__ == "__main__":
    sys.exit(main())
