"""A bill to rows in FOCUS 1.2 columns as exported from BigQuery: Parquet files in a folder of each invoice month.

Layout: `<export>/BILLING_PERIOD=YYYY-MM/rows-<n>.parquet`. No manifest says which files belong together: those that are there
do. What is appended to the billing export later comes in a file of its own. Credits and system labels are repeated records.
Knows no money beyond its type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.billing import CHARGES, FOCUS
from tests.fleet.charge import Charge, instant
from tests.fleet.export import NOT_1_2, by_period
from tests.fleet.model import Fleet

EXPORT = "focus"
INSTANT = pa.timestamp("us", tz="UTC")
PAIR = pa.struct([("key", pa.string()), ("value", pa.string())])


def export_schema(fleet: Fleet) -> pa.Schema:
    """Columns of the export in its order."""
    number = pa.decimal128(38, 12) if fleet.spec.decimals else pa.float64()
    found = []
    for column in CHARGES.columns:
        if column.source == FOCUS and not column.name.startswith(NOT_1_2):
            kind = INSTANT if pa.types.is_timestamp(column.type) else number
            plain = not (pa.types.is_timestamp(column.type) or pa.types.is_decimal(column.type))
            found.append(pa.field(column.name, pa.string() if plain else kind))
    credit = pa.struct([*((name, pa.string()) for name in ("id", "name", "full_name", "type")), ("amount", number)])
    found += [
        pa.field("x_CostType", pa.string()),
        pa.field("x_Credits", pa.list_(credit)),
        pa.field("x_ExportTime", INSTANT),
        pa.field("x_InvoiceMonth", pa.string()),
        pa.field("x_SystemLabels", pa.list_(PAIR)),
    ]
    return pa.schema(sorted(found, key=lambda f: (f.name.startswith("x_"), f.name)))


def export_files(fleet: Fleet, charges: Sequence[Charge], delivery: int = 1) -> list[tuple[str, bytes]]:
    """Path below the bucket and bytes of each file that is there after a delivery; earlier files stay as they are."""
    del delivery  # rows say themselves when they were exported
    files = []
    for (start, _), rows in by_period(charges).items():
        ordered = sorted(rows, key=lambda row: (row["x_ExportTime"], row.label, row.billed, row.effective))
        stamps = sorted({row["x_ExportTime"] for row in ordered})
        number = 0
        for stamp in stamps:
            mine = [row for row in ordered if row["x_ExportTime"] == stamp]
            size = -(-len(mine) // (fleet.spec.parts if stamp == stamps[0] else 1))
            for begin in range(0, len(mine), size):
                path = f"{EXPORT}/BILLING_PERIOD={start:%Y-%m}/rows-{number:012}.parquet"
                files.append((path, _parquet(fleet, mine[begin : begin + size])))
                number += 1
    return files


def _parquet(fleet: Fleet, charges: Sequence[Charge]) -> bytes:
    schema = export_schema(fleet)
    rows = [_row(charge) for charge in charges]
    arrays = [pa.array([_fit(row.get(f.name), f.type) for row in rows], f.type) for f in schema]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays, schema=schema), sink, compression="snappy")
    return bytes(sink.getvalue().to_pybytes())


def _row(charge: Charge) -> dict[str, Any]:
    return {
        **charge.columns,
        "BilledCost": charge.billed,
        "EffectiveCost": charge.effective,
        "ListCost": charge.listed,
        "ContractedCost": charge.listed,
        "ChargePeriodStart": instant(charge.start_ns),
        "ChargePeriodEnd": instant(charge.end_ns),
    }


def _fit(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_fit(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _fit(value.get(field.name), field.type) for field in kind}
    if pa.types.is_floating(kind):
        number = float(value)
        # A double of up to 15 digits reads back as the decimal it was written from.
        assert Decimal(repr(number)) == value, value
        return number
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
