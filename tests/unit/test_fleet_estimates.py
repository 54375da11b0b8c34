"""Estimates of a fleet's truth by hand: machines and volumes past the watermark, at their price times a factor."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.fleet import Fleet, Truth, build, tiny_spec, true_ledger
from tests.fleet.arithmetic import UNIT
from tests.fleet.clouds import PROFILES
from tests.fleet.estimates import volume_listed
from tests.fleet.model import HOUR, SECOND

DAY_NS = tiny_spec().day_ns


def totals(truth: Truth) -> dict[tuple[str, int], int]:
    """(resource, hour) to the estimate, units."""
    found: dict[tuple[str, int], int] = defaultdict(int)
    for a in truth.addresses:
        if a.estimated is not None:
            assert a.billed is a.effective is a.listed is None
            found[a.charge.split("/", 1)[1], (a.hour_ns - truth.day_ns) // HOUR] += a.estimated
    return dict(found)


def open_fleet(cloud: str = "aws", **switches: Any) -> Fleet:
    """A machine that runs for three hours, and a bill of the first."""
    return build(tiny_spec(5, cloud=cloud, bill_until=1, volume_facts=True, held=False, hours=3, **switches))


def test_a_volume_costs_its_list_price_by_size_over_the_hours_of_the_month() -> None:
    price = PROFILES["aws"].volume_rate
    # 1,000 GiB x 0.08 / 744 h = 0.10752688172043
    assert volume_listed(price, 1_000 << 30, DAY_NS) == 107_526_881_720
    february = tiny_spec(day="2026-02-03").day_ns
    # 80 / 672 = 0.119047619047619…; half a GiB is half of 0.08 / 672
    assert volume_listed(price, 1_000 << 30, february) == 119_047_619_048
    assert volume_listed(price, 1 << 29, february) == 59_523_810


def test_hours_past_the_watermark_are_estimates_and_the_volume_follows_its_machine() -> None:
    fleet = open_fleet()
    truth = true_ledger(fleet)
    machine, volume = fleet.machines[0], fleet.volumes[0]
    assert totals(truth) == {
        (machine.instance_id, 1): 5_672_000_000_000,
        (machine.instance_id, 2): 5_672_000_000_000,
        # It grew to 1,200 GiB at the end of the first hour: 96 / 744.
        (volume.volume_id, 1): 129_032_258_065,
    }
    places = {a.place for a in truth.addresses if a.charge.endswith(volume.volume_id)}
    assert places == set(truth.vectors[machine.instance_id, 1])
    assert {a.pricing for a in truth.addresses if a.estimated is not None} == {"Standard"}


def test_a_factor_is_that_of_account_and_family_and_rounds_half_to_even() -> None:
    fleet = open_fleet()
    account = PROFILES["aws"].account
    alphas = {f"aws|{account}|g5.12xlarge": 99 * UNIT // 100, f"aws|{account}|gp3": 1_010_000_000_001, "aws||gp3": 1}
    found = totals(true_ledger(fleet, alphas=alphas))
    assert found[fleet.machines[0].instance_id, 1] == 5_615_280_000_000
    # 129,032,258,065 x 1.010000000001 = 130,322,580,645.78
    assert found[fleet.volumes[0].volume_id, 1] == 130_322_580_646


def test_a_machine_that_no_bill_names_takes_the_factor_without_an_account() -> None:
    fleet = open_fleet(unbilled=True)
    machine = fleet.machines[-1]
    alphas = {"aws||g4dn.xlarge": 1_020_000_000_000, f"aws|{PROFILES['aws'].account}|g4dn.xlarge": 1}
    truth = true_ledger(fleet, alphas=alphas)
    assert totals(truth)[machine.instance_id, 1] == 536_520_000_000
    assert truth.unmatched == [(machine.instance_id, 0)]


def test_a_contracted_price_goes_before_the_list_and_the_spot_price_where_the_bill_knows_nothing_else() -> None:
    fleet = open_fleet(spot=True)
    account, spot = PROFILES["aws"].account, fleet.machines[-1]
    contracted = {f"aws|{account}|{kind}|us-east-1": "4.5 USD" for kind in ("g5.12xlarge", "g4dn.12xlarge")}
    truth = true_ledger(fleet, contracted=contracted)
    found = totals(truth)
    assert found[fleet.machines[0].instance_id, 1] == 4_500_000_000_000
    assert found[spot.instance_id, 1] == 1_287_500_000_000
    pricing = {a.pricing for a in truth.addresses if a.charge == f"estimate:aws/{spot.instance_id}"}
    assert pricing == {"Dynamic"}


def test_a_volume_that_states_nothing_or_is_billed_has_no_estimate() -> None:
    silent = build(tiny_spec(5, bill_until=1, held=False, hours=3))
    assert {name for name, _ in totals(true_ledger(silent))} == {silent.machines[0].instance_id}
    billed = build(tiny_spec(5, volume_facts=True, held=False, hours=3))
    assert totals(true_ledger(billed)) == {}


def test_an_unbilled_volume_before_the_watermark_has_no_address() -> None:
    fleet = build(tiny_spec(5, volume_facts=True, disk="", straddling=True, held=False, hours=3))
    assert fleet.volumes[0].attached and totals(true_ledger(fleet)) == {}


@pytest.mark.parametrize("cloud", ["azure", "gcp"])
def test_other_clouds_estimate_at_their_own_prices(cloud: str) -> None:
    fleet = open_fleet(cloud)
    found = totals(true_ledger(fleet))
    machine, volume = fleet.machines[0], fleet.volumes[0]
    size = volume.size(3_600)
    profile = PROFILES[cloud]
    # Azure sells its disks by tier: there is no price of a GiB, and so no estimate.
    wanted = None if cloud == "azure" else volume_listed(profile.volume_rate, size, DAY_NS)
    assert found.get((volume.volume_id, 1)) == wanted
    assert found[machine.instance_id, 2] == round(machine.facts.list_price * UNIT)
    # Azure bills days: its bill of the first hour has no machine at all.
    assert ((machine.instance_id, 0) in found) == (cloud == "azure")


def test_an_estimate_goes_by_the_longest_observed_time_and_what_others_lack_is_unobserved() -> None:
    fleet = build(tiny_spec(5, bill_until=1, held=False, gap=True, hours=3, first_hour=0))
    truth = true_ledger(fleet)
    machine = fleet.machines[0].instance_id
    for hour in (1, 2):
        by_device: dict[Any, int] = defaultdict(int)
        for place, ns in truth.observed[machine, hour].items():
            by_device[place.device] += ns
        longest = max(by_device.values())
        assert totals(truth)[machine, hour] == round(5_672 * 10**9 * longest / (3_600 * SECOND))
        assert sum(truth.vectors[machine, hour].values()) == 4 * longest
