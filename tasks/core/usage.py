"""A day's telemetry to jobs, device time, layer time and attachments: one partial a bucket, one merge, one finish.

`partial` sums what one bucket (an hour of some hosts) says; `merge` puts partials together, in any order and grouping;
`finish` decides what needs the whole day: what stands in for strata without a sample, whether a process was starting, who
shared a device over the edge of an hour, and where a device runs that no reading of its hour names. The result does not
depend on the order of shards, files or rows, nor on how many workers took part. Knows no storage and no clock.

Formulas: `claims` (a device between its holders), `layers` and `unsampled` (ops of a stratum), `devices` (the hour).
Source: infra/rules/telemetry.md 4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.partials import (
    ATTACHED,
    CLAIMS,
    DEVICES,
    EDGES,
    GREATEST,
    LAYERS,
    OPS,
    PARTIALS,
    REPEATS,
    SEEN,
    STATEMENTS_HEARD,
    STEPS,
)
from schemas.telemetry import DEVICE_SAMPLES, EVENTS, JOBS, OP_WINDOWS, PROCESS_SAMPLES, STEP_WINDOWS
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY, JOB_RUNS, LAYER_HOURLY
from seedance.schema import Table
from seedance.shard import Footer
from tasks.core import layer_table, observe, places, runs
from tasks.core.arrays import (
    Flags,
    Ints,
    distinct_rows,
    grouped,
    ints,
    match_groups,
    merge_rows,
    number_groups,
    plain,
    sums,
)
from tasks.core.claims import HOUR_NS, TOTALS
from tasks.core.devices import BUSY, CHECKPOINT, COMMUNICATION, HELD, INPUT_STALL, WORK, Hours, device_rows
from tasks.core.layers import OpRows, layer_rows, put, reduce_strata, sum_ops
from tasks.core.observe import DEVICE_KEY, HOLDER_KEY
from tasks.core.unsampled import fill, scale, unsampled
from tasks.errors import LawError

DETAIL = OPS.name
"""The partial that is as large as the day; `finish` needs only the rows that `detail_wanted` names."""


def partial(shards: Sequence[tuple[Footer, OpRows]]) -> dict[str, pa.Table]:
    """Everything that one bucket says, as the tables of `schemas.partials`.

    Args:
        shards: footer and rows of each shard, all of one hour; every shard of a host in the hour is here. Text may be
            dictionary-encoded. All are tables, but where a host has one shard of op windows: `OpRows` with OP_COLUMNS do.

    Raises:
        LawError: shards of several hours, or step time that does not add up; carries law, where, expected, found.
    """
    footers = [footer for footer, _ in shards]
    hours = sorted({footer.hour for footer in footers})
    if len(hours) != 1:
        raise LawError(
            f"a bucket holds one hour; found shards of {', '.join(hours) or 'none'}.",
            law="bucket",
            where="partial",
            expected=1,
            found=hours,
        )
    hour_ns = int(datetime.strptime(hours[0], "%Y-%m-%dT%H").replace(tzinfo=UTC).timestamp()) * 1_000_000_000
    repeats: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    rows = {
        spec.name: _together(shards, spec, repeats)
        for spec in (DEVICE_SAMPLES, PROCESS_SAMPLES, STEP_WINDOWS, JOBS, EVENTS)
    }
    readings = _name_devices(rows[DEVICE_SAMPLES.name])
    usable = readings.filter(pc.equal(readings.column("state"), "ok"))
    steps = rows[STEP_WINDOWS.name]
    processes = observe.whole_owner(rows[PROCESS_SAMPLES.name], steps)
    seen = observe.see(usable, processes, steps, hour_ns)
    tail = observe.tails(seen, readings, processes)
    claims, edges, totals = observe.observe(seen, tail, hour_ns)
    devices = observe.describe(seen, readings, footers, tail, totals)
    made = reduce_strata(steps, _op_sums(shards, repeats), devices, hour_ns)
    counted = [(name, *found) for name, found in sorted(repeats.items()) if any(found)]
    return made | {
        DEVICES.name: devices,
        CLAIMS.name: claims,
        EDGES.name: edges,
        SEEN.name: observe.processes_seen(processes, hour_ns),
        STATEMENTS_HEARD.name: runs.statements(rows[JOBS.name]),
        ATTACHED.name: places.attached(rows[EVENTS.name], footers, hour_ns),
        REPEATS.name: pa.table([list(c) for c in zip(*counted, strict=True)] or [[], [], []], schema=REPEATS.arrow),
    }


def merge(parts: Sequence[Mapping[str, pa.Table]]) -> dict[str, pa.Table]:
    """The tables of several partials as one; associative and commutative, a table that a part lacks is empty."""
    made = {}
    for name, spec in PARTIALS.items():
        tables = [spec.empty(), *(p[name].cast(spec.arrow) for p in parts if name in p)]
        made[name] = merge_rows(pa.concat_tables(tables), spec, GREATEST)
    return made


def detail_wanted(merged: Mapping[str, pa.Table]) -> pa.Table:
    """Device, job, attempt and rank by hour whose rows of DETAIL `finish` needs; keys of OPS up to the rank."""
    steps = merged[STEPS.name]
    replaced = _replaced(merged)
    claims, _ = _all_claims(merged, replaced)
    shared = _shared(claims, steps, replaced)
    chosen = pc.or_(pc.is_in(_text_key(steps), value_set=_text_key(shared)), pa.array(unsampled(steps)))
    return grouped(steps.filter(chosen), HOLDER_KEY)


def only(ops: pa.Table, wanted: pa.Table) -> pa.Table:
    """The rows of DETAIL whose device, job, attempt, rank and hour are wanted."""
    of_row, of_wanted, _ = match_groups(ops, wanted, HOLDER_KEY)
    return ops.filter(pa.array(np.isin(of_row, of_wanted)))


def finish(merged: Mapping[str, pa.Table], day: str) -> dict[str, pa.Table]:
    """The tables of `schemas.usage` for a day.

    Args:
        merged: every partial of the day, merged; of DETAIL the rows that `detail_wanted` names are enough.
        day: UTC day, YYYY-MM-DD.

    Raises:
        LawError: a device's hour does not add up, or work in the layer table is not the work of the devices; carries law,
            where, expected, found.
    """
    day_ns = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 1_000_000_000
    devices = places.resolve(merged[DEVICES.name], merged[EDGES.name])
    steps, ops = merged[STEPS.name], merged[OPS.name]
    replaced = _replaced(merged)
    claims, lengths = _all_claims(merged, replaced)
    shared = _shared(claims, steps, replaced)
    is_shared = np.asarray(pc.is_in(_text_key(steps), value_set=_text_key(shared)).to_numpy(zero_copy_only=False), bool)
    filled = fill(steps, merged[LAYERS.name], ops, devices, is_shared)
    hours, changes = _hours(
        filled.steps, claims, lengths, merged[SEEN.name], day_ns, is_shared, (ops, filled.rows), shared
    )
    added = [merged[LAYERS.name], filled.layers, layer_rows(changes, devices)]
    device_table = places.place(device_rows(hours), devices)
    layer_rows_ = layer_table.finish(pa.concat_tables([plain(t) for t in added]), devices)
    layer_table.assert_equal(layer_rows_, device_table)
    made = {
        JOB_RUNS.name: runs.finish(merged[STATEMENTS_HEARD.name], steps, merged[SEEN.name]),
        DEVICE_HOURLY.name: device_table,
        LAYER_HOURLY.name: layer_rows_,
        ATTACHMENTS.name: places.attachments(merged[ATTACHED.name], devices),
    }
    return {name: made[name] for name in (JOB_RUNS.name, DEVICE_HOURLY.name, LAYER_HOURLY.name, ATTACHMENTS.name)}


def _together(shards: Sequence[tuple[Footer, OpRows]], spec: Table, repeats: dict[str, list[int]]) -> pa.Table:
    """Rows of one table of all shards, with the footer's node and period, each key once."""
    tables = [spec.empty().append_column("period_ns", pa.array([], pa.int64()))]
    if "node" not in spec.names:
        tables = [t.append_column("node", pa.array([], pa.string())) for t in tables]
    names = tables[0].column_names
    for footer, table in shards:
        if footer.table == spec.name:
            # The host is the footer's: it chose the bucket. A row of the events may be about another one.
            own = {"period_ns": pa.repeat(pa.scalar(footer.period_ns, pa.int64()), table.num_rows)}
            if spec.name not in (EVENTS.name, JOBS.name):
                own["node"] = pa.repeat(pa.scalar(footer.node), table.num_rows)
            columns = [own[n] if n in own else table.column(n) for n in names]
            tables.append(plain(pa.table(columns, names=names)))
    rows = pa.concat_tables([plain(t) for t in tables])
    rows, duplicates, conflicts = distinct_rows(rows, spec.key)
    repeats[spec.name][0] += duplicates
    repeats[spec.name][1] += conflicts
    return rows


def _op_sums(shards: Sequence[tuple[Footer, OpRows]], repeats: dict[str, list[int]]) -> list[pa.Table]:
    """Sums of the op windows of each host; only a host with several shards can repeat a row."""
    by_node: dict[str, list[OpRows]] = defaultdict(list)
    for footer, table in shards:
        if footer.table == OP_WINDOWS.name:
            by_node[footer.node].append(table)
    made = []
    for node, tables in sorted(by_node.items()):
        rows = tables[0]
        if len(tables) > 1:
            rows, duplicates, conflicts = distinct_rows(pa.concat_tables([plain(t) for t in tables]), OP_WINDOWS.key)
            repeats[OP_WINDOWS.name][0] += duplicates
            repeats[OP_WINDOWS.name][1] += conflicts
        total = sum_ops(rows)
        made.append(total.append_column("node", pa.repeat(pa.scalar(node), total.num_rows)))
    return made


def _name_devices(rows: pa.Table) -> pa.Table:
    """Device rows with `device_uuid`, the slice, else the GPU, and `parent_uuid`, the GPU of a slice.

    A GPU with slices in the hour is no device itself.
    """
    whole = pc.is_null(rows.column("mig_uuid"))
    sliced = pc.unique(rows.column("gpu_uuid").filter(pc.invert(whole)))
    rows = rows.append_column("device_uuid", pc.coalesce(rows.column("mig_uuid"), rows.column("gpu_uuid")))
    parent = pc.if_else(whole, pa.scalar(None, pa.string()), rows.column("gpu_uuid"))
    rows = rows.append_column("parent_uuid", parent)
    return (
        rows.filter(pc.invert(pc.and_(whole, pc.is_in(rows.column("gpu_uuid"), value_set=sliced))))
        if len(sliced)
        else rows
    )


def replaced_ns(merged: Mapping[str, pa.Table]) -> int:
    """Wall time of units on whole GPUs in hours in which slices of them were read: it counts nowhere, as the slices have it."""
    steps = merged[STEPS.name]
    wall = steps.column("wall_ns").filter(_is_replaced(steps, _replaced(merged)))
    return int(pc.sum(wall).as_py() or 0)


def _replaced(merged: Mapping[str, pa.Table]) -> pa.Array:
    """GPUs that are no device in an hour, as its slices are: hour and device as one text."""
    devices = merged[DEVICES.name]
    if devices.column("parent_uuid").null_count == devices.num_rows:
        return pa.array([], pa.string())
    rows = places.resolve(devices, merged[EDGES.name])
    hour = rows.column("hour_utc").cast(pa.int64()).cast(pa.string())
    return pc.unique(pc.binary_join_element_wise(hour, rows.column("parent_uuid"), "\x1f").drop_null())


def _is_replaced(table: pa.Table, replaced: pa.Array) -> pa.ChunkedArray:
    hour = table.column("hour_utc").cast(pa.int64()).cast(pa.string())
    return pc.is_in(pc.binary_join_element_wise(hour, table.column("device_uuid"), "\x1f"), value_set=replaced)


def _all_claims(merged: Mapping[str, pa.Table], replaced: pa.Array) -> tuple[pa.Table, pa.Table]:
    """Claims of whole hours, and lengths of unions as DEVICE_KEY with their sums; none of GPUs that slices replace."""
    devices = merged[DEVICES.name]
    tail_claims, tail_lengths = observe.claim_tails(merged[EDGES.name], devices, merged[STEPS.name])
    claims = merge_rows(pa.concat_tables([plain(merged[CLAIMS.name]), plain(tail_claims)]), CLAIMS)
    lengths = pa.concat_tables([plain(devices.select([*DEVICE_KEY, *TOTALS])), plain(tail_lengths)])
    if len(replaced):
        claims, lengths = (t.filter(pc.invert(_is_replaced(t, replaced))) for t in (claims, lengths))
    return claims, grouped(lengths, DEVICE_KEY, dict.fromkeys(TOTALS, "sum"))


def _shared(claims: pa.Table, steps: pa.Table, replaced: pa.Array) -> pa.Table:
    """Holders whose step windows were not theirs alone: HOLDER_KEY, full_ns and the ns that were theirs.

    Of a GPU that slices replace nothing is anybody's, so that its units count, and their time does not.
    """
    step = claims.filter(pc.equal(claims.column("kind"), "step"))
    own = pc.add(pc.add(step.column("known_ns"), step.column("blind_ns")), step.column("dark_ns"))
    step = plain(step.select([*HOLDER_KEY, "full_ns"])).append_column("own_ns", own)
    made = grouped(step, HOLDER_KEY, {"full_ns": "sum", "own_ns": "sum"})
    made = made.filter(pc.less(made.column("own_ns"), made.column("full_ns")))
    if not len(replaced):
        return made
    gone = grouped(steps.filter(_is_replaced(steps, replaced)), HOLDER_KEY)
    for name, ns in (("full_ns", HOUR_NS), ("own_ns", 0)):
        gone = gone.append_column(name, pa.repeat(pa.scalar(ns, pa.int64()), gone.num_rows))
    return pa.concat_tables([made, gone.cast(made.schema)])


def _text_key(table: pa.Table) -> pa.ChunkedArray:
    """Hour, node, device, job, attempt and rank of each row as one text."""
    hour = table.column("hour_utc").cast(pa.int64()).cast(pa.string())
    parts = [hour, *(pc.fill_null(table.column(n).cast(pa.string()), "") for n in HOLDER_KEY[1:])]
    return pc.binary_join_element_wise(*parts, "\x1f")


def _hours(
    steps: pa.Table,
    claims: pa.Table,
    lengths: pa.Table,
    seen: pa.Table,
    day_ns: int,
    is_shared: Flags,
    details: tuple[pa.Table, pa.Table],
    shared: pa.Table,
) -> tuple[Hours, pa.Table]:
    """What `device_rows` takes, and rows of OPS that bring the layers of shared devices to the share they had."""
    everyone = pa.concat_tables([plain(t.select(HOLDER_KEY)) for t in (claims, steps, seen)])
    holder, first = number_groups(everyone.columns)
    holders, size = everyone.take(pa.array(first)), len(first)
    claimant, of_step, of_seen = np.split(holder, np.cumsum([claims.num_rows, steps.num_rows]))
    device_of, of_length, devices = match_groups(holders, lengths, DEVICE_KEY)
    known = {n: sums(of_length, devices.num_rows, ints(lengths.column(n))) for n in TOTALS}
    vector, evidence = _vectors(steps, of_step, size)
    changes = OPS.empty()
    if is_shared.any():
        changes = _scale_shared(vector, steps.filter(pa.array(is_shared)), holders, details, shared, claims, claimant)
    can_start = _can_start(
        holders, of_step, ints(steps.column("hour_utc")), of_seen, ints(seen.column("pid_started_ns")), day_ns
    )
    return Hours(devices, holders, device_of, vector, evidence, claims, claimant, can_start, known), changes


def _vectors(steps: pa.Table, of_step: Ints, size: int) -> tuple[Ints, Ints]:
    """Step time by category and holder, and the evidence of each part."""
    vector, evidence = np.zeros((2, 6, size), np.int64)
    found = ints(steps.column("evidence"))
    parts = [
        ("work_ns", WORK, True),
        ("communication_ns", COMMUNICATION, True),
        ("op_busy_ns", BUSY, True),
        ("op_idle_ns", HELD, True),
        ("held_idle_ns", HELD, False),
        ("checkpoint_ns", CHECKPOINT, False),
        ("input_stall_ns", INPUT_STALL, False),
    ]
    for name, category, is_op in parts:
        ns = ints(steps.column(name))
        np.add.at(vector[category], of_step, ns)
        if is_op:
            np.maximum.at(evidence[category], of_step, np.where(ns > 0, found, 0))
    return vector, evidence


def _scale_shared(
    vector: Ints,
    steps: pa.Table,
    holders: pa.Table,
    details: tuple[pa.Table, pa.Table],
    shared: pa.Table,
    claims: pa.Table,
    claimant: Ints,
) -> pa.Table:
    """Puts the step time of sharing jobs at their share into `vector`; rows of OPS with the change of each op's ns."""
    rows = pa.concat_tables([plain(t) for t in details])
    everyone = pa.concat_tables([plain(t.select(HOLDER_KEY)) for t in (holders, shared, steps, rows)])
    number, _ = number_groups(everyone.columns)
    of_holder, of_shared, of_step, of_row = np.split(
        number, np.cumsum([holders.num_rows, shared.num_rows, steps.num_rows])
    )
    place = np.full(int(number.max()) + 1, -1, np.int64)
    place[of_shared] = np.arange(shared.num_rows)
    mine = np.flatnonzero(place[of_row] >= 0)
    rows = rows.take(pa.array(mine))
    full, own = ints(shared.column("full_ns")), ints(shared.column("own_ns"))
    scaled, vectors = scale(steps, rows, place[of_step], place[of_row[mine]], full, own)
    where = np.full(len(place), -1, np.int64)
    where[of_holder] = np.arange(holders.num_rows)
    has_steps = np.unique(place[of_step])
    vector[:, where[of_shared[has_steps]]] = vectors[:, has_steps]
    even = np.zeros(holders.num_rows, bool)
    even[claimant[ints(claims.column("even_ns")) > 0]] = True
    assumed = even[where[of_row[mine]]]
    zero = {n: np.zeros(scaled.num_rows, np.int64) for n in ("weight_ns", "bound_ns", "sampled_calls", "busy_ns")}
    change = ints(scaled.column("ns")) - ints(rows.column("ns"))
    scaled = put(scaled, **zero, ns=change, evidence=np.where(assumed, 2, ints(rows.column("evidence"))))
    for name in ("calls", "flops", "hw_flops", "bytes_ideal", "uncounted_calls", "exclusive_us2"):
        scaled = put(scaled, **{name: np.zeros(scaled.num_rows, np.int64)})
    return scaled


def _can_start(holders: pa.Table, of_step: Ints, step_hour: Ints, of_seen: Ints, started: Ints, day_ns: int) -> Flags:
    """Holders whose process started within the day and had no unit in an earlier hour of it."""
    person, first = number_groups(holders.column(n) for n in HOLDER_KEY[1:])
    size = len(first)
    oldest = np.full(size, observe.NEVER)
    np.minimum.at(oldest, person[of_seen], started)
    unit = np.full(size, observe.NEVER)
    np.minimum.at(unit, person[of_step], step_hour)
    hour = ints(holders.column("hour_utc"))
    claimed = np.asarray(pc.is_valid(holders.column("job_id")).to_numpy(), bool)
    within = (oldest[person] >= day_ns) & (oldest[person] < observe.NEVER)
    return claimed & within & (unit[person] >= hour)
