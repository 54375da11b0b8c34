"""The sample day: who runs where on each cloud. Knows no bill and no telemetry."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from tests.fleet.model import HOUR_S, Fleet, Gap, Slice, Stretch, Tenant, Work

if TYPE_CHECKING:
    from tests.fleet.roster import Roster

YESTERDAY = -7 * HOUR_S
"""Start of a process that was there before the day began."""


def bundled(roster: Roster) -> Fleet:
    """The machines of the spec's cloud on the sample day."""
    return {"aws": _aws, "azure": _azure, "gcp": _gcp}[roster.spec.cloud](roster)


def clock(hour: int, minute: int = 0) -> int:
    """Second of the day."""
    return hour * HOUR_S + minute * 60


def _aws(roster: Roster) -> Fleet:
    """Training, serving, a spot machine with a notebook, and a machine without telemetry."""
    grid = roster.grid
    train = roster.machine(
        "train",
        "p4d.24xlarge",
        pricing="savings_plan",
        start_s=clock(4, 12),
        end_s=clock(18, 38),
        agent_s=clock(4, 15),
    )
    serve = roster.machine("serve", "g5.12xlarge", start_s=0, end_s=clock(10))
    spot = roster.machine(
        "spot",
        "g4dn.12xlarge",
        pricing="spot",
        start_s=clock(8, 21),
        end_s=clock(13, 47),
        agent_s=clock(8, 22),
    )
    roster.machine("dark", "g5.2xlarge", start_s=clock(14, 5), end_s=clock(17, 30), has_agent=False)
    llama = Work("llama-3-8b", "train", (4,), 2_048, 32, 3_800_000, checkpoint_every=300, checkpoint_us=42_000_000)
    begin, ready, end = clock(4, 18), clock(4, 31), clock(18, 30)
    run = (
        Stretch("startup", begin, ready, 120_000),
        Stretch("steps", ready, end, 950_000),
        Stretch("held", end, end + 4 * 60, 30_000),
    )
    seats = tuple((train, i) for i in range(8))
    roster.tenants.append(Tenant(seats, begin, run, "train-llama-3-8b", 0, "train", llama))
    roster.gaps.append(Gap(train, clock(9, 40), clock(9, 52), is_marked=False))
    bert = Work("bert-base", "prefill", (64, 256), 128, 12, 260_000, input_ppm=0, dtype="fp16")
    resnet = Work("resnet-50", "prefill", (128, 512), 0, 16, 300_000, input_ppm=300_000, dtype="fp16")
    for index, (name, work, stop) in enumerate(
        [("serve-bert", bert, 10), ("serve-bert", bert, 8), ("serve-resnet", resnet, 6)]
    ):
        stretches = (
            Stretch("held", 0, 10 * grid, 20_000),
            Stretch("steps", 10 * grid, clock(stop) - 10 * grid, 400_000),
            Stretch("held", clock(stop) - 10 * grid, clock(stop), 0),
        )
        roster.tenants.append(Tenant(((serve, index),), YESTERDAY, stretches, f"{name}-{index}", 0, "serve", work))
    notebook = (Stretch("held", clock(9), clock(10, 30), 80_000), Stretch("held", clock(10, 30), clock(12), 0))
    roster.tenants.append(Tenant(((spot, 0),), clock(9), notebook))
    return Fleet(
        roster.spec,
        tuple(roster.machines),
        tuple(roster.tenants),
        tuple(roster.gaps),
        (roster.volume(4_000, ((train, 4, 19),)),),
        commitment=Decimal("9.50"),
        commitment_hours=(0, 24),
        spot_prices={"g4dn.12xlarge": Decimal("1.2875")},
    )


def _azure(roster: Roster) -> Fleet:
    """Two members of a scale set: one trains ResNet-50 on two of its GPUs; on the other two jobs share one under MPS limits."""
    train = roster.machine(
        "train",
        pricing="savings_plan",
        start_s=clock(6, 2),
        end_s=clock(12, 50),
        agent_s=clock(6, 6),
    )
    serve = roster.machine("serve", start_s=clock(9, 10), end_s=clock(15), agent_s=clock(9, 11))
    resnet = Work("resnet-50", "train", (1_024,), 0, 16, 400_000, checkpoint_every=4_000, checkpoint_us=20_000_000)
    run = (
        Stretch("startup", clock(6, 9), clock(6, 15), 110_000),
        Stretch("steps", clock(6, 15), clock(12, 40), 900_000),
        Stretch("held", clock(12, 40), clock(12, 45), 20_000),
    )
    seats = ((train, 0), (train, 1))
    roster.tenants.append(Tenant(seats, clock(6, 9), run, "train-resnet-50", 0, "train", resnet))
    held = (Stretch("held", clock(7), clock(11), 150_000),)
    roster.tenants.append(Tenant(((train, 2),), clock(7), held))
    roster.gaps.append(Gap(train, clock(10, 20), clock(10, 31), is_marked=True))
    bert = Work("bert-base", "prefill", (64, 256), 128, 12, 300_000, input_ppm=100_000, dtype="fp16")
    small = Work("resnet-50", "prefill", (128,), 0, 16, 350_000, input_ppm=300_000, dtype="fp16")
    for name, work, limit, first, last in (
        ("serve-bert-mps", bert, 500_000, (9, 20), (14, 50)),
        ("serve-resnet-mps", small, 300_000, (10, 30), (14, 10)),
    ):
        begin, end = clock(*first), clock(*last)
        plan = (Stretch("startup", begin, begin + 3 * 60, 60_000), Stretch("steps", begin + 3 * 60, end, 400_000))
        roster.tenants.append(Tenant(((serve, 0),), begin, plan, name, 0, "serve", work, limit, "mps"))
    return Fleet(
        roster.spec,
        tuple(roster.machines),
        tuple(roster.tenants),
        tuple(roster.gaps),
        (roster.volume(1_024, ((train, 6, 13),)),),
        commitment=Decimal("4.20"),
        commitment_hours=(0, 24),
    )


def _gcp(roster: Roster) -> Fleet:
    """A machine that trains over the end of an invoice month, one whose GPU is cut into slices, and a spot machine."""
    train = roster.machine(
        "train",
        "a2-highgpu-2g",
        pricing="savings_plan",
        start_s=clock(4, 40),
        end_s=clock(11, 20),
        agent_s=clock(4, 42),
    )
    slices = tuple(Slice(0, profile) for profile in ("3g.40gb", "2g.20gb", "1g.10gb"))
    cut = roster.machine("mig", "a2-ultragpu-1g", start_s=clock(8), end_s=clock(14, 30), slices=slices)
    roster.machine("spot", "a2-highgpu-1g", pricing="spot", start_s=clock(15, 6), end_s=clock(17, 44))
    bert = Work("bert-base", "train", (512,), 128, 12, 420_000, checkpoint_every=4_000, checkpoint_us=15_000_000)
    run = (
        Stretch("startup", clock(4, 45), clock(4, 52), 90_000),
        Stretch("steps", clock(4, 52), clock(11, 10), 880_000),
        Stretch("held", clock(11, 10), clock(11, 14), 10_000),
    )
    roster.tenants.append(Tenant(((train, 0), (train, 1)), clock(4, 45), run, "train-bert-base", 0, "train", bert))
    roster.gaps.append(Gap(train, clock(8, 15), clock(8, 24), is_marked=False))
    serve = Work("bert-base", "prefill", (16, 64), 128, 12, 500_000, input_ppm=200_000, dtype="fp16")
    first = roster.machines[cut].facts.gpu_count
    for index, (begin, end) in enumerate([(clock(8, 10), clock(14, 20)), (clock(9), clock(12, 30))]):
        plan = (Stretch("startup", begin, begin + 2 * 60, 70_000), Stretch("steps", begin + 2 * 60, end, 350_000))
        job = f"serve-bert-slice-{index}"
        roster.tenants.append(Tenant(((cut, first + index),), begin, plan, job, 0, "serve", serve))
    notebook = (Stretch("held", clock(15, 30), clock(17), 60_000),)
    machine = len(roster.machines) - 1
    roster.tenants.append(Tenant(((machine, 0),), clock(15, 30), notebook))
    return Fleet(
        roster.spec,
        tuple(roster.machines),
        tuple(roster.tenants),
        tuple(roster.gaps),
        (roster.volume(2_000, ((train, 4, 12),)),),
        commitment=Decimal("0.60"),
        commitment_hours=(0, 24),
        spot_prices={"a2-highgpu-1g": Decimal("1.10")},
    )
