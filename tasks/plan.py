"""Which days are due, and why: the inputs of each day beside those of its head.

A day is due when new raw or bill objects touch it and its data key differs from its head's. Code alone never makes a committed
day due, except where shards were quarantined and the reader has changed since. Source: infra/rules/lake.md 3, 7, 10.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.billing import BILLING
from schemas.ledger import LEDGER, REPORTS
from schemas.telemetry import TELEMETRY
from schemas.usage import USAGE
from seedance.canonical import canonical
from tasks import bill
from tasks.core import estimate
from tasks.errors import DeliveryError, LayoutError
from tasks.io.lake import Commit, Handle, Lake, ShardRef
from tasks.io.prices import list_prices
from tasks.settings import Settings
from tasks.step import data_key, stage_key

CAUSES = ("bill", "shard", "price", "settings", "schema", "code")
STAGES = (
    "tasks.bill",
    "tasks.io.bills",
    "tasks.io.deliveries",
    "tasks.collect",
    "tasks.reduce",
    "tasks.reconcile",
    "tasks.witness",
    "tasks.publish",
)
"""Modules of all stages: with the pure code that they import, what a committed day was made by."""
READER = ("tasks.core.shards",)
SCHEMAS = tuple({**TELEMETRY, **USAGE, **BILLING, **LEDGER, **REPORTS}.values())


@dataclass(frozen=True)
class DayPlan:
    """One day that is due.

    Args:
        day: UTC usage day, YYYY-MM-DD.
        parts: digest of each kind of input (bill, shard, price, settings, schema).
        data_key: digest of all of them.
        key: data key with code and environment: what the commit is known by.
        cause: which kind of input differs from the head's; None for a day that was never committed.
        parent: number of the head that the plan was made on, 0 without one; the head's own parent when its key is the same.
        charges: core_billing__charges of the day in force.
        prices: core_pricing__list.
        bill_facts: watermarks clamped to the day, and the deliveries in force.
        alpha: calibration factor in units of 1e-12.
    """

    day: str
    parts: Mapping[str, str]
    data_key: str
    key: str
    cause: str | None
    parent: int
    charges: Handle
    prices: Handle
    bill_facts: Mapping[str, Any]
    alpha: int = estimate.ALPHA_ONE

    @property
    def revision(self) -> int:
        """Number of the commit that the plan leads to."""
        return self.parent + 1


@dataclass
class Plans:
    """Days that are due, oldest first; the days that cannot be planned, with the reason; and days that are too old.

    `older` are days with charges that lie before the look-back and were never committed: only a backfill runs them.
    `future` are days that have not come yet and have shards.
    """

    due: list[DayPlan] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    older: list[str] = field(default_factory=list)
    future: list[str] = field(default_factory=list)


def plan(settings: Settings, last_day: str, first_day: str | None = None, recode: bool = False) -> Plans:
    """Days due, oldest first, and days whose bills contradict each other.

    Args:
        settings: where the lake is.
        last_day: newest usage day to look at.
        first_day: oldest; the look-back of the settings before `last_day` when None.
        recode: also days whose code or environment changed since their head.
    """
    lake = Lake.open(settings.lake, buckets=settings.buckets)
    oldest = first_day or (dt.date.fromisoformat(last_day) - dt.timedelta(days=settings.look_back_days)).isoformat()
    shards: dict[str, list[ShardRef]] = {}
    today, future = dt.datetime.now(dt.UTC).date().isoformat(), set()
    for ref in lake.shards(None):
        day = ref.name.day.isoformat()
        if day > today:
            future.add(day)
        if oldest <= day <= last_day:
            shards.setdefault(day, []).append(ref)
    bills = bill.snapshots_in_force(lake, settings)
    # Committed days too: a delivery that takes all charges of a day away touches it by its absence.
    touched, committed = bill.days_touched(lake, settings, bills=bills), lake.committed_days()
    known = {*touched, *committed}
    days = sorted({*shards, *(d for d in known if oldest <= d <= last_day)})
    prices = lake.handle(BILLING["core_pricing__list"], None, [list_prices()]) if days else None
    older = sorted(d for d in touched if d < oldest and d not in committed)
    found = Plans(older=older, future=sorted(future))
    for day in days:
        assert prices is not None
        try:
            planned = plan_day(lake, settings, day, shards.get(day, []), prices, bills)
            if _is_due(planned, lake.head(day), recode):
                found.due.append(planned)
        except (DeliveryError, LayoutError) as error:  # of this day alone: the others go on
            found.failed[day] = f"{type(error).__name__}: {error}"
    return found


def plan_day(
    lake: Lake,
    settings: Settings,
    day: str,
    shards: Iterable[ShardRef],
    prices: Handle,
    bills: Sequence[bill.InForce],
) -> DayPlan:
    """The plan of one day on the inputs of now, whether it is due or not."""
    charges, bill_facts = bill.charges_of(lake, settings, day, bills=bills)
    declared = {"default_region": settings.default_region, "buckets": lake.buckets}
    parts = {
        "bill": _digest([charges.sha256, bill_facts["watermarks"]]),
        "shard": _digest(sorted(ref.path for ref in shards)),
        "price": _digest([prices.sha256, estimate.ALPHA_ONE]),
        "settings": _digest(declared),
        "schema": _digest(sorted(f"{t.name}:{t.version}" for t in SCHEMAS)),
    }
    inputs = [f"{name}={parts[name]}" for name in ("bill", "shard", "price")]
    key = stage_key("day", modules=STAGES, schemas=SCHEMAS, settings=declared, inputs=inputs)
    head = lake.head(day)
    same = head is not None and head.key == key
    return DayPlan(
        day=day,
        parts=parts,
        data_key=data_key("day", schemas=SCHEMAS, settings=declared, inputs=inputs),
        key=key,
        cause=head.body["cause"] if head and same else cause_of(parts, head),
        parent=head.body["parent"] if head and same else (head.n if head else 0),
        charges=charges,
        prices=prices,
        bill_facts=bill_facts,
    )


def plan_one(settings: Settings, day: str) -> list[DayPlan]:
    """The plan of one day, due or not."""
    lake = Lake.open(settings.lake, buckets=settings.buckets)
    prices = lake.handle(BILLING["core_pricing__list"], None, [list_prices()])
    return [plan_day(lake, settings, day, lake.shards([day]), prices, bill.snapshots_in_force(lake, settings))]


def cause_of(parts: Mapping[str, str], head: Commit | None) -> str | None:
    """The first kind of input that differs from the head's; code when none does; None without a head."""
    if head is None:
        return None
    before = head.body["facts"]["parts"]
    return next((name for name in CAUSES if name in parts and parts[name] != before.get(name)), "code")


def reader_digest() -> str:
    """Digest of the code that reads shards: quarantined ones are tried again when it changes."""
    return stage_key("reader", modules=READER, schemas=TELEMETRY.values(), settings={}, inputs=())


def _is_due(planned: DayPlan, head: Commit | None, recode: bool) -> bool:
    if head is None or head.body["data_key"] != planned.data_key:
        return True
    facts = head.body["facts"]
    retry = bool(facts["quarantined"]) and facts["reader"] != reader_digest()
    return retry or (recode and head.key != planned.key)


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()
