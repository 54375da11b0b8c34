"""Snapshots over time: what was in force before, which half-days are complete, prices of closed bills, differences."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from schemas.billing import PRICES
from schemas.restatements import DIFFERENCES
from seedance.schema import conform
from tasks import bill
from tasks.io.lake import Lake
from tests.bills import csv_bytes, export, row, settings, write
from tests.exports import gcp_row, gcp_set

DAY = "2026-11-10"
MORNING, EVENING = "10:00", "20:00"
OTHER = {"BillingAccountId": "222233334444", "ResourceId": "i-0eeeeffff00001111"}
OCTOBER = {"BillingPeriodStart": "2026-10-01T00:00:00Z", "BillingPeriodEnd": "2026-11-01T00:00:00Z"}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


def hour(at: str, **changes: str) -> dict[str, str]:
    start = f"{DAY}T{at}:00Z"
    facts = {"ChargePeriodStart": start, "ChargePeriodEnd": start.replace(":00:00Z", ":59:00Z"), "InvoiceId": ""}
    return row(**{**facts, **changes})


def deliver(lake: Lake, drop: Path, *nights: list[dict[str, str]]) -> None:
    for second, rows in enumerate(nights):
        write(drop / "a.csv", csv_bytes(rows), second)
        bill.ingest(lake, settings(drop))


def halves(lake: Lake, drop: Path, day: str = DAY) -> list[tuple[str, str, int]]:
    return sorted(bill.complete_windows(lake, settings(drop), day))


def test_half_days_are_complete_when_two_deliveries_have_the_same_usage(lake: Lake, drop: Path) -> None:
    first = [hour(MORNING, BilledCost="1"), hour(EVENING, BilledCost="2"), hour(MORNING, **OTHER)]
    deliver(lake, drop, first)
    assert halves(lake, drop) == []
    second = [first[1], hour(MORNING, BilledCost="3"), first[2], hour("21:00", **OTHER)]
    write(drop / "a.csv", csv_bytes(second), 9)
    bill.ingest(lake, settings(drop))
    assert halves(lake, drop) == [("aws", "111122223333", 1), ("aws", "222233334444", 0)]
    bill.ingest(lake, settings(drop))
    assert halves(lake, drop) == [("aws", "111122223333", 1), ("aws", "222233334444", 0)]
    tax = row(ChargeCategory="Tax", ChargeFrequency="", BilledCost="7", InvoiceId="")
    write(drop / "a.csv", csv_bytes([*second, tax]), 10)
    bill.ingest(lake, settings(drop))
    assert halves(lake, drop) == [
        (a, b, h) for a, b in (("aws", "111122223333"), ("aws", "222233334444")) for h in (0, 1)
    ]
    assert halves(lake, drop, "2026-11-11") == []


def test_a_half_day_that_lost_its_usage_is_not_complete(lake: Lake, drop: Path) -> None:
    deliver(lake, drop, [hour(MORNING), hour(EVENING)], [hour(EVENING)])
    assert halves(lake, drop) == [("aws", "111122223333", 1)]


def test_invoiced_usage_is_complete_at_once(lake: Lake, drop: Path) -> None:
    deliver(lake, drop, [hour(MORNING, InvoiceId="I1"), hour(EVENING, **OTHER), hour(MORNING, **OTHER, InvoiceId="I2")])
    assert halves(lake, drop) == [("aws", "111122223333", 0)]


def test_every_period_that_bills_a_half_day_must_agree(lake: Lake, drop: Path) -> None:
    late = hour(MORNING, **OCTOBER, BilledCost="5", ChargeClass="Correction")
    usage = [hour(MORNING), hour(EVENING)]
    deliver(lake, drop, usage, [*usage, late])
    assert halves(lake, drop) == [("aws", "111122223333", 1)]
    write(drop / "a.csv", csv_bytes([hour(MORNING), hour(EVENING, BilledCost="9"), late]), 10)
    bill.ingest(lake, settings(drop))
    assert [(one.period[:7], one.step.facts["rows"]) for one in bill.former_in_force(lake, settings(drop))] == [
        ("2026-10", 3),
        ("2026-11", 3),
    ]
    assert halves(lake, drop) == [("aws", "111122223333", 0)]


def test_the_former_state_of_a_period_is_that_before_its_own_change(lake: Lake, drop: Path) -> None:
    for second, (october, november) in enumerate((("1", "1"), ("1", "2"), ("3", "2"), ("3", "2"))):
        write(drop / "october.csv", csv_bytes([row(BilledCost=october, **OCTOBER)]), second)
        write(drop / "november.csv", csv_bytes([row(BilledCost=november)]), second)
        bill.ingest(lake, settings(drop))
    found = [
        (one.period[:7], one.step.facts["totals"][0]["BilledCost"])
        for one in bill.former_in_force(lake, settings(drop))
    ]
    assert found == [("2026-10", "1"), ("2026-11", "1")]


def test_files_that_are_parts_of_one_bill_are_no_states_of_one_another(lake: Lake, drop: Path) -> None:
    write(drop / "a.csv", csv_bytes([row()]))
    write(drop / "b.csv", csv_bytes([row(**OTHER)]), 1)
    bill.ingest(lake, settings(drop))
    assert bill.former_in_force(lake, settings(drop)) == []
    write(drop / "a.csv", csv_bytes([row(BilledCost="2")]), 2)
    bill.ingest(lake, settings(drop))
    assert len(bill.former_in_force(lake, settings(drop))) == 2


def priced(lake: Lake, drop: Path, day: str = "2026-11-01") -> list[tuple[str, str, str, Decimal, str]]:
    names = ("SkuId", "RegionId", "ListUnitPrice", "x_PriceSource")
    found = []
    for account, price in bill.contracted_prices(lake, settings(drop), day):
        assert tuple(price) == PRICES.names
        found.append((account, *(price[n] for n in names)))
    return found


def test_closed_bills_say_what_a_machine_costs(lake: Lake, drop: Path) -> None:
    base = {**OCTOBER, "InvoiceId": "I1", "RegionId": "us-east-1", "ContractedUnitPrice": "1.5"}
    rows = [
        row(**base, ChargePeriodStart="2026-10-02T00:00:00Z", ChargePeriodEnd="2026-10-02T01:00:00Z"),
        row(**{**base, "ContractedUnitPrice": "1.4"}, ChargePeriodStart="2026-10-09T00:00:00Z"),
        row(**{**base, "ContractedUnitPrice": "0.1"}, PricingCategory="Dynamic"),
        row(**{**base, "ContractedUnitPrice": "0.1"}, ChargeClass="Correction"),
        row(**{**base, **OTHER, "ContractedUnitPrice": ""}, EffectiveCost="3", ConsumedQuantity="2"),
        row(**{**base, "InvoiceId": "", "BillingAccountId": "3"}),
    ]
    rows = [{**r, "ChargePeriodEnd": "2026-10-31T00:00:00Z"} if "10-09" in r["ChargePeriodStart"] else r for r in rows]
    rows = [{"PricingCategory": "Standard", "ChargeClass": "", **r} for r in rows]
    deliver(lake, drop, rows)
    assert priced(lake, drop, "2026-10-31") == []
    assert priced(lake, drop) == [
        ("111122223333", "g5.4xlarge", "us-east-1", Decimal("1.4"), "contracted: 2026-10"),
        ("222233334444", "g5.4xlarge", "us-east-1", Decimal("1.5"), "contracted: 2026-10"),
    ]


def test_meters_of_a_machine_add_up_to_its_price(lake: Lake, drop: Path) -> None:
    facts: dict[str, Any] = {
        "BillingPeriodStart": "2026-10-01T07:00:00Z",
        "BillingPeriodEnd": "2026-11-01T07:00:00Z",
        "InvoiceId": "I1",
        "RegionId": "us-central1",
    }
    rows = [
        gcp_row("core", **facts, ContractedUnitPrice="0.03"),
        gcp_row("ram", **facts, ContractedUnitPrice="0.001"),
        gcp_row("gpu", cost="60", amount="0.5", **facts, ContractedUnitPrice=None),
    ]
    gcp_set(drop, "a.parquet", rows, period="2026-10")
    bill.ingest(lake, settings(drop))
    expected = 208 * Decimal("0.03") + 1872 * Decimal("0.001") + 120
    assert priced(lake, drop) == []
    assert [p[3] for p in priced(lake, drop, "2026-11-02")] == [expected]


def test_parts_of_a_type_that_nobody_knows_are_no_price_of_a_machine(lake: Lake, drop: Path) -> None:
    label = {"key": "compute.googleapis.com/machine_spec", "value": "a9-huge-8g"}
    facts: dict[str, Any] = {
        "BillingPeriodStart": "2026-10-01T07:00:00Z",
        "BillingPeriodEnd": "2026-11-01T07:00:00Z",
        "InvoiceId": "I1",
        "RegionId": "us-central1",
        "ContractedUnitPrice": "0.03",
        "x_SystemLabels": [label],
    }
    gcp_set(drop, "a.parquet", [gcp_row("core", **facts), gcp_row("gpu", **facts)], period="2026-10")
    bill.ingest(lake, settings(drop))
    assert priced(lake, drop, "2026-11-02") == []


def test_the_difference_of_two_snapshots_is_a_table(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    old = [
        row(BilledCost="1", InvoiceId="I1"),
        row(BilledCost="2", InvoiceId="I1"),
        row(ResourceId="b", InvoiceId="I1"),
    ]
    export(drop, old, execution="20261111T060000Z-a")
    bill.ingest(lake, plan)
    step, _ = bill.report_differences(lake, plan)
    assert step.facts == {"added": 0, "removed": 0, "changed": 0, "closed": 0}
    new = [
        row(BilledCost="2", InvoiceId="I1"),
        row(BilledCost="1.5", InvoiceId="I1"),
        row(ResourceId="c", InvoiceId="I1"),
    ]
    export(drop, new, execution="20261112T060000Z-b")
    bill.ingest(lake, plan)
    step, reused = bill.report_differences(lake, plan)
    assert (step.facts, reused) == ({"added": 1, "removed": 1, "changed": 1, "closed": 3}, False)
    assert bill.report_differences(lake, plan)[1]
    table = conform(lake.read(step.handles[DIFFERENCES.name], DIFFERENCES), DIFFERENCES, where="test")
    found = {r["x_Change"]: r for r in table.to_pylist()}
    (before,), (after,) = bill.former_in_force(lake, plan), bill.snapshots_in_force(lake, plan)
    assert (found["changed"]["x_FormerBilledCost"], found["changed"]["BilledCost"]) == (1, Decimal("1.5"))
    assert (found["changed"]["x_FormerDelivery"], found["changed"]["x_Delivery"]) == (before.delivery, after.delivery)
    assert (found["added"]["ResourceId"], found["added"]["x_FormerBilledCost"], found["added"]["x_FormerDelivery"]) == (
        "c",
        None,
        None,
    )
    assert (found["removed"]["ResourceId"], found["removed"]["BilledCost"], found["removed"]["x_Delivery"]) == (
        "b",
        None,
        None,
    )
    assert {r["x_UsageDate"] for r in found.values()} == {dt.date(2026, 11, 10)}
    lake.publish_as_of(step.handles[DIFFERENCES.name], "2026-11-12")
    assert lake.store.get(f"report/{DIFFERENCES.name}/as_of_date=2026-11-12/data.parquet")


def test_an_open_period_is_not_marked_as_closed(lake: Lake, drop: Path) -> None:
    deliver(lake, drop, [hour(MORNING), hour(EVENING, **OTHER, InvoiceId="I")], [hour(MORNING, BilledCost="9")])
    step, _ = bill.report_differences(lake, settings(drop))
    table = lake.read(step.handles[DIFFERENCES.name], DIFFERENCES)
    assert {(r["x_Change"], r["x_Closed"]) for r in table.to_pylist()} == {("changed", False), ("removed", True)}
