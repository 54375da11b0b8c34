"""Device, process and step rows of some hosts in one hour to what was seen of each device, and to its claims.

A reading covers [sampled - covered, sampled), at most three periods of its shard; one whose state is not "ok" is none. It may
reach back into the hour before, whose step windows lie in another bucket. So each hour is claimed up to its tail only, three
periods before its end; what covers the tail, and what reaches back from the next hour, is kept as it is (`EDGES`), and
`claim_tails` sweeps it after the merge. A reading that reaches back before the day, or before the tail, is cut there.

Knows one hour at a time, and nothing of op rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.partials import CLAIMS, DEVICES, EDGES, SEEN
from seedance.schema import INSTANT
from seedance.shard import Footer
from tasks.core.arrays import (
    UNKNOWN,
    Columns,
    Flags,
    Ints,
    grouped,
    ints,
    join,
    merge_rows,
    nullable,
    number_groups,
    pick,
    plain,
    unite,
)
from tasks.core.claims import CLAIM_KEY, CLAIM_SUMS, HOUR_NS, KINDS, TOTALS, Evidence, claim

CAP_PERIODS = 3
"""A reading covers at most so many of its shard's periods."""
TAIL_NS = 180_000_000_000
"""Tail of an hour in which a host sent no readings, so that no period is known."""
NEVER = 1 << 62
DEVICE_KEY = ("hour_utc", "node", "device_uuid")
HOLDER_KEY = (*DEVICE_KEY, "job_id", "attempt", "rank")
KIND_OF_EDGE = ("reading", "process", "step")
PLACE = ("cloud", "instance_id", "instance_type", "gpu_model", "parent_uuid", "mig_profile")
"""What DEVICES knows of a device beside its time."""
FACTS = ("covered_ns", "util_ppm", "limit_ppm", "process_count", "energy_mj")

Shards = Sequence[tuple[Footer, pa.Table]]


@dataclass(frozen=True)
class Seen:
    """What covers the time of some devices: one row a reading, process reading or union of step windows.

    Args:
        devices: DEVICE_KEY of each device, in order.
        holders: HOLDER_KEY of each holder, in order; rows of `spans` without one have holder UNKNOWN.
        spans: device, holder, kind, begin, end, pid, pid_started_ns and FACTS; UNKNOWN is null.
    """

    devices: pa.Table
    holders: pa.Table
    spans: Columns


def see(devices: pa.Table, processes: pa.Table, steps: pa.Table, hour_ns: int) -> Seen:
    """What covers the time of the devices of one hour.

    Args:
        devices, processes, steps: telemetry rows with `node`, `device_uuid` and `period_ns`; processes as `whole_owner`
            leaves them.
        hour_ns: start of the hour, ns UTC.
    """
    keys = [_keys(t, hour_ns, holder) for t, holder in ((devices, False), (processes, True), (steps, True))]
    everyone = pa.concat_tables(keys)
    device, first = number_groups(everyone.column(k) for k in DEVICE_KEY)
    holder, holder_first = number_groups(everyone.column(k) for k in HOLDER_KEY)
    cuts = np.cumsum([t.num_rows for t in keys])[:-1]
    device_of, holder_of = np.split(device, cuts), np.split(holder, cuts)
    readings = _reading_spans(devices, hour_ns) | {
        "device": device_of[0],
        "holder": np.full(len(device_of[0]), UNKNOWN),
    }
    held = _process_spans(processes, hour_ns) | {"device": device_of[1], "holder": holder_of[1]}
    begin = np.clip(ints(steps.column("window_start_utc")) - hour_ns, 0, HOUR_NS)
    end = np.clip(begin + ints(steps.column("window_ns")), 0, HOUR_NS)
    windows = {"device": device_of[2], "holder": holder_of[2], "begin": begin, "end": end}
    told = np.bincount(device_of[1], minlength=len(first)) > 0
    stepped = unite(_lay_units(windows, ints(steps.column("wall_ns")), told), ("device", "holder"))
    unknown = {n: np.full(len(stepped["begin"]), UNKNOWN) for n in (*FACTS, "pid", "pid_started_ns")}
    stepped |= unknown | {"kind": np.full(len(stepped["begin"]), 2)}
    spans = join(readings, held, stepped)
    spans = pick(spans, spans["begin"] < spans["end"])
    return Seen(everyone.select(DEVICE_KEY).take(pa.array(first)), everyone.take(pa.array(holder_first)), spans)


def observe(seen: Seen, tail: Ints, hour_ns: int) -> tuple[pa.Table, pa.Table, dict[str, Ints]]:
    """Claims of the hour before its tail, the edges for what comes later, and lengths of unions by device.

    Args:
        seen: from `see`.
        tail: by device, where the tail begins, ns from the start of the hour.
        hour_ns: start of the hour, ns UTC.
    """
    holders, spans = seen.holders.num_rows, seen.spans
    claims, totals = claim(_evidence(spans, np.zeros(len(tail), np.int64), tail, _first(spans, holders)))
    late = spans["end"] > tail[spans["device"]]
    edges = [_edges(seen, late, 0)]
    back = (spans["begin"] < 0) & (spans["kind"] < 2)
    if hour_ns % (24 * HOUR_NS):  # before midnight lies another day
        edges.append(_edges(seen, back, HOUR_NS))
    return _claim_table(claims, seen.devices, seen.holders), pa.concat_tables(edges), totals


def claim_tails(edges: pa.Table, devices: pa.Table, steps: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Claims of the tails of all hours, and lengths of unions as DEVICE_KEY with TOTALS.

    Args:
        edges: EDGES of the day.
        devices: DEVICES of the day, for where each tail begins; a device that an hour lacks is all tail.
        steps: STEPS of the day, for each holder's first window of the hour.
    """
    names = pa.concat_tables([plain(edges.select(HOLDER_KEY)), plain(steps.select(HOLDER_KEY))])
    both = pa.concat_tables([names.select(DEVICE_KEY), plain(devices.select(DEVICE_KEY))])
    device, first = number_groups(both.column(k) for k in DEVICE_KEY)
    low = np.zeros(len(first), np.int64)
    low[device[names.num_rows :]] = ints(devices.column("tail_ns"))
    holder, holder_first = number_groups(names.columns)
    spans = {n: ints(edges.column(n)) for n in FACTS}
    spans |= {"begin": ints(edges.column("begin_ns")), "end": ints(edges.column("end_ns"))}
    spans |= {"pid": ints(edges.column("host_pid")), "pid_started_ns": ints(edges.column("pid_started_ns"))}
    spans |= {"device": device[: edges.num_rows], "holder": holder[: edges.num_rows]}
    spans["kind"] = ints(pc.index_in(edges.column("kind"), value_set=pa.array(KIND_OF_EDGE)))
    start = np.full(len(holder_first), NEVER)
    begun = ints(steps.column("first_ns")) - ints(steps.column("hour_utc"))
    np.minimum.at(start, holder[edges.num_rows :], begun)
    claims, totals = claim(_evidence(spans, low, np.full(len(low), HOUR_NS), start))
    where = both.take(pa.array(first))
    table = _claim_table(claims, where, names.take(pa.array(holder_first)))
    lengths = pa.table([*where.columns, *(pa.array(totals[n]) for n in TOTALS)], names=[*DEVICE_KEY, *TOTALS])
    return table, lengths


def describe(seen: Seen, rows: pa.Table, footers: Sequence[Footer], tail: Ints, totals: Mapping[str, Ints]) -> pa.Table:
    """DEVICES: where each device runs, by its readings of the hour, else by any footer of its host.

    Args:
        seen: from `see`.
        rows: device rows of any state, with `node`, `device_uuid` and `parent_uuid`.
        footers: of every shard of the bucket.
        tail, totals: by device.
    """
    told = _least(rows, ("node", "device_uuid"), ("cloud", "instance_id", "gpu_model", "parent_uuid", "mig_profile"))
    hosts = footer_facts(footers)
    columns: dict[str, list[str | None]] = {n: [] for n in PLACE}
    for place in seen.devices.select(["node", "device_uuid"]).to_pylist():
        host = hosts.get(place["node"], {})
        own = told.get((place["node"], place["device_uuid"]), {})
        for name, values in columns.items():
            values.append(own.get(name) or host.get(name))
    arrays = {
        **{n: seen.devices.column(n) for n in DEVICE_KEY},
        **{n: pa.array(v, pa.string()) for n, v in columns.items()},
    }
    arrays |= {"tail_ns": pa.array(tail)} | {n: pa.array(totals[n]) for n in TOTALS}
    return pa.table([arrays[n] for n in DEVICES.names], schema=DEVICES.arrow)


def footer_facts(footers: Sequence[Footer]) -> dict[str, dict[str, str]]:
    """Cloud, instance and type of each host, the least of what its footers say where they differ."""
    facts: dict[str, dict[str, str]] = {}
    for footer in footers:
        mine = facts.setdefault(footer.node, {})
        for name in ("cloud", "instance_id", "instance_type"):
            value = getattr(footer, name)
            if value:
                mine[name] = min(value, mine.get(name, value))
    return facts


def tails(seen: Seen, devices: pa.Table, processes: pa.Table) -> Ints:
    """By device, where the tail of the hour begins: three of the longest periods of its host before the end."""
    periods: dict[str, int] = {}
    for table in (devices, processes):
        for row in grouped(table, ["node"], {"period_ns": "max"}).to_pylist():
            periods[row["node"]] = max(periods.get(row["node"], 0), row["period_ns"])
    length = [CAP_PERIODS * periods.get(n, TAIL_NS // CAP_PERIODS) for n in seen.devices.column("node").to_pylist()]
    return np.maximum(HOUR_NS - np.array(length, np.int64), 0)


def processes_seen(processes: pa.Table, hour_ns: int) -> pa.Table:
    """SEEN: when each job's process was read, and how old it is."""
    keys = _keys(processes, hour_ns, holder=True)
    at = ints(processes.column("sampled_at_utc"))
    table = pa.table([*keys.columns, ints(processes.column("pid_started_ns")), at, -at], schema=SEEN.arrow)
    return merge_rows(table, SEEN)


def whole_owner(processes: pa.Table, steps: pa.Table) -> pa.Table:
    """Process rows whose job has no attempt or rank take those of the job's least step row on the device, if any."""
    loose = pc.and_(
        pc.is_valid(processes.column("job_id")),
        pc.or_(pc.is_null(processes.column("attempt")), pc.is_null(processes.column("rank"))),
    )
    if not pc.any(loose).as_py():
        return processes
    names = ["node", "device_uuid", "job_id", "attempt", "rank"]
    known: list[tuple[Any, ...]] = [tuple(r.values()) for r in grouped(steps, names).to_pylist()]
    made: dict[str, list[int | None]] = {"attempt": [], "rank": []}
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in processes.select(names).to_pylist():
        key = tuple(row.values())
        if key not in found:
            fits = [k for k in known if k[:3] == key[:3] and key[3] in (None, k[3]) and key[4] in (None, k[4])]
            found[key] = (row["attempt"], row["rank"]) if row["job_id"] is None or not fits else min(fits)[3:]
        made["attempt"].append(found[key][0])
        made["rank"].append(found[key][1])
    for name, type_ in (("attempt", pa.int16()), ("rank", pa.int32())):
        processes = processes.set_column(processes.schema.get_field_index(name), name, pa.array(made[name], type_))
    return processes


def _lay_units(windows: Columns, wall: Ints, told: Flags) -> Columns:
    """Windows of devices that several ranks share, each as long as its units were and where they can have been.

    A window says that its units ended in it, not where they lay: of ranks that begin within a window, or whose units are longer
    than windows, whole windows would claim one time twice. A rank's units follow one another; so the wall time of each window
    lies as late as its own end and the later windows allow, but for gaps that its own begin does not force. Where processes were
    read, these say who held the device when, and windows stay as they are.

    Args:
        windows: device, holder, begin, end; begin and end in ns from the start of the hour.
        wall: wall time of the units that ended in each.
        told: by device, whether a process was read on it.

    Source: infra/rules/telemetry.md 4.5.
    """
    device_of = np.full(int(windows["holder"].max(initial=-1)) + 1, UNKNOWN)
    device_of[windows["holder"]] = windows["device"]
    crowded = (np.bincount(device_of[device_of != UNKNOWN], minlength=len(told)) > 1) & ~told
    if not crowded.any():
        return windows
    alone = pick(windows, ~crowded[windows["device"]])
    chosen = np.flatnonzero(crowded[windows["device"]])
    chosen = chosen[np.lexsort([windows[n][chosen] for n in ("begin", "end", "holder")])]
    rows, wall = pick(windows, chosen), wall[chosen]
    group = np.concatenate([[0], np.cumsum(np.diff(rows["holder"]) != 0)])
    first = np.flatnonzero(np.diff(group, prepend=-1))
    before = np.cumsum(wall) - wall
    before -= before[first][group]  # of the rank's units that ended in earlier windows
    latest = -_running(-(rows["end"] - before - wall)[::-1], group[::-1])[::-1]
    forced = np.minimum(rows["begin"] - wall - before, latest)
    forced[first] = latest[first]
    begin = before + _running(forced, group)
    return join(alone, rows | {"begin": np.maximum(begin, 0), "end": np.maximum(begin + wall, 0)})


def _running(values: Ints, group: Ints) -> Ints:
    """The greatest value so far within each group of rows that stand together."""
    width = int(values.max()) - int(values.min()) + 1
    base: Ints = np.cumsum(np.diff(group, prepend=group[0]) != 0) * width
    reach: Ints = np.maximum.accumulate(values + base)
    return reach - base


def _keys(table: pa.Table, hour_ns: int, holder: bool) -> pa.Table:
    hour = pa.repeat(pa.scalar(hour_ns, pa.int64()).cast(INSTANT), table.num_rows)
    size = table.num_rows
    columns = [hour, table.column("node"), table.column("device_uuid")]
    types = {"job_id": pa.string(), "attempt": pa.int16(), "rank": pa.int32()}
    columns += [table.column(n) if holder else pa.nulls(size, t) for n, t in types.items()]
    return plain(pa.table(columns, names=list(HOLDER_KEY)))


def _reading_spans(rows: pa.Table, hour_ns: int) -> Columns:
    end = ints(rows.column("sampled_at_utc")) - hour_ns
    util, active = ints(rows.column("gpu_util_ppm")), ints(rows.column("sm_active_ppm"))
    facts = {n: ints(rows.column(n)) for n in ("covered_ns", "process_count", "energy_mj")}
    size = len(end)
    return facts | {
        "kind": np.zeros(size, np.int64),
        "begin": end - _capped(rows),
        "end": end,
        "util_ppm": np.where(util == UNKNOWN, active, util),
        **{n: np.full(size, UNKNOWN) for n in ("limit_ppm", "pid", "pid_started_ns")},
    }


def _process_spans(rows: pa.Table, hour_ns: int) -> Columns:
    end = ints(rows.column("sampled_at_utc")) - hour_ns
    started = ints(rows.column("pid_started_ns"))
    size = len(end)
    return {
        "kind": np.ones(size, np.int64),
        "end": end,
        # A process holds nothing before it started, however long the reading that sees it first.
        "begin": np.maximum(end - _capped(rows), started - hour_ns),
        "util_ppm": ints(rows.column("sm_util_ppm")),
        "limit_ppm": ints(rows.column("mps_limit_ppm")),
        "pid": ints(rows.column("host_pid")),
        "pid_started_ns": started,
        "covered_ns": ints(rows.column("covered_ns")),
        **{n: np.full(size, UNKNOWN) for n in ("process_count", "energy_mj")},
    }


def _capped(rows: pa.Table) -> Ints:
    covered, period = ints(rows.column("covered_ns")), ints(rows.column("period_ns"))
    return np.where(period > 0, np.minimum(covered, CAP_PERIODS * period), covered)


def _first(spans: Columns, holders: int) -> Ints:
    first = np.full(holders, NEVER)
    step = spans["kind"] == 2
    np.minimum.at(first, spans["holder"][step], spans["begin"][step])
    return first


def _evidence(spans: Columns, low: Ints, high: Ints, first: Ints) -> Evidence:
    readings, processes, steps = (pick(spans, spans["kind"] == k) for k in range(3))
    # One process is its pid and its start on one device.
    order = np.lexsort([processes["pid_started_ns"], processes["pid"]])
    change = np.diff(processes["pid"][order]) != 0
    change |= np.diff(processes["pid_started_ns"][order]) != 0
    number = np.zeros(len(order), np.int64)
    number[order] = np.concatenate([[0], np.cumsum(change)])[: len(order)]
    return Evidence(readings, processes | {"pid": number}, steps, low, high, first)


def _edges(seen: Seen, chosen: Flags, shift: int) -> pa.Table:
    """Rows of EDGES for these spans, moved by `shift` ns into the hour before."""
    rows = pick(seen.spans, chosen)
    where, who = seen.devices.take(pa.array(rows["device"])), seen.holders.take(nullable(rows["holder"], pa.int64()))
    hour = pa.array(ints(where.column("hour_utc")) - shift, pa.int64()).cast(INSTANT)
    facts = {**rows, "begin_ns": rows["begin"] + shift, "end_ns": rows["end"] + shift, "host_pid": rows["pid"]}
    made = {n: nullable(facts[n], EDGES[n].type) for n in ("host_pid", "pid_started_ns", *FACTS)}
    made |= {n: pa.array(facts[n]) for n in ("begin_ns", "end_ns")}
    made |= {"hour_utc": hour, "kind": pa.array(KIND_OF_EDGE).take(pa.array(rows["kind"]))}
    made |= {n: where.column(n) for n in ("node", "device_uuid")} | {
        n: who.column(n) for n in ("job_id", "attempt", "rank")
    }
    return pa.table([made[n] for n in EDGES.names], schema=EDGES.arrow)


def _claim_table(claims: Columns, devices: pa.Table, holders: pa.Table) -> pa.Table:
    """Claims with names for numbers; holders beyond the last are nobody, on the device of their number."""
    count = holders.num_rows
    named = claims["holder"] < count
    who = holders.take(nullable(np.where(named, claims["holder"], UNKNOWN), pa.int64()))
    nobody = devices.take(nullable(np.where(named, UNKNOWN, claims["holder"] - count), pa.int64()))
    made = {n: pc.coalesce(who.column(n), nobody.column(n)) for n in DEVICE_KEY}
    made |= {n: who.column(n) for n in ("job_id", "attempt", "rank")}
    made |= {"kind": pa.array(KINDS).take(pa.array(claims["kind"]))}
    made |= {n: pa.array(claims[n]).cast(CLAIMS[n].type) for n in (*CLAIM_KEY[2:], *CLAIM_SUMS)}
    return merge_rows(pa.table([made[n] for n in CLAIMS.names], schema=CLAIMS.arrow), CLAIMS)


def _least(rows: pa.Table, keys: Sequence[str], names: Sequence[str]) -> dict[tuple[str, ...], dict[str, str]]:
    least = grouped(rows, keys, dict.fromkeys(names, "min"))
    return {tuple(r[k] for k in keys): {n: r[n] for n in names} for r in least.to_pylist()}
