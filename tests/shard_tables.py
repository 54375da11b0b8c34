"""Small valid rows for each telemetry table, all of one node and hour, to bend in one place per test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seedance.schema import (
    DEVICE_SAMPLES,
    EVENTS,
    JOBS,
    OP_WINDOWS,
    PROCESS_SAMPLES,
    STEP_WINDOWS,
    TELEMETRY,
    Table,
)
from seedance.shard import ShardName, content_sha16, write_shard

DAY = "2026-11-27"
HOUR = f"{DAY}T03"
START = int(datetime(2026, 11, 27, 3, tzinfo=UTC).timestamp()) * 1_000_000_000
SECOND = 1_000_000_000
HOUR_NS = 3600 * SECOND
NODE = "node-a"

_TEXT: dict[str, str] = {
    "cloud": "aws",
    "instance_id": "i-0a",
    "state": "ok",
    "method": "events",
    "pass": "fwd",
    "phase": "train",
    "statement": "beat",
    "kind": "train",
    "source": "kernel",
    "payload": "{}",
    "job_id": "job-1",
}


def row(spec: Table, **values: Any) -> dict[str, Any]:
    """One row: nullable columns null, labels empty, counts of things that must exist 1, all other numbers 0."""
    made: dict[str, Any] = {}
    for column in spec.columns:
        if column.null:
            made[column.name] = None
        elif pa.types.is_map(column.type):
            made[column.name] = []
        elif pa.types.is_string(column.type):
            made[column.name] = _TEXT.get(column.name, column.name)
        elif pa.types.is_timestamp(column.type):
            made[column.name] = START
        else:
            made[column.name] = column.min or 0
    return made | {k: v for k, v in {"node": NODE}.items() if k in spec.names} | values


def table(spec: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The rows as Arrow, in the declared types."""
    return pa.Table.from_pylist([dict(r) for r in rows], schema=spec.arrow)


def samples(n: int = 3, *, uuid: str = "GPU-1", **values: Any) -> list[dict[str, Any]]:
    """Readings of one device, one a second from the first second of the hour, each covering its second."""
    return [
        row(DEVICE_SAMPLES, gpu_uuid=uuid, sampled_at_utc=START + (i + 1) * SECOND, covered_ns=SECOND, **values)
        for i in range(n)
    ]


def processes(n: int = 2) -> list[dict[str, Any]]:
    """Readings of one process, every ten seconds."""
    return [
        row(PROCESS_SAMPLES, sampled_at_utc=START + (i + 1) * 10 * SECOND, covered_ns=10 * SECOND, host_pid=7)
        for i in range(n)
    ]


def steps(n: int = 3, *, first: int = 0, **values: Any) -> list[dict[str, Any]]:
    """Step windows of one rank, ten seconds each: 6 s active, 2 s input stall, 1 s checkpoint, 1 s held idle."""
    made = {
        "window_ns": 10 * SECOND,
        "units": 10,
        "wall_ns": 10 * SECOND,
        "active_ns": 6 * SECOND,
        "input_stall_ns": 2 * SECOND,
        "checkpoint_ns": SECOND,
        "held_idle_ns": SECOND,
        "sampled_units": 1,
        "sampled_active_ns": SECOND,
    }
    return [
        row(STEP_WINDOWS, window_start_utc=START + i * 10 * SECOND, **(made | values)) for i in range(first, first + n)
    ]


def ops(*exclusive_ns: int) -> list[dict[str, Any]]:
    """Op rows of one window of the same rank, one op each."""
    return [
        row(OP_WINDOWS, op_key=i, window_ns=300 * SECOND, calls=10, sampled_calls=1, busy_ns=ns, exclusive_ns=ns)
        for i, ns in enumerate(exclusive_ns)
    ]


def jobs() -> list[dict[str, Any]]:
    """Two statements of one job."""
    return [row(JOBS, stated_at_utc=START + i * SECOND, statement=s) for i, s in enumerate(("started", "beat"))]


def events() -> list[dict[str, Any]]:
    """Two events."""
    return [row(EVENTS, at_utc=START + i * SECOND, event_id=f"e{i}") for i in range(2)]


ROWS = {
    DEVICE_SAMPLES.name: samples(),
    PROCESS_SAMPLES.name: processes(),
    OP_WINDOWS.name: ops(2 * SECOND, SECOND),
    STEP_WINDOWS.name: steps(),
    JOBS.name: jobs(),
    EVENTS.name: events(),
}
"""Good rows by table; step and op rows agree."""


def shard(
    spec: Table, rows: Sequence[Mapping[str, Any]] | pa.Table, *, node: str = NODE, hour: str = HOUR, seq: int = 0
) -> tuple[str, bytes]:
    """Name and bytes of one shard, written as a host writes it."""
    return write_shard(
        rows if isinstance(rows, pa.Table) else table(spec, rows),
        spec,
        producer=node,
        node=node,
        cloud="aws",
        instance_id="i-0a",
        instance_type="p4d.24xlarge",
        hour=hour,
        seq=seq,
        period_ns=SECOND,
    )


def good_shards(node: str = NODE) -> dict[str, bytes]:
    """One good shard of every table, by name; a host has a device and a rank of its own."""
    made = {}
    for name, rows in ROWS.items():
        own = {"node": node} | ({"gpu_uuid": f"GPU-{node}", "device_uuid": f"GPU-{node}"} if node != NODE else {})
        mine = [r | {n: v for n, v in own.items() if r.get(n) is not None} for r in rows]
        path, data = shard(TELEMETRY[name], mine, node=node)
        made[path] = data
    return made


def rewritten(data: bytes, *, footer: bytes | None = b"", change: Any = None) -> bytes:
    """A shard's bytes with another footer (None: without one) or with its table changed, held to nothing."""
    read = pq.read_table(pa.BufferReader(data))
    made = change(read) if change is not None else read
    kept = dict(read.schema.metadata or {})
    if footer is None:
        kept.pop(b"seedance")
    elif footer:
        kept[b"seedance"] = footer
    sink = pa.BufferOutputStream()
    pq.write_table(made.replace_schema_metadata(kept or None), sink)
    return bytes(sink.getvalue().to_pybytes())


def named(
    spec: Table, data: bytes, *, node: str = NODE, day: str = DAY, hour: int = 3, seq: int = 0
) -> tuple[str, ShardName]:
    """Path and name of these bytes, with the sha that they have."""
    name = ShardName(spec.name, datetime.fromisoformat(day).date(), hour, node, seq, content_sha16(data))
    return f"raw/{name.path}", name
