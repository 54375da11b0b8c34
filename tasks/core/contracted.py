"""What a machine cost by the bill's own unit prices: rows of machines in, one price an hour for each account and type out.

A closed bill knows prices that no list has: negotiated ones. Knows no list, no file, no disk, no clock.
Source: infra/rules/ledger.md 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.snapshots import TIMES, instant_text
from tasks.core.units import HOUR_NS, time_unit_ns

_OF = ("x_Cloud", "BillingAccountId", "x_InstanceType", "RegionId", "BillingCurrency", "x_TieRule", "x_UnitsPerMachine")
_Key = tuple[str, str, str, str, str, str, str]


class Rate(NamedTuple):
    """Price of an hour of a machine, or of the part of it that one meter counts.

    Args:
        cloud, account, instance_type, region, currency: what it is the price of.
        part: tie rule of the meter where it counts a part of a machine; empty for whole machines.
        units: 1e-12 of the currency an hour.
        at: start of the newest charge that it was read from, ns UTC.
    """

    cloud: str
    account: str
    instance_type: str
    region: str
    currency: str
    part: str
    units: int
    at: int


def rates(charges: pa.Table) -> dict[str, list[Rate]]:
    """Rates of each billing period, from usage of machines at Standard terms that is not negative and no correction.

    ContractedUnitPrice of the newest charge that has one; where none has, what the charges cost (EffectiveCost without
    promotions) over the hours that they bill.

    Args:
        charges: stored charges of one delivery with x_Class and the other columns of ties.
    """
    mask = pc.and_(pc.equal(charges["x_Class"], "machine"), pc.equal(charges["ChargeCategory"], "Usage"))
    mask = pc.and_(mask, pc.and_(pc.equal(charges["PricingCategory"], "Standard"), charges["ChargeClass"].is_null()))
    mask = pc.and_(mask, pc.and_(charges["x_InstanceType"].is_valid(), charges["RegionId"].is_valid()))
    negative = pc.or_(pc.less(charges["BilledCost"], 0), pc.less(charges["EffectiveCost"], 0))
    mask = pc.and_(mask, pc.fill_null(pc.greater(charges["x_UnitsPerMachine"], 0), True))  # parts that nobody counts
    rows = charges.filter(pc.and_not(pc.fill_null(mask, False), negative))
    for name in ("ChargePeriodStart", "BillingPeriodStart"):
        rows = rows.set_column(rows.column_names.index(name), name, rows[name].cast(pa.int64()))
    stated = _stated(rows)
    spent = _spent(rows)
    out: dict[str, list[Rate]] = {}
    for key in sorted({*stated, *spent}):
        at, units = stated[key] if key in stated else spent[key]
        period, cloud, account, kind, region, currency, part = key
        out.setdefault(period, []).append(Rate(cloud, account, kind, region, currency, part, units, at))
    return out


def _key(row: Mapping[str, Any]) -> _Key:
    part = row["x_TieRule"] if row["x_UnitsPerMachine"] is not None else ""
    return (
        instant_text(row["BillingPeriodStart"]),
        row["x_Cloud"],
        row["BillingAccountId"],
        row["x_InstanceType"],
        row["RegionId"],
        row["BillingCurrency"],
        part,
    )


def _stated(rows: pa.Table) -> dict[_Key, tuple[int, int]]:
    """Start of the newest charge that states a ContractedUnitPrice by time, and that price for an hour of a machine."""
    groups = rows.group_by(["BillingPeriodStart", *_OF, "ContractedUnitPrice", "PricingUnit"], use_threads=False)
    found: dict[_Key, tuple[int, int]] = {}
    for row in groups.aggregate([("ChargePeriodStart", "max")]).to_pylist():
        per = time_unit_ns(row["PricingUnit"], metered=row["x_UnitsPerMachine"] is not None)
        if row["ContractedUnitPrice"] is None or per is None:
            continue
        units = money.half_even(money.units(row["ContractedUnitPrice"]) * HOUR_NS * _parts(row), per * 10**12)
        newest = (row["ChargePeriodStart_max"], units)
        found[_key(row)] = max(found.get(_key(row), newest), newest)
    return found


def _spent(rows: pa.Table) -> dict[_Key, tuple[int, int]]:
    """Start of the newest charge that bills time, and what an hour of a machine has cost over all of them."""
    quantities = [name for pair in TIMES for name in pair]
    stated = [pc.fill_null(rows[amount].is_valid(), False) for amount, _ in TIMES]
    table = rows.select(
        ["BillingPeriodStart", *_OF, "ChargePeriodStart", "EffectiveCost", "x_PromotionalCost", *quantities]
    )
    for (amount, _), known in zip(TIMES, stated, strict=True):
        table = table.append_column(f"{amount}_known", known)
    units = [unit for _, unit in TIMES]
    known_names = [f"{amount}_known" for amount, _ in TIMES]
    sums = table.group_by(["BillingPeriodStart", *_OF, *units, *known_names], use_threads=False).aggregate(
        [
            ("ChargePeriodStart", "max"),
            *((name, "sum") for name in ("EffectiveCost", "x_PromotionalCost", *(amount for amount, _ in TIMES))),
        ]
    )
    totals: dict[_Key, tuple[int, int, int]] = {}
    for row in sums.to_pylist():
        time = _machine_time(row)
        if not time:
            continue
        cost = money.units(row["EffectiveCost_sum"]) - money.units(row["x_PromotionalCost_sum"])
        old = totals.get(_key(row), (0, 0, 0))
        totals[_key(row)] = (max(old[0], row["ChargePeriodStart_max"]), old[1] + cost, old[2] + time)
    return {key: (at, money.half_even(cost * HOUR_NS * 10**12, time)) for key, (at, cost, time) in totals.items()}


def _parts(row: Mapping[str, Any]) -> int:
    """Units of the meter that a machine has, in 1e-12."""
    count = row["x_UnitsPerMachine"]
    return 10**12 if count is None else money.units(count)


def _machine_time(row: Mapping[str, Any]) -> int:
    """Time of whole machines that rows of one unit bill together, 1e-12 ns; 0 where they state none."""
    for amount, unit in TIMES:
        per = time_unit_ns(row[unit], metered=row["x_UnitsPerMachine"] is not None)
        if row[f"{amount}_known"] and per is not None:
            return money.half_even(money.units(row[f"{amount}_sum"]) * per * 10**12, _parts(row))
    return 0


def machine_prices(found: Iterable[Rate]) -> dict[tuple[str, str, str, str], tuple[str, int, int]]:
    """Price of an hour of a whole machine by (cloud, account, instance type, region): currency, units, newest charge.

    The newest rate of each part counts, of equal age the greater, and the parts add up. A machine that is billed both
    whole and in parts costs what its parts do. Prices in several currencies: that of the newest.

    Args:
        found: rates of one billing period, of all deliveries in force.
    """
    newest: dict[tuple[str, str, str, str], dict[str, dict[str, Rate]]] = {}
    for one in found:
        key = (one.cloud, one.account, one.instance_type, one.region)
        by_part = newest.setdefault(key, {}).setdefault(one.currency, {})
        by_part[one.part] = max(by_part.get(one.part, one), one, key=lambda r: (r.at, r.units))
    prices = {}
    for key, by_currency in sorted(newest.items()):
        told = []
        for currency, by_part in by_currency.items():
            parts = [rate for part, rate in by_part.items() if part] or list(by_part.values())
            told.append((max(r.at for r in parts), currency, sum(r.units for r in parts)))
        at, currency, units = max(told)
        prices[key] = (currency, units, at)
    return prices
