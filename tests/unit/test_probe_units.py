"""Units: marks of clocks that answer late, units that leave together, signatures, and what is counted when."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seedance.flops.profile import OpCount, Profile
from seedance.probe import clock as clocks
from seedance.probe.clock import RESERVE, DeviceClock, HostClock, Utc
from seedance.probe.memory import MemoryReader
from seedance.probe.probe import attach
from seedance.probe.sampling import Rate
from seedance.probe.settle import OpenUnit, Settler, Waits, window_end
from seedance.probe.unit import Unit
from seedance.probe.windows import Windows
from tests.probe_runs import Net, check_split, probing, rows, step, totals

X = torch.linspace(-1, 1, 32).reshape(4, 8)
MS = 1_000_000
SECOND = 1_000 * MS
HOUR = 3_600 * SECOND


# --- clocks -----------------------------------------------------------------------------------------------------------


@dataclass
class Device:
    """A device that passes events some time after they were recorded, in order."""

    lag_ns: int = 0
    made: list[Event] = field(default_factory=list)
    asked_early: int = 0
    queries: int = 0

    def event(self) -> Event:
        self.made.append(Event(self))
        return self.made[-1]


@dataclass(eq=False)
class Event:
    """What `torch.cuda.Event` does, on a device that is not there."""

    device: Device
    at: int | None = None

    def record(self) -> None:
        self.at = time.perf_counter_ns() + self.device.lag_ns

    def query(self) -> bool:
        assert self.at is not None
        self.device.queries += 1
        return time.perf_counter_ns() >= self.at

    def elapsed_time(self, end_event: Event) -> float:
        assert self.at is not None
        assert end_event.at is not None
        self.device.asked_early += not (self.query() and end_event.query())
        return (end_event.at - self.at) / 1e6


def test_marks_of_a_device_have_the_hosts_time_from_their_anchor_on() -> None:
    device = Device()
    begin = time.perf_counter_ns()
    clock = DeviceClock(device.event)
    marks = [clock.mark() for _ in range(3)]
    end = time.perf_counter_ns()
    found = [clock.ns(mark) for mark in marks]
    assert begin - MS <= found[0] <= found[1] <= found[2] <= end + MS
    gaps = [b.at - a.at for a, b in itertools.pairwise(marks)]  # type: ignore[union-attr, operator]
    assert [found[1] - found[0], found[2] - found[1]] == pytest.approx(gaps, abs=2)


def test_a_new_anchor_changes_no_difference() -> None:
    device = Device()
    clock = DeviceClock(device.event)
    first, second, third = clock.mark(), clock.mark(), clock.mark()
    before = [clock.ns(one) for one in (second, third)]
    clock.release([first])
    clock.rebase(second)
    assert [clock.ns(one) for one in (third,)] == pytest.approx(before[1:], abs=2)
    assert len(device.made) == 4
    clock.mark(), clock.mark()  # the former anchor and what was released are taken again
    assert len(device.made) == 4


def test_a_pool_that_is_empty_gives_no_mark_and_samples_leave_a_reserve() -> None:
    device = Device()
    clock = DeviceClock(device.event, most=RESERVE + 3)
    spare = [clock.spare() for _ in range(4)]
    assert [mark is None for mark in spare] == [False, False, True, True]
    marks = [clock.mark() for _ in range(RESERVE + 1)]
    assert marks[-1] is None
    assert None not in marks[:-1]
    clock.release(marks)
    assert clock.mark() is not None
    away = DeviceClock(device.event, is_here=lambda: False)
    assert away.mark() is None
    assert away.again(marks[0]) is marks[0]


def test_a_mark_that_is_taken_again_moves() -> None:
    clock = DeviceClock(Device().event)
    mark = clock.mark()
    assert mark is not None
    first = mark.at
    assert clock.again(mark) is mark
    assert mark.at > first
    assert clock.again(None) is not None
    host = HostClock()
    assert host.again(host.mark()) > 0


def test_utc_follows_the_wall_clock_forward_and_never_back() -> None:
    now = [10 * HOUR, 5 * SECOND]
    utc = Utc(wall=lambda: now[0], host=lambda: now[1])
    assert utc.offset_ns == 10 * HOUR - 5 * SECOND
    now[:] = [now[0] + SECOND + MS, now[1] + SECOND]
    assert utc.follow() == 10 * HOUR - 5 * SECOND  # a millisecond off is no reason
    now[0] += 7 * SECOND
    assert utc.follow() == 10 * HOUR + 2 * SECOND + MS
    now[0] -= HOUR
    assert utc.follow() == 10 * HOUR + 2 * SECOND + MS


@pytest.mark.parametrize("lag_ns", [0, 3 * MS])
def test_units_on_a_device_are_handed_on_later_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag_ns: int
) -> None:
    device = Device(lag_ns)
    monkeypatch.setattr("seedance.probe.session.clock_of", lambda _: DeviceClock(device.event))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probing(model, tmp_path):
        for _ in range(30):
            step(model, optimizer, X)
            time.sleep(0.004)
        with torch.no_grad():
            model(X)
        time.sleep(0.01)
    sums = check_split(tmp_path)
    assert sums["units"] == 31
    assert sums["dropped_units"] == 0
    assert sums["sampled_units"] == 29  # the first ones of both phases were counted
    assert device.asked_early == 0
    assert len(device.made) < 31 * 60  # events are taken again
    ops = rows(tmp_path, "op_windows")
    assert {row["method"] for row in ops} == {"events"}
    assert {row["layer"] for row in ops if row["exclusive_ns"]} >= {
        "blocks.0.up",
        "blocks.1.down",
        "head",
        "(optimizer)",
    }


def test_a_unit_is_asked_about_when_two_later_ones_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("seedance.probe.session.clock_of", lambda _: DeviceClock(device.event))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = []
    with probing(model, tmp_path, max_sample_ppm=0):
        for _ in range(5):
            step(model, optimizer, X)  # its end is taken note of when the next one begins
            asked.append(device.queries > 0)
    assert asked == [False, False, False, True, True]


def test_a_device_that_never_answers_costs_units_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(HOUR)
    monkeypatch.setattr("seedance.probe.session.clock_of", lambda _: DeviceClock(device.event))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, spool=tmp_path, max_sample_ppm=0) as probe:
        for _ in range(200):
            step(model, optimizer, X)
    assert probe.failures == 0
    assert len(device.made) <= 2 * 200 + 1
    assert rows(tmp_path, "step_windows") == []  # a unit that nobody knows the time of has no row


def test_a_capture_is_no_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [False]
    monkeypatch.setattr("seedance.probe.session.clock_of", lambda _: DeviceClock(Device().event))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    model = Net()
    with probing(model, tmp_path), torch.no_grad():
        model(X)
        captures[0] = True
        model(X)
        captures[0] = False
        model(X)
    assert totals(tmp_path)["units"] == 2


# --- units that leave together ----------------------------------------------------------------------------------------

PARTS = [Profile((OpCount("a", 0, "matmul", "fwd", "fp32", "", 1, n, n, n, n, 0),)) for n in (1, 2)]


@st.composite
def _units(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Gap, active time, saves and waits in and around the gap, profiles, phase: one tuple a unit."""
    made = []
    for _ in range(draw(st.integers(1, 25))):
        gap, active = draw(st.integers(0, 900)), draw(st.integers(1, 3_000))
        spots = st.tuples(st.integers(0, gap + active), st.integers(0, 500))
        made.append(
            (
                gap * MS,
                active * MS,
                [(a * MS, (a + b) * MS) for a, b in draw(st.lists(spots, max_size=2))],
                [(a * MS, (a + b) * MS) for a, b in draw(st.lists(spots, max_size=2))],
                draw(st.sampled_from([[], PARTS[:1], PARTS[1:], PARTS])),
                draw(st.sampled_from(["train", "eval"])),
                draw(st.booleans()) and draw(st.booleans()),
            )
        )
    return made


@given(_units(), st.integers(0, 3_599), st.integers(1, 20))
@settings(max_examples=60)
def test_units_that_leave_together_make_the_rows_that_they_would_make_alone(
    units: list[tuple[Any, ...]], second: int, window: int
) -> None:
    def windows() -> Windows:
        return Windows("job", 0, 0, "cpu:0", True, step_window_ns=window * SECOND, op_window_ns=3_600 * SECOND)

    together, alone = windows(), windows()
    step_ns = window * SECOND
    handed: list[Unit] = []
    dues: list[int] = []
    offset = 10 * HOUR + second * SECOND
    utc = SimpleNamespace(offset_ns=offset)
    settler = Settler(handed.append, together.drop, dues.append, rate=Rate(), utc=utc, step_window_ns=step_ns)  # type: ignore[arg-type]
    clock, at, waits, start = HostClock(), 0, Waits(), None
    for number, (gap, active, saves, inputs, parts, phase, counted) in enumerate(units):
        begin, end = at + gap, at + gap + active
        for kind, intervals in (("checkpoint", saves), ("input", inputs)):
            for first, last in intervals:
                waits._held.append((kind, at + first, at + last))
        waits._held = type(waits._held)(sorted(waits._held, key=lambda wait: wait[1]))
        unit = OpenUnit(number, phase, 4, phase == "train")
        unit.begin, unit.host_begin, unit.end, unit.host_end = begin, begin, end, end
        unit.is_counted, unit.samples, unit.own_ns = counted, 3, 7
        taken = waits.take(end)
        settler.add(unit, start, clock, list(parts), 0, taken)
        alone.add(
            Unit(
                number=number,
                start_ns=offset + (begin if start is None else start),
                begin_ns=offset + begin,
                end_ns=offset + end,
                phase=phase,
                batch_size=4,
                samples=3,
                probe_ns=7,
                checkpoint=tuple((offset + a, offset + b) for a, b in taken[0]),
                input_wait=tuple((offset + a, offset + b) for a, b in taken[1]),
                profile=parts[0] if parts else None,
                parts=tuple(parts[1:]),
            )
        )
        start = at = end
    settler.resolve(final=True)
    for unit in handed:
        together.add(unit)
    assert len(handed) <= len(units)
    assert _sorted(together.rows(0, final=True)) == _sorted(alone.rows(0, final=True))


def _sorted(found: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, list[tuple[str, Any]]]]:
    return sorted((table, sorted(row.items())) for table, row in found)


@pytest.mark.parametrize("length", [10, 7, 3_600])
def test_windows_end_on_a_grid_that_starts_anew_each_hour(length: int) -> None:
    for at in (1, SECOND, 10 * SECOND, 10 * SECOND + 1, HOUR - 1, HOUR, HOUR + 1):
        end = window_end(10 * HOUR + at, length * SECOND) - 10 * HOUR
        begin = max(end - length * SECOND, (at - 1) // HOUR * HOUR)
        assert begin < at <= end
        assert end == (at - 1) // HOUR * HOUR + HOUR or (end - (at - 1) // HOUR * HOUR) % (length * SECOND) == 0


def test_units_that_are_alike_leave_once_a_window() -> None:
    handed: list[Unit] = []
    dues: list[int] = []

    def due(end_ns: int) -> None:
        dues.append(end_ns - 10 * HOUR)
        settler.due_ns = window_end(end_ns, 10 * SECOND)

    utc = SimpleNamespace(offset_ns=10 * HOUR)
    settler = Settler(handed.append, pytest.fail, due, rate=Rate(), utc=utc, step_window_ns=10 * SECOND)  # type: ignore[arg-type]
    for number in range(100):
        unit = OpenUnit(number, "train", 4, True)
        unit.begin, unit.end = number * SECOND + MS, (number + 1) * SECOND
        settler.add(unit, number * SECOND, HostClock(), PARTS, 0, ((), ()))
    settler.resolve(final=True)
    assert [unit.units for unit in handed] == [10] * 10
    assert handed[3].number == 39
    assert dues == [number * 10 * SECOND + SECOND for number in range(10)]
    assert sum(unit.end_ns - unit.begin_ns for unit in handed) == 100 * (SECOND - MS)


# --- the allocator ----------------------------------------------------------------------------------------------------


def test_the_allocator_is_read_as_it_is_and_counters_are_deltas() -> None:
    def stats() -> Iterator[dict[str, int]]:
        for retries, ooms in ((5, 1), (7, 1), (1, 0)):
            yield {"allocated_bytes.all.peak": 10, "num_alloc_retries": retries, "num_ooms": ooms}

    found = stats()
    reader = MemoryReader(lambda: next(found))
    read = [reader.read() for _ in range(3)]
    assert [(one.allocated_bytes, one.alloc_retries, one.ooms) for one in read if one] == [
        (10, 0, 0),
        (10, 2, 0),
        (10, 1, 0),
    ]
    assert MemoryReader(None).read() is None


def test_waits_of_other_threads_and_old_ones_are_left_out() -> None:
    waits = Waits(most=3)
    for at in range(5):
        waits.add("input", at * 10, at * 10 + 5)
    assert waits.take(35) == ([], [(20, 25), (30, 35)])
    assert waits.take(100) == ([], [(40, 45)])
    assert waits.take(200) == ((), ())
    waits.thread = 1
    waits.add("input", 300, 400)
    assert waits.take(1_000) == ((), ())
    assert clocks.HostClock.is_host


def test_replays_of_a_recorded_graph_are_units_of_their_own_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorded:
        def replay(self) -> None:
            time.sleep(0.02)

    replay = Recorded.replay
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = Recorded()
    with probing(model, tmp_path):
        for _ in range(3):
            graph.replay()
            optimizer.step()
        with torch.no_grad():
            graph.replay()
    sums = check_split(tmp_path)
    assert sums["units"] == 4
    ops = rows(tmp_path, "op_windows")
    assert sum(row["exclusive_ns"] for row in ops if row["layer"] == "(graph)") >= 4 * 20 * MS
    assert sum(row["uncounted_calls"] for row in ops) == 4
    assert Recorded.replay is replay


def test_a_model_with_too_many_modules_is_marked_less_deeply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seedance.probe.trace.MOST_MARKS", 40)
    model = Net(blocks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probing(model, tmp_path):
        for _ in range(4):
            step(model, optimizer, X)
    sums = check_split(tmp_path)
    assert (sums["units"], sums["sampled_units"]) == (4, 2)  # one was counted, and one was too much
    timed = {row["layer"] for row in rows(tmp_path, "op_windows") if row["exclusive_ns"]}
    assert "blocks.0" in timed
    assert "blocks.0.up" not in timed
