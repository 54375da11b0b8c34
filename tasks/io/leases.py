"""Leases: of several runs of one day, one computes and the others wait a while, so that no work is done twice.

Nothing is guarded by them. A run that waited its time goes on without, and of two runs that compute the same day one commit
wins, as ever. `leases/<day>/<n>.json` says who holds a day; n is a fencing number, one more each time that it changes hands.
Time is only ever one's own monotonic clock: no two hosts' clocks are compared. Source: infra/rules/lake.md 11.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedance.canonical import canonical
from seedance.errors import Exists, StoreError
from seedance.store import Store
from tasks.io.handles import BROKEN

POLL_S = 0.5
_HELD_HERE: set[str] = set()
"""Tokens of the leases that this process holds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """A day that is held: its fencing number, and the token that tells this holder from any other."""

    day: str
    n: int
    token: str


@dataclass(frozen=True)
class Turns:
    """Leases of days, in order; and the days that another run held when they were asked for: plan them again."""

    leases: tuple[Lease, ...]
    waited: tuple[str, ...]
    waited_ms: int


def take(
    store: Store,
    days: Sequence[str],
    ttl_s: float,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Turns:
    """Take the leases of days, in their order; wait for those that others hold, `ttl_s` seconds in all.

    A holder that gave back, or whose process is gone from this host, is not waited for. When the time is over, what others
    hold is taken over: they may be dead, and if they are not, the work is done twice and the result is the same.

    Args:
        store: where the lake is.
        days: usage days; every run takes them in the order of the calendar, so that no two wait for each other.
        ttl_s: time to live, s, from when this run first asks.
        monotonic: a clock of this process, s.
        sleep: waits so many seconds.
    """
    start = monotonic()
    leases: list[Lease] = []
    waited: list[str] = []
    for day in sorted(days):
        while True:
            n, holder = _newest(store, day)
            left = ttl_s - (monotonic() - start)
            if _is_busy(holder):
                if day not in waited:
                    waited.append(day)
                    log.info(
                        "%s: host %s computes it (lease %d); waiting %.0f s at most", day, holder.get("host"), n, left
                    )
                if left > 0:
                    sleep(min(POLL_S, left))
                    continue
            lease = Lease(day, n + 1, uuid.uuid4().hex)
            if _create(store, lease):
                leases.append(lease)
                break
    return Turns(tuple(leases), tuple(waited), round((monotonic() - start) * 1000) if waited else 0)


def give_back(store: Store, leases: Sequence[Lease]) -> None:
    """Let others have the days at once; what fails here is only told, since the time to live ends every lease."""
    for lease in leases:
        _HELD_HERE.discard(lease.token)
        with contextlib.suppress(StoreError):
            store.replace(_path(lease), canonical({"token": lease.token, "released": True}))


def outdated(paths: Sequence[str]) -> list[str]:
    """Of the paths below `leases/`, those that a newer fencing number has succeeded."""
    newest: dict[str, int] = {}
    for day, n, _ in map(_named, paths):
        newest[day] = max(n, newest.get(day, 0))
    return sorted(path for day, n, path in map(_named, paths) if 0 < n < newest[day])


def _create(store: Store, lease: Lease) -> bool:
    body = {"token": lease.token, "released": False, **_here()}
    _HELD_HERE.add(lease.token)  # before it can be seen
    try:
        store.create(_path(lease), canonical(body))
    except Exists:  # another run was faster
        _HELD_HERE.discard(lease.token)
        return False
    except BaseException:
        _HELD_HERE.discard(lease.token)
        raise
    return True


def _newest(store: Store, day: str) -> tuple[int, dict[str, Any]]:
    """The newest fencing number of a day, 0 without one, and what its holder wrote."""
    n = max((n for _, n, _ in map(_named, [e.path for e in store.list(f"leases/{day}")])), default=0)
    try:
        holder = json.loads(store.get(f"leases/{day}/{n}.json") or b"{}") if n else {}
    except BROKEN:
        holder = {}
    return n, holder if isinstance(holder, dict) else {}


def _is_busy(holder: dict[str, Any]) -> bool:
    """Whether somebody may be computing; False for a text that names nobody, and for a process that is known to be gone."""
    if holder.get("released") is not False:
        return False
    here = _here()
    if any(holder.get(name) != here[name] for name in ("host", "boot")):
        return True  # on another machine nobody can tell
    if holder.get("pid") == here["pid"] and holder.get("started") == here["started"]:
        return holder.get("token") in _HELD_HERE
    return _started(holder.get("pid")) == holder.get("started")


def _here() -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.is_file() else "",
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def _started(pid: Any) -> str | None:
    """When a process of this host began, in the kernel's words; None when there is none, or it is dead and not yet reaped."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _named(path: str) -> tuple[str, int, str]:
    """Day and number of a lease, and its path; number 0 for what is none."""
    day, _, file = path.removeprefix("leases/").partition("/")
    stem = file.removesuffix(".json")
    is_number = file.endswith(".json") and stem.isascii() and stem.isdigit() and not stem.startswith("0")
    return day, int(stem) if is_number else 0, path


def _path(lease: Lease) -> str:
    return f"leases/{lease.day}/{lease.n}.json"
