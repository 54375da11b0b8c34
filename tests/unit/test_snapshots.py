"""Day parts, snapshots in force, watermarks and totals."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.schema import INSTANT, MONEY
from tasks.core import focus, snapshots, ties
from tasks.core.focus_values import Place
from tasks.core.snapshots import Listed
from tasks.core.units import DAY_NS, HOUR_NS, MOST_TIME_NS, quantity_ns, time_unit_ns
from tests.bills import row, text_table

LEDGERS = dict(snapshots.LEDGERS)
MICRO = 1_000


def charges(*rows: dict[str, str], kind: str = "machine", units: str | None = None) -> pa.Table:
    table = focus.normalise(text_table(rows), Place("aws", "x.csv")).rows
    table = table.append_column("x_Class", pa.array([kind] * len(table), pa.string()))
    table = table.append_column("x_MachineId", ties.machine_ids(table))
    per = pa.array([None if units is None else Decimal(units)] * len(table), MONEY)
    return table.append_column("x_UnitsPerMachine", per)


def at(table: pa.Table, start: int, end: int) -> pa.Table:
    for name, ns in (("ChargePeriodStart", start), ("ChargePeriodEnd", end)):
        column = pa.array([ns] * len(table), pa.int64()).cast(INSTANT)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


amounts = st.integers(-(10**20), 10**20).map(lambda units: Decimal(units).scaleb(-12))
starts = st.integers(-(10**16), 2 * 10**18)
lengths = st.one_of(
    st.integers(0, 3 * HOUR_NS),
    st.integers(0, 40 * DAY_NS),
    st.sampled_from([0, 1, HOUR_NS, DAY_NS, DAY_NS + 1, 30 * DAY_NS]),
)
kinds = st.sampled_from(["machine", "dependant", "other"])
frequencies = st.sampled_from(["Usage-Based", "Recurring", "One-Time", ""])


@given(amounts, amounts, st.one_of(st.none(), amounts), starts, lengths, kinds, frequencies)
def test_day_parts_add_up_to_the_charge_in_every_ledger(
    billed: Decimal, effective: Decimal, listed: Decimal | None, start: int, length: int, kind: str, frequency: str
) -> None:
    table = at(charges(row(ChargeFrequency=frequency), kind=kind), start, start + length)
    for name, amount in (("BilledCost", billed), ("EffectiveCost", effective), ("ListCost", listed)):
        table = table.set_column(table.column_names.index(name), name, pa.array([amount], MONEY))
    parts = snapshots.split_days(table).to_pylist()
    for ledger, amount in (("BilledCost", billed), ("EffectiveCost", effective)):
        assert sum(p[LEDGERS[ledger]] for p in parts) == amount
        assert all(p[LEDGERS[ledger]] * amount >= 0 for p in parts)
    if listed is None:
        assert all(p["x_DayListCost"] is None for p in parts)
    else:
        assert sum(p["x_DayListCost"] for p in parts) == listed
    assert [p["x_IsHomeDay"] for p in parts] == [True] + [False] * (len(parts) - 1)
    days = [p["x_UsageDate"].toordinal() - 719163 for p in parts]
    assert days == list(range(start // DAY_NS, start // DAY_NS + len(parts)))


@given(st.integers(-(10**15), 10**15), starts, st.integers(1, 5 * DAY_NS))
def test_a_day_part_is_a_difference_of_floors(units: int, start: int, length: int) -> None:
    table = at(charges(row()), start, start + length)
    amount = pa.array([Decimal(units).scaleb(-12)], MONEY)
    table = table.set_column(table.column_names.index("BilledCost"), "BilledCost", amount)
    for part in snapshots.split_days(table).to_pylist():
        day = (part["x_UsageDate"].toordinal() - 719163) * DAY_NS
        a, b = max(day - start, 0), min(day + DAY_NS - start, length)
        expected = abs(units) * b // length - abs(units) * a // length
        assert part["x_DayBilledCost"] == Decimal(expected if units >= 0 else -expected).scaleb(-12)


@pytest.mark.parametrize(
    ("hours", "kind", "frequency", "days"),
    [
        (24, "other", "Usage-Based", 2),
        (30, "other", "Usage-Based", 1),
        (30, "storage", "Usage-Based", 1),
        (30, "machine", "Usage-Based", 2),
        (72, "dependant", "Usage-Based", 4),
        (24, "machine", "Recurring", 1),
        (24, "machine", "", 1),
        (0, "machine", "Usage-Based", 1),
    ],
)
def test_which_charges_are_spread(hours: int, kind: str, frequency: str, days: int) -> None:
    start = 20_000 * DAY_NS + 12 * HOUR_NS
    table = at(charges(row(ChargeFrequency=frequency), kind=kind), start, start + hours * HOUR_NS)
    assert len(snapshots.split_days(table)) == days


def test_many_charges_at_once_keep_their_columns() -> None:
    table = charges(
        row(BilledCost="1"),
        row(BilledCost="-2", ChargePeriodStart="2026-11-10T18:00:00Z", ChargePeriodEnd="2026-11-11T06:00:00Z"),
        row(BilledCost="3", ChargePeriodEnd="2026-11-10T10:00:00Z"),
    )
    parts = snapshots.split_days(table).to_pylist()
    found = [
        (str(p["BilledCost"].normalize()), str(p["x_DayBilledCost"].normalize()), p["x_UsageDate"].day) for p in parts
    ]
    assert found == [("1", "1", 10), ("-2", "-1", 10), ("-2", "-1", 11), ("3", "3", 10)]


OCTOBER, NOVEMBER = "2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z"


def listed(delivery: str, group: str, at: str, *periods: str, main: bool = True, here: bool = True) -> Listed:
    return Listed(delivery, f"{group}.csv", group, at, main, periods or (NOVEMBER,), here)


def test_of_a_group_the_newest_is_a_contender_for_each_period() -> None:
    deliveries = [
        listed("d2", "a", "2", OCTOBER, NOVEMBER),
        listed("d1", "a", "1", OCTOBER),
        listed("d3", "a", "3", NOVEMBER, main=True),
        listed("d4", "a", "3", NOVEMBER, main=False),
        listed("z1", "b", "4", NOVEMBER),
        listed("z1", "copy", "2", NOVEMBER),
        listed("y1", "c", "3", NOVEMBER),
    ]
    expected = {OCTOBER: ["d2"], NOVEMBER: ["z1", "y1", "d3"]}
    for order in (deliveries, deliveries[::-1]):
        found = snapshots.contenders(order)
        assert {period: [one.delivery for one in some] for period, some in found.items()} == expected


def test_what_is_taken_away_stands_for_periods_that_nothing_else_covers() -> None:
    former = [listed("d1", "a", "1", OCTOBER, NOVEMBER), listed("d2", "b", "1")]
    there = [listed("d3", "c", "2")]
    now = snapshots.next_listing(former, there, ())
    assert now == [listed("d1", "a", "1", OCTOBER, here=False), *there]
    assert snapshots.next_listing(now, there, ()) == now
    assert snapshots.next_listing(now, [listed("d4", "a", "3", OCTOBER)], ()) == [
        listed("d4", "a", "3", OCTOBER),
        listed("d3", "c", "2", here=False),
    ]


def test_what_a_refused_delivery_could_not_replace_stands() -> None:
    former = [listed("d1", "a", "1"), listed("d2", "b", "1")]
    there = [listed("d2", "b", "1")]
    assert snapshots.next_listing(former, there, {"a"}) == former
    assert snapshots.next_listing(former, there, ()) == there


def test_deliveries_that_share_a_charge_with_a_newer_one_are_told() -> None:
    keys = [pa.array(list(k), pa.string()) for k in ("ab", "cd", "dx", "by", "q", "xy")]
    assert snapshots.superseded_by(keys) == [None, None, 1, 0, None, 2]
    assert snapshots.superseded_by([]) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"ConsumedQuantity": "40000"}, None),
        ({"ConsumedQuantity": "-40000.0001"}, ("ConsumedQuantity", 1)),
        ({"ConsumedQuantity": "99999999", "ConsumedUnit": "GB-Hours"}, None),
        ({"ConsumedQuantity": "99999999", "ResourceId": ""}, None),
        ({"PricingQuantity": "144000001", "PricingUnit": "Seconds"}, ("PricingQuantity", 1)),
        ({"ConsumedQuantity": "", "PricingQuantity": ""}, None),
    ],
)
def test_time_of_a_machine_stays_within_what_64_devices_can_hold(
    changes: dict[str, str], found: tuple[str, int] | None
) -> None:
    table = charges(row(), row(**changes), row())
    assert snapshots.too_long(table) == found
    assert MOST_TIME_NS * snapshots.MOST_HOURS / 40_000 * 64 < 2**63


def test_time_of_a_meter_is_that_of_its_machine() -> None:
    def rows(**changes: str) -> pa.Table:
        return charges(row(**{"ConsumedUnit": "gibibyte hour", **changes}), units="200")

    assert snapshots.too_long(rows(ConsumedQuantity="7999999")) is None
    assert snapshots.too_long(rows(ConsumedQuantity="8000100")) == ("ConsumedQuantity", 0)
    assert snapshots.too_long(charges(row(ConsumedQuantity="8000100", ConsumedUnit="gibibyte hour"))) is None
    assert snapshots.too_long_together(pa.concat_tables([rows(ConsumedQuantity="5000000")] * 2)) is not None


def test_time_of_a_machine_and_day_is_added_up_by_meter() -> None:
    def together(*meters: str) -> tuple[str, str] | None:
        table = charges(*(row(ConsumedQuantity="1200001", ConsumedUnit="Minutes", SkuMeter=m) for m in meters))
        return snapshots.too_long_together(table)

    assert together("a", "a") == ("i-0aaaabbbbccccdddd", "2026-11-10")
    assert together("a", "b") is None


def test_watermarks_are_floored_and_know_machines() -> None:
    machine = charges(row(ChargePeriodEnd="2026-11-10T11:30:00Z"))
    disk = charges(
        row(ChargePeriodEnd="2026-11-10T13:59:00Z"),
        row(ServiceName="S3", ChargePeriodEnd="2026-11-12T00:00:00Z"),
        row(ChargeCategory="Tax", ChargePeriodEnd="2026-11-30T00:00:00Z"),
        row(ChargeFrequency="Recurring", ChargePeriodEnd="2026-11-30T00:00:00Z"),
        row(ProviderName="Microsoft", ServiceName="VM", ChargePeriodEnd="2026-11-12T13:00:00Z"),
        kind="other",
    )
    marks, machines = snapshots.watermarks(pa.concat_tables([machine, disk]))
    ec2 = "aws|111122223333|Amazon Elastic Compute Cloud"
    period = "2026-11-01T00:00:00Z"
    assert {k: snapshots.instant_text(v) for k, v in marks[period].items()} == {
        ec2: "2026-11-10T13:00:00Z",
        "aws|111122223333|S3": "2026-11-12T00:00:00Z",
        "azure|111122223333|VM": "2026-11-12T00:00:00Z",
    }
    assert machines == {period: [ec2]}
    assert snapshots.watermarks(disk.slice(2, 2)) == ({}, {})


def test_watermarks_are_held_to_the_day() -> None:
    start = snapshots.day_start_ns("2026-11-10")
    marks = {"c": start - 5, "a": start + 7 * HOUR_NS, "b": start + 3 * DAY_NS}
    held = snapshots.clamp(marks, "2026-11-10")
    assert held == {"a": start + 7 * HOUR_NS, "b": start + DAY_NS, "c": start}
    assert list(held) == ["a", "b", "c"]


def test_totals_add_up_by_account_period_and_invoice() -> None:
    table = charges(
        row(BilledCost="1", InvoiceId="I1"),
        row(BilledCost="0.000000000001", EffectiveCost="-2", InvoiceId="I1"),
        row(BilledCost="5", InvoiceId=""),
    )
    found = snapshots.totals(table)
    assert [(t["InvoiceId"], t["rows"], t["BilledCost"], t["EffectiveCost"]) for t in found] == [
        (None, 1, "5", "1.624"),
        ("I1", 2, "1.000000000001", "-0.376"),
    ]
    assert found[0]["BillingPeriodStart"] == "2026-11-01T00:00:00Z"


@given(st.lists(amounts, max_size=20))
def test_sums_are_exact(values: list[Decimal]) -> None:
    assert snapshots.sum_money(pa.chunked_array([pa.array(values, MONEY)])) == sum(values, Decimal(0))


def test_sums_that_could_overflow_are_told() -> None:
    big = Decimal("9" * 25)
    assert snapshots.overflows(pa.chunked_array([pa.array([big] * 11, MONEY)]))
    assert not snapshots.overflows(pa.chunked_array([pa.array([big] * 9, MONEY)]))


@pytest.mark.parametrize(
    ("unit", "ns"),
    [("Hours", HOUR_NS), ("hrs", HOUR_NS), (" H ", HOUR_NS), ("Minutes", HOUR_NS // 60), ("SECOND", HOUR_NS // 3600)]
    + [(u, None) for u in ("GB-Hours", "vCPU-Hours", "Months", "", None, "LCU-Hours")],
)
def test_units_of_time(unit: str | None, ns: int | None) -> None:
    assert time_unit_ns(unit) == ns
    assert time_unit_ns(unit, metered=True) == (HOUR_NS if unit == "vCPU-Hours" else ns)


@pytest.mark.parametrize(
    "unit", ["gibibyte hour", "GiBy.h", "GiB-hours", "GiB hours", "vCPU-Hour", "core-hours", "GPU-hours"]
)
def test_units_of_a_part_of_a_machine_are_time_where_the_machine_is_known(unit: str) -> None:
    assert (time_unit_ns(unit), time_unit_ns(unit, metered=True)) == (None, HOUR_NS)


def test_quantities_of_time_are_half_even() -> None:
    assert quantity_ns(Decimal("0.296111"), HOUR_NS) == 1_065_999_600_000
    assert quantity_ns(Decimal("1E+2"), MICRO) == 100_000
    assert [quantity_ns(Decimal(q), 1) for q in ("0.5", "1.5", "-0.5", "-1.5", "2.50001")] == [0, 2, 0, -2, 3]
    with pytest.raises(ValueError, match="finite"):
        quantity_ns(Decimal("NaN"), 1)
