"""Specs by name: a tiny fleet, one with nearly every switch, one that dice throw, and the sample day."""

from __future__ import annotations

import random
from dataclasses import fields, replace

from tests.fleet.clouds import CLOUDS
from tests.fleet.model import FleetSpec


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


def whole_spec(cloud: str, seed: int = 0, **switches: object) -> FleetSpec:
    """A small fleet of a cloud with every switch on that can be on beside the others."""
    off = {"bundled", "daily_machine_rows", "decimals", "idle"}
    on = {f.name: True for f in fields(FleetSpec) if isinstance(f.default, bool) and f.name not in off}
    return full_spec(seed, **{**on, "cloud": cloud, "invoice": "INV-7", **switches})


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
    facts["cloud"] = dice.choice(CLOUDS)
    facts["currency"] = dice.choice(["USD", "USD", "EUR"])
    facts["invoice"] = dice.choice([None, None, "INV-1"])
    return tiny_spec(seed, **{**facts, **switches})


def bundled_spec(cloud: str = "aws") -> FleetSpec:
    """One cloud of the sample day: the first of a month, so that rows of the month fall on it."""
    everywhere = (
        "gap",
        "held",
        "serve",
        "savings_plan",
        "lost_volume",
        "storage",
        "tax",
        "refund",
        "transfer",
        "overheads",
    )
    own: dict[str, tuple[str, ...]] = {
        "aws": ("spot", "dark", "credit"),
        "azure": ("reservation", "capacity_reservation", "cluster_fee", "network_fees", "scale_set", "mps"),
        "gcp": ("spot", "credit", "nested_credits", "cluster_fee", "network_fees", "mig"),
    }
    return FleetSpec(
        seed=20261001 + CLOUDS.index(cloud),
        cloud=cloud,
        day="2026-10-01",
        hours=24,
        period_s=60,
        window_s=60,
        op_window_s=1_800,
        sample_ppm=20_000,
        blocks=32,
        disk="hourly",
        parts=2 if cloud == "aws" else 1,
        currency="EUR" if cloud == "azure" else "USD",
        bundled=True,
        **dict.fromkeys((*everywhere, *own[cloud]), True),  # type: ignore[arg-type]
    )


def bundled_specs() -> list[FleetSpec]:
    """The sample day on all clouds."""
    return [bundled_spec(cloud) for cloud in CLOUDS]


def with_switches(spec: FleetSpec, **switches: object) -> FleetSpec:
    """The same spec with some switches changed."""
    return replace(spec, **switches)  # type: ignore[arg-type]
