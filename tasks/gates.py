"""Gates: what must hold at the end of each stage before anything further is computed, as Great Expectations suites.

The suites derive from the contracts in `schemas/` and from a few measures of each stage. They run on aggregates (one row a
column, one row of measures), so that a day of ten million rows is judged like one of ten. A critical expectation that fails
stops the day; a warning is told and published. Results are rows of `report_quality__runs`; nothing is rendered by the library,
whose pages load scripts from the internet.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from schemas.ledger import ADDRESSES, JOB_DAILY, LAYER_DAILY, LAYERS, RECONCILIATION, RESOURCE_DAILY, SPANS
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY, JOB_RUNS, LAYER_HOURLY
from seedance.schema import Table
from tasks.core import contracts, money
from tasks.errors import GateError
from tasks.settings import Settings

MILLION = 1_000_000
HOUR_NS = 3_600_000_000_000
LEDGERS = ("BilledCost", "EffectiveCost")
CRITICAL, WARNING = "critical", "warning"
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Measure:
    """One figure of a stage and the range that it must lie in.

    Args:
        name: what is measured, with its unit.
        value: the figure; None is unknown and passes.
        most: greatest value that passes.
        least: least value that passes.
        severity: critical stops the day, warning is told.
        about: what to look at when it does not hold.
    """

    name: str
    value: int | None
    most: int
    least: int = 0
    severity: str = CRITICAL
    about: str = ""


TABLES: Mapping[str, tuple[Table, ...]] = {
    "bill": (CHARGES,),
    "reduce": (JOB_RUNS, DEVICE_HOURLY, LAYER_HOURLY, ATTACHMENTS),
    "reconcile": (ADDRESSES, LAYERS, SPANS, RECONCILIATION),
    "publish": (JOB_DAILY, RESOURCE_DAILY, LAYER_DAILY),
}
"""Whose contracts each gate holds the stage's output to."""


def check(stage: str, day: str, tables: Mapping[str, pa.Table], measures: Sequence[Measure]) -> list[dict[str, Any]]:
    """Run the suites of one stage.

    Args:
        stage: collect, bill, reduce, reconcile or publish.
        day: UTC usage day.
        tables: the stage's output by table name; those that TABLES names are held to their contracts.
        measures: figures of the stage.

    Returns:
        One row an expectation, for report_quality__runs: x_Check, x_Outcome, x_Detail, x_RowsIn.

    Raises:
        GateError: a critical expectation failed; names stage, day, what was expected and found. Nothing is published.
    """
    frame = contracts.together((tables[spec.name], spec) for spec in TABLES.get(stage, ()) if spec.name in tables)
    rows = [*_contract_suite(stage, frame), *_measure_suite(stage, measures)]
    failed = [r for r in rows if r["x_Outcome"] == "failed" and r["severity"] == CRITICAL]
    for row in rows:
        del row["severity"]
    if failed:
        found = "; ".join(f"{r['x_Check']}: {r['x_Detail']}" for r in failed)
        raise GateError(
            f"gate of {stage}, {day}: {len(failed)} of {len(rows)} expectations failed. {found}. Nothing of the day was "
            "published; what stood before still stands.",
            stage=stage,
            day=day,
            failed=[r["x_Check"] for r in failed],
            rows=rows,
        )
    return rows


# --- measures of the stages -------------------------------------------------------------------------------------------


def collect_measures(facts: Mapping[str, Any], settings: Settings) -> list[Measure]:
    """How much of a day's telemetry could not be used."""
    share = min(sum(int(q["share_ppm"]) for q in facts["quarantined"]), MILLION)
    return [
        Measure(
            "quarantined share, ppm",
            share,
            settings.max_quarantined_ppm,
            about="see quarantine/ for the reasons; max_quarantined_ppm sets the limit",
        )
    ]


def bill_measures(charges: pa.Table) -> list[Measure]:
    """Charges that no ledger could book in the right place."""
    start, end, day = (charges[c] for c in ("ChargePeriodStart", "ChargePeriodEnd", "x_UsageDate"))
    # The end is exclusive; a charge without length stands on the day that it starts.
    last = pc.max_element_wise(pc.subtract(end.cast(pa.int64()), 1), start.cast(pa.int64())).cast(end.type)
    begun, ended = (pc.cast(c.cast(pa.timestamp("s", "UTC"), safe=False), pa.date32()) for c in (start, last))
    upside_down = pc.sum(pc.less(end, start)).as_py() or 0
    elsewhere = pc.sum(pc.or_(pc.less(day, begun), pc.greater(day, ended))).as_py() or 0
    period = pc.sum(pc.less_equal(charges["BillingPeriodEnd"], charges["BillingPeriodStart"])).as_py() or 0
    return [
        Measure("charges that end before they start, rows", upside_down, 0),
        Measure("charges on a day outside their period, rows", elsewhere, 0),
        Measure("billing periods that end before they start, rows", period, 0),
    ]


def reduce_measures(devices: pa.Table) -> list[Measure]:
    """Law 2 before money: no device has more than an hour in an hour."""
    if not len(devices):
        return [Measure("longest device-hour, ns", 0, HOUR_NS)]
    sums = devices.group_by(["hour_utc", "node", "device_uuid"], use_threads=False).aggregate([("ns", "sum")])
    return [Measure("longest device-hour, ns", pc.max(sums["ns_sum"]).as_py(), HOUR_NS)]


def reconcile_measures(charges: pa.Table, addresses: pa.Table, spans: pa.Table, settings: Settings) -> list[Measure]:
    """Law 1 by currency in both ledgers, in whole units of 1e-12; and how much billed GPU time nobody observed."""
    found = []
    for currency in sorted(set(pc.unique(charges["BillingCurrency"]).to_pylist())):
        mine = charges.filter(pc.equal(charges["BillingCurrency"], currency))
        told = addresses.filter(pc.equal(addresses["BillingCurrency"], currency))
        for ledger in LEDGERS:
            gap = abs(money.units(_total(mine["x_Day" + ledger])) - money.units(_total(told[ledger])))
            found.append(Measure(f"{ledger} billed beside addressed, 1e-12 {currency}", gap, 0))
    total = pc.sum(spans["x_Ns"]).as_py() or 0
    dark = pc.sum(spans.filter(pc.equal(spans["x_Category"], "unobserved"))["x_Ns"]).as_py() or 0
    share = dark * MILLION // total if total else None
    about = (
        "hosts without an agent or with gaps: report_cost__resource_daily, x_Reason; max_unobserved_ppm sets the limit"
    )
    found.append(Measure("unobserved share of billed GPU time, ppm", share, settings.max_unobserved_ppm, about=about))
    return found


def publish_measures(addresses: pa.Table, reports: Mapping[str, pa.Table]) -> list[Measure]:
    """Every report adds up to the addresses."""
    found = []
    for name, report in sorted(reports.items()):
        for column in (*LEDGERS, "x_EstimatedCost"):
            gap = abs(money.units(_total(addresses[column])) - money.units(_total(report[column])))
            found.append(Measure(f"{name}.{column} beside the addresses, 1e-12", gap, 0))
    return found


def _total(column: pa.ChunkedArray) -> Decimal:
    found = pc.sum(column).as_py()
    return Decimal(0) if found is None else Decimal(found)


# --- suites -----------------------------------------------------------------------------------------------------------


def _contract_suite(stage: str, frame: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not frame:
        return []
    gx, gxe, _ = _library()
    table = pd.DataFrame([{k: r[k] for k in ("table", "column", *contracts.PROMISES)} for r in frame])
    promised = [p for p in contracts.PROMISES if table[p].notna().any()]
    suite = gx.ExpectationSuite(name=f"{stage}.contracts")
    for promise in promised:
        suite.add_expectation(gxe.ExpectColumnValuesToBeInSet(column=promise, value_set=[0], severity=CRITICAL))
    passed = _validate(suite, table)
    rows = []
    for promise in promised:
        bad = [contracts.told(r) for r in frame if r[promise]]
        tables = len({r["table"] for r in frame if r[promise] is not None})
        assert passed[promise] == (not bad), promise
        rows.append(
            _row(
                f"gate {stage}: {promise.replace('_', ' ')} against the contract of {tables} table(s)",
                passed[promise],
                "; ".join(bad) or None,
                CRITICAL,
                max(r["rows"] for r in frame),
            )
        )
    return rows


def _measure_suite(stage: str, measures: Sequence[Measure]) -> list[dict[str, Any]]:
    if not measures:
        return []
    gx, gxe, _ = _library()
    suite = gx.ExpectationSuite(name=f"{stage}.measures")
    for m in measures:
        suite.add_expectation(
            gxe.ExpectColumnValuesToBeBetween(column=m.name, min_value=m.least, max_value=m.most, severity=m.severity)
        )
    passed = _validate(suite, pd.DataFrame({m.name: pd.Series([m.value], dtype=object) for m in measures}))
    rows = []
    for m in measures:
        found = "unknown" if m.value is None else f"{m.value:,}"
        detail = f"expected {m.least:,} to {m.most:,}, found {found}" + (f": {m.about}" if m.about else "")
        rows.append(_row(f"gate {stage}: {m.name}", passed[m.name], detail, m.severity, None))
    return rows


def _row(check: str, passed: bool, detail: str | None, severity: str, rows: int | None) -> dict[str, Any]:
    outcome = "passed" if passed else "failed"
    return {"x_Check": check, "x_Outcome": outcome, "x_Detail": detail, "x_RowsIn": rows, "severity": severity}


def _validate(suite: Any, table: pd.DataFrame) -> dict[str, bool]:
    """Whether the expectation of each column holds; an expectation that could not be evaluated is an error, never a pass."""
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _batch()(table).validate(suite)
    outcome = {}
    for one in found.results:
        column = one.expectation_config.kwargs["column"]
        error = one.exception_info
        if error.get("raised_exception") or any(
            isinstance(v, dict) and v.get("raised_exception") for v in error.values()
        ):
            raise GateError(
                f"gate {suite.name}: the expectation on {column} could not be evaluated: {error}. Report it with the day's "
                "settings; nothing was published.",
                stage=suite.name,
                failed=[column],
                rows=[],
            )
        outcome[column] = bool(one.success)
    return outcome


@cache
def _library() -> tuple[Any, Any, Any]:
    """Great Expectations, its expectations and a context in memory; on first use, because the import takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the library
        import great_expectations as gx
        import great_expectations.expectations as gxe

        logging.getLogger("great_expectations.data_context.types.base").setLevel(
            logging.WARNING
        )  # says where it puts nothing
        context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    return gx, gxe, context


@cache
def _batch() -> Callable[[pd.DataFrame], Any]:
    _, _, context = _library()
    asset = context.data_sources.add_pandas("aggregates").add_dataframe_asset("frame")
    batch = asset.add_batch_definition_whole_dataframe("whole")
    return lambda table: batch.get_batch({"dataframe": table})
