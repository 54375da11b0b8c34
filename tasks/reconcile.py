"""Reconcile: a day's charges and usage to addresses, held to the laws and to the second ledger in SQL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from schemas.billing import CHARGES, PRICES
from schemas.ledger import ADDRESSES, LAYERS, RECONCILIATION, SPANS
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY, JOB_RUNS, LAYER_HOURLY
from seedance.catalogue import catalogue_digest, gpu_instances
from tasks import witness
from tasks.core.calibrate import Verdict, read_verdicts
from tasks.core.ledger import Inputs, Ledger, settle
from tasks.core.reconciliation import errors, findings, own_verdicts, reconciliation_hourly
from tasks.core.reports import totals_by_category
from tasks.io.lake import Handle, Lake, Step
from tasks.plan import DayPlan
from tasks.settings import Settings
from tasks.step import run_step, stage_key

_MODULES = ("tasks.reconcile", "tasks.witness")
_SCHEMAS = (
    CHARGES,
    PRICES,
    DEVICE_HOURLY,
    LAYER_HOURLY,
    ATTACHMENTS,
    JOB_RUNS,
    ADDRESSES,
    LAYERS,
    SPANS,
    RECONCILIATION,
)


def reconcile_day(
    lake: Lake, settings: Settings, plan: DayPlan, usage: Mapping[str, Handle], learnt: Mapping[str, Any] | None
) -> tuple[Step, bool]:
    """The ledger of one day: handles of addresses, layers, spans and the reconciliation; facts: totals, findings, checks.

    Args:
        lake: where everything is.
        settings: region of what no bill has placed.
        plan: of the day.
        usage: handles of its usage tables.
        learnt: facts of `tasks.calibrate`, `alphas` and `verdicts`; None for a day that is not open.

    Raises:
        LawError: money or time does not add up. WitnessError: the second ledger disagrees. Nothing is committed then.
    """
    key = stage_key(
        "reconcile",
        modules=_MODULES,
        schemas=_SCHEMAS,
        settings={
            "default_region": settings.default_region.model_dump(),
            "catalogue": catalogue_digest(),
            "witness": witness.SQL_DIGEST,
            "revision": plan.revision,
            "cause": plan.cause,
            "learnt": learnt,
            "contracted": plan.contracted,
        },
        inputs=[
            plan.charges.sha256,
            plan.prices.sha256,
            *(h.sha256 for h in usage.values()),
            *(f"{k}={v}" for k, v in plan.bill_facts["watermarks"].items()),
        ],
    )
    return run_step(lake, "reconcile", key, lambda: _compute(lake, settings, plan, usage, learnt))


def _compute(
    lake: Lake, settings: Settings, plan: DayPlan, usage: Mapping[str, Handle], learnt: Mapping[str, Any] | None
) -> Step:
    inputs = Inputs(
        day=plan.day,
        charges=lake.read(plan.charges, CHARGES),
        device_hourly=lake.read(usage[DEVICE_HOURLY.name], DEVICE_HOURLY),
        layer_hourly=lake.read(usage[LAYER_HOURLY.name], LAYER_HOURLY),
        attachments=lake.read(usage[ATTACHMENTS.name], ATTACHMENTS),
        jobs=lake.read(usage[JOB_RUNS.name], JOB_RUNS),
        gpu_counts=gpu_counts(),
        prices=lake.read(plan.prices, PRICES),
        watermarks=plan.bill_facts["watermarks"],
        default_region=settings.default_region.model_dump(),
        alphas=None if learnt is None else learnt["alphas"],
        contracted=plan.contracted,
        revision=plan.revision,
        cause=plan.cause,
    )
    ledger = settle(inputs)
    report = witness.check(
        charges=inputs.charges,
        device_hourly=inputs.device_hourly,
        layer_hourly=inputs.layer_hourly,
        attachments=inputs.attachments,
        gpu_counts=inputs.gpu_counts,
        prices=inputs.prices,
        watermarks=inputs.watermarks,
        day=plan.day,
        default_region=inputs.default_region,
        addresses=ledger.addresses,
        layers=ledger.layers,
        spans=ledger.spans,
        alphas=inputs.alphas or {},
        contracted=plan.contracted,
    )
    judged = own_verdicts(plan.day, ledger.pairs) if learnt is None else read_verdicts(learnt["verdicts"])
    hourly = reconciliation_hourly(inputs, ledger.pairs, judged)
    tables: list[tuple[Any, pa.Table]] = [
        (ADDRESSES, ledger.addresses),
        (LAYERS, ledger.layers),
        (SPANS, ledger.spans),
        (RECONCILIATION, hourly),
    ]
    handles = {spec.name: lake.handle(spec, plan.day, [table]) for spec, table in tables}
    return Step(handles, _facts(inputs, ledger, hourly, judged, report))


def gpu_counts() -> dict[str, int]:
    """Devices of each instance type, fractions rounded up; types whose count is unknown are left out."""
    return {i.instance_type: max(1, math.ceil(i.gpu_count)) for i in gpu_instances() if i.gpu_count is not None}


def _facts(
    inputs: Inputs, ledger: Ledger, hourly: pa.Table, judged: Mapping[str, Verdict], report: witness.WitnessReport
) -> dict[str, Any]:
    totals = [
        {k: (None if v is None else str(v)) for k, v in row.items()} for row in totals_by_category(ledger.addresses)
    ]
    found: dict[str, int] = {}  # resource-hours, as the table has them
    for row in findings(hourly):
        found[row["finding"]] = found.get(row["finding"], 0) + row["hours"]
    return {
        "totals": totals,
        "findings": found,
        "charges": len(inputs.charges),
        "addresses": len(ledger.addresses),
        "layers": len(ledger.layers),
        "spans": len(ledger.spans),
        "machine_hours": len(hourly),
        "lost_ns": ledger.lost_ns,
        "unpriced": sorted(
            {f"{p.cloud} {p.family or '(type not stated)'}" for p in ledger.pairs if "no_price" in p.findings}
        ),
        "alphas": inputs.alphas,
        "verdicts": {key: verdict.facts() for key, verdict in judged.items()},
        "errors": errors(hourly),
        "witness": report.facts(),
    }
