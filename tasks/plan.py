"""Which days are due, and why: the inputs of each day beside those of its head.

A day is due when new raw or bill objects touch it and its data key differs from its head's. Code alone never makes a committed
day due, except where shards were quarantined and the reader has changed since. Source: infra/rules/lake.md 3, 7, 10.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from schemas.billing import BILLING
from schemas.ledger import LEDGER, REPORTS
from schemas.restatements import RESTATED
from schemas.telemetry import TELEMETRY
from schemas.usage import USAGE
from seedance.canonical import canonical
from tasks import bill
from tasks.core import calibrate
from tasks.core.snapshots import day_start_ns
from tasks.core.spans import DAY_NS
from tasks.errors import DeliveryError, LayoutError
from tasks.io.lake import Commit, Handle, Lake, ShardRef
from tasks.io.prices import list_prices
from tasks.settings import Settings
from tasks.step import data_key, stage_key

CAUSES = ("schema", "bill", "shard", "price", "settings", "code")
"""In the order in which they are told: with other versions of tables the digests of the other inputs differ, too."""
STAGES = (
    "tasks.bill",
    "tasks.standing",
    "tasks.closing",
    "tasks.io.bill_rows",
    "tasks.io.deliveries",
    "tasks.collect",
    "tasks.reduce",
    "tasks.calibrate",
    "tasks.reconcile",
    "tasks.witness",
    "tasks.restate",
    "tasks.publish",
)
"""Modules of all stages: with the pure code that they import, what a committed day was made by."""
READER = ("tasks.core.shards",)
SCHEMAS = tuple({**TELEMETRY, **USAGE, **BILLING, **LEDGER, **REPORTS, **RESTATED}.values())


@dataclass(frozen=True)
class Past:
    """A day whose bill and usage calibrate the estimates of a later one.

    Args:
        day: UTC usage day, YYYY-MM-DD.
        charges: core_billing__charges of the day in force.
        complete: windows of which the bill is known to be whole, by `cloud|account`; never empty.
        shards: digest of its shards.
    """

    day: str
    charges: Handle
    complete: Mapping[str, Sequence[int]]
    shards: str


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
        is_open: the bill does not cover the day whole and there are shards: it may hold estimates.
        history: days before that calibrate them; none when the day is not open.
        contracted: `cloud|account|instance type|region` to "<price of a machine-hour> <currency>" of the latest closed bill;
            none when the day is not open.
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
    is_open: bool = False
    history: tuple[Past, ...] = ()
    contracted: Mapping[str, str] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Bills:
    """What the days of one run have in common: deliveries in force, shards, and what was looked up of them.

    Args:
        lake: where they are.
        settings: bill sources and regions.
        shards: by day, where they were listed at once; None lists each day when it is asked for.
    """

    lake: Lake
    settings: Settings
    shards: Mapping[str, Sequence[ShardRef]] | None = None
    _charged: dict[str, tuple[Handle, dict[str, Any]]] = field(default_factory=dict)
    _complete: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    @cached_property
    def force(self) -> Sequence[bill.InForce]:
        """Deliveries in force."""
        return bill.snapshots_in_force(self.lake, self.settings)

    @cached_property
    def _former(self) -> Sequence[bill.InForce]:
        return bill.former_in_force(self.lake, self.settings)

    def shards_of(self, day: str) -> Sequence[ShardRef]:
        """Shards of a day."""
        return self.lake.shards([day]) if self.shards is None else self.shards.get(day, ())

    def charges_of(self, day: str) -> tuple[Handle, dict[str, Any]]:
        """Charges of a day and facts about them, as `bill.charges_of`."""
        if day not in self._charged:
            self._charged[day] = bill.charges_of(self.lake, self.settings, day, bills=self.force)
        return self._charged[day]

    def complete(self, day: str) -> dict[str, list[int]]:
        """Windows of a day of which the bill is known to be whole, by `cloud|account`; a day on Azure is one window."""
        if day not in self._complete:
            found = bill.complete_windows(self.lake, self.settings, day, bills=self.force, former=self._former)
            halves: dict[str, set[int]] = {}
            for cloud, account, half in found:
                halves.setdefault(f"{cloud}|{account}", set()).add(half)
            days = {
                k: {0} if len(v) == 2 else set() for k, v in halves.items() if k.split("|")[0] in calibrate.WHOLE_DAYS
            }
            self._complete[day] = {key: sorted(windows) for key, windows in sorted((halves | days).items()) if windows}
        return self._complete[day]

    def history(self, day: str) -> tuple[Past, ...]:
        """The days before a day that teach something, oldest first.

        A day whose bills contradict each other teaches nothing; it fails by itself.
        """
        found = []
        for back in range(calibrate.DAYS, 0, -1):
            past = (dt.date.fromisoformat(day) - dt.timedelta(days=back)).isoformat()
            with contextlib.suppress(DeliveryError):
                charges, complete = self.charges_of(past)[0], self.complete(past)
                shards = self.shards_of(past) if complete else ()
                if shards:
                    found.append(Past(past, charges, complete, _shard_digest(shards)))
        return tuple(found)

    def contracted(self, day: str) -> dict[str, str]:
        """Prices of machine-hours in the latest closed bill, as `DayPlan.contracted`."""
        found = {}
        for account, price in bill.contracted_prices(self.lake, self.settings, day, bills=self.force):
            key = (price["x_Cloud"], account, price["SkuId"], price["RegionId"])
            found["|".join(key)] = f"{price['ListUnitPrice']:f} {price['BillingCurrency']}"
        return dict(sorted(found.items()))


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
    earliest = (dt.date.fromisoformat(oldest) - dt.timedelta(days=calibrate.DAYS)).isoformat()
    for ref in lake.shards(None):
        day = ref.name.day.isoformat()
        if day > today:
            future.add(day)
        if earliest <= day <= last_day:
            shards.setdefault(day, []).append(ref)
    bills = Bills(lake, settings, shards)
    # Committed days too: a delivery that takes all charges of a day away touches it by its absence.
    touched, committed = bill.days_touched(lake, settings, bills=bills.force), lake.committed_days()
    known = {*shards, *touched, *committed}
    days = sorted(d for d in known if oldest <= d <= last_day)
    prices = lake.handle(BILLING["core_pricing__list"], None, [list_prices()]) if days else None
    older = sorted(d for d in touched if d < oldest and d not in committed)
    found = Plans(older=older, future=sorted(future))
    for day in days:
        assert prices is not None
        try:
            planned = plan_day(bills, day, prices)
            if _is_due(planned, lake.head(day), recode):
                found.due.append(planned)
        except (DeliveryError, LayoutError) as error:  # of this day alone: the others go on
            found.failed[day] = f"{type(error).__name__}: {error}"
    return found


def plan_day(bills: Bills, day: str, prices: Handle) -> DayPlan:
    """The plan of one day on the inputs of now, whether it is due or not."""
    lake, settings = bills.lake, bills.settings
    charges, bill_facts = bills.charges_of(day)
    shards = bills.shards_of(day)
    is_open = bool(shards) and not is_covered(bill_facts["watermarks"], day)
    history = bills.history(day) if is_open else ()
    contracted = bills.contracted(day) if is_open else {}
    declared = {"default_region": settings.default_region.model_dump(), "buckets": lake.buckets}
    # What calibrates a day is input of days that may hold estimates, and of no other.
    billed = [[p.day, p.charges.sha256, p.complete] for p in history]
    parts = {
        "bill": _digest([charges.sha256, bill_facts["watermarks"], billed, contracted]),
        "shard": _digest([_shard_digest(shards), [[p.day, p.shards] for p in history]]),
        "price": _digest(prices.sha256),
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
        is_open=is_open,
        history=history,
        contracted=contracted,
    )


def is_covered(watermarks: Mapping[str, int], day: str) -> bool:
    """Whether every service that bills machines has been billed to the end of the day, so that it holds no estimates.

    Args:
        watermarks: ns UTC by `cloud|account|service`, held to the day.
        day: UTC day, YYYY-MM-DD.
    """
    return min(watermarks.values(), default=0) >= day_start_ns(day) + DAY_NS


def plan_one(settings: Settings, day: str) -> list[DayPlan]:
    """The plan of one day, due or not."""
    lake = Lake.open(settings.lake, buckets=settings.buckets)
    prices = lake.handle(BILLING["core_pricing__list"], None, [list_prices()])
    return [plan_day(Bills(lake, settings), day, prices)]


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


def _shard_digest(shards: Iterable[ShardRef]) -> str:
    return _digest(sorted(ref.path for ref in shards))
