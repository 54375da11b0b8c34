"""Reports are group-bys of the ledger: nothing is counted twice, ratios come last, unknown is null."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from schemas.billing import PRICES
from tasks.core.ledger import settle
from tasks.core.reconciliation import bridge_monthly, errors, findings, reconciliation_hourly
from tasks.core.reports import job_daily, layer_daily, resource_daily
from tasks.errors import LawError
from tasks.publish import assert_bridge, assert_same_total
from tests.tables import SCALE_SET, SECOND, build, charge, charges, device, devices, layer, layers, member
from tests.unit.test_ledger import TEN, inputs, machine, worked_example

DAY = dt.date(2026, 10, 1)


def spot_price(price: str) -> dict[str, Any]:
    return {
        "x_Cloud": "aws", "SkuId": "one.gpu", "RegionId": "us-east-1", "PricingCategory": "Dynamic", "x_AsOf": "undated",
        "ListUnitPrice": Decimal(price), "PricingUnit": "Hours", "BillingCurrency": "USD", "x_GpuModel": "T4", "x_GpuCount": 1,
        "x_PriceSource": "test",
    }  # fmt: skip


def test_layer_usage_counts_once_though_two_pools_share_it() -> None:
    example = worked_example()
    ledger = settle(example)
    rows = layer_daily(
        DAY, ledger.addresses, ledger.layers, example.layer_hourly, ledger.spans, example.jobs, lambda *_: None
    ).to_pylist()
    work = [r for r in rows if r["x_Category"] == "work"]
    assert sum(r["x_Flops"] or 0 for r in work) == 3 * 10**12
    assert sum(r["x_Ns"] or 0 for r in work) == 2500 * SECOND
    assert {r["x_BoundPpm"] for r in work} == {0}
    assert {r["x_BoundPpm"] for r in rows if r["x_Category"] != "work"} == {None}


def test_mfu_is_flops_over_time_at_the_peak() -> None:
    usage = devices(device(TEN, "work", 3600, job="A"))
    work = layers(layer(TEN, "A", "L1", 1000, gpu_model="T4") | {"flops": 5 * 10**15, "hw_flops": 6 * 10**15})
    day = inputs(charges(machine("m", "4.00", x_InstanceType="one.gpu")), usage, work)
    ledger = settle(day)
    (row,) = layer_daily(
        DAY, ledger.addresses, ledger.layers, work, ledger.spans, day.jobs, lambda model, dtype: 10**13
    ).to_pylist()
    assert (row["x_Mfu"], row["x_Hfu"], row["x_FlopsPerEffectiveUsd"]) == (0.5, 0.6, 5e15 / 4)
    assert row["x_EffectiveCostPerUnit"] == 0.4


def test_a_job_says_what_it_did_beside_what_it_cost() -> None:
    example = worked_example()
    ledger = settle(example)
    rows = job_daily(DAY, ledger.addresses, ledger.spans, example.jobs).to_pylist()
    of_a = [r for r in rows if r["x_JobId"] == "A"]
    assert {(r["x_Units"], r["x_Samples"], r["x_Team"]) for r in of_a} == {(10, 80, "team-A")}
    assert {r["x_Units"] for r in rows if r["x_JobId"] is None} == {None}
    assert sum(r["x_GpuNs"] or 0 for r in rows) == 7200 * SECOND


def test_a_resource_shows_its_devices_and_why_time_is_unobserved() -> None:
    usage = devices(device(TEN, "idle", 600))
    bill = charges(
        machine("m", "7.20"), machine("n", "1.00", x_MachineId="i-10", ResourceId="arn:aws:ec2:x:1:instance/i-10")
    )
    ledger = settle(inputs(bill, usage))
    rows = resource_daily(DAY, ledger.addresses, ledger.spans).to_pylist()
    found = {(r["ResourceId"], r["x_DeviceId"], r["x_Category"], r["x_Reason"]): r["x_GpuNs"] for r in rows}
    assert found == {
        ("i-1", "GPU-0", "idle", None): 600 * SECOND,
        ("i-1", "GPU-0", "unobserved", "gap"): 3000 * SECOND,
        ("i-1", None, "unobserved", "gap"): 3600 * SECOND,
        ("arn:aws:ec2:x:1:instance/i-10", None, "unobserved", "no_agent"): 7200 * SECOND,
    }
    assert {r["x_CoveragePpm"] for r in rows if r["ResourceId"] == "i-1"} == {600 * 10**6 // 7200}


def test_a_scale_set_has_one_spelling_and_the_time_of_its_machines_once() -> None:
    """Two machines of two GPUs, spelt differently; one has no agent, and traffic of the set names the other."""
    seen = device(TEN, "idle", 600, machine=str(member(0)["x_MachineId"]), cloud="azure")
    traffic = member(0, ServiceName="Bandwidth", x_Class="untied", ConsumedUnit="GB")
    bill = charges(
        machine("m", "7.20", **member(0)),
        machine("n", "3.60", **member(1)),
        machine("back", "-3.60", **member(1)),
        charge("egress", "0.01", start=TEN, **traffic),
    )
    ledger = settle(inputs(bill, devices(seen)))
    rows = resource_daily(DAY, ledger.addresses, ledger.spans).to_pylist()
    assert {r["ResourceId"] for r in rows} == {SCALE_SET.lower()}
    assert {r["ResourceId"] for r in ledger.addresses.to_pylist()} == {SCALE_SET, SCALE_SET.lower()}
    names = ("ServiceName", "x_DeviceId", "x_Category", "x_Reason")
    hours = {tuple(r[n] for n in names): (r["x_GpuNs"], r["x_GpuHours"], r["x_CoveragePpm"]) for r in rows}
    covered = 600 * 10**6 // 7200
    service = "Virtual Machine Scale Sets"
    assert hours == {
        (service, "GPU-0", "idle", None): (600 * SECOND, 600 / 3600, covered),
        (service, "GPU-0", "unobserved", "gap"): (3000 * SECOND, 3000 / 3600, covered),
        (service, None, "unobserved", "gap"): (3600 * SECOND, 1.0, covered),
        (service, None, "unobserved", "no_agent"): (7200 * SECOND, 2.0, 0),
        ("Bandwidth", "GPU-0", "idle", None): (None, None, covered),
        ("Bandwidth", "GPU-0", "unobserved", "gap"): (None, None, covered),
        ("Bandwidth", None, "unobserved", "gap"): (None, None, covered),
    }
    jobs = job_daily(DAY, ledger.addresses, ledger.spans, inputs(bill, devices(seen)).jobs).to_pylist()
    assert sum(r["x_GpuNs"] or 0 for r in rows) == sum(r["x_GpuNs"] or 0 for r in jobs) == 14_400 * SECOND


def test_machines_of_a_scale_set_without_devices_share_a_row_and_add_up() -> None:
    bill = charges(*(machine(f"m{n}", "3.60", **member(n)) for n in range(3)))
    ledger = settle(inputs(bill, devices()))
    (row,) = resource_daily(DAY, ledger.addresses, ledger.spans).to_pylist()
    assert (row["BilledCost"], row["x_GpuNs"], row["x_CoveragePpm"]) == (Decimal("10.8"), 3 * 7200 * SECOND, 0)


def test_findings_are_counted_in_the_hours_that_have_them() -> None:
    bill = charges(
        machine("m", "4.00", x_InstanceType="one.gpu"), machine("n", "4.00", x_MachineId="i-2", ResourceId="i-2")
    )
    day = inputs(bill, devices(device(TEN, "idle", 3600)), prices=build(PRICES, [spot_price("3")]))
    hourly = reconciliation_hourly(day, settle(day).pairs)
    told = {(r["finding"], r["cloud"]): (r["resources"], r["hours"]) for r in findings(hourly)}
    lists = [r["x_Finding"].split(", ") for r in hourly.to_pylist() if r["x_Finding"]]
    assert told == {(name, "aws"): (1, 1) for found in lists for name in found}
    assert told[("no_telemetry", "aws")] == (1, 1)


def test_without_telemetry_there_is_no_estimate_to_compare() -> None:
    day = inputs(
        charges(machine("m", "4.00", x_InstanceType="one.gpu")), devices(), prices=build(PRICES, [spot_price("3")])
    )
    (row,) = reconciliation_hourly(day, settle(day).pairs).to_pylist()
    assert (row["x_ListEstimate"], row["x_ApeBefore"], row["x_Finding"]) == (None, None, "no_telemetry")


def test_a_spot_machine_is_compared_with_the_spot_price() -> None:
    bill = charges(machine("m", "4.00", x_InstanceType="one.gpu", PricingCategory="Dynamic"))
    day = inputs(bill, devices(device(TEN, "idle", 3600)), prices=build(PRICES, [spot_price("3")]))
    hourly = reconciliation_hourly(day, settle(day).pairs)
    (row,) = hourly.to_pylist()
    assert (row["x_PriceSource"], row["x_ListEstimate"], row["x_ApeBefore"]) == ("spot", Decimal(3), 0.25)
    assert errors(hourly) == [
        {
            "cloud": "aws", "service": "Amazon Elastic Compute Cloud", "currency": "USD", "hours": 1,
            "mape_before": "0.250000", "weighted_mape_before": "0.250000", "mape_after": None, "weighted_mape_after": None,
        }
    ]  # fmt: skip


def test_a_report_that_loses_a_unit_is_stopped() -> None:
    ledger = settle(worked_example())
    report = job_daily(DAY, ledger.addresses, ledger.spans, worked_example().jobs)
    with pytest.raises(LawError, match=r"job_daily: BilledCost adds up to .*, the addresses to .*Nothing was"):
        assert_same_total(ledger.addresses, report.slice(1), "report_cost__job_daily")


def test_the_bridge_shows_what_the_file_leaves_unexplained_and_refuses_a_hole() -> None:
    key = {"cloud": "aws", "account": "1", "period": "2026-10-01T00:00:00Z", "currency": "USD"}
    amounts = {
        "stored_billed": 10,
        "stored_effective": 7,
        "scheduled_billed": 4,
        "scheduled_effective": 3,
        "purchases": 2,
    }
    bills = [key | amounts | {"used": 1, "unused": 0, "raw_minus_stored": Decimal("3E-13")}]
    bridge = bridge_monthly(bills, {tuple(key.values()): (6, 4)})
    (row,) = bridge.to_pylist()
    assert row["x_Unexplained"] == Decimal("-2E-12") and row["x_QuantisedAway"] == "0.0000000000003"
    assert_bridge(bridge)
    with pytest.raises(LawError, match=r"law 1 \(money\): aws account 1, .*BilledCost of stored rows is .*scheduled"):
        assert_bridge(bridge_monthly(bills, {tuple(key.values()): (5, 4)}))


def test_a_pool_of_one_instance_type_has_wider_bounds_than_its_job() -> None:
    """Bounds are stated of the whole job's work; half of it is a pool of half the money."""
    usage = devices(
        device(TEN, "work", 1800, job="A", instance_type="one.gpu"),
        device(TEN, "work", 1800, job="A", device="GPU-1", machine="i-2", instance_type="two.gpu"),
    )
    work = layers(
        layer(TEN, "A", "L1", 1800, instance_type="one.gpu", bound_ppm=1000),
        layer(TEN, "A", "L1", 1800, instance_type="two.gpu", bound_ppm=3000),
    )
    bill = charges(
        machine("m", "4.00", x_InstanceType="one.gpu"), machine("n", "4.00", x_MachineId="i-2", ResourceId="i-2")
    )
    ledger = settle(replace(inputs(bill, usage, work)))
    assert {r["x_InstanceType"]: r["x_BoundPpm"] for r in ledger.layers.to_pylist()} == {
        "one.gpu": 2000,
        "two.gpu": 6000,
    }
