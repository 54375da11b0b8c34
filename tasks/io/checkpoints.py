"""What lies in a checkpoint folder on local disk or S3: listings as `core_checkpoints__found`, a few thousand rows at a time.

Reads names, sizes, times, classes and checksums, never content, and writes nothing. Whatever cannot be used is listed with the
reason. An ETag is not taken for a checksum: that of an upload in parts is no hash of the content.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.checkpoints import FOUND
from seedance.errors import StoreError
from seedance.schema import INSTANT, conform
from tasks.errors import UsageError

ROWS = 5_000
"""Entries that are held as Python values at a time."""
PAGE = 1_000
"""Objects that one listing request may give; S3 gives no more."""
HEADS_AT_ONCE = 8
CHECKSUMS = ("SHA256", "SHA512", "SHA1", "CRC64NVME", "CRC32C", "CRC32")
"""In order of preference, as the API names them."""


def is_local(url: str) -> bool:
    """True for a path or a file:// URL."""
    return "://" not in url or url.startswith("file://")


def list_folder(url: str) -> Iterator[pa.Table]:
    """Every entry of a folder at any depth, as tables of up to 5,000 rows; none for an empty folder.

    Args:
        url: a local folder, or s3://bucket/prefix. Credentials come from the SDK's own chain.

    Raises:
        UsageError: the folder is not there, is no folder, or is of another kind; carries found, expected.
        StoreError: the listing was refused; carries url, path.
    """
    if is_local(url):
        yield from _tables(_on_disk(Path(url.removeprefix("file://"))))
    elif url.startswith("s3://"):
        yield from _on_s3(url)
    else:
        raise UsageError(
            f"checkpoint folder {url}: expected a local folder or an s3:// URL.", found=url, expected="a path or s3://"
        )


# --- local disk ------------------------------------------------------------------------------------------------------


def _on_disk(root: Path) -> Iterator[dict[str, Any]]:
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise UsageError(
            f"checkpoint folder {root}: expected a folder, found {found}.", found=found, expected="a folder"
        )
    todo = [""]
    while todo:
        folder = todo.pop()
        try:
            with os.scandir(root / folder) as items:
                for item in items:
                    path = f"{folder}/{item.name}" if folder else item.name
                    if item.is_dir(follow_symlinks=False):
                        todo.append(path)
                    else:
                        yield _file(path, item)
        except OSError as error:
            if not folder:
                raise StoreError(f"{root}: cannot be listed: {_said(error)}", url=str(root), path="") from error
            yield {"x_Path": _shown(folder), "x_Problem": f"this folder cannot be listed: {_said(error)}"}


def _file(path: str, item: os.DirEntry[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"x_Path": _shown(path)}
    try:
        facts = item.stat(follow_symlinks=False)
    except OSError as error:
        return row | {"x_Problem": f"its facts cannot be read: {_said(error)}"}
    if stat.S_ISLNK(facts.st_mode):
        return row | {"x_Problem": "a symbolic link: what it names is listed where it lies"}
    if not stat.S_ISREG(facts.st_mode):
        return row | {"x_Problem": "neither a file nor a folder"}
    row |= {"x_Bytes": facts.st_size, "x_ModifiedUtc": facts.st_mtime_ns}
    if facts.st_atime_ns > facts.st_mtime_ns:
        row["x_AccessedUtc"] = facts.st_atime_ns
    if row["x_Path"] != path:
        row["x_Problem"] = "its name is not UTF-8"
    elif not os.access(item.path, os.R_OK):
        row["x_Problem"] = "it may not be read"
    return row


def _shown(path: str) -> str:
    """A path as text: bytes that are not UTF-8 come from the system as lone surrogates."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _said(error: OSError) -> str:
    return f"{type(error).__name__}: {error.strerror or error}"


# --- S3 --------------------------------------------------------------------------------------------------------------


def _on_s3(url: str) -> Iterator[pa.Table]:
    import s3fs

    bucket, _, below = url.removeprefix("s3://").rstrip("/").partition("/")
    prefix = f"{below}/" if below else ""
    if not bucket:
        raise UsageError(
            f"checkpoint folder {url}: expected s3://bucket/prefix.", found=url, expected="s3://bucket/prefix"
        )
    fs = s3fs.S3FileSystem(use_listings_cache=False)
    listed = 0
    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        for page in _pages(fs, url, bucket, prefix):
            listed += len(page)
            yield from _tables(pool.map(lambda item: _object(fs, bucket, prefix, item), page))
    if not listed:
        raise UsageError(
            f"checkpoint folder {url}: there is nothing below it. Check bucket and prefix.",
            found="nothing",
            expected="objects",
        )


def _pages(fs: Any, url: str, bucket: str, prefix: str) -> Iterator[list[Mapping[str, Any]]]:
    token: dict[str, str] = {}
    while True:
        try:
            answer = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=PAGE, **token)
        except Exception as error:  # SDK clients raise types of their own beside OSError
            raise StoreError(
                f"{url}: cannot be listed: {type(error).__name__}: {error}", url=url, path=prefix
            ) from error
        yield answer.get("Contents", [])
        if not answer.get("IsTruncated"):
            return
        token = {"ContinuationToken": answer["NextContinuationToken"]}


def _object(fs: Any, bucket: str, prefix: str, item: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "x_Path": item["Key"].removeprefix(prefix) or ".",
        "x_Bytes": item["Size"],
        "x_ModifiedUtc": int(item["LastModified"].timestamp()) * 1_000_000_000,
        "x_ApiClass": item.get("StorageClass") or "STANDARD",
    }
    if not item.get("ChecksumAlgorithm"):
        return row
    try:
        facts = fs.call_s3("head_object", Bucket=bucket, Key=item["Key"], ChecksumMode="ENABLED")
    except Exception as error:  # noqa: BLE001 - as above; the object is listed all the same
        return row | {"x_Problem": f"its checksum cannot be read: {type(error).__name__}: {error}"}
    kind = next((k for k in CHECKSUMS if facts.get(f"Checksum{k}")), None)
    if kind is None:
        return row
    value = str(facts[f"Checksum{kind}"])
    # Stores that do not say which kind it is show by the ETag that the object came in parts.
    told = facts.get("ChecksumType") or ("COMPOSITE" if re.search(r"-\d+$", str(item["ETag"]).strip('"')) else None)
    in_parts = told == "COMPOSITE" or re.search(r"-\d+$", value) is not None
    return row | {"x_Checksum": value, "x_ChecksumKind": f"{kind} of parts" if in_parts else kind}


# --- rows to tables --------------------------------------------------------------------------------------------------


def _tables(rows: Iterable[dict[str, Any]]) -> Iterator[pa.Table]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS:
            yield _table(batch)
            batch = []
    if batch:
        yield _table(batch)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = []
    for column in FOUND.columns:
        values = [row.get(column.name) for row in rows]
        instants = column.type == INSTANT
        columns.append(pa.array(values, pa.int64()).cast(INSTANT) if instants else pa.array(values, column.type))
    return conform(pa.table(columns, names=list(FOUND.names)), FOUND, where="checkpoint listing")
