"""One row of a bill in FOCUS 1.2 columns as AWS spells them, and what it truly is; and the desk that writes such rows.

Amounts are decimals of at most ten digits after the point, so that the doubles of an export read back exactly. Knows no
telemetry and no file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from tests.fleet.model import HOUR, SECOND, Fleet

EC2 = "Amazon Elastic Compute Cloud"
LABEL = (
    "x_UsageType",
    "ResourceId",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "CommitmentDiscountStatus",
    "ChargeDescription",
)
"""Columns that name a charge in words; equal only for rows that are equal in everything."""
TEN_DIGITS = Decimal("1e-10")
ZERO = Decimal(0)


@dataclass(frozen=True)
class Charge:
    """One row of the bill, and what it truly is.

    Args:
        kind: machine, dependant, storage, shared, support, untied or other, as a tie rule would say from the row alone.
        start_ns, end_ns: charge period, ns UTC.
        billed, effective, listed: BilledCost, EffectiveCost, ListCost.
        columns: the other FOCUS columns that are not null.
        machine: instance that the row names, whatever it is.
        dependant: volume that the row names.
        instance_type: type of the instance hours that the row bills.
        hours: instance hours, of rows that bill them.
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
    hours: Decimal | None = None

    def __getitem__(self, column: str) -> Any:
        return self.columns.get(column)

    @property
    def label(self) -> str:
        """The charge in words."""
        times = {"ChargePeriodStart": instant(self.start_ns), "ChargePeriodEnd": instant(self.end_ns)}
        return charge_label({**self.columns, **times})


def charge_label(row: Mapping[str, Any]) -> str:
    """A charge in words, from any mapping that has the columns of LABEL: a row of a bill, or of the charges table."""
    return "|".join(str(_second(row.get(c)) if c.startswith("ChargePeriod") else row.get(c) or "") for c in LABEL)


def _second(value: Any) -> str:
    when: datetime = value.to_pydatetime(warn=False) if hasattr(value, "to_pydatetime") else value
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def instant(ns: int) -> datetime:
    """Instant of ns UTC, to the microsecond."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=ns // 1_000)


class Desk:
    """Writes rows of one fleet's month."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.spec, self.day = fleet, fleet.spec, fleet.spec.day_ns
        first = datetime.fromisoformat(fleet.spec.day).replace(tzinfo=UTC, day=1)
        after = (first + timedelta(days=32)).replace(day=1)
        self.month = int(first.timestamp()) * SECOND, int(after.timestamp()) * SECOND

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
        hours: Decimal | None = None,
        **columns: Any,
    ) -> Charge:
        """A row with the usual columns and these; a column of None is null, and costs that are not given equal the cash."""
        fleet = self.fleet
        cash = Decimal(billed)
        own = Decimal(effective) if effective is not None else cash
        usual: dict[str, Any] = {
            "BillingAccountId": fleet.account,
            "BillingAccountName": "Example Payer",
            "BillingAccountType": "Management",
            "BillingCurrency": "USD",
            "BillingPeriodStart": instant(self.month[0]),
            "BillingPeriodEnd": instant(self.month[1]),
            "ChargeCategory": "Usage",
            "ChargeFrequency": "Usage-Based",
            "InvoiceIssuerName": "Amazon Web Services, Inc.",
            "InvoiceId": self.spec.invoice,
            "PricingCurrency": "USD",
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
        usual.update(columns)
        usual = {name: value for name, value in usual.items() if value is not None}
        return Charge(
            kind,
            *period,
            cash,
            own,
            Decimal(listed) if listed is not None else own,
            usual,
            machine,
            dependant,
            instance_type,
            hours,
        )
