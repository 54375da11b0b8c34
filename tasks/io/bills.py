"""Bill deliveries on any fsspec URL: which are complete, their bytes, and their rows as Arrow tables.

Two layouts are known: AWS Data Exports (data and metadata folders by BILLING_PERIOD, a manifest that names every part),
and plain files, each a delivery of its own. Only reads; knows no charge, no lake and no clock.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tasks.core.focus_values import Place
from tasks.errors import DeliveryError

EXPORT = re.compile(
    r"(?P<export>(?:.*/)?)(?P<kind>data|metadata)/billing_period=(?P<period>[0-9]{4}-[0-9]{2})/(?P<rest>.+)",
    re.IGNORECASE,
)
EXECUTION = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})T?(\d{2})[:-]?(\d{2})[:-]?(\d{2})(?:\.(\d{1,6}))?\d*Z?-.+", re.ASCII)
"""`<timestamp>-<executionId>`, with or without punctuation in the timestamp."""
PLAIN_FILES = (".csv", ".csv.gz", ".parquet")
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
NULLS = ["", "NULL", "null"]
"""Bare words that mean null in text files; in quotes they are names, except empty text."""
BLOCK_BYTES = 16 << 20
BATCH_ROWS = 1 << 17


@dataclass(frozen=True)
class Candidate:
    """A complete delivery that has not been read yet.

    Args:
        name: manifest or file below the source's URL, for people.
        group: the file, or export and billing period: what a newer delivery of the same group replaces.
        delivered_at: sortable UTC text, from the layout's timestamp, else the time of modification.
        main: the billing period's own manifest names it, not only that of an execution; True for plain files.
        period: billing period of its folder, YYYY-MM; None for plain files, which speak for the periods of their rows.
        files: paths in the file system, each with a tag that changes whenever the file does, or None.
    """

    name: str
    group: str
    delivered_at: str
    main: bool
    period: str | None
    files: tuple[tuple[str, str | None], ...]


@dataclass
class Source:
    """One place where a provider drops bills.

    Args:
        name: name in the settings.
        url: file or folder, any fsspec URL.
    """

    name: str
    url: str

    def __post_init__(self) -> None:
        self._tags: dict[str, str | None] = {}
        with self._storage(self.url):
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
            self._fs.invalidate_cache()

    def discover(self) -> tuple[list[Candidate], list[DeliveryError]]:
        """Complete deliveries, oldest first, and what is wrong with the others.

        Raises:
            DeliveryError: nothing is there, or the storage refused; carries source, path.
        """
        with self._storage(self.url):
            found = self._fs.find(self._root, detail=True) if self._fs.exists(self._root) else {}
            self._tags = {path: _tag(info or self._fs.info(path)) for path, info in found.items()}
        if not found:
            raise self._refuse(
                self.url,
                f"nothing is at {self.url}",
                f"Correct bills.url of source {self.name} in the settings, or wait for the provider's first delivery.",
            )
        files = {self._below(path): path for path in sorted(found)}
        exports = {rel: match for rel in files if (match := EXPORT.fullmatch(rel))}
        if exports:
            candidates, problems = self._exports(files, exports)
        else:
            candidates, problems = self._plain(files)
        return sorted(candidates, key=lambda c: (c.delivered_at, c.main, c.name)), problems

    def fetch(self, path: str) -> bytes:
        """All bytes of one file.

        Raises:
            DeliveryError: the storage refused, or the file is gone; carries source, path.
        """
        with self._storage(path):
            return bytes(self._fs.cat_file(path))

    def _plain(self, files: Mapping[str, str]) -> tuple[list[Candidate], list[DeliveryError]]:
        alone = len(files) == 1 and next(iter(files.values())) == self._root
        names = [n for n in files if alone or (n.lower().endswith(PLAIN_FILES) and not _hidden(n))]
        if not names:
            raise self._refuse(
                self.url,
                f"no bill among {len(files)} file(s) at {self.url}; expected {', '.join(PLAIN_FILES)}",
                f"Correct bills.url of source {self.name} in the settings.",
            )
        return [
            Candidate(shown(n), shown(n), self._modified(files[n]), True, None, self._tagged([files[n]])) for n in names
        ], []

    def _exports(
        self, files: Mapping[str, str], exports: Mapping[str, re.Match[str]]
    ) -> tuple[list[Candidate], list[DeliveryError]]:
        """Every folder of a period; parts and manifests are matched within one export."""
        data: dict[tuple[str, str], dict[str, str]] = {}
        manifests: dict[tuple[str, str], list[str]] = {}
        for rel, match in exports.items():
            place = (match["export"], match["period"])
            rest = match["rest"]
            if match["kind"].lower() == "data" and not _hidden(rest):
                data.setdefault(place, {})[rest] = files[rel]
            elif match["kind"].lower() == "metadata" and rest.lower().endswith("manifest.json"):
                manifests.setdefault(place, []).append(rel)
        candidates: dict[tuple[str, ...], Candidate] = {}
        problems: list[DeliveryError] = []
        for place in sorted({*data, *manifests}):
            parts, named = data.get(place, {}), set[str]()
            group = shown(f"{place[0]}BILLING_PERIOD={place[1]}")
            first = len(problems)
            for rel in manifests.get(place, []):
                try:
                    rests = self._manifest(rel, files[rel], parts)
                except DeliveryError as error:
                    problems.append(error)
                    continue
                named.update(rests)
                paths = tuple(parts[r] for r in rests)
                main = "/" not in exports[rel]["rest"]
                if main or paths not in candidates:
                    at = _execution_time(rests) or self._modified(files[rel])
                    candidates[paths] = Candidate(shown(rel), group, at, main, place[1], self._tagged(paths))
            problems += self._unannounced(place, parts, named, bool(manifests.get(place)))
            for problem in problems[first:]:
                problem.facts["group"] = group
        return list(candidates.values()), problems

    def _manifest(self, rel: str, path: str, parts: Mapping[str, str]) -> list[str]:
        """Parts that a manifest names, below its period's data folder, sorted; all of them are there."""
        try:
            body = json.loads(self.fetch(path))
            uris = body["dataFiles"]
            if not isinstance(uris, list) or not all(isinstance(u, str) for u in uris):
                raise TypeError("dataFiles is no list of URIs")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._refuse(
                rel,
                f"not a manifest of AWS Data Exports: {error!r}; expected JSON with dataFiles",
                "Wait for the next export.",
            ) from error
        rests = [match["rest"] if (match := EXPORT.fullmatch(uri)) else uri for uri in uris]
        missing = [uri for uri, rest in zip(uris, rests, strict=True) if rest not in parts]
        if missing or not uris:
            what = f"part {missing[0]} is missing" if missing else "it names no part"
            raise self._refuse(
                rel,
                f"the delivery is incomplete: {what} ({len(uris) - len(missing)} of {len(uris)} parts are there)",
                "Wait until the export has delivered all parts, or export the period again.",
                part=missing[0] if missing else None,
            )
        return sorted(rests)

    def _unannounced(
        self, place: tuple[str, str], parts: Mapping[str, str], named: set[str], has_manifest: bool
    ) -> Iterator[DeliveryError]:
        """Parts of newer executions than any that a manifest names: their delivery is still under way."""
        folders = {_folder(rest) for rest in parts} - {_folder(rest) for rest in named}
        newest = max((_folder(rest) for rest in named), default="")
        for folder in sorted(folders):
            if folder > newest or not has_manifest:
                where = f"{place[0]}data/BILLING_PERIOD={place[1]}/{folder}".rstrip("/")
                yield self._refuse(
                    where,
                    "the delivery is incomplete: no manifest names its parts",
                    "The export writes the manifest last: wait for it. The source's URL must hold metadata/ as well.",
                )

    def _tagged(self, paths: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
        return tuple((path, self._tags[path]) for path in paths)

    def _below(self, path: str) -> str:
        return path[len(self._root) :].lstrip("/") if path != self._root else path.rsplit("/", 1)[-1]

    def _modified(self, path: str) -> str:
        with self._storage(path):
            at: datetime = self._fs.modified(path)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _refuse(self, path: str, problem: str, then: str, **facts: Any) -> DeliveryError:
        return DeliveryError(
            f"bill source {self.name}, {path}: {problem}. The former delivery stands. {then}",
            source=self.name,
            path=path,
            file=path,
            reason=problem,
            **facts,
        )

    @contextmanager
    def _storage(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._refuse(
                path,
                f"cannot be read: {type(error).__name__}: {error}",
                f"Check bills.url of source {self.name} in the settings, and the right to list and read it.",
            ) from error


def shown(text: str) -> str:
    """The text with what UTF-8 cannot hold escaped: file names need not be UTF-8 (`\\xff`)."""
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
        text = re.sub(r"\\udc([89a-f][0-9a-f])", r"\\x\1", text)
    return text


def _tag(info: Mapping[str, Any]) -> str | None:
    """Text that changes whenever a file does: size and the store's tag, or size, times and inode on local disk.

    None where the storage gives none that could be trusted (times in seconds, links whose own time is told).
    """
    etag = info.get("ETag") or info.get("etag") or info.get("md5Hash")
    if etag:
        return f"{info['size']}-{str(etag).strip(chr(34))}"
    if {"mtime", "created", "ino"} <= set(info) and not info.get("islink"):
        return "-".join(str(info[n]) for n in ("size", "mtime", "created", "ino"))
    return None


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _folder(rest: str) -> str:
    return rest.rpartition("/")[0]


def _execution_time(rests: Sequence[str]) -> str | None:
    """UTC text of the execution folder that all parts are in, or None."""
    folders = {_folder(rest).rsplit("/", 1)[-1] for rest in rests}
    match = EXECUTION.fullmatch(folders.pop()) if len(folders) == 1 else None
    if match is None:
        return None
    year, month, day, hour, minute, second = match.groups()[:6]
    return f"{year}-{month}-{day}T{hour}:{minute}:{second}.{(match[7] or '').ljust(6, '0')}Z"


def suffix(data: bytes) -> str:
    """File name suffix for bytes: .parquet, .csv.gz or .csv, told by the bytes and not by a name."""
    return ".parquet" if data[:4] == PARQUET else ".csv.gz" if data[:2] == GZIP else ".csv"


def read_tables(data: bytes, place: Place) -> Iterator[tuple[Place, pa.Table]]:
    """Batches of a bill file, each with the number of its first row.

    Args:
        data: CSV, gzipped CSV or Parquet, told by its first bytes. Columns of CSV come as text, unquoted NULL and empty
            fields as null; columns of Parquet keep their Arrow types.
        place: source and file, for messages.

    Raises:
        DeliveryError: the file has no bytes, is truncated, or not readable. A header without rows gives no batch.
    """
    if not data:
        raise place.refuse(
            None, "a bill", "a file of 0 bytes", "An empty export is not a bill of zero: check the provider's export."
        )
    row = 1
    try:
        for table in _parquet(data) if data[:4] == PARQUET else _text(data, place):
            if len(table):
                yield Place(place.source, place.file, row), table
            row += len(table)
    except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        kind = {".parquet": "Parquet", ".csv.gz": "gzipped CSV", ".csv": "CSV"}[suffix(data)]
        raise place.refuse(
            None,
            f"readable {kind}",
            f"{type(error).__name__}: {str(error)[:300]}",
            "The file is damaged or truncated: copy it again, or export the period again.",
        ) from error


def _parquet(data: bytes) -> Iterator[pa.Table]:
    file = pq.ParquetFile(pa.BufferReader(data))
    for batch in file.iter_batches(batch_size=BATCH_ROWS):
        yield pa.Table.from_batches([batch])


def _text(data: bytes, place: Place) -> Iterator[pa.Table]:
    stream: Any = gzip.GzipFile(fileobj=io.BytesIO(data)) if data[:2] == GZIP else io.BytesIO(data)
    first = stream.readline().decode("utf-8-sig")
    stream.seek(0)
    names = next(csv.reader([first]), [])
    if len({n.strip().casefold() for n in names}) < len(names):
        again = next(n for n in names if [m.strip().casefold() for m in names].count(n.strip().casefold()) > 1)
        raise place.refuse(again, "each column once", "it twice", "Remove one of the two from the export.")
    reader = pacsv.open_csv(
        stream,
        read_options=pacsv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
        parse_options=pacsv.ParseOptions(newlines_in_values=True),
        convert_options=pacsv.ConvertOptions(
            column_types={n: pa.string() for n in names},
            default_column_type=pa.string(),
            null_values=NULLS,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    for batch in reader:
        yield pa.Table.from_batches([batch])
