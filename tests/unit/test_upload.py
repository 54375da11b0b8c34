"""Spools to shards: which rows go, under which names, and what stays behind."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedance import upload as uploads
from seedance.cli import main
from seedance.errors import StoreError
from seedance.probe.spool import GRACE_NS, HOUR_NS, Spool
from seedance.schema import JOBS, OP_WINDOWS, STEP_WINDOWS, TELEMETRY, Table
from seedance.shard import ShardName, parse_name, read_shard
from seedance.upload import Uploaded, upload
from tests.shard_tables import NODE, ROWS, START, jobs, row, steps
from tests.spools import FACTS, examined, left, refused, tables, write

AFTER = START + HOUR_NS + GRACE_NS


# --- which hours go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alive", "held", "final", "after_ns", "due"),
    [
        (False, False, False, -1, False),
        (False, False, False, 0, True),
        (False, False, True, -1, True),
        (True, False, True, -1, False),
        (True, False, False, GRACE_NS - 1, False),
        (True, False, False, GRACE_NS, True),
        (True, True, False, GRACE_NS, False),
        (True, True, True, uploads.PATIENCE_NS - 1, False),
        (True, True, False, uploads.PATIENCE_NS, True),
    ],
)
def test_when_an_hour_goes(alive: bool, held: bool, final: bool, after_ns: int, due: bool, tmp_path: Path) -> None:
    write(tmp_path, (JOBS, row(JOBS)))
    now = START + HOUR_NS + after_ns
    with Spool(tmp_path, NODE) as other:
        if alive:
            other.write([(JOBS.name, row(JOBS, rank=1, stated_at_utc=START + (0 if held else 5 * HOUR_NS)))])
        done = upload(tmp_path, str(tmp_path / "drop"), final=final, now_ns=now)
        if alive:  # it goes on where it was, whatever was sent
            other.write([(JOBS.name, row(JOBS, rank=2, stated_at_utc=START + (0 if held else 5 * HOUR_NS)))])
    assert done.shards == due and done.problem is None
    rest = upload(tmp_path, str(tmp_path / "drop"), final=True, now_ns=now)
    assert done.rows + rest.rows == 1 + 2 * alive
    examined(tmp_path / "drop")


def test_rows_that_come_late_get_a_shard_of_their_own(tmp_path: Path) -> None:
    for first in (0, 3, 6):
        write(tmp_path, *((STEP_WINDOWS, r) for r in steps(3, first=first)))
        assert upload(tmp_path, str(tmp_path / "drop"), now_ns=AFTER).rows == 3
    found = examined(tmp_path / "drop")
    assert len({s.name.seq for s in found}) == len(found) == 3


def test_a_clock_that_goes_back_repeats_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setattr(time, "time_ns", lambda: 1000)
    for rank in range(3):
        write(tmp_path, (JOBS, row(JOBS, rank=rank)))
        assert upload(tmp_path, str(file), final=True).problem is not None
    assert sorted(p.name for p in (tmp_path / "batches").iterdir()) == ["1000", "1001", "1002"]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, (JOBS, row(JOBS)))
    names = ["closed/notes.txt", "open/notes.txt", "batches/notes.txt", "closed/1-1-00000000-2026-99-99T00-0.jsonl"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert upload(tmp_path, str(tmp_path / "drop"), final=True).rows == 1
    assert left(tmp_path) == sorted(
        [*names, *(str(p.relative_to(tmp_path)) for p in tmp_path.glob("drop/**/*.parquet"))]
    )


# --- what is left of the dead ----------------------------------------------------------------------------------------


def dead_writer(folder: Path, *rows: tuple[Table, Any]) -> None:
    """Rows of a process that was killed: an open segment and a mark."""
    child = os.fork()
    if not child:
        spool = Spool(folder, NODE, **FACTS)
        spool.write([(spec.name, r) for spec, r in rows])
        os.kill(os.getpid(), 9)
    assert os.waitpid(child, 0)[1] == 9


def test_segments_of_the_dead_are_adopted(tmp_path: Path) -> None:
    dead_writer(tmp_path, (JOBS, row(JOBS)))
    (segment,) = (tmp_path / "open").iterdir()
    with segment.open("ab") as file:
        file.write(b'["raw_telemetry__jobs",{"job')
    (tmp_path / "open" / f".new-{segment.name}").write_text("half a hea")
    done = upload(tmp_path, str(tmp_path / "drop"), now_ns=AFTER)
    assert (done.rows, done.torn_lines) == (1, 1)
    assert [name for name in left(tmp_path) if not name.startswith("drop")] == []


def test_a_mark_that_is_being_made_is_left_for_a_while(tmp_path: Path) -> None:
    mark = tmp_path / "writers" / ".new-1-1-00000000"
    mark.parent.mkdir()
    mark.touch()
    upload(tmp_path, str(tmp_path / "drop"))
    assert mark.exists()
    os.utime(mark, ns=(0, 0))
    upload(tmp_path, str(tmp_path / "drop"))
    assert not mark.exists()


def test_batches_that_were_being_made_or_removed(tmp_path: Path) -> None:
    write(tmp_path, (JOBS, row(JOBS)))
    write(tmp_path, (JOBS, row(JOBS, rank=1)))
    first, _ = sorted((tmp_path / "closed").iterdir())
    for name in (".new-17", ".done-16"):
        (tmp_path / "batches" / name).mkdir(parents=True)
    shutil.copy(first, tmp_path / "batches" / ".done-16" / first.name)  # sent already
    first.rename(tmp_path / "batches" / ".new-17" / first.name)
    assert upload(tmp_path, str(tmp_path / "drop"), final=True).rows == 2
    assert list((tmp_path / "batches").iterdir()) == []


# --- the drop folder -------------------------------------------------------------------------------------------------


def waiting(folder: Path, *rows: tuple[Table, Any]) -> None:
    """The rows in a batch that no drop folder took."""
    write(folder, *rows)
    file = folder / "file"
    file.write_text("a drop folder cannot be here")
    done = upload(folder, str(file), final=True)
    assert done.problem is not None and done.shards == 0
    file.unlink()


def test_a_batch_gives_the_same_bytes_each_time(tmp_path: Path) -> None:
    every = [(TELEMETRY[table], r) for table, rows in ROWS.items() for r in rows]
    # Several writers, some of whose rows have one key: which of them goes must not depend on how a folder is listed.
    for n in range(5):
        write(tmp_path / "a", *((JOBS, r | {"name": f"name {n}"}) for r in jobs()))
    waiting(tmp_path / "a", *every)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = []
    for spool in ("a", "b"):
        assert upload(tmp_path / spool, str(tmp_path / f"drop-{spool}")).shards == 6
        drop = tmp_path / f"drop-{spool}"
        found.append({str(p.relative_to(drop)): p.read_bytes() for p in drop.rglob("*.parquet")})
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize("there", ["same", "cut", "unreadable"])
def test_a_shard_that_is_there_already(
    there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(tmp_path / "a", (JOBS, row(JOBS)))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    upload(tmp_path / "a", str(tmp_path / "drop"))
    (shard,) = (tmp_path / "drop").rglob("*.parquet")
    data = shard.read_bytes()
    if there == "cut":
        shard.write_bytes(data[:-1])
    if there == "unreadable":  # a drop folder that may be written only

        def get(store: Any, path: str) -> bytes:
            raise StoreError("403", url=store.url, path=path)

        monkeypatch.setattr(uploads.Store, "get", get)
    done = upload(tmp_path / "b", str(tmp_path / "drop"))
    assert (done.shards, done.problem, done.waiting_batches) == (1, None, 0)
    assert shard.read_bytes() == data
    assert ("are not those of its name: replaced" in caplog.text) == (there == "cut")
    examined(tmp_path / "drop")


def test_a_drop_folder_that_refuses_keeps_the_batch(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    write(tmp_path / "spool", (JOBS, row(JOBS)))
    for _ in range(2):
        done = upload(tmp_path / "spool", str(file), final=True)
        assert (done.shards, done.rows, done.waiting_batches) == (0, 0, 1)
        assert done.problem is not None and "is a file" in done.problem
    unknown = upload(tmp_path / "spool", "nothing://bucket/x", final=True)
    assert unknown.problem is not None and "no file system for this URL" in unknown.problem
    assert upload(tmp_path / "spool", str(tmp_path / "drop")).rows == 1


def test_a_drop_folder_that_hangs_costs_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "spool", (JOBS, row(JOBS)))
    with monkeypatch.context() as patched:
        patched.setattr(uploads.Store, "create", lambda *_: time.sleep(2))
        begin = time.monotonic()
        done = upload(tmp_path / "spool", str(tmp_path / "drop"), final=True, object_timeout_s=0.05)
        assert time.monotonic() - begin < 2
    assert done.waiting_batches == 1 and done.problem is not None and "no answer within 0.05 s" in done.problem
    assert upload(tmp_path / "spool", str(tmp_path / "drop")).rows == 1


def test_the_oldest_batches_are_dropped_above_a_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(4):
        waiting(tmp_path / "spool", (JOBS, row(JOBS, rank=rank)))
    sizes = [sum(f.stat().st_size for f in b.iterdir()) for b in sorted((tmp_path / "spool" / "batches").iterdir())]
    file = tmp_path / "file"
    file.write_text("x")
    done = upload(tmp_path / "spool", str(file), keep_bytes=sum(sizes[2:]))
    assert (done.dropped_batches, done.waiting_batches) == (2, 2)
    assert caplog.text.count("is dropped") == 2 and "Make the drop folder reachable" in caplog.text
    assert str(done) == "uploaded 0 rows in 0 shards, 2 batches dropped."
    upload(tmp_path / "spool", str(tmp_path / "drop"))
    assert [r["rank"] for r in tables(tmp_path / "drop")[JOBS.name]] == [2, 3]


def test_refused_rows_are_kept_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "REFUSED_BYTES", 40_000)
    for n in range(4):
        write(tmp_path, (JOBS, row(JOBS, rank=n, attempt=-1, name="x" * 15_000)))
        assert upload(tmp_path, str(tmp_path / "drop"), final=True).refused_rows == 1
    assert [json.loads(r["text"])[1]["rank"] for r in refused(tmp_path)] == [2, 3]


def test_refused_rows_that_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "refused").write_text("in the way")
    write(tmp_path, (JOBS, row(JOBS)), (JOBS, row(JOBS, attempt=-1)))
    done = upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert (done.rows, done.refused_rows) == (1, 1)
    assert "refused rows could not be kept" in caplog.text


def test_errors_name_the_spool(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no spool .* Expected the folder that the probe writes to") as caught:
        upload(tmp_path / "nothing", str(tmp_path))
    assert caught.value.url == str(tmp_path / "nothing")
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "open").write_text("in the way")
    with pytest.raises(StoreError, match=r"NotADirectoryError.* nothing that was not sent is lost") as caught:
        upload(tmp_path / "spool", str(tmp_path))
    assert caught.value.path == str(tmp_path / "spool" / "open")


def test_an_empty_spool(tmp_path: Path) -> None:
    assert upload(tmp_path, "nothing://is/asked/for") == Uploaded()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")  # which it would set
    spool, drop = tmp_path / "spool", tmp_path / "drop"
    words = ["upload", "--spool", str(spool), "--to"]
    assert main([*words, str(drop)]) == 1
    assert "seedance: upload: no spool" in capsys.readouterr().err
    now = time.time_ns()
    with Spool(spool, NODE) as live:
        live.write([(JOBS.name, row(JOBS, stated_at_utc=now))])
    (tmp_path / "file").write_text("x")
    assert main([*words, str(tmp_path / "file"), "--final"]) == 1
    told = capsys.readouterr()
    assert told.out == "uploaded 0 rows in 0 shards.\n"
    assert told.err.startswith(f"seedance: 1 batch(es) wait in {spool}: ")
    assert main([*words, str(drop), "--final", "--timeout", "5"]) == 0
    assert capsys.readouterr().out == "uploaded 1 rows in 1 shards.\n"
    assert len(list(drop.rglob("*.parquet"))) == 1


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=12), st.randoms(use_true_random=False))
def test_rows_arrive_once_however_they_are_spread(
    tmp_path_factory: pytest.TempPathFactory, spread: Any, random: Any
) -> None:
    """Over writers, hours and runs of the uploader."""
    base = tmp_path_factory.mktemp("spread")
    expected = []
    for n, (writer, hour) in enumerate(spread):
        with Spool(base / "spool", f"node-{writer % 2}", **FACTS) as spool:
            spool.write([(JOBS.name, row(JOBS, rank=n, stated_at_utc=START + hour * HOUR_NS))])
        expected.append((n, hour))
        if random.random() < 0.3:
            upload(base / "spool", str(base / "drop"), now_ns=START + random.randrange(7) * HOUR_NS)
    if spread:
        upload(base / "spool", str(base / "drop"), final=True, now_ns=START)
    found = []
    names: set[ShardName] = set()
    for path in (base / "drop").rglob("*.parquet"):
        name = parse_name(str(path))
        assert name not in names
        names.add(name)
        footer, rows = read_shard(path.read_bytes(), JOBS, where=path.name)
        found += [(rank, name.hour - 3) for rank in rows.column("rank").to_pylist()]
        assert footer.rows == pq.read_metadata(path).num_rows
    assert sorted(found) == expected
    shutil.rmtree(base)


def test_logs_go_to_the_uploader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, (OP_WINDOWS, ROWS[OP_WINDOWS.name][0] | {"calls": -1}))
    with caplog.at_level(logging.WARNING, "seedance.upload"):
        upload(tmp_path, str(tmp_path / "drop"), final=True)
    assert [r.name for r in caplog.records] == ["seedance.upload"]
