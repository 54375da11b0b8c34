"""Reducing a day in a lake: reuse, one bucket for a late shard, every scheduler the same bytes, no scheduler a clear error."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas.partials import PARTIALS
from schemas.usage import DEVICE_HOURLY, USAGE
from seedance.errors import ShardError
from seedance.schema import DEVICE_SAMPLES, OP_WINDOWS
from tasks import reduce
from tasks.core import usage
from tasks.errors import LawError, SettingsError
from tasks.io.engine import map_buckets
from tasks.io.lake import Lake, Step
from tasks.settings import Settings
from tests.fleet import full_spec, roster, telemetry, timeline
from tests.shard_tables import shard
from tests.telling import DAY as TOLD_DAY
from tests.telling import op, step

SPEC = full_spec(5, hours=3)


@pytest.fixture(scope="module")
def shards() -> dict[str, bytes]:
    """The shards of a small fleet, by path in a lake."""
    return {f"raw/{s.path}": s.data for s in telemetry.shards(timeline.observe(roster.build(SPEC)))}


def filled(folder: Path, shards: dict[str, bytes], *, buckets: int = 8) -> Lake:
    lake = Lake.open(str(folder), buckets=buckets)
    for path, data in shards.items():
        lake.store.put(path, data)
    return lake


def reduced(lake: Lake, paths: Any, **facts: Any) -> tuple[Step, bool]:
    return reduce.reduce_day(lake, Settings(lake=lake.store.url, **facts), SPEC.day, list(paths))


def digests(step: Step) -> dict[str, str]:
    return {name: handle.sha256 for name, handle in step.handles.items()}


def test_tables_are_written_and_reused(tmp_path: Path, shards: dict[str, bytes]) -> None:
    lake = filled(tmp_path, shards)
    made, reused = reduced(lake, shards)
    assert not reused and set(made.handles) == set(USAGE)
    assert made.facts == {
        "buckets": len(reduce.buckets_of(lake, SPEC.day, list(shards))),
        "shards": len(shards),
        "duplicate_rows": {},
        "conflicting_rows": {},
        "replaced_ns": 0,
    }
    table = lake.read(made.handles[DEVICE_HOURLY.name], DEVICE_HOURLY)
    assert table.num_rows == made.handles[DEVICE_HOURLY.name].rows > 50
    before = lake.store.list("")
    again, reused = reduced(lake, reversed(shards))
    assert reused and again == made and lake.store.list("") == before


def test_a_late_shard_recomputes_its_bucket_and_the_day(tmp_path: Path, shards: dict[str, bytes]) -> None:
    lake = filled(tmp_path, shards)
    late = next(p for p in shards if DEVICE_SAMPLES.name in p)
    first, _ = reduced(lake, [p for p in shards if p != late])
    steps = {e.path for e in lake.store.list("steps")}
    second, reused = reduced(lake, shards)
    new = {e.path for e in lake.store.list("steps")} - steps
    assert not reused and sorted(p.split("/")[1] for p in new) == ["reduce_bucket", "reduce_day", "reduce_hour"]
    assert digests(first) != digests(second)
    assert digests(second) == digests(reduced(filled(tmp_path / "whole", shards), shards)[0])


def test_bucket_count_and_time_zone_do_not_change_the_bytes(
    tmp_path: Path, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digests(reduced(filled(tmp_path / "a", shards), shards)[0])
    monkeypatch.setenv("TZ", "Pacific/Chatham")
    time.tzset()
    try:
        found = digests(reduced(filled(tmp_path / "b", shards, buckets=1), shards, workers=1)[0])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == expected


@pytest.fixture
def address() -> Iterator[str]:
    """A scheduler that was started by somebody else."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.mark.filterwarnings("default")
def test_a_cluster_gives_the_same_bytes(tmp_path: Path, shards: dict[str, bytes], address: str) -> None:
    expected, _ = reduced(filled(tmp_path / "threads", shards), shards)
    given, _ = reduced(filled(tmp_path / "address", shards), shards, scheduler=address)
    local, _ = reduced(filled(tmp_path / "local", shards), shards, scheduler="local")
    assert expected == given == local


def test_no_scheduler_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.io.engine.CONNECT_S", 1)
    with pytest.raises(
        SettingsError, match=r"setting scheduler: nothing answers at tcp://127.0.0.1:9 within 1 s"
    ) as error:
        map_buckets(abs, [1], scheduler="tcp://127.0.0.1:9", workers=1)
    assert error.value.key == "scheduler"


def test_results_come_in_the_order_of_items() -> None:
    assert map_buckets(_slow, [3, 1, 2], scheduler="threads", workers=3) == [3, 1, 2]
    assert map_buckets(_slow, [], scheduler="tcp://127.0.0.1:9", workers=1) == []
    assert os.environ["ACERO_ALIGNMENT_HANDLING"] == "reallocate"


def _slow(value: int) -> int:
    time.sleep(value / 50)
    return value


def test_a_day_without_shards_is_empty(tmp_path: Path) -> None:
    made, _ = reduced(filled(tmp_path, {}), [])
    assert {h.rows for h in made.handles.values()} == {0} and set(made.handles) == set(USAGE)


def test_a_shard_of_another_day_is_refused(tmp_path: Path, shards: dict[str, bytes]) -> None:
    with pytest.raises(LawError, match="expected a shard of 2026-01-01"):
        reduce.reduce_day(filled(tmp_path, {}), Settings(lake=str(tmp_path)), "2026-01-01", list(shards))


def test_two_shards_of_ops_of_one_host_count_each_row_once(tmp_path: Path) -> None:
    both = [shard(OP_WINDOWS, [op("a", 6), op("b", 3)], seq=0), shard(OP_WINDOWS, [op("a", 6)], seq=1)]
    lake = filled(tmp_path, {f"raw/{path}": data for path, data in [*both, shard(step_spec(), [step(0, 9, active=9)])]})
    made, _ = reduce.reduce_day(lake, Settings(lake=str(tmp_path)), TOLD_DAY, [r.path for r in lake.shards()])
    rows = lake.read(made.handles["core_usage__layer_hourly"], USAGE["core_usage__layer_hourly"]).to_pylist()
    assert {r["layer"]: r["ns"] for r in rows} == {"a": 6, "b": 3}
    assert made.facts["duplicate_rows"] == {OP_WINDOWS.name: 1}


def step_spec() -> Any:
    from seedance.schema import STEP_WINDOWS

    return STEP_WINDOWS


def test_reading_few_columns_gives_what_reading_all_gives(shards: dict[str, bytes]) -> None:
    path = next(p for p in shards if OP_WINDOWS.name in p)
    few, all_ = (reduce.read_for_reduction(shards[path], path, is_only=flag) for flag in (True, False))
    assert few[0] == all_[0] and few[1].num_rows == all_[1].num_rows and isinstance(few[1], reduce.OpFile)
    one, two = (usage.partial([told]) for told in (few, all_))
    assert all(one[name].equals(two[name]) for name in PARTIALS)
    assert pa.types.is_dictionary(few[1].column("layer").type)


def test_a_shard_that_was_damaged_after_it_was_accepted(shards: dict[str, bytes]) -> None:
    path = next(p for p in shards if OP_WINDOWS.name in p)
    with pytest.raises(ShardError, match="It was accepted before: look for damage in the store"):
        reduce.read_for_reduction(shards[path][:-9], path, is_only=True)
