"""What people run beside the nights: which days would be computed and why, sweep, verify, and a new lake from `raw/` alone.

Plain functions of settings that return small values. Source: infra/rules/lake.md 12, 18, 19.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow.compute as pc

from schemas.ledger import SPANS
from seedance.errors import SchemaError, ShardError, StoreError
from seedance.shard import ShardName, parse_name
from seedance.store import Store
from tasks import bill, progress, stale
from tasks.core.completeness import HOURS, REASONS, Completeness, completeness, spans
from tasks.errors import LayoutError, UsageError
from tasks.io.deliveries import RAW, listed_sources
from tasks.io.lake import Lake
from tasks.io.sweep import Swept
from tasks.io.sweep import sweep as sweep_lake
from tasks.plan import DayPlan, plan
from tasks.settings import BillSource, Settings

COPIES_AT_ONCE = 16
MISSING = REASONS
UNOBSERVED = "unobserved"
WHY = {
    "bill": "other charges or watermarks than its commit was made from",
    "shard": "another set of shards",
    "price": "other prices",
    "settings": "other settings",
    "schema": "another version of a table",
    "code": "other code or environment",
    None: "never committed",
}


def open_lake(settings: Settings) -> Lake:
    """The lake of the settings."""
    return Lake.open(settings.lake, buckets=settings.buckets)


# --- plan ------------------------------------------------------------------------------------------------------------


def plan_days(settings: Settings, last_day: str, first_day: str | None, recode: bool) -> dict[str, Any]:
    """Which days a run would compute and why, on what the lake holds now; and which producers are missing.

    Args:
        settings: where the lake is.
        last_day: newest usage day to look at.
        first_day: oldest; the look-back of the settings before `last_day` when None.
        recode: also days whose code or environment changed since their head.

    Returns:
        `first_day` and `last_day` that were looked at, `due` [{day, cause, why, head, revision}], `failed` {day: reason},
        `older` and `future` days, `waiting` {day: shards in the drop folder that are not in the lake yet}, `stale`
        {day: marker}, and `completeness` {day: {expected, seen, missing: [{name, hours, reason}]}} of every
        day that is due or has shards.
    """
    found = plan(settings, last_day, first_day, recode)
    lake = open_lake(settings)
    oldest = first_day or _before(last_day, settings.look_back_days)
    names = [ref.name for ref in lake.shards(None)]
    committed = [day for day in lake.committed_days() if oldest <= day <= last_day]
    with_shards = {name.day.isoformat() for name in names if oldest <= name.day.isoformat() <= last_day}
    return {
        "first_day": oldest,
        "last_day": last_day,
        "due": [_due(lake, planned) for planned in found.due],
        "failed": dict(found.failed),
        "older": found.older,
        "future": found.future,
        "waiting": _waiting(settings, {f"raw/{name.path}" for name in names}),
        "stale": {day: stale.read(lake, day) for day in stale.days_marked(lake)},
        "completeness": {
            day: _told(completeness_of(lake, day, names)) for day in sorted({*with_shards, *committed, *found.failed})
        },
    }


def completeness_of(lake: Lake, day: str, names: list[ShardName]) -> Completeness:
    """Producers expected and seen on a day, from the names of shards, and from its ledger where it is committed."""
    date = dt.date.fromisoformat(day)
    seen: dict[int, set[str]] = {}
    for name in names:
        apart = (name.day - date).days
        if -1 <= apart <= 1:
            seen.setdefault(apart * HOURS + name.hour, set()).add(name.producer)
    billed: dict[int, set[str]] = {}
    observed: dict[int, set[str]] = {}
    try:
        head = lake.head(day)
        table = lake.read(head.handles[SPANS.name], SPANS) if head and SPANS.name in head.handles else SPANS.empty()
    except (LayoutError, SchemaError, StoreError):
        # Lost, as `verify` says, or of a former release, and then due as `schema`; the names of shards are still there.
        table = SPANS.empty()
    table = table.filter(pc.greater(table["x_BilledSpanNs"], 0)).select(["x_HourUtc", "x_MachineId", "x_Category"])
    for at, machine, category in zip(*(table[n].to_pylist() for n in table.column_names), strict=True):
        billed.setdefault(at.hour, set()).add(machine)
        if category != UNOBSERVED:
            observed.setdefault(at.hour, set()).add(machine)
    return completeness(seen, billed, observed)


def _due(lake: Lake, planned: DayPlan) -> dict[str, Any]:
    head = lake.head(planned.day)
    return {
        "day": planned.day,
        "cause": planned.cause,
        "why": WHY[planned.cause],
        "head": head.n if head else None,
        "revision": planned.revision,
    }


def _waiting(settings: Settings, known: set[str]) -> dict[str, int]:
    """Shards of the drop folder that are not in the lake, by day; whether they count, `collect` decides."""
    waiting: dict[str, int] = {}
    for entry in Store(settings.telemetry).list("", odd=lambda *_: None) if settings.telemetry else []:
        try:
            name = parse_name(entry.path)
        except ShardError:
            continue
        if f"raw/{name.path}" not in known:
            day = name.day.isoformat()
            waiting[day] = waiting.get(day, 0) + 1
    return dict(sorted(waiting.items()))


def _told(found: Completeness) -> dict[str, Any]:
    missing = [{"name": m.name, "hours": spans(m.hours), "reason": m.reason} for m in found.missing]
    return {"expected": list(found.expected), "seen": list(found.seen), "missing": missing}


def _before(day: str, days: int) -> str:
    return (dt.date.fromisoformat(day) - dt.timedelta(days=days)).isoformat()


# --- sweep -----------------------------------------------------------------------------------------------------------


def sweep(settings: Settings, now_ns: int, delete: bool) -> Swept:
    """Delete garbage, or say what would go.

    Args:
        settings: where the lake is.
        now_ns: ns UTC.
        delete: False only says it.
    """
    return sweep_lake(open_lake(settings), now_ns, dry_run=not delete)


# --- rebuild ---------------------------------------------------------------------------------------------------------


def copy_raw(settings: Settings, into: str) -> dict[str, Any]:
    """Copy everything raw into another lake, which must hold no commit yet; what it has already is not copied again.

    Returns:
        `objects` and `bytes` copied; `sources` of bills that raw/ has a listing of; `first_day` and `last_day` that have
        shards or charges, None without any.

    Raises:
        UsageError: `into` is the lake itself, or has commits.
    """
    old = open_lake(settings)
    inside = Store(into).url
    if f"{inside}/".startswith(f"{old.store.url}/") and inside != old.store.url:
        raise UsageError(
            f"rebuild: {inside} lies inside the lake {old.store.url}. Expected a folder or URL outside of it.",
            found=inside,
            expected="a place outside the lake",
        )
    new = Lake.open(into, buckets=old.buckets)
    if new.store.url == old.store.url or new.committed_days():
        raise UsageError(
            f"rebuild: {new.store.url} is {'the lake itself' if new.store.url == old.store.url else 'a lake with commits'}. "
            "Expected a folder or URL where there is no lake yet.",
            found=new.store.url,
            expected="a place without a lake",
        )
    there = {entry.path: entry.bytes for entry in new.store.list("raw")}
    wanted = [entry for entry in old.store.list("raw") if there.get(entry.path) != entry.bytes]

    def copy(path: str) -> int:
        data = old.store.read(path)
        new.store.put(path, data)
        return len(data)

    copied = 0
    with ThreadPoolExecutor(1 if old.store.is_local and new.store.is_local else COPIES_AT_ONCE) as pool:
        for number, size in enumerate(pool.map(copy, [entry.path for entry in wanted])):
            progress.tell(number, len(wanted), wanted[number].path)
            copied += size
    sources = listed_sources(new.store)
    raw_alone = from_raw_alone(settings, into, sources)
    days = {ref.name.day.isoformat() for ref in new.shards(None)} | set(bill.days_touched(new, raw_alone))
    return {
        "objects": len(wanted),
        "bytes": copied,
        "sources": sources,
        "first_day": min(days, default=None),
        "last_day": max(days, default=None),
    }


def compare_reports(settings: Settings, into: str) -> dict[str, list[str]]:
    """Daily report tables of two lakes: paths whose bytes are the `same`, `differ`, or are in one only (`missing`, `new`)."""
    old, new = open_lake(settings).store, Lake.open(into).store
    here, there = ({entry.path for entry in store.list("report") if _is_rebuilt(entry.path)} for store in (old, new))
    both = sorted(here & there)
    equal = {path: old.read(path) == new.read(path) for path in both}
    return {
        "same": [path for path in both if equal[path]],
        "differ": [path for path in both if not equal[path]],
        "missing": sorted(here - there),
        "new": sorted(there - here),
    }


def _is_rebuilt(path: str) -> bool:
    """Whether a report follows from raw/ alone; what tells of runs, of times and of former commits does not."""
    table = path.split("/")[1]
    history = ("report_quality__runs", "report_restatements__daily")
    return "/usage_date=" in path and table not in history


def from_raw_alone(settings: Settings, into: str, sources: Sequence[str]) -> Settings:
    """Settings of a lake that is made from its own raw/ alone: with the sources of bills that are there, and no others."""
    bills = tuple(BillSource(name=name, url=f"{into}/{RAW}/{name}") for name in sources)
    return settings.model_copy(update={"lake": into, "telemetry": None, "bills": bills})
