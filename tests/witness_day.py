"""The second ledger of a small day: arguments filled with plain defaults, and what comes out as plain values."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from decimal import Decimal
from typing import Any

import pyarrow as pa

from schemas.billing import PRICES
from schemas.ledger import ADDRESSES, LAYERS, SPANS
from schemas.usage import ATTACHMENTS
from tasks import witness
from tests.tables import DAY, HOUR, attachments, build, charge, charges, device, devices, layer, layers, ns

TEN = DAY.replace(hour=10)
COUNTS = {"g5.4xlarge": 1, "p5.48xlarge": 8, "two": 2}
ACCOUNT = "111122223333"
SERVICE = f"aws|{ACCOUNT}|Amazon Elastic Compute Cloud"
ALL_BILLED = {SERVICE: ns(DAY) + 24 * HOUR}
NO_DEVICES, NO_LAYERS, NO_ATTACHMENTS = devices(), layers(), attachments()
TINY = Decimal("1e-12")


def prices(*rows: dict[str, Any]) -> pa.Table:
    """Hourly list prices; what a row does not say is a two-GPU machine in us-east-1."""
    plain = {
        "x_Cloud": "aws",
        "SkuId": "two",
        "RegionId": "us-east-1",
        "PricingCategory": "Standard",
        "x_AsOf": "undated",
    }
    more = {
        "PricingUnit": "Hours",
        "BillingCurrency": "USD",
        "x_GpuModel": "A",
        "x_GpuCount": 2,
        "x_PriceSource": "test",
    }
    return build(PRICES, [plain | more | row for row in rows])


def monthly(price: str, **facts: Any) -> dict[str, Any]:
    """A price row of a volume type, gp3 unless said otherwise, per GiB and month."""
    return {"SkuId": "gp3", "PricingUnit": "GiB-Mo", "ListUnitPrice": Decimal(price), "x_GpuCount": 0} | facts


def disks(*rows: tuple[dt.datetime, str, str, float | None, str | None]) -> pa.Table:
    """core_usage__attachments_hourly of (hour, volume, instance, GiB, type)."""
    names = ("hour_utc", "object_id", "instance_id", "bytes", "object_type")
    sized = [(h, v, m, None if gib is None else round(gib * 2**30), kind) for h, v, m, gib, kind in rows]
    return build(ATTACHMENTS, [dict(zip(names, row, strict=True)) | {"cloud": "aws"} for row in sized])


def mig(
    hour: dt.datetime,
    category: str,
    nanoseconds: int,
    *,
    name: str,
    slices: int | None,
    gpu: str = "GPU-0",
    **facts: Any,
) -> dict[str, Any]:
    """A row of core_usage__device_hourly of a MIG slice of a GPU with seven compute slices."""
    cut = {"parent_uuid": gpu, "mig_slices": slices, "mig_total": 7, "ns": nanoseconds}
    return device(hour, category, 0, device=name, **facts) | cut


def ledger(
    bill: pa.Table,
    seen: pa.Table = NO_DEVICES,
    work: pa.Table = NO_LAYERS,
    hung: pa.Table = NO_ATTACHMENTS,
    **facts: Any,
) -> dict[str, pa.Table]:
    """The second ledger of a day."""
    asked = {"prices": prices(), "watermarks": ALL_BILLED, "gpu_counts": COUNTS, "day": "2026-10-01"} | facts
    return witness.compute(
        bill, seen, work, hung, default_region={"aws": "us-east-1", "azure": "eastus", "gcp": "us-central1"}, **asked
    )


def addresses(found: dict[str, pa.Table], key: str | None = None) -> list[tuple[Any, ...]]:
    """(hour, device, job, category, billed, effective) of the addresses of a charge."""
    return [
        (r["x_HourUtc"].hour, r["x_DeviceId"], r["x_JobId"], r["x_Category"], r["BilledCost"], r["EffectiveCost"])
        for r in found[ADDRESSES.name].to_pylist()
        if key is None or r["x_ChargeKey"] == key
    ]


def spans(found: dict[str, pa.Table]) -> dict[tuple[Any, ...], int]:
    """Nanoseconds by (hour, device, job, category)."""
    return {
        (r["x_HourUtc"].hour, r["x_DeviceId"], r["x_JobId"], r["x_Category"]): r["x_Ns"]
        for r in found[SPANS.name].to_pylist()
    }


def by_hour(found: dict[str, pa.Table], key: str) -> dict[int, Decimal]:
    """BilledCost of a charge by hour."""
    sums: dict[int, Decimal] = defaultdict(Decimal)
    for row in addresses(found, key):
        sums[row[0]] += row[4]
    return dict(sums)


def machine(
    key: str, billed: str, effective: str | None = None, *, hours: float = 1, quantity: str | None = None, **facts: Any
) -> dict[str, Any]:
    """A row of machine i-1 from 10:00 on; its quantity is its length unless said otherwise."""
    plain = {
        "start": TEN,
        "x_Class": "machine",
        "x_MachineId": "i-1",
        "x_InstanceType": "two",
        "ConsumedUnit": "Hours",
        "ConsumedQuantity": Decimal(str(hours) if quantity is None else quantity),
        "SkuMeter": "box",
        "PricingCategory": "Standard",
    }
    return charge(key, billed, effective, **({"hours": hours} | plain | facts))


def full(*parts: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """One charge with day amounts other than its own."""
    (row,) = parts
    return row | facts


def part(key: str, meter: str, quantity: str, unit: str, parts: str | None, **facts: Any) -> dict[str, Any]:
    """A row of one meter of machine i-1, which has so many parts of it."""
    units = None if parts is None else Decimal(parts)
    return machine(key, "1", quantity=quantity, ConsumedUnit=unit, SkuMeter=meter, x_UnitsPerMachine=units, **facts)


def promoted(row: dict[str, Any], amount: str, day: str | None = None) -> dict[str, Any]:
    """The charge with a promotion in it; `day` is its part on the day, all of it unless said otherwise."""
    return full(row, x_PromotionalCost=Decimal(amount), x_DayPromotionalCost=Decimal(amount if day is None else day))


def checked(
    found: dict[str, pa.Table], bill: pa.Table, seen: pa.Table = NO_DEVICES, work: pa.Table = NO_LAYERS,
    hung: pa.Table = NO_ATTACHMENTS, *, watermarks: dict[str, int] = ALL_BILLED, offers: pa.Table | None = None, **facts: Any,
) -> witness.WitnessReport:  # fmt: skip
    """The verdict on a ledger of a day."""
    return witness.check(
        bill, seen, work, hung, COUNTS, prices() if offers is None else offers, watermarks, "2026-10-01", {"aws": "us-east-1"},
        found[ADDRESSES.name], found[LAYERS.name], found[SPANS.name], **facts,
    )  # fmt: skip


def worked_example() -> dict[str, Any]:
    bill = charges(
        machine(
            "covered",
            "0",
            "3",
            quantity="0.6",
            PricingCategory="Committed",
            CommitmentDiscountStatus="Used",
            CommitmentDiscountId="sp-1",
        ),
        machine("on demand", "3.2", quantity="0.4"),
        charge(
            "plan fee",
            "4",
            "0",
            start=TEN,
            ChargeCategory="Purchase",
            CommitmentDiscountId="sp-1",
            ChargeFrequency="Recurring",
        ),
        charge("plan unused", "0", "1", start=TEN, CommitmentDiscountId="sp-1", CommitmentDiscountStatus="Unused"),
        charge("disk", "0.25", hours=24, x_Class="dependant", x_DependantId="vol-1"),
        charge("tax", "0.72", start=TEN, ChargeCategory="Tax", ChargeFrequency="One-Time"),
        charge("credit", "-0.5", start=TEN, ChargeCategory="Credit", ChargeFrequency="One-Time"),
    )
    seen = devices(
        device(TEN, "work", 700, job="A", instance_type="two"),
        device(TEN, "input_stall", 500, job="A"),
        device(TEN, "work", 1800, job="B"),
        device(TEN, "idle", 600),
        device(TEN, "idle", 3600, device="GPU-1"),
    )
    work = layers(
        layer(TEN, "A", "L1", 500, instance_type="two"),
        layer(TEN, "A", "L2", 200, instance_type="two"),
        layer(TEN, "B", "L1", 1800, instance_type="two"),
    )
    return {"bill": bill, "seen": seen, "work": work, "hung": attachments((TEN, "vol-1", "i-1")), "quantum_digits": 4}
