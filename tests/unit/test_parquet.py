"""The one writer of the lake's tables: equal rows, equal bytes."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedance.errors import SchemaError, StoreError
from seedance.schema import LABELS, MONEY, Column, Table, number, text
from tasks.io.parquet import from_bytes, to_bytes

SPEC = Table(
    "core_test__things",
    "one thing",
    ("job_id", "rank"),
    (
        text("job_id", "job", null=True),
        number("rank", 32, "count", "rank", null=True, summed=False),
        Column("cost", MONEY, "money", null=True, summed=True),
        Column("labels", LABELS, "labels", null=True),
    ),
)
Key = tuple[str | None, int | None]
KEYS = st.lists(
    st.tuples(st.one_of(st.none(), st.text(max_size=3)), st.one_of(st.none(), st.integers(0, 5))),
    unique=True,
    max_size=30,
)


def things(keys: list[Key]) -> pa.Table:
    return pa.table(
        {
            "job_id": pa.array([k[0] for k in keys], pa.string()),
            "rank": pa.array([k[1] for k in keys], pa.int32()),
            "cost": pa.array([Decimal(hash(k) % 1000) / 1000 for k in keys], MONEY),
            "labels": pa.array([[("a", str(k[1]))] for k in keys], LABELS),
        }
    )


@given(keys=KEYS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_order_and_chunks_do_not_change_the_bytes(keys: list[Key], data: st.DataObject) -> None:
    rows = things(keys)
    order = data.draw(st.permutations(range(len(keys))))
    cut = data.draw(st.integers(0, len(keys)))
    turned = rows.take(pa.array(order, pa.int64()))
    turned = pa.concat_tables([turned.slice(0, cut), turned.slice(cut)])
    assert to_bytes(turned, SPEC) == to_bytes(rows, SPEC)


@given(keys=KEYS)
@settings(max_examples=40, deadline=None)
def test_write_then_read_is_identity_up_to_the_order_of_the_key(keys: list[Key]) -> None:
    rows = from_bytes(to_bytes(things(keys), SPEC), SPEC, where="x")

    def rank_of(key: Key) -> tuple[bool, bytes, bool, int]:
        return key[0] is None, (key[0] or "").encode(), key[1] is None, key[1] or 0

    assert rows.equals(things(sorted(keys, key=rank_of)).cast(SPEC.arrow))


def test_long_tables_are_sorted_and_stay_the_same() -> None:
    keys: list[Key] = [(f"job-{i * 7919 % 50_000:06d}", i % 8) for i in range(50_000)]
    data = to_bytes(things(keys), SPEC)
    assert data == to_bytes(things(keys[::-1]), SPEC)
    assert from_bytes(data, SPEC, where="x", columns=["job_id"]).column("job_id")[0].as_py() == "job-000000"


def test_comments_dictionaries_and_widths_leave_no_trace() -> None:
    rows = things([("a", 1), ("b", 2)])
    coded = rows.set_column(0, "job_id", rows.column("job_id").dictionary_encode())
    wide = coded.set_column(1, "rank", coded.column("rank").cast(pa.int64()))
    renamed = replace(SPEC, columns=tuple(replace(c, about="another comment") for c in SPEC.columns))
    assert to_bytes(wide, renamed) == to_bytes(rows, SPEC)
    schema = pq.read_schema(pa.BufferReader(to_bytes(rows, SPEC)))
    assert schema.field("job_id").metadata is None
    assert (schema.metadata or {})[b"seedance.table"] == b"core_test__things"


def test_a_key_that_comes_twice_is_refused() -> None:
    with pytest.raises(SchemaError, match="2 row\\(s\\) have the key of another row") as caught:
        to_bytes(things([("b", None), ("a", 1), ("b", None), ("b", None)]), SPEC)
    assert caught.value.rows == 2
    assert caught.value.found == {"job_id": "b", "rank": None}


def test_some_columns_are_read_in_the_order_of_the_declaration() -> None:
    data = to_bytes(things([("a", 1)]), SPEC)
    assert from_bytes(data, SPEC, where="x", columns=["cost", "job_id"]).column_names == ["job_id", "cost"]
    with pytest.raises(SchemaError, match="has no column nope"):
        from_bytes(data, SPEC, where="x", columns=["nope"])


def test_a_nullable_column_that_the_file_predates_is_null() -> None:
    data = to_bytes(things([("a", 1)]), SPEC)
    newer = Table(SPEC.name, SPEC.about, SPEC.key, (*SPEC.columns, text("team", "team", null=True)))
    assert from_bytes(data, newer, where="x").column("team").to_pylist() == [None]
    assert from_bytes(data, newer, where="x", columns=["team"]).to_pylist() == [{"team": None}]
    strict = Table(SPEC.name, SPEC.about, SPEC.key, (*SPEC.columns, text("team", "team")))
    with pytest.raises(SchemaError, match="missing column team"):
        from_bytes(data, strict, where="x")


def test_other_files_are_refused() -> None:
    data = to_bytes(things([("a", 1)]), SPEC)
    with pytest.raises(SchemaError, match="expected core_test__things version 2, found core_test__things version 1"):
        from_bytes(data, replace(SPEC, version=2), where="x")
    with pytest.raises(StoreError, match="here: not a readable Parquet file") as caught:
        from_bytes(data[:-9], SPEC, where="here")
    assert caught.value.path == "here"


def test_rows_that_do_not_meet_the_declaration_are_refused() -> None:
    with pytest.raises(SchemaError, match="missing column cost"):
        to_bytes(things([("a", 1)]).drop_columns("cost"), SPEC)
