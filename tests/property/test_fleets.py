"""Fleets with every switch: found addresses equal the true ones, layers lie within the bounds that their rows state.

The seeds are committed; `make soak` takes random ones. The truth is computed from what happened, by code that shares nothing with
the pipeline.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests import nights, truth
from tests.fleet import FleetSpec, build, full_spec, observe, random_spec, true_ledger, write_fleet

SEEDS = (*range(20), 2117639474)
"""The last one has fewer charges than its export has files."""
FULL = range(2)
SOAK_SEEDS = 200


def hold(spec: FleetSpec, root: Path) -> None:
    """Run the fleet's day and compare every address and every layer with the truth."""
    fleet = build(spec)
    timeline = observe(fleet)
    write_fleet(fleet, root / "fleet", timeline=timeline)
    run = nights.run(nights.settings_for(root / "fleet", root / "lake"), spec.day)
    assert run.failed == {}, spec
    true = true_ledger(fleet, timeline=timeline, with_late=False)
    assert truth.found_addresses(root / "lake", spec.day) == truth.true_addresses(true), spec
    assert truth.layer_errors(root / "lake", spec.day, true) == [], spec


@pytest.mark.parametrize("seed", SEEDS)
def test_random_fleets(seed: int, tmp_path: Path) -> None:
    hold(random_spec(seed), tmp_path)


@pytest.mark.parametrize("seed", FULL)
def test_fleets_with_every_switch(seed: int, tmp_path: Path) -> None:
    hold(full_spec(seed), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(SOAK_SEEDS))
def test_fleets_of_random_seeds(number: int, tmp_path: Path) -> None:
    hold(random_spec(secrets.randbits(32)), tmp_path)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A truth of another delivery must not fit, or the tests above show nothing."""
    spec = full_spec(3)
    fleet = build(spec)
    write_fleet(fleet, tmp_path / "fleet")
    nights.run(nights.settings_for(tmp_path / "fleet", tmp_path / "lake"), spec.day)
    other = true_ledger(fleet, with_late=False, delivery=2)
    assert truth.found_addresses(tmp_path / "lake", spec.day) != truth.true_addresses(other)
    assert truth.layer_errors(tmp_path / "lake", spec.day, other) != []
