"""Laws of the probe: each ns has one place, each call is counted once, whatever the order of spans and the time of a flush."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from seedance.flops.profile import Profile
from seedance.probe.hooks import POINTS, HookManager
from seedance.probe.sampling import Rate, is_sampled
from seedance.probe.spans import Gap, OpKey, Share, Span, none_key, split_gap, sweep, unite
from seedance.probe.tally import COUNTS
from seedance.probe.windows import Unit, Windows
from tasks.core import layers
from tests.probe_rows import HOUR, Rows, S, assert_accepted, count, hour_of, ops, profile, steps, total
from tests.shard_tables import START

QUIET = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SLOW = settings(QUIET, max_examples=60)

KINDS = {"fwd": "compute", "comm": "comm", "copy": "copy"}
keys = st.builds(
    OpKey,
    st.sampled_from(["a", "a.b", "B", "é"]),
    st.sampled_from(list(KINDS)),
    st.sampled_from(["matmul", "norm"]),
    st.just("train"),
    st.sampled_from([8, 16]),
    st.just("bf16"),
)
instants = st.integers(-5, 40)


@st.composite
def spans_of_a_unit(draw: st.DrawFn) -> list[Span]:
    """Spans that start before they end; few instants, so that many ends fall together."""
    found = draw(st.lists(st.tuples(keys, instants, instants), max_size=12))
    return [Span(min(a, b), max(a, b), key, KINDS[key.pass_]) for key, a, b in found]  # type: ignore[arg-type]


def swept(spans: Sequence[Span], start: int, end: int) -> dict[OpKey, Share]:
    return sweep(start, end, spans, gaps="held_idle", phase="train", batch_size=8)


@QUIET
@given(spans=spans_of_a_unit(), start=st.integers(0, 10), length=st.integers(0, 30))
def test_exclusive_times_add_up_to_the_active_time(spans: list[Span], start: int, length: int) -> None:
    made = swept(spans, start, start + length)
    assert sum(share.exclusive_ns for share in made.values()) == length
    assert all(0 <= share.exclusive_ns <= share.busy_ns for share in made.values())
    assert sum(share.calls for share in made.values()) == len(spans)
    inside = (max(min(s.end_ns, start + length) - max(s.start_ns, start), 0) for s in spans)
    idle = made.get(none_key("held_idle", "train", 8), Share(0, 0, 0))
    assert sum(share.busy_ns for share in made.values()) == sum(inside) + idle.busy_ns


@QUIET
@given(spans=spans_of_a_unit(), start=st.integers(0, 10), length=st.integers(0, 30))
def test_the_sweep_is_that_of_the_reduction(spans: list[Span], start: int, length: int) -> None:
    """Another hand wrote it, in vectors."""
    segments = [layers.Segment(s.key.text, s.start_ns, s.end_ns) for s in spans]
    expected = layers.sweep(segments, start, start + length, empty=none_key("held_idle", "train", 8).text)
    made = {key.text: share.exclusive_ns for key, share in swept(spans, start, start + length).items()}
    assert {text: ns for text, ns in made.items() if ns} == expected


@QUIET
@given(spans=spans_of_a_unit(), seed=st.randoms(use_true_random=False))
def test_the_order_of_spans_does_not_matter(spans: list[Span], seed: random.Random) -> None:
    mixed = seed.sample(spans, len(spans))
    assert list(swept(mixed, 0, 30).items()) == list(swept(spans, 0, 30).items())


intervals = st.lists(st.tuples(instants, instants), max_size=6)


@QUIET
@given(start=instants, length=st.integers(0, 30), saves=intervals, waits=intervals, cut=st.integers(0, 30))
def test_parts_of_a_gap_add_up_and_are_those_of_each_ns(
    start: int, length: int, saves: list[tuple[int, int]], waits: list[tuple[int, int]], cut: int
) -> None:
    end = start + length
    made = split_gap(start, end, saves, waits)
    places = Counter(
        "checkpoint"
        if any(a <= at < b for a, b in saves)
        else "input"
        if any(a <= at < b for a, b in waits)
        else "idle"
        for at in range(start, end)
    )
    assert made == Gap(places["checkpoint"], places["input"], places["idle"])
    assert sum((made.checkpoint_ns, made.input_stall_ns, made.held_idle_ns)) == length
    middle = min(start + cut, end)
    halves = (split_gap(start, middle, saves, waits), split_gap(middle, end, saves, waits))
    assert tuple(a + b for a, b in zip(*halves, strict=True)) == tuple(made)


@QUIET
@given(found=intervals)
def test_united_intervals_cover_the_same_and_are_apart(found: list[tuple[int, int]]) -> None:
    made = unite(found)
    assert all(a[1] < b[0] for a, b in pairwise(made))
    expected = {at for first, last in found for at in range(first, last)}
    assert {at for first, last in made for at in range(first, last)} == expected


PROFILES = [
    profile(count("a", flops=10, bytes_ideal=3, calls=2), count("a", pass_="recompute", hw_flops=10)),
    profile(count("a", flops=7), count("b", op="uncounted", variant="aten.fft", calls=4, uncounted_calls=4)),
    profile(count("c", pass_="bwd", flops=3, bytes_ideal=9)),
]
HUGE = profile(count("b", flops=2**62, hw_flops=2**63))
"""Does not fit a row; a window of a few ns cannot be split for it, so that sums are held without it."""
lengths = st.one_of(
    st.integers(0, 3),
    st.sampled_from([S, 10 * S, 300 * S, HOUR, 2 * HOUR]),
    st.integers(0, 3 * S),
    st.integers(0, 900 * S),
)


@st.composite
def runs(draw: st.DrawFn, profiles: Sequence[Profile] = PROFILES) -> list[Unit]:
    """Units that follow one another, most of them without a pause, from anywhere near the end of an hour."""
    at = START + HOUR - draw(st.sampled_from([0, 1, 5 * S, 60 * S, HOUR]))
    made = []
    for number in range(draw(st.integers(1, 12))):
        start = at + draw(st.sampled_from([0, 0, 0, 1, 40 * S]))
        begin = start + draw(lengths)
        end = begin + draw(lengths)
        batch_size, phase = draw(st.sampled_from([(8, "train"), (16, "train"), (8, "eval")]))
        waits = tuple((start + draw(lengths), start + draw(lengths)) for _ in range(draw(st.integers(0, 2))))
        saves = tuple((start + draw(lengths), start + draw(lengths)) for _ in range(draw(st.integers(0, 1))))
        key = OpKey("a", "fwd", "matmul", phase, batch_size, "bf16")
        spans = [Span(begin + draw(lengths), end, key)] if draw(st.booleans()) else []
        made.append(
            Unit(
                number=number,
                start_ns=start,
                begin_ns=begin,
                end_ns=end,
                phase=phase,
                batch_size=batch_size,
                units=draw(st.integers(1, 3)),
                samples=draw(st.integers(0, 9)),
                tokens_in=draw(st.integers(0, 9)),
                tokens_out=draw(st.integers(0, 9)),
                requests=draw(st.integers(0, 9)),
                checkpoint=saves,
                input_wait=waits,
                probe_ns=draw(st.integers(0, 9)),
                sampled=draw(st.booleans()),
                ops=sweep(begin, end, spans, gaps="held_idle", phase=phase, batch_size=batch_size),
                profile=draw(st.sampled_from([None, *profiles])),
                parts=tuple(draw(st.lists(st.sampled_from(profiles), max_size=2))),
                method=draw(st.sampled_from(["host", "formula"])),
            )
        )
        at = end
    return made


@st.composite
def flushed(draw: st.DrawFn, profiles: Sequence[Profile] = PROFILES) -> tuple[list[Unit], list[Rows]]:
    """Units, and their rows as taken at any times; sessions end and begin in between."""
    units = draw(runs(profiles))
    made = Windows("job-1", 0, 0, "GPU-1", True)
    batches: list[Rows] = []
    for unit in units:
        made.add(unit)
        how = draw(st.sampled_from(["", "", "end", "ahead", "far", "final"]))
        if how:
            ahead = {"ahead": draw(lengths), "far": 5 * HOUR}.get(how, 0)
            batches.append(made.rows(unit.end_ns + ahead, final=how == "final"))
    batches.append(made.rows(units[-1].end_ns, final=True))
    assume(made.cut_ns == 0)
    return units, batches


def together(batches: Sequence[Rows]) -> list[tuple[str, dict[str, Any]]]:
    return [row for rows in batches for row in rows]


@SLOW
@given(run=flushed((*PROFILES, HUGE)))
def test_rows_meet_the_declaration_and_pass_every_check_of_collect(run: tuple[list[Unit], list[Rows]]) -> None:
    """As one shard of each hour, and as one of each flush."""
    _, batches = run
    assert_accepted(together(batches))
    assert_accepted(*batches)


def overlap(first: int, last: int, hour: int) -> int:
    return max(min(last, hour + HOUR) - max(first, hour), 0)


@SLOW
@given(run=flushed())
def test_wall_time_cut_at_the_hour_adds_up_over_hours(run: tuple[list[Unit], list[Rows]]) -> None:
    units, batches = run
    found = steps(together(batches))
    parts = ("active_ns", "input_stall_ns", "checkpoint_ns", "held_idle_ns")
    assert all(sum(r[n] for n in parts) == r["wall_ns"] for r in found)
    hours = {hour_of(r): r["window_start_utc"] // HOUR * HOUR for r in found}
    for name, hour in hours.items():
        mine = [r for r in found if hour_of(r) == name]
        wall, active = total(mine, "wall_ns", "active_ns")
        assert wall == sum(overlap(u.start_ns, u.end_ns, hour) for u in units) <= HOUR
        assert active == sum(overlap(u.begin_ns, u.end_ns, hour) for u in units)
    gaps = [split_gap(u.start_ns, u.begin_ns, u.checkpoint, u.input_wait) for u in units]
    assert total(found, "wall_ns") == (sum(u.end_ns - u.start_ns for u in units),)
    assert total(found, "checkpoint_ns", "input_stall_ns", "held_idle_ns") == tuple(map(sum, zip(*gaps, strict=True)))


@SLOW
@given(run=flushed())
def test_what_is_counted_is_kept_whatever_the_flush_times(run: tuple[list[Unit], list[Rows]]) -> None:
    units, batches = run
    rows = together(batches)
    for name in ("units", "samples", "tokens_in", "tokens_out", "requests", "probe_ns"):
        assert total(steps(rows), name) == (sum(getattr(u, name) for u in units),)
    assert total(steps(rows), "input_wait_ns") == (sum(b - a for u in units for a, b in unite(u.input_wait)),)
    sampled = [u for u in units if u.sampled]
    assert total(steps(rows), "sampled_units", "sampled_active_ns") == (
        len(sampled),
        sum(u.end_ns - u.begin_ns for u in sampled),
    )
    shares = [share for u in sampled for share in (u.ops or {}).values()]
    assert total(ops(rows), "sampled_calls", "busy_ns", "exclusive_ns", "exclusive_us2") == (
        sum(s.calls for s in shares),
        sum(s.busy_ns for s in shares),
        sum(s.exclusive_ns for s in shares),
        sum(s.exclusive_ns**2 // 1_000_000 for s in shares),
    )
    expected: Counter[tuple[str, ...]] = Counter()
    for u in units:
        found = [op for p in (u.profile, *u.parts) if p is not None for op in p.ops]
        for op in found:
            for name in COUNTS:
                expected[op.layer, op.pass_, op.op, u.phase, str(u.batch_size), u.method, name] += (
                    getattr(op, name) * u.units
                )
        if not found:
            for name in ("calls", "uncounted_calls"):
                expected["(model)", "fwd", "uncounted", u.phase, str(u.batch_size), u.method, name] += u.units
    counted: Counter[tuple[str, ...]] = Counter()
    for r in ops(rows):
        for name in COUNTS:
            key = (r["layer"], r["pass"], r["op"], r["phase"], str(r["batch_size"]), r["method"], name)
            counted[key] += r[name]
    assert +counted == +expected


@SLOW
@given(units=runs(), times=st.lists(lengths, min_size=12, max_size=12))
def test_flushes_within_a_session_change_no_sum_of_an_hour(units: list[Unit], times: list[int]) -> None:
    """Rows of an hour, phase and batch size add up alike, taken at the end or whenever a window may be over."""

    def sums(ahead: list[int] | None) -> Counter[tuple[str, ...]]:
        made, rows = Windows("job-1", 0, 0, "GPU-1", True), list[Any]()
        for number, unit in enumerate(units):
            made.add(unit)
            if ahead is not None:
                rows += made.rows(unit.end_ns + ahead[number])
        rows += made.rows(0, final=True)
        added: Counter[tuple[str, ...]] = Counter()
        for table, row in rows:
            place = (table, hour_of(row), row["phase"], str(row["batch_size"]), row.get("layer", ""), row.get("op", ""))
            for name, value in row.items():
                if isinstance(value, int) and name not in PLACE:
                    added[*place, name] += value
        return added

    assert sums(times) == sums(None)


PLACE = {"window_start_utc", "window_ns", "op_key", "layer_index", "batch_size", "attempt", "rank"}


@QUIET
@given(
    units=st.lists(st.integers(1, 10**10), min_size=1, max_size=40),
    costs=st.lists(st.integers(-5, 10**10), max_size=40),
    shares=st.lists(st.integers(0, 10**8), max_size=20),
    most=st.integers(0, 1_000_000),
)
def test_the_rate_stays_within_its_budget_and_at_most_doubles(
    units: list[int], costs: list[int], shares: list[int], most: int
) -> None:
    rate = Rate(most_ppm=most)
    for unit_ns in units:
        rate.unit(unit_ns)
    for cost_ns in costs:
        before = rate.p_ppm
        rate.sample(cost_ns)
        assert rate.p_ppm <= before
    for probe_ns in shares:
        before = rate.p_ppm
        rate.window(10**10, probe_ns)
        assert rate.p_ppm <= (max(before // 2, 1) if probe_ns > 5 * 10**7 else 2 * before)
        assert min(most, 1) <= rate.p_ppm <= most
        if rate.p_ppm > 1 and rate.cost_ns and rate.unit_ns and probe_ns <= 5 * 10**7:
            assert rate.p_ppm * rate.cost_ns <= 5_000 * rate.unit_ns


@QUIET
@given(job=st.text(max_size=5), unit=st.integers(0, 2**40), low=st.integers(0, 10**6), high=st.integers(0, 10**6))
def test_a_lower_rate_samples_a_part(job: str, unit: int, low: int, high: int) -> None:
    low, high = min(low, high), max(low, high)
    assert is_sampled(job, 0, unit, low) <= is_sampled(job, 0, unit, high)


@QUIET
@given(added=st.lists(st.tuples(st.sampled_from(POINTS), st.integers(-3, 3), st.booleans()), max_size=20))
def test_hooks_go_by_priority_and_failing_ones_go_once(added: list[tuple[str, int, bool]]) -> None:
    hooks, seen = HookManager(), list[int]()

    def hook(number: int, fails: bool) -> Any:
        def run(_: Any) -> None:
            seen.append(number)
            if fails:
                raise ValueError(number)

        return run

    for number, (point, priority, fails) in enumerate(added):
        hooks.add(point, hook(number, fails), priority=priority, name=str(number))
    for is_first in (True, False):
        for point in POINTS:
            seen.clear()
            hooks.fire(point)
            mine = [n for n, (p, _, fails) in enumerate(added) if p == point and (is_first or not fails)]
            assert seen == sorted(mine, key=lambda n: (added[n][1], n))
    assert dict(hooks.failures) == {str(n): 1 for n, (_, _, fails) in enumerate(added) if fails}
