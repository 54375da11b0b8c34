"""From runs to configurations: what each did and cost over some days, and where it stands beside the others.

Tables of settled days in, `core_pareto__runs` of each out; of these, `report_pareto__configs`. Everything is summed as integers
and decimals, and divided once, exactly, at the end. Knows no disk and no clock. Source: infra/rules/pareto.md.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.pareto import PARETO, PARETO_RUNS, WORK_UNITS
from seedance.schema import Table, conform
from tasks.core import money
from tasks.core.pareto import OBJECTIVES, Point, Verdict, fronts

MONEY = ("EffectiveCost", "x_PromotionalCost", "x_EstimatedCost")
FACTS = ("config_id", "model", "hardware_profile", "quantisation", "kind", "quality_metric", "quality")
COUNTS = (
    "units",
    "samples",
    "tokens",
    "requests",
    "wall_ns",
    "rank_units",
    "gpu_ns",
    "energy_mj",
    "energy_ns",
    "flops",
)
LESS_IS_BETTER = frozenset(
    {
        "loss",
        "perplexity",
        "ppl",
        "error",
        "err",
        "wer",
        "cer",
        "ter",
        "mae",
        "mse",
        "rmse",
        "mape",
        "nll",
        "fid",
        "bpc",
    }
    | {"bpb", "brier", "ece", "latency"}
)
"""Words in the name of a quality metric of which less is better; of any other, more is."""
LOSSES = ("loss", "perplexity", "nll")
_LESS_ENDINGS = ("loss", "error", "perplexity")

ENERGY_COVERAGE_PPM = 900_000
BOX_COST = Fraction(5, 100)
BOX_TFLOPS = Fraction(80)
BOX_CURRENCY = "USD"

_PER: Mapping[str, tuple[str, int]] = {
    "1M tokens": ("tokens", 1_000_000),
    "1k samples": ("samples", 1_000),
    "1k requests": ("requests", 1_000),
    "unit": ("units", 1),
}
_Run = tuple[str, int]


def day_runs(jobs: pa.Table, job_daily: pa.Table, spans: pa.Table, layer_daily: pa.Table) -> pa.Table:
    """`core_pareto__runs` of one day.

    Args:
        jobs: `core_jobs__runs` of the day.
        job_daily: `report_cost__job_daily`; its money without a job belongs to no configuration.
        spans: `core_cost__spans`: GPU time and energy.
        layer_daily: `report_cost__layer_daily`: FLOPs.

    A run that is billed and that no statement or unit names has no facts, and belongs to no configuration.
    """
    time = _time(spans)
    flops = _sums(layer_daily.filter(pc.is_valid(layer_daily["x_JobId"])), ("x_Flops",))
    facts = {(r["job_id"], r["attempt"]): r for r in jobs.to_pylist()}
    paid: dict[_Run, dict[str, dict[str, Decimal | None]]] = {}
    for row in _sums(job_daily.filter(pc.is_valid(job_daily["x_JobId"])), MONEY, "BillingCurrency"):
        paid.setdefault(_run(row), {})[row["BillingCurrency"]] = {n: row[n] for n in MONEY}
    work = {_run(r): r["x_Flops"] for r in flops}
    rows = []
    for run in sorted({*facts, *paid, *time}):
        told = facts.get(run, {})
        row = {n: told.get(n) or None for n in FACTS if n != "quality"} | {"quality": told.get("quality")}
        row |= {n: told.get(n) or 0 for n in COUNTS if n in told}
        row["tokens"] = (told.get("tokens_in") or 0) + (told.get("tokens_out") or 0)
        row |= time.get(run, {}) | {"flops": int(work.get(run) or 0), "job_id": run[0], "attempt": run[1]}
        counts = {n: row.get(n, 0) for n in COUNTS}
        for currency, amounts in sorted(paid.get(run, {None: {}}).items(), key=lambda item: item[0] or ""):
            rows.append(row | counts | amounts | {"BillingCurrency": currency})
    return _table(PARETO_RUNS, rows)


def _run(row: Mapping[str, Any]) -> _Run:
    return row["x_JobId"], row["x_Attempt"] or 0


def _sums(table: pa.Table, names: Sequence[str], *key: str) -> list[dict[str, Any]]:
    keys = ["x_JobId", "x_Attempt", *key]
    grouped = table.group_by(keys, use_threads=False).aggregate([(n, "sum") for n in names])
    return list(grouped.rename_columns([n.removesuffix("_sum") for n in grouped.column_names]).to_pylist())


def _time(spans: pa.Table) -> dict[_Run, dict[str, int]]:
    own = spans.filter(pc.is_valid(spans["x_JobId"]))
    read = pc.if_else(pc.is_valid(own["x_EnergyMj"]), own["x_Ns"], 0)
    own = own.append_column("read", read)
    found: dict[_Run, dict[str, int]] = {}
    for row in _sums(own, ("x_Ns", "x_EnergyMj", "read")):
        at = found.setdefault(_run(row), {"gpu_ns": 0, "energy_mj": 0, "energy_ns": 0})
        for ours, theirs in (("gpu_ns", "x_Ns"), ("energy_mj", "x_EnergyMj"), ("energy_ns", "read")):
            at[ours] += row[theirs] or 0
    return found


@dataclass
class _Job:
    """One job over all days: its facts as last stated, its money by currency, its counts."""

    facts: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(FACTS))
    money: dict[str, dict[str, int | None]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    elapsed: Fraction = Fraction(0)
    attempts: set[int] = field(default_factory=set)
    days: list[dt.date] = field(default_factory=list)

    @property
    def currency(self) -> str | None:
        """The one currency of its money; None when it has several or no money."""
        return next(iter(self.money)) if len(self.money) == 1 else None


def gather(days: Mapping[dt.date, pa.Table]) -> tuple[pa.Table, list[Verdict], dict[str, Any]]:
    """`report_pareto__configs` of `core_pareto__runs` by day.

    Returns:
        The table; a verdict per row of it; and what no row of it has the money of: {nameless: runs of jobs that name no
        configuration, mixed: runs of jobs billed in several currencies}, each {runs, cost: text by currency}.

    Raises:
        UsageError: a value is not a finite number; names the configuration.
    """
    groups: dict[tuple[str | None, ...], list[_Job]] = {}
    outside: dict[str, list[_Job]] = {"nameless": [], "mixed": []}
    for _, job in sorted(_jobs(days).items()):
        if job.facts["config_id"] is None:
            outside["nameless"].append(job)
            continue
        if len(job.money) > 1:
            outside["mixed"].append(job)
        key = tuple(job.facts[n] for n in FACTS[:5])
        groups.setdefault((*key, job.currency), []).append(job)
    ids = [key[0] for key in groups]
    rows, points = [], []
    for key in sorted(groups, key=lambda key: tuple((part is None, part or "") for part in key)):
        row, values, why = _config(key, groups[key])
        label = str(key[0]) if ids.count(key[0]) == 1 else _long_label(key)
        rows.append(row)
        points.append(Point(label, _group(row), values, why))
    verdicts = fronts(points)
    rows = [row | _stands(row, point, verdict) for row, point, verdict in zip(rows, points, verdicts, strict=True)]
    return _table(PARETO, rows), verdicts, {name: _outside(found) for name, found in outside.items()}


def _outside(jobs: Sequence[_Job]) -> dict[str, Any]:
    return {"runs": sum(len(job.attempts) for job in jobs), "cost": _told(jobs)}


def _told(jobs: Sequence[_Job]) -> dict[str, str]:
    """What jobs cost by currency, as text."""
    cost: dict[str, int] = {}
    for job in jobs:
        for currency, amounts in job.money.items():
            cost[currency] = cost.get(currency, 0) + _cost(amounts)
    return {currency: f"{money.decimal(amount):f}" for currency, amount in sorted(cost.items())}


def _jobs(days: Mapping[dt.date, pa.Table]) -> dict[str, _Job]:
    jobs: dict[str, _Job] = {}
    for day, table in sorted(days.items()):
        seen: set[_Run] = set()
        for row in sorted(table.to_pylist(), key=lambda r: (r["job_id"], r["attempt"], r["BillingCurrency"] or "")):
            job, run = jobs.setdefault(row["job_id"], _Job()), (row["job_id"], row["attempt"])
            _pay(job, row)
            if run in seen:
                continue
            seen.add(run)
            job.attempts.add(row["attempt"])
            job.days.append(day)
            # A metric and its value are one statement: they are taken together.
            told = {n: row[n] for n in FACTS if row[n] is not None and n not in ("quality", "quality_metric")}
            job.facts |= told
            if row["quality"] is not None:
                job.facts |= {n: row[n] for n in ("quality", "quality_metric")}
            for name in COUNTS:
                job.counts[name] += int(row[name])
            if row["rank_units"]:
                job.elapsed += Fraction(int(row["units"]) * int(row["wall_ns"]), int(row["rank_units"]))
    return jobs


def _pay(job: _Job, row: Mapping[str, Any]) -> None:
    if row["BillingCurrency"] is None:
        return
    amounts = job.money.setdefault(row["BillingCurrency"], dict.fromkeys(MONEY))
    for name in MONEY:
        if row[name] is not None:
            amounts[name] = (amounts[name] or 0) + money.units(row[name])


def _cost(amounts: Mapping[str, int | None]) -> int:
    """What a run cost, in whole units: effective without promotions, and estimates where no bill is yet."""
    effective, promotional, estimated = (amounts[n] or 0 for n in MONEY)
    return effective - promotional + estimated


def _config(
    key: tuple[str | None, ...], jobs: Sequence[_Job]
) -> tuple[dict[str, Any], dict[str, Fraction], str | None]:
    """One row without its verdict, its objectives, and why it cannot be compared."""
    counts = {name: sum(job.counts[name] for job in jobs) for name in COUNTS}
    names = ("x_ConfigId", "x_Model", "x_HardwareProfile", "x_Quantisation", "x_Kind", "BillingCurrency")
    days = [day for job in jobs for day in job.days]
    row: dict[str, Any] = dict(zip(names, key, strict=True)) | {
        "x_FirstDay": min(days),
        "x_LastDay": max(days),
        "x_Jobs": len(jobs),
        "x_Runs": sum(len(job.attempts) for job in jobs),
        "x_GpuNs": counts["gpu_ns"],
    }
    cost, why = _money(row, jobs)
    values: dict[str, Fraction] = {}
    unit = next((u for u in WORK_UNITS if counts[_PER[u][0]]), None)
    work = None
    if unit is None:
        why = _join(why, "it did no counted work")
    else:
        work = Fraction(counts[_PER[unit][0]], _PER[unit][1])
        row |= {"x_WorkUnit": unit, "x_Work": counts[_PER[unit][0]]}
        if cost is not None:
            values["cost"] = cost / work
    note = _quality(row, jobs, values)
    _speed(row, jobs, counts, values)
    _energy(row, counts, work, values)
    _box(row, counts, cost)
    if row.get("x_QualityMetric") is None and row["x_Model"] is None:
        why = _join(why, "neither a quality nor a model is stated, so nobody knows what it may be compared with")
    columns = {"cost": "x_CostPerWork", "throughput": "x_ThroughputPerSecond", "latency": "x_LatencyMs"}
    columns |= {"energy": "x_EnergyPerWork", "quality": "x_Quality", "loss": "x_Quality"}
    row |= {columns[name]: float(value) for name, value in values.items()} | {"x_Why": _join(why, note)}
    return row, values, why


def _money(row: dict[str, Any], jobs: Sequence[_Job]) -> tuple[Fraction | None, str | None]:
    """Fills in the money; the cost of the configuration, or why there is none."""
    if row["BillingCurrency"] is None:
        several = _told(jobs)
        if several:
            amounts = " and ".join(f"{amount} {currency}" for currency, amount in several.items())
            return None, f"its jobs are billed {amounts}, and nothing is converted"
        return None, "nothing is billed or estimated for its jobs"
    found: dict[str, int | None] = dict.fromkeys(MONEY)
    for job in jobs:
        for name, amount in job.money[row["BillingCurrency"]].items():
            if amount is not None:
                found[name] = (found[name] or 0) + amount
    cost = _cost(found)
    row |= {name: None if amount is None else money.decimal(amount) for name, amount in found.items()}
    row |= {"x_Cost": money.decimal(cost), "x_State": "billed" if found["x_EstimatedCost"] is None else "provisional"}
    if cost <= 0:
        return None, f"its cost is {money.decimal(cost):f}: a price that is not known, or a refund, is no low price"
    return Fraction(cost, 10**money.DIGITS), None


def _quality(row: dict[str, Any], jobs: Sequence[_Job], values: dict[str, Fraction]) -> str | None:
    """Fills in the quality; why it is not known although jobs state one."""
    stated = [(j.facts["quality_metric"], Fraction(j.facts["quality"])) for j in jobs if j.facts["quality"] is not None]
    metrics = sorted({metric or "" for metric, _ in stated})
    if not stated:
        return None
    if len(metrics) > 1 or not metrics[0]:
        told = ", ".join(metric or "one without a name" for metric in metrics)
        return f"no quality: its jobs state {told}"
    less = less_is_better(metrics[0])
    row |= {"x_QualityMetric": metrics[0], "x_QualityDirection": "min" if less else "max"}
    values["loss" if less else "quality"] = sum((v for _, v in stated), Fraction(0)) / len(stated)
    return None


def is_loss(metric: str) -> bool:
    """Whether a quality metric is what training minimises: it depends on vocabulary and data, and ranks no two models."""
    return any(word.endswith(LOSSES) for word in re.split(r"[^a-z]+", metric.casefold()))


def less_is_better(metric: str) -> bool:
    """Whether less of a quality metric is better, by the words of its name."""
    words = re.split(r"[^a-z]+", metric.casefold())
    return any(word in LESS_IS_BETTER or word.endswith(_LESS_ENDINGS) for word in words)


def _speed(
    row: Mapping[str, Any], jobs: Sequence[_Job], counts: Mapping[str, int], values: dict[str, Fraction]
) -> None:
    elapsed = sum((job.elapsed for job in jobs), Fraction(0))
    if counts["rank_units"] and counts["wall_ns"]:
        values["latency"] = Fraction(counts["wall_ns"], counts["rank_units"]) / 1_000_000
    if elapsed and row.get("x_Work"):
        values["throughput"] = Fraction(row["x_Work"]) * 1_000_000_000 / elapsed


def _energy(row: dict[str, Any], counts: Mapping[str, int], work: Fraction | None, values: dict[str, Fraction]) -> None:
    if not counts["gpu_ns"]:
        return
    coverage = counts["energy_ns"] * 1_000_000 // counts["gpu_ns"]
    row["x_EnergyCoveragePpm"] = coverage
    if work and counts["energy_mj"] and coverage >= ENERGY_COVERAGE_PPM:
        joules = Fraction(counts["energy_mj"], 1000) * counts["gpu_ns"] / counts["energy_ns"]
        values["energy"] = joules / work


def _box(row: dict[str, Any], counts: Mapping[str, int], cost: Fraction | None) -> None:
    if not counts["gpu_ns"] or not counts["flops"]:
        return
    tflops = Fraction(counts["flops"], counts["gpu_ns"] * 1_000)
    row["x_TflopsPerGpu"] = float(tflops)
    if cost is None:
        return
    # Cost of a GPU-hour over TFLOP/s: the GPU hours cancel out.
    rate = cost * 3_600 * 10**12 / counts["flops"]
    row["x_CostPerTflopsHour"] = float(rate)
    if row["BillingCurrency"] == BOX_CURRENCY:
        row["x_InBox"] = rate <= BOX_COST and tflops >= BOX_TFLOPS


def _group(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What must agree for two configurations to be compared; without a quality, or with a loss, the model must, too."""
    metric, model = row.get("x_QualityMetric"), f"model {row['x_Model']}"
    what = model if metric is None else f"{metric}, {model}" if is_loss(metric) else metric
    return row["BillingCurrency"] or "", row["x_Kind"] or "any kind", f"per {row.get('x_WorkUnit')}", what


def _stands(row: Mapping[str, Any], point: Point, verdict: Verdict) -> dict[str, Any]:
    known = ", ".join(o.name for o in OBJECTIVES if o.name in point.values)
    why = row["x_Why"] if verdict.why is None or point.reason is not None else _join(verdict.why, row["x_Why"])
    return {
        "x_Objectives": known,
        "x_ComparisonSet": None if verdict.on_front is None else f"{', '.join(point.group)}: {known}",
        "x_SetSize": verdict.size,
        "x_OnFront": verdict.on_front,
        "x_DominatedBy": verdict.dominated_by,
        "x_Why": why,
    }


def _long_label(key: tuple[str | None, ...]) -> str:
    return f"{key[0]} ({', '.join(part or '-' for part in key[1:])})"


def _join(*reasons: str | None) -> str | None:
    return "; ".join(r for r in reasons if r) or None


def _table(spec: Table, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    rows = list(rows)
    columns = [pa.array([row.get(c.name) for row in rows], c.type) for c in spec.columns]
    return conform(pa.table(columns, names=list(spec.names)), spec, where=spec.name)
