"""Strata without a sample to op time, from what other ranks, the day or the FLOP formulas say; decided after the merge.

In this order: the hour's sum over all ranks of (job, attempt, phase, batch size); the day's (both interpolated); the FLOPs
of the stratum's own op rows, else those of the hour, else of the day (assumed); else all of it is unattributed busy time
(assumed). Divided by largest remainder in code-point order of the op key. Knows no readings.
Source: infra/rules/telemetry.md 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.partials import GREATEST, LAYERS, OPS
from tasks.core.arrays import (
    Flags,
    Ints,
    Wide,
    grouped,
    ints,
    match_groups,
    merge_rows,
    number_groups,
    offsets,
    sums,
    whole_numbers,
)
from tasks.core.layers import NO_LAYER, OP_KEY, STRATUM, layer_rows, op_categories, op_order, put
from tasks.core.money import apportion, telescope

CHUNK_ROWS = 1_000_000
"""Op rows that are spread at a time."""
JOB = ("job_id", "attempt", "phase", "batch_size")
INTERPOLATED, ASSUMED = 1, 2
STEP_PARTS = ("work_ns", "communication_ns", "op_idle_ns", "op_busy_ns")


@dataclass(frozen=True)
class Filled:
    """What became of the strata without a sample.

    Args:
        steps: STEPS with every stratum's active time divided.
        layers: LAYERS to add.
        rows: rows of OPS of the strata that were to be kept apart.
    """

    steps: pa.Table
    layers: pa.Table
    rows: pa.Table


@dataclass(frozen=True)
class _Pool:
    """Op rows that can stand in for a stratum: those with equal `keys`, by `weight`."""

    rows: pa.Table
    keys: tuple[str, ...]
    weight: Wide
    evidence: int


def unsampled(steps: pa.Table) -> Flags:
    """Strata with active time and no sample."""
    none: Flags = ints(steps.column("weight_ns")) == 0
    return none & (ints(steps.column("active_ns")) > 0)


def fill(steps: pa.Table, layers: pa.Table, ops: pa.Table, devices: pa.Table, keep: Flags) -> Filled:
    """Divide the active time of every stratum that has no sample.

    Args:
        steps: STEPS of the day.
        layers: LAYERS of the day.
        ops: OPS; those of strata without a sample at least.
        devices: DEVICES of the day, for instance type and model.
        keep: strata whose rows are wanted one by one.
    """
    todo = np.flatnonzero(unsampled(steps))
    if not len(todo):
        return Filled(steps, LAYERS.empty(), OPS.empty())
    parts = np.zeros((len(STEP_PARTS), steps.num_rows), np.int64)
    evidence = ints(steps.column("evidence")).copy()
    added, kept = [LAYERS.empty()], [OPS.empty()]
    for pool in _pools(layers, ops):
        if not len(todo):
            break
        reached = np.zeros(steps.num_rows, bool)
        for owner, rows in _spread(steps, todo, pool):
            category, ns = op_categories(rows), ints(rows.column("ns"))
            for i in range(len(STEP_PARTS)):
                np.add.at(parts[i], owner, np.where(category == i, ns, 0))
            reached[owner] = True
            added.append(layer_rows(rows, devices))
            kept.append(rows.filter(pa.array(keep[owner])))
        evidence[reached] = pool.evidence
        todo = todo[~reached[todo]]
    if len(todo):
        rows = _unknown(steps, todo)
        parts[3][todo] = ints(steps.column("active_ns"))[todo]
        evidence[todo] = ASSUMED
        kept.append(rows.filter(pa.array(keep[todo])))
    told = {name: ints(steps.column(name)) + parts[i] for i, name in enumerate(STEP_PARTS)}
    steps = put(steps, **told, evidence=evidence)
    return Filled(steps, merge_rows(pa.concat_tables(added), LAYERS, GREATEST), pa.concat_tables(kept))


def _pools(layers: pa.Table, ops: pa.Table) -> Iterator[_Pool]:
    """Where to look for a stratum's shares, best first."""
    hour, day = ("hour_utc", *JOB), JOB
    for keys in (hour, day):
        rows = _over_ranks(layers, keys)
        yield _Pool(rows, keys, ints(rows.column("weight_ns")), INTERPOLATED)
    yield _Pool(ops, STRATUM, whole_numbers(ops.column("flops")), ASSUMED)
    for keys in (hour, day):
        rows = _over_ranks(layers, keys)
        yield _Pool(rows, keys, whole_numbers(rows.column("flops")), ASSUMED)


def _over_ranks(layers: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Weights and FLOPs by keys and op, over ranks, machines and, without the hour, hours."""
    names = list(dict.fromkeys([*keys, *OP_KEY]))
    return grouped(layers, names, {"weight_ns": "sum", "flops": "sum", "layer_index": "min"})


def _spread(steps: pa.Table, todo: Ints, pool: _Pool) -> Iterator[tuple[Ints, pa.Table]]:
    """Strata of `todo` that the pool reaches, some at a time: number of the stratum by row, and rows of OPS."""
    wanted = steps.take(pa.array(todo))
    of_step, of_row, keys = match_groups(wanted, pool.rows, pool.keys)
    weighs = np.flatnonzero(np.asarray(pool.weight > 0, bool))
    order = weighs[np.lexsort([op_order(pool.rows)[weighs], of_row[weighs]])]
    start = offsets(of_row[order], keys.num_rows)
    size = np.diff(start)[of_step]
    reached = np.flatnonzero(size > 0)
    active = ints(wanted.column("active_ns"))
    done = 0
    while done < len(reached):
        rows_upto = np.cumsum(size[reached[done:]])
        many = max(int(np.searchsorted(rows_upto, CHUNK_ROWS, side="right")), 1)
        strata = reached[done : done + many]
        done += many
        count = size[strata]
        owner = np.repeat(np.arange(len(strata)), count)
        begin = np.concatenate([[0], np.cumsum(count)])
        source = order[np.arange(begin[-1]) - begin[:-1][owner] + start[of_step[strata]][owner]]
        ns = apportion(active[strata], begin, pool.weight[source])
        stratum = todo[strata][owner]
        # Any share between nothing and all of the stratum is possible where it was not measured.
        yield (
            stratum,
            _rows(steps, stratum, pool.rows, source, ns.astype(np.int64), active[strata][owner], pool.evidence),
        )


def _rows(
    steps: pa.Table, stratum: Ints, named: pa.Table, source: Ints, ns: Ints, bound: Ints, evidence: int
) -> pa.Table:
    """Rows of OPS: stratum from steps, op from the pool; counts are 0, since the stratum's own op rows have them."""
    who, what = steps.take(pa.array(stratum)), named.take(pa.array(source))
    columns = {n: who.column(n) for n in STRATUM} | {
        n: what.column(n) for n in ("layer", "pass", "op", "dtype", "layer_index")
    }
    columns |= {n: pa.repeat(pa.scalar(0), len(ns)).cast(OPS[n].type) for n in OPS.names if n not in columns}
    table = pa.table([columns[n] for n in OPS.names], schema=OPS.arrow)
    return put(table, ns=ns, bound_ns=bound, evidence=np.full(len(ns), evidence))


def _unknown(steps: pa.Table, todo: Ints) -> pa.Table:
    """Rows of OPS that say of whole strata that nothing is known but that they were busy."""
    none = pa.table(
        {
            "layer": [NO_LAYER],
            "pass": ["none"],
            "op": ["unattributed_busy"],
            "dtype": ["none"],
            "layer_index": pa.array([-1], pa.int32()),
        }
    )
    active = ints(steps.column("active_ns"))[todo]
    return _rows(steps, todo, none, np.zeros(len(todo), np.int64), active, active, ASSUMED)


def scale(
    steps: pa.Table, rows: pa.Table, holder_of_step: Ints, holder_of_row: Ints, full: Ints, shared: Ints
) -> tuple[pa.Table, Ints]:
    """Step time of jobs that shared their device, at the share they had.

    Each holder's wall time W becomes floor(W * shared / full), over its op rows and gaps by largest remainder; ops go first, in
    code-point order of their key, then checkpoint, held idle and input stall, by phase and batch size.

    Args:
        steps: STEPS of these holders.
        rows: OPS of these holders, with their ns.
        holder_of_step, holder_of_row: holder of each row, 0 to h - 1.
        full, shared: by holder, length of its step windows, and its part of it, ns.

    Returns:
        The op rows with the ns they keep, and ns by holder of work, communication, checkpoint, input stall, unattributed busy
        and held idle, shape (6, h).
    """
    size = len(full)
    gaps = ("checkpoint_ns", "held_idle_ns", "input_stall_ns")
    gap_category = np.repeat(np.array([2, 5, 3]), steps.num_rows)
    op_category = np.array([0, 1, 5, 4])[op_categories(rows)]
    holder = np.concatenate([holder_of_row, *[holder_of_step] * 3])
    ns = np.concatenate([ints(rows.column("ns")), *[ints(steps.column(n)) for n in gaps]])
    category = np.concatenate([op_category, gap_category])
    unit, _ = number_groups(steps.column(n) for n in ("phase", "batch_size"))
    within = np.concatenate([op_order(rows), *[unit] * 3])
    last = np.concatenate([np.zeros(rows.num_rows, np.int64), *[np.full(steps.num_rows, i + 1) for i in range(3)]])
    order = np.lexsort([within, last, holder])
    wall = sums(holder, size, ns)
    kept = telescope(wall, shared, np.maximum(full, 1))
    made = np.zeros(len(ns), np.int64)
    made[order] = apportion(np.where(full > 0, kept, wall), offsets(holder[order], size), ns[order])
    vector = np.zeros((6, size), np.int64)
    np.add.at(vector, (category, holder), made)
    return put(rows, ns=made[: rows.num_rows]), vector
