"""Units of one rank to the rows of `raw_telemetry__step_windows` and `raw_telemetry__op_windows`.

A unit counts in the window in which it ends: (begin, end] of a grid in UTC that starts anew each hour. Its wall time is cut
at the hour; what lies before goes to the last step window of each hour it touches, with `units` 0. Op time of a sampled unit
is not cut. The first and the last window of a session are no longer than the session, so that a later one of the same rank
repeats no key and no time.

Rows meet `seedance.schema` and every limit of infra/rules/telemetry.md 3. Nothing here imports pyarrow: the closed sets of
that declaration are repeated, and a test holds them together. Knows no clock and no framework.

Source: infra/rules/telemetry.md 2 to 4.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from seedance.durations import HOUR_NS, SECOND_NS
from seedance.probe.spans import unite
from seedance.probe.tally import MOST, OpSums, Row, StepSums
from seedance.probe.unit import Memory, Unit, WindowError

__all__ = ["OP_TABLE", "STEP_TABLE", "Memory", "Unit", "WindowError", "Windows"]

STEP_TABLE = "raw_telemetry__step_windows"
OP_TABLE = "raw_telemetry__op_windows"
PHASES = ("train", "prefill", "decode", "mixed", "eval")
METHODS = ("events", "kineto", "graph", "formula", "host")
STEP_WINDOW_NS = 10 * SECOND_NS
OP_WINDOW_NS = 300 * SECOND_NS
MOST_SAMPLED_NS = 24 * HOUR_NS
"""Longest active time of a unit whose ops are kept: collect refuses rows above 25 h."""
MOST_ENTRIES = 200_000
"""Entries held before units are dropped: about 100 MB."""

_Place = tuple[int, str, int]
"""Start of a window on its grid, phase, batch size."""


class Windows:
    """Sums of one rank by window, phase and batch size, until `rows` takes them. Safe to use from several threads.

    Args:
        job_id, attempt, rank, device_uuid: whose units these are.
        writes_samples: whether this rank writes samples, tokens and requests for its replica; else they are 0.
        writes_ops: whether this rank writes op rows; above 64 ranks those of eight replicas are enough.
        layers: position of each layer in the model where profiles do not tell it; read when rows are made.
        step_window_ns, op_window_ns: lengths of the windows, at most an hour.
        most_entries: entries held; from there on units are dropped whole and counted, until rows are taken.

    Raises:
        WindowError: a value that the tables cannot hold.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        rank: int,
        device_uuid: str,
        writes_samples: bool,
        *,
        writes_ops: bool = True,
        layers: Mapping[str, int] | None = None,
        step_window_ns: int = STEP_WINDOW_NS,
        op_window_ns: int = OP_WINDOW_NS,
        most_entries: int = MOST_ENTRIES,
    ) -> None:
        _hold(f"windows of job {job_id}", "attempt", attempt, 0, 2**15 - 1)
        _hold(f"windows of job {job_id}", "rank", rank, 0, 2**31 - 1)
        _hold(f"windows of job {job_id}", "step_window_ns", step_window_ns, 1, HOUR_NS)
        _hold(f"windows of job {job_id}", "op_window_ns", op_window_ns, 1, HOUR_NS)
        self._who: Row = {"job_id": job_id, "attempt": attempt, "rank": rank, "device_uuid": device_uuid}
        self._writes_samples, self._writes_ops = writes_samples, writes_ops
        self._step_ns, self._op_ns, self._most_entries = step_window_ns, op_window_ns, most_entries
        self._layers: Mapping[str, int] = {} if layers is None else layers
        self._lock = threading.Lock()
        self._steps: dict[_Place, StepSums] = {}
        self._ops: dict[_Place, OpSums] = {}
        self._opened: int | None = None
        """First ns of the session: no window begins before."""
        self._end = 0
        """End of the latest unit: no time before is free any more."""
        self._floors = (0, 0)
        """Starts of the first step window and of the first op window that were not taken."""
        self._near: tuple[int, int, str, int, StepSums, OpSums] | None = None
        """The latest sums with the instants that they are for: the windows change every hundredth unit at most."""
        self._latest = ("", 0)
        """Phase and batch size of the latest unit."""
        self._entries = 0
        self._dropped = 0
        self._cut_ns = 0

    @property
    def dropped(self) -> int:
        """Units that were dropped and stand in no row yet."""
        return self._dropped

    @property
    def cut_ns(self) -> int:
        """Wall time that came twice and was cut off, ns; 0 as long as units follow one another."""
        return self._cut_ns

    def add(self, unit: Unit) -> None:
        """Count one unit. Units come in the order in which they ended.

        Time that a former unit has already is cut off, and a unit that loses active time by that is not sampled.

        Raises:
            WindowError: a count is negative, phase, batch size or method cannot be, or the ops of a sampled unit do not
                add up to its active time; nothing was counted then.
        """
        _check(unit)
        with self._lock:
            if self._entries >= self._most_entries:
                self._dropped += unit.units
                self._end = max(self._end, unit.end_ns)
            else:
                self._add(unit)

    def drop(self, units: int) -> None:
        """Count units that were lost before they came here; they stand in the row of the next unit, else in the last."""
        with self._lock:
            self._dropped += units

    def rows(self, before_ns: int, *, final: bool = False) -> list[tuple[str, Row]]:
        """Take the rows of the windows that are over: table and row, instants in ns UTC.

        The last step window of an hour stays until a unit ended after it: the unit that runs may reach back into it. A
        unit that ends in a window already taken counts in the next one of its hour.

        Args:
            before_ns: windows up to here are over: the end of the latest unit, or an instant before which none will end.
            final: take everything, and end the session.
        """
        with self._lock:
            taken = self._take(before_ns, final)
        made: list[tuple[str, Row]] = []
        for begin, end, (_, phase, batch_size), sums in taken:
            place = self._who | {"phase": phase, "batch_size": batch_size}
            place |= {"window_start_utc": begin, "window_ns": end - begin}
            if isinstance(sums, StepSums):
                made.append((STEP_TABLE, sums.row(place)))
            else:
                made += ((OP_TABLE, row) for row in sums.rows(place, self._layers))
        return made

    def _add(self, unit: Unit) -> None:
        first, middle, last = unit.start_ns, unit.begin_ns, unit.end_ns
        is_whole = self._end <= first <= middle <= last
        if not is_whole:
            first = max(first, self._end)
            last = max(last, first)
            middle = min(max(middle, first), last)
            is_whole = (middle, last) == (unit.begin_ns, unit.end_ns)
            self._cut_ns += max(unit.end_ns - unit.start_ns - (last - first), 0)
        step, ops = self._sums(unit, first, last)
        self._spend(unit, step, first, middle, last)
        self._end = last
        step.units += unit.units
        step.probe_ns += unit.probe_ns
        if self._writes_samples:
            step.samples += unit.samples
            step.tokens_in += unit.tokens_in
            step.tokens_out += unit.tokens_out
            step.requests += unit.requests
        if unit.input_wait:
            step.input_wait_ns += sum(end - begin for begin, end in unite(unit.input_wait))
        if self._dropped:
            step.dropped_units += self._dropped
            self._dropped = 0
        if unit.memory is not None:
            step.remember(unit.memory)
        if self._writes_ops:
            before = len(ops)
            _count(unit, ops)
            if unit.sampled and unit.ops is not None and is_whole and last - middle <= MOST_SAMPLED_NS:
                # Units marked together are one figure: as one sample they leave the spread between samples as it is.
                step.sampled_units += 1
                step.sampled_active_ns += last - middle
                ops.measure(unit.ops, unit.method)
            self._entries += len(ops) - before

    def _sums(self, unit: Unit, first: int, last: int) -> tuple[StepSums, OpSums]:
        """Sums of the windows in which a unit ends."""
        at = last - 1 if last > first else first
        near = self._near
        if near is not None and near[0] <= at < near[1] and near[2] == unit.phase and near[3] == unit.batch_size:
            return near[4], near[5]
        if self._opened is None:
            self._opened = first
        self._latest = unit.phase, unit.batch_size
        at = max(at, self._floors[0])
        step, step_end = self._step_at(at)
        begin, end = _grid(max(at, self._floors[1]), self._op_ns)
        place = (begin, *self._latest)
        ops = self._ops.get(place)
        if ops is None:
            ops = self._ops[place] = OpSums()
            self._entries += 1
        self._near = (at, min(step_end, end), unit.phase, unit.batch_size, step, ops)
        return step, ops

    def _step_at(self, at: int) -> tuple[StepSums, int]:
        """Sums of the step window at an instant for the latest phase and batch size, and where it ends."""
        begin, end = _grid(at, self._step_ns)
        place = (begin, *self._latest)
        step = self._steps.get(place)
        if step is None:
            step = self._steps[place] = StepSums()
            self._entries += 1
        return step, end

    def _spend(self, unit: Unit, step: StepSums, first: int, middle: int, last: int) -> None:
        """Give each ns of a unit's wall time one place, in its own hour."""
        checkpoint, input_wait = unit.checkpoint, unit.input_wait
        if unit.host_begin_ns is not None and (checkpoint or input_wait):
            shift = unit.begin_ns - unit.host_begin_ns
            checkpoint = tuple((begin + shift, end + shift) for begin, end in checkpoint)
            input_wait = tuple((begin + shift, end + shift) for begin, end in input_wait)
        hour_end = first - first % HOUR_NS + HOUR_NS
        while hour_end < last:
            tail, _ = self._step_at(hour_end - 1)
            tail.spend(first, min(max(middle, first), hour_end), hour_end, checkpoint, input_wait)
            first, hour_end = hour_end, hour_end + HOUR_NS
        step.spend(first, max(middle, first), last, checkpoint, input_wait)

    def _take(self, before_ns: int, final: bool) -> list[tuple[int, int, _Place, StepSums | OpSums]]:
        """Start, end, place and sums of each window that is over."""
        opened = self._opened
        if opened is None:
            return []
        self._near = None
        if final:
            limit = MOST
            if self._dropped:
                step, _ = self._step_at(max(self._end - 1, opened, self._floors[0]))
                step.dropped_units += self._dropped
                self._dropped = 0
        else:
            tail, _ = _grid(self._end - self._end % HOUR_NS + HOUR_NS - 1, self._step_ns)
            limit = min(before_ns, tail)
            floors = (_grid(limit, self._step_ns)[0], _grid(limit, self._op_ns)[0])
            self._floors = max(self._floors[0], floors[0]), max(self._floors[1], floors[1])
        taken: list[tuple[int, int, _Place, StepSums | OpSums]] = []
        for held, length in ((self._steps, self._step_ns), (self._ops, self._op_ns)):
            for place in [p for p in held if _grid(p[0], length)[1] <= limit]:
                begin, end = _grid(place[0], length)
                begin = max(begin, opened)
                if final:
                    end = min(end, max(self._end, begin + 1))
                taken.append((begin, end, place, held.pop(place)))
        self._entries = len(self._steps) + len(self._ops) + sum(map(len, self._ops.values()))
        if final:  # a later session of this rank may begin where this one ends
            self._end, self._opened = max([self._end, *(end for _, end, _, _ in taken)]), None
        return taken


def _count(unit: Unit, ops: OpSums) -> None:
    """Note which profiles a unit had."""
    uncounted = unit.uncounted
    if unit.profile is not None:
        ops.count(unit.profile, unit.method, unit.units)
    elif not unit.parts and not uncounted:
        uncounted = 1
    for profile in unit.parts:
        ops.count(profile, unit.method, unit.units)
    if uncounted:
        ops.miss(unit.method, uncounted * unit.units)


def _grid(at: int, length: int) -> tuple[int, int]:
    """Window at an instant: windows of this length from each full hour on, the last as long as is left."""
    inside = at % HOUR_NS
    begin = at - inside % length
    return begin, min(begin + length, at - inside + HOUR_NS)


def _check(unit: Unit) -> None:
    if (
        unit.units < 1
        or unit.samples < 0
        or unit.tokens_in < 0
        or unit.tokens_out < 0
        or unit.requests < 0
        or unit.probe_ns < 0
        or unit.uncounted < 0
        or unit.phase not in PHASES
        or unit.method not in METHODS
        or not 0 <= unit.batch_size < 2**31
    ):
        expected = f"counts of 0 or more, a phase of {', '.join(PHASES)}, a method of {', '.join(METHODS)}"
        raise WindowError(
            f"unit {unit.number}: expected {expected}, found {unit}.", what="unit", expected=expected, found=str(unit)
        )
    if unit.sampled and unit.ops is not None:
        total, active = sum(share.exclusive_ns for share in unit.ops.values()), unit.end_ns - unit.begin_ns
        if total != active:
            raise WindowError(
                f"unit {unit.number}: expected ops that add up to its active time of {active:,} ns, found {total:,} ns. Sweep "
                "the spans between the same marks.",
                what="ops",
                expected=active,
                found=total,
            )


def _hold(where: str, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise WindowError(
            f"{where}: expected {name} from {least:,} to {most:,}, found {value:,}. Mend the setting.",
            what=name,
            expected=(least, most),
            found=value,
        )
