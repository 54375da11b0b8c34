"""Spools for tests: rows in, shards as the pipeline judges them out, and what can go wrong between."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from seedance.cli import main
from seedance.probe.spool import Spool
from seedance.schema import STEP_WINDOWS, Table
from seedance.shard import parse_name
from tasks.core.shards import Examined, examine, settle
from tests.shard_tables import NODE

ROOT = Path(__file__).resolve().parent.parent
FACTS: dict[str, Any] = {"cloud": "aws", "instance_id": "i-0a", "instance_type": "p4d.24xlarge"}


def write(folder: Path, *rows: tuple[Table, Any], node: str = NODE, **facts: Any) -> None:
    """The rows in a closed segment."""
    with Spool(folder, node, **(FACTS | facts)) as spool:
        assert spool.write([(spec.name, r) for spec, r in rows]) == len(rows)


def examined(drop: Path) -> list[Examined]:
    """Every shard of a drop folder, as the pipeline judges it alone and beside the others."""
    found = []
    for path in sorted(drop.rglob("*.parquet")):
        name = parse_name(str(path))
        assert str(path).endswith(name.path)
        assert main(["check-shard", str(path)]) == 0
        found.append(examine(f"raw/{name.path}", name, path.read_bytes(), last_day=date(2099, 1, 1)))
    assert [shard.reason for shard in found if shard.reason] == []
    for key in {(s.name.table, s.name.producer, s.name.day, s.name.hour) for s in found}:
        same = [s for s in found if (s.name.table, s.name.producer, s.name.day, s.name.hour) == key]
        assert settle(same)[1:] == ({}, {})
    return found


def tables(drop: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by table, instants as ns."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for shard in examined(drop):
        assert shard.table is not None
        plain = pa.table(
            [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in shard.table.columns],
            names=shard.table.column_names,
        )
        rows.setdefault(shard.name.table, []).extend(plain.to_pylist())
    return rows


def refused(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in sorted((folder / "refused").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def left(folder: Path) -> list[str]:
    """Files below a spool, but the lock."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != "lock")


def stated(number: int, at_ns: int | None = None) -> tuple[str, dict[str, Any]]:
    """A row that has nothing but its number and its instant: now, when left out."""
    return STEP_WINDOWS.name, {"window_start_utc": time.time_ns() if at_ns is None else at_ns, "rank": number}


def segments(folder: Path, below: str = "open") -> list[Path]:
    """Files in a folder of a spool."""
    return sorted((folder / below).glob("*")) if (folder / below).is_dir() else []


def lines(folder: Path, below: str = "open") -> list[Any]:
    """Every line but the headers; each must be whole."""
    found = []
    for path in segments(folder, below):
        data = path.read_bytes()
        assert data.endswith(b"\n")
        header, *rest = (json.loads(line) for line in data.splitlines())
        assert header["seedance_spool"] == 1
        found += rest
    return found


def ranks(folder: Path, below: str = "open") -> list[int]:
    """Numbers of the rows in a folder of a spool, in order."""
    return [line[1]["rank"] for line in lines(folder, below) if isinstance(line, list)]


def script(text: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, in the root of this project."""
    words = [sys.executable, "-c", text, *(str(a) for a in args)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 256 KiB in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@cache
def can_mount() -> bool:
    """True where this user may make a small disk."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "disk"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def fill_up(file: Path) -> None:
    """Take all the space that a disk has."""
    with file.open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))


class Proxy:
    """Stands before a store, and does one thing to one of the puts that come through.

    Args:
        port: where the store listens.
        number: which put, from 0.
        when: "asked": it never comes to the store; "answered": its answer never comes back.
        then: called at that moment; the connection is cut afterwards.
    """

    def __init__(self, port: int, number: int, when: str, then: Callable[[], object]) -> None:
        self._port, self._left, self._when, self._then = port, number, when, then
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.hits = 0

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as store, suppress(OSError):
            chosen = threading.Event()
            back = threading.Thread(target=self._answers, args=(client, store, chosen), daemon=True)
            back.start()
            while data := client.recv(65536):
                if data.startswith(b"PUT ") and b".parquet" in data:
                    with self._lock:
                        self._left -= 1
                        if self._left == -1:
                            chosen.set()
                    if chosen.is_set() and self._when == "asked":
                        self._hit(client, store)
                        return
                store.sendall(data)
            back.join(5)

    def _answers(self, client: socket.socket, store: socket.socket, chosen: threading.Event) -> None:
        with suppress(OSError):
            while data := store.recv(65536):
                if chosen.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    self._hit(client, store)
                    return
                client.sendall(data)

    def _hit(self, client: socket.socket, store: socket.socket) -> None:
        self.hits += 1
        self._then()
        for end in (client, store):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
