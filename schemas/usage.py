"""What the reduction makes of a day's telemetry: jobs, device time, layer time, attachments.

Every summed column is an integer or a decimal, so that the order of shards and workers never matters. Snake case with
the unit last; null where a value is not known.
"""

import pyarrow as pa

from seedance.schema import COUNT, LABELS, PASSES, PHASES, Column, Table, instant, number, text

CATEGORIES = (
    "tax",
    "rounding",
    "commitment_purchase",
    "commitment_unused",
    "capacity_unused",
    "support",
    "credit",
    "adjustment",
    "refund",
    "storage",
    "shared",
    "untied",
    "other_usage",
    "unobserved",
    "idle",
    "startup",
    "work",
    "checkpoint",
    "communication",
    "input_stall",
    "unattributed_busy",
    "held_idle",
)
"""The categories of infra/rules/ledger.md 3, in order of precedence."""

TIME_CATEGORIES = CATEGORIES[13:]
"""Categories that share out the time of a tied machine."""

EVIDENCE = ("measured", "interpolated", "assumed")

JOB_RUNS = Table(
    "core_jobs__runs",
    "one run of a job on one day, resolved from its statements and units",
    ("job_id", "attempt"),
    (
        text("job_id", "job"),
        number("attempt", 16, "count", "restart number", summed=False),
        text("name", "name people know the job by; null when the job was seen but never stated", null=True),
        text("team", "owner team", null=True),
        text("project", "owner project", null=True),
        text("owner", "owner, a role or group", null=True),
        text("kind", "train or serve", null=True),
        text("model", "model", null=True),
        text("config_id", "configuration", null=True),
        text("hardware_profile", "hardware profile", null=True),
        text("quantisation", "quantisation scheme", null=True),
        text("code_version", "code version of the job", null=True),
        text("run_url", "where the run is tracked", null=True),
        text("quality_metric", "name of the quality metric", null=True),
        text("exit_reason", "why it ended", null=True),
        Column("labels", LABELS, "free labels", null=True),
        number("dp", 16, "count", "data parallel size", null=True, summed=False),
        number("tp", 16, "count", "tensor parallel size", null=True, summed=False),
        number("pp", 16, "count", "pipeline parallel size", null=True, summed=False),
        number("cp", 16, "count", "context parallel size", null=True, summed=False),
        number("ep", 16, "count", "expert parallel size", null=True, summed=False),
        number("world_size", 32, "count", "ranks", null=True, summed=False),
        Column("quality", pa.decimal128(18, 9), "last stated value of the quality metric", null=True),
        text("status", "last statement of the day", null=True),
        instant("first_seen_utc", "first statement, process or unit of the day"),
        instant("last_seen_utc", "last statement, process or unit of the day"),
        number("ranks_seen", 32, "count", "ranks seen on this day", summed=False),
        number("units", 64, "count", "units of work: the maximum over ranks"),
        number("samples", 64, "count", "samples, summed over ranks"),
        number("tokens_in", 64, "count", "tokens in"),
        number("tokens_out", 64, "count", "tokens out"),
        number("requests", 64, "count", "requests"),
        number("wall_ns", 64, "ns", "wall time of its units, summed over ranks"),
        number(
            "rank_units", 64, "count", "units, summed over ranks: wall_ns over rank_units is the mean time of a unit"
        ),
    ),
    version=2,
)

DEVICE_HOURLY = Table(
    "core_usage__device_hourly",
    "observed time of one device in one hour, by job, rank and category",
    ("hour_utc", "cloud", "instance_id", "device_uuid", "job_id", "attempt", "rank", "category"),
    (
        instant("hour_utc", "start of the hour"),
        text("cloud", "aws, azure, gcp …; null when no reading says where the device runs", null=True),
        text("instance_id", "instance in the form the bill uses", null=True),
        text("instance_type", "instance type, as the agent states it in the shard's footer", null=True),
        text("node", "host name"),
        text("device_uuid", "device"),
        text("gpu_model", "model as NVML names it", null=True),
        text("parent_uuid", "GPU that a MIG slice is cut from; null for a whole device", null=True),
        number(
            "mig_slices", 16, "count", "compute slices of a MIG slice; null for a whole device", null=True, summed=False
        ),
        number("mig_total", 16, "count", "compute slices of its GPU; null for a whole device", null=True, summed=False),
        text("job_id", "job; null for idle and for processes that nobody claims", null=True),
        number("attempt", 16, "count", "restart number", null=True, summed=False),
        number("rank", 32, "count", "global rank", null=True, summed=False),
        text(
            "category",
            "what the time was; only observed time has rows, and unobserved where a reading has no utilisation",
            values=TIME_CATEGORIES,
        ),
        number("ns", 64, "ns", "time; adds up over the rows of a device and hour to what was observed"),
        number("energy_mj", 64, "mJ", "energy; null when no reading gave any", null=True),
        text("evidence", "measured, interpolated or assumed", values=EVIDENCE),
    ),
    version=2,
)

LAYER_HOURLY = Table(
    "core_usage__layer_hourly",
    "work of one job in one hour, by layer, pass, op, phase, batch size and dtype",
    (
        "hour_utc",
        "job_id",
        "attempt",
        "instance_type",
        "gpu_model",
        "layer",
        "pass",
        "op",
        "phase",
        "batch_size",
        "dtype",
    ),
    (
        instant("hour_utc", "start of the hour"),
        text("job_id", "job"),
        number("attempt", 16, "count", "restart number", summed=False),
        text("instance_type", "instance type, as the agent states it", null=True),
        text("gpu_model", "model as NVML names it", null=True),
        text("layer", "layer, or (optimizer), (graph), (model) …"),
        text("pass", "fwd, bwd, recompute, optim, comm, copy", values=PASSES),
        text("op", "op family"),
        text("phase", "train, prefill, decode, mixed, eval", values=PHASES),
        number("batch_size", 32, "count", "batch size", summed=False),
        text("dtype", "compute dtype"),
        number(
            "layer_index", 32, "count", "position of the layer in the model; -1 without a module", min=-1, summed=False
        ),
        text("category", "work or communication", values=("work", "communication")),
        Column("calls", COUNT, "calls in every unit", unit="count", min=0, summed=True),
        Column("flops", COUNT, "model FLOPs", unit="FLOP", min=0, summed=True),
        Column("hw_flops", COUNT, "hardware FLOPs", unit="FLOP", min=0, summed=True),
        Column("bytes_ideal", COUNT, "least memory traffic", unit="bytes", min=0, summed=True),
        Column("uncounted_calls", COUNT, "calls without a FLOP formula", unit="count", min=0, summed=True),
        number("ns", 64, "ns", "device time, after strata are scaled to all units and shares to the device's hour"),
        number("uncounted_ns", 64, "ns", "of ns, the part whose calls have no FLOP formula"),
        number(
            "bound_ppm",
            32,
            "ppm",
            "four standard errors of ns, from the spread over sampled units, in ppm of the work of the job in the hour; 0 when "
            "every unit was sampled, at most 1,000,000",
            max=1_000_000,
            summed=False,
        ),
        text("evidence", "measured, interpolated or assumed", values=EVIDENCE),
    ),
)

ATTACHMENTS = Table(
    "core_usage__attachments_hourly",
    "one volume or address seen on one instance in one hour",
    ("hour_utc", "object_id", "cloud", "instance_id"),
    (
        instant("hour_utc", "start of the hour"),
        text("object_id", "volume or address, in the form the bill uses"),
        text("cloud", "aws, azure, gcp …"),
        text("instance_id", "instance it was attached to"),
        number("bytes", 64, "bytes", "size of the volume, as the host states it", null=True, summed=False),
        text("object_type", "type of the volume in the provider's words, such as gp3", null=True),
    ),
    version=2,
)

USAGE = {t.name: t for t in (JOB_RUNS, DEVICE_HOURLY, LAYER_HOURLY, ATTACHMENTS)}
