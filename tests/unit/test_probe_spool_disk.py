"""The spool on disks that are full, closed, or in the way: rows are lost and counted, and nothing is raised."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from pathlib import Path

import pytest

from seedance.probe.spool import HOUR_NS, Spool
from tests.spools import can_mount, lines, ranks, script, segments, small_disk
from tests.spools import stated as row

WAYS = ["rlimit", "disk"] if can_mount() else ["rlimit"]
"""A limit on the size of a file is had everywhere, a small disk where this user may mount one."""

FULL = """
import json, logging, os, resource, signal, sys
from pathlib import Path
from seedance.probe.spool import Spool
folder, way, limit, keep_torn = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "torn"
logging.basicConfig(level=logging.WARNING)
if way == "rlimit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
else:
    (folder / "ballast").write_bytes(bytes(200_000))
if keep_torn:
    def refuse(fd, size): raise PermissionError(1, "not this file")
    os.ftruncate = refuse
spool = Spool(folder / "spool", "n")
from time import time_ns
def row(n): return ("raw_telemetry__jobs", {"stated_at_utc": time_ns(), "rank": n, "name": "x" * 100})
kept = []
for first in range(0, 2000, 20):
    kept.append((first, spool.write([row(n) for n in range(first, first + 20)])))
full = spool.dropped_rows
if way == "rlimit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
else:
    (folder / "ballast").unlink()
after = spool.write([row(n) for n in range(2000, 2020)])
spool.close()
print(json.dumps({"kept": kept, "full": full, "after": after, "dropped": spool.dropped_rows, "written": spool.written_rows}))
"""


@pytest.mark.parametrize("torn", ["whole", "torn"])
@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_costs_rows_and_no_more(way: str, torn: str, tmp_path: Path) -> None:
    if way == "disk":
        with small_disk(tmp_path / "disk") as folder:
            done = script(FULL, folder, way, 0, torn)
            _check_full(folder / "spool", done, torn)
    else:
        _check_full(tmp_path / "spool", script(FULL, tmp_path, way, 30_011, torn), torn)


def _check_full(folder: Path, done: subprocess.CompletedProcess[str], torn: str) -> None:
    told = json.loads(done.stdout)
    assert told["after"] == 20 and told["full"] == told["dropped"] > 1000
    assert told["written"] + told["dropped"] == 2020
    assert done.stderr.count("Rows of telemetry are dropped and counted") == 1
    found, lost, cut = [], 0, 0
    for path in segments(folder, "closed"):
        data = path.read_bytes()
        assert data.endswith(b"\n")
        for line in data.splitlines()[1:]:
            try:
                value = json.loads(line)
            except ValueError:
                cut += 1
                continue
            if isinstance(value, list):
                found.append(value[1]["rank"])
            else:
                lost += value["lost_rows"]
    expected = [n for first, kept in told["kept"] for n in range(first, first + kept)]
    assert found == [*expected, *range(2000, 2020)]
    assert lost == told["dropped"]
    assert cut <= (1 if torn == "torn" else 0)


def test_no_permission(tmp_path: Path) -> None:
    text = """
import json, logging, os, sys
from pathlib import Path
from seedance.probe.spool import Spool
folder = Path(sys.argv[1])
logging.basicConfig(level=logging.WARNING)
read, write = os.pipe()
child = os.fork()
if child == 0:
    # As somebody whom permissions hold.
    if os.geteuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    spool = Spool(folder / "spool", "n")
    def row(n): return ("raw_telemetry__jobs", {"stated_at_utc": 10**18, "rank": n})
    counts = [spool.write([row(n)]) for n in range(3)]
    os.write(write, b"x")
    while not (folder / "go").exists(): pass
    counts.append(spool.write([row(3)]))
    spool.close()
    print(json.dumps([counts, spool.dropped_rows]), flush=True)
    os._exit(0)
os.read(read, 1)
folder.chmod(0o777)
(folder / "go").touch()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    folder = tmp_path / "closed-to-others"
    folder.mkdir()
    if os.geteuid() == 0:  # so that others come this far
        for place in (tmp_path, *tmp_path.parents):
            if not place.stat().st_mode & 0o001:
                place.chmod(0o755)
    folder.chmod(0o555)
    done = script(text, folder)
    assert json.loads(done.stdout) == [[0, 0, 0, 1], 3]
    assert done.stderr.count("PermissionError: Permission denied") == 1
    assert lines(folder / "spool", "closed") == [
        {"lost_rows": 3},
        ["raw_telemetry__jobs", {"stated_at_utc": 10**18, "rank": 3}],
    ]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("x")
    with Spool(tmp_path / "spool", "n") as spool:
        assert spool.write([row(0)]) == 0
        assert spool.dropped_rows == 1


def test_a_segment_that_cannot_be_closed_is_closed_later(tmp_path: Path) -> None:
    with Spool(tmp_path, "n") as spool:
        (tmp_path / "closed").write_text("in the way")
        spool.write([row(0, 7 * HOUR_NS)])
        spool.rotate()
        assert ranks(tmp_path) == [0] and spool.dropped_rows == 0
        (tmp_path / "closed").unlink()
        spool.rotate()
        assert ranks(tmp_path) == [] and ranks(tmp_path, "closed") == [0]


def test_log_goes_to_the_probe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path, "n", limit_bytes=0)
    with caplog.at_level(logging.WARNING, "seedance.probe"):
        for n in range(3):
            spool.write([row(n)])
    assert [(r.name, r.levelname) for r in caplog.records] == [("seedance.probe", "WARNING")]
    assert spool.dropped_rows == 3 and segments(tmp_path) == []
