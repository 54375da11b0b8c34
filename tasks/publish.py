"""Publish: reports from a settled day, the laws asserted once more on what was read back, the commit, and `report/`.

Also what is known about a run itself: `report_quality__runs` and `runs/`, the only outputs that hold times.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from schemas.ledger import (
    ADDRESSES,
    BRIDGE,
    JOB_DAILY,
    LAYER_DAILY,
    LAYERS,
    QUALITY,
    RECONCILIATION,
    RESOURCE_DAILY,
    SPANS,
)
from schemas.usage import JOB_RUNS, LAYER_HOURLY
from seedance.canonical import canonical
from seedance.catalogue import catalogue_digest, peak_flops
from tasks import bill
from tasks.core import money
from tasks.core.ledger import assert_money
from tasks.core.reconciliation import bridge_monthly
from tasks.core.reports import job_daily, layer_daily, resource_daily
from tasks.core.snapshots import instant_text
from tasks.errors import DeliveryError, LawError, LayoutError
from tasks.io import parquet
from tasks.io.lake import Commit, Handle, Lake, Step
from tasks.plan import DayPlan, reader_digest
from tasks.settings import Settings
from tasks.step import run_step, stage_key

_MODULES = ("tasks.publish",)
_SCHEMAS = (ADDRESSES, LAYERS, SPANS, JOB_RUNS, LAYER_HOURLY, JOB_DAILY, LAYER_DAILY, RESOURCE_DAILY)
BRIDGE_KEY = ("x_Cloud", "BillingAccountId", "BillingPeriodStart", "BillingCurrency")


def report_day(
    lake: Lake, plan: DayPlan, usage: Mapping[str, Handle], ledger: Mapping[str, Handle]
) -> tuple[Step, bool]:
    """The report tables of one day, as handles."""
    inputs = [h.sha256 for h in (*usage.values(), *ledger.values())]
    key = stage_key(
        "publish", modules=_MODULES, schemas=_SCHEMAS, settings={"catalogue": catalogue_digest()}, inputs=inputs
    )
    return run_step(lake, "publish", key, lambda: _reports(lake, plan, usage, ledger))


def _reports(lake: Lake, plan: DayPlan, usage: Mapping[str, Handle], ledger: Mapping[str, Handle]) -> Step:
    day = dt.date.fromisoformat(plan.day)
    addresses, layers, spans = (lake.read(ledger[spec.name], spec) for spec in (ADDRESSES, LAYERS, SPANS))
    jobs, layer_hourly = lake.read(usage[JOB_RUNS.name], JOB_RUNS), lake.read(usage[LAYER_HOURLY.name], LAYER_HOURLY)
    tables = [
        (JOB_DAILY, job_daily(day, addresses, spans, jobs)),
        (RESOURCE_DAILY, resource_daily(day, addresses, spans)),
        (LAYER_DAILY, layer_daily(day, addresses, layers, layer_hourly, spans, jobs, peak_flops)),
    ]
    for spec, table in tables:
        assert_same_total(addresses, table, spec.name)
    return Step({spec.name: lake.handle(spec, plan.day, [table]) for spec, table in tables})


def assert_same_total(addresses: pa.Table, report: pa.Table, name: str) -> None:
    """Every report adds up to the addresses, in each ledger.

    Raises:
        LawError: names the report, the ledger, both totals.
    """
    for column in ("BilledCost", "EffectiveCost", "x_EstimatedCost", "x_PromotionalCost"):
        expected, found = (_total(t[column]) for t in (addresses, report))
        if expected != found:
            raise LawError(
                f"{name}: {column} adds up to {found}, the addresses to {expected}. Nothing was published.",
                table=name,
                ledger=column,
                expected=expected,
                found=found,
            )


def commit_day(
    lake: Lake,
    plan: DayPlan,
    collected: Mapping[str, Any],
    usage: Mapping[str, Handle],
    ledger: Step,
    reports: Mapping[str, Handle],
) -> Commit:
    """Assert the laws on what was read back, commit, and bring `report/` to the head.

    Raises:
        LawError: what the lake holds does not add up; nothing is committed.
        Moved: another run committed the day from other inputs.
    """
    addresses = lake.read(ledger.handles[ADDRESSES.name], ADDRESSES)
    charges = lake.read(plan.charges, CHARGES)
    assert_money(charges, addresses)
    assert_periods(charges, addresses)
    handles = {plan.charges.table: plan.charges, **usage, **ledger.handles, **reports}
    body = {
        "parent": plan.parent,
        "key": plan.key,
        "data_key": plan.data_key,
        "handles": handles,
        "bills": plan.bill_facts["bills"],
        "prices": plan.prices.to_dict(),
        "alphas": ledger.facts["alphas"],
        "cause": plan.cause,
        "facts": {
            "parts": dict(plan.parts),
            "reader": reader_digest(),
            "quarantined": len(collected["quarantined"]),
            "totals": ledger.facts["totals"],
            "findings": ledger.facts["findings"],
            "errors": ledger.facts["errors"],
            "lost_ns": ledger.facts["lost_ns"],
            "unpriced": ledger.facts["unpriced"],
            "periods": period_totals(addresses),
        },
    }
    commit = lake.commit(plan.day, body)
    lake.materialise(plan.day)
    return commit


def assert_periods(charges: pa.Table, addresses: pa.Table) -> None:
    """Law 1 per account, period, invoice and currency of the day, in each ledger.

    Raises:
        LawError: names the account and period.
    """
    key = ["BillingAccountId", "SubAccountId", "BillingPeriodStart", "InvoiceId", "BillingCurrency"]
    billed = addresses.filter(pc.equal(addresses["x_State"], "billed"))
    have = billed.group_by(key, use_threads=False).aggregate([("BilledCost", "sum"), ("EffectiveCost", "sum")])
    want = charges.group_by(key, use_threads=False).aggregate(
        [("x_DayBilledCost", "sum"), ("x_DayEffectiveCost", "sum")]
    )
    found = {tuple(r[k] for k in key): (r["BilledCost_sum"], r["EffectiveCost_sum"]) for r in have.to_pylist()}
    for row in want.to_pylist():
        expected = (row["x_DayBilledCost_sum"], row["x_DayEffectiveCost_sum"])
        at = tuple(row[k] for k in key)
        told = found.get(at, (Decimal(0), Decimal(0)))
        if told != expected:
            raise LawError(
                f"law 1 (money): account {at[0]}, period {at[2]}, invoice {at[3]}: the bill has {expected[0]} billed and "
                f"{expected[1]} effective {at[4]} on this day, the addresses {told[0]} and {told[1]}. Nothing was "
                "committed; run the day again from its charges.",
                account=at[0],
                expected=expected,
                found=told,
            )


def period_totals(addresses: pa.Table) -> list[dict[str, str]]:
    """Both ledgers of billed addresses per cloud, account, billing period and currency, as text; what the bridge adds up."""
    billed = addresses.filter(pc.equal(addresses["x_State"], "billed"))
    found = billed.group_by(list(BRIDGE_KEY), use_threads=False).aggregate(
        [("BilledCost", "sum"), ("EffectiveCost", "sum")]
    )
    periods = found["BillingPeriodStart"].cast(pa.int64()).to_pylist()
    rows = [
        {
            "cloud": r["x_Cloud"],
            "account": r["BillingAccountId"],
            "period": instant_text(period),
            "currency": r["BillingCurrency"],
            "billed": str(r["BilledCost_sum"]),
            "effective": str(r["EffectiveCost_sum"]),
        }
        for r, period in zip(found.to_pylist(), periods, strict=True)
    ]
    return sorted(rows, key=lambda r: (r["cloud"], r["account"], r["period"], r["currency"]))


def publish_bridge(lake: Lake, settings: Settings, as_of: str) -> list[str]:
    """`report_bridge__monthly` as of a day: every bill in force against the addresses of the days that stand on it.

    Returns:
        Committed days whose bill has changed since: their reports are older than the bill until they are run again.
    """
    addressed: dict[tuple[Any, ...], tuple[int, int]] = {}
    standing: set[str] = set()
    stale = []
    bills = bill.snapshots_in_force(lake, settings)
    for day in lake.committed_days():
        head = _readable_head(lake, day)
        if head is None or not _stands(lake, settings, head, bills):
            stale.append(day)
            continue
        standing.add(day)
        for row in head.body["facts"]["periods"]:
            key = (row["cloud"], row["account"], row["period"], row["currency"])
            cash, amortised = addressed.get(key, (0, 0))
            addressed[key] = (cash + money.units(row["billed"]), amortised + money.units(row["effective"]))
    table = bridge_monthly(bill.period_facts(lake, settings, standing), addressed)
    assert_bridge(table)
    lake.publish_as_of(lake.handle(BRIDGE, None, [table]), as_of)
    return stale


def assert_bridge(bridge: pa.Table) -> None:
    """Law 1 per account and billing period: stored rows = addresses + parts on days that have not been run, in each ledger.

    Raises:
        LawError: names the account, the period and the amounts.
    """
    for row in bridge.to_pylist():
        for ledger in ("BilledCost", "EffectiveCost"):
            stored, addressed, scheduled = (row[f"x_{kind}{ledger}"] for kind in ("Stored", "Addressed", "Scheduled"))
            told = money.total([addressed, scheduled])
            if stored != told:
                raise LawError(
                    f"law 1 (money): {row['x_Cloud']} account {row['BillingAccountId']}, period {row['BillingPeriodStart']}: "
                    f"{ledger} of stored rows is {stored} {row['BillingCurrency']}, of addresses {addressed}, scheduled "
                    f"{scheduled}. The bridge was not published; compare the bill's days with the committed ones.",
                    account=row["BillingAccountId"],
                    expected=stored,
                    found=told,
                )


def _readable_head(lake: Lake, day: str) -> Commit | None:
    try:
        return lake.head(day)
    except LayoutError:  # told when the day was planned
        return None


def _stands(lake: Lake, settings: Settings, head: Commit, bills: Sequence[bill.InForce]) -> bool:
    """Whether the charges that a commit was made from are those in force."""
    try:
        charges, _ = bill.charges_of(lake, settings, head.day, bills=bills)
    except DeliveryError:  # told when the day was planned
        return False
    return head.handles[CHARGES.name].sha256 == charges.sha256


def publish_quality(lake: Lake, day: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace `report_quality__runs` of a day: the checks of the newest run that computed it."""
    values = list(rows)
    table = pa.table(
        [pa.array([r.get(c.name) for r in values], c.type) for c in QUALITY.columns], names=list(QUALITY.names)
    )
    lake.store.replace(f"report/{QUALITY.name}/usage_date={day}/data.parquet", parquet.to_bytes(table, QUALITY))


def record_run(lake: Lake, run_id: str, facts: Mapping[str, Any]) -> None:
    """Keep what a run did, with its times, in `runs/`."""
    lake.store.replace(f"runs/{run_id}.json", canonical(facts))


def _total(column: pa.ChunkedArray) -> Decimal:
    total = pc.sum(column).as_py()
    return Decimal(0) if total is None else Decimal(total)


__all__ = [
    "RECONCILIATION",
    "assert_periods",
    "commit_day",
    "publish_bridge",
    "publish_quality",
    "record_run",
    "report_day",
]
