"""Restatements of a day from its commits in a lake."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas.ledger import ADDRESSES
from schemas.restatements import RESTATEMENTS
from seedance.schema import INSTANT
from tasks.io.lake import Commit, Handle, Lake
from tasks.plan import DayPlan
from tasks.restate import restate_day

DAY = "2026-11-10"
NOTHING = Handle("t", 1, DAY, ())
FACTS: dict[str, Any] = {
    "x_ChargeKey": "k",
    "x_Occurrence": 0,
    "x_HourUtc": 1_794_304_800_000_000_000,
    "x_Cloud": "aws",
    "BillingAccountId": "1",
    "x_Category": "tax",
    "BillingCurrency": "USD",
    "x_State": "billed",
    "ChargeCategory": "Tax",
    "EffectiveCost": Decimal(0),
    "x_PromotionalCost": Decimal(0),
}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


def addresses(lake: Lake, cost: str, revision: int) -> Handle:
    row = {**FACTS, "BilledCost": Decimal(cost), "x_Revision": revision}
    columns = {
        c.name: pa.array([row.get(c.name)], pa.int64()).cast(INSTANT)
        if c.type == INSTANT
        else pa.array([row.get(c.name)], c.type)
        for c in ADDRESSES.columns
    }
    return lake.handle(ADDRESSES, DAY, [pa.table(columns)])


def plan(parent: int, cause: str | None) -> DayPlan:
    return DayPlan(DAY, {}, "d", f"k{parent}", cause, parent, NOTHING, NOTHING, {})


def commit(lake: Lake, parent: int, cost: str, cause: str | None) -> tuple[Commit, list[dict[str, Any]]]:
    found = addresses(lake, cost, parent + 1)
    step, _ = restate_day(lake, plan(parent, cause), found)
    handles = {ADDRESSES.name: found, **step.handles}
    made = lake.commit(DAY, {"parent": parent, "key": f"k{parent}", "handles": handles})
    rows: list[dict[str, Any]] = lake.read(step.handles[RESTATEMENTS.name], RESTATEMENTS).to_pylist()
    return made, rows


def test_each_revision_adds_what_it_changed(lake: Lake) -> None:
    assert commit(lake, 0, "1", None)[1] == []
    assert [(r["x_Revision"], r["BilledCost"], r["x_Cause"]) for r in commit(lake, 1, "1.5", "bill")[1]] == [
        (2, Decimal("0.5"), "bill")
    ]
    head, rows = commit(lake, 2, "1.25", "code")
    assert [(r["x_Revision"], r["BilledCost"]) for r in rows] == [(2, Decimal("0.5")), (3, Decimal("-0.25"))]
    assert head.n == 3
    lake.materialise(DAY)
    assert lake.store.get(f"report/{RESTATEMENTS.name}/usage_date={DAY}/data.parquet")


def test_what_equal_inputs_restate_is_kept(lake: Lake) -> None:
    commit(lake, 0, "1", None)
    found = addresses(lake, "2", 2)
    assert restate_day(lake, plan(1, "bill"), found)[1] is False
    assert restate_day(lake, plan(1, "bill"), found)[1] is True


def test_a_commit_from_before_the_table_has_no_earlier_restatements(lake: Lake) -> None:
    lake.commit(DAY, {"parent": 0, "key": "k0", "handles": {ADDRESSES.name: addresses(lake, "1", 1)}})
    assert [r["BilledCost"] for r in commit(lake, 1, "4", "price")[1]] == [3]
