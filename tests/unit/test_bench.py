"""The arithmetic of the benchmarks; what they measure is never asserted."""

from __future__ import annotations

import random

from tests.bench._turns import bounds, resampled, trimmed_mean, turns


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
