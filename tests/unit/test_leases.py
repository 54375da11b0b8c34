"""Leases: who holds a day, how long others wait, and what a holder that is gone costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seedance.canonical import canonical
from seedance.store import Store
from tasks.io import leases
from tasks.io.leases import Turns, give_back, outdated, take

ROOT = Path(__file__).parents[2]
DAY, NEXT = "2026-11-28", "2026-11-29"
AWAY = {"token": "t", "released": False, "host": "another-host", "boot": "b", "pid": 1, "started": "1"}


class Time:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "lake"))


def taken(store: Store, ttl_s: float, *days: str) -> tuple[Turns, float]:
    clock = Time()
    turns = take(store, days or (DAY,), ttl_s, monotonic=clock.monotonic, sleep=clock.sleep)
    return turns, clock.now - 100


def test_a_free_day_is_taken_at_once_with_the_next_number(store: Store) -> None:
    first, waited = taken(store, 60)
    assert ([lease.n for lease in first.leases], first.waited, waited) == ([1], (), 0)
    give_back(store, first.leases)
    second, waited = taken(store, 60)
    assert ([lease.n for lease in second.leases], second.waited, waited) == ([2], (), 0)
    assert [e.path for e in store.list("leases")] == [f"leases/{DAY}/1.json", f"leases/{DAY}/2.json"]


def test_a_day_that_another_host_holds_is_taken_over_after_the_time_to_live(store: Store) -> None:
    store.create(f"leases/{DAY}/7.json", canonical(AWAY))
    turns, waited = taken(store, 60)
    assert ([lease.n for lease in turns.leases], turns.waited) == ([8], (DAY,))
    assert waited == pytest.approx(60) and turns.waited_ms == pytest.approx(60_000)


def test_the_time_to_live_is_for_all_days_together(store: Store) -> None:
    for day in (DAY, NEXT):
        store.create(f"leases/{day}/1.json", canonical(AWAY))
    turns, waited = taken(store, 60, NEXT, DAY)
    assert ([(lease.day, lease.n) for lease in turns.leases], turns.waited) == ([(DAY, 2), (NEXT, 2)], (DAY, NEXT))
    assert waited == pytest.approx(60)


def test_nobody_waits_where_the_settings_say_so(store: Store) -> None:
    store.create(f"leases/{DAY}/1.json", canonical(AWAY))
    turns, waited = taken(store, 0)
    assert ([lease.n for lease in turns.leases], turns.waited, waited) == ([2], (DAY,), 0)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"released":1}', b"null"])
def test_a_lease_that_names_nobody_holds_nothing(store: Store, text: bytes) -> None:
    store.create(f"leases/{DAY}/3.json", text)
    turns, waited = taken(store, 60)
    assert ([lease.n for lease in turns.leases], waited) == ([4], 0)


def test_a_holder_that_is_no_process_holds_nothing(store: Store) -> None:
    store.create(
        f"leases/{DAY}/1.json", json.dumps({**leases._here(), "released": False, "pid": float("inf")}).encode()
    )
    turns, waited = taken(store, 60)
    assert ([lease.n for lease in turns.leases], waited) == ([2], 0)


def test_a_waiter_goes_on_as_soon_as_the_day_is_given_back(store: Store) -> None:
    held, _ = taken(store, 60)
    clock = Time()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.now >= 103:
            give_back(store, held.leases)

    turns = take(store, [DAY], 60, monotonic=clock.monotonic, sleep=sleep)
    assert (turns.waited, turns.leases[0].n) == ((DAY,), 2)
    assert clock.now - 100 == pytest.approx(3, abs=leases.POLL_S)


def test_who_is_late_in_giving_back_harms_nobody(store: Store) -> None:
    store.create(f"leases/{DAY}/1.json", canonical(AWAY))
    turns, _ = taken(store, 1)
    give_back(store, [leases.Lease(DAY, 1, "t")])
    _, waited = taken(store, 5)
    assert waited == pytest.approx(5), "the second holder still has the day"
    give_back(store, turns.leases)


def test_giving_back_never_fails(store: Store) -> None:
    turns, _ = taken(store, 1)
    folder = Path(store.url, "leases", DAY)
    (folder / "1.json").unlink()
    folder.rmdir()
    folder.write_text("no folder")
    give_back(store, turns.leases)


def test_of_many_at_once_each_gets_a_number_of_its_own(store: Store) -> None:
    gate, got = threading.Barrier(6), []

    def run() -> None:
        gate.wait()
        got.extend(take(store, [DAY], 0).leases)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lease.n for lease in got) == [1, 2, 3, 4, 5, 6]
    give_back(store, got)


def holder(store: Store) -> subprocess.Popen[bytes]:
    """A process that has taken the day and sleeps."""
    code = (
        "import time\nfrom seedance.store import Store\nfrom tasks.io.leases import take\n"
        f"take(Store({store.url!r}), [{DAY!r}], 9)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not store.exists(f"leases/{DAY}/1.json"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_a_holder_that_lives_on_this_host_is_waited_for_and_a_killed_one_is_not(store: Store) -> None:
    process = holder(store)
    try:
        _, waited = taken(store, 7)
        assert waited == pytest.approx(7)
        give_back(store, [leases.Lease(DAY, 2, "x")])
        store.delete(f"leases/{DAY}/2.json")
        os.kill(process.pid, signal.SIGKILL)
        # Not yet reaped, it is dead all the same.
        deadline = time.monotonic() + 10
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
        turns, waited = taken(store, 7)
        assert (turns.waited, waited) == ((), 0)
        give_back(store, turns.leases)
    finally:
        process.kill()
        process.wait(20)


def test_a_killed_holder_of_another_host_blocks_for_the_time_to_live_at_most(store: Store) -> None:
    process = holder(store)
    process.kill()
    process.wait(20)
    body = json.loads(store.read(f"leases/{DAY}/1.json"))
    store.replace(f"leases/{DAY}/1.json", canonical({**body, "host": "another-host"}))
    start = time.monotonic()
    turns = take(store, [DAY], 1.0)
    assert 0.9 < time.monotonic() - start < 20
    assert [lease.n for lease in turns.leases] == [2]
    give_back(store, turns.leases)


def test_only_the_newest_lease_of_a_day_is_kept() -> None:
    paths = [f"leases/{DAY}/{n}.json" for n in (1, 2, 10)] + [f"leases/{NEXT}/1.json", f"leases/{DAY}/notes.txt"]
    assert outdated(paths) == [f"leases/{DAY}/1.json", f"leases/{DAY}/2.json"]
