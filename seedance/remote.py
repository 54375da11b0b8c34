"""Object stores through fsspec: Amazon S3, Azure Blob Storage, Google Cloud Storage, and any other with a conditional put.

Credentials come from each SDK's own chain and are never read here. Azure, as adlfs has it: AZURE_STORAGE_CONNECTION_STRING,
or an account (in the URL, `abfs://container@account.dfs.core.windows.net/prefix`, or AZURE_STORAGE_ACCOUNT_NAME) with the
DefaultAzureCredential of azure-identity. What the store above promises is in infra/rules/lake.md 1.
"""

from __future__ import annotations

import base64
import calendar
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from seedance.errors import StoreError

Odd = Callable[[str, str], None]
"""Called with path and reason for what stands in a folder and cannot be listed."""

TEMPORARY = ".tmp-"
_CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
_CONFLICT_TRIES = 5
_GOOGLE = ("gs", "gcs")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Where S3, Azure, Google and memory:// say when an object was written."""


class Entry(NamedTuple):
    """One object: path below the store's URL, size in bytes, and a tag that changes when the content does."""

    path: str
    bytes: int
    etag: str


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Args:
        url: any URL that fsspec knows.
        options: for the file system.

    Raises:
        StoreError: there is no such file system, or it has not been told what it needs; carries url.
    """
    # Here and not above: hosts that write to local disk do without fsspec.
    import fsspec

    if os.environ.get("STORAGE_EMULATOR_HOST") and url.startswith(tuple(f"{name}://" for name in _GOOGLE)):
        # gcsfs asks Google's control service about every bucket, over a connection that no emulator answers: it would
        # wait a minute each time. It reads this when it is first imported.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise StoreError(
            f"{url}: no file system for this URL: {error}. Expected a folder, s3://, abfs:// or gs:// with what it needs: "
            "s3fs, adlfs or gcsfs installed, and for abfs:// AZURE_STORAGE_CONNECTION_STRING, or an account's name in the "
            "URL or in AZURE_STORAGE_ACCOUNT_NAME.",
            url=url,
            path="",
        ) from error
    return found


class Remote:
    """The objects below one URL of an fsspec file system; never from its listing cache."""

    def __init__(self, url: str) -> None:
        self._fs, root = file_system(url, use_listings_cache=False)
        self._root = root.rstrip("/")
        self._google = _is_google(self._fs.protocol)

    def create(self, path: str, data: bytes) -> None:
        for attempt in range(_CONFLICT_TRIES):
            try:
                self._fs.pipe_file(self._at(path), data, mode="create", **self._whole(data))
                return
            except FileExistsError:
                raise
            except OSError as error:
                if attempt == _CONFLICT_TRIES - 1 or not _is_conflict(error):
                    raise
                time.sleep(0.05 * 2**attempt)  # S3 answers 409 to both of two puts at once; the next try is decided

    def replace(self, path: str, data: bytes) -> str:
        answer = self._fs.pipe_file(self._at(path), data, **self._whole(data))
        if self._google:  # it answers with a place; the tag is that of the content
            return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        etag = (answer.get("ETag") or answer.get("etag")) if isinstance(answer, dict) else None
        if etag:
            return str(etag).strip('"')
        entry = self.stat(path, True)
        return entry.etag if entry else ""

    def delete(self, path: str) -> None:
        self._fs.rm_file(self._at(path))

    def read(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(self._at(path)))

    def stat(self, path: str, digest: bool) -> Entry | None:
        info = self._fs.info(self._at(path))
        return self._entry(path, info, digest) if info["type"] == "file" else None

    def entries(self, prefix: str, digest: bool, odd: Odd | None) -> Iterator[Entry]:
        for path, info in self._found(prefix):
            yield self._entry(path, info, digest)

    def written(self, prefix: str) -> Iterator[tuple[str, int]]:
        for path, info in self._found(prefix):
            yield path, _time_ns(info)

    def folders(self, prefix: str) -> list[str]:
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._at(prefix), detail=True)
        except FileNotFoundError:
            return []
        return [i["name"].rstrip("/").rpartition("/")[2] for i in found if i["type"] == "directory"]

    def _found(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(self._at(prefix), detail=True)
        except FileNotFoundError:
            return
        for name, info in found.items():
            path = name.removeprefix(self._root).strip("/")
            inside = not prefix or path.startswith(prefix + "/")
            if info["type"] == "file" and inside and not path.rpartition("/")[2].startswith(TEMPORARY):
                yield path, info

    def _whole(self, data: bytes) -> dict[str, Any]:
        # gcsfs cuts what is large into several requests, and then the condition holds for the first of them only.
        return {"chunksize": len(data) + 1} if self._google else {}

    def _entry(self, path: str, info: dict[str, Any], digest: bool) -> Entry:
        # Google's etag counts generations, its md5Hash is of the content; S3 and Azure have the one tag.
        tag = (info.get("md5Hash") if digest else None) or info.get("ETag") or info.get("etag")
        if not tag:
            tag = hashlib.sha256(self.read(path)).hexdigest()  # stores for tests alone, such as memory://
        return Entry(path, int(info["size"]), str(tag).strip('"'))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _is_google(protocol: str | tuple[str, ...]) -> bool:
    return any(name in _GOOGLE for name in ((protocol,) if isinstance(protocol, str) else protocol))


def _time_ns(info: dict[str, Any]) -> int:
    """When an object was last written, ns UTC."""
    at = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    if not isinstance(at, datetime):
        raise StoreError(
            f"{info.get('name')}: the store does not say when it was written; it has {', '.join(sorted(info))}. Expected "
            f"one of {', '.join(_TIMES)}.",
            path=str(info.get("name")),
        )
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return calendar.timegm(at.utctimetuple()) * 1_000_000_000 + at.microsecond * 1000


def _is_conflict(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in _CONFLICTS:
            return True
        cause = cause.__cause__
    return False
