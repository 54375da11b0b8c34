"""What BI reads: group-bys of the ledger. Every report is complete, so that any filter of it is a partition of the total.

Addresses, layer money, spans and usage in; report tables out. Ratios are computed last, from summed integers and decimals.
Knows no disk, no clock.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import JOB_DAILY, LAYER_DAILY, RESOURCE_DAILY
from seedance.schema import Table
from tasks.core.money import difference
from tasks.core.second import LAYER, POOL
from tasks.core.spans import HOUR_NS
from tasks.core.spelling import one_spelling

MONEY = ("BilledCost", "EffectiveCost", "ListCost", "x_EstimatedCost", "x_PromotionalCost")
LEDGERS = ("BilledCost", "EffectiveCost", "x_EstimatedCost")
"""What a night prints: both ledgers and the estimate."""
LAYER_KEY = tuple(ours for ours, _ in LAYER)
_USAGE = {
    "job_id": "x_JobId",
    "attempt": "x_Attempt",
    "layer": "x_Layer",
    "pass": "x_Pass",
    "op": "x_Op",
    "phase": "x_Phase",
    "batch_size": "x_BatchSize",
    "dtype": "x_Dtype",
}
Peak = Callable[[str, str], int | None]


def sums(table: pa.Table, key: Sequence[str], values: Mapping[str, str]) -> pa.Table:
    """Rows of a table by key, each value aggregated as named (sum, max, min, count); columns keep their names."""
    grouped = table.group_by(list(key), use_threads=False).aggregate(list(values.items()))
    names = {f"{name}_{how}": name for name, how in values.items()}
    return grouped.rename_columns([names.get(n, n) for n in grouped.column_names])


def totals_by_category(addresses: pa.Table) -> list[dict[str, Any]]:
    """Both ledgers and the estimate by cloud, currency and category, in order: the table that a night prints."""
    key = ("x_Cloud", "BillingCurrency", "x_Category")
    rows = sums(addresses, key, dict.fromkeys(LEDGERS, "sum")).to_pylist()
    return sorted(rows, key=lambda r: tuple(r[k] for k in key))


def job_daily(day: dt.date, addresses: pa.Table, spans: pa.Table, jobs: pa.Table) -> pa.Table:
    """Rows of report_cost__job_daily."""
    key = JOB_DAILY.key
    cost = sums(addresses, key, dict.fromkeys(MONEY, "sum")).to_pylist()
    time_key = ("x_Cloud", "x_State", "x_JobId", "x_Attempt", "x_Category")
    time = _by(sums(spans, time_key, {"x_Ns": "sum", "x_EnergyMj": "sum"}).to_pylist(), time_key)
    facts = _by(jobs.to_pylist(), ("job_id", "attempt"))
    rows = []
    for row in _ordered(cost, key):
        spent = time.pop(tuple(row[k] for k in time_key), {})
        row |= {
            "x_UsageDate": day,
            "x_GpuNs": spent.get("x_Ns"),
            "x_EnergyMj": spent.get("x_EnergyMj"),
            "x_GpuHours": _hours(spent.get("x_Ns")),
        }
        rows.append(row | _job_facts(facts, row) | _job_counts(facts, row) | _unit_costs(facts, row))
    return _table(JOB_DAILY, rows)


def resource_daily(day: dt.date, addresses: pa.Table, spans: pa.Table) -> pa.Table:
    """Rows of report_cost__resource_daily."""
    key = RESOURCE_DAILY.key
    addresses = one_spelling(addresses)
    cost = sums(addresses, key, dict.fromkeys(MONEY, "sum") | {"x_InstanceType": "min"}).to_pylist()
    time, parents = _own_time(addresses, spans), _parents(spans)
    rows = []
    for row in _ordered(cost, key):
        ns, coverage = time.get(tuple(row[k] for k in key), (None, None))
        row |= {"x_UsageDate": day, "x_GpuNs": ns, "x_GpuHours": _hours(ns), "x_CoveragePpm": coverage}
        row["x_ParentId"] = parents.get(row["x_DeviceId"])
        rows.append(row)
    return _table(RESOURCE_DAILY, rows)


def _own_time(addresses: pa.Table, spans: pa.Table) -> dict[tuple[Any, ...], tuple[int | None, int | None]]:
    """GPU time in ns, and observed part of the billed spans in ppm, of each row of the report that is of machines themselves.

    A row of a scale set has several machines. Time counts once: of rows that share a span, the one with the most money, signs
    left out, has it, so that it stands with the machine's hours and not with its traffic.
    """
    key = RESOURCE_DAILY.key
    wide = (*key, "x_MachineId")
    time_key = ("x_Cloud", "x_State", "x_MachineId", "x_DeviceId", "x_Category", "x_Reason")
    time = _by(sums(spans, time_key, {"x_Ns": "sum"}).to_pylist(), time_key)
    observed = _observed(spans)
    sized = sums(addresses.append_column("size", _size(addresses)), wide, {"size": "sum"}).to_pylist()
    found: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
    for row in sorted(_ordered(sized, wide), key=lambda r: -r["size"]):
        if _names(row["ResourceId"], row["x_MachineId"]):
            ns = time.pop(tuple(row[k] for k in time_key), {}).get("x_Ns")
            parts = observed.get((row["x_Cloud"], row["x_MachineId"]), (0, 0))
            found.setdefault(tuple(row[k] for k in key), []).append((ns, parts))
    told = {}
    for at, machines in found.items():
        known = [ns for ns, _ in machines if ns is not None]
        seen, billed = (sum(parts[n] for _, parts in machines) for n in (0, 1))
        told[at] = (sum(known) if known else None, seen * 1_000_000 // billed if billed else None)
    return told


def _names(resource: str | None, machine: str | None) -> bool:
    """Whether a resource id is that of a machine, bare or as an ARN, or of its scale set, and not of what hangs on it."""
    if resource is None or machine is None:
        return False
    one, other = resource.lower(), machine.lower()
    return one == other or one.endswith("/" + other) or other.rpartition("/virtualmachines/")[0] == one != ""


def layer_daily(
    day: dt.date,
    addresses: pa.Table,
    layers: pa.Table,
    layer_hourly: pa.Table,
    spans: pa.Table,
    jobs: pa.Table,
    peak: Peak,
) -> pa.Table:
    """Rows of report_cost__layer_daily: the layer money, and every address that has no layers.

    Args:
        peak: dense peak in FLOP/s of (GPU model, dtype); None when unknown.
    """
    base = ("x_Cloud", "BillingCurrency", "x_State", "x_JobId", "x_Attempt")
    amounts = {name: "sum" for name in MONEY if name != "ListCost"}
    rest = addresses.filter(pc.not_equal(addresses["x_Category"], "work"))
    facts = _by(jobs.to_pylist(), ("job_id", "attempt"))
    power = _mean_power_mw(spans)
    usage = _layer_usage(layer_hourly, "work")
    hours = _first_owner(layers)
    rows: list[dict[str, Any]] = []
    weighted = _with_bound(layers)
    for row in _ordered(
        sums(weighted, (*base, *LAYER_KEY), amounts | {"bound": "sum", "pool": "sum"}).to_pylist(), (*base, *LAYER_KEY)
    ):
        row["x_Category"] = "work"
        bound, pool = row.pop("bound"), row.pop("pool")
        row["x_BoundPpm"] = min(1_000_000, -(-int(bound) // int(pool))) if pool else 0
        at = tuple(row[k] for k in (*base, *LAYER_KEY))
        row |= _gather(hours.get(at, ()), usage, at)
        rows.append(row)
    key = (*base, "x_Category")
    for row in _ordered(sums(rest, key, amounts).to_pylist(), key):
        rows.append(row)
    for row in rows:
        row |= {"x_UsageDate": day} | _job_facts(facts, row) | _unit_costs(facts, row) | _efficiency(row, peak, power)
    return _table(LAYER_DAILY, rows)


def _with_bound(layers: pa.Table) -> pa.Table:
    """Adds the pool's money and bound times it, in whole units, so that daily bounds weigh each pool by its money."""
    layers = layers.append_column("money", _size(layers))
    total = sums(layers, POOL, {"money": "sum"})
    codes = {tuple(r[k] for k in POOL): r["money"] for r in total.to_pylist()}
    own = [codes[k] for k in zip(*(layers[c].to_pylist() for c in POOL), strict=True)]
    units = [int(m.scaleb(12)) for m in own]
    wide = pa.decimal128(38, 0)
    bound = [u * b for u, b in zip(units, layers["x_BoundPpm"].to_pylist(), strict=True)]
    return layers.append_column("pool", pa.array(units, wide)).append_column("bound", pa.array(bound, wide))


def _size(table: pa.Table) -> pa.ChunkedArray:
    """Money of each row without its sign: the amortised ledger, else the estimate."""
    nothing = pa.scalar(Decimal(0), pa.decimal128(38, 12))
    return pc.abs(pc.coalesce(table["EffectiveCost"], table["x_EstimatedCost"], nothing))


def _layer_usage(layer_hourly: pa.Table, category: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = layer_hourly.filter(pc.equal(layer_hourly["category"], category))
    rows = rows.rename_columns([_USAGE.get(n, n) for n in rows.column_names])
    values = {
        "ns": "sum",
        "flops": "sum",
        "hw_flops": "sum",
        "calls": "sum",
        "uncounted_calls": "sum",
        "uncounted_ns": "sum",
        "layer_index": "min",
        "gpu_model": "min",
    }
    highest = rows.append_column("highest_model", rows["gpu_model"])
    key = ("hour_utc", "x_JobId", "x_Attempt", *LAYER_KEY)
    return _by(sums(highest, key, values | {"highest_model": "max"}).to_pylist(), key)


def _first_owner(layers: pa.Table) -> dict[tuple[Any, ...], list[Any]]:
    """Hours whose usage each report row shows: usage counts once, in the first of the rows that share it."""
    key = ("x_Cloud", "BillingCurrency", "x_State", "x_JobId", "x_Attempt", *LAYER_KEY)
    owner: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    columns = [layers[c].to_pylist() for c in (*key, "x_HourUtc")]
    for *values, hour in sorted(zip(*columns, strict=True), key=_null_last):
        at = tuple(values)
        owner.setdefault((hour, *at[3:]), at)
    hours: dict[tuple[Any, ...], list[Any]] = {}
    for (hour, *_), at in owner.items():
        hours.setdefault(at, []).append(hour)
    return hours


def _gather(
    hours: Iterable[Any], usage: Mapping[tuple[Any, ...], dict[str, Any]], at: tuple[Any, ...]
) -> dict[str, Any]:
    found = [usage[(hour, *at[3:])] for hour in hours if (hour, *at[3:]) in usage]
    if not found:
        return {}
    models = {m for f in found for m in (f["gpu_model"], f["highest_model"])}
    names = {
        "ns": "x_Ns",
        "flops": "x_Flops",
        "hw_flops": "x_HwFlops",
        "calls": "x_Calls",
        "uncounted_calls": "x_UncountedCalls",
        "uncounted_ns": "x_UncountedNs",
    }
    row = {ours: sum(f[theirs] for f in found) for theirs, ours in names.items()}
    return row | {
        "x_LayerIndex": min(f["layer_index"] for f in found),
        "x_GpuModel": models.pop() if len(models) == 1 else None,
    }


def _efficiency(row: Mapping[str, Any], peak: Peak, power: Mapping[tuple[str, int], Decimal]) -> dict[str, Any]:
    flops, hw_flops, ns = row.get("x_Flops"), row.get("x_HwFlops"), row.get("x_Ns")
    money = _own_cost(row)
    out: dict[str, Any] = {}
    if flops is not None and money:
        out["x_FlopsPerEffectiveUsd"] = float(Decimal(flops) / money)
    if flops is None or hw_flops is None or not ns:
        return out
    best = peak(row["x_GpuModel"], row["x_Dtype"]) if row.get("x_GpuModel") else None
    if best:
        out |= {
            "x_Mfu": float(Decimal(flops) * 10**9 / ns / best),
            "x_Hfu": float(Decimal(hw_flops) * 10**9 / ns / best),
        }
    watts = power.get((row["x_JobId"], row["x_Attempt"]))
    if watts:
        out["x_TflopsPerWatt"] = float(Decimal(flops) / ns / 1000 / (watts / 1000))
    return out


def _mean_power_mw(spans: pa.Table) -> dict[tuple[str, int], Decimal]:
    rows = spans.filter(pc.and_(spans["x_JobId"].is_valid(), spans["x_EnergyMj"].is_valid()))
    found = sums(rows, ("x_JobId", "x_Attempt"), {"x_EnergyMj": "sum", "x_Ns": "sum"}).to_pylist()
    return {(r["x_JobId"], r["x_Attempt"]): Decimal(r["x_EnergyMj"]) * 10**9 / r["x_Ns"] for r in found if r["x_Ns"]}


def _observed(spans: pa.Table) -> dict[tuple[str, str], tuple[int, int]]:
    """Observed and billed ns of each machine's devices."""
    seen = spans.append_column("seen", pc.if_else(pc.equal(spans["x_Category"], "unobserved"), 0, spans["x_Ns"]))
    found = sums(seen, ("x_Cloud", "x_MachineId"), {"x_Ns": "sum", "seen": "sum"}).to_pylist()
    return {(r["x_Cloud"], r["x_MachineId"]): (r["seen"], r["x_Ns"]) for r in found}


def _own_cost(row: Mapping[str, Any]) -> Decimal | None:
    """What unit costs stand on: the amortised ledger before promotional credits, which no work earned; else the estimate."""
    effective: Decimal | None = row["EffectiveCost"]
    estimated: Decimal | None = row["x_EstimatedCost"]
    return estimated if effective is None else difference(effective, row["x_PromotionalCost"] or Decimal(0))


def _parents(spans: pa.Table) -> dict[str, str]:
    """GPU of each MIG slice."""
    rows = spans.filter(spans["x_ParentId"].is_valid())
    return {r["x_DeviceId"]: r["x_ParentId"] for r in sums(rows, ("x_DeviceId", "x_ParentId"), {}).to_pylist()}


def _unit_costs(facts: Mapping[tuple[Any, ...], dict[str, Any]], row: Mapping[str, Any]) -> dict[str, float | None]:
    job = facts.get((row["x_JobId"], row["x_Attempt"]))
    money = _own_cost(row)
    if job is None or money is None:
        return {}
    tokens = job["tokens_in"] + job["tokens_out"]
    parts = {
        "x_EffectiveCostPerUnit": (job["units"], 1),
        "x_EffectiveCostPer1kSamples": (job["samples"], 1_000),
        "x_EffectiveCostPer1MTokens": (tokens, 1_000_000),
    }
    return {name: float(money * per / count) if count else None for name, (count, per) in parts.items()}


def _job_facts(facts: Mapping[tuple[Any, ...], dict[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    job = facts.get((row["x_JobId"], row["x_Attempt"]), {})
    return {
        "x_JobName": job.get("name"),
        "x_Team": job.get("team"),
        "x_Project": job.get("project"),
        "x_Model": job.get("model"),
    }


def _job_counts(facts: Mapping[tuple[Any, ...], dict[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    names = {"x_Units": "units", "x_Samples": "samples", "x_TokensIn": "tokens_in", "x_TokensOut": "tokens_out"}
    job = facts.get((row["x_JobId"], row["x_Attempt"]), {})
    return {ours: job.get(theirs) for ours, theirs in names.items()}


def _hours(ns: int | None) -> float | None:
    return None if ns is None else ns / HOUR_NS


def _by(rows: Iterable[dict[str, Any]], key: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[k] for k in key): row for row in rows}


def _null_last(values: Iterable[Any]) -> tuple[tuple[bool, Any], ...]:
    return tuple((v is None, "" if v is None else v) for v in values)


def _ordered(rows: Iterable[dict[str, Any]], key: Sequence[str]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: _null_last(row[k] for k in key))


def _table(spec: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.table([pa.array([row.get(c.name) for row in rows], c.type) for c in spec.columns], names=list(spec.names))
