"""Readings, processes and step windows of devices in an hour to what each holder claims of the time, by sweeping segments.

The hour is cut wherever a reading, a process reading or a step window begins or ends; inside a segment nothing changes.
Times are ns from the start of the device's hour. In a segment of L ns:

- holders are the processes seen there (only where a reading covers it and does not count 0 processes) and the jobs with a
  step window there; several processes of one job, attempt and rank are one holder. A reading that counts processes where
  none is known has one holder without a job. A reading without a holder is `idle`.
- one holder: its part is L. Several, all with a known SM share u (a job with a step window but no process row has none):
  L is divided by weights u, and 10^6 - sum(u) for the rest when positive, by largest remainder; the rest is spare and goes
  evenly to the holders. Otherwise, all with an MPS limit and none with a share: the same with limits, and the rest is `idle`
  (declared, and nobody's), for a single holder too. Otherwise evenly. Without a reading there is no rest, and all weights 0
  means evenly. Ties go by the holder's order (job, attempt, rank, nulls last), the rest after them.
- busy ns of a reading from its begin to x is floor(x * util / 10^6), so that parts of a cut reading add up; a holder's is
  floor(busy * part / L). Energy from the former reading to x is floor(energy * x / covered), over parts by largest remainder.

Sums over segments are all that is kept, so that stretches of one hour can be swept apart and added. Knows no day.
Source: infra/rules/telemetry.md 4.4 and 4.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.core.arrays import UNKNOWN, Columns, Flags, Ints, expand, fold, join, offsets, pick, sums
from tasks.core.money import apportion, telescope

HOUR_NS = 3_600_000_000_000
MILLION = 1_000_000
STEP, HELD, IDLE = 0, 1, 2
KINDS = ("step", "held", "idle")
CLAIM_KEY = ("holder", "kind", "is_inside", "is_before")
CLAIM_SUMS = ("full_ns", "known_ns", "busy_ns", "blind_ns", "dark_ns", "spare_ns", "even_ns", "energy_mj", "energy_ns")
TOTALS = ("step_ns", "any_ns", "both_ns")

_SPAN = 2 * HOUR_NS
"""Distance of two devices on the common time axis."""


@dataclass(frozen=True)
class Evidence:
    """What was seen of some devices in an hour, and which stretch [low, high) of it to sweep.

    Args:
        readings: device, begin, end, covered_ns, util_ppm, process_count, energy_mj; begin is not before the cap of three
            periods; UNKNOWN is null.
        processes: device, holder, pid, begin, end, util_ppm, limit_ppm.
        steps: device, holder, begin, end.
        low, high: by device, ns.
        first: by holder, begin of its first step window in the hour; greater than any time when it has none.
    """

    readings: Columns
    processes: Columns
    steps: Columns
    low: Ints
    high: Ints
    first: Ints

    @property
    def nobody(self) -> int:
        """Number of the holder without a job on device 0; that of device g is g higher."""
        return len(self.first)


def claim(seen: Evidence) -> tuple[Columns, Columns]:
    """What each holder claims, and lengths of unions.

    Returns:
        Rows by CLAIM_KEY with CLAIM_SUMS, kind as a number, the holder without a job of device g numbered
        `seen.nobody + g`; and TOTALS by device.
    """
    readings = _clip(_apart(seen.readings, ("device",)), seen)
    processes = _clip(_apart(seen.processes, ("device", "pid")), seen)
    steps = _clip({**seen.steps, "start": seen.steps["begin"]}, seen)
    points = np.unique(
        np.concatenate(
            [part["device"] * _SPAN + part[side] for part in (readings, processes, steps) for side in ("start", "end")]
        )
    )
    if len(points) < 2:
        return _none(), {name: np.zeros(len(seen.low), np.int64) for name in TOTALS}
    segments = _segments(points, readings)
    pairs = _pairs(points, segments, processes, steps, seen.nobody)
    device = segments["device"]
    stepping = np.zeros(len(device), bool)
    stepping[pairs["segment"][pairs["is_step"] > 0]] = True
    read = segments["reading"] >= 0
    totals = {
        "step_ns": sums(device, len(seen.low), np.where(stepping, segments["ns"], 0)),
        "any_ns": sums(device, len(seen.low), np.where(stepping | read, segments["ns"], 0)),
        "both_ns": sums(device, len(seen.low), np.where(stepping & read, segments["ns"], 0)),
    }
    segments["is_inside"] = stepping.astype(np.int64)
    _measure(segments, readings)
    rows = _rows(segments, _share(segments, pairs), seen)
    return fold(rows, CLAIM_KEY), totals


def _apart(rows: Columns, keys: tuple[str, ...]) -> Columns:
    """Readings with `start`: where each begins that does not repeat time of an earlier one of the same key."""
    order = np.lexsort([rows["begin"], rows["end"], *[rows[k] for k in reversed(keys)]])
    made = pick(rows, order)
    made["start"] = made["begin"].copy()
    if len(order) > 1:
        same = np.ones(len(order) - 1, bool)
        for k in keys:
            same &= made[k][1:] == made[k][:-1]
        late = np.maximum(made["begin"][1:], made["end"][:-1])
        made["start"][1:] = np.where(same, late, made["begin"][1:])
    return made


def _clip(rows: Columns, seen: Evidence) -> Columns:
    device = rows["device"]
    start = np.maximum(rows["start"], seen.low[device])
    stop = np.minimum(rows["end"], seen.high[device])
    made = {**rows, "start": start, "stop": stop, "origin": rows["begin"], "until": rows["end"], "end": stop}
    return pick(made, start < stop)


def _segments(points: Ints, readings: Columns) -> Columns:
    """Stretches between neighbouring points: device, begin, ns, and the reading that covers each (UNKNOWN: none)."""
    begin, end = points[:-1], points[1:]
    device = begin // _SPAN
    ns = np.where(end // _SPAN == device, end - begin, 0)
    reading = np.full(len(ns), UNKNOWN, np.int64)
    where, owner = _cover(points, readings)
    reading[where] = owner
    count = np.full(len(ns), UNKNOWN, np.int64)
    count[where] = readings["process_count"][owner]
    return {"device": device, "begin": begin - device * _SPAN, "ns": ns, "reading": reading, "process_count": count}


def _cover(points: Ints, rows: Columns) -> tuple[Ints, Ints]:
    axis = rows["device"] * _SPAN
    return expand(np.searchsorted(points, axis + rows["start"]), np.searchsorted(points, axis + rows["end"]))


def _pairs(points: Ints, segments: Columns, processes: Columns, steps: Columns, nobody: int) -> Columns:
    """Segments with their holders, ordered by segment and holder: is_step, processes, and their shares or UNKNOWN."""
    reading = segments["reading"]
    at, who = _cover(points, processes)
    seen = reading[at] >= 0
    seen &= segments["process_count"][at] != 0
    at, who = at[seen], who[seen]
    util, limit = processes["util_ppm"][who], processes["limit_ppm"][who]
    by_process = {
        "segment": at,
        "holder": processes["holder"][who],
        "processes": np.ones(len(at), np.int64),
        "util_ppm": np.maximum(util, 0),
        "no_util": (util == UNKNOWN).astype(np.int64),
        "limit_ppm": np.maximum(limit, 0),
        "no_limit": (limit == UNKNOWN).astype(np.int64),
    }
    at, who = _cover(points, steps)
    by_step = {"segment": at, "holder": steps["holder"][who], "is_step": np.ones(len(at), np.int64)}
    pairs = fold(join(by_process, by_step), ("segment", "holder"))
    alone = np.ones(len(reading), bool)
    alone[pairs["segment"]] = False
    lost = np.flatnonzero(alone & (reading >= 0) & (segments["process_count"] != 0))
    ghosts = {
        "segment": lost,
        "holder": nobody + segments["device"][lost],
        "processes": np.ones(len(lost), np.int64),
        "no_util": np.ones(len(lost), np.int64),
        "no_limit": np.ones(len(lost), np.int64),
        "is_unsure": (segments["process_count"][lost] == UNKNOWN).astype(np.int64),
    }
    pairs = join(
        pairs, {name: values[:0] for name, values in ghosts.items()}
    )  # the same columns, whether any is lost or not
    pairs = fold(join(pairs, ghosts), ("segment", "holder")) if len(lost) else pairs
    for name in ("util", "limit"):
        unknown = (pairs["processes"] == 0) | (pairs[f"no_{name}"] > 0)
        pairs[f"{name}_ppm"] = np.where(unknown, UNKNOWN, pairs[f"{name}_ppm"])
    return pairs


def _measure(segments: Columns, readings: Columns) -> None:
    """Adds what the reading says of each segment: util_ppm, busy_ns, energy_mj, and is_powered where it gave energy."""
    reading = segments["reading"]
    read = np.flatnonzero(reading >= 0)
    mine = pick(readings, reading[read])
    begin, end = segments["begin"][read], segments["begin"][read] + segments["ns"][read]
    util = np.maximum(mine["util_ppm"], 0)
    million = np.full(len(read), MILLION, np.int64)
    covered = np.maximum(mine["covered_ns"], 1)
    former = mine["until"] - mine["covered_ns"]
    powered = mine["energy_mj"] != UNKNOWN
    energy = np.where(powered, mine["energy_mj"], 0)
    facts = {
        "util_ppm": mine["util_ppm"],
        "busy_ns": _floor(end - mine["origin"], util, million) - _floor(begin - mine["origin"], util, million),
        "energy_mj": telescope(energy, end - former, covered) - telescope(energy, begin - former, covered),
        "is_powered": powered.astype(np.int64),
    }
    for name, values in facts.items():
        segments[name] = np.full(len(reading), UNKNOWN if name == "util_ppm" else 0, np.int64)
        segments[name][read] = values


def _floor(length: Ints, ppm: Ints, million: Ints) -> Ints:
    return (length // million) * ppm + (length % million) * ppm // million


def _share(segments: Columns, pairs: Columns) -> Columns:
    """Adds to the pairs part_ns, spare_ns and is_even; to the segments idle_ns."""
    count = len(segments["ns"])
    segment = pairs["segment"]
    holders = sums(segment, count, np.ones(len(segment), np.int64))
    read = segments["reading"] >= 0
    known = {n: sums(segment, count, (pairs[f"{n}_ppm"] >= 0).astype(np.int64)) == holders for n in ("util", "limit")}
    some_util = sums(segment, count, (pairs["util_ppm"] >= 0).astype(np.int64)) > 0
    limited = known["limit"] & read & ~some_util & (sums(segment, count, pairs["limit_ppm"]) < MILLION)
    shared = (holders > 1) | ((holders == 1) & limited)
    segments["idle_ns"] = np.where(read & (holders == 0), segments["ns"], 0)
    pairs["part_ns"] = segments["ns"][segment].copy()
    pairs["spare_ns"] = np.zeros(len(segment), np.int64)
    pairs["is_even"] = np.zeros(len(segment), np.int64)
    chosen = np.flatnonzero(shared[segment])
    if not len(chosen):
        return pairs
    which = np.unique(segment[chosen])
    size = holders[which]
    mine = pick(pairs, chosen)
    by_util, by_limit = known["util"][which] & (size > 1), known["limit"][which] & ~some_util[which]
    group = np.repeat(np.arange(len(which)), size)
    weight = np.where(by_util[group], mine["util_ppm"], np.where(by_limit[group], mine["limit_ppm"], 0))
    total = sums(group, len(which), weight)
    even = (total == 0) & ~((by_util | by_limit) & read[which])
    weight = np.where(even[group], 1, weight)
    rest = np.where(even | ~read[which], 0, np.maximum(MILLION - total, 0))
    start = np.concatenate([[0], np.cumsum(size + 1)])
    place = np.arange(len(chosen)) + group
    weights = np.zeros(start[-1], np.int64)
    weights[place], weights[start[1:] - 1] = weight, rest
    parts = apportion(segments["ns"][which], start, weights)
    pairs["part_ns"][chosen] = parts[place]
    left = parts[start[1:] - 1]
    segments["idle_ns"][which] = np.where(by_limit, left, 0)
    spare = np.where(by_limit, 0, left)
    pairs["spare_ns"][chosen] = apportion(spare, np.concatenate([[0], np.cumsum(size)]), np.ones(len(chosen), np.int64))
    pairs["is_even"][chosen] = even[group].astype(np.int64)
    return pairs


def _rows(segments: Columns, pairs: Columns, seen: Evidence) -> Columns:
    """Claims of each pair, of spare time and of idle segments, not added up yet."""
    at = segments["is_inside"]
    segment, holder = pairs["segment"], pairs["holder"]
    part, step = pairs["part_ns"], pairs["is_step"] > 0
    read, known = segments["reading"][segment] >= 0, segments["util_ppm"][segment] >= 0
    nobody = np.full(len(seen.low), HOUR_NS * 2, np.int64)
    before = (segments["begin"][segment] < np.concatenate([seen.first, nobody])[holder]).astype(np.int64)
    busy = telescope(segments["busy_ns"][segment], part, np.maximum(segments["ns"][segment], 1))
    # Whether anybody holds the device is not known: what was busy was busy, and the rest is neither idle nor held.
    unsure = known & (pairs["is_unsure"] > 0)
    energy, spare_energy, idle_energy = _energy(segments, pairs)
    power = segments["is_powered"]
    main = {
        "holder": holder,
        "kind": np.where(step, STEP, HELD),
        "is_inside": at[segment],
        "is_before": np.where(step, 0, before),
        "full_ns": np.where(step, segments["ns"][segment], 0),
        "known_ns": np.where(unsure, busy, np.where(known, part, 0)),
        "busy_ns": np.where(known & ~step, busy, 0),
        "blind_ns": np.where(unsure, part - busy, np.where(read & ~known, part, 0)),
        "dark_ns": np.where(read, 0, part),
        "even_ns": np.where(pairs["is_even"] > 0, part, 0),
        "energy_mj": energy,
        "energy_ns": part * power[segment],
    }
    some = np.flatnonzero(pairs["spare_ns"])
    spare = {
        "holder": holder[some],
        "kind": np.full(len(some), HELD),
        "is_inside": at[segment[some]],
        "is_before": before[some],
        "spare_ns": pairs["spare_ns"][some],
        "energy_mj": spare_energy[some],
        "energy_ns": pairs["spare_ns"][some] * power[segment[some]],
    }
    empty = np.flatnonzero(segments["idle_ns"])
    idle = {
        "holder": seen.nobody + segments["device"][empty],
        "kind": np.full(len(empty), IDLE),
        "is_inside": at[empty],
        "known_ns": segments["idle_ns"][empty],
        "energy_mj": idle_energy[empty],
        "energy_ns": segments["idle_ns"][empty] * power[empty],
    }
    return join(_none(), main, spare, idle)


def _energy(segments: Columns, pairs: Columns) -> tuple[Ints, Ints, Ints]:
    """Energy of each pair's part, of its spare part, and of each segment's idle part."""
    segment = pairs["segment"]
    energy = segments["energy_mj"]
    whole = np.where(pairs["part_ns"] == segments["ns"][segment], energy[segment], 0)
    spare = np.zeros(len(segment), np.int64)
    idle = np.where(segments["idle_ns"] == segments["ns"], energy, 0)
    cut: Flags = np.zeros(len(energy), bool)
    cut[segment[pairs["part_ns"] != segments["ns"][segment]]] = True
    chosen = np.flatnonzero(cut[segment] & (energy[segment] > 0))
    if not len(chosen):
        return whole, spare, idle
    which, group = np.unique(segment[chosen], return_inverse=True)
    first = offsets(group, len(which))
    # Each segment's rows: part and spare of each holder in turn, then what is idle.
    start = 2 * first + np.arange(len(which) + 1)
    place = 2 * np.arange(len(chosen)) + group
    weights = np.zeros(start[-1], np.int64)
    weights[place], weights[place + 1] = pairs["part_ns"][chosen], pairs["spare_ns"][chosen]
    weights[start[1:] - 1] = segments["idle_ns"][which]
    parts = apportion(energy[which], start, weights)
    whole[chosen], spare[chosen] = parts[place], parts[place + 1]
    idle[which] = parts[start[1:] - 1]
    return whole, spare, idle


def _none() -> Columns:
    return {name: np.zeros(0, np.int64) for name in (*CLAIM_KEY, *CLAIM_SUMS)}
