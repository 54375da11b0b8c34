"""The store and the lake on S3, against an emulator that enforces conditional puts."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import s3fs

from seedance.errors import Exists, StoreError
from seedance.schema import Table, number
from seedance.store import Entry, Store
from tasks.io.lake import Commit, Lake, Moved, Step
from tests import nights
from tests.fleet import build, tiny_spec, write_fleet

DAY = "2026-11-28"
REPORT = Table("report_test__daily", "one line", ("n",), (number("n", 64, "count", "number"),))
DATA_PATH = f"report/{REPORT.name}/usage_date={DAY}/data.parquet"
MULTIPART_BYTES = 101 << 20


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An S3 emulator of our own on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/moto-api/data.json", server)
        yield url
    finally:
        server.terminate()
        server.wait(20)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the emulator ended"
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer within 60 s")


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A bucket of this test."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"lake-{abs(hash(request.node.name)):x}"
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(bucket)
    yield f"s3://{bucket}/below"
    s3fs.S3FileSystem.clear_instance_cache()


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def commit_of(lake: Lake, key: str, *values: int) -> Commit:
    return lake.commit(DAY, {"key": key, "handles": {REPORT.name: lake.handle(REPORT, DAY, [numbers(*values)])}})


def published(lake: Lake) -> bytes:
    return lake.store.read(DATA_PATH)


def test_create_put_replace_and_list(url: str) -> None:
    store = Store(url)
    store.check()
    store.check()
    store.create("a/b", b"one")
    with pytest.raises(Exists, match="a/b exists already"):
        store.create("a/b", b"two")
    store.create("a/empty", b"")
    with pytest.raises(Exists):
        store.create("a/empty", b"")
    store.put("a/b", b"one")
    tag = store.replace("a/c/d", b"three")
    assert store.read("a/b") == b"one"
    entries = store.list("a")
    assert [(e.path, e.bytes) for e in entries] == [("a/b", 3), ("a/c/d", 5), ("a/empty", 0)]
    assert entries[1] == store.stat("a/c/d") == Entry("a/c/d", 5, tag)
    assert store.replace("a/c/d", b"four") != tag
    assert store.list("a", digest=True)[1].etag != tag
    assert store.folders("a") == ["c"]
    assert not store.exists("a/c")
    assert store.get("a/none") is None
    assert store.list("none") == []
    with pytest.raises(StoreError, match="no object a/none"):
        store.read("a/none")


def test_large_objects_are_created_once_too(url: str) -> None:
    store = Store(url)
    store.create("big", bytes(MULTIPART_BYTES))
    with pytest.raises(Exists):
        store.create("big", b"x" * MULTIPART_BYTES)
    entry = store.stat("big")
    assert entry is not None
    assert entry.bytes == MULTIPART_BYTES
    assert entry.etag == store.list("", digest=True)[0].etag


def test_of_many_writers_one_wins(url: str) -> None:
    store, gate = Store(url), threading.Barrier(6)

    def write(n: int) -> bool:
        gate.wait()
        try:
            store.create("days/1.json", f"{n}".encode())
        except Exists:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(write, range(6)))
    assert won.count(True) == 1
    assert store.read("days/1.json") == f"{won.index(True)}".encode()


def test_a_bucket_that_is_not_there_is_named(url: str) -> None:
    missing = url.replace("lake-", "none-")
    with pytest.raises(StoreError, match=r"cannot create lake\.check") as caught:
        Lake.open(missing)
    assert caught.value.url == missing


def test_a_store_that_ignores_the_condition_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = s3fs.S3FileSystem._pipe_file

    async def plain_put(self: s3fs.S3FileSystem, path: str, data: bytes, mode: str = "") -> object:
        return await honest(self, path, data)

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", plain_put)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match="has no conditional create"):
        Lake.open(url)


def test_steps_commits_and_report(url: str) -> None:
    lake = Lake.open(url, buckets=4)
    assert Lake.open(url).buckets == 4
    handle = lake.handle(REPORT, DAY, [numbers(2, 1)])
    lake.create_step("publish", "k", Step({REPORT.name: handle}, {"rows": 2}))
    stored = lake.step("publish", "k")
    assert stored is not None
    assert lake.read(stored.handles[REPORT.name], REPORT).column("n").to_pylist() == [1, 2]
    assert commit_of(lake, "a", 1, 2).n == 1
    assert lake.materialise(DAY) == [DATA_PATH]
    assert lake.materialise(DAY) == lake.repair() == []
    assert commit_of(lake, "b", 3).n == 2
    assert lake.materialise(DAY) == [DATA_PATH]
    assert lake.committed_days() == [DAY]


def test_of_two_commits_at_once_one_wins(url: str) -> None:
    gate = threading.Barrier(2)

    def hold(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "create") and path.startswith("days/"):
            gate.wait(20)

    def run(key: str) -> str:
        try:
            return commit_of(Lake.open(url, watch=hold), key, len(key)).key
        except Moved:
            return "moved"

    with ThreadPoolExecutor(2) as pool:
        results = sorted(pool.map(run, ("a", "bb")))
    head = Lake.open(url).head(DAY)
    assert head is not None
    assert head.n == 1
    assert results == sorted([head.key, "moved"])


def test_a_late_writer_is_repaired(url: str) -> None:
    lake = Lake.open(url)
    commit_of(lake, "a", 1)
    lake.materialise(DAY)
    old = published(lake)
    commit_of(lake, "b", 2)
    lake.materialise(DAY)
    new, record = published(lake), lake.store.read(f"report/_days/{DAY}.json")
    lake.store.replace(DATA_PATH, old)
    assert lake.repair() == [DATA_PATH]
    assert (published(lake), lake.store.read(f"report/_days/{DAY}.json")) == (new, record)
    assert lake.repair() == []


def test_a_whole_night_on_s3_publishes_the_bytes_of_a_night_on_disk(url: str, tmp_path: Path) -> None:
    spec = tiny_spec(13, spot=True, gap=True)
    write_fleet(build(spec), tmp_path / "fleet")
    nights.run(nights.settings_for(tmp_path / "fleet", tmp_path / "lake"), spec.day)
    settings = nights.settings_for(tmp_path / "fleet", tmp_path).model_copy(update={"lake": url})
    assert nights.run(settings, spec.day).failed == {}
    lake = tmp_path / "lake"
    paths = [p.relative_to(lake).as_posix() for p in (lake / "report").rglob("data.parquet")]
    same = {p: Store(url).read(p) == (lake / p).read_bytes() for p in paths if nights.QUALITY not in p}
    assert len(same) >= 5 and all(same.values())
    again = nights.run(settings, spec.day)
    assert (again.failed, again.repaired, again.causes) == ({}, [], {})
