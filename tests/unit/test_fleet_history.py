"""A history of days whose bills come late: what each night knows, what was true, and the factor folded by hand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.fleet.arithmetic import UNIT, units
from tests.fleet.charge import TEN_DIGITS
from tests.fleet.history import HIGH, LOW, History, HistorySpec, make_history, write_history
from tests.fleet.model import DAY, HOUR, MILLION

BIAS = {"g5.xlarge": 13_000, "g4dn.2xlarge": -4_000, "gp3": -9_000}
ACCOUNT = "111122223333"


def history(**facts: object) -> History:
    """A history without noise whose biases are known; nothing is written."""
    known: dict[str, object] = {"days": 4, "noise_ppm": 0, "bias_ppm": BIAS}
    return make_history(HistorySpec(**{**known, **facts}), Path("unused"))  # type: ignore[arg-type]


def folded(bias_ppm: int, windows: int) -> int:
    """The factor after some windows that all show the same bias: half of what is missing each time."""
    return round(UNIT + Fraction(bias_ppm * UNIT, MILLION) * (1 - Fraction(1, 2**windows)))


def test_every_day_has_the_same_machines_and_volumes_and_a_job_of_its_own() -> None:
    days = history().fleets
    assert [f.spec.day for f in days] == ["2026-10-01", "2026-10-02", "2026-10-03", "2026-10-04"]
    assert all((f.machines, f.volumes) == (days[0].machines, days[0].volumes) for f in days)
    assert len({f.tenants[0].job_id for f in days}) == 4
    assert sorted(history().family.values()) == ["g4dn.2xlarge", "g5.xlarge", "gp3", "gp3"]


def test_costs_are_list_prices_times_the_bias() -> None:
    made = history()
    costs = made.costs
    assert len(costs) == 4 * 4 * 6
    for resource, family in made.family.items():
        for day in made.days:
            off = Fraction(costs[resource, day, 9] * MILLION, made.listed(resource)) - MILLION
            assert abs(off - BIAS[family]) < Fraction(1, 100)


def test_list_prices_are_those_of_catalogue_and_volume_type() -> None:
    made = history(days=1)
    by_family = {made.family[r]: made.listed(r) for r in made.family if "i-0" in r}
    assert by_family == {"g5.xlarge": 1_006_000_000_000, "g4dn.2xlarge": 752_000_000_000}
    volumes = sorted(made.listed(r) for r in made.family if "vol" in r)
    # 200 and 500 GiB x 0.08 / 744
    assert volumes == [21_505_376_344, 53_763_440_860]


def test_noise_stays_within_its_width_and_has_about_no_mean() -> None:
    made = history(days=40, noise_ppm=10_000)
    machine = next(r for r, family in made.family.items() if family == "g5.xlarge")
    off = [
        made.costs[machine, day, hour] * MILLION / made.listed(machine) / 1.013 - MILLION
        for day in made.days
        for hour in range(9, 15)
    ]
    assert max(map(abs, off)) <= 10_001 and len(set(off)) > 200
    assert abs(sum(off) / len(off)) < 4 * 10_000 / 3**0.5 / 240**0.5


def test_biases_are_drawn_within_the_band_and_by_the_seed() -> None:
    drawn = [make_history(HistorySpec(seed=seed, days=1), Path("unused")).bias_ppm for seed in range(12)]
    values = [value for bias in drawn for value in bias.values()]
    assert all(3_000 <= abs(v) <= 18_000 for v in values) and min(values) < 0 < max(values)
    assert len({tuple(b.items()) for b in drawn}) == 12


def test_a_night_delivers_the_month_so_far_without_its_last_hours_and_a_part_of_those_before() -> None:
    made = history()
    start = made.fleets[2].spec.day_ns
    rows = made.delivery(2)
    # Two machines and two volumes: six hours on each of two days, and on the third those that ended by 13:00.
    assert len(rows) == 2 * 6 * 4 + 4 * 4
    assert max(row.end_ns for row in rows) == start + 13 * HOUR
    whole = {(row.label, row.start_ns): row for row in made.rows}
    for row in rows:
        true = whole[row.label, row.start_ns]
        is_filling = row.end_ns > start + 12 * HOUR
        part = 2 if is_filling else 1
        assert abs(row.effective - true.effective / part) < TEN_DIGITS
        assert abs(row["ConsumedQuantity"] - true["ConsumedQuantity"] / part) < TEN_DIGITS


def test_hours_that_no_delivery_has_yet_are_provisional() -> None:
    made = history()
    assert {hour for _, hour in made.provisional(2)} == {13, 14} and len(made.provisional(2)) == 8
    assert made.provisional(2, made.days[1]) == []
    late = history(late_hours=35)
    assert {hour for _, hour in late.provisional(2)} == set(range(9, 15))
    assert {hour for _, hour in late.provisional(2, late.days[1])} == {13, 14}


def test_the_factor_halves_what_is_missing_with_each_complete_window() -> None:
    made = history()
    assert made.alphas(0) == {}
    # Of the day before only the morning is the same in two deliveries; of each day before that both halves.
    for night, windows in ((1, 1), (2, 3), (3, 5)):
        found = made.alphas(night)
        assert set(found) == {f"aws|{who}|{family}" for who in (ACCOUNT, "") for family in BIAS}
        for family, bias in BIAS.items():
            assert abs(found[f"aws|{ACCOUNT}|{family}"] - folded(bias, windows)) < 10_000
            assert found[f"aws||{family}"] == found[f"aws|{ACCOUNT}|{family}"]


def test_a_window_by_hand() -> None:
    made = history(bias_ppm={"g5.xlarge": 13_000, "g4dn.2xlarge": 0, "gp3": -9_000})
    # Three hours of 1.006 at 1.013 times: (3.018 + 3.057234) / (2 x 3.018)
    assert made.alphas(1)[f"aws|{ACCOUNT}|g5.xlarge"] == 1_006_500_000_000
    assert made.alphas(1)[f"aws|{ACCOUNT}|g4dn.2xlarge"] == UNIT
    # Hours of 0.0537634409 and 0.0215053763 at 0.991 times, ten digits, three of each: 0.0532795699 and 0.0213118279.
    listed, paid = 3 * (53_763_440_860 + 21_505_376_344), 3 * (53_279_569_900 + 21_311_827_900)
    assert made.alphas(1)[f"aws|{ACCOUNT}|gp3"] == round(Fraction(UNIT * (listed + paid), 2 * listed))


def test_the_factor_is_clamped_at_each_step() -> None:
    made = history(bias_ppm={"g5.xlarge": 90_000, "g4dn.2xlarge": -90_000, "gp3": 0})
    found = made.alphas(3)
    assert (found["aws||g5.xlarge"], found["aws||g4dn.2xlarge"]) == (HIGH, LOW)
    assert abs(found["aws||gp3"] - UNIT) < 1_000


def test_hours_that_are_still_filling_are_never_in_a_window() -> None:
    steady, filling = history(days=6, filling_hours=0), history(days=6, filling_hours=3)
    # With more hours filling the morning of the day before is not complete either; the days before it are.
    for family, bias in BIAS.items():
        assert abs(steady.alphas(5)[f"aws||{family}"] - folded(bias, 9)) < 10_000
        assert abs(filling.alphas(5)[f"aws||{family}"] - folded(bias, 8)) < 10_000
    late = history(days=6, late_hours=35)
    assert abs(late.alphas(5)["aws||g5.xlarge"] - folded(13_000, 7)) < 10_000


def test_windows_older_than_fourteen_days_are_forgotten() -> None:
    made = history(days=18)
    assert abs(made.alphas(16)["aws||g5.xlarge"] - folded(13_000, 27)) < 10_000
    assert made.alphas(17) != made.alphas(17, delivered=[16, 17])


def test_nights_that_were_left_out_deliver_nothing_to_compare() -> None:
    made = history(days=6)
    assert made.alphas(5, delivered=[5]) == {}
    # Day 3 and the morning of day 4 were the same in nights 4 and 5, but only days 4 and 5 have telemetry.
    assert abs(made.alphas(5, delivered=[4, 5])["aws||g5.xlarge"] - folded(13_000, 1)) < 10_000


def test_azure_bills_days_and_folds_days() -> None:
    bias = {"Standard_NC24ads_A100_v4": 11_000, "Standard_NC16as_T4_v3": -5_000}
    made = history(cloud="azure", bias_ppm=bias)
    assert set(made.family.values()) == set(bias), "disks that are sold by tier have no price of a GiB"
    assert {hour for _, hour in made.provisional(2)} == set(range(9, 15))
    assert {row.end_ns - row.start_ns for row in made.rows} == {DAY}
    assert made.alphas(1) == {}
    for family, ppm in bias.items():
        assert abs(made.alphas(3)[f"azure||{family}"] - folded(ppm, 2)) < 1_000_000


def test_gcp_bills_meters_and_folds_their_sum() -> None:
    bias = {"a2-highgpu-1g": 12_000, "a2-highgpu-2g": -8_000, "pd-balanced": 3_000}
    made = history(cloud="gcp", bias_ppm=bias)
    for family, ppm in bias.items():
        assert abs(made.alphas(3)[f"gcp||{family}"] - folded(ppm, 5)) < 1_000_000


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_a_written_history_has_a_folder_a_night_and_delivers_over_a_drop(cloud: str, tmp_path: Path) -> None:
    spec = HistorySpec(seed=4, days=2, cloud=cloud, hours=4, first_hour=10, invoice="INV-9")
    made = write_history(spec, tmp_path / "history")
    drop = tmp_path / "drop"
    for night, day in enumerate(made.days):
        made.deliver(night, drop)
        shards = {p.parent.parent.name for p in (drop / "telemetry").rglob("*.parquet")}
        assert shards == {f"date={d}" for d in made.days[: night + 1]}
        # A row of an Azure day is there after its day.
        assert any(p.is_file() for p in (drop / "bills" / cloud).rglob("*")) == (night > 0 or cloud != "azure")
        assert day == made.fleets[night].spec.day
    before = {p: p.read_bytes() for p in drop.rglob("*") if p.is_file()}
    made.deliver_final(drop)
    assert {p: p.read_bytes() for p in drop.rglob("*") if p.is_file()} != before


def test_the_files_of_a_night_hold_its_delivery(tmp_path: Path) -> None:
    made = write_history(HistorySpec(seed=4, days=3), tmp_path)
    for night, folder in enumerate([*made.folders, made.final]):
        rows = made.delivery(night) if folder != made.final else made.rows
        (file,) = folder.rglob("*.snappy.parquet")
        table = pq.read_table(file)
        assert sorted(map(str, table["EffectiveCost"].to_pylist())) == sorted(str(float(r.effective)) for r in rows)
    executions = {p.name for folder in [*made.folders, made.final] for p in folder.rglob("BILLING_PERIOD=*/*-*")}
    assert len([name for name in executions if not name.endswith(".json")]) == 4
    assert sum(units(r.effective) for r in made.rows) == sum(made.costs.values())


def test_a_history_goes_on_into_the_next_month(tmp_path: Path) -> None:
    made = write_history(HistorySpec(seed=4, days=3, first_day="2026-10-31"), tmp_path)
    months = [sorted({p.name for p in f.rglob("BILLING_PERIOD=*")}) for f in [*made.folders, made.final]]
    october, november = "BILLING_PERIOD=2026-10", "BILLING_PERIOD=2026-11"
    assert months == [[october], [october, november], [november], [october, november]]
    volume = made.fleets[0].volumes[0].volume_id
    assert made.listed(volume, "2026-11-01") * 720 == pytest.approx(made.listed(volume) * 744, rel=1e-9)


def test_equal_specs_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (write_history(HistorySpec(seed=8, days=2), tmp_path / name) for name in ("a", "b"))
    files = [
        {p.relative_to(made.root): p.read_bytes() for p in made.root.rglob("*") if p.is_file()}
        for made in (first, second)
    ]
    assert files[0] == files[1]
