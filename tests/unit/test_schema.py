"""`conform` lets through what a declaration allows, in its order and types, and names what it refuses."""

from decimal import Decimal

import pyarrow as pa
import pytest

from schemas import telemetry
from schemas.billing import BILLING
from schemas.ledger import LEDGER, REPORTS
from schemas.usage import USAGE
from seedance import schema
from seedance.errors import SchemaError
from seedance.schema import MONEY, Column, Table, conform, instant, number, text

SPEC = Table(
    "core_test__rows",
    "one row",
    ("name", "ns"),
    (
        text("name", "a name"),
        text("kind", "a closed set", null=True, values=("a", "b")),
        number("ns", 64, "ns", "time, summed"),
        number("share_ppm", 32, "ppm", "a share", null=True, max=1_000_000),
        Column("cost", MONEY, "money", unit="BillingCurrency", null=True, summed=True),
        instant("at_utc", "when", null=True),
    ),
)


def rows(**columns: pa.Array) -> pa.Table:
    """Two good rows, with some columns put in the place of the good ones."""
    good = {
        "name": pa.array(["x", "y"]),
        "kind": pa.array(["a", None]),
        "ns": pa.array([0, 5], pa.int64()),
        "share_ppm": pa.array([None, 1_000_000], pa.int32()),
        "cost": pa.array([Decimal("1.5"), None], MONEY),
        "at_utc": pa.array([0, None], pa.timestamp("ns", tz="UTC")),
    }
    return pa.table({**good, **columns})


def refusal(table: pa.Table, spec: Table = SPEC) -> SchemaError:
    with pytest.raises(SchemaError) as caught:
        conform(table, spec, where="lake/x")
    error = caught.value
    assert str(error).startswith("lake/x: ")
    assert (error.table, error.where) == (spec.name, "lake/x")
    return error


def test_good_rows_come_back_as_declared() -> None:
    found = conform(rows().select(SPEC.names[::-1]), SPEC, where="lake/x")
    assert found.schema.equals(SPEC.arrow, check_metadata=True)
    assert found.to_pylist() == rows().to_pylist()
    assert found.schema.metadata == {b"seedance.table": b"core_test__rows", b"seedance.version": b"1"}
    assert found.schema.field("ns").metadata == {b"about": b"time, summed", b"unit": b"ns"}


def test_no_rows_are_good_rows() -> None:
    assert conform(SPEC.empty(), SPEC, where="lake/x").num_rows == 0
    assert conform(rows().slice(0, 0), SPEC, where="lake/x").num_rows == 0


def test_dictionaries_large_text_and_narrow_integers_are_decoded() -> None:
    found = conform(
        rows(
            name=pa.array(["x", "y"]).dictionary_encode(),
            kind=pa.array(["a", "b"], pa.large_string()),
            ns=pa.array([1, 2], pa.uint8()),
            share_ppm=pa.array([None, None], pa.null()),
            cost=pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
        ),
        SPEC,
        where="lake/x",
    )
    assert found.schema.equals(SPEC.arrow)
    assert found.column("cost").to_pylist() == [Decimal("1.5"), None]
    assert found.column("kind").to_pylist() == ["a", "b"]


def test_missing_column() -> None:
    error = refusal(rows().drop_columns(["ns"]))
    assert "not core_test__rows version 1: missing column ns. Expected 6 columns, found 5." in str(error)
    assert (error.column, error.expected, error.found) == ("ns", pa.int64(), "absent")


def test_extra_column() -> None:
    error = refusal(rows(extra=pa.array([1, 2])))
    assert "unknown column extra. Expected 6 columns, found 7." in str(error)
    assert (error.column, error.expected, error.found) == ("extra", "absent", "int64")


def test_missing_and_extra_are_both_named() -> None:
    assert "missing column kind; unknown column sort" in str(refusal(rows().rename_columns({"kind": "sort"})))


def test_retyped_column() -> None:
    error = refusal(rows(name=pa.array([1, 2])))
    assert "core_test__rows.name: expected string, found int64 (2 row(s))." in str(error)
    assert (error.column, error.rows) == ("name", 2)


def test_text_never_becomes_a_number() -> None:
    assert refusal(rows(ns=pa.array(["1", "2"]))).found == "string"


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_a_float_never_enters_a_summed_column(kind: pa.DataType) -> None:
    for column in ("ns", "cost"):
        error = refusal(rows(**{column: pa.array([1.0, 2.0]).cast(kind)}))
        assert "this column is summed; a float would make the sum depend on its order" in str(error)
        assert error.column == column


def test_nan_is_a_float() -> None:
    assert refusal(rows(ns=pa.array([float("nan"), 1.0]))).found == "double"


def test_a_summed_float_cannot_even_be_declared() -> None:
    with pytest.raises(SchemaError, match="column x is summed and declared double"):
        Column("x", pa.float64(), "a sum", summed=True)


def test_a_number_that_does_not_fit() -> None:
    error = refusal(rows(share_ppm=pa.array([2**40, 0], pa.int64())))
    assert "expected int32, found a int64 that does not fit" in str(error)


def test_money_finer_than_the_quantum_is_refused_not_rounded() -> None:
    error = refusal(rows(cost=pa.array([Decimal("1e-13"), None], pa.decimal128(38, 13))))
    assert error.column == "cost"
    assert "does not fit" in error.found


def test_null_where_none_may_be() -> None:
    error = refusal(rows(name=pa.array(["x", None])))
    assert "core_test__rows.name: expected no nulls, found null (1 row(s))." in str(error)


@pytest.mark.parametrize(
    ("column", "values", "expected", "found"),
    [
        ("ns", pa.array([0, -1], pa.int64()), "at least 0 ns", "-1 ns"),
        ("share_ppm", pa.array([0, 1_000_001], pa.int32()), "at most 1000000 ppm", "1000001 ppm"),
        ("share_ppm", pa.array([-5, None], pa.int32()), "at least 0 ppm", "-5 ppm"),
    ],
)
def test_out_of_range(column: str, values: pa.Array, expected: str, found: str) -> None:
    error = refusal(rows(**{column: values}))
    assert (error.column, error.expected, error.found) == (column, expected, found)


def test_outside_the_closed_set() -> None:
    error = refusal(rows(kind=pa.array(["c", "c"])))
    assert "core_test__rows.kind: expected one of a, b, found 'c' (2 row(s))." in str(error)


def test_a_key_must_be_declared_and_a_column_once() -> None:
    with pytest.raises(SchemaError, match=r"key columns \['no'\] are not declared"):
        Table("t", "one", ("no",), (text("a", "a"),))
    with pytest.raises(SchemaError, match="declared twice"):
        Table("t", "one", ("a",), (text("a", "a"), text("a", "a")))


def test_the_pipeline_reads_the_contract_that_hosts_write() -> None:
    assert telemetry.TELEMETRY is schema.TELEMETRY
    assert all(getattr(telemetry, name) is getattr(schema, name) for name in telemetry.__all__)


TABLES = [*schema.TELEMETRY.values(), *USAGE.values(), *BILLING.values(), *LEDGER.values(), *REPORTS.values()]


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_every_declaration_is_whole(spec: Table) -> None:
    assert spec.about
    assert spec.key
    for column in spec.columns:
        assert column.about, column.name
        assert column.unit or not (column.summed or pa.types.is_integer(column.type)), column.name
        assert not pa.types.is_floating(column.type) or not column.summed, column.name
    assert conform(spec.empty(), spec, where="nowhere").schema.equals(spec.arrow)
