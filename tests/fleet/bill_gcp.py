"""The bill of a fleet on Google Cloud, as its rows are exported from BigQuery.

Machine time comes from `instances_gcp`; here are the disks, the overheads, the fees beside machines, corrections, and what is
appended later. Knows no telemetry and no file format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tests.fleet.charge import PROMOTION, TEN_DIGITS, ZERO, Charge, instant
from tests.fleet.clouds import GCP_ZONE
from tests.fleet.instances_gcp import GIB, Meter, MeterRows, credit, meters
from tests.fleet.model import DAY, HOUR, HOUR_S, SECOND, Machine, Volume


class GcpBill(MeterRows):
    """All rows of a fleet on Google Cloud."""

    def rows(self) -> list[Charge]:
        """Every row that this fleet causes, each in its own invoice month."""
        spec = self.spec
        found = [*self.machine_rows(), *self._volumes()]
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
            (spec.closed_correction, self._closed_correction),
            (spec.capacity_reservation, self._unused_capacity),
        ):
            if wanted:
                found += make()
        return found

    def restate(self, rows: list[Charge]) -> list[Charge]:
        """Nothing is taken out of an export: rows are appended that undo on-demand hours and state them anew."""
        appended = []
        later = {"x_ExportTime": instant(self.day + 2 * DAY), "ChargeClass": "Correction", "x_CostType": "adjustment"}
        for row in rows:
            is_use = row.kind == "machine" and row["PricingCategory"] == "Standard" and row.billed > 0
            if is_use and row.start_ns // HOUR % 2 == 0 and row["ChargeClass"] is None:
                undone, again = _times(row, Decimal(-1)), _times(row, Decimal("0.9"))
                appended += [replace(r, columns={**r.columns, **later}) for r in (undone, again)]
        period = self.hour(self.spec.first_hour)
        about: dict[str, Any] = {"ChargeDescription": "Billing modification", "x_ExportTime": later["x_ExportTime"]}
        fixed: dict[str, Any] = {
            "ChargeCategory": "Adjustment",
            "ChargeFrequency": "One-Time",
            "x_CostType": "adjustment",
        }
        return [*rows, *appended, self.row("untied", period, "-1.05", **fixed, **about)]

    def _unused_capacity(self) -> Iterable[Charge]:
        """Reserved machines in the hours after the training machine's first, in which nobody uses them.

        A label alone says so: these rows have no CapacityReservationStatus.
        """
        machine = self.fleet.machines[0]
        first = machine.start_s // HOUR_S
        for hour in range(first + 1, self.spec.first_hour + self.spec.hours):
            for meter in meters(machine):
                facts = self.machine_facts(machine, meter) | self.use(meter, HOUR_S)
                labels = [
                    *facts["x_SystemLabels"],
                    {"key": "compute.googleapis.com/is_unused_reservation", "value": "true"},
                ]
                facts |= {"ResourceId": self.capacity, "ResourceName": "gpu", "ResourceType": "Reservation"}
                cost = (meter.price * meter.units).quantize(TEN_DIGITS)
                yield self.row("capacity_unused", self.hour(hour), cost, **facts | {"x_SystemLabels": labels})

    def _volume(self, volume: Volume, period: tuple[int, int], cost: Decimal | None = None) -> Charge:
        share = Decimal(period[1] - period[0]) / (self.month[1] - self.month[0])
        months = (volume.gib * share).quantize(TEN_DIGITS)
        cost = (self.spec.profile.volume_rate * months).quantize(TEN_DIGITS) if cost is None else cost
        return self.row(
            "dependant",
            period,
            cost,
            dependant=volume.volume_id,
            ResourceId=volume.billed_id,
            ResourceName=volume.billed_id.rsplit("/", 1)[1],
            ResourceType="Disk",
            ServiceCategory="Storage",
            ServiceSubcategory="Block Storage",
            ConsumedQuantity=Decimal(volume.gib * GIB * ((period[1] - period[0]) // 10**9)),
            ConsumedUnit="byte-seconds",
            PricingQuantity=months,
            PricingUnit="gibibyte month",
            SkuId="SKU-BALANCED",
            SkuMeter="Balanced PD Capacity",
            ChargeDescription="Balanced PD Capacity",
        )

    def _volumes(self) -> Iterable[Charge]:
        whole = self.day, self.day + DAY
        hours = [self.hour(h) for h in range(self.spec.first_hour, self.spec.first_hour + self.spec.hours)]
        for volume in self.fleet.volumes:
            for period in hours if self.spec.disk == "hourly" else [whole] if self.spec.disk else []:
                yield self._volume(volume, period)
        if self.spec.lost_volume:
            name = f"//compute.googleapis.com/projects/{self.fleet.sub_account}/zones/{GCP_ZONE}/disks/lost"
            yield self._volume(Volume(name, 300, ()), whole)

    def _storage(self) -> Iterable[Charge]:
        gross, nested = Decimal("1.5081720001"), []
        if self.spec.nested_credits:
            nested = [credit("FreeTier", "FREE_TIER", Decimal("-0.1000000003"))]
            nested.append(credit("FreeTrial", PROMOTION, Decimal("-0.7000000007")))
        yield self.row(
            "storage",
            (self.day, self.day + DAY),
            gross + sum((given["amount"] for given in nested), ZERO),
            listed=gross,
            x_Credits=nested or None,
            ResourceId="//storage.googleapis.com/projects/_/buckets/example-checkpoints",
            ResourceType="Bucket",
            ServiceCategory="Storage",
            ServiceSubcategory="Object Storage",
            ServiceName="Cloud Storage",
            SkuMeter="Standard Storage US Regional",
            ConsumedUnit="byte-seconds",
            PricingQuantity=Decimal("75.4"),
            PricingUnit="gibibyte month",
            ChargeDescription="Standard Storage US Regional",
        )

    def _tax(self) -> Iterable[Charge]:
        """Tax of the month, and the row by which rounding is evened out."""
        nobody: dict[str, Any] = {"PricingCategory": None, "ServiceName": "Invoice", "ServiceCategory": "Other"}
        fixed = {"ChargeFrequency": "One-Time", "ServiceSubcategory": "Other (Other)", **nobody}
        tax: dict[str, Any] = {"ChargeCategory": "Tax", "ChargeDescription": "Tax", "x_CostType": "tax"}
        yield self.row("other", self.month, "41.27", **fixed, **tax)
        rounding: dict[str, Any] = {
            "ChargeCategory": "Adjustment",
            "ChargeDescription": "Rounding error",
            "x_CostType": "rounding_error",
        }
        yield self.row("rounding", self.month, "0.0000012345", **fixed, **rounding)

    def _credit(self) -> Iterable[Charge]:
        yield self.row(
            "other",
            self.hour(self.spec.first_hour),
            "-12.3400000001",
            ChargeCategory="Credit",
            ChargeFrequency="One-Time",
            PricingCategory="Other",
            ServiceName="Invoice",
            ChargeDescription="Contract billing adjustment",
            x_CostType="adjustment",
        )

    def _refund(self) -> Iterable[Charge]:
        machine = self.fleet.machines[0]
        period, gpu = self.hour(machine.start_s // HOUR_S), meters(machine)[2]
        about: dict[str, Any] = {"machine": machine.instance_id, "instance_type": machine.instance_type}
        facts = self.machine_facts(machine, gpu) | self.use(gpu, 600)
        yield self.row("machine", period, "-0.7100000003", units_per=gpu.units, **about, **facts)
        yield self.row("untied", period, "-0.33", ChargeDescription="Refund", x_CostType="adjustment")

    def _transfer(self) -> Iterable[Charge]:
        for machine in self.fleet.machines:
            if machine is self.fleet.machines[0] or not machine.is_billed:
                for hour in range(machine.start_s // HOUR_S, (machine.end_s - 1) // HOUR_S + 1):
                    yield self._bytes(machine, self.hour(hour), "0.0123456789", "Network Internet Egress from Americas")

    def _bytes(self, machine: Machine, period: tuple[int, int], cost: str, about: str) -> Charge:
        meter = Meter("egress", about, Decimal(1), Decimal("0.085"), False)
        return self.row(
            "untied",
            period,
            cost,
            machine=machine.instance_id,
            ServiceSubcategory="Network Infrastructure",
            ConsumedQuantity=Decimal(147102345),
            ConsumedUnit="bytes",
            PricingQuantity=Decimal("0.137"),
            PricingUnit="gibibyte",
            **self.machine_facts(machine, meter),
        )

    def _twins(self) -> Iterable[Charge]:
        machine = self.fleet.machines[0]
        for _ in range(2):
            yield self._bytes(machine, self.hour(machine.start_s // HOUR_S), "0.02", "Network Inter Zone Egress")

    def _overheads(self) -> Iterable[Charge]:
        day, hour = (self.day, self.day + DAY), self.hour(self.spec.first_hour)
        cpu = (
            f"//compute.googleapis.com/projects/{self.fleet.sub_account}/zones/{GCP_ZONE}/instances/4000000000000000001"
        )
        support: dict[str, Any] = {
            "ServiceName": "Support",
            "ServiceCategory": "Other",
            "ServiceSubcategory": "Other (Other)",
        }
        yield self.row("support", day, "3.2258064516", ChargeDescription="Enhanced Support", **support)
        yield self.row(
            "untied",
            hour,
            "0.096",
            ResourceId=cpu,
            ResourceType="Instance",
            SkuMeter="N2 Instance Core running in Americas",
            ChargeDescription="N2 Instance Core running in Americas",
            ConsumedQuantity=Decimal(7200),
            ConsumedUnit="seconds",
            PricingQuantity=Decimal(2),
            PricingUnit="hour",
            x_SystemLabels=[{"key": "compute.googleapis.com/machine_spec", "value": "n2-standard-2"}],
        )
        yield self.row(
            "other",
            hour,
            "0.0000002083",
            ServiceName="Cloud Functions",
            SkuMeter="Invocations",
            ResourceId=f"//cloudfunctions.googleapis.com/projects/{self.fleet.sub_account}/functions/reaper",
            ChargeDescription="Invocations",
        )

    def _straddling(self) -> Iterable[Charge]:
        """A volume's day from 18:00, thirty hours from 20:00, and a week of a service that no rule knows."""
        evening = self.day + 18 * HOUR
        volume = self.fleet.volumes[0]
        yield self._volume(volume, (evening, evening + DAY))
        yield self._volume(volume, (evening + 2 * HOUR, evening + 32 * HOUR), Decimal("0.0000000025"))
        about: dict[str, Any] = {
            "ServiceName": "Data Catalog",
            "SkuMeter": "Catalog",
            "ChargeDescription": "Catalogue of a week",
        }
        yield self.row("other", (self.day, self.day + 7 * DAY), "7.0000000007", **about)
        machine = self.fleet.machines[0]
        long = self.day + machine.start_s * SECOND, self.day + 2 * DAY
        yield self._bytes(machine, long, "0.0700000003", "Network Egress of two days")

    def _cluster_fee(self) -> Iterable[Charge]:
        for hour in range(self.spec.first_hour, self.spec.first_hour + self.spec.hours):
            yield self.row(
                "shared",
                self.hour(hour),
                "0.1",
                ServiceName="Kubernetes Engine",
                ServiceSubcategory="Containers",
                ResourceId=f"//container.googleapis.com/projects/{self.fleet.sub_account}/zones/{GCP_ZONE}/clusters/gpu",
                SkuMeter="Zonal Kubernetes Clusters",
                ConsumedQuantity=Decimal(3600),
                ConsumedUnit="seconds",
                PricingQuantity=Decimal(1),
                PricingUnit="hour",
                ChargeDescription="Zonal Kubernetes Clusters",
            )

    def _network_fees(self) -> Iterable[Charge]:
        """Gateway, balancer and address, and a machine's bytes between zones."""
        hour = self.hour(self.spec.first_hour)
        base = f"//compute.googleapis.com/projects/{self.fleet.sub_account}/regions/{self.fleet.region}"
        network: dict[str, Any] = {"ServiceCategory": "Networking", "ServiceName": "Networking"}
        for kind, about, cost in (
            ("forwardingRules", "Cloud Load Balancer Forwarding Rule", "0.0250000001"),
            ("addresses", "External IP Charge on a Standard VM", "0.005"),
        ):
            name = f"{base}/{kind}/gpu"
            facts = {"ResourceId": name, "SkuMeter": about, "ChargeDescription": about, **network}
            yield self.row("dependant", hour, cost, dependant=name, **facts)
        about = "Networking Cloud NAT Gateway Uptime"
        yield self.row("shared", hour, "0.0014", SkuMeter=about, ChargeDescription=about, **network)
        machine = self.fleet.machines[0]
        hour = self.hour(machine.start_s // HOUR_S)
        yield self._bytes(machine, hour, "0.0137000009", "Network Inter Region Egress")

    def _closed_correction(self) -> Iterable[Charge]:
        """A later invoice month takes back a part of the training machine's first hour, and adds something else."""
        machine = self.fleet.machines[0]
        period, gpu = self.hour(machine.start_s // HOUR_S), meters(machine)[2]
        about: dict[str, Any] = {"machine": machine.instance_id, "instance_type": machine.instance_type}
        facts = self.machine_facts(machine, gpu) | self.use(gpu, 900)
        facts |= {"ChargeClass": "Correction", "x_CostType": "adjustment"}
        hours = Fraction(900 * gpu.units) / HOUR_S
        yield self.later(
            self.row("machine", period, "-0.3700000011", hours=hours, units_per=gpu.units, **about, **facts)
        )
        text: dict[str, Any] = {"ChargeDescription": "Price correction of a closed month", "ChargeClass": "Correction"}
        yield self.later(self.row("untied", period, "0.1100000013", **text))


def _times(row: Charge, factor: Decimal) -> Charge:
    """A row with costs, quantities and nested credits times a factor."""

    def scaled(value: Decimal) -> Decimal:
        return (value * factor).quantize(TEN_DIGITS)

    columns: dict[str, Any] = {**row.columns}
    quantities = ("ConsumedQuantity", "PricingQuantity")
    columns.update({name: scaled(columns[name]) for name in quantities if columns.get(name) is not None})
    if row["ConsumedUnit"] == "byte-seconds":  # whole, or a double of the export could not hold it
        columns["ConsumedQuantity"] = columns["ConsumedQuantity"].quantize(Decimal(1))
    if row["x_Credits"]:
        columns["x_Credits"] = [{**credit, "amount": scaled(credit["amount"])} for credit in row["x_Credits"]]
    costs: dict[str, Any] = {name: scaled(getattr(row, name)) for name in ("billed", "effective", "listed")}
    assert row.hours is not None
    return replace(row, columns=columns, hours=row.hours * Fraction(factor), **costs)
