"""The second ledger against days worked out by hand: parts of machines, MIG slices, promotions, volumes, calibration."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from schemas.ledger import ADDRESSES, LAYERS
from tasks import witness
from tests.tables import DAY, HOUR, SECOND, charge, charges, device, devices, layer, layers, ns
from tests.witness_day import (
    ACCOUNT,
    NO_LAYERS,
    SERVICE,
    TEN,
    TINY,
    addresses,
    checked,
    disks,
    full,
    ledger,
    machine,
    mig,
    monthly,
    part,
    prices,
    promoted,
    spans,
)

ONE = 10**12


def amounts(found: dict[str, pa.Table], column: str, key: str | None = None) -> list[Decimal | None]:
    """One amount of each address of a charge, in units of 1e-12."""
    rows = found[ADDRESSES.name].to_pylist()
    values = [r[column] for r in rows if key is None or r["x_ChargeKey"] == key]
    return [None if v is None else v / TINY for v in values]


# --- meters that count parts of a machine ---------------------------------------------------------------------------


def test_meters_of_a_machine_are_divided_by_what_it_has_and_the_greatest_counts() -> None:
    """26 cores for half an hour; 234 GiB for 0.6 h; 2 GPUs for 0.45 and 0.05 h; the surcharge has no parts."""
    bill = charges(
        part("cores", "Core", "46800", "seconds", "26"),
        part("memory", "Ram", "140.4", "gibibyte hour", "234"),
        part("gpu", "GPU", "0.9", "GPU-Hours", "2"),
        part("more gpu", "GPU", "0.1", "gpu-hour", "2"),
        part("licence", "License", "0.5", "hour", None),
    )
    assert spans(ledger(bill)) == {(10, None, None, "unobserved"): 2 * 2160 * SECOND}
    without = bill.filter(pa.array([True, False, True, True, True]))
    assert spans(ledger(without)) == {(10, None, None, "unobserved"): HOUR}


@pytest.mark.parametrize("unit", ["GiBy.h", "GiB-hours", "gib hour", "vCPU-Hours", "core-hour", "Gibibyte Hours"])
def test_unit_of_parts_is_time_only_where_the_parts_are_known(unit: str) -> None:
    bill = [part("a", "m", "2", unit, "8"), part("a", "m", "2", unit, None)]
    assert [sum(spans(ledger(charges(row))).values()) for row in bill] == [2 * HOUR // 4, 2 * HOUR]


def test_pricing_quantity_stands_in_where_the_consumed_unit_is_no_time() -> None:
    row = part("a", "m", "99", "requests", "4", PricingUnit="core-hours", PricingQuantity=Decimal(2))
    assert sum(spans(ledger(charges(row))).values()) == HOUR


def test_rows_that_name_the_machine_and_are_no_meter_of_it_follow_it() -> None:
    seen = devices(device(TEN, "work", 1800, job="A"), device(TEN, "idle", 1800, device="GPU-1"))
    bill = charges(
        part("cores", "Core", "13", "core-hours", "26"),
        charge("ssd", "2", start=TEN, x_Class="untied", x_MachineId="i-1"),
        charge("egress", "4", start=TEN, x_Class="dependant", x_MachineId="i-1", x_DependantId="vol-9"),
    )
    found = ledger(bill, seen)
    assert [a[2:5] for a in addresses(found, "ssd")] == [("A", "work", 1), (None, "idle", 1)]
    assert [a[2:5] for a in addresses(found, "egress")] == [("A", "work", 2), (None, "idle", 2)]


@pytest.mark.parametrize("parts", [1, 7, 208 * ONE, 3 * ONE // 7, 10**16 + 1])
@pytest.mark.parametrize("quantity", [0, 1, -1, 5 * 10**16, 10**17 + 3, 5, 15])
def test_time_over_parts_is_half_even_and_never_overflows(quantity: int, parts: int) -> None:
    engine = duckdb.connect(":memory:", config={"threads": 1})
    text = Path(witness.__file__).with_name("witness.sql").read_text(encoding="utf-8")
    engine.execute(text.split("-- === Observed time")[0])
    time = quantity * HOUR
    if abs(time) * ONE // parts >= 10**38:
        pytest.fail("no case of this test leaves 38 digits") if parts > 7 else None
        time = quantity
    (found,) = engine.execute("SELECT machine_time(?::HUGEINT, ?::HUGEINT)", [time, parts]).fetchone() or (None,)
    exact = Fraction(abs(time) * ONE, parts)
    assert found == (1 if time >= 0 else -1) * round(exact)


# --- MIG -------------------------------------------------------------------------------------------------------------


def span_of(nanoseconds: int, **facts: Any) -> dict[str, Any]:
    """A row that bills machine i-1, with one GPU unless said otherwise, for so many ns."""
    plain = {"x_InstanceType": "g5.4xlarge", "ConsumedUnit": "Seconds", "quantity": f"{nanoseconds}e-9"}
    return machine("box", "1", **(plain | facts))


def test_gpu_is_cut_by_compute_slices_and_the_rest_is_idle() -> None:
    """700 ns: 300 to the slice of three, 200 to that of two, 200 to nobody. 300 over work 400, idle 200 and the 100 that it
    was not seen: 171.4, 85.7, 42.9. 200 over work 900, more than the span: all of it."""
    seen = devices(
        mig(TEN, "work", 400, name="MIG-a", slices=3, job="A"),
        mig(TEN, "idle", 200, name="MIG-a", slices=3),
        mig(TEN, "work", 900, name="MIG-b", slices=2, job="B"),
    )
    found = ledger(charges(span_of(700)), seen)
    assert spans(found) == {
        (10, "MIG-a", "A", "work"): 171, (10, "MIG-a", None, "idle"): 86, (10, "MIG-a", None, "unobserved"): 43,
        (10, "MIG-b", "B", "work"): 200, (10, "GPU-0", None, "idle"): 200,
    }  # fmt: skip
    assert [a[1] for a in addresses(found)] == ["GPU-0", "MIG-a", "MIG-a", "MIG-a", "MIG-b"]


def test_slices_that_fill_the_gpu_leave_nothing_and_ties_go_in_device_order() -> None:
    """10 ns over seven slices of one: the three odd ns go to the first three."""
    names = [f"MIG-{c}" for c in "gfedcba"]
    found = ledger(charges(span_of(10)), devices(*(mig(TEN, "work", 10, name=n, slices=1, job=n) for n in names)))
    assert spans(found) == {(10, n, n, "work"): 2 if n in {"MIG-a", "MIG-b", "MIG-c"} else 1 for n in names}


def test_slices_of_a_gpu_that_was_cut_anew_within_the_hour_share_what_there_is() -> None:
    seen = devices(
        *(mig(TEN, "work", 100, name=n, slices=k, job="A") for n, k in (("MIG-a", 7), ("MIG-b", 4), ("MIG-c", 3)))
    )
    assert spans(ledger(charges(span_of(140)), seen)) == {
        (10, "MIG-a", "A", "work"): 50, (10, "MIG-a", None, "unobserved"): 20, (10, "MIG-b", "A", "work"): 29,
        (10, "MIG-b", None, "unobserved"): 11, (10, "MIG-c", "A", "work"): 21, (10, "MIG-c", None, "unobserved"): 9,
    }  # fmt: skip


def test_slices_of_one_gpu_count_as_one_beside_whole_gpus_and_unseen_ones() -> None:
    """Four GPUs by the catalogue: one in slices, one whole, two that no reading names."""
    seen = devices(
        mig(TEN, "idle", 1000, name="MIG-a", slices=4),
        mig(TEN, "idle", 1000, name="MIG-b", slices=None),
        device(TEN, "work", 500e-9, job="A", device="GPU-1"),
    )
    found = ledger(charges(span_of(1000, x_InstanceType="four")), seen, gpu_counts={"four": 4})
    assert spans(found) == {
        (10, "MIG-a", None, "idle"): 571, (10, "MIG-b", None, "idle"): 143, (10, "GPU-0", None, "idle"): 286,
        (10, "GPU-1", "A", "work"): 500, (10, "GPU-1", None, "unobserved"): 500, (10, None, None, "unobserved"): 2000,
    }  # fmt: skip


def test_gpu_with_four_slices_and_a_gpu_that_is_not_in_the_catalogue() -> None:
    rows = [mig(TEN, "idle", 400, name=f"MIG-{g}", slices=1, gpu=f"GPU-{g}") | {"mig_total": 4} for g in (0, 1)]
    found = ledger(charges(span_of(400, x_InstanceType=None)), devices(*rows))
    assert spans(found) == {
        (10, "MIG-0", None, "idle"): 100, (10, "GPU-0", None, "idle"): 300,
        (10, "MIG-1", None, "idle"): 100, (10, "GPU-1", None, "idle"): 300,
    }  # fmt: skip


def test_what_no_slice_of_a_slice_gets_is_no_row() -> None:
    """2 ns over slices of 3 and 1 and a rest of 3: 0.86, 0.29, 0.86; the slice of one gets nothing and has no row."""
    rows = [mig(TEN, "idle", 5, name=n, slices=k) for n, k in (("MIG-a", 3), ("MIG-b", 1))]
    found = ledger(charges(span_of(2)), devices(*rows))
    assert spans(found) == {(10, "MIG-a", None, "idle"): 1, (10, "GPU-0", None, "idle"): 1}


def test_slices_without_billed_time_are_used_as_they_were_seen() -> None:
    rows = [mig(TEN, "work", 30, name="MIG-a", slices=3, job="A"), mig(TEN, "idle", 10, name="MIG-b", slices=1)]
    found = ledger(charges(machine("back", "-1")), devices(*rows))
    assert [a[1:5] for a in addresses(found)] == [
        ("MIG-a", "A", "work", Decimal("-0.75")), ("MIG-b", None, "idle", Decimal("-0.25")),
    ]  # fmt: skip


def test_estimated_hour_of_a_sliced_gpu_runs_as_long_as_its_longest_slice() -> None:
    rows = [
        mig(TEN, "work", 7 * HOUR // 10, name="MIG-a", slices=3, job="A", instance_type="two"),
        mig(TEN, "idle", 7 * HOUR // 20, name="MIG-b", slices=4, instance_type="two"),
    ]
    found = ledger(charges(), devices(*rows), prices=prices({"ListUnitPrice": Decimal(10)}), watermarks={})
    assert {(a[1], a[3]): n / ONE for a, n in zip(addresses(found), amounts(found, "x_EstimatedCost"), strict=True)} == {
        ("MIG-a", "work"): Decimal("1.5"), ("MIG-b", "idle"): Decimal(1), ("MIG-b", "unobserved"): Decimal(1),
        (None, "unobserved"): Decimal("3.5"),
    }  # fmt: skip


def test_several_jobs_in_slices_of_two_gpus_fill_each_gpu() -> None:
    seen, total = [], 999_999_999_937
    for gpu, cut in enumerate(((3, 3), (1, 2, 2), (7,), (4, 1))):
        for i, k in enumerate(cut):
            facts: dict[str, Any] = {"name": f"MIG-{gpu}{i}", "slices": k, "gpu": f"GPU-{gpu}"}
            seen += [
                mig(TEN, c, 10**11 * (i + 3) + j, job=f"J{i}", **facts) for j, c in enumerate(("work", "held_idle"))
            ]
    found = ledger(charges(span_of(total, x_InstanceType=None)), devices(*seen))
    filled: dict[str, int] = defaultdict(int)
    for (_, name, _, _), nanoseconds in spans(found).items():
        filled[name.replace("MIG-", "GPU-")[:5]] += nanoseconds
    assert filled == {f"GPU-{gpu}": total for gpu in range(4)}
    of_first = {place[1]: 0 for place in spans(found) if place[1].startswith(("MIG-0", "GPU-0"))}
    for (_, name, _, _), nanoseconds in spans(found).items():
        if name in of_first:
            of_first[name] += nanoseconds
    assert all(abs(of_first[n] - Fraction(total * k, 7)) < 1 for n, k in (("MIG-00", 3), ("MIG-01", 3), ("GPU-0", 1)))


def test_meters_under_one_text_are_told_apart_by_their_rules() -> None:
    rules = {"core": "gcp-gpu-core", "more": "gcp-gpu-core", "ram": "gcp-gpu-ram", "gpu": "gcp-gpu-gpu"}
    rows = [("core", "6.75", "hour", "12"), ("more", "2.25", "hour", "12"), ("ram", "63.75", "gibibyte hour", "85")]
    bill = [part(key, "A2", *fact, x_TieRule=rules[key]) for key, *fact in (*rows, ("gpu", "0.75", "hour", "1"))]
    assert set(spans(ledger(charges(*bill))).values()) == {2 * 2700 * SECOND}


def test_time_of_what_names_no_machine_is_never_multiplied() -> None:
    """The hours of a whole account may be more than any machine can have."""
    facts = {"ConsumedQuantity": Decimal("1e25"), "ConsumedUnit": "Hours"}
    assert [a[3:5] for a in addresses(ledger(charges(charge("all", "1", **facts))))] == [("other_usage", Decimal(1))]


@pytest.mark.parametrize("parts", ["0", "-12"])
def test_hours_of_parts_that_nobody_counts_are_no_time(parts: str) -> None:
    found = spans(ledger(charges(part("core", "core", "48", "hour", parts))))
    assert set(found.values()) == {2 * HOUR}


def test_a_machine_that_changes_its_type_within_an_hour_has_one_for_all_its_money() -> None:
    """Half an hour each as two types; the layers of the hour share out both rows alike."""
    bill = charges(
        machine("before", "1", quantity="0.5", x_InstanceType="g5.4xlarge"),
        machine("after", "3", quantity="0.5", x_InstanceType="two"),
    )
    seen = devices(device(TEN, "work", 3600, job="A"))
    work = layers(layer(TEN, "A", "L1", 10, instance_type="g5.4xlarge"), layer(TEN, "A", "L2", 20, instance_type="two"))
    rows = ledger(bill, seen, work)[LAYERS.name].to_pylist()
    assert [(r["x_InstanceType"], r["x_Layer"], r["BilledCost"]) for r in rows] == [("g5.4xlarge", "L1", Decimal(4))]


# --- promotional credits ---------------------------------------------------------------------------------------------


def test_promotion_is_shared_on_its_own_over_the_same_weights() -> None:
    seen = devices(device(TEN, "work", 1, job="A"), device(TEN, "work", 1, job="B"), device(TEN, "idle", 1))
    row = machine("a", "0", x_InstanceType="g5.4xlarge", ConsumedUnit="Seconds", quantity="3")
    found = ledger(
        charges(promoted(row, "-0.000000000005")), seen, layers(layer(TEN, "A", "L1", 1), layer(TEN, "A", "L0", 1))
    )
    assert amounts(found, "x_PromotionalCost") == [-2, -2, -1]
    assert amounts(found, "BilledCost") == [0, 0, 0]
    rows = found[LAYERS.name].to_pylist()
    assert [(r["x_JobId"], r["x_Layer"], r["x_PromotionalCost"] / TINY) for r in rows] == [
        ("A", "L0", -1),
        ("A", "L1", -1),
    ]


def test_promotion_over_hours_follows_each_kind_of_charge() -> None:
    """Of a machine: by its time, from the day part; of a disk: by the formula, from the whole charge; else whole."""
    box = promoted(machine("box", "3", hours=2, quantity="1.5"), "-0.000000000010")
    late = charge("disk", "5", start=DAY - dt.timedelta(hours=1), hours=3, x_Class="dependant", x_DependantId="vol-1")
    disk = promoted(full(late, x_UsageDate=DAY.date()), "-0.000000000010", "-0.000000000007")
    credit = promoted(
        charge("credit", "-7", start=TEN, hours=5, ChargeCategory="Credit", ChargeFrequency="One-Time"), "-7"
    )
    found = ledger(
        charges(box, disk, credit), devices(device(TEN, "work", 3600, job="A"), device(TEN, "work", 3600, job="B"))
    )
    sums: dict[tuple[str, int], Decimal] = defaultdict(Decimal)
    for row in found[ADDRESSES.name].to_pylist():
        sums[row["x_ChargeKey"], row["x_HourUtc"].hour] += row["x_PromotionalCost"] / TINY
    assert sums == {
        ("box", 10): -7, ("box", 11): -3, ("disk", 0): -3, ("disk", 1): -4, ("credit", 10): Decimal(-7) / TINY,
    }  # fmt: skip


# --- categories ------------------------------------------------------------------------------------------------------


def test_fee_whose_use_is_offset_is_unused_commitment_before_it_is_a_purchase() -> None:
    fee = {"ChargeCategory": "Purchase", "CommitmentDiscountId": "c-1", "x_Class": "commitment_unused"}
    for facts, category in ((fee, "commitment_unused"), (fee | {"ChargeCategory": "Tax"}, "tax")):
        found = ledger(charges(charge("fee", "1", start=TEN, ChargeFrequency="Recurring", x_MachineId="i-1", **facts)))
        assert [a[3] for a in addresses(found)] == [category]


# --- estimates: volumes, spot, calibration, currencies -----------------------------------------------------------------


def running(**facts: Any) -> pa.Table:
    """Machine i-1 for half an hour at work and as long idle."""
    return devices(
        *(device(TEN, c, 1800, job=j, instance_type="two", **facts) for c, j in (("work", "A"), ("idle", None)))
    )


def test_volume_is_estimated_by_size_and_calendar_month_over_the_vector_of_its_machine() -> None:
    """744 GiB at 0.08 a GiB-month of 744 h: 0.08 an hour; times 0.99 it is 0.0792, half of it to an unseen GPU."""
    found = ledger(
        charges(), running(), NO_LAYERS, disks((TEN, "vol-1", "i-1", 744, "gp3")), watermarks={},
        prices=prices(monthly("0.08")), alphas={"aws||gp3": 99 * ONE // 100, "aws||two": 5, "gcp||gp3": 7},
    )  # fmt: skip
    rows = found[ADDRESSES.name].to_pylist()
    assert {r["x_ChargeKey"] for r in rows} == {"estimate:aws/vol-1"}
    assert [(r["x_MachineId"], r["x_DeviceId"], r["x_Category"], r["x_EstimatedCost"]) for r in rows] == [
        ("i-1", "GPU-0", "work", Decimal("0.0198")), ("i-1", "GPU-0", "idle", Decimal("0.0198")),
        ("i-1", None, "unobserved", Decimal("0.0396")),
    ]  # fmt: skip
    assert {(r["BilledCost"], r["EffectiveCost"], r["ListCost"], r["x_PromotionalCost"]) for r in rows} == {(None,) * 4}


@pytest.mark.parametrize(("day", "hours"), [("2027-02-28", 672), ("2028-02-29", 696), ("2026-11-01", 720)])
def test_month_has_the_hours_of_the_calendar(day: str, hours: int) -> None:
    at = dt.datetime.fromisoformat(day).replace(tzinfo=dt.UTC)
    hung = disks((at, "vol-1", "i-1", hours, "gp3"))
    found = ledger(charges(), hung=hung, watermarks={}, prices=prices(monthly("0.5")), day=day)
    assert [(a[1], a[3]) for a in addresses(found)] == [(None, "idle")]
    assert amounts(found, "x_EstimatedCost") == [ONE // 2]


def test_volume_amount_is_half_even_before_and_after_alpha() -> None:
    """1 GiB at 1.116e-9 is 1.5 units an hour: 2; times 1.25 is 2.5: 2. At 0.372e-9 it is half a unit: 0."""
    for price, alpha, expected in (
        ("1.116e-9", 125, 2),
        ("1.116e-9", 100, 2),
        ("0.372e-9", 100, 0),
        ("1.86e-9", 150, 3),
    ):
        found = ledger(
            charges(), hung=disks((TEN, "vol-1", "i-1", 1, "gp3")), watermarks={}, prices=prices(monthly(price)),
            alphas={"aws||gp3": alpha * ONE // 100},
        )  # fmt: skip
        assert amounts(found, "x_EstimatedCost") == [expected]


def test_volume_hour_that_any_row_of_the_bill_names_is_no_estimate() -> None:
    hours = [TEN + dt.timedelta(hours=h) for h in range(4)]
    bill = charges(
        charge("disk", "1", start=TEN, hours=1.5, x_Class="dependant", x_DependantId="vol-1"),
        charge("io", "1", start=hours[2], x_Class="untied", x_DependantId="vol-2"),
        charge("elsewhere", "1", start=hours[3], x_Cloud="gcp", x_Class="dependant", x_DependantId="vol-1"),
    )
    hung = disks(*((h, "vol-1", "i-1", 1, "gp3") for h in hours))
    found = ledger(bill, hung=hung, watermarks={}, prices=prices(monthly("744")))
    of_volume = [a[0] for a in addresses(found, "estimate:aws/vol-1")]
    assert of_volume == [12, 13]


def test_volume_is_estimated_from_the_least_watermark_of_its_machines_on() -> None:
    """i-1 is billed to 11:00; i-2, of another account, to 10:00; what no bill names, to the least of the cloud: 10:00."""
    bill = charges(
        machine("one", "1", start=TEN.replace(hour=8)),
        machine("two", "1", start=TEN.replace(hour=8), x_MachineId="i-2", BillingAccountId="999"),
    )
    marks = {SERVICE: ns(TEN.replace(hour=11)), "aws|999|Amazon Elastic Compute Cloud": ns(TEN)}
    rows: list[tuple[dt.datetime, str, str, float | None, str | None]] = []
    for hour in (9, 10, 11):
        for volume, names in (("v1", ("i-1",)), ("v2", ("i-2",)), ("v12", ("i-1", "i-2")), ("v3", ("i-3",))):
            rows += [(TEN.replace(hour=hour), volume, name, 1, "gp3") for name in names]
    found = ledger(bill, hung=disks(*rows), watermarks=marks, prices=prices(monthly("744")))
    hours: dict[str, list[int]] = defaultdict(list)
    for row in found[ADDRESSES.name].to_pylist():
        hours[row["x_ChargeKey"]].append(row["x_HourUtc"].hour)
    assert {k: v for k, v in hours.items() if k.startswith("estimate")} == {
        "estimate:aws/v1": [11], "estimate:aws/v12": [10, 11], "estimate:aws/v2": [10, 11], "estimate:aws/v3": [10, 11],
    }  # fmt: skip


def test_volume_of_several_machines_takes_all_their_time_and_the_facts_of_the_first() -> None:
    later = TEN.replace(hour=8)
    bill = charges(
        machine(
            "two", "1", start=later, x_MachineId="i-2", RegionId="eu-west-1", BillingAccountId="999", SubAccountId="s"
        ),
        machine("one", "1", start=later, RegionId="eu-north-1", SubAccountId="t"),
    )
    seen = devices(
        device(TEN, "work", 3600, job="A", instance_type="g5.4xlarge"),
        device(TEN, "work", 3600, job="B", machine="i-2", device="GPU-2", instance_type="g5.4xlarge"),
    )
    hung = disks((TEN, "vol-1", "i-2", 744, "gp3"), (TEN, "vol-1", "i-1", 744, "gp3"))
    offers = prices(monthly("2", RegionId="eu-north-1"), monthly("8", RegionId="eu-west-1"), monthly("16"))
    found = ledger(
        bill, seen, layers(*(layer(TEN, j, "L", 1) for j in "AB")), hung, prices=offers, watermarks={},
        alphas={f"aws|{ACCOUNT}|gp3": ONE // 2, "aws|999|gp3": 3, "aws||gp3": 5},
    )  # fmt: skip
    rows = [r for r in found[ADDRESSES.name].to_pylist() if r["x_ChargeKey"].startswith("estimate")]
    assert [(r["x_MachineId"], r["x_JobId"], r["x_EstimatedCost"]) for r in rows] == [
        ("i-1", "A", Decimal("0.5")), ("i-2", "B", Decimal("0.5")),
    ]  # fmt: skip
    assert {
        (r["BillingAccountId"], r["SubAccountId"], r["PricingCategory"]) for r in found[LAYERS.name].to_pylist()
    } == {(ACCOUNT, "t", "Standard")}


def test_volume_without_size_type_or_price_has_no_address() -> None:
    hung = disks(
        (TEN, "v1", "i-1", None, "gp3"), (TEN, "v2", "i-1", 1, None), (TEN, "v3", "i-1", 1, "io2"), (TEN, "v4", "i-1", 1, "two")
    )  # fmt: skip
    offers = prices(monthly("1"), monthly("1", SkuId="io2", RegionId="mars"), {"ListUnitPrice": Decimal(1)})
    assert ledger(charges(), hung=hung, watermarks={}, prices=offers)[ADDRESSES.name].num_rows == 0
    hung = disks((TEN, "v1", "i-1", None, None), (TEN, "v1", "i-2", 744, "gp3"), (TEN, "v1", "i-3", 7440, "gp3"))
    assert amounts(ledger(charges(), hung=hung, watermarks={}, prices=prices(monthly("1"))), "x_EstimatedCost") == [ONE]


def test_machine_is_priced_at_spot_only_when_every_row_of_it_is_spot_and_a_spot_price_is_known() -> None:
    spot = {"PricingCategory": "Dynamic", "start": TEN.replace(hour=8)}
    offers = [{"ListUnitPrice": Decimal(8)}, {"ListUnitPrice": Decimal(2), "PricingCategory": "Dynamic"}]
    mixed = [machine("a", "1", **spot), machine("b", "1", start=TEN.replace(hour=8))]
    work = layers(layer(TEN, "A", "L", 1))
    for bill, known, expected in (
        (mixed[:1], offers, (2, "Dynamic")),
        (mixed, offers, (8, "Standard")),
        (mixed[:1], offers[:1], (8, "Standard")),
        ([], offers, (8, "Standard")),
        (mixed[:1], offers[1:], (2, "Dynamic")),
    ):
        found = ledger(charges(*bill), running(), work, prices=prices(*known), watermarks={})
        estimates = [v for v in amounts(found, "x_EstimatedCost") if v is not None]
        pools = {r["PricingCategory"] for r in found[LAYERS.name].to_pylist() if r["x_State"] == "provisional"}
        assert (sum(estimates) / ONE, *pools) == expected


def test_alpha_is_that_of_cloud_account_and_family_and_missing_is_one() -> None:
    """5 units an hour times 0.9 is 4.5, which rounds to the even 4; of an unknown account the empty one counts."""
    own = [machine("a", "1", start=TEN.replace(hour=8), BillingAccountId=a) for a in ("222", "111")]
    offers = prices({"ListUnitPrice": 5 * TINY})
    for bill, alphas, expected in (
        (own, {"aws|111|two": 9 * ONE // 10, "aws|222|two": 0, "aws||two": 0}, 4),
        (own, {"aws|222|two": 0, "aws||two": 0, "gcp|111|two": 0, "aws|111|one": 0}, 5),
        ([], {"aws||two": 11 * ONE // 10, "aws|111|two": ONE // 2}, 6),
        ([], {}, 5),
    ):
        found = ledger(charges(*bill), running(), prices=offers, watermarks={}, alphas=alphas)
        assert sum(v for v in amounts(found, "x_EstimatedCost") if v is not None) == expected


def test_contracted_price_of_account_type_and_region_goes_before_list_but_not_before_spot() -> None:
    eight = {"start": TEN.replace(hour=8), "RegionId": "eu-west-1"}
    offers = prices(
        {"ListUnitPrice": Decimal(8), "RegionId": "eu-west-1"}, {"ListUnitPrice": Decimal(9)},
        {"ListUnitPrice": Decimal(2), "RegionId": "eu-west-1", "PricingCategory": "Dynamic"},
    )  # fmt: skip
    mine, other = (
        f"aws|{ACCOUNT}|two|eu-west-1",
        {"gcp||two|us-east-1": "1 USD", f"aws|{ACCOUNT}|two|us-east-1": "1 USD"},
    )
    spot = machine("a", "1", PricingCategory="Dynamic", **eight)
    for bill, known, expected in (
        ([machine("a", "1", **eight)], other | {mine: "7.000000000001 EUR"}, (7 * ONE + 1, "EUR", "Standard")),
        ([machine("a", "1", **eight)], other, (8 * ONE, "USD", "Standard")),
        ([spot], {mine: "7 EUR"}, (2 * ONE, "USD", "Dynamic")),
        ([], {"aws||two|us-east-1": "5 USD"}, (5 * ONE, "USD", "Standard")),
        ([], {mine: "7 EUR"}, (9 * ONE, "USD", "Standard")),
    ):
        work = layers(layer(TEN, "A", "L", 1))
        found = ledger(charges(*bill), running(), work, prices=offers, watermarks={}, contracted=known)
        estimates = [v for v in amounts(found, "x_EstimatedCost") if v is not None]
        (pool,) = (r for r in found[LAYERS.name].to_pylist() if r["x_State"] == "provisional")
        assert (sum(estimates), pool["BillingCurrency"], pool["PricingCategory"]) == expected


def test_currencies_stand_side_by_side() -> None:
    eight = TEN.replace(hour=8)
    bill = charges(machine("a", "3", BillingCurrency="EUR"), charge("tax", "1", start=TEN, ChargeCategory="Tax"))
    late = devices(device(TEN, "work", 3600, job="A", instance_type="two"), device(eight, "work", 3600, job="A"))
    work = layers(layer(TEN, "A", "L", 1), layer(eight, "A", "L", 1))
    found = ledger(bill, late, work, prices=prices({"ListUnitPrice": Decimal(8)}), watermarks={})
    report = checked(found, bill, late, work, watermarks={}, offers=prices({"ListUnitPrice": Decimal(8)}))
    totals = {(t.currency, t.category): (t.billed, t.estimated) for t in report.totals}
    assert totals == {
        ("EUR", "work"): (Decimal("1.5"), None), ("EUR", "unobserved"): (Decimal("1.5"), None),
        ("USD", "tax"): (1, None), ("USD", "work"): (None, 4), ("USD", "unobserved"): (None, 4),
    }  # fmt: skip
    assert {(r["BillingCurrency"], r["x_State"]) for r in found[LAYERS.name].to_pylist()} == {
        ("EUR", "billed"), ("USD", "provisional"),
    }  # fmt: skip
