"""A bill to the files of an Azure FOCUS 1.2 export: CSV parts in the folder of a run, and the run's manifest after them.

Layout: `<directory>/<export>/<YYYYMMDD-YYYYMMDD>/<run>/part_<i>_0001.csv` and `manifest.json` beside the parts; a blob's name
is its path from the container's root. Text starts with a byte-order mark, nulls are empty, costs have all their digits.
Knows no money beyond its text.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from schemas.billing import CHARGES, FOCUS
from tests.fleet.charge import Charge, instant
from tests.fleet.export import NOT_1_2, by_period, guid
from tests.fleet.model import DAY, HOUR, Fleet

DIRECTORY = "cost"
EXPORT = "seedance-focus"
LEFT_OUT = ("AvailabilityZone", "PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost")
LEFT_OUT_TOO = "PricingCurrencyListUnitPrice"
OWN = (
    "x_BillingExchangeRate",
    "x_PricingUnitDescription",
    "x_ResourceGroupName",
    "x_SkuDetails",
    "x_SkuMeterCategory",
    "x_SkuMeterSubcategory",
)


def columns() -> list[str]:
    """Header of the export."""
    focus = [c.name for c in CHARGES.columns if c.source == FOCUS and not c.name.startswith(NOT_1_2)]
    return sorted(name for name in focus if name not in (*LEFT_OUT, LEFT_OUT_TOO)) + list(OWN)


def export_files(fleet: Fleet, charges: Sequence[Charge], delivery: int = 1) -> list[tuple[str, bytes]]:
    """Path below the container and bytes of each file of one delivery; each run's manifest after its parts."""
    periods = by_period(charges)
    return [file for dates, rows in periods.items() for file in _run_files(fleet, rows, dates, delivery)]


def _run_files(
    fleet: Fleet, charges: Sequence[Charge], dates: tuple[datetime, datetime], delivery: int
) -> list[tuple[str, bytes]]:
    first, last = dates[0], dates[1] - timedelta(days=1)
    run = guid(fleet.spec, "run", delivery, f"{first:%Y-%m}")
    folder = f"{DIRECTORY}/{EXPORT}/{first:%Y%m%d}-{last:%Y%m%d}/{run}"
    size = -(-len(charges) // fleet.spec.parts)
    parts = [charges[start : start + size] for start in range(0, len(charges), size)]
    # Compression is a choice of the export's owner; here it goes with the number of parts.
    packed = fleet.spec.parts > 1
    files, blobs = [], []
    for number, rows in enumerate(parts):
        data = _text(rows)
        data = gzip.compress(data, mtime=0) if packed else data
        path = f"{folder}/part_{number}_0001.csv" + (".gz" if packed else "")
        files.append((path, data))
        blobs.append({"blobName": path, "byteCount": len(data), "dataRowCount": len(rows)})
    submitted = instant(fleet.spec.day_ns + DAY + delivery * 6 * HOUR)
    manifest = {
        "manifestVersion": "2024-04-01",
        "byteCount": sum(len(data) for _, data in files),
        "blobCount": len(files),
        "dataRowCount": len(charges),
        "exportConfig": {
            "exportName": EXPORT,
            "resourceId": f"{fleet.account}/providers/Microsoft.CostManagement/exports/{EXPORT}",
            "dataVersion": "1.2",
            "apiVersion": "2023-07-01-preview",
            "type": "FocusCost",
            "timeFrame": "MonthToDate",
            "granularity": "Daily",
        },
        "deliveryConfig": {
            "partitionData": True,
            "dataOverwriteBehavior": "CreateNewReport",
            "fileFormat": "Csv",
            "compressionMode": "Gzip" if packed else "None",
            "containerUri": "/subscriptions/00000000-0000-4000-8000-000000000011/containers/billing",
            "rootFolderPath": DIRECTORY,
        },
        "runInfo": {
            "executionType": "Scheduled",
            "submittedTime": f"{submitted:%Y-%m-%dT%H:%M:%S}.1234567Z",
            "runId": run,
            "startDate": f"{first:%Y-%m-%dT%H:%M:%S}",
            "endDate": f"{last:%Y-%m-%dT%H:%M:%S}",
        },
        "blobs": blobs,
    }
    return [*files, (f"{folder}/manifest.json", json.dumps(manifest, indent=1).encode())]


def _text(charges: Sequence[Charge]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, columns(), restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(_row(charge) for charge in charges)
    return b"\xef\xbb\xbf" + out.getvalue().encode()


def _row(charge: Charge) -> dict[str, str]:
    costs = {"BilledCost": charge.billed, "EffectiveCost": charge.effective, "ListCost": charge.listed}
    times = {"ChargePeriodStart": instant(charge.start_ns), "ChargePeriodEnd": instant(charge.end_ns)}
    row: dict[str, Any] = {**charge.columns, **costs, **times, "ContractedCost": charge.listed}
    return {name: _cell(value) for name, value in {**row, **charge.texts}.items() if value is not None}


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M:%SZ}"
    if isinstance(value, Decimal):
        return f"{value:f}"
    return json.dumps(value) if isinstance(value, dict) else str(value)
