"""What a fleet is: machines, tenants on their GPUs, volumes, and the switches that shape them.

Times are whole seconds from the start of the day, on the grid of the readings, so that what happened can be told to the
nanosecond. Everything that telemetry, bill and truth say derives from these values. Knows no table and no file.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path

from tests.fleet.clouds import CLOUDS, PROFILES, Profile

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
    cloud: str = "aws"
    """aws, azure or gcp: the machines, and whose bill it is."""
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
    volume_facts: bool = False
    """Hosts state size and type of their volumes, one of which grows while it is attached."""
    mig: bool = False
    """A machine whose GPU is cut into slices, with and without tenants, and a rest that no slice takes."""
    mps: bool = False
    """Two tenants on one GPU under declared thread limits, and a rest that is nobody's."""
    fractions: bool = False
    """The same on another machine, declared by its scheduler; for a while one tenant is alone."""
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
    cluster_fee: bool = False
    """The hourly fee of a Kubernetes cluster."""
    network_fees: bool = False
    """Gateway, balancer and address hours, and bytes of a machine between zones."""
    reservation: bool = False
    """Reserved hours cover a part of the serving machine, else of the training machine; a part of them is unused."""
    capacity_reservation: bool = False
    """A capacity reservation that the training machine uses in its first hour and nobody after it."""
    nested_credits: bool = False
    """GCP: credits inside the rows of machines, promotions among them; elsewhere a credit that names a machine."""
    neighbour_month: bool = False
    """A machine's last usage row stands in the invoice month after its own."""
    two_months: bool = False
    """A part of each usage row of the training machine is billed in the following invoice month."""
    closed_correction: bool = False
    """A later month corrects usage of this day: one row names a machine, one names nothing."""
    second_currency: bool = False
    """A machine of a second billing account, which pays in euros."""
    scale_set: bool = False
    """Azure: the machines are members of a scale set, and their rows name the set."""
    currency: str = "USD"
    """Currency of the first billing account; prices are taken as they are."""
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
        assert self.cloud in CLOUDS, self.cloud

    @property
    def profile(self) -> Profile:
        """What its cloud calls things."""
        return PROFILES[self.cloud]

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
    spot_price: Decimal | None = None


@dataclass(frozen=True)
class Slice:
    """A MIG slice: the GPU that it is cut from, and its profile as the driver names it."""

    gpu: int
    profile: str

    @property
    def compute(self) -> int:
        """Compute slices: 3 of `3g.40gb`, 1 of `1c.3g.40gb`, 1 where the driver names no profile."""
        return int(self.profile[0]) if self.profile else 1


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
    stated: str | None = None
    """The id that its agent states, where it spells it differently."""
    resource: str | None = None
    """ResourceId in the bill, where it differs: an ARN, another case, the scale set."""
    member: str | None = None
    """Name of the member in the bill, where the resource is its scale set."""
    account: str | None = None
    """Billing account, where it is not the fleet's first."""
    currency: str | None = None
    """Currency of that account."""
    slices: tuple[Slice, ...] = ()
    """Slices of its GPUs. Indices of devices go on with them: GPUs first, then slices in this order."""
    cut_s: int = 0
    """Instant from which on the slices are there."""

    @property
    def billed_id(self) -> str:
        """The machine as the bill spells it."""
        return self.resource or self.instance_id

    @property
    def stated_id(self) -> str:
        """The machine as its agent spells it."""
        return self.stated or self.instance_id

    @property
    def facts(self) -> Facts:
        """Its type in the catalogue."""
        return instance_facts(self.instance_type)

    def device(self, index: int) -> str:
        """UUID of one of its GPUs or slices, in the form NVML gives it."""
        digest = hashlib.blake2b(f"{self.instance_id}/{index}".encode(), digest_size=16).hexdigest()
        kind = "GPU-" if index < self.facts.gpu_count else "MIG-"
        return kind + "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:]))

    @property
    def devices(self) -> list[str]:
        """UUIDs of its GPUs."""
        return [self.device(i) for i in range(self.facts.gpu_count)]

    def readable(self, second: int) -> list[int]:
        """Indices of the GPUs and slices that can be read at an instant; a GPU that is cut is among them."""
        return list(range(self.facts.gpu_count + (len(self.slices) if second >= self.cut_s else 0)))

    def slice_at(self, index: int) -> Slice | None:
        """The slice that an index names; None for a GPU."""
        return None if index < self.facts.gpu_count else self.slices[index - self.facts.gpu_count]

    def is_cut(self, index: int, second: int) -> bool:
        """Whether an index names a GPU that is cut at an instant, so that no process holds the whole of it."""
        return second >= self.cut_s and any(s.gpu == index for s in self.slices)

    @property
    def gpu_of(self) -> dict[str, str]:
        """UUID of each slice to that of its GPU."""
        return {self.device(self.facts.gpu_count + n): self.device(s.gpu) for n, s in enumerate(self.slices)}

    @property
    def compute_slices(self) -> int:
        """Compute slices of one of its GPUs."""
        return 4 if "A30" in self.facts.gpu_model else 7


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
    """Share of the device that is the tenant's: below a million only where two tenants share it."""
    declared_by: str = ""
    """Who declared the share as a limit: "mps" or "k8s"; empty where it is what the driver measures."""

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
    stated: str | None = None
    """The id that hosts see, where they spell it differently."""
    resource: str | None = None
    """ResourceId in the bill, where it differs."""
    type: str | None = None
    """Type in the provider's words, as its hosts state it beside the size; None where they state neither."""
    grows: tuple[tuple[int, int], ...] = ()
    """(second, GiB) from which on it is larger, ascending; the bill does not follow."""

    @property
    def billed_id(self) -> str:
        """The volume as the bill spells it."""
        return self.resource or self.volume_id

    @property
    def stated_id(self) -> str:
        """The volume as its hosts spell it."""
        return self.stated or self.volume_id

    def size(self, second: int) -> int:
        """Bytes at a second of the day."""
        return next((gib for start, gib in reversed(self.grows) if start <= second), self.gib) << 30

    def told(self, machine: Machine, hour: int) -> list[int]:
        """Seconds of an hour at which a machine that it hangs on states it: once an hour, and when it has grown."""
        begin, end = max(hour * HOUR_S, machine.agent_s), min((hour + 1) * HOUR_S, machine.end_s)
        return [begin, *(t for t, _ in self.grows if begin < t < end)] if begin < end else []


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
    """Savings plan, per hour."""
    commitment_hours: tuple[int, int] = (0, 0)
    spot_prices: dict[str, Decimal] = field(default_factory=dict)

    @property
    def account(self) -> str:
        """Who pays."""
        return self.spec.profile.account

    @property
    def sub_account(self) -> str:
        """Who uses."""
        return self.spec.profile.sub_account

    @property
    def region(self) -> str:
        """Where the machines stand."""
        return self.spec.profile.region

    def lost_readings(self, *, with_late: bool) -> frozenset[tuple[int, int]]:
        """(machine, hour) without device readings, because the shard is truncated or not there yet."""
        return frozenset(self.corrupt) | (frozenset() if with_late else frozenset(self.late))


@cache
def instance_facts(instance_type: str) -> Facts:
    """Facts and list price of an instance type in the region of its cloud's profile."""
    with CATALOGUE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["instance_type"] == instance_type and row["region"] == PROFILES[row["cloud"]].region:
                memory = int(Decimal(row["gpu_memory_gib"]) * 1024**3)
                price = Decimal(row["on_demand_usd_per_hour"])
                spot = Decimal(row["spot_usd_per_hour"]) if row["spot_usd_per_hour"] else None
                return Facts(
                    row["gpu_model"], int(row["gpu_count"]), memory, int(row["vcpus"]), row["memory_gib"], price, spot
                )
    raise KeyError(f"{CATALOGUE}: no row of {instance_type} in the region of its cloud")
