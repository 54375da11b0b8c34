"""Estimate beside bill, hour by hour, and the bridge from a bill's rows to its addresses.

Pairs of a settled day in; report_reconciliation__hourly and report_bridge__monthly out. No bill row is ever scaled: the factor
touches estimates only, and what a file leaves unexplained stands here and nowhere else. Knows no disk, no clock.
Source: infra/rules/ledger.md 2 and 5.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from schemas.ledger import BRIDGE, RECONCILIATION
from seedance.schema import INSTANT
from tasks.core import money
from tasks.core.calibrate import Verdict, key_of, verdicts, window_sums
from tasks.core.compare import Pair
from tasks.core.estimate import alpha_of, calibrated
from tasks.core.placed import DayInputs
from tasks.core.snapshots import plain
from tasks.core.spans import HOUR_NS

ERRORS = ("mape_before", "weighted_mape_before", "mape_after", "weighted_mape_after")


def reconciliation_hourly(
    inputs: DayInputs, pairs: Sequence[Pair], judged: Mapping[str, Verdict] | None = None
) -> pa.Table:
    """Rows of report_reconciliation__hourly: every machine-hour that was observed or billed, and volume-hours with a size.

    Args:
        inputs: of the settled day; without calibration factors nothing stands there after alpha but estimates.
        pairs: of the settled day.
        judged: what the windows before the day say of each family; the day's own hours say it when None.
    """
    found = own_verdicts(inputs.day, pairs) if judged is None else judged
    rows = [_row(inputs.day_ns, pair, inputs.alphas, found) for pair in pairs]
    columns = []
    for column in RECONCILIATION.columns:
        values = [row[column.name] for row in rows]
        columns.append(
            pa.array(values, pa.int64()).cast(INSTANT) if column.type == INSTANT else pa.array(values, column.type)
        )
    return pa.table(columns, names=list(RECONCILIATION.names))


def own_verdicts(day: str, pairs: Iterable[Pair]) -> dict[str, Verdict]:
    """What the hours of the day itself say of each family."""
    return verdicts(window_sums(day, pairs, None))


def _row(day_ns: int, pair: Pair, alphas: Mapping[str, int] | None, judged: Mapping[str, Verdict]) -> dict[str, Any]:
    resource = pair.key.split("|", 1)[1]
    verdict = judged.get(key_of(pair.cloud, pair.account, pair.family))
    # Amounts of a row are in one currency, and nothing is converted.
    listed = None if pair.paid is not None and not pair.comparable else pair.listed
    paid = pair.paid if pair.paid is not None and len(pair.paid.currencies) == 1 else None
    known = alphas is not None or pair.state == "provisional"
    alpha = alpha_of(alphas or {}, pair.cloud, pair.account, pair.family) if known else None
    after = None if alpha is None else calibrated(listed, alpha)
    findings = {*pair.findings, *(verdict.findings if verdict is not None else ())}
    return {
        "x_HourUtc": day_ns + pair.hour * HOUR_NS,
        "x_Cloud": pair.cloud,
        "x_ResourceId": resource,
        "x_MachineId": resource if pair.is_machine else None,
        "x_Family": pair.family,
        "BillingAccountId": pair.account,
        "ServiceName": pair.service,
        "BillingCurrency": pair.currency,
        "x_ListEstimate": _amount(listed),
        "x_EstimatedCost": _amount(after),
        "BilledCost": _amount(paid.cash) if paid else None,
        "EffectiveCost": _amount(paid.amortised) if paid else None,
        "x_Alpha": _amount(alpha),
        "x_PriceSource": None if pair.price is None else pair.price.source,
        "x_ApeBefore": _ape(listed, paid.amortised if paid else None),
        "x_ApeAfter": _ape(after, paid.amortised if paid else None),
        "x_ObservedNs": pair.observed_ns,
        "x_BilledSpanNs": pair.billed_ns,
        "x_State": pair.state,
        "x_Finding": ", ".join(sorted(findings)) or None,
        "x_DeviationCause": verdict.cause if verdict is not None else None,
    }


def _amount(units: int | None) -> Decimal | None:
    return None if units is None else money.decimal(units)


def _ape(estimate: int | None, billed: int | None) -> float | None:
    """Absolute percentage error against EffectiveCost, as a ratio; None where either is unknown or the bill is zero."""
    if estimate is None or billed is None or billed == 0:
        return None
    return float(Decimal(abs(estimate - billed)) / abs(billed))


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


def errors(reconciliation: pa.Table) -> list[dict[str, str | int | None]]:
    """MAPE and weighted MAPE before and after alpha per cloud, service and currency, as text, 6 digits.

    Over hours with a bill other than zero and a known price. After alpha is None on a day that is not calibrated.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in reconciliation.to_pylist():
        if row["x_ApeBefore"] is not None:
            key = (row["x_Cloud"], row["ServiceName"] or "", row["BillingCurrency"])
            groups.setdefault(key, []).append(row)
    found: list[dict[str, str | int | None]] = []
    for key in sorted(groups):
        rows = groups[key]
        figures = (*_errors(rows, "x_ListEstimate"), *_errors(rows, "x_EstimatedCost"))
        told = {n: None if v is None else f"{v:.6f}" for n, v in zip(ERRORS, figures, strict=True)}
        found.append({"cloud": key[0], "service": key[1], "currency": key[2], "hours": len(rows), **told})
    return found


def _errors(rows: Iterable[Mapping[str, Any]], estimate: str) -> tuple[Decimal | None, Decimal | None]:
    pairs = [(row[estimate], row["EffectiveCost"]) for row in rows if row[estimate] is not None]
    if not pairs:
        return None, None
    ratios = [abs(e - b) / abs(b) for e, b in pairs]
    return sum(ratios) / len(ratios), sum(abs(e - b) for e, b in pairs) / sum(abs(b) for _, b in pairs)


def bridge_monthly(
    bills: Iterable[Mapping[str, Any]], addressed: Mapping[tuple[Any, ...], tuple[int, int]]
) -> pa.Table:
    """Rows of report_bridge__monthly.

    Args:
        bills: per (cloud, account, period, currency) of the snapshots in force, as `tasks.bill.period_facts` gives them.
        addressed: BilledCost and EffectiveCost of the addresses of days that stand on these snapshots, by the same key.
    """
    rows = []
    for bill in bills:
        key = (bill["cloud"], bill["account"], bill["period"], bill["currency"])
        cash, amortised = addressed.get(key, (0, 0))
        lost = bill["raw_minus_stored"]
        expected = bill["stored_billed"] - bill["purchases"] + bill["used"] + bill["unused"]
        rows.append(
            {
                "x_Cloud": key[0],
                "BillingAccountId": key[1],
                "BillingPeriodStart": dt.datetime.fromisoformat(key[2]),
                "BillingCurrency": key[3],
                "x_RawBilledCost": None if lost is None else plain(money.decimal(bill["stored_billed"]) + lost),
                "x_QuantisedAway": None if lost is None else plain(lost),
                "x_StoredBilledCost": money.decimal(bill["stored_billed"]),
                "x_AddressedBilledCost": money.decimal(cash),
                "x_ScheduledBilledCost": money.decimal(bill["scheduled_billed"]),
                "x_StoredEffectiveCost": money.decimal(bill["stored_effective"]),
                "x_AddressedEffectiveCost": money.decimal(amortised),
                "x_ScheduledEffectiveCost": money.decimal(bill["scheduled_effective"]),
                "x_CommitmentPurchases": money.decimal(bill["purchases"]),
                "x_CommitmentUsed": money.decimal(bill["used"]),
                "x_CommitmentUnused": money.decimal(bill["unused"]),
                "x_Unexplained": money.decimal(bill["stored_effective"] - expected),
                "x_Invoice": "not supplied",
            }
        )
    return pa.table([pa.array([r[c.name] for r in rows], c.type) for c in BRIDGE.columns], names=list(BRIDGE.names))
