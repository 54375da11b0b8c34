"""The stages of a night as functions of settings and plans: what each flow calls, with Prefect around it or without.

Each opens the lake, loops over the days that are due, and returns small values. A day that fails is set aside with its reason
and the others go on; nothing of a failed day is committed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from schemas.billing import CHARGES
from schemas.ledger import ADDRESSES, LEDGER, REPORTS, SPANS
from schemas.usage import DEVICE_HOURLY, USAGE
from seedance.errors import SeedanceError
from tasks import bill, calibrate, collect, gates, progress, publish, reconcile, reduce, restate, stale
from tasks.core import money
from tasks.errors import DeliveryError, GateError, LayoutError, PipelineError
from tasks.io import leases
from tasks.io.lake import Commit, Lake, Moved, Step
from tasks.plan import DayPlan
from tasks.settings import Settings

log = logging.getLogger(__name__)
LEDGER_TABLES = {**LEDGER, **REPORTS}


@dataclass
class Outcome:
    """What a stage made of each day.

    Args:
        stage: name of the stage.
        steps: outputs by day.
        reused: days whose output was there already.
        failed: reason by day.
        duration_ms: wall time by day.
        checks: what the gate of the stage found, by day.
    """

    stage: str
    steps: dict[str, Step] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    duration_ms: dict[str, int] = field(default_factory=dict)
    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass
class Published:
    """Commits by day, days to be planned again because another run moved their head, and what failed."""

    commits: dict[str, Commit] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    duration_ms: dict[str, int] = field(default_factory=dict)
    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


Gate = Callable[[str, Step], list[dict[str, Any]]]


def _each(stage: str, days: Sequence[str], work: Callable[[str], tuple[Step, bool]], gate: Gate) -> Outcome:
    outcome = Outcome(stage)
    for number, day in enumerate(days):
        progress.tell(number, len(days), f"{stage} {day}")
        start = time.monotonic_ns()
        try:
            step, reused = work(day)
            outcome.checks[day] = gate(day, step)
            outcome.steps[day] = step
        except Exception as error:  # noqa: BLE001 - whatever stops one day must not stop the others
            outcome.failed[day] = _reason(stage, day, error)
            if isinstance(error, GateError):
                outcome.checks[day] = error.facts["rows"]
            continue
        finally:
            outcome.duration_ms[day] = (time.monotonic_ns() - start) // 1_000_000
        if reused:
            outcome.reused.append(day)
    return outcome


def _reason(stage: str, day: str, error: Exception) -> str:
    """What people are told; the trace of an error that is not one of ours goes to the log."""
    if not isinstance(error, PipelineError | SeedanceError):
        log.error("%s %s failed in a way that has no message of its own", stage, day, exc_info=error)
    return f"{type(error).__name__}: {error}"


def open_lake(settings: Settings) -> Lake:
    """The lake of the settings."""
    return Lake.open(settings.lake, buckets=settings.buckets)


def ingest_bills(settings: Settings) -> list[dict[str, Any]]:
    """Accept new deliveries of every source, each whole or not at all."""
    return bill.ingest(open_lake(settings), settings)


def admit_shards(settings: Settings) -> list[str]:
    """Copy new shards of the drop folder into the lake."""
    return collect.admit(open_lake(settings), settings)


def damaged(paths: Sequence[str]) -> list[str]:
    """What people are told of files whose bytes are not those of their names; they make no day due."""
    found = [path for path in paths if collect.DAMAGED in path]
    words = "file(s) of the drop folder have other bytes than their names say and do not count; see quarantine/. First:"
    return [f"{len(found):,} {words} {found[0]}"] if found else []


def refuse_future(settings: Settings, days: Sequence[str]) -> dict[str, int]:
    """Quarantine shards of days that have not come yet; their number by day. They are tried again on their day."""
    lake = open_lake(settings)
    return {day: len(collect.collect_day(lake, settings, day)[0].facts["quarantined"]) for day in days}


def collect_days(settings: Settings, plans: Sequence[DayPlan]) -> Outcome:
    """Check the shards of each day; quarantine what cannot be used."""
    lake = open_lake(settings)

    def gate(day: str, step: Step) -> list[dict[str, Any]]:
        return gates.check("collect", day, {}, gates.collect_measures(step.facts, settings))

    return _each("collect", [p.day for p in plans], lambda day: collect.collect_day(lake, settings, day), gate)


def reduce_days(settings: Settings, collected: Outcome) -> Outcome:
    """Reduce the accepted shards of each day to usage tables."""
    lake = open_lake(settings)

    def work(day: str) -> tuple[Step, bool]:
        return reduce.reduce_day(lake, settings, day, collected.steps[day].facts["accepted"])

    def gate(day: str, step: Step) -> list[dict[str, Any]]:
        tables = {name: lake.read(handle, USAGE[name]) for name, handle in step.handles.items() if name in USAGE}
        return gates.check("reduce", day, tables, gates.reduce_measures(tables[DEVICE_HOURLY.name]))

    return _each("reduce", list(collected.steps), work, gate)


def calibrate_days(settings: Settings, plans: Sequence[DayPlan], usage: Outcome) -> Outcome:
    """Learn from the days before each open day how far its estimates lie from bills."""
    lake = open_lake(settings)
    by_day = {p.day: p for p in plans}
    days = [day for day in usage.steps if by_day[day].is_open]

    def work(day: str) -> tuple[Step, bool]:
        return calibrate.calibrate_day(lake, settings, by_day[day])

    return _each("calibrate", days, work, lambda day, step: [])


def reconcile_days(settings: Settings, plans: Sequence[DayPlan], usage: Outcome, learnt: Outcome) -> Outcome:
    """Settle each day's ledger and hold it to the laws and to the witness."""
    lake = open_lake(settings)
    by_day = {p.day: p for p in plans}

    of_bill: dict[str, list[dict[str, Any]]] = {}

    def work(day: str) -> tuple[Step, bool]:
        charges = lake.read(by_day[day].charges, CHARGES)
        of_bill[day] = gates.check("bill", day, {CHARGES.name: charges}, gates.bill_measures(charges))
        step = learnt.steps.get(day)
        return reconcile.reconcile_day(
            lake, settings, by_day[day], usage.steps[day].handles, None if step is None else step.facts
        )

    def gate(day: str, step: Step) -> list[dict[str, Any]]:
        charges = lake.read(by_day[day].charges, CHARGES)
        tables = {name: lake.read(handle, LEDGER_TABLES[name]) for name, handle in step.handles.items()}
        measures = gates.reconcile_measures(charges, tables[ADDRESSES.name], tables[SPANS.name], settings)
        return of_bill[day] + gates.check("reconcile", day, tables, measures)

    return _each("reconcile", [day for day in usage.steps if day not in learnt.failed], work, gate)


def publish_days(
    settings: Settings, plans: Sequence[DayPlan], collected: Outcome, usage: Outcome, ledgers: Outcome
) -> Published:
    """Reports, commit and `report/` of each settled day."""
    lake = open_lake(settings)
    by_day = {p.day: p for p in plans}
    done = Published()
    for number, (day, ledger) in enumerate(ledgers.steps.items()):
        progress.tell(number, len(ledgers.steps), f"publish {day}")
        start = time.monotonic_ns()
        plan, of_day = by_day[day], usage.steps[day].handles
        try:
            reports, _ = publish.report_day(lake, plan, of_day, ledger.handles)
            restated, _ = restate.restate_day(lake, plan, ledger.handles[ADDRESSES.name])
            done.checks[day] = _publish_gate(lake, day, ledger, reports)
            done.commits[day] = publish.commit_day(
                lake, plan, collected.steps[day].facts, of_day, ledger, {**reports.handles, **restated.handles}
            )
        except Moved:
            done.moved.append(day)
        except Exception as error:  # noqa: BLE001 - whatever stops one day must not stop the others
            done.failed[day] = _reason("publish", day, error)
            if isinstance(error, GateError):
                done.checks[day] = error.facts["rows"]
        done.duration_ms[day] = (time.monotonic_ns() - start) // 1_000_000
    return done


def _publish_gate(lake: Lake, day: str, ledger: Step, reports: Step) -> list[dict[str, Any]]:
    tables = {name: lake.read(handle, REPORTS[name]) for name, handle in reports.handles.items()}
    addresses = lake.read(ledger.handles[ADDRESSES.name], ADDRESSES)
    costs = {name: table for name, table in tables.items() if name.startswith("report_cost__")}
    return gates.check("publish", day, tables, gates.publish_measures(addresses, costs))


def take_turns(settings: Settings, days: Sequence[str]) -> leases.Turns:
    """Leases of the days that are about to be computed; waits, for as long as the settings say, where another run has them."""
    return leases.take(open_lake(settings).store, days, settings.lease_seconds)


def give_back(settings: Settings, turns: leases.Turns) -> None:
    """End the leases of days, done or not."""
    leases.give_back(open_lake(settings).store, turns.leases)


def mark_stale(settings: Settings, failed: Mapping[str, str], first_day: str | None, last_day: str) -> None:
    """Mark the days that failed as stale beside their reports, and take the marks of the others away."""
    oldest = first_day or (dt.date.fromisoformat(last_day) - dt.timedelta(days=settings.look_back_days)).isoformat()
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    stale.mark(open_lake(settings), failed, oldest, last_day, now)


def heads(settings: Settings, days: Sequence[str]) -> dict[str, Commit]:
    """Head commits of the days that have one that can be read; a damaged one was told when its day was planned."""
    lake, found = open_lake(settings), {}
    for day in days:
        with contextlib.suppress(LayoutError):
            if (head := lake.head(day)) is not None:
                found[day] = head
    return found


def shown_days(settings: Settings, first_day: str, last_day: str, computed: Sequence[str]) -> list[str]:
    """Committed days of the range that was asked for, and those that this run computed."""
    asked = [day for day in open_lake(settings).committed_days() if first_day <= day <= last_day]
    return sorted({*asked, *computed})


def billed_of(settings: Settings, days: Sequence[str]) -> dict[str, dict[str, Decimal]]:
    """Both ledgers of the charges in force on the days, by currency: summed from the bill's own rows, not from addresses."""
    lake = open_lake(settings)
    totals: dict[str, dict[str, Decimal]] = {}
    columns = ["BillingCurrency", "x_DayBilledCost", "x_DayEffectiveCost"]
    bills = bill.snapshots_in_force(lake, settings)
    for day in days:
        try:
            handle, _ = bill.charges_of(lake, settings, day, bills=bills)
        except DeliveryError:  # told when the day was planned
            continue
        for row in lake.read(handle, CHARGES, columns).to_pylist():
            total = totals.setdefault(row["BillingCurrency"], {"BilledCost": Decimal(0), "EffectiveCost": Decimal(0)})
            for name in total:
                total[name] = money.total([total[name], row["x_Day" + name]])
    return totals
