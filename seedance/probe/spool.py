"""Rows of telemetry to files on the node's disk, cheap enough for a training process; a short-lived uploader reads them.

A spool is one folder of one node, shared by every process there:

    open/<writer>-<hour>-<n>.jsonl   a segment being written; <writer> is <pid>-<start ns>-<8 hex digits>
    closed/                          segments that their writer is done with
    writers/<writer>                 one file a writer, which holds a lock on it while it lives
    batches/, refused/, lock         the uploader's (seedance.upload)

A segment holds the rows of one UTC hour, one line each: a header, then `[table, row]`, and `{"lost_rows": n}` where rows
were lost before. Instants are ns UTC, decimals text. What cannot be written is dropped, counted and warned of once: a full
disk costs telemetry and never a step. Knows no declaration of a table but the column that places its rows in an hour.
Standard library only: this is loaded into the training process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any

from seedance.durations import HOUR_NS

OPEN, CLOSED, WRITERS, BATCHES, REFUSED = "open", "closed", "writers", "batches", "refused"
NEW = ".new-"
"""Begins the name of what is not whole yet."""
FORMAT = 1
"""Version of the lines; stands in each header."""
LATE_NS = 360_000_000_000
"""How long after its end an hour stays open: windows of 300 s are written after they end."""
GRACE_NS = 600_000_000_000
"""How long after its end an uploader leaves an hour to writers that live; to run one earlier is to wait for the next."""
LIMIT_BYTES = 1 << 30
MOST_OPEN = 4
"""Segments that one writer keeps open: rows of more hours at once come from a clock that jumps."""
MOST_NODE = 128
"""Characters of a node's name in a shard's name: file names end at 255 bytes."""
SCAN_NS, SCAN_BYTES = 30_000_000_000, 4 << 20
"""The folder is measured again after that long, or that many bytes."""

CLOCKS = {
    "raw_telemetry__device_samples": "sampled_at_utc",
    "raw_telemetry__process_samples": "sampled_at_utc",
    "raw_telemetry__op_windows": "window_start_utc",
    "raw_telemetry__step_windows": "window_start_utc",
    "raw_telemetry__jobs": "stated_at_utc",
    "raw_telemetry__events": "at_utc",
}
"""The column that places a row of each table in its hour."""

SEGMENT = re.compile(r"(?P<writer>\d+-\d+-[0-9a-f]{8})-(?P<hour>\d{4}-\d\d-\d\dT\d\d)-(?P<number>\d+)\.jsonl")

log = logging.getLogger("seedance.probe")

_OURS: set[str] = set()
"""Writers of this process that live."""


class Spool:
    """Appends rows to the segments of this process. No method raises for what disk, folder or rows are like.

    Safe from several threads. In a forked child it does nothing: the segments are the parent's.

    Args:
        folder: the node's spool; made when the first row comes.
        node: the node's name; see `clean_node`.
        cloud, instance_id, instance_type: where the node runs, in the bill's words; None when it does not know.
        period_ns: nominal time between two rows of one kind, ns.
        clock_offset_ns: host clock minus true UTC, ns; 0 when it was not measured.
        limit_bytes: most that the whole spool may hold; rows above it are dropped.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        node: str,
        *,
        cloud: str | None = None,
        instance_id: str | None = None,
        instance_type: str | None = None,
        period_ns: int = 10_000_000_000,
        clock_offset_ns: int = 0,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.dropped_rows = 0
        """Rows that were lost: disk full, no permission, folder gone, spool at its limit, no JSON."""
        self.written_rows = 0
        self._pid = os.getpid()
        self.writer = f"{self._pid}-{time.time_ns()}-{os.urandom(4).hex()}"
        facts = {
            "seedance_spool": FORMAT,
            "node": clean_node(node),
            "cloud": clean_text(cloud),
            "instance_id": clean_text(instance_id),
            "instance_type": clean_text(instance_type),
            "period_ns": period_ns,
            "clock_offset_ns": clock_offset_ns,
        }
        self._header = json.dumps(facts | process_facts(self._pid), separators=(",", ":")).encode() + b"\n"
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._number = 0
        self._mark = -1
        self._stuck: list[tuple[Path, int]] = []
        self._untold = 0
        self._warned = False
        self._closed = False
        self._used = self._added = 0
        self._measured_ns = -SCAN_NS

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> int:
        """Append rows to the segments of their hours: one write to disk an hour; how many rows are there now.

        Args:
            rows: table and row each; a row that no hour can be told of goes to the present one, and is refused later.
        """
        if os.getpid() != self._pid:
            return 0
        with self._lock:
            hours: dict[int, list[bytes]] = {}
            for table, row in rows:
                line = _line(table, row)
                if line is None:
                    self._lose(1, f"a row of {table!r:.80} cannot be written as JSON", "Report this")
                    continue
                hour = hour_of(table, row)
                hours.setdefault(time.time_ns() // HOUR_NS if hour is None else hour, []).append(line)
            written = sum(self._append(hour, lines) for hour, lines in hours.items())
            self.written_rows += written
            self._close_past(keep=hours)
            return written

    def rotate(self) -> None:
        """Close the segments of hours that are over. `write` does so too; a process without rows calls this at times."""
        if os.getpid() == self._pid:
            with self._lock:
                self._close_past()

    def close(self) -> None:
        """Hand every segment over to the uploader; rows that come later are dropped. Again is fine."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for hour in list(self._segments):
                self._close_segment(hour)
            self._retry_stuck()
            self._closed = True
            if self._mark >= 0:
                with suppress(OSError):
                    (self.folder / WRITERS / self.writer).unlink(missing_ok=True)
                with suppress(OSError):
                    os.close(self._mark)
                self._mark = -1
            _OURS.discard(self.writer)

    def _append(self, hour: int, lines: list[bytes]) -> int:
        """Rows of one hour that are on disk now; the others are counted as lost."""
        kept = 0
        try:
            if self._closed:
                raise OSError(errno.EBADF, "the spool is closed")
            segment = self._segment(hour)
            begin = b"\n" if segment.is_torn else b""
            if self._untold:
                begin += b'{"lost_rows":%d}\n' % self._untold
            data = b"".join([begin, *lines])
            self._make_room(len(data))
            told, self._untold = self._untold, 0
            size, error = segment.append(data)
            kept = max(0, data.count(b"\n", 0, size) - begin.count(b"\n"))
            segment.rows += kept
            self._added += size
            if size < len(begin):
                self._untold += told
            if error is not None:
                raise error
        except OSError as error:
            self._lose(len(lines) - kept, f"{type(error).__name__}: {error.strerror or error}")
        return kept

    def _segment(self, hour: int) -> _Segment:
        """The open segment of an hour, the last used at the end."""
        segment = self._segments.pop(hour, None)
        if segment is not None and segment.is_gone():
            segment.close()
            self._lose(segment.rows, f"{segment.path} was deleted")
            segment = None
        if segment is None:
            while len(self._segments) >= MOST_OPEN:
                self._close_segment(next(iter(self._segments)))
            self._make_room(len(self._header))
            segment = self._open_segment(hour)
        self._segments[hour] = segment
        return segment

    def _open_segment(self, hour: int) -> _Segment:
        self._mark_alive()
        name = f"{self.writer}-{hour_text(hour)}-{self._number}.jsonl"
        self._number += 1
        fd = _create(self.folder / OPEN / f"{NEW}{name}", self._header, lock=False)
        self._added += len(self._header)
        return _Segment(self.folder / OPEN / name, fd)

    def _mark_alive(self) -> None:
        """A locked file that says that this writer lives. Before its first segment: an unmarked one is an orphan."""
        if self._mark >= 0 and os.fstat(self._mark).st_nlink:
            return
        if self._mark >= 0:  # somebody deleted the folder
            os.close(self._mark)
            self._mark = -1
        _OURS.add(self.writer)
        self._mark = _create(self.folder / WRITERS / f"{NEW}{self.writer}", self._header, lock=True)
        self._added += len(self._header)

    def _close_past(self, keep: Container[int] = ()) -> None:
        self._retry_stuck()
        now_ns = time.time_ns()
        for hour in [h for h in self._segments if (h + 1) * HOUR_NS + LATE_NS <= now_ns and h not in keep]:
            self._close_segment(hour)

    def _close_segment(self, hour: int) -> None:
        segment = self._segments.pop(hour)
        gone = segment.is_gone()
        segment.close()
        if gone:
            self._lose(segment.rows, f"{segment.path} was deleted")
        else:
            self._stuck.append((segment.path, segment.rows))
            self._retry_stuck()

    def _retry_stuck(self) -> None:
        """Move finished segments to closed/; what cannot be moved now is tried again, and adopted when the process ends."""
        stuck, self._stuck = self._stuck, []
        for path, rows in stuck:
            try:
                (self.folder / CLOSED).mkdir(parents=True, exist_ok=True)
                path.rename(self.folder / CLOSED / path.name)
            except FileNotFoundError:
                self._lose(rows, f"{path} was deleted")
            except OSError:
                self._stuck.append((path, rows))

    def _make_room(self, size: int) -> None:
        """Raise ENOSPC when the spool would grow above its limit."""
        now = time.monotonic_ns()
        stale = now - self._measured_ns >= SCAN_NS or self._added >= SCAN_BYTES
        if stale or self._used + self._added + size > self._limit:
            self._used, self._added, self._measured_ns = bytes_below(self.folder), 0, now
        if self._used + self._added + size > self._limit:
            raise OSError(
                errno.ENOSPC, f"the spool holds {self._used + self._added:,} bytes; it may hold {self._limit:,} bytes"
            )

    def _lose(
        self, rows: int, why: str, step: str = "Free space there, or name another folder (SEEDANCE_SPOOL)"
    ) -> None:
        self.dropped_rows += rows
        self._untold += rows
        if rows and not self._warned:
            self._warned = True
            log.warning(
                "spool %s: %s. Rows of telemetry are dropped and counted, the next ones are tried again, and the job goes "
                "on. %s. Told once.",
                self.folder,
                why,
                step,
            )


@dataclass
class _Segment:
    """One open file."""

    path: Path
    fd: int
    rows: int = 0
    is_torn: bool = False
    """The last line may lack its end: the next write begins a new one."""

    def append(self, data: bytes) -> tuple[int, OSError | None]:
        """How many bytes are there, whole lines only, and what stopped the rest."""
        was_torn, self.is_torn = self.is_torn, True
        done = 0
        try:
            while done < len(data):  # once, but for a disk that fills up on the way
                done += os.write(self.fd, data[done:] if done else data)
        except OSError as error:
            kept = data.rfind(b"\n", 0, done) + 1
            with suppress(OSError):
                if done > kept:
                    os.ftruncate(self.fd, os.lseek(self.fd, 0, os.SEEK_END) - (done - kept))
                self.is_torn = was_torn and not kept
            return kept, error
        self.is_torn = False
        return done, None

    def is_gone(self) -> bool:
        """True when the file has no name any more."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:
            return True

    def close(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


def clean_node(name: str) -> str:
    """A node's name as it can stand in a shard's name: ASCII letters, digits, `.`, `_`, `-`; the first a letter or digit."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:MOST_NODE]
    return cleaned if re.match(r"[A-Za-z0-9]", cleaned) else f"n{cleaned[: MOST_NODE - 1]}"


def clean_text(text: str | None) -> str | None:
    """The text with lone surrogates (bytes that were no UTF-8 where it came from) spelled out, as `\\udc80`."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def hour_of(table: object, row: object) -> int | None:
    """UTC hour of a row, counted from 1970; None when table or instant is none.

    A reading belongs to the hour in which it ends, the last instant of it included; all else to that in which it begins.
    """
    column = CLOCKS.get(table) if isinstance(table, str) else None
    at = row.get(column) if column is not None and isinstance(row, Mapping) else None
    if not isinstance(at, int) or isinstance(at, bool) or not 0 < at < 2**63:
        return None
    return (at - (column == "sampled_at_utc")) // HOUR_NS


def hour_text(hour: int) -> str:
    """An hour counted from 1970 as YYYY-MM-DDTHH, UTC."""
    return f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%dT%H}"


def bytes_below(folder: Path) -> int:
    """Bytes of every file below a folder; what cannot be read counts nothing."""
    total = 0
    todo = [str(folder)]
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as items:
            for item in items:
                with suppress(OSError):
                    if item.is_dir(follow_symlinks=False):
                        todo.append(item.path)
                    else:
                        total += item.stat(follow_symlinks=False).st_size
    return total


def process_facts(pid: int) -> dict[str, Any]:
    """What tells a process from a later one of the same number: boot, pid namespace, start in clock ticks."""
    return {"pid": pid, "started": _started(pid), **_place()}


def is_alive(mark: Path) -> bool:
    """Whether the writer of a file in writers/ may still write.

    It does when its process runs, or when somebody holds its lock: a process in another container has no number here.
    """
    if mark.name in _OURS and mark.name.startswith(f"{os.getpid()}-"):
        return True  # and not opened: to close it here would set its lock free
    try:
        told = json.loads(mark.read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return _is_locked(mark)
    pid = told.get("pid") if isinstance(told, dict) else None
    if isinstance(pid, int) and process_facts(pid).items() <= told.items() and told["started"] is not None:
        return True
    return _is_locked(mark)


def _is_locked(mark: Path) -> bool:
    try:
        fd = os.open(mark, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # not ours to open: whose it is may still write
        return True
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return True
        # A file system without locks: silent for a day is dead.
        return time.time_ns() - os.fstat(fd).st_mtime_ns < 24 * HOUR_NS
    finally:
        os.close(fd)
    return False


def _place() -> dict[str, str | None]:
    return {"boot_id": _first_line("/proc/sys/kernel/random/boot_id"), "pid_namespace": _link("/proc/self/ns/pid")}


def _started(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when it has ended."""
    stat = _first_line(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split() if stat else []  # the name before it may hold anything
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else None


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return str(Path(path).readlink())
    except OSError:
        return None


def _line(table: str, row: object) -> bytes | None:
    try:
        # ASCII, with escapes for all else: a line feed within text cannot end a line.
        return json.dumps([table, row], separators=(",", ":"), default=_plain).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError):
        return None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Decimal):
        return str(value)
    return f"<{type(value).__name__}>"  # its text could be anything, such as the wait for a GPU


def _create(temporary: Path, data: bytes, *, lock: bool) -> int:
    """A file that appears with this content under its name without NEW; its descriptor, for appending."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        if lock:
            # Of the process, not of the descriptor: a forked child must not keep it.
            with suppress(OSError):
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "no space for a header")
        temporary.rename(temporary.parent / temporary.name.removeprefix(NEW))
    except OSError:
        os.close(fd)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return fd
