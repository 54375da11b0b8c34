"""A fleet's history through ingestion, calibration and the ledger, night by night, without gates, commits or Prefect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.ledger import ADDRESSES, RECONCILIATION
from tasks import bill, calibrate, collect, reconcile, reduce
from tasks.core import money
from tasks.io.lake import Lake
from tasks.plan import DayPlan, plan_one
from tasks.settings import BillSource, Settings
from tests.fleet.history import History

GPU_TARGET, STORAGE_TARGET = 0.005, 0.008
"""Most that estimates after alpha may lie from later bills, of GPU instances and of storage."""


def settings_for(history: History, drop: Path, lake: Path) -> Settings:
    """Settings of a lake over a drop that nights of the history are laid over."""
    cloud = history.spec.cloud
    return Settings(
        lake=str(lake),
        telemetry=str(drop / "telemetry"),
        bills=(BillSource(name=cloud, url=str(drop / "bills" / cloud)),),
        workers=1,
        buckets=1,
    )


def take_in(settings: Settings) -> Lake:
    """The lake with all bills and shards of the drop in it."""
    lake = Lake.open(settings.lake, buckets=settings.buckets)
    if Path(settings.bills[0].url).is_dir():  # a provider of daily rows delivers nothing in the first night
        refused = [entry for entry in bill.ingest(lake, settings) if entry["status"] == "refused"]
        assert not refused, refused
    collect.admit(lake, settings)
    return lake


def learn(lake: Lake, settings: Settings, day: str) -> tuple[DayPlan, Mapping[str, Any]]:
    """The plan of a day and what the days before it teach."""
    (planned,) = plan_one(settings, day)
    return planned, calibrate.calibrate_day(lake, settings, planned)[0].facts


@dataclass(frozen=True)
class Estimated:
    """Estimates of one night that have a price, by (resource, hour), in whole units.

    Args:
        listed: by price.
        after: after alpha.
        addressed: what the addresses of each add up to.
    """

    listed: Mapping[tuple[str, int], int]
    after: Mapping[tuple[str, int], int]
    addressed: Mapping[tuple[str, int], int]


def estimate(lake: Lake, settings: Settings, day: str) -> Estimated:
    """The provisional hours of a day as the ledger has them, witness and laws included."""
    planned, learnt = learn(lake, settings, day)
    accepted = collect.collect_day(lake, settings, day)[0].facts["accepted"]
    usage = reduce.reduce_day(lake, settings, day, accepted)[0].handles
    handles = reconcile.reconcile_day(lake, settings, planned, usage, learnt)[0].handles
    rows = lake.read(handles[RECONCILIATION.name], RECONCILIATION).to_pylist()
    open_rows = [row for row in rows if row["x_State"] == "provisional" and row["x_ListEstimate"] is not None]
    addressed: dict[tuple[str, int], int] = {}
    for row in lake.read(handles[ADDRESSES.name], ADDRESSES).to_pylist():
        if row["x_State"] == "provisional":
            key = (row["ResourceId"], row["x_HourUtc"].hour)
            addressed[key] = addressed.get(key, 0) + money.units(row["x_EstimatedCost"])
    sides = (
        {(row["x_ResourceId"], row["x_HourUtc"].hour): money.units(row[name]) for row in open_rows}
        for name in ("x_ListEstimate", "x_EstimatedCost")
    )
    return Estimated(*sides, addressed)


def biases(history: History, nights: Mapping[int, Estimated]) -> dict[str, tuple[float, float, int]]:
    """By family: how far estimates by price and after alpha lie from what was billed later, as ratios, and of how many hours."""
    costs = history.costs
    sums: dict[str, list[int]] = {}
    for night, found in nights.items():
        for (resource, hour), listed in found.listed.items():
            total = sums.setdefault(history.family[resource], [0, 0, 0, 0])
            billed = costs[resource, history.days[night], hour]
            for i, amount in enumerate((listed, found.after[resource, hour], billed, 1)):
                total[i] += amount
    return {f: (listed / billed - 1, after / billed - 1, n) for f, (listed, after, billed, n) in sorted(sums.items())}


def targets(history: History, families: Iterable[str]) -> dict[str, float]:
    """Target of each family's bias after alpha."""
    machines = {m.instance_type for m in history.fleets[0].machines}
    return {family: GPU_TARGET if family in machines else STORAGE_TARGET for family in families}
