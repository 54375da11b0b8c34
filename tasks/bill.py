"""Bill deliveries into charges per usage day: accepted or refused whole, parsed once; and what other stages ask of them.

A delivery is copied into `raw/bills/<source>/<delivery>/`; its `delivery.json`, written last, is the acceptance. What stands
at a source is listed after that. Until then it can be killed anywhere and run again. Knows no telemetry and no address.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow.compute as pc

from schemas.billing import CHARGES
from seedance.canonical import canonical
from seedance.catalogue import gpu_instances
from seedance.errors import SeedanceError, StoreError
from tasks.closing import Contracted, complete_windows, contracted_prices
from tasks.core import snapshots
from tasks.core.snapshots import Listed
from tasks.differences import report_differences
from tasks.errors import DeliveryError, PipelineError
from tasks.io import deliveries
from tasks.io.bills import Source
from tasks.io.deliveries import RAW
from tasks.io.lake import Handle, Lake, Part, Step
from tasks.io.layouts import Candidate, shown
from tasks.settings import BillSource, Settings
from tasks.standing import (
    InForce,
    Standing,
    former_in_force,
    handle_name,
    parse_step,
    snapshots_in_force,
    standing,
    tie_rules,
)

__all__ = [
    "Contracted",
    "InForce",
    "charges_of",
    "complete_windows",
    "contracted_prices",
    "days_touched",
    "former_in_force",
    "ingest",
    "period_facts",
    "report_differences",
    "snapshots_in_force",
]

LOG = logging.getLogger(__name__)
LISTING_TRIES = 20


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
        handle = one.step.handles.get(handle_name(one.period, day))
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
            handle = one.step.handles[handle_name(one.period, day)]
            digests.setdefault(day, []).extend(part.sha256 for part in handle.parts)
    return {day: hashlib.sha256(canonical(sorted(digests[day]))).hexdigest() for day in sorted(digests)}


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
        stands, rivals = standing(lake, source.name, now), snapshots.rivals(now)
        for entry in entries:
            if entry["status"] == "known" and (entry["delivery"], entry["name"]) in accepted:
                entry["status"] = "accepted"
            _tell_superseded(entry, stands)
            _tell_rival(entry, rivals)
    except DeliveryError as error:
        entries.append(_entry(source.name, None, source.url, "refused", error=error))
    except Exception as error:
        if not isinstance(error, PipelineError | SeedanceError):
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
            if not isinstance(error, PipelineError | SeedanceError):  # ours say what is wrong
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
        return record, parse_step(lake, record, None), "known"
    contents = [(deliveries.file_facts(path, data), data) for path, data in _fetched(source, candidate)]
    contents.sort(key=lambda content: (content[0]["name"], content[0]["origin"]))
    files = [file for file, _ in contents]
    delivery = deliveries.delivery_id(files)
    record = deliveries.read_record(lake.store, source.name, delivery)
    if record is not None:
        return record, parse_step(lake, record, None), "known"
    try:
        parsed = deliveries.parse(source.name, candidate.period, contents, tie_rules(), gpu_instances())
        deliveries.check_promises(source.name, candidate, parsed, files)
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
    step = parse_step(lake, record, parsed)
    deliveries.accept(lake.store, record)
    return record, step, "accepted"


def _fetched(source: Source, candidate: Candidate) -> Iterator[tuple[str, bytes]]:
    for path, _ in candidate.files:
        yield path, source.fetch(path)


def _tell_superseded(entry: dict[str, Any], stands: Standing) -> None:
    """Say which newer file stands in the place of this one, for all of its billing periods or some."""
    by = {period: name for (old, period), name in stands.superseded.items() if old == entry["delivery"]}
    if entry["status"] == "refused" or not by:
        return
    if not any(one.delivery == entry["delivery"] for one in stands.force):
        entry["status"] = "superseded"
    names = " and ".join(sorted(set(by.values())))
    entry["message"] = (
        f"bill source {entry['source']}, {entry['name']}: it shares charges of {', '.join(p[:7] for p in sorted(by))} with "
        f"{names}, which is newer and counts in its place. Keep files of one billing period that overlap apart: one source each, "
        "or only the newest in the folder."
    )


def _tell_rival(entry: dict[str, Any], rivals: Mapping[tuple[str, str], str]) -> None:
    """Say of a state that another one of the same time counts in its place: nothing but their ids decided that."""
    other = rivals.get((entry["delivery"], entry["name"]))
    if entry["status"] != "refused" and other is not None:
        entry["message"] = (
            f"bill source {entry['source']}, {entry['name']}: expected one state of its billing period at a time, found {other} "
            "of the same time with other content, which counts because its id is the greater. Run the export again, so that "
            "one is the newest."
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
