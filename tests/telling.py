"""Shards of one host in the words of a test: readings, processes, step and op windows with times in ns of the hour.

What comes back is what `tasks.core.usage.partial` takes. Hosts, jobs and devices have plain defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import pyarrow as pa

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
from seedance.shard import Footer
from tasks.core import usage
from tests.shard_tables import DAY, NODE, SECOND, START, row, table

HOUR_NS = 3600 * SECOND
DEVICE = "GPU-1"
JOB = {"job_id": "job-1", "attempt": 0, "rank": 0, "device_uuid": DEVICE}
Rows = list[dict[str, Any]]
Told = tuple[Footer, pa.Table]


def begin(hour: int) -> int:
    """Start of an hour of the day, ns UTC."""
    return START + (hour - 3) * HOUR_NS


def readings(first: int, last: int, period: int, *, hour: int = 3, device: str = DEVICE, **facts: Any) -> Rows:
    """Readings that tile [first, last) with one each period."""
    made = {
        "process_count": 1,
        "gpu_util_ppm": 500_000,
        "cloud": "aws",
        "instance_id": "i-0a",
        "gpu_model": "NVIDIA A10G",
    }
    return [
        row(DEVICE_SAMPLES, gpu_uuid=device, sampled_at_utc=begin(hour) + end, covered_ns=period, **(made | facts))
        for end in range(first + period, last + 1, period)
    ]


def processes(first: int, last: int, period: int, *, hour: int = 3, started: int = 0, **facts: Any) -> Rows:
    """Readings of one process that tile [first, last); `started` is ns from the start of its hour."""
    made = {**JOB, "host_pid": 7, "sm_util_ppm": 500_000, "owner_source": "env"}
    return [
        row(
            PROCESS_SAMPLES,
            sampled_at_utc=begin(hour) + end,
            covered_ns=period,
            pid_started_ns=begin(hour) + started,
            **(made | facts),
        )
        for end in range(first + period, last + 1, period)
    ]


def step(
    first: int,
    length: int,
    *,
    hour: int = 3,
    active: int = 0,
    stall: int = 0,
    save: int = 0,
    held: int = 0,
    **facts: Any,
) -> dict[str, Any]:
    """One step window; its wall time is the sum of its parts, and at most a second of its active time was sampled."""
    made = {
        **JOB,
        "phase": "train",
        "batch_size": 8,
        "units": 10,
        "sampled_units": 10,
        "sampled_active_ns": min(active, SECOND),
        "window_ns": length,
        "wall_ns": active + stall + save + held,
        "active_ns": active,
        "input_stall_ns": stall,
        "checkpoint_ns": save,
        "held_idle_ns": held,
    }
    return row(STEP_WINDOWS, window_start_utc=begin(hour) + first, **(made | facts))


def op(layer: str, exclusive: int, *, hour: int = 3, **facts: Any) -> dict[str, Any]:
    """One op window of 300 s."""
    made = {
        **JOB,
        "layer": layer,
        "op": "matmul",
        "pass": "fwd",
        "phase": "train",
        "batch_size": 8,
        "dtype": "bf16",
        "variant": "",
        "method": "events",
        "window_ns": 300 * SECOND,
        "calls": 10,
        "flops": 1_000,
        "hw_flops": 1_000,
        "bytes_ideal": 10,
        "sampled_calls": 10,
        "busy_ns": exclusive,
        "exclusive_ns": exclusive,
        "window_start_utc": begin(hour),
        "op_key": int.from_bytes(blake2b(layer.encode(), digest_size=8).digest(), "big", signed=True),
    }
    return row(OP_WINDOWS, **(made | facts))


def tell(
    rows: Mapping[str, Rows], *, node: str = NODE, hour: int = 3, period: int = 10 * SECOND, **footer: Any
) -> list[Told]:
    """A shard of each table that has rows, of one host and hour; nodes in rows are the host's."""
    made = []
    for name, found in rows.items():
        spec: Table = TELEMETRY[name]
        own = [r | ({"node": node} if "node" in spec.names else {}) for r in found]
        made.append((footer_of(spec, len(own), node=node, hour=hour, period=period, **footer), table(spec, own)))
    return made


def footer_of(
    spec: Table, rows: int, *, node: str = NODE, hour: int = 3, period: int = 10 * SECOND, **footer: Any
) -> Footer:
    """A footer."""
    facts = {"cloud": "aws", "instance_id": "i-0a", "instance_type": "g5.xlarge"} | footer
    return Footer(
        spec.version,
        spec.name,
        node,
        node,
        facts["cloud"],
        facts["instance_id"],
        facts["instance_type"],
        f"{DAY}T{hour:02}",
        0,
        period,
        begin(hour),
        begin(hour),
        rows,
    )


def host(
    *,
    readings: Rows = (),
    processes: Rows = (),
    steps: Rows = (),
    ops: Rows = (),
    jobs: Rows = (),
    events: Rows = (),  # type: ignore[assignment]
    **facts: Any,
) -> list[Told]:
    """The shards of one host and hour."""
    told = {
        DEVICE_SAMPLES: readings,
        PROCESS_SAMPLES: processes,
        STEP_WINDOWS: steps,
        OP_WINDOWS: ops,
        JOBS: jobs,
        EVENTS: events,
    }
    return tell({spec.name: list(rows) for spec, rows in told.items() if rows}, **facts)


def day_of(*buckets: Sequence[Told]) -> dict[str, pa.Table]:
    """The usage tables of a day of these buckets, each one hour of some hosts."""
    return usage.finish(usage.merge([usage.partial(list(b)) for b in buckets]), DAY)


def vector(tables: Mapping[str, pa.Table], *, hour: int = 3, device: str = DEVICE) -> dict[tuple[str | None, str], int]:
    """ns of a device's hour by (job, category)."""
    found: dict[tuple[str | None, str], int] = {}
    for r in tables["core_usage__device_hourly"].to_pylist():
        if r["device_uuid"] == device and r["hour_utc"].hour == hour:
            key = (r["job_id"], r["category"])
            found[key] = found.get(key, 0) + r["ns"]
    return found


def layer_ns(tables: Mapping[str, pa.Table], *, hour: int = 3) -> dict[str, int]:
    """ns of an hour by layer, all else summed."""
    found: dict[str, int] = {}
    for r in tables["core_usage__layer_hourly"].to_pylist():
        if r["hour_utc"].hour == hour:
            found[r["layer"]] = found.get(r["layer"], 0) + r["ns"]
    return found
