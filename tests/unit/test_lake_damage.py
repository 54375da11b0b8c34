"""A lake that was cut, edited or cleared from outside: what can be made again is, and the rest is told with a way out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest

from seedance.errors import StoreError
from seedance.schema import Table, number
from tasks.errors import DeterminismError, LayoutError
from tasks.io import lake as lake_module
from tasks.io.lake import Lake, Step
from tasks.step import run_step

DAY = "2026-11-28"
CORE = Table("core_test__things", "one thing", ("n",), (number("n", 64, "count", "number"),))
REPORT = Table("report_test__daily", "one line", ("n",), (number("n", 64, "count", "number"),))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def made(lake: Lake, *values: int) -> Step:
    return Step({CORE.name: lake.handle(CORE, DAY, [numbers(n) for n in values])}, {"rows": len(values)})


def published(lake: Lake, day: str = DAY) -> Path:
    """A day that was committed and published; its folder."""
    lake.commit(day, {"key": "a", "data_key": "a", "handles": {REPORT.name: lake.handle(REPORT, day, [numbers(1)])}})
    lake.materialise(day)
    return Path(lake.store.url)


# --- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ('{"layout":1,"buckets":0}', "a whole number from 1 to 4096", 0),
        ('{"layout":1,"buckets":"2"}', "a whole number from 1 to 4096", "2"),
        ('{"layout":1,"buckets":true}', "a whole number from 1 to 4096", True),
        ('{"layout":1,"buckets":8.0}', "a whole number from 1 to 4096", 8.0),
        ('{"layout":1.9,"buckets":8}', 1, 1.9),
        ('{"layout":"1","buckets":8}', 1, "1"),
        ('{"layout":0,"buckets":8}', 1, 0),
    ],
)
def test_a_layout_of_strange_values_is_refused(tmp_path: Path, text: str, expected: object, found: object) -> None:
    (tmp_path / "lake.json").write_text(text)
    with pytest.raises(LayoutError, match="Restore it from a copy, or write") as caught:
        Lake.open(str(tmp_path))
    assert (caught.value.expected, caught.value.found, caught.value.url) == (expected, found, str(tmp_path))


@pytest.mark.parametrize("folder", ["days", "steps"])
def test_a_layout_that_was_deleted_is_not_made_anew(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    with pytest.raises(LayoutError, match=f"expected lake.json, found none beside {folder}/: it was deleted") as caught:
        Lake.open(str(tmp_path), buckets=3)
    assert not (tmp_path / "lake.json").exists()
    assert '{"buckets":8,"layout":1}' in str(caught.value)
    (tmp_path / "lake.json").write_text('{"buckets":3,"layout":1}')
    assert Lake.open(str(tmp_path)).buckets == 3


def test_shards_that_came_before_the_first_night_are_no_lake(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    assert Lake.open(str(tmp_path), buckets=3).buckets == 3


# --- texts that do not parse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", '{"key":', "[]", "{}", '{"key":"a","handles":[]}', '{"key":"a","handles":{"t":1}}']
)
def test_a_commit_that_cannot_be_read_is_named(lake: Lake, text: str) -> None:
    root = published(lake)
    file = root / "days" / DAY / "1.json"
    file.write_text(text)
    with pytest.raises(LayoutError, match="Restore the file from a copy, or delete it and run the day again") as caught:
        lake.head(DAY)
    assert str(file) in str(caught.value)
    assert caught.value.path == f"days/{DAY}/1.json"
    file.unlink()
    assert lake.head(DAY) is None
    published(lake)
    assert lake.commits(DAY)[0].key == "a"


@pytest.mark.parametrize("text", ["", '{"handles":', "[]", '{"facts":{}}', '{"facts":[],"handles":{}}', "\x00"])
def test_a_step_that_cannot_be_read_is_made_again(lake: Lake, text: str, caplog: pytest.LogCaptureFixture) -> None:
    step, _ = run_step(lake, "reduce", "k", lambda: made(lake, 1))
    file = Path(lake.store.url, "steps/reduce/k.json")
    whole = file.read_bytes()
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert run_step(lake, "reduce", "k", lambda: made(lake, 1)) == (step, False)
    assert "steps/reduce/k.json is not a step" in caplog.text
    assert file.read_bytes() == whole
    assert run_step(lake, "reduce", "k", lambda: made(lake, 2)) == (step, True)


@pytest.mark.parametrize("text", ["", '{"commit":', "[]", '{"commit":1,"etags":[]}', '{"check":"x","commit":1.5}'])
def test_a_record_of_a_day_that_cannot_be_read_is_written_again(lake: Lake, text: str) -> None:
    file = published(lake) / "report" / "_days" / f"{DAY}.json"
    whole = file.read_bytes()
    file.write_text(text)
    lake.repair()
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "stray", ["days/README", "days/x/y/1.json", "days/2026-10-99/1.json", f"days/{DAY}/notes.json", f"days/{DAY}/01.json",
              f"days/{DAY}/2.txt", f"days/{DAY}/a/2.json", f"days/{DAY}/٣.json"],
)  # fmt: skip
def test_strange_files_among_the_days_are_ignored(lake: Lake, stray: str, caplog: pytest.LogCaptureFixture) -> None:
    file = published(lake) / stray
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert lake.committed_days() == [DAY]
    assert f"{stray} is not the name of a commit" in caplog.text
    assert [c.n for c in lake.commits(DAY)] == [1]
    assert lake.repair() == []


# --- objects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_step_whose_object_is_gone_is_run_again(
    lake: Lake, harm: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_module, "FEW_PARTS", 0 if listed else 64)
    step, _ = run_step(lake, "reduce", "k", lambda: made(lake, 1, 2))
    handle = step.handles[CORE.name]
    assert lake.missing([handle]) == []
    file = Path(lake.store.url, handle.parts[1].path)
    file.unlink() if harm == "gone" else file.write_bytes(file.read_bytes()[:-9])
    assert lake.missing([handle]) == [handle.parts[1].path]
    assert lake.step("reduce", "k") is None
    assert run_step(lake, "reduce", "k", lambda: made(lake, 1, 2)) == (step, False)
    assert lake.read(handle, CORE).column("n").to_pylist() == [1, 2]
    assert run_step(lake, "reduce", "k", lambda: made(lake, 9)) == (step, True)


def test_a_step_whose_object_is_gone_and_comes_back_otherwise_is_shown(lake: Lake) -> None:
    step, _ = run_step(lake, "reduce", "k", lambda: made(lake, 1))
    Path(lake.store.url, step.handles[CORE.name].parts[0].path).unlink()
    with pytest.raises(DeterminismError):
        run_step(lake, "reduce", "k", lambda: made(lake, 2))


def test_objects_of_a_remote_lake_are_looked_up_too() -> None:
    lake = Lake.open("memory://damaged-lake")
    step, _ = run_step(lake, "reduce", "k", lambda: made(lake, 1, 2, 3))
    assert lake.step("reduce", "k") == step
    lake.store.replace(step.handles[CORE.name].parts[2].path, b"cut")
    assert lake.step("reduce", "k") is None


def test_the_way_out_of_an_altered_object_works(lake: Lake) -> None:
    step, _ = run_step(lake, "reduce", "k", lambda: made(lake, 1))
    handle = step.handles[CORE.name]
    file = Path(lake.store.url, handle.parts[0].path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(StoreError, match=f"Delete {file} and run the day again"):
        lake.read(handle, CORE)
    file.unlink()
    assert run_step(lake, "reduce", "k", lambda: made(lake, 1)) == (step, False)
    assert file.read_bytes() == whole


def test_a_day_whose_object_is_gone_does_not_bar_the_repair_of_others(lake: Lake) -> None:
    root = published(lake)
    gone = lake.handle(REPORT, DAY, [numbers(7)])
    lake.commit(DAY, {"key": "b", "handles": {REPORT.name: gone}})
    later = published(lake, "2026-11-29") / "report" / REPORT.name / "usage_date=2026-11-29" / "data.parquet"
    whole = later.read_bytes()
    later.unlink()
    (root / gone.parts[0].path).unlink()
    with pytest.raises(StoreError, match="no object objects/report_test__daily/"):
        lake.repair()
    assert later.read_bytes() == whole
    lake.handle(REPORT, DAY, [numbers(7)])
    assert len(lake.repair()) == 1
    assert json.loads((root / "report" / "_days" / f"{DAY}.json").read_text())["commit"] == 2
