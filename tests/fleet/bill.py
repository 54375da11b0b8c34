"""The bill of a fleet: every row of a delivery, with what each row truly is beside it.

Instance hours come from `instances`; here are the volumes, the overheads, and what a second delivery changes. Knows no
telemetry and no file format.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal

from tests.fleet.charge import EC2, TEN_DIGITS, Charge, charge_label, instant
from tests.fleet.instances import InstanceRows
from tests.fleet.model import DAY, HOUR, HOUR_S, Fleet, Machine, instance_facts
from tests.fleet.roster import token

__all__ = ["EC2", "Charge", "charge_label", "charges", "deliveries", "instant"]


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


class _Bill(InstanceRows):
    """All rows of a fleet."""

    def rows(self) -> list[Charge]:
        """Every row of the month that this fleet causes."""
        found = [*super().rows(), *self._volumes()]
        spec = self.spec
        for wanted, make in (
            (spec.storage, self._storage),
            (spec.tax, self._tax),
            (spec.credit, self._credit),
            (spec.refund, self._refund),
            (spec.transfer, self._transfer),
            (spec.overheads, self._overheads),
            (spec.straddling, self._straddling),
            (spec.twins, self._twins),
        ):
            if wanted:
                found += make()
        return found

    def restate(self, rows: list[Charge]) -> list[Charge]:
        """A tenth off the on-demand hours of even hours, the credit gone, an adjustment new."""
        changed = []
        for row in rows:
            if (
                row.kind == "machine"
                and row["PricingCategory"] == "Standard"
                and row.billed > 0
                and row.start_ns // HOUR % 2 == 0
            ):
                less = (row.billed * Decimal("0.9")).quantize(TEN_DIGITS)
                row = replace(row, billed=less, effective=less)
            if row["ChargeCategory"] != "Credit":
                changed.append(row)
        period = self.hour(self.spec.first_hour)
        changed.append(
            self.row(
                "untied",
                period,
                "-1.05",
                ChargeCategory="Adjustment",
                ChargeFrequency="One-Time",
                ChargeDescription="Rate correction of the open month",
            )
        )
        return changed

    def _volume(self, volume_id: str, gib: int, period: tuple[int, int], cost: Decimal | None = None) -> Charge:
        quantity = (Decimal(gib) * (period[1] - period[0]) / (self.month[1] - self.month[0])).quantize(TEN_DIGITS)
        cost = (Decimal("0.08") * quantity).quantize(TEN_DIGITS) if cost is None else cost
        return self.row(
            "dependant",
            period,
            cost,
            dependant=volume_id,
            ResourceId=volume_id,
            ResourceType="volume",
            ServiceCategory="Storage",
            ServiceSubcategory="Block Storage",
            ConsumedQuantity=quantity,
            ConsumedUnit="GB-Months",
            PricingQuantity=quantity,
            PricingUnit="GB-Months",
            ListUnitPrice=Decimal("0.08"),
            ContractedUnitPrice=Decimal("0.08"),
            SkuId="SKU-gp3",
            SkuMeter="EBS:VolumeUsage.gp3",
            x_UsageType="EBS:VolumeUsage.gp3",
            x_Operation="CreateVolume-Gp3",
            ChargeDescription="$0.08 per GB-month of General Purpose (gp3) provisioned storage - US East (N. Virginia)",
        )

    def _volumes(self) -> Iterable[Charge]:
        hours = range(self.spec.first_hour, self.spec.first_hour + self.spec.hours)
        whole = self.day, self.day + DAY
        for volume in self.fleet.volumes:
            periods = [self.hour(h) for h in hours] if self.spec.disk == "hourly" else [whole] if self.spec.disk else []
            for period in periods:
                yield self._volume(volume.volume_id, volume.gib, period)
        if self.spec.lost_volume:
            yield self._volume("vol-0" + token(self.spec, "lost", digits=16), 300, whole)

    def _storage(self) -> Iterable[Charge]:
        yield self.row(
            "storage",
            (self.day, self.day + DAY),
            "1.7344086022",
            ResourceId="example-checkpoints",
            ResourceType="bucket",
            ServiceCategory="Storage",
            ServiceSubcategory="Object Storage",
            ServiceName="Amazon Simple Storage Service",
            x_ServiceCode="AmazonS3",
            x_UsageType="TimedStorage-ByteHrs",
            x_Operation="StandardStorage",
            ConsumedUnit="GB-Months",
            ConsumedQuantity=Decimal("75.408"),
            PricingQuantity=Decimal("75.408"),
            PricingUnit="GB-Months",
            ChargeDescription="$0.023 per GB - first 50 TB / month of storage used",
        )

    def _tax(self) -> Iterable[Charge]:
        yield self.row(
            "untied",
            self.month,
            "41.27",
            ChargeCategory="Tax",
            ChargeFrequency="One-Time",
            PricingCategory=None,
            ChargeDescription="Tax for product code AmazonEC2",
            ServiceSubcategory="Other (Compute)",
        )

    def _credit(self) -> Iterable[Charge]:
        yield self.row(
            "untied",
            self.hour(self.spec.first_hour),
            "-12.3400000001",
            ChargeCategory="Credit",
            ChargeFrequency="One-Time",
            PricingCategory="Other",
            ChargeDescription="Promotional credits",
        )

    def _refund(self) -> Iterable[Charge]:
        """A negative row that names the training machine, in an hour in which it runs, and one that names nothing."""
        machine = self.fleet.machines[0]
        hour = machine.start_s // HOUR_S
        facts = self.facts(machine, machine.facts.list_price, None)
        yield self.row(
            "machine",
            self.hour(hour),
            "-0.7100000003",
            machine=machine.instance_id,
            instance_type=machine.instance_type,
            **facts | {"ChargeDescription": "Refund of instance hours"},
        )
        yield self.row("untied", self.hour(hour), "-0.33", ChargeDescription="Refund", x_UsageType="Refund")

    def _transfer(self) -> Iterable[Charge]:
        """Bytes out of the training machine, in each hour of its time; and of one that the bill does not know."""
        for machine in self.fleet.machines:
            if machine is self.fleet.machines[0] or not machine.is_billed:
                for hour in range(machine.start_s // HOUR_S, (machine.end_s - 1) // HOUR_S + 1):
                    yield self._bytes(
                        machine, hour, "0.0123456789", "$0.09 per GB - first 10 TB / month data transfer out"
                    )

    def _bytes(self, machine: Machine, hour: int, cost: str, about: str) -> Charge:
        return self.row(
            "untied",
            self.hour(hour),
            cost,
            machine=machine.instance_id,
            ResourceId=machine.instance_id,
            ResourceType="instance",
            x_UsageType="DataTransfer-Out-Bytes",
            x_Operation="RunInstances",
            ConsumedUnit="GB",
            ConsumedQuantity=Decimal("0.137"),
            PricingQuantity=Decimal("0.137"),
            PricingUnit="GB",
            ServiceCategory="Networking",
            ServiceSubcategory="Network Infrastructure",
            ChargeDescription=about,
        )

    def _twins(self) -> Iterable[Charge]:
        machine = self.fleet.machines[0]
        for _ in range(2):
            yield self._bytes(machine, machine.start_s // HOUR_S, "0.02", "$0.02 per GB data transfer between regions")

    def _overheads(self) -> Iterable[Charge]:
        day, hour = (self.day, self.day + DAY), self.hour(self.spec.first_hour)
        cpu = "i-0" + token(self.spec, "cpu", digits=16)
        yield self.row(
            "support",
            day,
            "3.2258064516",
            ServiceName="AWS Support (Business)",
            x_ServiceCode="AWSSupportBusiness",
            ServiceCategory="Other",
            ServiceSubcategory="Other (Other)",
            ChargeDescription="AWS Support (Business)",
            x_UsageType="Dollar",
        )
        yield self.row(
            "shared",
            day,
            "1.08",
            ResourceId=f"arn:aws:ec2:us-east-1:{self.fleet.sub_account}:natgateway/nat-0a1b2c3d4e",
            x_UsageType="NatGateway-Hours",
            ConsumedQuantity=Decimal(24),
            ConsumedUnit="Hours",
            ChargeDescription="$0.045 per NAT Gateway Hour",
            ServiceCategory="Networking",
        )
        yield self.row(
            "untied",
            hour,
            "0.096",
            ResourceId=cpu,
            ResourceType="instance",
            x_UsageType="BoxUsage:m5.large",
            ChargeDescription="$0.096 per On Demand Linux m5.large Instance Hour",
            ConsumedQuantity=Decimal(1),
            ConsumedUnit="Hours",
            SkuPriceDetails={"InstanceType": "m5.large"},
        )
        yield self.row(
            "other",
            hour,
            "0.0000002083",
            ServiceName="AWS Lambda",
            x_ServiceCode="AWSLambda",
            x_UsageType="Lambda-GB-Second",
            ResourceId="arn:aws:lambda:us-east-1:444455556666:function:reaper",
            ChargeDescription="AWS Lambda - Total Compute",
            ConsumedQuantity=Decimal("0.0125"),
            ConsumedUnit="Second",
        )
        reservation = f"arn:aws:ec2:us-east-1:{self.fleet.sub_account}:capacity-reservation/cr-0f1e2d3c4b5a69788"
        price = instance_facts("g5.xlarge").list_price
        yield self.row(
            "untied",
            hour,
            price,
            ResourceId=reservation,
            CapacityReservationId=reservation,
            CapacityReservationStatus="Unused",
            x_UsageType="UnusedBox:g5.xlarge",
            ChargeDescription=f"${price} per Unused Reservation Linux g5.xlarge Instance Hour",
        )

    def _straddling(self) -> Iterable[Charge]:
        """A volume's day from 18:00, thirty hours from 20:00, and a week of a service that no rule knows."""
        volume = self.fleet.volumes[0]
        evening = self.day + 18 * HOUR
        yield self._volume(volume.volume_id, volume.gib, (evening, evening + DAY))
        yield self._volume(
            volume.volume_id, volume.gib, (evening + 2 * HOUR, evening + 32 * HOUR), Decimal("0.0000000025")
        )
        yield self.row(
            "other",
            (self.day, self.day + 7 * DAY),
            "7.0000000007",
            ServiceName="AWS Glue",
            x_ServiceCode="AWSGlue",
            x_UsageType="Catalog-Storage",
            ChargeDescription="Catalogue storage of a week",
        )
