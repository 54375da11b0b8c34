"""The lake: steps are created once, days commit in order, and report/ follows the head."""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seedance.canonical import canonical
from seedance.errors import Exists, SchemaError, StoreError
from seedance.schema import INSTANT, Table, instant, number, text
from seedance.shard import content_sha16, parse_name, write_shard
from seedance.store import Store, Watch
from tasks.errors import DeterminismError, LayoutError, PipelineError
from tasks.io.lake import Handle, Lake, Moved, Step

DAY = "2026-11-28"
CORE = Table("core_test__things", "one thing", ("n",), (number("n", 64, "count", "number"),))
REPORT = Table("report_test__daily", "one line", ("n",), (number("n", 64, "count", "number"),))
OTHER = Table("report_test__other", "one line", ("n",), (number("n", 64, "count", "number"),))
SHARD = Table("raw_telemetry__things", "one thing", ("at_utc",), (instant("at_utc", "when"), text("v", "value")))
START = 1_795_849_200_000_000_000


class Killed(Exception):
    """The writer is gone."""


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def open_lake(tmp_path: Path, watch: Watch | None = None) -> Lake:
    return Lake.open(str(tmp_path / "lake"), watch=watch)


def body(lake: Lake, key: str, *values: int, **more: Any) -> dict[str, Any]:
    """A commit of two report tables and one in between."""
    handles = {spec.name: lake.handle(spec, DAY, [numbers(*values)]) for spec in (CORE, REPORT, OTHER)}
    return {"key": key, "data_key": key, "handles": handles, **more}


def published(lake: Lake, table: str = REPORT.name) -> list[int]:
    path = f"report/{table}/usage_date={DAY}/data.parquet"
    return list(pq.read_table(io.BytesIO(lake.store.read(path))).column("n").to_pylist())


def shard(value: str, *, seq: int = 0, hour: str = f"{DAY}T07", producer: str = "n-1") -> tuple[str, bytes]:
    rows = pa.table({"at_utc": pa.array([START], INSTANT), "v": [value]})
    return write_shard(
        rows, SHARD, producer=producer, node="n-1", cloud=None, instance_id=None, instance_type=None, hour=hour,
        seq=seq, period_ns=1,
    )  # fmt: skip


def dies_at(moment: str, operation: str, part: str) -> Watch:
    def watch(when: str, what: str, path: str) -> None:
        if (when, what) == (moment, operation) and part in path:
            raise Killed(path)

    return watch


# --- layout ---------------------------------------------------------------------------------------------------------


def test_a_lake_keeps_the_bucket_count_it_was_made_with(tmp_path: Path) -> None:
    assert Lake.open(str(tmp_path), buckets=4).buckets == 4
    assert Lake.open(str(tmp_path), buckets=32).buckets == 4
    assert (tmp_path / "lake.json").read_bytes() == b'{"buckets":4,"layout":1}'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lake.check", "lake.json"]


@pytest.mark.parametrize("text", ['{"layout":2,"buckets":8}', "[]", '{"layout":1}', "not JSON"])
def test_another_layout_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "lake.json").write_text(text)
    with pytest.raises(LayoutError) as caught:
        Lake.open(str(tmp_path))
    assert caught.value.expected == 1
    assert caught.value.found == (2 if "2" in text else None)


def test_lakes_opened_at_once_agree(tmp_path: Path) -> None:
    gate, counts = threading.Barrier(4), []

    def run(buckets: int) -> None:
        gate.wait()
        counts.append(Lake.open(str(tmp_path), buckets=buckets).buckets)

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 4
    assert len(set(counts)) == 1


def test_lakes_and_handles_travel_to_workers(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    handle = pickle.loads(pickle.dumps(lake.handle(CORE, DAY, [numbers(1)])))
    assert pickle.loads(pickle.dumps(lake)).read(handle, CORE).equals(numbers(1).cast(CORE.arrow))


# --- handles and steps ----------------------------------------------------------------------------------------------


def test_tables_are_read_back_as_they_were(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    handle = lake.handle(CORE, DAY, [numbers(3, 1), numbers(2)])
    assert [part.rows for part in handle.parts] == [2, 1]
    assert handle.rows == 3
    assert lake.read(handle, CORE).column("n").to_pylist() == [1, 3, 2]
    assert lake.read(handle, CORE, columns=["n"]).column_names == ["n"]
    assert Handle.from_json(handle.to_json()) == handle
    assert handle == lake.handle(CORE, DAY, [numbers(1, 3), numbers(2)])
    assert handle.sha256 != lake.handle(CORE, DAY, [numbers(1, 3)]).sha256
    assert lake.read(lake.handle(CORE, None, []), CORE).num_rows == 0


def test_a_report_table_is_one_object_whatever_it_is_made_of(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    assert [p.rows for p in lake.handle(REPORT, DAY, []).parts] == [0]
    assert lake.handle(REPORT, DAY, [numbers(1), numbers(2)]) == lake.handle(REPORT, DAY, [numbers(2, 1)])


def test_objects_that_are_missing_or_altered_are_named(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    handle = lake.handle(CORE, DAY, [numbers(1)])
    file = Path(lake.store.url, handle.parts[0].path)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="was altered: expected sha256") as caught:
        lake.read(handle, CORE)
    assert caught.value.path == handle.parts[0].path
    file.unlink()
    with pytest.raises(StoreError, match="no object objects/core_test__things/"):
        lake.read(handle, CORE)
    with pytest.raises(SchemaError, match="expected report_test__daily"):
        lake.read(lake.handle(CORE, DAY, [numbers(1)]), REPORT)


def test_a_step_is_created_once_and_again_when_equal(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    step = Step({CORE.name: lake.handle(CORE, DAY, [numbers(1)])}, {"rows": 1, "quarantined": []})
    assert lake.step("reduce", "k1") is None
    lake.create_step("reduce", "k1", step)
    assert lake.create_step("reduce", "k1", step) == lake.step("reduce", "k1") == step


def test_other_outputs_of_one_key_are_shown_side_by_side(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    one = Step({CORE.name: lake.handle(CORE, DAY, [numbers(1)])}, {"rows": 1, "only": True})
    two = Step({CORE.name: lake.handle(CORE, DAY, [numbers(1, 2)])}, {"rows": 2})
    lake.create_step("reduce", "k1", one)
    with pytest.raises(DeterminismError) as caught:
        lake.create_step("reduce", "k1", two)
    message = str(caught.value)
    for step in (one, two):
        assert step.handles[CORE.name].parts[0].sha256 in message
    assert "stored 1 rows" in message
    assert "computed 2 rows" in message
    assert "fact rows: stored 1, computed 2" in message
    assert "fact only: stored true, computed nothing" in message
    assert (caught.value.stage, caught.value.key, caught.value.found) == ("reduce", "k1", two.to_json())
    assert lake.step("reduce", "k1") == one


def test_floats_stay_out_of_steps_and_commits(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    with pytest.raises(SchemaError, match=r"\$\.facts\.share: cannot be written"):
        lake.create_step("reduce", "k", Step({}, {"share": 0.5}))
    with pytest.raises(SchemaError, match=r"\$\.alpha: cannot be written"):
        lake.commit(DAY, {"key": "k", "alpha": 1.5})


# --- commits --------------------------------------------------------------------------------------------------------


def test_commits_count_up_and_older_ones_stay(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    assert lake.head(DAY) is None
    first = lake.commit(DAY, body(lake, "a", 1, parent=0))
    second = lake.commit(DAY, body(lake, "b", 1, 2, parent=1))
    assert (first.n, second.n, second.body["parent"]) == (1, 2, 1)
    assert lake.head(DAY) == second
    assert lake.commits(DAY) == [first, second]
    assert lake.committed_days() == [DAY]
    assert second.handles[CORE.name] == lake.handle(CORE, DAY, [numbers(1, 2)])
    raw = lake.store.read(f"days/{DAY}/2.json")
    assert raw == canonical(json.loads(raw))


def test_a_key_that_comes_back_after_another_is_a_new_commit(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    for key in ("a", "b", "a", "a"):
        lake.commit(DAY, body(lake, key, 1))
    assert [c.key for c in lake.commits(DAY)] == ["a", "b", "a"]


def test_the_eleventh_commit_is_newer_than_the_second(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    for n in range(11):
        lake.commit(DAY, {"key": str(n)})
    head = lake.head(DAY)
    assert head is not None
    assert (head.n, head.key) == (11, "10")


def test_who_read_an_older_head_must_recompute(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    lake.commit(DAY, body(lake, "a", 1, parent=0))
    with pytest.raises(Moved, match="expected revision 0 as the head, found 1") as caught:
        lake.commit(DAY, body(lake, "b", 2, parent=0))
    assert isinstance(caught.value, PipelineError)
    assert (caught.value.day, caught.value.expected, caught.value.found, caught.value.key) == (DAY, 0, 1, "b")


@pytest.mark.parametrize("same", [True, False])
def test_of_two_commits_at_once_one_wins(tmp_path: Path, same: bool) -> None:
    gate = threading.Barrier(2)
    results: list[Any] = []

    def hold(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "create") and path.startswith("days/"):
            gate.wait(10)

    def run(key: str) -> None:
        lake = open_lake(tmp_path, hold)
        try:
            results.append(lake.commit(DAY, body(lake, key, len(key))))
        except Moved as error:
            results.append(error)

    open_lake(tmp_path)
    threads = [threading.Thread(target=run, args=(key,)) for key in (("a", "a") if same else ("a", "bb"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    head = open_lake(tmp_path).head(DAY)
    assert head is not None
    assert head.n == 1
    losers = [r for r in results if isinstance(r, Moved)]
    assert len(losers) == (0 if same else 1)
    assert [r for r in results if not isinstance(r, Moved)] == [head] * (2 if same else 1)


def test_commits_that_cannot_be_published_are_refused(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    with pytest.raises(LayoutError, match="exactly one object a day; found 0"):
        lake.commit(DAY, {"key": "a", "handles": {REPORT.name: Handle(REPORT.name, 1, DAY, ())}})
    with pytest.raises(LayoutError, match="is not a day"):
        lake.commit("20261128", {"key": "a"})
    with pytest.raises(LayoutError, match="expected the key"):
        lake.commit(DAY, {"handles": {}})
    assert lake.committed_days() == []


# --- report/ --------------------------------------------------------------------------------------------------------


def test_report_follows_the_head(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    assert lake.materialise(DAY) == []
    lake.commit(DAY, body(lake, "a", 1))
    assert lake.materialise(DAY) == [f"report/{t}/usage_date={DAY}/data.parquet" for t in (REPORT.name, OTHER.name)]
    assert published(lake) == [1]
    assert lake.materialise(DAY) == []
    second = body(lake, "b", 1)
    second["handles"][OTHER.name] = lake.handle(OTHER, DAY, [numbers(7)])
    lake.commit(DAY, second)
    assert lake.materialise(DAY) == [f"report/{OTHER.name}/usage_date={DAY}/data.parquet"]
    assert json.loads(lake.store.read(f"report/_days/{DAY}.json"))["commit"] == 2
    assert lake.repair() == []


def test_a_table_that_the_head_lacks_keeps_its_file(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    lake.commit(DAY, body(lake, "a", 1))
    lake.materialise(DAY)
    lake.commit(DAY, {"key": "b", "handles": {REPORT.name: lake.handle(REPORT, DAY, [numbers(2)])}})
    lake.materialise(DAY)
    assert (published(lake), published(lake, OTHER.name)) == ([2], [1])


@pytest.mark.parametrize(
    "fate",
    [
        ("before", "create", "days/"), ("after", "create", "days/"), ("before", "replace", REPORT.name),
        ("after", "replace", REPORT.name), ("after", "replace", OTHER.name), ("before", "replace", "_days"),
        ("after", "replace", "_days"),
    ],
)  # fmt: skip
def test_a_killed_run_and_the_next_give_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, fate: tuple[str, str, str]
) -> None:
    def run(root: Path, watch: Watch | None = None) -> dict[str, bytes]:
        lake = open_lake(root, watch)
        lake.commit(DAY, body(lake, "a", 1, 2))
        lake.materialise(DAY)
        return {e.path: lake.store.read(e.path) for e in lake.store.list("")}

    with pytest.raises(Killed):
        run(tmp_path / "killed", dies_at(*fate))
    assert run(tmp_path / "killed") == run(tmp_path / "undisturbed")


def test_a_writer_that_wakes_up_late_is_overwritten_again(tmp_path: Path) -> None:
    asleep, woken = threading.Event(), threading.Event()

    def nap(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "replace") and REPORT.name in path and not asleep.is_set():
            asleep.set()
            assert woken.wait(20)

    slow, fast = open_lake(tmp_path, nap), open_lake(tmp_path)
    slow.commit(DAY, body(slow, "a", 1))
    thread = threading.Thread(target=slow.materialise, args=(DAY,))
    thread.start()
    assert asleep.wait(20)
    fast.commit(DAY, body(fast, "b", 2))
    fast.materialise(DAY)
    assert published(fast) == [2]
    woken.set()
    thread.join()
    assert published(fast) == published(fast, OTHER.name) == [2]
    assert fast.repair() == []


@pytest.mark.parametrize("fate", [("after", "replace", REPORT.name), ("after", "replace", "_days")])
def test_a_writer_that_wakes_up_late_and_dies_is_repaired(tmp_path: Path, fate: tuple[str, str, str]) -> None:
    fast = open_lake(tmp_path)
    fast.commit(DAY, body(fast, "a", 1))
    stopped = dies_at(*fate)
    raced = [False]

    def overtaken(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "replace") and not raced[0]:
            raced[0] = True
            fast.commit(DAY, body(fast, "b", 2))
            fast.materialise(DAY)
        stopped(moment, operation, path)

    with pytest.raises(Killed):
        open_lake(tmp_path, overtaken).materialise(DAY)
    assert published(fast) == [1]
    replaced = fast.repair()
    assert f"report/{REPORT.name}/usage_date={DAY}/data.parquet" in replaced
    assert published(fast) == published(fast, OTHER.name) == [2]
    assert fast.repair() == []


@pytest.mark.parametrize("harm", ["delete", "alter", "no record", "empty record"])
def test_what_was_harmed_from_outside_is_repaired(tmp_path: Path, harm: str) -> None:
    lake = open_lake(tmp_path)
    lake.commit(DAY, body(lake, "a", 1))
    lake.materialise(DAY)
    before = {e.path: lake.store.read(e.path) for e in lake.store.list("report")}
    root = Path(lake.store.url, "report")
    file, record = root / REPORT.name / f"usage_date={DAY}" / "data.parquet", root / "_days" / f"{DAY}.json"
    steps: dict[str, Callable[[], object]] = {
        "delete": file.unlink,
        "alter": lambda: file.write_bytes(b"other"),
        "no record": record.unlink,
        "empty record": lambda: record.write_text("{}"),
    }
    steps[harm]()
    assert len(lake.repair()) == (1 if harm in ("delete", "alter") else 0)
    assert {e.path: lake.store.read(e.path) for e in lake.store.list("report")} == before


def read_once(file: Path) -> list[int]:
    """As a reader that opens the file once, whatever it reads from it then."""
    return list(pq.ParquetFile(file).read().column("n").to_pylist())


def read_twice(file: Path) -> list[int]:
    """As a reader that opens the file for its schema and again for its rows: it can fail, and says so."""
    try:
        return list(pq.read_table(file, partitioning=None).column("n").to_pylist())
    except OSError:
        return []


@pytest.mark.parametrize("read", [read_once, read_twice])
def test_readers_see_whole_commits_while_days_are_published_again(
    tmp_path: Path, read: Callable[[Path], list[int]]
) -> None:
    lake = open_lake(tmp_path)
    rows = 2_000
    bodies = [body(lake, str(n), *range(n * rows, (n + 1) * rows)) for n in range(2)]
    lake.commit(DAY, bodies[0])
    lake.materialise(DAY)
    done, mixed, reads = threading.Event(), [], [0]

    def loop() -> None:
        root = Path(lake.store.url, "report")
        while not done.is_set():
            for file in root.glob("report_*/usage_date=*/data.parquet"):
                found = read(file)
                reads[0] += bool(found)
                if found and found not in (list(range(rows)), list(range(rows, 2 * rows))):
                    mixed.append(found)

    thread = threading.Thread(target=loop)
    thread.start()
    for turn in range(40):
        lake.commit(DAY, bodies[(turn + 1) % 2])
        lake.materialise(DAY)
    done.set()
    thread.join()
    assert reads[0] > 5
    assert mixed == []


def test_tables_as_of_a_day_are_published_beside(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    lake.publish_as_of(lake.handle(REPORT, None, [numbers(1)]), DAY)
    lake.publish_as_of(lake.handle(REPORT, None, [numbers(2)]), DAY)
    (entry,) = lake.store.list("report")
    assert entry.path == f"report/{REPORT.name}/as_of_date={DAY}/data.parquet"
    with pytest.raises(LayoutError, match="exactly one object"):
        lake.publish_as_of(Handle(REPORT.name, 1, None, ()), DAY)


# --- shards ---------------------------------------------------------------------------------------------------------


def test_shards_are_admitted_once_under_the_name_of_their_bytes(tmp_path: Path) -> None:
    lake, drop = open_lake(tmp_path), Store(str(tmp_path / "drop"))
    name, data = shard("a")
    drop.create(name, data)
    drop.create("notes/readme.txt", b"no shard")
    assert lake.admit(drop) == [f"raw/{name}"]
    assert lake.admit(drop) == []
    copy = name.replace("n-1-0-", "n-1-7-")
    drop.create(copy, data)
    assert lake.admit(drop) == []
    (ref,) = lake.shards()
    assert (ref.path, ref.bytes, ref.name) == (f"raw/{name}", len(data), parse_name(name))
    assert lake.store.read(ref.path) == data


def test_a_shard_that_is_still_being_uploaded_does_not_bar_the_whole_one(tmp_path: Path) -> None:
    lake, drop = open_lake(tmp_path), Store(str(tmp_path / "drop"))
    name, data = shard("a")
    drop.create(name, data[:100])
    (torn,) = lake.admit(drop)
    assert parse_name(torn).sha16 == content_sha16(data[:100])
    assert lake.admit(drop) == []
    drop.replace(name, data)
    assert lake.admit(drop) == [f"raw/{name}"]
    assert len(lake.shards()) == 2


def test_shards_of_some_days_are_the_same_however_they_are_listed(tmp_path: Path) -> None:
    lake, drop = open_lake(tmp_path), Store("memory://drop-of-test-lake")
    days = [f"2026-11-{d:02d}" for d in range(1, 13)]
    for day in days:
        for hour in ("00", "23"):
            drop.put(*shard("a", hour=f"{day}T{hour}"))
    lake.store.create("raw/bills/aws/delivery/x.parquet", b"")
    lake.store.create("raw/prices/x.csv", b"")
    assert len(lake.admit(drop)) == 24
    every = lake.shards()
    assert [ref.path for ref in every] == sorted(ref.path for ref in every)
    for wanted in ([], days[:1], days[2:5], days[1:11]):
        assert lake.shards(wanted) == [ref for ref in every if ref.name.day.isoformat() in wanted]


def test_quarantine_points_at_the_shard(tmp_path: Path) -> None:
    lake = open_lake(tmp_path)
    name, _ = shard("a")
    lake.quarantine(f"raw/{name}", {"reason": "no footer", "share_ppm": 3})
    lake.quarantine(f"raw/{name}", {"reason": "no footer", "share_ppm": 4})
    raw = lake.store.read(f"quarantine/raw_telemetry__things/{parse_name(name).sha16}.json")
    assert json.loads(raw) == {"path": f"raw/{name}", "reason": "no footer", "share_ppm": 4}


def test_a_commit_whose_answer_was_lost_is_still_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = open_lake(tmp_path)
    honest = lake.store.create

    def lossy(path: str, data: bytes) -> None:
        honest(path, data)
        raise Exists("the retry of a put that had arrived", path=path)

    monkeypatch.setattr(lake.store, "create", lossy)
    assert lake.commit(DAY, body(lake, "a", 1)).n == 1
    step = Step({}, {"rows": 1})
    assert lake.create_step("reduce", "k", step) == step
