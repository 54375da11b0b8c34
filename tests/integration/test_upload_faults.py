"""What a node goes through while its spool is sent: kills, full disks, dead and slow buckets, many processes at once.

Every row that a writer was told is written arrives in exactly one shard of the drop folder, and no other row does.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from seedance.errors import StoreError
from seedance.probe.spool import HOUR_NS, Spool
from seedance.schema import JOBS, STEP_WINDOWS, TELEMETRY
from seedance.shard import parse_name, read_footer, read_shard
from seedance.store import Store
from seedance.upload import upload
from tasks.collect import admit, collect_day
from tasks.core.shards import examine, settle
from tasks.io.lake import Lake
from tasks.settings import Settings
from tests import spools, stores
from tests.shard_tables import DAY, NODE, ROWS, START, jobs, row, steps

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fast() -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of runs are synced to it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def counted(drop: str | Path) -> Counter[tuple[str, int | None, int]]:
    """How often each row is in a drop folder: table, rank (of job rows and step windows), hour; every shard as collect
    judges it."""
    store = Store(str(drop))
    found: Counter[tuple[str, int | None, int]] = Counter()
    judged: dict[tuple[str, str, date, int], list[Any]] = {}
    for entry in store.list():
        name, data = parse_name(entry.path), store.read(entry.path)
        shard = examine(f"raw/{name.path}", name, data, last_day=date(2099, 1, 1))
        assert shard.reason is None
        judged.setdefault((name.table, name.producer, name.day, name.hour), []).append(shard)
        rows = read_shard(data, TELEMETRY[name.table], where=entry.path)[1]
        found.update((name.table, rank, name.hour) for rank in rows.column("rank").to_pylist())
    for same in judged.values():
        assert settle(same)[1:] == ({}, {})
    return found


def runner(what: str, work: Path) -> list[dict[str, Any]]:
    """What tests.integration.upload_runner says."""
    words = [sys.executable, "-m", "tests.integration.upload_runner", what, "--work", str(work)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def once(rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    """The rows, sorted by their words; none of them is there twice."""
    found = sorted((tuple(r) for r in rows), key=str)
    assert len(set(found)) == len(found)
    return found


# --- kills -----------------------------------------------------------------------------------------------------------


def test_a_writer_killed_at_every_step(fast: Path) -> None:
    *points, calm = runner("writer", fast)
    assert len(points) == len(calm["steps"]) > 30
    assert once(calm["rows"]) == sorted((("raw_telemetry__jobs", n) for n in range(16)), key=str)
    assert any(p["written"] == [] for p in points) and any(len(p["written"]) == 16 for p in points)
    for point in points:
        assert point["killed"] and point["status"] == 0, point
        ranks = {rank for _, rank in once(point["rows"])}
        # A write that was on its way may have come to disk, or not.
        assert {*point["written"]} <= ranks <= {*point["written"], *range(len(point["written"]) + 2)}, point
        # Its mark may be left, for a while, when it was just made.
        assert all("/writers/.new-" in name for name in point["left"]), point


def test_an_uploader_killed_at_every_step(fast: Path) -> None:
    *points, calm = runner("uploader", fast)
    assert len(points) == len(calm["steps"]) > 100
    kinds = {step.split()[0] for step in calm["steps"]}
    assert kinds >= {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.fsync", "open", "fcntl.flock"}
    expected = once(calm["rows"])
    assert len(expected) == 20 and calm["refused"] == 1
    for point in points:
        assert point["killed"] and point["status"] == 0, point
        assert once(point["rows"]) == expected, point
        # One shard a node, hour and table, whatever happened.
        assert len(point["shards"]) == len(calm["shards"]) == 4, point
        assert (point["refused"], len(point["left"])) == (1, 1), point


def test_uploaders_killed_one_after_another(fast: Path) -> None:
    runs = runner("chain", fast)
    assert sum(run["kills"] for run in runs) > 50
    for run in runs:
        assert run["status"] == 0 and once(run["rows"]) == once(runs[0]["rows"]), run
        assert (len(run["rows"]), len(run["shards"]), run["refused"], len(run["left"])) == (20, 4, 1, 1), run


BUSY = """
import json, os, sys
from seedance.probe.spool import Spool
spool = Spool(sys.argv[1], "node-a")
row = json.loads(sys.argv[2])
table, size = "raw_telemetry__jobs", 200
for first in range(0, 10**9, size):
    assert spool.write([(table, row | {"rank": n}) for n in range(first, first + size)]) == size
    os.write(1, b"%d\\n" % (first + size))
"""


@pytest.mark.parametrize("after_s", [0.05, 0.11, 0.23])
def test_a_writer_killed_in_the_middle_of_its_work(after_s: float, tmp_path: Path) -> None:
    words = [sys.executable, "-c", BUSY, str(tmp_path / "spool"), json.dumps(row(JOBS))]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        # The pipe holds more than is said in this time.
        time.sleep(after_s)
        process.kill()
        said += process.stdout.read()
    written = int(said.split()[-1])
    done = upload(tmp_path / "spool", str(tmp_path / "drop"), final=True)
    assert done.torn_lines <= 1 and done.refused_rows == 0
    found = counted(tmp_path / "drop")
    ranks = sorted(rank for _, rank, _ in found if rank is not None)
    assert ranks == list(range(len(ranks))) and set(found.values()) == {1}
    assert written <= len(ranks) <= written + 200


# --- disks -----------------------------------------------------------------------------------------------------------


LIMITED = """
import json, resource, signal, sys
from seedance.upload import upload
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
done = upload(sys.argv[1], sys.argv[2], final=True)
print(json.dumps([done.rows, done.refused_rows, done.problem]))
"""


def fill(spool: Path) -> None:
    """Good rows, and one that is refused."""
    with Spool(spool, NODE, **spools.FACTS) as writer:
        writer.write([(JOBS.name, r) for r in [*jobs(), row(JOBS, attempt=-1, name="x" * 4000)]])


def limited(spool: Path, drop: Path) -> list[Any]:
    """Upload where no file may grow above 1,000 bytes."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, spool, drop], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_drop_folder_without_space(tmp_path: Path) -> None:
    fill(tmp_path / "spool")
    rows, refused, problem = limited(tmp_path / "spool", tmp_path / "drop")
    assert (rows, refused) == (0, 0) and "File too large" in problem
    assert counted(tmp_path / "drop") == {}
    done = upload(tmp_path / "spool", str(tmp_path / "drop"))
    assert (done.rows, done.refused_rows, done.problem) == (2, 1, None)
    assert counted(tmp_path / "drop") == {(JOBS.name, None, 3): 2}


if spools.can_mount():

    def test_a_full_disk_under_the_drop_folder(tmp_path: Path) -> None:
        fill(tmp_path / "spool")
        with spools.small_disk(tmp_path / "disk") as disk:
            ballast = disk / "ballast"
            spools.fill_up(ballast)
            done = upload(tmp_path / "spool", str(disk / "drop"), final=True)
            assert done.problem is not None and "No space left on device" in done.problem
            ballast.unlink()
            assert upload(tmp_path / "spool", str(disk / "drop")).rows == 2
            assert counted(disk / "drop") == {(JOBS.name, None, 3): 2}

    def test_a_full_disk_under_the_spool(tmp_path: Path) -> None:
        """It can be emptied by nothing but an upload, so that must not need space."""
        with spools.small_disk(tmp_path / "disk") as disk:
            fill(disk / "spool")
            spools.fill_up(disk / "ballast")
            done = upload(disk / "spool", str(tmp_path / "drop"), final=True)
            assert (done.rows, done.refused_rows, done.problem) == (2, 1, None)
            assert counted(tmp_path / "drop") == {(JOBS.name, None, 3): 2}


# --- buckets ---------------------------------------------------------------------------------------------------------


def command(spool: Path, to: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    """`seedance upload --final` as a process."""
    line = [sys.executable, "-m", "seedance", "upload", "--spool", str(spool), "--to", to, "--final", *words]
    return subprocess.Popen(
        line, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def closed_port() -> Iterator[int]:
    """A port of this machine where nobody listens, and nobody will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def silent_port() -> Iterator[int]:
    """A port of this machine that takes connections and never says anything."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        yield server.getsockname()[1]


KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.mark.parametrize(
    ("port", "told"), [(closed_port, "Could not connect to the endpoint"), (silent_port, "no answer within 3 s")]
)
def test_a_dead_bucket_keeps_the_batch(port: Callable[[], Iterator[int]], told: str, tmp_path: Path) -> None:
    fill(tmp_path / "spool")
    for number in port():
        environment = KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{number}"}
        seconds = "60" if port is closed_port else "3"
        for _ in range(2):
            process = command(tmp_path / "spool", "s3://bucket/drop", "--timeout", seconds, **environment)
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out) == (1, "uploaded 0 rows in 0 shards.\n")
            assert "1 batch(es) wait" in err and told in err
    assert upload(tmp_path / "spool", str(tmp_path / "drop")).rows == 2


@pytest.mark.parametrize("url", stores.KINDS, indirect=True)
def test_every_kind_of_store(url: str, tmp_path: Path) -> None:
    every = [(table, r) for table, rows in ROWS.items() for r in rows if "rank" in TELEMETRY[table].names]
    with Spool(tmp_path / "spool", NODE, **spools.FACTS) as spool:
        spool.write(every)
    shutil.copytree(tmp_path / "spool" / "closed", tmp_path / "again" / "closed")
    assert upload(tmp_path / "spool", url, final=True).rows == len(every)
    found = counted(url)
    assert sum(found.values()) == len(every)
    # A shard that is there is not sent again, and is compared.
    seq = parse_name(Store(url).list()[0].path).seq
    batch = tmp_path / "again" / "batches" / str(seq)
    batch.parent.mkdir()
    (tmp_path / "again" / "closed").rename(batch)
    times = Store(url).written()
    done = upload(tmp_path / "again", url)
    assert (done.rows, done.problem) == (len(every), None)
    assert Store(url).written() == times and counted(url) == found


def two_shards(spool: Path) -> None:
    with Spool(spool, NODE, **spools.FACTS) as writer:
        writer.write([*((JOBS.name, r) for r in jobs()), *((STEP_WINDOWS.name, r) for r in steps())])


def store_port() -> int:
    return int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])


@pytest.mark.parametrize("url", ["s3"], indirect=True)
@pytest.mark.parametrize("when", ["asked", "answered"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_uploader_killed_at_a_put(url: str, when: str, number: int, tmp_path: Path) -> None:
    two_shards(tmp_path / "spool")
    running: list[subprocess.Popen[str]] = []
    with spools.Proxy(store_port(), number, when, lambda: [p.kill() for p in running]) as proxy:
        running.append(command(tmp_path / "spool", url, AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}"))
        running[0].communicate(timeout=60)
        assert (proxy.hits, running[0].returncode) == (1, -signal.SIGKILL)
    assert len(Store(url).list()) == number + (when == "answered")
    done = upload(tmp_path / "spool", url)
    assert (done.rows, done.shards, done.waiting_batches) == (5, 2, 0)
    assert len(Store(url).list()) == 2
    assert counted(url) == {(JOBS.name, None, 3): 2, (STEP_WINDOWS.name, 0, 3): 3}


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_an_answer_that_is_lost(url: str, tmp_path: Path) -> None:
    """The client asks again, is told that the object exists, and it is its own."""
    two_shards(tmp_path / "spool")
    with spools.Proxy(store_port(), 0, "answered", lambda: None) as proxy:
        process = command(tmp_path / "spool", url, AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}")
        out, err = process.communicate(timeout=60)
        assert proxy.hits == 1
    assert (process.returncode, out) == (0, "uploaded 5 rows in 2 shards.\n"), err
    assert counted(url) == {(JOBS.name, None, 3): 2, (STEP_WINDOWS.name, 0, 3): 3}


# --- many processes --------------------------------------------------------------------------------------------------


def test_uploaders_at_once(tmp_path: Path) -> None:
    for rank in range(40):
        with Spool(tmp_path / "spool", NODE, **spools.FACTS) as spool:
            spool.write([(JOBS.name, row(JOBS, rank=rank))])
    running = [command(tmp_path / "spool", str(tmp_path / "drop")) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0] * 4, said
    assert sorted(out for out, _ in said) == ["uploaded 0 rows in 0 shards.\n"] * 3 + [
        "uploaded 40 rows in 1 shards.\n"
    ]
    assert counted(tmp_path / "drop") == {(JOBS.name, rank, 3): 1 for rank in range(40)}


def test_an_uploader_does_not_wait_for_ever(tmp_path: Path) -> None:
    fill(tmp_path)
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with (tmp_path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        with pytest.raises(StoreError, match="another uploader has worked on spool") as caught:
            upload(tmp_path, str(tmp_path / "drop"), final=True, lock_timeout_s=0.2)
        assert (caught.value.url, caught.value.path) == (str(tmp_path), "lock")
    finally:
        release.set()
        thread.join()
    assert upload(tmp_path, str(tmp_path / "drop"), final=True).rows == 2


RANK = """
import json, os, sys, time
from pathlib import Path
from seedance.probe.spool import HOUR_NS, Spool
base, rank, job, step, hour = Path(sys.argv[1]), int(sys.argv[2]), *map(json.loads, sys.argv[3:6])
spool = Spool(base / "spool", "node-a", cloud="aws", instance_id="i-0a", instance_type="p4d.24xlarge")
end = (hour + 1) * HOUR_NS
spool.write([("raw_telemetry__jobs", job | {"rank": rank, "stated_at_utc": end - HOUR_NS})])
(base / f"ready-{rank}").touch()
while len(list(base.glob("ready-*"))) < 8:
    time.sleep(0.01)
for n in range(-30, 30):  # ten seconds each, over the boundary of an hour
    at = end + n * 10**10
    rows = [("raw_telemetry__step_windows", step | {"rank": rank, "window_start_utc": at})]
    if n % 10 == 0:
        rows.append(("raw_telemetry__jobs", job | {"rank": rank, "stated_at_utc": at}))
    assert spool.write(rows) == len(rows)
while rank > 3 and not (base / "go").exists():
    time.sleep(0.01)
assert spool.write([("raw_telemetry__jobs", job | {"rank": rank, "stated_at_utc": end - 1})]) == 1
spool.close()
assert "pyarrow" not in sys.modules
words = ["-m", "seedance", "upload", "--spool", base / "spool", "--to", base / "drop", "--final"]
os.execv(sys.executable, [sys.executable, *words])
"""


def test_eight_ranks_give_one_shard_a_node_hour_and_table(tmp_path: Path) -> None:
    """Each sends what is there when it ends; the last to end sends the hour."""
    hour = time.time_ns() // HOUR_NS
    facts = [json.dumps(x) for x in (row(JOBS), steps(1)[0], hour)]
    running = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank), *facts], cwd=ROOT) for rank in range(8)
    ]
    assert [process.wait(120) for process in running[:4]] == [0] * 4
    assert not (tmp_path / "drop").exists()  # the others live
    (tmp_path / "go").touch()
    assert [process.wait(120) for process in running[4:]] == [0] * 4
    found = counted(tmp_path / "drop")
    hours = [hour % 24, (hour + 1) % 24]
    expected = {(STEP_WINDOWS.name, rank, h): 30 for rank in range(8) for h in hours}
    expected |= {(JOBS.name, rank, h): 3 + 2 * (h == hours[0]) for rank in range(8) for h in hours}
    assert found == expected
    shards = list((tmp_path / "drop").rglob("*.parquet"))
    assert len(shards) == 4
    assert {read_footer(s).instance_id for s in shards} == {"i-0a"}
    assert [p.name for p in (tmp_path / "spool").rglob("*") if p.is_file()] == ["lock"]


# --- the pipeline ----------------------------------------------------------------------------------------------------


def test_collect_takes_the_shards(tmp_path: Path) -> None:
    every = [(table, r) for table, rows in ROWS.items() for r in rows]
    for part in range(3):
        with Spool(tmp_path / "spool", NODE, **spools.FACTS) as spool:
            spool.write(every[part::3])
    upload(tmp_path / "spool", str(tmp_path / "drop"), now_ns=START + HOUR_NS)
    lake = Lake.open(str(tmp_path / "lake"))
    settings = Settings(lake=lake.store.url, telemetry=str(tmp_path / "drop"))
    assert len(admit(lake, settings)) == 6
    facts = collect_day(lake, settings, DAY, last_day=date(2026, 11, 29))[0].facts
    assert (facts["rows_accepted"], facts["quarantined"], facts["mismatch"]) == (len(every), [], 0)
