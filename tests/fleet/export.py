"""A bill to the files of an AWS FOCUS 1.2 Data Export: Parquet parts in a folder of their own, and the manifest after them.

Layout: `<prefix>/<export>/data/BILLING_PERIOD=YYYY-MM/<timestamp>-<executionId>/<export>-00001.snappy.parquet` and
`<prefix>/<export>/metadata/BILLING_PERIOD=YYYY-MM/<export>-Manifest.json`. Costs are doubles as the provider delivers them,
instants have no zone, tags and details are maps. Knows no money beyond its type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.billing import CHARGES, FOCUS
from tests.fleet.charge import Charge, instant
from tests.fleet.model import DAY, HOUR, Fleet
from tests.fleet.roster import token

PREFIX = "focus"
EXPORT = "seedance-focus"
BUCKET = "example-billing"
FOCUS_1_2 = 57
"""Columns of FOCUS 1.2; the contract also has ours and those that 1.3 adds."""
NOT_1_2 = ("x_", "Allocated", "HostProviderName", "ServiceProviderName")
MAPS = ("SkuPriceDetails", "Tags", "x_CostCategories")
PLAIN = ("x_Operation", "x_ServiceCode", "x_UsageType")
TEXT_MAP = pa.map_(pa.string(), pa.string())
INSTANT = pa.timestamp("ms")


def export_schema(fleet: Fleet) -> pa.Schema:
    """Columns of the export in its order."""
    number = pa.decimal128(38, 12) if fleet.spec.decimals else pa.float64()
    found = []
    for column in CHARGES.columns:
        if column.source != FOCUS or column.name.startswith(NOT_1_2):
            continue
        kind = (
            TEXT_MAP
            if column.name in MAPS
            else INSTANT
            if pa.types.is_timestamp(column.type)
            else (number if pa.types.is_decimal(column.type) else pa.string())
        )
        found.append(pa.field(column.name, kind))
    assert len(found) == FOCUS_1_2, len(found)
    found.append(pa.field("x_CostCategories", TEXT_MAP))
    found.append(pa.field("x_Discounts", pa.map_(pa.string(), number)))
    found += [pa.field(name, pa.string()) for name in PLAIN]
    return pa.schema(sorted(found, key=lambda f: (f.name.startswith("x_"), f.name)))


def table_of(fleet: Fleet, charges: Sequence[Charge]) -> pa.Table:
    """Rows of the export."""
    schema = export_schema(fleet)
    rows = [_row(charge) for charge in charges]
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        columns.append(pa.array([_fit(v, field.type) for v in values], field.type))
    return pa.table(columns, schema=schema)


def _row(charge: Charge) -> dict[str, Any]:
    listed = {"ContractedCost": charge.listed, "ListCost": charge.listed}
    return {
        **charge.columns,
        **listed,
        "BilledCost": charge.billed,
        "EffectiveCost": charge.effective,
        "ChargePeriodStart": instant(charge.start_ns),
        "ChargePeriodEnd": instant(charge.end_ns),
        "PricingCurrencyEffectiveCost": charge.effective,
        "x_CostCategories": {"environment": "test"},
        "x_Discounts": {},
    }


def _fit(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_map(kind):
        return [(k, _fit(v, kind.item_type)) for k, v in sorted(value.items())]
    if pa.types.is_floating(kind):
        number = float(value)
        # A double of up to 15 digits reads back as the decimal it was written from.
        assert Decimal(repr(number)) == value, value
        return number
    if pa.types.is_timestamp(kind):
        return value.replace(tzinfo=None)
    return value


def by_period(charges: Sequence[Charge]) -> dict[tuple[datetime, datetime], list[Charge]]:
    """Rows of each billing period, the earliest first."""
    found: dict[tuple[datetime, datetime], list[Charge]] = {}
    for row in charges:
        found.setdefault((row["BillingPeriodStart"], row["BillingPeriodEnd"]), []).append(row)
    return dict(sorted(found.items()))


def export_files(fleet: Fleet, charges: Sequence[Charge], delivery: int = 1) -> list[tuple[str, bytes]]:
    """Path below the bucket and bytes of each file of one delivery; each billing period's manifest after its files."""
    periods = by_period(charges)
    return [file for dates, rows in periods.items() for file in _period_files(fleet, rows, dates, delivery)]


def guid(*what: object) -> str:
    """A stable identifier in the form of a GUID."""
    digits = token(*what, digits=32)  # type: ignore[arg-type]
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _period_files(
    fleet: Fleet, charges: Sequence[Charge], dates: tuple[datetime, datetime], delivery: int
) -> list[tuple[str, bytes]]:
    period = f"{dates[0]:%Y-%m}"
    execution = guid(fleet.spec, "execution", delivery, *([] if period == fleet.spec.day[:7] else [period]))
    stamp = _zulu(fleet.spec.day_ns + DAY + delivery * 6 * HOUR)
    folder = f"{PREFIX}/{EXPORT}/data/BILLING_PERIOD={period}/{stamp.replace(':', '-')}-{execution}"
    table = table_of(fleet, charges)
    size = -(-len(table) // fleet.spec.parts)
    files = []
    for part in range(fleet.spec.parts):
        sink = pa.BufferOutputStream()
        pq.write_table(table.slice(part * size, size), sink, compression="snappy")
        files.append((f"{folder}/{EXPORT}-{part + 1:05}.snappy.parquet", sink.getvalue().to_pybytes()))
    serial = token(fleet.spec, "export", digits=12)
    manifest = {
        "executionId": execution,
        "exportArn": f"arn:aws:bcm-data-exports:us-east-1:{fleet.account}:export/{EXPORT}-{serial}",
        "columns": [{"name": f.name, "type": _type_name(f.type)} for f in table.schema],
        "dataFiles": [f"s3://{BUCKET}/{path}" for path, _ in files],
        "additionalOutputFiles": [],
        "period": dict(zip(("start", "end"), (f"{at:%Y-%m-%dT%H:%M:%S}.000Z" for at in dates), strict=True)),
        "timestamp": stamp,
    }
    name = f"{PREFIX}/{EXPORT}/metadata/BILLING_PERIOD={period}/{EXPORT}-Manifest.json"
    return [*files, (name, json.dumps(manifest, indent=1).encode())]


def _zulu(ns: int) -> str:
    return instant(ns).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _type_name(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"map<string,{_type_name(kind.item_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp"
    return "decimal(38,12)" if pa.types.is_decimal(kind) else "double" if pa.types.is_floating(kind) else "string"
