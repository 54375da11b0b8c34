"""From marks to units: what a unit was is settled when its marks are known, and units that are alike leave as one.

Consecutive units of one step window with the same phase, batch size and profiles become one `Unit` of several: their gaps,
saves, waits and active times are added, each to the ns. A sampled unit always goes alone. So a unit costs the process a few
additions, and what is made of it waits for the end of the window.

Source: infra/rules/telemetry.md 2 and 4; marks on a device are read two units later and never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from seedance.durations import HOUR_NS
from seedance.flops.names import GRAD_SYNC, MODEL, OPTIMIZER
from seedance.flops.profile import Profile
from seedance.probe.clock import Clock, Mark, Utc
from seedance.probe.counting import UNCOUNTED, op_names
from seedance.probe.sampling import Rate
from seedance.probe.spans import NONE, Interval, OpKey, Share, none_key, split_gap, unite
from seedance.probe.trace import Place, Time, Trace
from seedance.probe.unit import Memory, Unit

MOST_PENDING = 64
"""Units whose marks the device has not passed yet; beyond, the oldest is dropped."""
LAG = 2
"""Units after which marks on a device are read."""
Names = dict[Place, tuple[str, str]]
"""Op and dtype by layer and pass."""
_NAMES: Names = {
    (OPTIMIZER, "optim"): ("optimizer", NONE),
    (GRAD_SYNC, "comm"): ("all_reduce", NONE),
}
"""Op and dtype of layers without a module, where no profile knows them."""


class Waits:
    """Host time in blocking saves and in waiting for input, until a unit takes it. Bounded: the oldest go first.

    Args:
        most: waits held.
    """

    def __init__(self, most: int = 4_096) -> None:
        self._held: deque[tuple[str, int, int]] = deque(maxlen=most)
        self.last_ns = 0
        """End of the latest wait."""
        self.thread = 0
        """Thread of the models: what waits in another one hides behind them."""

    def add(self, kind: str, begin_ns: int, end_ns: int) -> None:
        """Note a wait of this thread: `input` or `checkpoint`."""
        if self.thread and get_ident() != self.thread:
            return
        self._held.append((kind, begin_ns, end_ns))
        self.last_ns = end_ns

    def take(self, until_ns: int) -> tuple[Sequence[Interval], Sequence[Interval]]:
        """Saves and waits for input that began before an instant; later ones stay."""
        held = self._held
        if not held or held[0][1] >= until_ns:
            return (), ()
        taken: dict[str, list[Interval]] = {"checkpoint": [], "input": []}
        while held and held[0][1] < until_ns:
            kind, begin, end = held.popleft()
            taken[kind].append((begin, end))
        return taken["checkpoint"], taken["input"]


class OpenUnit:
    """A unit that runs, or has ended and may still go on.

    Args:
        number: within the attempt.
        phase, batch_size: as in the rows.
        is_training: whether the optimizer's step ends it.
    """

    __slots__ = (
        "batch_size",
        "begin",
        "calls",
        "end",
        "group_batch",
        "group_tokens",
        "has_grad",
        "host_begin",
        "host_end",
        "is_counted",
        "is_done",
        "is_training",
        "number",
        "own_ns",
        "phase",
        "requests",
        "samples",
        "tokens_in",
        "tokens_out",
        "trace",
    )

    def __init__(self, number: int, phase: str, batch_size: int, is_training: bool) -> None:
        self.number, self.phase, self.batch_size, self.is_training = number, phase, batch_size, is_training
        self.begin: Mark | None = None
        self.end: Mark | None = None
        self.host_begin = self.host_end = self.own_ns = self.group_batch = self.group_tokens = 0
        self.calls = self.samples = self.tokens_in = self.tokens_out = self.requests = 0
        self.has_grad = self.is_done = self.is_counted = False
        self.trace: Trace | None = None


@dataclass(slots=True)
class _Pending:
    """A unit that is over, with marks that may not be known yet."""

    unit: OpenUnit
    start: Mark | None
    clock: Clock
    parts: list[Profile]
    missed: int
    saves: Sequence[Interval]
    inputs: Sequence[Interval]


class _Sum:
    """Units that are alike, added up; times on the host's monotonic clock."""

    __slots__ = (
        "active",
        "end",
        "idle",
        "key",
        "limit",
        "missed",
        "number",
        "own",
        "parts",
        "requests",
        "samples",
        "saved",
        "stalled",
        "start",
        "tokens_in",
        "tokens_out",
        "units",
        "waited",
    )

    def __init__(self, key: tuple[Any, ...], start: int, limit: int, parts: list[Profile], missed: int) -> None:
        self.key, self.start, self.limit, self.parts, self.missed = key, start, limit, parts, missed
        self.end = start
        self.units = self.number = self.active = self.idle = self.saved = self.stalled = self.waited = self.own = 0
        self.samples = self.tokens_in = self.tokens_out = self.requests = 0


class Settler:
    """Hands on units when their marks are known.

    Args:
        take: gets each `Unit`, in order.
        drop: told how many units are lost.
        due: called when a unit ends after `due_ns`, before it is added, with its end in UTC.
        rate: told what units and samples took.
        utc: the host's monotonic clock in UTC.
        step_window_ns: length of a step window, ns: a `Unit` of several ends in one.
    """

    def __init__(
        self,
        take: Callable[[Unit], None],
        drop: Callable[[int], None],
        due: Callable[[int], None],
        *,
        rate: Rate,
        utc: Utc,
        step_window_ns: int,
    ) -> None:
        self._take, self._drop, self._due, self._rate, self._utc = take, drop, due, rate, utc
        self.due_ns = 0
        """When a window is over, UTC."""
        self.step_window_ns = step_window_ns
        self._pending: deque[_Pending] = deque()
        self._sum: _Sum | None = None
        self._own_ns = 0
        self._method = "host"
        self._named: tuple[tuple[Profile, ...], Names] = ((), {})
        """Names of ops by layer and pass, for the latest sample's profiles."""
        self.rebases = False
        """Whether later marks are to be measured from the start of the next unit."""
        self.memory: Memory | None = None
        """What the allocator said, for the next unit."""

    def own(self, ns: int) -> None:
        """Host time that the probe took outside of a unit's own."""
        self._own_ns += ns

    def add(
        self,
        unit: OpenUnit,
        start: Mark | None,
        clock: Clock,
        parts: list[Profile],
        missed: int,
        waits: tuple[Sequence[Interval], Sequence[Interval]],
    ) -> None:
        """A unit is over.

        Args:
            unit: the unit, with both its marks.
            start: end of the unit before; None for the first one.
            clock: of the marks.
            parts: profiles of its groups and steps.
            missed: groups without a profile.
            waits: saves and waits for input on the host's clock.
        """
        if clock.is_host and not self._pending:
            begin: int = unit.begin  # type: ignore[assignment]
            self._settle(unit, begin if start is None else start, begin, unit.end, parts, missed, waits, clock)  # type: ignore[arg-type]
            return
        self._pending.append(_Pending(unit, start, clock, parts, missed, *waits))
        self.resolve()

    def resolve(self, *, final: bool = False) -> None:
        """Hand on what is known by now.

        Args:
            final: there will be no later time: what is not known is dropped, and what was added up leaves.
        """
        while self._pending:
            pending = self._pending[0]
            unit, clock = pending.unit, pending.clock
            if not final and not clock.is_host and len(self._pending) <= LAG:
                return
            if not clock.is_known(unit.end):
                if not final and len(self._pending) <= MOST_PENDING:
                    return
                # Its marks stay out of the pool: the device has yet to pass them.
                self._pending.popleft()
                self._drop(1)
                continue
            self._pending.popleft()
            begin, end = clock.ns(unit.begin), clock.ns(unit.end)
            start = begin if pending.start is None else min(clock.ns(pending.start), begin)
            # The gap ends on the host's clock where the host recorded the begin.
            shift = 0 if clock.is_host else begin - unit.host_begin
            waits = _shifted(pending.saves, shift), _shifted(pending.inputs, shift)
            self._settle(unit, start, begin, max(end, begin), pending.parts, pending.missed, waits, clock)
            self._release(pending)
        if final:
            self.flush()

    def _settle(
        self,
        unit: OpenUnit,
        start: int,
        begin: int,
        end: int,
        parts: list[Profile],
        missed: int,
        waits: tuple[Sequence[Interval], Sequence[Interval]],
        clock: Clock,
    ) -> None:
        trace = unit.trace
        if end + self._utc.offset_ns > self.due_ns:
            self.flush()
            self._due(end + self._utc.offset_ns)
        if trace is None and not unit.is_counted:
            self._rate.unit(end - start)
        elif trace is not None and trace.is_whole:
            self._alone(unit, trace, start, begin, end, parts, missed, waits, clock)
            return
        key = (unit.phase, unit.batch_size, missed, *map(id, parts))
        made = self._sum
        if made is None or made.key != key or made.end != start or end > made.limit or self._method != clock.method:
            self.flush()
            self._method = clock.method
            shift, window = self._utc.offset_ns, self.step_window_ns
            limit = window_end(end + shift, window) - shift
            if (start + shift) // HOUR_NS != (end + shift - 1) // HOUR_NS:
                limit = end  # its parts belong to several hours: only their real places tell which
            made = self._sum = _Sum(key, start, limit, parts, missed)
        gap = begin - start
        saves, inputs = waits
        if saves or inputs:
            split = split_gap(start, begin, saves, inputs)
            made.saved += split.checkpoint_ns
            made.stalled += split.input_stall_ns
            gap = split.held_idle_ns
            if inputs:
                made.waited += sum(last - first for first, last in unite(inputs))
        made.idle += gap
        made.active += end - begin
        made.end = end
        made.units += 1
        made.number = unit.number
        made.samples += unit.samples
        made.tokens_in += unit.tokens_in
        made.tokens_out += unit.tokens_out
        made.requests += unit.requests
        made.own += unit.own_ns + (0 if trace is None else trace.cost_ns)
        if made.limit == end and made.units == 1:
            self.flush((start, begin, *waits))

    def flush(self, places: tuple[int, int, Sequence[Interval], Sequence[Interval]] | None = None) -> None:
        """What was added up leaves.

        Args:
            places: start, begin, saves and waits of a single unit that spans hours; else the parts follow one another.
        """
        made, self._sum = self._sum, None
        if made is None:
            return
        begin = made.end - made.active
        if places is None:
            saved = made.start + made.saved
            stalled = saved + made.stalled
            saves: Sequence[Interval] = ((made.start, saved),) if made.saved else ()
            hidden = made.waited - made.stalled
            inputs: Sequence[Interval] = ((saved, stalled),) if made.stalled else ()
            if hidden > 0:  # behind the model's work, or behind a save
                inputs = (*inputs, (begin, begin + hidden)) if begin >= stalled else ((saved, stalled + hidden),)
        else:
            _, _, saves, inputs = places
        phase, batch_size = made.key[:2]
        self._hand_on(
            Unit(
                number=made.number,
                start_ns=made.start + self._utc.offset_ns,
                begin_ns=begin + self._utc.offset_ns,
                end_ns=made.end + self._utc.offset_ns,
                phase=phase,
                batch_size=batch_size,
                units=made.units,
                samples=made.samples,
                tokens_in=made.tokens_in,
                tokens_out=made.tokens_out,
                requests=made.requests,
                checkpoint=_shifted(saves, self._utc.offset_ns),
                input_wait=_shifted(inputs, self._utc.offset_ns),
                probe_ns=made.own + self._own_ns,
                profile=made.parts[0] if made.parts else None,
                parts=tuple(made.parts[1:]),
                uncounted=made.missed,
                method=self._method,
                memory=self.memory,
            )
        )

    def _alone(
        self,
        unit: OpenUnit,
        trace: Trace,
        start: int,
        begin: int,
        end: int,
        parts: list[Profile],
        missed: int,
        waits: tuple[Sequence[Interval], Sequence[Interval]],
        clock: Clock,
    ) -> None:
        """Hand on a sampled unit."""
        begun = perf_counter_ns()
        self.flush()
        shift = self._utc.offset_ns
        times = trace.times([clock.ns(mark) for mark, _, _ in trace.marks], begin, end)
        self._hand_on(
            Unit(
                number=unit.number,
                start_ns=start + shift,
                begin_ns=begin + shift,
                end_ns=end + shift,
                phase=unit.phase,
                batch_size=unit.batch_size,
                samples=unit.samples,
                tokens_in=unit.tokens_in,
                tokens_out=unit.tokens_out,
                requests=unit.requests,
                checkpoint=_shifted(waits[0], shift),
                input_wait=_shifted(waits[1], shift),
                probe_ns=unit.own_ns + trace.cost_ns + self._own_ns,
                sampled=True,
                ops=shares(times, unit.phase, unit.batch_size, self._names_of(parts)),
                profile=parts[0] if parts else None,
                parts=tuple(parts[1:]),
                uncounted=missed,
                method=clock.method,
                memory=self.memory,
            )
        )
        # What the host spent on it, or by how much it was slower than others where that is more: caches are cold after it.
        cost = trace.cost_ns + perf_counter_ns() - begun
        self._rate.sample(max(cost, end - start - (self._rate.unit_ns or end - start)))

    def _names_of(self, parts: list[Profile]) -> Names:
        profiles, names = self._named
        if len(parts) != len(profiles) or any(a is not b for a, b in zip(parts, profiles, strict=True)):
            names = op_names(parts)
            self._named = tuple(parts), names
        return names

    def _hand_on(self, unit: Unit) -> None:
        self.memory = None
        self._own_ns = 0
        self._take(unit)

    def _release(self, pending: _Pending) -> None:
        clock, unit = pending.clock, pending.unit
        if clock.is_host:
            return
        marks = [] if unit.trace is None else [mark for mark, _, _ in unit.trace.marks]
        if unit.begin is not pending.start:  # else there was no call of the model to mark
            marks.append(unit.begin)
        if pending.start is not None and self.rebases:
            self.rebases = False
            clock.rebase(pending.start)
        else:
            marks.append(pending.start)
        clock.release(marks)


def window_end(at_ns: int, length_ns: int) -> int:
    """End of the window in which a unit that ends then counts: (begin, end] of a grid that starts anew each hour."""
    inside = (at_ns - 1) % HOUR_NS
    return at_ns - 1 - inside + min(inside - inside % length_ns + length_ns, HOUR_NS)


def shares(times: dict[Place | None, Time], phase: str, batch_size: int, names: Names) -> dict[OpKey, Share]:
    """Times of layers and passes by op key.

    Args:
        times: exclusive time by layer and pass; None: what no layer covers.
        phase, batch_size: of the unit.
        names: op and dtype by layer and pass, as profiles give them.

    Source: infra/rules/telemetry.md 2.
    """
    made: dict[OpKey, Share] = {}
    for place, (ns, calls) in times.items():
        if place is None:
            key = none_key("unattributed_busy", phase, batch_size)
        else:
            op, dtype = names.get(place) or _NAMES.get(place) or (_op_of(place[0]), NONE)
            key = OpKey(place[0], place[1], op, phase, batch_size, dtype)
        made[key] = Share(ns, ns, calls)
    return made


def _op_of(layer: str) -> str:
    """Op of time in a layer that no profile knows."""
    return "region" if layer.startswith("(") and layer != MODEL else UNCOUNTED


def _shifted(intervals: Sequence[Interval], shift: int) -> tuple[Interval, ...]:
    return tuple((first + shift, last + shift) for first, last in intervals) if intervals else ()
