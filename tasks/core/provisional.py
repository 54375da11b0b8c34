"""Addresses of estimates: what the bill has not reached, shared out like the bill will be.

Estimates and machine-hour vectors in; rows of core_cost__addresses out, with x_EstimatedCost alone. They add up to estimate
times alpha on their own and enter no sum of billed money. Knows no disk, no clock. Source: infra/rules/ledger.md 4.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.address_rows import Teams, complete, coverage, hour_instants, of_vector, teams_of
from tasks.core.allocate import Index, dependant_slots, rows_of, share_out
from tasks.core.estimate import NO_FACTS, Estimate, MachineFacts, Terms, Volume
from tasks.core.money import Ints
from tasks.core.spans import HOUR_NS, MachineHours
from tasks.errors import LawError

KEY = "estimate:"
"""What the charge key of an estimate begins with; `<cloud>/<resource>` follows."""


@dataclass(frozen=True)
class _Item:
    """One estimate to be shared out: `cloud|resource`, hour, whose vectors share it, who pays, what it costs."""

    key: str
    hour: int
    slots: list[int]
    facts: MachineFacts
    units: int
    currency: str
    pricing: str


def estimated_rows(
    vector: pa.Table,
    hours: MachineHours,
    found: Sequence[Estimate],
    volumes: Sequence[Volume],
    terms: Terms,
    teams: Teams,
    revision: int,
    cause: str | None,
) -> pa.Table:
    """Addresses of provisional estimates; what has no price has none, and is a finding: unknown is not zero.

    Args:
        vector: rows of spans.VECTOR of every slot, a provisional slot over its observed running time.
        hours: slots of the day.
        found: estimates of machine-hours.
        volumes: volumes and hours; those that are provisional are shared out like dependants.
        terms: what the bill says of the machines.
        teams: owner team by job and attempt.
        revision: number of the commit that will hold the rows.
        cause: why the day is written again; None for the first time.

    Raises:
        LawError: the addresses of an estimate do not add up to it.
    """
    items = [*_machines(hours, found, terms), *_volumes(hours, volumes)]
    if not items:
        return complete({}, 0, revision, cause)
    part, place = rows_of(vector, [item.slots for item in items])
    lone = np.array([i for i, item in enumerate(items) if not item.slots], np.int64)
    units = np.array([item.units for item in items], object)
    units = units.astype(np.int64) if all(abs(int(u)) < 1 << 62 for u in units) else units
    weight = np.asarray(vector["ns"])[place]
    shared = share_out(units, part, weight)
    table = _table(
        [items[i] for i in (*part.tolist(), *lone.tolist())],
        vector.take(pa.array([*place.tolist(), *([None] * len(lone))], pa.int64())),
        np.concatenate([shared.astype(object), units[lone].astype(object)]),
        hours,
        coverage(vector, len(hours.slots)),
        terms.day_ns,
        teams,
    )
    rows = complete(table, len(part) + len(lone), revision, cause)
    assert_estimates(rows, {(_key(i), i.hour): i.units for i in items}, terms.day_ns)
    return rows


def _machines(hours: MachineHours, found: Sequence[Estimate], terms: Terms) -> list[_Item]:
    items = []
    for one in found:
        if one.provisional and one.units is not None and one.price is not None:
            slot = hours.slots[one.slot]
            pricing = "Dynamic" if one.price.source == "spot" else "Standard"
            facts = terms.facts.get(slot.machine, NO_FACTS)
            items.append(_Item(slot.machine, slot.hour, [one.slot], facts, one.units, one.price.currency, pricing))
    return items


def _volumes(hours: MachineHours, volumes: Sequence[Volume]) -> list[_Item]:
    items = []
    for one in volumes:
        if one.provisional and one.units is not None and one.price is not None:
            slots = dependant_slots(hours, list(one.machines), one.hour)
            items.append(_Item(one.key, one.hour, slots, one.facts, one.units, one.price.currency, "Standard"))
    return items


def _table(
    items: Sequence[_Item],
    rows: pa.Table,
    units: Ints,
    hours: MachineHours,
    seen: Index,
    day_ns: int,
    teams: Teams,
) -> dict[str, pa.Array]:
    """Columns of the addresses: the item and the vector row of each; no vector row is idle without a machine."""
    slots = rows["slot"].to_pylist()
    machines = [None if s is None else hours.slots[s].machine.split("|", 1)[1] for s in slots]
    owners = [item.facts.owner for item in items]
    return {
        "x_ChargeKey": pa.array([_key(item) for item in items], pa.string()),
        "x_Occurrence": pa.array([0] * len(items), pa.int32()),
        "x_HourUtc": hour_instants(np.array([item.hour for item in items], np.int64), day_ns),
        "x_Cloud": pa.array([item.key.split("|", 1)[0] for item in items], pa.string()),
        "ResourceId": pa.array([item.key.split("|", 1)[1] for item in items], pa.string()),
        "x_MachineId": pa.array(machines, pa.string()),
        "x_InstanceType": pa.array([None if s is None else hours.slots[s].instance_type for s in slots], pa.string()),
        "BillingAccountId": pa.array([o[0] for o in owners], pa.string()),
        "SubAccountId": pa.array([o[1] for o in owners], pa.string()),
        "ServiceName": pa.array([o[2] for o in owners], pa.string()),
        "x_CoveragePpm": pa.array([None if s is None or seen[s] < 0 else int(seen[s]) for s in slots], pa.int32()),
        "x_Category": pc.fill_null(rows["category"], "idle"),
        "x_Team": teams_of(rows, teams),
        "x_EstimatedCost": money.from_units(units),
        "BillingCurrency": pa.array([item.currency for item in items], pa.string()),
        "x_State": pa.array(["provisional"] * len(items), pa.string()),
        "ChargeCategory": pa.array(["Usage"] * len(items), pa.string()),
        "PricingCategory": pa.array([item.pricing for item in items], pa.string()),
        **of_vector(rows),
    }


def _key(item: _Item) -> str:
    return KEY + item.key.replace("|", "/", 1)


def assert_estimates(addresses: pa.Table, wanted: Mapping[tuple[str, int], int], day_ns: int) -> None:
    """The addresses of each estimate add up to it: price times quantity times alpha, and nothing else is an estimate.

    Args:
        addresses: of estimates alone.
        wanted: whole units by charge key and hour of the day.
        day_ns: start of the day.

    Raises:
        LawError: names the estimate and its hour, both amounts in whole units.
    """
    hour_ns = addresses["x_HourUtc"].cast(pa.int64()).to_pylist()
    units, _ = money.to_units(addresses["x_EstimatedCost"])
    found: dict[tuple[str, int], int] = {}
    for key, at, amount in zip(addresses["x_ChargeKey"].to_pylist(), hour_ns, units.tolist(), strict=True):
        place = (key, (at - day_ns) // HOUR_NS)
        found[place] = found.get(place, 0) + amount
    for place in sorted({*wanted, *found}):
        expected, told = wanted.get(place, 0), found.get(place, 0)
        if expected != told or place not in wanted:
            raise LawError(
                f"estimates: {place[0]} hour {place[1]:02d}: expected {money.decimal(expected)}, addresses add up to "
                f"{money.decimal(told)}. Nothing was published.",
                charge=place[0],
                hour=place[1],
                expected=expected,
                found=told,
            )
