"""The bill of a fleet on AWS.

Instance hours come from `instances`; here are the volumes, the overheads, the fees beside machines, corrections, and what a
second delivery changes. Knows no telemetry and no file format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from tests.fleet.charge import TEN_DIGITS, Charge
from tests.fleet.instances import InstanceRows
from tests.fleet.model import DAY, HOUR, HOUR_S, SECOND, Machine, Volume, instance_facts
from tests.fleet.roster import token


class AwsBill(InstanceRows):
    """All rows of a fleet on AWS."""

    def rows(self) -> list[Charge]:
        """Every row that this fleet causes, each in its own invoice month."""
        found = [*self.instance_rows(), *self._volumes()]
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
            (spec.cluster_fee, self._cluster_fee),
            (spec.network_fees, self._network_fees),
            (spec.nested_credits, self._machine_credit),
            (spec.closed_correction, self._closed_correction),
            (spec.capacity_reservation, self._unused_capacity),
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

    def _volume(self, volume: Volume, period: tuple[int, int], cost: Decimal | None = None) -> Charge:
        volume_id, gib = volume.volume_id, volume.gib
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
                yield self._volume(volume, period)
        if self.spec.lost_volume:
            yield self._volume(Volume("vol-0" + token(self.spec, "lost", digits=16), 300, ()), whole)

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
                        machine, self.hour(hour), "0.0123456789", "$0.09 per GB - first 10 TB / month data transfer out"
                    )

    def _bytes(self, machine: Machine, period: tuple[int, int], cost: str, about: str) -> Charge:
        return self.row(
            "untied",
            period,
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
            hour = self.hour(machine.start_s // HOUR_S)
            yield self._bytes(machine, hour, "0.02", "$0.02 per GB data transfer between regions")

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
        yield self._volume(volume, (evening, evening + DAY))
        yield self._volume(volume, (evening + 2 * HOUR, evening + 32 * HOUR), Decimal("0.0000000025"))
        yield self.row(
            "other",
            (self.day, self.day + 7 * DAY),
            "7.0000000007",
            ServiceName="AWS Glue",
            x_ServiceCode="AWSGlue",
            x_UsageType="Catalog-Storage",
            ChargeDescription="Catalogue storage of a week",
        )
        machine = self.fleet.machines[0]
        long = self.day + machine.start_s * SECOND, self.day + 2 * DAY
        yield self._bytes(machine, long, "0.0700000003", "$0.01 per GB data transfer of two days")

    def _cluster_fee(self) -> Iterable[Charge]:
        """The control plane of a cluster, in each hour in which machines run."""
        for hour in range(self.spec.first_hour, self.spec.first_hour + self.spec.hours):
            yield self.row(
                "shared",
                self.hour(hour),
                "0.10",
                ServiceName="Amazon Elastic Kubernetes Service",
                x_ServiceCode="AmazonEKS",
                x_UsageType="AmazonEKS-Hours:perCluster",
                x_Operation="CreateOperation",
                ResourceId=f"arn:aws:eks:us-east-1:{self.fleet.sub_account}:cluster/gpu",
                ServiceSubcategory="Containers",
                ConsumedQuantity=Decimal(1),
                ConsumedUnit="Hours",
                ChargeDescription="Amazon EKS cluster usage in US East (N. Virginia)",
            )

    def _network_fees(self) -> Iterable[Charge]:
        """Hours of a NAT gateway and a balancer, a public address, and a machine's bytes between zones."""
        hour = self.hour(self.spec.first_hour)
        arn = f"arn:aws:ec2:us-east-1:{self.fleet.sub_account}"
        balancer = f"arn:aws:elasticloadbalancing:us-east-1:{self.fleet.sub_account}:loadbalancer/net/gpu/0a1b"
        network: dict[str, Any] = {"ServiceCategory": "Networking", "ServiceSubcategory": "Network Infrastructure"}
        yield self.row(
            "shared",
            hour,
            "0.045",
            ResourceId=f"{arn}:natgateway/nat-0f1e2d3c4b5a69788",
            x_UsageType="NatGateway-Hours",
            ChargeDescription="$0.045 per NAT Gateway Hour",
            **network,
        )
        yield self.row(
            "dependant",
            hour,
            "0.0225000001",
            dependant=balancer,
            ServiceName="Elastic Load Balancing",
            x_ServiceCode="AWSELB",
            ResourceId=balancer,
            x_UsageType="LoadBalancerUsage",
            ChargeDescription="$0.0225 per Network LoadBalancer-hour (or partial hour)",
            **network,
        )
        yield self.row(
            "dependant",
            hour,
            "0.005",
            dependant="eni-0a9b8c7d6e5f43210",
            ServiceName="Amazon Virtual Private Cloud",
            x_ServiceCode="AmazonVPC",
            ResourceId=f"{arn}:network-interface/eni-0a9b8c7d6e5f43210",
            x_UsageType="PublicIPv4:InUseAddress",
            ChargeDescription="$0.005 per In-use public IPv4 address per hour",
            **network,
        )
        machine = self.fleet.machines[0]
        first = self.hour(machine.start_s // HOUR_S)
        yield self._bytes(machine, first, "0.0137000009", "$0.010 per GB - regional data transfer")

    def _machine_credit(self) -> Iterable[Charge]:
        """A promotional credit that names the training machine: it lowers the bill of the machine and no unit cost."""
        machine = self.fleet.machines[0]
        yield self.row(
            "machine",
            self.hour(machine.start_s // HOUR_S),
            "-0.2500000007",
            machine=machine.instance_id,
            instance_type=machine.instance_type,
            **self.facts(machine, machine.facts.list_price, None)
            | {"ChargeCategory": "Credit", "ChargeFrequency": "One-Time", "ChargeDescription": "Activate credits"},
        )

    def _closed_correction(self) -> Iterable[Charge]:
        """A later month takes back a part of the training machine's first hour, and adds something that names nothing."""
        machine = self.fleet.machines[0]
        period = self.hour(machine.start_s // HOUR_S)
        facts = self.facts(machine, machine.facts.list_price, Decimal("0.25"))
        yield self.later(
            self.row(
                "machine",
                period,
                "-0.3700000011",
                machine=machine.instance_id,
                instance_type=machine.instance_type,
                hours=Decimal("0.25"),
                **facts | {"ChargeClass": "Correction", "ChargeDescription": "Rate correction of a closed month"},
            )
        )
        about: dict[str, Any] = {"ChargeClass": "Correction", "ChargeDescription": "Correction of a closed month"}
        yield self.later(self.row("untied", period, "0.1100000013", x_UsageType="Correction", **about))

    def _unused_capacity(self) -> Iterable[Charge]:
        """Reserved capacity in the hours after the training machine's first, in which nobody uses it."""
        machine = self.fleet.machines[0]
        first = machine.start_s // HOUR_S
        for hour in range(first + 1, self.spec.first_hour + self.spec.hours):
            yield self.row(
                "untied",
                self.hour(hour),
                machine.facts.list_price,
                ResourceId=self.capacity,
                CapacityReservationId=self.capacity,
                CapacityReservationStatus="Unused",
                x_UsageType=f"UnusedBox:{machine.instance_type}",
                ChargeDescription=f"Unused Reservation Linux {machine.instance_type} Instance Hour",
            )
