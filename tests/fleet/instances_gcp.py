"""Rows of machine time on Google Cloud: one for each SKU of a machine, and the fees of commitments that pay a part of them.

A machine-hour has a row for its cores, one for its memory, one for its GPUs, and one for its local SSD where it has one.
Costs are net of the credits nested in the row. Invoice months begin at midnight in California, so the first hours of a
month in UTC belong to the month before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

from tests.fleet.charge import PROMOTION, TEN_DIGITS, ZERO, Charge, Desk, instant
from tests.fleet.clouds import GCP_ZONE
from tests.fleet.model import DAY, HOUR, HOUR_S, SECOND, Fleet, Machine

CORE, RAM = Decimal("0.031611"), Decimal("0.004237")
"""List price of an A2 core-hour and of a GiB-hour. Source: Cloud Billing Catalog, A2 instances in Americas."""
SSD_GIB, SSD = 375, Decimal("0.08")
"""Local SSD of an ultragpu machine for each GPU, GiB, and its price for a GiB-month."""
MONTH_HOURS = 730
GIB = 1 << 30
FLEXIBLE, OWNED, SPOT = Decimal("0.72"), Decimal("0.63"), Decimal("0.3")
"""Rates of a flexible commitment, of a resource commitment and of spot, of the list price."""
OWNED_S = 1_200
"""Seconds of an hour that a resource commitment pays at most; it is bought for half as much again."""
HOST_LATE_S = 90
"""Seconds by which cores and memory of a spot machine are billed later than its GPUs."""
OFFSET = "FEE_UTILIZATION_OFFSET"


@dataclass(frozen=True)
class Meter:
    """One SKU of a machine type: its description, units a machine has, and list price of a unit-hour."""

    name: str
    about: str
    units: Decimal
    price: Decimal
    committed: bool
    """Whether commitments pay it."""


def meters(machine: Machine) -> list[Meter]:
    """Cores, memory and GPUs of a machine; the GPU price is what the list price of the type leaves."""
    facts = machine.facts
    cores, memory = Decimal(facts.vcpus), Decimal(facts.memory_gib)
    rest = facts.list_price - cores * CORE - memory * RAM - ssd_price(machine)
    model = "80GB" if "80GB" in facts.gpu_model else "40GB"
    return [
        Meter("core", "A2 Instance Core running in Americas", cores, CORE, True),
        Meter("ram", "A2 Instance Ram running in Americas", memory, RAM, True),
        Meter(
            "gpu",
            f"Nvidia Tesla A100 {model} GPU running in Americas",
            Decimal(facts.gpu_count),
            rest / facts.gpu_count,
            False,
        ),
    ]


def ssd_price(machine: Machine) -> Decimal:
    """List price of a machine's local SSD, per hour; 0 without one."""
    return SSD_GIB * machine.facts.gpu_count * SSD / MONTH_HOURS if "ultragpu" in machine.instance_type else ZERO


class MeterRows(Desk):
    """Machine time of every machine, and the fees of commitments."""

    zone = ZoneInfo("America/Los_Angeles")

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.month = self.month_of(self.day + DAY - 1)

    def usual(self, period: tuple[int, int]) -> dict[str, Any]:
        """Columns that every row has unless it says otherwise."""
        return {
            "BillingAccountId": self.fleet.account,
            "BillingAccountName": "Example Payer",
            "BillingAccountType": "Billing Account",
            "BillingCurrency": self.spec.currency,
            **self.period(period[0]),
            "ChargeCategory": "Usage",
            "ChargeFrequency": "Usage-Based",
            "InvoiceIssuerName": "Google Cloud",
            "PricingCurrency": "USD",
            "ProviderName": "Google Cloud",
            "PublisherName": "Google Cloud",
            "RegionId": self.fleet.region,
            "RegionName": "Iowa",
            "ServiceCategory": "Compute",
            "ServiceName": "Compute Engine",
            "ServiceSubcategory": "Virtual Machines",
            "SubAccountId": self.fleet.sub_account,
            "SubAccountName": "example-ml",
            "SubAccountType": "Project",
            "PricingCategory": "Standard",
            "x_CostType": "regular",
            "x_ExportTime": instant(self.day + DAY + 3 * HOUR),
        }

    def period(self, ns: int, later: int = 0) -> dict[str, Any]:
        """Columns of the invoice month that holds an instant, or a later one."""
        start = instant(self.month_of(ns, later)[0]).astimezone(self.zone)
        return {**super().period(ns, later), "x_InvoiceMonth": f"{start:%Y%m}"}

    def machine_facts(self, machine: Machine, meter: Meter) -> dict[str, Any]:
        """Columns that every row of a machine's meter has; the type stands in a system label, of spot in the SKU too."""
        facts = machine.facts
        labels = {"machine_spec": machine.instance_type, "cores": str(facts.vcpus)}
        labels["memory"] = str(int(Decimal(facts.memory_gib) * 1024))
        return {
            "AvailabilityZone": GCP_ZONE,
            "ChargeDescription": meter.about,
            "ContractedUnitPrice": meter.price.quantize(TEN_DIGITS),
            "ListUnitPrice": meter.price.quantize(TEN_DIGITS),
            "ResourceId": machine.billed_id,
            "ResourceName": machine.node.split(".")[0],
            "ResourceType": "Instance",
            "SkuId": f"SKU-{meter.name.upper()}",
            "SkuMeter": meter.about,
            "SkuPriceId": f"SKU-{meter.name.upper()}-0",
            "Tags": {"team": "ml"},
            **self.payer(machine),
            "x_SystemLabels": [{"key": f"compute.googleapis.com/{key}", "value": text} for key, text in labels.items()],
        }

    def use(self, meter: Meter, seconds: int) -> dict[str, Any]:
        """Quantities of a meter in a stretch of a machine: core-seconds, GPU-seconds, or byte-seconds."""
        hours = (Decimal(seconds) * meter.units / HOUR_S).quantize(TEN_DIGITS)
        if meter.name == "ram":
            size = int(meter.units * GIB) * seconds
            consumed = {"ConsumedQuantity": Decimal(size), "ConsumedUnit": "byte-seconds"}
            return {**consumed, "PricingQuantity": hours, "PricingUnit": "gibibyte hour"}
        consumed = {"ConsumedQuantity": seconds * meter.units, "ConsumedUnit": "seconds"}
        return {**consumed, "PricingQuantity": hours, "PricingUnit": "hour"}

    def machine_rows(self) -> list[Charge]:
        """Rows of all machines that are billed, then the fees."""
        billed = [machine for machine in self.fleet.machines if machine.is_billed]
        return [*(row for machine in billed for row in self._machine(machine)), *self._fees()]

    def _machine(self, machine: Machine) -> Iterable[Charge]:
        """Rows of each hour and meter; or of the day where the switch says so."""
        hours = {h: self._seconds(machine, h) for h in range(24) if self._seconds(machine, h) > 0}
        whole = self.day, self.day + DAY
        groups = [(self.hour(h), s) for h, s in hours.items()]
        if self.spec.daily_machine_rows and machine.pricing != "spot":
            groups = [(whole, sum(hours.values()))]
        for period, seconds in groups:
            for meter in meters(machine):
                yield from self._meter(machine, meter, period, seconds)
            if ssd_price(machine):
                yield self._ssd(machine, period, seconds)

    def _meter(self, machine: Machine, meter: Meter, period: tuple[int, int], seconds: int) -> Iterable[Charge]:
        """A meter's rows: what a resource commitment owns, what the flexible commitment pays, and the rest."""
        if machine.pricing == "spot":
            spot = replace(meter, about=f"Spot Preemptible {meter.about}")
            # Spot rows name their type in the SKU's details and bear no labels.
            facts = {"PricingCategory": "Dynamic", "SkuPriceDetails": {"InstanceType": machine.instance_type}}
            # In its first hour the host is counted later than its GPUs.
            late = HOST_LATE_S if meter.committed and period[0] <= self.day + machine.start_s * SECOND else 0
            yield self._use_row(machine, spot, period, seconds - late, SPOT, {**facts, "x_SystemLabels": None})
            return
        owned = self._owned(machine, seconds) if meter.committed else 0
        flexible = self._flexible(machine, seconds) if meter.committed else 0
        if owned:
            yield self._use_row(machine, meter, period, owned, OWNED, self._committed("Usage", "gpu-owned"))
        if flexible:
            yield self._use_row(machine, meter, period, flexible, FLEXIBLE, self._committed("Spend", "gpu-flexible"))
        if seconds - owned - flexible:
            capacity = self._capacity(machine, period)
            yield self._use_row(machine, meter, period, seconds - owned - flexible, Decimal(1), capacity)

    def _use_row(
        self,
        machine: Machine,
        meter: Meter,
        period: tuple[int, int],
        seconds: int,
        rate: Decimal,
        more: dict[str, Any],
    ) -> Charge:
        quantities = self.use(meter, seconds)
        listed = (meter.price * meter.units * seconds / HOUR_S).quantize(TEN_DIGITS)
        gross = (meter.price * meter.units * seconds * rate / HOUR_S).quantize(TEN_DIGITS)
        nested = self._credits(machine, gross) if self.spec.nested_credits else []
        net = gross + sum((given["amount"] for given in nested), ZERO)
        hours = (
            Fraction(quantities["PricingQuantity"]) if meter.name == "ram" else Fraction(seconds * meter.units) / HOUR_S
        )
        return self.row(
            "machine",
            period,
            net,
            net,
            listed,
            machine=machine.instance_id,
            instance_type=machine.instance_type,
            hours=hours,
            units_per=meter.units,
            **{**self.machine_facts(machine, meter), **quantities, "x_Credits": nested, **more},
        )

    def _credits(self, machine: Machine, gross: Decimal) -> list[dict[str, Any]]:
        """A negotiated discount on everything, and a promotion on all machines but the first."""
        found = [credit("Contract", "DISCOUNT", (gross * Decimal("-0.05")).quantize(TEN_DIGITS))]
        if machine is not self.fleet.machines[0] or len(self.fleet.machines) == 1:
            found.append(credit("FreeTrial", PROMOTION, (gross * Decimal("-0.25")).quantize(TEN_DIGITS)))
        return found

    def _seconds(self, machine: Machine, hour: int) -> int:
        return max(0, min(machine.end_s, (hour + 1) * HOUR_S) - max(machine.start_s, hour * HOUR_S))

    @property
    def reserved_machine(self) -> Machine | None:
        """The machine whose cores and memory are committed in part: the serving machine, else the training machine."""
        fixed = [m for m in self.fleet.machines[:2] if m.pricing != "spot" and m.is_billed and m.account is None]
        return fixed[-1] if self.spec.reservation else None

    def _owned(self, machine: Machine, seconds: int) -> int:
        return min(seconds, OWNED_S) if machine is self.reserved_machine else 0

    def _flexible(self, machine: Machine, seconds: int) -> int:
        """Seconds of cores and memory that the flexible commitment pays."""
        if machine.pricing != "savings_plan":
            return 0
        hourly = sum(meter.price * meter.units * FLEXIBLE for meter in meters(machine) if meter.committed)
        most = int(self.fleet.commitment * HOUR_S / hourly)
        return min(seconds - self._owned(machine, seconds), most)

    def _committed(self, category: str, name: str) -> dict[str, Any]:
        return {
            "CommitmentDiscountCategory": category,
            "CommitmentDiscountId": self._commitment(name),
            "CommitmentDiscountName": name,
            "CommitmentDiscountStatus": "Used",
            "CommitmentDiscountType": "Committed Use Discount",
            "PricingCategory": "Committed",
        }

    def _commitment(self, name: str) -> str:
        return (
            f"//compute.googleapis.com/projects/{self.fleet.sub_account}/regions/{self.fleet.region}/commitments/{name}"
        )

    def _fees(self) -> Iterable[Charge]:
        """The fee of each commitment in each hour, less the credit for what was used of it."""
        for hour in range(self.spec.first_hour, self.spec.first_hour + self.spec.hours):
            for machine in self.fleet.machines:
                seconds = self._seconds(machine, hour)
                if machine.pricing == "savings_plan":
                    used = self._paid(machine, self._flexible(machine, seconds), FLEXIBLE)
                    # Fee and offset need not meet to the last digit.
                    fee = self.fleet.commitment.quantize(TEN_DIGITS) + Decimal("0.0000013")
                    yield self._fee(hour, "gpu-flexible", "Spend", fee, used)
                if machine is self.reserved_machine:
                    used = self._paid(machine, self._owned(machine, seconds), OWNED)
                    fee = self._paid(machine, OWNED_S * 3 // 2, OWNED)
                    yield self._fee(hour, "gpu-owned", "Usage", fee, used)

    def _paid(self, machine: Machine, seconds: int, rate: Decimal) -> Decimal:
        hourly = sum(meter.price * meter.units for meter in meters(machine) if meter.committed)
        return (hourly * seconds * rate / HOUR_S).quantize(TEN_DIGITS)

    def _fee(self, hour: int, name: str, category: str, fee: Decimal, used: Decimal) -> Charge:
        rest = fee - used
        return self.row(
            "commitment_unused",
            self.hour(hour),
            rest,
            rest,
            fee,
            ChargeCategory="Purchase",
            ChargeFrequency="Recurring",
            ChargeDescription=f"Commitment fee {name}",
            CommitmentDiscountCategory=category,
            CommitmentDiscountId=self._commitment(name),
            CommitmentDiscountName=name,
            CommitmentDiscountType="Committed Use Discount",
            ResourceId=self._commitment(name),
            SkuMeter=f"Commitment - dollar based v1: {name}",
            x_Credits=[credit("Fee utilization offset", OFFSET, -used)],
        )

    def _ssd(self, machine: Machine, period: tuple[int, int], seconds: int) -> Charge:
        """The local SSD: named like the machine, and in another unit than time."""
        size = SSD_GIB * machine.facts.gpu_count
        months = (Decimal(size) * seconds / HOUR_S / MONTH_HOURS).quantize(TEN_DIGITS)
        cost = (ssd_price(machine) * seconds / HOUR_S).quantize(TEN_DIGITS)
        meter = Meter("ssd", "SSD backed Local Storage attached to A2 instances", Decimal(size), SSD, False)
        return self.row(
            "untied",
            period,
            cost,
            machine=machine.instance_id,
            ConsumedQuantity=Decimal(size * GIB * seconds),
            ConsumedUnit="byte-seconds",
            PricingQuantity=months,
            PricingUnit="gibibyte month",
            **self.machine_facts(machine, meter),
        )

    def _capacity(self, machine: Machine, period: tuple[int, int]) -> dict[str, Any]:
        """The reservation, which the training machine uses in its first hour."""
        first = self.hour(self.fleet.machines[0].start_s // HOUR_S)
        if not self.spec.capacity_reservation or machine is not self.fleet.machines[0] or period[0] != first[0]:
            return {}
        return {"CapacityReservationId": self.capacity, "CapacityReservationStatus": "Used"}

    @property
    def capacity(self) -> str:
        """Name of the capacity reservation."""
        return f"//compute.googleapis.com/projects/{self.fleet.sub_account}/zones/{GCP_ZONE}/reservations/gpu"


def credit(name: str, kind: str, amount: Decimal) -> dict[str, Any]:
    """A credit as it is nested in a row."""
    return {"id": f"{name}:{kind}", "name": name, "full_name": None, "type": kind, "amount": amount}
