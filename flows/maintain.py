"""What people run beside the nights, each as a flow: `plan`, `verify`, `sweep` and `rebuild`, and how their answers are shown."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from rich.table import Table

from flows.night import Run, run_days, run_night
from flows.params import Plan, Rebuild, Sweep, Verify
from tasks import maintain
from tasks import verify as checks
from tasks.errors import PipelineError
from tasks.io import show
from tasks.settings import Settings
from tasks.steps import Call, as_task

SHOWN = 200
"""Rows of a table that people are shown; `--json` has all of them."""
NAMED = 10
"""Paths of each kind that a sweep names to people."""
UNNAMED = (
    "no kept commit and no step names them, not counting steps that go now; they go seven days after a sweep with --delete "
    "first noted that"
)


class MaintenanceFailed(PipelineError):
    """Something that was asked about is not as it should be, or could not be done: failed, run."""


@dataclass
class Answer:
    """What a command found: facts for programs, lines and a table for people, and a reason for whatever failed."""

    name: str
    facts: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def as_dict(answer: Answer) -> dict[str, Any]:
    """The answer as JSON values."""
    return answer.facts | {"failed": answer.failed}


def tell(answer: Answer) -> None:
    """Print the answer for people."""
    out = show.console()
    if answer.rows:
        table = Table(title=answer.name.capitalize(), title_justify="left")
        for name in answer.columns:
            table.add_column(name, overflow="fold")
        for row in answer.rows[:SHOWN]:
            table.add_row(*row)
        out.print(table)
        if len(answer.rows) > SHOWN:
            out.print(f"{len(answer.rows) - SHOWN:,} more; --json shows all")
    for line in answer.lines:
        out.print(line)
    for what, why in answer.failed.items():
        show.console(error=True).print(f"failed {what}: {why}", style="bold red")


async def _artifacts(answer: Answer) -> Answer:
    """Show the answer in the Prefect UI; then raise when something failed."""
    text = "\n".join([f"# {answer.name}", "", *(f"- {line}" for line in answer.lines)])
    await acreate_markdown_artifact(text, key=f"{answer.name}-answer", description=f"What {answer.name} found")
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows[:SHOWN]]
    await acreate_table_artifact(rows, key=f"{answer.name}-table", description=f"What {answer.name} found, row by row")
    if answer.failed:
        told = "; ".join(f"{what}: {why}" for what, why in list(answer.failed.items())[:SHOWN])
        raise MaintenanceFailed(f"{answer.name}: {told}", failed=answer.failed, run=answer)
    return answer


# --- plan ------------------------------------------------------------------------------------------------------------


@flow(name="plan", persist_result=False)
async def plan(params: Plan = Plan()) -> Answer:  # noqa: B008 - the default is the form of an unattended run
    """Say which days a night would compute and why, and which producers of telemetry are missing."""
    return await _artifacts(
        await plan_answer(params.load(), params.newest, _text(params.first_day), params.recode, as_task)
    )


async def plan_answer(settings: Settings, last_day: str, first_day: str | None, recode: bool, call: Call) -> Answer:
    """The answer of `plan`, called in any way."""
    facts = await call(maintain.plan_days, settings, last_day, first_day, recode)
    rows = [
        (d["day"], d["cause"] or "first", d["why"], f"{d['head'] or 'none'} -> {d['revision']}") for d in facts["due"]
    ]
    due = f"{len(facts['due'])} day(s) due" if facts["due"] else "no day is due: nothing would be computed"
    lines = [f"looked at {facts['first_day']} to {facts['last_day']}: {due}"]
    for day, count in facts["waiting"].items():
        lines.append(f"{day}: {count} shard(s) in the drop folder are not in the lake yet")
    lines += [f"{day}: has charges and lies before the look-back; only a backfill runs it" for day in facts["older"]]
    lines += [f"{day}: has not come yet and has shards" for day in facts["future"]]
    for day, marker in facts["stale"].items():
        lines.append(
            f"{day}: stale since {marker.get('since')}, commit {marker.get('commit')} stands: {marker.get('why')}"
        )
    for day, complete in facts["completeness"].items():
        for missing in complete["missing"]:
            why = maintain.MISSING[missing["reason"]]
            lines.append(f"{day}: {missing['name']} is missing in hour {missing['hours']}: {why}")
    return Answer("plan", facts, lines, ("day", "cause", "why", "revision"), rows, dict(facts["failed"]))


# --- verify ----------------------------------------------------------------------------------------------------------


@flow(name="verify", persist_result=False)
async def verify(params: Verify = Verify()) -> Answer:  # noqa: B008 - the default is the form of an unattended run
    """Hold every committed day to its objects and to its reports; with repair, bring back what can be had again."""
    answer = await verify_answer(params.load(), _text(params.first_day), _text(params.last_day), params.repair, as_task)
    return await _artifacts(answer)


async def verify_answer(
    settings: Settings, first_day: str | None, last_day: str | None, repair: bool, call: Call
) -> Answer:
    """The answer of `verify`, called in any way."""
    found = await call(checks.verify, settings, first_day, last_day)
    if repair and found.lost:
        reasons = await _restore(settings, found, call)
        after = await call(checks.verify, settings, first_day, last_day)
        found = checks.judge(found, after, reasons)
    rows = [(one.day or "-", one.path, one.problem, one.command) for one in found.lost]
    lost = f"{len(found.lost):,} lost" if found.lost else "all as committed"
    lines = [f"{found.days:,} committed day(s), {found.objects:,} objects ({found.bytes:,} bytes) read: {lost}"]
    if not found.days:
        lines = [f"no day is committed in {settings.lake} in the range that was asked for: nothing was read"]
    lines += [f"brought back {path}" for path in found.repaired]
    facts = {
        "days": found.days,
        "objects": found.objects,
        "bytes": found.bytes,
        "lost": [vars(one) for one in found.lost],
        "repaired": found.repaired,
    }
    failed = {
        one.path: one.problem.rstrip(".") + (f". Run `{one.command}`" if one.command else "") for one in found.lost
    }
    return Answer("verify", facts, lines, ("day", "path", "problem", "command"), rows, failed)


async def _restore(settings: Settings, found: checks.Verified, call: Call) -> Mapping[str, str]:
    """Compute what is lost again, day by day; a reason for each day where that failed."""
    reasons: dict[str, str] = {}
    for day in await call(checks.clear, settings, found):
        run = Run(day)
        try:
            plans = await call(checks.plans_to_restore, settings, day, found)
            await run_days(settings, plans, call, run, {})
        except Exception as error:  # noqa: BLE001 - whatever stops one day must not stop the others
            run.failed[day] = f"{type(error).__name__}: {error}"
        reasons |= run.failed
    shown: dict[str, str] = await call(checks.show_heads, settings, found, reasons)
    return shown


# --- sweep -----------------------------------------------------------------------------------------------------------


@flow(name="sweep", persist_result=False)
async def sweep(params: Sweep = Sweep()) -> Answer:  # noqa: B008 - the default is the form of an unattended run
    """Say which steps and objects no kept commit needs, and with delete take them away, in two passes a week apart."""
    return await _artifacts(await sweep_answer(params.load(), params.delete, time.time_ns(), as_task))


async def sweep_answer(settings: Settings, delete: bool, now_ns: int, call: Call) -> Answer:
    """The answer of `sweep`, called in any way."""
    swept = await call(maintain.sweep, settings, now_ns, delete)
    now = "deleted" if delete else "would be deleted"
    kinds = (
        (now, "step", swept.steps, "over 30 days old, and no kept commit names an object of theirs"),
        (now, "object", swept.objects, "no kept commit and no step names them, for seven days or longer"),
        (now, "lease", swept.leases, "their day has a later lease"),
        ("waits", "object", swept.waiting, UNNAMED),
    )
    rows = [
        (when, kind, path, f"{size:,}") for when, kind, sizes, _ in kinds for path, size in list(sizes.items())[:NAMED]
    ]
    lines = [_swept_line(*facts) for facts in kinds]
    lines.append(f"{swept.freed:,} bytes {now}{'' if delete else ' (dry run; --delete does it)'}")
    facts = {"deleted": delete, "bytes": swept.freed, "at": dt.datetime.fromtimestamp(now_ns / 1e9, dt.UTC).isoformat()}
    return Answer("sweep", facts | vars(swept), lines, ("when", "kind", "path", "bytes"), rows)


def _swept_line(when: str, kind: str, sizes: Mapping[str, int], why: str) -> str:
    """How many, how large and why; and how many of them the table does not name."""
    line = f"{when}: {len(sizes):,} {kind}(s), {sum(sizes.values()):,} bytes"
    if not sizes:
        return line
    rest = f"; {len(sizes) - NAMED:,} more than are named here, --json names all" if len(sizes) > NAMED else ""
    return f"{line}: {why}{rest}"


# --- rebuild ---------------------------------------------------------------------------------------------------------


@flow(name="rebuild", persist_result=False)
async def rebuild(params: Rebuild) -> Answer:
    """Make a new lake from what another one keeps in raw/, compute every day, and compare the reports of both."""
    return await _artifacts(await rebuild_answer(params.load(), params.into, _text(params.last_day), as_task))


async def rebuild_answer(settings: Settings, into: str, last_day: str | None, call: Call) -> Answer:
    """The answer of `rebuild`, called in any way."""
    copied = await call(maintain.copy_raw, settings, into)
    failed: dict[str, str] = {}
    commits: Mapping[str, int] = {}
    newest = last_day or copied["last_day"]
    if copied["first_day"] is not None:
        fresh = maintain.from_raw_alone(settings, into, copied["sources"])
        run = await run_night(fresh, newest, call, first_day=copied["first_day"], raw_alone=True)
        failed, commits = dict(run.failed), run.commits
    reports = await call(maintain.compare_reports, settings, into)
    failed |= dict.fromkeys(reports["differ"], "its bytes differ from those of the old lake")
    # Of days after the one that was asked for none was made.
    absent = [path for path in reports["missing"] if last_day is None or _day_of(path) <= last_day]
    failed |= dict.fromkeys(absent, "the old lake has it, and it was not made again")
    bills = f"bills of {', '.join(copied['sources'])}" if copied["sources"] else "no bills"
    lines = [
        f"{copied['objects']:,} objects ({copied['bytes']:,} bytes) of raw/ copied, with {bills}; "
        f"{len(commits):,} day(s) committed",
        f"daily reports: {len(reports['same']):,} the same byte for byte, {len(reports['differ']):,} differ, "
        f"{len(reports['missing']):,} only in the old lake, {len(reports['new']):,} only in the new one",
    ]
    rows = [(kind, path) for kind in ("differ", "missing", "new") for path in reports[kind]]
    facts = {"copied": copied, "commits": dict(commits), "reports": reports}
    return Answer("rebuild", facts, lines, ("what", "path"), rows, failed)


def _day_of(report: str) -> str:
    """Usage day of the path of a daily report."""
    return report.partition("/usage_date=")[2].partition("/")[0]


def _text(day: dt.date | None) -> str | None:
    return None if day is None else day.isoformat()


__all__: Sequence[str] = ("Answer", "as_dict", "plan", "rebuild", "sweep", "tell", "verify")
