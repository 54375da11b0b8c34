"""Exact arithmetic of money: whole units of 1e-12 in, whole units out. Never a float in a result.

Amounts are signed integers of 1e-12 of their currency: int64 while every amount fits (9.2 million), Python integers in an
object array beyond. `apportion` is the largest-remainder rule, `telescope` the running-floor rule; both work on the absolute
value and restore the sign. Knows no tables, no clock, no disk. Source: infra/rules/ledger.md 1 and 4.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seedance.schema import MONEY

Ints: TypeAlias = npt.NDArray[Any]
"""int64, or Python integers in an object array."""

DIGITS = 12
_WIDE = 1 << 57
"""Divisors from here on leave the fast path: the float estimate of a quotient must stay within 2**63 / divisor."""


def apportion(total: Ints, start: Ints, weight: Ints) -> Ints:
    """Each total over its rows in proportion to their weights, by largest remainder.

    Args:
        total: shape (g,), signed whole units.
        start: shape (g + 1,), rows of group i are start[i]:start[i + 1], already in tie order.
        weight: shape (n,), non-negative integers.

    Returns:
        Shape (n,), whole units with the sign of their total; the rows of a group add up to its total exactly, and each
        differs from its share by less than one unit.

    Raises:
        ValueError: a weight is negative, or a group with a total other than 0 has no positive weight.

    Source: infra/rules/ledger.md 1; verified against fractions in tests/property/test_money.py.
    """
    groups = len(total)
    if len(start) != groups + 1 or (groups and start[-1] != len(weight)):
        raise ValueError(f"apportion: {groups} totals, {len(start)} offsets, {len(weight)} weights do not fit together")
    if len(weight) == 0:
        if np.any(total != 0):
            raise ValueError("apportion: an amount has no rows to go to")
        return np.zeros(0, total.dtype)
    if np.any(weight < 0):
        raise ValueError("apportion: negative weight")
    size = np.diff(start)
    group = np.repeat(np.arange(groups), size)
    divisor = _group_sums(weight, start)
    if np.any((divisor == 0) & (total != 0)):
        raise ValueError("apportion: all weights of an amount are zero")
    safe = np.where(divisor == 0, 1, divisor)
    amount = np.abs(total)
    whole, part = amount // safe, amount % safe
    share, remainder = multiply_divide(part[group], weight, safe[group])
    share = share + whole[group] * weight
    share = share + _largest(remainder, start, amount - _group_sums(share, start))
    return _signed(share, np.asarray(total < 0)[group])


def _largest(remainder: Ints, start: Ints, short: Ints) -> npt.NDArray[np.bool_]:
    """Where the `short` largest remainders of each group are, ties to the first row.

    Groups of one size are sorted together as the rows of a matrix: many small sorts are several times faster than one large.
    """
    chosen = np.zeros(len(remainder), bool)
    size = np.where(short > 0, np.diff(start), 0)
    for width in np.unique(size[size > 0]):
        groups = np.nonzero(size == width)[0]
        rows = start[groups][:, None] + np.arange(width)
        order = np.argsort(-remainder[rows], axis=1, kind="stable")
        taken = np.arange(width) < short[groups][:, None].astype(np.int64)
        chosen[np.take_along_axis(rows, order, axis=1)[taken]] = True
    return chosen


def telescope(total: Ints, upto: Ints, length: Ints) -> Ints:
    """Running floor: sign(total) * floor(|total| * upto / length). Differences of it along a charge add up to the charge.

    Args:
        total: signed whole units.
        upto: ns from the start of the charge, 0 <= upto <= length.
        length: ns of the charge, positive.

    Source: infra/rules/ledger.md 4.4.
    """
    amount = np.abs(total)
    share, _ = multiply_divide(amount % length, upto, length)
    share = share + (amount // length) * upto
    return _signed(share, np.asarray(total < 0))


def multiply_divide(a: Ints, b: Ints, divisor: Ints) -> tuple[Ints, Ints]:
    """Quotient and remainder of a * b / divisor for 0 <= a < divisor and 0 <= b <= divisor, exact beyond 64 bits.

    The quotient is estimated in floating point and corrected by the remainder, which is computed modulo 2**64: the estimate is
    off by far less than 2**63 / divisor, so the wrapped remainder tells the whole error.
    """
    if a.dtype == object or b.dtype == object or (len(divisor) and int(divisor.max()) >= _WIDE):
        product = a.astype(object) * b.astype(object)
        wide = divisor.astype(object)
        return product // wide, product % wide
    quotient = (a.astype(np.float64) * b.astype(np.float64) / divisor.astype(np.float64)).astype(np.int64)
    with np.errstate(over="ignore"):
        remainder = (a.view(np.uint64) * b.view(np.uint64) - quotient.view(np.uint64) * divisor.view(np.uint64)).view(
            np.int64
        )
    error = remainder // divisor
    return quotient + error, remainder - error * divisor


def _signed(share: Ints, negative: npt.NDArray[np.bool_]) -> Ints:
    out: Ints = np.where(negative, -share, share)
    return out


def _group_sums(values: Ints, start: Ints) -> Ints:
    """Sums of values[start[i]:start[i + 1]]; empty groups are 0. Python integers where int64 could wrap."""
    size = np.diff(start)
    largest = int(size.max()) if len(size) else 0
    limit = int(np.abs(values).max()) if len(values) else 0
    if values.dtype != object and limit * largest >= 1 << 63:
        values = values.astype(object)
    sums = np.zeros(len(size), values.dtype)
    filled = size > 0
    if filled.any():
        sums[filled] = np.add.reduceat(values, start[:-1][filled])
    if sums.dtype == object and len(sums) and max(abs(int(s)) for s in sums) < 1 << 62:
        return sums.astype(np.int64)
    return sums


def half_even(numerator: int, divisor: int) -> int:
    """numerator / divisor rounded half to even; divisor positive."""
    quotient, rest = divmod(numerator, divisor)
    if 2 * rest > divisor or (2 * rest == divisor and quotient % 2):
        quotient += 1
    return quotient


def to_units(column: pa.ChunkedArray | pa.Array) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Whole units of a decimal(38, 12) column and where it is valid; null counts 0 units.

    Returns:
        int64 where every value fits, else Python integers; and a mask, both of shape (n,).
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # an empty chunked array stays chunked
        array = pa.array([], MONEY)
    if array.type != MONEY:
        raise ValueError(f"to_units: expected {MONEY}, found {array.type}")
    valid = np.asarray(array.is_valid())
    words = (
        np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset : 2 * (array.offset + len(array))]
        if len(array)
        else np.zeros(0, np.int64)
    )
    low, high = words[0::2], words[1::2]
    low = np.where(valid, low, 0)
    high = np.where(valid, high, 0)
    if np.array_equal(high, low >> 63):
        return low, valid
    wide = np.array(
        [int(h) * (1 << 64) + int(np.uint64(lo)) for h, lo in zip(high, low.view(np.uint64), strict=True)], object
    )
    return wide, valid


def from_units(units: Ints, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """A decimal(38, 12) column of whole units; null where `valid` is False.

    Raises:
        OverflowError: an amount does not fit 38 digits.
    """
    if units.dtype == object:
        if any(abs(int(u)) >= 10**38 for u in units):
            raise OverflowError("from_units: an amount needs more than 38 digits")
        low = np.array([int(u) & ((1 << 64) - 1) for u in units], np.uint64).view(np.int64)
        high = np.array([int(u) >> 64 for u in units], np.int64)
    else:
        low = units.astype(np.int64)
        high = low >> 63
    words = np.empty(2 * len(units), np.int64)
    words[0::2], words[1::2] = low, high
    mask = None if valid is None or bool(np.all(valid)) else pa.array(valid).buffers()[1]
    return pa.Array.from_buffers(MONEY, len(units), [mask, pa.py_buffer(words)])


def units(value: Decimal | int | str) -> int:
    """Whole units of one exact decimal; half-even beyond 12 digits."""
    sign, digits, exponent = Decimal(value).as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"units: {value} is not a finite amount")
    magnitude = int("".join(map(str, digits)) or "0")
    shift = exponent + DIGITS
    magnitude = magnitude * 10**shift if shift >= 0 else half_even(magnitude, 10**-shift)
    return -magnitude if sign else magnitude


def total(values: Iterable[Decimal | str | None]) -> Decimal:
    """Exact sum of amounts, whatever their size; None adds nothing. Decimal's own `+` rounds beyond 28 digits."""
    return decimal(sum(units(value) for value in values if value is not None))


def difference(one: Decimal | str, other: Decimal | str) -> Decimal:
    """Exact one - other."""
    return decimal(units(one) - units(other))


def decimal(amount: int) -> Decimal:
    """The decimal of whole units, with 12 digits after the point."""
    amount = int(amount)
    return Decimal((int(amount < 0), tuple(map(int, str(abs(amount)))), -DIGITS))
