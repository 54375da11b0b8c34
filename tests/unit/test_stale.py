"""Marks of days that could not be published as their inputs are."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from seedance.schema import Table, number
from tasks import stale
from tasks.io.lake import Lake

DAY, NEXT = "2026-11-28", "2026-11-29"
REPORT = Table("report_test__daily", "one line", ("n",), (number("n", 64, "count", "number"),))
FIRST, LATER = "2026-11-30T02:30:00+00:00", "2026-12-01T02:30:00+00:00"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


def committed(lake: Lake, key: str) -> None:
    table = pa.table({"n": pa.array([1], pa.int64())})
    lake.commit(DAY, {"key": key, "handles": {REPORT.name: lake.handle(REPORT, DAY, [table])}})
    lake.materialise(DAY)


def test_a_mark_says_since_when_why_and_what_stands(lake: Lake) -> None:
    committed(lake, "a")
    stale.mark(lake, {DAY: "LawError: it does not add up", "export of aws": "refused"}, DAY, NEXT, FIRST)
    assert stale.days_marked(lake) == [DAY]
    assert stale.read(lake, DAY) == {"since": FIRST, "why": "LawError: it does not add up", "commit": 1}
    stale.mark(lake, {DAY: "other"}, DAY, NEXT, LATER)
    assert stale.read(lake, DAY) == {"since": FIRST, "why": "other", "commit": 1}
    stale.mark(lake, {}, DAY, NEXT, LATER)
    assert stale.days_marked(lake) == [] and lake.store.list("report/_stale") == []


def test_a_day_without_a_commit_has_nothing_that_stands(lake: Lake) -> None:
    stale.mark(lake, {DAY: "x"}, DAY, NEXT, FIRST)
    assert stale.read(lake, DAY)["commit"] is None


def test_marks_of_days_that_a_run_did_not_look_at_stay(lake: Lake) -> None:
    stale.mark(lake, {DAY: "x", NEXT: "y"}, DAY, NEXT, FIRST)
    stale.mark(lake, {}, NEXT, NEXT, LATER)
    assert stale.days_marked(lake) == [DAY]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null"])
def test_a_mark_that_cannot_be_read_is_made_again(lake: Lake, text: bytes) -> None:
    lake.store.replace(f"report/_stale/{DAY}.json", text)
    assert stale.read(lake, DAY) == {}
    stale.mark(lake, {DAY: "x"}, DAY, NEXT, LATER)
    assert stale.read(lake, DAY)["since"] == LATER


def test_a_mark_on_a_commit_that_was_cut_says_nothing_stands(lake: Lake) -> None:
    committed(lake, "a")
    lake.store.replace(f"days/{DAY}/1.json", b"{")
    stale.mark(lake, {DAY: "x"}, DAY, NEXT, FIRST)
    assert stale.read(lake, DAY)["commit"] is None


def test_marks_do_not_stand_in_the_way_of_a_repair(lake: Lake) -> None:
    committed(lake, "a")
    stale.mark(lake, {DAY: "x"}, DAY, NEXT, FIRST)
    assert lake.repair() == []
    assert json.loads(lake.store.read(f"report/_stale/{DAY}.json"))["commit"] == 1
