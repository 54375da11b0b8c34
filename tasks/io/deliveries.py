"""What the lake keeps of bill deliveries: copies, acceptances, and what stood at each source when it was last looked at.

    raw/bills/<source>/<delivery>/<sha16>.<suffix>   copies of its files
    raw/bills/<source>/<delivery>/delivery.json      the acceptance, written last
    raw/bills/<source>/present/<n>.json              listings of the source; the highest n counts

Knows no charge beyond its billing period, and no clock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from seedance.canonical import canonical
from seedance.catalogue import GpuInstance
from seedance.errors import Exists, StoreError
from seedance.store import Store
from tasks.core import focus, snapshots, ties
from tasks.core.focus_values import EXACT, Place
from tasks.core.snapshots import Listed
from tasks.core.units import HOUR_NS, MOST_TIME_NS
from tasks.io.bill_rows import read_tables, suffix
from tasks.io.layouts import Candidate, shown

RAW = "raw/bills"
RECORD = "delivery.json"
PRESENT = "present"
FACTS = frozenset({"source", "delivery", "delivered_at", "period", "periods", "files", "rows"})
"""What an acceptance says."""


class Parsed(NamedTuple):
    """Stored charges of a delivery, one row a charge and tied, and the facts of each file."""

    charges: pa.Table
    files: list[dict[str, Any]]


# --- acceptances and copies ------------------------------------------------------------------------------------------


def file_facts(path: str, data: bytes) -> dict[str, Any]:
    """What the acceptance says of one file: its name in the lake, where it came from, size and digest."""
    digest = hashlib.sha256(data).hexdigest()
    return {"name": digest[:16] + suffix(data), "origin": shown(path), "bytes": len(data), "sha256": digest}


def delivery_id(files: Sequence[Mapping[str, Any]]) -> str:
    """Id of a delivery: its bytes alone, whatever their names and order."""
    return hashlib.sha256("\n".join(sorted(f["sha256"] for f in files)).encode()).hexdigest()[:16]


def read_record(store: Store, source: str, delivery: str) -> dict[str, Any] | None:
    """The acceptance of a delivery, or None.

    Raises:
        StoreError: it is damaged; carries url, path.
    """
    path = f"{RAW}/{source}/{delivery}/{RECORD}"
    raw = store.get(path)
    if raw is None:
        return None
    then = "Delete it, and run again while the delivery is still at its source: it is accepted anew."
    record = _json(store, path, raw, then)
    if not isinstance(record, dict) or not set(record) >= FACTS:
        raise _damaged(store, path, "it lacks " + ", ".join(sorted(FACTS - set(record))), then)
    return record


def accept(store: Store, record: Mapping[str, Any]) -> None:
    """Write the acceptance of a delivery whose copies are there; that of the same bytes by another run is fine."""
    try:
        store.create(f"{RAW}/{record['source']}/{record['delivery']}/{RECORD}", canonical(record))
    except Exists:
        return


def read_copies(store: Store, record: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], bytes]]:
    """The files of an accepted delivery, from the lake, each with its facts and held to its digest.

    Raises:
        StoreError: a copy is missing or altered; carries url, path, expected, found.
    """
    contents = []
    for file in record["files"]:
        path = f"{RAW}/{record['source']}/{record['delivery']}/{file['name']}"
        data = store.read(path)
        found = hashlib.sha256(data).hexdigest()
        if found != file["sha256"]:
            raise StoreError(
                f"{store.url}: {path}, a copy of the bill {file['origin']}, was altered: expected sha256 "
                f"{file['sha256']} ({file['bytes']:,} bytes), found {found} ({len(data):,} bytes). Put the delivered "
                f"file back in its place; or, while it is still at its source, delete the copy and {RECORD} beside it, "
                "and run again.",
                url=store.url,
                path=path,
                expected=file["sha256"],
                found=found,
            )
        contents.append((file, data))
    return contents


# --- listings --------------------------------------------------------------------------------------------------------


def listed_sources(store: Store) -> list[str]:
    """Every source of which the lake has a listing, sorted, whether the settings name it or not."""
    return [source for source in store.folders(RAW) if store.list(f"{RAW}/{source}/{PRESENT}")]


def newest_listing(store: Store, source: str) -> tuple[int, list[Listed]]:
    """Number and content of the newest listing of a source; 0 and nothing before the first.

    Raises:
        StoreError: it is damaged; carries url, path.
    """
    folder = f"{RAW}/{source}/{PRESENT}"
    stems = [entry.path.rpartition("/")[2].removesuffix(".json") for entry in store.list(folder)]
    n = max((int(stem) for stem in stems if stem.isascii() and stem.isdigit()), default=0)
    return (n, read_listing(store, source, n)) if n else (0, [])


def read_listing(store: Store, source: str, n: int) -> list[Listed]:
    """Content of a listing of a source; of one that was deleted nothing.

    Raises:
        StoreError: it is damaged; carries url, path.
    """
    path = f"{RAW}/{source}/{PRESENT}/{n}.json"
    raw = store.get(path)
    if raw is None:
        return []
    then = "Delete it, and run again: the source is listed anew."
    body = _json(store, path, raw, then)
    try:
        return [_listed(one) for one in body["deliveries"]]
    except (KeyError, TypeError) as error:
        raise _damaged(store, path, f"{type(error).__name__}: {error}", then) from error


def _listed(facts: Mapping[str, Any]) -> Listed:
    files = tuple((path, tag) for path, tag in facts["files"])
    return Listed(**{**facts, "periods": tuple(facts["periods"]), "files": files})


def record_listing(store: Store, source: str, n: int, former: Sequence[Listed], now: Sequence[Listed]) -> bool:
    """Write what stands at a source as the listing after `n`, unless it equals that one.

    Returns:
        False when another run has listed the source since: look at it again.
    """
    if list(former) == list(now):
        return True
    try:
        store.create(f"{RAW}/{source}/{PRESENT}/{n + 1}.json", canonical({"deliveries": [asdict(one) for one in now]}))
    except Exists:
        return False
    return True


def _json(store: Store, path: str, raw: bytes, then: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise _damaged(store, path, f"{len(raw):,} bytes that are no JSON ({error})", then) from error


def _damaged(store: Store, path: str, found: str, then: str) -> StoreError:
    return StoreError(
        f"{store.url}: {path} is damaged: expected what ingestion wrote, found {found}. {then}",
        url=store.url,
        path=path,
        found=found,
    )


# --- from bytes to stored charges ------------------------------------------------------------------------------------


def parse(
    source: str,
    period: str | None,
    contents: Sequence[tuple[Mapping[str, Any], bytes]],
    rules: Sequence[ties.Rule],
    instances: Sequence[GpuInstance],
) -> Parsed:
    """Stored charges of all files of a delivery, tied, with occurrence numbers over the whole of it.

    Args:
        source: name of the bill source.
        period: billing period that all rows must be of, YYYY-MM; None for any.
        contents: facts and bytes of each file.
        rules: tie rules in order.
        instances: instance types with GPUs.

    Raises:
        DeliveryError: something in it cannot be used; carries source, file, row, column, expected, found.
    """
    tables, facts = [], []
    for file, data in contents:
        place = Place(source, file["origin"])
        batches = [focus.normalise(table, at) for at, table in read_tables(data, place)]
        if not batches:  # a provider may cut a small export into more files than it has rows
            facts.append({"name": file["name"], "rows": 0, "currencies": {}})
            continue
        rows = pa.concat_tables([b.rows for b in batches]).combine_chunks()
        tied = ties.tie(rows, rules, instances)
        for name in tied.column_names:
            rows = rows.append_column(name, tied[name])
        _check_scope(rows, period, place)
        _check_time(rows, place)
        tables.append(rows)
        facts.append({"name": file["name"], "rows": len(rows), "currencies": _currencies(rows, batches)})
    if not tables:
        raise Place(source, ", ".join(f["origin"] for f, _ in contents)).refuse(
            None, "rows", "a header and no row", "An empty export is not a bill of zero: check the provider's export."
        )
    charges = pa.concat_tables(tables)
    _check_sums(charges, Place(source, ", ".join(f["origin"] for f, _ in contents)))
    return Parsed(charges.append_column("x_Occurrence", focus.occurrences(charges)), facts)


def periods_of(charges: pa.Table) -> list[str]:
    """Billing periods of stored charges: their starts as text, sorted."""
    starts = pc.unique(charges["BillingPeriodStart"]).cast(pa.int64()).to_pylist()
    return [snapshots.instant_text(ns) for ns in sorted(starts)]


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


def check_promises(source: str, candidate: Candidate, parsed: Parsed, files: Sequence[Mapping[str, Any]]) -> None:
    """Hold a delivery to what its layout says of it: the number of its rows, and that billing periods are whole in it.

    Args:
        source: name of the bill source.
        candidate: the delivery as its layout describes it.
        parsed: its charges, and the facts of its files.
        files: `file_facts` of its files, in the same order.

    Raises:
        DeliveryError: it has more or fewer rows, begins after a billing period of its rows did, or is a folder in which one
            file stands twice.
    """
    place, charges = Place(source, candidate.name), parsed.charges
    known: dict[str, str] = {}
    for file, facts in zip(files, parsed.files, strict=True) if not candidate.announced else ():
        other = known.setdefault(file["sha256"], file["origin"])
        if other != file["origin"] and facts["rows"]:
            found = f"{other} and {file['origin']} with the same {facts['rows']:,} rows, byte for byte"
            then = "Every file of the folder counts: take the copy away."
            raise place.refuse(None, "each file once", found, then)
    if candidate.rows is not None and candidate.rows != len(charges):
        expected, found = f"{candidate.rows:,} rows, as its manifest says", f"{len(charges):,}"
        raise place.refuse(None, expected, found, "Run the export again.")
    if candidate.begins is not None:
        began = pc.min(charges["BillingPeriodStart"]).cast(pa.timestamp("s", "UTC")).as_py().date()
        if began < candidate.begins:
            expected = f"billing periods from {candidate.begins} on, the first day that it covers"
            then = "Each run replaces the one before: export the whole billing period."
            raise place.refuse("BillingPeriodStart", expected, f"one that began on {began}", then)


TIME_ADVICE = "Check the unit, and export machines by the hour or the day."


def _check_time(rows: pa.Table, place: Place) -> None:
    """Time of a machine is multiplied by its devices; beyond the bound that would not fit 64 bits."""
    found = snapshots.too_long(rows)
    if found is not None:
        column, row = found
        unit = rows[column.replace("Quantity", "Unit")][row].as_py()
        amount = f"{snapshots.plain(rows[column][row].as_py())} {unit}"
        expected = f"at most {MOST_TIME_NS // HOUR_NS:,} hours of one machine in a row"
        raise place.refuse(column, expected, amount, TIME_ADVICE, row=row)


def _check_sums(charges: pa.Table, place: Place) -> None:
    for column in focus.AMOUNTS:
        if snapshots.overflows(charges[column]):
            raise place.refuse(column, "sums of at most 38 digits", "larger amounts", "Check the export's unit.")
    found = snapshots.too_long_together(charges)
    if found is not None:
        machine, day = found
        expected = f"at most {MOST_TIME_NS // HOUR_NS:,} hours of one machine, meter and day"
        raise place.refuse("ConsumedQuantity", expected, f"more for {machine} on {day}", TIME_ADVICE)


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
