"""Estimates and their addresses: the price ladder, volumes by size and month, alpha, whose time shares them out."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from schemas.billing import PRICES
from schemas.usage import ATTACHMENTS
from tasks import witness
from tasks.core import money
from tasks.core.estimate import Ladder, MachineFacts, Price, volume_units
from tasks.core.ledger import Inputs, Ledger, settle
from tasks.core.provisional import assert_estimates
from tasks.core.reconciliation import reconciliation_hourly
from tasks.errors import LawError
from tests.tables import SECOND, build, charge, charges, device, devices, ns
from tests.unit.test_ledger import TEN, inputs, machine

ACCOUNT = "111122223333"
SERVICE = f"aws|{ACCOUNT}|Amazon Elastic Compute Cloud"
NINE, ELEVEN = TEN.replace(hour=9), TEN.replace(hour=11)
GIB = 2**30


def price(kind: str, amount: str, **facts: Any) -> dict[str, Any]:
    """One price in us-east-1; list and by the hour unless said otherwise."""
    plain = {
        "x_Cloud": "aws", "SkuId": kind, "RegionId": "us-east-1", "PricingCategory": "Standard", "x_AsOf": "undated",
        "ListUnitPrice": Decimal(amount), "PricingUnit": "Hours", "BillingCurrency": "USD", "x_PriceSource": "test",
    }  # fmt: skip
    return plain | facts


def book(*rows: dict[str, Any]) -> pa.Table:
    """core_pricing__list of one.gpu at 10.00 an hour, gp3 at 0.08 a GiB and month, and more rows."""
    return build(PRICES, [price("one.gpu", "10"), price("gp3", "0.08", PricingUnit="GiB-Mo"), *rows])


def hung(*rows: tuple[dt.datetime, str, str, int | None, str | None]) -> pa.Table:
    """core_usage__attachments_hourly of (hour, volume, machine, bytes, type)."""
    names = ("hour_utc", "object_id", "instance_id", "bytes", "object_type")
    return build(ATTACHMENTS, [dict(zip(names, r, strict=True)) | {"cloud": "aws"} for r in rows])


def seen(hour: dt.datetime, seconds: float = 3600, name: str = "i-1", **facts: Any) -> dict[str, Any]:
    """An idle machine of one GPU."""
    return device(hour, "idle", seconds, machine=name, device=f"GPU-{name}", instance_type="one.gpu", **facts)


def open_day(usage: pa.Table, volumes: pa.Table, *bill: dict[str, Any], **facts: Any) -> Inputs:
    """A day billed up to 10:00."""
    marks = {SERVICE: ns(TEN)}
    return inputs(charges(*bill), usage, None, volumes, **({"prices": book(), "watermarks": marks} | facts))


def agree(day: Inputs) -> Ledger:
    """The ledger of a day that the second ledger in SQL has to the digit as well."""
    ledger = settle(day)
    witness.check(
        day.charges, day.device_hourly, day.layer_hourly, day.attachments, day.gpu_counts, day.prices, day.watermarks,
        day.day, day.default_region, ledger.addresses, ledger.layers, ledger.spans, alphas=day.alphas or {},
        contracted=day.contracted or {},
    )  # fmt: skip
    return ledger


def estimated(ledger: Ledger) -> dict[tuple[Any, ...], Decimal]:
    """Estimates by resource, hour, machine and category."""
    return {
        (r["ResourceId"], r["x_HourUtc"].hour, r["x_MachineId"], r["x_Category"]): r["x_EstimatedCost"]
        for r in ledger.addresses.to_pylist()
        if r["x_State"] == "provisional"
    }


def test_a_volume_hour_costs_its_size_for_an_hour_of_the_month() -> None:
    listed = Price(money.units("0.08"), "USD", "list")
    assert volume_units(listed, 500 * GIB, "2026-10-01") == money.units("0.053763440860")  # 40 / 744 h
    assert volume_units(listed, 500 * GIB, "2026-02-28") == money.units("0.059523809524")  # 40 / 672 h
    assert volume_units(Price(1, "USD", "list"), GIB * 372, "2026-10-01") == 0  # a half goes to the even number
    assert volume_units(Price(1, "USD", "list"), GIB * 1116, "2026-10-01") == 2


def test_a_volume_beyond_the_watermark_follows_its_machine() -> None:
    volumes = hung((NINE, "vol-1", "i-1", 500 * GIB, "gp3"), (TEN, "vol-1", "i-1", 500 * GIB, "gp3"))
    alphas = {"aws||gp3": money.units("1.01"), "aws||one.gpu": money.units("0.99")}
    ledger = agree(open_day(devices(seen(TEN, 1200)), volumes, alphas=alphas))
    assert estimated(ledger) == {
        ("i-1", 10, "i-1", "idle"): Decimal("3.3"),  # 1,200 s at 10.00 an hour, times 0.99
        ("vol-1", 10, "i-1", "idle"): Decimal("0.054301075269"),
    }


def test_two_machines_share_a_volume_and_detached_volumes_are_idle() -> None:
    usage = devices(seen(TEN, 3600), seen(TEN, 1800, "i-2"), seen(ELEVEN))
    volumes = hung(
        (TEN, "vol-1", "i-1", None, None),
        (TEN, "vol-1", "i-2", 372 * GIB, "gp3"),
        (ELEVEN, "vol-2", "i-9", 372 * GIB, "gp3"),
    )
    ledger = agree(open_day(usage, volumes))
    found = {key: cost for key, cost in estimated(ledger).items() if key[0].startswith("vol")}
    assert found == {
        ("vol-1", 10, "i-1", "idle"): Decimal("0.026666666667"),
        ("vol-1", 10, "i-2", "idle"): Decimal("0.013333333333"),
        ("vol-2", 11, None, "idle"): Decimal("0.04"),
    }
    (lone,) = [r for r in ledger.addresses.to_pylist() if r["ResourceId"] == "vol-2"]
    assert (lone["x_ChargeKey"], lone["x_DeviceId"], lone["x_InstanceType"], lone["x_CoveragePpm"]) == (
        "estimate:aws/vol-2", None, None, None,
    )  # fmt: skip


def test_a_volume_is_no_estimate_once_any_charge_names_the_hour_or_the_bill_has_passed() -> None:
    usage = devices(seen(NINE), seen(TEN), seen(ELEVEN))
    volumes = hung(*((hour, "vol-1", "i-1", 744 * GIB, "gp3") for hour in (NINE, TEN, ELEVEN)))
    disk = charge("d", "0.05", start=TEN, x_Class="dependant", x_DependantId="vol-1")
    day = open_day(usage, volumes, disk)
    ledger = agree(day)
    assert {key[:2] for key in estimated(ledger) if key[0] == "vol-1"} == {("vol-1", 11)}
    told = {
        r["x_HourUtc"].hour: (r["x_State"], r["x_ListEstimate"], r["EffectiveCost"])
        for r in reconciliation_hourly(day, ledger.pairs).to_pylist()
        if r["x_ResourceId"] == "vol-1"
    }
    assert told == {  # 9:00 lies before the watermark without a row: no address and no finding
        10: ("billed", Decimal("0.08"), Decimal("0.05")), 11: ("provisional", Decimal("0.08"), None),
    }  # fmt: skip


def test_a_volume_without_size_type_or_price_is_no_estimate() -> None:
    usage = devices(seen(TEN))
    rows = [(TEN, "v-1", "i-1", GIB, None), (TEN, "v-2", "i-1", None, "gp3"), (TEN, "v-3", "i-1", GIB, "io2")]
    day = open_day(usage, hung(*rows))
    ledger = agree(day)
    assert {key[0] for key in estimated(ledger)} == {"i-1"}
    told = {r["x_ResourceId"]: r["x_Finding"] for r in reconciliation_hourly(day, ledger.pairs).to_pylist()}
    assert told == {"i-1": None, "v-3": "no_price"}


def test_an_account_has_its_own_factor_and_an_unknown_one_that_of_the_only_one() -> None:
    usage = devices(seen(ELEVEN), seen(ELEVEN, name="i-2"))
    bill = machine("m", "10.00", start=NINE, x_InstanceType="one.gpu")
    alphas = {f"aws|{ACCOUNT}|one.gpu": money.units("1.02"), "aws||one.gpu": money.units("0.98")}
    ledger = agree(open_day(usage, hung(), bill, alphas=alphas))
    assert estimated(ledger) == {
        ("i-1", 11, "i-1", "idle"): Decimal("10.2"), ("i-2", 11, "i-2", "idle"): Decimal("9.8"),
    }  # fmt: skip


def test_a_spot_machine_is_estimated_at_spot() -> None:
    usage = devices(seen(ELEVEN))
    bill = machine("m", "3.10", start=NINE, x_InstanceType="one.gpu", PricingCategory="Dynamic")
    ledger = agree(open_day(usage, hung(), bill, prices=book(price("one.gpu", "3", PricingCategory="Dynamic"))))
    (row,) = [r for r in ledger.addresses.to_pylist() if r["x_State"] == "provisional"]
    assert (row["x_EstimatedCost"], row["PricingCategory"]) == (Decimal(3), "Dynamic")
    half = machine("n", "5.00", start=NINE, x_InstanceType="one.gpu", quantity="0.5")
    mixed = agree(open_day(usage, hung(), bill, half, prices=book(price("one.gpu", "3", PricingCategory="Dynamic"))))
    assert estimated(mixed) == {("i-1", 11, "i-1", "idle"): Decimal(10)}
    alone = agree(open_day(usage, hung(), bill))
    assert estimated(alone) == {("i-1", 11, "i-1", "idle"): Decimal(10)}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (MachineFacts(frozenset({("1", None, None)}), None, "eu-west-1", ("USD",), False), ("7", "EUR", "contracted")),
        (MachineFacts(frozenset({("1", None, None)}), None, None, ("USD",), False), ("10", "USD", "list")),
        (MachineFacts(frozenset({("2", None, None)}), None, None, ("USD",), False), ("10", "USD", "list")),
        (MachineFacts(frozenset({("1", None, None)}), None, "eu-west-1", ("USD",), True), None),
        (MachineFacts(frozenset({("1", None, None)}), None, "us-east-1", ("USD",), True), ("3", "USD", "spot")),
    ],
)
def test_the_ladder_goes_from_the_latest_closed_bill_to_spot_to_list(
    facts: MachineFacts, expected: tuple[str, str, str] | None
) -> None:
    prices = book(price("one.gpu", "3", PricingCategory="Dynamic"))
    ladder = Ladder(prices, {"aws": "us-east-1"}, "2026-10-01", {"aws|1|one.gpu|eu-west-1": "7.00 EUR"})
    wanted = None if expected is None else Price(money.units(expected[0]), *expected[1:])
    assert ladder.machine("aws", "one.gpu", facts) == wanted


def test_estimates_follow_the_price_of_the_latest_closed_bill() -> None:
    bill = machine("m", "10.00", start=NINE, x_InstanceType="one.gpu", RegionId="us-east-1")
    contracted = {f"aws|{ACCOUNT}|one.gpu|us-east-1": "8.5 USD"}
    day = open_day(devices(seen(ELEVEN)), hung(), bill, contracted=contracted)
    ledger = agree(day)
    assert estimated(ledger) == {("i-1", 11, "i-1", "idle"): Decimal("8.5")}
    told = {r["x_State"]: r["x_PriceSource"] for r in reconciliation_hourly(day, ledger.pairs).to_pylist()}
    assert told == {"billed": "contracted", "provisional": "contracted"}


def test_estimates_add_up_on_their_own() -> None:
    """Three devices share what does not divide; a unit more or less is a breach of the law and is named."""
    usage = devices(*(seen(TEN, 3600) | {"device_uuid": f"GPU-{n}"} for n in range(3)))
    day = open_day(usage, hung((TEN, "vol-1", "i-1", 372 * GIB, "gp3")), gpu_counts={"one.gpu": 3})
    ledger = agree(day)
    sums: dict[str, Decimal] = {}
    for row in ledger.addresses.to_pylist():
        sums[row["x_ChargeKey"]] = sums.get(row["x_ChargeKey"], Decimal(0)) + row["x_EstimatedCost"]
        assert (row["BilledCost"], row["EffectiveCost"], row["x_PromotionalCost"]) == (None, None, None)
    assert sums == {"estimate:aws/i-1": Decimal(10), "estimate:aws/vol-1": Decimal("0.04")}
    wanted = {("estimate:aws/i-1", 10): money.units("10"), ("estimate:aws/vol-1", 10): money.units("0.04")}
    assert_estimates(ledger.addresses, wanted, day.day_ns)
    with pytest.raises(
        LawError, match=r"estimates: estimate:aws/vol-1 hour 10: expected 0\.04.*add up to 0\.02.*Nothing"
    ):
        assert_estimates(ledger.addresses.slice(0, 5), wanted, day.day_ns)
    with pytest.raises(LawError, match=r"estimates: estimate:aws/vol-1 hour 10: expected 0"):
        assert_estimates(ledger.addresses, {k: v for k, v in wanted.items() if "vol" not in k[0]}, day.day_ns)


def test_when_the_bill_passes_the_estimate_is_gone() -> None:
    usage, volumes = devices(seen(ELEVEN)), hung((ELEVEN, "vol-1", "i-1", GIB, "gp3"))
    before = open_day(usage, volumes)
    rows = (
        machine("m", "10.00", start=ELEVEN, x_InstanceType="one.gpu"),
        charge("d", "0.01", start=ELEVEN, x_Class="dependant", x_DependantId="vol-1"),
    )
    after = replace(before, charges=charges(*rows), watermarks={SERVICE: ns(ELEVEN) + 3600 * SECOND})
    assert {r["x_State"] for r in agree(before).addresses.to_pylist()} == {"provisional"}
    assert {r["x_State"] for r in agree(after).addresses.to_pylist()} == {"billed"}
