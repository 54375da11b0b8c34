"""Bill deliveries into charges per usage day: accepted or refused whole, parsed once; and which snapshot is in force.

A delivery is copied into `raw/bills/<source>/<delivery>/`; its `delivery.json`, written last, is the acceptance. Until
then it can be killed anywhere and run again. Knows no telemetry and no address.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from seedance.canonical import canonical
from seedance.catalogue import gpu_instances
from seedance.errors import Exists
from tasks.core import focus, money, snapshots, ties
from tasks.core.focus_values import EXACT, Place
from tasks.errors import DeliveryError
from tasks.io.bills import Candidate, Source, read_tables, suffix
from tasks.io.lake import Handle, Lake, Part, Step
from tasks.settings import BillSource, Settings
from tasks.step import run_step, stage_key

STAGE = "bill"
RULES = Path(__file__).parent / "rules" / "ties.csv"
MODULES = (
    "schemas.billing",
    "tasks.bill",
    "tasks.core.focus",
    "tasks.core.focus_values",
    "tasks.core.money",
    "tasks.core.snapshots",
    "tasks.core.ties",
    "tasks.core.units",
    "tasks.io.bills",
)
RAW = "raw/bills"
RECORD = "delivery.json"
AGAIN = "again-"
"""An export that wrote the bytes of an earlier execution once more: `again-<delivered_at>.json`."""


@dataclass(frozen=True)
class InForce:
    """The delivery in force for one billing period of one source, and what parsing made of it."""

    source: str
    period: str
    delivery: str
    step: Step


@dataclass(frozen=True)
class _Parsed:
    """Stored charges of a delivery, one row a charge, and the facts of each file."""

    charges: pa.Table
    files: list[dict[str, Any]]


def ingest(lake: Lake, settings: Settings) -> list[dict[str, Any]]:
    """Accept what is new at every bill source, and parse it into objects per usage day.

    Args:
        lake: where copies, steps and objects go.
        settings: `bills` names the sources.

    Returns:
        One entry a delivery, and one a source that cannot be read: source, delivery (None when it was never read),
        name, status (accepted, known or refused), reason (None unless refused), message, rows, periods, days. A refused
        delivery never stops another one, and what was accepted before it stands.
    """
    return [entry for source in settings.bills for entry in _ingest_source(lake, source)]


def charges_of(
    lake: Lake, settings: Settings, day: str, *, bills: Sequence[InForce] | None = None
) -> tuple[Handle, dict[str, Any]]:
    """Charges of one usage day, from the snapshots in force.

    Args:
        lake: where deliveries were accepted.
        settings: `bills` names the sources that count.
        day: UTC usage day, YYYY-MM-DD.
        bills: what `snapshots_in_force` gave, when many days are asked for.

    Returns:
        The handle of core_billing__charges (no parts when the day has no charge); and facts: watermarks, ns UTC by
        "cloud|account|service" of services with machine rows, held to the day; bills, "source/delivery" of those that
        contribute, sorted.

    Raises:
        DeliveryError: two sources deliver the same charge, so it would count twice; carries sources.
    """
    force = snapshots_in_force(lake, settings) if bills is None else bills
    parts: dict[str, tuple[InForce, Part]] = {}
    marks: dict[str, int] = {}
    machines = {k for one in force for k in one.step.facts["machine_services"].get(one.period, ())}
    for one in force:
        handle = one.step.handles.get(_handle_name(one.period, day))
        if handle is not None:
            parts.update({part.path: (one, part) for part in handle.parts})
        for key, at in one.step.facts["watermarks"].get(one.period, {}).items():
            if key in machines:
                marks[key] = max(at, marks.get(key, at))
    handle = Handle(CHARGES.name, CHARGES.version, day, tuple(parts[path][1] for path in sorted(parts)))
    contributing = [one for one, _ in parts.values()]
    if len({one.source for one in contributing}) > 1:
        _refuse_twice(lake, handle)
    return handle, {
        "watermarks": snapshots.clamp(marks, day),
        "bills": sorted({f"{one.source}/{one.delivery}" for one in contributing}),
    }


def days_touched(lake: Lake, settings: Settings, *, bills: Sequence[InForce] | None = None) -> dict[str, str]:
    """Every usage day that a snapshot in force has charges for, with a digest of their objects, sorted by day."""
    digests: dict[str, list[str]] = {}
    for one in snapshots_in_force(lake, settings) if bills is None else bills:
        for day in one.step.facts["days"].get(one.period, {}):
            handle = one.step.handles[_handle_name(one.period, day)]
            digests.setdefault(day, []).extend(part.sha256 for part in handle.parts)
    return {day: hashlib.sha256(canonical(sorted(digests[day]))).hexdigest() for day in sorted(digests)}


def snapshots_in_force(lake: Lake, settings: Settings) -> list[InForce]:
    """The delivery in force for each billing period of each source in the settings, sorted.

    A delivery that this code has not parsed yet is parsed now, from its copy in the lake.
    """
    names = [source.name for source in settings.bills]
    records = {(r["source"], r["delivery"]): r for name in names for r in _records(lake, name)}
    deliveries = [
        snapshots.Delivery(r["source"], r["delivery"], r["delivered_at"], tuple(r["periods"])) for r in records.values()
    ]
    steps: dict[tuple[str, str], Step] = {}
    out = []
    for (source, period), delivery in snapshots.in_force(deliveries).items():
        which = (source, delivery)
        if which not in steps:
            steps[which] = _parse_step(lake, records[which], None)
        out.append(InForce(source, period, delivery, steps[which]))
    return out


def period_facts(lake: Lake, settings: Settings, standing: Collection[str]) -> list[dict[str, Any]]:
    """What the bridge needs of the snapshots in force, by cloud, account, billing period and currency, in whole units.

    Args:
        lake: where deliveries were accepted.
        settings: `bills` names the sources that count.
        standing: committed days whose addresses stand on the charges in force; parts on other days are scheduled.

    Returns:
        Per key: stored_billed, stored_effective, scheduled_billed, scheduled_effective, purchases, used, unused; and
        raw_minus_stored of BilledCost as a Decimal, None where a file's quantised rows cannot be told apart by key.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in snapshots_in_force(lake, settings):
        lost = _lost(one.step)
        for row in one.step.facts["bridge"]:
            if row["period"] != one.period:
                continue
            key = (row["cloud"], row["account"], row["period"], row["currency"])
            facts = found.setdefault(key, {"raw_minus_stored": Decimal(0)} | dict.fromkeys(_BRIDGED, 0))
            _add_bridge(facts, row, standing)
            gone = lost.get(row["currency"])
            known = facts["raw_minus_stored"] is not None and gone is not None
            facts["raw_minus_stored"] = facts["raw_minus_stored"] + gone if known else None
    names = ("cloud", "account", "period", "currency")
    return [dict(zip(names, key, strict=True)) | found[key] for key in sorted(found)]


_BRIDGED = (
    "stored_billed", "stored_effective", "scheduled_billed", "scheduled_effective", "purchases", "used", "unused",
)  # fmt: skip


def _add_bridge(facts: dict[str, Any], row: Mapping[str, Any], standing: Collection[str]) -> None:
    def both(name: str) -> tuple[int, int]:
        billed, effective = row.get(name, ("0", "0"))
        return money.units(billed), money.units(effective)

    for name, amount in zip(("stored_billed", "stored_effective"), both("stored"), strict=True):
        facts[name] += amount
    facts["purchases"] += both("purchases")[0]
    for name in ("used", "unused"):
        billed, effective = both(name)
        facts[name] += effective - billed
    for day, (billed_text, effective_text) in row["days"].items():
        if day not in standing:
            facts["scheduled_billed"] += money.units(billed_text)
            facts["scheduled_effective"] += money.units(effective_text)


def _lost(step: Step) -> dict[str, Decimal | None]:
    """Σ raw − Σ stored of BilledCost by currency; None where something was lost and the currency has several keys."""
    rows = [row["currency"] for row in step.facts["bridge"]]
    sums: dict[str, Decimal | None] = {}
    for currency in set(rows):
        gone = sum(
            (
                Decimal(f["currencies"].get(currency, _NOTHING)["BilledCost"]["raw_minus_stored"])
                for f in step.facts["files"]
            ),
            Decimal(0),
        )
        sums[currency] = gone if not gone or rows.count(currency) == 1 else None
    return sums


_NOTHING = {"BilledCost": {"raw_minus_stored": "0"}}


def _ingest_source(lake: Lake, source: BillSource) -> list[dict[str, Any]]:
    try:
        place = Source(source.name, source.url)
        candidates, problems = place.discover()
    except DeliveryError as error:
        return [_entry(source.name, None, source.url, "refused", error=error)]
    entries = [_entry(source.name, None, str(problem.facts["path"]), "refused", error=problem) for problem in problems]
    for candidate in candidates:
        try:
            entries.append(_ingest_one(lake, place, candidate))
        except DeliveryError as error:
            entries.append(_entry(source.name, error.facts.get("delivery"), candidate.name, "refused", error=error))
    return entries


def _ingest_one(lake: Lake, source: Source, candidate: Candidate) -> dict[str, Any]:
    contents = {path: source.fetch(path) for path in candidate.files}
    files = [_file(path, data) for path, data in contents.items()]
    files.sort(key=lambda f: (f["name"], f["origin"]))
    delivery = hashlib.sha256("\n".join(sorted(f["sha256"] for f in files)).encode()).hexdigest()[:16]
    folder = f"{RAW}/{source.name}/{delivery}"
    raw = lake.store.get(f"{folder}/{RECORD}")
    if raw is not None:
        record = json.loads(raw)
        if candidate.stamped and candidate.delivered_at > record["delivered_at"]:
            with suppress(Exists):  # the provider went back to an earlier state: it counts from now on
                lake.store.create(f"{folder}/{AGAIN}{candidate.delivered_at}.json", raw)
        return _entry(source.name, delivery, candidate.name, "known", step=_parse_step(lake, record, None))
    try:
        parsed = _parse(source.name, candidate.period, [(f, contents[f["origin"]]) for f in files])
    except DeliveryError as error:
        error.facts["delivery"] = delivery
        raise
    for file in files:
        lake.store.put(f"{folder}/{file['name']}", contents[file["origin"]])
    record = {
        "source": source.name,
        "delivery": delivery,
        "delivered_at": candidate.delivered_at,
        "period": candidate.period,
        "periods": _periods(parsed.charges),
        "files": files,
        "rows": len(parsed.charges),
    }
    step = _parse_step(lake, record, parsed)
    with suppress(Exists):  # another run accepted the same bytes meanwhile
        lake.store.create(f"{folder}/{RECORD}", canonical(record))
    return _entry(source.name, delivery, candidate.name, "accepted", step=step)


def _file(path: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    return {"name": digest[:16] + suffix(data), "origin": path, "bytes": len(data), "sha256": digest}


def _entry(
    source: str,
    delivery: str | None,
    name: str,
    status: str,
    *,
    step: Step | None = None,
    error: DeliveryError | None = None,
) -> dict[str, Any]:
    facts = step.facts if step is not None else {}
    days = sorted({day for by_day in facts.get("days", {}).values() for day in by_day})
    return {
        "source": source,
        "delivery": delivery,
        "name": name,
        "status": status,
        "reason": None if error is None else str(error.facts.get("reason", error)),
        "message": None if error is None else str(error),
        "rows": facts.get("rows", 0),
        "periods": facts.get("periods", []),
        "days": days,
    }


def _records(lake: Lake, source: str) -> list[dict[str, Any]]:
    """Accepted deliveries of a source, each with the newest time at which it was delivered."""
    paths = [e.path for e in lake.store.list(f"{RAW}/{source}")]
    again: dict[str, str] = {}
    for path in paths:
        folder, _, file = path.rpartition("/")
        if file.startswith(AGAIN):
            again[folder] = max(again.get(folder, ""), file.removeprefix(AGAIN).removesuffix(".json"))
    records = []
    for path in paths:
        folder, _, file = path.rpartition("/")
        if file == RECORD:
            record = json.loads(lake.store.read(path))
            records.append({**record, "delivered_at": max(record["delivered_at"], again.get(folder, ""))})
    return records


def _parse_step(lake: Lake, record: Mapping[str, Any], parsed: _Parsed | None) -> Step:
    """The parse step of an accepted delivery; from its copy in the lake when it was not parsed just now."""
    rules = RULES.read_bytes()
    types = sorted({i.instance_type for i in gpu_instances()})
    key = stage_key(
        STAGE,
        modules=MODULES,
        schemas=[CHARGES],
        settings={
            "ties": hashlib.sha256(rules).hexdigest(),
            "gpu_types": types,
            "source": record["source"],
            "period": record["period"],
        },
        inputs=[f["sha256"] for f in record["files"]],
    )

    def compute() -> Step:
        ready = parsed
        if ready is None:
            folder = f"{RAW}/{record['source']}/{record['delivery']}"
            contents = [(f, lake.store.read(f"{folder}/{f['name']}")) for f in record["files"]]
            ready = _parse(record["source"], record["period"], contents)
        tied = ties.tie(ready.charges, ties.parse_rules(rules.decode(), where=f"tasks/rules/{RULES.name}"), types)
        return _store(lake, record["source"], ready, tied)

    return run_step(lake, STAGE, key, compute)[0]


def _parse(source: str, period: str | None, contents: Sequence[tuple[Mapping[str, Any], bytes]]) -> _Parsed:
    """Stored charges of all files of a delivery, with occurrence numbers over the whole of it."""
    tables, facts = [], []
    for file, data in contents:
        batches = [focus.normalise(table, place) for place, table in read_tables(data, Place(source, file["origin"]))]
        rows = pa.concat_tables([b.rows for b in batches])
        _check_scope(rows, period, Place(source, file["origin"]))
        tables.append(rows)
        facts.append({"name": file["name"], "rows": len(rows), "currencies": _currencies(rows, batches)})
    charges = pa.concat_tables(tables)
    for column in focus.COSTS:
        if snapshots.overflows(charges[column]):
            place = Place(source, ", ".join(f["origin"] for f, _ in contents))
            raise place.refuse(column, "sums of at most 38 digits", "larger amounts", "Check the export's unit.")
    return _Parsed(charges.append_column("x_Occurrence", focus.occurrences(charges)), facts)


def _check_scope(rows: pa.Table, period: str | None, place: Place) -> None:
    """Rows of another billing period than their folder would displace that period's own delivery."""
    if period is None:
        return
    found = pc.strftime(rows["BillingPeriodStart"].cast(pa.timestamp("s", "UTC")), format="%Y-%m")
    other = pc.not_equal(found, period)
    if pc.any(other).as_py():
        row = int(pc.index(other, True).as_py())
        raise place.refuse(
            "BillingPeriodStart",
            f"the billing period of the folder, {period}",
            found[row].as_py(),
            "Export each billing period into its own folder.",
            row=row,
        )


def _currencies(rows: pa.Table, batches: Sequence[focus.Batch]) -> dict[str, Any]:
    """Σ stored and Σ raw − Σ stored of a file, by currency and ledger, as decimal text."""
    out: dict[str, Any] = {}
    for currency in sorted(pc.unique(rows["BillingCurrency"]).to_pylist()):
        some = rows.filter(pc.equal(rows["BillingCurrency"], currency))
        out[currency] = {}
        for column in focus.COSTS:
            lost = Decimal(0)
            for batch in batches:
                lost = EXACT.add(lost, batch.lost.get((column, currency), Decimal(0)))
            stored = snapshots.plain(snapshots.sum_money(some[column]))
            out[currency][column] = {"stored": stored, "raw_minus_stored": snapshots.plain(lost)}
    return out


def _periods(charges: pa.Table) -> list[str]:
    starts = pc.unique(charges["BillingPeriodStart"]).cast(pa.int64()).to_pylist()
    return [snapshots.instant_text(ns) for ns in sorted(starts)]


def _handle_name(period: str, day: str) -> str:
    return f"{CHARGES.name}/{period}/{day}"


def _store(lake: Lake, source: str, parsed: _Parsed, tied: pa.Table) -> Step:
    """Objects per billing period and usage day, and the facts of the delivery."""
    charges = parsed.charges
    for name in tied.column_names:
        charges = charges.append_column(name, tied[name])
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
        handles[_handle_name(period, date)] = lake.handle(CHARGES, date, [some])
        days.setdefault(period, {})[date] = {
            "rows": len(some),
            "BilledCost": snapshots.plain(snapshots.sum_money(some["x_DayBilledCost"])),
            "EffectiveCost": snapshots.plain(snapshots.sum_money(some["x_DayEffectiveCost"])),
        }
    marks, machines = snapshots.watermarks(charges)
    facts = {
        "rows": len(charges),
        "periods": _periods(charges),
        "currencies": sorted(pc.unique(charges["BillingCurrency"]).to_pylist()),
        "days": days,
        "watermarks": marks,
        "machine_services": machines,
        "totals": snapshots.totals(charges),
        "bridge": snapshots.bridge(charges, parts),
        "files": parsed.files,
    }
    return Step(handles, facts)


def _refuse_twice(lake: Lake, handle: Handle) -> None:
    rows = lake.read(handle, CHARGES, columns=["x_ChargeKey", "x_Occurrence", "x_Source"])
    seen = rows.group_by(["x_ChargeKey", "x_Occurrence"]).aggregate([("x_Source", "distinct"), ("x_Source", "count")])
    twice = seen.filter(pc.greater(seen["x_Source_count"], 1))
    if len(twice):
        sources = sorted({s for names in twice["x_Source_distinct"].to_pylist() for s in names})
        raise DeliveryError(
            f"bill sources {', '.join(sources)}: {len(twice):,} charge(s) of {handle.day} are delivered by both, and "
            f"would count twice (first key {twice['x_ChargeKey'][0].as_py()}). Name each export in one source only.",
            source=sources[0],
            sources=sources,
            day=handle.day,
            rows=len(twice),
            reason="the same charge in two sources",
        )
