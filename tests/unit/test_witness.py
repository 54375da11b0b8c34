"""The second ledger against ledgers worked out by hand: categories, hours, spans, first rounding, dependants."""

from __future__ import annotations

import datetime as dt
import random
from collections import defaultdict
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest

from schemas.ledger import ADDRESSES, LAYERS, SPANS
from tasks.errors import WitnessError
from tests.tables import DAY, HOUR, SECOND, attachments, charge, charges, device, devices
from tests.witness_day import (
    TEN,
    TINY,
    addresses,
    by_hour,
    full,
    ledger,
    machine,
    spans,
    worked_example,
)

# --- a worked example: a savings plan, a disk, tax and a credit -----------------------------------------------------


def test_worked_example_is_met_to_the_digit() -> None:
    found = ledger(**worked_example())
    sums: dict[tuple[Any, ...], list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])
    for hour, gpu, job, category, billed, effective in addresses(found):
        place = (hour == 10, gpu, job, category)
        sums[place][0] += billed
        sums[place][1] += effective
    money = {place: tuple(f"{amount:f}" for amount in amounts) for place, amounts in sums.items()}
    pad = "00000000"
    assert money == {
        (True, "GPU-0", "A", "work"): (f"0.3121{pad}", f"0.6038{pad}"),
        (True, "GPU-0", "A", "input_stall"): (f"0.2229{pad}", f"0.4312{pad}"),
        (True, "GPU-0", "B", "work"): (f"0.8026{pad}", f"1.5526{pad}"),
        (True, "GPU-0", None, "idle"): (f"0.2676{pad}", f"0.5176{pad}"),
        (True, "GPU-1", None, "idle"): (f"1.6052{pad}", f"3.1052{pad}"),
        (False, None, None, "idle"): (f"0.2396{pad}", f"0.2396{pad}"),
        (True, None, None, "commitment_purchase"): (f"4.0000{pad}", f"0.0000{pad}"),
        (True, None, None, "commitment_unused"): (f"0.0000{pad}", f"1.0000{pad}"),
        (True, None, None, "tax"): (f"0.7200{pad}", f"0.7200{pad}"),
        (True, None, None, "credit"): (f"-0.5000{pad}", f"-0.5000{pad}"),
    }
    assert sum(a[0] for a in sums.values()) == sum(a[1] for a in sums.values()) == Decimal("7.67")
    assert by_hour(found, "disk")[10] == Decimal("0.0104")
    of_layers: dict[tuple[str, str], list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])
    for row in found[LAYERS.name].to_pylist():
        of_layers[row["x_JobId"], row["x_Layer"]][0] += row["BilledCost"]
        of_layers[row["x_JobId"], row["x_Layer"]][1] += row["EffectiveCost"]
    assert dict(of_layers) == {
        ("A", "L1"): [Decimal("0.2229"), Decimal("0.4313")],
        ("A", "L2"): [Decimal("0.0892"), Decimal("0.1725")],
        ("B", "L1"): [Decimal("0.8026"), Decimal("1.5526")],
    }
    assert sum(spans(found).values()) == 2 * HOUR


def test_amount_below_the_quantum_is_refused() -> None:
    with pytest.raises(WitnessError, match=r"no multiple of 1e-4") as refusal:
        ledger(charges(charge("a", "0.00001")), quantum_digits=4)
    assert refusal.value.where == "x_DayBilledCost"


# --- categories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "category"),
    [
        ({"ChargeCategory": "Tax", "x_Class": "rounding"}, "tax"),
        ({"x_Class": "rounding", "ChargeCategory": "Adjustment"}, "rounding"),
        ({"ChargeCategory": "Purchase", "CapacityReservationId": "cr-1"}, "commitment_purchase"),
        ({"ChargeCategory": "Purchase"}, "other_usage"),
        ({"CommitmentDiscountStatus": "Unused", "x_Class": "machine", "x_MachineId": "i-1"}, "commitment_unused"),
        ({"CapacityReservationStatus": "Unused"}, "capacity_unused"),
        ({"x_UsageType": "USE2-UnusedBox:p5.48xlarge"}, "capacity_unused"),
        ({"x_UsageType": "UnusedDed:p5.48xlarge"}, "capacity_unused"),
        ({"x_Class": "capacity_unused", "x_MachineId": "i-1", "ChargeClass": "Correction"}, "capacity_unused"),
        ({"x_Class": "support", "ChargeCategory": "Credit"}, "support"),
        ({"ChargeCategory": "Credit", "x_Class": "storage"}, "credit"),
        ({"ChargeClass": "Correction"}, "adjustment"),
        ({"ChargeCategory": "Adjustment"}, "adjustment"),
        ({"EffectiveCost": Decimal(-1), "x_DayEffectiveCost": Decimal(-1)}, "refund"),
        ({"x_Class": "storage"}, "storage"),
        ({"x_Class": "shared"}, "shared"),
        ({"x_Class": "untied"}, "untied"),
        ({"x_Class": "dependant", "x_DependantId": "vol-9"}, "untied"),
        ({"x_Class": "machine"}, "untied"),
        ({}, "other_usage"),
    ],
)
def test_first_matching_category_wins(facts: dict[str, Any], category: str) -> None:
    found = ledger(charges(full(charge("a", "1", start=TEN), **facts)))
    assert [(a[0], a[1], a[3]) for a in addresses(found)] == [(10, None, category)]


def test_any_row_that_names_a_known_machine_is_tied_and_negative_rows_keep_the_tie() -> None:
    seen = devices(
        device(TEN, "work", 3600, job="A"), device(TEN, "work", 3600, job="B", machine="i-2", device="GPU-2")
    )
    bill = charges(
        machine("box", "2"),
        machine("refund", "-1"),
        charge("fee", "0.5", start=TEN, x_MachineId="i-1"),
        charge("seen only", "0.25", start=TEN, x_MachineId="i-2"),
        charge("elsewhere", "7", start=TEN, x_MachineId="i-3"),
    )
    found = ledger(bill, seen)
    assert {(a[2], a[3]) for a in addresses(found, "refund")} == {("A", "work"), (None, "unobserved")}
    assert sum(a[4] for a in addresses(found, "refund")) == -1
    assert [a[2:5] for a in addresses(found, "seen only")] == [("B", "work", Decimal("0.25"))]
    assert [a[3] for a in addresses(found, "elsewhere")] == ["other_usage"]
    assert {a[2] for a in addresses(found, "fee")} == {"A", None}


# --- hours ----------------------------------------------------------------------------------------------------------


def test_untied_usage_follows_the_formula_on_the_whole_charge() -> None:
    """2,500 units over 30 hours, of which 20 lie in the day: the charge is telescoped, not its day part."""
    row = charge("a", "0.25", start=DAY + dt.timedelta(hours=4), hours=30, x_Class="dependant", x_DependantId="vol-1")
    day_part = Decimal(2500 * 20 // 30) / 10_000
    found = ledger(charges(full(row, x_DayBilledCost=day_part, x_DayEffectiveCost=day_part)), quantum_digits=4)
    hours = by_hour(found, "a")
    assert hours == {4 + i: Decimal(2500 * (i + 1) // 30 - 2500 * i // 30) / 10_000 for i in range(20)}
    assert sum(hours.values()) == day_part


def test_second_day_of_a_charge_starts_where_the_first_ended() -> None:
    row = charge("a", "-0.25", start=DAY - dt.timedelta(hours=20), hours=24, x_Class="storage")
    day_part = -Decimal(2500 - 2500 * 20 // 24) / 10_000
    row = full(row, x_DayBilledCost=day_part, x_DayEffectiveCost=day_part, x_UsageDate=DAY.date())
    hours = by_hour(ledger(charges(row), quantum_digits=4), "a")
    assert hours == {i: -Decimal(2500 * (21 + i) // 24 - 2500 * (20 + i) // 24) / 10_000 for i in range(4)}


def test_what_is_not_usage_based_or_long_and_untied_is_booked_whole() -> None:
    bill = charges(
        charge("fee", "3", start=TEN, hours=12, ChargeFrequency="Recurring"),
        charge("none", "3", start=TEN, hours=12, ChargeFrequency=None),
        charge("month", "31", start=TEN, hours=744, x_Class="storage"),
        charge("no length", "1", start=TEN, hours=0),
    )
    found = ledger(bill)
    assert {key: by_hour(found, key) for key in ("fee", "none", "month", "no length")} == {
        "fee": {10: 3}, "none": {10: 3}, "month": {10: 31}, "no length": {10: 1},
    }  # fmt: skip


def test_rows_of_other_days_are_left_aside() -> None:
    other = full(charge("b", "1"), x_UsageDate=DAY.date() + dt.timedelta(days=1))
    assert {a[0] for a in addresses(ledger(charges(charge("a", "1"), other)))} == {0}
    assert ledger(charges(other))[ADDRESSES.name].num_rows == 0


def run_of(*seconds: float) -> pa.Table:
    """Machine i-1 at work in the hours from 10:00 on."""
    return devices(*(device(TEN + dt.timedelta(hours=i), "work", s, job="A") for i, s in enumerate(seconds) if s))


@pytest.mark.parametrize(
    ("quantity", "ran", "expected"),
    [
        ("1.5", (3600, 3600, 0), {10: "0.75", 11: "0.75", 12: "0"}),  # less than was seen: by running time
        ("2", (1800, 3600, 0), {10: "0.75", 11: "0.75", 12: "0"}),  # more: to the earliest free half hour
        ("3", (1800, 0, 0), {10: "0.5", 11: "0.5", 12: "0.5"}),
        ("4", (1800, 0, 0), {10: "0.375", 11: "0.375", 12: "0.75"}),  # more than there is: to the last hour
        ("0", (1800, 1800, 0), {10: "1.5", 11: "0", 12: "0"}),  # no time at all: the first hour
        (None, (0, 600, 0), {10: "0.5", 11: "0.5", 12: "0.5"}),  # no quantity of time: the charge period
    ],
)
def test_machine_row_over_several_hours(quantity: str | None, ran: tuple[float, ...], expected: dict[int, str]) -> None:
    facts = {"ConsumedUnit": "Requests"} if quantity is None else {}
    found = ledger(charges(machine("box", "1.5", hours=3, quantity=quantity or "3", **facts)), run_of(*ran))
    assert by_hour(found, "box") == {hour: Decimal(amount) for hour, amount in expected.items()}


def test_capacity_of_an_hour_ends_where_the_charge_does() -> None:
    row = machine("box", "1", hours=1, start=TEN + dt.timedelta(minutes=45))
    found = ledger(charges(row), run_of(3600, 3600))
    assert by_hour(found, "box") == {10: Decimal("0.25"), 11: Decimal("0.75")}
    assert spans(found)[11, "GPU-0", "A", "work"] == 2700 * SECOND


def test_negative_machine_row_follows_the_charge_period() -> None:
    found = ledger(charges(machine("box", "2", hours=2), machine("back", "-1", hours=2)), run_of(3600, 60))
    assert by_hour(found, "back") == {10: Decimal("-0.5"), 11: Decimal("-0.5")}


def test_quantity_over_midnight_is_telescoped_like_money() -> None:
    """1.5 h stated from 22:30 to 01:30: half an hour of stated time belongs to each clock hour."""
    row = machine("box", "3", hours=3, quantity="1.5", start=DAY - dt.timedelta(minutes=90))
    row = full(row, x_UsageDate=DAY.date(), x_DayBilledCost=Decimal("1.5"), x_DayEffectiveCost=Decimal("1.5"))
    seen = devices(device(DAY, "work", 3600, job="A"), device(DAY + dt.timedelta(hours=1), "work", 1800, job="A"))
    found = ledger(charges(row), seen)
    assert by_hour(found, "box") == {0: Decimal(1), 1: Decimal("0.5")}
    assert spans(found)[0, "GPU-0", "A", "work"] == 1800 * SECOND


# --- billed span and vectors ----------------------------------------------------------------------------------------


def test_span_is_the_sum_of_one_meter_and_the_largest_of_several() -> None:
    bill = charges(
        machine("covered", "0", "1", quantity="0.25"),
        machine("on demand", "1", quantity="0.25"),
        machine("cores", "1", quantity="20", ConsumedUnit="MINUTES", SkuMeter="cores"),
        machine("back", "-1"),
        machine("corrected", "1", ChargeClass="Correction"),
        machine("unused", "1", CommitmentDiscountStatus="Unused"),
        machine("credit", "1", ChargeCategory="Credit"),
    )
    assert spans(ledger(bill)) == {(10, None, None, "unobserved"): HOUR}


def test_span_is_summed_exactly_and_rounded_half_even() -> None:
    """1e-12 h is 3.6 ns, so 0.296111111112 h is 1,066,000,000,003.2 ns; halves of a ns need seconds."""
    assert sum(spans(ledger(charges(machine("a", "1", quantity="0.296111111112")))).values()) == 2 * 1_066_000_000_003
    half = {"ConsumedUnit": "Seconds", "quantity": "1.0000000005"}
    assert sum(spans(ledger(charges(machine("a", "1", **half)))).values()) == 2 * SECOND
    assert sum(spans(ledger(charges(machine("a", "1", **half), machine("b", "1", **half)))).values()) == 2 * (
        2 * SECOND + 1
    )
    odd = {"ConsumedUnit": "Seconds", "quantity": "1.0000000015"}
    assert sum(spans(ledger(charges(machine("a", "1", **odd)))).values()) == 2 * (SECOND + 2)


def test_pricing_quantity_stands_in_for_a_quantity_that_is_no_time() -> None:
    row = machine("a", "1", ConsumedUnit="GB", PricingUnit="Hrs", PricingQuantity=Decimal("0.5"))
    assert sum(spans(ledger(charges(row))).values()) == HOUR


def test_devices_are_counted_from_the_catalogue_or_from_what_was_seen() -> None:
    seen = devices(*(device(TEN, "idle", 3600, device=f"GPU-{i}") for i in range(3)))
    assert sum(spans(ledger(charges(machine("a", "1")), seen)).values()) == 3 * HOUR
    unknown = machine("a", "1", x_InstanceType=None)
    assert sum(spans(ledger(charges(unknown))).values()) == HOUR
    eight = machine("a", "1", x_InstanceType="p5.48xlarge")
    assert spans(ledger(charges(eight), seen))[10, None, None, "unobserved"] == 5 * HOUR


def test_seen_less_than_billed_is_unobserved_and_joins_what_had_no_utilisation() -> None:
    seen = devices(
        device(TEN, "work", 1000, job="A"), device(TEN, "unobserved", 100), device(TEN, "unobserved", 50, job="A")
    )
    assert spans(ledger(charges(machine("a", "1")), seen)) == {
        (10, "GPU-0", "A", "work"): 1000 * SECOND,
        (10, "GPU-0", "A", "unobserved"): 50 * SECOND,
        (10, "GPU-0", None, "unobserved"): 2550 * SECOND,
        (10, None, None, "unobserved"): HOUR,
    }


def test_seen_more_than_billed_is_scaled_with_ties_in_address_order() -> None:
    """10 ns over three equal shares: the odd ns goes to the first job in code-point order, and a null job is last."""
    rows = [device(TEN, "work", 100, job=j) for j in ("b", "B")] + [device(TEN, "idle", 100)]
    found = ledger(charges(machine("a", "1", ConsumedUnit="Seconds", quantity="0.00000001")), devices(*rows))
    assert spans(found) == {
        (10, "GPU-0", "B", "work"): 4, (10, "GPU-0", "b", "work"): 3, (10, "GPU-0", None, "idle"): 3,
        (10, None, None, "unobserved"): 10,
    }  # fmt: skip


def test_hour_without_billed_time_uses_what_was_seen_as_it_is() -> None:
    bill = charges(machine("back", "-1"), machine("box", "1", start=TEN.replace(hour=12)))
    found = ledger(bill, devices(device(TEN, "work", 10, job="A"), device(TEN, "idle", 30)))
    assert [a[1:5] for a in addresses(found, "back")] == [
        ("GPU-0", "A", "work", Decimal("-0.25")),
        ("GPU-0", None, "idle", Decimal("-0.75")),
    ]
    assert {place[0] for place in spans(found)} == {12}
    unseen = ledger(bill)
    assert [a[1:5] for a in addresses(unseen, "back")] == [(None, None, "unobserved", Decimal(-1))]


# --- first rounding -------------------------------------------------------------------------------------------------


def test_odd_units_go_to_the_largest_remainder_then_in_address_order() -> None:
    """10 units over 3:3:1:1 of one device: 3.75, 3.75, 1.25, 1.25. Code points: Z before a before é before an emoji."""
    rows = [device(TEN, "work", s, job=j) for j, s in (("\U0001f600", 1), ("é", 1), ("a", 3), ("Z", 3))]
    bill = charges(
        machine(
            "a", "0.000000000010", "-0.000000000010", x_InstanceType="g5.4xlarge", ConsumedUnit="Seconds", quantity="8"
        )
    )
    found = ledger(bill, devices(*rows))
    assert [(a[2], a[4] / TINY, a[5] / TINY) for a in addresses(found)] == [
        ("Z", 4, -4),
        ("a", 4, -4),
        ("é", 1, -1),
        ("\U0001f600", 1, -1),
    ]
    even = charges(machine("a", "0.000000000006", x_InstanceType="g5.4xlarge", ConsumedUnit="Seconds", quantity="4"))
    rows = [device(TEN, "work", 1, job=j) for j in ("\U0001f600", "é", "a")] + [device(TEN, "idle", 1)]
    assert [(a[2], a[4] / TINY) for a in addresses(ledger(even, devices(*rows)))] == [
        ("a", 2),
        ("é", 2),
        ("\U0001f600", 1),
        (None, 1),
    ]


def test_ranks_are_ordered_as_numbers() -> None:
    rows = [device(TEN, "work", 1, job="A", rank=r) for r in (10, 9)]
    bill = charges(machine("a", "0.000000000001", x_InstanceType="g5.4xlarge", ConsumedUnit="Seconds", quantity="2"))
    found = ledger(bill, devices(*rows))[ADDRESSES.name].to_pylist()
    assert [(r["x_Rank"], r["BilledCost"] / TINY) for r in found] == [(9, 1), (10, 0)]


def test_huge_amounts_of_both_signs_stay_exact() -> None:
    """99 trillion in units of 1e-12 times ns of a day pass 2^127: products are taken apart."""
    amount = Decimal("-99999999999999.999999999999")
    seen = devices(*(device(TEN, "work", 1000 + i, job=f"j{i}", device=f"GPU-{i}") for i in range(7)))
    disk = charge("disk", str(amount), hours=744, x_Class="dependant", x_DependantId="vol-1")
    found = ledger(charges(machine("a", str(amount)), machine("span", "0"), disk), seen, gpu_counts={"two": 7})
    units = int(abs(amount) / TINY)
    weights = {(f"GPU-{i}", f"j{i}", "work"): (1000 + i) * SECOND for i in range(7)}
    weights |= {(f"GPU-{i}", None, "unobserved"): (2600 - i) * SECOND for i in range(7)}
    for _, gpu, job, category, billed, _ in addresses(found, "a"):
        assert abs(int(-billed / TINY) - Fraction(units * weights[gpu, job, category], 7 * HOUR)) < 1
    assert sum(int(a[4] / TINY) for a in addresses(found, "a")) == -units
    first = by_hour(found, "disk")[0]
    assert int(first / TINY) == -(units // 744)


def test_list_cost_is_shared_on_its_own_and_null_stays_null() -> None:
    bill = charges(machine("a", "1", ListCost=Decimal(2), x_DayListCost=Decimal(2)), machine("b", "1"))
    rows = ledger(bill)[ADDRESSES.name].to_pylist()
    assert [(r["x_ChargeKey"], r["ListCost"], r["x_EstimatedCost"]) for r in rows] == [
        ("a", 2, None),
        ("b", None, None),
    ]


def test_row_without_time_is_no_row_and_a_vector_without_rows_is_one_unobserved_row() -> None:
    seen = [device(TEN, "work", 0, job="A"), device(TEN, "idle", 100)]
    found = ledger(charges(machine("zero", "0"), machine("one", "1")), devices(*seen))
    for key in ("zero", "one"):
        assert [a[1:4] for a in addresses(found, key)] == [
            ("GPU-0", None, "idle"), ("GPU-0", None, "unobserved"), (None, None, "unobserved"),
        ]  # fmt: skip
    assert 0 not in spans(found).values()
    nothing = ledger(charges(machine("back", "-1")), devices(*seen[:1]))
    assert [a[1:5] for a in addresses(nothing)] == [(None, None, "unobserved", -1)]


def test_row_that_is_scaled_back_to_nothing_has_no_address() -> None:
    seen = devices(device(TEN, "work", 1e-9, job="A"), device(TEN, "idle", 1000))
    bill = charges(machine("a", "0", x_InstanceType="g5.4xlarge", ConsumedUnit="Seconds", quantity="0.0000001"))
    found = ledger(bill, seen)
    assert spans(found) == {(10, "GPU-0", None, "idle"): 100}
    assert [a[3] for a in addresses(found)] == ["idle"]


def test_machine_without_billed_time_shares_a_disk_at_nothing() -> None:
    """Its vector is one row of 0 ns: the address stands, and holds no money."""
    bill = charges(
        machine("one", "0", x_InstanceType="g5.4xlarge"),
        machine("two", "0", x_MachineId="i-2", quantity="0"),
        charge("disk", "1", start=TEN, x_Class="dependant", x_DependantId="vol-1"),
    )
    found = ledger(bill, hung=attachments((TEN, "vol-1", "i-1"), (TEN, "vol-1", "i-2")))
    rows = [r for r in found[ADDRESSES.name].to_pylist() if r["x_ChargeKey"] == "disk"]
    assert [(r["x_MachineId"], r["BilledCost"]) for r in rows] == [("i-1", 1), ("i-2", 0)]


@pytest.mark.parametrize("unit", ["Hr", "hour", " Hours ", "h"])
def test_spellings_of_an_hour(unit: str) -> None:
    assert sum(spans(ledger(charges(machine("a", "1", quantity="0.5", ConsumedUnit=unit)))).values()) == HOUR


# --- dependants -----------------------------------------------------------------------------------------------------


def test_disk_on_several_machines_follows_the_time_of_all_of_them() -> None:
    seen = devices(
        device(TEN, "work", 3600, job="A"), device(TEN, "work", 3600, job="B", machine="i-2", device="GPU-2")
    )
    bill = charges(
        machine("one", "1", x_InstanceType="g5.4xlarge"),
        machine("two", "1", x_MachineId="i-2", x_InstanceType="two"),
        charge("disk", "3", start=TEN, x_Class="dependant", x_DependantId="vol-1"),
        charge("tiny", "0.000000000001", start=TEN, x_Class="dependant", x_DependantId="vol-1"),
    )
    found = ledger(bill, seen, hung=attachments((TEN, "vol-1", "i-1"), (TEN, "vol-1", "i-2"), (TEN, "vol-1", "i-9")))
    rows = [r for r in found[ADDRESSES.name].to_pylist() if r["x_ChargeKey"] == "disk"]
    assert [(r["x_MachineId"], r["x_DeviceId"], r["x_JobId"], r["BilledCost"]) for r in rows] == [
        ("i-1", "GPU-0", "A", 1), ("i-2", "GPU-2", "B", 1), ("i-2", None, None, 1),
    ]  # fmt: skip
    tiny = {a[1]: a[4] / TINY for a in addresses(found, "tiny")}
    assert tiny == {"GPU-0": 1, "GPU-2": 0, None: 0}


def test_two_machines_without_readings_stay_two_addresses() -> None:
    bill = charges(
        machine("one", "1", x_InstanceType="g5.4xlarge"),
        machine("two", "1", x_MachineId="i-2", x_InstanceType="g5.4xlarge"),
        charge("disk", "0.000000000003", start=TEN, x_Class="dependant", x_DependantId="vol-1"),
    )
    found = ledger(bill, hung=attachments((TEN, "vol-1", "i-2"), (TEN, "vol-1", "i-1")))
    rows = [r for r in found[ADDRESSES.name].to_pylist() if r["x_ChargeKey"] == "disk"]
    assert [(r["x_MachineId"], r["x_Category"], r["BilledCost"] / TINY) for r in rows] == [
        ("i-1", "unobserved", 2),
        ("i-2", "unobserved", 1),
    ]


def test_disk_is_idle_where_it_is_detached_or_its_machine_has_no_time() -> None:
    bill = charges(
        machine("back", "-1"), charge("disk", "3", start=TEN, hours=3, x_Class="dependant", x_DependantId="vol-1")
    )
    hung = attachments((TEN, "vol-1", "i-1"), (TEN.replace(hour=11), "vol-1", "i-9"))
    assert [a[:5] for a in addresses(ledger(bill, hung=hung), "disk")] == [
        (h, None, None, "idle", 1) for h in (10, 11, 12)
    ]


# --- laws 1 and 2 on days that nobody made by hand ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_charge_closes_and_every_span_is_full(seed: int) -> None:
    dice = random.Random(seed)
    rows, seen, hung = [], [], []
    for i in range(60):
        start = DAY + dt.timedelta(minutes=dice.randrange(0, 1380))
        hours = min(dice.choice((0.3, 1, 5)), (24 * 60 - (start - DAY).total_seconds() / 60) / 60)
        money = str(dice.choice((-1, 1, 1)) * dice.randrange(0, 10**15) * TINY)
        tie = dice.choice(
            (
                {},
                {"x_Class": "machine", "x_MachineId": f"i-{i % 3}", "x_InstanceType": "two"},
                {"x_DependantId": f"v-{i % 4}"},
            )
        )
        category = dice.choice(("Usage", "Usage", "Credit", "Tax"))
        quantity = {"ConsumedUnit": "Hours", "ConsumedQuantity": Decimal(dice.randrange(0, 3 * 10**12)) * TINY}
        rows.append(charge(f"c{i:02}", money, start=start, hours=hours, ChargeCategory=category, **tie, **quantity))
    for h in range(24):
        at = DAY.replace(hour=h)
        hung += [(at, f"v-{v}", f"i-{m}") for v in range(3) for m in range(3) if dice.random() < 0.3]
        for m in range(3):
            kinds = [(c, j) for c, j in (("work", "A"), ("work", "B"), ("idle", None)) if dice.random() < 0.5]
            seen += [device(at, c, dice.randrange(0, 1200), job=j, machine=f"i-{m}", device=f"G{m}") for c, j in kinds]
    found = ledger(charges(*rows), devices(*seen), hung=attachments(*hung))
    closed: dict[str, Decimal] = defaultdict(Decimal)
    for row in found[ADDRESSES.name].to_pylist():
        closed[row["x_ChargeKey"]] += row["BilledCost"]
    assert dict(closed) == {row["x_ChargeKey"]: row["BilledCost"] for row in rows}
    filled: dict[tuple[Any, ...], int] = defaultdict(int)
    of_device: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in found[SPANS.name].to_pylist():
        filled[row["x_HourUtc"], row["x_MachineId"]] += row["x_Ns"]
        of_device[row["x_HourUtc"], row["x_MachineId"], row["x_DeviceId"]] += row["x_Ns"]
    assert filled
    for (hour, name, _), total in of_device.items():
        assert 2 * total in (filled[hour, name], 2 * filled[hour, name])
