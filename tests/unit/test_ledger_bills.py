"""What bills put side by side: currencies and invoice months in one hour, reservations, corrections of old hours, promotions."""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tasks.core.ledger import Ledger, assert_money, settle
from tasks.core.reports import job_daily, layer_daily, resource_daily, totals_by_category
from tasks.errors import LawError
from tests.tables import DAY, SECOND, charge, charges, device, devices, layer, layers, ns
from tests.unit.test_ledger import TEN, inputs, machine, prices

JUNE = DAY.replace(month=6)
AT_WORK = devices(device(TEN, "work", 2400, job="A"), device(TEN, "idle", 1200))
LAYERS = layers(layer(TEN, "A", "L1", 1600), layer(TEN, "A", "L2", 800))


def one(key: str, billed: str, effective: str | None = None, **facts: Any) -> dict[str, Any]:
    """A row of a machine with one GPU."""
    return machine(key, billed, effective, **({"x_InstanceType": "one.gpu"} | facts))


def day(*rows: dict[str, Any], usage: pa.Table = AT_WORK) -> Ledger:
    return settle(inputs(charges(*rows), usage, LAYERS))


def by(table: pa.Table, *names: str, column: str = "BilledCost") -> dict[tuple[Any, ...], Decimal]:
    found: dict[tuple[Any, ...], Decimal] = defaultdict(Decimal)
    for row in table.to_pylist():
        found[tuple(row[n] for n in names)] += row[column]
    return dict(found)


def test_two_currencies_and_two_invoice_months_in_one_hour_share_one_vector_and_no_sum() -> None:
    """Half the hour is on one invoice in dollars, a quarter on the next month's, a quarter in euros: one span, three pools."""
    ledger = day(
        one("a", "3.00", quantity="0.5", InvoiceId="inv-9", BillingPeriodStart=DAY.replace(month=9)),
        one("b", "1.50", quantity="0.25", InvoiceId="inv-10"),
        one("c", "1.20", quantity="0.25", InvoiceId="inv-10", BillingCurrency="EUR"),
    )
    assert [s.billed_ns for s in ledger.hours.slots] == [3600 * SECOND]
    key = ("BillingCurrency", "InvoiceId", "x_Category")
    assert by(ledger.addresses, *key) == {
        ("USD", "inv-9", "work"): Decimal("2.0"), ("USD", "inv-9", "idle"): Decimal("1.0"),
        ("USD", "inv-10", "work"): Decimal("1.0"), ("USD", "inv-10", "idle"): Decimal("0.5"),
        ("EUR", "inv-10", "work"): Decimal("0.8"), ("EUR", "inv-10", "idle"): Decimal("0.4"),
    }  # fmt: skip
    assert by(ledger.layers, "BillingCurrency", "InvoiceId", "x_Layer") == {
        ("USD", "inv-9", "L1"): Decimal("1.333333333333"), ("USD", "inv-9", "L2"): Decimal("0.666666666667"),
        ("USD", "inv-10", "L1"): Decimal("0.666666666667"), ("USD", "inv-10", "L2"): Decimal("0.333333333333"),
        ("EUR", "inv-10", "L1"): Decimal("0.533333333333"), ("EUR", "inv-10", "L2"): Decimal("0.266666666667"),
    }  # fmt: skip
    totals = {(r["BillingCurrency"], r["x_Category"]): r["BilledCost"] for r in totals_by_category(ledger.addresses)}
    assert totals == {
        ("USD", "work"): 3, ("USD", "idle"): Decimal("1.5"), ("EUR", "work"): Decimal("0.8"), ("EUR", "idle"): Decimal("0.4")
    }  # fmt: skip
    reports = (
        job_daily(DAY.date(), ledger.addresses, ledger.spans, inputs(charges(), AT_WORK).jobs),
        resource_daily(DAY.date(), ledger.addresses, ledger.spans),
    )
    for report in reports:
        assert by(report, "BillingCurrency") == {("USD",): Decimal("4.5"), ("EUR",): Decimal("1.2")}


def test_a_reserved_machine_and_what_of_the_reservations_nobody_used() -> None:
    """A capacity reservation is used by the machine's own row; its unused hour and the fees are nobody's time."""
    reserved = {"CapacityReservationId": "cr-1", "CapacityReservationStatus": "Used"}
    ledger = day(
        one("covered", "0", "2.00", quantity="0.5", CommitmentDiscountStatus="Used", CommitmentDiscountId="ri-1"),
        one("reserved", "3.00", quantity="0.5", **reserved),
        charge("ri unused", "0", "4.00", start=TEN, CommitmentDiscountStatus="Unused", CommitmentDiscountId="ri-1"),
        charge(
            "ri fee", "6.00", "0", ChargeCategory="Purchase", ChargeFrequency="Recurring", CommitmentDiscountId="ri-1"
        ),
        charge("cr unused", "5.00", start=TEN, CapacityReservationId="cr-1", CapacityReservationStatus="Unused"),
        charge("cr fee", "7.00", "0", ChargeCategory="Purchase", CapacityReservationId="cr-1"),
        charge(
            "rest of a fee", "0.25", x_Class="commitment_unused", ChargeCategory="Purchase", CommitmentDiscountId="cud"
        ),
    )
    assert ledger.hours.slots[0].billed_ns == 3600 * SECOND
    assert by(ledger.addresses, "x_ChargeKey", "x_Category") == {
        ("covered", "work"): 0, ("covered", "idle"): 0,
        ("reserved", "work"): Decimal(2), ("reserved", "idle"): Decimal(1),
        ("ri unused", "commitment_unused"): 0, ("ri fee", "commitment_purchase"): Decimal(6),
        ("cr unused", "capacity_unused"): Decimal(5), ("cr fee", "commitment_purchase"): Decimal(7),
        ("rest of a fee", "commitment_unused"): Decimal("0.25"),
    }  # fmt: skip
    assert by(ledger.addresses, "x_Category", column="EffectiveCost") == {
        ("work",): Decimal("3.333333333333"), ("idle",): Decimal("1.666666666667"),
        ("commitment_unused",): Decimal("4.25"), ("commitment_purchase",): 0, ("capacity_unused",): Decimal(5),
    }  # fmt: skip


@pytest.mark.parametrize("billed", ["0.90", "-0.90"])
def test_a_correction_of_an_old_hour_uses_the_vector_of_that_hour(billed: str) -> None:
    """It stands on its old day, under the period in which it was issued, and adds nothing to the span."""
    fix = one("fix", billed, ChargeClass="Correction", BillingPeriodStart=JUNE.replace(month=11), InvoiceId="inv-11")
    ledger = day(one("m", "3.00", InvoiceId="inv-10"), fix)
    assert ledger.hours.slots[0].billed_ns == 3600 * SECOND
    found = [r for r in ledger.addresses.to_pylist() if r["x_ChargeKey"] == "fix"]
    assert {(r["x_HourUtc"], r["BillingPeriodStart"], r["InvoiceId"]) for r in found} == {
        (TEN, JUNE.replace(month=11), "inv-11")
    }
    third = Decimal(billed) / 3
    assert {(r["x_JobId"], r["x_Category"]): r["BilledCost"] for r in found} == {
        ("A", "work"): 2 * third, (None, "idle"): third
    }  # fmt: skip


def test_a_correction_of_an_hour_that_has_no_other_row_follows_what_was_observed() -> None:
    """Nothing was billed for the hour, and no longer is anything estimated: two thirds of what was seen was work."""
    ledger = day(one("fix", "0.90", ChargeClass="Correction"))
    assert [(s.touched, s.billed_ns) for s in ledger.hours.slots] == [(True, None)]
    assert by(ledger.addresses, "x_State", "x_JobId", "x_Category") == {
        ("billed", "A", "work"): Decimal("0.6"), ("billed", None, "idle"): Decimal("0.3")
    }  # fmt: skip
    assert len(ledger.spans) == 0


def test_a_correction_of_a_machine_that_nobody_sees_any_more_is_unobserved() -> None:
    fix = one("fix", "0.90", ChargeClass="Correction", x_MachineId="i-gone", ResourceId="i-gone")
    (row,) = day(fix).addresses.to_pylist()[-1:]
    assert (row["x_MachineId"], row["x_Category"], row["x_Reason"]) == ("i-gone", "unobserved", "no_agent")


PROMOTED = (
    one("m", "3.00", x_PromotionalCost=Decimal("-1.00")),
    one("credit", "-0.60", ChargeCategory="Credit"),
    charge("account credit", "-5.00", ChargeCategory="Credit", start=TEN),
)
"""A row with a promotion nested in it, a credit for the machine, and one for the account: 3.00 net, 4.00 before promotions."""


def test_a_promotion_follows_its_charge_to_the_digit() -> None:
    ledger = day(*PROMOTED)
    assert by(ledger.addresses, "x_ChargeKey", "x_Category", column="x_PromotionalCost") == {
        ("m", "work"): Decimal("-0.666666666667"), ("m", "idle"): Decimal("-0.333333333333"),
        ("credit", "work"): Decimal("-0.4"), ("credit", "idle"): Decimal("-0.2"),
        ("account credit", "credit"): Decimal(-5),
    }  # fmt: skip
    assert by(ledger.layers, "x_Layer", column="x_PromotionalCost") == {
        ("L1",): Decimal("-0.711111111111"), ("L2",): Decimal("-0.355555555556")
    }  # fmt: skip


def test_promotions_never_lower_unit_costs() -> None:
    """Job A's work costs 2.666666666667 for its 10 units whether or not somebody else paid for some of it."""
    with_promotions, without = (day(*rows) for rows in (PROMOTED, (one("m", "4.00"),)))
    facts = inputs(charges(), AT_WORK).jobs
    found = []
    for ledger in (with_promotions, without):
        jobs = job_daily(DAY.date(), ledger.addresses, ledger.spans, facts).to_pylist()
        work = layer_daily(
            DAY.date(), ledger.addresses, ledger.layers, LAYERS, ledger.spans, facts, lambda *_: None
        ).to_pylist()
        found.append(
            (
                [r["x_EffectiveCostPerUnit"] for r in jobs if r["x_JobId"] == "A"],
                [round(r["x_FlopsPerEffectiveUsd"], 3) for r in work if r["x_Category"] == "work"],
            )
        )
    assert found[0] == found[1]
    assert found[0][0] == [0.2666666666667]
    lowered = job_daily(DAY.date(), with_promotions.addresses, with_promotions.spans, facts).to_pylist()
    assert [(r["EffectiveCost"], r["x_PromotionalCost"]) for r in lowered if r["x_JobId"] == "A"] == [
        (Decimal("1.6"), Decimal("-1.066666666667"))
    ]


def test_an_estimate_has_no_promotion() -> None:
    usage = devices(device(TEN, "idle", 3600, instance_type="one.gpu"))
    ledger = settle(
        inputs(charges(), usage, watermarks={"aws|1|s": ns(TEN)}, prices=prices(("one.gpu", "2026-09", "3.00")))
    )
    assert [(r["x_State"], r["x_PromotionalCost"]) for r in ledger.addresses.to_pylist()] == [("provisional", None)]


def test_law_one_holds_for_promotions_too() -> None:
    ledger = day(*PROMOTED)
    place = ledger.addresses.schema.get_field_index("x_PromotionalCost")
    amounts = ledger.addresses["x_PromotionalCost"].to_pylist()
    amounts[0] += Decimal("1e-12")
    broken = ledger.addresses.set_column(
        place, "x_PromotionalCost", pa.array(amounts, ledger.addresses.schema.field(place).type)
    )
    with pytest.raises(LawError, match=r"law 1 \(money\): charge .*: x_PromotionalCost expected .*add up to"):
        assert_money(charges(*PROMOTED), broken)
