"""The store and the lake on local disk, S3, Azure Blob Storage and Google Cloud Storage: one behaviour on all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from fsspec.asyn import sync_wrapper

from seedance.errors import Exists, StoreError
from seedance.schema import Table, number
from seedance.store import Entry, Store
from tasks.io.lake import Commit, Lake, Moved, Step
from tests import nights, stores
from tests.fleet import build, tiny_spec, write_fleet

DAY = "2026-11-28"
REPORT = Table("report_test__daily", "one line", ("n",), (number("n", 64, "count", "number"),))
DATA_PATH = f"report/{REPORT.name}/usage_date={DAY}/data.parquet"
ROOT = Path(__file__).resolve().parents[2]
SPEC = tiny_spec(13, spot=True, gap=True)
MULTIPART_BYTES = 101 << 20
"""More than S3, Azure and Google take in one request unless told to."""

# aiohttp warns of large bodies whatever their sender does; it is not shown outside of tests.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


on_all = pytest.mark.parametrize("url", stores.KINDS, indirect=True)
on_remote = pytest.mark.parametrize("url", stores.REMOTE, indirect=True)


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def commit_of(lake: Lake, key: str, *values: int) -> Commit:
    return lake.commit(DAY, {"key": key, "handles": {REPORT.name: lake.handle(REPORT, DAY, [numbers(*values)])}})


def published(lake: Lake) -> bytes:
    return lake.store.read(DATA_PATH)


def standing(lake: Lake) -> tuple[int, dict[str, str]]:
    """Commit and digests of a day's record; the tags beside them are new with every write on Azure."""
    record = json.loads(lake.store.read(f"report/_days/{DAY}.json"))
    assert record["etags"] == {DATA_PATH: lake.store.list("report", digest=True)[1].etag}
    return record["commit"], record["parts"]


@on_all
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
    assert [(e.path, e.bytes) for e in store.list()] == [("a/b", 3), ("a/c/d", 5), ("a/empty", 0), ("lake.check", 48)]
    assert entries[1] == store.stat("a/c/d")
    assert store.list("a", digest=True)[1] == store.stat("a/c/d", digest=True) == Entry("a/c/d", 5, tag)
    other = store.replace("a/c/d", b"other")
    assert store.list("a", digest=True)[1] == Entry("a/c/d", 5, other) and other != tag
    assert store.folders("a") == ["c"]
    assert not store.exists("a/c")
    assert store.get("a/none") is None
    assert store.list("none") == []
    with pytest.raises(StoreError, match="no object a/none"):
        store.read("a/none")
    now = time.time_ns()
    assert {p: abs(now - at) < 120_000_000_000 for p, at in store.written("a").items()} == {
        "a/b": True,
        "a/c/d": True,
        "a/empty": True,
    }
    store.delete("a/b")
    store.delete("a/b")
    store.delete("a/none/below")
    assert [e.path for e in store.list("a")] == ["a/c/d", "a/empty"] and not store.exists("a/b")
    store.create("a/b", b"again")
    assert store.read("a/b") == b"again"


@on_remote
def test_what_others_write_is_seen_at_once(url: str) -> None:
    store = Store(url)
    assert store.list() == [] and store.get("a/b") is None
    other = fsspec.core.url_to_fs(url, skip_instance_cache=True)[0]
    other.pipe_file(f"{url}/a/b", b"one")
    assert [e.path for e in store.list()] == ["a/b"] and store.read("a/b") == b"one"
    assert store.folders() == ["a"]
    other.pipe_file(f"{url}/a/b", b"other")
    assert [e.bytes for e in store.list()] == [5] and store.read("a/b") == b"other"
    other.rm_file(f"{url}/a/b")
    assert store.list() == [] and store.get("a/b") is None and store.stat("a/b") is None


@on_remote
def test_large_objects_are_created_once_too(url: str) -> None:
    store = Store(url)
    store.create("big", bytes(MULTIPART_BYTES))
    with pytest.raises(Exists):
        store.create("big", b"x" * MULTIPART_BYTES)
    entry = store.stat("big")
    assert entry is not None
    assert entry.bytes == MULTIPART_BYTES
    assert entry.etag == store.list("", digest=True)[0].etag


@on_all
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


@on_remote
def test_a_bucket_that_is_not_there_is_named(url: str) -> None:
    missing = url.replace("lake-", "none-")
    with pytest.raises(StoreError, match=r"cannot create lake\.check") as caught:
        Lake.open(missing)
    assert caught.value.url == missing
    assert "\n" not in str(caught.value)


@on_remote
def test_a_store_that_ignores_the_condition_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file_system = type(fsspec.core.url_to_fs(url)[0])
    honest = file_system._pipe_file

    async def plain_put(self: fsspec.AbstractFileSystem, path: str, data: bytes, mode: str = "", **more: int) -> object:
        return await honest(self, path, data, **more)

    monkeypatch.setattr(file_system, "_pipe_file", plain_put)
    if "abfs" in file_system.protocol:  # it binds the call when the class is made
        monkeypatch.setattr(file_system, "pipe_file", sync_wrapper(plain_put))
    stores.forget()
    with pytest.raises(StoreError, match="has no conditional create"):
        Lake.open(url)


@on_all
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


@on_all
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


@on_all
def test_a_late_writer_is_repaired(url: str) -> None:
    lake = Lake.open(url)
    commit_of(lake, "a", 1)
    lake.materialise(DAY)
    old = published(lake)
    commit_of(lake, "b", 2)
    lake.materialise(DAY)
    new, record = published(lake), standing(lake)
    lake.store.replace(DATA_PATH, old)
    assert lake.repair() == [DATA_PATH]
    assert (published(lake), standing(lake)) == (new, record)
    assert lake.repair() == []


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny fleet, and the lake of a night over it on local disk."""
    folder = tmp_path_factory.mktemp("night")
    write_fleet(build(SPEC), folder / "fleet")
    assert nights.run(nights.settings_for(folder / "fleet", folder / "lake"), SPEC.day).failed == {}
    return folder


@on_remote
def test_a_whole_night_publishes_the_bytes_of_a_night_on_disk(url: str, on_disk: Path) -> None:
    settings = nights.settings_for(on_disk / "fleet", on_disk).model_copy(update={"lake": url})
    assert nights.run(settings, SPEC.day).failed == {}
    lake = on_disk / "lake"
    paths = [p.relative_to(lake).as_posix() for p in (lake / "report").rglob("data.parquet")]
    same = {p: Store(url).read(p) == (lake / p).read_bytes() for p in paths if nights.QUALITY not in p}
    assert len(same) >= 5 and all(same.values())
    again = nights.run(settings, SPEC.day)
    assert (again.failed, again.repaired, again.causes) == ({}, [], {})


def test_azure_without_a_connection_string_asks_the_sdk_s_own_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    stores.forget()
    store = Store("abfs://container@someaccount.dfs.core.windows.net/below")
    file_system = store._disk._fs  # type: ignore[union-attr]
    assert type(file_system.credential).__name__ == "DefaultAzureCredential"
    assert file_system.account_url == "https://someaccount.blob.core.windows.net"
    with pytest.raises(StoreError, match="AZURE_STORAGE_CONNECTION_STRING, or an account's name") as caught:
        Store("abfs://container/below")
    assert caught.value.url == "abfs://container/below"
    stores.forget()


@pytest.mark.parametrize(("host", "wanted"), [("http://127.0.0.1:9", "false"), (None, "None")])
def test_google_is_asked_for_kinds_of_buckets_unless_an_emulator_is_set(host: str | None, wanted: str) -> None:
    name = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
    code = f"""
import os, fsspec
fsspec.core.url_to_fs = lambda url, **_: (None, "")  # no client, so no credentials are looked for
from seedance.store import file_system
file_system("gs://bucket/below")
print(os.environ.get({name!r}))
"""
    environment = {n: v for n, v in os.environ.items() if n not in (name, "STORAGE_EMULATOR_HOST")}
    if host is not None:
        environment["STORAGE_EMULATOR_HOST"] = host
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout.strip(), done.returncode) == (wanted, 0), done.stderr[-500:]
