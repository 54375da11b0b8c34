"""What is known of configurations, and which of them nothing beats.

Beside these tables the front is exported as JSON and YAML, which `pareto.schema.json` in this folder describes. Source:
infra/rules/pareto.md.
"""

import pyarrow as pa

from schemas.ledger import EFFECTIVE, ESTIMATED, PROMOTIONAL, STATES, money
from seedance.schema import COUNT, Column, Table, number, text

WORK_UNITS = ("1M tokens", "1k samples", "1k requests", "unit")
"""What work is counted in: the first that a configuration has any of."""


def _count(name: str, about: str, unit: str = "count") -> Column:
    return Column(name, COUNT, about, unit=unit, min=0, summed=True)


def _ratio(name: str, unit: str, about: str) -> Column:
    return Column(name, pa.float64(), about, unit=unit, null=True)


PARETO_RUNS = Table(
    "core_pareto__runs",
    "one run of a job on one day in one currency: what a configuration did and cost; counts are the same in each currency",
    ("job_id", "attempt", "BillingCurrency"),
    (
        text("job_id", "job"),
        number("attempt", 16, "count", "restart number", summed=False),
        text("BillingCurrency", "currency of the money; null where a run has none", null=True),
        text("config_id", "configuration; null where nobody named one", null=True),
        text("model", "model", null=True),
        text("hardware_profile", "hardware profile", null=True),
        text("quantisation", "quantisation scheme", null=True),
        text("kind", "train or serve", null=True),
        text("quality_metric", "name of the quality metric", null=True),
        Column("quality", pa.decimal128(18, 9), "last stated value of the quality metric", null=True),
        _count("units", "units of work"),
        _count("samples", "samples"),
        _count("tokens", "tokens, in and out"),
        _count("requests", "requests"),
        _count("wall_ns", "wall time of its units, summed over ranks", "ns"),
        _count("rank_units", "units, summed over ranks"),
        _count("gpu_ns", "GPU time of the billed span", "ns"),
        _count("energy_mj", "energy of the GPU time that has a reading", "mJ"),
        _count("energy_ns", "of gpu_ns, the part that has an energy reading", "ns"),
        _count("flops", "model FLOPs of its work", "FLOP"),
        EFFECTIVE,
        PROMOTIONAL,
        ESTIMATED,
    ),
)

PARETO = Table(
    "report_pareto__configs",
    "one configuration over the days up to a day: what it costs, does and uses, and whether anything beats it",
    ("x_ConfigId", "x_Model", "x_HardwareProfile", "x_Quantisation", "x_Kind", "BillingCurrency"),
    (
        text("x_ConfigId", "configuration"),
        text("x_Model", "model", null=True),
        text("x_HardwareProfile", "hardware profile", null=True),
        text("x_Quantisation", "quantisation scheme", null=True),
        text("x_Kind", "train or serve", null=True),
        text("BillingCurrency", "currency; null where a job is billed in several or in none", null=True),
        Column("x_FirstDay", pa.date32(), "first UTC day on which it ran"),
        Column("x_LastDay", pa.date32(), "last UTC day on which it ran"),
        number("x_Jobs", 32, "count", "jobs", summed=False),
        number("x_Runs", 32, "count", "runs: jobs and their restarts", summed=False),
        text("x_State", "provisional when any of its cost is an estimate, else billed", null=True, values=STATES[:2]),
        EFFECTIVE,
        PROMOTIONAL,
        ESTIMATED,
        money(
            "x_Cost", "EffectiveCost without promotional credits, and the estimates of hours that no bill covers yet"
        ),
        text("x_WorkUnit", "what its work is counted in; null without any", null=True, values=WORK_UNITS),
        Column("x_Work", COUNT, "tokens, samples, requests or units", unit="count", null=True, min=0, summed=True),
        _count("x_GpuNs", "GPU time of the billed span", "ns"),
        _ratio(
            "x_CostPerWork", "BillingCurrency per x_WorkUnit", "x_Cost over the work: objective cost, least is best"
        ),
        text("x_QualityMetric", "name of the quality metric; null without one", null=True),
        text("x_QualityDirection", "which value of the metric is better", null=True, values=("max", "min")),
        _ratio("x_Quality", "of the metric", "mean over jobs of the last value each stated: objective quality or loss"),
        _ratio(
            "x_ThroughputPerSecond", "tokens, samples, requests or units per s", "objective throughput, most is best"
        ),
        _ratio("x_LatencyMs", "ms", "mean wall time of a unit of work: objective latency, least is best"),
        _ratio("x_EnergyPerWork", "J per x_WorkUnit", "energy over the work: objective energy, least is best"),
        number(
            "x_EnergyCoveragePpm",
            32,
            "ppm",
            "GPU time that has an energy reading; the rest counts at the same mean power, and below 900,000 energy is null",
            null=True,
            max=1_000_000,
            summed=False,
        ),
        _ratio("x_TflopsPerGpu", "TFLOP/s", "model FLOPs over all GPU time of its jobs, busy or not"),
        _ratio("x_CostPerTflopsHour", "BillingCurrency per TFLOP/s and hour", "cost of a GPU-hour over x_TflopsPerGpu"),
        Column(
            "x_InBox",
            pa.bool_(),
            "at most 0.05 USD per TFLOP/s and hour, and at least 80 TFLOP/s a GPU: a mark, not the front; null where unknown",
            null=True,
        ),
        text("x_Objectives", "objectives that it was compared in, or could have been, in order"),
        text("x_ComparisonSet", "what it was compared with; null when with nothing", null=True),
        number("x_SetSize", 32, "count", "configurations in that set, itself included", summed=False),
        Column("x_OnFront", pa.bool_(), "nothing beats it; null when it was compared with nothing", null=True),
        text("x_DominatedBy", "one configuration of the front that beats it", null=True),
        text("x_Why", "why it was compared with nothing, or an objective is not known", null=True),
    ),
)

PARETO_TABLES = {t.name: t for t in (PARETO_RUNS, PARETO)}
