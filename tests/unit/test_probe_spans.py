"""Spans to exclusive time: the worked example, precedence, odd ns, edges; gaps; keys."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from seedance.probe.spans import (
    Gap,
    Kind,
    OpKey,
    Share,
    Span,
    SpanError,
    covered,
    none_key,
    op_key,
    split_gap,
    sweep,
    unite,
)

KNOWN = 2_074_615_274_929_161_170
KNOWN_NONE = 6_776_968_789_931_576_558


def key(layer: str, pass_: str = "fwd", op: str = "matmul") -> OpKey:
    return OpKey(layer, pass_, op, "train", 8, "bf16")


L0, L1, S = key("L0"), key("L1"), key("S")
AR = key("AR", "comm", "all_reduce[dp]")
D2H = key("D", "copy", "copy")
IDLE, BUSY = none_key("held_idle", "train", 8), none_key("unattributed_busy", "train", 8)
EXAMPLE = [Span(260, 480, L0), Span(480, 700, L1), Span(659, 780, S), Span(680, 900, AR, "comm")]


def swept(spans: list[Span], start: int, end: int, *, known: bool = True) -> dict[OpKey, Share]:
    gaps = "held_idle" if known else "unattributed_busy"
    return sweep(start, end, spans, gaps=gaps, phase="train", batch_size=8)


def exclusive(spans: list[Span], start: int, end: int) -> dict[OpKey, int]:
    return {k: s.exclusive_ns for k, s in swept(spans, start, end).items()}


def test_the_active_time_of_the_worked_example() -> None:
    """L1 and S overlap 41 ns: 21 and 20. AR runs behind them until 780."""
    expected = {L0: Share(220, 220, 1), L1: Share(220, 200, 1), S: Share(121, 100, 1), AR: Share(220, 120, 1)}
    for order in itertools.permutations(EXAMPLE):
        assert swept(list(order), 260, 1_000) == expected | {IDLE: Share(100, 100, 0)}
    assert sum(s.exclusive_ns for s in swept(EXAMPLE, 260, 1_000).values()) == 740


def test_the_gap_of_the_worked_example() -> None:
    assert split_gap(0, 260, [(10, 70)], [(70, 200)]) == Gap(60, 130, 70)


def test_keys_come_in_code_point_order_of_their_text() -> None:
    made = list(swept([Span(0, 5, key("b")), Span(5, 6, key("a")), Span(6, 8, key("Z"))], 0, 10))
    assert [k.layer for k in made] == ["(none)", "Z", "a", "b"]
    # As text 16 comes before 8, and "a|fwd" before "a.b|fwd" would be wrong: "." is below "|".
    wide = [OpKey("a", "fwd", "matmul", "train", batch, "bf16") for batch in (8, 16)]
    assert [k.batch_size for k in swept([Span(0, 3, k) for k in wide], 0, 3)] == [16, 8]
    assert exclusive([Span(0, 3, key("a")), Span(0, 3, key("a.b"))], 0, 3) == {key("a.b"): 2, key("a"): 1}


@pytest.mark.parametrize(
    ("there", "winner"),
    [(("compute", "comm", "copy"), L0), (("comm", "copy"), AR), (("copy",), D2H), (("compute", "copy"), L0)],
)
def test_compute_goes_before_communication_before_copies(there: tuple[Kind, ...], winner: OpKey) -> None:
    by_kind: dict[Kind, OpKey] = {"compute": L0, "comm": AR, "copy": D2H}
    spans = [Span(0, 10, by_kind[kind], kind) for kind in there]
    made = swept(spans, 0, 10)
    assert {k for k, s in made.items() if s.exclusive_ns} == {winner}
    assert all(made[by_kind[kind]].busy_ns == 10 for kind in there)


def test_odd_ns_go_to_the_first_keys() -> None:
    assert exclusive([Span(0, 11, k) for k in (S, L1, L0)], 0, 11) == {L0: 4, L1: 4, S: 3}


def test_a_segment_ends_where_any_key_starts_or_ends() -> None:
    """L0 and L1 share 0-3 and 3-6 apart, because the copy behind them begins at 3: the odd ns come twice."""
    together = [Span(0, 6, L0), Span(0, 6, L1)]
    assert exclusive(together, 0, 6) == {L0: 3, L1: 3}
    assert exclusive([*together, Span(3, 5, D2H, "copy")], 0, 6) == {L0: 4, L1: 2, D2H: 0}
    assert exclusive([*together, Span(3, 3, S)], 0, 6) == {L0: 4, L1: 2, S: 0}
    # A key that goes on ends nothing.
    assert exclusive([Span(0, 3, L0), Span(3, 6, L0), Span(0, 6, L1)], 0, 6) == {L0: 3, L1: 3}


def test_a_key_that_overlaps_itself_is_busy_twice_and_there_once() -> None:
    made = swept([Span(0, 10, L0), Span(5, 15, L0), Span(0, 10, S)], 0, 20)
    assert made == {L0: Share(20, 10, 2), S: Share(10, 5, 1), IDLE: Share(5, 5, 0)}


def test_what_lies_outside_the_active_time_is_cut_off() -> None:
    made = swept([Span(-5, 3, L0), Span(90, 120, L0), Span(200, 300, S), Span(-9, -2, S)], 0, 100)
    assert made == {L0: Share(13, 13, 2), S: Share(0, 0, 2), IDLE: Share(87, 87, 0)}


def test_nothing_at_all() -> None:
    assert swept([], 5, 9, known=False) == {BUSY: Share(4, 4, 0)}
    assert swept([], 5, 5) == {}
    assert swept([Span(5, 5, L0)], 5, 5) == {L0: Share(0, 0, 1)}


def test_a_continued_call_counts_once() -> None:
    assert swept([Span(0, 2, L0), Span(2, 4, L1), Span(4, 6, L0, calls=0)], 0, 6)[L0] == Share(4, 4, 1)


def test_active_time_that_ends_before_it_begins() -> None:
    with pytest.raises(SpanError, match=r"at or after its start 9 ns, found 5 ns") as caught:
        swept([], 9, 5)
    assert (caught.value.start_ns, caught.value.end_ns) == (9, 5)


@pytest.mark.parametrize(
    ("checkpoint", "wait", "expected"),
    [
        ([], [], Gap(0, 0, 100)),
        ([(0, 100)], [(0, 100)], Gap(100, 0, 0)),
        ([(20, 60)], [(10, 30), (50, 90)], Gap(40, 40, 20)),
        ([(-50, 10), (5, 20)], [(90, 500)], Gap(20, 10, 70)),
        ([(200, 300)], [(-9, -1)], Gap(0, 0, 100)),
        ([(30, 20)], [(40, 40)], Gap(0, 0, 100)),
    ],
)
def test_gaps(checkpoint: list[tuple[int, int]], wait: list[tuple[int, int]], expected: Gap) -> None:
    assert split_gap(0, 100, checkpoint, wait) == expected


def test_a_gap_that_ends_before_it_begins_is_none() -> None:
    assert split_gap(10, 4, [], []) == Gap(0, 0, 0)
    assert split_gap(10, 4, [(0, 20)], [(0, 20)]) == Gap(0, 0, 0)


def test_unite() -> None:
    assert unite([(5, 9), (0, 2), (2, 4), (8, 12), (6, 7), (20, 19)]) == [(0, 4), (5, 12)]
    assert covered([(0, 4), (2, 6)], 1, 5) == 4


def test_an_op_key_is_the_signed_blake2b_64_of_its_text() -> None:
    """Known answers, so that keys of another release are the same."""
    text = OpKey("lm_head", "fwd", "matmul", "train", 1, "bf16").text
    assert text == "lm_head|fwd|matmul|train|1|bf16"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert op_key(text) == int.from_bytes(digest, "big", signed=True) == KNOWN
    assert op_key(none_key("held_idle", "decode", 64).text) == KNOWN_NONE
    assert none_key("held_idle", "decode", 64).text == "(none)|none|held_idle|decode|64|none"


def test_an_op_key_of_text_without_utf8_is_one_nevertheless() -> None:
    assert op_key("\ud800") == op_key("?")
