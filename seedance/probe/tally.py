"""Sums of one window, phase and batch size, and the rows that are made of them.

The hot path adds to plain fields and counts units by profile; multiplying and hashing wait until rows are made.
Knows no windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from seedance.flops.profile import Profile
from seedance.probe.spans import NONE, Interval, OpKey, Share, op_key, split_gap
from seedance.probe.unit import Memory

Row = dict[str, Any]
MODEL = "(model)"
"""Layer of work that is seen as a whole."""
UNCOUNTED = "uncounted"
"""Op of work without a FLOP count."""
MOST = 2**63 - 1
"""Most that a column of 64 bits holds."""
MOST_COUNT = 2**53
"""Most units, samples, tokens, requests or sampled calls that collect believes of one row."""
COUNTS = ("calls", "flops", "hw_flops", "bytes_ideal", "uncounted_calls")
TIMES = ("sampled_calls", "busy_ns", "exclusive_ns", "exclusive_us2")
WIDE = (*COUNTS, "exclusive_us2")
"""Sums that can pass 64 bits; the others are time of one rank, and calls in it."""


@dataclass(slots=True)
class StepSums:
    """Sums of one step row, under the names of its columns."""

    units: int = 0
    wall_ns: int = 0
    active_ns: int = 0
    input_stall_ns: int = 0
    checkpoint_ns: int = 0
    held_idle_ns: int = 0
    sampled_units: int = 0
    sampled_active_ns: int = 0
    samples: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    requests: int = 0
    input_wait_ns: int = 0
    probe_ns: int = 0
    dropped_units: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    active_bytes: int = 0
    inactive_split_bytes: int = 0
    alloc_retries: int = 0
    ooms: int = 0

    def spend(
        self, first: int, middle: int, last: int, checkpoint: tuple[Interval, ...], input_wait: tuple[Interval, ...]
    ) -> None:
        """Add the gap [first, middle) and the active time [middle, last)."""
        self.wall_ns += last - first
        self.active_ns += last - middle
        if checkpoint or input_wait:
            gap = split_gap(first, middle, checkpoint, input_wait)
            self.checkpoint_ns += gap.checkpoint_ns
            self.input_stall_ns += gap.input_stall_ns
            self.held_idle_ns += gap.held_idle_ns
        else:
            self.held_idle_ns += middle - first

    def remember(self, memory: Memory) -> None:
        """Keep the highest peaks, and add what was added."""
        self.allocated_bytes = max(self.allocated_bytes, memory.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, memory.reserved_bytes)
        self.active_bytes = max(self.active_bytes, memory.active_bytes)
        self.inactive_split_bytes = max(self.inactive_split_bytes, memory.inactive_split_bytes)
        self.alloc_retries += memory.alloc_retries
        self.ooms += memory.ooms

    def row(self, place: Row) -> Row:
        """The row: who and where, then the sums."""
        return place | {name: min(getattr(self, name), MOST_COUNT if name in _BELIEVED else MOST) for name in _STEP}


_STEP = tuple(field.name for field in fields(StepSums))
_BELIEVED = frozenset(("units", "sampled_units", "samples", "tokens_in", "tokens_out", "requests"))


class OpSums:
    """Profiles, uncounted units and sampled times that op rows are made of."""

    __slots__ = ("_profiles", "_times", "_uncounted")

    def __init__(self) -> None:
        # A profile stands beside its identity, so that no other object can take that meanwhile.
        self._profiles: dict[tuple[int, str], tuple[Profile, list[int]]] = {}
        self._uncounted: dict[str, int] = {}
        self._times: dict[tuple[OpKey, str], list[int]] = {}

    def __len__(self) -> int:
        """Entries held."""
        return len(self._profiles) + len(self._uncounted) + len(self._times)

    def count(self, profile: Profile, method: str, units: int) -> None:
        """Note that so many units did what the profile says."""
        noted = self._profiles.get((id(profile), method))
        if noted is None:
            self._profiles[id(profile), method] = (profile, [units])
        else:
            noted[1][0] += units

    def miss(self, method: str, calls: int) -> None:
        """Note so many calls of the model that nobody counted."""
        self._uncounted[method] = self._uncounted.get(method, 0) + calls

    def measure(self, shares: Mapping[OpKey, Share], method: str) -> None:
        """Add the times of one sampled unit."""
        times = self._times
        for key, (busy_ns, exclusive_ns, calls) in shares.items():
            sums = times.get((key, method))
            if sums is None:
                sums = times[key, method] = [0, 0, 0, 0]
            sums[0] += calls
            sums[1] += busy_ns
            sums[2] += exclusive_ns
            # Rounded down by less than 1 us^2 a unit, which the bound of the reduction allows for.
            sums[3] += exclusive_ns * exclusive_ns // 1_000_000

    def rows(self, place: Row, layers: Mapping[str, int]) -> Iterator[Row]:
        """A row by op key, variant and method; several, one after another in the window, where int64 is too small.

        Args:
            place: who, phase, batch size, start and length of the window.
            layers: position of each layer in the model; profiles go first, and a layer that neither knows is at -1.
        """
        found: dict[str, int] = {}
        sums: dict[tuple[str, ...], dict[str, int]] = {}
        for (_, method), (profile, (units,)) in self._profiles.items():
            for op in profile.ops:
                found.setdefault(op.layer, op.layer_index)
                row = sums.setdefault((op.layer, op.pass_, op.op, op.dtype, op.variant, method), dict(_ZEROS))
                row["calls"] += op.calls * units
                row["flops"] += op.flops * units
                row["hw_flops"] += op.hw_flops * units
                row["bytes_ideal"] += op.bytes_ideal * units
                row["uncounted_calls"] += op.uncounted_calls * units
        for method, calls in self._uncounted.items():
            row = sums.setdefault((MODEL, "fwd", UNCOUNTED, NONE, "", method), dict(_ZEROS))
            row["calls"] += calls
            row["uncounted_calls"] += calls
        for (key, method), times in self._times.items():
            row = sums.setdefault((key.layer, key.pass_, key.op, key.dtype, "", method), dict(_ZEROS))
            for name, value in zip(TIMES, times, strict=True):
                row[name] += value
        for (layer, pass_, op_, dtype, variant, method), row in sums.items():
            words = {"layer": _utf8(layer), "op": op_, "pass": pass_, "dtype": dtype}
            words |= {"variant": _utf8(variant), "method": method}
            key = OpKey(words["layer"], pass_, op_, place["phase"], place["batch_size"], dtype)
            where = found.get(layer, layers.get(layer, -1))
            facts = place | words | {"op_key": op_key(key.text), "layer_index": where}
            yield from split_row(facts | row)


_ZEROS = dict.fromkeys((*COUNTS, *TIMES), 0)


def split_row(row: Row) -> Iterator[Row]:
    """An op row as it is, or where a sum passes int64 as rows of equal key for as many parts of its window.

    A key has one row a window, so a sum that is too large needs smaller windows; times stand in the first of them. A
    window without a ns for each part keeps what fits.
    """
    row["sampled_calls"] = min(row["sampled_calls"], MOST_COUNT)
    largest = max(row[name] for name in WIDE)
    if largest <= MOST:
        yield row
        return
    begin, length = row["window_start_utc"], row["window_ns"]
    parts = max(min(-(-largest // MOST), length), 1)
    rest = {name: row[name] for name in WIDE}
    for part in range(parts):
        first, last = length * part // parts, length * (part + 1) // parts
        held = {name: min(rest[name], MOST) for name in WIDE}
        rest = {name: rest[name] - held[name] for name in WIDE}
        later = {} if part == 0 else dict.fromkeys(("sampled_calls", "busy_ns", "exclusive_ns"), 0)
        yield row | later | held | {"window_start_utc": begin + first, "window_ns": last - first}


def _utf8(text: str) -> str:
    """The text as it can be written; what has no UTF-8 becomes a question mark."""
    return text if text.isascii() else text.encode(errors="replace").decode()
