"""Progress: whoever listens hears, in other threads too, and nobody has to."""

from __future__ import annotations

import asyncio
import threading

from tasks import progress


def test_nobody_has_to_listen() -> None:
    progress.tell(1, 2, "a day")


def test_the_listener_and_the_one_around_it_hear_and_are_gone_afterwards() -> None:
    outer: list[tuple[int, int, str]] = []
    inner: list[tuple[int, int, str]] = []
    with progress.listening(lambda *t: outer.append(t)):
        with progress.listening(lambda *t: inner.append(t)):
            progress.tell(0, 2, "a")
        progress.tell(1, 2, "b")
    progress.tell(2, 2, "c")
    assert outer == [(0, 2, "a"), (1, 2, "b")]
    assert inner == [(0, 2, "a")]


def test_a_stage_in_a_thread_is_heard_where_it_was_started() -> None:
    heard: list[tuple[str, str]] = []

    def stage() -> None:
        progress.tell(0, 1, threading.current_thread().name)

    async def run() -> None:
        with progress.listening(lambda done, of, what: heard.append((what, threading.current_thread().name))):
            await asyncio.to_thread(stage)

    asyncio.run(run())
    assert len(heard) == 1 and heard[0][0] == heard[0][1] != threading.main_thread().name
