"""Bill deliveries into charges per usage day: accepted or refused whole, parsed once; and which snapshots are in force.

A delivery is copied into `raw/bills/<source>/<delivery>/`; its `delivery.json`, written last, is the acceptance. What stands
at a source is listed after that. Until then it can be killed anywhere and run again. Knows no telemetry and no address.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from seedance.canonical import canonical
from seedance.catalogue import gpu_instances
from seedance.errors import StoreError
from tasks.core import snapshots, ties
from tasks.core.snapshots import Listed
from tasks.errors import DeliveryError
from tasks.io import deliveries
from tasks.io.bills import Candidate, Source, shown
from tasks.io.deliveries import RAW, RECORD, Parsed
from tasks.io.lake import Handle, Lake, Part, Step
from tasks.settings import BillSource, Settings
from tasks.step import run_step, stage_key

LOG = logging.getLogger(__name__)
STAGE = "bill"
OVERLAP = "bill_overlap"
RULES = Path(__file__).parent / "rules" / "ties.csv"
MODULES = ("tasks.bill", "tasks.io.bills", "tasks.io.deliveries")
LISTING_TRIES = 20


@dataclass(frozen=True)
class InForce:
    """A delivery in force for one billing period of one source, and what parsing made of it; a period can have several."""

    source: str
    period: str
    delivery: str
    step: Step


class _Standing(NamedTuple):
    """What counts of a source, and the newer file by (delivery, billing period) of what does not."""

    force: list[InForce]
    superseded: dict[tuple[str, str], str]


def ingest(lake: Lake, settings: Settings) -> list[dict[str, Any]]:
    """Accept what is new at every bill source, and parse it into objects per usage day.

    Args:
        lake: where copies, steps and objects go.
        settings: `bills` names the sources.

    Returns:
        One entry a delivery, and one a source that cannot be read: source, delivery (None when it was never read),
        name, status (accepted, known, superseded or refused), reason (None unless refused), message, rows, periods, days.
        A refused delivery never stops another one, and what was accepted before it stands. A superseded one shares charges
        with a newer one at the source, which its message names, and counts for no billing period.
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
    """The deliveries in force for each billing period of each source in the settings, sorted by source and period.

    Of a period those count that stood at the source when it was last listed with any delivery of the period, without
    older states of one another. A delivery that this code has not parsed yet is parsed now, from its copy in the lake.

    Raises:
        StoreError: an acceptance, a listing or a copy is damaged; carries path.
    """
    names = sorted(source.name for source in settings.bills)
    return [
        one for name in names for one in _standing(lake, name, deliveries.newest_listing(lake.store, name)[1]).force
    ]


def _standing(lake: Lake, source: str, listed: Sequence[Listed]) -> _Standing:
    steps: dict[str, Step] = {}
    force: list[InForce] = []
    superseded: dict[tuple[str, str], str] = {}
    for period, some in snapshots.contenders(listed).items():
        for one in some:
            if one.delivery not in steps:
                steps[one.delivery] = _parse_step(lake, _record(lake, source, one.delivery), None)
        by = _overlaps(lake, source, period, [InForce(source, period, d.delivery, steps[d.delivery]) for d in some])
        names = {one.delivery: one.name for one in some}
        superseded |= {(old, period): names[new] for old, new in by.items()}
        force += [InForce(source, period, d, steps[d]) for d in sorted(names) if d not in by]
    return _Standing(force, superseded)


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
    prefix = _handle_name(period, "")
    handles = {one.delivery: [h for name, h in one.step.handles.items() if name.startswith(prefix)] for one in some}
    key = stage_key(
        OVERLAP,
        modules=("tasks.bill", "tasks.core.snapshots"),
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
        lost = snapshots.lost(one.step.facts)
        for row in one.step.facts["bridge"]:
            if row["period"] != one.period:
                continue
            key = (row["cloud"], row["account"], row["period"], row["currency"])
            facts = found.setdefault(key, {"raw_minus_stored": Decimal(0)} | dict.fromkeys(snapshots.BRIDGED, 0))
            snapshots.add_bridge(facts, row, standing)
            gone = lost.get(row["currency"])
            known = facts["raw_minus_stored"] is not None and gone is not None
            facts["raw_minus_stored"] = facts["raw_minus_stored"] + gone if known else None
    names = ("cloud", "account", "period", "currency")
    return [dict(zip(names, key, strict=True)) | found[key] for key in sorted(found)]


def _ingest_source(lake: Lake, source: BillSource) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    try:
        accepted: set[tuple[str, str]] = set()
        for _ in range(LISTING_TRIES):
            entries.clear()
            number, former = deliveries.newest_listing(lake.store, source.name)
            here, broken = _look(lake, Source(source.name, source.url), former, entries)
            accepted |= {(e["delivery"], e["name"]) for e in entries if e["status"] == "accepted"}
            now = snapshots.next_listing(former, here, broken)
            if deliveries.record_listing(lake.store, source.name, number, former, now):
                break
        else:
            raise StoreError(f"other runs listed it {LISTING_TRIES} times meanwhile. Run again.", url=lake.store.url)
        standing = _standing(lake, source.name, now)
        for entry in entries:
            if entry["status"] == "known" and (entry["delivery"], entry["name"]) in accepted:
                entry["status"] = "accepted"
            _tell_superseded(entry, standing)
    except DeliveryError as error:
        entries.append(_entry(source.name, None, source.url, "refused", error=error))
    except Exception as error:
        LOG.exception("bill source %s", source.name)
        entries.append(_entry(source.name, None, source.url, "refused", error=error))
    return entries


def _look(
    lake: Lake, place: Source, former: Sequence[Listed], entries: list[dict[str, Any]]
) -> tuple[list[Listed], set[str]]:
    """Ingest what is complete at a source: what of it stands there accepted, and the groups where something is wrong."""
    candidates, problems = place.discover()
    entries += [_entry(place.name, None, str(problem.facts["path"]), "refused", error=problem) for problem in problems]
    broken = {str(problem.facts["group"]) for problem in problems}
    known = {one.files: one.delivery for one in former if one.files and all(tag for _, tag in one.files)}
    here = []
    for candidate in candidates:
        files = tuple((shown(path), tag) for path, tag in candidate.files)
        try:
            record, step, status = _ingest_one(lake, place, candidate, known.get(files))
            entries.append(_entry(place.name, record["delivery"], candidate.name, status, step=step))
            here.append(
                Listed(
                    record["delivery"],
                    candidate.name,
                    candidate.group,
                    candidate.delivered_at,
                    candidate.main,
                    tuple(record["periods"]),
                    files=files,
                )
            )
            continue
        except DeliveryError as error:
            refusal: Exception = error
        except Exception as error:
            LOG.exception("bill source %s, %s", place.name, candidate.name)
            refusal = error
        broken.add(candidate.group)
        delivery = refusal.facts.get("delivery") if isinstance(refusal, DeliveryError) else None
        entries.append(_entry(place.name, delivery, candidate.name, "refused", error=refusal))
    return here, broken


def _ingest_one(
    lake: Lake, source: Source, candidate: Candidate, known: str | None
) -> tuple[Mapping[str, Any], Step, str]:
    """The record and step of a complete delivery, and whether it is new; not read again when its tags are `known`."""
    record = None if known is None else deliveries.read_record(lake.store, source.name, known)
    if record is not None:
        return record, _parse_step(lake, record, None), "known"
    contents = [(deliveries.file_facts(path, data), data) for path, data in _fetched(source, candidate)]
    contents.sort(key=lambda content: (content[0]["name"], content[0]["origin"]))
    files = [file for file, _ in contents]
    delivery = deliveries.delivery_id(files)
    record = deliveries.read_record(lake.store, source.name, delivery)
    if record is not None:
        return record, _parse_step(lake, record, None), "known"
    try:
        parsed = deliveries.parse(source.name, candidate.period, contents)
    except DeliveryError as error:
        error.facts["delivery"] = delivery
        raise
    for file, data in contents:
        lake.store.put(f"{RAW}/{source.name}/{delivery}/{file['name']}", data)
    record = {
        "source": source.name,
        "delivery": delivery,
        "delivered_at": candidate.delivered_at,
        "period": candidate.period,
        "periods": deliveries.periods_of(parsed.charges),
        "files": files,
        "rows": len(parsed.charges),
    }
    step = _parse_step(lake, record, parsed)
    deliveries.accept(lake.store, record)
    return record, step, "accepted"


def _fetched(source: Source, candidate: Candidate) -> Iterator[tuple[str, bytes]]:
    for path, _ in candidate.files:
        yield path, source.fetch(path)


def _tell_superseded(entry: dict[str, Any], standing: _Standing) -> None:
    """Say which newer file stands in the place of this one, for all of its billing periods or some."""
    by = {period: name for (old, period), name in standing.superseded.items() if old == entry["delivery"]}
    if entry["status"] == "refused" or not by:
        return
    if not any(one.delivery == entry["delivery"] for one in standing.force):
        entry["status"] = "superseded"
    names = " and ".join(sorted(set(by.values())))
    entry["message"] = (
        f"bill source {entry['source']}, {entry['name']}: it shares charges of {', '.join(p[:7] for p in sorted(by))} with "
        f"{names}, which is newer and counts in its place. Keep files of one billing period that overlap apart: one source each, "
        "or only the newest in the folder."
    )


def _entry(
    source: str,
    delivery: str | None,
    name: str,
    status: str,
    *,
    step: Step | None = None,
    error: Exception | None = None,
) -> dict[str, Any]:
    facts = step.facts if step is not None else {}
    days = sorted({day for by_day in facts.get("days", {}).values() for day in by_day})
    message = reason = None
    if isinstance(error, DeliveryError):
        message, reason = str(error), str(error.facts.get("reason", error))
    elif error is not None:
        reason = f"{type(error).__name__}: {error}"
        message = (
            f"bill source {source}, {name}: {reason}. The delivery is refused whole and the former one stands. The log has "
            "the traceback."
        )
    return {
        "source": source,
        "delivery": delivery,
        "name": shown(name),
        "status": status,
        "reason": None if reason is None else shown(reason),
        "message": None if message is None else shown(message),
        "rows": facts.get("rows", 0),
        "periods": facts.get("periods", []),
        "days": days,
    }


def _parse_step(lake: Lake, record: Mapping[str, Any], parsed: Parsed | None) -> Step:
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
            copies = deliveries.read_copies(lake.store, record)
            ready = deliveries.parse(record["source"], record["period"], copies)
        tied = ties.tie(ready.charges, ties.parse_rules(rules.decode(), where=f"tasks/rules/{RULES.name}"), types)
        return _store(lake, record["source"], ready, tied)

    return run_step(lake, STAGE, key, compute)[0]


def _handle_name(period: str, day: str) -> str:
    return f"{CHARGES.name}/{period}/{day}"


def _store(lake: Lake, source: str, parsed: Parsed, tied: pa.Table) -> Step:
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
        "periods": deliveries.periods_of(charges),
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
