"""The lake: how stages keep what they made, how a day is committed, and how it is published for readers.

Everything but `report/` and `quarantine/` is immutable. A day's highest commit is its head; `report/` is a copy of the
head's report tables that is repaired whenever it differs. Knows no stage and no clock.

A report table that an earlier commit had and the head has not keeps its file: nothing published is deleted here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from typing import Any

import pyarrow as pa

from seedance.canonical import canonical
from seedance.errors import Exists, ShardError, StoreError
from seedance.schema import Table, conform
from seedance.shard import ShardName, content_sha16, parse_name
from seedance.store import Entry, Store, Watch
from tasks.errors import DeterminismError, LayoutError, PipelineError
from tasks.io import parquet
from tasks.io.handles import (
    LAYOUT,
    Commit,
    Handle,
    Part,
    ShardRef,
    Step,
    bucket_count,
    commit_numbers,
    is_day,
    layout_gone,
    read_commit,
    read_record,
    read_step,
    record_text,
    step_difference,
)

__all__ = ["Commit", "Handle", "Lake", "Moved", "Part", "ShardRef", "Step"]

REPORT_PREFIX = "report_"
NOT_SHARDS = ("bills", "prices")
FEW_DAYS = 7
COPIES_AT_ONCE = 8
MADE_ANEW = (
    "The stage that made it makes it anew when the day is run again; a day that is committed already is due once the "
    "commit that names it, days/<day>/<n>.json, is deleted."
)
FEW_PARTS = 64
"""Parts of one step that are looked up one by one when it is reused; more are found in one listing a table."""

log = logging.getLogger(__name__)


class Moved(PipelineError):
    """Another run committed the day first, from other inputs: day, expected, found, key. Compute the day again."""


@dataclass(frozen=True)
class Lake:
    """One lake: its store, and the number of buckets that a reduction is cut into."""

    store: Store
    buckets: int

    @classmethod
    def open(cls, url: str, *, buckets: int = 8, watch: Watch | None = None) -> Lake:
        """The lake at a URL, made when there is none.

        Args:
            url: folder or fsspec URL.
            buckets: bucket count of a new lake; a lake that is there keeps its own.
            watch: called around every write (see `seedance.store`).

        Raises:
            StoreError: the store cannot refuse a second create, or cannot be written.
            LayoutError: the lake was written by newer code, or lake.json is not ours or was deleted; carries url,
                expected, found.
        """
        store = Store(url, watch=watch)
        store.check()
        raw = store.get("lake.json")
        if raw is None:
            made = [name for name in store.folders("") if name in ("days", "steps")]
            raw = store.get("lake.json")  # another run can have made it, and steps, since the first look
            if made and raw is None:
                raise layout_gone(store.url, made)
        if raw is None:
            with contextlib.suppress(Exists):  # another run made it in between, perhaps with another bucket count
                store.create("lake.json", canonical({"layout": LAYOUT, "buckets": buckets}))
            raw = store.read("lake.json")
        return cls(store, bucket_count(raw, store.url))

    # --- tables ------------------------------------------------------------------------------------------------------

    def put_table(self, table: pa.Table, spec: Table) -> Part:
        """Keep a table as one object named by its bytes.

        Raises:
            SchemaError: the rows do not meet the declaration, or a key comes twice.
        """
        data = parquet.to_bytes(table, spec)
        digest = hashlib.sha256(data).hexdigest()
        path = f"objects/{spec.name}/{digest}.parquet"
        self.store.put(path, data)
        return Part(path, table.num_rows, len(data), digest)

    def handle(self, spec: Table, day: str | None, tables: Iterable[pa.Table]) -> Handle:
        """Keep tables as the parts of one handle, in the order given.

        A report table always gets exactly one part, however many tables (or none) are given: readers see one object.
        """
        if spec.name.startswith(REPORT_PREFIX):
            tables = [pa.concat_tables([spec.empty(), *(conform(t, spec, where=spec.name) for t in tables)])]
        return Handle(spec.name, spec.version, day, tuple(self.put_table(table, spec) for table in tables))

    def read(self, handle: Handle, spec: Table, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a handle, every byte verified.

        Args:
            handle: what to read.
            spec: declaration of the table that is expected.
            columns: read these only, in the order of the declaration.

        Raises:
            StoreError: an object is missing or altered; carries url, path.
            SchemaError: the handle or an object is of another table or version.
        """
        shape = spec if columns is None else parquet.narrow(spec, columns)
        tables = [
            parquet.from_bytes(self.read_part(part), spec, where=f"{self.store.url}/{part.path}", columns=columns)
            for part in handle.parts
        ]
        return pa.concat_tables(tables) if tables else shape.empty()

    def read_part(self, part: Part) -> bytes:
        """The bytes of one object, verified against its digest.

        Raises:
            StoreError: it is missing or altered; carries url, path.
        """
        data = self.store.get(part.path)
        if data is None:
            problem, found = f"no object {part.path}. ", None
        elif (found := hashlib.sha256(data).hexdigest()) != part.sha256:
            problem = (
                f"{part.path} was altered: expected sha256 {part.sha256} ({part.bytes:,} bytes), found {found} "
                f"({len(data):,} bytes). Delete {self.store.url}/{part.path} and run the day again. "
            )
        else:
            return data
        raise StoreError(
            f"{self.store.url}: {problem}{MADE_ANEW}",
            url=self.store.url,
            path=part.path,
            expected=part.sha256,
            found=found,
        )

    def missing(self, handles: Iterable[Handle]) -> list[str]:
        """Paths of objects that handles name and that are gone or of another size; objects are looked up, not read."""
        return self._gone([part for handle in handles for part in handle.parts])

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, stage: str, key: str) -> Step | None:
        """What this key of a stage made; None when it has not been run to its end, or is to be run again.

        It is when its text was cut or edited, or an object that it names is gone or of another size. Objects are looked
        up, not read: one request for each of up to 64, else one listing for each table.
        """
        path = _step_path(stage, key)
        raw = self.store.get(path)
        step = None if raw is None else read_step(raw, path)
        gone = [] if step is None else self.missing(step.handles.values())
        if gone:
            log.warning("%s: %d object(s) gone or cut, first %s: the step is run again", path, len(gone), gone[0])
        return None if gone else step

    def create_step(self, stage: str, key: str, step: Step) -> Step:
        """Record what a key made; the same outputs a second time are fine. A text that is no step is replaced.

        Raises:
            DeterminismError: the key made other outputs before; carries stage, key, expected, found. The former stand.
        """
        path = _step_path(stage, key)
        text = step.to_json()
        try:
            self.store.create(path, text.encode())
        except Exists as error:
            stored = read_step(self.store.read(path), path)
            if stored is None:
                self.store.replace(path, text.encode())
            elif stored.to_json() != text:
                lines = "\n  ".join(step_difference(stored, step))
                raise DeterminismError(
                    f"{stage}: the same key gave other outputs than before ({path}):\n  {lines}\n"
                    "The stored ones stand. Find what the stage reads beside its declared inputs; a run in another "
                    "environment can be the cause.",
                    stage=stage,
                    key=key,
                    expected=stored.to_json(),
                    found=text,
                ) from error
        return step

    # --- commits -----------------------------------------------------------------------------------------------------

    def head(self, day: str) -> Commit | None:
        """The newest commit of a day, or None."""
        n = self._newest(day)
        return self._commit(day, n) if n else None

    def commits(self, day: str) -> list[Commit]:
        """Every commit of a day, oldest first."""
        numbers = sorted(commit_numbers(self.store.list(f"days/{day}")).get(day, []))
        return [self._commit(day, n) for n in numbers]

    def committed_days(self) -> list[str]:
        """Days with a commit, sorted."""
        return sorted(commit_numbers(self.store.list("days")))

    def commit(self, day: str, body: Mapping[str, Any]) -> Commit:
        """Make the next commit of a day; the head of the same key is the same commit.

        Args:
            day: UTC usage day, YYYY-MM-DD.
            body: {parent, key, data_key, handles, bills, prices, alphas, cause, facts}, canonical JSON without floats
                and times; handles may be `Handle`s. `parent` is the head's number when the caller read its inputs, 0
                when there was none; left out, the head of now.

        Raises:
            Moved: a commit of another key came in between. Recompute on the newest inputs.
            LayoutError: the day is not a date, the body has no key, or a report table is not one object.
        """
        _check_day(day)
        filled = {**body, "handles": {k: _as_dict(v) for k, v in body.get("handles", {}).items()}}
        if not filled.get("key"):
            raise LayoutError(f"commit of {day}: expected the key of the run in the body.", expected="key", found=None)
        for name, facts in filled["handles"].items():
            _check_report(name, Handle.from_dict(facts))
        head = self.head(day)
        if head is not None and head.key == filled["key"]:
            return head
        newest = head.n if head else 0
        parent = newest if filled.get("parent") is None else int(filled["parent"])
        filled["parent"] = parent
        if parent == newest:
            data = canonical(filled)
            try:
                self.store.create(f"days/{day}/{parent + 1}.json", data)
                return Commit(day, parent + 1, json.loads(data))
            except Exists:
                head = self.head(day)
        if head is not None and head.key == filled["key"]:
            return head
        found = head.n if head else 0
        raise Moved(
            f"commit of {day}: expected revision {parent} as the head, found {found}: another run committed the day "
            "from other inputs. Compute the day again on the newest inputs.",
            day=day,
            expected=parent,
            found=found,
            key=filled["key"],
        )

    # --- what readers see --------------------------------------------------------------------------------------------

    def materialise(self, day: str) -> list[str]:
        """Bring `report/` to the head of a day, until the head no longer moves.

        Returns:
            Paths that were replaced, sorted; none for a day without a commit.
        """
        replaced: set[str] = set()
        head = self.head(day)
        while head is not None:
            replaced.update(self._publish(head))
            newest = self._newest(day)
            if newest == head.n:
                break
            head = self._commit(day, newest)
        return sorted(replaced)

    def repair(self) -> list[str]:
        """Bring `report/` back to the heads of all days: interrupted runs, and writers that woke up late.

        Returns:
            Paths that were replaced, sorted.

        Raises:
            StoreError: a day's object is missing or altered; every other day was brought back before.
            LayoutError: likewise for a day's commit that cannot be read.
        """
        listed = {entry.path: entry.etag for entry in self.store.list("report", digest=True)}
        heads = {day: max(numbers) for day, numbers in commit_numbers(self.store.list("days")).items()}
        replaced: list[str] = []
        failed: list[StoreError | LayoutError] = []
        for day, newest in sorted(heads.items()):
            record = self._record(day) if _record_path(day) in listed else {}
            whole = record.get("commit") == newest and all(
                listed.get(path) == etag for path, etag in record.get("etags", {}).items()
            )
            if not whole:
                try:
                    replaced.extend(self.materialise(day))
                except (StoreError, LayoutError) as error:
                    failed.append(error)
        if failed:
            raise failed[0]
        return sorted(replaced)

    def publish_as_of(self, handle: Handle, day: str) -> None:
        """Replace `report/<table>/as_of_date=<day>/data.parquet`, for a table that is not daily.

        Raises:
            LayoutError: the handle is not one object, or the day is not a date.
        """
        _check_day(day)
        _check_report(handle.table, handle, always=True)
        path = f"report/{handle.table}/as_of_date={day}/data.parquet"
        data = self.read_part(handle.parts[0])
        if self.store.get(path) != data:
            self.store.replace(path, data)

    # --- shards ------------------------------------------------------------------------------------------------------

    def shards(self, days: Collection[str] | None = None) -> list[ShardRef]:
        """The shards in `raw/`, sorted by path; of these usage days only, when given.

        Few days are listed one by one, so that the cost does not grow with the lake's age; otherwise in one listing.
        """
        if days is not None and len(days) <= FEW_DAYS:
            tables = [name for name in self.store.folders("raw") if name not in NOT_SHARDS]
            prefixes = [f"raw/{table}/date={day}" for table in tables for day in sorted(set(days))]
        else:
            prefixes = ["raw"]
        found = (
            ShardRef(name, entry.path, entry.bytes)
            for prefix in prefixes
            for name, entry in _named(self.store.list(prefix, odd=_left_out), "raw/")
        )
        return sorted(
            (ref for ref in found if days is None or ref.name.day.isoformat() in days), key=lambda ref: ref.path
        )

    def admit(self, drop: Store) -> list[str]:
        """Copy the shards of a drop folder into `raw/`, each under the name that its bytes give.

        The same bytes of one table and hour are one object, however often and under whatever name they come. A shard
        that is damaged, or still being uploaded, is kept under the name of the bytes seen: the whole one still gets in.

        Returns:
            Paths in the lake that are new, sorted.
        """
        offered = list(_named(drop.list("", odd=_left_out), ""))
        days = {name.day.isoformat() for name, _ in offered}
        known = {_content(ref.name) for ref in self.shards(days)} if days else set()
        fresh = [(name, entry) for name, entry in offered if _content(name) not in known]
        added: list[str] = []
        for name, data in self._fetch(drop, fresh):
            true_name = ShardName(name.table, name.day, name.hour, name.producer, name.seq, content_sha16(data))
            if _content(true_name) in known:
                continue
            known.add(_content(true_name))
            path = f"raw/{true_name.path}"
            self.store.put(path, data)
            added.append(path)
        return sorted(added)

    def quarantine(self, path: str, record: Mapping[str, Any]) -> None:
        """Say why a shard is not used, in `quarantine/<table>/<sha16>.json`; the shard stays where it is.

        Args:
            path: the shard, in the lake.
            record: reason and share of the day, canonical JSON without floats and times.
        """
        name = parse_name(path)
        self.store.replace(f"quarantine/{name.table}/{name.sha16}.json", canonical({**record, "path": path}))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _newest(self, day: str) -> int:
        return max(commit_numbers(self.store.list(f"days/{day}")).get(day, [0]))

    def _commit(self, day: str, n: int) -> Commit:
        return read_commit(self.store.read(f"days/{day}/{n}.json"), day, n, self.store.url)

    def _record(self, day: str) -> dict[str, Any]:
        return read_record(self.store.get(_record_path(day)), _record_path(day))

    def _gone(self, parts: Sequence[Part]) -> list[str]:
        """Paths of the parts whose object is missing or of another size, in order."""
        if len(parts) > FEW_PARTS:
            folders = {part.path.rpartition("/")[0] for part in parts}
            sizes = {entry.path: entry.bytes for folder in sorted(folders) for entry in self.store.list(folder)}
            return [part.path for part in parts if sizes.get(part.path) != part.bytes]
        paths = [part.path for part in parts]
        if self.store.is_local or len(paths) < 2:
            found = [self.store.stat(path) for path in paths]
        else:
            with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
                found = list(pool.map(self.store.stat, paths))
        return [
            part.path for part, entry in zip(parts, found, strict=True) if entry is None or entry.bytes != part.bytes
        ]

    def _publish(self, commit: Commit) -> list[str]:
        """Replace what differs from the commit, then say in `_days` what was written; the paths replaced.

        The tags recorded are those of this writer's own bytes: one that overwrites them afterwards is found by its tag.
        """
        record = self._record(commit.day)
        etags, parts, replaced = {}, {}, []
        for name, handle in sorted(commit.handles.items()):
            if not name.startswith(REPORT_PREFIX):
                continue
            (part,) = handle.parts
            path = f"report/{name}/usage_date={commit.day}/data.parquet"
            entry = self.store.stat(path, digest=True)
            written = record.get("etags", {}).get(path)
            mine = record.get("parts", {}).get(path) == part.sha256 and entry is not None and entry.etag == written
            if entry is not None and (mine or entry.etag == part.sha256):
                etags[path] = entry.etag
            else:
                etags[path] = self.store.replace(path, self.read_part(part))
                replaced.append(path)
            parts[path] = part.sha256
        data = record_text(commit, etags, parts)
        if self.store.get(_record_path(commit.day)) != data:
            self.store.replace(_record_path(commit.day), data)
        return replaced

    def _fetch(self, drop: Store, fresh: list[tuple[ShardName, Entry]]) -> Iterator[tuple[ShardName, bytes]]:
        """Name and bytes of each, in order; a few at a time are on their way when the drop folder is remote."""
        if drop.is_local:
            yield from ((name, drop.read(entry.path)) for name, entry in fresh)
            return
        with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
            for start in range(0, len(fresh), COPIES_AT_ONCE):
                batch = fresh[start : start + COPIES_AT_ONCE]
                names, paths = [name for name, _ in batch], [entry.path for _, entry in batch]
                yield from zip(names, pool.map(drop.read, paths), strict=True)


def _named(entries: Iterable[Entry], prefix: str) -> Iterator[tuple[ShardName, Entry]]:
    """The entries whose path is a shard's name below the prefix."""
    for entry in entries:
        try:
            name = parse_name(entry.path)
        except ShardError:
            if not entry.path.startswith(tuple(f"{prefix}{folder}/" for folder in NOT_SHARDS)):
                log.warning("%s is not the name of a shard and is left where it is", entry.path)
            continue
        yield name, entry


def _left_out(path: str, reason: str) -> None:
    log.warning("%s cannot be listed and is left where it is: %s", path, reason)


def _content(name: ShardName) -> tuple[str, date, int, str]:
    return name.table, name.day, name.hour, name.sha16


def _as_dict(handle: Handle | Mapping[str, Any]) -> dict[str, Any]:
    return handle.to_dict() if isinstance(handle, Handle) else dict(handle)


def _check_day(day: str) -> None:
    if not is_day(day):
        raise LayoutError(f"{day!r} is not a day. Expected YYYY-MM-DD.", expected="YYYY-MM-DD", found=day)


def _check_report(name: str, handle: Handle, *, always: bool = False) -> None:
    if (always or name.startswith(REPORT_PREFIX)) and (len(handle.parts) != 1 or name != handle.table):
        raise LayoutError(
            f"{name}: a published table is exactly one object a day; found {len(handle.parts)} of {handle.table}. "
            "Make it with Lake.handle.",
            table=name,
            expected=1,
            found=len(handle.parts),
        )


def _step_path(stage: str, key: str) -> str:
    return f"steps/{stage}/{key}.json"


def _record_path(day: str) -> str:
    return f"report/_days/{day}.json"
