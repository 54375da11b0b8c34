"""The calibration factor by hand: window sums, the fold to the digit, what a difference is made of, and what counts."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from schemas.ledger import RECONCILIATION
from seedance.schema import conform
from tasks.core import money
from tasks.core.calibrate import LEAST, MOST, fold, read_verdicts, step, verdicts, window_sums
from tasks.core.compare import CAUSES
from tasks.core.estimate import ALPHA_ONE
from tasks.core.ledger import Inputs, settle
from tasks.core.reconciliation import errors, own_verdicts, reconciliation_hourly
from tests.tables import charges, device, devices
from tests.unit.test_ledger import TEN, inputs, machine, prices

KEY = "aws|111122223333|one.gpu"
PRICE = prices(("one.gpu", "2026-09", "10.00"))


def row(window: str, estimate: int, bill: int, **facts: Any) -> dict[str, Any]:
    """Sums of one window; what is not said differs by rate alone."""
    plain = {"window": window, "cloud": "aws", "account": "1", "family": "g5", "meters": "Box", "hours": 1}
    parts = dict.fromkeys(CAUSES, 0) | {"rate": bill - estimate}
    return plain | {"estimate": estimate, "bill": bill} | parts | facts


def day(*bill: dict[str, object], seen: float = 3600, **facts: object) -> Inputs:
    """A machine of one GPU at 10.00 an hour, seen from 10:00 for some seconds."""
    usage = devices(device(TEN, "idle", seen, instance_type="one.gpu"))
    return inputs(charges(*bill), usage, **({"prices": PRICE} | facts))  # type: ignore[arg-type]


def billed(key: str, cost: str, **facts: object) -> dict[str, object]:
    """A row of that machine."""
    return machine(key, cost, **({"x_InstanceType": "one.gpu"} | facts))  # type: ignore[arg-type]


def test_the_worked_example_of_the_fold() -> None:
    """infra/rules/ledger.md 5: halfway to each ratio in turn, held to the band at every step; a window at 0 is skipped."""
    windows = [("01T00", 100, 101), ("01T12", 200, 198), ("02T00", 50, 60), ("02T12", 0, 9), ("03T00", 7, 7)]
    expected = ("1.005", "0.9975", "1.02", "1.02", "1.01")
    for count, factor in enumerate(expected, start=1):
        rows = [row(f"2026-10-{name}", *sums) for name, *sums in windows[:count]]
        assert fold(rows)["aws|1|g5"] == money.units(factor)
    # Held to the band after the step, not before: a ratio of 1.2 cut to 1.02 first would end at 1.00875.
    assert step(money.units("0.9975"), 50, 60) == MOST
    assert step(ALPHA_ONE, 3, 1) == LEAST
    # Twelve digits, half to even: (1 + 300/297) / 2 = 1.00505…
    assert step(ALPHA_ONE, 297, 300) == 1_005_050_505_051
    assert [step(ALPHA_ONE, 10**13, 10**13 + n * 10) for n in (1, 3)] == [ALPHA_ONE, ALPHA_ONE + 2]


def test_a_family_of_one_account_also_serves_machines_that_no_bill_has_named() -> None:
    rows = [row("2026-10-01T00", 100, 101), row("2026-10-01T00", 100, 102, family="p5")]
    both = [*rows, row("2026-10-01T00", 100, 99, account="2")]
    assert fold(rows) == {
        "aws|1|g5": 1_005_000_000_000, "aws|1|p5": 1_010_000_000_000,
        "aws||g5": 1_005_000_000_000, "aws||p5": 1_010_000_000_000,
    }  # fmt: skip
    assert "aws||g5" not in fold(both) and fold(both)["aws|2|g5"] == 995_000_000_000


def test_sums_take_only_complete_windows_and_whole_days_on_azure() -> None:
    pairs = settle(day(billed("m", "10.10"))).pairs
    (found,) = window_sums("2026-10-01", pairs, {"aws|111122223333": [0]})
    assert (found["window"], found["estimate"], found["bill"], found["hours"]) == (
        "2026-10-01T00", money.units("10"), money.units("10.1"), 1,
    )  # fmt: skip
    assert window_sums("2026-10-01", pairs, {"aws|111122223333": [1]}) == []
    assert window_sums("2026-10-01", pairs, {"aws|9": [0, 1]}) == []
    late = [replace(p, hour=20) for p in pairs]
    assert window_sums("2026-10-01", late, None)[0]["window"] == "2026-10-01T12"
    azure = [replace(p, key="azure|vm", hour=20) for p in pairs]
    assert window_sums("2026-10-01", azure, None)[0]["window"] == "2026-10-01T00"


@pytest.mark.parametrize(
    ("bill", "seen", "cause", "part"),
    [
        ([billed("m", "10.40")], 3600, "rate", "0.4"),
        ([billed("m", "5.00", quantity="0.5")], 3600, "lateness", "-5"),
        ([billed("m", "10.00")], 1800, "missing_resource", "5"),
        (
            [billed("m", "6.00", PricingCategory="Committed", ListCost=Decimal(10), x_DayListCost=Decimal(10))],
            3600,
            "commitment",
            "-4",
        ),
        ([billed("m", "6.00", CommitmentDiscountId="sp-1")], 3600, "commitment", "-4"),
        ([billed("m", "8.50", x_PromotionalCost=Decimal("-1.5"))], 3600, "credit", "-1.5"),
    ],
)
def test_a_difference_is_told_by_its_cause(bill: list[dict[str, object]], seen: float, cause: str, part: str) -> None:
    (pair,) = settle(day(*bill, seen=seen)).pairs
    assert pair.paid is not None and pair.listed is not None
    parts = pair.causes()
    assert {name: units for name, units in parts.items() if units} == {cause: money.units(part)}
    assert sum(parts.values()) == pair.paid.amortised - pair.listed
    verdict = own_verdicts("2026-10-01", [pair])[KEY]
    assert (verdict.findings, verdict.cause) == (("deviation", "out_of_band"), cause)


def test_hours_that_lack_a_meter_of_their_family_miss_a_resource() -> None:
    whole = row("2026-10-01T00", 100, 100, meters="Core|Gpu|Ram")
    short = row("2026-10-01T12", 100, 60, meters="Core|Ram")
    other = row("2026-10-01T12", 100, 60, meters="Box")
    assert verdicts([whole, short])["aws|1|g5"].cause == "missing_resource"
    assert verdicts([whole, other])["aws|1|g5"].cause == "rate"


@pytest.mark.parametrize(
    ("bill", "findings", "ppm"),
    [
        (10_149, (), 1_014_900),
        (10_150, (), 1_015_000),
        (10_151, ("deviation",), 1_015_100),
        (9_849, ("deviation",), 984_900),
        (10_200, ("deviation",), 1_020_000),
        (10_201, ("deviation", "out_of_band"), 1_020_100),
        (9_799, ("deviation", "out_of_band"), 979_900),
    ],
)
def test_where_findings_begin(bill: int, findings: tuple[str, ...], ppm: int) -> None:
    verdict = verdicts([row("2026-10-01T00", 10_000, bill)])["aws|1|g5"]
    assert (verdict.findings, verdict.ratio_ppm) == (findings, ppm)
    assert (verdict.cause is None) == (not findings)
    assert read_verdicts({"k": verdict.facts()}) == {"k": verdict}


def test_what_is_not_comparable_teaches_nothing() -> None:
    other = day(billed("m", "9.00", BillingCurrency="EUR"))
    (pair,) = settle(other).pairs
    assert (pair.comparable, pair.findings, window_sums("2026-10-01", [pair], None)) == (False, ("other_currency",), [])
    (told,) = reconciliation_hourly(other, [pair]).to_pylist()
    assert (told["BillingCurrency"], told["EffectiveCost"], told["x_ListEstimate"]) == ("EUR", Decimal(9), None)
    assert (told["x_ApeBefore"], told["x_Finding"]) == (None, "other_currency")
    two = [billed("m", "5.00", quantity="0.5"), billed("n", "4.50", quantity="0.5", BillingCurrency="EUR")]
    (pair,) = settle(day(*two)).pairs
    (told,) = reconciliation_hourly(other, [pair]).to_pylist()
    assert (told["BilledCost"], told["EffectiveCost"], told["x_Finding"]) == (None, None, "other_currency")
    unseen = inputs(charges(billed("m", "10.00")), devices(), prices=PRICE)
    assert not settle(unseen).pairs[0].comparable
    assert not settle(day(billed("m", "10.00"), prices=prices())).pairs[0].comparable


def test_the_reconciliation_shows_both_sides_of_alpha() -> None:
    calibrated = day(billed("m", "10.10"), alphas={KEY: money.units("1.005")})
    hourly = conform(reconciliation_hourly(calibrated, settle(calibrated).pairs), RECONCILIATION, where="test")
    (told,) = hourly.to_pylist()
    assert (told["x_ListEstimate"], told["x_EstimatedCost"], told["x_Alpha"]) == (
        Decimal(10), Decimal("10.05"), Decimal("1.005"),
    )  # fmt: skip
    assert (told["x_ApeBefore"], told["x_ApeAfter"]) == (0.1 / 10.1, 0.05 / 10.1)
    assert (told["x_ResourceId"], told["x_MachineId"], told["x_Family"]) == ("i-1", "i-1", "one.gpu")
    (figures,) = errors(hourly)
    assert (figures["mape_before"], figures["mape_after"]) == ("0.009901", "0.004950")
    plain = day(billed("m", "10.10"))
    (told,) = reconciliation_hourly(plain, settle(plain).pairs).to_pylist()
    assert (told["x_Alpha"], told["x_EstimatedCost"], told["x_ApeAfter"]) == (None, None, None)


def test_windows_judge_the_estimates_of_a_day_that_is_open() -> None:
    judged = verdicts([row("2026-09-30T00", 100, 104, account="", family="one.gpu")])
    opened = day(alphas={})
    (told,) = reconciliation_hourly(opened, settle(opened).pairs, judged).to_pylist()
    assert (told["x_State"], told["x_Alpha"], told["x_EstimatedCost"]) == ("provisional", 1, Decimal(10))
    assert (told["x_Finding"], told["x_DeviationCause"]) == ("deviation, out_of_band", "rate")
