"""Profiles between counted shapes: exact for every polynomial of degree two, and silent about all else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from seedance.flops.profile import OpCount, Profile, Uncounted
from seedance.probe.shapes import Shapes

Numbers = tuple[int, int, int]


def profile(length: int, terms: Numbers = (3, 5, 7), *, layer: str = "a") -> Profile:
    """What a model whose FLOPs are such a polynomial counts."""
    constant, linear, square = terms
    flops = constant + linear * length + square * length * length
    ops = (
        OpCount(layer, 0, "matmul", "fwd", "fp32", "", 2, flops, 2 * flops, flops, linear * length, 0),
        OpCount(layer, 0, "uncounted", "fwd", "fp32", "aten.fft", 1, 0, 0, 0, length, 1),
    )
    return Profile(ops, (Uncounted("aten.fft", 1, 99),), 1_000)


def signature(length: int, batch: int = 2, *, kind: str = "f32", plus: int = 1) -> Any:
    """A batch of sequences, and a mask that is one longer."""
    return ((True, None, ((batch, length, 8), kind, (batch, length + plus), "i64")),)


def counted(*lengths: int, **given: Any) -> Shapes:
    shapes = Shapes()
    for length in lengths:
        assert shapes.add(signature(length), profile(length, **given))
    return shapes


def numbers(found: Profile | None) -> Any:
    return None if found is None else [replace(op) for op in found.ops]


@given(
    st.tuples(*[st.integers(0, 10**12)] * 3),
    st.lists(st.integers(1, 5_000), min_size=4, max_size=8, unique=True),
    st.integers(1, 40_000),
)
def test_four_counts_tell_the_lengths_between_them(terms: Numbers, lengths: list[int], length: int) -> None:
    found = counted(*lengths, terms=terms).infer(signature(length))
    if min(lengths) <= length <= max(lengths):
        assert numbers(found) == numbers(profile(length, terms))
    else:
        assert found is None


def test_three_counts_tell_nothing() -> None:
    assert counted(1, 2, 4).infer(signature(3)) is None


def test_nothing_is_told_of_what_lies_beyond() -> None:
    """A window of attention may begin there, and then it would be wrong until the next count."""
    shapes = counted(2, 4, 6, 8)
    assert shapes.infer(signature(7)) is not None
    assert shapes.infer(signature(9)) is None and shapes.infer(signature(1)) is None


def test_what_is_far_beyond_is_worth_a_count() -> None:
    shapes = counted(2, 4, 6, 8)
    assert [shapes.is_far(signature(n)) for n in (7, 9, 15, 16)] == [False, False, False, True]
    assert not shapes.is_far(signature(16, kind="f16"))  # nothing like it was counted: that is decided elsewhere


def test_what_is_no_polynomial_is_not_inferred() -> None:
    shapes = Shapes()
    for length in (1, 2, 3, 4, 5):
        shapes.add(signature(length), profile(length**3))
    assert shapes.infer(signature(6)) is None


def test_other_ops_other_batches_and_other_places_are_not_mixed() -> None:
    shapes = counted(1, 2, 3)
    shapes.add(signature(6), profile(6, layer="b"))
    assert shapes.infer(signature(5)) is None
    shapes = counted(1, 2, 3, 6)
    assert shapes.infer(signature(5, batch=3)) is None
    assert shapes.infer(signature(5, kind="f16")) is None
    assert shapes.infer(signature(5, plus=2)) is None
    assert shapes.infer(signature(5)) is not None
    assert shapes.infer(signature(0)) is None


def test_a_count_that_does_not_agree_ends_it() -> None:
    shapes = counted(1, 2, 3, 8)
    assert shapes.add(signature(9), profile(9)) and shapes.infer(signature(7)) is not None
    assert not shapes.add(signature(5), profile(6))
    assert shapes.infer(signature(7)) is None
    shapes.clear()
    assert shapes.add(signature(5), profile(6))


def test_a_flag_is_no_length() -> None:
    shapes = Shapes()
    for flag in (False, True):
        for length in (1, 2, 3, 10):
            shapes.add((flag, length), profile(length, (1, 1, int(flag))))
    assert numbers(shapes.infer((True, 9))) == numbers(profile(9, (1, 1, 1)))
    assert numbers(shapes.infer((False, 9))) == numbers(profile(9, (1, 1, 0)))
