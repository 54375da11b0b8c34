"""The bill of a fleet: every row of a delivery, with what each row truly is beside it.

What the clouds bill is in `bill_aws`, `bill_azure` and `bill_gcp`; here is what can happen to any bill: rows that stand in
another invoice month, rows that are not there yet, a second delivery. Knows no telemetry and no file format.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol

from tests.fleet.bill_aws import AwsBill
from tests.fleet.bill_azure import AzureBill
from tests.fleet.bill_gcp import GcpBill
from tests.fleet.charge import EC2, TEN_DIGITS, ZERO, Charge, charge_label, instant
from tests.fleet.model import HOUR, Fleet

__all__ = ["EC2", "Charge", "bill_of", "charge_label", "charges", "deliveries", "instant"]

LATER_PART = Decimal("0.4")
"""Part of a usage row that two_months bills in the following invoice month."""
SCALED = ("ConsumedQuantity", "PricingQuantity", "CommitmentDiscountQuantity")


class Bill(Protocol):
    """The bill of one cloud."""

    def rows(self) -> list[Charge]:
        """Every row that the fleet causes, each in its own invoice month."""

    def restate(self, rows: list[Charge]) -> list[Charge]:
        """Rows of the second delivery."""

    def later(self, row: Charge) -> Charge:
        """A row in the invoice month after its own."""


BILLS: dict[str, Callable[[Fleet], Bill]] = {"aws": AwsBill, "azure": AzureBill, "gcp": GcpBill}


def bill_of(fleet: Fleet) -> Bill:
    """The bill of a fleet's cloud."""
    return BILLS[fleet.spec.cloud](fleet)


def charges(fleet: Fleet, delivery: int = 1) -> list[Charge]:
    """Rows of one delivery of the bill: 1, or 2 where the fleet's bill is restated."""
    bill = bill_of(fleet)
    rows = bill.rows()
    if fleet.spec.bill_until is not None:
        until = fleet.spec.day_ns + fleet.spec.bill_until * HOUR
        rows = [row for row in rows if row.end_ns <= until]
    if fleet.spec.two_months:
        rows = [part for row in rows for part in _over_two_months(bill, fleet, row)]
    if fleet.spec.neighbour_month:
        rows = list(_with_a_neighbour(bill, fleet, rows))
    if delivery == 2:
        assert fleet.spec.restated, "the bill of this fleet has one delivery"
        rows = bill.restate(rows)
    # An export has no order that means anything.
    random.Random(f"bill/{fleet.spec.seed}").shuffle(rows)
    return rows


def deliveries(fleet: Fleet) -> list[list[Charge]]:
    """Rows of each delivery, first to last."""
    return [charges(fleet, number) for number in range(1, 3 if fleet.spec.restated else 2)]


def _is_use(row: Charge) -> bool:
    """Whether a row bills machine time."""
    return row.kind == "machine" and row.billed >= 0 and row.hours is not None and row["ChargeClass"] is None


def _over_two_months(bill: Bill, fleet: Fleet, row: Charge) -> Iterable[Charge]:
    """The machine time of the training machine: a part of each row in the invoice month after its own."""
    if not _is_use(row) or row.machine != fleet.machines[0].instance_id:
        return [row]
    later = _scaled(row, LATER_PART)
    return [_without(row, later), bill.later(later)]


def _scaled(row: Charge, part: Decimal) -> Charge:
    """A part of a row: costs, quantities and nested credits, each cut to ten digits."""

    def cut(value: Decimal) -> Decimal:
        return (value * part).quantize(TEN_DIGITS)

    columns: dict[str, Any] = {**row.columns}
    columns.update({name: cut(columns[name]) for name in SCALED if columns.get(name) is not None})
    if row["ConsumedUnit"] == "byte-seconds":  # whole, or a double of the export could not hold it
        columns["ConsumedQuantity"] = columns["ConsumedQuantity"].quantize(Decimal(1))
    if row["x_Credits"]:
        columns["x_Credits"] = [{**credit, "amount": cut(credit["amount"])} for credit in row["x_Credits"]]
    return replace(
        row,
        billed=cut(row.billed),
        effective=cut(row.effective),
        listed=cut(row.listed),
        columns=columns,
        hours=_hours(row, columns),
        texts={},
    )


def _without(row: Charge, part: Charge) -> Charge:
    """What a part leaves of a row."""
    columns: dict[str, Any] = {**row.columns}
    columns.update({name: columns[name] - part[name] for name in SCALED if columns.get(name) is not None})
    if row["x_Credits"]:
        columns["x_Credits"] = [
            {**whole, "amount": whole["amount"] - taken["amount"]}
            for whole, taken in zip(row["x_Credits"], part["x_Credits"], strict=True)
        ]
    return replace(
        row,
        billed=row.billed - part.billed,
        effective=row.effective - part.effective,
        listed=row.listed - part.listed,
        columns=columns,
        hours=_hours(row, columns),
        texts={},
    )


def _hours(row: Charge, columns: dict[str, Any]) -> Fraction:
    """Hours that the quantity of a row of machine time means after it changed: the consumed one, if that is time."""
    assert row.hours is not None
    for name in ("ConsumedQuantity", "PricingQuantity"):
        old = row[name]
        if old is not None and old != ZERO and row.hours == Fraction(old) * _hours_per(row, name):
            return Fraction(columns[name]) * _hours_per(row, name)
    raise AssertionError(f"no quantity of {row.label} says its hours")


def _hours_per(row: Charge, name: str) -> Fraction:
    """Hours in one unit of a quantity; 0 where it is no time."""
    unit = str(row[name.replace("Quantity", "Unit")]).lower()
    return {"seconds": Fraction(1, 3600), "byte-seconds": Fraction(0)}.get(unit, Fraction(1))


def _with_a_neighbour(bill: Bill, fleet: Fleet, rows: list[Charge]) -> Iterable[Charge]:
    """The rows of the last hour or day of one machine's time in the invoice month after their own."""
    use = [row for row in rows if _is_use(row)]
    last = max(use, key=lambda row: (row.start_ns, row.label), default=None)
    for row in rows:
        moved = last is not None and _is_use(row) and (row.machine, row.start_ns) == (last.machine, last.start_ns)
        yield bill.later(row) if moved else row
