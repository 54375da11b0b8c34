"""A sweep takes nothing that a commit or a step needs, whatever the history of the lake, and whoever writes meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedance.store import Watch
from tasks.core.garbage import DAY_NS, objects_in
from tasks.errors import LayoutError
from tasks.io.lake import Handle, Lake, Part, Step
from tasks.io.sweep import RECORD, sweep
from tasks.step import run_step

START = 1_795_849_200_000_000_000
TABLE = "core_test__things"


def make(lake: Lake, content: int) -> Handle:
    """An object of this content, as a stage keeps it."""
    data = b"content %d" % content
    digest = hashlib.sha256(data).hexdigest()
    path = f"objects/{TABLE}/{digest}.parquet"
    lake.store.put(path, data)
    return Handle(TABLE, 1, None, (Part(path, 1, len(data), digest),))


def written_at(lake: Lake, path: str, now_ns: int) -> None:
    os.utime(Path(lake.store.url, path), ns=(now_ns, now_ns))


def named(lake: Lake, folder: str) -> set[str]:
    return {name for e in lake.store.list(folder) for name in objects_in(lake.store.read(e.path))}


def gone(lake: Lake, folder: str) -> set[str]:
    """Objects that something in the folder names and that are not there."""
    return {path for path in named(lake, folder) if not lake.store.exists(path)}


contents = st.lists(st.integers(0, 9), max_size=3)
OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 7), contents),
    st.tuples(st.just("commit"), st.integers(1, 4), contents),
    st.tuples(st.just("begin"), st.integers(0, 7), contents),
    st.tuples(st.just("finish")),
    st.tuples(st.just("wait"), st.integers(1, 20)),
    st.tuples(st.just("sweep"), st.booleans()),
)


@settings(max_examples=60)
@given(st.lists(OPERATIONS, max_size=40))
def test_no_history_loses_what_is_named(operations: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        replay(Lake.open(folder), operations)


def replay(lake: Lake, operations: list[tuple[object, ...]]) -> None:
    now, waiting = START, []
    made = 0
    for operation, *words in operations:
        if operation in ("step", "begin"):
            key, some = f"k{words[0]}-{sorted(set(words[1]))}", sorted(set(words[1]))  # type: ignore[call-overload]
            if operation == "step":
                finish(lake, key, some, now)
            else:  # a run that has put its objects, and is not done yet
                for content in some:
                    make(lake, content)
                waiting.append((key, some))
        elif operation == "finish" and waiting:
            finish(lake, *waiting.pop(0), now)
        elif operation == "commit":
            made += 1
            handles = {f"{TABLE}/{c}": make(lake, c) for c in words[1]}  # type: ignore[attr-defined]
            lake.commit(f"2026-11-0{words[0]}", {"key": f"run {made}", "handles": handles})
        elif operation == "wait":
            now += int(words[0]) * DAY_NS  # type: ignore[call-overload]
        elif operation == "sweep":
            before = {e.path for e in lake.store.list()}
            swept = sweep(lake, now, dry_run=bool(words[0]))
            after = {e.path for e in lake.store.list()}
            lost = {*swept.steps, *swept.objects}
            assert before - after == (set() if words[0] else lost)
            assert not any(path.startswith(("days/", "raw/", "lake")) for path in lost)
        assert gone(lake, "days") == gone(lake, "steps") == set()
    for days in (31, 38):
        sweep(lake, now + days * DAY_NS, dry_run=False)
    left = {e.path for e in lake.store.list("objects")}
    assert left == named(lake, "days") | named(lake, "steps"), "what nobody needs is gone in the end"
    assert all(named(lake, "days") & set(objects_in(lake.store.read(e.path))) for e in lake.store.list("steps"))


def finish(lake: Lake, key: str, some: list[int], now: int) -> None:
    path = f"steps/test/{key}.json"
    there = lake.store.exists(path)
    run_step(lake, "test", key, lambda: Step({f"{TABLE}/{c}": make(lake, c) for c in some}))
    if not there:
        written_at(lake, path, now)


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    yield Lake.open(str(tmp_path / "lake"))


def condemned(lake: Lake) -> str:
    """An object that nothing has named for a week; its path."""
    path = make(lake, 1).parts[0].path
    assert sweep(lake, START, dry_run=False).waiting == {path: 9}
    return path


def test_a_step_that_is_written_while_objects_go_has_them_back(lake: Lake) -> None:
    path = condemned(lake)

    def write_step(moment: str, operation: str, at: str) -> None:
        # The worst moment: the writer saw the object, and looks after its step is written, just before it goes.
        if (moment, operation, at) == ("before", "delete", path) and not quiet.store.exists("steps/test/k.json"):
            run_step(quiet, "test", "k", lambda: Step({TABLE: make(quiet, 1)}))

    quiet = lake
    sweep(watched(lake, write_step), START + 7 * DAY_NS, dry_run=False)
    assert gone(lake, "steps") == set() and named(lake, "steps") == {path}


def test_a_step_that_is_written_after_its_object_went_is_made_once_more(lake: Lake) -> None:
    path = condemned(lake)
    tries = []

    def compute() -> Step:
        handle = make(lake, 1)  # it is there, so nothing is written
        if not tries:
            sweep(lake, START + 7 * DAY_NS, dry_run=False)
            assert not lake.store.exists(path)
        tries.append(1)
        return Step({TABLE: handle})

    run_step(lake, "test", "k", compute)
    assert len(tries) == 2 and gone(lake, "steps") == set()


def test_a_commit_that_is_written_while_objects_go_has_them_back(lake: Lake) -> None:
    path = condemned(lake)

    def commit(moment: str, operation: str, at: str) -> None:
        if (moment, operation, at) == ("before", "delete", path) and quiet.head("2026-11-01") is None:
            quiet.commit("2026-11-01", {"key": "a", "handles": {TABLE: make(quiet, 1)}})

    quiet = lake
    sweep(watched(lake, commit), START + 7 * DAY_NS, dry_run=False)
    assert gone(lake, "days") == set() and named(lake, "days") == {path}


def watched(lake: Lake, watch: Watch) -> Lake:
    return Lake.open(lake.store.url, watch=watch)


@pytest.mark.parametrize("text", [b"", b'{"key":"a","handles":{"t":{"pa'])
def test_nothing_goes_while_a_commit_cannot_be_read(lake: Lake, text: bytes) -> None:
    path = condemned(lake)
    lake.store.replace("days/2026-11-01/1.json", text)
    with pytest.raises(LayoutError, match=r"days/2026-11-01/1\.json: expected a commit") as caught:
        sweep(lake, START + 90 * DAY_NS, dry_run=False)
    assert "python -m flows.verify --repair" in str(caught.value)
    assert lake.store.exists(path)


def test_what_a_commit_names_beside_its_handles_stays(lake: Lake) -> None:
    prices = make(lake, 5)
    lake.commit("2026-11-01", {"key": "a", "handles": {}, "prices": prices.to_dict()})
    for days in (0, 8, 90):
        assert sweep(lake, START + days * DAY_NS, dry_run=False).objects == {}
    assert lake.missing([prices]) == []


@pytest.mark.parametrize("text", [b"", b"[]", b'{"objects/x":true}', b"null"])
def test_a_note_that_cannot_be_read_begins_anew(lake: Lake, text: bytes) -> None:
    path = condemned(lake)
    lake.store.replace(RECORD, text)
    later = START + 90 * DAY_NS
    assert sweep(lake, later, dry_run=False).waiting == {path: 9}
    assert json.loads(lake.store.read(RECORD)) == {path: later}


def test_old_leases_go_and_the_newest_stays(lake: Lake) -> None:
    for n in (1, 2, 3):
        lake.store.create(f"leases/2026-11-01/{n}.json", b"{}")
    assert list(sweep(lake, START, dry_run=False).leases) == [f"leases/2026-11-01/{n}.json" for n in (1, 2)]
    assert [e.path for e in lake.store.list("leases")] == ["leases/2026-11-01/3.json"]
