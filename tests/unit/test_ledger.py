"""The worked example of the ledger rules (quantum 0.0001), to the digit, and the rules around it."""

from decimal import Decimal

import pyarrow as pa

from schemas.billing import PRICES
from tasks.core.ledger import Inputs, Ledger, settle
from tests.tables import DAY, attachments, build, charge, charges, device, devices, jobs, layer, layers

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
        "default_region": "us-east-1",
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
