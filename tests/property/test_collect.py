"""Laws of collect: the order of rows and of shards does not matter, nothing is lost, and no bytes raise."""

from __future__ import annotations

import random
from datetime import date
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.telemetry import DEVICE_SAMPLES, STEP_WINDOWS, TELEMETRY
from seedance.schema import Table
from seedance.shard import parse_name, read_footer
from tasks.core.shards import Examined, check_rows, check_shard, examine, settle
from tests.shard_tables import HOUR_NS, ROWS, SECOND, START, named, samples, shard, steps, table

TODAY = date(2026, 11, 29)
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def reading(at: int, covered: int, device: int, slot: int) -> dict[str, Any]:
    mig = None if slot == 0 else f"MIG-{slot}"
    return samples(1, uuid=f"GPU-{device}", mig_uuid=mig)[0] | {"sampled_at_utc": START + at, "covered_ns": covered}


def window(at: int, length: int, active: int, rank: int) -> dict[str, Any]:
    facts = {"window_start_utc": START + at, "window_ns": length, "active_ns": active, "rank": rank}
    return steps(1)[0] | facts | {"wall_ns": active + 4 * SECOND, "sampled_active_ns": min(active, SECOND)}


small = st.integers(0, 6)
bit = st.integers(0, 1)
readings = st.lists(st.builds(reading, small, st.integers(0, 3), bit, bit), min_size=1, max_size=8)
windows = st.lists(
    st.builds(window, small, st.integers(0, 3), st.sampled_from([SECOND, HOUR_NS // 3]), st.integers(0, 1)), max_size=8
)


def problem(spec: Table, rows: list[dict[str, Any]]) -> str | None:
    path, data = shard(spec, rows)
    return check_shard(read_footer(data), table(spec, rows), spec, parse_name(path), last_day=TODAY)


@QUIET
@given(rows=readings, seed=st.randoms(use_true_random=False))
def test_the_order_of_readings_does_not_matter(rows: list[dict[str, Any]], seed: random.Random) -> None:
    mixed = seed.sample(rows, len(rows))
    assert problem(DEVICE_SAMPLES, mixed) == problem(DEVICE_SAMPLES, rows)


@QUIET
@given(rows=windows, seed=st.randoms(use_true_random=False))
def test_the_order_of_windows_does_not_matter(rows: list[dict[str, Any]], seed: random.Random) -> None:
    mixed = seed.sample(rows, len(rows))
    assert problem(STEP_WINDOWS, mixed) == problem(STEP_WINDOWS, rows)


@QUIET
@given(rows=readings)
def test_readings_pass_exactly_when_they_are_apart(rows: list[dict[str, Any]]) -> None:
    """Against the plainest way to say it: every pair of one device, in pure Python."""
    apart = all(r["sampled_at_utc"] > START for r in rows)
    for i, one in enumerate(rows):
        for two in rows[i + 1 :]:
            if (one["gpu_uuid"], one["mig_uuid"]) != (two["gpu_uuid"], two["mig_uuid"]):
                continue
            first, second = sorted((one, two), key=lambda r: r["sampled_at_utc"])
            apart &= first["sampled_at_utc"] != second["sampled_at_utc"]
            apart &= second["sampled_at_utc"] - second["covered_ns"] >= first["sampled_at_utc"]
    assert (problem(DEVICE_SAMPLES, rows) is None) == apart


@QUIET
@given(
    parts=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5),
    seed=st.randoms(use_true_random=False),
)
def test_the_order_of_shards_does_not_matter_and_none_is_lost(
    parts: list[tuple[int, int, int]], seed: random.Random
) -> None:
    seen: dict[str, Examined] = {}
    for first, n, seq in parts:
        path, data = shard(STEP_WINDOWS, steps(n, first=first), seq=seq)
        seen[path] = examine(path, parse_name(path), data, last_day=TODAY)
    shards = list(seen.values())
    kept, refused, twins = settle(shards)
    assert settle(seed.sample(shards, len(shards))) == (kept, refused, twins)
    verdicts = [s.path for s in kept] + list(refused) + list(twins)
    assert sorted(verdicts) == sorted(seen)
    assert all(same in {s.path for s in kept} | set(refused) for same in twins.values())
    together = pa.concat_tables([s.table for s in kept])
    footer = read_footer(shard(STEP_WINDOWS, together)[1])
    assert check_rows(footer, together, STEP_WINDOWS, kept[0].name) is None, "what counts is sound together"


@QUIET
@given(data=st.data())
def test_no_damage_raises(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TELEMETRY)))
    good = shard(TELEMETRY[name], ROWS[name])[1]
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at] = data.draw(st.integers(0, 255))
    cut = bytes(bad[: data.draw(st.integers(0, len(bad)))]) if data.draw(st.booleans()) else bytes(bad)
    path, shard_name = named(TELEMETRY[name], cut)
    seen = examine(path, shard_name, cut, last_day=TODAY)
    assert (seen.reason is None) == (seen.table is not None)
    if seen.reason is not None:
        assert seen.reason.startswith(f"{name} 2026-11-27T03 node-a: ")
        seen.reason.encode()
