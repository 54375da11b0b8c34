"""How a flow calls a stage: as a Prefect task, or directly.

Few, large tasks: one a stage. Prefect's caching and result persistence are off, since reuse is the lake's. Work of several
units (days, objects) shows how far it is in a progress artifact of the task run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Protocol, TypeVar

from prefect import task
from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import quote

from tasks import progress

log = logging.getLogger(__name__)
SHOWN_EVERY_S = 1.0
"""Least time between two updates of a progress artifact."""
T = TypeVar("T")


class Call(Protocol):
    """Calls a stage with its arguments and waits for what it returns."""

    def __call__(self, stage: Callable[..., T], *args: Any) -> Awaitable[T]: ...


async def directly(stage: Callable[..., T], *args: Any) -> T:
    """The stage in this thread, without Prefect."""
    return stage(*args)


async def as_task(stage: Callable[..., T], *args: Any) -> T:
    """The stage as a Prefect task, in a thread of its own so that the run keeps its heartbeat."""
    return await _task(stage)(*(quote(a) for a in args))  # type: ignore[no-any-return]


@cache
def _task(stage: Callable[..., Any]) -> Any:
    async def run(*args: Any) -> Any:
        shown = _Shown(stage.__name__)
        watch = asyncio.create_task(shown.keep_up())
        try:
            with progress.listening(shown.hear):
                result = await asyncio.to_thread(stage, *args)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        await shown.finish()
        return result

    description = (stage.__doc__ or "").split("\n", 1)[0]
    return task(name=stage.__name__, description=description, cache_policy=NO_CACHE, persist_result=False)(run)


class _Shown:
    """The progress artifact of one task run; made when the work turns out to have several units."""

    def __init__(self, name: str) -> None:
        self._key = name.replace("_", "-") + "-progress"
        self._heard: tuple[int, int, str] | None = None
        self._told: tuple[int, int, str] | None = None
        self._artifact: Any = None

    def hear(self, done: int, of: int, what: str) -> None:
        """Called by the stage, in its own thread."""
        self._heard = (done, of, what)

    async def keep_up(self) -> None:
        """Show what was heard last, every now and then, until cancelled."""
        while True:
            await asyncio.sleep(SHOWN_EVERY_S)
            await self._show(self._heard)

    async def finish(self) -> None:
        """Show that all of it is done, where anything was shown."""
        if self._artifact is not None and self._heard is not None:
            await self._show((self._heard[1], self._heard[1], "done"))

    async def _show(self, heard: tuple[int, int, str] | None) -> None:
        if heard is None or heard[1] < 2 or heard == self._told:
            return
        done, of, what = self._told = heard
        words = f"{done} of {of}: {what}"
        try:
            if self._artifact is None:
                self._artifact = await acreate_progress_artifact(100 * done / of, key=self._key, description=words)
            else:
                await aupdate_progress_artifact(self._artifact, 100 * done / of, description=words)
        except Exception as error:  # noqa: BLE001 - what cannot be shown must not fail the work
            log.warning("progress %s (%s) cannot be shown: %s", self._key, words, error)
