"""How fast the reduction is: op windows beside DuckDB and Polars on the same files, a late shard, readings of one second.

Each contender runs in a process of its own, so that its peak memory is its own; the best of the runs counts.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seedance.canonical import canonical
from seedance.schema import DEVICE_SAMPLES, OP_WINDOWS, PROCESS_SAMPLES, STEP_WINDOWS, Table
from seedance.shard import COMPRESSION, COMPRESSION_LEVEL, FOOTER_KEY, ROW_GROUP_ROWS, ShardName, content_sha16
from tasks import reduce
from tasks.core import usage
from tasks.core.layers import RUN_KEYS, RUN_SUMS, sum_ops
from tasks.io.engine import map_buckets
from tasks.io.lake import Lake
from tasks.settings import Settings
from tests.telling import DAY, HOUR_NS, begin, footer_of

ROWS = int(os.environ.get("BENCH_REDUCE_ROWS", "20000000"))
RUNS = 3
CORES = 2
GPUS, OPS, WINDOWS = 8, 2_604, 12
HOSTS = 16
SECOND = 1_000_000_000


def run() -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        return [*_beside_peers(Path(folder) / "ops"), *_late_shard(Path(folder) / "lake"), _readings()]


def row(name: str, value: float, **facts: Any) -> dict[str, Any]:
    """One row in the form that `tests.bench` writes."""
    made = {
        "name": f"reduce.{name}",
        "value": round(value, 4),
        "unit": "s",
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "rows": None,
        "peak_mb": None,
        "runs": RUNS,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    made |= facts
    if made["peer_value"] is not None:
        made |= {"peer_value": round(made["peer_value"], 4), "ratio": round(made["peer_value"] / value, 3)}
    return made


# --- op windows beside DuckDB and Polars ----------------------------------------------------------------------------


def _beside_peers(folder: Path) -> list[dict[str, Any]]:
    rows = 0
    for number in range(-(-ROWS // (GPUS * OPS * WINDOWS))):
        name, data, count = op_shard(number, hour=number % 24)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        rows += count
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "duckdb": [], "polars": []}
    for _ in range(RUNS):  # in turns, so that a busy minute of the machine hits all of them
        for who in found:
            found[who].append(_alone(who, folder))
    totals = {json.dumps([r["groups"], r["flops"], r["exclusive"]]) for results in found.values() for r in results}
    assert len(totals) == 1, totals
    best = {who: min(results, key=lambda r: r["seconds"]) for who, results in found.items()}
    mine = best["ours"]
    return [
        row(
            "op_windows",
            mine["seconds"],
            peer=who,
            peer_value=best[who]["seconds"],
            rows=rows,
            peak_mb=mine["peak_mb"],
            cpu_s=round(mine["cpu"], 3),
            peer_cpu_s=round(best[who]["cpu"], 3),
            peer_peak_mb=best[who]["peak_mb"],
        )
        for who in ("duckdb", "polars")
    ]


def _alone(who: str, folder: Path) -> dict[str, Any]:
    code = f"from tests.bench import reduce; reduce.contend({who!r}, {str(folder)!r})"
    environment = {**os.environ, "POLARS_MAX_THREADS": str(CORES), "OMP_NUM_THREADS": str(CORES)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def contend(who: str, folder: str) -> None:
    """Run one contender in this process and print what it took: seconds, peak MB, and totals that all must agree on."""
    paths = sorted(str(p) for p in Path(folder).rglob("*.parquet"))
    contenders: dict[str, Callable[[list[str]], tuple[int, int, int]]] = {
        "ours": _ours,
        "duckdb": _duckdb,
        "polars": _polars,
    }
    for module in {"ours": ("dask.threaded",)}.get(who, (who,)):
        importlib.import_module(module)  # loading code is not what is measured
    pa.array(np.zeros(1))  # loads pandas where it is installed
    start, busy = time.perf_counter(), time.process_time()
    groups, flops, exclusive = contenders[who](paths)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        json.dumps(
            {"seconds": seconds, "cpu": cpu, "peak_mb": peak, "groups": groups, "flops": flops, "exclusive": exclusive}
        )
    )


def _sum_file(path: str) -> pa.Table:
    return sum_ops(reduce.read_for_reduction(Path(path).read_bytes(), path, is_only=True)[1])


def _ours(paths: list[str]) -> tuple[int, int, int]:
    made = pa.concat_tables(map_buckets(_sum_file, paths, scheduler="threads", workers=CORES))
    return (
        made.num_rows,
        int(pa.compute.sum(made.column("flops")).as_py()),
        int(pa.compute.sum(made.column("exclusive_ns")).as_py()),
    )


def _duckdb(paths: list[str]) -> tuple[int, int, int]:
    import duckdb

    keys = ", ".join(f'"{k}"' for k in RUN_KEYS)
    sums = ", ".join(f"sum({n}) AS {n}" for n in RUN_SUMS)
    connection = duckdb.connect(config={"threads": CORES})
    files = ", ".join(f"'{p}'" for p in paths)
    connection.execute("SET enable_progress_bar = false")
    made = connection.execute(f"SELECT {keys}, {sums} FROM read_parquet([{files}]) GROUP BY {keys}").to_arrow_table()
    connection.register("made", made)
    total = connection.execute("SELECT count(*), sum(flops)::VARCHAR, sum(exclusive_ns)::VARCHAR FROM made").fetchone()
    assert total is not None
    return int(total[0]), int(total[1].split(".")[0]), int(total[2].split(".")[0])


def _polars(paths: list[str]) -> tuple[int, int, int]:
    import polars as pl

    made = pl.scan_parquet(paths).group_by(RUN_KEYS).agg(pl.col(RUN_SUMS).sum()).collect(engine="streaming")
    return made.height, sum(map(int, made["flops"].to_list())), int(made["exclusive_ns"].sum())


def op_shard(
    number: int, *, hour: int, node: str | None = None, gpus: int = GPUS, ops: int = OPS
) -> tuple[str, bytes, int]:
    """Name, bytes and rows of one host's op windows of one hour, sorted by key as a host writes them."""
    random = np.random.default_rng(number)
    rows = gpus * ops * WINDOWS
    rank, place, window = np.unravel_index(np.arange(rows), (gpus, ops, WINDOWS))
    key = np.sort(random.integers(-(2**63), 2**63 - 1, ops))
    layer = [f"model.layers.{i // 32}.{('self_attn', 'mlp')[i % 2]}" for i in range(ops)]
    passes, kinds = ("fwd", "bwd", "recompute", "comm"), ("matmul", "attention", "rms_norm", "all_reduce[dp]")
    calls = random.integers(1, 400, rows)
    text: dict[str, Any] = {
        "job_id": (np.zeros(rows, int), [f"job-{number // 96:04}"]),
        "variant": (np.zeros(rows, int), [""]),
        "method": (np.zeros(rows, int), ["events"]),
        "device_uuid": (rank, [f"GPU-{number:05}-{i}" for i in range(gpus)]),
        "layer": (place, layer),
        "op": (place // 2 % 4, list(kinds)),
        "pass": (place // 8 % 4, list(passes)),
        "phase": (np.zeros(rows, int), ["train"]),
        "dtype": (place % 3, ["bf16", "fp8", "fp32"]),
    }
    exclusive = random.integers(10**5, 10**8, rows)
    numbers: dict[str, Any] = {
        "attempt": np.zeros(rows),
        "rank": rank + gpus * (number // 24 % 4),
        "op_key": key[place],
        "window_start_utc": begin(hour) + window * 300 * SECOND,
        "layer_index": place // 32,
        "batch_size": 8 + place % 4,
        "window_ns": np.full(rows, 300 * SECOND),
        "calls": calls,
        "flops": calls * random.integers(10**9, 10**12, rows),
        "hw_flops": calls * 10**12,
        "bytes_ideal": calls * 4_096,
        "uncounted_calls": np.zeros(rows),
        "sampled_calls": calls // 50,
        "busy_ns": exclusive * 13 // 10,
        "exclusive_ns": exclusive,
        "exclusive_us2": exclusive // 1_000 * 7,
    }
    columns = []
    for column in OP_WINDOWS.columns:
        if column.name in text:
            index, words = text[column.name]
            columns.append(pa.array(words).take(pa.array(index)))
        else:
            columns.append(pa.array(numbers[column.name].astype(np.int64)).cast(column.type))
    return shard_of(pa.table(columns, schema=OP_WINDOWS.arrow), OP_WINDOWS, node or f"node-{number:05}", hour)


def shard_of(table: pa.Table, spec: Table, node: str, hour: int) -> tuple[str, bytes, int]:
    """A shard of rows that are in order, written as `write_shard` does without checking them again."""
    footer = footer_of(spec, table.num_rows, node=node, hour=hour, instance_id=f"i-{node}")
    sink = pa.BufferOutputStream()
    bare = pa.schema(
        [pa.field(f.name, f.type, f.nullable) for f in table.schema], {FOOTER_KEY: canonical(footer.__dict__)}
    )
    pq.write_table(
        pa.table(table.columns, schema=bare),
        sink,
        row_group_size=ROW_GROUP_ROWS,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        write_page_checksum=True,
    )
    data = sink.getvalue().to_pybytes()
    day = datetime.fromisoformat(DAY).date()
    return ShardName(spec.name, day, hour, node, 0, content_sha16(data)).path, data, table.num_rows


# --- a whole day, and one late shard --------------------------------------------------------------------------------


def _late_shard(folder: Path) -> list[dict[str, Any]]:
    """A day of some hosts, four to a job; then one shard of op windows comes late."""
    lake = Lake.open(str(folder))
    paths, rows = [], 0
    for node in range(HOSTS):
        for hour in range(24):
            for name, data, count in (
                op_shard(24 * node + hour, hour=hour, node=f"node-{node:05}", ops=400),
                *_host_hour(24 * node + hour, hour),
            ):
                lake.store.put(f"raw/{name}", data)
                paths.append(f"raw/{name}")
                rows += count
    settings = Settings(lake=str(folder), workers=CORES)
    late = next(p for p in paths if OP_WINDOWS.name in p)
    reduced = partial(reduce.reduce_day, lake, settings, DAY)
    whole = _seconds(lambda: reduced([p for p in paths if p != late]))
    again = _seconds(lambda: reduced(paths))
    unchanged = _seconds(lambda: reduced(paths))
    return [
        row("day", whole, rows=rows, runs=1),
        row("late_shard", again, peer="full run", peer_value=whole, rows=rows, runs=1),
        row("nothing_new", unchanged, peer="full run", peer_value=whole, rows=rows, runs=1),
    ]


def _host_hour(number: int, hour: int, *, period: int = 10) -> list[tuple[str, bytes, int]]:
    """Readings, processes and step windows of one host's hour, and of the same jobs as its op windows."""
    count = 3_600 // period
    gpu, slot = np.unravel_index(np.arange(GPUS * count), (GPUS, count))
    at = begin(hour) + slot * period * SECOND
    ns = np.full(len(at), period * SECOND)
    device = pa.array([f"GPU-{number:05}-{i}" for i in range(GPUS)]).take(pa.array(gpu))
    rank, job = gpu + GPUS * (number // 24 % 4), f"job-{number // 96:04}"
    facts: dict[Table, dict[str, Any]] = {
        DEVICE_SAMPLES: {
            "gpu_uuid": device,
            "sampled_at_utc": at + ns,
            "covered_ns": ns,
            "gpu_util_ppm": ns * 0 + 900_000,
            "process_count": ns * 0 + 1,
            "state": "ok",
            "cloud": "aws",
            "instance_id": "i-1",
            "gpu_model": "NVIDIA A100",
            "energy_mj": ns // 10**6,
        },
        PROCESS_SAMPLES: {
            "device_uuid": device,
            "sampled_at_utc": at + ns,
            "covered_ns": ns,
            "job_id": job,
            "attempt": ns * 0,
            "rank": rank,
            "pid_started_ns": ns * 0 + begin(0),
            "host_pid": gpu,
            "sm_util_ppm": ns * 0 + 900_000,
            "owner_source": "env",
        },
        STEP_WINDOWS: {
            "job_id": job,
            "attempt": ns * 0,
            "rank": rank,
            "device_uuid": device,
            "phase": "train",
            "batch_size": ns * 0 + 8 + slot % 4,
            "window_start_utc": at,
            "window_ns": ns,
            "units": ns * 0 + 20,
            "wall_ns": ns,
            "active_ns": ns * 8 // 10,
            "held_idle_ns": ns * 2 // 10,
            "sampled_units": ns * 0 + 1,
            "sampled_active_ns": ns // 20,
        },
    }
    node = f"node-{number // 24:05}" if period == 10 else f"node-{number:05}"
    made = []
    for spec, known in facts.items():
        columns = []
        for column in spec.columns:
            value = known.get(column.name, None if column.null else node if pa.types.is_string(column.type) else 0)
            if isinstance(value, np.ndarray):
                value = pa.array(value).cast(column.type)
            elif not isinstance(value, pa.Array):
                value = pa.repeat(
                    pa.scalar(value, column.type if value is None or isinstance(value, str) else pa.int64()), len(at)
                ).cast(column.type)
            columns.append(value)
        made.append(shard_of(pa.table(columns, schema=spec.arrow), spec, node, hour))
    return made


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _readings() -> dict[str, Any]:
    """A bucket of twenty hosts whose devices are read every second."""
    told = []
    for number in range(20):
        for name, data, _ in _host_hour(number, 3, period=1):
            told.append(reduce.read_for_reduction(data, name, is_only=True))
    rows = sum(t.num_rows for _, t in told)
    best = min(_seconds(lambda: usage.partial(told)) for _ in range(RUNS))
    return row(
        "readings_of_a_second", best, rows=rows, peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    )


assert HOUR_NS == 3_600 * SECOND
