"""Days that flows are asked for: in order, and of the calendar that a lake can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from flows.params import Backfill, Explain, Nightly, OneDay, Plan, Rebuild, Verify
from flows.tier import Tier

FIRST = "0001-01-01"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Nightly(day=FIRST),
        lambda: OneDay(day=FIRST),
        lambda: Plan(last_day=FIRST),
        lambda: Plan(first_day=FIRST),
        lambda: Backfill(first_day=FIRST, last_day="2026-10-01"),
        lambda: Rebuild(into="x", last_day=FIRST),
        lambda: Explain(job="j", day=FIRST),
        lambda: Tier(policy="p", day=FIRST),
    ],
)
def test_a_day_before_1970_is_refused(ask: Callable[[], Any]) -> None:
    with pytest.raises(ValidationError, match="0001-01-01 lies before 1970-01-01, the oldest day"):
        ask()


@pytest.mark.parametrize("model", [Plan, Verify, Backfill])
def test_a_range_that_is_reversed_is_refused(model: Any) -> None:
    with pytest.raises(ValidationError, match="first_day 2026-10-05 lies after last_day 2026-10-01"):
        model(first_day="2026-10-05", last_day="2026-10-01")
    assert model(first_day="2026-10-01", last_day="2026-10-01").first_day is not None
