"""Estimate beside bill, machine-hour by machine-hour, and the bridge from a bill's rows to its addresses.

A settled ledger in; report_reconciliation__hourly and report_bridge__monthly out. No bill row is ever scaled: the factor touches
estimates only, and what a file leaves unexplained stands here and nowhere else. Knows no disk, no clock.
Source: infra/rules/ledger.md 2 and 5.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from schemas.ledger import BRIDGE, RECONCILIATION
from seedance.schema import INSTANT
from tasks.core import money
from tasks.core.estimate import ALPHA_ONE, PriceBook, list_units, machine_facts
from tasks.core.ledger import Inputs, Ledger
from tasks.core.snapshots import plain
from tasks.core.spans import HOUR_NS


def reconciliation_hourly(inputs: Inputs, ledger: Ledger) -> pa.Table:
    """Rows of report_reconciliation__hourly: every machine-hour that was observed or billed."""
    book = PriceBook(inputs.prices, inputs.default_region, inputs.day)
    spot = PriceBook(inputs.prices, inputs.default_region, inputs.day, "Dynamic")
    facts = machine_facts(inputs.charges)
    estimated = {e.slot: e for e in ledger.estimated}
    rows = []
    for number, slot in enumerate(ledger.hours.slots):
        if slot.billed_ns is None and not slot.devices:
            continue
        cloud, machine = slot.machine.split("|", 1)
        known = facts.get(slot.machine)
        place = (cloud, slot.instance_type, known.region if known else None)
        spot_price = spot.per_hour(*place) if known is not None and known.is_spot else None
        price = spot_price or book.per_hour(*place)
        # Without telemetry the running time is unknown, not zero: there is nothing to set beside the bill.
        listed = None if price is None or not slot.devices else list_units(price[0], slot.running_ns)
        after = None if listed is None else money.half_even(listed * inputs.alpha, ALPHA_ONE)
        billed = ledger.usage_units.get(number) if slot.billed_ns is not None else None
        state = "billed"
        if number in estimated:
            state = "provisional" if estimated[number].provisional else "unmatched"
        accounts = sorted(a[0] for a in known.accounts) if known else [None]
        findings = slot.findings if slot.devices else {*slot.findings, "no_telemetry"}
        rows.append(
            {
                "x_HourUtc": inputs.day_ns + slot.hour * HOUR_NS,
                "x_Cloud": cloud,
                "x_MachineId": machine,
                "x_InstanceType": slot.instance_type,
                "BillingAccountId": accounts[0],
                "BillingCurrency": (known.currency if known else None) or (price[1] if price else None),
                "x_ListEstimate": _amount(listed),
                "x_EstimatedCost": _amount(after),
                "BilledCost": _amount(billed[0]) if billed else None,
                "EffectiveCost": _amount(billed[1]) if billed else None,
                "x_Alpha": money.decimal(inputs.alpha),
                "x_PriceSource": None if price is None else "spot" if spot_price else "list",
                "x_ApeBefore": _ape(listed, billed),
                "x_ApeAfter": _ape(after, billed),
                "x_ObservedNs": slot.running_ns,
                "x_BilledSpanNs": slot.billed_ns,
                "x_State": state,
                "x_Finding": ", ".join(sorted(findings)) or None,
            }
        )
    columns = []
    for column in RECONCILIATION.columns:
        values = [row[column.name] for row in rows]
        columns.append(
            pa.array(values, pa.int64()).cast(INSTANT) if column.type == INSTANT else pa.array(values, column.type)
        )
    return pa.table(columns, names=list(RECONCILIATION.names))


def _amount(units: int | None) -> Decimal | None:
    return None if units is None else money.decimal(units)


def _ape(estimate: int | None, billed: tuple[int, int] | None) -> float | None:
    """Absolute percentage error against EffectiveCost, as a ratio; None where either is unknown or the bill is zero."""
    if estimate is None or billed is None or billed[1] == 0:
        return None
    return float(Decimal(abs(estimate - billed[1])) / abs(billed[1]))


def errors(reconciliation: pa.Table) -> dict[str, Decimal | None]:
    """MAPE and weighted MAPE before alpha, over hours with a bill other than zero and a known price; None without such hours."""
    pairs = [
        (r["x_ListEstimate"], r["EffectiveCost"]) for r in reconciliation.to_pylist() if r["x_ApeBefore"] is not None
    ]
    if not pairs:
        return {"mape": None, "weighted_mape": None}
    ratios = [abs(e - b) / abs(b) for e, b in pairs]
    return {
        "mape": sum(ratios) / len(ratios),
        "weighted_mape": sum(abs(e - b) for e, b in pairs) / sum(abs(b) for _, b in pairs),
    }


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
