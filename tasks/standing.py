"""Which snapshots of bills are in force, now and just before, and the step that makes charges of an accepted delivery.

An accepted delivery is parsed once, from its copy in the lake, into objects per billing period and usage day. What stood at
a source over time is in its listings. Knows no provider's storage, no telemetry and no address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from seedance.catalogue import gpu_instances
from seedance.errors import StoreError
from tasks.core import changes, contracted, snapshots, ties
from tasks.core.snapshots import Listed
from tasks.io import deliveries
from tasks.io.deliveries import RAW, RECORD, Parsed
from tasks.io.lake import Handle, Lake, Step
from tasks.settings import Settings
from tasks.step import run_step, stage_key

STAGE = "bill"
OVERLAP = "bill_overlap"
RULES = Path(__file__).parent / "rules" / "ties.csv"
MODULES = ("tasks.standing", "tasks.io.bill_rows", "tasks.io.deliveries")


@dataclass(frozen=True)
class InForce:
    """A delivery in force for one billing period of one source, and what parsing made of it; a period can have several."""

    source: str
    period: str
    delivery: str
    step: Step


class Standing(NamedTuple):
    """What counts of a source, and the newer file by (delivery, billing period) of what does not."""

    force: list[InForce]
    superseded: dict[tuple[str, str], str]


def snapshots_in_force(lake: Lake, settings: Settings) -> list[InForce]:
    """The deliveries in force for each billing period of each source in the settings, sorted by source and period.

    Of a period those count that stood at the source when it was last listed with any delivery of the period, without
    older states of one another. A delivery that this code has not parsed yet is parsed now, from its copy in the lake.

    Raises:
        StoreError: an acceptance, a listing or a copy is damaged; carries path.
    """
    names = sorted(source.name for source in settings.bills)
    return [one for name in names for one in standing(lake, name, deliveries.newest_listing(lake.store, name)[1]).force]


def former_in_force(lake: Lake, settings: Settings) -> list[InForce]:
    """The deliveries that were in force just before the newest change of each source and billing period, sorted by both.

    The listings of a source are gone through from the newest to the first whose deliveries in force for the period are
    others. Where all listings agree, what would be in force without the newest delivery counts: several states can have
    been there at the first look. A period with one state has none.

    Raises:
        StoreError: an acceptance, a listing or a copy is damaged; carries path.
    """
    return [one for name in sorted(source.name for source in settings.bills) for one in _former(lake, name)]


def _former(lake: Lake, source: str) -> list[InForce]:
    number, listed = deliveries.newest_listing(lake.store, source)
    now = {period: [one.delivery for one in some] for period, some in snapshots.contenders(listed).items()}
    force = {period: _of_period(lake, source, period, listed) for period in now}
    found: dict[str, list[InForce]] = {}
    while number > 1 and len(found) < len(now):
        number -= 1
        earlier = deliveries.read_listing(lake.store, source, number)
        then = snapshots.contenders(earlier)
        for period in now.keys() - found.keys():
            if period in then and [one.delivery for one in then[period]] != now[period]:
                some = _of_period(lake, source, period, earlier)
                if _ids(some) != _ids(force[period]):
                    found[period] = some
    for period in now.keys() - found.keys():
        rest = [one for one in listed if one.delivery != now[period][0]]
        some = _of_period(lake, source, period, rest) if now[period] else []
        if some and set(_ids(some)) - set(_ids(force[period])):
            found[period] = some
    return [one for period in sorted(found) for one in found[period]]


def _ids(some: Sequence[InForce]) -> list[str]:
    return [one.delivery for one in some]


def _of_period(lake: Lake, source: str, period: str, listed: Sequence[Listed]) -> list[InForce]:
    """What is in force for one billing period when this stands at the source."""
    return standing(lake, source, [one for one in listed if period in one.periods], only=period).force


def standing(lake: Lake, source: str, listed: Sequence[Listed], *, only: str | None = None) -> Standing:
    """What of a listing is in force, for every billing period or only for one."""
    steps: dict[str, Step] = {}
    force: list[InForce] = []
    superseded: dict[tuple[str, str], str] = {}
    for period, some in snapshots.contenders(listed).items():
        if only is not None and period != only:
            continue
        for one in some:
            if one.delivery not in steps:
                steps[one.delivery] = parse_step(lake, _record(lake, source, one.delivery), None)
        by = _overlaps(lake, source, period, [InForce(source, period, d.delivery, steps[d.delivery]) for d in some])
        names = {one.delivery: one.name for one in some}
        superseded |= {(old, period): names[new] for old, new in by.items()}
        force += [InForce(source, period, d, steps[d]) for d in sorted(names) if d not in by]
    return Standing(force, superseded)


def _record(lake: Lake, source: str, delivery: str) -> dict[str, Any]:
    record = deliveries.read_record(lake.store, source, delivery)
    if record is None:
        path = f"{RAW}/{source}/{delivery}/{RECORD}"
        raise StoreError(
            f"{lake.store.url}: no {path}, and the listing of source {source} names that delivery. Put the folder back, or "
            "run ingestion again while the delivery is still at its source.",
            url=lake.store.url,
            path=path,
        )
    return record


def _overlaps(lake: Lake, source: str, period: str, some: Sequence[InForce]) -> Mapping[str, str]:
    """Deliveries of a period that share a charge with a newer one, and the newest such; `some` is newest first."""
    if len(some) < 2:
        return {}
    prefix = handle_name(period, "")
    handles = {one.delivery: [h for name, h in one.step.handles.items() if name.startswith(prefix)] for one in some}
    key = stage_key(
        OVERLAP,
        modules=("tasks.standing",),
        schemas=[CHARGES],
        settings={"source": source, "period": period, "newest_first": [one.delivery for one in some]},
        inputs=[h.sha256 for found in handles.values() for h in found],
    )

    def compute() -> Step:
        keys = []
        for one in some:
            tables = [lake.read(h, CHARGES, columns=["x_ChargeKey"]) for h in handles[one.delivery]]
            keys.append(pc.unique(pa.concat_tables(tables)["x_ChargeKey"]))
        newer = snapshots.superseded_by(keys)
        return Step({}, {one.delivery: some[n].delivery for one, n in zip(some, newer, strict=True) if n is not None})

    return run_step(lake, OVERLAP, key, compute)[0].facts


def parse_step(lake: Lake, record: Mapping[str, Any], parsed: Parsed | None) -> Step:
    """The parse step of an accepted delivery; from its copy in the lake when it was not parsed just now."""
    key = stage_key(
        STAGE,
        modules=MODULES,
        schemas=[CHARGES],
        settings={
            "ties": hashlib.sha256(RULES.read_bytes()).hexdigest(),
            "instances": _instance_facts(),
            "source": record["source"],
            "period": record["period"],
        },
        inputs=[f["sha256"] for f in record["files"]],
    )

    def compute() -> Step:
        ready = parsed
        if ready is None:
            copies = deliveries.read_copies(lake.store, record)
            ready = deliveries.parse(record["source"], record["period"], copies, tie_rules(), gpu_instances())
        return _store(lake, record["source"], ready)

    return run_step(lake, STAGE, key, compute)[0]


def _instance_facts() -> list[list[str]]:
    """What ties take from the catalogue: prices are none of it."""
    return sorted(
        [i.cloud, i.instance_type, *("" if n is None else str(n) for n in (i.vcpus, i.memory_gib, i.gpu_count))]
        for i in gpu_instances()
    )


def tie_rules() -> tuple[ties.Rule, ...]:
    """The rules of the repository."""
    return ties.parse_rules(RULES.read_text(encoding="utf-8"), where=f"tasks/rules/{RULES.name}")


def handle_name(period: str, day: str) -> str:
    """Name of the handle of one usage day of a billing period in a parse step."""
    return f"{CHARGES.name}/{period}/{day}"


def _store(lake: Lake, source: str, parsed: Parsed) -> Step:
    """Objects per billing period and usage day, and the facts of the delivery."""
    charges = parsed.charges
    charges = charges.append_column("x_Source", pa.array([source] * len(charges), pa.string()))
    parts = snapshots.split_days(charges).select(list(CHARGES.names))
    start = np.asarray(parts["BillingPeriodStart"].cast(pa.int64()))
    day = np.asarray(parts["x_UsageDate"].cast(pa.int32())).astype(np.int64)
    handles: dict[str, Handle] = {}
    days: dict[str, dict[str, Any]] = {}
    order = np.lexsort((day, start))
    edges = np.flatnonzero((np.diff(start[order]) != 0) | (np.diff(day[order]) != 0)) + 1
    for rows in np.split(order, edges):
        period, date = snapshots.instant_text(int(start[rows[0]])), snapshots.day_text(int(day[rows[0]]))
        some = parts.take(pa.array(rows))
        handles[handle_name(period, date)] = lake.handle(CHARGES, date, [some])
        days.setdefault(period, {})[date] = {
            "rows": len(some),
            "BilledCost": snapshots.plain(snapshots.sum_money(some["x_DayBilledCost"])),
            "EffectiveCost": snapshots.plain(snapshots.sum_money(some["x_DayEffectiveCost"])),
        }
    marks, machines = snapshots.watermarks(charges)
    facts = {
        "rows": len(charges),
        "periods": deliveries.periods_of(charges),
        "currencies": sorted(pc.unique(charges["BillingCurrency"]).to_pylist()),
        "days": days,
        "watermarks": marks,
        "machine_services": machines,
        "totals": snapshots.totals(charges),
        "bridge": snapshots.bridge(charges, parts),
        "windows": changes.window_digests(parts),
        "invoiced": changes.invoiced(charges),
        "rates": {period: [list(rate) for rate in some] for period, some in contracted.rates(charges).items()},
        "ends": snapshots.period_ends(charges),
        "files": parsed.files,
    }
    return Step(handles, facts)
