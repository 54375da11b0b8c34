"""What a night found beside what is true of a fleet: money by charge and address, layers within their stated bounds."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.fleet import Truth, charge_label

Amounts = tuple[int | None, ...]
COLUMNS = ("BilledCost", "EffectiveCost", "ListCost", "x_EstimatedCost", "x_PromotionalCost")
LEDGERS = ("BilledCost", "EffectiveCost", "x_EstimatedCost", "x_PromotionalCost")
"""Amounts that have layers."""


def head_table(lake: Path, day: str, table: str) -> list[dict[str, Any]]:
    """Rows of a table of a day's head commit; the hour as ns."""
    head = max((lake / "days" / day).glob("*.json"), key=lambda p: int(p.stem))
    handle = json.loads(head.read_text())["handles"][table]
    rows: list[dict[str, Any]] = []
    for part in handle["parts"]:
        found = pq.read_table(lake / part["path"])
        for place, field in enumerate(found.schema):
            if field.name == "x_HourUtc":
                found = found.set_column(place, field.name, found.column(place).cast("int64"))
        rows += found.to_pylist()
    return rows


def units(value: Decimal | None) -> int | None:
    """Whole units of 1e-12."""
    return None if value is None else int(value.scaleb(12))


def found_addresses(lake: Path, day: str) -> dict[tuple[Any, ...], list[Amounts]]:
    """Amounts by (cloud, charge, hour, machine, device, job, attempt, rank, category); charges of one label together."""
    labels = {
        (r["x_ChargeKey"], r["x_Occurrence"]): charge_label(r) for r in head_table(lake, day, "core_billing__charges")
    }
    found: dict[tuple[Any, ...], list[Amounts]] = defaultdict(list)
    for row in head_table(lake, day, "core_cost__addresses"):
        label = labels.get((row["x_ChargeKey"], row["x_Occurrence"]), row["x_ChargeKey"])
        place = tuple(
            row[c] for c in ("x_HourUtc", "x_MachineId", "x_DeviceId", "x_JobId", "x_Attempt", "x_Rank", "x_Category")
        )
        found[(row["x_Cloud"], label, *place)].append(tuple(units(row[c]) for c in COLUMNS))
    return {key: sorted(amounts, key=str) for key, amounts in found.items()}


def true_addresses(*truths: Truth) -> dict[tuple[Any, ...], list[Amounts]]:
    """The same of the truth: of one fleet, or of several whose bills and telemetry lie side by side."""
    found: dict[tuple[Any, ...], list[Amounts]] = defaultdict(list)
    for truth in truths:
        for a in truth.addresses:
            amounts = a.billed, a.effective, a.listed, a.estimated, a.promotional
            found[(truth.cloud, a.charge, a.hour_ns, a.machine, *a.place)].append(amounts)
    return {key: sorted(amounts, key=str) for key, amounts in found.items()}


def layer_errors(lake: Path, day: str, *truths: Truth) -> list[str]:
    """Layers whose found money lies further from the truth than the row's bound; none when all is well."""
    key = ("x_Cloud", "x_HourUtc", "x_JobId", "x_Attempt", "x_InstanceType", "PricingCategory")
    layer = ("x_Layer", "x_Pass", "x_Op", "x_Phase", "x_BatchSize", "x_Dtype")
    found: dict[tuple[Any, ...], dict[tuple[Any, ...], list[int]]] = defaultdict(dict)
    for row in head_table(lake, day, "core_cost__layers"):
        pool = found[tuple(row[k] for k in key)]
        entry = pool.setdefault(tuple(row[k] for k in layer), [0] * (len(LEDGERS) + 1))
        for i, column in enumerate(LEDGERS):
            entry[i] += units(row[column]) or 0
        entry[-1] = max(entry[-1], row["x_BoundPpm"])
    wanted: dict[tuple[Any, ...], dict[tuple[Any, ...], list[int]]] = defaultdict(dict)
    for truth in truths:
        for m in truth.layers:
            pool = wanted[(truth.cloud, m.hour_ns, m.job, m.attempt, m.instance_type, m.pricing)]
            entry = pool.setdefault(tuple(m.layer), [0] * len(LEDGERS))
            for i, value in enumerate((m.billed, m.effective, m.estimated, m.promotional)):
                entry[i] += value or 0
    return _compare(found, wanted)


def _compare(found: dict[tuple[Any, ...], Any], wanted: dict[tuple[Any, ...], Any]) -> list[str]:
    problems = [f"pool {p} on one side only" for p in set(found) ^ set(wanted)]
    for pool in set(found) & set(wanted):
        for i, ledger in enumerate(LEDGERS):
            total, true_total = (sum(v[i] for v in side[pool].values()) for side in (found, wanted))
            if total != true_total:
                problems.append(f"pool {pool}: {ledger} {total}, true {true_total}")
            for layer in {*found[pool], *wanted[pool]}:
                nothing = [0] * len(LEDGERS)
                have, true = found[pool].get(layer, [*nothing, 1_000_000]), wanted[pool].get(layer, nothing)
                slack = -(-abs(total) * have[-1] // 1_000_000) + len(found[pool])
                if abs(have[i] - true[i]) > slack:
                    problems.append(
                        f"{pool} {layer}: {ledger} {have[i]}, true {true[i]}, bound {have[-1]} ppm of {total}"
                    )
    return problems
