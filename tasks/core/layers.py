"""Op and step rows to device time by op: the sweep of overlapping kernels, sums over windows, and sampled strata.

A stratum is (hour, device, job, attempt, rank, phase, batch size). Its op ns are sum(active_ns) over the sums of exclusive_ns
of its op rows, by largest remainder in code-point order of layer|pass|op|phase|batch|dtype, divided once. Sampled time that
no op row explains weighs as (none) unattributed_busy. A stratum without a sample gets nothing here: what stands in for it
is known only after the merge. Everything summed is an integer; the bound of a share is rounded up to whole ns before it is
added. Knows no readings and one hour only.

Source: infra/rules/telemetry.md 4.2 and 4.3; the bound is stated in `_bounds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.partials import GREATEST, LAYERS, OPS, STEPS
from seedance.schema import INSTANT
from tasks.core.arrays import (
    Flags,
    Ints,
    all_distinct,
    counts,
    flat,
    grouped,
    ints,
    match_groups,
    merge_rows,
    number_groups,
    offsets,
    plain,
    run_sums,
    sums,
    unite,
)
from tasks.core.money import apportion
from tasks.errors import LawError

OP_KEY = ("layer", "pass", "op", "phase", "batch_size", "dtype")
STRATUM = ("hour_utc", "node", "device_uuid", "job_id", "attempt", "rank", "phase", "batch_size")
NO_LAYER = "(none)"
CATEGORIES = ("work", "communication", "held_idle", "unattributed_busy")
"""What an op row can be; the first two have layers."""
COUNTED = ("calls", "flops", "hw_flops", "bytes_ideal", "uncounted_calls")
RUN_KEYS = ("job_id", "attempt", "rank", "device_uuid", "layer", "pass", "op", "phase", "batch_size", "dtype")
RUN_SUMS = (*COUNTED, "sampled_calls", "busy_ns", "exclusive_ns", "exclusive_us2")
OP_COLUMNS = (*RUN_KEYS, "layer_index", "method", *RUN_SUMS)
"""Columns of an op window that the reduction needs where no other shard can repeat its rows."""
GAPS = ("input_stall_ns", "checkpoint_ns", "held_idle_ns")
SIGMAS = 4
MILLION = 1_000_000


class Segment(NamedTuple):
    """Device time of one op in a unit: key is layer|pass|op|phase|batch|dtype; ns on one clock, [begin, end)."""

    key: str
    begin: int
    end: int


def sweep(segments: Sequence[Segment], begin: int, end: int, *, empty: str = "held_idle") -> dict[str, int]:
    """Exclusive ns of each op in the active time [begin, end) of a unit; they add up to end - begin.

    Compute goes before communication, communication before copies; ops of the first class that is there share a segment
    evenly, and its odd ns go to the first keys in code-point order.

    Args:
        segments: kernels of the unit in any order; what lies outside [begin, end) is cut off.
        begin, end: active time, ns on the clock of the segments.
        empty: name under which time without any kernel is returned.

    Returns:
        Exclusive ns by key, keys without any left out.

    Source: infra/rules/telemetry.md 4.2.
    """
    keys = sorted({s.key for s in segments})
    number = {key: i for i, key in enumerate(keys)}
    own = np.array([number[s.key] for s in segments], np.int64)
    sides = (np.array([s[i] for s in segments], np.int64) for i in (1, 2))
    # Kernels of one key that overlap are one stretch of it: a segment ends only where a key does.
    rows = unite(dict(zip(("key", "begin", "end"), (own, *sides), strict=True)), ("key",))
    own, start, stop = rows["key"], np.clip(rows["begin"], begin, end), np.clip(rows["end"], begin, end)
    points = np.unique(np.concatenate([start, stop, np.array([begin, end], np.int64)]))
    length = np.diff(points)
    first, last = np.searchsorted(points, start), np.searchsorted(points, np.maximum(start, stop))
    at = np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for a, b in zip(first, last, strict=True))])
    at, who = np.divmod(np.sort(at * max(len(keys), 1) + np.repeat(own, last - first)), max(len(keys), 1))
    rank = np.array([{"comm": 1, "copy": 2}.get(_pass_of(key), 0) for key in keys], np.int64)[who]
    best = np.full(len(length), 3, np.int64)
    np.minimum.at(best, at, rank)
    wins = rank == best[at]
    at, who = at[wins], who[wins]
    size = offsets(at, len(length))
    share = (
        apportion(np.where(best == 3, 0, length), size, np.ones(len(at), np.int64))
        if len(at)
        else np.zeros(0, np.int64)
    )
    total = sums(who, len(keys), share)
    found = {key: int(ns) for key, ns in zip(keys, total, strict=True) if ns}
    idle = int(length[best == 3].sum())
    return found | ({empty: found.get(empty, 0) + idle} if idle else {})


def _pass_of(key: str) -> str:
    parts = key.split("|")
    return parts[1] if len(parts) > 1 else ""


class OpRows(Protocol):
    """Op windows by column: a table, or a file that is read as it is summed."""

    @property
    def num_rows(self) -> int: ...

    def column(self, name: str, /) -> pa.ChunkedArray:
        """One column; text may be dictionary-encoded."""


def sum_ops(rows: OpRows) -> pa.Table:
    """Op windows of one shard summed over windows, variants and methods, by RUN_KEYS.

    Rows come sorted by their key, so that each group is one run; a group in several runs (another order, several
    variants) is made one afterwards. Each column is taken once and summed before the next, so that few bytes are at work.

    Returns:
        RUN_KEYS, layer_index (the least), evidence (the greatest), COUNTED and exclusive_us2 as decimal(38, 0), the rest
        int64; text is dictionary-encoded where it came so.

    Raises:
        OverflowError: ns or sampled calls of one op in the hour pass int64.
    """
    keys = {name: flat(rows.column(name)) for name in RUN_KEYS}
    start = _runs(keys.values(), rows.num_rows)
    where = pa.array(start)
    columns: dict[str, pa.Array] = {name: array.take(where) for name, array in keys.items()}
    index = ints(rows.column("layer_index"))
    evidence = _method_evidence(flat(rows.column("method")), keys["layer"])
    if len(start):
        index, evidence = np.minimum.reduceat(index, start), np.maximum.reduceat(evidence, start)
    columns |= {"layer_index": pa.array(index).cast(pa.int32()), "evidence": pa.array(evidence).cast(pa.int16())}
    for name in RUN_SUMS:
        total = run_sums(ints(rows.column(name)), start)
        wide = name in COUNTED or name == "exclusive_us2"
        if not wide and total.dtype == object:
            raise OverflowError(
                f"{name} of one op in one hour passes int64: expected less than 2^63, found {max(total)}"
            )
        columns[name] = counts(total) if wide else pa.array(total)
    return _one_row_each(pa.table(columns))


def reduce_strata(steps: pa.Table, ops: Sequence[pa.Table], devices: pa.Table, hour_ns: int) -> dict[str, pa.Table]:
    """STEPS, OPS and LAYERS of one bucket.

    Args:
        steps: step windows with `node`.
        ops: sums of op windows (`sum_ops`) with `node`.
        devices: DEVICES of the bucket, for instance type and model.
        hour_ns: start of the hour, ns UTC.

    Raises:
        LawError: the parts of a stratum's wall time are more than its wall time.
    """
    strata = _sum_steps(steps, hour_ns)
    rows = _op_rows(ops, hour_ns)
    rows = _explain_rest(strata, rows)
    of_step, of_op, keys = match_groups(strata, rows, STRATUM)
    size = keys.num_rows
    order = np.lexsort([op_order(rows), of_op])
    rows, of_op = rows.take(pa.array(order)), of_op[order]
    weight = ints(rows.column("weight_ns"))
    whole = sums(of_op, size, weight)
    active = sums(of_step, size, ints(strata.column("active_ns")))
    active = np.where(whole > 0, active, 0)
    ns = apportion(active, offsets(of_op, size), weight)
    units = sums(of_step, size, ints(strata.column("units")))
    sampled = sums(of_step, size, ints(strata.column("sampled_units")))
    bound = _bounds(rows, of_op, active, units, sampled, whole)
    rows = put(rows, ns=ns, bound_ns=bound)
    return {
        STEPS.name: _finish_steps(strata, of_step, rows, of_op, whole),
        OPS.name: rows,
        LAYERS.name: layer_rows(rows, devices),
    }


def op_categories(rows: pa.Table) -> Ints:
    """Index into CATEGORIES of each op row."""
    none = _equal(rows.column("layer"), NO_LAYER)
    idle = _equal(rows.column("op"), "held_idle")
    apart = np.asarray(flat(pc.is_in(rows.column("pass"), value_set=pa.array(["comm", "copy"]))))
    return np.where(none, np.where(idle, 2, 3), apart.astype(np.int64))


def op_order(rows: pa.Table) -> Ints:
    """Rank of each row's layer|pass|op|phase|batch|dtype in code-point order; equal keys have equal ranks."""
    group, first = number_groups(rows.column(k) for k in OP_KEY)
    distinct = rows.select(OP_KEY).take(pa.array(first)).to_pylist()
    texts = np.array(["|".join(str(row[k]) for k in OP_KEY) for row in distinct], object)
    rank = np.empty(len(texts), np.int64)
    rank[np.argsort(texts, kind="stable")] = np.arange(len(texts))
    return rank[group]


def layer_rows(rows: pa.Table, devices: pa.Table) -> pa.Table:
    """LAYERS of rows of OPS: summed over ranks, by instance type and model; devices named where these are not known."""
    where = ("hour_utc", "node", "device_uuid")
    of_device, of_row, keys = match_groups(devices, rows, where)
    place = np.full(keys.num_rows, -1, np.int64)
    place[of_device] = np.arange(len(of_device))
    index = pa.array(place[of_row], mask=place[of_row] < 0)
    kind, model = (devices.column(n).take(index) for n in ("instance_type", "gpu_model"))
    known = pc.and_(pc.is_valid(kind), pc.is_valid(model))
    columns = {n: rows.column(n) for n in LAYERS.names if n in rows.column_names}
    columns |= {"instance_type": kind, "gpu_model": model}
    columns |= {n: pc.if_else(known, pa.scalar(None, pa.string()), rows.column(n)) for n in where[1:]}
    return merge_rows(pa.table([columns[n] for n in LAYERS.names], schema=LAYERS.arrow), LAYERS, GREATEST)


def _runs(keys: Iterable[pa.Array], size: int) -> Ints:
    """First row of each stretch of neighbours with equal keys."""
    change: Flags = np.zeros(size, bool)
    change[:1] = True
    for array in keys:
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            array = array.dictionary_encode()
        if pa.types.is_dictionary(array.type):
            if len(array.dictionary) < 2:
                continue
            array = array.indices
        values = array.to_numpy()
        change[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(change)


def _method_evidence(method: pa.Array, layer: pa.Array) -> Ints:
    """2 for a time by formula, 1 for a CUDA graph split by another run's order, 0 for what was timed itself."""
    known = set(pc.unique(method).to_pylist())
    made = np.zeros(len(method), np.int64)
    if "graph" in known:
        made[_equal(method, "graph") & ~_equal(layer, "(graph)")] = 1
    if "formula" in known:
        made[_equal(method, "formula")] = 2
    return made


def _equal(column: pa.ChunkedArray | pa.Array, value: str) -> Flags:
    array = flat(column)
    if pa.types.is_dictionary(array.type):
        hit = np.asarray(pc.equal(array.dictionary, value).to_numpy(zero_copy_only=False), bool)
        return hit[array.indices.to_numpy()] if len(hit) else np.zeros(len(array), bool)
    return np.asarray(pc.equal(array, value).to_numpy(zero_copy_only=False), bool)


def _one_row_each(table: pa.Table) -> pa.Table:
    if all_distinct(table.column(k) for k in RUN_KEYS):
        return table
    how = dict.fromkeys(RUN_SUMS, "sum") | {"layer_index": "min", "evidence": "max"}
    made = grouped(table, RUN_KEYS, how)
    schema = plain(table).schema
    return pa.table([made.column(n).cast(schema.field(n).type) for n in table.column_names], schema=schema)


def _sum_steps(steps: pa.Table, hour_ns: int) -> pa.Table:
    """STEPS of step windows, without what op rows say."""
    start, size = ints(steps.column("window_start_utc")), steps.num_rows
    zero = pa.array(np.zeros(size, np.int64))
    columns = {n: flat(steps.column(n)) for n in STEPS.names if n in steps.column_names}
    parts = sum((ints(steps.column(n)) for n in GAPS), ints(steps.column("active_ns")))
    columns["held_idle_ns"] = pa.array(ints(steps.column("held_idle_ns")) + ints(steps.column("wall_ns")) - parts)
    columns |= {"first_ns": pa.array(start), "last_ns": pa.array(-(start + ints(steps.column("window_ns"))))}
    columns |= dict.fromkeys(("weight_ns", "work_ns", "communication_ns", "op_idle_ns", "op_busy_ns", "evidence"), zero)
    columns["hour_utc"] = pa.repeat(pa.scalar(hour_ns, pa.int64()).cast(INSTANT), size)
    table = plain(pa.table([columns[n] for n in STEPS.names], names=list(STEPS.names)))
    table = table.set_column(
        table.schema.get_field_index("evidence"), "evidence", table.column("evidence").cast(pa.int16())
    )
    merged = merge_rows(table, STEPS, GREATEST)
    short = pc.less(merged.column("held_idle_ns"), 0)
    if pc.any(short).as_py():
        row = merged.filter(short).slice(0, 1).to_pylist()[0]
        raise LawError(
            f"device {row['device_uuid']} of {row['node']} in the hour {row['hour_utc']:%Y-%m-%dT%H}, job {row['job_id']} "
            f"rank {row['rank']}: expected active, input stall, checkpoint and held idle of at most wall_ns "
            f"{row['wall_ns']:,} ns, found {-row['held_idle_ns']:,} ns more. Quarantine the step windows of the host.",
            law="time",
            where=row["device_uuid"],
            expected=row["wall_ns"],
            found=row["wall_ns"] - row["held_idle_ns"],
        )
    return merged


def _op_rows(ops: Sequence[pa.Table], hour_ns: int) -> pa.Table:
    """OPS of sums of op windows, without ns and bound."""
    shaped = [OPS.empty()]
    for table in map(plain, ops):
        zero = pa.array(np.zeros(table.num_rows, np.int64))
        columns = {n: table.column(n) for n in OPS.names if n in table.column_names}
        columns |= {"weight_ns": table.column("exclusive_ns"), "ns": zero, "bound_ns": zero}
        columns["hour_utc"] = pa.repeat(pa.scalar(hour_ns, pa.int64()).cast(INSTANT), table.num_rows)
        shaped.append(pa.table([columns[n] for n in OPS.names], schema=OPS.arrow))
    return merge_rows(pa.concat_tables(shaped), OPS, GREATEST)


def _explain_rest(strata: pa.Table, rows: pa.Table) -> pa.Table:
    """The rows, and a (none) row for sampled active time that the op rows of a sampled stratum do not explain."""
    of_step, of_op, keys = match_groups(strata, rows, STRATUM)
    whole = sums(of_op, keys.num_rows, ints(rows.column("weight_ns")))
    rest = sums(of_step, keys.num_rows, ints(strata.column("sampled_active_ns"))) - whole
    lost = np.flatnonzero((whole > 0) & (rest > 0))
    if not len(lost):
        return rows
    named = {"layer": NO_LAYER, "pass": "none", "op": "unattributed_busy", "dtype": "none"}
    columns = {n: keys.column(n).take(pa.array(lost)) for n in STRATUM}
    columns |= {n: pa.repeat(pa.scalar(v), len(lost)) for n, v in named.items()}
    columns |= {
        n: pa.repeat(pa.scalar(-1 if n == "layer_index" else 0), len(lost)).cast(OPS[n].type)
        for n in OPS.names
        if n not in columns
    }
    columns["weight_ns"] = pa.array(rest[lost])
    extra = pa.table([columns[n] for n in OPS.names], schema=OPS.arrow)
    return merge_rows(pa.concat_tables([rows, extra]), OPS, GREATEST)


def _bounds(rows: pa.Table, group: Ints, active: Ints, units: Ints, sampled: Ints, whole: Ints) -> Ints:
    """Whole ns, rounded up, that a row's part of its stratum's active time can be off by, from the spread over units.

    With n of N units sampled, sd over units of an op's time e, and m the mean active time of a sampled unit:
    4 * sqrt(1 - n / N) * (sd(e) + share * sum of sd over the ops) / (m * sqrt(n)), at most 1; nothing when all units are
    sampled, 1 when n is 1. The second term covers the ratio's denominator. Squares may have been rounded down by 1 us^2 a unit.
    """
    weight = ints(rows.column("weight_ns"))
    n = sampled[group].astype(np.float64)
    squares = np.array(flat(rows.column("exclusive_us2")).cast(pa.float64()))
    mean_us = weight / 1000.0
    safe = np.maximum(n, 1.0)
    spread = np.maximum(squares + n - mean_us * mean_us / safe, 0.0) / np.maximum(n - 1.0, 1.0)
    deviation = np.ceil(np.sqrt(spread) * 1000.0).astype(np.int64)
    together = sums(group, len(whole), deviation)[group]
    share = weight / np.maximum(whole[group], 1)
    mean = np.maximum(whole[group], 1) / safe
    rest = np.sqrt(np.maximum(1.0 - n / np.maximum(units[group], 1), 0.0))
    bound = SIGMAS * rest * (deviation + share * together) / (mean * np.sqrt(safe))
    bound = np.where(n >= units[group], 0.0, np.where(n <= 1, 1.0, np.minimum(bound, 1.0)))
    bound = np.where(n == 0, 1.0, bound)
    return np.where(whole[group] > 0, np.ceil(bound * active[group]), 0.0).astype(np.int64)


def _finish_steps(strata: pa.Table, of_step: Ints, rows: pa.Table, of_op: Ints, whole: Ints) -> pa.Table:
    """STEPS with the time of their op rows by category; their evidence is the worst of the rows that weigh."""
    category, ns = op_categories(rows), ints(rows.column("ns"))
    evidence = np.zeros(len(whole), np.int64)
    weighs = ints(rows.column("weight_ns")) > 0
    np.maximum.at(evidence, of_op[weighs], ints(rows.column("evidence"))[weighs])
    names = ("work_ns", "communication_ns", "op_idle_ns", "op_busy_ns")
    made = {name: sums(of_op, len(whole), np.where(category == i, ns, 0))[of_step] for i, name in enumerate(names)}
    return put(strata, **made, weight_ns=whole[of_step], evidence=evidence[of_step])


def put(table: pa.Table, **columns: Ints) -> pa.Table:
    """The table with these columns' values replaced, in the types they have."""
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(
            place, table.schema.field(place), pa.array(values).cast(table.schema.field(place).type)
        )
    return table
