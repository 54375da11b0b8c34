"""The calibration factor on random windows and random days: order, repetition, band; both ledgers agree on what it touches."""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.billing import PRICES
from schemas.usage import ATTACHMENTS
from tasks.core import money
from tasks.core.calibrate import LEAST, MOST, fold, verdicts, window_sums
from tasks.core.compare import CAUSES
from tasks.core.estimate import ALPHA_ONE
from tasks.core.ledger import Inputs, settle
from tests.property.test_ledger import agree, random_day
from tests.tables import build

WINDOWS = [f"2026-10-{day:02d}T{hour}" for day in range(1, 15) for hour in ("00", "12")]


def random_rows(seed: int) -> list[dict[str, Any]]:
    """Sums of some windows of some accounts and families, two sets of meters each; ratios inside the band and far outside."""
    rng = random.Random(seed)
    rows = []
    for account, family in (("1", "g5"), ("1", "p5"), ("2", "g5")):
        for window in rng.sample(WINDOWS, rng.randint(0, len(WINDOWS))):
            for meters in rng.sample(["Box", "Box|Spot"], rng.randint(1, 2)):
                estimate = rng.choice([0, 1, 7, rng.randint(1, 10**15), rng.randint(1, 10**20)])
                ratio = rng.choice([rng.randint(970_000, 1_030_000), rng.randint(0, 3_000_000)])
                bill = estimate * ratio // 10**6 + rng.randint(0, 3)
                key = {"window": window, "cloud": "aws", "account": account, "family": family, "meters": meters}
                parts = dict.fromkeys(CAUSES, 0) | {rng.choice(CAUSES): bill - estimate}
                rows.append(key | {"estimate": estimate, "bill": bill, "hours": 1} | parts)
    return rows


def exact(rows: list[dict[str, Any]], account: str, family: str) -> int:
    """The rule again, in fractions: alpha <- clamp((alpha + r) / 2) window by window, 12 digits half to even."""
    alpha = Fraction(1)
    for window in WINDOWS:
        mine = [r for r in rows if (r["window"], r["account"], r["family"]) == (window, account, family)]
        estimate, bill = (sum(r[name] for r in mine) for name in ("estimate", "bill"))
        if estimate:
            halved = Fraction(round((alpha + Fraction(bill, estimate)) / 2 * 10**12), 10**12)
            alpha = min(max(halved, Fraction(98, 100)), Fraction(102, 100))
    return int(alpha * 10**12)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_the_fold_knows_no_order_and_stays_in_the_band(seed: int) -> None:
    rows = random_rows(seed)
    alphas = fold(rows)
    mixed = random.Random(seed + 1).sample(rows, len(rows))
    assert fold(mixed) == alphas == fold(rows)
    assert all(LEAST <= alpha <= MOST for alpha in alphas.values())
    for account, family in (("1", "g5"), ("1", "p5"), ("2", "g5")):
        key = f"aws|{account}|{family}"
        if any((r["account"], r["family"]) == (account, family) for r in rows):
            assert alphas[key] == exact(rows, account, family)
        else:
            assert key not in alphas
    owners = {r["account"] for r in rows if r["family"] == "g5"}
    assert ("aws||g5" in alphas) == (len(owners) == 1)
    assert verdicts(mixed) == verdicts(rows)
    for verdict in verdicts(rows).values():
        assert (verdict.cause is not None) == ("deviation" in verdict.findings)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 10**18), st.booleans(), st.integers(8, 28))
def test_a_bias_in_the_band_halves_with_every_window(ppm: int, estimate: int, dear: bool, windows: int) -> None:
    ratio = ALPHA_ONE + (ppm if dear else -ppm) * 10**6
    bill = money.half_even(estimate * ratio, ALPHA_ONE)
    parts = dict.fromkeys(CAUSES, 0)
    key = {"cloud": "aws", "account": "1", "family": "g5", "meters": "Box", "hours": 1}
    rows = [key | parts | {"window": w, "estimate": estimate, "bill": bill} for w in WINDOWS[:windows]]
    left = abs(fold(rows)["aws|1|g5"] - Fraction(bill * ALPHA_ONE, estimate))
    assert left <= Fraction(ppm * 10**6, 2**windows) + Fraction(ALPHA_ONE, estimate) + 1


def sized(seed: int) -> Inputs:
    """A random day with volumes of known size, all rungs of prices, and calibration factors."""
    rng = random.Random(seed)
    day = random_day(seed)
    rows = [
        r | {"bytes": rng.choice([None, rng.randint(0, 2**50)]), "object_type": rng.choice([None, "gp3", "gp3", "io2"])}
        for r in day.attachments.to_pylist()
    ]
    more = [
        {"SkuId": "gp3", "PricingUnit": "GiB-Mo", "ListUnitPrice": Decimal("0.08")},
        {"SkuId": "one.gpu", "PricingUnit": "Hours", "ListUnitPrice": Decimal("1.25"), "PricingCategory": "Dynamic"},
        {"SkuId": "two.gpu", "PricingUnit": "Hours", "ListUnitPrice": Decimal("2.5"), "PricingCategory": "Dynamic"},
    ]
    plain = {
        "x_Cloud": "aws", "RegionId": "us-east-1", "PricingCategory": "Standard", "x_AsOf": "2026-09",
        "BillingCurrency": "USD", "x_PriceSource": "test",
    }  # fmt: skip
    prices = pa.concat_tables([day.prices, build(PRICES, [plain | row for row in more])])
    keys = [f"aws|{account}|{family}" for account in ("111122223333", "") for family in ("two.gpu", "one.gpu", "gp3")]
    alphas = {key: rng.randint(LEAST, MOST) for key in keys if rng.random() < 0.7}
    agreed = {
        "aws|111122223333|two.gpu|us-east-1": "7.25 USD",
        "aws|111122223333|one.gpu|us-east-1": "0.333333333333 EUR",
    }
    contracted = {key: price for key, price in agreed.items() if rng.random() < 0.5}
    return replace(day, attachments=build(ATTACHMENTS, rows), prices=prices, alphas=alphas, contracted=contracted)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_both_ledgers_agree_on_estimates_of_machines_and_volumes(seed: int) -> None:
    agree(sized(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_causes_add_up_and_sums_know_no_order_of_rows(seed: int) -> None:
    day = sized(seed)
    pairs = settle(day).pairs
    for pair in pairs:
        if pair.comparable:
            assert pair.paid is not None and pair.listed is not None
            assert sum(pair.causes().values()) == pair.paid.amortised - pair.listed
    found = window_sums(day.day, pairs, None)
    rng = random.Random(seed)

    def mixed(table: pa.Table) -> pa.Table:
        return table.take(pa.array(rng.sample(range(len(table)), len(table)), pa.int64()))

    other = replace(day, charges=mixed(day.charges), device_hourly=mixed(day.device_hourly), prices=mixed(day.prices))
    assert window_sums(day.day, settle(other).pairs, None) == found
    # Neither what is known of other days nor a factor changes what a day teaches.
    blind = replace(day, alphas=None, watermarks={})
    assert window_sums(day.day, settle(blind).pairs, None) == found
