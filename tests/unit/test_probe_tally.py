"""Counts, times and the allocator of units to the sums of a row, and what a row can hold."""

from __future__ import annotations

from seedance.probe.spans import NONE, Share, none_key, op_key
from seedance.probe.tally import MOST, MOST_COUNT, UNCOUNTED, split_row
from seedance.probe.windows import OP_TABLE, Memory
from tasks.core.layers import sum_ops
from tests.probe_rows import (
    HOUR,
    S,
    assert_accepted,
    count,
    counts_by_op,
    key,
    ops,
    profile,
    rows_of,
    sampled,
    steps,
    table_of,
    timed,
    total,
    unit,
)
from tests.shard_tables import START


def test_counts_are_profiles_times_units() -> None:
    train = profile(
        count("a", flops=10, bytes_ideal=3, index=4, calls=2),
        count("a", pass_="recompute", hw_flops=10, index=4),
        count("b", op=UNCOUNTED, variant="aten.fft", calls=5, uncounted_calls=5, index=5),
    )
    other = profile(count("a", flops=1, index=4), count("(optimizer)", op="optimizer", pass_="optim", index=-1))
    rows = rows_of(
        unit(0, 0, 1, profile=train),
        unit(1, 1, 2, profile=train, units=3),
        unit(2, 2, 3, profile=other, parts=(train, train)),
        unit(3, 3, 4, profile=profile(*train.ops)),  # equal, and not the same object
    )
    assert_accepted(rows)
    assert counts_by_op(rows) == {
        ("a", "fwd", "matmul"): (15, 71, 71, 21, 0),
        ("a", "recompute", "matmul"): (7, 0, 70, 0, 0),
        ("b", "fwd", UNCOUNTED): (35, 0, 0, 0, 35),
        ("(optimizer)", "optim", "optimizer"): (1, 0, 0, 0, 0),
    }
    assert {r["layer"]: (r["layer_index"], r["variant"]) for r in ops(rows)} == {
        "a": (4, ""),
        "b": (5, "aten.fft"),
        "(optimizer)": (-1, ""),
    }
    assert total(steps(rows), "units") == (6,)


def test_times_and_counts_of_one_op_share_a_row() -> None:
    counted = profile(count("a", flops=10, index=7))
    shares = {
        key("a"): Share(9, 7, 2),
        key("norm", op="norm"): Share(1, 1, 1),
        none_key("unattributed_busy", "train", 8): Share(1, 1, 0),
    }
    first = unit(0, 1, 10, profile=counted, sampled=True, ops=shares, method="events")
    rows = rows_of(first, unit(10, 10, 11, profile=counted, method="events"), layers={"norm": 3, "a": 99})
    assert_accepted(rows)
    found = {r["layer"]: r for r in ops(rows)}
    assert len(found) == len(ops(rows)) == 3
    a = found["a"]
    assert (a["calls"], a["flops"], a["sampled_calls"], a["busy_ns"], a["exclusive_ns"]) == (2, 20, 2, 9, 7)
    assert (a["op_key"], a["method"]) == (op_key(key("a").text), "events")
    assert {n: r["layer_index"] for n, r in found.items()} == {"a": 7, "norm": 3, "(none)": -1}
    assert (found["(none)"]["pass"], found["(none)"]["dtype"], found["(none)"]["op"]) == (
        NONE,
        NONE,
        "unattributed_busy",
    )


def test_methods_are_apart() -> None:
    counted = profile(count("a", flops=10))
    rows = rows_of(
        unit(0, 0, 1, profile=counted, method="events"),
        unit(1, 1, 2, profile=counted, method="formula"),
        unit(2, 2, 3, method="formula"),
    )
    assert_accepted(rows)
    assert {(r["layer"], r["method"]): r["flops"] for r in ops(rows)} == {
        ("a", "events"): 10,
        ("a", "formula"): 10,
        ("(model)", "formula"): 0,
    }


def test_units_without_a_profile_are_uncounted() -> None:
    counted = profile(count("a", flops=1))
    rows = rows_of(
        unit(0, 0, 1),
        unit(1, 1, 2, units=4),
        unit(2, 2, 3, profile=counted, uncounted=2),
        unit(3, 3, 4, uncounted=3),
        unit(4, 4, 5, parts=(counted,)),
    )
    assert_accepted(rows)
    assert counts_by_op(rows) == {
        ("a", "fwd", "matmul"): (2, 2, 2, 0, 0),
        ("(model)", "fwd", UNCOUNTED): (10, 0, 0, 0, 10),
    }


def test_squares_are_of_single_samples() -> None:
    units = [sampled(0, 0, 3_000_000), sampled(3_000_000, 3_000_000, 3_001_999)]
    rows = rows_of(*units)
    (row,) = timed(rows)
    assert row["exclusive_us2"] == 3_000**2 + 3  # 1.999 us squared, rounded down


def test_units_marked_together_are_one_sample() -> None:
    rows = rows_of(sampled(0, 0, 10, units=5), unit(10, 10, 20, units=5))
    assert_accepted(rows)
    assert total(steps(rows), "units", "sampled_units", "sampled_active_ns") == (10, 1, 10)


def test_a_forced_sample_stays_out_of_the_sums() -> None:
    forced = unit(0, 0, 10, ops={key("a"): Share(10, 10, 1)})
    rows = rows_of(forced, unit(10, 10, 20, sampled=True))
    assert_accepted(rows)
    assert total(steps(rows), "units", "sampled_units", "sampled_active_ns") == (2, 0, 0)
    assert total(ops(rows), "exclusive_ns") == (0,)


def test_one_rank_of_a_replica_writes_samples() -> None:
    counts = {"samples": 8, "tokens_in": 4_096, "tokens_out": 5, "requests": 2}
    for writes in (True, False):
        rows = rows_of(unit(0, 0, 1, **counts), unit(1, 1, 2, **counts), writes_samples=writes)
        assert_accepted(rows)
        assert total(steps(rows), *counts) == tuple(2 * writes * n for n in counts.values())


def test_a_rank_that_writes_no_op_rows_samples_nothing() -> None:
    rows = rows_of(sampled(0, 0, 10, profile=profile(count("a"))), writes_ops=False)
    assert_accepted(rows)
    assert ops(rows) == []
    assert total(steps(rows), "units", "sampled_units", "sampled_active_ns") == (1, 0, 0)


def test_the_allocator_has_peaks_and_sums() -> None:
    low = Memory(allocated_bytes=5, reserved_bytes=9, active_bytes=8, inactive_split_bytes=1, alloc_retries=1, ooms=2)
    high = Memory(allocated_bytes=7, reserved_bytes=8, active_bytes=6, inactive_split_bytes=3, alloc_retries=1)
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "alloc_retries", "ooms")
    rows = rows_of(unit(0, 0, 1, memory=low), unit(1, 1, 2, memory=high), unit(2, 2, 3))
    assert total(steps(rows), *names) == (7, 9, 8, 3, 2, 2)
    assert total(steps(rows_of(unit(0, 0, 1))), *names) == (0,) * 6


def test_flops_beyond_int64_are_split_over_parts_of_the_window() -> None:
    """A key has one row a window: the window is made smaller where a sum is too large, and nothing is lost."""
    huge = profile(count("a", flops=MOST, hw_flops=2 * MOST, bytes_ideal=5, calls=3))
    rows = rows_of(sampled(0, 0, 10 * S, layer="a", profile=huge, units=3), unit(10 * S, 10 * S, 400 * S))
    assert_accepted(rows)
    found = [r for r in ops(rows) if r["layer"] == "a"]
    assert len(found) == 6
    assert total(found, "flops", "hw_flops", "bytes_ideal", "calls") == (3 * MOST, 6 * MOST, 15, 9)
    assert [r["flops"] for r in found] == [MOST] * 3 + [0] * 3
    assert [r["exclusive_ns"] for r in found] == [10 * S] + [0] * 5
    assert [(r["window_start_utc"] - START) // S for r in found] == [0, 50, 100, 150, 200, 250]
    assert {r["window_ns"] for r in found} == {50 * S}
    summed = sum_ops(table_of(OP_TABLE, found)).to_pylist()
    assert [(int(r["flops"]), int(r["hw_flops"])) for r in summed] == [(3 * MOST, 6 * MOST)]


def test_squares_beyond_int64_are_split_too() -> None:
    """An op that ran for an hour in one sample: (3.6e9 us)^2 is above 2^63."""
    rows = rows_of(sampled(0, 0, HOUR))
    assert_accepted(rows)
    assert total(ops(rows), "exclusive_us2", "exclusive_ns", "sampled_calls") == ((HOUR // 1_000) ** 2, HOUR, 1)
    assert len([r for r in ops(rows) if r["exclusive_us2"]]) == 2


def test_a_window_too_short_to_split_keeps_what_fits() -> None:
    (row,) = ops(rows_of(unit(0, 0, 1, profile=profile(count("a", flops=3 * MOST)))))
    assert row["flops"] == MOST
    assert [r["flops"] for r in split_row(row | {"flops": 3 * MOST, "window_ns": 2})] == [MOST, MOST]


def test_counts_that_nobody_believes_are_cut_to_what_collect_does() -> None:
    rows = rows_of(unit(0, 0, 1, tokens_in=MOST_COUNT + 5, samples=2**70))
    assert_accepted(rows)
    assert total(steps(rows), "tokens_in", "samples") == (MOST_COUNT, MOST_COUNT)


def test_layers_without_utf8_can_be_written() -> None:
    rows = rows_of(unit(0, 0, 1, profile=profile(count("a\ud800é"), count("ключ", index=3))))
    assert_accepted(rows)
    assert {r["layer"]: r["layer_index"] for r in ops(rows)} == {"a?é": 0, "ключ": 3}
