"""One row of a bill in FOCUS 1.2 columns, and what it truly is; and the desk that writes such rows as AWS spells them.

Amounts are decimals of at most ten digits after the point, so that the doubles of an export read back exactly; text exports
may say more digits, and the amount is what the ledger makes of them. Knows no telemetry and no file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from typing import Any

from tests.fleet.model import HOUR, SECOND, Fleet, Machine

EC2 = "Amazon Elastic Compute Cloud"
LABEL = (
    "BillingAccountId",
    "BillingPeriodStart",
    "x_UsageType",
    "SkuMeter",
    "ResourceId",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "CommitmentDiscountStatus",
    "ChargeDescription",
)
"""Columns that name a charge in words; equal only for rows that are equal in everything."""
TEN_DIGITS = Decimal("1e-10")
TWELVE_DIGITS = Decimal("1e-12")
ZERO = Decimal(0)
PROMOTION = "PROMOTION"
"""Type of a nested credit that pays instead of lowering a price."""
TIMES = ("ChargePeriodStart", "ChargePeriodEnd", "BillingPeriodStart")


@dataclass(frozen=True)
class Charge:
    """One row of the bill, and what it truly is.

    Args:
        kind: machine, dependant, storage, shared, support, rounding, commitment_unused, capacity_unused, untied or
            other, as a tie rule would say from the row alone.
        start_ns, end_ns: charge period, ns UTC.
        billed, effective, listed: BilledCost, EffectiveCost, ListCost.
        columns: the other FOCUS columns that are not null.
        machine: instance that the row names, whatever it is.
        dependant: volume that the row names.
        instance_type: type of the instance hours that the row bills.
        hours: hours of the meter, of rows that bill a machine.
        units_per: units of the meter that one machine has: cores, GPUs or GiB; None is one.
        texts: costs as a text export prints them, where they have more digits than the ledger keeps.
    """

    kind: str
    start_ns: int
    end_ns: int
    billed: Decimal
    effective: Decimal
    listed: Decimal
    columns: Mapping[str, Any]
    machine: str | None = None
    dependant: str | None = None
    instance_type: str | None = None
    hours: Fraction | None = None
    units_per: Decimal | None = None
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def promotional(self) -> Decimal:
        """What of the amortised cost a promotional credit paid, zero or negative."""
        if self["ChargeCategory"] == "Credit":
            return self.effective
        nested = (credit["amount"] for credit in self["x_Credits"] or () if credit["type"] == PROMOTION)
        return sum(nested, ZERO)

    @property
    def payer(self) -> tuple[Any, ...]:
        """Who pays it, in what and when: pools of work money do not mix these."""
        names = ("BillingAccountId", "SubAccountId", "BillingPeriodStart", "InvoiceId", "BillingCurrency")
        return tuple(self[name] for name in names)

    def __getitem__(self, column: str) -> Any:
        return self.columns.get(column)

    @property
    def label(self) -> str:
        """The charge in words."""
        times = {"ChargePeriodStart": instant(self.start_ns), "ChargePeriodEnd": instant(self.end_ns)}
        return charge_label({**self.columns, **times})


def charge_label(row: Mapping[str, Any]) -> str:
    """A charge in words, from any mapping that has the columns of LABEL: a row of a bill, or of the charges table."""
    return "|".join(str(_second(row.get(c)) if c in TIMES else row.get(c) or "") for c in LABEL)


def _second(value: Any) -> str:
    when: datetime = value.to_pydatetime(warn=False) if hasattr(value, "to_pydatetime") else value
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def instant(ns: int) -> datetime:
    """Instant of ns UTC, to the microsecond."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=ns // 1_000)


class Desk:
    """Writes rows of one fleet's bill."""

    zone: tzinfo = UTC
    """Zone in which invoice months begin."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.spec, self.day = fleet, fleet.spec, fleet.spec.day_ns
        self.month = self.month_of(self.day)

    def month_of(self, ns: int, later: int = 0) -> tuple[int, int]:
        """Invoice month that holds an instant, or a later one: start and end, ns UTC."""
        first = instant(ns).astimezone(self.zone).replace(day=1, hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
        for _ in range(later):
            first = (first + timedelta(days=32)).replace(day=1)
        after = (first + timedelta(days=32)).replace(day=1)
        start, end = (int(at.replace(tzinfo=self.zone).timestamp()) * SECOND for at in (first, after))
        return start, end

    def period(self, ns: int, later: int = 0) -> dict[str, Any]:
        """Columns of the billing period that holds an instant, or a later one; a later one has an invoice of its own."""
        start, end = self.month_of(ns, later)
        invoice = self.spec.invoice
        return {
            "BillingPeriodStart": instant(start),
            "BillingPeriodEnd": instant(end),
            "InvoiceId": f"{invoice}-{later}" if invoice and later else invoice,
        }

    def later(self, row: Charge) -> Charge:
        """The same row in the invoice month after its own."""
        kept = {**row.columns, **self.period(int(row["BillingPeriodStart"].timestamp()) * SECOND, 1)}
        return replace(row, columns={name: value for name, value in kept.items() if value is not None})

    def payer(self, machine: Machine) -> dict[str, Any]:
        """Columns of who pays for a machine, where that is another account than the fleet's first."""
        if machine.account is None:
            return {}
        return {
            "BillingAccountId": machine.account,
            "BillingAccountName": "Example Payer Europe",
            "BillingCurrency": machine.currency,
            "PricingCurrency": machine.currency,
        }

    def hour(self, hour: int) -> tuple[int, int]:
        """Charge period of an hour of the day."""
        return self.day + hour * HOUR, self.day + (hour + 1) * HOUR

    def row(
        self,
        kind: str,
        period: tuple[int, int],
        billed: Decimal | str,
        effective: Decimal | str | None = None,
        listed: Decimal | str | None = None,
        *,
        machine: str | None = None,
        dependant: str | None = None,
        instance_type: str | None = None,
        hours: Decimal | Fraction | None = None,
        units_per: Decimal | None = None,
        **columns: Any,
    ) -> Charge:
        """A row with the usual columns and these; a column of None is null, and costs that are not given equal the cash."""
        cash = Decimal(billed)
        own = Decimal(effective) if effective is not None else cash
        costs = {"BilledCost": cash, "EffectiveCost": own, "ListCost": Decimal(listed) if listed is not None else own}
        stored = {name: cost.quantize(TWELVE_DIGITS, ROUND_HALF_EVEN) for name, cost in costs.items()}
        usual = {**self.usual(period), **columns}
        return Charge(
            kind,
            period[0],
            period[1],
            stored["BilledCost"],
            stored["EffectiveCost"],
            stored["ListCost"],
            {name: value for name, value in usual.items() if value is not None},
            machine,
            dependant,
            instance_type,
            None if hours is None else Fraction(hours),
            units_per,
            {name: f"{cost:f}" for name, cost in costs.items() if cost != stored[name]},
        )

    def usual(self, period: tuple[int, int]) -> dict[str, Any]:
        """Columns that every row of a charge period has unless it says otherwise."""
        fleet = self.fleet
        return {
            "BillingAccountId": fleet.account,
            "BillingAccountName": "Example Payer",
            "BillingAccountType": "Management",
            "BillingCurrency": self.spec.currency,
            **self.period(period[0]),
            "ChargeCategory": "Usage",
            "ChargeFrequency": "Usage-Based",
            "InvoiceIssuerName": "Amazon Web Services, Inc.",
            "PricingCurrency": self.spec.currency,
            "ProviderName": "AWS",
            "PublisherName": "Amazon Web Services, Inc.",
            "RegionId": fleet.region,
            "RegionName": "US East (N. Virginia)",
            "ServiceCategory": "Compute",
            "ServiceName": EC2,
            "ServiceSubcategory": "Virtual Machines",
            "SubAccountId": fleet.sub_account,
            "SubAccountName": "Example ML",
            "SubAccountType": "Linked",
            "PricingCategory": "Standard",
            "x_ServiceCode": "AmazonEC2",
        }
