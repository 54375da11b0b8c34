"""The bill of a fleet on Azure: one row for each meter, resource and day, as a FOCUS export of a Customer Agreement has them.

Costs have more digits than the ledger keeps. Tax, credits and support are no rows of such an export; rounding is one. Ids
are in lower case, except where people typed them. Knows no telemetry and no file format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from tests.fleet.charge import ZERO, Charge, Desk
from tests.fleet.model import DAY, HOUR, HOUR_S, SECOND, Machine, Volume
from tests.fleet.roster import token

MACHINES, SETS = "Virtual Machines", "Virtual Machine Scale Sets"
PLAN_RATE, RESERVED_RATE = Decimal("0.65"), Decimal("0.58")
"""Rates of savings plan and reservation, of the list price."""
RESERVED = Decimal("3")
"""Hours of a day that are reserved; RESERVED_USE of them is used at most."""
RESERVED_USE = Decimal("1")


class AzureBill(Desk):
    """All rows of a fleet on Azure."""

    @property
    def whole(self) -> tuple[int, int]:
        """Charge period of the day."""
        return self.day, self.day + DAY

    def usual(self, period: tuple[int, int]) -> dict[str, Any]:
        """Columns that every row has unless it says otherwise."""
        return {
            "BillingAccountId": self.fleet.account,
            "BillingAccountName": "Example Payer",
            "BillingAccountType": "Billing Profile",
            "BillingCurrency": self.spec.currency,
            **self.period(period[0]),
            "ChargeCategory": "Usage",
            "ChargeFrequency": "Usage-Based",
            "InvoiceIssuerName": "Microsoft",
            "PricingCurrency": "USD",
            "ProviderName": "Microsoft",
            "PublisherName": "Microsoft",
            "RegionId": self.fleet.region,
            "RegionName": "East US",
            "ServiceCategory": "Compute",
            "ServiceName": MACHINES,
            "ServiceSubcategory": "Virtual Machines",
            "SubAccountId": self.fleet.sub_account,
            "SubAccountName": "Example ML",
            "SubAccountType": "Subscription",
            "PricingCategory": "Standard",
            "x_ResourceGroupName": "ml-gpu",
        }

    def rows(self) -> list[Charge]:
        """Every row that this fleet causes, each in its own invoice month."""
        spec = self.spec
        found = [
            row for machine in self.fleet.machines if machine.is_billed for row in self._machine(machine, self.whole)
        ]
        if spec.bill_until is not None:
            # A day is there or not: what was billed last is the training machine's day before.
            found += self._machine(self.fleet.machines[0], (self.day - DAY, self.day))
        found += self._commitments()
        found += [self._volume(v, self.whole) for v in self.fleet.volumes if spec.disk]
        if spec.lost_volume:
            stated = f"{self.fleet.sub_account}/resourcegroups/ml-gpu/providers/microsoft.compute/disks/lost"
            found.append(self._volume(Volume(stated + token(spec, "lost", digits=6), 512, ()), self.whole))
        for wanted, make in (
            (spec.storage, self._storage),
            (spec.tax, self._rounding),
            (spec.refund, self._refund),
            (spec.transfer, self._transfer),
            (spec.overheads, self._overheads),
            (spec.straddling, self._straddling),
            (spec.twins, self._twins),
            (spec.cluster_fee, self._cluster_fee),
            (spec.network_fees, self._network_fees),
            (spec.nested_credits, self._machine_credit),
            (spec.closed_correction, self._closed_correction),
        ):
            if wanted:
                found += make()
        return found

    def restate(self, rows: list[Charge]) -> list[Charge]:
        """A tenth off the on-demand days, as the open month is rated again, and an adjustment new."""
        changed = []
        for row in rows:
            if row.kind == "machine" and row["PricingCategory"] == "Standard" and row.billed > 0:
                less = (row.billed * Decimal("0.9")).quantize(Decimal("1e-12"))
                row = replace(row, billed=less, effective=less, texts={})
            changed.append(row)
        about: dict[str, Any] = {"ChargeDescription": "Rate correction of the open month", "ServiceName": MACHINES}
        changed.append(
            self.row("untied", self.whole, "-1.05", ChargeCategory="Adjustment", ChargeFrequency="One-Time", **about)
        )
        return changed

    # --- machines ----------------------------------------------------------------------------------------------------

    def machine_facts(self, machine: Machine, quantity: Decimal | None) -> dict[str, Any]:
        """Columns that every row of a machine's time has. A scale set is the resource of all its members."""
        kind, price = machine.instance_type, machine.facts.list_price
        size = kind.removeprefix("Standard_").replace("_", " ")
        in_set = machine.member is not None
        details = {"ServiceType": kind, "ImageType": "Canonical", "VCPUs": machine.facts.vcpus}
        name = machine.member or machine.stated_id.rsplit("/", 1)[1]
        return {
            "ChargeDescription": f"Virtual Machines NC Series - {size} - US East",
            "ConsumedQuantity": quantity,
            "ConsumedUnit": "Hours",
            "ContractedUnitPrice": price,
            "ListUnitPrice": price,
            "PricingQuantity": quantity,
            "PricingUnit": "Hours",
            "ResourceId": machine.billed_id,
            "ResourceName": machine.billed_id.rsplit("/", 1)[1],
            "ResourceType": "Virtual machine scale set" if in_set else "Virtual machine",
            "ServiceName": SETS if in_set else MACHINES,
            "SkuId": f"DZH318Z0-{size.replace(' ', '')}",
            "SkuMeter": size,
            "SkuPriceId": f"DZH318Z0-{size.replace(' ', '')}_USD",
            # The set's rows name the size in their details only.
            "SkuPriceDetails": None if in_set else {"InstanceType": kind, "GpuCount": str(machine.facts.gpu_count)},
            "Tags": {"team": "ml"},
            **self.payer(machine),
            "x_SkuDetails": json.dumps({**details, "VMName": name}),
            "x_SkuMeterCategory": "Virtual Machines",
            "x_SkuMeterSubcategory": "NC Series",
            "x_PricingUnitDescription": "1 Hour",
        }

    def _machine(self, machine: Machine, period: tuple[int, int]) -> Iterable[Charge]:
        """A day of a machine: reserved hours, then those that the plan pays, then on demand; or spot."""
        quantity = Decimal(machine.end_s - machine.start_s) / HOUR_S
        quantity = quantity.quantize(Decimal("1e-10"))
        price = machine.facts.list_price
        if machine.pricing == "spot":
            rate = self.fleet.spot_prices[machine.instance_type] * Decimal("0.98123456789")
            facts = self.machine_facts(machine, quantity) | {
                "PricingCategory": "Dynamic",
                "ContractedUnitPrice": None,
                "SkuMeter": machine.instance_type.removeprefix("Standard_").replace("_", " ") + " Spot",
                "ChargeDescription": "Virtual Machines NC Series Spot - US East",
            }
            yield self._hours(machine, period, quantity, rate * quantity, rate * quantity, price * quantity, facts)
            return
        reserved = min(quantity, RESERVED_USE) if machine is self.reserved_machine else ZERO
        planned = self._planned(machine, quantity - reserved)
        for hours, rate, commitment in (
            (reserved, RESERVED_RATE, self._reservation),
            (planned, PLAN_RATE, self._plan),
        ):
            if hours > 0:
                cost = price * rate * hours
                facts = self.machine_facts(machine, hours) | commitment("Used", hours, cost)
                yield self._hours(machine, period, hours, ZERO, cost, ZERO, facts)
        rest = quantity - reserved - planned
        if rest > 0:
            cost = price * rest
            capacity = self._capacity(machine)
            yield self._hours(machine, period, rest, cost, cost, cost, self.machine_facts(machine, rest) | capacity)

    def _hours(
        self,
        machine: Machine,
        period: tuple[int, int],
        hours: Decimal,
        billed: Decimal,
        effective: Decimal,
        listed: Decimal,
        facts: dict[str, Any],
    ) -> Charge:
        """A row of machine time; a scale-set row names its member only in the details."""
        kind = machine.instance_type
        about: dict[str, Any] = {"machine": machine.instance_id, "instance_type": kind, "hours": hours}
        return self.row("machine", period, billed, effective, listed, **about, **facts)

    def _planned(self, machine: Machine, quantity: Decimal) -> Decimal:
        """Hours that the plan pays of those that nothing else does."""
        return (quantity * Decimal("0.4")).quantize(Decimal("1e-6")) if machine.pricing == "savings_plan" else ZERO

    def _plan_cost(self, machine: Machine) -> Decimal:
        """What a machine's day uses of the plan."""
        quantity = (Decimal(machine.end_s - machine.start_s) / HOUR_S).quantize(Decimal("1e-10"))
        reserved = min(quantity, RESERVED_USE) if machine is self.reserved_machine else ZERO
        return machine.facts.list_price * PLAN_RATE * self._planned(machine, quantity - reserved)

    @property
    def reserved_machine(self) -> Machine | None:
        """The machine that the reservation pays for in part: the serving machine, else the training machine."""
        fixed = [m for m in self.fleet.machines[:2] if m.pricing != "spot" and m.is_billed and m.account is None]
        return fixed[-1] if self.spec.reservation else None

    def _plan(self, status: str | None, hours: Decimal, cost: Decimal) -> dict[str, Any]:
        name = f"/providers/Microsoft.BillingBenefits/savingsPlanOrders/{token(self.spec, 'plan', digits=12)}"
        return self._commitment(
            "Spend", "Savings Plan", name, status, cost.quantize(Decimal("1e-10")), self.spec.currency
        )

    def _reservation(self, status: str | None, hours: Decimal, cost: Decimal) -> dict[str, Any]:
        name = f"/providers/Microsoft.Capacity/reservationOrders/{token(self.spec, 'reservation', digits=12)}"
        return self._commitment("Usage", "Reservation", name, status, hours, "Hours")

    def _commitment(
        self, category: str, kind: str, name: str, status: str | None, quantity: Decimal, unit: str
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "CommitmentDiscountCategory": category,
            "CommitmentDiscountId": name,
            "CommitmentDiscountName": "gpu commitment",
            "CommitmentDiscountType": kind,
        }
        if status is None:
            return found
        status_facts = {"CommitmentDiscountStatus": status, "PricingCategory": "Committed"}
        return found | status_facts | {"CommitmentDiscountQuantity": quantity, "CommitmentDiscountUnit": unit}

    def _commitments(self) -> Iterable[Charge]:
        """Purchase and unused part of plan and reservation; unused rows name no subscription."""
        nobody: dict[str, Any] = {"SubAccountId": None, "SubAccountName": None, "SubAccountType": None}
        for machine in self.fleet.machines:
            if machine.pricing == "savings_plan":
                bought = {"ChargeCategory": "Purchase", "ChargeFrequency": "Recurring"} | self._plan(None, ZERO, ZERO)
                unused = nobody | self._plan("Unused", ZERO, Decimal("1.7"))
                fee = self._plan_cost(machine) + Decimal("1.70000000000012345")
                yield self.row("untied", self.whole, fee, ZERO, ChargeDescription="Compute Savings Plan", **bought)
                text = "Unused compute savings plan"
                yield self.row(
                    "untied", self.whole, ZERO, "1.70000000000012345", ZERO, ChargeDescription=text, **unused
                )
            if machine is self.reserved_machine:
                price = machine.facts.list_price * RESERVED_RATE
                used = min(Decimal(machine.end_s - machine.start_s) / HOUR_S, RESERVED_USE)
                bought = {"ChargeCategory": "Purchase", "ChargeFrequency": "Recurring"}
                bought |= {**self._reservation(None, ZERO, ZERO), "ChargeDescription": "Reserved VM Instance"}
                yield self.row("untied", self.month, price * RESERVED * 31, ZERO, **bought)
                rest = (RESERVED - used).quantize(Decimal("1e-10"))
                unused = nobody | self._reservation("Unused", rest, ZERO)
                unused["ResourceId"] = unused["CommitmentDiscountId"].lower()
                text = "Unused reservation"
                yield self.row("untied", self.whole, ZERO, price * rest, ZERO, ChargeDescription=text, **unused)

    def _capacity(self, machine: Machine) -> dict[str, Any]:
        if not self.spec.capacity_reservation or machine is not self.fleet.machines[0]:
            return {}
        return {"CapacityReservationId": self.capacity, "CapacityReservationStatus": "Used"}

    @property
    def capacity(self) -> str:
        """Id of the capacity reservation."""
        group = f"{self.fleet.sub_account}/resourcegroups/ml-gpu/providers/microsoft.compute/capacityreservationgroups"
        return f"{group}/gpu/capacityreservations/{token(self.spec, 'capacity', digits=6)}"

    # --- beside machines ---------------------------------------------------------------------------------------------

    def _volume(self, volume: Volume, period: tuple[int, int], cost: Decimal | None = None) -> Charge:
        rate = self.spec.profile.volume_rate
        part = Decimal(period[1] - period[0]) / (self.month[1] - self.month[0])
        listed = rate * volume.gib * part if cost is None else cost
        return self.row(
            "dependant",
            period,
            listed,
            dependant=volume.volume_id,
            ResourceId=volume.billed_id,
            ResourceName=volume.billed_id.rsplit("/", 1)[1],
            ResourceType="Disk",
            ServiceCategory="Storage",
            ServiceSubcategory="Block Storage",
            ConsumedQuantity=part.quantize(Decimal("1e-10")),
            ConsumedUnit="Months",
            PricingQuantity=part.quantize(Decimal("1e-10")),
            PricingUnit="Months",
            SkuId="DZH318Z0BP04",
            SkuMeter="P30 LRS Disk",
            ChargeDescription="Premium SSD Managed Disks - P30 LRS - US East",
            x_SkuMeterCategory="Storage",
        )

    def _storage(self) -> Iterable[Charge]:
        account = (
            f"{self.fleet.sub_account}/resourcegroups/ml-gpu/providers/microsoft.storage/storageaccounts/checkpoints"
        )
        yield self.row(
            "storage",
            self.whole,
            Decimal("2.13870967741935483870967742"),
            ResourceId=account,
            ResourceType="Storage account",
            ServiceCategory="Storage",
            ServiceSubcategory="Object Storage",
            ServiceName="Storage Accounts",
            SkuMeter="Hot LRS Data Stored",
            ConsumedUnit="GB-Months",
            ConsumedQuantity=Decimal("102.7"),
            PricingQuantity=Decimal("102.7"),
            PricingUnit="GB-Months",
            ChargeDescription="Blob Storage - Hot LRS - US East",
        )

    def _rounding(self) -> Iterable[Charge]:
        yield self.row(
            "rounding",
            self.month,
            "0.0031415926",
            ChargeCategory="Adjustment",
            ChargeFrequency="One-Time",
            ChargeDescription="Rounding Adjustment",
            PricingCategory=None,
            ServiceCategory="Other",
            ServiceName="Rounding Adjustment",
            ServiceSubcategory="Other (Other)",
            SubAccountId=None,
            SubAccountName=None,
            SubAccountType=None,
        )

    def _refund(self) -> Iterable[Charge]:
        machine = self.fleet.machines[0]
        about: dict[str, Any] = {"machine": machine.instance_id, "instance_type": machine.instance_type}
        facts = self.machine_facts(machine, None) | {"ChargeDescription": "Refund of machine hours"}
        yield self.row("machine", self.whole, "-0.7100000000000345", **about, **facts)
        yield self.row("untied", self.whole, "-0.33", ChargeDescription="Refund")

    def _transfer(self) -> Iterable[Charge]:
        for machine in self.fleet.machines:
            if machine is self.fleet.machines[0] or not machine.is_billed:
                yield self._bytes(machine, "0.0123456789123456", "Bandwidth - Standard Data Transfer Out")

    def _bytes(self, machine: Machine, cost: str, about: str, period: tuple[int, int] | None = None) -> Charge:
        facts = self.machine_facts(machine, None)
        kept = ("ResourceId", "ResourceName", "ResourceType")
        named = {name: facts[name] for name in kept}
        if machine.member is not None:
            named["x_SkuDetails"] = json.dumps({"VMName": machine.member})
        return self.row(
            "other",
            period or self.whole,
            cost,
            machine=machine.instance_id,
            ServiceCategory="Networking",
            ServiceSubcategory="Network Infrastructure",
            ServiceName="Bandwidth",
            SkuMeter="Standard Data Transfer Out",
            ConsumedUnit="GB",
            ConsumedQuantity=Decimal("0.137"),
            PricingQuantity=Decimal("0.137"),
            PricingUnit="GB",
            ChargeDescription=about,
            **named,
        )

    def _twins(self) -> Iterable[Charge]:
        for _ in range(2):
            yield self._bytes(self.fleet.machines[0], "0.02", "Bandwidth - Inter-Region Data Transfer")

    def _overheads(self) -> Iterable[Charge]:
        """A CPU machine, a function, and reserved capacity without a machine."""
        group = f"{self.fleet.sub_account}/resourcegroups/ml-gpu/providers"
        cpu = f"{group}/microsoft.compute/virtualmachines/cpu-{token(self.spec, 'cpu', digits=6)}"
        yield self.row(
            "untied",
            self.whole,
            Decimal("0.096") * 24,
            ResourceId=cpu,
            ResourceType="Virtual machine",
            ConsumedQuantity=Decimal(24),
            ConsumedUnit="Hours",
            SkuMeter="D2s v5",
            SkuPriceDetails={"InstanceType": "Standard_D2s_v5"},
            ChargeDescription="Virtual Machines Dsv5 Series - D2s v5 - US East",
            x_SkuDetails=json.dumps({"ServiceType": "Standard_D2s_v5"}),
        )
        yield self.row(
            "other",
            self.whole,
            "0.0000002083333333",
            ServiceName="Azure Functions",
            SkuMeter="Standard Execution Time",
            ResourceId=f"{group}/microsoft.web/sites/reaper",
            ChargeDescription="Functions - Standard Execution Time",
            ConsumedQuantity=Decimal("0.0125"),
            ConsumedUnit="GB-Seconds",
        )
        yield self.row(
            "capacity_unused",
            self.whole,
            "3.673",
            ResourceId=self.capacity,
            CapacityReservationId=self.capacity,
            CapacityReservationStatus="Unused",
            SkuMeter="NC24ads A100 v4",
            ChargeDescription="Unused capacity reservation",
        )

    def _straddling(self) -> Iterable[Charge]:
        """A volume's day from 18:00, thirty hours from 20:00, and a week of a service that no rule knows."""
        evening = self.day + 18 * HOUR
        volume = self.fleet.volumes[0]
        yield self._volume(volume, (evening, evening + DAY))
        yield self._volume(volume, (evening + 2 * HOUR, evening + 32 * HOUR), Decimal("0.0000000025"))
        about: dict[str, Any] = {
            "ServiceName": "Azure Purview",
            "SkuMeter": "Catalog",
            "ChargeDescription": "Catalogue of a week",
        }
        yield self.row("other", (self.day, self.day + 7 * DAY), "7.0000000007", **about)
        machine = self.fleet.machines[0]
        long = self.day + machine.start_s * SECOND, self.day + 2 * DAY
        yield self._bytes(machine, "0.0700000003", "Bandwidth of two days", long)

    def _cluster_fee(self) -> Iterable[Charge]:
        yield self.row(
            "shared",
            self.whole,
            "2.4",
            ServiceName="Azure Kubernetes Service",
            ServiceSubcategory="Containers",
            ResourceId=f"{self.fleet.sub_account}/resourcegroups/ml-gpu/providers/microsoft.containerservice/managedclusters/gpu",
            SkuMeter="Standard Uptime SLA",
            ConsumedQuantity=Decimal(24),
            ConsumedUnit="Hours",
            ChargeDescription="Azure Kubernetes Service - Standard Uptime SLA",
        )

    def _network_fees(self) -> Iterable[Charge]:
        """Gateway, balancer and address, and a machine's bytes."""
        network = f"{self.fleet.sub_account}/resourcegroups/ml-gpu/providers/microsoft.network"
        for kind, service, cost in (
            ("natgateways", "Azure NAT Gateway", "1.08"),
            ("loadbalancers", "Load Balancer", "0.6000000000007"),
            ("publicipaddresses", "Virtual Network", "0.12"),
        ):
            yield self.row(
                "dependant",
                self.whole,
                cost,
                dependant=f"{network}/{kind}/gpu",
                ResourceId=f"{network}/{kind}/gpu",
                ServiceName=service,
                ServiceCategory="Networking",
                ServiceSubcategory="Network Connectivity",
                SkuMeter=f"Standard {kind}",
                ChargeDescription=f"{service} - Standard",
            )
        yield self._bytes(self.fleet.machines[0], "0.0137000009", "Bandwidth - Inter-Zone Data Transfer")

    def _machine_credit(self) -> Iterable[Charge]:
        """A promotional credit that names the training machine: it lowers the bill of the machine and no unit cost."""
        machine = self.fleet.machines[0]
        about: dict[str, Any] = {"machine": machine.instance_id, "instance_type": machine.instance_type}
        facts = self.machine_facts(machine, None) | {"ChargeCategory": "Credit", "ChargeFrequency": "One-Time"}
        facts["ChargeDescription"] = "Sponsorship credit"
        yield self.row("machine", self.whole, "-0.2500000007", **about, **facts)

    def _closed_correction(self) -> Iterable[Charge]:
        """A later month takes back a part of the training machine's day, and adds something that names nothing."""
        machine = self.fleet.machines[0]
        about: dict[str, Any] = {"machine": machine.instance_id, "instance_type": machine.instance_type}
        facts = self.machine_facts(machine, Decimal("0.25")) | {"ChargeClass": "Correction"}
        facts["ChargeDescription"] = "Rate correction of a closed month"
        yield self.later(self.row("machine", self.whole, "-0.3700000011", hours=Decimal("0.25"), **about, **facts))
        text = "Correction of a closed month"
        yield self.later(
            self.row("untied", self.whole, "0.1100000013", ChargeClass="Correction", ChargeDescription=text)
        )
