"""The order of the stages, once, for every flow: which stage is called with what, and what is told at the end.

`call` decides how: as Prefect tasks, or directly. No arithmetic and no storage here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tasks import night
from tasks.errors import PipelineError
from tasks.finish import Finished, finish
from tasks.plan import DayPlan, Plans, plan, plan_one
from tasks.settings import Settings
from tasks.steps import Call
from tasks.summary import add_up, head_totals, quality_rows, refused_rows, run_facts, without_money

TRIES = 3
"""How often a day is planned again when another run moves its head in between."""


class NightFailed(PipelineError):
    """Some days, bills or sources failed; the others stand, and days that were due are published. Carries failed."""


@dataclass
class Run:
    """What a run did: stages with times, deliveries, days, totals; `failed` holds a reason for whatever failed."""

    last_day: str
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    stages: list[dict[str, Any]] = field(default_factory=list)
    deliveries: list[dict[str, Any]] = field(default_factory=list)
    has_bills: bool = True
    admitted: int = 0
    days: list[str] = field(default_factory=list)
    totals: list[dict[str, Any]] = field(default_factory=list)
    billed: dict[str, dict[str, Any]] = field(default_factory=dict)
    commits: dict[str, int] = field(default_factory=dict)
    causes: dict[str, str | None] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)
    findings: dict[str, dict[str, int]] = field(default_factory=dict)
    without_money: dict[str, list[str]] = field(default_factory=dict)
    repaired: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    older: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    async def time(self, call: Call, stage: Callable[..., Any], *args: Any) -> Any:
        """Call a stage and note its time and what it reused."""
        start = time.monotonic_ns()
        result = await call(stage, *args)
        row: dict[str, Any] = {"stage": stage.__name__, "ms": (time.monotonic_ns() - start) // 1_000_000}
        if isinstance(result, night.Outcome):
            row |= {"days": len(result.steps) + len(result.failed), "reused": len(result.reused)}
            row["computed"] = len(result.steps) - len(result.reused)
            self.failed |= result.failed
        if stage is plan:
            row |= {
                "days": len(result.due),
                "what": "days due" if result.due else "no day is due: nothing is computed again",
            }
            self.failed |= result.failed
            self.older = result.older
        self.stages.append(row)
        return result

    async def ingest(self, call: Call, settings: Settings) -> None:
        """Take in bills; a refused delivery is a failure of the run, and a run without bill sources says so."""
        self.has_bills = bool(settings.bills)
        self.deliveries = await self.time(call, night.ingest_bills, settings)
        refused = [d for d in self.deliveries if d["status"] == "refused"]
        self.failed |= {f"{d['name']} of {d['source']}": d["message"] for d in refused}


async def run_night(
    settings: Settings,
    last_day: str,
    call: Call,
    *,
    first_day: str | None = None,
    recode: bool = False,
    raw_alone: bool = False,
) -> Run:
    """Bills and shards in, due days through every stage, reports out.

    Args:
        settings: where everything is.
        last_day: newest usage day, YYYY-MM-DD.
        call: how stages are called.
        first_day: oldest usage day; the look-back of the settings when None.
        recode: also days whose code changed.
        raw_alone: look at no source of bills: what the lake has in raw/ counts.
    """
    run = Run(last_day)
    if not raw_alone:
        await run.ingest(call, settings)
    admitted = await run.time(call, night.admit_shards, settings)
    run.admitted, damaged = len(admitted), night.damaged(admitted)
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(TRIES):
        plans: Plans = await run.time(call, plan, settings, last_day, first_day, recode)
        run.quarantined = await call(night.refuse_future, settings, plans.future)
        async with turns(settings, plans.due, call, run) as waited:
            if waited:  # another run computed some of them meanwhile
                plans = await run.time(call, plan, settings, last_day, first_day, recode)
            moved = await run_days(settings, plans.due, call, run, rows)
        if not moved:
            break
    else:
        run.failed |= dict.fromkeys(moved, "another run moved its head three times; run it again")
    days = await run.time(call, night.shown_days, settings, first_day or last_day, last_day, sorted(rows))
    await tell(settings, call, run, days)
    await call(night.mark_stale, settings, run.failed, first_day, last_day)
    done: Finished = await run.time(call, finish, settings, last_day, run.run_id, rows, run_facts(run))
    run.repaired, run.stale, run.told = done.repaired, done.stale, damaged + done.notes
    run.failed |= done.failed
    return run


@asynccontextmanager
async def turns(settings: Settings, plans: Sequence[DayPlan], call: Call, run: Run) -> AsyncIterator[bool]:
    """Inside, this run holds the leases of the days; True when another run held some of them at first."""
    if not plans:
        yield False
        return
    taken = await call(night.take_turns, settings, [p.day for p in plans])
    try:
        if taken.waited:
            what = f"another run had {', '.join(taken.waited)}"
            run.stages.append({"stage": "take_turns", "ms": taken.waited_ms, "what": what})
        yield bool(taken.waited)
    finally:
        await call(night.give_back, settings, taken)


async def run_days(
    settings: Settings, plans: Sequence[DayPlan], call: Call, run: Run, rows: dict[str, list[dict[str, Any]]]
) -> list[str]:
    """Due days through collect, reduce, reconcile and publish; days whose head another run moved."""
    if not plans:
        return []
    collected = await run.time(call, night.collect_days, settings, plans)
    usage = await run.time(call, night.reduce_days, settings, collected)
    learnt = await run.time(call, night.calibrate_days, settings, plans, usage)
    ledgers = await run.time(call, night.reconcile_days, settings, plans, usage, learnt)
    published = await run.time(call, night.publish_days, settings, plans, collected, usage, ledgers)
    run.failed |= published.failed
    run.causes |= {p.day: p.cause for p in plans if p.day in published.commits}
    for day in published.commits:
        rows[day] = quality_rows(run.run_id, day, [collected, usage, ledgers], published)
    rows |= refused_rows(run.run_id, [collected, usage, ledgers], published)
    return list(published.moved)


async def run_stage(settings: Settings, day: str | None, call: Call, upto: str) -> Run:
    """The stages of one day up to the one named, due or not; what the lake holds already is not computed again.

    Args:
        settings: where everything is.
        day: usage day; only `bill` can do without.
        call: how stages are called.
        upto: bill, collect, reduce, reconcile or publish.
    """
    run = Run(day or "")
    if upto == "bill":
        await run.ingest(call, settings)
        run.billed = await run.time(call, night.billed_of, settings, [day] if day else [])
        return run
    assert day is not None
    if upto == "collect":
        run.admitted = len(await run.time(call, night.admit_shards, settings))
    plans = await run.time(call, plan_one, settings, day)
    collected = await run.time(call, night.collect_days, settings, plans)
    run.quarantined = {
        d: len(step.facts["quarantined"]) for d, step in collected.steps.items() if step.facts["quarantined"]
    }
    if upto == "collect":
        return run
    usage = await run.time(call, night.reduce_days, settings, collected)
    if upto == "reduce":
        return run
    learnt = await run.time(call, night.calibrate_days, settings, plans, usage)
    ledgers = await run.time(call, night.reconcile_days, settings, plans, usage, learnt)
    run.totals = add_up(t for step in ledgers.steps.values() for t in step.facts["totals"])
    run.days, run.billed = [day], await call(night.billed_of, settings, [day])
    if upto == "publish":
        published = await run.time(call, night.publish_days, settings, plans, collected, usage, ledgers)
        run.failed |= published.failed | dict.fromkeys(published.moved, "another run moved its head; run it again")
    run.commits = {d: c.n for d, c in (await call(night.heads, settings, [day])).items()}
    return run


async def tell(settings: Settings, call: Call, run: Run, days: Sequence[str]) -> None:
    """Totals of the days' heads beside what the bill has for them."""
    commits = await call(night.heads, settings, days)
    run.days = sorted(commits)
    run.commits = {day: c.n for day, c in commits.items()}
    run.totals, run.findings = head_totals(commits)
    run.without_money = {day: said for day, commit in commits.items() if (said := without_money(commit))}
    run.quarantined |= {
        day: c.body["facts"]["quarantined"] for day, c in commits.items() if c.body["facts"]["quarantined"]
    }
    run.billed = await call(night.billed_of, settings, sorted(commits))
