"""Units to rows: where their time goes, and the edges of windows, hours and sessions."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from seedance import schema
from seedance.probe import windows as module
from seedance.probe.spans import OpKey, Share, Span, sweep
from seedance.probe.windows import WindowError, Windows
from tests.probe_rows import (
    FAR,
    HOUR,
    S,
    assert_accepted,
    count,
    counts_by_op,
    key,
    ops,
    profile,
    rows_of,
    sampled,
    steps,
    timed,
    total,
    unit,
    windows,
)
from tests.shard_tables import START
from tests.telling import day_of, host, layer_ns, processes, readings, vector

PARTS = ("wall_ns", "active_ns", "input_stall_ns", "checkpoint_ns", "held_idle_ns")


def example_ops() -> dict[OpKey, Share]:
    spans = [Span(260, 480, key("L0")), Span(480, 700, key("L1")), Span(659, 780, key("S"))]
    spans.append(Span(680, 900, key("AR", "comm", "all_reduce[dp]"), "comm"))
    return sweep(260, 1_000, spans, gaps="held_idle", phase="train", batch_size=8)


def test_the_worked_example_to_the_digit() -> None:
    """Startup 2,000, units 47,000: the rows of the probe, reduced, are the numbers of the specification."""
    at = 2_000
    first = unit(
        at,
        at + 260,
        at + 1_000,
        checkpoint=[(at + 10, at + 70)],
        input_wait=[(at + 70, at + 200)],
        sampled=True,
        ops=example_ops(),
        profile=profile(count("L0", flops=10)),
        method="events",
    )
    # 46 units of 1,000 ns: 9,827 ns of gaps, 6,270 of them waiting for input.
    rest = [
        unit(
            at + 1_000 * k,
            at + 1_000 * k + (257 if k == 1 else 213 if k > 2 else 198),
            at + 1_000 * k + 1_000,
            input_wait=[(at + 1_000 * k, at + 1_000 * k + (150 if k == 1 else 136))],
            method="events",
        )
        for k in range(1, 47)
    ]
    gap = sum(u.begin_ns - u.start_ns for u in rest)
    assert (gap, sum(b - a for u in rest for a, b in u.input_wait)) == (9_827, 6_270)
    rows = rows_of(first, *rest)
    assert_accepted(rows)
    (step,) = steps(rows)
    assert {name: step[name] for name in PARTS} == {
        "wall_ns": 47_000,
        "active_ns": 36_913,
        "input_stall_ns": 6_400,
        "checkpoint_ns": 60,
        "held_idle_ns": 3_627,
    }
    assert (step["units"], step["sampled_units"], step["sampled_active_ns"]) == (47, 1, 740)
    assert (step["window_start_utc"] - START, step["window_ns"]) == (2_000, 47_000)
    found = {r["layer"]: (r["busy_ns"], r["exclusive_ns"]) for r in timed(rows)}
    assert found == {"L0": (220, 220), "L1": (220, 200), "S": (121, 100), "AR": (220, 120), "(none)": (100, 100)}
    held = {"readings": readings(0, 49_000, 1_000), "processes": processes(0, 49_000, 1_000)}
    made = day_of(host(**held, steps=steps(rows), ops=ops(rows), period=1_000))
    named = {layer: ns for layer, ns in layer_ns(made).items() if ns}
    assert named == {"L0": 10_974, "L1": 9_977, "S": 4_988, "AR": 5_986}
    assert vector(made) == {
        ("job-1", "startup"): 2_000,
        ("job-1", "work"): 10_974 + 9_977 + 4_988,
        ("job-1", "communication"): 5_986,
        ("job-1", "checkpoint"): 60,
        ("job-1", "input_stall"): 6_400,
        ("job-1", "held_idle"): 4_988 + 3_627,
    }
    assert sum(vector(made).values()) + 1_000 == 50_000


def test_the_closed_sets_and_columns_are_those_of_the_declaration() -> None:
    assert (module.PHASES, module.METHODS) == (schema.PHASES, schema.METHODS)
    assert (schema.STEP_WINDOWS.name, schema.OP_WINDOWS.name) == (module.STEP_TABLE, module.OP_TABLE)
    rows = rows_of(sampled(0, 1, 2))
    assert {name: set(row) for name, row in rows} == {
        t.name: set(t.names) for t in (schema.STEP_WINDOWS, schema.OP_WINDOWS)
    }


def test_a_training_process_needs_no_arrow_for_it() -> None:
    told = (
        "import sys, seedance.probe.windows, seedance.probe.hooks, seedance.probe.sampling; "
        "print(*{'pyarrow', 'torch', 'numpy', 'fsspec'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout == "\n"


def test_units_count_where_they_end() -> None:
    """A window is (begin, end]: what ends with it is in it. A gap before a unit goes where the unit goes."""
    rows = rows_of(
        unit(0, S, 9 * S), unit(9 * S, 9 * S, 10 * S), unit(10 * S, 11 * S, 25 * S), unit(25 * S, 25 * S, 26 * S)
    )
    assert_accepted(rows)
    found = [
        ((r["window_start_utc"] - START) // S, r["window_ns"] // S, r["units"], r["wall_ns"] // S) for r in steps(rows)
    ]
    assert found == [(0, 10, 2, 10), (20, 6, 2, 16)]
    assert total(steps(rows), "active_ns", "held_idle_ns") == (24 * S, 2 * S)


def test_wall_time_is_cut_at_the_hour_and_op_time_is_not() -> None:
    """From 59:50 to 00:30 with a gap of 4 s: 10 s stand in the old hour, with 0 units; the sample stands in the new one."""
    first = sampled(0, 5 * S, HOUR - 10 * S)
    second = sampled(HOUR - 10 * S, HOUR - 6 * S, HOUR + 30 * S, input_wait=[(HOUR - 9 * S, HOUR - 8 * S)], samples=8)
    rows = rows_of(first, second)
    assert_accepted(rows)
    before, tail, after = steps(rows)
    assert (tail["window_start_utc"] - START, tail["window_ns"]) == (HOUR - 10 * S, 10 * S)
    assert [tail[n] // S for n in PARTS] == [10, 6, 1, 0, 3]
    assert total([tail], "units", "sampled_units", "sampled_active_ns", "samples", "input_wait_ns") == (0, 0, 0, 0, 0)
    assert (after["window_start_utc"] - START, after["units"], after["samples"]) == (HOUR + 20 * S, 1, 8)
    assert [after[n] // S for n in PARTS] == [30, 30, 0, 0, 0]
    assert (after["sampled_active_ns"], after["input_wait_ns"]) == (36 * S, S)
    assert [r["exclusive_ns"] // S for r in timed(rows)] == [HOUR // S - 15, 36]
    assert before["wall_ns"] + tail["wall_ns"] == HOUR


def test_a_gap_that_crosses_the_hour_is_cut_with_its_parts() -> None:
    rows = rows_of(
        unit(
            HOUR - 5 * S,
            HOUR + 5 * S,
            HOUR + 6 * S,
            checkpoint=[(HOUR - 4 * S, HOUR + S)],
            input_wait=[(HOUR, HOUR + 3 * S)],
        )
    )
    assert_accepted(rows)
    tail, after = steps(rows)
    assert [tail[n] // S for n in PARTS] == [5, 0, 0, 4, 1]
    assert [after[n] // S for n in PARTS] == [6, 1, 2, 1, 2]
    assert after["input_wait_ns"] == 3 * S  # all of it, hidden or not


def test_a_unit_of_several_hours_has_a_piece_in_each() -> None:
    rows = rows_of(sampled(HOUR // 2, HOUR // 2 + 60 * S, 3 * HOUR + 60 * S, profile=profile(count("L0", flops=7))))
    assert_accepted(rows)
    found = steps(rows)
    assert [(r["window_start_utc"] - START) // S for r in found] == [3_590, 7_190, 10_790, 10_850]
    assert [r["wall_ns"] // S for r in found] == [1_800, 3_600, 3_600, 60]
    assert [r["held_idle_ns"] // S for r in found] == [60, 0, 0, 0]
    assert [r["units"] for r in found] == [0, 0, 0, 1]
    assert total(ops(rows), "calls", "flops") == (1, 7)


def test_a_unit_that_ends_with_the_hour_is_all_in_it() -> None:
    rows = rows_of(sampled(HOUR - 7 * S, HOUR - 6 * S, HOUR), sampled(HOUR, HOUR, HOUR + S))
    assert_accepted(rows)
    assert [(r["window_start_utc"] - START, r["units"], r["wall_ns"]) for r in steps(rows)] == [
        (HOUR - 7 * S, 1, 7 * S),
        (HOUR, 1, S),
    ]


def test_a_sample_longer_than_a_day_is_left_out() -> None:
    """Collect believes 25 h of a row; the unit itself counts."""
    long = sampled(0, 0, 24 * HOUR + 1, profile=profile(count("L0")))
    rows = rows_of(long)
    assert_accepted(rows)
    assert total(steps(rows), "units", "sampled_units", "sampled_active_ns", "wall_ns") == (1, 0, 0, 24 * HOUR + 1)
    assert total(ops(rows), "calls", "exclusive_ns") == (1, 0)
    rows = rows_of(sampled(0, 0, 24 * HOUR))
    assert_accepted(rows)
    assert total(ops(rows), "exclusive_ns") == (24 * HOUR,)


def test_time_that_came_twice_is_cut_off() -> None:
    made = windows()
    made.add(sampled(0, 1, 10))
    made.add(sampled(5, 6, 20, samples=3))  # its active time is cut: no sample
    made.add(sampled(15, 25, 30))  # its gap is cut: sampled
    made.add(sampled(1, 2, 3))  # nothing is left of it, but it counts
    made.add(unit(40, 35, 38))  # ends before it begins
    rows = made.rows(FAR, final=True)
    assert_accepted(rows)
    (row,) = steps(rows)
    assert [row[n] for n in PARTS] == [30, 24, 0, 0, 6]
    assert (row["units"], row["sampled_units"], row["sampled_active_ns"], row["samples"]) == (5, 2, 14, 3)
    assert made.cut_ns == 5 + 5 + 2


def test_phases_and_batch_sizes_have_rows_of_their_own() -> None:
    units = [
        unit(0, 1, 2),
        unit(2, 3, 4, phase="eval"),
        unit(4, 5, 6, batch_size=16),
        unit(6, 7, 8),
        unit(8, 9, 10, phase="eval", batch_size=16),
    ]
    rows = rows_of(*units)
    assert_accepted(rows)
    assert {(r["phase"], r["batch_size"]): r["units"] for r in steps(rows)} == {
        ("train", 8): 2,
        ("eval", 8): 1,
        ("train", 16): 1,
        ("eval", 16): 1,
    }
    assert {(r["phase"], r["batch_size"]): r["calls"] for r in ops(rows)} == {
        ("train", 8): 2,
        ("eval", 8): 1,
        ("train", 16): 1,
        ("eval", 16): 1,
    }


def test_the_probes_time_and_all_waiting_are_added() -> None:
    rows = rows_of(
        unit(0, 5, 10, probe_ns=3, input_wait=[(1, 3), (2, 4), (6, 9)]),
        unit(10, 10, 20, probe_ns=4, input_wait=[(5, 7)]),
    )
    (row,) = steps(rows)
    assert (row["probe_ns"], row["input_wait_ns"], row["input_stall_ns"]) == (7, 8, 3)


def test_the_gap_lies_on_the_hosts_clock_and_ends_where_the_host_recorded_it() -> None:
    """The device began 50 ns after the host recorded B: the gap of 100 ns is 100-200 on the host's clock."""
    rows = rows_of(
        unit(
            150,
            250,
            400,
            host_begin_ns=START + 200,
            checkpoint=[(90, 120)],
            input_wait=[(110, 150), (190, 230)],
        )
    )
    (row,) = steps(rows)
    assert [row[n] for n in PARTS] == [250, 150, 30 + 10, 20, 40]
    assert row["input_wait_ns"] == 80


def test_dropped_units_stand_in_the_next_row_or_the_last() -> None:
    made = windows()
    made.drop(2)
    assert made.rows(FAR, final=True) == []
    assert made.dropped == 2
    made.add(unit(0, 0, S))
    made.drop(3)
    made.add(unit(S, S, 15 * S))
    made.drop(4)
    rows = made.rows(FAR, final=True)
    assert [r["dropped_units"] for r in steps(rows)] == [2, 7]
    assert total(steps(rows), "units") == (2,)
    assert_accepted(rows)
    made.add(unit(15 * S, 15 * S, 16 * S))
    first = made.rows(START + 20 * S)
    made.drop(5)
    last = made.rows(FAR, final=True)
    assert_accepted([*rows, *first, *last])
    assert total(steps(last), "units", "wall_ns", "dropped_units") == (0, 0, 5)


def test_full_of_entries_it_drops_whole_units_until_rows_are_taken() -> None:
    made = windows(most_entries=5)
    for k in range(5):  # a step row, an op row and a profile each
        made.add(unit(k, k, k + 1, batch_size=k, profile=profile(count("a"))))
    assert made.dropped == 3
    rows = [*made.rows(START + 10 * S)]
    assert total(steps(rows), "units", "wall_ns") == (2, 2)
    made.add(unit(11 * S, 11 * S, 12 * S))
    rows = [*rows, *made.rows(FAR, final=True)]
    assert_accepted(rows)
    assert total(steps(rows), "units", "dropped_units") == (3, 3)


def test_rows_are_taken_once_and_only_of_windows_that_are_over() -> None:
    made = windows()
    for k in range(60):
        made.add(unit(10 * k * S, 10 * k * S + S, 10 * k * S + 9 * S, profile=profile(count("a", flops=1))))
    first = made.rows(START + 305 * S)
    assert [(r["window_start_utc"] - START) // S for r in steps(first)] == list(range(0, 300, 10))
    assert [(r["window_start_utc"] - START) // S for r in ops(first)] == [0]
    assert made.rows(START + 305 * S) == []
    second = made.rows(START + 310 * S)
    assert len(steps(second)) == 1
    assert ops(second) == []
    last = made.rows(FAR, final=True)
    assert made.rows(FAR, final=True) == []
    assert_accepted([*first, *second, *last])
    assert_accepted(first, second, last)
    assert total(steps([*first, *second, *last]), "units") == (60,)
    assert counts_by_op([*first, *second, *last]) == {("a", "fwd", "matmul"): (60, 60, 60, 0, 0)}


def test_the_last_window_of_an_hour_waits_for_the_unit_that_runs() -> None:
    made = windows()
    made.add(unit(0, 0, HOUR - 5 * S))
    early = made.rows(START + HOUR + 20 * S)
    assert early == []
    made.add(unit(HOUR - 5 * S, HOUR - 4 * S, HOUR + 25 * S))
    rows = [*made.rows(START + HOUR + 25 * S), *made.rows(FAR, final=True)]
    assert_accepted(rows)
    tail, after = steps(rows)
    assert (tail["units"], tail["wall_ns"], after["units"], after["wall_ns"]) == (1, HOUR, 1, 25 * S)


def test_a_unit_that_ends_in_a_window_already_taken_counts_in_the_next() -> None:
    made = windows()
    made.add(unit(0, 0, S))
    first = made.rows(START + 600 * S)
    made.add(sampled(S, S, 2 * S, profile=profile(count("a", flops=5))))
    rows = [*first, *made.rows(FAR, final=True)]
    assert_accepted(rows)
    assert_accepted(first, rows[len(first) :])
    assert [(r["window_start_utc"] - START) // S for r in steps(rows)] == [0, 600]
    assert total(steps(rows), "units", "wall_ns", "sampled_active_ns") == (2, 2 * S, S)
    assert made.cut_ns == 0


def test_a_late_unit_finds_an_op_window_that_was_not_taken() -> None:
    """At 10 s the op window [0, 10) was taken and the step window [7, 14) was not."""
    made = windows(step_window_ns=7 * S, op_window_ns=10 * S)
    made.add(sampled(0, 0, S))
    first = made.rows(START + 10 * S)
    made.add(sampled(S, S, 2 * S))
    rows = [*first, *made.rows(FAR, final=True)]
    assert_accepted(rows)
    assert [(r["window_start_utc"] - START) // S for r in steps(rows)] == [0, 7]
    assert [(r["window_start_utc"] - START) // S for r in timed(rows)] == [0, 10]


def test_the_time_of_a_dropped_unit_is_not_free() -> None:
    made = windows(most_entries=1)
    made.add(unit(0, 0, S))
    made.add(unit(S, S, 15 * S))
    first = made.rows(START + 301 * S)
    made.add(unit(10 * S, 10 * S, 20 * S))
    rows = [*first, *made.rows(FAR, final=True)]
    assert_accepted(rows)
    assert total(steps(rows), "units", "dropped_units", "wall_ns") == (2, 1, 6 * S)
    assert made.cut_ns == 5 * S


def test_sessions_of_one_rank_repeat_no_key_and_no_time() -> None:
    """Detached and attached again within one window, by the same object and by another one."""
    made = windows()
    made.add(sampled(S, 2 * S, 3 * S))
    first = made.rows(FAR, final=True)
    made.add(sampled(3 * S, 3 * S, 4 * S))
    second = made.rows(FAR, final=True)
    third = rows_of(sampled(4 * S, 4 * S, 5 * S))
    assert_accepted(first, second, third)
    found = [(r["window_start_utc"] - START, r["window_ns"]) for r in steps([*first, *second, *third])]
    assert found == [(S, 2 * S), (3 * S, S), (4 * S, S)]


def test_a_session_after_a_late_one_begins_after_it() -> None:
    """The late unit stands at 600 s in a window of 1 ns; the next session's windows begin after that."""
    made = windows()
    made.add(unit(0, 0, S))
    rows = [*made.rows(START + 600 * S)]
    made.add(unit(S, S, 2 * S))
    rows += made.rows(FAR, final=True)
    made.add(sampled(600 * S - 5, 600 * S - 1, 601 * S))
    rows += made.rows(FAR, final=True)
    assert_accepted(rows)
    assert [(r["window_start_utc"] - START, r["window_ns"]) for r in steps(rows)] == [
        (0, 10 * S),
        (600 * S, 1),
        (600 * S + 1, S - 1),
    ]
    assert made.cut_ns == 6


@pytest.mark.parametrize(
    "facts",
    [
        {"units": 0},
        {"samples": -1},
        {"tokens_in": -1},
        {"tokens_out": -1},
        {"requests": -1},
        {"probe_ns": -1},
        {"uncounted": -1},
        {"phase": "lunch"},
        {"method": "guess"},
        {"batch_size": -1},
        {"batch_size": 2**31},
        {"sampled": True, "ops": {key("a"): Share(4, 4, 1)}},
    ],
)
def test_a_unit_that_cannot_be_is_refused_and_leaves_nothing(facts: dict[str, Any]) -> None:
    made = windows()
    with pytest.raises(WindowError, match=r"^unit 0: expected "):
        made.add(unit(0, 0, 5, **facts))
    assert made.rows(FAR, final=True) == []


@pytest.mark.parametrize("facts", [{"attempt": -1}, {"attempt": 2**15}, {"rank": 2**31}, {"rank": -1}])
def test_a_rank_that_the_tables_cannot_hold(facts: dict[str, int]) -> None:
    with pytest.raises(WindowError, match=r"found -?[\d,]+\. Mend the setting\."):
        Windows(**({"job_id": "j", "attempt": 0, "rank": 0, "device_uuid": "d", "writes_samples": True} | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["step_window_ns", "op_window_ns"])
@pytest.mark.parametrize("length", [0, HOUR + 1])
def test_a_window_that_cannot_be(name: str, length: int) -> None:
    with pytest.raises(WindowError, match=name):
        windows(**{name: length})


@pytest.mark.parametrize(("step_ns", "op_ns"), [(7 * S, 11 * S), (HOUR, HOUR), (1_000, S), (3_599 * S, 7 * S)])
def test_windows_of_any_length_fit_the_hour(step_ns: int, op_ns: int) -> None:
    made, rows = windows(step_window_ns=step_ns, op_window_ns=op_ns), []
    for k in range(300):
        made.add(sampled(37 * k * S, 37 * k * S + S, 37 * (k + 1) * S))
        if k % 3 == 0:
            rows += made.rows(START + 37 * (k + 1) * S)
    rows += made.rows(FAR, final=True)
    assert_accepted(rows)
    assert total(steps(rows), "wall_ns", "units") == (37 * 300 * S, 300)


def test_one_thread_adds_while_another_takes() -> None:
    made, rows, counted = windows(), list[Any](), profile(count("a", flops=2))
    done = threading.Event()

    def take() -> None:
        while not done.is_set():
            rows.extend(made.rows(START))  # nothing is over yet: only the lock is tried
            rows.extend(made.rows(FAR - 1))

    taker = threading.Thread(target=take)
    taker.start()
    for k in range(3_000):
        made.add(unit(k * S, k * S, (k + 1) * S, profile=counted))
    done.set()
    taker.join()
    rows.extend(made.rows(FAR, final=True))
    assert_accepted(rows)
    assert total(steps(rows), "units", "wall_ns") == (3_000, 3_000 * S)
    assert total(ops(rows), "flops") == (6_000,)
