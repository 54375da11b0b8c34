"""Long work shows how far it is: a progress artifact of the task run, which ends at a hundred percent."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from tasks import progress
from tasks.steps import as_task

pytestmark = pytest.mark.usefixtures("prefect_harness")


def slow_days(count: int) -> int:
    """Take a while for each of some days."""
    for n in range(count):
        progress.tell(n, count, f"day {n}")
        time.sleep(1.5)
    return count


def quick_day(count: int) -> int:
    """One unit of work: there is nothing to show."""
    progress.tell(0, count, "a day")
    return count


async def artifacts(key: str) -> list[Any]:
    async with get_client() as client:
        return [a for a in await client.read_artifacts() if a.key == key]


def test_work_of_several_units_shows_its_progress_while_it_runs() -> None:
    seen: list[float] = []

    @flow(persist_result=False)
    async def long_work() -> int:
        async def look() -> None:
            while True:
                await asyncio.sleep(0.3)
                seen.extend(float(a.data) for a in await artifacts("slow-days-progress"))

        watch = asyncio.create_task(look())
        done = await as_task(slow_days, 4)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return done

    assert asyncio.run(long_work()) == 4
    assert any(0 < percent < 100 for percent in seen), seen
    (shown,) = asyncio.run(artifacts("slow-days-progress"))
    assert float(shown.data) == 100
    assert shown.description == "4 of 4: done"
    assert shown.task_run_id is not None


def test_work_of_one_unit_shows_nothing() -> None:
    @flow(persist_result=False)
    async def short_work() -> int:
        return await as_task(quick_day, 1)

    assert asyncio.run(short_work()) == 1
    assert asyncio.run(artifacts("quick-day-progress")) == []
