"""Switches to machines, tenants, gaps and volumes: `build` turns a FleetSpec into a Fleet, the same for the same spec."""

from __future__ import annotations

import hashlib
import random
from decimal import Decimal

from tests.fleet.model import HOUR_S, Fleet, FleetSpec, Gap, Machine, Stretch, Tenant, Volume, Work, instance_facts

YESTERDAY = -7 * HOUR_S
"""Start of a process that was there before the day began."""


def build(spec: FleetSpec) -> Fleet:
    """The fleet that a spec describes."""
    return _Roster(spec).bundled() if spec.bundled else _Roster(spec).switched()


def token(spec: FleetSpec, *what: object, digits: int = 17) -> str:
    """A stable identifier in hexadecimal digits."""
    text = "/".join(str(part) for part in (spec.seed, spec.day, *what))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:digits]


class _Roster:
    """Collects the parts of a fleet; `first` and `last` bound the time in which machines run, in s."""

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.random = random.Random(f"roster/{spec.seed}/{spec.day}")
        self.grid = spec.grid_s
        self.first = spec.first_hour * HOUR_S
        self.last = (spec.first_hour + spec.hours) * HOUR_S
        self.machines: list[Machine] = []
        self.tenants: list[Tenant] = []
        self.gaps: list[Gap] = []

    def machine(self, instance_type: str, **facts: object) -> int:
        """Adds a machine; by default it runs all the time, and inside hours where the switch says so."""
        number = len(self.machines)
        start, end, delay = self.first, self.last, 0
        if self.spec.partial_hours and instance_type != "g5.xlarge":
            # Up to a third of an hour, on the grid: the first hour and the last one are not whole.
            third = HOUR_S // 3 // self.grid
            start += self.random.randint(1, third) * self.grid
            end -= self.random.randint(1, third) * self.grid
            delay = 2 * self.grid
        chosen: dict[str, object] = {
            "instance_id": "i-0" + token(self.spec, "machine", number, digits=16),
            "instance_type": instance_type,
            "node": f"ip-10-0-{number + 1}-{self.spec.seed % 250 + 4}.ec2.internal",
            "start_s": start,
            "end_s": end,
        }
        chosen.update(facts)
        chosen.setdefault("agent_s", int(str(chosen["start_s"])) + delay)
        self.machines.append(Machine(**chosen))  # type: ignore[arg-type]
        return number

    def near(self, machine: int, parts: int, of: int) -> int:
        """An instant on the grid at about parts/of of a machine's observed time."""
        start, end = self.machines[machine].agent_s, self.machines[machine].end_s
        return start + (end - start) * parts // of // self.grid * self.grid

    def switched(self) -> Fleet:
        """The fleet that the switches choose."""
        spec = self.spec
        train = self.machine("g5.12xlarge", pricing="savings_plan" if spec.savings_plan else "on_demand")
        self._training(train)
        if spec.gap:
            start = self.near(train, 3, 10)
            self.gaps.append(Gap(train, start, start + self.random.randint(3, 6) * self.grid, is_marked=False))
        if spec.serve or spec.shared_gpu:
            serve = self.machine("g5.xlarge", is_arn=True)
            self._serving(serve)
            if spec.gap:
                start = self.near(serve, 6, 10)
                self.gaps.append(Gap(serve, start, start + self.random.randint(3, 6) * self.grid, is_marked=True))
        if spec.spot:
            self._spot(self.machine("g4dn.12xlarge", pricing="spot"))
        if spec.dark:
            self.machine("g5.2xlarge", has_agent=False)
        if spec.unbilled:
            self.machine("g4dn.xlarge", is_billed=False)
        first_hour, last_hour = self.first // HOUR_S, self.last // HOUR_S - 1
        price = instance_facts("g5.12xlarge").list_price
        return Fleet(
            spec,
            tuple(self.machines),
            tuple(self.tenants),
            tuple(self.gaps),
            self._volumes(train),
            corrupt=((train, last_hour),) if spec.corrupt_shard else (),
            late=((train, first_hour),) if spec.late_shard else (),
            duplicated=((train, first_hour),) if spec.duplicate_shard else (),
            # At the plan's rate this pays 0.88 of an hour: part of a whole one, and more than some short ones.
            commitment=(price * Decimal("0.572")).quantize(Decimal("0.01")) if spec.savings_plan else Decimal(0),
            commitment_hours=(first_hour, min(24, last_hour + 2)),
            spot_prices={"g4dn.12xlarge": Decimal("1.2875")},
        )

    def _training(self, machine: int) -> None:
        """Llama-3-8B on the GPUs that are neither idle nor held, with start-up, steps and a tail in which nothing runs."""
        spec, grid = self.spec, self.grid
        free = instance_facts(self.machines[machine].instance_type).gpu_count - spec.idle - spec.held
        seats = tuple((machine, i) for i in range(free))
        if spec.held:
            started = YESTERDAY if self.machines[machine].start_s == 0 else self.machines[machine].agent_s
            middle = self.near(machine, 2, 5)
            self.tenants.append(
                Tenant(
                    ((machine, free),),
                    started,
                    (
                        Stretch("held", self.machines[machine].agent_s, middle, 0),
                        Stretch("held", middle, self.near(machine, 4, 5), self.random.randint(1, 400) * 1_000),
                    ),
                )
            )
        work = Work(
            "llama-3-8b",
            "train",
            (1,),
            2_048,
            spec.blocks,
            2_000_000 + 200_000 * spec.blocks,
            checkpoint_every=400,
            checkpoint_us=9_000_000,
        )
        job = f"train-llama-{token(spec, 'train', digits=6)}"
        start, end = self.machines[machine].agent_s + 2 * grid, self.machines[machine].end_s - 4 * grid
        crash = self.near(machine, 3, 5)
        runs = [(start, crash), (crash + grid, end)] if spec.restart else [(start, end)]
        for attempt, (begin, stop) in enumerate(runs):
            ready = begin + self.random.randint(2, 4) * grid
            stretches = [Stretch("startup", begin, ready, 150_000), Stretch("steps", ready, stop - 2 * grid, 930_000)]
            # The process of the last attempt outlives its steps; a process that failed is gone at once.
            tail = Stretch("held", stop - 2 * grid, stop, 40_000)
            if stop == end:
                stretches.append(tail)
            self.tenants.append(Tenant(seats, begin, tuple(stretches), job, attempt, "train", work))

    def _serving(self, machine: int) -> None:
        spec, grid = self.spec, self.grid
        begin, end = self.machines[machine].agent_s, self.machines[machine].end_s
        bert = Work("bert-base", "prefill", (64, 256), 128, spec.blocks, 500_000, input_ppm=0, dtype="fp16")
        names = [f"serve-{n}-{token(spec, n, digits=6)}" for n in ("bert", "resnet")]
        if not spec.shared_gpu:
            # There since the day before, and without a unit at first: not startup, as no one saw it start.
            started = YESTERDAY if begin == 0 else begin
            first = Stretch("held" if begin == 0 else "startup", begin, begin + 5 * grid, 20_000)
            stretches = (first, Stretch("steps", first.end_s, end - grid, 300_000), Stretch("held", end - grid, end, 0))
            self.tenants.append(Tenant(((machine, 0),), started, stretches, names[0], 0, "serve", bert))
            return
        resnet = Work("resnet-50", "prefill", (128,), 0, 16, 400_000, input_ppm=100_000, dtype="fp16")
        shares = self.random.choice([(600_000, 400_000), (500_000, 300_000)])
        steps = (Stretch("steps", begin + 3 * grid, end - 5 * grid, sum(shares)),)
        for name, work, share in zip(names, (bert, resnet), shares, strict=True):
            self.tenants.append(Tenant(((machine, 0),), steps[0].start_s, steps, name, 0, "serve", work, share))

    def _spot(self, machine: int) -> None:
        spec, grid = self.spec, self.grid
        begin, middle = self.machines[machine].agent_s, self.near(machine, 1, 2)
        work = Work("resnet-50", "prefill", (128, 512), 0, 16, 700_000, input_ppm=250_000, dtype="fp16")
        stretches = (
            Stretch("startup", begin + grid, begin + 3 * grid, 50_000),
            Stretch("steps", begin + 3 * grid, middle, 200_000),
        )
        job = f"serve-resnet-spot-{token(spec, 'spot', digits=6)}"
        self.tenants.append(Tenant(((machine, 0),), begin + grid, stretches, job, 0, "serve", work))

    def _volumes(self, train: int) -> tuple[Volume, ...]:
        if not self.spec.disk and not self.spec.straddling:
            return ()
        first, last = self.first // HOUR_S, self.last // HOUR_S
        attached = [(train, first, max(first + 1, last - 1))]
        if len(self.machines) > 1 and self.machines[1].has_agent and last - first > 2:
            attached.append((1, last - 2, last - 1))  # moves to the second machine within an hour
        return (Volume("vol-0" + token(self.spec, "volume", digits=16), 1_000, tuple(attached)),)

    def bundled(self) -> Fleet:
        """Training, serving, a spot machine with a notebook, and a machine without telemetry."""
        spec, grid, hour = self.spec, self.grid, HOUR_S
        train = self.machine(
            "p4d.24xlarge",
            pricing="savings_plan",
            start_s=4 * hour + 12 * 60,
            end_s=18 * hour + 38 * 60,
            agent_s=4 * hour + 15 * 60,
        )
        serve = self.machine("g5.12xlarge", start_s=0, end_s=10 * hour, is_arn=True)
        spot = self.machine(
            "g4dn.12xlarge",
            pricing="spot",
            start_s=8 * hour + 21 * 60,
            end_s=13 * hour + 47 * 60,
            agent_s=8 * hour + 22 * 60,
        )
        self.machine("g5.2xlarge", start_s=14 * hour + 5 * 60, end_s=17 * hour + 30 * 60, has_agent=False)
        llama = Work("llama-3-8b", "train", (4,), 2_048, 32, 3_800_000, checkpoint_every=300, checkpoint_us=42_000_000)
        begin, ready, end = 4 * hour + 18 * 60, 4 * hour + 31 * 60, 18 * hour + 30 * 60
        run = (
            Stretch("startup", begin, ready, 120_000),
            Stretch("steps", ready, end, 950_000),
            Stretch("held", end, end + 4 * 60, 30_000),
        )
        seats = tuple((train, i) for i in range(8))
        self.tenants.append(Tenant(seats, begin, run, "train-llama-3-8b", 0, "train", llama))
        self.gaps.append(Gap(train, 9 * hour + 40 * 60, 9 * hour + 52 * 60, is_marked=False))
        bert = Work("bert-base", "prefill", (64, 256), 128, 12, 260_000, input_ppm=0, dtype="fp16")
        resnet = Work("resnet-50", "prefill", (128, 512), 0, 16, 300_000, input_ppm=300_000, dtype="fp16")
        for index, (name, work, stop) in enumerate(
            [("serve-bert", bert, 10), ("serve-bert", bert, 8), ("serve-resnet", resnet, 6)]
        ):
            stretches = (
                Stretch("held", 0, 10 * grid, 20_000),
                Stretch("steps", 10 * grid, stop * hour - 10 * grid, 400_000),
                Stretch("held", stop * hour - 10 * grid, stop * hour, 0),
            )
            self.tenants.append(Tenant(((serve, index),), YESTERDAY, stretches, f"{name}-{index}", 0, "serve", work))
        notebook = (
            Stretch("held", 9 * hour, 10 * hour + 30 * 60, 80_000),
            Stretch("held", 10 * hour + 30 * 60, 12 * hour, 0),
        )
        self.tenants.append(Tenant(((spot, 0),), 9 * hour, notebook))
        volume = Volume("vol-0" + token(spec, "volume", digits=16), 4_000, ((train, 4, 19),))
        return Fleet(
            spec,
            tuple(self.machines),
            tuple(self.tenants),
            tuple(self.gaps),
            (volume,),
            commitment=Decimal("9.50"),
            commitment_hours=(0, 24),
            spot_prices={"g4dn.12xlarge": Decimal("1.2875")},
        )
