"""The front against the definition, on random points with duplicates and ties in two to five dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.pareto import OBJECTIVES, Exact, Point, Verdict, fronts
from tasks.errors import UsageError

NAMES = [o.name for o in OBJECTIVES]
HIGHEST = {o.name: o.highest for o in OBJECTIVES}


def dominates(one: Point, other: Point) -> bool:
    """The definition, pair by pair."""
    better = False
    for name, value in one.values.items():
        gap = Fraction(value) - Fraction(other.values[name])
        if not HIGHEST[name]:
            gap = -gap
        if gap < 0:
            return False
        better = better or gap > 0
    return better


def brute(points: Sequence[Point]) -> list[bool | None]:
    """On the front or not, from the definition alone."""
    out: list[bool | None] = []
    for p in points:
        peers = [q for q in points if q.group == p.group and set(q.values) == set(p.values)]
        alone = "cost" not in p.values or len(p.values) < 2
        out.append(None if alone else not any(dominates(q, p) for q in peers))
    return out


# Few distinct values make many ties and duplicates; large neighbours meet in one float.
VALUES: st.SearchStrategy[Exact] = st.one_of(
    st.integers(0, 3),
    st.integers(10**18, 10**18 + 2),
    st.decimals("0", "2", places=1),
    st.sampled_from([Fraction(1, 3), Fraction(2, 3), Decimal("0.1"), 0.1, 0.30000000000000004]),
)


@st.composite
def clouds(draw: st.DrawFn) -> list[Point]:
    """Points of two to five objectives, cost among them; some lack one."""
    names = ["cost", *draw(st.lists(st.sampled_from(NAMES[1:]), min_size=1, max_size=4, unique=True))]
    count = draw(st.integers(1, 24))
    points = []
    for i in range(count):
        known = [n for n in names if draw(st.integers(0, 9)) or n == draw(st.sampled_from(names))]
        group = (draw(st.sampled_from(["USD", "USD", "USD", "EUR"])),)
        points.append(Point(f"c{i}", group, {n: draw(VALUES) for n in known}))
    return points


@given(clouds())
def test_the_front_is_what_nothing_dominates(points: list[Point]) -> None:
    verdicts = fronts(points)
    assert [v.on_front for v in verdicts] == brute(points)
    by_label = {p.label: (p, v) for p, v in zip(points, verdicts, strict=True)}
    for point, verdict in zip(points, verdicts, strict=True):
        assert (verdict.dominated_by is not None) == (verdict.on_front is False)
        assert (verdict.why is not None) == (verdict.on_front is None)
        if verdict.dominated_by is not None:
            winner, its = by_label[verdict.dominated_by]
            assert its.on_front
            assert winner.group == point.group
            assert dominates(winner, point)


@given(clouds(), st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_the_order(points: list[Point], random: object) -> None:
    order = list(range(len(points)))
    random.shuffle(order)  # type: ignore[attr-defined]
    again: dict[str, Verdict] = {
        points[i].label: v for i, v in zip(order, fronts([points[i] for i in order]), strict=True)
    }
    assert [again[p.label] for p in points] == fronts(points)


@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
def test_thousands_of_points_in_each_dimension(dimensions: int) -> None:
    """Large enough for the library's own fast paths, which differ by dimension."""
    state = 12345 + dimensions
    points = []
    for i in range(600):
        values = {}
        for name in NAMES[:dimensions]:
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            values[name] = (state >> 40) % 40
        points.append(Point(f"c{i:03}", ("USD",), values))
    verdicts = fronts(points)
    assert [v.on_front for v in verdicts] == brute(points)
    assert 0 < sum(bool(v.on_front) for v in verdicts) < 600


def test_equal_points_are_all_on_the_front() -> None:
    points = [Point(n, (), {"cost": 1, "quality": 2}) for n in "abc"] + [Point("d", (), {"cost": 1, "quality": 1})]
    verdicts = fronts(points)
    assert [v.on_front for v in verdicts] == [True, True, True, False]
    assert verdicts[3].dominated_by == "a"


def test_two_costs_that_are_one_float_are_two_costs() -> None:
    near = Decimal("1.0000000000000000001")
    assert float(near) == 1.0
    one, two = fronts(
        [Point("a", (), {"cost": Decimal(1), "latency": 5}), Point("b", (), {"cost": near, "latency": 5})]
    )
    assert (one.on_front, two.on_front, two.dominated_by) == (True, False, "a")


def test_a_missing_objective_is_neither_good_nor_bad() -> None:
    full = {"cost": 1, "quality": 9, "energy": 1}
    points = [Point("full", (), full), Point("bare", (), {"cost": 5, "quality": 1}), Point("cheap", (), {"cost": 1})]
    full_, bare, cheap = fronts(points)
    assert (full_.size, bare.size) == (1, 1)
    assert bare.on_front
    assert (cheap.on_front, cheap.why) == (None, "nothing is known of it beside its cost")
    (free,) = fronts([Point("free", (), {"quality": 1, "latency": 2})])
    assert (free.on_front, free.why) == (None, "its cost is not known")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity")])
@pytest.mark.parametrize("name", ["cost", "quality"])
def test_nan_and_infinity_are_refused_with_the_configuration(wrong: float | Decimal, name: str) -> None:
    values = {"cost": 1, "quality": 1, name: wrong}
    with pytest.raises(UsageError, match=f"configuration bert-4: {name} is .*expected a finite number") as caught:
        fronts([Point("fine", (), {"cost": 1, "quality": 1}), Point("bert-4", (), values)])
    assert caught.value.config == "bert-4"


def test_a_number_too_large_for_a_float_is_a_number() -> None:
    one, two = fronts([Point(n, (), {"cost": 10**400 + i, "latency": Fraction(1)}) for i, n in enumerate("ab")])
    assert (one.on_front, two.dominated_by) == (True, "a")


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UsageError, match="configuration a: unknown objective speed"):
        fronts([Point("a", (), {"cost": 1, "speed": 1})])


def test_no_points_have_no_front() -> None:
    assert fronts([]) == []
