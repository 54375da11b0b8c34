"""FOCUS columns to exact values, content keys and occurrence numbers."""

from __future__ import annotations

import datetime as dt
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.schema import INSTANT, MONEY
from tasks.core import focus
from tasks.core.focus_values import (
    Place,
    decimal_column,
    enum_column,
    instant_column,
    json_column,
    parse_instant,
    text_column,
)
from tasks.errors import DeliveryError
from tests.bills import row, text_table

PLACE = Place("aws", "part-1.csv", 11)
WIDE = Context(prec=400)
QUANTUM = Decimal("1e-12")


def decimals(values: list[Any], kind: pa.DataType | None = None) -> list[Decimal | None]:
    return decimal_column(pa.chunked_array([pa.array(values, kind or pa.string())]), "BilledCost", PLACE)[0].to_pylist()


@pytest.mark.parametrize(
    ("raw", "stored"),
    [
        ("1.624", "1.624"),
        ("-0.01288992000", "-0.01288992"),
        ("35.2E-7", "0.00000352"),
        ("1e+3", "1000"),
        ("2.000000000000000", "2"),
        (".5", "0.5"),
        ("7.", "7"),
        ("-0", "0"),
        ("0.0000000000005", "0"),
        ("0.0000000000015", "0.000000000002"),
        ("-0.0000000000025", "-0.000000000002"),
        ("0.1234567890123456789012345678", "0.123456789012"),
        ("12345678901234567890123456.123456789012", "12345678901234567890123456.123456789012"),
        ("00000000000000000000000000000001.5", "1.5"),
        ("", None),
        (None, None),
    ],
)
def test_number_text_is_exact_and_half_even_beyond_12_digits(raw: str | None, stored: str | None) -> None:
    assert decimals([raw, "1"]) == [None if stored is None else Decimal(stored), Decimal(1)]


@pytest.mark.parametrize(
    "raw", ["1,624.00", "+1", "nan", "NaN", "inf", "-inf", "1e", "USD 1", "1 ", "0x1", "1_000", "--1"]
)
def test_what_is_no_number_is_refused_with_its_row(raw: str) -> None:
    with pytest.raises(DeliveryError, match=r"source aws, part-1\.csv, row 13 .*BilledCost") as caught:
        decimals(["1", None, raw, raw])
    assert (caught.value.row, caught.value.column, caught.value.found) == (13, "BilledCost", repr(raw))
    assert "refused whole" in str(caught.value)


@pytest.mark.parametrize("raw", ["1" + "0" * 26, "1e26", "-99999999999999999999999999.9999999999999"])
def test_overflow_is_an_error(raw: str) -> None:
    with pytest.raises(DeliveryError, match="26 digits"):
        decimals([raw])


@given(st.floats(min_value=-1e20, max_value=1e20))
def test_a_double_is_its_shortest_decimal(value: float) -> None:
    expected = Decimal(repr(value)).quantize(QUANTUM, ROUND_HALF_EVEN, WIDE)
    values, lost = decimal_column(pa.array([value]), "BilledCost", PLACE)
    assert values[0].as_py() == expected
    assert WIDE.add(values[0].as_py(), sum((rest for _, rest in lost), Decimal(0))) == Decimal(repr(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_double_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(DeliveryError, match="BilledCost"):
        decimals([1.0, value], pa.float64())


@given(st.decimals(-(10**9), 10**9, places=20))
def test_rounding_is_published_to_the_last_digit(value: Decimal) -> None:
    text = format(value, "f")
    stored, lost = decimal_column(pa.array([text]), "BilledCost", PLACE)
    assert WIDE.add(stored[0].as_py(), sum((rest for _, rest in lost), Decimal(0))) == value


@pytest.mark.parametrize(
    "array",
    [
        pa.array([Decimal("1.5")], pa.decimal128(9, 4)),
        pa.array([Decimal("1.5")], pa.decimal128(38, 28)),
        pa.array([Decimal("1.5")], pa.decimal256(60, 30)),
        pa.array([1.5], pa.float32()),
        pa.array(["1.5"]).dictionary_encode(),
        pa.array(["1.5"], pa.large_string()),
    ],
)
def test_typed_columns_read_the_same(array: pa.Array) -> None:
    assert decimal_column(array, "BilledCost", PLACE)[0] == pa.array([Decimal("1.5")], MONEY)


def test_whole_numbers_and_absent_values() -> None:
    assert decimals([3, None], pa.int64()) == [Decimal(3), None]
    assert decimals([None, None], pa.null()) == [None, None]
    with pytest.raises(DeliveryError, match="a number"):
        decimals([True], pa.bool_())


NOON = int(dt.datetime(2026, 11, 10, 12, tzinfo=dt.UTC).timestamp()) * 10**9


@pytest.mark.parametrize(
    ("raw", "ns"),
    [
        ("2026-11-10 12:00:00", NOON),
        ("2026-11-10T12:00:00Z", NOON),
        ("2026-11-10T12:00:00.000Z", NOON),
        ("2026-11-10T12:00Z", NOON),
        ("2026-11-10T14:30:00+02:30", NOON),
        ("2026-11-10T04:00:00-0800", NOON),
        ("2026-11-10 12:00:00 UTC", NOON),
        ("2026-11-10T12:00:00.123456789Z", NOON + 123456789),
        ("2026-11-10", NOON - 12 * 3600 * 10**9),
        ("1969-12-31T23:59:59.5Z", -(10**9) // 2),
    ],
)
def test_instants_are_utc(raw: str, ns: int) -> None:
    assert parse_instant(raw) == ns
    assert instant_column(pa.array([raw, None, ""]), "ChargePeriodStart", PLACE).cast(pa.int64()).to_pylist() == [
        ns,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "raw", ["5/1/25", "2026-02-30", "2026-11-10T25:00:00Z", "9999-01-01", "yesterday", "20261110", "2026-11-1٠"]
)
def test_what_is_no_instant_is_refused(raw: str) -> None:
    with pytest.raises(DeliveryError, match=r"row 12 .*ChargePeriodStart.*ISO 8601") as caught:
        instant_column(pa.array(["2026-11-10", raw]), "ChargePeriodStart", PLACE)
    assert caught.value.found == repr(raw)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/Los_Angeles"])
def test_arrow_timestamps_of_any_unit(unit: str, zone: str | None) -> None:
    per = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    array = pa.array([NOON // per, None], pa.int64()).cast(pa.timestamp(unit, zone))
    found = instant_column(array, "ChargePeriodStart", PLACE)
    assert found.type == INSTANT
    assert found.cast(pa.int64()).to_pylist() == [NOON, None]


def test_dates_and_out_of_range() -> None:
    found = instant_column(pa.array([dt.date(2026, 11, 10)]), "ChargePeriodStart", PLACE)
    assert found.cast(pa.int64()).to_pylist() == [NOON - 12 * 3600 * 10**9]
    far = pa.array([10**12], pa.int64()).cast(pa.timestamp("s"))
    with pytest.raises(DeliveryError, match="1678 to 2261"):
        instant_column(far, "ChargePeriodStart", PLACE)
    with pytest.raises(DeliveryError, match="timestamps or ISO"):
        instant_column(pa.array([1.5]), "ChargePeriodStart", PLACE)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_text_that_is_not_utf_8_is_refused_with_its_row(kind: pa.DataType) -> None:
    binary = pa.large_binary() if kind == pa.large_string() else pa.binary()
    array = pa.array([b"x", None, b"a\xff"], binary)
    array = array if kind == pa.binary() else array.view(kind)
    for read in (text_column, json_column) if kind == pa.binary() else (text_column, json_column, instant_column):
        with pytest.raises(DeliveryError, match=r"row 13 .*column Tags: expected UTF-8 text"):
            read(pa.chunked_array([array]), "Tags", PLACE)
    if kind != pa.binary():
        with pytest.raises(DeliveryError, match=r"row 13 .*column Tags: expected UTF-8 text"):
            text_column(array.dictionary_encode(), "Tags", PLACE)


def test_maps_that_are_not_utf_8_or_too_deep_are_refused_with_their_row() -> None:
    keys, values = pa.array(["a", "a"]), pa.array([b"ok", b"\xff"]).view(pa.string())
    with pytest.raises(DeliveryError, match=r"row 12 .*column Tags: expected UTF-8 text"):
        json_column(pa.MapArray.from_arrays([0, 1, 2], keys, values), "Tags", PLACE)
    deep: Any = "x"
    for _ in range(70):
        deep = [deep]
    with pytest.raises(DeliveryError, match=r"row 12 .*column Tags: .* at most 64 levels, found more than 64"):
        json_column(pa.array([None, deep]), "Tags", PLACE)


def test_enumerations_are_caseless_and_closed() -> None:
    allowed = ("One-Time", "Recurring", "Usage-Based")
    found = enum_column(pa.array(["Usage-based", "RECURRING", "", None]), "ChargeFrequency", allowed, PLACE)
    assert found.to_pylist() == ["Usage-Based", "Recurring", None, None]
    with pytest.raises(DeliveryError, match=r"row 12 .*ChargeFrequency.*Usage-Based.*'Hourly'"):
        enum_column(pa.array(["Recurring", "Hourly"]), "ChargeFrequency", allowed, PLACE)


def test_objects_are_canonical() -> None:
    map_type = pa.map_(pa.string(), pa.string())
    same = [
        pa.array(['{"b": "2", "a": "1"}']),
        pa.array(['"b": "2", "a": "1"']),
        pa.array([[("b", "2"), ("a", "1")]], map_type),
        pa.array([{"b": "2", "a": "1", "c": None}]),
    ]
    for array in same:
        assert json_column(array, "Tags", PLACE).to_pylist() == ['{"a":"1","b":"2"}']
    raw = '{" org": "é", "n": 1.10, "big": 12345678901234567890.5, "in": {"z": [true, null], "y": ",NULL,NULL,"}}'
    assert json_column(pa.array([raw, "", "null", None]), "Tags", PLACE).to_pylist() == [
        '{" org":"é","big":12345678901234567890.5,"in":{"y":",NULL,NULL,","z":[true,null]},"n":1.10}',
        None,
        None,
        None,
    ]
    for bad in ("[1]", "{", "a=b"):
        with pytest.raises(DeliveryError, match=r"row 12 .*JSON object"):
            json_column(pa.array(["{}", bad]), "Tags", PLACE)


def test_records_of_key_and_value_are_objects_in_any_order() -> None:
    pair = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string()), ("inherited", pa.bool_())]))
    rows = [
        [{"key": "b", "value": "2"}, {"key": "a", "value": "1"}],
        [{"key": "a", "value": "1"}, {"key": "b", "value": "2", "inherited": True}],
        [{"key": "a", "value": "2"}, {"key": "b"}, {"key": "a", "value": "1"}],
        [],
        None,
    ]
    assert json_column(pa.array(rows, pair), "Tags", PLACE).to_pylist() == [
        '{"a":"1","b":"2"}',
        '{"a":"1","b":"2"}',
        '{"a":["1","2"],"b":""}',
        None,
        None,
    ]


def test_identifiers_are_text_and_never_doubles() -> None:
    assert text_column(pa.array([42, None]), "InvoiceId", PLACE).to_pylist() == ["42", None]
    assert text_column(pa.array([None, None], pa.float64()), "InvoiceId", PLACE).to_pylist() == [None, None]
    assert text_column(pa.array(["", "x"]).dictionary_encode(), "InvoiceId", PLACE).to_pylist() == [None, "x"]
    with pytest.raises(DeliveryError, match="doubles lose digits"):
        text_column(pa.array([1.23e12]), "BillingAccountId", PLACE)


def normalised(*rows: dict[str, str]) -> pa.Table:
    return focus.normalise(text_table(rows), PLACE).rows


def key(**changes: str) -> str:
    found: str = normalised(row(**changes))["x_ChargeKey"][0].as_py()
    return found


def test_a_row_is_stored_under_focus_names() -> None:
    stored = normalised(row(x_UsageType="BoxUsage:g5.4xlarge"))
    assert stored.column_names == [
        *(c.name for c in focus.STORED),
        "x_PromotionalCost",
        "x_ChargeKey",
        "x_Cloud",
        *focus.ASIDE,
    ]
    (found,) = stored.to_pylist()
    assert found["BilledCost"] == Decimal("1.624")
    assert found["x_Cloud"] == "aws"
    assert found["x_UsageType"] == "BoxUsage:g5.4xlarge"
    assert found["InvoiceId"] is None


def test_headers_in_another_case_and_with_a_mark() -> None:
    table = text_table([row()])
    names = ["\ufeff" + n.lower() if i == 0 else n.upper() for i, n in enumerate(table.column_names)]
    assert focus.normalise(table.rename_columns(names), PLACE).rows.equals(normalised(row()))


@pytest.mark.parametrize("name", focus.MANDATORY)
def test_a_missing_mandatory_column_is_refused(name: str) -> None:
    with pytest.raises(DeliveryError, match=name) as caught:
        focus.normalise(text_table([row()]).drop_columns([name]), PLACE)
    assert caught.value.column == name
    assert "FOCUS cost and usage export" in str(caught.value)


def test_a_provider_column_is_needed_and_later_names_are_read() -> None:
    table = text_table([row()]).drop_columns(["ProviderName"])
    with pytest.raises(DeliveryError, match="ProviderName or ServiceProviderName"):
        focus.normalise(table, PLACE)
    later = table.append_column("ServiceProviderName", pa.array(["Google Cloud"]))
    assert focus.normalise(later, PLACE).rows["x_Cloud"].to_pylist() == ["gcp"]


def test_an_export_with_a_provider_column_is_told_by_it_first() -> None:
    names = {"ServiceProviderName": "Model House", "HostProviderName": "AWS", "InvoiceIssuerName": "AWS"}
    found = normalised(row(**names, ProviderName="Microsoft"), row(**names, ProviderName=""))
    assert found["x_Cloud"].to_pylist() == ["azure", "model house"]
    with pytest.raises(DeliveryError, match="a provider in every row, in ProviderName or ServiceProviderName or Host"):
        normalised(row(InvoiceIssuerName="AWS"), row(InvoiceIssuerName="AWS", ProviderName=""))


@pytest.mark.parametrize("name", ["BilledCost", "EffectiveCost", "ChargePeriodEnd", "BillingAccountId", "ProviderName"])
def test_a_missing_mandatory_value_is_refused(name: str) -> None:
    with pytest.raises(DeliveryError, match=f"row 12 .*{name}.*null"):
        normalised(row(), row(**{name: ""}))


def test_a_charge_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(DeliveryError, match=r"row 11 .*ChargePeriodEnd"):
        normalised(row(ChargePeriodEnd="2026-11-10T09:00:00Z"))


def test_a_column_twice_is_refused() -> None:
    table = text_table([row()]).append_column("BILLEDCOST", pa.array(["9"]))
    with pytest.raises(DeliveryError, match="BilledCost: expected each column once"):
        focus.normalise(table, PLACE)


@pytest.mark.parametrize(
    ("provider", "cloud"),
    [
        ("AWS", "aws"),
        ("Amazon Web Services", "aws"),
        ("Microsoft", "azure"),
        ("Azure", "azure"),
        ("Google Cloud", "gcp"),
        ("Oracle", "oracle"),
    ],
)
def test_clouds(provider: str, cloud: str) -> None:
    assert focus.cloud_of(provider) == cloud


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BilledCost", "2"),
        ("EffectiveCost", "2"),
        ("ListCost", "2"),
        ("ListUnitPrice", "2"),
        ("ConsumedQuantity", "2"),
        ("PricingQuantity", "2"),
        ("CommitmentDiscountQuantity", "2"),
        ("InvoiceId", "INV-1"),
        ("InvoiceDetailId", "INV-1-7"),
        ("Id", "77"),
        ("x_RowId", "77"),
        ("x_ExportTime", "2026-11-11"),
        ("x_BilledCostInUsd", "2"),
        ("x_EffectiveUnitPrice", "2"),
        ("x_Discounts", "{}"),
        ("x_Credits", '[{"type": "PROMOTION", "amount": -1}]'),
        ("RegionId", ""),
        ("x_NewColumn", ""),
    ],
)
def test_the_key_does_not_know(name: str, value: str) -> None:
    assert key(**{name: value}) == key()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ResourceId", "i-other"),
        ("SkuId", "SKU2"),
        ("ChargePeriodStart", "2026-11-10T10:30:00Z"),
        ("Tags", '{"team": "speech"}'),
        ("ChargeClass", "Correction"),
        ("x_Operation", "RunInstances"),
        ("x_CostCategories", '{"a": "b"}'),
        ("RegionId", "us-east-1"),
        ("x_Corporate", "a"),
        ("x_SystemLabels", '{"compute.googleapis.com/cores": "8"}'),
        ("x_CostType", "regular"),
        ("x_InvoiceMonth", "202611"),
        ("x_LoadBalancer", "a"),
    ],
)
def test_the_key_knows(name: str, value: str) -> None:
    assert key(**{name: value}) != key()


def test_the_key_is_the_same_from_text_and_from_types() -> None:
    table = text_table([row()])
    for name in ("ChargePeriodStart", "ChargePeriodEnd", "BillingPeriodStart", "BillingPeriodEnd"):
        at = instant_column(table[name], name, PLACE).cast(pa.timestamp("ms", "UTC"))
        table = table.set_column(table.column_names.index(name), name, at)
    table = table.set_column(table.column_names.index("BilledCost"), "BilledCost", pa.array([1.624]))
    tags = pa.array([[("team", "vision")]], pa.map_(pa.string(), pa.string()))
    table = table.set_column(table.column_names.index("Tags"), "Tags", tags)
    assert focus.normalise(table, PLACE).rows.equals(normalised(row()))


def test_keys_cannot_be_forged_across_columns() -> None:
    one = focus.content_keys({"A": pa.array(["x\x1fB=y"]), "B": pa.array([None], pa.string())})
    two = focus.content_keys({"A": pa.array(["x"]), "B": pa.array(["y"])})
    assert one != two
    assert focus.content_keys({"A": pa.array(["\\u"])}) != focus.content_keys({"A": pa.array(["\x1f"])})


@given(st.permutations(range(7)))
def test_occurrences_know_neither_order_nor_split(order: list[int]) -> None:
    rows = [row(BilledCost=c) for c in ("1", "2", "10", "-1", "2")] + [row(ResourceId="vol-1"), row(InvoiceId="I")]
    rows = [{"InvoiceId": "", **r} for r in rows]

    def numbered(of: list[int]) -> list[tuple[str, int, Decimal, str | None]]:
        tables = [normalised(*(rows[i] for i in of[:3])), normalised(*(rows[i] for i in of[3:]))]
        table = pa.concat_tables(tables)
        numbers = focus.occurrences(table).to_pylist()
        stored = table.to_pylist()
        return sorted(
            ((r["x_ChargeKey"], n, r["BilledCost"], r["InvoiceId"]) for r, n in zip(stored, numbers, strict=True)),
            key=str,
        )

    found = numbered(order)
    assert found == numbered(list(range(7)))
    assert len({(k, n) for k, n, _, _ in found}) == 7
    assert sorted(n for k, n, _, _ in found if k == key()) == [0, 1, 2, 3, 4, 5]


def test_what_rounding_took_is_summed_by_currency() -> None:
    batch = focus.normalise(
        text_table(
            [
                row(BilledCost="0.0000000000014"),
                row(BilledCost="0.0000000000016"),
                row(BilledCost="1.0000000000003", BillingCurrency="EUR"),
            ]
        ),
        PLACE,
    )
    assert batch.lost == {("BilledCost", "USD"): Decimal("0E-13"), ("BilledCost", "EUR"): Decimal("3E-13")}
