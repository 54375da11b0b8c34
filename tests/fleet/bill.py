"""The bill of a fleet: charges in FOCUS 1.2 columns as AWS spells them, with what each row truly is beside it.

Amounts are decimals of at most ten digits after the point, so that the doubles of an export read back exactly. Knows no
telemetry and no file format.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import ROUND_DOWN, Decimal
from typing import Any

from tests.fleet.model import DAY, HOUR, HOUR_S, SECOND, Fleet, Machine, instance_facts
from tests.fleet.roster import token

EC2 = "Amazon Elastic Compute Cloud"
LABEL = (
    "x_UsageType", "ResourceId", "ChargePeriodStart", "ChargePeriodEnd", "ChargeCategory", "CommitmentDiscountStatus",
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


def charges(fleet: Fleet, delivery: int = 1) -> list[Charge]:
    """Rows of one delivery of the bill: 1, or 2 where the fleet's bill is restated."""
    ledger = _Bill(fleet)
    rows = ledger.rows()
    if fleet.spec.bill_until is not None:
        until = fleet.spec.day_ns + fleet.spec.bill_until * HOUR
        rows = [row for row in rows if row.end_ns <= until]
    if delivery == 2:
        assert fleet.spec.restated, "the bill of this fleet has one delivery"
        rows = ledger.restate(rows)
    # An export has no order that means anything.
    random.Random(f"bill/{fleet.spec.seed}").shuffle(rows)
    return rows


def deliveries(fleet: Fleet) -> list[list[Charge]]:
    """Rows of each delivery, first to last."""
    return [charges(fleet, number) for number in range(1, 3 if fleet.spec.restated else 2)]


class _Bill:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.spec, self.day = fleet, fleet.spec, fleet.spec.day_ns
        first = datetime.fromisoformat(fleet.spec.day).replace(tzinfo=UTC, day=1)
        after = (first + timedelta(days=32)).replace(day=1)
        self.month = int(first.timestamp()) * SECOND, int(after.timestamp()) * SECOND
        self.plan = f"arn:aws:savingsplans::{fleet.account}:savingsplan/{token(fleet.spec, 'plan', digits=16)}"

    def rows(self) -> list[Charge]:
        """Every row of the month that this fleet causes."""
        found: list[Charge] = []
        for number, machine in enumerate(self.fleet.machines):
            if machine.is_billed:
                found += self._machine(number, machine)
        found += self._plan(found)
        found += self._volumes()
        spec = self.spec
        for wanted, make in (
            (spec.storage, self._storage), (spec.tax, self._tax), (spec.credit, self._credit), (spec.refund, self._refund),
            (spec.transfer, self._transfer), (spec.overheads, self._overheads), (spec.straddling, self._straddling),
            (spec.twins, self._twins),
        ):
            if wanted:
                found += make()
        return found

    def restate(self, rows: list[Charge]) -> list[Charge]:
        """A tenth off the on-demand hours of even hours, the credit gone, an adjustment new."""
        changed = []
        for row in rows:
            if row.kind == "machine" and row["PricingCategory"] == "Standard" and row.billed > 0 and row.start_ns // HOUR % 2 == 0:
                less = (row.billed * Decimal("0.9")).quantize(TEN_DIGITS)
                row = replace(row, billed=less, effective=less)
            if row["ChargeCategory"] != "Credit":
                changed.append(row)
        period = self._hour(self.spec.first_hour)
        changed.append(self._row("untied", period, "-1.05", ChargeCategory="Adjustment", ChargeFrequency="One-Time",
                                 ChargeDescription="Rate correction of the open month"))
        return changed

    # --- one row -----------------------------------------------------------------------------------------------------

    def _hour(self, hour: int) -> tuple[int, int]:
        return self.day + hour * HOUR, self.day + (hour + 1) * HOUR

    def _row(self, kind: str, period: tuple[int, int], billed: Decimal | str, effective: Decimal | str | None = None,
             listed: Decimal | str | None = None, *, machine: str | None = None, dependant: str | None = None,
             instance_type: str | None = None, hours: Decimal | None = None, **columns: Any) -> Charge:
        fleet = self.fleet
        cash = Decimal(billed)
        own = Decimal(effective) if effective is not None else cash
        usual: dict[str, Any] = {
            "BillingAccountId": fleet.account, "BillingAccountName": "Example Payer", "BillingAccountType": "Management",
            "BillingCurrency": "USD", "BillingPeriodStart": instant(self.month[0]), "BillingPeriodEnd": instant(self.month[1]),
            "ChargeCategory": "Usage", "ChargeFrequency": "Usage-Based", "InvoiceIssuerName": "Amazon Web Services, Inc.",
            "InvoiceId": self.spec.invoice, "PricingCurrency": "USD", "ProviderName": "AWS",
            "PublisherName": "Amazon Web Services, Inc.", "RegionId": fleet.region, "RegionName": "US East (N. Virginia)",
            "ServiceCategory": "Compute", "ServiceName": EC2, "ServiceSubcategory": "Virtual Machines",
            "SubAccountId": fleet.sub_account, "SubAccountName": "Example ML", "SubAccountType": "Linked",
            "PricingCategory": "Standard", "x_ServiceCode": "AmazonEC2",
        }
        usual.update(columns)
        usual = {name: value for name, value in usual.items() if value is not None}
        return Charge(kind, *period, cash, own, Decimal(listed) if listed is not None else own, usual, machine, dependant,
                      instance_type, hours)

    # --- machines ----------------------------------------------------------------------------------------------------

    def _machine(self, number: int, machine: Machine) -> Iterable[Charge]:
        """Instance hours, one row an hour and price; or one a day where the switch says so and the price is fixed."""
        hours = {h: _hours(machine, h) for h in range(24) if _hours(machine, h) > 0}
        if machine.pricing == "spot":
            for hour, quantity in hours.items():
                yield self._spot(machine, hour, quantity)
            return
        covered = {h: self._covered(machine, q) if machine.pricing == "savings_plan" else ZERO for h, q in hours.items()}
        daily = self.spec.daily_machine_rows
        groups = [(((self.day, self.day + DAY)), list(hours))] if daily else [(self._hour(h), [h]) for h in hours]
        for period, together in groups:
            plan = sum((covered[h] for h in together), ZERO)
            rest = sum((hours[h] for h in together), ZERO) - plan
            if plan > 0:
                yield self._instance_hours(machine, period, plan, is_covered=True)
            if rest > 0:
                yield self._instance_hours(machine, period, rest, is_covered=False)

    def _covered(self, machine: Machine, quantity: Decimal) -> Decimal:
        """Hours that the plan pays in an hour in which a machine runs `quantity` of it."""
        return min(quantity, (self.fleet.commitment / plan_rate(machine)).quantize(Decimal("0.000001"), ROUND_DOWN))

    def _instance_hours(self, machine: Machine, period: tuple[int, int], quantity: Decimal, *, is_covered: bool) -> Charge:
        price = machine.facts.list_price
        listed = (price * quantity).quantize(TEN_DIGITS)
        own = (plan_rate(machine) * quantity).quantize(TEN_DIGITS) if is_covered else listed
        facts = self._facts(machine, price, quantity)
        if is_covered:
            facts |= {
                "CommitmentDiscountCategory": "Spend", "CommitmentDiscountId": self.plan, "CommitmentDiscountStatus": "Used",
                "CommitmentDiscountType": "Compute Savings Plan", "CommitmentDiscountQuantity": own,
                "CommitmentDiscountUnit": "USD", "PricingCategory": "Committed",
            }
        return self._row("machine", period, ZERO if is_covered else listed, own, listed, machine=machine.instance_id,
                         instance_type=machine.instance_type, hours=quantity, **facts)

    def _facts(self, machine: Machine, price: Decimal, quantity: Decimal | None) -> dict[str, Any]:
        facts, kind = machine.facts, machine.instance_type
        return {
            "AvailabilityZone": "us-east-1a", "ChargeDescription": f"${price} per On Demand Linux {kind} Instance Hour",
            "ConsumedQuantity": quantity, "ConsumedUnit": "Hours", "ContractedUnitPrice": price, "ListUnitPrice": price,
            "PricingQuantity": quantity, "PricingUnit": "Hours", "ResourceId": resource_id(self.fleet, machine),
            "ResourceType": "instance", "SkuId": f"SKU-{kind}", "SkuMeter": f"BoxUsage:{kind}",
            "SkuPriceId": f"SKU-{kind}.JRTCKXETXF.6YS6EN2CT7",
            "SkuPriceDetails": {"InstanceType": kind, "CoreCount": str(facts.vcpus), "GpuCount": str(facts.gpu_count),
                                "MemorySize": facts.memory_gib, "OperatingSystem": "Linux"},
            "Tags": {"team": "ml"}, "x_UsageType": f"BoxUsage:{kind}", "x_Operation": "RunInstances",
        }

    def _spot(self, machine: Machine, hour: int, quantity: Decimal) -> Charge:
        """Spot hours: the price moves from hour to hour, and only the description names the type."""
        kind = machine.instance_type
        price = (self.fleet.spot_prices[kind] * (100 + hour * 7 % 5) / 100).quantize(Decimal("0.0001"))
        cost = (price * quantity).quantize(TEN_DIGITS)
        facts = self._facts(machine, machine.facts.list_price, quantity) | {
            "ChargeDescription": f"{kind} Linux/UNIX Spot Instance-hour in US East (Virginia) in VPC Zone #1",
            "ContractedUnitPrice": price, "PricingCategory": "Dynamic", "SkuPriceDetails": None, "SkuMeter": f"SpotUsage:{kind}",
            "x_UsageType": f"SpotUsage:{kind}", "x_Operation": "RunInstances:SV001",
        }
        return self._row("machine", self._hour(hour), cost, cost, (machine.facts.list_price * quantity).quantize(TEN_DIGITS),
                         machine=machine.instance_id, instance_type=kind, hours=quantity, **facts)

    def _plan(self, rows: list[Charge]) -> Iterable[Charge]:
        """The plan's fee of each hour, and what of it no machine used."""
        if not self.fleet.commitment:
            return
        fee = self.fleet.commitment
        common: dict[str, Any] = {
            "CommitmentDiscountCategory": "Spend", "CommitmentDiscountId": self.plan, "ResourceId": self.plan,
            "CommitmentDiscountType": "Compute Savings Plan", "x_UsageType": "ComputeSP:1yrNoUpfront", "ServiceName": "Savings Plans",
            "x_ServiceCode": "ComputeSavingsPlans", "ServiceCategory": "Other", "ServiceSubcategory": "Other (Other)",
        }
        used: dict[int, Decimal] = {}
        for hour in range(*self.fleet.commitment_hours):
            used[hour] = ZERO
        if self.spec.daily_machine_rows:
            used = {h: sum((self._hour_use(m, h) for m in self.fleet.machines if m.pricing == "savings_plan"), ZERO) for h in used}
        else:
            for row in rows:
                if row["CommitmentDiscountStatus"] == "Used":
                    used[(row.start_ns - self.day) // HOUR] += row.effective
        for hour, amount in used.items():
            yield self._row("other", self._hour(hour), fee, ZERO, fee, ChargeCategory="Purchase", ChargeFrequency="Recurring",
                            ChargeDescription="1 year No Upfront Compute Savings Plan", PricingQuantity=Decimal(1), **common)
            if fee > amount:
                yield self._row("other", self._hour(hour), ZERO, fee - amount, ZERO, CommitmentDiscountStatus="Unused",
                                PricingCategory="Committed", ChargeDescription="Unused Compute Savings Plan commitment", **common)

    def _hour_use(self, machine: Machine, hour: int) -> Decimal:
        quantity = _hours(machine, hour)
        return (plan_rate(machine) * self._covered(machine, quantity)).quantize(TEN_DIGITS) if quantity > 0 else ZERO

    # --- everything beside machines ----------------------------------------------------------------------------------

    def _volume(self, volume_id: str, gib: int, period: tuple[int, int], cost: Decimal | None = None) -> Charge:
        quantity = (Decimal(gib) * (period[1] - period[0]) / (self.month[1] - self.month[0])).quantize(TEN_DIGITS)
        cost = (Decimal("0.08") * quantity).quantize(TEN_DIGITS) if cost is None else cost
        return self._row(
            "dependant", period, cost, dependant=volume_id, ResourceId=volume_id, ResourceType="volume", ServiceCategory="Storage",
            ServiceSubcategory="Block Storage", ConsumedQuantity=quantity, ConsumedUnit="GB-Months", PricingQuantity=quantity,
            PricingUnit="GB-Months", ListUnitPrice=Decimal("0.08"), ContractedUnitPrice=Decimal("0.08"), SkuId="SKU-gp3",
            SkuMeter="EBS:VolumeUsage.gp3", x_UsageType="EBS:VolumeUsage.gp3", x_Operation="CreateVolume-Gp3",
            ChargeDescription="$0.08 per GB-month of General Purpose (gp3) provisioned storage - US East (N. Virginia)")

    def _volumes(self) -> Iterable[Charge]:
        hours = range(self.spec.first_hour, self.spec.first_hour + self.spec.hours)
        whole = self.day, self.day + DAY
        for volume in self.fleet.volumes:
            periods = [self._hour(h) for h in hours] if self.spec.disk == "hourly" else [whole] if self.spec.disk else []
            for period in periods:
                yield self._volume(volume.volume_id, volume.gib, period)
        if self.spec.lost_volume:
            yield self._volume("vol-0" + token(self.spec, "lost", digits=16), 300, whole)

    def _storage(self) -> Iterable[Charge]:
        yield self._row(
            "storage", (self.day, self.day + DAY), "1.7344086022", ResourceId="example-checkpoints", ResourceType="bucket",
            ServiceCategory="Storage", ServiceSubcategory="Object Storage", ServiceName="Amazon Simple Storage Service",
            x_ServiceCode="AmazonS3", x_UsageType="TimedStorage-ByteHrs", x_Operation="StandardStorage", ConsumedUnit="GB-Months",
            ConsumedQuantity=Decimal("75.408"), PricingQuantity=Decimal("75.408"), PricingUnit="GB-Months",
            ChargeDescription="$0.023 per GB - first 50 TB / month of storage used")

    def _tax(self) -> Iterable[Charge]:
        yield self._row("untied", self.month, "41.27", ChargeCategory="Tax", ChargeFrequency="One-Time", PricingCategory=None,
                        ChargeDescription="Tax for product code AmazonEC2", ServiceSubcategory="Other (Compute)")

    def _credit(self) -> Iterable[Charge]:
        yield self._row("untied", self._hour(self.spec.first_hour), "-12.3400000001", ChargeCategory="Credit",
                        ChargeFrequency="One-Time", PricingCategory="Other", ChargeDescription="Promotional credits")

    def _refund(self) -> Iterable[Charge]:
        """A negative row that names the training machine, in an hour in which it runs, and one that names nothing."""
        machine = self.fleet.machines[0]
        hour = machine.start_s // HOUR_S
        facts = self._facts(machine, machine.facts.list_price, None)
        yield self._row("machine", self._hour(hour), "-0.7100000003", machine=machine.instance_id,
                        instance_type=machine.instance_type, **facts | {"ChargeDescription": "Refund of instance hours"})
        yield self._row("untied", self._hour(hour), "-0.33", ChargeDescription="Refund", x_UsageType="Refund")

    def _transfer(self) -> Iterable[Charge]:
        """Bytes out of the training machine, in each hour of its time; and of one that the bill does not know."""
        for machine in self.fleet.machines:
            if machine is self.fleet.machines[0] or not machine.is_billed:
                for hour in range(machine.start_s // HOUR_S, (machine.end_s - 1) // HOUR_S + 1):
                    yield self._bytes(machine, hour, "0.0123456789", "$0.09 per GB - first 10 TB / month data transfer out")

    def _bytes(self, machine: Machine, hour: int, cost: str, about: str) -> Charge:
        return self._row("untied", self._hour(hour), cost, machine=machine.instance_id, ResourceId=machine.instance_id,
                         ResourceType="instance", x_UsageType="DataTransfer-Out-Bytes", x_Operation="RunInstances",
                         ConsumedUnit="GB", ConsumedQuantity=Decimal("0.137"), PricingQuantity=Decimal("0.137"), PricingUnit="GB",
                         ServiceCategory="Networking", ServiceSubcategory="Network Infrastructure", ChargeDescription=about)

    def _twins(self) -> Iterable[Charge]:
        machine = self.fleet.machines[0]
        for _ in range(2):
            yield self._bytes(machine, machine.start_s // HOUR_S, "0.02", "$0.02 per GB data transfer between regions")

    def _overheads(self) -> Iterable[Charge]:
        day, hour = (self.day, self.day + DAY), self._hour(self.spec.first_hour)
        cpu = "i-0" + token(self.spec, "cpu", digits=16)
        yield self._row("support", day, "3.2258064516", ServiceName="AWS Support (Business)", x_ServiceCode="AWSSupportBusiness",
                        ServiceCategory="Other", ServiceSubcategory="Other (Other)", ChargeDescription="AWS Support (Business)",
                        x_UsageType="Dollar")
        yield self._row("shared", day, "1.08", ResourceId=f"arn:aws:ec2:us-east-1:{self.fleet.sub_account}:natgateway/nat-0a1b2c3d4e",
                        x_UsageType="NatGateway-Hours", ConsumedQuantity=Decimal(24), ConsumedUnit="Hours",
                        ChargeDescription="$0.045 per NAT Gateway Hour", ServiceCategory="Networking")
        yield self._row("untied", hour, "0.096", ResourceId=cpu, ResourceType="instance", x_UsageType="BoxUsage:m5.large",
                        ChargeDescription="$0.096 per On Demand Linux m5.large Instance Hour", ConsumedQuantity=Decimal(1),
                        ConsumedUnit="Hours", SkuPriceDetails={"InstanceType": "m5.large"})
        yield self._row("other", hour, "0.0000002083", ServiceName="AWS Lambda", x_ServiceCode="AWSLambda",
                        x_UsageType="Lambda-GB-Second", ResourceId="arn:aws:lambda:us-east-1:444455556666:function:reaper",
                        ChargeDescription="AWS Lambda - Total Compute", ConsumedQuantity=Decimal("0.0125"), ConsumedUnit="Second")
        reservation = f"arn:aws:ec2:us-east-1:{self.fleet.sub_account}:capacity-reservation/cr-0f1e2d3c4b5a69788"
        price = instance_facts("g5.xlarge").list_price
        yield self._row("untied", hour, price, ResourceId=reservation, CapacityReservationId=reservation,
                        CapacityReservationStatus="Unused", x_UsageType="UnusedBox:g5.xlarge",
                        ChargeDescription=f"${price} per Unused Reservation Linux g5.xlarge Instance Hour")

    def _straddling(self) -> Iterable[Charge]:
        """A volume's day from 18:00, thirty hours from 20:00, and a week of a service that no rule knows."""
        volume = self.fleet.volumes[0]
        evening = self.day + 18 * HOUR
        yield self._volume(volume.volume_id, volume.gib, (evening, evening + DAY))
        yield self._volume(volume.volume_id, volume.gib, (evening + 2 * HOUR, evening + 32 * HOUR), Decimal("0.0000000025"))
        yield self._row("other", (self.day, self.day + 7 * DAY), "7.0000000007", ServiceName="AWS Glue", x_ServiceCode="AWSGlue",
                        x_UsageType="Catalog-Storage", ChargeDescription="Catalogue storage of a week")


def plan_rate(machine: Machine) -> Decimal:
    """Rate of the savings plan, USD per hour."""
    return (machine.facts.list_price * Decimal("0.65")).quantize(Decimal("0.000001"))


def resource_id(fleet: Fleet, machine: Machine) -> str:
    """The instance as the bill spells it."""
    arn = f"arn:aws:ec2:{fleet.region}:{fleet.sub_account}:instance/{machine.instance_id}"
    return arn if machine.is_arn else machine.instance_id


def _hours(machine: Machine, hour: int) -> Decimal:
    """Time that a machine runs in an hour of the day, in hours, as the bill rounds it."""
    seconds = min(machine.end_s, (hour + 1) * HOUR_S) - max(machine.start_s, hour * HOUR_S)
    return (Decimal(max(0, seconds)) / HOUR_S).quantize(TEN_DIGITS)
