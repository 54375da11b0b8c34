"""Turn the bytes of telemetry shards into verdicts: accepted, a duplicate, or quarantined with a reason.

`examine` looks at one shard alone, `settle` at the shards of one node, hour and table together, `compare_ops` at the
step and op rows of one node and hour, `clashes` at what the hosts of an hour say about one device. A reason is the first
thing that failed: what, where, expected and found with units, and what to do next. Rules about rows are in
`tasks.core.shard_rows`. Knows no lake, no clock and no other day.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.telemetry import DEVICE_SAMPLES, OP_WINDOWS, PROCESS_SAMPLES, STEP_WINDOWS, TELEMETRY
from seedance.errors import SchemaError, ShardError
from seedance.schema import Table
from seedance.shard import Footer, ShardName, parse_name, read_footer, read_shard
from tasks.core.shard_rows import HOUR_NS, RANK, Rows, iso, row_problem, union_problem

STRATUM = (*RANK, "phase", "batch_size")
DEVICE = ("gpu_uuid", "mig_uuid")
HELD = {DEVICE_SAMPLES.name: DEVICE, STEP_WINDOWS.name: RANK}
"""Tables that say what time of a device was whose, by what tells their owners apart."""
FOLLOWS = {PROCESS_SAMPLES.name: DEVICE_SAMPLES.name, OP_WINDOWS.name: STEP_WINDOWS.name}
"""Tables whose rows mean nothing without those of another of the same host and hour."""
CAP_PERIODS = 3
"""Periods that a reading covers at most (infra/rules/telemetry.md 4.4)."""
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError)
"""What reading damaged Parquet raises, as found by damaging it."""


@dataclass(frozen=True)
class Examined:
    """One shard after it was looked at alone.

    Args:
        path: path in the lake.
        name: what the path says.
        bytes: size of the object.
        rows: rows that the Parquet file holds; None when its footer cannot be read.
        reason: why it is quarantined; None when nothing is wrong with it.
        table: the rows; None when it is quarantined.
        period_ns: nominal sampling period that its footer names, ns; 0 when it is quarantined.
    """

    path: str
    name: ShardName
    bytes: int
    rows: int | None
    reason: str | None
    table: pa.Table | None
    period_ns: int = 0


@dataclass(frozen=True)
class OpTotals:
    """Sampled active time of step rows against exclusive time of op rows, over one node and hour.

    Args:
        strata: job, attempt, rank, device, phase and batch size that were compared.
        mismatched: how many of them differ.
        sampled_active_ns: sum over the step rows, ns.
        exclusive_ns: sum over the op rows, ns.
    """

    strata: int
    mismatched: int
    sampled_active_ns: int
    exclusive_ns: int


def bucket_of(node: str, buckets: int) -> int:
    """Bucket of a node in each hour: sha256 of its name, modulo the lake's bucket count."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest(), "big") % buckets


def examine(path: str, name: ShardName, data: bytes, *, last_day: date) -> Examined:
    """What one shard holds, or why it cannot be used.

    Args:
        path: path in the lake, for the record.
        name: what the path says.
        data: the bytes of the object.
        last_day: latest UTC day that can have been observed.
    """
    reason = name_problem(name, data) or _calendar_problem(name, last_day)
    table: pa.Table | None = None
    period_ns = 0
    if reason is None:
        spec = TELEMETRY[name.table]
        try:
            footer, table = read_shard(data, spec, where=_where(name))
            period_ns = footer.period_ns
            reason = check_shard(footer, table, spec, name, last_day=last_day)
        except (ShardError, SchemaError, *UNREADABLE) as error:
            reason = _unreadable(data, spec, name, error)
    rows = _parquet_rows(data) if table is None else table.num_rows
    if reason is not None:  # text of a strange footer may not be encodable, and the record must be
        reason, table, period_ns = reason.encode(errors="replace").decode(), None, 0
    return Examined(path, name, len(data), rows, reason, table, period_ns)


def name_problem(name: ShardName, data: bytes) -> str | None:
    """Why bytes cannot be the shard that a name promises, or None."""
    if name.table not in TELEMETRY:
        return f"{_where(name)}: unknown table. Expected one of {', '.join(sorted(TELEMETRY))}. Move it elsewhere."
    sha16 = hashlib.sha256(data).hexdigest()[:16]
    if sha16 == name.sha16:
        return None
    return (
        f"{_where(name)}: expected sha256 {name.sha16}… as the name says, found {sha16}… over {len(data):,} bytes. The "
        "object was cut, changed or renamed. Upload the shard again from the host."
    )


def check_shard(footer: Footer, table: pa.Table, spec: Table, name: ShardName, *, last_day: date) -> str | None:
    """Why a shard that could be read is not to be used, or None.

    Args:
        footer: what the producer says about the shard.
        table: the rows, as `conform` leaves them.
        spec: declaration of the table.
        name: what the file name says.
        last_day: latest UTC day that can have been observed.
    """
    return check_footer(footer, spec, name, last_day=last_day) or check_rows(footer, table, spec, name)


def check_footer(footer: Footer, spec: Table, name: ShardName, *, last_day: date) -> str | None:
    """Why the footer contradicts the name, the declaration or the calendar, or None."""
    where = _where(name)
    if (problem := _calendar_problem(name, last_day)) is not None:
        return problem
    if footer.schema_version != spec.version:
        return (
            f"{where}: expected schema version {spec.version}, found {footer.schema_version}. Bring the agent of the "
            "host and this pipeline to the same release."
        )
    told = (
        ("table", footer.table, name.table),
        ("hour", footer.hour, f"{name.day.isoformat()}T{name.hour:02}"),
        ("producer", footer.producer, name.producer),
        ("node", footer.node, name.producer),
    )
    for fact, found, expected in told:
        if found != expected:
            return (
                f"{where}: expected {fact} {expected} as the name says, found {found} in the footer. Store the shard "
                "under its own name."
            )
    # Reduce lets a reading cover three periods: a period that nobody samples at would cover any time, or leave int64.
    is_sampled = spec.name in (DEVICE_SAMPLES.name, PROCESS_SAMPLES.name)
    if footer.period_ns > HOUR_NS or footer.period_ns < (1 if is_sampled else 0):
        least = "above 0 ns" if is_sampled else "of 0 ns or more"
        return (
            f"{where}: expected a sampling period {least} and of at most {HOUR_NS:,} ns, found {footer.period_ns:,} ns. "
            "Write the nominal period."
        )
    for fact in ("clock_offset_ns", "first_ns", "last_ns"):
        if not -(2**63) <= getattr(footer, fact) < 2**63:
            return (
                f"{where}: expected {fact} of 64 bits, found {getattr(footer, fact):,} ns in the footer. Write the shard "
                "again."
            )
    return None


def check_rows(footer: Footer, table: pa.Table, spec: Table, name: ShardName) -> str | None:
    """Why the rows contradict the footer, the hour or one another, or None."""
    if footer.rows != table.num_rows:
        return (
            f"{_where(name)}: expected {footer.rows:,} rows as the footer says, found {table.num_rows:,}. Write the "
            "shard again."
        )
    return row_problem(_rows(table, spec, name))


def settle(shards: Iterable[Examined]) -> tuple[list[Examined], dict[str, str], dict[str, str]]:
    """Which shards of one node, hour and table count, of those that are good alone.

    The same bytes count once, under the first path. Of the others, those with more rows go first, then the lower
    sequence number, then the lower sha256; one that repeats a sequence number, a row or a time of those before it is
    refused.

    Returns:
        The shards that count, by path; the reason by path of those refused; the path of the first by path of those that
        repeat its bytes.
    """
    first: dict[str, Examined] = {}
    twins: dict[str, str] = {}
    for shard in sorted(shards, key=lambda s: s.path):
        if shard.name.sha16 in first:
            twins[shard.path] = first[shard.name.sha16].path
        else:
            first[shard.name.sha16] = shard
    kept: list[Examined] = []
    refused: dict[str, str] = {}
    for shard in sorted(first.values(), key=lambda s: (-(s.rows or 0), s.name.seq, s.name.sha16)):
        reason = _conflict(shard, kept)
        if reason is None:
            kept.append(shard)
        else:
            refused[shard.path] = reason
    return sorted(kept, key=lambda s: s.path), refused, twins


def spans(shard: Examined) -> list[list[Any]]:
    """When a shard of HELD has rows of each of its owners: their keys, then first and last ns from the hour's start.

    A reading counts for the time that reduce lets it cover; one whose state is not "ok" is none.
    """
    if shard.table is None or shard.name.table not in HELD:
        return []
    rows = _rows(shard.table, TELEMETRY[shard.name.table], shard.name)
    keys = HELD[shard.name.table]
    at, table = rows.at - rows.start_ns, shard.table.select(list(keys))
    if shard.name.table == DEVICE_SAMPLES.name:
        covered = np.minimum(rows.ints("covered_ns"), CAP_PERIODS * shard.period_ns)
        first, last = np.maximum(at - covered, 0), at
    else:
        first, last = at, at + rows.ints("window_ns")
    table = table.append_column("first", pa.array(first)).append_column("last", pa.array(last))
    if shard.name.table == DEVICE_SAMPLES.name:
        table = table.filter(pc.equal(shard.table.column("state"), "ok"))
    held = table.group_by(list(keys), use_threads=False).aggregate([("first", "min"), ("last", "max")])
    found = [[row[n] for n in (*keys, "first_min", "last_max")] for row in held.to_pylist()]
    return sorted(found, key=lambda span: [(value is None, 0 if value is None else value) for value in span])


def clashes(shards: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, str]:
    """Which of the shards that count, each good among those of its host, report time that another host reports too.

    Of two hosts that say they had one device (or one rank on it) at one time, the first by name is believed; the other's
    shard is refused. Two hosts in turn are one host that was renamed, and both count.

    Args:
        shards: `spans` by path of each shard that counts, of one day; empty for tables that are not in HELD.

    Returns:
        The reason by path of those refused.
    """
    taken: dict[tuple[Any, ...], list[tuple[int, int, str]]] = {}
    refused: dict[str, str] = {}
    whole: set[tuple[str, int, str]] = set()
    names = {path: parse_name(path) for path in shards}
    for path in sorted(shards, key=lambda path: (names[path].producer, path)):
        name = names[path]
        mine = [((name.table, name.hour, *keys), first, last) for *keys, first, last in shards[path]]
        for key, first, last in mine:
            for begin, end, host in taken.get(key, []):
                if path not in refused and host != name.producer and first < end and begin < last:
                    refused[path] = _clash(name, key[2:], host, max(first, begin), min(last, end))
        if path not in refused:
            whole.add((name.table, name.hour, name.producer))
            for key, first, last in mine:
                taken.setdefault(key, []).append((first, last, name.producer))
    lost = {(n.table, n.hour, n.producer): refused[path] for path in sorted(refused) for n in [names[path]]}
    for path, name in sorted(names.items()):
        owner = (FOLLOWS.get(name.table, ""), name.hour, name.producer)
        if owner in lost and owner not in whole:
            refused[path] = (
                f"{_where(name)}: goes with {owner[0]} of this host and hour, which is refused: {lost[owner]}"
            )
    return refused


def _clash(name: ShardName, key: Sequence[Any], other: str, first: int, last: int) -> str:
    start = _hour_ns(name)
    words = ", ".join(f"{c} {'null' if v is None else v}" for c, v in zip(HELD[name.table], key, strict=True))
    return (
        f"{_where(name)}: conflict with host {other}: expected the time of a device from one host, found {words} reported "
        f"by {other} and by {name.producer} from {iso(start + first)} to {iso(start + last)}; {other} counts. Look for two "
        "agents under two host names, and stop one."
    )


def compare_ops(steps: Sequence[pa.Table], ops: Sequence[pa.Table]) -> OpTotals:
    """Whether exclusive time of op rows adds up to sampled active time of step rows, per rank, phase and batch size.

    Only ranks that wrote op rows are looked at: of a large job, eight replicas do (infra/rules/telemetry.md 2).
    """
    parts = [_halves(t, "sampled_active_ns", 0) for t in steps] + [_halves(t, "exclusive_ns", 1) for t in ops]
    table = pa.concat_tables(parts or [_halves(STEP_WINDOWS.empty(), "sampled_active_ns", 0)])
    grouped = table.group_by([*STRATUM, "side"], use_threads=False).aggregate([("high", "sum"), ("low", "sum")])
    rows = grouped.to_pylist()
    ranks = {tuple(row[c] for c in RANK) for row in rows if row["side"]}
    totals: dict[tuple[object, ...], list[int]] = {}
    for row in rows:
        if tuple(row[c] for c in RANK) in ranks:
            pair = totals.setdefault(tuple(row[c] for c in STRATUM), [0, 0])
            pair[row["side"]] += (row["high_sum"] << 32) + row["low_sum"]
    return OpTotals(
        strata=len(totals),
        mismatched=sum(1 for sampled, exclusive in totals.values() if sampled != exclusive),
        sampled_active_ns=sum(sampled for sampled, _ in totals.values()),
        exclusive_ns=sum(exclusive for _, exclusive in totals.values()),
    )


def _conflict(shard: Examined, kept: Sequence[Examined]) -> str | None:
    where = _where(shard.name)
    for other in kept:
        if other.name.seq == shard.name.seq:
            return (
                f"{where}: conflict: expected one content for sequence number {shard.name.seq}, found "
                f"{other.name.sha16} with {other.rows:,} rows, which counts, and {shard.name.sha16} with "
                f"{shard.rows:,} rows. Look for two agents on the host."
            )
    if not kept:
        return None
    union = pa.concat_tables([s.table for s in (*kept, shard) if s.table is not None])
    problem = union_problem(_rows(union, TELEMETRY[shard.name.table], shard.name))
    if problem is None:
        return None
    others = ", ".join(f"{s.name.seq}-{s.name.sha16}" for s in sorted(kept, key=lambda s: s.path))
    return f"{where}: conflict with {others} of the same node and hour; together: {problem.removeprefix(where + ': ')}"


def _calendar_problem(name: ShardName, last_day: date) -> str | None:
    if name.day <= last_day:
        return None
    return (
        f"{_where(name)}: expected a day up to {last_day} (UTC), the latest that can have been observed, found "
        f"{name.day}. Set the clock of the host; the shard is tried again when that day has come."
    )


def _unreadable(data: bytes, spec: Table, name: ShardName, error: Exception) -> str:
    """Why a shard could not be read: what its footer says, when that is wrong, tells more than the columns."""
    try:
        problem = check_footer(read_footer(data), spec, name, last_day=name.day)
    except (ShardError, *UNREADABLE):
        problem = None
    if problem is not None:
        return problem
    if isinstance(error, SchemaError):
        return f"{error} The shard is tried again when the reader changes."
    told = error.reason if isinstance(error, ShardError) else f"rows cannot be read: {error}"
    return f"{_where(name)}: {told}. Upload the shard again from the host."


def _parquet_rows(data: bytes) -> int | None:
    try:
        return int(pq.read_metadata(pa.BufferReader(data)).num_rows)
    except UNREADABLE:
        return None


def _rows(table: pa.Table, spec: Table, name: ShardName) -> Rows:
    return Rows(table, spec, node=name.producer, start_ns=_hour_ns(name), where=_where(name))


def _hour_ns(name: ShardName) -> int:
    midnight = datetime(name.day.year, name.day.month, name.day.day, tzinfo=UTC)
    return int(midnight.timestamp()) * 1_000_000_000 + name.hour * HOUR_NS


def _where(name: ShardName) -> str:
    return f"{name.table} {name.day.isoformat()}T{name.hour:02} {name.producer}"


def _halves(table: pa.Table, column: str, side: int) -> pa.Table:
    # Two halves of 32 bits, so that a sum over many rows cannot leave int64.
    values = table.column(column)
    halves = [pc.shift_right(values, 32), pc.bit_wise_and(values, 0xFFFF_FFFF)]
    return pa.table(
        [*(table.column(c) for c in STRATUM), pa.repeat(pa.scalar(side, pa.int8()), table.num_rows), *halves],
        names=[*STRATUM, "side", "high", "low"],
    )
