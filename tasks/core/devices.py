"""Claims and step time of devices to the rows of `core_usage__device_hourly`: observed time, each ns in one category.

By device and hour, with W_j the step time of job j at its share, W their sum, U the union of step windows, D of readings:

    O = W + max(0, |D u U| - max(|U|, W)) + min(max(0, |U| - W), |D n U|)

Step time goes first. Time outside U: what nobody holds is `idle`; a job's process before its first unit is `startup`, if the
process started within the day and had no unit in an earlier hour; where a reading gives no utilisation `unobserved`; else what
was measured busy is `unattributed_busy`, the rest `held_idle`. Spare time of a shared device is `held_idle`. Time inside U
beyond W: first what others claim there, then what each job's windows have more than its step time, where a reading covers
them: `held_idle`, since what was busy inside step windows is the steps' own, or `unobserved` by the part of readings without
utilisation, rounded down.

Where step time is more than the job's windows (a unit that began before its window), the excess is taken from time outside U:
from what the same job claims after its first unit, then from its startup, then from all claims of the device, each in
proportion by largest remainder. Energy of step windows goes over the job's step categories by ns, other energy over the
categories of its claim by ns; what is taken from a claim takes its energy along. Knows no op and no layer.
Source: infra/rules/telemetry.md 4.4 and 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.usage import EVIDENCE
from tasks.core.arrays import Columns, Flags, Ints, ints, join, nullable, number_groups, offsets, pick, sums
from tasks.core.claims import HOUR_NS
from tasks.core.money import apportion, telescope
from tasks.errors import LawError

WORK, COMMUNICATION, CHECKPOINT, INPUT_STALL, BUSY, HELD, STARTUP, IDLE, UNOBSERVED = range(9)
NAMES = (
    "work",
    "communication",
    "checkpoint",
    "input_stall",
    "unattributed_busy",
    "held_idle",
    "startup",
    "idle",
    "unobserved",
)
KIND_STEP, KIND_HELD, KIND_IDLE = "step", "held", "idle"
MEASURED, ASSUMED = 0, 2
OWN, OTHERS = 1, 0


@dataclass(frozen=True)
class Hours:
    """Devices of the day's hours and what holds them, numbered in the order of their keys.

    Args:
        devices: hour, node, device.
        holders: hour, node, device, job, attempt, rank.
        device_of: by holder.
        vector: step time by the first six categories and holder, at the holder's share, ns.
        evidence: of each part of it.
        claims: CLAIMS, with `claimant` the holder of each.
        claimant: holder of each claim.
        can_start: by holder: its process started within the day and had no unit before this hour.
        lengths: step_ns, any_ns, both_ns by device.
    """

    devices: pa.Table
    holders: pa.Table
    device_of: Ints
    vector: Ints
    evidence: Ints
    claims: pa.Table
    claimant: Ints
    can_start: Flags
    lengths: Columns


def device_rows(hours: Hours) -> pa.Table:
    """hour_utc, node, device_uuid, job_id, attempt, rank, category, ns, energy_mj, evidence of every device hour.

    Raises:
        LawError: a device's hour has more than an hour, or a negative time; carries law, where, expected, found.
    """
    size, device_of = hours.holders.num_rows, hours.device_of
    step = _of_kind(hours, KIND_STEP)
    claims = {n: ints(hours.claims.column(n)) for n in _MEASURES}
    mine = {n: sums(hours.claimant[step], size, claims[n][step]) for n in _MEASURES}
    wall = hours.vector.sum(axis=0)
    shared = mine["known_ns"] + mine["blind_ns"] + mine["dark_ns"]
    devices = hours.devices.num_rows
    inside, outside, total = _lengths(hours, sums(device_of, devices, wall))
    entries = _entries(hours, claims)
    outer = _take_excess(pick(entries, entries["is_inside"] == 0), np.maximum(wall - shared, 0), device_of, outside)
    moved = sums(outer["holder"], size, outer["moved_mj"])
    inner = _fill_inside(
        pick(entries, entries["is_inside"] == 1), mine, np.maximum(shared - wall, 0), device_of, inside
    )
    stepped = _step_entries(hours, mine, moved, inner)
    rows = _together(join(stepped, inner, outer), ("holder", "category"))
    rows = pick(rows, rows["ns"] != 0)
    _assert_time(hours, rows, total)
    return _table(hours, rows)


_MEASURES = ("full_ns", "known_ns", "busy_ns", "blind_ns", "dark_ns", "spare_ns", "even_ns", "energy_mj", "energy_ns")


def _of_kind(hours: Hours, kind: str) -> Flags:
    return np.asarray(pc.equal(hours.claims.column("kind"), kind).to_numpy(), bool)


def _lengths(hours: Hours, wall: Ints) -> tuple[Ints, Ints, Ints]:
    """By device: observed time beside step time inside U, outside U, and all observed time O."""
    union, either, both = (hours.lengths[n] for n in ("step_ns", "any_ns", "both_ns"))
    outside = np.maximum(either - np.maximum(union, wall), 0)
    inside = np.minimum(np.maximum(union - wall, 0), both)
    _leave_out_twice(hours.devices, union, wall, outside, inside)
    return inside, outside, wall + outside + inside


def _leave_out_twice(devices: pa.Table, union: Ints, wall: Ints, outside: Ints, inside: Ints) -> None:
    """Where a host was renamed within the hour, takes from `outside` and `inside` what makes its device's hour too long.

    Neither readings nor step windows of the two names overlap, or collect had refused one; but a step window under one name may
    go on while readings come under the other. Such time is at most that of the step windows, and step time goes first. Anything
    longer is left for the check of the hour.
    """
    group, first = number_groups(devices.column(n) for n in ("hour_utc", "device_uuid"))
    size = len(first)
    if size == devices.num_rows:
        return
    excess = np.maximum(sums(group, size, wall + outside + inside) - HOUR_NS, 0)
    excess[excess > sums(group, size, union)] = 0
    for number in np.flatnonzero(excess).tolist():
        rows = np.flatnonzero(group == number)[::-1]  # the name that comes first is believed
        for part in (outside, inside):
            for row in rows:
                taken = min(int(excess[number]), int(part[row]))
                part[row] -= taken
                excess[number] -= taken


def _entries(hours: Hours, claims: Columns) -> Columns:
    """Claims beside the jobs' own step windows as rows of holder, category, ns, energy, evidence, is_inside, is_start."""
    flags = {n: ints(hours.claims.column(n)) for n in ("is_inside", "is_before")}
    held, idle = _of_kind(hours, KIND_HELD), _of_kind(hours, KIND_IDLE)
    start = held & (flags["is_before"] > 0) & hours.can_start[hours.claimant]
    rest = held & ~start
    unit = claims["known_ns"] - claims["busy_ns"]
    parts = [
        (idle, IDLE, claims["known_ns"]),
        (start, STARTUP, claims["known_ns"] + claims["blind_ns"]),
        (rest, BUSY, claims["busy_ns"]),
        (rest, HELD, unit),
        (rest, UNOBSERVED, claims["blind_ns"]),
        (held, HELD, claims["spare_ns"]),
    ]
    rows = []
    for mask, category, ns in parts:
        chosen = np.flatnonzero(mask & (ns > 0))
        rows.append(
            {
                "claim": chosen,
                "holder": hours.claimant[chosen],
                "category": np.full(len(chosen), category),
                "ns": ns[chosen],
                "is_inside": flags["is_inside"][chosen],
                # The claim's parts that were split evenly are not told apart from the others.
                "evidence": np.where(claims["even_ns"][chosen] > 0, ASSUMED, MEASURED),
            }
        )
    made = _together(join(*rows), ("claim", "category"))
    size = len(claims["energy_mj"])
    known = sums(made["claim"], size, made["ns"]) > 0
    made["energy_mj"] = apportion(np.where(known, claims["energy_mj"], 0), offsets(made["claim"], size), made["ns"])
    made["energy_ns"] = claims["energy_ns"][made["claim"]]
    return made


def _together(rows: Columns, keys: tuple[str, ...]) -> Columns:
    """Rows with equal keys made one: ns and energy add up, all else keeps its greatest value."""
    rows = pick(rows, np.lexsort([rows[k] for k in reversed(keys)]))
    size = len(rows["ns"])
    if not size:
        return rows
    change = np.zeros(size, bool)
    change[0] = True
    for k in keys:
        change[1:] |= rows[k][1:] != rows[k][:-1]
    start = np.flatnonzero(change)
    return {n: (np.add if n in ("ns", "energy_mj") else np.maximum).reduceat(v, start) for n, v in rows.items()}


def _take_excess(rows: Columns, excess: Ints, device_of: Ints, outside: Ints) -> Columns:
    """Time outside U reduced to what is observed there beside step time, with `moved_mj` the energy that leaves each row."""
    devices = len(outside)
    rows = pick(rows, np.lexsort([rows["category"], rows["claim"], rows["holder"]]))
    ns, device = rows["ns"].copy(), device_of[rows["holder"]]
    surplus = sums(device, devices, ns) - outside
    if not np.any(surplus):
        return rows | {"moved_mj": np.zeros(len(ns), np.int64)}
    by_holder = offsets(device_of, devices)
    taken = apportion(np.where(sums(device_of, devices, excess) > 0, surplus, 0), by_holder, excess)
    for own in (rows["category"] != STARTUP, rows["category"] == STARTUP):
        mine = own & (rows["category"] != IDLE)
        have = sums(rows["holder"][mine], len(excess), ns[mine])
        part = np.minimum(taken, have)
        ns[mine] = apportion(have - part, offsets(rows["holder"][mine], len(excess)), ns[mine])
        taken = taken - part
    # Rows are ordered by holder, and so by device.
    left = sums(device, devices, ns)
    fits = offsets(device, devices)
    ns = apportion(np.where(left > 0, outside, 0), fits, ns)
    energy = telescope(rows["energy_mj"], ns, np.maximum(rows["ns"], 1))
    keeps = excess[rows["holder"]] > 0
    # Energy follows time only to the job that the time goes to; another's claim keeps what it measured while it has time.
    energy = np.where(keeps | (ns == 0), energy, rows["energy_mj"])
    moved = np.where(keeps, rows["energy_mj"] - energy, 0)
    return rows | {"ns": ns, "energy_mj": energy, "moved_mj": moved}


def _fill_inside(rows: Columns, mine: Columns, spare: Ints, device_of: Ints, inside: Ints) -> Columns:
    """Time inside U beside step time: claims of others, then what readings cover of windows, then the rest of windows."""
    holders = np.flatnonzero(spare > 0)
    seen = mine["known_ns"] + mine["blind_ns"]
    covered = np.minimum(spare, seen)
    blind = np.where(seen > 0, telescope(covered, mine["blind_ns"], np.maximum(seen, 1)), 0)
    tiers = [rows | {"tier": np.zeros(len(rows["ns"]), np.int64)}]
    evidence = np.where(mine["even_ns"] > 0, ASSUMED, MEASURED)
    for tier, category, ns in ((1, HELD, covered - blind), (1, UNOBSERVED, blind), (2, HELD, spare - covered)):
        tiers.append(
            {
                "holder": holders,
                "category": np.full(len(holders), category),
                "ns": ns[holders],
                "tier": np.full(len(holders), tier),
                "evidence": evidence[holders],
                "is_leftover": np.ones(len(holders), np.int64),
            }
        )
    made = join(*tiers)
    made = pick(made, np.lexsort([made["category"], made["claim"], made["holder"], device_of[made["holder"]]]))
    device, left = device_of[made["holder"]], inside.copy()
    for tier in range(3):
        here = made["tier"] == tier
        have = sums(device[here], len(inside), made["ns"][here])
        part = np.minimum(left, have)
        made["ns"][here] = apportion(part, offsets(device[here], len(inside)), made["ns"][here])
        left = left - part
    return made


def _step_entries(hours: Hours, mine: Columns, moved: Ints, inner: Columns) -> Columns:
    """Step time of each holder by category, with the energy of its windows; its leftovers in `inner` get their part too."""
    size = hours.holders.num_rows
    energy = mine["energy_mj"] + moved
    vector = hours.vector
    left = np.flatnonzero(inner["is_leftover"] > 0)
    holder = np.concatenate([np.repeat(np.arange(size), 6), inner["holder"][left]])
    ns = np.concatenate([vector.T.reshape(-1), inner["ns"][left]])
    order = np.lexsort([np.arange(len(ns)), holder])
    have = sums(holder, size, ns) > 0
    parts = np.zeros(len(ns), np.int64)
    parts[order] = apportion(np.where(have, energy, 0), offsets(holder[order], size), ns[order])
    inner["energy_mj"][left] = parts[6 * size :]
    inner["energy_ns"][left] = mine["energy_ns"][inner["holder"][left]]
    evidence = np.where(mine["even_ns"] > 0, ASSUMED, hours.evidence).T.reshape(-1)
    return {
        "holder": np.repeat(np.arange(size), 6),
        "category": np.tile(np.arange(6), size),
        "ns": vector.T.reshape(-1).copy(),
        "energy_mj": parts[: 6 * size],
        "energy_ns": np.repeat(mine["energy_ns"], 6),
        "evidence": evidence,
    }


def _assert_time(hours: Hours, rows: Columns, total: Ints) -> None:
    """The second law for observed time: no negative row, the rows add up to O, and O is at most an hour."""
    device = hours.device_of[rows["holder"]]
    found = sums(device, len(total), rows["ns"])
    wrong = (found != total) | (total > HOUR_NS)
    wrong[device[rows["ns"] < 0]] = True
    if not wrong.any():
        return
    first = int(np.flatnonzero(wrong)[0])
    row = hours.devices.slice(first, 1).to_pylist()[0]
    raise LawError(
        f"device {row['device_uuid']} of {row['node']} in the hour {row['hour_utc']:%Y-%m-%dT%H}: expected parts of at "
        f"least 0 ns that add up to the observed {int(total[first]):,} ns, at most {HOUR_NS:,} ns; found "
        f"{int(found[first]):,} ns with the least part {int(rows['ns'][device == first].min(initial=0)):,} ns. Look at the "
        "step windows of the host: wall time of one device cannot be more than the hour.",
        law="time",
        where=f"{row['device_uuid']} {row['hour_utc']:%Y-%m-%dT%H}",
        expected=int(total[first]),
        found=int(found[first]),
    )


def _table(hours: Hours, rows: Columns) -> pa.Table:
    who = hours.holders.take(pa.array(rows["holder"]))
    energy = np.where(rows["energy_ns"] > 0, rows["energy_mj"], -1)
    facts = {
        "category": pa.array(NAMES).take(pa.array(rows["category"])),
        "ns": pa.array(rows["ns"]),
        "energy_mj": nullable(energy, pa.int64()),
        "evidence": pa.array(EVIDENCE).take(pa.array(rows["evidence"])),
    }
    return pa.table({n: who.column(n) for n in who.column_names} | facts)
