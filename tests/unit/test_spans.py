"""Vectors of machine-hours whose GPUs are cut into slices, and spans from meters that count parts of a machine, by hand."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from tasks.core.ledger import Ledger, assert_time, settle
from tasks.core.reports import resource_daily
from tasks.core.spans import quantity_ns
from tasks.errors import LawError
from tests.tables import DAY, SECOND, attachments, charge, charges, device, devices, layer, layers, ns
from tests.unit.test_ledger import TEN, inputs, machine

VM = "//compute.googleapis.com/projects/p/zones/europe-west4-a/instances/4711"


def slice_of(name: str, slices: int, category: str, seconds: float, **facts: Any) -> dict[str, Any]:
    """One row of a MIG slice of GPU-0, which has seven."""
    made = {"parent_uuid": "GPU-0", "mig_slices": slices, "mig_total": 7} | facts
    return device(TEN, category, seconds, device=name, **made)


def sliced() -> Ledger:
    """Three of seven slices are MIG-a, one is MIG-b, and nobody was given the other three; 45 minutes were billed."""
    bill = charges(
        machine("usage", "2.70", quantity="0.75", x_InstanceType="one.gpu"),
        machine("refund", "-1.00", ChargeCategory="Credit", x_InstanceType="one.gpu"),
    )
    usage = devices(
        slice_of("MIG-a", 3, "work", 1800, job="A"),
        slice_of("MIG-a", 3, "idle", 600),
        slice_of("MIG-b", 1, "held_idle", 3000, job="B"),
    )
    return settle(inputs(bill, usage, layers(layer(TEN, "A", "L1", 1800))))


def test_a_gpu_in_slices_shares_its_span_by_their_compute_slices() -> None:
    """2,700 s over 3, 1 and 3 sevenths; MIG-a has 300 s of its span that no reading covers, MIG-b was seen for too long."""
    ledger = sliced()
    rows = {(r["x_DeviceId"], r["x_JobId"], r["x_Category"]): r for r in ledger.spans.to_pylist()}
    assert {key: r["x_Ns"] for key, r in rows.items()} == {
        ("GPU-0", None, "idle"): 1_157_142_857_143,
        ("MIG-a", "A", "work"): 771_428_571_429,
        ("MIG-a", None, "idle"): 257_142_857_143,
        ("MIG-a", None, "unobserved"): 128_571_428_571,
        ("MIG-b", "B", "held_idle"): 385_714_285_714,
    }
    assert {d: r["x_ParentId"] for (d, _, _), r in rows.items()} == {"GPU-0": None, "MIG-a": "GPU-0", "MIG-b": "GPU-0"}
    assert {d: r["x_ObservedNs"] for (d, _, _), r in rows.items()} == {
        "GPU-0": 0, "MIG-a": 2400 * SECOND, "MIG-b": 3000 * SECOND
    }  # fmt: skip
    rest = rows["GPU-0", None, "idle"]
    assert (rest["x_Evidence"], rest["x_Reason"], rest["x_EnergyMj"]) == ("measured", None, None)
    assert rows["MIG-a", None, "unobserved"]["x_Reason"] == "gap"
    assert ledger.hours.slots[0].findings == {"observed_exceeds_billed"}
    assert ledger.hours.slots[0].devices == 1


def test_money_of_a_gpu_in_slices_to_the_digit() -> None:
    """The first charge has a unit for each nanosecond; of the refund the last two units go to the largest remainders."""
    found = {
        (r["x_ChargeKey"], r["x_DeviceId"], r["x_Category"]): r["BilledCost"] for r in sliced().addresses.to_pylist()
    }
    assert found == {
        ("usage", "GPU-0", "idle"): Decimal("1.157142857143"),
        ("usage", "MIG-a", "work"): Decimal("0.771428571429"),
        ("usage", "MIG-a", "idle"): Decimal("0.257142857143"),
        ("usage", "MIG-a", "unobserved"): Decimal("0.128571428571"),
        ("usage", "MIG-b", "held_idle"): Decimal("0.385714285714"),
        ("refund", "GPU-0", "idle"): Decimal("-0.428571428572"),
        ("refund", "MIG-a", "work"): Decimal("-0.285714285714"),
        ("refund", "MIG-a", "idle"): Decimal("-0.095238095238"),
        ("refund", "MIG-a", "unobserved"): Decimal("-0.047619047619"),
        ("refund", "MIG-b", "held_idle"): Decimal("-0.142857142857"),
    }
    assert {r["x_CoveragePpm"] for r in sliced().addresses.to_pylist()} == {952_380}


def test_the_resource_report_shows_the_gpu_of_a_slice() -> None:
    ledger = sliced()
    rows = resource_daily(DAY.date(), ledger.addresses, ledger.spans).to_pylist()
    assert {(r["x_DeviceId"], r["x_ParentId"]) for r in rows} == {
        ("GPU-0", None), ("MIG-a", "GPU-0"), ("MIG-b", "GPU-0")
    }  # fmt: skip
    assert sum(r["x_GpuNs"] for r in rows) == 2700 * SECOND


def test_law_two_names_the_gpu_whose_slices_do_not_add_up() -> None:
    ledger = sliced()
    spans = ledger.spans.filter(np.array([r["x_DeviceId"] != "MIG-b" for r in ledger.spans.to_pylist()]))
    day = inputs(charges(), devices())
    with pytest.raises(
        LawError,
        match=r"law 2 \(time\): aws\|i-1 hour 10: billed 2700000000000 ns for each of 1 device\(s\); GPU GPU-0: expected "
        r"2700000000000 ns, categories add up to 2314285714286 ns",
    ):
        assert_time(spans, ledger.hours, day.gpu_counts, np.array([2700 * SECOND]), day.day_ns)


def test_slices_of_one_gpu_beside_a_whole_gpu_and_one_that_no_reading_names() -> None:
    usage = devices(
        slice_of("MIG-a", 4, "idle", 3600),
        slice_of("MIG-b", 3, "idle", 3600),
        device(TEN, "idle", 1800, device="GPU-1"),
    )
    four = inputs(charges(machine("m", "4.00", x_InstanceType="four.gpu")), usage, gpu_counts={"four.gpu": 4})
    rows = settle(four).spans.to_pylist()
    assert {(r["x_DeviceId"], r["x_Category"], r["x_Reason"]): r["x_Ns"] for r in rows} == {
        ("MIG-a", "idle", None): 2_057_142_857_143,
        ("MIG-b", "idle", None): 1_542_857_142_857,
        ("GPU-1", "idle", None): 1800 * SECOND,
        ("GPU-1", "unobserved", "gap"): 1800 * SECOND,
        (None, "unobserved", "gap"): 2 * 3600 * SECOND,
    }


def test_a_slice_too_small_for_a_nanosecond_has_no_row() -> None:
    """A nanosecond of span belongs to one of the seven slices: to the largest."""
    usage = devices(
        slice_of("MIG-a", 1, "idle", 3600), slice_of("MIG-b", 2, "idle", 3600), slice_of("MIG-c", 4, "idle", 1)
    )
    bill = charges(machine("m", "4.00", quantity="0.000000001", ConsumedUnit="Seconds", x_InstanceType="one.gpu"))
    ledger = settle(inputs(bill, usage))
    assert [(r["x_DeviceId"], r["x_Ns"]) for r in ledger.spans.to_pylist()] == [("MIG-c", 1)]


def test_without_a_span_slices_keep_what_was_observed() -> None:
    """Nothing was billed for the hour: a refund follows the time that the slices were seen for."""
    usage = devices(slice_of("MIG-a", 3, "idle", 600), slice_of("MIG-b", 1, "held_idle", 1800, job="B"))
    refund = machine("r", "-4.00", ChargeCategory="Credit", x_InstanceType="one.gpu")
    marks = {"aws|111122223333|Amazon Elastic Compute Cloud": ns(TEN) + 3600 * SECOND}
    ledger = settle(inputs(charges(refund), usage, watermarks=marks))
    assert {r["x_DeviceId"]: r["BilledCost"] for r in ledger.addresses.to_pylist()} == {
        "MIG-a": Decimal("-1"), "MIG-b": Decimal("-3")
    }  # fmt: skip
    assert len(ledger.spans) == 0


def gcp(key: str, meter: str, billed: str, quantity: str, unit: str, per: str | None, **facts: Any) -> dict[str, Any]:
    """One row of a VM of Google from 10:00 to 11:00, as its export has it."""
    made: dict[str, Any] = {
        "x_Cloud": "gcp",
        "x_Class": "machine",
        "x_MachineId": VM,
        "ResourceId": VM,
        "x_InstanceType": "a2-highgpu-1g",
        "SkuMeter": meter,
        "ServiceName": "Compute Engine",
        "ConsumedQuantity": Decimal("1"),
        "ConsumedUnit": "seconds of cores",
        "PricingQuantity": Decimal(quantity),
        "PricingUnit": unit,
        "x_UnitsPerMachine": None if per is None else Decimal(per),
        "PricingCategory": "Standard",
        "start": TEN,
    }
    return charge(key, billed, **(made | facts))


def test_a_vm_of_google_by_hand() -> None:
    """45 minutes of 12 cores, 85 GiB and one GPU; a local disk has no meter of time and follows them all the same."""
    bill = charges(
        gcp("core", "core", "0.30", "9", "hour", "12"),
        gcp("memory", "ram", "0.20", "63.75", "gibibyte hour", "85"),
        gcp("gpu", "gpu", "2.20", "0.75", "hour", "1"),
        gcp("ssd", "ssd", "0.03", "0.385", "GiBy.mo", None, x_Class="dependant", x_DependantId="ssd-1"),
    )
    facts: Any = {"machine": VM, "cloud": "gcp"}
    usage = devices(device(TEN, "work", 900, job="A", **facts), device(TEN, "idle", 1350, **facts))
    volumes = attachments()
    ledger = settle(inputs(bill, usage, layers(layer(TEN, "A", "L1", 900)), volumes, gpu_counts={"a2-highgpu-1g": 1}))
    assert {r["x_Category"]: r["x_Ns"] for r in ledger.spans.to_pylist()} == {
        "work": 900 * SECOND, "idle": 1350 * SECOND, "unobserved": 450 * SECOND
    }  # fmt: skip
    assert ledger.hours.slots[0].findings == set()
    found = {(r["x_ChargeKey"], r["x_Category"]): r["BilledCost"] for r in ledger.addresses.to_pylist()}
    assert found == {
        ("core", "work"): Decimal("0.1"), ("core", "idle"): Decimal("0.15"), ("core", "unobserved"): Decimal("0.05"),
        ("memory", "work"): Decimal("0.066666666667"), ("memory", "idle"): Decimal("0.1"),
        ("memory", "unobserved"): Decimal("0.033333333333"),
        ("gpu", "work"): Decimal("0.733333333333"), ("gpu", "idle"): Decimal("1.1"),
        ("gpu", "unobserved"): Decimal("0.366666666667"),
        ("ssd", "work"): Decimal("0.01"), ("ssd", "idle"): Decimal("0.015"), ("ssd", "unobserved"): Decimal("0.005"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("quantity", "unit", "per", "time"),
    [
        ("9", "hour", "12", "2700000000000"),
        ("1", "vcpu-hours", "7", "514285714285.714285714286"),
        ("1", "h", "3", "1200000000000"),
        ("0.000000000001", "seconds", "2000000000", "0"),
        ("0.000000000003", "seconds", "2000000000", "0.000000000002"),
        ("63.75", "GiBy.h", "85", "2700000000000"),
        ("1", "core-hours", "4", "900000000000"),
        ("2", "gpu-hour", "8", "900000000000"),
        ("1", "hour", None, "3600000000000"),
        ("1", "vcpu-hours", None, None),
        ("1", "gibibyte hour", "0", None),
        ("1", "hour", "0", None),
        ("1", "hour", "-12", None),
        ("1", "GiBy.mo", "375", None),
    ],
)
def test_time_of_a_meter_that_counts_parts_of_a_machine(
    quantity: str, unit: str, per: str | None, time: str | None
) -> None:
    """Half to even at the twelfth digit after the nanosecond; a meter without its parts is no time."""
    row = {"ConsumedQuantity": None, "ConsumedUnit": None, "PricingQuantity": Decimal(quantity), "PricingUnit": unit}
    expected = None if time is None else int(Decimal(time).scaleb(12))
    assert quantity_ns(row | {"x_UnitsPerMachine": None if per is None else Decimal(per)}) == expected


@pytest.mark.parametrize(("cores", "findings"), [("9.003333333333", set()), ("9.0034", {"meters_disagree"})])
def test_meters_of_a_vm_may_differ_by_a_second(cores: str, findings: set[str]) -> None:
    """9.003333333333 core-hours over 12 cores are a second more than 45 minutes."""
    bill = charges(gcp("core", "core", "1", cores, "hour", "12"), gcp("gpu", "gpu", "1", "0.75", "hour", "1"))
    ledger = settle(inputs(bill, devices(), gpu_counts={"a2-highgpu-1g": 1}))
    assert ledger.hours.slots[0].findings == findings


def test_meters_under_one_text_are_told_apart_by_their_rules() -> None:
    """Twelve cores, 85 GiB and one GPU for 45 minutes, all under one SkuMeter; a second core row adds up with the first."""
    facts = {"core": ("6.75", "hour", "12"), "more": ("2.25", "hour", "12"), "ram": ("63.75", "gibibyte hour", "85")}
    rules = {"core": "gcp-gpu-core", "more": "gcp-gpu-core", "ram": "gcp-gpu-ram", "gpu": "gcp-gpu-gpu"}
    facts["gpu"] = ("0.75", "hour", "1")
    rows = [gcp(name, "A2", "1", *fact, x_TieRule=rules[name]) for name, fact in facts.items()]
    ledger = settle(inputs(charges(*rows), devices(), gpu_counts={"a2-highgpu-1g": 1}))
    assert (ledger.hours.slots[0].billed_ns, ledger.hours.slots[0].findings) == (2700 * SECOND, set())


def test_a_type_that_nobody_knows_is_billed_for_the_time_of_its_rows() -> None:
    """48 core-hours of a type that the catalogue does not have are not 48 hours of one machine; the hour says so."""
    row = gcp("core", "core", "4", "48", "hour", "0", x_InstanceType="a9-huge-4g")
    facts: Any = {"machine": VM, "cloud": "gcp"}
    seen = devices(device(TEN, "idle", 3600, **facts))
    ledger = settle(inputs(charges(row), seen))
    assert (ledger.hours.slots[0].billed_ns, ledger.hours.slots[0].findings) == (3600 * SECOND, {"unknown_type"})
    assert [(r["x_Category"], r["BilledCost"]) for r in ledger.addresses.to_pylist()] == [("idle", 4)]


def test_rows_of_one_meter_add_up_before_they_are_rounded() -> None:
    """Three sevenths of an hour three times over: each alone would be rounded up."""
    rows = [gcp(f"c{i}", "core", "1", "1", "vcpu-hours", "7") for i in range(3)]
    ledger = settle(inputs(charges(*rows), devices()))
    assert ledger.hours.slots[0].billed_ns == round(3 * 3_600_000_000_000 / 7)
