"""The store: an object appears whole or not at all, once."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from seedance.canonical import canonical
from seedance.errors import Exists, SchemaError, StoreError
from seedance.store import CHECK_PATH, Entry, Store


class OverwritingStore(Store):
    """A store whose create is a plain put, as object stores without conditional puts have it."""

    def _create(self, path: str, data: bytes) -> None:
        self.replace(path, data)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "lake"))


def test_create_makes_an_object_once(store: Store) -> None:
    store.create("a/b.json", b"one")
    with pytest.raises(Exists, match=r"a/b\.json exists already") as caught:
        store.create("a/b.json", b"two")
    assert caught.value.path == "a/b.json"
    assert store.read("a/b.json") == b"one"
    assert [e.path for e in store.list("")] == ["a/b.json"]


def test_of_many_writers_one_wins(store: Store) -> None:
    results: list[str] = []
    gate = threading.Barrier(8)

    def write(n: int) -> None:
        gate.wait()
        try:
            store.create("days/1.json", f"{n}".encode() * 10_000)
            results.append(f"{n}")
        except Exists:
            pass

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 1
    assert store.read("days/1.json") == results[0].encode() * 10_000


def test_put_of_the_same_name_is_fine_and_replace_replaces(store: Store) -> None:
    store.put("objects/x", b"one")
    store.put("objects/x", b"one")
    tag = store.replace("objects/x", b"three")
    assert store.read("objects/x") == b"three"
    entry = store.stat("objects/x", digest=True)
    assert entry == Entry("objects/x", 5, tag)


def test_tags_change_with_the_content_and_digests_with_nothing_else(store: Store) -> None:
    store.replace("report/x", b"one")
    (before,), (cheap,) = store.list("report", digest=True), store.list("report")
    os.utime(Path(store.url, "report/x"), ns=(1, 1))
    assert store.list("report", digest=True) == [before]
    store.replace("report/x", b"two")
    assert store.list("report", digest=True)[0].etag != before.etag
    assert store.list("report")[0].etag != cheap.etag


def test_missing_objects_are_named(store: Store) -> None:
    assert store.get("a/none") is None
    assert not store.exists("a/none")
    assert store.list("nowhere") == []
    assert store.folders("nowhere") == []
    with pytest.raises(StoreError, match="no object a/none") as caught:
        store.read("a/none")
    assert (caught.value.url, caught.value.path) == (store.url, "a/none")


def test_a_folder_is_no_object(store: Store) -> None:
    store.create("a/b/c", b"")
    assert not store.exists("a/b")
    assert store.get("a/b") is None
    assert store.folders("a") == ["b"]
    assert store.read("a/b/c") == b""


@pytest.mark.parametrize("path", ["", "/etc/x", "a/../b", "a//b", "./a"])
def test_paths_stay_below_the_url(store: Store, path: str) -> None:
    with pytest.raises(StoreError, match="not a path below a store"):
        store.create(path, b"")


def test_what_the_disk_raises_becomes_ours(store: Store) -> None:
    store.create("a", b"")
    with pytest.raises(StoreError, match="cannot create a/b") as caught:
        store.create("a/b", b"")
    assert isinstance(caught.value.__cause__, OSError)


def test_listing_is_sorted_and_leaves_out_what_killed_writers_left(store: Store) -> None:
    for path in ("b/2", "a/1", "b/1", "bb/1"):
        store.create(path, b"x")
    Path(store.url, "b", ".tmp-77-dead").write_bytes(b"half")
    assert [e.path for e in store.list("b")] == ["b/1", "b/2"]
    assert [e.path for e in store.list("")] == ["a/1", "b/1", "b/2", "bb/1"]


def test_a_killed_writer_leaves_no_object(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from seedance.store import Store\n"
        "def die(source, target): os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.link = die\n"
        f"Store({str(tmp_path)!r}).create('a/b', b'x' * 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    store = Store(str(tmp_path))
    assert store.list("") == []
    assert len(list((tmp_path / "a").iterdir())) == 1  # the left-over is there, and is not listed
    store.create("a/b", b"whole")
    assert store.read("a/b") == b"whole"


def test_watch_sees_every_write_and_no_success_that_was_none(tmp_path: Path) -> None:
    seen: list[tuple[str, str, str]] = []
    store = Store(str(tmp_path), watch=lambda *event: seen.append(event))
    store.create("a", b"")
    store.put("b", b"")
    store.replace("a", b"")
    with pytest.raises(Exists):
        store.create("a", b"")
    assert seen == [
        ("before", "create", "a"), ("after", "create", "a"), ("before", "put", "b"), ("after", "put", "b"),
        ("before", "replace", "a"), ("after", "replace", "a"), ("before", "create", "a"),
    ]  # fmt: skip


def test_stores_travel_to_workers(tmp_path: Path) -> None:
    store = Store(str(tmp_path), watch=lambda *_: None)
    copy = pickle.loads(pickle.dumps(store))
    copy.create("a", b"1")
    assert store.read("a") == b"1"


def test_file_urls_and_relative_paths_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Store("lake").create("a", b"1")
    assert Store(f"file://{tmp_path}/lake").read("a") == b"1"
    assert Store("lake/").url == str(tmp_path / "lake")


def test_check_passes_again_and_again_and_leaves_one_object(store: Store) -> None:
    for _ in range(3):
        store.check()
    assert [e.path for e in store.list("")] == [CHECK_PATH]


def test_a_folder_that_another_process_makes_meanwhile_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nights that begin at once both look before either has made the lake; whatever is asked first, the answer changes."""
    lake = tmp_path / "lake"
    for question in ("is_dir", "exists"):
        with monkeypatch.context() as patched:
            real = getattr(Path, question)

            def asked(path: Path, real: Any = real, **facts: Any) -> bool:
                found = bool(real(path, **facts))
                if path == lake and not found:
                    lake.mkdir()
                return found

            patched.setattr(Path, question, asked)
            Store(str(lake)).check()
        assert lake.is_dir()
        shutil.rmtree(lake)


def test_a_store_without_conditional_create_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no conditional create") as caught:
        OverwritingStore(str(tmp_path)).check()
    assert caught.value.path == CHECK_PATH


def test_a_remote_store_that_ignores_the_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type(fsspec.filesystem("memory"))
    honest = memory.pipe_file
    monkeypatch.setattr(memory, "pipe_file", lambda self, path, value, mode="overwrite": honest(self, path, value))
    with pytest.raises(StoreError, match=r"memory://refused: the store let lake\.check be created twice"):
        Store("memory://refused").check()


def test_any_fsspec_store_with_conditional_create_will_do() -> None:
    store = Store("memory://lake-one/below/")
    store.check()
    store.create("a/b", b"one")
    with pytest.raises(Exists):
        store.create("a/b", b"two")
    store.put("a/b", b"one")
    tag = store.replace("a/c", b"three")
    assert [(e.path, e.bytes) for e in store.list("a")] == [("a/b", 3), ("a/c", 5)]
    assert store.list("a", digest=True)[1].etag == tag
    assert store.folders("") == ["a"]
    assert store.get("a/none") is None
    assert store.list("none") == []
    assert not store.exists("a")


def test_an_unknown_url_is_refused() -> None:
    with pytest.raises(StoreError, match="no file system for this URL"):
        Store("nosuch://x")


def test_canonical_text_is_one_per_value() -> None:
    assert canonical({"b": (1, None), "a": "é"}) == '{"a":"é","b":[1,null]}'.encode()


@pytest.mark.parametrize(("value", "where"), [({"a": [0.5]}, "$.a[0]"), ({1: 2}, "$.1"), ({"a": {1}}, "$.a")])
def test_canonical_refuses_what_has_no_one_text(value: object, where: str) -> None:
    with pytest.raises(SchemaError, match="cannot be written as canonical JSON") as caught:
        canonical(value)
    assert caught.value.where == where


# --- what stands in the way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "/lake"])
def test_a_file_where_the_folder_should_be_is_told(tmp_path: Path, below: str) -> None:
    file = tmp_path / "lake.txt"
    file.write_text("x")
    with pytest.raises(StoreError, match=r"lake\.txt is a file; expected a folder, or nothing there yet") as caught:
        Store(f"{file}{below}").check()
    assert "Name another folder, or move the file away." in str(caught.value)


@pytest.mark.parametrize("url", ["a\0b", "~nobody-of-this-name/lake"])
def test_what_is_no_path_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="is not a folder's path: ") as caught:
        Store(url)
    assert caught.value.url == url


def test_a_nul_in_a_path_is_refused(store: Store) -> None:
    for call in (store.exists, store.get, store.list):
        with pytest.raises(StoreError, match="without NUL"):
            call("a\0b")


def test_links_in_a_circle_are_listed_once_and_told(store: Store) -> None:
    store.create("a/b/1", b"x")
    root = Path(store.url)
    (root / "a" / "up").symlink_to(root / "a")
    (root / "a" / "self").symlink_to("self")
    (root / "a" / "nothing").symlink_to("nowhere")
    os.mkfifo(root / "a" / "pipe")
    odd: dict[str, str] = {}
    assert [e.path for e in store.list("a", odd=odd.__setitem__)] == ["a/b/1"]
    assert odd.pop("a/self").startswith("OSError: Too many levels of symbolic links")
    assert odd == {"a/up": "a link to a folder that it lies in", "a/pipe": "neither a file nor a folder"}
    with pytest.raises(StoreError, match="cannot list a: OSError"):
        store.list("a")
    (root / "a" / "self").unlink()
    assert [e.path for e in store.list("a")] == ["a/b/1"]


def test_links_to_other_folders_are_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "1").write_bytes(b"x")
    store.create("a/2", b"y")
    for name in ("one", "two"):
        Path(store.url, name).symlink_to(tmp_path / "other")
    assert [e.path for e in store.list()] == ["a/2", "one/1", "two/1"]


def test_a_folder_that_cannot_be_read_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("a/1", b"x")
    store.create("b/1", b"x")
    real = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    odd: dict[str, str] = {}
    assert [e.path for e in store.list("", odd=odd.__setitem__)] == ["b/1"]
    assert odd == {"a": "PermissionError: Permission denied"}
    with pytest.raises(StoreError, match="Permission denied"):
        store.list("")


@pytest.mark.parametrize("url", ["disk", "memory://cut-objects"])
def test_a_put_replaces_what_was_cut(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(str(tmp_path) if url == "disk" else url)
    store.replace("objects/x", b"who")
    store.put("objects/x", b"whole")
    assert store.read("objects/x") == b"whole"
    assert "objects/x holds 3 bytes; its name stands for 5: replaced" in caplog.text
