"""The page of a day that was published: its head's ledger as one HTML file, `page/usage_date=<D>/report.html`."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import ADDRESSES, LAYERS, QUALITY, RECONCILIATION
from seedance.errors import StoreError
from tasks.core.reconciliation import findings
from tasks.core.snapshots import instant_text
from tasks.core.tree import AMOUNTS, cost_tree, negatives
from tasks.io import page, parquet
from tasks.io.lake import Commit, Lake

FOLDER = "page"
_READ = (ADDRESSES, LAYERS, RECONCILIATION)


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
        "negatives": {column: negatives(addresses, column) for column in AMOUNTS},
        "quality": _quality(lake, commit.day),
    }
    path = _path(commit.day)
    lake.store.replace(path, page.render(commit.day, cost_tree(addresses, layers), facts))
    lake.store.replace(_made_from(commit.day), commit.sha256.encode())
    return path


def pages_wanted(lake: Lake, heads: Mapping[str, Commit]) -> list[str]:
    """Days whose page is gone or of another commit than their head: a run was killed, or a stage was called by hand.

    Heads of a former release have no page of this one; they get it when they are computed again.
    """
    found = []
    for day, head in heads.items():
        handles = head.handles
        is_ours = all(spec.name in handles and handles[spec.name].version == spec.version for spec in _READ)
        is_made = lake.store.get(_made_from(day)) == head.sha256.encode() and lake.store.exists(_path(day))
        if is_ours and not is_made:
            found.append(day)
    return found


def _path(day: str) -> str:
    return f"{FOLDER}/usage_date={day}/report.html"


def _made_from(day: str) -> str:
    """The object that holds the digest of the commit that the page was made from."""
    return f"{FOLDER}/usage_date={day}/commit.sha256"


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
