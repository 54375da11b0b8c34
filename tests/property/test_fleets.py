"""Fleets of three clouds with every switch: found addresses equal the true ones, layers lie within the bounds that rows state.

The seeds are committed; `make soak` takes random ones. The truth is computed from what happened, by code that shares nothing with
the pipeline.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import pytest

from tests import nights, truth
from tests.fleet import (
    FleetSpec,
    build,
    full_spec,
    observe,
    random_spec,
    true_ledger,
    whole_spec,
    write_fleet,
)
from tests.fleet.clouds import CLOUDS

SEEDS = (*range(20), 2117639474)
"""The last one has fewer charges than its export has files."""
SOAK_SEEDS = 200
every_cloud = pytest.mark.parametrize("cloud", CLOUDS)


def hold(root: Path, *specs: FleetSpec, deliveries: int = 1) -> None:
    """Run the day of fleets that lie side by side and compare every address and every layer with the truth.

    Args:
        root: an empty folder.
        specs: at most one a cloud, all of one day.
        deliveries: 2 lets the second delivery of the bill arrive, and runs the day again.
    """
    told = [(fleet, observe(fleet)) for fleet in map(build, specs)]
    for fleet, timeline in told:
        write_fleet(fleet, root / "fleet", timeline=timeline)
    (day,) = {spec.day for spec in specs}
    for delivery in range(1, deliveries + 1):
        if delivery == 2:
            shutil.copytree(root / "fleet/restated", root / "fleet", dirs_exist_ok=True)
        run = nights.run(nights.settings_for(root / "fleet", root / "lake"), day)
        assert run.failed == {}, specs
        true = [true_ledger(f, timeline=t, with_late=False, delivery=delivery) for f, t in told]
        assert truth.found_addresses(root / "lake", day) == truth.true_addresses(*true), (specs, delivery)
        assert truth.layer_errors(root / "lake", day, *true) == [], (specs, delivery)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_fleets(seed: int, tmp_path: Path) -> None:
    hold(tmp_path, random_spec(seed))


@every_cloud
def test_fleets_with_every_switch(cloud: str, tmp_path: Path) -> None:
    hold(tmp_path, whole_spec(cloud, 1))


@every_cloud
def test_a_second_delivery_takes_the_place_of_the_first(cloud: str, tmp_path: Path) -> None:
    hold(tmp_path, full_spec(2, cloud=cloud, closed_correction=True, nested_credits=True), deliveries=2)


def test_fleets_of_three_clouds_side_by_side(tmp_path: Path) -> None:
    hold(tmp_path, *(random_spec(40 + i, cloud=cloud) for i, cloud in enumerate(CLOUDS)))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(SOAK_SEEDS))
def test_fleets_of_random_seeds(number: int, tmp_path: Path) -> None:
    hold(tmp_path, random_spec(secrets.randbits(32)))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(SOAK_SEEDS // 10))
def test_three_fleets_of_random_seeds(number: int, tmp_path: Path) -> None:
    hold(tmp_path, *(random_spec(secrets.randbits(32), cloud=cloud) for cloud in CLOUDS))


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A truth of another delivery must not fit, or the tests above show nothing."""
    spec = full_spec(3)
    fleet = build(spec)
    write_fleet(fleet, tmp_path / "fleet")
    nights.run(nights.settings_for(tmp_path / "fleet", tmp_path / "lake"), spec.day)
    other = true_ledger(fleet, with_late=False, delivery=2)
    assert truth.found_addresses(tmp_path / "lake", spec.day) != truth.true_addresses(other)
    assert truth.layer_errors(tmp_path / "lake", spec.day, other) != []
