"""Exports of Azure and Google as their storage holds them, with invented accounts and resources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.bills import ROW, csv_bytes

SUBSCRIPTION = "/subscriptions/5f0e5c1e-0000-4000-8000-000000000001"
GROUP = f"{SUBSCRIPTION}/resourceGroups/Train/providers"
SET = f"{GROUP}/Microsoft.Compute/virtualMachineScaleSets/Gpu"
GCE = "//compute.googleapis.com/projects/p/zones/us-central1-a/instances/1234567890123456789"
LABEL = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
AMOUNT = pa.decimal128(38, 9)

AZURE = {
    **ROW,
    "BillingAccountId": "/providers/Microsoft.Billing/billingAccounts/1",
    "SubAccountId": SUBSCRIPTION,
    "ChargePeriodStart": "2026-11-10T00:00:00Z",
    "ChargePeriodEnd": "2026-11-11T00:00:00Z",
    "ChargeDescription": "NC24ads A100 v4",
    "ConsumedQuantity": "24",
    "PricingQuantity": "24",
    "ProviderName": "Microsoft",
    "PublisherName": "Microsoft",
    "ServiceName": "Virtual Machines",
    "ResourceId": SET,
    "SkuPriceDetails": "",
    "x_SkuDetails": '{"VMName": "gpu_7", "ServiceType": "Standard_NC24ads_A100_v4"}',
}
"""A day of one machine of a scale set."""


def azure(**changes: str) -> dict[str, str]:
    """AZURE with other values."""
    return {**AZURE, **changes}


def azure_run(
    root: Path,
    rows: Sequence[Mapping[str, str]],
    *,
    run: str,
    submitted: str,
    span: str = "20261101-20261130",
    parts: int = 1,
    packed: bool = True,
    mark: bool = False,
    manifest: Mapping[str, Any] | None = None,
    without: Sequence[int] = (),
) -> Path:
    """One run of an Azure export below the container `root`; returns its folder.

    Args:
        root: the container.
        rows: rows, dealt out over the parts.
        run: name of the run's folder.
        submitted: submittedTime of the run.
        span: folder of the days.
        parts: number of files.
        packed: gzipped.
        mark: a byte-order mark first, unless packed.
        manifest: changes to the manifest by dotted path; the value None leaves the whole manifest out.
        without: parts that are named and not there.
    """
    folder = root / "focus" / span / run
    folder.mkdir(parents=True)
    blobs = []
    for i in range(parts):
        some = rows[i::parts]
        name = f"part_{i}_0001.csv{'.gz' if packed else ''}"
        data = (b"\xef\xbb\xbf" if mark and not packed else b"") + csv_bytes(some or rows[:0], packed=packed)
        if i not in without:
            (folder / name).write_bytes(data)
        blobs.append({"blobName": f"focus/{span}/{run}/{name}", "byteCount": len(data), "dataRowCount": len(some)})
    body: dict[str, Any] = {
        "manifestVersion": "2024-04-01",
        "byteCount": sum(b["byteCount"] for b in blobs),
        "blobCount": len(blobs),
        "dataRowCount": len(rows),
        "exportConfig": {"exportName": "focus", "type": "FocusCost", "dataVersion": "1.2", "timeFrame": "MonthToDate"},
        "deliveryConfig": {"partitionData": True, "containerUri": "account/container", "rootFolderPath": ""},
        "runInfo": {
            "executionType": "Scheduled",
            "submittedTime": submitted,
            "runId": run,
            "startDate": f"{span[:4]}-{span[4:6]}-{span[6:8]}T00:00:00",
            "endDate": f"{span[9:13]}-{span[13:15]}-{span[15:17]}T00:00:00",
        },
        "blobs": blobs,
    }
    for path, value in (manifest or {}).items():
        *above, last = path.split(".")
        inner = body
        for name in above:
            inner = inner[name]
        inner[last] = value
    if manifest is None or manifest.get("blobs", ()) is not None:
        (folder / "manifest.json").write_text(json.dumps(body))
    return folder


def gcp_row(meter: str, *, amount: str = "1", cost: str = "1", **changes: Any) -> dict[str, Any]:
    """An hour of one meter of an a3-highgpu-8g machine, in the types of a BigQuery export.

    Args:
        meter: core, ram, gpu or ssd.
        amount: machine-hours.
        cost: BilledCost and EffectiveCost.
        changes: other values.
    """
    text, unit, per = {
        "core": ("A3 Instance Core running in Americas", "hour", 208),
        "ram": ("A3 Instance Ram running in Americas", "gibibyte hour", 1872),
        "gpu": ("Nvidia H100 80GB GPU attached to VMs running in Americas", "hour", 8),
        "ssd": ("SSD backed Local Storage", "gibibyte month", 6000),
    }[meter]
    values: dict[str, Any] = {
        **{name: value or None for name, value in ROW.items() if name != "Tags"},
        "ProviderName": "Google Cloud",
        "PublisherName": "Google",
        "ServiceName": "Compute Engine",
        "BillingAccountId": "01A2B3-C4D5E6-F70819",
        "SubAccountId": "vision",
        "BillingPeriodStart": "2026-11-01T07:00:00Z",
        "BillingPeriodEnd": "2026-12-01T08:00:00Z",
        "ChargeDescription": text,
        "SkuMeter": text,
        "SkuId": f"SKU-{meter}",
        "ResourceId": GCE,
        "PricingQuantity": Decimal(amount) * per,
        "PricingUnit": unit,
        "ConsumedQuantity": Decimal(amount) * per * 3600,
        "ConsumedUnit": "seconds" if meter in ("core", "gpu") else "byte-seconds",
        "BilledCost": Decimal(cost),
        "EffectiveCost": Decimal(cost),
        "ListCost": Decimal(cost),
        "x_InvoiceMonth": "202611",
        "x_CostType": "regular",
        "x_ExportTime": "2026-11-11T01:02:03Z",
        "x_Credits": [],
        "x_SystemLabels": [
            {"key": "compute.googleapis.com/machine_spec", "value": "a3-highgpu-8g"},
            {"key": "compute.googleapis.com/cores", "value": "208"},
        ],
        "Tags": [{"key": "team", "value": "vision"}],
    }
    return {**values, **changes}


def gcp_bytes(rows: Sequence[Mapping[str, Any]], *, doubles: bool = False) -> bytes:
    """A Parquet file with the types of BigQuery: nested records, NUMERIC amounts or doubles."""
    money = pa.float64() if doubles else AMOUNT
    credit = pa.struct([(n, pa.string()) for n in ("id", "name", "full_name", "type")] + [("amount", money)])
    types: dict[str, pa.DataType] = {"x_Credits": pa.list_(credit), "x_SystemLabels": LABEL, "Tags": LABEL}
    amounts = ("BilledCost", "EffectiveCost", "ListCost", "PricingQuantity", "ConsumedQuantity")
    columns = {}
    for name in dict.fromkeys(n for r in rows for n in r):
        kind = money if name in amounts else types.get(name, pa.string())
        values = [r.get(name) for r in rows]
        if doubles and name in amounts:
            values = [None if v is None else float(v) for v in values]
        if doubles and name == "x_Credits":
            values = [[{**c, "amount": float(c["amount"])} for c in v] for v in values]
        columns[name] = pa.array(values, kind)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def gcp_set(root: Path, name: str, rows: Sequence[Mapping[str, Any]], *, period: str = "2026-11") -> Path:
    """One more file of a period's set."""
    folder = root / f"BILLING_PERIOD={period}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(gcp_bytes(rows))
    return path


def credit(kind: str, amount: str) -> dict[str, Any]:
    """A credit nested in a row."""
    return {"id": f"{kind}-1", "name": kind.title(), "full_name": None, "type": kind, "amount": Decimal(amount)}
