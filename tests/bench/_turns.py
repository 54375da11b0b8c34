"""How the benchmarks compare kinds of steps: they take turns, and an interval by bootstrap says how sure the result is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 10_000
SEED = 20261130
TRIMMED = 0.1
"""Share of the values left out at each end: minutes in which the machine was busy with something else."""


def turns(kinds: Sequence[str], rounds: int, seed: int = SEED) -> list[list[str]]:
    """Every kind once a round, in an order drawn anew for each."""
    draw = random.Random(seed)
    return [draw.sample(kinds, len(kinds)) for _ in range(rounds)]


def trimmed_mean(values: Sequence[float]) -> float:
    """Mean without the least and the largest of them."""
    out = int(len(values) * TRIMMED)
    return statistics.fmean(sorted(values)[out : len(values) - out])


def resampled(values: Sequence[float], *, seed: int = SEED, times: int = RESAMPLES) -> list[float]:
    """The trimmed mean of so many draws from values, each as many as there are, with replacement."""
    draw = random.Random(seed)
    return [trimmed_mean(draw.choices(values, k=len(values))) for _ in range(times)]


def bounds(found: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of resampled figures: the ends of a confidence interval."""
    ordered = sorted(found)
    return ordered[len(found) * 25 // 1_000], ordered[len(found) * 975 // 1_000]
