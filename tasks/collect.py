"""Bring telemetry shards into the lake, and say for each shard of a day whether it counts.

`admit` copies a drop folder into `raw/`; `collect_day` checks the shards of one day there. A bucket (hour, and sha256
of the node modulo the lake's bucket count) is one step, so a late shard has one bucket checked again, and the day's
verdict is one step over all of them; there the hosts of an hour are held against one another, by what each bucket says
that its shards cover. Nothing is dropped: each object of the day is accepted, a duplicate, or
quarantined with its reason and its share of the day. Rules are in `tasks.core.shards`; knows no bill, and a clock only
to tell today.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from functools import cached_property, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeVar

from schemas.telemetry import OP_WINDOWS, STEP_WINDOWS, TELEMETRY
from seedance.canonical import canonical
from seedance.errors import ShardError, StoreError
from seedance.shard import ShardName, content_sha16, parse_name
from seedance.store import Entry, Store
from tasks.core.shards import HELD, Examined, bucket_of, clashes, compare_ops, examine, name_problem, settle, spans
from tasks.errors import LawError, UsageError
from tasks.io.engine import map_buckets
from tasks.io.lake import Lake, ShardRef, Step
from tasks.settings import Settings
from tasks.step import run_step, stage_key

STAGE = "collect"
BUCKET_STAGE = "collect_bucket"
MODULES = ("tasks.collect",)
NOT_SHARDS = ("bills", "prices")
"""Folders of `raw/` that hold no telemetry."""
DAMAGED = ".damaged-"
"""Stands in the name of a shard whose bytes were not those that its name promised when it was admitted."""
NAME = "<table>/date=YYYY-MM-DD/hour=HH/<producer>-<seq>-<sha16>.parquet"
READS_AT_ONCE = 16

Read = TypeVar("Read")


def admit(lake: Lake, settings: Settings) -> list[str]:
    """Copy the shards of the drop folder into `raw/`; those that are there already are not read again.

    A file whose name is not a shard's, or that cannot be read or listed, stays where it is. One whose bytes are not those
    that its name promises (cut, changed, or still being uploaded) is copied under a name that says so, for the day's
    verdict to count it, and leaves the shard's own name free for the whole one. All get a record in `quarantine/`.

    Returns:
        Paths in the lake that are new, sorted; none when no drop folder is set.

    Raises:
        UsageError: the folder that `telemetry` names does not exist, or lies in the lake. Carries setting, url.
        StoreError: the storage refused.
    """
    drop = _drop_folder(lake, settings)
    if drop is None:
        return []
    odd: dict[str, str] = {}
    entries = drop.list("", odd=odd.__setitem__)
    named, foreign = _sorted_out(entries)
    total = sum(entry.bytes for entry in entries)
    for path, why in odd.items():
        _quarantine_drop(lake, drop, Entry(path, 0, ""), _unlisted(f"{drop.url}/{_text(path)}", why), total)
    for entry in foreign:
        reason = f"not the name of a shard: expected {NAME}, found {_text(entry.path)}. Move it elsewhere."
        _quarantine_drop(lake, drop, entry, f"{drop.url}: {reason}", total)
    known_tables = [(name, entry) for name, entry in named if name.table in TELEMETRY]
    for name, entry in named:
        if name.table not in TELEMETRY:
            _quarantine_drop(lake, drop, entry, str(name_problem(name, b"")), total)
    days = {name.day.isoformat() for name, _ in known_tables}
    there = {ref.path for ref in lake.shards(days)} if days else set()
    fresh = [(name, entry) for name, entry in known_tables if f"raw/{name.path}" not in there]
    added = set()
    for (name, entry), data in zip(fresh, _read(drop, [entry.path for _, entry in fresh], _or_error), strict=True):
        path = f"raw/{name.path}"
        if isinstance(data, StoreError):
            _quarantine_drop(
                lake, drop, entry, f"{str(data).rstrip('.')}. Make it readable, or upload the shard again.", total
            )
            continue
        problem = name_problem(name, data)
        if problem is not None:
            _quarantine_drop(lake, drop, entry, problem, total)
            path = f"{path.removesuffix('.parquet')}{DAMAGED}{content_sha16(data)}.parquet"
        if path not in added and not lake.store.exists(path):
            lake.store.put(path, data)
            added.add(path)
    return sorted(added)


def collect_day(lake: Lake, settings: Settings, day: str, *, last_day: date | None = None) -> tuple[Step, bool]:
    """The verdict over every shard of one UTC day in `raw/`.

    Args:
        lake: where the shards are.
        settings: scheduler and workers.
        day: YYYY-MM-DD.
        last_day: latest UTC day that can have been observed; today when left out. Shards of a later day are
            quarantined.

    Returns:
        The step, without handles, and True when nothing had to be checked. Facts: `accepted` [path], `quarantined`
        [{path, table, reason, rows (null when unknown), bytes, share_ppm (of the day's rows; of its bytes when rows is
        null)}], `duplicates` [{path, same_as}], each sorted by path; `shards_in`, `bytes_in`, `rows_in`,
        `rows_accepted`, `rows_quarantined`, `rows_duplicate`; `mismatch`, the strata whose op rows do not add up to
        their step rows, and `mismatches`, the nodes and hours that have some.

    Raises:
        UsageError: `day` is not a date; carries found, expected.
        LawError: a shard has no verdict, or two.
    """
    when = _date(day)
    latest = min(last_day or datetime.now(UTC).date(), when)
    refs, foreign, odd = _listing(lake, day)
    buckets: dict[tuple[int, int], list[ShardRef]] = {}
    for ref in refs:
        buckets.setdefault((ref.name.hour, bucket_of(ref.name.producer, lake.buckets)), []).append(ref)
    key = stage_key(
        STAGE,
        modules=MODULES,
        schemas=TELEMETRY.values(),
        settings={"day": day, "last_day": latest.isoformat(), "buckets": lake.buckets},
        inputs=_inputs([*refs, *foreign]),
    )

    def compute() -> Step:
        work = [_Bucket(lake, hour, number, tuple(buckets[hour, number]), latest) for hour, number in sorted(buckets)]
        facts = _verdict(day, refs, foreign, odd, _check_buckets(work, settings))
        _quarantine_day(lake, facts["quarantined"])
        return Step({}, facts)

    return run_step(lake, STAGE, key, compute)


@dataclass(frozen=True)
class _Bucket:
    """Shards of one hour whose nodes share a number."""

    lake: Lake
    hour: int
    number: int
    refs: tuple[ShardRef, ...]
    last_day: date

    @cached_property
    def key(self) -> str:
        place = {"hour": self.hour, "bucket": self.number, "buckets": self.lake.buckets}
        return stage_key(
            BUCKET_STAGE,
            modules=MODULES,
            schemas=TELEMETRY.values(),
            settings={**place, "last_day": self.last_day.isoformat()},
            inputs=_inputs(self.refs),
        )


def _check_buckets(work: Sequence[_Bucket], settings: Settings) -> list[Mapping[str, Any]]:
    """Facts of each bucket; those that were checked before are read, the others go to the engine."""
    stored = [bucket.lake.step(BUCKET_STAGE, bucket.key) for bucket in work]
    missing = [bucket for bucket, step in zip(work, stored, strict=True) if step is None]
    # Processes take longer to start than one bucket takes.
    scheduler = "threads" if settings.scheduler == "local" and len(missing) == 1 else settings.scheduler
    checked = iter(map_buckets(_check_bucket, missing, scheduler=scheduler, workers=settings.workers))
    return [next(checked) if step is None else step.facts for step in stored]


def _check_bucket(bucket: _Bucket) -> Mapping[str, Any]:
    """Facts of one bucket: `shards` [{path, rows, bytes, verdict, reason or same_as or spans}] and `mismatches`."""

    def compute() -> Step:
        ordered = sorted(bucket.refs, key=lambda ref: (ref.name.producer, ref.path))
        pairs = zip(ordered, _read(bucket.lake.store, [ref.path for ref in ordered], Store.read), strict=True)
        shards, mismatches = [], []
        for _, node in groupby(pairs, key=lambda pair: pair[0].name.producer):  # memory is that of one node and hour
            examined = [examine(ref.path, ref.name, data, last_day=bucket.last_day) for ref, data in node]
            judged, mismatch = _judge(examined)
            shards += judged
            mismatches += mismatch
        return Step({}, {"shards": sorted(shards, key=lambda shard: str(shard["path"])), "mismatches": mismatches})

    return run_step(bucket.lake, BUCKET_STAGE, bucket.key, compute)[0].facts


def _judge(examined: Sequence[Examined]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Verdicts over the shards of one node and hour, and where its op rows do not add up to its step rows."""
    tables: dict[str, list[Examined]] = {}
    for shard in examined:
        tables.setdefault(shard.name.table, []).append(shard)
    verdicts: list[dict[str, Any]] = []
    kept: dict[str, list[Examined]] = {}
    broken = set()
    for table, shards in tables.items():
        kept[table], refused, twins = settle(s for s in shards if s.reason is None)
        for shard in shards:
            facts: dict[str, Any] = {"path": shard.path, "rows": shard.rows, "bytes": shard.bytes}
            reason = shard.reason or refused.get(shard.path)
            if reason is not None:
                facts |= {"verdict": "quarantined", "reason": reason}
                broken.add(table)
            elif shard.path in twins:
                facts |= {"verdict": "duplicate", "same_as": twins[shard.path]}
            else:
                facts["verdict"] = "accepted"
                if table in HELD:
                    facts["spans"] = spans(shard)
            verdicts.append(facts)
    pair = (STEP_WINDOWS.name, OP_WINDOWS.name)
    if not broken.isdisjoint(pair) or not all(kept.get(table) for table in pair):
        return verdicts, []
    totals = compare_ops(*([s.table for s in kept[table]] for table in pair))
    where = {"node": examined[0].name.producer, "hour": examined[0].name.hour}
    return verdicts, [where | asdict(totals)] if totals.mismatched else []


def _verdict(
    day: str,
    refs: Sequence[ShardRef],
    foreign: Sequence[Entry],
    odd: Mapping[str, str],
    parts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    shards, clashing = _without_clashes([shard for part in parts for shard in part["shards"]])
    accepted = {shard["path"] for shard in shards if shard["verdict"] == "accepted"}
    shards += [_foreign_facts(entry, odd, accepted) for entry in foreign]
    shards.sort(key=lambda s: str(s["path"]))
    rows = {"accepted": 0, "quarantined": 0, "duplicate": 0}
    for shard in shards:
        rows[shard["verdict"]] += shard["rows"] or 0
    rows_in, bytes_in = sum(rows.values()), sum(shard["bytes"] for shard in shards)
    mismatches = [m for part in parts for m in part["mismatches"] if (m["hour"], m["node"]) not in clashing]
    mismatches.sort(key=lambda m: (m["hour"], m["node"]))
    _assert_whole(day, [*refs, *foreign], shards)
    return {
        "accepted": [s["path"] for s in shards if s["verdict"] == "accepted"],
        "quarantined": [
            {
                "path": s["path"],
                "table": s["path"].split("/")[1],
                "reason": s["reason"],
                "rows": s["rows"],
                "bytes": s["bytes"],
                "share_ppm": _ppm(s["bytes"], bytes_in) if s["rows"] is None else _ppm(s["rows"], rows_in),
            }
            for s in shards
            if s["verdict"] == "quarantined"
        ],
        "duplicates": [{"path": s["path"], "same_as": s["same_as"]} for s in shards if s["verdict"] == "duplicate"],
        "shards_in": len(shards),
        "bytes_in": bytes_in,
        "rows_in": rows_in,
        "rows_accepted": rows["accepted"],
        "rows_quarantined": rows["quarantined"],
        "rows_duplicate": rows["duplicate"],
        "mismatch": sum(m["mismatched"] for m in mismatches),
        "mismatches": mismatches,
    }


def _without_clashes(
    shards: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], set[tuple[int, str]]]:
    """The verdicts after hosts that report one device at one time were told apart; hour and host of those that lost."""
    refused = clashes({s["path"]: s.get("spans", ()) for s in shards if s["verdict"] == "accepted"})
    judged: list[Mapping[str, Any]] = []
    for shard in shards:
        reason = refused.get(shard.get("same_as", shard["path"]))
        if reason is not None:
            shard = {n: shard[n] for n in ("path", "rows", "bytes")} | {"verdict": "quarantined", "reason": reason}
        judged.append(shard)
    names = [parse_name(path) for path in refused]
    return judged, {(name.hour, name.producer) for name in names}


def _foreign_facts(entry: Entry, odd: Mapping[str, str], accepted: Collection[str]) -> dict[str, Any]:
    path = _text(entry.path)
    facts: dict[str, Any] = {"path": path, "rows": None, "bytes": entry.bytes, "verdict": "quarantined"}
    if entry.path in odd:
        return facts | {"reason": _unlisted(path, odd[entry.path])}
    promised, damaged, found = path.removesuffix(".parquet").rpartition(DAMAGED)
    whole = f"{promised}.parquet"
    if not damaged:
        return facts | {"reason": f"{path}: not the name of a shard: expected {NAME}. Move it elsewhere."}
    if whole in accepted:  # it was uploaded again, whole, and counts under its own name
        return facts | {"verdict": "duplicate", "same_as": whole}
    reason = (
        f"{path}: expected the sha256 that the name began with, found {found}… over {entry.bytes:,} bytes when it was "
        "admitted. The object was cut, changed or renamed. Upload the shard again from the host."
    )
    return facts | {"reason": reason}


def _assert_whole(day: str, listed: Sequence[ShardRef | Entry], judged: Sequence[Mapping[str, Any]]) -> None:
    expected = sorted(_text(item.path) for item in listed)
    found = sorted(str(shard["path"]) for shard in judged)
    if expected != found:
        odd = sorted({*expected} ^ {*found}) or [p for p, q in pairwise(found) if p == q]
        raise LawError(
            f"collect {day}: {len(expected):,} shards in, {len(found):,} verdicts; first without exactly one: "
            f"{odd[:1]}. Nothing may be lost (law 5). Nothing was stored; report this with the listing of raw/.",
            law=5,
            where=f"collect {day}",
            expected=len(expected),
            found=len(found),
        )


def _quarantine_day(lake: Lake, quarantined: Sequence[Mapping[str, Any]]) -> None:
    """One record for each refused content; further paths of the same content stand in it as `also`."""
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for item in quarantined:
        try:
            name = parse_name(item["path"])
        except ShardError:
            _put_record(lake, item["path"], item)
            continue
        first = records.setdefault((name.table, name.sha16), {**item})
        if first["path"] != item["path"]:
            first["also"] = [*first.get("also", []), item["path"]]
    for record in records.values():
        lake.quarantine(record["path"], record)


def _quarantine_drop(lake: Lake, drop: Store, entry: Entry, reason: str, total: int) -> None:
    """A record about a file of a drop folder; its share is that of the folder's bytes."""
    path = f"{drop.url}/{_text(entry.path)}"
    share_ppm = _ppm(entry.bytes, total)
    _put_record(lake, path, {"path": path, "reason": reason, "bytes": entry.bytes, "share_ppm": share_ppm})


def _put_record(lake: Lake, path: str, record: Mapping[str, Any]) -> None:
    at = f"quarantine/foreign/{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"
    data = canonical(record)
    if lake.store.get(at) != data:
        lake.store.replace(at, data)


def _drop_folder(lake: Lake, settings: Settings) -> Store | None:
    if settings.telemetry is None:
        return None
    drop = Store(settings.telemetry)
    if drop.url == f"{lake.store.url}/raw":
        return None
    if drop.url == lake.store.url or drop.url.startswith(f"{lake.store.url}/"):
        raise UsageError(
            f"setting telemetry: {drop.url} lies in the lake {lake.store.url}. Expected a folder outside it, or the "
            "lake's own raw/. Name the folder that hosts upload to, or leave the setting out.",
            setting="telemetry",
            url=drop.url,
            found=drop.url,
            expected="a folder outside the lake",
        )
    # An object store has no empty folders: there, nothing below the URL and a wrong URL look the same.
    if not (Path(drop.url).is_dir() if drop.is_local else drop.list("")):
        raise UsageError(
            f"setting telemetry: no folder {drop.url}. Expected the folder that hosts upload shards to. Correct the "
            "setting, make the folder, or leave the setting out to read the lake's own raw/.",
            setting="telemetry",
            url=drop.url,
            found="nothing",
            expected="a folder",
        )
    return drop


def _listing(lake: Lake, day: str) -> tuple[list[ShardRef], list[Entry], dict[str, str]]:
    """What `raw/` holds for one day: shards by name, what is none, each sorted by path; why some of the latter is none."""
    odd: dict[str, str] = {}
    tables = [name for name in lake.store.folders("raw") if name not in NOT_SHARDS]
    entries = [entry for table in tables for entry in lake.store.list(f"raw/{table}/date={day}", odd=odd.__setitem__)]
    named, foreign = _sorted_out(entries)
    wrong = [entry for name, entry in named if entry.path != f"raw/{name.path}"]
    refs = [ShardRef(name, entry.path, entry.bytes) for name, entry in named if entry.path == f"raw/{name.path}"]
    unlisted = [Entry(path, 0, "") for path in odd]
    return sorted(refs, key=lambda ref: ref.path), sorted([*foreign, *wrong, *unlisted]), odd


def _sorted_out(entries: Sequence[Entry]) -> tuple[list[tuple[ShardName, Entry]], list[Entry]]:
    named, foreign = [], []
    for entry in entries:
        try:
            name = parse_name(entry.path)
        except ShardError:
            foreign.append(entry)
            continue
        if entry.path.isascii():
            named.append((name, entry))
        else:  # hosts write ASCII names only, and some others cannot stand in a record
            foreign.append(entry)
    return named, foreign


def _read(store: Store, paths: Sequence[str], read: Callable[[Store, str], Read]) -> Iterator[Read]:
    """The objects' bytes, in order; of a remote store a few are on their way at a time, and no more are held."""
    if store.is_local:
        yield from (read(store, path) for path in paths)
        return
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for start in range(0, len(paths), READS_AT_ONCE):
            yield from pool.map(partial(read, store), paths[start : start + READS_AT_ONCE])


def _or_error(store: Store, path: str) -> bytes | StoreError:
    try:
        return store.read(path)
    except StoreError as error:
        return error


def _unlisted(path: str, why: str) -> str:
    return f"{path}: expected a file or folder that can be read, found none: {why}. Repair or remove it."


def _inputs(items: Sequence[ShardRef | Entry]) -> list[str]:
    # The path holds the sha256; the size tells when a damaged object was replaced.
    return [f"{_text(item.path)}:{item.bytes}" for item in items]


def _date(day: str) -> date:
    try:
        when = date.fromisoformat(day)
    except ValueError:
        when = None
    if when is None or when.isoformat() != day:
        raise UsageError(f"collect: {day!r} is not a day. Expected YYYY-MM-DD.", found=day, expected="YYYY-MM-DD")
    return when


def _ppm(part: int, whole: int) -> int:
    return part * 1_000_000 // whole if whole else 0


def _text(path: str) -> str:
    return path.encode(errors="replace").decode()
