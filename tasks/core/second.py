"""The second rounding: the work of a pool over layers.

Work addresses and layer time in; money by layer, pass, op, phase, batch size and dtype out, adding up pool by pool. Knows no
charges, no disk, no clock. Source: infra/rules/ledger.md 4.11.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ledger import LAYERS
from seedance.schema import MONEY
from tasks.core import money
from tasks.errors import LawError

LAYER = (
    ("x_Layer", "layer"),
    ("x_Pass", "pass"),
    ("x_Op", "op"),
    ("x_Phase", "phase"),
    ("x_BatchSize", "batch_size"),
    ("x_Dtype", "dtype"),
)
POOL = (*(name for name in LAYERS.key if name not in dict(LAYER)), "x_Revision", "x_Cause")
"""What shares its work money over layers on its own; revision and cause are those of the day."""
AMOUNTS = ("BilledCost", "EffectiveCost", "x_EstimatedCost", "x_PromotionalCost")
_JOB_HOUR = ("hour_utc", "job_id", "attempt")
_EVIDENCE = {"measured": 0, "interpolated": 1, "assumed": 2}


def second_rounding(addresses: pa.Table, layer_hourly: pa.Table) -> pa.Table:
    """Rows of core_cost__layers.

    Args:
        addresses: rows of core_cost__addresses; only those of category work are used.
        layer_hourly: rows of core_usage__layer_hourly of the day; only those of category work are used.

    Returns:
        One row a pool and layer key. The amounts of a pool add up to its addresses; null where all its addresses are null.

    Raises:
        LawError: a pool has money and no layer time to share it.
    """
    work = addresses.filter(pc.equal(addresses["x_Category"], "work"))
    if not len(work):
        return LAYERS.empty()
    pools = work.group_by(list(POOL), use_threads=False).aggregate([(name, "sum") for name in AMOUNTS])
    weights = _Weights(layer_hourly)
    pool_rows: list[int] = []
    layer_rows: list[int] = []
    starts = [0]
    keys = pools.select(["x_HourUtc", "x_JobId", "x_Attempt", "x_InstanceType"])
    keys = keys.set_column(0, "x_HourUtc", pools["x_HourUtc"].cast(pa.int64()))
    for place, (hour, job, attempt, kind) in enumerate(
        zip(*(keys[c].to_pylist() for c in keys.column_names), strict=True)
    ):
        found = weights.of(hour, job, attempt, kind)
        if not found:
            raise LawError(
                f"second rounding: job {job} attempt {attempt} has work money at "
                f"{pools['x_HourUtc'][place].as_py()} and no layer time. "
                "core_usage__layer_hourly and core_usage__device_hourly disagree; reduce the day again.",
                job=job,
                attempt=attempt,
                hour=hour,
            )
        layer_rows += found
        pool_rows += [place] * len(found)
        starts.append(len(layer_rows))
    take_pool, take_layer = pa.array(pool_rows, pa.int64()), pa.array(layer_rows, pa.int64())
    layers = weights.table
    columns = {name: pools[name].take(take_pool) for name in POOL}
    columns |= {ours: layers[theirs].take(take_layer) for ours, theirs in LAYER}
    weight = np.asarray(layers["ns"])[np.array(layer_rows)]
    for name in AMOUNTS:
        total, valid = money.to_units(pools[name + "_sum"].cast(MONEY))
        shares = money.apportion(total, np.array(starts), weight)
        columns[name] = money.from_units(shares, valid[np.array(pool_rows)])
    columns["x_BoundPpm"] = layers["bound_ppm"].take(take_layer)
    columns["x_Evidence"] = layers["evidence"].take(take_layer)
    return pa.table([columns[c.name] for c in LAYERS.columns], names=list(LAYERS.names))


class _Weights:
    """Layer time of (hour, job, attempt, instance type), models summed; all types of the job-hour where the type has none."""

    def __init__(self, layer_hourly: pa.Table) -> None:
        rows = layer_hourly.filter(pc.equal(layer_hourly["category"], "work"))
        rank = pc.index_in(rows["evidence"], value_set=pa.array(list(_EVIDENCE)))
        rows = rows.set_column(rows.schema.get_field_index("evidence"), "evidence", rank)
        names = [theirs for _, theirs in LAYER]
        exact = _summed(rows, [*_JOB_HOUR, "instance_type", *names], pooled=False)
        every = _summed(rows, [*_JOB_HOUR, *names], pooled=True)
        every = every.append_column("instance_type", pa.nulls(len(every), pa.string()))
        table = pa.concat_tables([exact, every.select(exact.column_names)])
        order = pc.sort_indices(table, sort_keys=[(n, "ascending") for n in names])
        table = table.take(order).combine_chunks()
        self._rows: dict[tuple[object, ...], list[int]] = {}
        index = table.select([*_JOB_HOUR, "instance_type", "pooled"])
        index = index.set_column(0, "hour_utc", index["hour_utc"].cast(pa.int64()))
        for place, found in enumerate(zip(*(index[c].to_pylist() for c in index.column_names), strict=True)):
            self._rows.setdefault(found, []).append(place)
        self.table = self._restate_bounds(table)

    def _restate_bounds(self, table: pa.Table) -> pa.Table:
        """Bounds are ppm of the job-hour's work; a pool of one instance type is a part of it, so its bounds are wider."""
        ns, bound = np.asarray(table["ns"]), np.asarray(table["bound_ppm"]).copy()
        total: dict[tuple[object, ...], int] = {}
        for key, places in self._rows.items():
            if key[-1]:
                total[key[:3]] = int(ns[places].sum())
        for key, places in self._rows.items():
            own = int(ns[places].sum())
            if own and own != total[key[:3]]:
                bound[places] = [-(-int(b) * total[key[:3]] // own) for b in bound[places]]
        capped = pa.array(np.minimum(bound, 1_000_000), pa.int32())
        return table.set_column(table.schema.get_field_index("bound_ppm"), "bound_ppm", capped)

    def of(self, hour: int, job: str, attempt: int, kind: str | None) -> list[int]:
        """Row numbers in `table`, in tie order."""
        return (
            self._rows.get((hour, job, attempt, kind, False)) or self._rows.get((hour, job, attempt, None, True)) or []
        )


def _summed(rows: pa.Table, key: list[str], *, pooled: bool) -> pa.Table:
    grouped = rows.group_by(key, use_threads=False).aggregate(
        [("ns", "sum"), ("bound_ppm", "sum"), ("evidence", "max")]
    )
    columns = {k: grouped[k] for k in key} | {"ns": grouped["ns_sum"], "bound_ppm": grouped["bound_ppm_sum"]}
    columns["evidence"] = pa.array(list(_EVIDENCE)).take(grouped["evidence_max"].combine_chunks())
    columns["pooled"] = pa.array([pooled] * len(grouped), pa.bool_())
    return pa.table(columns)
