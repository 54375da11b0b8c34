"""Switches to machines, tenants, gaps and volumes: `build` turns a FleetSpec into a Fleet, the same for the same spec."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from decimal import Decimal

from tests.fleet.bundled import YESTERDAY, bundled
from tests.fleet.clouds import Ids, aws_machine, azure_machine, gcp_machine, node_name, volume_ids
from tests.fleet.model import HOUR_S, MILLION, Fleet, FleetSpec, Gap, Machine, Slice, Stretch, Tenant, Volume, Work

LAYOUTS = (
    ("3g.40gb", "2g.20gb", "1g.10gb"),
    ("1c.3g.40gb", "2c.3g.40gb", "2g.20gb"),
    ("4g.40gb", "3g.40gb"),
    ("2g.20gb", "1g.10gb+me"),
    ("3g.40gb", ""),
)
"""Profiles of the slices of a GPU of 80 GB and seven compute slices; one that the driver does not name."""


def build(spec: FleetSpec) -> Fleet:
    """The fleet that a spec describes."""
    return bundled(Roster(spec)) if spec.bundled else Roster(spec).switched()


def repeated(spec: FleetSpec, day: str) -> Fleet:
    """Two machines with a volume each, a job and a notebook, on one of many days: machines and volumes are the spec's."""
    return Roster(spec).repeated(day)


def token(spec: FleetSpec, *what: object, digits: int = 17) -> str:
    """A stable identifier in hexadecimal digits."""
    text = "/".join(str(part) for part in (spec.seed, spec.day, *what))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:digits]


class Roster:
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

    def machine(self, role: str, instance_type: str | None = None, **facts: object) -> int:
        """Adds a machine; by default it runs all the time, and inside hours where the switch says so."""
        number = len(self.machines)
        start, end, delay = self.first, self.last, 0
        ids = self.ids(number, role)
        if self.spec.partial_hours and role != "serve":
            # Up to a third of an hour, on the grid: the first hour and the last one are not whole.
            third = HOUR_S // 3 // self.grid
            start += self.random.randint(1, third) * self.grid
            end -= self.random.randint(1, third) * self.grid
            delay = 2 * self.grid
        chosen: dict[str, object] = {
            "instance_id": ids.known,
            "stated": ids.stated,
            "resource": ids.billed,
            "member": ids.member,
            "instance_type": instance_type or self.spec.profile.types[role],
            "node": node_name(self.spec.cloud, number, self.spec.seed),
            "start_s": start,
            "end_s": end,
        }
        chosen.update(facts)
        chosen.setdefault("agent_s", int(str(chosen["start_s"])) + delay)
        self.machines.append(Machine(**chosen))  # type: ignore[arg-type]
        return number

    def ids(self, number: int, role: str) -> Ids:
        """Spellings of a machine; the bill spells the serving machine another way where it can."""
        spec, owner = self.spec, self.spec.profile.sub_account

        def digits(*what: object, digits: int) -> str:
            return token(spec, *what, digits=digits)

        if spec.cloud == "aws":
            return aws_machine(digits, number, spec.profile.region, owner, is_arn=role == "serve")
        if spec.cloud == "azure":
            return azure_machine(digits, number, owner, in_set=spec.scale_set, is_mixed=role == "serve")
        return gcp_machine(digits, number, owner)

    def near(self, machine: int, parts: int, of: int) -> int:
        """An instant on the grid at about parts/of of a machine's observed time."""
        start, end = self.machines[machine].agent_s, self.machines[machine].end_s
        return start + (end - start) * parts // of // self.grid * self.grid

    def switched(self) -> Fleet:
        """The fleet that the switches choose."""
        spec = self.spec
        train = self.machine("train", pricing="savings_plan" if spec.savings_plan else "on_demand")
        self._training(train)
        if spec.gap:
            start = self.near(train, 3, 10)
            self.gaps.append(Gap(train, start, start + self.random.randint(3, 6) * self.grid, is_marked=False))
        if spec.serve or spec.shared_gpu:
            serve = self.machine("serve")
            self._serving(serve)
            if spec.gap:
                start = self.near(serve, 6, 10)
                self.gaps.append(Gap(serve, start, start + self.random.randint(3, 6) * self.grid, is_marked=True))
        if spec.spot:
            self._spot(self.machine("spot", pricing="spot"))
        if spec.dark:
            self.machine("dark", has_agent=False)
        if spec.second_currency:
            account, currency = spec.profile.second
            self._abroad(self.machine("second", account=account, currency=currency))
        if spec.unbilled:
            self.machine("unbilled", is_billed=False)
        if spec.mig:
            self._sliced()
        for role, declared_by in (("mps", "mps"), ("fractions", "k8s")):
            if getattr(spec, role):
                self._limited(self.machine(role), declared_by)
        first_hour, last_hour = self.first // HOUR_S, self.last // HOUR_S - 1
        price = self.machines[train].facts.list_price
        return Fleet(
            spec,
            tuple(self.machines),
            tuple(self.tenants),
            tuple(self.gaps),
            self._volumes(train),
            corrupt=((train, last_hour),) if spec.corrupt_shard else (),
            late=((train, first_hour),) if spec.late_shard else (),
            duplicated=((train, first_hour),) if spec.duplicate_shard else (),
            # At the plan's rate this pays 0.88 of an hour: part of a whole one, and more than some short ones. On GCP it
            # pays cores and memory alone.
            commitment=(price * Decimal("0.1" if spec.cloud == "gcp" else "0.572")).quantize(Decimal("0.01"))
            if spec.savings_plan
            else Decimal(0),
            commitment_hours=(first_hour, min(24, last_hour + 2)),
            spot_prices={spec.profile.types["spot"]: spec.profile.spot_price},
        )

    def _training(self, machine: int) -> None:
        """Llama-3-8B on the GPUs that are neither idle nor held, with start-up, steps and a tail in which nothing runs."""
        spec, grid = self.spec, self.grid
        free = self.machines[machine].facts.gpu_count - spec.idle - spec.held
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

    def _abroad(self, machine: int) -> None:
        """A job of the second billing account, on a machine that starts with it."""
        begin, end, grid = self.machines[machine].agent_s, self.machines[machine].end_s, self.grid
        bert = Work("bert-base", "prefill", (16,), 128, self.spec.blocks, 600_000, input_ppm=500_000, dtype="fp16")
        plan = (
            Stretch("startup", begin + grid, begin + 2 * grid, 40_000),
            Stretch("steps", begin + 2 * grid, end - grid, 250_000),
        )
        job = f"serve-bert-abroad-{token(self.spec, 'abroad', digits=6)}"
        self.tenants.append(Tenant(((machine, 0),), begin + grid, plan, job, 0, "serve", bert))

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

    def _sliced(self) -> None:
        """A machine with one GPU cut, or two: tenants on slices, a slice that two share, slices that nobody holds.

        The GPUs are whole at first, and a notebook holds one, unless they were cut before the machine's time began.
        """
        spec, grid = self.spec, self.grid
        number = self.machine("mig")
        machine = self.machines[number]
        layouts = [self.random.choice(LAYOUTS) for _ in range(min(2, machine.facts.gpu_count))]
        slices = tuple(Slice(gpu, profile) for gpu, layout in enumerate(layouts) for profile in layout)
        edge = HOUR_S * (machine.agent_s // HOUR_S + 1)
        cut = self.random.choice([0, self.near(number, 1, 3), edge if edge < machine.end_s - HOUR_S // 2 else 0])
        machine = self.machines[number] = replace(machine, slices=slices, cut_s=cut)
        begin, end = max(machine.agent_s, cut), machine.end_s
        if cut:
            notebook = Stretch("held", machine.agent_s + grid, cut, self.random.randint(0, 300) * 1_000)
            self.tenants.append(Tenant(((number, 0),), machine.agent_s + grid, (notebook,)))
        index = machine.facts.gpu_count
        seats = tuple((number, index + i) for i in (0, len(layouts[0]))[: len(layouts)])
        bert = Work("bert-base", "prefill", (16, 64), 128, spec.blocks, 700_000, input_ppm=200_000, dtype="fp16")
        steps = (
            Stretch("startup", begin + grid, begin + 3 * grid, 100_000),
            Stretch("steps", begin + 3 * grid, end - 4 * grid, 500_000),
            Stretch("held", end - 4 * grid, end - grid, self.random.randint(0, 200) * 1_000),
        )
        job = f"serve-slices-{token(spec, 'slices', digits=6)}"
        self.tenants.append(Tenant(seats, begin + grid, steps, job, 0, "serve", bert))
        # Nobody measures how two processes share a slice: an even split.
        both = (Stretch("steps", begin + 2 * grid, end - 6 * grid, 300_000),)
        for name in ("left", "right"):
            job = f"serve-{name}-{token(spec, name, digits=6)}"
            pair = Tenant(((number, index + 1),), both[0].start_s, both, job, 0, "serve", bert, MILLION // 2)
            self.tenants.append(pair)

    def _limited(self, machine: int, declared_by: str) -> None:
        """Two tenants under declared limits, at once and alone; what the limits leave is nobody's."""
        spec, grid = self.spec, self.grid
        begin, end = self.machines[machine].agent_s, self.machines[machine].end_s
        limits = self.random.choice([(600_000, 300_000), (250_000, 500_000), (333_000, 333_000), (400_000, 600_000)])
        works = (
            Work("bert-base", "prefill", (16, 64), 128, spec.blocks, 800_000, input_ppm=150_000, dtype="fp16"),
            Work("resnet-50", "prefill", (32,), 0, 16, 900_000, input_ppm=300_000, dtype="fp16"),
        )
        early, late = self.near(machine, 1, 4), self.near(machine, 3, 4)
        plans = (
            (
                Stretch("startup", begin + grid, begin + 3 * grid, 80_000),
                Stretch("steps", begin + 3 * grid, late, 400_000),
                Stretch("held", late, late + grid, 10_000),
            ),
            (
                Stretch("startup", early, early + 2 * grid, 60_000),
                Stretch("steps", early + 2 * grid, end - 3 * grid, 350_000),
            ),
        )
        for name, plan, work, limit in zip(("one", "two"), plans, works, limits, strict=True):
            job = f"serve-{declared_by}-{name}-{token(spec, declared_by, name, digits=6)}"
            seat = ((machine, 0),)
            self.tenants.append(Tenant(seat, plan[0].start_s, plan, job, 0, "serve", work, limit, declared_by))

    def _volumes(self, train: int) -> tuple[Volume, ...]:
        if not self.spec.disk and not self.spec.straddling:
            return ()
        first, last = self.first // HOUR_S, self.last // HOUR_S
        attached = [(train, first, max(first + 1, last - 1))]
        if len(self.machines) > 1 and self.machines[1].has_agent and last - first > 2:
            attached.append((1, last - 2, last - 1))  # moves to the second machine within an hour
        return (self.volume(1_000, tuple(attached)),)

    def volume(self, gib: int, attached: tuple[tuple[int, int, int], ...], *name: int) -> Volume:
        """A volume; where the switch says so its hosts state size and type, and it grows."""
        digits = token(self.spec, "volume", *name, digits=16)
        ids = volume_ids(self.spec.cloud, digits, self.spec.profile.sub_account)
        if not self.spec.volume_facts:
            return Volume(ids.known, gib, attached, ids.stated, ids.billed)
        grows = (self.near(attached[0][0], 1, 3), gib * 6 // 5)
        return Volume(ids.known, gib, attached, ids.stated, ids.billed, self.spec.profile.volume_type, (grows,))

    def repeated(self, day: str) -> Fleet:
        """A day of a history. Everything is seen, and a unit is long, so that a day costs little to make."""
        spec, grid = self.spec, self.grid
        work = Work("bert-base", "prefill", (64,), 128, 1, 60_000_000, dtype="fp16")
        volumes: list[Volume] = []
        for role, gib in (("serve", 500), ("fractions", 200)):
            number = self.machine(role)
            machine = self.machines[number]
            begin, end = machine.agent_s, machine.end_s
            plan = (
                Stretch("startup", begin, begin + grid, 50_000),
                Stretch("steps", begin + grid, end - grid, 300_000),
            )
            if volumes:
                self.tenants.append(Tenant(((number, 0),), begin, (Stretch("held", begin, end, 20_000),)))
            else:
                job = f"{role}-{day}-{token(spec, role, day, digits=6)}"
                self.tenants.append(Tenant(((number, 0),), begin, plan, job, 0, "serve", work))
            hours = (number, machine.start_s // HOUR_S, machine.end_s // HOUR_S)
            volume = self.volume(gib, (hours,), number)
            volumes.append(replace(volume, type=spec.profile.volume_type, grows=()))
        return Fleet(replace(spec, day=day), tuple(self.machines), tuple(self.tenants), volumes=tuple(volumes))
