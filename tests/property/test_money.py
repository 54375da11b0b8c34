"""Largest remainder and running floor against fractions, far beyond 64 bits; decimals to units and back."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.schema import MONEY
from tasks.core import money

WEIGHTS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**45), st.integers(0, 2**57)), min_size=1, max_size=6)
AMOUNTS = st.one_of(st.integers(-20, 20), st.integers(-(10**13), 10**13), st.integers(-(10**37), 10**37))


def by_fractions(total: int, weights: list[int]) -> list[int]:
    """The rule as it is written: floors, then one unit each to the largest remainders, ties to the first."""
    whole, amount = sum(weights), abs(total)
    parts = [amount * w // whole for w in weights]
    order = sorted(range(len(weights)), key=lambda i: (-Fraction(amount * weights[i] % whole), i))
    for i in order[: amount - sum(parts)]:
        parts[i] += 1
    return [-p if total < 0 else p for p in parts]


def integers(values: list[int]) -> money.Ints:
    return np.array(values, np.int64 if all(abs(v) < 2**63 for v in values) else object)


@given(st.lists(st.tuples(AMOUNTS, WEIGHTS.filter(any)), min_size=1, max_size=4))
def test_apportion_is_the_rule_and_adds_up(groups: list[tuple[int, list[int]]]) -> None:
    totals = integers([total for total, _ in groups])
    starts = np.cumsum([0, *(len(w) for _, w in groups)])
    parts = money.apportion(totals, starts, integers([x for _, w in groups for x in w]))
    for i, (total, weights) in enumerate(groups):
        mine = [int(p) for p in parts[starts[i] : starts[i + 1]]]
        assert mine == by_fractions(total, weights)
        assert sum(mine) == total


@given(AMOUNTS, st.integers(1, 2**52), st.lists(st.integers(0, 2**52), max_size=5))
def test_telescope_adds_up_whatever_the_cuts(total: int, length: int, cuts: list[int]) -> None:
    edges = [0, *sorted(c % length for c in cuts), length]
    upto = money.telescope(integers([total] * len(edges)), np.array(edges), np.array([length] * len(edges)))
    assert int(upto[0]) == 0 and int(upto[-1]) == total
    assert [abs(int(u)) for u in upto] == [abs(total) * e // length for e in edges]


@given(st.lists(st.one_of(st.none(), st.integers(-(10**38) + 1, 10**38 - 1)), max_size=8), st.integers(0, 3))
def test_units_of_a_column_and_back(units: list[int | None], offset: int) -> None:
    column = pa.array([None if u is None else money.decimal(u) for u in units], MONEY).slice(offset)
    values, valid = money.to_units(pa.chunked_array([column]))
    assert [None if not ok else int(v) for v, ok in zip(values, valid, strict=True)] == units[offset:]
    assert money.from_units(values, valid).equals(column)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=15, min_value=-(10**9), max_value=10**9))
def test_units_round_half_to_even(value: Decimal) -> None:
    assert money.units(value) == int((value * 10**12).quantize(Decimal(1), rounding="ROUND_HALF_EVEN"))


@pytest.mark.parametrize(
    ("totals", "starts", "weights", "message"),
    [
        ([5], [0, 2], [0, 0], "all weights of an amount are zero"),
        ([5], [0, 2], [1, -1], "negative weight"),
        ([5], [0, 0], [], "an amount has no rows to go to"),
        ([5, 6], [0, 2], [1, 1], "do not fit together"),
    ],
)
def test_apportion_refuses(totals: list[int], starts: list[int], weights: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        money.apportion(np.array(totals), np.array(starts), np.array(weights, np.int64))


def test_amounts_beyond_38_digits_are_an_error() -> None:
    with pytest.raises(OverflowError, match="38 digits"):
        money.from_units(np.array([10**38], object))
