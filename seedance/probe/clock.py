"""Marks in time: of the host's clock, or of events on a device's stream that are read later and never waited for.

A mark is taken where something begins or ends; what time it was is asked when the device has passed it. All times are ns on
the host's monotonic clock; `Utc` says what they are in UTC. Knows torch only as far as it makes the device's events.

Source: infra/rules/telemetry.md 4.1; a device's clock and the host's need no alignment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any, Protocol

from seedance.durations import SECOND_NS

Mark = Any
"""What a clock gives for an instant; opaque to everybody else."""
JUMP_NS = SECOND_NS
"""How far the wall clock may run ahead of ours before we follow it."""
MOST_EVENTS = 65_536
"""Events of a device's pool: about 12 MB of host memory when all are in use."""
RESERVE = 256
"""Events that are left to the ends of units: a sample that would take them is given up."""


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark the present position of the current stream."""

    def query(self) -> bool:
        """Whether the device has passed the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Time from this mark to a later one, ms."""


class Clock(Protocol):
    """What the probe needs of a clock."""

    method: str
    """Name of the method in op rows."""
    is_host: bool
    """True when a mark is known as soon as it is taken."""

    def mark(self) -> Mark | None:
        """This instant; None when there is no room for one more."""

    def spare(self) -> Mark | None:
        """As `mark`, for a mark that can be done without."""

    def again(self, mark: Mark | None) -> Mark | None:
        """This instant instead of a former one."""

    def is_known(self, mark: Mark) -> bool:
        """Whether `ns` can be asked without waiting."""

    def ns(self, mark: Mark) -> int:
        """When the mark was passed, ns on the host's monotonic clock."""

    def release(self, marks: Iterable[Mark | None]) -> None:
        """These marks are no longer needed."""

    def rebase(self, mark: Mark) -> None:
        """Measure later marks from this known one: it is the newest of those that were released or are being so."""


class HostClock:
    """The host's monotonic clock. On a CPU the host's time is the work's time."""

    method = "host"
    is_host = True

    mark = spare = staticmethod(perf_counter_ns)

    def again(self, mark: Mark | None) -> Mark:
        return perf_counter_ns()

    def is_known(self, mark: Mark) -> bool:
        return True

    def ns(self, mark: Mark) -> int:
        return int(mark)

    def release(self, marks: Iterable[Mark | None]) -> None:
        return None

    def rebase(self, mark: Mark) -> None:
        return None


class DeviceClock:
    """Events on the current stream of one device, from a pool that only grows to its bound.

    The first event is the anchor: it gets the host's time at its recording, and every other mark the time since. A new
    anchor keeps the time that it has by the old one, so that differences telescope across anchors.

    Args:
        make: makes an event that measures time.
        is_here: whether the calling thread's current device is this clock's; elsewhere no mark is taken.
        most: events at most.
    """

    method = "events"
    is_host = False

    def __init__(
        self, make: Callable[[], Event], *, is_here: Callable[[], bool] = lambda: True, most: int = MOST_EVENTS
    ) -> None:
        self._make = make
        self._is_here = is_here
        self._free: list[Event] = []
        self._left = most
        self._anchor = self._take()
        self._anchor.record()
        self._anchor_ns = perf_counter_ns()

    def _take(self) -> Event:
        if self._free:
            return self._free.pop()
        self._left -= 1
        return self._make()

    def mark(self) -> Mark | None:
        """See `Clock`."""
        if not (self._free or self._left > 0) or not self._is_here():
            return None
        event = self._take()
        event.record()
        return event

    def spare(self) -> Mark | None:
        """See `Clock`."""
        return self.mark() if len(self._free) + self._left > RESERVE else None

    def again(self, mark: Mark | None) -> Mark | None:
        """See `Clock`. A recorded event that is recorded again moves; nobody may have asked for its time yet."""
        if mark is None or not self._is_here():
            return self.mark() if mark is None else mark
        mark.record()
        return mark

    def is_known(self, mark: Mark) -> bool:
        """See `Clock`."""
        return bool(mark.query())

    def ns(self, mark: Mark) -> int:
        """See `Clock`."""
        return self._anchor_ns + round(1_000_000 * self._anchor.elapsed_time(mark))

    def release(self, marks: Iterable[Mark | None]) -> None:
        """See `Clock`."""
        self._free.extend(mark for mark in marks if mark is not None)

    def rebase(self, mark: Mark) -> None:
        """See `Clock`. The mark must not be released as well."""
        self._anchor_ns = self.ns(mark)
        self._free.append(self._anchor)
        self._anchor = mark


def clock_of(device: Any) -> Clock:
    """The clock of the device that a model is on; the host's for everything but CUDA.

    Args:
        device: `torch.device`, or None for a model without parameters.
    """
    if device is None or device.type != "cuda":
        return HostClock()
    import torch

    cuda = torch.cuda
    index = cuda.current_device() if device.index is None else device.index

    def is_here() -> bool:
        return cuda.current_device() == index and not cuda.is_current_stream_capturing()

    with cuda.device(index):
        return DeviceClock(lambda: cuda.Event(enable_timing=True), is_here=is_here)


class Utc:
    """The host's monotonic clock in UTC. It follows the wall clock forward, never back: rows of a rank must not overlap.

    Args:
        wall: ns UTC.
        host: ns on the monotonic clock.
    """

    def __init__(
        self, *, wall: Callable[[], int] = time.time_ns, host: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._wall, self._host = wall, host
        self.offset_ns = wall() - host()
        """UTC minus monotonic clock."""

    def follow(self) -> int:
        """Catch up when the wall clock is ahead by more than a second (it was set, or the host slept); the offset, ns."""
        ahead = self._wall() - self._host() - self.offset_ns
        if ahead > JUMP_NS:
            self.offset_ns += ahead
        return self.offset_ns
