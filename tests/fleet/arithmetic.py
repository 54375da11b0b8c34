"""Exact splitting in Python integers: largest remainder, telescoped parts, the order of places.

A second writing of the arithmetic that the ledger prescribes; shares no code with the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from tests.fleet.observed import Place

UNIT = 10**12
"""Units of money in one of currency."""


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Integers that add up to total, each within one of its share; ties to the earlier. The weights' sum is positive."""
    whole = sum(weights)
    parts = [divmod(abs(total) * w, whole) for w in weights]
    short = abs(total) - sum(quotient for quotient, _ in parts)
    up = set(sorted(range(len(parts)), key=lambda i: (-parts[i][1], i))[:short])
    sign = -1 if total < 0 else 1
    return [sign * (quotient + (i in up)) for i, (quotient, _) in enumerate(parts)]


def half_even(value: Fraction) -> int:
    """Nearest integer, ties to the even one."""
    return round(value)


def order(place: Place) -> tuple[tuple[bool, str | int], ...]:
    """Order of places: code points of text, numbers as numbers, nulls last."""
    return tuple(
        (value is None, "" if value is None and i in (0, 1, 4) else 0 if value is None else value)
        for i, value in enumerate(place)
    )


def units(amount: Decimal) -> int:
    """Units of 1e-12."""
    scaled = amount * UNIT
    assert scaled == int(scaled), amount
    return int(scaled)


def telescoped(amount: int, start: int, end: int, length: int) -> int:
    """Part of an amount over [start, end) of its length: adds up without knowing the other parts."""
    part = abs(amount) * end // length - abs(amount) * start // length
    return -part if amount < 0 else part
