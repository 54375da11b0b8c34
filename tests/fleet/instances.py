"""Rows of instance hours and of the savings plan that pays a part of them."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_DOWN, Decimal
from typing import Any

from tests.fleet.charge import TEN_DIGITS, ZERO, Charge, Desk
from tests.fleet.model import DAY, HOUR, HOUR_S, Machine
from tests.fleet.roster import token

RESERVED = Decimal("0.8")
"""Hours of the machine that are reserved in each hour; RESERVED_USE of them is used at most."""
RESERVED_USE = Decimal("0.6")


class InstanceRows(Desk):
    """Instance hours of every machine, and the plan."""

    @property
    def plan(self) -> str:
        """ARN of the savings plan."""
        return f"arn:aws:savingsplans::{self.fleet.account}:savingsplan/{token(self.spec, 'plan', digits=16)}"

    @property
    def reserved_instances(self) -> str:
        """ARN of the reserved instances."""
        number = token(self.spec, "reserved", digits=16)
        return f"arn:aws:ec2:{self.fleet.region}:{self.fleet.account}:reserved-instances/{number}"

    @property
    def capacity(self) -> str:
        """ARN of the capacity reservation."""
        number = token(self.spec, "capacity", digits=16)
        return f"arn:aws:ec2:{self.fleet.region}:{self.fleet.sub_account}:capacity-reservation/cr-0{number}"

    @property
    def reserved_machine(self) -> Machine | None:
        """The machine whose hours are reserved in part: the serving machine, else the training machine."""
        fixed = [m for m in self.fleet.machines[:2] if m.pricing != "spot" and m.is_billed and m.account is None]
        return fixed[-1] if self.spec.reservation else None

    def instance_rows(self) -> list[Charge]:
        """Rows of all machines that are billed, then those of plan and reservation."""
        found: list[Charge] = []
        for machine in self.fleet.machines:
            if machine.is_billed:
                found += self._machine(machine)
        return [*found, *self._plan(found), *self._reservation()]

    def _machine(self, machine: Machine) -> Iterable[Charge]:
        """Instance hours, one row an hour and price; or one a day where the switch says so and the price is fixed."""
        hours = {h: _hours(machine, h) for h in range(24) if _hours(machine, h) > 0}
        if machine.pricing == "spot":
            for hour, quantity in hours.items():
                yield self._spot(machine, hour, quantity)
            return
        reserved = {h: self._reserved(machine, q) for h, q in hours.items()}
        covered = {
            h: self._covered(machine, q - reserved[h]) if machine.pricing == "savings_plan" else ZERO
            for h, q in hours.items()
        }
        daily = self.spec.daily_machine_rows
        groups = [(((self.day, self.day + DAY)), list(hours))] if daily else [(self.hour(h), [h]) for h in hours]
        for period, together in groups:
            plan = sum((covered[h] for h in together), ZERO)
            owned = sum((reserved[h] for h in together), ZERO)
            rest = sum((hours[h] for h in together), ZERO) - plan - owned
            if owned > 0:
                yield self._reserved_hours(machine, period, owned)
            if plan > 0:
                yield self._instance_hours(machine, period, plan, is_covered=True)
            if rest > 0:
                yield self._instance_hours(machine, period, rest, is_covered=False)

    def _reserved(self, machine: Machine, quantity: Decimal) -> Decimal:
        """Reserved hours that pay for an hour in which a machine runs `quantity` of it."""
        return min(quantity, RESERVED_USE) if machine is self.reserved_machine else ZERO

    def _reserved_hours(self, machine: Machine, period: tuple[int, int], quantity: Decimal) -> Charge:
        price = machine.facts.list_price
        facts = self.facts(machine, price, quantity) | {
            "CommitmentDiscountCategory": "Usage",
            "CommitmentDiscountId": self.reserved_instances,
            "CommitmentDiscountStatus": "Used",
            "CommitmentDiscountType": "Reserved Instance",
            "CommitmentDiscountQuantity": quantity,
            "CommitmentDiscountUnit": "Hours",
            "PricingCategory": "Committed",
            "ChargeDescription": f"{machine.instance_type} Reserved Instance applied",
        }
        return self.row(
            "machine",
            period,
            ZERO,
            (reserved_rate(machine) * quantity).quantize(TEN_DIGITS),
            (price * quantity).quantize(TEN_DIGITS),
            machine=machine.instance_id,
            instance_type=machine.instance_type,
            hours=quantity,
            **facts,
        )

    def _reservation(self) -> Iterable[Charge]:
        """The month's fee of the reserved instances, and in each hour what nobody used of them."""
        machine = self.reserved_machine
        if machine is None:
            return
        common: dict[str, Any] = {
            "CommitmentDiscountCategory": "Usage",
            "CommitmentDiscountId": self.reserved_instances,
            "CommitmentDiscountType": "Reserved Instance",
            "ResourceId": self.reserved_instances,
            "x_UsageType": f"HeavyUsage:{machine.instance_type}",
        }
        yield self.row(
            "untied",
            self.month,
            (reserved_rate(machine) * RESERVED * 24 * 31).quantize(TEN_DIGITS),
            ZERO,
            ChargeCategory="Purchase",
            ChargeFrequency="Recurring",
            ChargeDescription=f"Recurring fee of {machine.instance_type} Reserved Instances",
            **common,
        )
        for hour in range(self.spec.first_hour, self.spec.first_hour + self.spec.hours):
            used = self._reserved(machine, _hours(machine, hour))
            yield self.row(
                "untied",
                self.hour(hour),
                ZERO,
                (reserved_rate(machine) * (RESERVED - used)).quantize(TEN_DIGITS),
                ZERO,
                CommitmentDiscountStatus="Unused",
                CommitmentDiscountQuantity=RESERVED - used,
                CommitmentDiscountUnit="Hours",
                PricingCategory="Committed",
                ChargeDescription="Unused reserved instance hours",
                **common,
            )

    def _covered(self, machine: Machine, quantity: Decimal) -> Decimal:
        """Hours that the plan pays in an hour in which a machine runs `quantity` of it."""
        return min(quantity, (self.fleet.commitment / plan_rate(machine)).quantize(Decimal("0.000001"), ROUND_DOWN))

    def _capacity(self, machine: Machine, period: tuple[int, int]) -> dict[str, Any]:
        """The capacity reservation, which the training machine uses in its first hour."""
        first = self.hour(self.fleet.machines[0].start_s // HOUR_S)
        if not self.spec.capacity_reservation or machine is not self.fleet.machines[0] or period[0] != first[0]:
            return {}
        return {"CapacityReservationId": self.capacity, "CapacityReservationStatus": "Used"}

    def _instance_hours(
        self, machine: Machine, period: tuple[int, int], quantity: Decimal, *, is_covered: bool
    ) -> Charge:
        price = machine.facts.list_price
        listed = (price * quantity).quantize(TEN_DIGITS)
        own = (plan_rate(machine) * quantity).quantize(TEN_DIGITS) if is_covered else listed
        facts = self.facts(machine, price, quantity) | self._capacity(machine, period)
        if is_covered:
            facts |= {
                "CommitmentDiscountCategory": "Spend",
                "CommitmentDiscountId": self.plan,
                "CommitmentDiscountStatus": "Used",
                "CommitmentDiscountType": "Compute Savings Plan",
                "CommitmentDiscountQuantity": own,
                "CommitmentDiscountUnit": "USD",
                "PricingCategory": "Committed",
            }
        return self.row(
            "machine",
            period,
            ZERO if is_covered else listed,
            own,
            listed,
            machine=machine.instance_id,
            instance_type=machine.instance_type,
            hours=quantity,
            **facts,
        )

    def facts(self, machine: Machine, price: Decimal, quantity: Decimal | None) -> dict[str, Any]:
        """Columns that every row of instance hours has."""
        facts, kind = machine.facts, machine.instance_type
        return {
            "AvailabilityZone": "us-east-1a",
            "ChargeDescription": f"${price} per On Demand Linux {kind} Instance Hour",
            "ConsumedQuantity": quantity,
            "ConsumedUnit": "Hours",
            "ContractedUnitPrice": price,
            "ListUnitPrice": price,
            "PricingQuantity": quantity,
            "PricingUnit": "Hours",
            "ResourceId": machine.billed_id,
            "ResourceType": "instance",
            "SkuId": f"SKU-{kind}",
            "SkuMeter": f"BoxUsage:{kind}",
            "SkuPriceId": f"SKU-{kind}.JRTCKXETXF.6YS6EN2CT7",
            "SkuPriceDetails": {
                "InstanceType": kind,
                "CoreCount": str(facts.vcpus),
                "GpuCount": str(facts.gpu_count),
                "MemorySize": facts.memory_gib,
                "OperatingSystem": "Linux",
            },
            "Tags": {"team": "ml"},
            **self.payer(machine),
            "x_UsageType": f"BoxUsage:{kind}",
            "x_Operation": "RunInstances",
        }

    def _spot(self, machine: Machine, hour: int, quantity: Decimal) -> Charge:
        """Spot hours: the price moves from hour to hour, and only the description names the type."""
        kind = machine.instance_type
        price = (self.fleet.spot_prices[kind] * (100 + hour * 7 % 5) / 100).quantize(Decimal("0.0001"))
        cost = (price * quantity).quantize(TEN_DIGITS)
        facts = self.facts(machine, machine.facts.list_price, quantity) | {
            "ChargeDescription": f"{kind} Linux/UNIX Spot Instance-hour in US East (Virginia) in VPC Zone #1",
            "ContractedUnitPrice": price,
            "PricingCategory": "Dynamic",
            "SkuPriceDetails": None,
            "SkuMeter": f"SpotUsage:{kind}",
            "x_UsageType": f"SpotUsage:{kind}",
            "x_Operation": "RunInstances:SV001",
        }
        return self.row(
            "machine",
            self.hour(hour),
            cost,
            cost,
            (machine.facts.list_price * quantity).quantize(TEN_DIGITS),
            machine=machine.instance_id,
            instance_type=kind,
            hours=quantity,
            **facts,
        )

    def _plan(self, rows: list[Charge]) -> Iterable[Charge]:
        """The plan's fee of each hour, and what of it no machine used."""
        if not self.fleet.commitment:
            return
        fee = self.fleet.commitment
        common: dict[str, Any] = {
            "CommitmentDiscountCategory": "Spend",
            "CommitmentDiscountId": self.plan,
            "ResourceId": self.plan,
            "CommitmentDiscountType": "Compute Savings Plan",
            "x_UsageType": "ComputeSP:1yrNoUpfront",
            "ServiceName": "Savings Plans",
            "x_ServiceCode": "ComputeSavingsPlans",
            "ServiceCategory": "Other",
            "ServiceSubcategory": "Other (Other)",
        }
        used: dict[int, Decimal] = {}
        for hour in range(*self.fleet.commitment_hours):
            used[hour] = ZERO
        if self.spec.daily_machine_rows:
            used = {
                h: sum((self._hour_use(m, h) for m in self.fleet.machines if m.pricing == "savings_plan"), ZERO)
                for h in used
            }
        else:
            for row in rows:
                if row["CommitmentDiscountStatus"] == "Used" and row["CommitmentDiscountId"] == self.plan:
                    used[(row.start_ns - self.day) // HOUR] += row.effective
        for hour, amount in used.items():
            yield self.row(
                "other",
                self.hour(hour),
                fee,
                ZERO,
                fee,
                ChargeCategory="Purchase",
                ChargeFrequency="Recurring",
                ChargeDescription="1 year No Upfront Compute Savings Plan",
                PricingQuantity=Decimal(1),
                **common,
            )
            if fee > amount:
                yield self.row(
                    "other",
                    self.hour(hour),
                    ZERO,
                    fee - amount,
                    ZERO,
                    CommitmentDiscountStatus="Unused",
                    PricingCategory="Committed",
                    ChargeDescription="Unused Compute Savings Plan commitment",
                    **common,
                )

    def _hour_use(self, machine: Machine, hour: int) -> Decimal:
        quantity = _hours(machine, hour) - self._reserved(machine, _hours(machine, hour))
        return (plan_rate(machine) * self._covered(machine, quantity)).quantize(TEN_DIGITS) if quantity > 0 else ZERO


def plan_rate(machine: Machine) -> Decimal:
    """Rate of the savings plan, per hour."""
    return (machine.facts.list_price * Decimal("0.65")).quantize(Decimal("0.000001"))


def reserved_rate(machine: Machine) -> Decimal:
    """Rate of reserved instances, per hour."""
    return (machine.facts.list_price * Decimal("0.55")).quantize(Decimal("0.000001"))


def _hours(machine: Machine, hour: int) -> Decimal:
    """Time that a machine runs in an hour of the day, in hours, as the bill rounds it."""
    seconds = min(machine.end_s, (hour + 1) * HOUR_S) - max(machine.start_s, hour * HOUR_S)
    return (Decimal(max(0, seconds)) / HOUR_S).quantize(TEN_DIGITS)
