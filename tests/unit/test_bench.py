"""The arithmetic of the benchmarks; what they measure is never asserted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.bench._pairs import STEPS, Group, Measured, measure
from tests.bench._training import LAUNCH_BOUND
from tests.bench._turns import bounds, resampled, trimmed_mean, turns
from tests.bench._worker import PEERS, PROBED, WARM_UP, Block
from tests.bench.probe import KINDS, overhead_rows, spooled


def test_turns_are_drawn_once_and_for_all() -> None:
    rounds = turns(("bare", "probe", "peer"), 200)
    assert rounds == turns(("bare", "probe", "peer"), 200) != turns(("bare", "probe", "peer"), 200, seed=1)
    assert all(sorted(order) == ["bare", "peer", "probe"] for order in rounds)
    for kind in ("bare", "probe", "peer"):  # each goes first about as often
        assert 40 < sum(order[0] == kind for order in rounds) < 95


def test_a_trimmed_mean_leaves_out_a_tenth_at_each_end() -> None:
    assert trimmed_mean([1.0] * 8 + [100.0, -100.0]) == 1.0
    assert trimmed_mean([1.0, 2.0, 6.0]) == 3.0


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    held = 0
    for trial in range(20):
        low, high = bounds(resampled([draw.gauss(1.005, 0.01) for _ in range(40)], seed=trial, times=1_000))
        assert low < high
        held += low <= 1.005 <= high
    assert 16 <= held <= 20


def test_the_interval_narrows_with_more_rounds_and_is_the_same_each_time() -> None:
    draw = random.Random(2)
    values = [draw.gauss(1.0, 0.02) for _ in range(160)]
    low, high = bounds(resampled(values, times=2_000))
    assert (low, high) == bounds(resampled(values, times=2_000))
    assert low < trimmed_mean(values) < high
    few_low, few_high = bounds(resampled(values[:20], times=2_000))
    assert high - low < few_high - few_low


def test_bounds_leave_two_and_a_half_percent_at_each_end() -> None:
    assert bounds([float(n) for n in range(1_000)]) == (25.0, 975.0)


def test_a_group_gives_one_figure_of_all_its_steps() -> None:
    group = Group({"bare": [Block([1.0, 3.0], 2.0)], "x": [Block([2.0, 2.0], 3.0), Block([4.0, 4.0], 5.0)]}, {})
    assert (group.step_s("bare"), group.step_s("bare", how="cpu")) == (2.0, 1.0)
    assert (group.step_s("x"), group.step_s("x", how="cpu")) == (3.0, 2.0)
    other = Group({"bare": [Block([1.0], 1.0)]}, {})
    assert Measured([group, other]).ratios("x") == [1.5]
    assert Measured([group, other]).percent("x") == (50.0, 50.0, 50.0)
    assert Measured([group, other]).bare_s() == 1.5
    twice = Measured([Group(group.blocks | {"control": [Block([3.0, 5.0], 2.0)]}, {})])
    assert (twice.ratios("x"), twice.ratios("control", over=("bare",)), twice.bare_s()) == ([1.0], [2.0], 3.0)


def test_a_sample_costs_what_its_step_and_the_next_took_more() -> None:
    blocks = [
        Block([1.0, 5.0, 2.0, 1.0, 1.0], 0.0, sampled=[1]),
        Block([1.0, 1.0, 1.0, 1.0, 5.0], 0.0, sampled=[4]),  # its next is in another block
        Block([1.0, 5.0, 5.0, 1.0, 1.0], 0.0, sampled=[1, 2]),  # the second alone can be told
        Block([9.0, 9.0, 1.0, 2.0], 0.0, sampled=[0]),  # most of the block is the sample's own
        Block([1.0] * 5, 0.0),
    ]
    assert Measured([Group({"probe": blocks}, {})]).samples_s("probe") == [5.0, 4.0, 15.0]


def test_processes_step_in_turns_and_every_step_is_told(tmp_path: Path) -> None:
    measured = measure(LAUNCH_BOUND, KINDS, tmp_path, groups=1, rounds=2, rare=tuple(PEERS))
    (group,) = measured.groups
    assert set(group.blocks) == set(group.told) == {*KINDS, *PEERS}
    for blocks in group.blocks.values():
        assert [len(block.wall) for block in blocks] == [STEPS, STEPS]
        assert all(second > 0 for block in blocks for second in [*block.wall, block.cpu])
    assert group.told[PROBED].attach > 0
    units = sum(row["units"] for table, row in spooled(tmp_path) if table == "raw_telemetry__step_windows")
    assert units == WARM_UP + 2 * STEPS
    rows = overhead_rows(measured)
    assert {row["peer"] for row in rows} == {None, "budget", *PEERS.values()}


def test_a_process_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 1"):
        measure(LAUNCH_BOUND | {"heads": 0}, ("bare",), tmp_path, groups=1, rounds=1)
