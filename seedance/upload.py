"""A spool's finished segments to shards in the drop folder, each row once, whatever dies on the way.

Segments of an hour are moved into a batch, by renames; from then on the batch never changes, so its shards have the same
names and bytes however often they are written. When the drop folder has all of them, the batch goes. Whoever is killed
leaves a state from which the next one goes on:

    closed/ -> batches/.new-<seq>/ -> batches/<seq>/ -> (one create-only put a table) -> batches/.done-<seq>/ -> nothing

One uploader at a time (a lock on the spool). A drop folder that does not answer costs a bounded time, and the batch waits.
Runs as a short-lived process: what it imports must not stay in a training process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from seedance.durations import HOUR_NS
from seedance.errors import Exists, SeedanceError, StoreError
from seedance.probe.spool import (
    BATCHES,
    CLOSED,
    GRACE_NS,
    LIMIT_BYTES,
    NEW,
    OPEN,
    REFUSED,
    SEGMENT,
    WRITERS,
    bytes_below,
    is_alive,
)
from seedance.segments import Group, Header, Refusal, read_segments
from seedance.shard import write_shard
from seedance.store import Store

DONE = ".done-"
"""Begins the name of a batch that the drop folder has."""
PATIENCE_NS = HOUR_NS
"""How long after its end an hour waits for a living writer that keeps it open."""
OBJECT_TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 180.0
KEEP_BYTES = LIMIT_BYTES // 2
REFUSED_BYTES = 64 << 20
RETRIES = {"AWS_MAX_ATTEMPTS": "2"}
"""For the environment of a process that uploads: s3fs tries five times, and each time its client would too."""

Made = TypeVar("Made")

log = logging.getLogger(__name__)


@dataclass
class Uploaded:
    """What one run did."""

    shards: int = 0
    """Shards that the drop folder has now."""
    rows: int = 0
    """Rows in them."""
    refused_rows: int = 0
    """Rows that break their declaration; they are in refused/."""
    torn_lines: int = 0
    """Lines that a killed writer or a full disk cut."""
    lost_rows: int = 0
    """Rows that writers say they lost before."""
    dropped_batches: int = 0
    """Batches given up because too many waited."""
    waiting_batches: int = 0
    """Batches that the drop folder did not take."""
    problem: str | None = None
    """Why batches wait; None when none does."""

    def __str__(self) -> str:
        told = [f"uploaded {self.rows:,} rows in {self.shards:,} shards"]
        for count, what in (
            (self.refused_rows, "rows refused"),
            (self.torn_lines, "lines torn"),
            (self.lost_rows, "rows lost before they were written"),
            (self.dropped_batches, "batches dropped"),
        ):
            if count:
                told.append(f"{count:,} {what}")
        return f"{', '.join(told)}."


def upload(
    spool: str | os.PathLike[str],
    to: str,
    *,
    final: bool = False,
    object_timeout_s: float = OBJECT_TIMEOUT_S,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    keep_bytes: int = KEEP_BYTES,
    now_ns: int | None = None,
) -> Uploaded:
    """Send what is finished in a spool to a drop folder.

    Args:
        spool: the node's spool folder.
        to: folder or URL that shards go to.
        final: send the present hour too, when no writer of the spool lives.
        object_timeout_s: longest that one object may take, s; also bounds what a silent bucket costs.
        lock_timeout_s: longest wait for another uploader, s.
        keep_bytes: most that waiting batches may hold; the oldest are dropped above it.
        now_ns: the time, ns UTC; the clock's when left out.

    Raises:
        StoreError: the spool cannot be read or changed, or another uploader is at work; carries url, path.
    """
    folder = Path(spool).absolute()
    if not folder.is_dir():
        raise StoreError(
            f"upload: no spool {folder}. Expected the folder that the probe writes to (SEEDANCE_SPOOL).",
            url=str(folder),
            path="",
        )
    done = Uploaded()
    try:
        with _locked(folder, lock_timeout_s):
            _recover(folder)
            alive, held = _adopt(folder)
            now = time.time_ns() if now_ns is None else now_ns
            for hour in _due(folder, alive, held, now, final=final):
                _make_batch(folder, hour)
            _send_all(folder, to, object_timeout_s, done)
            _bound(folder, keep_bytes, done)
            done.waiting_batches = len(_batches(folder))
    except OSError as error:
        raise StoreError(
            f"upload: spool {folder}: {type(error).__name__}: {error}. Expected a folder that this user may read and change; "
            "nothing that was not sent is lost.",
            url=str(folder),
            path=str(error.filename or ""),
        ) from error
    return done


@contextmanager
def _locked(folder: Path, timeout_s: float) -> Iterator[None]:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"upload: another uploader has worked on spool {folder} for {timeout_s:g} s. Expected one at a "
                        "time; run this again later.",
                        url=str(folder),
                        path="lock",
                    ) from error
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _recover(folder: Path) -> None:
    """Undo batches that were being made, end those that were being removed."""
    for batch in _list(folder / BATCHES):
        if batch.name.startswith(NEW):  # never sent: its segments are free
            for segment in _list(batch):
                segment.rename(_made(folder / CLOSED) / segment.name)
            batch.rmdir()
        elif batch.name.startswith(DONE):
            shutil.rmtree(batch, ignore_errors=True)


def _adopt(folder: Path) -> tuple[bool, set[str]]:
    """Close the segments of writers that are dead; whether another lives, and the hours that living ones have open."""
    held: set[str] = set()
    # A writer marks itself before its first segment: whoever has one here and no living mark is dead.
    for segment in _list(folder / OPEN):
        name = SEGMENT.fullmatch(segment.name.removeprefix(NEW))
        if name is None:
            continue
        if is_alive(folder / WRITERS / name["writer"]):
            held.add(name["hour"])
        elif segment.name.startswith(NEW):  # nothing but a header
            segment.unlink(missing_ok=True)
        else:
            with suppress(FileNotFoundError):  # closed by its writer since
                segment.rename(_made(folder / CLOSED) / segment.name)
    alive = False
    for mark in _list(folder / WRITERS):
        if is_alive(mark):
            alive = True
        elif not mark.name.startswith(NEW) or time.time_ns() - _changed_ns(mark) > GRACE_NS:
            mark.unlink(missing_ok=True)
    return alive, held


def _due(folder: Path, alive: bool, held: set[str], now_ns: int, *, final: bool) -> list[str]:
    """Hours whose closed segments can go."""
    names = [SEGMENT.fullmatch(segment.name) for segment in _list(folder / CLOSED)]
    due = []
    for hour in sorted({name["hour"] for name in names if name is not None}):
        try:
            start = datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC)
        except ValueError:  # no segment of ours
            continue
        over_ns = now_ns - int(start.timestamp()) * 1_000_000_000 - HOUR_NS
        if not alive:
            is_due = final or over_ns >= 0
        else:
            is_due = over_ns >= (PATIENCE_NS if hour in held else GRACE_NS)
        if is_due:
            due.append(hour)
    return due


def _make_batch(folder: Path, hour: str) -> None:
    """Move the closed segments of an hour into a batch of its own."""
    names = [batch.name.rpartition("-")[2] for batch in _list(folder / BATCHES)]
    # The time, and not a count: a spool that was lost must not begin again with numbers that were used.
    seq = max([time.time_ns(), *(int(name) + 1 for name in names if name.isdecimal())])
    new = _made(folder / BATCHES / f"{NEW}{seq}")
    for segment in _list(folder / CLOSED):
        name = SEGMENT.fullmatch(segment.name)
        if name is not None and name["hour"] == hour:
            _sync(segment)
            segment.rename(new / segment.name)
    # Else a power cut after the first put could give the rows to another batch, and they would count twice.
    for changed in (new, folder / CLOSED):
        _sync(changed)
    new.rename(folder / BATCHES / str(seq))
    _sync(folder / BATCHES)


def _send_all(folder: Path, to: str, timeout_s: float, done: Uploaded) -> None:
    """Send batches, the oldest first, until one fails."""
    waiting = _batches(folder)
    if not waiting:
        return
    try:
        store = _bounded(partial(Store, to), timeout_s, to)  # some clients ask for credentials here
        for batch in waiting:
            _send(batch, store, timeout_s, done)
            batch.rename(batch.with_name(f"{DONE}{batch.name}"))
            shutil.rmtree(batch.with_name(f"{DONE}{batch.name}"), ignore_errors=True)
    except StoreError as error:
        done.problem = str(error)


def _send(batch: Path, store: Store, timeout_s: float, done: Uploaded) -> None:
    read = read_segments(_list(batch))
    shards: list[tuple[str, bytes, int]] = []
    refused = read.refused
    for (node, hour, _), group in read.groups.items():
        try:
            name, data = _shard(group, read.headers[node, hour], int(batch.name))
            shards.append((name, data, group.table.num_rows))
        except (SeedanceError, pa.ArrowException, UnicodeError) as error:  # a rule that the rows' own check lacks
            refused += group.refuse(range(group.table.num_rows), str(error))
    _write_refused(batch, refused)
    for name, data, rows in shards:
        _bounded(partial(_put, store, name, data), timeout_s, f"{store.url}: {name}")
        done.shards += 1
        done.rows += rows
    done.refused_rows += len(refused)
    done.torn_lines += read.torn_lines
    done.lost_rows += read.lost_rows


def _shard(group: Group, header: Header, seq: int) -> tuple[str, bytes]:
    return write_shard(
        group.table,
        group.spec,
        producer=header.node,
        node=header.node,
        cloud=header.cloud,
        instance_id=header.instance_id,
        instance_type=header.instance_type,
        hour=group.hour,
        seq=seq,
        period_ns=header.period_ns,
        clock_offset_ns=header.clock_offset_ns,
    )


def _put(store: Store, name: str, data: bytes) -> None:
    """Create an object; one that is there is this one, from a try whose answer was lost."""
    try:
        store.create(name, data)
    except Exists:
        try:
            there = store.get(name)
        except StoreError:  # may not be read; the name is made of the content
            return
        if there is not None and there != data:
            log.warning("%s: %s holds %d bytes that are not those of its name: replaced", store.url, name, len(there))
            store.replace(name, data)


def _bounded(act: Callable[[], Made], timeout_s: float, what: str) -> Made:
    """What comes of something that may hang, awaited so long; the rest of it ends with the process and does no harm."""
    made: list[Made] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(act())
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not made:
        raise StoreError(
            f"{what}: no answer within {timeout_s:g} s. The batch waits in the spool; check the URL and the network.",
            url=what,
            path="",
        )
    return made[0]


def _write_refused(batch: Path, refused: list[Refusal]) -> None:
    """The refused rows of a batch to one file, whole or not at all; the oldest files go above REFUSED_BYTES."""
    if not refused:
        return
    folder = batch.parent.parent / REFUSED
    name = f"{batch.name}.jsonl"
    log.warning(
        "upload: %d row(s) are refused, the first of %s line %d: %s. They are in %s.",
        len(refused),
        refused[0].segment,
        refused[0].line,
        refused[0].reason,
        folder / name,
    )
    try:
        new = _made(folder) / f"{NEW}{name}"
        with new.open("w", encoding="ascii") as file:
            for row in refused:
                facts = {"segment": row.segment, "line": row.line, "reason": row.reason, "text": row.text}
                file.write(json.dumps(facts) + "\n")
        new.replace(folder / name)
        files = [file for file in _list(folder) if file.name != name]
        while files and bytes_below(folder) > REFUSED_BYTES:
            files.pop(0).unlink()
    except OSError as error:  # a full disk: the good rows go all the same
        log.warning("upload: refused rows could not be kept: %s", error)


def _bound(folder: Path, keep_bytes: int, done: Uploaded) -> None:
    """Drop the oldest waiting batches above a size."""
    waiting = [(batch, bytes_below(batch)) for batch in _batches(folder)]
    total = sum(size for _, size in waiting)
    for batch, size in waiting:
        if total <= keep_bytes:
            break
        log.warning(
            "upload: batch %s of %d bytes is dropped: %d bytes wait, %d may. Make the drop folder reachable.",
            batch.name,
            size,
            total,
            keep_bytes,
        )
        gone = batch.with_name(f"{DONE}{batch.name}")
        batch.rename(gone)
        shutil.rmtree(gone)
        total -= size
        done.dropped_batches += 1


def _batches(folder: Path) -> list[Path]:
    return sorted((b for b in _list(folder / BATCHES) if b.name.isdecimal()), key=lambda b: int(b.name))


def _list(folder: Path) -> list[Path]:
    """What is in a folder, sorted; nothing when there is none."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return time.time_ns()


def _sync(path: Path) -> None:
    """Bring a file or folder to disk, as far as its file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
