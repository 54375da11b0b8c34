"""Restatements: signed differences of address groups over the revisions of a day."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ledger import ADDRESSES
from schemas.restatements import RESTATEMENTS
from seedance.schema import conform
from tasks.core.restate import AMOUNTS, COLUMNS, GROUP, restatements

DAY = "2026-11-10"
FACTS = {
    "x_Cloud": "aws",
    "BillingAccountId": "1",
    "BillingCurrency": "USD",
    "x_State": "billed",
    "ResourceId": "i-1",
    "x_MachineId": "i-1",
    "x_DeviceId": "GPU-0",
    "x_JobId": "J",
    "x_Attempt": 0,
    "x_Category": "work",
}


def addresses(*rows: dict[str, Any]) -> pa.Table:
    values = [FACTS | r for r in rows]
    types = {c.name: c.type for c in ADDRESSES.columns}
    return pa.table({n: pa.array([r.get(n) for r in values], types[n]) for n in COLUMNS})


def restated(before: pa.Table, after: pa.Table, **facts: Any) -> list[dict[str, Any]]:
    found = restatements(DAY, before, after, RESTATEMENTS.empty(), **{"revision": 2, "cause": "bill", **facts})
    conform(found, RESTATEMENTS, where="test")
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def test_an_estimate_that_a_bill_replaces_is_taken_back() -> None:
    before = addresses({"x_State": "provisional", "x_EstimatedCost": Decimal(3)})
    after = addresses({"BilledCost": Decimal(0), "EffectiveCost": Decimal("2.5")})
    found = {r["x_State"]: [r[n] for n in AMOUNTS] for r in restated(before, after)}
    assert found == {"provisional": [None, None, -3], "billed": [0, Decimal("2.5"), None]}


def test_a_resource_of_azure_that_is_spelt_otherwise_is_not_restated() -> None:
    amounts = {"BilledCost": Decimal(3), "EffectiveCost": Decimal(3)}
    one, other = ({"x_Cloud": "azure", "ResourceId": name} for name in ("/Sets/GPU", "/sets/gpu"))
    assert restated(addresses(amounts | one), addresses(amounts | other)) == []
    (found,) = restated(addresses(amounts | one), addresses(amounts | other | {"BilledCost": Decimal(4)}))
    assert (found["ResourceId"], found["BilledCost"]) == ("/sets/gpu", 1)
    assert len(restated(addresses(amounts | {"ResourceId": "I-1"}), addresses(amounts))) == 2  # of aws: two resources


def test_rows_of_one_group_add_up_and_equal_groups_are_left_out() -> None:
    before = addresses(
        {"BilledCost": Decimal(1)}, {"BilledCost": Decimal(2)}, {"BilledCost": Decimal(5), "x_JobId": None}
    )
    after = addresses({"BilledCost": Decimal(3)}, {"BilledCost": Decimal(4), "x_JobId": None})
    (found,) = restated(before, after)
    assert (found["x_JobId"], found["BilledCost"], found["EffectiveCost"]) == (None, -1, None)
    assert (found["x_Revision"], found["x_Cause"]) == (2, "bill")


def test_earlier_revisions_stay_and_the_first_has_none() -> None:
    one, two = addresses({"BilledCost": Decimal(1)}), addresses({"BilledCost": Decimal(2)})
    first = restatements(DAY, one, one, RESTATEMENTS.empty(), revision=1, cause=None)
    assert len(first) == 0
    second = restatements(DAY, one, two, first, revision=2, cause="bill")
    third = restatements(DAY, two, one, second, revision=3, cause="code")
    assert [(r["x_Revision"], r["BilledCost"], r["x_Cause"]) for r in third.to_pylist()] == [
        (2, 1, "bill"),
        (3, -1, "code"),
    ]
    with pytest.raises(ValueError, match="revision 4 of 2026-11-10 has no cause"):
        restatements(DAY, two, one, third, revision=4, cause=None)


amounts = st.one_of(st.none(), st.integers(-(10**15), 10**15).map(lambda u: Decimal(u).scaleb(-12)))
rows = st.lists(
    st.fixed_dictionaries(
        {
            "x_JobId": st.sampled_from(["J", "K", None]),
            "InvoiceId": st.sampled_from(["I", None]),
            "x_State": st.sampled_from(["billed", "provisional"]),
            **dict.fromkeys(AMOUNTS, amounts),
        }
    ),
    max_size=8,
)


@given(st.lists(rows, min_size=1, max_size=4))
def test_over_all_revisions_they_add_up_to_what_changed(revisions: list[list[dict[str, Any]]]) -> None:
    tables = [addresses(*some) for some in revisions]
    found = RESTATEMENTS.empty()
    for n, (before, after) in enumerate(itertools.pairwise(tables), 2):
        found = restatements(DAY, before, after, found, revision=n, cause="bill")

    def sums(table: pa.Table, sign: int) -> dict[tuple[Any, ...], Decimal]:
        out: dict[tuple[Any, ...], Decimal] = {}
        for r in table.to_pylist():
            for name in AMOUNTS:
                key = (name, *(r[g] for g in GROUP))
                out[key] = out.get(key, Decimal(0)) + sign * (r[name] or 0)
        return out

    expected = sums(tables[-1], 1)
    for key, amount in sums(tables[0], -1).items():
        expected[key] = expected.get(key, Decimal(0)) + amount
    told = sums(found, 1)
    assert {k: v for k, v in told.items() if v} == {k: v for k, v in expected.items() if v}
    assert all(any(r[n] for n in AMOUNTS) for r in found.to_pylist())
