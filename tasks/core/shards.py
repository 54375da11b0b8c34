"""Turn the bytes of telemetry shards into verdicts: accepted, a duplicate, or quarantined with a reason.

`examine` looks at one shard alone, `settle` at the shards of one node, hour and table together, `compare_ops` at the
step and op rows of one node and hour. A reason is the first thing that failed: what, where, expected and found with
units, and what to do next. Rules about rows are in `tasks.core.shard_rows`. Knows no lake, no clock and no other day.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.telemetry import DEVICE_SAMPLES, STEP_WINDOWS, TELEMETRY
from seedance.errors import SchemaError, ShardError
from seedance.schema import Table
from seedance.shard import Footer, ShardName, read_footer, read_shard
from tasks.core.shard_rows import HOUR_NS, RANK, Rows, row_problem, union_problem

STRATUM = (*RANK, "phase", "batch_size")
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
    """

    path: str
    name: ShardName
    bytes: int
    rows: int | None
    reason: str | None
    table: pa.Table | None


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
    if reason is None:
        spec = TELEMETRY[name.table]
        try:
            footer, table = read_shard(data, spec, where=_where(name))
            reason = check_shard(footer, table, spec, name, last_day=last_day)
        except (ShardError, SchemaError, *UNREADABLE) as error:
            reason = _unreadable(data, spec, name, error)
    rows = _parquet_rows(data) if table is None else table.num_rows
    if reason is not None:  # text of a strange footer may not be encodable, and the record must be
        reason, table = reason.encode(errors="replace").decode(), None
    return Examined(path, name, len(data), rows, reason, table)


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
    if spec.name == DEVICE_SAMPLES.name and footer.period_ns <= 0:
        return f"{where}: expected a sampling period above 0 ns, found {footer.period_ns} ns. Write the nominal period."
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


def compare_ops(steps: Sequence[pa.Table], ops: Sequence[pa.Table]) -> OpTotals:
    """Whether exclusive time of op rows adds up to sampled active time of step rows, per rank, phase and batch size.

    Only ranks that wrote op rows are looked at: of a large job, eight replicas do (telemetry.md section 1).
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
    midnight = datetime(name.day.year, name.day.month, name.day.day, tzinfo=UTC)
    start_ns = int(midnight.timestamp()) * 1_000_000_000 + name.hour * HOUR_NS
    return Rows(table, spec, node=name.producer, start_ns=start_ns, where=_where(name))


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
