"""Whole nights without Prefect: the bundled day, late shards, restated bills, two at once, other orders, and what stops one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.shell import tell
from schemas.ledger import ADDRESSES, RECONCILIATION
from seedance.schema import OP_WINDOWS, TELEMETRY
from seedance.shard import parse_name, read_shard, write_shard
from tasks import reconcile
from tasks.core import ledger as ledger_core
from tasks.settings import BillSource, Settings
from tasks.summary import notes
from tests import nights, truth
from tests.bills import csv_bytes, row
from tests.fleet import FleetSpec, build, full_spec, observe, tiny_spec, true_ledger, write_fleet
from tests.real import real_data

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("BilledCost", "EffectiveCost", "x_EstimatedCost")
RUN_ONE = """
import sys
from pathlib import Path
from tests import nights
run = nights.run(nights.settings_for(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[3])
sys.exit(bool(run.failed))
"""
"""A night in a process of its own: fleet, lake, day."""


def totals_of(run: Any) -> dict[str, dict[str, Decimal]]:
    return {t["x_Category"]: {c: t[c] or Decimal(0) for c in COLUMNS} for t in run.totals}


def on(day: str, **changes: str) -> dict[str, str]:
    """One instance hour of a bill on a day."""
    return row(ChargePeriodStart=f"{day}T10:00:00Z", ChargePeriodEnd=f"{day}T11:00:00Z", **changes)


def reports(lake: Path) -> dict[str, str]:
    """Digests of report files alone; commits also name the shards they came from."""
    return {name: digest for name, digest in nights.published(lake).items() if "data.parquet" in name}


def test_the_bundled_day_equals_its_truth_and_a_second_night_computes_nothing(tmp_path: Path) -> None:
    settings = nights.settings_for(ROOT / "samples", tmp_path / "lake", workers=2, buckets=8)
    first = nights.run(settings, "2026-10-01")
    day = json.loads((ROOT / "samples" / "truth.json").read_text())["days"]["2026-10-01"]
    true = {
        (cloud, currency, name): {c: Decimal(v[c]) for c in COLUMNS}
        for cloud, found in day.items()
        for currency, told in found.items()
        for name, v in told["categories"].items()
    }
    found = {(t["x_Cloud"], t["BillingCurrency"], t["x_Category"]): t for t in first.totals}
    assert {key: {c: t[c] or Decimal(0) for c in COLUMNS} for key, t in found.items()} == true
    assert {cloud for cloud, _, _ in true} == {"aws", "azure", "gcp"}
    for currency, billed in first.billed.items():
        for column in COLUMNS[:2]:
            assert sum(t[column] or 0 for t in first.totals if t["BillingCurrency"] == currency) == billed[column]
    hourly = truth.head_table(tmp_path / "lake", "2026-10-01", RECONCILIATION.name)
    told = Counter(f for r in hourly if r["x_Finding"] for f in r["x_Finding"].split(", "))
    assert first.findings == {"2026-10-01": dict(told)} and {"no_telemetry", "deviation"} <= set(told)
    before = nights.published(tmp_path / "lake")
    again = nights.run(settings, "2026-10-01")
    assert [s["stage"] for s in again.stages if s.get("days")] == []
    assert nights.published(tmp_path / "lake") == before
    assert again.totals == first.totals and again.failed == {}


def test_a_late_shard_makes_its_day_due_and_changes_one_bucket(tmp_path: Path) -> None:
    spec = full_spec(5, corrupt_shard=False, restated=False)
    fleet, lake = build(spec), tmp_path / "lake"
    timeline = observe(fleet)
    write_fleet(fleet, tmp_path / "fleet", timeline=timeline)
    settings = nights.settings_for(tmp_path / "fleet", lake, buckets=8)
    nights.run(settings, spec.day)
    partials = {p.name for p in (lake / "steps" / "reduce_bucket").glob("*.json")}
    shutil.copytree(tmp_path / "fleet" / "late" / "telemetry", tmp_path / "fleet" / "telemetry", dirs_exist_ok=True)
    run = nights.run(settings, spec.day)
    assert (run.commits[spec.day], run.causes[spec.day], run.failed) == (2, "shard", {})
    true = true_ledger(fleet, timeline=timeline, with_late=True)
    assert truth.found_addresses(lake, spec.day) == truth.true_addresses(true)
    assert len({p.name for p in (lake / "steps" / "reduce_bucket").glob("*.json")} - partials) == 1
    rows = truth.head_table(lake, spec.day, ADDRESSES.name)
    assert {(r["x_Revision"], r["x_Cause"]) for r in rows} == {(2, "shard")}


def test_a_restated_delivery_replaces_its_period_and_keeps_history(tmp_path: Path) -> None:
    spec = full_spec(6, corrupt_shard=False)
    fleet, lake = build(spec), tmp_path / "lake"
    write_fleet(fleet, tmp_path / "fleet")
    settings = nights.settings_for(tmp_path / "fleet", lake)
    nights.run(settings, spec.day)
    former = (lake / "days" / spec.day / "1.json").read_bytes()
    shutil.copytree(tmp_path / "fleet" / "restated" / "bills", tmp_path / "fleet" / "bills", dirs_exist_ok=True)
    run = nights.run(settings, spec.day)
    assert (run.commits[spec.day], run.causes[spec.day], run.failed) == (2, "bill", {})
    true = true_ledger(fleet, with_late=False, delivery=2)
    assert truth.found_addresses(lake, spec.day) == truth.true_addresses(true)
    assert (lake / "days" / spec.day / "1.json").read_bytes() == former


def test_two_nights_of_one_day_together_end_in_one_result(tmp_path: Path) -> None:
    spec = tiny_spec(8, spot=True, tax=True)
    write_fleet(build(spec), tmp_path / "fleet")
    nights.run(nights.settings_for(tmp_path / "fleet", tmp_path / "alone"), spec.day)
    words = [sys.executable, "-c", RUN_ONE, str(tmp_path / "fleet"), str(tmp_path / "both"), spec.day]
    both = [subprocess.Popen(words, cwd=ROOT) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    assert nights.published(tmp_path / "both") == nights.published(tmp_path / "alone")
    assert len(list((tmp_path / "both" / "days" / spec.day).iterdir())) == 1


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> tuple[FleetSpec, Path, dict[str, str]]:
    """A fleet and the reports of its ordinary night."""
    root = tmp_path_factory.mktemp("ordinary")
    spec = full_spec(9, sample_ppm=100_000, corrupt_shard=False, late_shard=False)
    write_fleet(build(spec), root / "fleet")
    nights.run(nights.settings_for(root / "fleet", root / "lake"), spec.day)
    return spec, root / "fleet", reports(root / "lake")


@pytest.mark.parametrize("facts", [{"workers": 4}, {"scheduler": "local", "workers": 2}, {"buckets": 5}], ids=str)
def test_workers_and_buckets_never_matter(
    ordinary: tuple[FleetSpec, Path, dict[str, str]], tmp_path: Path, facts: dict[str, object]
) -> None:
    spec, fleet, wanted = ordinary
    run = nights.run(nights.settings_for(fleet, tmp_path / "lake", **facts), spec.day)
    assert run.failed == {} and reports(tmp_path / "lake") == wanted


def test_the_time_zone_never_matters(ordinary: tuple[FleetSpec, Path, dict[str, str]], tmp_path: Path) -> None:
    spec, fleet, wanted = ordinary
    words = [sys.executable, "-c", RUN_ONE, str(fleet), str(tmp_path / "lake"), spec.day]
    subprocess.run(words, cwd=ROOT, env=os.environ | {"TZ": "Pacific/Chatham"}, check=True)
    assert reports(tmp_path / "lake") == wanted


def test_order_of_shards_files_and_rows_never_matters(
    ordinary: tuple[FleetSpec, Path, dict[str, str]], tmp_path: Path
) -> None:
    """Shards cut in two with rows dealt out alternately, and the bill's parts merged in reverse order."""
    spec, fleet, wanted = ordinary
    for path in sorted((fleet / "telemetry").rglob("*.parquet"), reverse=True):
        name = parse_name(path.relative_to(fleet / "telemetry").as_posix())
        footer, table = read_shard(path.read_bytes(), TELEMETRY[name.table], where=str(path))
        halves = [table.take(pa.array(range(i, len(table), 2), pa.int64())) for i in (0, 1)]
        whole = name.table != OP_WINDOWS.name or len(table) < 2
        for seq, rows in enumerate([table] if whole else halves):
            place, data = write_shard(
                rows, TELEMETRY[name.table], producer=footer.producer, node=footer.node, cloud=footer.cloud,
                instance_id=footer.instance_id, instance_type=footer.instance_type, hour=footer.hour, seq=900 + seq,
                period_ns=footer.period_ns,
            )  # fmt: skip
            (tmp_path / "fleet" / "telemetry" / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fleet" / "telemetry" / place).write_bytes(data)
    parts = sorted((fleet / "bills").rglob("*.parquet"), reverse=True)
    bill = pa.concat_tables([pq.read_table(p) for p in parts], promote_options="permissive")
    (tmp_path / "bill").mkdir()
    pq.write_table(bill.take(pa.array(range(len(bill) - 1, -1, -1))), tmp_path / "bill" / "bill.parquet")
    settings = nights.settings_for(
        tmp_path / "fleet", tmp_path / "lake", bills=(BillSource(name="aws", url=str(tmp_path / "bill")),)
    )
    run = nights.run(settings, spec.day)
    assert run.failed == {} and reports(tmp_path / "lake") == wanted


def test_the_real_focus_sample_closes_without_telemetry(tmp_path: Path) -> None:
    source = BillSource(name="focus", url=str(real_data("focus", "focus_1_0_sample_1000.csv")))
    settings = Settings(lake=str(tmp_path / "lake"), bills=(source,))
    run = nights.run(settings, "2024-09-30", first_day="2024-09-01")
    assert run.failed == {} and len(run.days) == 30
    for column in COLUMNS[:2]:
        assert sum((t[column] for t in run.totals), Decimal(0)) == run.billed["USD"][column]
    rows = [r for day in run.days for r in truth.head_table(tmp_path / "lake", day, ADDRESSES.name)]
    unobserved = [r for r in rows if r["x_Category"] == "unobserved"]
    assert sorted(r["x_InstanceType"] for r in unobserved) == ["g3.4xlarge"] * 2 + ["g5.4xlarge"] * 8
    assert {r["x_Cloud"] for r in rows} == {"aws", "azure", "oracle"}
    bridge = pq.read_table(
        tmp_path / "lake" / "report" / "report_bridge__monthly" / "as_of_date=2024-09-30" / "data.parquet"
    )
    aws = next(r for r in bridge.to_pylist() if r["x_Cloud"] == "aws")
    assert (aws["x_StoredBilledCost"], aws["x_StoredEffectiveCost"]) == (Decimal("18.0066386184"), Decimal(13))
    assert aws["x_Unexplained"] == Decimal("-5.0066386184")
    assert aws["x_AddressedBilledCost"] == aws["x_StoredBilledCost"] and aws["x_Invoice"] == "not supplied"


def test_the_witness_stops_what_the_laws_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two addresses of one charge trade a unit: every law still holds, and only the second ledger sees it."""
    settle = ledger_core.settle

    def off_by_one(inputs: ledger_core.Inputs) -> ledger_core.Ledger:
        ledger = settle(inputs)
        rows, place = ledger.addresses.to_pylist(), ledger.addresses.schema.get_field_index("BilledCost")
        key = next(r["x_ChargeKey"] for r in rows if [x["x_ChargeKey"] for x in rows].count(r["x_ChargeKey"]) > 1)
        one, two = [i for i, r in enumerate(rows) if r["x_ChargeKey"] == key][:2]
        amounts = [r["BilledCost"] for r in rows]
        amounts[one], amounts[two] = amounts[one] + Decimal("1e-12"), amounts[two] - Decimal("1e-12")
        changed = ledger.addresses.set_column(place, "BilledCost", pa.array(amounts, ADDRESSES["BilledCost"].type))
        return ledger_core.Ledger(**{**vars(ledger), "addresses": changed})

    monkeypatch.setattr(reconcile, "settle", off_by_one)
    spec = tiny_spec(4)
    write_fleet(build(spec), tmp_path / "fleet")
    run = nights.run(nights.settings_for(tmp_path / "fleet", tmp_path / "lake"), spec.day)
    assert "WitnessError" in run.failed[spec.day] and "core_cost__addresses" in run.failed[spec.day]
    assert not (tmp_path / "lake" / "report" / "report_cost__job_daily").exists()
    assert not (tmp_path / "lake" / "days").exists()


def test_a_missing_bill_folder_fails_the_run_and_names_the_setting(tmp_path: Path) -> None:
    spec = tiny_spec(4)
    write_fleet(build(spec), tmp_path / "fleet")
    bills = (BillSource(name="aws", url=str(tmp_path / "nowhere")),)
    run = nights.run(nights.settings_for(tmp_path / "fleet", tmp_path / "lake", bills=bills), spec.day)
    (message,) = run.failed.values()
    assert "nowhere" in message and "bills" in message
    assert {t["x_Category"] for t in run.totals} >= {"work"}, "the day is still told, as estimates"
    assert all(t["BilledCost"] is None for t in run.totals)


def test_shards_of_a_day_that_has_not_come_are_put_aside(tmp_path: Path) -> None:
    spec = tiny_spec(4, day="2099-01-01")
    write_fleet(build(spec), tmp_path / "fleet")
    settings = nights.settings_for(tmp_path / "fleet", tmp_path / "lake", bills=())
    run = nights.run(settings, "2026-10-01")
    assert set(run.quarantined) == {"2099-01-01"} and run.quarantined["2099-01-01"] > 0
    record = next((tmp_path / "lake" / "quarantine").rglob("*.json")).read_text()
    assert "2099-01-01" in record and "tried again when that day has come" in record


def test_an_altered_object_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    spec = tiny_spec(4)
    write_fleet(build(spec), tmp_path / "fleet")
    settings = nights.settings_for(tmp_path / "fleet", tmp_path / "lake")
    nights.run(settings, spec.day)
    shutil.rmtree(tmp_path / "lake" / "days")
    victim = next((tmp_path / "lake" / "objects" / ADDRESSES.name).glob("*.parquet"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"X")
    run = nights.run(settings, spec.day)
    assert victim.name in run.failed[spec.day] and "altered" in run.failed[spec.day]
    assert not (tmp_path / "lake" / "days").exists()


def test_a_day_that_loses_its_charges_loses_their_money(tmp_path: Path) -> None:
    """A restated bill moves a charge to another day; a day without any charge left is published again, at zero."""
    first = [on("2026-11-10", BilledCost="1.624"), on("2026-11-11", BilledCost="1.624")]
    second = [on("2026-11-11", BilledCost="3.248")]
    bill_file = tmp_path / "bill.csv"
    settings = Settings(lake=str(tmp_path / "lake"), bills=(BillSource(name="focus", url=str(bill_file)),))
    for revision, rows in enumerate((first, second), 1):
        bill_file.write_bytes(csv_bytes(rows))
        os.utime(bill_file, ns=(revision * 10**18, revision * 10**18))
        run = nights.run(settings, "2026-11-20")
        assert run.failed == {}
    assert run.commits == {"2026-11-10": 2, "2026-11-11": 2} and run.causes["2026-11-10"] == "bill"
    daily = pq.ParquetDataset(tmp_path / "lake" / "report" / "report_cost__job_daily").read()
    assert sum(daily["BilledCost"].to_pylist()) == Decimal("3.248")


def test_amounts_beyond_28_digits_are_told_exactly(tmp_path: Path) -> None:
    rows = [
        on("2026-11-10", BilledCost="10000000000000000.000000000001", EffectiveCost="10000000000000000.000000000001")
    ]
    (tmp_path / "bill.csv").write_bytes(csv_bytes(rows))
    settings = Settings(lake=str(tmp_path / "lake"), bills=(BillSource(name="focus", url=str(tmp_path / "bill.csv")),))
    run = nights.run(settings, "2026-11-20")
    assert run.failed == {} and run.billed["USD"]["BilledCost"] == Decimal("10000000000000000.000000000001")


def test_hostile_text_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [on("2026-11-10", BillingCurrency="[/red]"), on("2026-11-10", ProviderName="[bold]x")]
    (tmp_path / "a[1].csv").write_bytes(csv_bytes(rows))
    (tmp_path / "b[b].csv").write_bytes(csv_bytes([on("2026-11-10", ChargeCategory="[/red]x")]))
    run = nights.run(
        Settings(lake=str(tmp_path / "lake"), bills=(BillSource(name="focus", url=str(tmp_path)),)), "2026-11-20"
    )
    tell(run)
    printed = capsys.readouterr()
    assert "[/red]" in printed.out and "[bold]x" in printed.out and "[/red]x" in printed.err


def test_what_the_totals_leave_out_is_said(tmp_path: Path) -> None:
    rows = [
        on("2026-11-10"),
        on("2026-06-05", BillingPeriodStart="2026-06-01T00:00:00Z", BillingPeriodEnd="2026-07-01T00:00:00Z"),
    ]
    (tmp_path / "bill.csv").write_bytes(csv_bytes(rows))
    settings = Settings(lake=str(tmp_path / "lake"), bills=(BillSource(name="focus", url=str(tmp_path / "bill.csv")),))
    run = nights.run(settings, "2026-11-20")
    (note,) = notes(run)
    assert "1 day(s) with charges lie before the look-back" in note and "2026-06-05" in note
    nights.run(settings, "2026-06-30", first_day="2026-06-01")
    assert notes(nights.run(settings, "2026-11-20")) == []
    (alone,) = notes(nights.run(Settings(lake=str(tmp_path / "other")), "2026-11-20"))
    assert "name no bill source" in alone


def test_a_day_that_a_gate_refuses_has_its_checks_on_record_and_on_the_page(tmp_path: Path) -> None:
    spec = tiny_spec(3, dark=True, late_shard=True)
    write_fleet(build(spec), tmp_path / "fleet")
    lake = tmp_path / "lake"
    quality = lake / "report" / "report_quality__runs" / f"usage_date={spec.day}" / "data.parquet"
    page = lake / "page" / f"usage_date={spec.day}" / "report.html"

    def failed_checks() -> list[str]:
        rows = pq.read_table(quality).to_pylist()
        return [r["x_Detail"] for r in rows if r["x_Outcome"] == "failed" and r["x_Check"].startswith("gate ")]

    strict = nights.settings_for(tmp_path / "fleet", lake, max_unobserved_ppm=0)
    refused = nights.run(strict, spec.day)
    assert "GateError" in refused.failed[spec.day] and refused.commits == {}
    (detail,) = failed_checks()
    assert detail.startswith("expected 0 to 0, found ") and "max_unobserved_ppm" in detail
    assert not page.exists()

    assert nights.run(nights.settings_for(tmp_path / "fleet", lake), spec.day).failed == {}
    assert failed_checks() == [] and "expected 0 to 0, found" in page.read_text()
    before = nights.published(lake)
    shutil.copytree(tmp_path / "fleet" / "late" / "telemetry", tmp_path / "fleet" / "telemetry", dirs_exist_ok=True)
    again = nights.run(strict, spec.day)
    assert again.failed and again.commits == {spec.day: 1}
    assert len(failed_checks()) == 1
    assert nights.published(lake).items() >= before.items()
