"""Small tables for tests: rows as dicts, what is not said filled with a plain default, conformed to the contract."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa

from schemas.billing import CHARGES
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY, JOB_RUNS, LAYER_HOURLY
from seedance.schema import Table, conform

UTC = dt.UTC
DAY = dt.datetime(2026, 10, 1, tzinfo=UTC)
HOUR = 3_600_000_000_000
SECOND = 1_000_000_000


def ns(moment: dt.datetime) -> int:
    """Integer nanoseconds of an instant."""
    return int((moment - dt.datetime(1970, 1, 1, tzinfo=UTC)) / dt.timedelta(microseconds=1)) * 1000


def build(spec: Table, rows: list[dict[str, Any]], **defaults: Any) -> pa.Table:
    """A conformed table of the rows; a nullable column that no row names is null."""
    columns = []
    for column in spec.columns:
        values = [row.get(column.name, defaults.get(column.name)) for row in rows]
        columns.append(pa.array(values, column.type))
    return conform(pa.table(columns, names=list(spec.names)), spec, where="test")


def charge(
    key: str, billed: str, effective: str | None = None, *, start: dt.datetime = DAY, hours: float = 1, **facts: Any
) -> dict[str, Any]:
    """One charge row of one day; amounts as text."""
    end = start + dt.timedelta(hours=hours)
    amounts = {"BilledCost": Decimal(billed), "EffectiveCost": Decimal(effective if effective is not None else billed)}
    row = {
        "x_ChargeKey": key,
        "x_Occurrence": 0,
        "x_UsageDate": start.date(),
        "x_IsHomeDay": True,
        "x_Cloud": "aws",
        "x_Source": "test",
        "x_Class": "other",
        "BillingAccountId": "111122223333",
        "BillingCurrency": "USD",
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": start,
        "ChargePeriodEnd": end,
        "BillingPeriodStart": DAY,
        "BillingPeriodEnd": DAY.replace(month=11),
        "ServiceName": "Amazon Elastic Compute Cloud",
        **amounts,
        "x_DayBilledCost": amounts["BilledCost"],
        "x_DayEffectiveCost": amounts["EffectiveCost"],
        "x_PromotionalCost": amounts["EffectiveCost"] if facts.get("ChargeCategory") == "Credit" else Decimal(0),
    }
    row |= facts
    return {"x_DayPromotionalCost": row["x_PromotionalCost"]} | row


def charges(*rows: dict[str, Any]) -> pa.Table:
    """core_billing__charges."""
    return build(CHARGES, list(rows))


def device(
    hour: dt.datetime,
    category: str,
    seconds: float,
    *,
    device: str = "GPU-0",
    job: str | None = None,
    machine: str = "i-1",
    **facts: Any,
) -> dict[str, Any]:
    """One row of core_usage__device_hourly."""
    row = {
        "hour_utc": hour,
        "cloud": "aws",
        "instance_id": machine,
        "node": "n-" + machine,
        "device_uuid": device,
        "job_id": job,
        "attempt": None if job is None else 0,
        "rank": None if job is None else 0,
        "category": category,
        "ns": round(seconds * SECOND),
        "evidence": "measured",
    }
    return row | facts


SCALE_SET = "/subscriptions/s/resourceGroups/ml/providers/Microsoft.Compute/virtualMachineScaleSets/gpu"
"""A scale set of Azure as half of its bill spells it."""


def member(n: int, **facts: Any) -> dict[str, Any]:
    """What the bill says of one machine of SCALE_SET; even ones stand in lower case, as the rest of such a bill does."""
    low = SCALE_SET.lower()
    machine = {"x_MachineId": f"{low}/virtualmachines/{n}", "ResourceId": SCALE_SET if n % 2 else low}
    return machine | {"x_Cloud": "azure", "BillingCurrency": "EUR", "ServiceName": "Virtual Machine Scale Sets"} | facts


def devices(*rows: dict[str, Any]) -> pa.Table:
    """core_usage__device_hourly."""
    return build(DEVICE_HOURLY, list(rows))


def layer(hour: dt.datetime, job: str, name: str, seconds: float, **facts: Any) -> dict[str, Any]:
    """One row of core_usage__layer_hourly."""
    row = {
        "hour_utc": hour,
        "job_id": job,
        "attempt": 0,
        "layer": name,
        "pass": "fwd",
        "op": "matmul",
        "phase": "train",
        "batch_size": 8,
        "dtype": "bf16",
        "layer_index": 0,
        "category": "work",
        "calls": 1,
        "flops": 10**12,
        "hw_flops": 10**12,
        "bytes_ideal": 10**9,
        "uncounted_calls": 0,
        "ns": round(seconds * SECOND),
        "uncounted_ns": 0,
        "bound_ppm": 0,
        "evidence": "measured",
    }
    return row | facts


def layers(*rows: dict[str, Any]) -> pa.Table:
    """core_usage__layer_hourly."""
    return build(LAYER_HOURLY, list(rows))


def attachments(*rows: tuple[dt.datetime, str, str]) -> pa.Table:
    """core_usage__attachments_hourly of (hour, object, instance)."""
    return build(ATTACHMENTS, [{"hour_utc": h, "object_id": o, "cloud": "aws", "instance_id": m} for h, o, m in rows])


def jobs(*names: str) -> pa.Table:
    """core_jobs__runs of jobs that nothing more is known of."""
    rows = [
        {
            "job_id": n,
            "attempt": 0,
            "team": f"team-{n}",
            "first_seen_utc": DAY,
            "last_seen_utc": DAY,
            "ranks_seen": 1,
            "units": 10,
            "samples": 80,
            "tokens_in": 0,
            "tokens_out": 0,
            "requests": 0,
            "wall_ns": 0,
            "rank_units": 10,
        }
        for n in names
    ]
    return build(JOB_RUNS, rows)
