"""Counts of shapes that lie between counted ones: exact where one length varies, and nothing otherwise.

Batches that are padded to their longest sample, and decoding against a growing cache, have a new shape each time. What their ops
count (FLOPs, bytes, calls) is a polynomial of the length, of degree two at most. Three counted shapes decide it; it is believed
when every further one agrees in every number, and never again when one does not. Beyond the shapes that were counted nothing is
said: a window or a limit may begin there. Pure integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seedance.flops.profile import OpCount, Profile, Uncounted

POINTS = 3
"""Shapes that decide a polynomial of degree two."""
MOST_FAMILIES = 256
MOST_POINTS = 16
FAR = 2
"""How many times the longest counted length a length is that is worth a count of its own: so few are."""
_HOLE = "a number"


@dataclass(frozen=True, slots=True)
class _Curve:
    """A polynomial of degree two for every number of a profile, by three profiles that lie on it."""

    lengths: tuple[int, ...]
    profiles: tuple[Profile, ...]
    ops: tuple[tuple[OpCount, ...], ...]
    """Each op at the three lengths."""


@dataclass(slots=True)
class _Family:
    """Counted shapes that differ in whole numbers only."""

    counted: dict[tuple[int, ...], Profile] = field(default_factory=dict)
    most: tuple[int, ...] = ()
    """The greatest counted number at each place."""
    is_broken: bool = False
    """Whether a count did not agree with the others."""
    believed: dict[Any, _Curve | None] = field(default_factory=dict)
    """Polynomials by the places that vary and the numbers in the others; None where there is none."""


class Shapes:
    """Profiles by signature, and those between them."""

    def __init__(self) -> None:
        self._families: dict[Any, _Family] = {}

    def add(self, signature: Any, profile: Profile) -> bool:
        """Note a count; False when it shows that what was inferred from the others is wrong."""
        numbers: list[int] = []
        shape = _flat(signature, numbers)
        family = self._families.get(shape)
        if family is None:
            if len(self._families) >= MOST_FAMILIES:
                return True
            family = self._families[shape] = _Family()
        at = tuple(numbers)
        expected = _infer(family, at)
        if expected is not None and not _agree(expected, profile):
            family.is_broken = True
            return False
        family.most = tuple(map(max, at, family.most or at))
        if len(family.counted) < MOST_POINTS:
            family.counted[at] = profile
            family.believed.clear()
        return True

    def points(self, signature: Any) -> int:
        """How many shapes were counted that differ from this one in whole numbers only."""
        family = self._families.get(_flat(signature, []))
        return 0 if family is None else len(family.counted)

    def is_far(self, signature: Any) -> bool:
        """Whether shapes like this one were counted and it is far beyond them."""
        numbers: list[int] = []
        family = self._families.get(_flat(signature, numbers))
        return family is not None and any(n >= FAR * most for n, most in zip(numbers, family.most, strict=True) if most)

    def infer(self, signature: Any) -> Profile | None:
        """The profile of a shape that was not counted; None when the counted ones do not tell."""
        numbers: list[int] = []
        family = self._families.get(_flat(signature, numbers))
        return None if family is None else _infer(family, tuple(numbers))

    def clear(self) -> None:
        """Forget all."""
        self._families.clear()


def _flat(value: Any, numbers: list[int]) -> Any:
    """A signature with holes where it has whole numbers, which are collected; a flag is no number."""
    if isinstance(value, tuple):
        return tuple(_flat(one, numbers) for one in value)
    if isinstance(value, int) and not isinstance(value, bool):
        numbers.append(value)
        return _HOLE
    return value


def _infer(family: _Family, at: tuple[int, ...]) -> Profile | None:
    """What a family says of a shape: of those that differ from it in one length, however often that stands in the shape."""
    if family.is_broken or len(family.counted) <= POINTS:
        return None
    if at in family.counted:
        return family.counted[at]
    for other in family.counted:
        places = tuple(n for n, (a, b) in enumerate(zip(at, other, strict=True)) if a != b)
        # One length: all its places move by the same.
        if len({other[n] - at[n] for n in places}) == 1:
            # What is fixed, and how far the places of the length lie apart.
            fixed = tuple(number if n not in places else number - at[places[0]] for n, number in enumerate(at))
            if (places, fixed) not in family.believed:
                family.believed[places, fixed] = _curve(family, places, fixed)
            curve = family.believed[places, fixed]
            if curve is not None:
                return _point(curve, at[places[0]])
    return None


def _curve(family: _Family, places: tuple[int, ...], fixed: tuple[int, ...]) -> _Curve | None:
    """The polynomial through all counted shapes that differ in these places alone; None when no one does."""
    by_length: dict[int, Profile] = {}
    for other, profile in family.counted.items():
        length = other[places[0]]
        if all(number == fixed[n] + (length if n in places else 0) for n, number in enumerate(other)):
            by_length[length] = profile
    if len(by_length) <= POINTS:
        return None
    lengths = sorted(by_length)
    # The ends and the middle decide; the others are held against it.
    base = (lengths[0], lengths[len(lengths) // 2], lengths[-1])
    profiles = tuple(by_length[length] for length in base)
    tables = [{op.key: op for op in profile.ops} for profile in profiles]
    names = [[(one.name, one.calls) for one in profile.uncounted] for profile in profiles]
    if any(table.keys() != tables[0].keys() for table in tables) or any(name != names[0] for name in names):
        return None
    ops = tuple(tuple(table[op.key] for table in tables) for op in profiles[0].ops)
    curve = _Curve(base, profiles, ops)
    for length, profile in by_length.items():
        made = _point(curve, length)
        if made is None or not _agree(made, profile):
            return None
    return curve


def _point(curve: _Curve, at: int) -> Profile | None:
    """The profile at a length; None when it is not between, or a number would be no whole one (Lagrange, in integers)."""
    a, b, c = curve.lengths
    if not a <= at <= c:
        return None
    over = (a - b) * (a - c) * (b - c)
    first, second, third = (at - b) * (at - c) * (b - c), -(at - a) * (at - c) * (a - c), (at - a) * (at - b) * (a - b)
    ops: list[OpCount] = []
    for one, two, three in curve.ops:
        numbers = []
        for x, y, z in zip(_numbers(one), _numbers(two), _numbers(three), strict=True):
            value, rest = (x, 0) if x == y == z else divmod(first * x + second * y + third * z, over)
            if rest or value < 0:
                return None
            numbers.append(value)
        ops.append(OpCount(one.layer, one.layer_index, one.op, one.pass_, one.dtype, one.variant, *numbers))
    uncounted = tuple(Uncounted(one.name, one.calls, None) for one in curve.profiles[0].uncounted)
    return Profile(tuple(ops), uncounted, None, any(profile.is_bound for profile in curve.profiles))


def _numbers(op: OpCount) -> tuple[int, ...]:
    return op.calls, op.flops, op.hw_flops, op.flops_full, op.bytes_ideal, op.uncounted_calls


def _agree(one: Profile, other: Profile) -> bool:
    """Whether two profiles count the same, times aside."""
    return {op.key: op for op in one.ops} == {op.key: op for op in other.ops}
