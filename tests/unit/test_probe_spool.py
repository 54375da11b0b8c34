"""The spool that the probe writes to: what is on disk after each write, and that nothing of the disk reaches the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seedance.probe import spool as spools
from seedance.probe.spool import HOUR_NS, SEGMENT, Spool, clean_node, clean_text, hour_of, hour_text, is_alive
from seedance.schema import INSTANT, TELEMETRY
from tests.spools import ROOT, lines, ranks, script, segments
from tests.spools import stated as row

STEPS = "raw_telemetry__step_windows"
SAMPLES = "raw_telemetry__device_samples"


def test_the_clocks_are_those_of_the_declarations() -> None:
    assert {
        name: next(k for k in spec.key if spec[k].type == INSTANT) for name, spec in TELEMETRY.items()
    } == spools.CLOCKS


def test_the_resident_part_is_light(tmp_path: Path) -> None:
    text = """
import sys
from seedance.probe.spool import Spool
spool = Spool(sys.argv[1], "n")
assert spool.write([("raw_telemetry__jobs", {"stated_at_utc": 10**18})]) == 1
spool.close()
heavy = {"pyarrow", "fsspec", "numpy", "torch", "asyncio", "subprocess", "seedance.schema"} & set(sys.modules)
assert not heavy, heavy
"""
    script(text, tmp_path)


def test_a_write_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Spool(tmp_path, "node-a") as spool:
        assert spool.write([row(0)]) == 1
        sizes: list[int] = []
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: sizes.append(len(data)) or real(fd, data))
        assert spool.write([row(n) for n in range(1, 500)]) == 499
        monkeypatch.undo()
        assert len(sizes) == 1
        assert ranks(tmp_path) == list(range(500))
        assert (spool.written_rows, spool.dropped_rows) == (500, 0)
    assert segments(tmp_path) == segments(tmp_path, "writers") == []
    assert ranks(tmp_path, "closed") == list(range(500))


def test_the_header(tmp_path: Path) -> None:
    with Spool(
        tmp_path, "ip-10.eu/ü", cloud="aws", instance_id="i-\udc80", instance_type=None, period_ns=5, clock_offset_ns=-7
    ) as spool:
        spool.write([row(0)])
    (path,) = segments(tmp_path, "closed")
    header = json.loads(path.read_bytes().splitlines()[0])
    assert header.pop("started") > 0 and header.pop("boot_id") and header.pop("pid_namespace").startswith("pid:")
    assert header == {
        "seedance_spool": 1,
        "node": "ip-10.eu--",
        "cloud": "aws",
        "instance_id": "i-\\udc80",
        "instance_type": None,
        "period_ns": 5,
        "clock_offset_ns": -7,
        "pid": os.getpid(),
    }
    name = SEGMENT.fullmatch(path.name)
    assert name is not None and name["writer"] == spool.writer


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [("", "n"), ("-a", "n-a"), ("a b", "a-b"), ("x" * 300, "x" * 128), ("\0/\n", "n---"), ("gpu-1.a_b", "gpu-1.a_b")],
)
def test_node_names(name: str, cleaned: str) -> None:
    assert clean_node(name) == cleaned == clean_node(cleaned)


@pytest.mark.parametrize(
    ("table", "at", "hour"),
    [
        (STEPS, 7 * HOUR_NS, 7),
        (STEPS, 8 * HOUR_NS - 1, 7),
        (SAMPLES, 7 * HOUR_NS, 6),  # a reading belongs where it ends
        (SAMPLES, 7 * HOUR_NS + 1, 7),
        (STEPS, True, None),
        (STEPS, None, None),
        (STEPS, 7.0, None),
        (STEPS, -1, None),
        (STEPS, 2**63, None),
        ("nothing", 7 * HOUR_NS, None),
        (None, 7 * HOUR_NS, None),
    ],
)
def test_hours(table: Any, at: Any, hour: int | None) -> None:
    assert hour_of(table, {"window_start_utc": at, "sampled_at_utc": at}) == hour
    assert hour_of(table, at) is None


def test_each_hour_has_its_segment(tmp_path: Path) -> None:
    now = time.time_ns() // HOUR_NS
    with Spool(tmp_path, "n") as spool:
        # The last instant of an hour and the first of the next, out of order, in one write.
        assert (
            spool.write([row(1, (now + 1) * HOUR_NS), row(0, (now + 1) * HOUR_NS - 1), row(2, (now + 1) * HOUR_NS)])
            == 3
        )
        by_hour = {SEGMENT.fullmatch(p.name)["hour"]: p for p in segments(tmp_path)}  # type: ignore[index]
        assert list(by_hour) == [hour_text(now), hour_text(now + 1)]
        assert [len(p.read_bytes().splitlines()) - 1 for p in by_hour.values()] == [1, 2]


def test_hours_that_are_over_are_closed(tmp_path: Path) -> None:
    now = time.time_ns() // HOUR_NS
    with Spool(tmp_path, "n") as spool:
        spool.write([row(0, (now - 2) * HOUR_NS)])
        spool.write([row(1, (now - 2) * HOUR_NS)])
        assert len(segments(tmp_path)) == 1  # as long as rows of it come
        spool.write([row(2)])
        assert ranks(tmp_path) == [2] and ranks(tmp_path, "closed") == [0, 1]
        # The clock went back: its rows get a segment of their own, and none is written twice.
        spool.write([row(3, (now - 2) * HOUR_NS)])
        spool.rotate()
        assert ranks(tmp_path) == [2] and ranks(tmp_path, "closed") == [0, 1, 3]
        assert len(segments(tmp_path, "closed")) == 2


def test_a_jumping_clock_keeps_few_files_open(tmp_path: Path) -> None:
    now = time.time_ns() // HOUR_NS
    with Spool(tmp_path, "n") as spool:
        assert spool.write([row(n, (now + n) * HOUR_NS) for n in range(50)]) == 50
        assert len(segments(tmp_path)) == spools.MOST_OPEN
        # Back and forth over hours that are still open makes no new files.
        for n in (49, 48, 49, 47):
            spool.write([row(n, (now + n) * HOUR_NS)])
    assert len(segments(tmp_path, "closed")) == 50
    assert sorted(ranks(tmp_path, "closed")) == sorted([*range(50), 49, 48, 49, 47])


def test_a_row_without_an_hour_goes_to_the_present_one(tmp_path: Path) -> None:
    with Spool(tmp_path, "n") as spool:
        rows: list[Any] = [("nothing", {}), (STEPS, {"window_start_utc": "x"}), (STEPS, 7)]
        assert spool.write(rows) == 3
    (path,) = segments(tmp_path, "closed")
    assert hour_text(time.time_ns() // HOUR_NS) in path.name
    assert lines(tmp_path, "closed") == [list(r) for r in rows]


def test_values_that_json_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Slow:
        def __str__(self) -> str:
            raise AssertionError("text of a tensor would wait for its device")

        __repr__ = __str__

    circle: list[Any] = []
    circle.append(circle)
    with Spool(tmp_path, "n") as spool:
        good = {"labels": MappingProxyType({"a": "b"}), "quality": Decimal("0.5"), "x": Slow(), "y": (1, 2)}
        assert spool.write([(STEPS, good)]) == 1
        assert spool.write([(STEPS, {"x": circle}), (STEPS, {("a",): 1}), (STEPS, {"n": 10**5000})]) == 0  # type: ignore[dict-item]
        assert spool.dropped_rows == 3
    assert lines(tmp_path, "closed")[0] == [STEPS, {"labels": {"a": "b"}, "quality": "0.5", "x": "<Slow>", "y": [1, 2]}]
    assert len(caplog.records) == 1 and "cannot be written as JSON" in caplog.text


@given(st.text(st.characters(), max_size=50))
@example("a\nb\0\r\u2028\x85")
@example("\ud800 lone")
@example("\ud800\udc80")
@example("x" * 1_000_000)
def test_any_text_is_one_line(text: str) -> None:
    line = spools._line(STEPS, {"job_id": text})
    assert line is not None and line.count(b"\n") == 1 and line.endswith(b"\n") and b"\0" not in line
    # Two lone surrogates that stand together are one character in JSON.
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert json.loads(line) == [STEPS, {"job_id": whole}]
    cleaned = clean_text(text)
    assert cleaned is not None and cleaned.encode("utf-8").decode() == cleaned
    if text.isascii():
        assert cleaned == text


def test_threads(tmp_path: Path) -> None:
    with Spool(tmp_path, "n") as spool:

        def work(first: int) -> None:
            for n in range(first, first + 200):
                assert spool.write([row(n)]) == 1

        threads = [threading.Thread(target=work, args=(i * 200,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(ranks(tmp_path, "closed")) == list(range(1600))


def test_a_write_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ctrl-C leaves is a line that does not spoil the next one."""
    with Spool(tmp_path, "n") as spool:
        spool.write([row(0)])
        real = os.write

        def interrupted(fd: int, data: bytes) -> int:
            real(fd, data[:20])
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spool.write([row(1)])
        monkeypatch.undo()
        assert spool.write([row(2)]) == 1
    (path,) = segments(tmp_path, "closed")
    _, first, torn, last = path.read_bytes().splitlines()
    assert (json.loads(first)[1]["rank"], len(torn), json.loads(last)[1]["rank"]) == (0, 20, 2)


def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    with Spool(tmp_path, "n") as spool:
        spool.write([row(0)])
        mark = tmp_path / "writers" / spool.writer
        child = os.fork()
        if not child:
            try:
                ok = spool.write([row(1)]) == 0
                spool.rotate()
                spool.close()
            finally:
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert spool.write([row(2)]) == 1
        assert mark.exists() and _is_locked(mark)
        assert ranks(tmp_path) == [0, 2]


def _is_locked(mark: Path) -> bool:
    """As another process finds it."""
    text = "import pathlib, sys; from seedance.probe import spool; print(spool._is_locked(pathlib.Path(sys.argv[1])))"
    return script(text, mark).stdout == "True\n"


def test_a_writer_lives_until_it_ends(tmp_path: Path) -> None:
    text = """
import sys, time
from seedance.probe.spool import Spool
spool = Spool(sys.argv[1], "n")
spool.write([("raw_telemetry__jobs", {"stated_at_utc": time.time_ns()})])
print(spool.writer, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", text, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        mark = tmp_path / "writers" / process.stdout.readline().strip()
        assert is_alive(mark)
        # A process in another container has no number here that says anything; its lock does.
        facts = json.loads(mark.read_bytes())
        for change in (
            {"pid_namespace": "pid:[1]"},
            {"pid": 2**22},
            {"started": None},
            {"started": 1},
            {"boot_id": "x"},
        ):
            mark.write_text(json.dumps(facts | change))
            assert is_alive(mark)
        mark.write_bytes(b"")
        assert is_alive(mark)
        mark.write_text(json.dumps(facts))
        process.send_signal(signal.SIGKILL)
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert not is_alive(mark)  # though nobody has asked for its status yet
    assert not is_alive(mark)
    assert not is_alive(tmp_path / "writers" / "nobody")


def test_looking_at_a_writer_of_this_process_does_not_unlock_it(tmp_path: Path) -> None:
    others = set(spools._OURS)  # of tests that ran in this process
    with Spool(tmp_path, "n") as spool:
        spool.write([row(0)])
        mark = tmp_path / "writers" / spool.writer
        assert is_alive(mark)
        assert _is_locked(mark)
    assert not is_alive(mark) and set(spools._OURS) <= others


def test_after_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path, "n")
    spool.close()
    assert not tmp_path.joinpath("open").exists()
    spool.write([row(0)])
    spool.rotate()
    spool.close()
    assert spool.dropped_rows == 1 and "the spool is closed" in caplog.text
    assert lines(tmp_path) == lines(tmp_path, "closed") == []


def test_the_folder_is_deleted_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "spool"
    with Spool(folder, "n") as spool:
        spool.write([row(0), row(1)])
        shutil.rmtree(folder)
        assert spool.write([row(2)]) == 1
        assert spool.dropped_rows == 2  # told, though they had been written
        assert lines(folder) == [{"lost_rows": 2}, [STEPS, row(2, lines(folder)[1][1]["window_start_utc"])[1]]]
        assert is_alive(folder / "writers" / spool.writer) and _is_locked(folder / "writers" / spool.writer)
        shutil.rmtree(folder)
    assert spool.dropped_rows == 3
    assert len(caplog.records) == 1
    assert "was deleted. Rows of telemetry are dropped and counted" in caplog.text and "SEEDANCE_SPOOL" in caplog.text


def test_the_limit_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Spool(tmp_path, "n", limit_bytes=20_000) as spool:
        written = sum(spool.write([row(n)]) for n in range(1000))
        assert 0 < written < 300 and spool.dropped_rows == 1000 - written
        assert spools.bytes_below(tmp_path) <= 20_000
        # Somebody else's bytes count as well, and room is used again.
        (path,) = segments(tmp_path)
        path.unlink()
        (tmp_path / "batches").mkdir()
        (tmp_path / "batches" / "1").write_bytes(bytes(15_000))
        again = sum(spool.write([row(n)]) for n in range(1000))
        assert 0 < again < 60
        assert lines(tmp_path)[0] == {"lost_rows": 1000}
    assert len(caplog.records) == 1 and "it may hold 20,000 bytes" in caplog.text
