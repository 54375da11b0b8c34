"""Estimates: what machine-hours cost that the bill has not reached yet.

Observed machine-hours, prices and watermarks in; price and estimate of each out. An estimate never enters a sum of billed
money; it stands in x_EstimatedCost on its own. Knows no disk, no clock. Source: infra/rules/ledger.md 4.13 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa

from tasks.core import money
from tasks.core.categories import equals, machine_keys
from tasks.core.spans import HOUR_NS, MachineHours
from tasks.core.units import time_unit_ns

ALPHA_ONE = 10**money.DIGITS
"""Calibration factor 1, in units of 1e-12."""


@dataclass(frozen=True)
class MachineFacts:
    """What the day's bill says of one machine: accounts and services of its rows, instance type, region, currency, spot."""

    accounts: frozenset[tuple[str, str | None, str | None]]
    instance_type: str | None
    region: str | None
    currency: str | None
    is_spot: bool


@dataclass(frozen=True)
class Estimate:
    """Estimate of one slot: list amount and amount after alpha in whole units, None without a price; the rung it came from."""

    slot: int
    span_ns: int
    list_units: int | None
    units: int | None
    source: str | None
    currency: str | None
    provisional: bool


def machine_facts(charges: pa.Table) -> dict[str, MachineFacts]:
    """Facts of each machine that a machine row of the day names, by `cloud|instance`."""
    rows = charges.filter(pa.array(equals(charges["x_Class"], "machine")))
    columns = (
        "BillingAccountId",
        "SubAccountId",
        "ServiceName",
        "RegionId",
        "BillingCurrency",
        "x_InstanceType",
        "PricingCategory",
    )
    facts: dict[str, MachineFacts] = {}
    gathered: dict[str, list[tuple[str | None, ...]]] = {}
    values = [rows[c].to_pylist() for c in columns]
    for key, *row in zip(machine_keys(rows).to_pylist(), *values, strict=True):
        if key is not None:
            gathered.setdefault(key, []).append(tuple(row))
    for key, found in gathered.items():
        region, currency, kind = (min((str(r[i]) for r in found if r[i] is not None), default=None) for i in (3, 4, 5))
        accounts = frozenset((str(r[0]), r[1], r[2]) for r in found)
        is_spot = {r[6] for r in found} == {"Dynamic"}
        facts[key] = MachineFacts(accounts, kind, region, currency, is_spot)
    return facts


def watermark_of(
    machine: str, facts: Mapping[str, MachineFacts], watermarks: Mapping[str, int], services: Mapping[str, set[str]]
) -> int | None:
    """Instant up to which the bill of a machine is there; None when its cloud has no bill.

    Of a machine that the bill names: the least watermark of its accounts and services. Of any other: the least of the
    services that bill machines in its cloud, or of all services where none does.
    """
    cloud = machine.split("|", 1)[0]
    known = facts.get(machine)
    if known is not None:
        found = [w for a, _, s in known.accounts if (w := watermarks.get(f"{cloud}|{a}|{s or ''}")) is not None]
        if found:
            return min(found)
    of_cloud = {key: w for key, w in watermarks.items() if key.split("|", 1)[0] == cloud}
    billing = services.get(cloud, set())
    chosen = [w for key, w in of_cloud.items() if not billing or key.rsplit("|", 1)[-1] in billing]
    return min(chosen) if chosen else None


def machine_services(charges: pa.Table) -> dict[str, set[str]]:
    """Services that bill machines, by cloud."""
    rows = charges.filter(pa.array(equals(charges["x_Class"], "machine")))
    found: dict[str, set[str]] = {}
    for cloud, service in zip(rows["x_Cloud"].to_pylist(), rows["ServiceName"].to_pylist(), strict=True):
        found.setdefault(cloud, set()).add(service or "")
    return found


class PriceBook:
    """Prices per hour by cloud, instance type and region, of one pricing category: Standard (list) or Dynamic (spot).

    Of several the latest dated at or before the day, else the undated one, else the earliest of later ones.
    """

    def __init__(self, prices: pa.Table, default_region: str, day: str, category: str = "Standard") -> None:
        self._default = default_region
        self._prices: dict[tuple[str, str, str], tuple[Decimal, str]] = {}
        hourly = [
            r
            for r in prices.to_pylist()
            if r["PricingCategory"] == category and time_unit_ns(r["PricingUnit"]) == HOUR_NS
        ]
        hourly.sort(key=lambda r: str(r["BillingCurrency"]), reverse=True)
        dated = [r for r in hourly if r["x_AsOf"][:4].isdigit()]
        later = sorted((r for r in dated if r["x_AsOf"] > day), key=lambda r: str(r["x_AsOf"]), reverse=True)
        before = sorted((r for r in dated if r["x_AsOf"] <= day), key=lambda r: str(r["x_AsOf"]))
        undated = [r for r in hourly if not r["x_AsOf"][:4].isdigit()]
        for row in (*later, *undated, *before):  # the last one stands
            self._prices[row["x_Cloud"], row["SkuId"], row["RegionId"]] = (row["ListUnitPrice"], row["BillingCurrency"])

    def per_hour(self, cloud: str, instance_type: str | None, region: str | None) -> tuple[Decimal, str] | None:
        """Price of one machine-hour and its currency; None when the catalogue has none for that type and region."""
        return self._prices.get((cloud, instance_type or "", region or self._default))


def list_units(price: Decimal, span_ns: int) -> int:
    """price per hour times span, half-even to whole units."""
    return money.half_even(money.units(price) * span_ns, HOUR_NS)


def estimates(
    hours: MachineHours,
    day_ns: int,
    facts: Mapping[str, MachineFacts],
    services: Mapping[str, set[str]],
    watermarks: Mapping[str, int],
    prices: PriceBook,
    alpha: int,
) -> list[Estimate]:
    """An estimate for every observed slot that no usage row of a bill touches, in slot order.

    Slots before the watermark are not provisional: they were observed and not billed, a finding, and have no address.
    """
    found = []
    for number, slot in enumerate(hours.slots):
        if slot.touched or not slot.devices:
            continue
        mark = watermark_of(slot.machine, facts, watermarks, services)
        provisional = mark is None or day_ns + slot.hour * HOUR_NS >= mark
        cloud = slot.machine.split("|", 1)[0]
        known = facts.get(slot.machine)
        price = prices.per_hour(cloud, slot.instance_type, known.region if known else None)
        listed = None if price is None else list_units(price[0], slot.running_ns)
        after = None if listed is None else money.half_even(listed * alpha, ALPHA_ONE)
        found.append(
            Estimate(
                number,
                slot.running_ns,
                listed,
                after,
                None if price is None else "list",
                None if price is None else price[1],
                provisional,
            )
        )
        if not provisional:
            slot.findings.add("unmatched")
        if price is None:
            slot.findings.add("no_price")
    return found
