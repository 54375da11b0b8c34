"""The page of a day that was published: its head's ledger as one HTML file, `page/usage_date=<D>/report.html`."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import ADDRESSES, LAYERS, QUALITY, RECONCILIATION
from seedance.errors import StoreError
from tasks.core.snapshots import instant_text
from tasks.core.tree import cost_tree
from tasks.io import page, parquet
from tasks.io.lake import Commit, Lake

FOLDER = "page"


def publish_page(lake: Lake, commit: Commit, billed: Mapping[str, Mapping[str, Decimal]]) -> str:
    """Write the page of a committed day; its path in the lake.

    Args:
        lake: where the day is.
        commit: head of the day.
        billed: both ledgers of the charges in force on the day, by currency, summed from the bill's own rows.
    """
    handles = commit.handles
    addresses, layers = lake.read(handles[ADDRESSES.name], ADDRESSES), lake.read(handles[LAYERS.name], LAYERS)
    hourly = lake.read(handles[RECONCILIATION.name], RECONCILIATION)
    facts = {
        "billed": billed,
        "revision": commit.n,
        "hours": hours(hourly),
        "errors": commit.body["facts"]["errors"],
        "findings": findings(hourly),
        "quality": _quality(lake, commit.day),
    }
    path = f"{FOLDER}/usage_date={commit.day}/report.html"
    lake.store.replace(path, page.render(commit.day, cost_tree(addresses, layers), facts))
    return path


def hours(hourly: pa.Table) -> list[dict[str, Any]]:
    """Estimate and EffectiveCost by hour, cloud and currency, of machines and volumes that have either; in order."""
    rows = hourly.filter(pc.or_(hourly["x_EstimatedCost"].is_valid(), hourly["EffectiveCost"].is_valid()))
    found = rows.group_by(["x_HourUtc", "x_Cloud", "BillingCurrency"], use_threads=False).aggregate(
        [("x_EstimatedCost", "sum"), ("EffectiveCost", "sum")]
    )
    instants = found["x_HourUtc"].cast(pa.int64()).to_pylist()
    told = [
        {
            "hour": instant_text(at),
            "cloud": row["x_Cloud"],
            "currency": row["BillingCurrency"] or "",
            "estimated": row["x_EstimatedCost_sum"],
            "effective": row["EffectiveCost_sum"],
        }
        for at, row in zip(instants, found.to_pylist(), strict=True)
    ]
    return sorted(told, key=lambda r: (r["hour"], r["cloud"], r["currency"]))


def findings(hourly: pa.Table) -> list[dict[str, Any]]:
    """Findings by kind and cloud: how many resources, how many resource-hours; in order."""
    gathered: dict[tuple[str, str], list[str]] = {}
    columns = (hourly[c].to_pylist() for c in ("x_Finding", "x_Cloud", "x_ResourceId"))
    for told, cloud, name in zip(*columns, strict=True):
        for finding in (told or "").split(", ") if told else ():
            gathered.setdefault((finding, cloud), []).append(name)
    return [
        {"finding": f, "cloud": c, "resources": len(set(names)), "hours": len(names)}
        for (f, c), names in sorted(gathered.items())
    ]


def _quality(lake: Lake, day: str) -> list[dict[str, Any]]:
    """The checks on record for a day; times and run ids are left out, so that the page depends on the day alone."""
    path = f"report/{QUALITY.name}/usage_date={day}/data.parquet"
    try:
        table = parquet.from_bytes(lake.store.read(path), QUALITY, where=path)
    except StoreError:
        return []
    return [
        {"stage": r["x_Stage"], "check": r["x_Check"], "outcome": r["x_Outcome"], "detail": r["x_Detail"]}
        for r in table.to_pylist()
    ]
