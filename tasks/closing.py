"""What bills in force can be relied on for: half-days that no longer change, and prices of closed billing periods.

Calibration of estimates reads nothing else of bills. Knows no telemetry and no address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from schemas.billing import PRICES
from seedance.catalogue import gpu_instance
from tasks.core import changes, contracted, money, snapshots
from tasks.io.lake import Lake
from tasks.settings import Settings
from tasks.standing import InForce, former_in_force, snapshots_in_force


class Contracted(NamedTuple):
    """What a closed bill says that a machine costs an account: `price` has the columns of core_pricing__list."""

    account: str
    price: dict[str, Any]


def complete_windows(
    lake: Lake,
    settings: Settings,
    day: str,
    *,
    bills: Sequence[InForce] | None = None,
    former: Sequence[InForce] | None = None,
) -> frozenset[tuple[str, str, int]]:
    """Half-days whose usage can be taken as complete: what is not may still gain rows.

    Args:
        lake: where deliveries were accepted.
        settings: `bills` names the sources that count.
        day: UTC usage day, YYYY-MM-DD.
        bills: what `snapshots_in_force` gave, when many days are asked for.
        former: what `former_in_force` gave, likewise.

    Returns:
        (cloud, billing account, half): 0 is 00 to 12 UTC, 1 is 12 to 24. The account's usage in it is the same in force
        and just before, in every source and billing period that has some; or all its rows of the period bear an invoice.

    Source: infra/rules/ledger.md 5.
    """
    force = snapshots_in_force(lake, settings) if bills is None else bills
    earlier = former_in_force(lake, settings) if former is None else former
    told: dict[tuple[str, int], list[bool]] = {}
    for at in sorted({(one.source, one.period) for one in force}):
        some = [one for one in force if (one.source, one.period) == at]
        now, before = (_windows(group, day) for group in (some, [e for e in earlier if (e.source, e.period) == at]))
        found = changes.complete(now, before, invoiced_accounts(some))
        for who, half in {(who, half) for side in (now, before) for who, halves in side.items() for half in halves}:
            told.setdefault((who, half), []).append(half in found.get(who, ()))
    whole = [key for key, answers in told.items() if all(answers)]
    return frozenset((*who.split("|", 1), half) for who, half in whole)  # type: ignore[misc]


def _windows(some: Sequence[InForce], day: str) -> dict[str, dict[int, list[str]]]:
    """Digests of the usage of a day's halves, by "cloud|account" and half, of all deliveries of one billing period."""
    found: dict[str, dict[int, list[str]]] = {}
    for one in some:
        for who, days in one.step.facts["windows"].get(one.period, {}).items():
            for half, digest in enumerate(days.get(day, ())):
                if digest is not None:
                    found.setdefault(who, {}).setdefault(half, []).append(digest)
    return found


def invoiced_accounts(some: Sequence[InForce]) -> set[str]:
    """Accounts, "cloud|account", all of whose rows bear an InvoiceId in these deliveries of one billing period."""
    told: dict[str, bool] = {}
    for one in some:
        for who, known in one.step.facts["invoiced"].get(one.period, {}).items():
            told[who] = known and told.get(who, True)
    return {who for who, known in told.items() if known}


def contracted_prices(
    lake: Lake, settings: Settings, before_day: str, *, bills: Sequence[InForce] | None = None
) -> list[Contracted]:
    """Prices of machines at Standard terms by the newest closed bill of each account, sorted.

    Args:
        lake: where deliveries were accepted.
        settings: `bills` names the sources that count.
        before_day: UTC day; only billing periods that ended by its start count.
        bills: what `snapshots_in_force` gave, when many days are asked for.

    Returns:
        Only from periods in which every row of the account bears an InvoiceId.

    Source: infra/rules/ledger.md 5.
    """
    force = snapshots_in_force(lake, settings) if bills is None else bills
    start = snapshots.day_start_ns(before_day)
    newest: dict[tuple[str, str, str, str], Contracted] = {}
    for period in sorted({one.period for one in force}):
        some = [one for one in force if one.period == period and one.step.facts["ends"][period] <= start]
        open_accounts = {f"{o.source}|{who}" for o in some for who in o.step.facts["invoiced"].get(period, {})}
        for source in {one.source for one in some}:
            open_accounts -= {f"{source}|{who}" for who in invoiced_accounts([o for o in some if o.source == source])}
        rates = [
            rate
            for one in some
            for rate in (contracted.Rate(*facts) for facts in one.step.facts["rates"].get(period, ()))
            if f"{one.source}|{rate.cloud}|{rate.account}" not in open_accounts
        ]
        for key, (currency, units, at) in contracted.machine_prices(rates).items():
            newest[key] = Contracted(key[1], _price(key, currency, units, at, period))
    return [newest[key] for key in sorted(newest)]


def _price(key: tuple[str, str, str, str], currency: str, units: int, at: int, period: str) -> dict[str, Any]:
    cloud, _, kind, region = key
    known = gpu_instance(cloud, kind)
    values = {
        "x_Cloud": cloud,
        "SkuId": kind,
        "RegionId": region,
        "PricingCategory": "Standard",
        "x_AsOf": snapshots.instant_text(at)[:10],
        "ListUnitPrice": money.decimal(units),
        "PricingUnit": "Hours",
        "BillingCurrency": currency,
        "x_GpuModel": known.gpu_model if known is not None else "",
        "x_GpuCount": math.ceil(known.gpu_count) if known is not None and known.gpu_count is not None else 0,
        "x_PriceSource": f"contracted: {period[:7]}",
    }
    return {name: values[name] for name in PRICES.names}
