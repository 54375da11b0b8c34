"""What a fleet is: machines, tenants on their GPUs, volumes, and the switches that shape them.

Times are whole seconds from the start of the day, on the grid of the readings, so that what happened can be told to the
nanosecond. Everything that telemetry, bill and truth say derives from these values. Knows no table and no file.
"""

from __future__ import annotations

import csv
import hashlib
import random
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path

SECOND = 1_000_000_000
HOUR_S = 3_600
HOUR = HOUR_S * SECOND
DAY = 24 * HOUR
MILLION = 1_000_000
CATALOGUE = Path(__file__).parents[2] / "seedance" / "data" / "gpu_instances.csv"


@dataclass(frozen=True)
class FleetSpec:
    """Switches of a fleet; all can be combined. Equal specs give equal bytes."""

    seed: int = 0
    day: str = "2026-10-05"
    """UTC day on which the machines run."""
    first_hour: int = 0
    """Hour in which the first machine runs; at 0 the machines run since the day before."""
    hours: int = 3
    """Hours in which machines run."""
    period_s: int = 10
    """Period of device and process readings, s; divides the windows."""
    window_s: int = 10
    """Step windows, s."""
    op_window_s: int = 300
    """Op windows, s."""
    sample_ppm: int = MILLION
    """Units that are sampled, ppm; doubled for a job until each hour and batch size has a sample."""
    blocks: int = 2
    """Blocks of each network that are kept; per layer the FLOPs stay exact."""
    partial_hours: bool = False
    """Machines start and stop inside an hour, and their agent starts a little later."""
    serve: bool = False
    """A second machine, on demand, serves BERT."""
    shared_gpu: bool = False
    """A second job, ResNet, runs on the serving GPU at the same time."""
    spot: bool = False
    """A machine on the spot market serves ResNet for a while and then stands idle."""
    dark: bool = False
    """A machine without telemetry."""
    unbilled: bool = False
    """A machine that telemetry sees and the bill does not."""
    gap: bool = False
    """Readings and steps of a machine are missing for a stretch."""
    idle: bool = True
    """A GPU of the training machine has no process."""
    held: bool = False
    """A GPU of the training machine is held by a notebook that no job claims."""
    restart: bool = False
    """The training job fails half-way and starts again as attempt 1."""
    savings_plan: bool = False
    """A savings plan covers a part of the training machine, and part of the plan is unused."""
    daily_machine_rows: bool = False
    """The bill has one row a day for each on-demand machine, not one an hour."""
    disk: str = ""
    """Rows of the volumes: "hourly", "daily", or none when empty."""
    lost_volume: bool = False
    """A volume that no host ever names."""
    storage: bool = False
    """Object storage."""
    tax: bool = False
    """Tax of the month, booked at its first instant."""
    credit: bool = False
    """A promotional credit without a resource."""
    refund: bool = False
    """A negative row that names the training machine, and one that names nothing."""
    transfer: bool = False
    """Data transfer billed under the id of a machine."""
    overheads: bool = False
    """Support, NAT hours, a CPU instance, a function, reserved capacity without an instance."""
    straddling: bool = False
    """Rows that reach into the next day, and one of a week that books whole."""
    twins: bool = False
    """Two rows that are equal in every column; both are real money."""
    bill_until: int | None = None
    """Hour up to which the bill is there; None is the whole day. Later hours can only be estimated."""
    invoice: str | None = None
    """Invoice on each row; None while it is not issued."""
    restated: bool = False
    """A second delivery changes amounts of the first."""
    late_shard: bool = False
    """Device readings of the training machine in its first hour come in a second drop."""
    duplicate_shard: bool = False
    """A shard comes twice, with the same bytes under another sequence number."""
    corrupt_shard: bool = False
    """Device readings of the training machine in its last hour arrive truncated."""
    decimals: bool = False
    """Costs as decimals; False is doubles, as the provider delivers them."""
    parts: int = 1
    """Parquet files of each delivery."""
    bundled: bool = False
    """The roster of the bundled day instead of the one that the switches choose."""

    def __post_init__(self) -> None:
        assert HOUR_S % self.period_s == 0 and HOUR_S % self.op_window_s == 0
        assert self.window_s % self.period_s == 0 and self.op_window_s % self.window_s == 0
        assert self.first_hour >= 0 and self.first_hour + self.hours <= 24 and self.hours >= 1
        assert self.disk in ("", "hourly", "daily"), self.disk

    @property
    def grid_s(self) -> int:
        """Grid of all events, s."""
        return self.window_s

    @property
    def day_ns(self) -> int:
        """Start of the day, ns UTC."""
        start = date.fromisoformat(self.day)
        return int(datetime(start.year, start.month, start.day, tzinfo=UTC).timestamp()) * SECOND


@dataclass(frozen=True)
class Facts:
    """An instance type as the catalogue has it."""

    gpu_model: str
    gpu_count: int
    gpu_memory_bytes: int
    vcpus: int
    memory_gib: str
    list_price: Decimal


@dataclass(frozen=True)
class Machine:
    """One instance. It is billed from start_s to end_s; its agent reports from agent_s on."""

    instance_id: str
    instance_type: str
    node: str
    start_s: int
    end_s: int
    agent_s: int
    pricing: str = "on_demand"
    """on_demand, spot or savings_plan."""
    has_agent: bool = True
    is_billed: bool = True
    is_arn: bool = False
    """The bill spells the resource as an ARN."""

    @property
    def facts(self) -> Facts:
        """Its type in the catalogue."""
        return instance_facts(self.instance_type)

    def device(self, index: int) -> str:
        """UUID of one of its GPUs, in the form NVML gives it."""
        digest = hashlib.blake2b(f"{self.instance_id}/{index}".encode(), digest_size=16).hexdigest()
        return "GPU-" + "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:]))

    @property
    def devices(self) -> list[str]:
        """UUIDs of its GPUs."""
        return [self.device(i) for i in range(self.facts.gpu_count)]


@dataclass(frozen=True)
class Work:
    """What the units of a job are."""

    network: str
    phase: str
    """train, or prefill for batches of inference."""
    batches: tuple[int, ...]
    seq: int
    blocks: int
    unit_us: int
    """Wall time of a unit, about, in us; gaps make up what the operations do not fill."""
    input_ppm: int = 400_000
    """Part of the gaps that waits for input; the rest is held idle."""
    checkpoint_every: int = 0
    """Units between two blocking saves; 0 is never."""
    checkpoint_us: int = 0
    dtype: str = "bf16"


@dataclass(frozen=True)
class Stretch:
    """What a process does from start_s to end_s: startup, steps or held; `busy_ppm` is what the GPU shows."""

    kind: str
    start_s: int
    end_s: int
    busy_ppm: int = 0


@dataclass(frozen=True)
class Tenant:
    """The processes of one attempt of a job, one a seat, or a process that nobody claims (no job)."""

    seats: tuple[tuple[int, int], ...]
    """(machine, GPU index) of each rank."""
    pid_started_s: int
    stretches: tuple[Stretch, ...]
    """Touch one another, in order."""
    job_id: str | None = None
    attempt: int = 0
    kind: str = "train"
    work: Work | None = None
    share_ppm: int = MILLION
    """Share of the device that the driver reports; below a million only where two tenants share it."""

    @property
    def start_s(self) -> int:
        """First instant that the agent sees the process."""
        return self.stretches[0].start_s

    @property
    def end_s(self) -> int:
        """The process is gone."""
        return self.stretches[-1].end_s


@dataclass(frozen=True)
class Gap:
    """Time that a machine's telemetry lacks."""

    machine: int
    start_s: int
    end_s: int
    is_marked: bool
    """Readings are there, in another state than ok; otherwise they are missing."""


@dataclass(frozen=True)
class Volume:
    """A block volume; `attached` lists (machine, from hour, to hour)."""

    volume_id: str
    gib: int
    attached: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Fleet:
    """A fleet on one day."""

    spec: FleetSpec
    machines: tuple[Machine, ...]
    tenants: tuple[Tenant, ...]
    gaps: tuple[Gap, ...] = ()
    volumes: tuple[Volume, ...] = ()
    corrupt: tuple[tuple[int, int], ...] = ()
    """(machine, hour) whose device readings arrive truncated."""
    late: tuple[tuple[int, int], ...] = ()
    """(machine, hour) whose device readings come in the second drop."""
    duplicated: tuple[tuple[int, int], ...] = ()
    """(machine, hour) whose step windows come twice."""
    commitment: Decimal = Decimal(0)
    """Savings plan, USD per hour."""
    commitment_hours: tuple[int, int] = (0, 0)
    spot_prices: dict[str, Decimal] = field(default_factory=dict)
    account: str = "111122223333"
    sub_account: str = "444455556666"
    region: str = "us-east-1"

    def lost_readings(self, *, with_late: bool) -> frozenset[tuple[int, int]]:
        """(machine, hour) without device readings, because the shard is truncated or not there yet."""
        return frozenset(self.corrupt) | (frozenset() if with_late else frozenset(self.late))


@cache
def instance_facts(instance_type: str) -> Facts:
    """Facts and list price of an AWS instance type in us-east-1."""
    with CATALOGUE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["cloud"] == "aws" and row["instance_type"] == instance_type and row["region"] == "us-east-1":
                memory = int(Decimal(row["gpu_memory_gib"]) * 1024**3)
                price = Decimal(row["on_demand_usd_per_hour"])
                return Facts(
                    row["gpu_model"], int(row["gpu_count"]), memory, int(row["vcpus"]), row["memory_gib"], price
                )
    raise KeyError(f"{CATALOGUE}: no row of aws {instance_type} in us-east-1")


def tiny_spec(seed: int = 0, **switches: object) -> FleetSpec:
    """One machine of four GPUs for two hours of the first of a month; in well under half a second. Switches may be added."""
    facts: dict[str, object] = {
        "seed": seed,
        "day": "2026-10-01",
        "hours": 2,
        "period_s": 60,
        "window_s": 60,
        "op_window_s": 600,
        "blocks": 1,
        "held": True,
        "disk": "hourly",
        "tax": True,
        "credit": True,
    }
    return FleetSpec(**{**facts, **switches})  # type: ignore[arg-type]


def full_spec(seed: int = 0, **switches: object) -> FleetSpec:
    """A small fleet with nearly every switch on."""
    on = (
        "partial_hours",
        "serve",
        "shared_gpu",
        "spot",
        "dark",
        "gap",
        "held",
        "restart",
        "savings_plan",
        "lost_volume",
        "storage",
        "tax",
        "credit",
        "refund",
        "transfer",
        "overheads",
        "straddling",
        "twins",
        "restated",
        "late_shard",
        "duplicate_shard",
        "corrupt_shard",
    )
    facts: dict[str, object] = {**dict.fromkeys(on, True), "disk": "hourly", "parts": 2, "period_s": 60, "window_s": 60}
    return FleetSpec(**{"seed": seed, **facts, **switches})  # type: ignore[arg-type]


def random_spec(seed: int, **switches: object) -> FleetSpec:
    """A tiny fleet with switches thrown by the seed, for tests of what must hold for every fleet."""
    dice = random.Random(f"spec/{seed}")
    fixed = {"idle", "bundled", "decimals"}
    facts: dict[str, object] = {
        f.name: dice.random() < 0.4 for f in fields(FleetSpec) if isinstance(f.default, bool) and f.name not in fixed
    }
    facts["hours"] = dice.randint(2, 4)
    facts["first_hour"] = dice.choice([0, 0, 9, 20])
    facts["disk"] = dice.choice(["", "hourly", "daily"])
    if not facts["daily_machine_rows"]:  # rows of a day are not there before it ends
        facts["bill_until"] = dice.choice([None, None, int(str(facts["first_hour"])) + 1])
    facts["sample_ppm"] = dice.choice([1_000_000, 100_000])
    facts["parts"] = dice.randint(1, 3)
    facts["decimals"] = dice.random() < 0.3
    return tiny_spec(seed, **{**facts, **switches})


def bundled_spec() -> FleetSpec:
    """The sample day: the first of a month, so that rows of the month fall on it."""
    return FleetSpec(
        seed=20261001,
        day="2026-10-01",
        hours=24,
        period_s=60,
        window_s=60,
        op_window_s=1_800,
        sample_ppm=20_000,
        blocks=32,
        gap=True,
        held=True,
        serve=True,
        spot=True,
        dark=True,
        savings_plan=True,
        disk="hourly",
        lost_volume=True,
        storage=True,
        tax=True,
        credit=True,
        refund=True,
        transfer=True,
        overheads=True,
        parts=2,
        bundled=True,
    )


def with_switches(spec: FleetSpec, **switches: object) -> FleetSpec:
    """The same spec with some switches changed."""
    return replace(spec, **switches)  # type: ignore[arg-type]
