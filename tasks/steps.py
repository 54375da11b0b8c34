"""How a flow calls a stage: as a Prefect task, or directly.

Few, large tasks: one a stage. Prefect's caching and result persistence are off, since reuse is the lake's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Protocol, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import quote

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
        return await asyncio.to_thread(stage, *args)

    description = (stage.__doc__ or "").split("\n", 1)[0]
    return task(name=stage.__name__, description=description, cache_policy=NO_CACHE, persist_result=False)(run)
