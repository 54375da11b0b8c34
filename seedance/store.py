"""Bytes under names, on local disk or any fsspec URL, with one promise: `create` makes an object whole, or says Exists.

Local disk: temporary file, fsync, hard link. Object stores: a conditional put. Everything that commits is built on that
promise, so `check` tries it and refuses a store that cannot keep it. Knows no table, no layout and no clock.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from seedance.errors import Exists, StoreError

Watch = Callable[[str, str, str], None]
"""Called with ("before" | "after", "create" | "put" | "replace", path); tests stop or kill a writer there."""

TEMPORARY = ".tmp-"
CHECK_PATH = "lake.check"
_CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
_CONFLICT_TRIES = 5


class Entry(NamedTuple):
    """One object: path below the store's URL, size in bytes, and a tag that changes when the content does."""

    path: str
    bytes: int
    etag: str


class Store:
    """Objects below one URL.

    Args:
        url: a folder on local disk (a path, or `file://`), or any fsspec URL such as `s3://bucket/prefix`.
        watch: called around every write; not carried along when the store is pickled.

    Paths are relative, with `/`. Any failure of the storage below is a StoreError that names url and path.
    """

    url: str

    def __init__(self, url: str, *, watch: Watch | None = None) -> None:
        local = url.removeprefix("file://") if "://" not in url or url.startswith("file://") else None
        self._disk: _Disk | _Remote
        if local is not None:
            self.url = str(Path(local).expanduser().resolve())
            self._disk = _Disk(self.url)
        else:
            self.url = url.rstrip("/")
            self._disk = _Remote(self.url)
        self._watch = watch

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return type(self), (self.url,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def is_local(self) -> bool:
        """True on local disk."""
        return isinstance(self._disk, _Disk)

    def create(self, path: str, data: bytes) -> None:
        """Make an object that is not there yet, whole.

        Raises:
            Exists: an object of this name is there; it is untouched. After a lost answer it can be one's own.
            StoreError: the storage refused.
        """
        self._notify("before", "create", path)
        self._create(path, data)
        self._notify("after", "create", path)

    def put(self, path: str, data: bytes) -> None:
        """Make an object whose name is derived from its content; one of the same name is the same object, and fine."""
        self._notify("before", "put", path)
        if self.stat(path) is None:
            with contextlib.suppress(Exists):
                self._create(path, data)
        self._notify("after", "put", path)

    def replace(self, path: str, data: bytes) -> str:
        """Put the data in place of what is there: readers see the former object or this one, never a mix.

        Returns:
            The tag of what was written: what `list` and `stat` give with `digest=True` until somebody overwrites it.
        """
        self._notify("before", "replace", path)
        with _Edge(self.url, path, "replace"):
            etag = self._disk.replace(_clean(path), data)
        self._notify("after", "replace", path)
        return etag

    def get(self, path: str) -> bytes | None:
        """The object's bytes, or None when there is no such object."""
        with _Edge(self.url, path, "read"):
            try:
                return self._disk.read(_clean(path))
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None

    def read(self, path: str) -> bytes:
        """The object's bytes.

        Raises:
            StoreError: there is no such object, or the storage refused.
        """
        data = self.get(path)
        if data is None:
            raise StoreError(f"{self.url}: no object {path}. Expected it to be there.", url=self.url, path=path)
        return data

    def stat(self, path: str, *, digest: bool = False) -> Entry | None:
        """One object's entry, or None when there is no such object; `digest` as in `list`."""
        with _Edge(self.url, path, "stat"):
            try:
                return self._disk.stat(_clean(path), digest)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def exists(self, path: str) -> bool:
        """True when there is an object of this name; a folder is none."""
        return self.stat(path) is not None

    def list(self, prefix: str = "", *, digest: bool = False) -> builtins.list[Entry]:
        """Every object below a folder, at any depth, sorted by path; [] when nothing is there.

        Args:
            prefix: folder below the URL; "" lists everything. Files of writers that were killed never appear.
            digest: give tags that depend on the content alone. On local disk that reads every file (sha256); otherwise
                the tag is made of size, modification time and inode. Object stores give theirs either way.
        """
        with _Edge(self.url, prefix, "list"):
            return sorted(self._disk.entries(_clean(prefix, allow_empty=True), digest))

    def folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the folders directly below a folder, sorted; [] when there are none."""
        with _Edge(self.url, prefix, "list"):
            return sorted(self._disk.folders(_clean(prefix, allow_empty=True)))

    def check(self) -> None:
        """Hold the store to its promise by creating one fixed key twice; safe while others do the same.

        Raises:
            StoreError: the second create was allowed, so two writers could both believe that they won.
        """
        mark = b"A second create of this object must be refused.\n"
        for _ in range(2):
            try:
                self.create(CHECK_PATH, mark)
            except Exists:
                return
        raise StoreError(
            f"{self.url}: the store let {CHECK_PATH} be created twice; expected the second create to be refused. It "
            "has no conditional create, so two runs could overwrite each other's commits. Use local disk, or a store "
            "with conditional puts.",
            url=self.url,
            path=CHECK_PATH,
        )

    def _create(self, path: str, data: bytes) -> None:
        with _Edge(self.url, path, "create"):
            try:
                self._disk.create(_clean(path), data)
            except FileExistsError as error:
                raise Exists(f"{self.url}: {path} exists already.", url=self.url, path=path) from error

    def _notify(self, moment: str, operation: str, path: str) -> None:
        if self._watch is not None:
            self._watch(moment, operation, path)


class _Edge:
    """Turns what the storage below raises into a StoreError with url and path; ours pass."""

    def __init__(self, url: str, path: str, operation: str) -> None:
        self._url, self._path, self._operation = url, path, operation

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # SDK clients raise types of their own beside OSError, so the edge takes every Exception; it never takes
        # KeyboardInterrupt and its like.
        if isinstance(error, Exception) and not isinstance(error, StoreError):
            raise StoreError(
                f"{self._url}: cannot {self._operation} {self._path or 'the folder'}: {type(error).__name__}: {error}",
                url=self._url,
                path=self._path,
                operation=self._operation,
            ) from error


def _clean(path: str, *, allow_empty: bool = False) -> str:
    parts = path.strip("/").split("/") if path.strip("/") else []
    if (not parts and not allow_empty) or path.startswith("/") or any(p in ("", ".", "..") for p in parts):
        raise StoreError(f"{path!r} is not a path below a store: expected relative names joined by '/'.", path=path)
    return "/".join(parts)


class _Disk:
    """Local disk."""

    def __init__(self, root: str) -> None:
        self._root = root

    def create(self, path: str, data: bytes) -> None:
        final, temporary = self._write_beside(path, data)
        try:
            os.link(temporary, final)
        finally:
            temporary.unlink()
        _sync_folder(final.parent)

    def replace(self, path: str, data: bytes) -> str:
        final, temporary = self._write_beside(path, data)
        temporary.replace(final)
        _sync_folder(final.parent)
        return hashlib.sha256(data).hexdigest()

    def read(self, path: str) -> bytes:
        return Path(self._root, path).read_bytes()

    def stat(self, path: str, digest: bool) -> Entry | None:
        file = Path(self._root, path)
        facts = file.stat()
        return _disk_entry(path, file, facts, digest) if file.is_file() else None

    def entries(self, prefix: str, digest: bool) -> Iterator[Entry]:
        folders = [prefix]
        while folders:
            folder = folders.pop()
            for item in self._scan(folder):
                path = f"{folder}/{item.name}" if folder else item.name
                if item.is_dir():
                    folders.append(path)
                elif not item.name.startswith(TEMPORARY):
                    try:
                        yield _disk_entry(path, Path(item.path), item.stat(), digest)
                    except FileNotFoundError:
                        continue  # deleted since the folder was read

    def folders(self, prefix: str) -> Iterator[str]:
        return (item.name for item in self._scan(prefix) if item.is_dir())

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(Path(self._root, folder)) as items:
                return list(items)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _write_beside(self, path: str, data: bytes) -> tuple[Path, Path]:
        final = Path(self._root, path)
        _make_folder(final.parent)
        temporary = final.parent / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return final, temporary


def _disk_entry(path: str, file: Path, facts: os.stat_result, digest: bool) -> Entry:
    if digest:
        data = file.read_bytes()
        return Entry(path, len(data), hashlib.sha256(data).hexdigest())
    return Entry(path, facts.st_size, f"{facts.st_size:x}-{facts.st_mtime_ns:x}-{facts.st_ino:x}")


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:  # a file of that name: not what Exists means
        raise NotADirectoryError(*error.args) from error
    _sync_folder(folder.parent)  # or the folder, and all in it, could be gone after a power cut


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Remote:
    """Any fsspec file system; never from its listing cache."""

    def __init__(self, url: str) -> None:
        # Here and not above: hosts that write to local disk do without fsspec.
        import fsspec

        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StoreError(f"{url}: no file system for this URL: {error}", url=url, path="") from error
        self._root = root.rstrip("/")

    def create(self, path: str, data: bytes) -> None:
        for attempt in range(_CONFLICT_TRIES):
            try:
                self._fs.pipe_file(self._at(path), data, mode="create")
                return
            except FileExistsError:
                raise
            except OSError as error:
                if attempt == _CONFLICT_TRIES - 1 or not _is_conflict(error):
                    raise
                time.sleep(0.05 * 2**attempt)  # S3 answers 409 to both of two puts at once; the next try is decided

    def replace(self, path: str, data: bytes) -> str:
        answer = self._fs.pipe_file(self._at(path), data)
        etag = answer.get("ETag") if isinstance(answer, dict) else None
        if etag:
            return str(etag).strip('"')
        entry = self.stat(path, True)
        return entry.etag if entry else ""

    def read(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(self._at(path)))

    def stat(self, path: str, digest: bool) -> Entry | None:
        info = self._fs.info(self._at(path))
        return self._entry(path, info, digest) if info["type"] == "file" else None

    def entries(self, prefix: str, digest: bool) -> Iterator[Entry]:
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(self._at(prefix), detail=True)
        except FileNotFoundError:
            return
        for name, info in found.items():
            path = name.removeprefix(self._root).strip("/")
            inside = not prefix or path.startswith(prefix + "/")
            if info["type"] == "file" and inside and not path.rpartition("/")[2].startswith(TEMPORARY):
                yield self._entry(path, info, digest)

    def folders(self, prefix: str) -> list[str]:
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._at(prefix), detail=True)
        except FileNotFoundError:
            return []
        return [i["name"].rstrip("/").rpartition("/")[2] for i in found if i["type"] == "directory"]

    def _entry(self, path: str, info: dict[str, Any], digest: bool) -> Entry:
        # Google's etag counts generations, its md5Hash is of the content; S3 and Azure have the one tag.
        tag = (info.get("md5Hash") if digest else None) or info.get("ETag") or info.get("etag")
        if not tag:
            tag = hashlib.sha256(self.read(path)).hexdigest()  # stores for tests alone, such as memory://
        return Entry(path, int(info["size"]), str(tag).strip('"'))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _is_conflict(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in _CONFLICTS:
            return True
        cause = cause.__cause__
    return False
