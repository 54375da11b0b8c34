"""FOCUS rows and deliveries for tests, with invented accounts and resources."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.billing import CHARGES
from tasks import bill
from tasks.io.lake import Lake
from tasks.settings import BillSource, Settings

ROW = {
    "BilledCost": "1.624",
    "EffectiveCost": "1.624",
    "ListCost": "1.624",
    "BillingAccountId": "111122223333",
    "SubAccountId": "444455556666",
    "BillingCurrency": "USD",
    "BillingPeriodStart": "2026-11-01T00:00:00Z",
    "BillingPeriodEnd": "2026-12-01T00:00:00Z",
    "ChargePeriodStart": "2026-11-10T10:00:00Z",
    "ChargePeriodEnd": "2026-11-10T11:00:00Z",
    "ChargeCategory": "Usage",
    "ChargeClass": "",
    "ChargeFrequency": "Usage-Based",
    "ChargeDescription": "$1.624 per On Demand Linux g5.4xlarge Instance Hour",
    "ConsumedQuantity": "1",
    "ConsumedUnit": "Hours",
    "PricingCategory": "Standard",
    "PricingQuantity": "1",
    "PricingUnit": "Hours",
    "ProviderName": "AWS",
    "PublisherName": "Amazon Web Services, Inc.",
    "ServiceCategory": "Compute",
    "ServiceName": "Amazon Elastic Compute Cloud",
    "ResourceId": "i-0aaaabbbbccccdddd",
    "SkuId": "SKU1",
    "Tags": '{"team": "vision"}',
}
"""One hour of a GPU instance."""


def row(**changes: str) -> dict[str, str]:
    """ROW with other values; new names become new columns."""
    return {**ROW, **changes}


def csv_bytes(rows: Sequence[Mapping[str, str]], *, packed: bool = False) -> bytes:
    """A CSV file, every field quoted; columns of the first row."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else list(ROW), quoting=csv.QUOTE_ALL, restval="")
    writer.writeheader()
    writer.writerows(rows)
    data = out.getvalue().encode()
    return gzip.compress(data, mtime=0) if packed else data


def parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A Parquet file of the values as they are."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([dict(r) for r in rows]), sink)
    return bytes(sink.getvalue().to_pybytes())


def not_utf8(column: str) -> bytes:
    """A Parquet file of three rows whose second value of one text column is no UTF-8."""
    texts = pa.array([b"1", b"\xff\xfe", b"1"]).view(pa.string())
    table = pa.Table.from_pylist([row(**{column: "1"})] * 3)
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(table.column_names.index(column), column, texts), sink)
    return bytes(sink.getvalue().to_pybytes())


def text_table(rows: Sequence[Mapping[str, str]]) -> pa.Table:
    """Rows as a table of text, as a CSV reader gives them."""
    names = list(rows[0])
    return pa.table({n: pa.array([r.get(n) or None for r in rows], pa.string()) for n in names})


def export(
    root: Path,
    rows: Sequence[Mapping[str, str]],
    *,
    period: str = "2026-11",
    execution: str | None = None,
    parts: int = 1,
    name: str = "gpu",
    missing: Sequence[int] = (),
    manifest: bool = True,
) -> Path:
    """One delivery of AWS Data Exports below `root`; returns its manifest's path.

    Args:
        root: folder of the export.
        rows: rows, dealt out over the parts.
        period: billing period of the folder.
        execution: `<timestamp>-<executionId>` folder; None writes straight into the period's folder.
        parts: number of data files.
        name: name of the export.
        missing: parts that the manifest names and that are not written.
        manifest: False leaves the manifest out.
    """
    folder = root / "data" / f"BILLING_PERIOD={period}" / (execution or "")
    folder.mkdir(parents=True, exist_ok=True)
    uris = []
    for i in range(parts):
        file = f"{name}-{i:05d}.csv.gz"
        if i not in missing:
            (folder / file).write_bytes(csv_bytes(rows[i::parts], packed=True))
        below = f"{execution}/{file}" if execution else file
        uris.append(f"s3://bucket/prefix/{name}/data/BILLING_PERIOD={period}/{below}")
    path = root / "metadata" / f"BILLING_PERIOD={period}" / f"{name}-Manifest.json"
    if manifest:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"executionId": execution or "e-1", "dataFiles": uris}))
    return path


def settings(*urls: Path | str) -> Settings:
    """Settings with sources s0, s1, …"""
    return Settings(bills=tuple(BillSource(name=f"s{i}", url=str(url)) for i, url in enumerate(urls)))


def write(path: Path, data: bytes, second: int = 0) -> Path:
    """A file with a time of modification, in seconds after an arbitrary instant."""
    path.write_bytes(data)
    os.utime(path, (1_790_000_000 + second, 1_790_000_000 + second))
    return path


def stored(lake: Lake, plan: Settings) -> pa.Table:
    """All charges in force, by usage day."""
    tables = [lake.read(bill.charges_of(lake, plan, day)[0], CHARGES) for day in bill.days_touched(lake, plan)]
    return pa.concat_tables([CHARGES.empty(), *tables])


def billed(lake: Lake, plan: Settings) -> Decimal:
    """Σ of BilledCost in force."""
    return sum(stored(lake, plan)["x_DayBilledCost"].to_pylist(), Decimal(0))


def objects(lake: Lake) -> dict[str, bytes]:
    """Everything in a lake."""
    return {e.path: lake.store.read(e.path) for e in lake.store.list()}


def statuses(entries: list[dict[str, Any]]) -> list[str]:
    """Statuses of what `ingest` returned."""
    return [e["status"] for e in entries]
