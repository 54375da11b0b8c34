"""Work money of one day by pool: what a pool holds, the layers that share it, and the part of any work address in each layer.

A pool is divided over layers once, at the second rounding; a part of it, such as the work of one charge, is divided here in the
same proportion (op ns), so that it adds up too. Source: infra/rules/ledger.md 4.11.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import LAYERS
from tasks.core import money
from tasks.core.levels import AMOUNTS, NOTHING, Node, Units, amount, not_equal, plain, total
from tasks.errors import LawError

Row = dict[str, Any]
LAYER = ("x_Layer", "x_Pass", "x_Op", "x_Phase", "x_BatchSize", "x_Dtype")
POOL = tuple(name for name in LAYERS.key if name not in LAYER)
"""What the addresses of one pool have in common."""
_HOURLY = ("layer", "pass", "op", "phase", "batch_size", "dtype")


@dataclass(frozen=True)
class Pool:
    """One pool: its amounts, the number of its addresses, and its layers with their rows and op ns, in order."""

    units: Units
    addresses: int
    layers: tuple[Mapping[str, Any], ...]
    ns: tuple[int, ...]


def pools_of(addresses: pa.Table, layers: pa.Table, layer_hourly: pa.Table, job: str) -> dict[tuple[Any, ...], Pool]:
    """The pools of one job on one day, by the values of POOL, instants as ns.

    Args:
        addresses: core_cost__addresses of the day.
        layers: core_cost__layers of the day.
        layer_hourly: core_usage__layer_hourly of the day.
        job: job id.

    Raises:
        LawError: the layers of a pool do not add up to its addresses, in some ledger.
    """
    work = pc.and_(pc.equal(addresses["x_JobId"], job), pc.equal(addresses["x_Category"], "work"))
    found = {pool_key(row): row for row in sums_of(addresses.filter(work), POOL)}
    shares: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows_of(layers.filter(pc.equal(layers["x_JobId"], job)), (*POOL, *LAYER, "x_Evidence", "x_BoundPpm")):
        shares[pool_key(row)].append(row)
    times = _op_times(layer_hourly.filter(pc.equal(layer_hourly["job_id"], job)))
    for key in {*found, *shares}:
        _assert_pool(key, found[key]["units"] if key in found else NOTHING, shares[key])
    return {key: _pool(key, row, shares[key], times) for key, row in found.items()}


def _assert_pool(key: tuple[Any, ...], units: Units, shares: Sequence[Mapping[str, Any]]) -> None:
    told = total(row["units"] for row in shares)
    for ledger, expected, sum_of in zip(AMOUNTS, units, told, strict=True):
        if expected != sum_of:
            raise not_equal(f"pool {pool_name(key)}", ledger, expected, sum_of, f"its {len(shares):,} layers")


def _pool(
    key: tuple[Any, ...], sums: Row, shares: list[Mapping[str, Any]], times: Mapping[tuple[Any, ...], int]
) -> Pool:
    at = dict(zip(POOL, key, strict=True))
    ordered = sorted(shares, key=lambda row: tuple((row[c] is None, row[c]) for c in LAYER))
    names = [tuple(row[c] for c in LAYER) for row in ordered]
    place = (at["x_HourUtc"], at["x_JobId"], at["x_Attempt"])
    own = [times.get((*place, True, at["x_InstanceType"], *name), 0) for name in names]
    # Where this instance type has no op time, that of all types together was the measure.
    ns = own if sum(own) else [times.get((*place, False, None, *name), 0) for name in names]
    if not sum(ns):
        raise LawError(
            f"pool {plain(pool_name(key))}: its {len(ordered):,} layers have no op time in core_usage__layer_hourly, so "
            "nothing says how its work is divided. Hold the commit of the day to its objects with verify.",
            law="1",
            where=pool_name(key),
            expected="op time",
            found=0,
        )
    return Pool(sums["units"], sums["rows"], tuple(ordered), tuple(ns))


def _op_times(layer_hourly: pa.Table) -> dict[tuple[Any, ...], int]:
    """Op ns of work by (hour, job, attempt, by type, type, layer columns), for each type and for all types together."""
    found: dict[tuple[Any, ...], int] = defaultdict(int)
    work = layer_hourly.filter(pc.equal(layer_hourly["category"], "work"))
    for row in rows_of(work, ("hour_utc", "job_id", "attempt", "instance_type", *_HOURLY, "ns"), amounts=()):
        name = tuple(row[c] for c in _HOURLY)
        place = (row["hour_utc"], row["job_id"], row["attempt"])
        found[(*place, True, row["instance_type"], *name)] += row["ns"]
        found[(*place, False, None, *name)] += row["ns"]
    return found


def divide(pool: Pool, units: Units) -> list[Node]:
    """A part of a pool over its layers, greatest first; layers that get nothing in any ledger have no node.

    Each node tells what the whole pool has in that layer, which is the row of core_cost__layers.
    """
    ns = np.array(pool.ns, object)
    start = np.array([0, len(ns)])
    columns = [
        [None] * len(ns) if u is None else [int(p) for p in money.apportion(np.array([u], object), start, ns)]
        for u in units
    ]
    nodes = []
    for row, *parts in zip(pool.layers, *columns, strict=True):
        if any(parts) or not any(units):
            nodes.append(Node("layer", layer_name(row), tuple(parts), _layer_facts(row)))
    return sorted(nodes, key=lambda n: (-max(abs(u or 0) for u in n.units), n.name))


def _layer_facts(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    whole = [f"{name} {amount(u)}" for name, u in zip(AMOUNTS, row["units"], strict=True) if u]
    facts = [("whole pool", ", ".join(whole))] if whole else []
    facts += [(name, str(row[name])) for name in ("x_Evidence", "x_BoundPpm") if row[name] not in (None, 0)]
    return tuple(facts)


def layer_name(row: Mapping[str, Any]) -> str:
    """Layer, pass and op, and what else tells rows of one layer apart."""
    return f"{row['x_Layer']}, {op_name(row)}"


def op_name(row: Mapping[str, Any]) -> str:
    """Pass and op of a layer, and what else tells its rows apart."""
    more = ", ".join((row["x_Phase"] or "", f"batch {row['x_BatchSize']}", row["x_Dtype"] or ""))
    return f"{row['x_Pass']}, {row['x_Op']} ({more})"


def pool_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The pool that a row of addresses or of layers belongs to."""
    return tuple(row[name] for name in POOL)


def pool_name(key: tuple[Any, ...]) -> str:
    """A pool in words."""
    at = dict(zip(POOL, key, strict=True))
    words = (at["x_InstanceType"], at["PricingCategory"], at["BillingAccountId"], at["InvoiceId"], at["x_State"])
    return f"{at['x_JobId']} attempt {at['x_Attempt']}, {hour_text(at['x_HourUtc'])}, " + ", ".join(
        w for w in words if w
    )


def hour_text(ns: int) -> str:
    """An instant of a whole hour, YYYY-MM-DD HH:00 in UTC."""
    return str(np.datetime64(ns, "ns").astype("datetime64[h]")).replace("T", " ") + ":00"


def sums_of(table: pa.Table, by: Sequence[str]) -> list[Row]:
    """Amounts added up by columns, as `rows_of`, and under `rows` of how many rows."""
    found = table.group_by(list(by), use_threads=False).aggregate(
        [*((name, "sum") for name in AMOUNTS), ([], "count_all")]
    )
    names = [name.removesuffix("_sum") for name in found.column_names]
    return [row | {"rows": row["count_all"]} for row in rows_of(found.rename_columns(names), (*by, "count_all"))]


def rows_of(table: pa.Table, columns: Sequence[str], *, amounts: Sequence[str] = AMOUNTS) -> list[Row]:
    """Rows as plain values: instants as ns UTC, and the amounts together as whole units under `units`."""
    values = {}
    for name in columns:
        column = table[name]
        values[name] = (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
    units: list[list[int | None]] = []
    for name in amounts:
        whole, valid = money.to_units(table[name])
        units.append([int(u) if ok else None for u, ok in zip(whole, valid, strict=True)])
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    if amounts:
        for row, of_row in zip(rows, zip(*units, strict=True), strict=True):
            row["units"] = of_row
    return rows
