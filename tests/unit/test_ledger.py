"""The worked example of the ledger rules (quantum 0.0001), to the digit, and the rules around it."""

from decimal import Decimal

import pyarrow as pa
import pytest

from schemas.billing import PRICES
from tasks.core.ledger import Inputs, Ledger, assert_money, settle
from tasks.core.reconciliation import reconciliation_hourly
from tasks.core.spans import spread_quantity
from tasks.errors import LawError
from tests.tables import DAY, SECOND, attachments, build, charge, charges, device, devices, jobs, layer, layers, ns

TEN = DAY.replace(hour=10)
QUANTUM = Decimal("1e-12")


def quanta(amount: str) -> str:
    """An amount of the worked example, whose quantum is 0.0001, in the ledger's quantum of 1e-12."""
    return str(Decimal(amount) * 10_000 * QUANTUM)


def found(value: Decimal) -> Decimal:
    return (value / QUANTUM / 10_000).quantize(Decimal("0.0001"))


def inputs(
    bill: pa.Table, usage: pa.Table, work: pa.Table | None = None, volumes: pa.Table | None = None, **facts: object
) -> Inputs:
    defaults = {
        "day": "2026-10-01",
        "charges": bill,
        "device_hourly": usage,
        "layer_hourly": work if work is not None else layers(),
        "attachments": volumes if volumes is not None else attachments(),
        "jobs": jobs("A", "B"),
        "gpu_counts": {"two.gpu": 2, "one.gpu": 1},
        "prices": build(PRICES, []),
        "watermarks": {},
        "default_region": {"aws": "us-east-1"},
    }
    return Inputs(**(defaults | facts))  # type: ignore[arg-type]


def machine(
    key: str, billed: str, effective: str | None = None, *, quantity: str = "1", **facts: object
) -> dict[str, object]:
    tied = {
        "x_Class": "machine",
        "x_MachineId": "i-1",
        "x_InstanceType": "two.gpu",
        "ResourceId": "i-1",
        "SkuMeter": "BoxUsage",
        "ConsumedQuantity": Decimal(quantity),
        "ConsumedUnit": "Hours",
        "PricingCategory": "Standard",
        "start": TEN,
    }
    return charge(key, billed, effective, **(tied | facts))  # type: ignore[arg-type]


def by(ledger: Ledger, table: str, *names: str) -> dict[tuple[object, ...], tuple[Decimal, Decimal]]:
    rows = getattr(ledger, table).to_pylist()
    sums: dict[tuple[object, ...], list[Decimal]] = {}
    for row in rows:
        total = sums.setdefault(tuple(row[n] for n in names), [Decimal(0), Decimal(0)])
        total[0] += row["BilledCost"] or 0
        total[1] += row["EffectiveCost"] or 0
    return {k: (found(a), found(b)) for k, (a, b) in sums.items()}


def worked_example() -> Inputs:
    bill = charges(
        machine(
            "covered",
            "0",
            quanta("3.0000"),
            quantity="0.6",
            CommitmentDiscountStatus="Used",
            PricingCategory="Committed",
        ),
        machine("demand", quanta("3.2000"), quantity="0.4"),
        charge(
            "fee",
            quanta("4.0000"),
            "0",
            ChargeCategory="Purchase",
            ChargeFrequency="Recurring",
            CommitmentDiscountId="sp-1",
            start=TEN,
        ),
        charge(
            "unused", "0", quanta("1.0000"), CommitmentDiscountStatus="Unused", CommitmentDiscountId="sp-1", start=TEN
        ),
        charge(
            "disk",
            quanta("0.2500"),
            hours=24,
            x_Class="dependant",
            x_DependantId="vol-1",
            ResourceId="vol-1",
            PricingCategory="Standard",
        ),
        charge("tax", quanta("0.7200"), ChargeCategory="Tax", start=TEN),
        charge("credit", quanta("-0.5000"), ChargeCategory="Credit", start=TEN),
    )
    usage = devices(
        device(TEN, "work", 700, job="A"),
        device(TEN, "input_stall", 500, job="A"),
        device(TEN, "work", 1800, job="B"),
        device(TEN, "idle", 600),
        device(TEN, "idle", 3600, device="GPU-1"),
    )
    work = layers(layer(TEN, "A", "L1", 500), layer(TEN, "A", "L2", 200), layer(TEN, "B", "L1", 1800))
    return inputs(bill, usage, work, attachments((TEN, "vol-1", "i-1")))


def test_worked_example_addresses_to_the_digit() -> None:
    ledger = settle(worked_example())
    tied = by(ledger, "addresses", "x_JobId", "x_DeviceId", "x_Category")
    expected = {
        ("A", "GPU-0", "input_stall"): ("0.2229", "0.4312"),
        ("B", "GPU-0", "work"): ("0.8026", "1.5526"),
        (None, "GPU-0", "idle"): ("0.2676", "0.5176"),
        (None, "GPU-1", "idle"): ("1.6052", "3.1052"),
        (None, None, "idle"): ("0.2396", "0.2396"),
        (None, None, "commitment_purchase"): ("4.0000", "0.0000"),
        (None, None, "commitment_unused"): ("0.0000", "1.0000"),
        (None, None, "tax"): ("0.7200", "0.7200"),
        (None, None, "credit"): ("-0.5000", "-0.5000"),
    }
    work = tied.pop(("A", "GPU-0", "work"))
    assert tied == {k: (Decimal(a), Decimal(b)) for k, (a, b) in expected.items()}
    assert work == (Decimal("0.3121"), Decimal("0.6038"))
    assert by(ledger, "addresses") == {(): (Decimal("7.6700"), Decimal("7.6700"))}


def test_worked_example_layers_to_the_digit() -> None:
    found_layers = by(settle(worked_example()), "layers", "x_JobId", "x_Layer")
    assert found_layers == {
        ("A", "L1"): (Decimal("0.2229"), Decimal("0.4313")),
        ("A", "L2"): (Decimal("0.0892"), Decimal("0.1725")),
        ("B", "L1"): (Decimal("0.8026"), Decimal("1.5526")),
    }


def prices(*rows: tuple[str, str, str]) -> pa.Table:
    return build(
        PRICES,
        [
            {"x_Cloud": "aws", "SkuId": kind, "RegionId": "us-east-1", "PricingCategory": "Standard", "x_AsOf": as_of,
             "ListUnitPrice": Decimal(price), "PricingUnit": "Hours", "BillingCurrency": "USD", "x_GpuModel": "T4",
             "x_GpuCount": 1, "x_PriceSource": "test"}
            for kind, as_of, price in rows
        ],
    )  # fmt: skip


def amounts(ledger: Ledger, *names: str, column: str = "BilledCost") -> dict[tuple[object, ...], Decimal]:
    sums: dict[tuple[object, ...], Decimal] = {}
    for row in ledger.addresses.to_pylist():
        if row[column] is not None:
            key = tuple(row[n] for n in names)
            sums[key] = sums.get(key, Decimal(0)) + row[column]
    return sums


def test_a_machine_without_telemetry_is_unobserved_with_its_reason() -> None:
    ledger = settle(inputs(charges(machine("m", "8.00")), devices()))
    (row,) = ledger.addresses.to_pylist()
    assert (row["x_Category"], row["x_Reason"], row["x_DeviceId"], row["x_CoveragePpm"]) == (
        "unobserved",
        "no_agent",
        None,
        0,
    )
    assert ledger.spans.to_pylist()[0]["x_Ns"] == 2 * 3600 * SECOND


def test_observed_less_than_billed_is_unobserved_never_idle() -> None:
    usage = devices(device(TEN, "idle", 600), device(TEN, "idle", 3600, device="GPU-1"))
    found_amounts = amounts(settle(inputs(charges(machine("m", "7.20")), usage)), "x_DeviceId", "x_Category")
    assert found_amounts == {
        ("GPU-0", "idle"): Decimal("0.60"), ("GPU-0", "unobserved"): Decimal("3.00"), ("GPU-1", "idle"): Decimal("3.60"),
    }  # fmt: skip


def test_observed_more_than_billed_is_scaled_back_and_found() -> None:
    usage = devices(device(TEN, "work", 1200, job="A"), device(TEN, "idle", 2400))
    bill = charges(machine("m", "1.00", quantity="0.5", x_InstanceType="one.gpu"))
    ledger = settle(inputs(bill, usage, layers(layer(TEN, "A", "L1", 1200))))
    spent = {r["x_Category"]: r["x_Ns"] for r in ledger.spans.to_pylist()}
    assert spent == {"work": 600 * SECOND, "idle": 1200 * SECOND}
    assert ledger.hours.slots[0].findings == {"observed_exceeds_billed"}


def test_meters_that_disagree_take_the_largest_and_are_found() -> None:
    bill = charges(
        machine("core", "1.00", quantity="0.75", SkuMeter="core", x_InstanceType="one.gpu"),
        machine("gpu", "2.00", quantity="0.5", SkuMeter="gpu", x_InstanceType="one.gpu"),
    )
    ledger = settle(inputs(bill, devices()))
    assert [s.billed_ns for s in ledger.hours.slots] == [2700 * SECOND]
    assert ledger.hours.slots[0].findings == {"meters_disagree"}


def test_a_daily_machine_row_follows_running_time_and_fills_the_earliest_free_hours() -> None:
    usage = devices(device(TEN, "idle", 3600), device(TEN.replace(hour=20), "idle", 1800))
    bill = charges(machine("m", "5.00", quantity="2", start=DAY, hours=24, x_InstanceType="one.gpu"))
    ledger = settle(inputs(bill, usage))
    spans = {s.hour: s.billed_ns for s in ledger.hours.slots if s.billed_ns}
    assert spans == {0: 1800 * SECOND, 10: 3600 * SECOND, 20: 1800 * SECOND}
    assert amounts(ledger, "x_HourUtc")[(TEN,)] == Decimal("2.50")


@pytest.mark.parametrize(
    ("quantity", "running", "capacity", "expected"),
    [
        (10, [0, 0, 0], [6, 6, 6], [6, 4, 0]),
        (10, [0, 5, 0], [6, 6, 6], [5, 5, 0]),
        (10, [8, 8, 4], [8, 8, 8], [4, 4, 2]),
        (30, [0, 0], [6, 6], [6, 24]),
        (0, [3, 0], [6, 6], [0, 0]),
    ],
)
def test_spread_quantity(quantity: int, running: list[int], capacity: list[int], expected: list[int]) -> None:
    assert spread_quantity(quantity, running, capacity) == expected


def test_beyond_the_watermark_is_estimated_and_before_it_unmatched() -> None:
    usage = devices(
        device(TEN, "idle", 1800, instance_type="one.gpu"),
        device(TEN.replace(hour=11), "idle", 3600, instance_type="one.gpu"),
    )
    marks = {"aws|111122223333|Amazon Elastic Compute Cloud": ns(TEN) + 3600 * SECOND}
    ledger = settle(
        inputs(
            charges(),
            usage,
            prices=prices(("one.gpu", "2026-09", "3.00"), ("one.gpu", "2026-11", "9.00")),
            watermarks=marks,
        )
    )
    (row,) = ledger.addresses.to_pylist()
    assert (row["x_HourUtc"], row["x_EstimatedCost"], row["x_State"], row["BilledCost"]) == (
        TEN.replace(hour=11), Decimal("3.00"), "provisional", None,
    )  # fmt: skip
    assert {s.hour: s.findings for s in ledger.hours.slots} == {10: {"unmatched"}, 11: set()}


def test_an_estimate_without_a_price_is_a_finding_not_a_zero() -> None:
    ledger = settle(inputs(charges(), devices(device(TEN, "idle", 3600, instance_type="one.gpu"))))
    assert len(ledger.addresses) == 0
    assert ledger.hours.slots[0].findings == {"no_price"}
    hourly = reconciliation_hourly(inputs(charges(), devices()), ledger.pairs).to_pylist()
    assert [(r["x_State"], r["x_EstimatedCost"], r["x_Finding"]) for r in hourly] == [("provisional", None, "no_price")]


def test_a_refund_of_a_machine_stays_with_its_jobs() -> None:
    usage = devices(device(TEN, "work", 3600, job="A"))
    work = layers(layer(TEN, "A", "L1", 3600))
    refund = machine("r", "-1.00", ChargeCategory="Credit", x_InstanceType="one.gpu")
    bill = charges(machine("m", "4.00", x_InstanceType="one.gpu"), refund)
    assert amounts(settle(inputs(bill, usage, work)), "x_JobId", "x_Category") == {("A", "work"): Decimal("3.00")}


@pytest.mark.parametrize(
    ("facts", "category"),
    [
        ({"ChargeCategory": "Tax"}, "tax"),
        ({"x_Class": "rounding", "ChargeCategory": "Adjustment"}, "rounding"),
        ({"ChargeCategory": "Purchase", "CommitmentDiscountId": "sp-1"}, "commitment_purchase"),
        ({"ChargeCategory": "Purchase"}, "other_usage"),
        ({"CommitmentDiscountStatus": "Unused"}, "commitment_unused"),
        ({"CapacityReservationStatus": "Unused"}, "capacity_unused"),
        ({"x_Class": "capacity_unused", "ChargeClass": "Correction"}, "capacity_unused"),
        ({"x_UsageType": "UnusedBox:p4d.24xlarge"}, "capacity_unused"),
        ({"x_Class": "support"}, "support"),
        ({"ChargeCategory": "Credit"}, "credit"),
        ({"ChargeCategory": "Adjustment"}, "adjustment"),
        ({"ChargeClass": "Correction"}, "adjustment"),
        ({"BilledCost": Decimal(-1), "x_DayBilledCost": Decimal(-1)}, "refund"),
        ({"x_Class": "storage"}, "storage"),
        ({"x_Class": "shared"}, "shared"),
        ({"x_Class": "dependant", "x_DependantId": "vol-9"}, "untied"),
        ({"x_Class": "untied"}, "untied"),
        ({"x_Class": "machine"}, "untied"),
        ({}, "other_usage"),
    ],
)
def test_categories_in_order_of_precedence(facts: dict[str, object], category: str) -> None:
    row = charge("c", "1.00") | facts
    assert [r["x_Category"] for r in settle(inputs(charges(row), devices())).addresses.to_pylist()] == [category]


def test_hours_of_an_untied_charge_come_from_the_whole_charge() -> None:
    row = charge("s", "0.000000002500", hours=24, x_Class="storage")
    by_hour = amounts(settle(inputs(charges(row), devices())), "x_HourUtc")
    expected = [2500 * (h + 1) // 24 - 2500 * h // 24 for h in range(24)]
    assert [int(by_hour[(DAY.replace(hour=h),)] / QUANTUM) for h in range(24)] == expected


def test_law_one_names_the_charge_and_both_amounts() -> None:
    example = worked_example()
    addresses = settle(example).addresses
    place = addresses.schema.get_field_index("BilledCost")
    first = addresses["BilledCost"].to_pylist()
    first[0] += QUANTUM
    broken = addresses.set_column(place, "BilledCost", pa.array(first, addresses.schema.field(place).type))
    with pytest.raises(
        LawError, match=r"law 1 \(money\): charge \w+ occurrence 0: BilledCost expected .* add up to"
    ) as caught:
        assert_money(example.charges, broken)
    assert caught.value.facts["found"] - caught.value.facts["expected"] == QUANTUM


def test_work_without_layer_time_stops() -> None:
    usage = devices(device(TEN, "work", 3600, job="A"))
    with pytest.raises(LawError, match=r"job A attempt 0 has work money at .* and no layer time"):
        settle(inputs(charges(machine("m", "4.00", x_InstanceType="one.gpu")), usage))
