"""Declare columns once; derive the Arrow schema, the checks and the dictionary from the declaration.

A `Column` says name, Arrow type, unit, null rule, range, meaning and source. A `Table` is an ordered set of columns with
a version and a key. `conform` holds a table to its declaration at every read and write. The telemetry tables that GPU
hosts write are declared at the end; the pipeline's own tables live in `schemas/`. Knows no storage and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from seedance.errors import SchemaError

INSTANT = pa.timestamp("ns", tz="UTC")
LABELS = pa.map_(pa.string(), pa.string())
MONEY = pa.decimal128(38, 12)
COUNT = pa.decimal128(38, 0)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Args:
        name: column name; telemetry in snake_case with the unit last, bills and reports as FOCUS column IDs.
        type: Arrow type at rest.
        about: what the value means.
        unit: ns, bytes, mW, mJ, ppm, MHz, currency, count …; None for names and identifiers.
        null: True when the value may be missing. Missing is null: never zero, never empty text.
        min: smallest value allowed, inclusive; None when unbounded.
        max: largest value allowed, inclusive; None when unbounded.
        values: the closed set of values allowed, or None.
        summed: True when the value is added up anywhere; then floats are refused.
        source: where the definition comes from.
    """

    name: str
    type: pa.DataType
    about: str
    unit: str | None = None
    null: bool = False
    min: int | None = None
    max: int | None = None
    values: tuple[str, ...] | None = None
    summed: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if self.summed and pa.types.is_floating(self.type):
            raise SchemaError(
                f"column {self.name} is summed and declared {self.type}: sums of floats depend on their order. "
                "Declare an integer or a decimal.",
                column=self.name,
                expected="integer or decimal",
                found=str(self.type),
            )

    def field(self) -> pa.Field:
        """Arrow field with the declaration as metadata."""
        facts = {"about": self.about, "unit": self.unit or "", "source": self.source}
        return pa.field(self.name, self.type, self.null, {k: v for k, v in facts.items() if v})


@dataclass(frozen=True)
class Table:
    """One table: its columns in order, its version, and the key that identifies a row and sorts the file."""

    name: str
    about: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    version: int = 1
    _by_name: dict[str, Column] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name.update({c.name: c for c in self.columns})
        missing = [k for k in self.key if k not in self._by_name]
        if missing or len(self._by_name) != len(self.columns):
            raise SchemaError(
                f"table {self.name}: key columns {missing} are not declared, or a column is declared twice"
            )

    def __getitem__(self, name: str) -> Column:
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(c.name for c in self.columns)

    @property
    def arrow(self) -> pa.Schema:
        """Arrow schema with field metadata (about, unit, source) and table metadata (table, version)."""
        return pa.schema(
            [c.field() for c in self.columns],
            {"seedance.table": self.name, "seedance.version": str(self.version)},
        )

    def empty(self) -> pa.Table:
        """A table of this shape without rows."""
        return self.arrow.empty_table()


def conform(table: pa.Table, spec: Table, *, where: str) -> pa.Table:
    """The same rows in exactly the declared columns, types and order; anything else is refused.

    Dictionary and large variants of a declared type are decoded; an integer of another width is cast when every value
    fits. No other cast is made, and a float never enters a column that is summed.

    Args:
        table: rows as read or computed.
        spec: the declaration they must meet.
        where: what is being read or written, for the message (a path, a stage).

    Raises:
        SchemaError: a column is missing, unknown or of another type; a value is null, out of range or outside the closed
            set where the declaration forbids it. Carries table, column, expected, found, rows, where.
    """
    missing = [c.name for c in spec.columns if c.name not in table.column_names]
    extra = [n for n in table.column_names if n not in spec.names]
    if missing or extra:
        problem = "; ".join([f"missing column {n}" for n in missing] + [f"unknown column {n}" for n in extra])
        raise SchemaError(
            f"{where}: not {spec.name} version {spec.version}: {problem}. Expected {len(spec.columns)} columns, found "
            f"{len(table.column_names)}. Compare with the data dictionary.",
            table=spec.name,
            column=(missing + extra)[0],
            expected=spec[missing[0]].type if missing else "absent",
            found="absent" if missing else str(table.schema.field(extra[0]).type),
            where=where,
        )
    arrays = [_fit(table.column(c.name), c, spec, where) for c in spec.columns]
    return pa.table(arrays, schema=spec.arrow)


def _fit(values: pa.ChunkedArray, column: Column, spec: Table, where: str) -> pa.ChunkedArray:
    fitted = _retype(values, column, spec, where)
    if not column.null and fitted.null_count:
        raise _refusal(spec, column, where, "no nulls", "null", fitted.null_count)
    if column.min is not None or column.max is not None:
        _check_range(fitted, column, spec, where)
    if column.values is not None and len(fitted):
        known = pc.is_in(fitted, value_set=pa.array(column.values, column.type))
        bad = pc.and_(pc.is_valid(fitted), pc.invert(known))
        count = pc.sum(bad).as_py() or 0
        if count:
            first = fitted.filter(bad)[0].as_py()
            raise _refusal(spec, column, where, "one of " + ", ".join(column.values), repr(first), count)
    return fitted


def _retype(values: pa.ChunkedArray, column: Column, spec: Table, where: str) -> pa.ChunkedArray:
    found, wanted = values.type, column.type
    if found == wanted:
        return values
    if pa.types.is_dictionary(found):
        values = values.cast(found.value_type)
        found = values.type
    same_text = pa.types.is_large_string(found) and pa.types.is_string(wanted)
    whole = pa.types.is_integer(found) and pa.types.is_integer(wanted)
    money = pa.types.is_decimal(found) and pa.types.is_decimal(wanted)
    all_null = pa.types.is_null(found)
    if found == wanted:
        return values
    if same_text or whole or money or all_null:
        try:
            return values.cast(wanted)
        except pa.ArrowInvalid as error:
            raise _refusal(spec, column, where, str(wanted), f"a {found} that does not fit ({error})", 1) from error
    hint = (
        " (this column is summed; a float would make the sum depend on its order)"
        if (column.summed and pa.types.is_floating(found))
        else ""
    )
    raise _refusal(spec, column, where, f"{wanted}{hint}", str(found), len(values))


def _check_range(values: pa.ChunkedArray, column: Column, spec: Table, where: str) -> None:
    low_high = pc.min_max(values).as_py()
    low, high = low_high["min"], low_high["max"]
    unit = f" {column.unit}" if column.unit else ""
    if low is not None and column.min is not None and low < column.min:
        raise _refusal(spec, column, where, f"at least {column.min}{unit}", f"{low}{unit}", 1)
    if high is not None and column.max is not None and high > column.max:
        raise _refusal(spec, column, where, f"at most {column.max}{unit}", f"{high}{unit}", 1)


def _refusal(spec: Table, column: Column, where: str, expected: str, found: str, rows: int) -> SchemaError:
    return SchemaError(
        f"{where}: {spec.name}.{column.name}: expected {expected}, found {found} ({rows:,} row(s)).",
        table=spec.name,
        column=column.name,
        expected=expected,
        found=found,
        rows=rows,
        where=where,
    )


def text(name: str, about: str, **facts: Any) -> Column:
    """A text column."""
    return Column(name, pa.string(), about, **facts)


def number(name: str, bits: int, unit: str, about: str, **facts: Any) -> Column:
    """A signed integer column of 16, 32 or 64 bits with a unit; non-negative and summed unless said otherwise."""
    types = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
    facts.setdefault("min", 0)
    facts.setdefault("summed", bits == 64)
    return Column(name, types[bits], about, unit=unit, **facts)


def instant(name: str, about: str, **facts: Any) -> Column:
    """An instant in UTC, integer nanoseconds."""
    return Column(name, INSTANT, about, unit="ns UTC", **facts)


# --- the shards that GPU hosts write --------------------------------------------------------------------------------

_T = "seedance telemetry, version 1"
PASSES = ("fwd", "bwd", "recompute", "optim", "comm", "copy", "none")
PHASES = ("train", "prefill", "decode", "mixed", "eval")
METHODS = ("events", "kineto", "graph", "formula", "host")
STATEMENTS = ("started", "beat", "ended", "result")
CLOUDS_ABOUT = "aws, azure, gcp, or the lower-case provider name"

_RANK_KEY = (
    text("job_id", "job the rank belongs to"),
    number("attempt", 16, "count", "restart number of the job, from 0", summed=False),
    number("rank", 32, "count", "global rank in the job", summed=False),
    text("device_uuid", "GPU-…, MIG-… or cpu:<boot id>"),
)

DEVICE_SAMPLES = Table(
    "raw_telemetry__device_samples",
    "one reading of one GPU or MIG slice",
    ("gpu_uuid", "mig_uuid", "sampled_at_utc"),
    (
        text("gpu_uuid", "GPU that was read", source="NVML uuid"),
        text("mig_uuid", "slice that was read, under MIG", null=True, source="NVML MIG uuid"),
        instant("sampled_at_utc", "end of the time that the reading covers"),
        text("node", "host name"),
        text("boot_id", "boot of the host"),
        text("cloud", CLOUDS_ABOUT),
        text("instance_id", "instance in the form the bill uses"),
        text("gpu_model", "model as NVML names it", source="NVML device name"),
        text("mig_profile", "profile of the slice", null=True, source="NVML"),
        text("source", "nvml, dcgm, prometheus, smi"),
        text("state", "ok, or why the reading is not to be used"),
        number("gpu_index", 16, "count", "index of the GPU on its host"),
        number("sm_count", 16, "count", "streaming multiprocessors"),
        number("process_count", 16, "count", "compute processes on the device; null when the call failed", null=True),
        number("temperature_c", 16, "degrees C", "die temperature", min=-40, max=200),
        number("sm_clock_mhz", 16, "MHz", "SM clock"),
        number("memory_clock_mhz", 16, "MHz", "memory clock"),
        number(
            "gpu_util_ppm",
            32,
            "ppm",
            "time with at least one kernel running",
            null=True,
            max=1_000_000,
            source="NVML utilisation; not SM activity",
        ),
        number(
            "sm_active_ppm", 32, "ppm", "mean share of SMs with a warp", null=True, max=1_000_000, source="DCGM 1002"
        ),
        number("tensor_active_ppm", 32, "ppm", "tensor pipe active", null=True, max=1_000_000, source="DCGM 1004"),
        number("dram_active_ppm", 32, "ppm", "DRAM interface active", null=True, max=1_000_000, source="DCGM 1005"),
        number("power_mw", 32, "mW", "board power, averaged by the driver", null=True, source="NVML power usage"),
        number("covered_ns", 64, "ns", "time that the reading covers, ending at sampled_at_utc"),
        number("memory_used_bytes", 64, "bytes", "memory in use"),
        number("memory_total_bytes", 64, "bytes", "memory of the device"),
        number("throttle_mask", 64, "bits", "clock event reasons", summed=False),
        number("energy_mj", 64, "mJ", "energy since the former reading; null after a reset", null=True),
        number("pcie_tx_bytes", 64, "bytes", "sent over PCIe since the former reading", null=True),
        number("pcie_rx_bytes", 64, "bytes", "received over PCIe since the former reading", null=True),
        number("nvlink_tx_bytes", 64, "bytes", "sent over NVLink since the former reading", null=True),
        number("nvlink_rx_bytes", 64, "bytes", "received over NVLink since the former reading", null=True),
    ),
)

PROCESS_SAMPLES = Table(
    "raw_telemetry__process_samples",
    "one reading of one process on one device, about every 10 s",
    ("device_uuid", "host_pid", "pid_started_ns", "sampled_at_utc"),
    (
        text("device_uuid", "device the process is on"),
        number("host_pid", 32, "count", "process id on the host", summed=False),
        number("pid_started_ns", 64, "ns UTC", "start of the process", summed=False),
        instant("sampled_at_utc", "end of the time that the reading covers"),
        text("node", "host name"),
        text("job_id", "job of the process; null when nobody claims it", null=True),
        text("owner_source", "where the owner comes from: env, k8s, slurm, none"),
        number("attempt", 16, "count", "restart number of the job", null=True, summed=False),
        number("rank", 32, "count", "global rank", null=True, summed=False),
        number(
            "sm_util_ppm",
            32,
            "ppm",
            "SM time of this process; null when the call is unsupported",
            null=True,
            max=1_000_000,
        ),
        number("mps_limit_ppm", 32, "ppm", "MPS thread limit", null=True, max=1_000_000),
        number("covered_ns", 64, "ns", "time that the reading covers, ending at sampled_at_utc"),
        number("memory_used_bytes", 64, "bytes", "device memory of the process", null=True),
    ),
)

OP_WINDOWS = Table(
    "raw_telemetry__op_windows",
    "one op key of one rank in one window of about 300 s",
    ("job_id", "attempt", "rank", "device_uuid", "op_key", "variant", "method", "window_start_utc"),
    (
        *_RANK_KEY,
        number("op_key", 64, "hash", "BLAKE2b-64 of layer|pass|op|phase|batch|dtype", min=None, summed=False),
        text("variant", "kernel or shape variant of the op; empty when there is one"),
        text(
            "method",
            "how it was timed: CUDA events, a profiler, a graph split by another run, FLOPs, a host clock",
            values=METHODS,
        ),
        instant("window_start_utc", "start of the window"),
        text(
            "layer",
            "module path without wrapper segments, or (optimizer), (grad_sync), (pipeline), (graph), (model), (none)",
        ),
        text("op", "op family, or held_idle, unattributed_busy for layer (none)"),
        text("pass", "fwd, bwd, recompute, optim, comm, copy; none for layer (none)", values=PASSES),
        text("phase", "train, prefill, decode, mixed, eval", values=PHASES),
        text("dtype", "compute dtype"),
        number(
            "layer_index", 32, "count", "position of the layer in the model; -1 without a module", min=-1, summed=False
        ),
        number("batch_size", 32, "count", "local micro-batch, or sequences rounded to the captured size", summed=False),
        number("window_ns", 64, "ns", "length of the window", summed=False),
        number("calls", 64, "count", "calls in every unit"),
        number("flops", 64, "FLOP", "model FLOPs of every unit, from local shapes"),
        number("hw_flops", 64, "FLOP", "FLOPs with recompute and fused-kernel recomputation"),
        number("bytes_ideal", 64, "bytes", "least memory traffic"),
        number("uncounted_calls", 64, "count", "calls without a FLOP formula"),
        number("sampled_calls", 64, "count", "calls in sampled units"),
        number("busy_ns", 64, "ns", "time in sampled units, where overlapping ops each count it"),
        number("exclusive_ns", 64, "ns", "time in sampled units, each ns to one op: adds up to sampled_active_ns"),
        number("exclusive_us2", 64, "us^2", "sum over sampled units of the squared exclusive time"),
    ),
)

STEP_WINDOWS = Table(
    "raw_telemetry__step_windows",
    "units of work of one rank in one window of about 10 s",
    ("job_id", "attempt", "rank", "device_uuid", "phase", "batch_size", "window_start_utc"),
    (
        *_RANK_KEY,
        text("phase", "train, prefill, decode, mixed, eval", values=PHASES),
        number("batch_size", 32, "count", "local micro-batch, or sequences rounded to the captured size", summed=False),
        instant("window_start_utc", "start of the window"),
        number("window_ns", 64, "ns", "length of the window", summed=False),
        number("units", 64, "count", "units that ended in the window"),
        number("wall_ns", 64, "ns", "end of the former unit to end of this one, cut at the hour"),
        number("active_ns", 64, "ns", "first to last device mark of the units"),
        number("input_stall_ns", 64, "ns", "gap spent waiting for input"),
        number("checkpoint_ns", 64, "ns", "gap spent in a blocking save"),
        number("held_idle_ns", 64, "ns", "rest of the gap"),
        number("sampled_units", 64, "count", "units that were sampled"),
        number("sampled_active_ns", 64, "ns", "active time of the sampled units"),
        number("samples", 64, "count", "samples; one rank of a replica writes them"),
        number("tokens_in", 64, "count", "tokens in; one rank of a replica writes them"),
        number("tokens_out", 64, "count", "tokens out; one rank of a replica writes them"),
        number("requests", 64, "count", "requests; one rank of a replica writes them"),
        number("input_wait_ns", 64, "ns", "all waiting for input, hidden or not"),
        number("probe_ns", 64, "ns", "host time of the probe itself"),
        number("dropped_units", 64, "count", "units lost to a full buffer"),
        number("allocated_bytes", 64, "bytes", "allocator: allocated, peak", summed=False),
        number("reserved_bytes", 64, "bytes", "allocator: reserved, peak", summed=False),
        number("active_bytes", 64, "bytes", "allocator: active, peak", summed=False),
        number("inactive_split_bytes", 64, "bytes", "allocator: inactive split, peak", summed=False),
        number("alloc_retries", 64, "count", "allocator retries"),
        number("ooms", 64, "count", "out-of-memory errors"),
    ),
)

JOBS = Table(
    "raw_telemetry__jobs",
    "one statement about a job",
    ("job_id", "attempt", "rank", "stated_at_utc", "statement"),
    (
        text("job_id", "job"),
        number("attempt", 16, "count", "restart number, from 0", summed=False),
        number("rank", 32, "count", "rank that speaks; null for the whole job", null=True, summed=False),
        instant("stated_at_utc", "when it was said"),
        text("statement", "started, beat, ended, result", values=STATEMENTS),
        text("node", "host of the rank", null=True),
        text("device_uuid", "device of the rank", null=True),
        text("name", "name people know the job by"),
        text("team", "owner team"),
        text("project", "owner project"),
        text("owner", "owner, a role or group"),
        text("kind", "train or serve", values=("train", "serve")),
        text("model", "model"),
        text("config_id", "configuration"),
        text("hardware_profile", "hardware profile"),
        text("quantisation", "quantisation scheme"),
        text("code_version", "code version of the job"),
        text("run_url", "where the run is tracked", null=True),
        text("quality_metric", "name of the quality metric", null=True),
        text("exit_reason", "why it ended", null=True),
        Column("labels", LABELS, "free labels"),
        number("dp", 16, "count", "data parallel size", min=1, summed=False),
        number("tp", 16, "count", "tensor parallel size", min=1, summed=False),
        number("pp", 16, "count", "pipeline parallel size", min=1, summed=False),
        number("cp", 16, "count", "context parallel size", min=1, summed=False),
        number("ep", 16, "count", "expert parallel size", min=1, summed=False),
        number("world_size", 32, "count", "ranks", min=1, summed=False),
        Column("quality", pa.decimal128(18, 9), "value of the quality metric", null=True),
    ),
)

EVENTS = Table(
    "raw_telemetry__events",
    "one event of a host, a cluster or a job",
    ("at_utc", "event_id"),
    (
        instant("at_utc", "when"),
        text("event_id", "unique id"),
        text("source", "who says it", values=("k8s", "nccl", "kernel", "checkpoint", "scaler")),
        text("kind", "what; block_device names a volume that the host sees during this hour"),
        text("severity", "info, warning, error"),
        text("object", "what it is about: a volume, a pod, a path"),
        text("node", "host", null=True),
        text("device_uuid", "device", null=True),
        text("job_id", "job", null=True),
        text("payload", "JSON object"),
        number("attempt", 16, "count", "restart number", null=True, summed=False),
        number("rank", 32, "count", "rank", null=True, summed=False),
        number("count", 32, "count", "how often", min=1),
    ),
)

TELEMETRY = {t.name: t for t in (DEVICE_SAMPLES, PROCESS_SAMPLES, OP_WINDOWS, STEP_WINDOWS, JOBS, EVENTS)}
