"""What the reduction keeps of one bucket (an hour of some hosts), before anything is decided that needs the whole day.

Every table merges by its key: summed columns add up, the others keep their least value. Times inside an hour are ns from
its start unless the name says UTC. Evidence is a rank: 0 measured, 1 interpolated, 2 assumed.
"""

import pyarrow as pa

from seedance.schema import COUNT, PASSES, PHASES, STATEMENTS, Column, Table, instant, number, text

_HOUR = instant("hour_utc", "start of the hour")
_NODE = text("node", "host name, as the shard's footer has it")
_DEVICE = text("device_uuid", "GPU-…, MIG-… or cpu:<boot id>")
_HOLDER = (
    text("job_id", "job that holds the device; null when nobody claims it", null=True),
    number("attempt", 16, "count", "restart number", null=True, summed=False),
    number("rank", 32, "count", "global rank", null=True, summed=False),
)
_RANK = (
    text("job_id", "job"),
    number("attempt", 16, "count", "restart number", summed=False),
    number("rank", 32, "count", "global rank", summed=False),
)
_UNIT = (
    text("phase", "phase of the units", values=PHASES),
    number("batch_size", 32, "count", "batch size", summed=False),
)
_OP = (
    text("layer", "layer, or a name in parentheses"),
    text("pass", "direction", values=PASSES),
    text("op", "op family"),
    *_UNIT,
    text("dtype", "compute dtype"),
)
_COUNTED = tuple(
    Column(name, COUNT, about, unit=unit, min=0, summed=True)
    for name, about, unit in (
        ("calls", "calls in every unit", "count"),
        ("flops", "model FLOPs", "FLOP"),
        ("hw_flops", "hardware FLOPs", "FLOP"),
        ("bytes_ideal", "least memory traffic", "bytes"),
        ("uncounted_calls", "calls without a FLOP formula", "count"),
    )
)
_INDEX = number(
    "layer_index", 32, "count", "position of the layer in the model; -1 without a module", min=-1, summed=False
)
_RANKED = number(
    "evidence", 16, "rank", "0 measured, 1 interpolated, 2 assumed: the worst of what was added up", max=2, summed=False
)
_TIMED = (
    number("weight_ns", 64, "ns", "exclusive time in sampled units, with what no op row explains under (none)"),
    number("ns", 64, "ns", "device time of sampled strata, scaled to all units; 0 where the stratum has no sample"),
    number("bound_ns", 64, "ns", "bound of the row's share times the stratum's active time, rounded up"),
)

DEVICES = Table(
    "partial_usage__devices",
    "one device in one hour: where it runs, and lengths of unions before the tail of the hour",
    ("hour_utc", "node", "device_uuid"),
    (
        _HOUR,
        _NODE,
        _DEVICE,
        text("cloud", "provider, from readings, else footers of the hour", null=True),
        text("instance_id", "instance, from readings, else footers of the hour", null=True),
        text("instance_type", "instance type, from footers of the hour", null=True),
        text("gpu_model", "model, from readings of the hour", null=True),
        text("parent_uuid", "GPU that a MIG slice is cut from, from readings of the hour", null=True),
        text("mig_profile", "profile of the slice, from readings of the hour", null=True),
        number(
            "tail_ns",
            64,
            "ns",
            "where the tail begins that is decided with the next hour's first readings",
            summed=False,
        ),
        number("step_ns", 64, "ns", "length of the union of step windows, before the tail"),
        number("any_ns", 64, "ns", "length of the union of readings and step windows, before the tail"),
        number("both_ns", 64, "ns", "length of what both readings and step windows cover, before the tail"),
    ),
)

CLAIMS = Table(
    "partial_usage__claims",
    "time of one device before the tail of the hour, by holder and by what is known of it",
    ("hour_utc", "node", "device_uuid", "job_id", "attempt", "rank", "kind", "is_inside", "is_before"),
    (
        _HOUR,
        _NODE,
        _DEVICE,
        *_HOLDER,
        text(
            "kind",
            "step: the holder's own step windows; held: other time it holds; idle: nobody holds",
            values=("step", "held", "idle"),
        ),
        number("is_inside", 16, "flag", "1 inside the step windows of any job", max=1, summed=False),
        number("is_before", 16, "flag", "1 before the holder's first unit of the hour", max=1, summed=False),
        number("full_ns", 64, "ns", "length of the segments, however many share them; kind step"),
        number("known_ns", 64, "ns", "the holder's part where a reading gives utilisation"),
        number("busy_ns", 64, "ns", "of known_ns, what the device measured busy"),
        number("blind_ns", 64, "ns", "the holder's part where a reading gives no utilisation"),
        number("dark_ns", 64, "ns", "the holder's part without a reading; kind step"),
        number("spare_ns", 64, "ns", "its part of what no holder used"),
        number("even_ns", 64, "ns", "of all of these, what was split evenly because no share is known"),
        number("energy_mj", 64, "mJ", "energy"),
        number("energy_ns", 64, "ns", "time whose reading gave energy"),
    ),
)

EDGES = Table(
    "partial_usage__edges",
    "readings, processes and step windows of the tail of an hour, among them those of the next hour that reach back",
    (
        "hour_utc",
        "node",
        "device_uuid",
        "kind",
        "begin_ns",
        "end_ns",
        "job_id",
        "attempt",
        "rank",
        "host_pid",
        "pid_started_ns",
    ),
    (
        _HOUR,
        _NODE,
        _DEVICE,
        text("kind", "what covers the time", values=("reading", "process", "step")),
        number("begin_ns", 64, "ns", "begin, from the start of the hour", min=None, summed=False),
        number("end_ns", 64, "ns", "end, from the start of the hour", summed=False),
        *_HOLDER,
        number("host_pid", 32, "count", "process id", null=True, summed=False),
        number("pid_started_ns", 64, "ns UTC", "start of the process", null=True, summed=False),
        number("covered_ns", 64, "ns", "time since the former reading", null=True, summed=False),
        number("util_ppm", 32, "ppm", "utilisation of the device, or of the process", null=True, max=1_000_000),
        number("limit_ppm", 32, "ppm", "MPS thread limit of the process", null=True, max=1_000_000),
        number("process_count", 16, "count", "compute processes on the device", null=True, summed=False),
        number("energy_mj", 64, "mJ", "energy since the former reading", null=True, summed=False),
    ),
)

SEEN = Table(
    "partial_usage__seen",
    "one job's process on one device in one hour",
    ("hour_utc", "node", "device_uuid", "job_id", "attempt", "rank"),
    (
        _HOUR,
        _NODE,
        _DEVICE,
        *_HOLDER,
        number("pid_started_ns", 64, "ns UTC", "start of its oldest process", summed=False),
        number("first_ns", 64, "ns UTC", "first reading of it", summed=False),
        number(
            "last_ns",
            64,
            "ns UTC",
            "last reading of it, negative so that the least is the last",
            min=None,
            summed=False,
        ),
    ),
)

STEPS = Table(
    "partial_usage__steps",
    "units of one stratum: hour, device, job, attempt, rank, phase, batch size",
    ("hour_utc", "node", "device_uuid", "job_id", "attempt", "rank", "phase", "batch_size"),
    (
        _HOUR,
        _NODE,
        _DEVICE,
        *_RANK,
        *_UNIT,
        number("first_ns", 64, "ns UTC", "start of the first window", summed=False),
        number(
            "last_ns",
            64,
            "ns UTC",
            "end of the last window, negative so that the least is the last",
            min=None,
            summed=False,
        ),
        number("units", 64, "count", "units"),
        number("wall_ns", 64, "ns", "wall time"),
        number("active_ns", 64, "ns", "active time"),
        number("input_stall_ns", 64, "ns", "waiting for input"),
        number("checkpoint_ns", 64, "ns", "blocking save"),
        number("held_idle_ns", 64, "ns", "rest of the wall time"),
        number("sampled_units", 64, "count", "sampled units"),
        number("sampled_active_ns", 64, "ns", "active time of sampled units"),
        number("samples", 64, "count", "samples"),
        number("tokens_in", 64, "count", "tokens in"),
        number("tokens_out", 64, "count", "tokens out"),
        number("requests", 64, "count", "requests"),
        number("weight_ns", 64, "ns", "exclusive time of its op rows; 0: the stratum has no sample"),
        number("work_ns", 64, "ns", "of active_ns, work; 0 where there is no sample"),
        number("communication_ns", 64, "ns", "of active_ns, communication"),
        number("op_idle_ns", 64, "ns", "of active_ns, without a kernel"),
        number("op_busy_ns", 64, "ns", "of active_ns, busy with no op known"),
        number("evidence", 16, "rank", "0 measured, 1 interpolated, 2 assumed", max=2, summed=False),
    ),
)

OPS = Table(
    "partial_usage__ops",
    "one op of one stratum: what a rank did, for drilling down and for what is decided after the merge",
    (
        "hour_utc",
        "node",
        "device_uuid",
        "job_id",
        "attempt",
        "rank",
        "layer",
        "pass",
        "op",
        "phase",
        "batch_size",
        "dtype",
    ),
    (
        _HOUR,
        _NODE,
        _DEVICE,
        *_RANK,
        *_OP,
        _INDEX,
        *_COUNTED,
        number("sampled_calls", 64, "count", "calls in sampled units"),
        number("busy_ns", 64, "ns", "raw time in sampled units"),
        Column(
            "exclusive_us2",
            COUNT,
            "sum over sampled units of the squared exclusive time",
            unit="us^2",
            min=0,
            summed=True,
        ),
        *_TIMED,
        _RANKED,
    ),
)

LAYERS = Table(
    "partial_usage__layers",
    "one op of one job and hour, over the ranks of the bucket; device named only where its type or model is not known yet",
    (
        "hour_utc",
        "job_id",
        "attempt",
        "instance_type",
        "gpu_model",
        "node",
        "device_uuid",
        "layer",
        "pass",
        "op",
        "phase",
        "batch_size",
        "dtype",
    ),
    (
        _HOUR,
        text("job_id", "job"),
        number("attempt", 16, "count", "restart number", summed=False),
        text("instance_type", "instance type", null=True),
        text("gpu_model", "model", null=True),
        text("node", "host, where type or model are not known within the hour", null=True),
        text("device_uuid", "device, where type or model are not known within the hour", null=True),
        *_OP,
        _INDEX,
        *_COUNTED,
        *_TIMED,
        _RANKED,
    ),
)

STATEMENTS_HEARD = Table(
    "partial_jobs__statements",
    "one statement about a job; labels as canonical JSON, so that rows can be ordered",
    ("job_id", "attempt", "rank", "stated_at_utc", "statement", "said"),
    (
        text("job_id", "job"),
        number("attempt", 16, "count", "restart number", summed=False),
        number("rank", 32, "count", "rank that speaks; null for the whole job", null=True, summed=False),
        instant("stated_at_utc", "when it was said"),
        text("statement", "started, beat, ended, result", values=STATEMENTS),
        text("said", "the other columns as canonical JSON"),
    ),
)

ATTACHED = Table(
    "partial_usage__attached",
    "the last statement of one host about one volume in one hour",
    ("hour_utc", "object_id", "node", "at_utc", "event_id"),
    (
        _HOUR,
        text("object_id", "volume or address"),
        _NODE,
        text("cloud", "provider, from the footer", null=True),
        text("instance_id", "instance, from the footer", null=True),
        instant("at_utc", "when it was stated"),
        text("event_id", "statement"),
        number("bytes", 64, "bytes", "size of the volume, where the statement has it", null=True, summed=False),
        text("object_type", "type of the volume, where the statement has it", null=True),
    ),
)

REPEATS = Table(
    "partial_usage__repeats",
    "rows that came twice, by telemetry table",
    ("table",),
    (
        text("table", "telemetry table"),
        number("duplicates", 64, "count", "rows equal to another one: counted once"),
        number(
            "conflicts", 64, "count", "rows with the key of another one and other values: the first in row order counts"
        ),
    ),
)

PARTIALS = {t.name: t for t in (DEVICES, CLAIMS, EDGES, SEEN, STEPS, OPS, LAYERS, STATEMENTS_HEARD, ATTACHED, REPEATS)}
GREATEST = ("evidence",)
"""Columns that merge by their greatest value; all others that are not summed keep the least."""

assert all(not pa.types.is_floating(c.type) for t in PARTIALS.values() for c in t.columns)
