"""Every FOCUS file that we hold: it closes, or is refused with a reason. Amounts by DuckDB, which read the files itself."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest

from schemas.billing import CHARGES, PRICES
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY, JOB_RUNS, LAYER_HOURLY
from tasks import bill
from tasks.core import money
from tasks.core.ledger import Inputs, settle
from tasks.io.lake import Lake
from tests.bills import settings, statuses
from tests.real import real_data

WHOLE = {
    "focus_1_0_sample_1000.csv": 1000,
    "synthetic_aws_1_2_rows100.csv": 100,
    "synthetic_aws_1_3_rows100.csv": 100,
    "synthetic_azure_1_2_rows100.csv": 100,
    "synthetic_azure_1_3_rows100.csv": 100,
    "synthetic_gcp_1_2_rows100.csv": 100,
}
"""Files that close, and their rows."""
LACKING = "BillingAccountId: expected the columns BillingAccountId, BillingCurrency, ServiceName, ProviderName or"
REFUSED = {
    "currency_codes.csv": "BilledCost: expected the columns BilledCost",
    "scenarios_correction_set.csv": "BillingAccountId: expected the columns BillingAccountId, BillingPeriodEnd",
    "spec_commitment_discount_purchase_scenario_1.csv": LACKING,
    "spec_commitment_discount_purchase_scenario_2.csv": LACKING,
    "spec_commitment_discount_purchase_scenario_3.csv": LACKING,
    "spec_commitment_discount_usage_scenario_1.csv": LACKING,
    "spec_commitment_discount_usage_scenario_2.csv": LACKING,
    "spec_commitment_discount_usage_scenario_3.csv": LACKING,
    "spec_commitment_discount_usage_scenario_4.csv": LACKING,
    "spec_one_hundred_percent_utilization_with_commitment_discount_flexibility_with_2_resources.csv": LACKING,
    "spec_one_hundred_percent_utilization_without_commitment_discount_flexibility.csv": LACKING,
    "spec_virtual_currency_pricing_model_a1.csv": "BillingPeriodEnd: expected an instant .*'5/1/25'",
    "synthetic_aws_1_3_contract_commitment.csv": "BilledCost: expected the columns BilledCost",
    "validator_all_pass.csv": "BillingCurrency: expected the columns BillingCurrency, ChargeCategory, EffectiveCost",
    "validator_sample.parquet": "BilledCost: expected the columns BilledCost",
}
"""Files that are refused: examples that hold only the columns they explain, other data sets, dates of another format."""
COMPLETED = {
    "spec_commitment_discount_purchase_scenario_1.csv": None,
    "spec_commitment_discount_purchase_scenario_2.csv": "ChargePeriodEnd: expected an instant .*'2023-02-01T30:00:00Z'",
    "spec_commitment_discount_purchase_scenario_3.csv": "ChargePeriodEnd: expected an instant .*'2023-02-01T30:00:00Z'",
    "spec_commitment_discount_usage_scenario_1.csv": None,
    "spec_commitment_discount_usage_scenario_2.csv": None,
    "spec_commitment_discount_usage_scenario_3.csv": None,
    "spec_commitment_discount_usage_scenario_4.csv": None,
    "spec_one_hundred_percent_utilization_with_commitment_discount_flexibility_with_2_resources.csv": None,
    "spec_one_hundred_percent_utilization_without_commitment_discount_flexibility.csv": None,
    "spec_virtual_currency_pricing_model_a1.csv": None,
    "scenarios_correction_set.csv": None,
}
"""The examples with the columns that they leave out: None where they close then, else why they do not."""
FILLER = {
    "BillingAccountId": "111122223333",
    "BillingCurrency": "USD",
    "ServiceName": "Example",
    "ProviderName": "AWS",
    "BillingPeriodStart": "2026-11-01T00:00:00Z",
    "BillingPeriodEnd": "2026-12-01T00:00:00Z",
    "ChargePeriodStart": "2026-11-10T10:00:00Z",
    "ChargePeriodEnd": "2026-11-10T11:00:00Z",
}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


def by_duckdb(path: Path) -> tuple[int, Decimal, Decimal]:
    """Rows, BilledCost and EffectiveCost of a file by another reader, in exact decimals."""
    rows, billed, effective = duckdb.sql(
        "select count(*), sum(cast(BilledCost as decimal(38, 20))), sum(cast(EffectiveCost as decimal(38, 20))) from "
        f"read_csv('{path}', all_varchar=true, nullstr=['NULL', ''], header=true, quote='\"', escape='\"')"
    ).fetchall()[0]
    return int(rows), Decimal(billed), Decimal(effective)


def settled(lake: Lake, plan: Any) -> dict[str, tuple[Decimal, Decimal]]:
    """Both ledgers by category of the addresses of every day that a bill touches, without any telemetry."""
    found: dict[str, list[Decimal]] = {}
    for day in bill.days_touched(lake, plan):
        handle, facts = bill.charges_of(lake, plan, day)
        ledger = settle(
            Inputs(
                day=day,
                charges=lake.read(handle, CHARGES),
                device_hourly=DEVICE_HOURLY.empty(),
                layer_hourly=LAYER_HOURLY.empty(),
                attachments=ATTACHMENTS.empty(),
                jobs=JOB_RUNS.empty(),
                gpu_counts={},
                prices=PRICES.empty(),
                watermarks=facts["watermarks"],
                default_region={"aws": "us-east-1"},
            )
        )
        for row in ledger.addresses.to_pylist():
            sums = found.setdefault(row["x_Category"], [Decimal(0), Decimal(0)])
            sums[0], sums[1] = (
                money.total([old, row[n]]) for old, n in zip(sums, ("BilledCost", "EffectiveCost"), strict=True)
            )
    return {category: (billed, effective) for category, (billed, effective) in found.items()}


def test_every_file_is_named() -> None:
    files = {path.name for path in real_data("focus").iterdir()}
    assert files == {*WHOLE, *REFUSED}


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_closes(lake: Lake, name: str) -> None:
    path = real_data("focus", name)
    plan = settings(path)
    (entry,) = bill.ingest(lake, plan)
    assert (entry["status"], entry["rows"]) == ("accepted", WHOLE[name])
    rows, billed, effective = by_duckdb(path)
    facts = bill.period_facts(lake, plan, bill.days_touched(lake, plan))
    assert rows == WHOLE[name]
    steps = {one.delivery: one.step.facts for one in bill.snapshots_in_force(lake, plan)}
    (files,) = (facts["files"] for facts in steps.values())
    lost = {
        ledger: sum(
            (Decimal(c[ledger]["raw_minus_stored"]) for f in files for c in f["currencies"].values()), Decimal(0)
        )
        for ledger in ("BilledCost", "EffectiveCost")
    }
    stored = [money.decimal(sum(f[f"stored_{ledger}"] for f in facts)) for ledger in ("billed", "effective")]
    assert stored == [billed - lost["BilledCost"], effective - lost["EffectiveCost"]]
    addressed = settled(lake, plan)
    assert [money.total(both[i] for both in addressed.values()) for i in (0, 1)] == stored
    assert all(f["scheduled_billed"] == f["scheduled_effective"] == 0 for f in facts)


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_with_a_reason(lake: Lake, name: str) -> None:
    (entry,) = bill.ingest(lake, settings(real_data("focus", name)))
    assert entry["status"] == "refused"
    assert re.search(REFUSED[name], entry["reason"]), entry["reason"]
    assert bill.days_touched(lake, settings(real_data("focus", name))) == {}


def completed(path: Path) -> tuple[bytes, list[Mapping[str, str]]]:
    """The example with the columns that it leaves out, and dates in ISO 8601; as bytes and as rows."""
    rows = [r for r in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))) if any(r.values())]
    out = []
    for row in rows:
        facts = {**FILLER, "EffectiveCost": row["BilledCost"], **row}
        for key, value in facts.items():
            if value.count("/") == 2 and key.endswith(("Start", "End")):
                month, day, year = value.split("/")
                facts[key] = f"20{year}-{int(month):02d}-{int(day):02d}T00:00:00Z"
        out.append(facts)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(out[0]))
    writer.writeheader()
    writer.writerows(out)
    return text.getvalue().encode(), out


@pytest.mark.parametrize("name", COMPLETED)
def test_a_completed_example_closes_or_is_refused(lake: Lake, tmp_path: Path, name: str) -> None:
    data, rows = completed(real_data("focus", name))
    path = tmp_path / name
    path.write_bytes(data)
    plan = settings(path)
    entries = bill.ingest(lake, plan)
    reason = COMPLETED[name]
    if reason is not None:
        assert re.search(reason, entries[0]["reason"]), entries[0]["reason"]
        return
    assert statuses(entries) == ["accepted"]
    count, billed, effective = by_duckdb(path)
    assert count == len(rows)
    addressed = settled(lake, plan)
    assert money.total(both[0] for both in addressed.values()) == billed
    assert money.total(both[1] for both in addressed.values()) == effective
    (facts,) = bill.period_facts(lake, plan, [])
    unexplained = (
        facts["stored_billed"] - facts["purchases"] + facts["used"] + facts["unused"] - facts["stored_effective"]
    )
    assert unexplained == (0 if "virtual" not in name else 200_000 * 10**12)


def test_what_examples_of_commitments_become(lake: Lake, tmp_path: Path) -> None:
    plans = []
    for number in (1, 3):
        kind = ("purchase", "usage")[number == 3]
        name = f"spec_commitment_discount_{kind}_scenario_{number}.csv"
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "a.csv").write_bytes(completed(real_data("focus", name))[0])
        plans.append(settings(folder))
    bought, used = (Lake.open(str(tmp_path / f"lake{n}")) for n in (0, 1))
    for one, plan in zip((bought, used), plans, strict=True):
        bill.ingest(one, plan)
    assert settled(bought, plans[0]) == {"commitment_purchase": (8760, 0)}
    assert settled(used, plans[1]) == {"other_usage": (0, Decimal("0.75")), "commitment_unused": (0, Decimal("0.25"))}
