"""Collect on a real lake on disk: what is admitted, what counts, what is quarantined, and what is checked again."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from seedance.schema import DEVICE_SAMPLES, EVENTS, OP_WINDOWS, STEP_WINDOWS, TELEMETRY
from seedance.shard import content_sha16
from seedance.store import Store
from tasks import collect
from tasks.collect import admit, collect_day
from tasks.core import shards as core_shards
from tasks.core.shards import bucket_of
from tasks.errors import LawError, UsageError
from tasks.io.lake import Lake, Step
from tasks.settings import Settings
from tests.fleet import full_spec
from tests.fleet.roster import build
from tests.fleet.write import write_fleet
from tests.shard_tables import (
    DAY,
    HOUR,
    NODE,
    ROWS,
    SECOND,
    good_shards,
    ops,
    rewritten,
    samples,
    shard,
    steps,
)

TODAY = date(2026, 11, 29)
EMPTY = {
    "accepted": [], "quarantined": [], "duplicates": [], "shards_in": 0, "bytes_in": 0, "rows_in": 0,
    "rows_accepted": 0, "rows_quarantined": 0, "rows_duplicate": 0, "mismatch": 0, "mismatches": [],
}  # fmt: skip


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """An empty lake."""
    return Lake.open(str(tmp_path / "lake"))


def settings(lake: Lake, drop: Path | str | None = None) -> Settings:
    return Settings(lake=lake.store.url, telemetry=None if drop is None else str(drop))


def fill(lake: Lake, shards: dict[str, bytes]) -> list[str]:
    """Put shards into raw/ by hand; their paths."""
    for path, data in shards.items():
        lake.store.put(f"raw/{path}", data)
    return sorted(f"raw/{path}" for path in shards)


def drop_files(folder: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def records(lake: Lake) -> dict[str, dict[str, Any]]:
    """What stands in quarantine/, by path of the record."""
    return {e.path: json.loads(lake.store.read(e.path)) for e in lake.store.list("quarantine")}


def facts_of(lake: Lake, day: str = DAY) -> dict[str, Any]:
    return dict(collect_day(lake, settings(lake), day, last_day=TODAY)[0].facts)


def test_good_shards_are_accepted_and_kept(lake: Lake) -> None:
    paths = fill(lake, good_shards() | good_shards("node-b"))
    step, reused = collect_day(lake, settings(lake), DAY, last_day=TODAY)
    rows = 2 * sum(len(r) for r in ROWS.values())
    assert (dict(step.handles), reused) == ({}, False)
    assert step.facts == EMPTY | {
        "accepted": paths,
        "shards_in": 12,
        "bytes_in": sum(e.bytes for e in lake.store.list("raw")),
        "rows_in": rows,
        "rows_accepted": rows,
    }
    again, reused = collect_day(lake, settings(lake), DAY, last_day=TODAY)
    assert (again, reused) == (step, True)
    assert records(lake) == {}


def test_a_day_without_shards(lake: Lake) -> None:
    assert facts_of(lake) == EMPTY


@pytest.mark.parametrize("day", ["2026-13-01", "yesterday", "20261127"])
def test_a_day_that_is_none(lake: Lake, day: str) -> None:
    with pytest.raises(UsageError, match=f"collect: '{day}' is not a day. Expected YYYY-MM-DD") as error:
        collect_day(lake, settings(lake), day)
    assert (error.value.found, error.value.expected) == (day, "YYYY-MM-DD")


def test_bad_shards_are_quarantined_with_reason_and_share(lake: Lake) -> None:
    good = fill(lake, good_shards())
    path, data = shard(STEP_WINDOWS, steps(20), node="node-b")
    bad = rewritten(data, change=lambda t: t.drop_columns(["wall_ns"]))
    bad_path = path.replace(content_sha16(data), content_sha16(bad))
    cut = data[:-50]
    cut_path = path.replace(content_sha16(data), content_sha16(cut)).replace("node-b", "node-c")
    fill(lake, {bad_path: bad, cut_path: cut})
    facts = facts_of(lake)
    rows = sum(len(r) for r in ROWS.values())
    assert facts["accepted"] == good
    assert (facts["rows_in"], facts["rows_accepted"], facts["rows_quarantined"]) == (rows + 20, rows, 20)
    first, second = facts["quarantined"]
    assert (first["path"], first["table"], first["rows"]) == (f"raw/{bad_path}", STEP_WINDOWS.name, 20)
    assert first["share_ppm"] == 20_000_000 // (rows + 20)
    assert "missing column wall_ns" in first["reason"]
    assert (second["path"], second["rows"], second["bytes"]) == (f"raw/{cut_path}", None, len(cut))
    assert second["share_ppm"] == len(cut) * 1_000_000 // facts["bytes_in"]
    assert "not a Parquet file" in second["reason"]
    kept = records(lake)
    assert kept == {
        f"quarantine/{STEP_WINDOWS.name}/{content_sha16(bad)}.json": first,
        f"quarantine/{STEP_WINDOWS.name}/{content_sha16(cut)}.json": second,
    }


def test_a_name_that_does_not_fit_the_bytes(lake: Lake) -> None:
    path, data = shard(EVENTS, ROWS[EVENTS.name])
    fill(lake, {path.replace(content_sha16(data), "0" * 16): data})
    (refused,) = facts_of(lake)["quarantined"]
    assert f"expected sha256 {'0' * 16}… as the name says, found {content_sha16(data)}…" in refused["reason"]


def test_duplicates_count_once(lake: Lake) -> None:
    path, data = shard(EVENTS, ROWS[EVENTS.name])
    twin = path.replace("node-a-0", "node-a-1")
    fill(lake, {path: data, twin: data})
    facts = facts_of(lake)
    assert facts["accepted"] == [f"raw/{path}"]
    assert facts["duplicates"] == [{"path": f"raw/{twin}", "same_as": f"raw/{path}"}]
    assert (facts["rows_in"], facts["rows_accepted"], facts["rows_duplicate"]) == (4, 2, 2)


def test_two_contents_of_one_number_conflict(lake: Lake) -> None:
    few, many = shard(STEP_WINDOWS, steps(2)), shard(STEP_WINDOWS, steps(3))
    fill(lake, dict([few, many]))
    facts = facts_of(lake)
    assert facts["accepted"] == [f"raw/{many[0]}"]
    assert "conflict: expected one content for sequence number 0" in facts["quarantined"][0]["reason"]


def test_refused_twins_share_a_record(lake: Lake) -> None:
    rows = steps(3)
    rows[1]["wall_ns"] += 1
    path, data = shard(STEP_WINDOWS, rows)
    twin = path.replace("node-a-0", "node-a-1")
    fill(lake, {path: data, twin: data})
    assert len(facts_of(lake)["quarantined"]) == 2
    (record,) = records(lake).values()
    assert (record["path"], record["also"]) == (f"raw/{path}", [f"raw/{twin}"])


def test_strange_files_in_raw_are_counted(lake: Lake) -> None:
    good = fill(lake, good_shards())
    strange = f"raw/{EVENTS.name}/date={DAY}/hour=03/notes.txt"
    unknown = f"raw/raw_telemetry__moods/date={DAY}/hour=03/{NODE}-0-{content_sha16(b'x')}.parquet"
    lake.store.put(strange, b"hello")
    lake.store.put(unknown, b"x")
    lake.store.put(f"raw/bills/aws/1/date={DAY}/a.csv", b"not telemetry")
    facts = facts_of(lake)
    assert facts["accepted"] == good
    assert [q["path"] for q in facts["quarantined"]] == [strange, unknown]
    assert facts["quarantined"][0]["reason"] == (
        f"{strange}: not the name of a shard: expected "
        "<table>/date=YYYY-MM-DD/hour=HH/<producer>-<seq>-<sha16>.parquet. Move it elsewhere."
    )
    assert "unknown table" in facts["quarantined"][1]["reason"]
    assert {r["path"] for r in records(lake).values()} == {strange, unknown}


def test_one_late_shard_has_one_bucket_checked_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [f"node-{i}" for i in range(12)]
    for node in nodes:
        fill(lake, good_shards(node))
    looked: list[str] = []
    real = core_shards.examine

    def counted(path: str, *rest: Any, **named: Any) -> Any:
        looked.append(path)
        return real(path, *rest, **named)

    monkeypatch.setattr(collect, "examine", counted)
    facts_of(lake)
    assert len(looked) == 6 * len(nodes)
    looked.clear()
    late, data = shard(STEP_WINDOWS, steps(3, first=3), node="node-3", seq=1)
    fill(lake, {late: data})
    assert f"raw/{late}" in facts_of(lake)["accepted"]
    same = [n for n in nodes if bucket_of(n, lake.buckets) == bucket_of("node-3", lake.buckets)]
    assert len(same) < len(nodes)
    assert len(looked) == 6 * len(same) + 1


def test_processes_give_the_same_facts_as_threads(tmp_path: Path) -> None:
    texts = []
    for scheduler in ("threads", "local"):
        lake = Lake.open(str(tmp_path / scheduler))
        for i in range(4):
            fill(lake, good_shards(f"node-{i}"))
        fill(lake, dict([shard(STEP_WINDOWS, steps(5), seq=7)]))
        chosen = Settings(lake=lake.store.url, scheduler=scheduler, workers=2)
        texts.append(collect_day(lake, chosen, DAY, last_day=TODAY)[0].to_json())
    assert texts[0] == texts[1]


def test_a_day_that_has_not_come_is_tried_again_when_it_has(lake: Lake) -> None:
    paths = fill(lake, good_shards())
    step, _ = collect_day(lake, settings(lake), DAY, last_day=date(2026, 11, 25))
    assert step.facts["accepted"] == []
    assert all("expected a day up to 2026-11-25 (UTC)" in q["reason"] for q in step.facts["quarantined"])
    assert all("found 2026-11-27" in q["reason"] for q in step.facts["quarantined"])
    come, _ = collect_day(lake, settings(lake), DAY, last_day=date(2026, 11, 27))
    assert come.facts["accepted"] == paths
    assert collect_day(lake, settings(lake), DAY, last_day=TODAY) == (come, True), "a later today changes no past day"


def test_without_a_last_day_the_clock_says_today(lake: Lake) -> None:
    hour = f"{datetime.now(UTC).year + 2}-01-01T00"
    fill(lake, dict([shard(EVENTS, [], hour=hour)]))
    step, _ = collect_day(lake, settings(lake), hour[:10])
    assert "the latest that can have been observed" in step.facts["quarantined"][0]["reason"]


def test_op_rows_that_do_not_add_up_are_counted_and_kept(lake: Lake) -> None:
    shards = [shard(STEP_WINDOWS, steps()), shard(OP_WINDOWS, ops(SECOND, SECOND))]
    paths = fill(lake, dict(shards))
    facts = facts_of(lake)
    assert facts["accepted"] == paths
    assert facts["mismatch"] == 1
    totals = {"strata": 1, "mismatched": 1, "sampled_active_ns": 3 * SECOND, "exclusive_ns": 2 * SECOND}
    assert facts["mismatches"] == [{"node": NODE, "hour": 3, **totals}]
    bad = steps()
    bad[0]["wall_ns"] += 1
    fill(lake, dict([shard(STEP_WINDOWS, bad, seq=1)]))
    facts = facts_of(lake)
    assert facts["mismatch"] == 0, "not all step rows of the hour are there"


def test_what_is_refused_is_tried_again_when_the_code_changes(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = samples()
    rows[1]["covered_ns"] *= 2
    fill(lake, dict([shard(DEVICE_SAMPLES, rows)]))
    assert len(facts_of(lake)["quarantined"]) == 1
    monkeypatch.setattr(collect, "MODULES", (*collect.MODULES, "tasks.errors"))
    step, reused = collect_day(lake, settings(lake), DAY, last_day=TODAY)
    assert (len(step.facts["quarantined"]), reused) == (1, False)


def test_a_shard_without_a_verdict_breaks_the_law(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = fill(lake, dict([shard(EVENTS, ROWS[EVENTS.name])]))
    monkeypatch.setattr(collect, "_judge", lambda *_: ([], []))
    with pytest.raises(LawError, match="1 shards in, 0 verdicts") as error:
        facts_of(lake)
    assert (error.value.law, error.value.expected, error.value.found) == (5, 1, 0)
    assert path in str(error.value)


# --- the drop folder -------------------------------------------------------------------------------------------------


def test_no_drop_folder_and_the_lakes_own(lake: Lake) -> None:
    fill(lake, good_shards())
    assert admit(lake, settings(lake)) == []
    assert admit(lake, settings(lake, f"{lake.store.url}/raw")) == []


def test_a_drop_folder_that_is_missing(lake: Lake, tmp_path: Path) -> None:
    url = str(tmp_path / "dorp")
    with pytest.raises(UsageError) as error:
        admit(lake, settings(lake, url))
    assert str(error.value) == (
        f"setting telemetry: no folder {url}. Expected the folder that hosts upload shards to. Correct the setting, "
        "make the folder, or leave the setting out to read the lake's own raw/."
    )
    assert (error.value.setting, error.value.url) == ("telemetry", url)
    (tmp_path / "dorp").mkdir()
    assert admit(lake, settings(lake, url)) == []


def test_a_drop_folder_inside_the_lake(lake: Lake) -> None:
    for url in (lake.store.url, f"{lake.store.url}/objects"):
        with pytest.raises(UsageError, match=f"setting telemetry: {url} lies in the lake {lake.store.url}") as error:
            admit(lake, settings(lake, url))
        assert (error.value.setting, error.value.url) == ("telemetry", url)


def test_shards_are_copied_once(lake: Lake, tmp_path: Path) -> None:
    drop = tmp_path / "drop"
    shards = good_shards()
    drop_files(drop, shards)
    assert admit(lake, settings(lake, drop)) == sorted(f"raw/{p}" for p in shards)
    found = {e.path.removeprefix("raw/"): lake.store.read(e.path) for e in lake.store.list("raw")}
    assert found == shards
    late = shard(STEP_WINDOWS, steps(3, first=3), seq=1)
    drop_files(drop, dict([late]))
    assert admit(lake, settings(lake, drop)) == [f"raw/{late[0]}"]
    assert facts_of(lake)["shards_in"] == 7
    assert records(lake) == {}


def test_a_remote_drop_folder(lake: Lake) -> None:
    shards = good_shards() | good_shards("node-b") | good_shards("node-c")
    drop = Store("memory://hosts/drop")
    with pytest.raises(UsageError, match="setting telemetry: no folder memory://hosts/drop"):
        admit(lake, settings(lake, drop.url))
    for path, data in shards.items():
        drop.put(f"cluster-1/{path}", data)
    assert admit(lake, settings(lake, drop.url)) == sorted(f"raw/{p}" for p in shards)
    assert len(facts_of(lake)["accepted"]) == 18


def test_a_remote_lake_gives_the_same_verdict(lake: Lake) -> None:
    remote = Lake.open("memory://lakes/one")
    for path, data in (good_shards() | good_shards("node-b")).items():
        for each in (lake, remote):
            each.store.put(f"raw/{path}", data)
    assert facts_of(remote) == facts_of(lake)


def test_strange_files_in_the_drop_folder_are_recorded(lake: Lake, tmp_path: Path) -> None:
    drop = tmp_path / "drop"
    _, data = shard(EVENTS, ROWS[EVENTS.name])
    unknown = f"raw_telemetry__moods/date={DAY}/hour=03/{NODE}-0-{content_sha16(data)}.parquet"
    drop_files(drop, {"README": b"hello", unknown: data})
    assert admit(lake, settings(lake, drop)) == []
    total = 5 + len(data)
    by_path = {r["path"]: r for r in records(lake).values()}
    assert by_path[f"{drop}/README"] == {
        "path": f"{drop}/README",
        "reason": f"{drop}: not the name of a shard: expected "
        "<table>/date=YYYY-MM-DD/hour=HH/<producer>-<seq>-<sha16>.parquet, found README. Move it elsewhere.",
        "bytes": 5,
        "share_ppm": 5_000_000 // total,
    }
    assert "unknown table" in by_path[f"{drop}/{unknown}"]["reason"]
    assert lake.store.list("raw") == []


def test_what_cannot_be_read_is_recorded_and_the_rest_admitted(lake: Lake, tmp_path: Path) -> None:
    drop = tmp_path / "drop"
    shards = good_shards()
    drop_files(drop, shards)
    bad, blind = shard(EVENTS, [], node="node-b")[0], shard(EVENTS, [], node="node-c")[0]
    (drop / bad).symlink_to((drop / bad).name)
    (drop / "loop").symlink_to(drop)
    (drop / "pipe").mkdir()
    (drop / blind).write_bytes(b"")
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == drop / blind:
            raise PermissionError(13, "Permission denied")
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        assert admit(lake, settings(lake, drop)) == sorted(f"raw/{p}" for p in shards)
    by_path = {r["path"]: r["reason"] for r in records(lake).values()}
    assert sorted(by_path) == sorted(f"{drop}/{p}" for p in (bad, blind, "loop"))
    assert "Too many levels of symbolic links. Repair or remove it." in by_path[f"{drop}/{bad}"]
    assert "a link to a folder that it lies in. Repair or remove it." in by_path[f"{drop}/loop"]
    assert "Permission denied. Make it readable" in by_path[f"{drop}/{blind}"]


def test_what_cannot_be_read_in_the_lakes_own_raw_is_counted(lake: Lake) -> None:
    good = fill(lake, good_shards())
    bad = f"raw/{shard(EVENTS, [], node='node-b')[0]}"
    Path(lake.store.url, bad).symlink_to(Path(bad).name)
    assert [ref.path for ref in lake.shards()] == good
    facts = facts_of(lake)
    assert facts["accepted"] == good
    assert [q["path"] for q in facts["quarantined"]] == [bad]
    assert (
        "expected a file or folder that can be read, found none: OSError: Too many "
        in facts["quarantined"][0]["reason"]
    )


def test_a_shard_cut_on_its_way_counts_as_quarantined_until_it_is_whole(lake: Lake, tmp_path: Path) -> None:
    drop = tmp_path / "drop"
    path, data = shard(STEP_WINDOWS, steps())
    drop_files(drop, {path: data[:-9]})
    (admitted,) = admit(lake, settings(lake, drop))
    sha = content_sha16(data[:-9])
    assert admitted == f"raw/{path.removesuffix('.parquet')}.damaged-{sha}.parquet"
    assert admit(lake, settings(lake, drop)) == []
    (record,) = records(lake).values()
    assert record["path"] == f"{drop}/{path}"
    assert f"found {sha}… over {len(data) - 9:,} bytes. The object was cut, changed or renamed." in record["reason"]
    (refused,) = facts_of(lake)["quarantined"]
    assert (refused["path"], refused["rows"], refused["share_ppm"]) == (admitted, None, 1_000_000)
    assert refused["reason"].startswith(f"{admitted}: expected the sha256 that the name began with, found {sha}… over ")

    drop_files(drop, {path: data})
    assert admit(lake, settings(lake, drop)) == [f"raw/{path}"]
    facts = facts_of(lake)
    assert facts["accepted"] == [f"raw/{path}"]
    assert facts["duplicates"] == [{"path": admitted, "same_as": f"raw/{path}"}]


def test_every_table_of_the_contract_has_a_clock() -> None:
    from tasks.core.shard_rows import CLOCKS

    assert set(CLOCKS) == set(TELEMETRY)
    assert all(clock in TELEMETRY[name].key for name, clock in CLOCKS.items())


def test_facts_are_the_same_bytes_in_two_lakes(tmp_path: Path) -> None:
    texts = []
    for name, order in (("one", 1), ("two", -1)):
        lake = Lake.open(str(tmp_path / name))
        for path, data in list((good_shards() | good_shards("node-b")).items())[::order]:
            fill(lake, {path: data})
        texts.append(Step({}, facts_of(lake)).to_json())
    assert texts[0] == texts[1]
    assert HOUR.startswith(DAY)


def test_a_fleet_with_a_cut_a_doubled_and_a_late_shard(lake: Lake, tmp_path: Path) -> None:
    fleet = build(full_spec(1))
    written = write_fleet(fleet, tmp_path)
    drop, day = tmp_path / "telemetry", fleet.spec.day
    admitted = admit(lake, settings(lake, drop))
    assert len(admitted) == len(written.telemetry)
    facts = facts_of(lake, day)
    assert [q["path"].partition(".damaged-")[0] for q in facts["quarantined"]] == [
        p.replace("telemetry", "raw", 1).removesuffix(".parquet") for p in written.corrupt
    ]
    assert [d["path"] for d in facts["duplicates"]] == [p.replace("telemetry", "raw", 1) for p in written.duplicates]
    assert facts["shards_in"] == len(written.telemetry)
    assert facts["rows_in"] == facts["rows_accepted"] + facts["rows_duplicate"]
    assert (len(written.corrupt), len(written.duplicates), facts["mismatch"]) == (1, 1, 0)

    shutil.copytree(tmp_path / "late" / "telemetry", drop, dirs_exist_ok=True)
    late = admit(lake, settings(lake, drop))
    assert late == sorted(p.replace("late/telemetry", "raw", 1) for p in written.late)
    assert set(facts_of(lake, day)["accepted"]) == {*facts["accepted"], *late}
