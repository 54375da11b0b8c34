"""What a plan takes from the bills of other days: when a day is open, complete windows, prices of the latest closed bill."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tasks import bill
from tasks.io.lake import Commit, Lake
from tasks.plan import Bills, cause_of, is_covered
from tasks.settings import Settings
from tests.tables import DAY, HOUR, ns

MIDNIGHT = ns(DAY) + 24 * HOUR


@pytest.fixture
def bills(tmp_path: Path) -> Bills:
    """Bills of a lake without any."""
    return Bills(Lake.open(str(tmp_path / "lake")), Settings(lake=str(tmp_path / "lake")))


@pytest.mark.parametrize(
    ("marks", "covered"),
    [
        ({}, False),
        ({"aws|1|EC2": MIDNIGHT}, True),
        ({"aws|1|EC2": MIDNIGHT - HOUR}, False),
        ({"aws|1|EC2": MIDNIGHT, "azure|2|VM": MIDNIGHT - 24 * HOUR}, False),
    ],
)
def test_a_day_is_covered_when_every_service_is_billed_to_its_end(marks: dict[str, int], covered: bool) -> None:
    assert is_covered(marks, "2026-10-01") == covered


def test_a_day_on_azure_is_complete_when_both_its_halves_are(bills: Bills, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {("aws", "1", 1), ("azure", "2", 0), ("azure", "2", 1), ("azure", "3", 0), ("gcp", "4", 0), ("gcp", "4", 1)}
    monkeypatch.setattr(bill, "complete_windows", lambda *_, **__: frozenset(found))
    assert bills.complete("2026-10-01") == {"aws|1": [1], "azure|2": [0], "gcp|4": [0, 1]}


def test_prices_of_the_latest_closed_bill_are_known_by_account_type_and_region(
    bills: Bills, monkeypatch: pytest.MonkeyPatch
) -> None:
    price: dict[str, Any] = {"x_Cloud": "aws", "SkuId": "p5", "RegionId": "us-east-1", "BillingCurrency": "EUR"}
    told = [bill.Contracted("1", price | {"ListUnitPrice": Decimal("1E+1")})]
    monkeypatch.setattr(bill, "contracted_prices", lambda *_, **__: told)
    assert bills.contracted("2026-10-01") == {"aws|1|p5|us-east-1": "10 EUR"}


def test_with_other_versions_of_tables_the_cause_is_the_schema() -> None:
    parts = {name: f"{name} 2" for name in ("bill", "shard", "price", "settings", "schema")}
    head = Commit("2026-10-01", 1, {"key": "k", "facts": {"parts": {name: f"{name} 1" for name in parts}}})
    assert cause_of(parts, head) == "schema"
    assert cause_of(parts | {"schema": "schema 1"}, head) == "bill"
    assert cause_of(parts, None) is None
