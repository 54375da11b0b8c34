"""Credits nested in rows: canonical text whatever the types, and what of a row's cost a promotion paid."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.schema import MONEY
from tasks.core.focus_values import Place
from tasks.core.nested_credits import PROMOTION, TYPES, credits_column, promotional
from tasks.errors import DeliveryError

PLACE = Place("s", "f", 11)
FIELDS = [(n, pa.string()) for n in ("id", "name", "full_name", "type")]


def records(rows: list[Any], amount: pa.DataType) -> pa.Array:
    return pa.array(rows, pa.list_(pa.struct([*FIELDS, ("amount", amount)])))


def told(*rows: Any) -> list[str | None]:
    found: list[str | None] = credits_column(pa.array(list(rows), pa.string()), "x_Credits", PLACE).to_pylist()
    return found


def one(kind: str, amount: Any) -> dict[str, Any]:
    return {"id": "c", "name": None, "type": kind, "amount": amount}


def test_the_text_is_the_same_from_every_type() -> None:
    expected = [
        '[{"amount":"-0.1","id":"c","type":"PROMOTION"},{"amount":"-12","id":"c","type":"DISCOUNT"}]',
        None,
        None,
    ]
    pair = [("DISCOUNT", "-12"), ("PROMOTION", "-0.1")]
    for kind, amount in (
        (pa.decimal128(38, 9), Decimal),
        (pa.float64(), float),
        (pa.string(), str),
    ):
        for order in (pair, pair[::-1]):
            rows = [[one(k, amount(a)) for k, a in order], [], None]
            assert credits_column(records(rows, kind), "x_Credits", PLACE).to_pylist() == expected
    text = json.dumps([{**one(k, 0), "amount": float(a)} for k, a in pair])
    assert told(text, "[]", "") == expected
    assert credits_column(pa.nulls(2), "x_Credits", PLACE).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('[{"type": "LOYALTY", "amount": -1}]', r"row 12 .*a credit type among .*found 'LOYALTY'"),
        ('[{"amount": -1}]', r"row 12 .*a credit type among"),
        ('[{"type": "PROMOTION"}]', r"row 12 .*an amount in every credit, found ''"),
        ('[{"type": "PROMOTION", "amount": "1,5"}]', r"row 12 .*an amount in every credit"),
        ('[{"type": "PROMOTION", "amount": 1e30}]', r"row 12 .*at most 26 digits"),
        ('{"type": "PROMOTION", "amount": 1}', r"row 12 .*an array of credits"),
        ("[1]", r"row 12 .*an array of credits"),
        ("[{'type': 'PROMOTION'}]", r"row 12 .*a JSON array of credits"),
        ('[{"type": "PROMOTION", "amount": 1, "name": "\\ud800"}]', r"row 12 .*credits of Unicode text"),
    ],
)
def test_what_is_no_credit_is_refused(value: str, expected: str) -> None:
    with pytest.raises(DeliveryError, match=expected):
        told('[{"type": "PROMOTION", "amount": 1}]', value)


amounts = st.integers(-(10**15), 10**15).map(lambda u: Decimal(u).scaleb(-12))


@given(st.lists(st.lists(st.tuples(st.sampled_from(TYPES), amounts), max_size=4), min_size=1, max_size=4), st.data())
def test_promotions_add_up_exactly(rows: list[list[tuple[str, Decimal]]], data: st.DataObject) -> None:
    category = pa.array([data.draw(st.sampled_from(["Usage", "Credit"])) for _ in rows])
    effective = pa.array([data.draw(amounts) for _ in rows], MONEY)
    nested = told(*(json.dumps([one(k, str(a)) for k, a in some]) for some in rows))
    found = promotional(category, effective, pa.array(nested, pa.string())).to_pylist()
    for some, kind, cost, paid in zip(rows, category.to_pylist(), effective.to_pylist(), found, strict=True):
        assert paid == (cost if kind == "Credit" else sum(a for k, a in some if k == PROMOTION))


def test_more_digits_than_money_has_are_rounded_half_to_even() -> None:
    nested = pa.array(
        told('[{"type": "PROMOTION", "amount": "-0.0000000000005"}, {"type": "PROMOTION", "amount": -1.5e-12}]')
    )
    zero = pa.array([Decimal(0)], MONEY)
    assert promotional(pa.array(["Usage"]), zero, nested).to_pylist() == [Decimal("-0.000000000002")]
