"""Bytes under names, on local disk or any fsspec URL, with one promise: `create` makes an object whole, or says Exists.

Local disk: temporary file, fsync, hard link. Object stores: a conditional put. Everything that commits is built on that
promise, so `check` tries it and refuses a store that cannot keep it. Knows no table, no layout and no clock.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from seedance.errors import Exists, StoreError
from seedance.remote import TEMPORARY, Entry, Odd, Remote, file_system

__all__ = ["CHECK_PATH", "TEMPORARY", "Entry", "Odd", "Store", "Watch", "file_system"]

Watch = Callable[[str, str, str], None]
"""Called with ("before" | "after", "create" | "put" | "replace" | "delete", path); tests stop or kill a writer there."""

CHECK_PATH = "lake.check"

log = logging.getLogger(__name__)


class Store:
    """Objects below one URL.

    Args:
        url: a folder on local disk (a path, or `file://`), or an fsspec URL: `s3://bucket/prefix`,
            `abfs://container/prefix`, `gs://bucket/prefix`.
        watch: called around every write; not carried along when the store is pickled.

    Paths are relative, with `/`. Any failure of the storage below is a StoreError that names url and path.
    """

    url: str

    def __init__(self, url: str, *, watch: Watch | None = None) -> None:
        local = url.removeprefix("file://") if "://" not in url or url.startswith("file://") else None
        self._disk: _Disk | Remote
        if local is not None:
            self.url = _folder_of(local)
            self._disk = _Disk(self.url)
        else:
            self.url = url.rstrip("/")
            self._disk = Remote(self.url)
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
        """Make an object whose name is derived from its content; one of the same name is the same object, and fine.

        One of another size was cut or overwritten from outside: it is replaced, with a warning.
        """
        self._notify("before", "put", path)
        there = self.stat(path)
        if there is None:
            with contextlib.suppress(Exists):
                self._create(path, data)
        elif there.bytes != len(data):
            log.warning(
                "%s: %s holds %d bytes; its name stands for %d: replaced", self.url, path, there.bytes, len(data)
            )
            with _Edge(self.url, path, "replace"):
                self._disk.replace(_clean(path), data)
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

    def delete(self, path: str) -> None:
        """Take an object away; one that is not there is fine. Readers that have it open keep it on local disk."""
        self._notify("before", "delete", path)
        with _Edge(self.url, path, "delete"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._disk.delete(_clean(path))
        self._notify("after", "delete", path)

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

    def list(self, prefix: str = "", *, digest: bool = False, odd: Odd | None = None) -> builtins.list[Entry]:
        """Every object below a folder, at any depth, sorted by path; [] when nothing is there.

        Args:
            prefix: folder below the URL; "" lists everything. Files of writers that were killed never appear.
            digest: give tags that depend on the content alone. On local disk that reads every file (sha256); otherwise
                the tag is made of size, modification time and inode. Object stores give theirs either way.
            odd: told of what cannot be listed (a folder or file that may not be read, links in a circle), and the rest
                is listed. Without it links in a circle are left out and anything else is a StoreError.
        """
        with _Edge(self.url, prefix, "list"):
            return sorted(self._disk.entries(_clean(prefix, allow_empty=True), digest, odd))

    def written(self, prefix: str = "") -> dict[str, int]:
        """When every object below a folder was last written, ns UTC by the storage's own clock, sorted by path."""
        with _Edge(self.url, prefix, "list"):
            return dict(sorted(self._disk.written(_clean(prefix, allow_empty=True))))

    def folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the folders directly below a folder, sorted; [] when there are none."""
        with _Edge(self.url, prefix, "list"):
            return sorted(self._disk.folders(_clean(prefix, allow_empty=True)))

    def check(self) -> None:
        """Hold the store to its promise by creating one fixed key twice; safe while others do the same.

        Raises:
            StoreError: the second create was allowed, so two writers could both believe that they won; or the URL is
                that of a file.
        """
        if isinstance(self._disk, _Disk):
            _check_folder(Path(self.url))
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
                f"{self._url}: cannot {self._operation} {self._path or 'the folder'}: {type(error).__name__}: {_first(error)}",
                url=self._url,
                path=self._path,
                operation=self._operation,
            ) from error


def _first(error: Exception) -> str:
    """The first line of what was raised: Azure's errors carry the whole answer below it."""
    return str(error).partition("\n")[0]


def _clean(path: str, *, allow_empty: bool = False) -> str:
    parts = path.strip("/").split("/") if path.strip("/") else []
    wrong = path.startswith("/") or "\0" in path or any(p in ("", ".", "..") for p in parts)
    if wrong or not (parts or allow_empty):
        raise StoreError(
            f"{path!r} is not a path below a store: expected relative names joined by '/', without NUL.", path=path
        )
    return "/".join(parts)


def _folder_of(local: str) -> str:
    """A local path made absolute."""
    try:
        if "\0" in local:
            raise ValueError("it holds a NUL character")
        return str(Path(local).expanduser().resolve())
    except (ValueError, RuntimeError, OSError) as error:  # links in a circle, an unknown ~user
        raise StoreError(
            f"{local!r} is not a folder's path: {error}. Name a folder on this machine, or an fsspec URL.",
            url=local,
            path="",
        ) from error


def _check_folder(folder: Path) -> None:
    """Refuse a root that is a file, or lies below one: nothing could ever be written there."""
    for place in (folder, *folder.parents):
        if not place.exists():
            continue
        if place.is_dir():  # asked second: another process may make the folder at any moment
            return
        raise StoreError(
            f"{folder}: {place} is a file; expected a folder, or nothing there yet. Name another folder, or move the "
            "file away.",
            url=str(folder),
            path="",
            expected="a folder",
            found="a file",
        )


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

    def entries(self, prefix: str, digest: bool, odd: Odd | None) -> Iterator[Entry]:
        # Each folder with the identities of those above it: a link to one of them would be listed without end.
        todo: list[tuple[str, frozenset[tuple[int, int]]]] = [(prefix, _identity(Path(self._root, prefix)))]
        while todo:
            folder, above = todo.pop()
            try:
                items = self._scan(folder)
            except OSError as error:
                _tell(odd, folder, error)
                continue
            for item in items:
                path = f"{folder}/{item.name}" if folder else item.name
                try:
                    facts = item.stat()
                    if stat.S_ISREG(facts.st_mode):
                        if not item.name.startswith(TEMPORARY):
                            yield _disk_entry(path, Path(item.path), facts, digest)
                        continue
                except FileNotFoundError:
                    continue  # deleted since the folder was read, or a link to nothing
                except OSError as error:
                    _tell(odd, path, error)
                    continue
                here = (facts.st_dev, facts.st_ino)
                if stat.S_ISDIR(facts.st_mode) and here not in above:
                    todo.append((path, above | {here}))
                elif odd is not None:
                    is_folder = stat.S_ISDIR(facts.st_mode)
                    odd(path, "a link to a folder that it lies in" if is_folder else "neither a file nor a folder")

    def delete(self, path: str) -> None:
        file = Path(self._root, path)
        file.unlink()
        _sync_folder(file.parent)

    def written(self, prefix: str) -> Iterator[tuple[str, int]]:
        for entry in self.entries(prefix, False, None):
            with contextlib.suppress(FileNotFoundError):
                yield entry.path, Path(self._root, entry.path).stat().st_mtime_ns

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


def _identity(folder: Path) -> frozenset[tuple[int, int]]:
    """Device and inode of a folder, as a set; empty when it is gone."""
    try:
        facts = folder.stat()
    except OSError:
        return frozenset()
    return frozenset({(facts.st_dev, facts.st_ino)})


def _tell(odd: Odd | None, path: str, error: OSError) -> None:
    if odd is None:
        raise error
    odd(path, f"{type(error).__name__}: {error.strerror or error}")


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
        raise NotADirectoryError(f"{folder} is a file; expected a folder. Move the file away.") from error
    _sync_folder(folder.parent)  # or the folder, and all in it, could be gone after a power cut


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
