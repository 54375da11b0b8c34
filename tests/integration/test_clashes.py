"""Hosts that report one device in one hour: two agents of one host, and a host that was renamed."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from seedance.schema import DEVICE_SAMPLES, OP_WINDOWS, PROCESS_SAMPLES, STEP_WINDOWS
from seedance.shard import parse_name
from tasks import collect
from tasks.collect import collect_day
from tasks.core import shards as core_shards
from tasks.core.shards import bucket_of
from tasks.io.lake import Lake
from tasks.settings import Settings
from tests.shard_tables import DAY, NODE, SECOND, ops, processes, samples, shard, steps

TODAY = date(2026, 11, 29)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """An empty lake."""
    return Lake.open(str(tmp_path / "lake"))


def fill(lake: Lake, shards: dict[str, bytes]) -> list[str]:
    """Put shards into raw/ by hand; their paths."""
    for path, data in shards.items():
        lake.store.put(f"raw/{path}", data)
    return sorted(f"raw/{path}" for path in shards)


def facts_of(lake: Lake) -> dict[str, Any]:
    return dict(collect_day(lake, Settings(lake=lake.store.url), DAY, last_day=TODAY)[0].facts)


def records(lake: Lake) -> list[dict[str, Any]]:
    return [json.loads(lake.store.read(entry.path)) for entry in lake.store.list("quarantine")]


def shards_of(node: str, first: int, n: int, seq: int = 0) -> dict[str, bytes]:
    """Shards of one device and rank from the ten seconds numbered `first`, as this host would report them."""
    readings = [r | {"node": node} for r in samples(10 * (first + n))[10 * first :]]
    process = [r | {"node": node} for r in processes(first + n)[first:]]
    made = [(DEVICE_SAMPLES, readings), (PROCESS_SAMPLES, process), (STEP_WINDOWS, steps(n, first=first))]
    made.append((OP_WINDOWS, ops(*[SECOND] * n)))
    return dict(shard(spec, rows, node=node, seq=seq) for spec, rows in made)


@pytest.mark.parametrize("buckets", [1, 64])
def test_two_hosts_that_report_one_device_at_one_time(tmp_path: Path, buckets: int) -> None:
    lake = Lake.open(str(tmp_path / "lake"), buckets=buckets)
    fill(lake, shards_of("node-b", 2, 3))
    kept = fill(lake, shards_of("node-a", 0, 3))
    facts = facts_of(lake)
    assert facts["accepted"] == kept
    reasons = {q["table"]: q["reason"] for q in facts["quarantined"]}
    assert reasons[DEVICE_SAMPLES.name] == (
        "raw_telemetry__device_samples 2026-11-27T03 node-b: conflict with host node-a: expected the time of a device from "
        "one host, found gpu_uuid GPU-1, mig_uuid null reported by node-a and by node-b from "
        "2026-11-27T03:00:20.000000000Z to 2026-11-27T03:00:30.000000000Z; node-a counts. Look for two agents under two "
        "host names, and stop one."
    )
    assert "found job_id job-1, attempt 0, rank 0, device_uuid device_uuid reported by" in reasons[STEP_WINDOWS.name]
    for follower, owner in ((PROCESS_SAMPLES, DEVICE_SAMPLES), (OP_WINDOWS, STEP_WINDOWS)):
        told = f"{follower.name} 2026-11-27T03 node-b: goes with {owner.name} of this host and hour, which is refused: "
        assert reasons[follower.name] == told + reasons[owner.name]
    assert (facts["shards_in"], facts["mismatch"], len(records(lake))) == (8, 0, 4)


def test_a_host_that_was_renamed_within_the_hour_counts_under_both_names(lake: Lake) -> None:
    paths = fill(lake, shards_of("node-b", 0, 3) | shards_of("node-a", 3, 3))
    assert facts_of(lake)["accepted"] == sorted(paths)
    assert facts_of(lake)["quarantined"] == []


def test_what_overlaps_by_one_ns_clashes(lake: Lake) -> None:
    rows = [r | {"node": "node-b"} for r in samples(6)[3:]]
    rows[0]["covered_ns"] += 1
    fill(lake, dict([shard(DEVICE_SAMPLES, samples(3)), shard(DEVICE_SAMPLES, rows, node="node-b")]))
    assert len(facts_of(lake)["quarantined"]) == 1


def test_what_is_no_reading_or_another_device_does_not_clash(lake: Lake) -> None:
    for node, bent in (
        ("node-b", {"state": "lost"}),
        ("node-c", {"gpu_uuid": "GPU-2"}),
        ("node-d", {"mig_uuid": "MIG-1"}),
    ):
        rows = [r | {"node": node} | bent for r in samples()]
        fill(lake, dict([shard(DEVICE_SAMPLES, rows, node=node)]))
    fill(lake, dict([shard(DEVICE_SAMPLES, samples())]))
    assert facts_of(lake)["quarantined"] == []


def test_of_a_host_with_two_shards_the_one_that_clashes_is_refused(lake: Lake) -> None:
    fill(lake, shards_of("node-a", 0, 3))
    late = shards_of("node-b", 4, 2) | {p: d for p, d in shards_of("node-b", 2, 1, seq=1).items() if "op_win" not in p}
    fill(lake, late)
    refused = facts_of(lake)["quarantined"]
    assert {(q["table"], parse_name(q["path"]).seq) for q in refused} == {
        (DEVICE_SAMPLES.name, 1), (STEP_WINDOWS.name, 1),
    }  # fmt: skip


def test_a_clash_is_found_without_reading_the_other_bucket_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    other = next(f"node-b{i}" for i in range(99) if bucket_of(f"node-b{i}", 8) != bucket_of(NODE, 8))
    fill(lake, shards_of(NODE, 0, 3))
    facts_of(lake)
    looked: list[str] = []
    real = core_shards.examine
    monkeypatch.setattr(
        collect, "examine", lambda path, *rest, **named: looked.append(path) or real(path, *rest, **named)
    )
    late = fill(lake, shards_of(other, 2, 3))
    facts = facts_of(lake)
    assert sorted(q["path"] for q in facts["quarantined"]) == late
    assert sorted(looked) == late


def test_a_twin_of_a_shard_that_clashes_is_refused_with_it(lake: Lake) -> None:
    fill(lake, dict([shard(STEP_WINDOWS, steps())]))
    path, data = shard(STEP_WINDOWS, steps(), node="node-b")
    fill(lake, {path: data, path.replace("node-b-0", "node-b-1"): data})
    facts = facts_of(lake)
    assert (len(facts["quarantined"]), facts["duplicates"]) == (2, [])
    assert facts["rows_quarantined"] == 6
