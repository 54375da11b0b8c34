"""Spans of one sampled unit to the exclusive time of each op, and the gap before a unit to its parts.

Compute goes before communication, communication before copies; what runs at the same time shares it evenly, and what
nothing covers stands under layer `(none)`. So the exclusive times of a unit add up to its active time, to the ns.
Knows no clock and no framework: all times are integer ns on one clock, all intervals half-open.

Source: infra/rules/telemetry.md 2 (keys), 4.1 (gaps) and 4.2 (inside a unit).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Literal, NamedTuple

from seedance.errors import SeedanceError

NO_LAYER = "(none)"
NONE = "none"
"""Pass and dtype of time without a layer."""
Kind = Literal["compute", "comm", "copy"]
Gaps = Literal["held_idle", "unattributed_busy"]
Interval = tuple[int, int]
"""First ns and the ns after the last."""
KINDS: tuple[Kind, ...] = ("compute", "comm", "copy")
"""Kinds of work, the one that goes first in front."""
_PRECEDENCE = {kind: place for place, kind in enumerate(KINDS)}


class SpanError(SeedanceError):
    """Spans that cannot be: active time that ends before it begins, or that does not add up; start_ns, end_ns."""


class OpKey(NamedTuple):
    """What op rows are added over within one job and rank.

    Args:
        layer: module path without wrapper segments, or a name in parentheses.
        pass_: fwd, bwd, recompute, optim, comm, copy; none for time without a layer.
        op: family, such as `matmul`, or `fused:a+b`; held_idle or unattributed_busy without a layer.
        phase: train, prefill, decode, mixed, eval.
        batch_size: local micro-batch, or sequences rounded to the captured size.
        dtype: compute dtype.
    """

    layer: str
    pass_: str
    op: str
    phase: str
    batch_size: int
    dtype: str

    @property
    def text(self) -> str:
        """layer|pass|op|phase|batch|dtype: what is hashed, and what orders keys."""
        return "|".join(map(str, self))


class Span(NamedTuple):
    """A stretch in which one op ran.

    Args:
        start_ns: first ns.
        end_ns: the ns after the last.
        key: the op.
        kind: compute, comm or copy.
        calls: calls that this span stands for; 0 where it goes on with a call that another span has counted.
    """

    start_ns: int
    end_ns: int
    key: OpKey
    kind: Kind = "compute"
    calls: int = 1


class Share(NamedTuple):
    """What one op did in one unit.

    Args:
        busy_ns: time of its spans, each on its own.
        exclusive_ns: time that is its alone; adds up over the ops of a unit.
        calls: calls.
    """

    busy_ns: int
    exclusive_ns: int
    calls: int


class Gap(NamedTuple):
    """Time between two units by what it was spent on, ns."""

    checkpoint_ns: int
    input_stall_ns: int
    held_idle_ns: int


def op_key(text: str) -> int:
    """BLAKE2b-64 of the text of an `OpKey` as a signed integer, the first byte most significant."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big", signed=True)


def none_key(op: Gaps, phase: str, batch_size: int) -> OpKey:
    """Key of active time that no op covers."""
    return OpKey(NO_LAYER, NONE, op, phase, batch_size, NONE)


def sweep(
    start_ns: int, end_ns: int, spans: Iterable[Span], *, gaps: Gaps, phase: str, batch_size: int
) -> dict[OpKey, Share]:
    """What each op of a unit did; exclusive times add up to end_ns - start_ns.

    Args:
        start_ns, end_ns: active time of the unit.
        spans: in any order, on the same clock; what lies outside the active time is cut off. Spans of nested host calls
            must come without what their children cover: here they would share it.
        gaps: what time is that no span covers: held_idle where everything that ran is known, else unattributed_busy.
        phase, batch_size: of the unit, for the key of that time.

    Returns:
        A share by key, in code-point order of the keys' text; an op that is always behind another has exclusive time 0.

    Raises:
        SpanError: the active time ends before it begins.

    Source: infra/rules/telemetry.md 4.2.
    """
    if end_ns < start_ns:
        raise SpanError(
            f"active time of a unit: expected an end at or after its start {start_ns:,} ns, found {end_ns:,} ns. Give both "
            "on one clock.",
            start_ns=start_ns,
            end_ns=end_ns,
        )
    lanes: dict[tuple[OpKey, Kind], list[Interval]] = {}
    busy: dict[OpKey, int] = {}
    calls: dict[OpKey, int] = {}
    for first, last, key, kind, count in spans:
        first, last = max(first, start_ns), min(last, end_ns)
        busy[key] = busy.get(key, 0) + max(last - first, 0)
        calls[key] = calls.get(key, 0) + count
        if first <= last:
            lanes.setdefault((key, kind), []).append((first, last))
    texts = {key: key.text for key in busy}
    ordered = sorted(lanes, key=lambda lane: texts[lane[0]])
    shares, empty = _share([(_PRECEDENCE[kind], unite(lanes[key, kind])) for key, kind in ordered], start_ns, end_ns)
    exclusive = dict.fromkeys(busy, 0)
    for (key, _), ns in zip(ordered, shares, strict=True):
        exclusive[key] += ns
    if empty:
        nothing = none_key(gaps, phase, batch_size)
        for sums, ns in ((exclusive, empty), (busy, empty), (calls, 0)):
            sums[nothing] = sums.get(nothing, 0) + ns
        texts[nothing] = nothing.text
    if sum(exclusive.values()) != end_ns - start_ns:
        raise SpanError(
            f"ops of a unit: expected exclusive times that add up to {end_ns - start_ns:,} ns, found "
            f"{sum(exclusive.values()):,} ns. Report it with the spans of the unit.",
            start_ns=start_ns,
            end_ns=end_ns,
        )
    return {key: Share(busy[key], exclusive[key], calls[key]) for key in sorted(exclusive, key=texts.__getitem__)}


def split_gap(start_ns: int, end_ns: int, checkpoint: Sequence[Interval], input_wait: Sequence[Interval]) -> Gap:
    """The gap before a unit by what it was spent on: a save first, then waiting for input, the rest held idle.

    Args:
        start_ns, end_ns: the gap; one that ends before it begins is none.
        checkpoint, input_wait: host time in blocking saves and in waiting for input, on the clock of the gap, in any
            order; they may overlap and reach beyond the gap.

    Source: infra/rules/telemetry.md 4.1.
    """
    whole = max(end_ns - start_ns, 0)
    if not checkpoint and not input_wait:
        return Gap(0, 0, whole)
    saved = covered(checkpoint, start_ns, end_ns) if checkpoint else 0
    either = covered([*checkpoint, *input_wait] if checkpoint else input_wait, start_ns, end_ns)
    return Gap(saved, either - saved, whole - either)


def covered(intervals: Iterable[Interval], start_ns: int, end_ns: int) -> int:
    """Length in ns of the union of the intervals within [start_ns, end_ns)."""
    length = 0
    for first, last in unite(intervals):
        length += max(min(last, end_ns) - max(first, start_ns), 0)
    return length


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals in order, those that touch or overlap made one; one that ends before it begins is left out."""
    made: list[Interval] = []
    for first, last in sorted(intervals):
        if last < first:
            continue
        if made and first <= made[-1][1]:
            if last > made[-1][1]:
                made[-1] = (made[-1][0], last)
        else:
            made.append((first, last))
    return made


def _share(lanes: Sequence[tuple[int, list[Interval]]], start_ns: int, end_ns: int) -> tuple[list[int], int]:
    """Exclusive ns of each lane (its precedence and stretches, in code-point order of keys), and ns that none covers."""
    changes: list[tuple[int, int, int]] = []
    for lane, (_, stretches) in enumerate(lanes):
        for first, last in stretches:
            # One without length still ends a segment; it is there and gone before time passes.
            changes += ((first, 1, lane), (last, -1, lane))
    changes.sort(key=itemgetter(0))
    shares = [0] * len(lanes)
    active: tuple[list[int], ...] = tuple([] for _ in KINDS)
    empty, now = 0, start_ns
    for at, change, lane in changes:
        if at > now:
            empty += _divide(at - now, active, shares)
            now = at
        mine = active[lanes[lane][0]]
        if change > 0:
            insort(mine, lane)
        else:
            mine.remove(lane)
    return shares, empty + _divide(end_ns - now, active, shares)


def _divide(length: int, active: Sequence[list[int]], shares: list[int]) -> int:
    """Give a segment to the lanes of the first kind that is there, odd ns to the first lanes; returns what nobody took."""
    for lanes in active:
        if lanes:
            each, odd = divmod(length, len(lanes))
            for place, lane in enumerate(lanes):
                shares[lane] += each + (place < odd)
            return 0
    return length
