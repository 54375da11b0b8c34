"""Laws of the reduction: order never matters, merging is free, time adds up, and the truth of a fleet is found."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.partials import PARTIALS
from schemas.usage import DEVICE_HOURLY, LAYER_HOURLY
from seedance.schema import DEVICE_SAMPLES, TELEMETRY
from seedance.shard import read_shard
from tasks.core import usage
from tasks.core.layers import Segment, sweep
from tests.fleet import full_spec, model, observed, roster, telemetry, timeline
from tests.shard_tables import SECOND
from tests.telling import DAY, HOUR_NS, Told, begin, day_of, host, op, processes, readings, step

S = SECOND
QUICK = settings(max_examples=60, deadline=None)
SPAN = 200
"""Seconds in which the drawn device hours have all their readings and windows."""


@st.composite
def tiles(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Stretches of whole ns in order, some touching, none overlapping."""
    cuts = sorted(draw(st.sets(st.integers(0, SPAN * S), min_size=2, max_size=8)))
    return [pair for pair in itertools.pairwise(cuts) if draw(st.booleans())]


@st.composite
def hours(draw: st.DrawFn) -> list[Told]:
    """One device in one hour: readings, processes of up to two jobs, and step windows of up to two jobs."""
    seen, held, steps, ops = [], [], [], []
    for a, b in draw(tiles()):
        facts: dict[str, Any] = {
            "gpu_util_ppm": draw(st.none() | st.integers(0, 10**6)),
            "process_count": draw(st.none() | st.integers(0, 2)),
            "energy_mj": draw(st.none() | st.integers(0, 10**7)),
        }
        seen += readings(a, b, b - a, **facts)
    for pid, job in ((1, "A"), (2, "B"), (3, None)):
        for a, b in draw(tiles()):
            util, limit = draw(st.none() | st.integers(0, 10**6)), draw(st.none() | st.integers(0, 10**6))
            held += processes(
                a,
                b,
                b - a,
                job_id=job,
                host_pid=pid,
                sm_util_ppm=util,
                mps_limit_ppm=limit,
                started=draw(st.sampled_from([-4 * HOUR_NS, 0])),
            )
    for job in "AB":
        for a, b in draw(tiles()):
            parts = draw(st.lists(st.integers(0, 2 * (b - a) // 3), min_size=4, max_size=4))
            units = dict(zip(("active", "stall", "save", "held"), parts, strict=True))
            steps.append(step(a, b - a, job_id=job, **units))
        ops += [op(layer, draw(st.integers(0, 9)), job_id=job) for layer in ("x", "y")]
    return host(readings=seen, processes=held, steps=steps, ops=ops, period=SPAN * S)


def length(stretches: list[tuple[int, int]]) -> int:
    """Length of the union."""
    points = sorted({p for pair in stretches for p in pair})
    return sum(b - a for a, b in itertools.pairwise(points) if any(x <= a and b <= y for x, y in stretches))


def stretches_of(told: list[Told], table: str) -> list[tuple[int, int]]:
    """Stretches of readings or step windows, ns of the hour."""
    rows = [r for footer, t in told if footer.table == table for r in numbers(t)]
    if table == DEVICE_SAMPLES.name:
        return [(r["sampled_at_utc"] - r["covered_ns"] - begin(3), r["sampled_at_utc"] - begin(3)) for r in rows]
    return [(r["window_start_utc"] - begin(3), r["window_start_utc"] - begin(3) + r["window_ns"]) for r in rows]


def numbers(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with instants as integers."""
    plain = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in table.columns]
    return list(pa.table(plain, names=table.column_names).to_pylist())


@QUICK
@given(hours())
def test_time_of_a_device_is_what_was_observed(told: list[Told]) -> None:
    made = day_of(told) if told else usage.finish(usage.merge([]), DAY)
    rows = made[DEVICE_HOURLY.name].to_pylist()
    assert all(r["ns"] > 0 for r in rows)
    read, stepped = (stretches_of(told, t) for t in (DEVICE_SAMPLES.name, "raw_telemetry__step_windows"))
    wall = sum(r["ns"] for r in rows if r["category"] in ("work", "communication", "checkpoint", "input_stall"))
    union, either = length(stepped), length(read + stepped)
    both = length(read) + union - either
    total = sum(r["ns"] for r in rows)
    # Step time at its share is at least what only step windows can be, and the formula of observed time holds for it.
    steps = [r for footer, t in told if footer.table == "raw_telemetry__step_windows" for r in t.to_pylist()]
    most = sum(r["wall_ns"] for r in steps)
    assert wall <= most
    assert max(either - union, 0) <= total + most and total <= max(either, most) + max(0, either - union)
    if len({r["job_id"] for r in steps}) < 2 and not any(f.table == "raw_telemetry__process_samples" for f, _ in told):
        assert total == most + max(0, either - max(union, most)) + min(max(0, union - most), both)
    work = sum(r["ns"] for r in rows if r["category"] == "work")
    assert sum(r["ns"] for r in made[LAYER_HOURLY.name].to_pylist() if r["category"] == "work") == work


@QUICK
@given(hours(), st.randoms(use_true_random=False))
def test_order_of_shards_rows_and_parts_does_not_matter(told: list[Told], shuffler: random.Random) -> None:
    if not told:
        return
    other = host(readings=readings(-5 * S, 20 * S, 5 * S, hour=4), steps=[step(0, 9, hour=4, active=9)], hour=4)
    third = host(steps=[step(3, 9, active=9, job_id="A", rank=1)], ops=[op("x", 9, job_id="A", rank=1)], node="node-b")
    straight = day_of(told, other, third)
    mixed = []
    for footer, table in told:
        order = list(range(table.num_rows))
        shuffler.shuffle(order)
        mixed.append((footer, table.take(pa.array(order, pa.int64()))))
    shuffler.shuffle(mixed)
    one, two, three = (usage.partial(b) for b in (mixed, other, third))
    for name, spec in PARTIALS.items():
        assert one[name].schema.equals(spec.arrow), name
    left = usage.merge([usage.merge([three, one]), two])
    right = usage.merge([two, usage.merge([one, three])])
    for name in PARTIALS:
        assert left[name].equals(right[name]), name
    again = usage.finish(left, DAY)
    for name, table in straight.items():
        assert table.equals(again[name]), name


@QUICK
@given(hours())
def test_only_the_wanted_detail_is_needed(told: list[Told]) -> None:
    if not told:
        return
    merged = usage.merge([usage.partial(told)])
    whole = usage.finish(merged, DAY)
    few = dict(merged) | {usage.DETAIL: usage.only(merged[usage.DETAIL], usage.detail_wanted(merged))}
    assert all(table.equals(whole[name]) for name, table in usage.finish(few, DAY).items())


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-5, 60), st.integers(-5, 60)), max_size=9),
    st.sampled_from(["held_idle", "unattributed_busy"]),
)
def test_sweep_adds_up_whatever_the_order(drawn: list[tuple[int, int, int]], empty: str) -> None:
    keys = ("a|fwd|", "b|fwd|", "c|comm|", "d|comm|", "e|copy|", "f|bwd|")
    segments = [Segment(keys[k], min(a, b), max(a, b)) for k, a, b in drawn]
    made = sweep(segments, 0, 50, empty=empty)
    assert sum(made.values()) == 50 and all(ns > 0 for ns in made.values())
    assert sweep(segments[::-1], 0, 50, empty=empty) == made
    compute = length(
        [
            (max(s.begin, 0), min(s.end, 50))
            for s in segments
            if "|comm|" not in s.key and "|copy|" not in s.key and min(s.end, 50) > max(s.begin, 0)
        ]
    )
    assert sum(ns for key, ns in made.items() if "|fwd|" in key or "|bwd|" in key) == compute


def buckets(told: list[Told], count: int) -> list[list[Told]]:
    """Shards by hour and hash of their host."""
    made: dict[tuple[str, int], list[Told]] = defaultdict(list)
    for footer, table in told:
        made[footer.hour, int(hashlib.sha256(footer.node.encode()).hexdigest(), 16) % count].append((footer, table))
    return list(made.values())


def reduced(
    spec: model.FleetSpec, *, count: int = 8, with_late: bool = True
) -> tuple[model.Fleet, timeline.Timeline, dict[str, pa.Table]]:
    """A fleet, what happened in it, and what the reduction makes of its shards."""
    fleet = roster.build(spec)
    happened = timeline.observe(fleet)
    lost = fleet.lost_readings(with_late=with_late)
    told = [
        read_shard(s.data, TELEMETRY[s.table], where=s.path)
        for s in telemetry.shards(happened)
        if (s.machine, s.hour) not in lost or s.table != DEVICE_SAMPLES.name
    ]
    parts = [usage.partial(b) for b in buckets(told, count)]
    return fleet, happened, usage.finish(usage.merge(parts), spec.day)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_late", [True, False])
def test_the_truth_of_a_fleet_is_found(seed: int, with_late: bool) -> None:
    spec = full_spec(seed, hours=3)
    fleet, happened, made = reduced(spec, with_late=with_late)
    machines = {m.instance_id: i for i, m in enumerate(fleet.machines)}
    found: dict[tuple[int, int], dict[tuple[Any, ...], int]] = defaultdict(dict)
    for r in made[DEVICE_HOURLY.name].to_pylist():
        found[machines[r["instance_id"]], r["hour_utc"].hour][
            r["device_uuid"], r["job_id"], r["attempt"], r["rank"], r["category"]
        ] = r["ns"]
    truth = observed.observed_time(happened, with_late=with_late)
    assert found == {key: {tuple(place): ns for place, ns in places.items()} for key, places in truth.items()}
    layers: dict[tuple[Any, ...], int] = defaultdict(int)
    for r in made[LAYER_HOURLY.name].to_pylist():
        if r["category"] == "work":
            pool = (r["hour_utc"].hour, r["job_id"], r["attempt"], r["instance_type"])
            layers[pool, (r["layer"], r["pass"], r["op"], r["phase"], r["batch_size"], r["dtype"])] += r["ns"]
    assert layers == {
        (pool, tuple(layer)): ns for pool, known in observed.layer_time(happened).items() for layer, ns in known.items()
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_of_units_keeps_categories_and_bounds_layers(seed: int) -> None:
    fleet, happened, made = reduced(full_spec(seed, hours=3, sample_ppm=50_000))
    truth = observed.layer_time(happened)
    pools: dict[tuple[Any, ...], int] = defaultdict(int)
    for pool, known in truth.items():
        pools[pool[:3]] += sum(known.values())
    for r in made[LAYER_HOURLY.name].to_pylist():
        if r["category"] == "work":
            pool = (r["hour_utc"].hour, r["job_id"], r["attempt"], r["instance_type"])
            layer = observed.Layer(r["layer"], r["pass"], r["op"], r["phase"], r["batch_size"], r["dtype"])
            assert abs(truth[pool].get(layer, 0) - r["ns"]) * 10**6 <= r["bound_ppm"] * pools[pool[:3]]
    assert fleet.machines


def test_buckets_do_not_change_the_result() -> None:
    spec = full_spec(7, hours=2)
    results = [reduced(spec, count=count)[2] for count in (1, 8)]
    assert all(results[0][name].equals(results[1][name]) for name in results[0])


def test_no_float_stands_in_a_partial() -> None:
    assert not [c.name for t in PARTIALS.values() for c in t.columns if pa.types.is_floating(c.type)]
