"""Estimates and layers of the second ledger, and its verdict on ledgers with one thing wrong."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from schemas.ledger import ADDRESSES, LAYERS, SPANS
from tasks import witness
from tasks.errors import WitnessError
from tests.tables import DAY, HOUR, SECOND, attachments, charge, charges, device, devices, layer, layers, ns
from tests.witness_day import (
    ACCOUNT,
    ALL_BILLED,
    COUNTS,
    SERVICE,
    TEN,
    TINY,
    addresses,
    checked,
    disks,
    ledger,
    machine,
    mig,
    monthly,
    part,
    prices,
    promoted,
    spans,
    worked_example,
)

# --- estimates ------------------------------------------------------------------------------------------------------


def test_estimate_stands_beyond_the_watermark_only() -> None:
    """Seen 09:00 to 12:00; billed at 09:00; the watermark is 11:00: 10:00 is unmatched, 11:00 is estimated."""
    times = [TEN.replace(hour=h) for h in (9, 10, 11)]
    facts = {"instance_type": "two"}
    seen = devices(*(device(t, "work", 1800, job="A", **facts) for t in times), device(times[2], "idle", 900, **facts))
    work = layers(*(layer(t, "A", "L1", 1, instance_type="two") for t in times))
    bill = charges(
        machine("box", "1", start=times[0], RegionId="eu-west-1", SubAccountId="sub", PricingCategory="Committed")
    )
    offers = prices(
        {"ListUnitPrice": Decimal(8), "RegionId": "eu-west-1"},
        {"ListUnitPrice": Decimal(99)},
        {"ListUnitPrice": Decimal(9), "RegionId": "eu-west-1", "PricingCategory": "Dynamic"},
    )
    found = ledger(bill, seen, work, prices=offers, watermarks={SERVICE: ns(times[2])})
    rows = [r for r in found[ADDRESSES.name].to_pylist() if r["x_HourUtc"].hour > 9]
    assert {r["x_ChargeKey"] for r in rows} == {"estimate:aws/i-1"}
    assert [(r["x_HourUtc"].hour, r["x_Category"], r["x_EstimatedCost"], r["BilledCost"]) for r in rows] == [
        (11, "work", 2, None),
        (11, "idle", 1, None),
        (11, "unobserved", 3, None),
    ]
    assert {place[0] for place in spans(found)} == {9, 11}
    assert spans(found)[11, None, None, "unobserved"] == 2700 * SECOND
    pool = [r for r in found[LAYERS.name].to_pylist() if r["x_HourUtc"].hour == 11]
    assert [
        (r["x_State"], r["BilledCost"], r["x_EstimatedCost"], r["BillingAccountId"], r["SubAccountId"]) for r in pool
    ] == [("provisional", None, 2, "111122223333", "sub")]


def test_estimate_is_rounded_half_even_and_needs_a_price() -> None:
    """1 unit of 1e-12 per hour over half an hour is half a unit, which rounds to the even 0; three units to 2."""
    seen = devices(device(TEN, "work", 1800, job="A", instance_type="two"))
    for price, expected in (("1", 0), ("3", 2), ("5", 2)):
        offers = prices({"ListUnitPrice": Decimal(price) * TINY})
        rows = ledger(charges(), seen, prices=offers, watermarks={})[ADDRESSES.name].to_pylist()
        assert sum(r["x_EstimatedCost"] for r in rows) / TINY == expected
    assert ledger(charges(), seen, watermarks={})[ADDRESSES.name].num_rows == 0


def test_price_is_the_latest_one_of_the_day_or_before() -> None:
    seen = devices(device(TEN, "work", 3600, job="A", instance_type="g5.4xlarge"))
    dated = {"2026-08": 1, "2026-09-30": 2, "2026-10-02": 3, "undated": 4}
    offers = prices(*({"SkuId": "g5.4xlarge", "x_AsOf": at, "ListUnitPrice": Decimal(p)} for at, p in dated.items()))
    rows = ledger(charges(), seen, prices=offers, watermarks={})[ADDRESSES.name].to_pylist()
    assert [r["x_EstimatedCost"] for r in rows] == [2]


def test_watermark_is_the_machines_own_else_the_least_of_its_service() -> None:
    late = TEN.replace(hour=11)
    seen = devices(
        device(TEN, "work", 1800, job="A", instance_type="two"),
        device(TEN, "work", 1800, job="A", instance_type="two", machine="i-2", device="GPU-2"),
    )
    bill = charges(machine("box", "1", start=TEN.replace(hour=8)))
    offers = prices({"ListUnitPrice": Decimal(8)})
    marks = {SERVICE: ns(late), "aws|999|Amazon Elastic Compute Cloud": ns(TEN), "aws|111122223333|Amazon S3": ns(DAY)}
    found = ledger(bill, seen, prices=offers, watermarks=marks)
    assert {r["x_ChargeKey"] for r in found[ADDRESSES.name].to_pylist()} == {"box", "estimate:aws/i-2"}


def test_one_vector_serves_every_row_of_an_estimated_hour() -> None:
    seen = devices(device(TEN, "work", 1800, job="A", instance_type="two"))
    bill = charges(charge("disk", "1", start=TEN, x_Class="dependant", x_DependantId="vol-1"))
    found = ledger(
        bill, seen, hung=attachments((TEN, "vol-1", "i-1")), prices=prices({"ListUnitPrice": Decimal(8)}), watermarks={}
    )
    assert [a[1:5] for a in addresses(found, "disk")] == [
        ("GPU-0", "A", "work", Decimal("0.5")),
        (None, None, "unobserved", Decimal("0.5")),
    ]


# --- second rounding ------------------------------------------------------------------------------------------------


def test_pool_uses_layers_of_its_type_else_of_all_types() -> None:
    seen = devices(
        device(TEN, "work", 3600, job="A", device="GPU-0"), device(TEN, "work", 3600, job="A", device="GPU-1")
    )
    mine = [layer(TEN, "A", "L1", 1, instance_type="two", gpu_model=m) for m in ("x", "y")] + [
        layer(TEN, "A", "L2", 1, instance_type="two")
    ]
    other = [
        layer(TEN, "A", "L3", 3, instance_type="other"),
        layer(TEN, "A", "L4", 9, instance_type="two", category="communication"),
    ]
    bill = charges(machine("a", "0.000000000006"), machine("b", "-0.000000000006", InvoiceId="inv"))

    def shares(work: pa.Table) -> list[tuple[Any, ...]]:
        rows = ledger(bill, seen, work)[LAYERS.name].to_pylist()
        return [(r["InvoiceId"], r["x_Layer"], r["BilledCost"] / TINY) for r in rows]

    assert shares(layers(*mine, *other)) == [("inv", "L1", -4), ("inv", "L2", -2), (None, "L1", 4), (None, "L2", 2)]
    assert shares(layers(*other)) == [("inv", "L3", -6), (None, "L3", 6)]
    assert shares(layers()) == []


def test_layer_ties_go_in_the_order_of_the_columns() -> None:
    seen = devices(device(TEN, "work", 3600, job="A"))
    work = layers(*(layer(TEN, "A", "L1", 1, batch_size=b) for b in (16, 8)), layer(TEN, "A", "L0", 1, dtype="fp8"))
    rows = ledger(charges(machine("a", "0.000000000004", x_InstanceType="g5.4xlarge")), seen, work)[
        LAYERS.name
    ].to_pylist()
    assert [(r["x_Layer"], r["x_BatchSize"], r["BilledCost"] / TINY) for r in rows] == [
        ("L0", 8, 2),
        ("L1", 8, 1),
        ("L1", 16, 1),
    ]


# --- the comparison -------------------------------------------------------------------------------------------------


def judged(found: dict[str, pa.Table], **facts: Any) -> witness.WitnessReport:
    """The verdict on a ledger of the worked example's day."""
    given = worked_example()
    return witness.check(
        given["bill"], given["seen"], given["work"], given["hung"], COUNTS, prices(), ALL_BILLED, "2026-10-01",
        {"aws": "us-east-1"},
        found[ADDRESSES.name], found[LAYERS.name], found[SPANS.name], **facts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def example() -> dict[str, pa.Table]:
    return ledger(**(worked_example() | {"quantum_digits": 12}))


def altered(table: pa.Table, row: int, column: str, value: Any) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] = value(values[row])
    return table.set_column(table.column_names.index(column), column, pa.array(values, table.schema.field(column).type))


def test_equal_ledgers_agree_and_are_counted(example: dict[str, pa.Table]) -> None:
    report = judged({name: table.take(pa.array(range(len(table) - 1, -1, -1))) for name, table in example.items()})
    assert report.rows == {name: len(table) for name, table in example.items()}
    assert sum(t.billed for t in report.totals if t.billed is not None) == Decimal("7.67")
    assert sum(t.effective for t in report.totals if t.effective is not None) == Decimal("7.67")
    tax = next(t for t in report.facts()["totals"] if t["category"] == "tax")
    assert tax == {
        "currency": "USD",
        "category": "tax",
        "billed": "0.720000000000",
        "effective": "0.720000000000",
        "estimated": None,
    }


@pytest.mark.parametrize("column", ["BilledCost", "EffectiveCost", "x_PromotionalCost"])
def test_one_unit_in_one_address_is_found_and_named(example: dict[str, pa.Table], column: str) -> None:
    rows = example[ADDRESSES.name].to_pylist()
    place = next(i for i, r in enumerate(rows) if r["x_ChargeKey"] == "on demand" and r["x_JobId"] == "B")
    wrong = altered(example[ADDRESSES.name], place, column, lambda amount: amount + TINY)
    with pytest.raises(WitnessError) as refusal:
        judged(example | {ADDRESSES.name: wrong})
    error = refusal.value
    right = Decimal(0) if column == "x_PromotionalCost" else Decimal("0.8")
    assert error.expected == f"{column} {right:.12f}"
    assert error.found == f"{column} {right + TINY:.12f}"
    assert error.differences == {ADDRESSES.name: 1, LAYERS.name: 0, SPANS.name: 0}
    assert error.address["x_ChargeKey"] == "on demand"
    assert error.where == "core_cost__addresses 2026-10-01"
    message = str(error)
    for words in ("witness 2026-10-01: core_cost__addresses: 1 row(s) differ", "x_ChargeKey on demand", "x_JobId B",
                 "x_HourUtc 2026-10-01T10:00:00Z", "witness.sql has", "the ledger has", f"{right + TINY:.12f}"):  # fmt: skip
        assert words in message


@pytest.mark.parametrize("name", [ADDRESSES.name, LAYERS.name, SPANS.name])
def test_missing_row_and_row_that_stands_twice_are_found(example: dict[str, pa.Table], name: str) -> None:
    table = example[name]
    with pytest.raises(WitnessError, match="the ledger has no such row"):
        judged(example | {name: table.slice(1)})
    with pytest.raises(WitnessError, match="the ledger has 2 rows of"):
        judged(example | {name: pa.concat_tables([table, table.slice(0, 1)])})


def test_row_that_no_rule_gives_is_found(example: dict[str, pa.Table]) -> None:
    table = altered(example[ADDRESSES.name], 0, "x_Category", lambda _: "other_usage")
    with pytest.raises(WitnessError, match=r"has no such row") as refusal:
        judged(example | {ADDRESSES.name: table})
    assert refusal.value.differences[ADDRESSES.name] == 2


def test_null_is_not_zero(example: dict[str, pa.Table]) -> None:
    table = altered(example[ADDRESSES.name], 0, "ListCost", lambda _: Decimal(0))
    with pytest.raises(WitnessError, match=r"witness\.sql has ListCost null, the ledger has ListCost 0\.000000000000"):
        judged(example | {ADDRESSES.name: table})


def test_wrong_span_and_wrong_layer_are_found(example: dict[str, pa.Table]) -> None:
    with pytest.raises(WitnessError, match=r"core_cost__spans: 1 row.* ns, the ledger has x_Ns .* ns"):
        judged(example | {SPANS.name: altered(example[SPANS.name], 0, "x_Ns", lambda n: n + 1)})
    with pytest.raises(WitnessError, match="core_cost__layers: 1 row"):
        judged(example | {LAYERS.name: altered(example[LAYERS.name], 0, "EffectiveCost", lambda a: a - TINY)})


def test_threads_and_time_zone_do_not_matter(example: dict[str, pa.Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    assert judged(example, threads=4) == judged(example)


# --- one unit off is found -------------------------------------------------------------------------------------------


def rich_day() -> tuple[tuple[pa.Table, ...], dict[str, Any]]:
    """A day with parts of a machine, slices, a promotion, a disk, and estimates of a machine and a volume."""
    late = TEN.replace(hour=12)
    bill = charges(
        promoted(part("cores", "Core", "13.7", "core-hours", "26"), "-0.3"),
        promoted(charge("disk", "0.7", start=TEN, x_Class="dependant", x_DependantId="vol-2"), "-0.1"),
    )
    seen = devices(
        mig(TEN, "work", HOUR // 3, name="MIG-a", slices=3, job="A"), mig(TEN, "idle", HOUR // 5, name="MIG-b", slices=1),
        device(late, "work", 1000, job="A", instance_type="two"),
    )  # fmt: skip
    work = layers(*(layer(at, "A", name, 1) for at in (TEN, late) for name in ("L1", "L2", "L3")))
    hung = disks((late, "vol-1", "i-1", 100, "gp3"), (TEN, "vol-2", "i-1", None, None))
    offers = prices({"ListUnitPrice": Decimal("7.7")}, monthly("0.08"))
    alphas = {f"aws|{ACCOUNT}|two": 1_003_000_000_000, f"aws|{ACCOUNT}|gp3": 991_000_000_007}
    return (bill, seen, work, hung), {"watermarks": {SERVICE: ns(late)}, "offers": offers, "alphas": alphas}


@pytest.fixture(scope="module")
def rich() -> dict[str, pa.Table]:
    day, facts = rich_day()
    asked = dict(facts)
    return ledger(*day, prices=asked.pop("offers"), **asked)


COMPARED = {
    ADDRESSES.name: ("BilledCost", "EffectiveCost", "x_PromotionalCost", "x_EstimatedCost"),
    LAYERS.name: ("BilledCost", "EffectiveCost", "x_PromotionalCost", "x_EstimatedCost"),
    SPANS.name: ("x_Ns",),
}


@pytest.mark.parametrize("name", list(COMPARED))
def test_every_amount_of_every_row_is_compared(rich: dict[str, pa.Table], name: str) -> None:
    """One row and column after another is changed by one unit; each time that row is named with both numbers."""
    day, facts = rich_day()
    assert checked(rich, *day, **facts).rows == {n: len(t) for n, t in rich.items()}
    table, tried = rich[name], 0
    for column in COMPARED[name]:
        values = table.column(column).to_pylist()
        for i in {*range(0, len(values), 3), len(values) - 1}:
            if values[i] is None:
                continue
            off = values[i] + (1 if column == "x_Ns" else TINY)
            wrong = pa.array([off if j == i else v for j, v in enumerate(values)], table.schema.field(column).type)
            changed = table.set_column(table.column_names.index(column), column, wrong)
            with pytest.raises(WitnessError) as refusal:
                checked(rich | {name: changed}, *day, **facts)
            error, row = refusal.value, table.slice(i, 1).to_pylist()[0]
            assert error.differences == {n: int(n == name) for n in COMPARED}
            assert {k: v for k, v in error.address.items() if "Utc" not in k and "Start" not in k} == {
                k: row[k] for k in error.address if "Utc" not in k and "Start" not in k
            }
            unit = " ns" if column == "x_Ns" else ""
            told = [f"{column} {v if unit else format(v, 'f')}{unit}" for v in (values[i], off)]
            assert [error.expected, error.found] == told and all(t in str(error) for t in told)
            tried += 1
    assert tried >= 4


@pytest.mark.parametrize(
    "facts",
    [
        {"alphas": {}},
        {"alphas": {f"aws|{ACCOUNT}|two": 1_003_000_000_000, f"aws|{ACCOUNT}|gp3": 991_000_000_100}},
        {"watermarks": {SERVICE: ns(TEN.replace(hour=13))}},
    ],
)
def test_other_inputs_give_another_ledger(rich: dict[str, pa.Table], facts: dict[str, Any]) -> None:
    day, given = rich_day()
    with pytest.raises(WitnessError, match="estimate:aws/"):
        checked(rich, *day, **(given | facts))


def test_digest_covers_every_file_of_the_witness() -> None:
    assert sorted(p.name for p in Path(witness.__file__).parent.glob("witness*.sql")) == sorted(witness.FILES)


# --- the arithmetic of the SQL itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [0, 1, -1, 7, -(10**26), 10**26 + 1, 2**86])
@pytest.mark.parametrize("weights", [(1,), (0, 1, 0), (3, 3, 1), (10**14, 1, 10**14 - 1), (0, 2, 2)])
def test_largest_remainder_is_within_one_unit_and_adds_up(units: int, weights: tuple[int, ...]) -> None:
    engine = duckdb.connect(":memory:", config={"threads": 1})
    macros = (
        Path(witness.__file__).with_name("witness.sql").read_text(encoding="utf-8").split("-- === Observed time")[0]
    )
    engine.execute(macros)
    engine.execute("CREATE TEMP TABLE t (grp BIGINT, pos BIGINT, units HUGEINT, weight BIGINT)")
    engine.executemany("INSERT INTO t VALUES (1, ?, ?, ?)", [[i, units, w] for i, w in enumerate(weights)])
    parts = [int(p) for (p,) in engine.execute("SELECT part FROM largest_remainder('t') ORDER BY pos").fetchall()]
    shares = [Fraction(units * w, sum(weights)) for w in weights]
    assert sum(parts) == units
    assert all(abs(p - s) < 1 for p, s in zip(parts, shares, strict=True))
