"""Laws 1 and 2 on random days, and the second ledger in SQL: both must agree to the digit, whatever the order of rows."""

import datetime as dt
import random
from decimal import Decimal

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.billing import CLASSES, PRICES
from tasks import witness
from tasks.core import money
from tasks.core.ledger import Inputs, settle
from tasks.core.reconciliation import reconciliation_hourly
from tasks.core.reports import job_daily, layer_daily, resource_daily
from tasks.publish import assert_same_total
from tests import tables
from tests.tables import DAY, HOUR, SECOND, build, charge, device, layer, ns

MACHINES = ("i-1", "i-2", "i-3")
TYPES = {"i-1": "two.gpu", "i-2": "one.gpu", "i-3": None}
HOURS = (0, 1, 2, 23)
BUSY = ("startup", "work", "checkpoint", "communication", "input_stall", "unattributed_busy", "held_idle")


def random_day(seed: int) -> Inputs:
    """A day with every kind of charge, gaps, shared devices, partial hours and estimates."""
    rng = random.Random(seed)
    usage, work, volumes = _usage(rng)
    bill = [_machine_row(rng, i) for i in range(rng.randint(0, 10))] + [
        _other_row(rng, i) for i in range(rng.randint(0, 14))
    ]
    rng.shuffle(bill)
    prices = [
        {
            "x_Cloud": "aws",
            "SkuId": "two.gpu",
            "RegionId": "us-east-1",
            "PricingCategory": "Standard",
            "x_AsOf": "2026-09",
            "ListUnitPrice": Decimal("8.123456789"),
            "PricingUnit": "Hours",
            "BillingCurrency": "USD",
            "x_GpuModel": "T4",
            "x_GpuCount": 2,
            "x_PriceSource": "test",
        },
    ]
    marks = {"aws|111122223333|Amazon Elastic Compute Cloud": ns(DAY) + rng.choice([0, 1, 2, 24]) * HOUR}
    return Inputs(
        day="2026-10-01",
        charges=tables.charges(*bill),
        device_hourly=tables.devices(*usage),
        layer_hourly=tables.layers(*work),
        attachments=tables.attachments(*volumes),
        jobs=tables.jobs("A", "B"),
        gpu_counts={"two.gpu": 2, "one.gpu": 1},
        prices=build(PRICES, prices),
        watermarks=marks if rng.random() < 0.8 else {},
        default_region={"aws": "us-east-1", "gcp": "us-central1"},
    )


def _amount(rng: random.Random) -> str:
    scale = rng.choice([1, 10**3, 10**12, 10**14, 7 * 10**19])
    value = Decimal(rng.randint(0, scale)).scaleb(-12)
    return str(-value if rng.random() < 0.15 else value)


def _usage(
    rng: random.Random,
) -> tuple[list[dict[str, object]], list[dict[str, object]], list[tuple[dt.datetime, str, str]]]:
    usage, work, volumes = [], [], []
    for machine in MACHINES:
        for h in HOURS:
            if rng.random() < 0.3:
                continue
            hour = DAY.replace(hour=h)
            if rng.random() < 0.5:
                volumes.append((hour, rng.choice(["vol-1", "vol-2"]), machine))
            for gpu in range(rng.randint(1, 2)):
                for name, cut in _layout(rng, f"GPU-{machine}-{gpu}"):
                    usage += [r | cut for r in _device_hour(rng, hour, machine, name, work)]
    seen = {(w["hour_utc"], w["job_id"], w["layer"], w["instance_type"]): w for w in work}
    return usage, list(seen.values()), sorted(set(volumes))


def _layout(rng: random.Random, gpu: str) -> list[tuple[str, dict[str, object]]]:
    """A GPU as it is, or its slices in this hour: all seven, fewer, or more than it can have."""
    if rng.random() < 0.7:
        return [(gpu, {})]
    total = rng.choice([4, 7])
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    return [(f"MIG-{gpu}-{i}", {"parent_uuid": gpu, "mig_slices": k, "mig_total": total}) for i, k in enumerate(sizes)]


def _bill_facts(rng: random.Random, effective: str) -> dict[str, object]:
    """Who invoices a row, in which currency and month, and what of it a promotion paid."""
    facts: dict[str, object] = {
        "BillingCurrency": rng.choice(["USD", "USD", "USD", "EUR"]),
        "InvoiceId": rng.choice([None, "inv-1", "inv-2"]),
        "BillingPeriodStart": rng.choice([DAY, DAY, DAY.replace(month=9)]),
    }
    if rng.random() < 0.3:
        facts["x_PromotionalCost"] = -abs(Decimal(effective)) // 3 if rng.random() < 0.5 else Decimal("-0.000000000007")
    return facts


def _device_hour(
    rng: random.Random, hour: dt.datetime, machine: str, gpu: str, work: list[dict[str, object]]
) -> list[dict[str, object]]:
    left = rng.choice([3600, 3600, 1800, 2500]) * SECOND + rng.randint(-1, 0)
    facts = {"device": gpu, "machine": machine, "instance_type": rng.choice([TYPES[machine], None])}
    rows = []
    for job in rng.sample(["A", "B"], rng.randint(0, 2)):
        for category in rng.sample(BUSY, rng.randint(1, 4)):
            spent = min(left, rng.randint(1, 1200 * SECOND))
            left -= spent
            if spent <= 0:
                continue
            rows.append(device(hour, category, 0, job=job, **facts) | {"ns": spent})  # type: ignore[arg-type]
            if category == "work":
                for name in rng.sample(["L1", "L2", "L3"], rng.randint(1, 3)):
                    work.append(
                        layer(hour, job, name, 0, instance_type=facts["instance_type"]) | {"ns": rng.randint(1, 10**12)}
                    )
    if left > 0 and rng.random() < 0.7:
        rows.append(device(hour, rng.choice(["idle", "unobserved"]), 0, **facts) | {"ns": left})  # type: ignore[arg-type]
    return rows


def _machine_row(rng: random.Random, i: int) -> dict[str, object]:
    machine = rng.choice([*MACHINES, "i-9"])
    hours = rng.choice([1, 1, 1, 1, 2, 24, 0.5])
    start = DAY.replace(hour=rng.choice(HOURS if hours <= 1 else (0, 1)))
    if hours == 24:
        start = DAY
    quantity: dict[str, object] = {
        "ConsumedQuantity": Decimal(rng.randint(0, int(hours * 10**9))).scaleb(-9),
        "ConsumedUnit": rng.choice(["Hours", "hrs"]),
    }
    if rng.random() < 0.15:
        quantity = {
            "PricingQuantity": Decimal("0.25"),
            "PricingUnit": "Hours",
            "ConsumedUnit": "Units",
            "ConsumedQuantity": Decimal(7),
        }
    if rng.random() < 0.2:
        quantity = {
            "PricingQuantity": Decimal(rng.randint(0, 12 * int(hours * 10**9))).scaleb(-9),
            "PricingUnit": rng.choice(["hour", "gibibyte hour", "vcpu-hours", "GiBy.h"]),
            "x_UnitsPerMachine": rng.choice([Decimal(12), Decimal("3.75"), Decimal(7), Decimal(0), None]),
        }
    if rng.random() < 0.1:
        quantity = {}
    status = rng.choice([None, None, "Used"])
    facts: dict[str, object] = {
        "x_Class": "machine",
        "x_MachineId": machine,
        "ResourceId": machine,
        "x_InstanceType": TYPES.get(machine, "one.gpu")
        if rng.random() < 0.9
        else rng.choice(["one.gpu", "new.gpu", None]),
        "start": start,
        "hours": hours,
        "SkuMeter": rng.choice(["BoxUsage", "BoxUsage", "SpotUsage", None]),
        "x_TieRule": rng.choice(["core", "core", "ram", None]),
        "CommitmentDiscountStatus": status,
        "CommitmentDiscountId": None if status is None else "sp-1",
        "PricingCategory": "Standard" if status is None else "Committed",
        "ListCost": rng.choice([None, Decimal("3.5")]),
    }
    if facts["ListCost"] is not None:
        facts["x_DayListCost"] = facts["ListCost"]
    if rng.random() < 0.2:
        facts |= {
            "ChargeCategory": rng.choice(["Credit", "Adjustment"]),
            "ChargeClass": rng.choice([None, "Correction"]),
        }
    billed = "0" if status else _amount(rng)
    effective = _amount(rng) if status else billed
    facts |= quantity | _bill_facts(rng, effective)
    return charge(f"m{i}", billed, effective, **facts)  # type: ignore[arg-type]


def _other_row(rng: random.Random, i: int) -> dict[str, object]:
    kind = rng.choice([*CLASSES[2:], *["dependant"] * 3])
    hours = rng.choice([1, 1, 24, 0.75, 3])
    facts: dict[str, object] = {
        "x_Class": kind,
        "start": DAY if hours == 24 else DAY.replace(hour=rng.choice((0, 1))),
        "hours": hours,
        "ChargeCategory": rng.choice(["Usage", "Usage", "Usage", "Tax", "Credit", "Adjustment", "Purchase"]),
        "ChargeFrequency": rng.choice(["Usage-Based", "Usage-Based", "Recurring", "One-Time"]),
        "CommitmentDiscountStatus": rng.choice([None, None, None, "Unused"]),
        "x_UsageType": rng.choice([None, "UnusedBox:two.gpu"]),
    }
    if kind == "dependant":
        facts["x_DependantId"] = rng.choice(["vol-1", "vol-2", "vol-9"])
    if rng.random() < 0.15:
        facts["x_MachineId"] = rng.choice([*MACHINES, "i-8"])
    if rng.random() < 0.2:
        facts["CommitmentDiscountId"] = "sp-1"
    effective = _amount(rng)
    facts |= _bill_facts(rng, effective)
    return charge(f"o{i}", _amount(rng), effective, **facts)  # type: ignore[arg-type]


def agree(day: Inputs) -> pa.Table:
    ledger = settle(day)
    witness.check(
        day.charges,
        day.device_hourly,
        day.layer_hourly,
        day.attachments,
        day.gpu_counts,
        day.prices,
        day.watermarks,
        day.day,
        day.default_region,
        ledger.addresses,
        ledger.layers,
        ledger.spans,
        alphas=day.alphas or {},
        contracted=day.contracted or {},
    )
    reconciled = reconciliation_hourly(day, ledger.pairs)
    paid = [pair.paid.cash for pair in ledger.pairs if pair.paid is not None and len(pair.paid.currencies) == 1]
    assert money.total(reconciled["BilledCost"].to_pylist()) == money.decimal(sum(paid))
    date = dt.date.fromisoformat(day.day)
    for report in (
        job_daily(date, ledger.addresses, ledger.spans, day.jobs),
        resource_daily(date, ledger.addresses, ledger.spans),
        layer_daily(date, ledger.addresses, ledger.layers, day.layer_hourly, ledger.spans, day.jobs, lambda *_: 10**14),
    ):
        assert_same_total(ledger.addresses, report, "report")
    return ledger.addresses


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_both_ledgers_agree_on_random_days(seed: int) -> None:
    agree(random_day(seed))
