"""Deliveries from folders into charges per usage day: both layouts, refusals, snapshots, kills, real exports."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pytest

from schemas.billing import CHARGES
from tasks import bill, standing
from tasks.core import snapshots
from tasks.errors import DeliveryError
from tasks.io.lake import Lake
from tasks.settings import Settings
from tests.bills import (
    billed,
    csv_bytes,
    export,
    not_utf8,
    objects,
    parquet_bytes,
    row,
    settings,
    statuses,
    stored,
    write,
)
from tests.real import real_data

DAY = "2026-11-10"
EC2 = "aws|111122223333|Amazon Elastic Compute Cloud"
ODDITIES = Path(__file__).resolve().parents[1] / "data" / "bills" / "focus_1_0_oddities.csv"
E1, E2, E3 = (f"2026-11-{d}T06:00:00.000Z-0000000{d}-aaaa-bbbb-cccc-000000000000" for d in (11, 12, 13))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


def test_a_plain_file_becomes_charges_of_its_days(lake: Lake, drop: Path) -> None:
    rows = [row(), row(ResourceId="vol-0aaaabbbb", ChargePeriodEnd="2026-11-11T10:00:00Z", BilledCost="1")]
    plan = settings(write(drop / "bill.csv", csv_bytes(rows)))
    (entry,) = bill.ingest(lake, plan)
    assert entry["status"] == "accepted"
    assert (entry["rows"], entry["days"]) == (2, [DAY, "2026-11-11"])
    assert entry["periods"] == ["2026-11-01T00:00:00Z"]
    handle, facts = bill.charges_of(lake, plan, DAY)
    assert handle.rows == 2
    assert facts["bills"] == [f"s0/{entry['delivery']}"]
    assert facts["watermarks"] == {EC2: snapshots.day_start_ns("2026-11-11")}
    found = {r["ResourceId"]: r for r in lake.read(handle, CHARGES).to_pylist()}
    assert found["vol-0aaaabbbb"]["x_DayBilledCost"] == Decimal("0.583333333333")
    assert found["vol-0aaaabbbb"]["x_Source"] == "s0"
    assert billed(lake, plan) == Decimal("2.624")
    assert bill.charges_of(lake, plan, "2026-12-25") == (
        bill.Handle(CHARGES.name, CHARGES.version, "2026-12-25", ()),
        {"watermarks": {EC2: snapshots.day_start_ns("2026-12-25")}, "bills": []},
    )


def test_the_same_bytes_twice_change_nothing(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    write(drop / "a.csv", csv_bytes([row()]))
    (first,) = bill.ingest(lake, plan)
    before = objects(lake)
    write(drop / "a.csv", csv_bytes([row()]), second=500)
    write(drop / "copy.csv", csv_bytes([row()]), second=900)
    again = bill.ingest(lake, plan)
    assert statuses(again) == ["known", "known"]
    assert {e["delivery"] for e in again} == {first["delivery"]}
    after = objects(lake)
    assert {path for path in after if "/present/" not in path} == {path for path in before if "/present/" not in path}
    assert billed(lake, plan) == Decimal("1.624")
    bill.ingest(lake, plan)
    assert objects(lake) == after


def test_the_newest_file_replaces_the_periods_of_its_rows_only(lake: Lake, drop: Path) -> None:
    october = {
        "BillingPeriodStart": "2026-10-01T00:00:00Z",
        "BillingPeriodEnd": "2026-11-01T00:00:00Z",
        "ChargePeriodStart": "2026-10-31T10:00:00Z",
        "ChargePeriodEnd": "2026-10-31T11:00:00Z",
    }
    plan = settings(drop)
    write(drop / "1.csv", csv_bytes([row(BilledCost="1"), row(BilledCost="10", **october)]))
    bill.ingest(lake, plan)
    touched = bill.days_touched(lake, plan)
    write(drop / "2.csv", csv_bytes([row(BilledCost="2")]), second=60)
    bill.ingest(lake, plan)
    assert billed(lake, plan) == 12
    after = bill.days_touched(lake, plan)
    assert [day for day in after if after[day] != touched[day]] == [DAY]
    write(drop / "0.csv", csv_bytes([row(BilledCost="3")]), second=30)
    entries = {e["name"]: e for e in bill.ingest(lake, plan)}
    assert {name: e["status"] for name, e in entries.items()} == {
        "0.csv": "superseded",
        "1.csv": "known",
        "2.csv": "known",
    }
    assert "2026-11 with 2.csv, which is newer" in entries["0.csv"]["message"]
    assert "2026-11 with 2.csv, which is newer" in entries["1.csv"]["message"]
    assert billed(lake, plan) == 12


@pytest.mark.parametrize("packed", [False, True])
def test_text_packed_text_and_parquet_give_the_same_charges(lake: Lake, drop: Path, packed: bool) -> None:
    rows = [row(BilledCost=c) for c in ("1.5", "2.25", "2.25")]
    text = settings(write(drop / "bill.any", csv_bytes(rows, packed=packed)))
    typed = settings(
        write(drop / "bill.parquet", parquet_bytes([{**r, "BilledCost": float(r["BilledCost"])} for r in rows]))
    )
    assert statuses(bill.ingest(lake, text)) == ["accepted"]
    one = stored(lake, text)
    other = Lake.open(str(drop / "lake"))
    bill.ingest(other, typed)
    assert one.equals(stored(other, typed))


def test_an_export_in_overwrite_mode(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    export(drop / "gpu", [row(BilledCost="1"), row(BilledCost="2"), row(BilledCost="4")], parts=2)
    (entry,) = bill.ingest(lake, plan)
    assert (entry["status"], entry["rows"]) == ("accepted", 3)
    assert entry["name"] == "gpu/metadata/BILLING_PERIOD=2026-11/gpu-Manifest.json"
    assert billed(lake, plan) == 7
    record = json.loads(lake.store.read(f"raw/bills/s0/{entry['delivery']}/delivery.json"))
    assert set(record) == {"source", "delivery", "delivered_at", "period", "periods", "files", "rows"}
    assert len(record["files"]) == 2


def test_an_export_in_create_new_mode_counts_its_newest_execution(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    export(drop, [row(BilledCost="1")], execution=E1)
    bill.ingest(lake, plan)
    export(drop, [row(BilledCost="2")], execution=E2)
    assert statuses(bill.ingest(lake, plan)) == ["accepted"]
    assert billed(lake, plan) == 2
    export(drop, [row(BilledCost="1")], execution=E3)
    assert statuses(bill.ingest(lake, plan)) == ["known"]
    assert billed(lake, plan) == 1
    before = objects(lake)
    bill.ingest(lake, plan)
    assert objects(lake) == before


def test_manifests_of_executions_are_read_as_well(lake: Lake, drop: Path) -> None:
    for execution, cost in ((E1, "1"), (E2, "2")):
        manifest = export(drop, [row(BilledCost=cost)], execution=execution)
        own = manifest.parent / execution / manifest.name
        own.parent.mkdir()
        own.write_bytes(manifest.read_bytes())
    plan = settings(drop)
    assert statuses(bill.ingest(lake, plan)) == ["accepted", "accepted"]
    assert billed(lake, plan) == 2


def test_an_incomplete_delivery_is_refused_and_the_former_stands(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    export(drop, [row(BilledCost="1")], execution=E1)
    bill.ingest(lake, plan)
    export(drop, [row(BilledCost="2"), row(BilledCost="3")], execution=E2, parts=2, missing=[1])
    entries = bill.ingest(lake, plan)
    refused = next(e for e in entries if "part" in (e["reason"] or ""))
    assert f"{E2}/gpu-00001.csv.gz" in refused["reason"]
    assert "1 of 2 parts" in refused["reason"]
    assert "gpu-Manifest.json" in refused["message"]
    assert "former delivery stands" in refused["message"]
    assert billed(lake, plan) == 1
    export(drop, [row(BilledCost="2"), row(BilledCost="3")], execution=E2, parts=2)
    assert statuses(bill.ingest(lake, plan)) == ["accepted"]
    assert billed(lake, plan) == 5


def test_parts_without_a_manifest_wait(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    export(drop, [row()], execution=E2, manifest=False)
    (entry,) = bill.ingest(lake, plan)
    assert entry["status"] == "refused"
    assert "no manifest names" in entry["reason"]
    export(drop, [row(BilledCost="1")], execution=E1)
    assert statuses(bill.ingest(lake, plan)) == ["refused", "accepted"]
    export(drop, [row(BilledCost="5")], execution=E3)
    assert statuses(bill.ingest(lake, plan)) == ["accepted"]
    assert billed(lake, plan) == 5


@pytest.mark.parametrize("body", ["{", "[]", '{"dataFiles": "x"}', '{"dataFiles": []}', '{"columns": []}'])
def test_a_broken_manifest_is_refused(lake: Lake, drop: Path, body: str) -> None:
    export(drop, [row()]).write_text(body)
    entries = bill.ingest(lake, settings(drop))
    assert set(statuses(entries)) == {"refused"}
    assert "Manifest.json" in entries[0]["name"]


def test_rows_of_another_period_than_their_folder_are_refused(lake: Lake, drop: Path) -> None:
    export(drop, [row(), row()], period="2026-10")
    (entry,) = bill.ingest(lake, settings(drop))
    assert "the billing period of the folder, 2026-10" in entry["reason"]


def test_two_exports_below_one_source_do_not_mix(lake: Lake, drop: Path) -> None:
    export(drop / "a", [row(BillingAccountId="1", BilledCost="1")], name="x")
    october = {"BillingPeriodStart": "2026-10-01T00:00:00Z", "BillingPeriodEnd": "2026-11-01T00:00:00Z"}
    export(drop / "b", [row(BilledCost="2", **october)], period="2026-10", name="x", missing=[0])
    entries = bill.ingest(lake, settings(drop))
    assert sorted(statuses(entries)) == ["accepted", "refused"]


BAD = {
    "zero bytes": (b"", "0 bytes"),
    "header only": (csv_bytes([]), "no row"),
    "no cost column": (csv_bytes([{k: v for k, v in row().items() if k != "BilledCost"}]), "BilledCost"),
    "unknown category": (csv_bytes([row(), row(ChargeCategory="Gift")]), "one of Usage, Purchase"),
    "money with separators": (csv_bytes([row(BilledCost="1,624.00")]), "1,624.00"),
    "not finite": (parquet_bytes([{**row(), "EffectiveCost": float("nan")}]), "nan"),
    "truncated parquet": (parquet_bytes([row()])[:-9], "readable Parquet"),
    "truncated gzip": (csv_bytes([row()] * 50, packed=True)[:-40], "readable gzipped CSV"),
    "cut line": (csv_bytes([row(), row()])[:-60], "readable CSV"),
    "not text": (b"\xff\xfe\x00BilledCost", "readable CSV"),
    "another table": (b"ContractId,BillingCurrency\nc-1,USD\n", "FOCUS cost and usage export"),
    "a column twice": (csv_bytes([row(billedcost="3")]), "each column once"),
    "too large": (csv_bytes([row(BilledCost="9" * 26)] * 11), "38 digits"),
    "too large a list price": (csv_bytes([row(ListCost="9" * 26)] * 11), "38 digits"),
    "too large a contract price": (csv_bytes([row(ContractedCost="9" * 26)] * 11), "38 digits"),
    "too long": (csv_bytes([row(), row(ConsumedQuantity="40000.1")]), "row 2 (header not counted): column ConsumedQ"),
    "too long a price": (csv_bytes([row(PricingQuantity="2400001", PricingUnit="Minutes")]), "at most 40,000 hours"),
    "too long together": (csv_bytes([row(ConsumedQuantity="30000"), row(ConsumedQuantity="-10001")]), "and day"),
    "half a pair": (csv_bytes([row(), row(Tags='{"a": "\\ud800"}')]), "row 2 (header not counted): column Tags"),
    "half a pair in a price": (csv_bytes([row(SkuPriceDetails='{"\\udfff": 1}')]), "half a surrogate pair"),
    "deep": (csv_bytes([row(Tags='{"a":' * 3000 + "1" + "}" * 3000)]), "at most 64 levels"),
    "very deep": (csv_bytes([row(Tags='{"a":' * 100_000 + "1" + "}" * 100_000)]), "at most 64 levels"),
    "rather deep": (csv_bytes([row(Tags='{"a":' * 65 + "1" + "}" * 65)]), "at most 64 levels"),
    "not UTF-8 in Parquet": (not_utf8("ResourceId"), "row 2 (header not counted): column ResourceId: expected UTF-8"),
    "not UTF-8 in a cost": (not_utf8("BilledCost"), "row 2 (header not counted): column BilledCost: expected UTF-8"),
    "not UTF-8 in a further column": (not_utf8("x_Further"), "column x_Further: expected UTF-8"),
    "digits of another script": (csv_bytes([row(ChargePeriodStart="2026-11-1٠T10:00:00Z")]), "an instant such as"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_delivery_is_refused_whole_and_stops_nobody(lake: Lake, drop: Path, tmp_path: Path, name: str) -> None:
    data, expected = BAD[name]
    other = write(tmp_path / "other.csv", csv_bytes([row(BillingAccountId="9", BilledCost="7")]))
    plan = settings(drop, other)
    write(drop / "a.csv", csv_bytes([row(BilledCost="1")]))
    bill.ingest(lake, plan)
    before = objects(lake)
    write(drop / "b.csv", data, second=60)
    entries = bill.ingest(lake, plan)
    assert statuses(entries) == ["known", "refused", "known"]
    refused = entries[1]
    assert expected in refused["message"]
    assert "s0" in refused["message"]
    assert "b.csv" in refused["message"]
    assert "former one stands" in refused["message"]
    assert refused["reason"]
    assert objects(lake) == before
    assert billed(lake, plan) == 8


def test_a_missing_source_is_named_with_its_setting(lake: Lake, drop: Path) -> None:
    good = write(drop / "a.csv", csv_bytes([row()]))
    entries = bill.ingest(lake, settings(drop / "nowhere", good, "nosuch://bucket"))
    assert statuses(entries) == ["refused", "accepted", "refused"]
    assert "bills.url of source s0" in entries[0]["message"]
    assert str(drop / "nowhere") in entries[0]["message"]
    assert "nosuch" in entries[2]["message"]
    (drop / "only").mkdir()
    write(drop / "only" / "notes.txt", b"x")
    (entry,) = bill.ingest(lake, settings(drop / "only"))
    assert "no bill among 1 file" in entry["reason"]


def test_a_source_in_another_file_system(lake: Lake, drop: Path) -> None:
    export(drop / "gpu", [row(BilledCost="1"), row(BilledCost="2")], execution=E1, parts=2)
    memory = fsspec.filesystem("memory")
    memory.put(str(drop / "gpu"), "/bills/gpu", recursive=True)
    try:
        plan = settings("memory://bills/gpu")
        assert statuses(bill.ingest(lake, plan)) == ["accepted"]
        assert billed(lake, plan) == 3
    finally:
        memory.rm("/bills", recursive=True)


def test_two_sources_with_the_same_charge_are_refused(lake: Lake, drop: Path) -> None:
    one = write(drop / "a.csv", csv_bytes([row()]))
    later = {"ChargePeriodStart": "2026-11-12T10:00:00Z", "ChargePeriodEnd": "2026-11-12T11:00:00Z"}
    two = write(drop / "b.csv", csv_bytes([row(BilledCost="3"), row(**later)]))
    plan = settings(one, two)
    assert statuses(bill.ingest(lake, plan)) == ["accepted", "accepted"]
    with pytest.raises(DeliveryError, match="s0, s1") as caught:
        bill.charges_of(lake, plan, DAY)
    assert caught.value.sources == ["s0", "s1"]
    assert len(bill.snapshots_in_force(lake, plan)) == 2
    assert list(bill.days_touched(lake, plan)) == [DAY, "2026-11-12"]
    assert bill.charges_of(lake, plan, "2026-11-12")[0].rows == 1
    assert bill.charges_of(lake, settings(one), DAY)[0].rows == 1


def test_the_split_over_files_and_the_order_of_rows_do_not_matter(drop: Path) -> None:
    rows = [row(BilledCost=str(i % 3), ResourceId=f"i-0000000{i % 2}") for i in range(12)]
    found = []
    for name, some, parts in (("a", rows, 1), ("b", rows[::-1], 1), ("c", rows[5:] + rows[:5], 4)):
        export(drop / name, some, parts=parts)
        lake, plan = Lake.open(str(drop / f"lake-{name}")), settings(drop / name)
        assert statuses(bill.ingest(lake, plan)) == ["accepted"]
        found.append(bill.days_touched(lake, plan))
    assert found[0] == found[1] == found[2]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_a_kill_at_any_write_leaves_what_a_quiet_run_leaves(drop: Path) -> None:
    export(drop / "e", [row(BilledCost="1"), row(ChargePeriodEnd="2026-11-12T10:00:00Z")], execution=E1, parts=2)
    plan = settings(drop / "e")
    quiet = Lake.open(str(drop / "quiet"))
    bill.ingest(quiet, plan)
    expected = objects(quiet)
    for moment in ("before", "after"):
        for write_number in range(1, 40):
            left = write_number

            def watch(when: str, operation: str, path: str, moment: str = moment) -> None:
                nonlocal left
                if when == moment:
                    left -= 1
                    if left == 0:
                        raise Killed

            url = str(drop / f"{moment}-{write_number}")
            Lake.open(url)
            try:
                bill.ingest(_watched(url, watch), plan)
            except Killed:
                lake = Lake.open(url)
                assert bill.days_touched(lake, plan) in ({}, bill.days_touched(quiet, plan))
                bill.ingest(lake, plan)
                assert objects(lake) == expected, (moment, write_number)
            else:
                assert write_number > 5
                break
        else:
            pytest.fail("the run never came to its end")


def _watched(url: str, watch: Any) -> Lake:
    opened = Lake.open(url)
    return Lake(type(opened.store)(url, watch=watch), opened.buckets)


def test_a_delivery_that_newer_code_has_not_parsed_is_parsed_from_the_lake(
    lake: Lake, drop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = settings(write(drop / "a.csv", csv_bytes([row()])))
    bill.ingest(lake, plan)
    before = bill.days_touched(lake, plan)
    (drop / "a.csv").unlink()
    monkeypatch.setattr(standing, "MODULES", (*standing.MODULES, "tasks.errors"))
    assert bill.days_touched(lake, plan) == before
    assert len(lake.store.list("steps/bill")) == 2


def test_look_alikes_of_a_real_export(lake: Lake) -> None:
    plan = settings(ODDITIES)
    (entry,) = bill.ingest(lake, plan)
    assert (entry["status"], entry["rows"]) == ("accepted", 13)
    assert entry["periods"] == ["2024-09-01T00:00:00Z", "2024-10-01T00:00:00Z"]
    rows = stored(lake, plan).to_pylist()
    assert Counter(r["x_Class"] for r in rows) == Counter(
        {"untied": 5, "other": 3, "machine": 2, "dependant": 2, "storage": 1}
    )
    assert Counter(r["x_Cloud"] for r in rows) == Counter({"aws": 10, "oracle": 2, "azure": 1})
    assert Counter(r["x_Occurrence"] for r in rows) == Counter({0: 12, 1: 1})
    by_text = {r["ChargeDescription"]: r for r in rows}
    oracle = by_text["Standard - E3 - Memory"]
    assert (oracle["ChargeFrequency"], oracle["PricingCategory"], oracle["CommitmentDiscountCategory"]) == (
        "Usage-Based",
        None,
        None,
    )
    assert by_text["$0.40 per million requests"]["BilledCost"] == Decimal("0.00000352")
    assert by_text["$1.14 per On Demand Linux g3.4xlarge Instance Hour"]["Tags"] == (
        '{" org":"a","note":",NULL,NULL,","org":"b"}'
    )
    assert by_text["Standard - A1"]["ChargeCategory"] == "Adjustment"
    disk = by_text["Premium SSD Managed Disks - P6 LRS - US East 2"]
    assert disk["x_DependantId"] == disk["ResourceId"].lower()
    facts = bill.snapshots_in_force(lake, plan)[0].step.facts
    sums = facts["files"][0]["currencies"]["USD"]
    assert sums["BilledCost"]["raw_minus_stored"] == "0"
    assert Decimal(sums["BilledCost"]["stored"]) == billed(lake, plan)


def test_the_real_sample_of_the_focus_project(lake: Lake) -> None:
    plan = settings(real_data("focus", "focus_1_0_sample_1000.csv"))
    (entry,) = bill.ingest(lake, plan)
    assert (entry["status"], entry["rows"]) == ("accepted", 1000), entry["message"]
    rows = stored(lake, plan)
    assert Counter(rows["x_Cloud"].to_pylist()) == Counter({"aws": 942, "azure": 51, "oracle": 7})
    machines = [r for r in rows.to_pylist() if r["x_Class"] == "machine"]
    assert Counter(r["x_InstanceType"] for r in machines) == Counter({"g5.4xlarge": 8, "g3.4xlarge": 2})
    classes = {(r["ServiceName"], r["ResourceType"], r["x_Class"]) for r in rows.to_pylist()}
    assert {c for s, t, c in classes if t == "volume"} == {"dependant"}
    assert {c for s, t, c in classes if s == "Amazon Simple Storage Service"} == {"storage"}
    hours = [r for r in rows.to_pylist() if "Instance Hour" in (r["ChargeDescription"] or "") and r not in machines]
    assert {r["x_Class"] for r in hours} == {"untied"}
    _closes(lake, plan)


@pytest.mark.parametrize(
    ("name", "cloud"),
    [
        ("synthetic_aws_1_2_rows100.csv", "aws"),
        ("synthetic_aws_1_3_rows100.csv", "aws"),
        ("synthetic_azure_1_2_rows100.csv", "azure"),
        ("synthetic_azure_1_3_rows100.csv", "azure"),
        ("synthetic_gcp_1_2_rows100.csv", "gcp"),
    ],
)
def test_outside_files_close(lake: Lake, name: str, cloud: str) -> None:
    plan = settings(real_data("focus", name))
    assert statuses(bill.ingest(lake, plan)) == ["accepted"]
    assert set(stored(lake, plan)["x_Cloud"].to_pylist()) == {cloud}
    _closes(lake, plan)


def test_a_data_set_that_holds_no_costs_is_refused(lake: Lake) -> None:
    (entry,) = bill.ingest(lake, settings(real_data("focus", "synthetic_aws_1_3_contract_commitment.csv")))
    assert entry["status"] == "refused"
    assert "FOCUS cost and usage export" in entry["message"]


def _closes(lake: Lake, plan: Settings) -> None:
    """Σ day parts = Σ stored = Σ totals = Σ raw − what rounding took, in both ledgers."""
    rows = stored(lake, plan)
    steps = {one.delivery: one.step for one in bill.snapshots_in_force(lake, plan)}.values()
    for ledger, part in (("BilledCost", "x_DayBilledCost"), ("EffectiveCost", "x_DayEffectiveCost")):
        parts = sum(rows[part].to_pylist(), Decimal(0))
        whole = sum(rows.filter(rows["x_IsHomeDay"])[ledger].to_pylist(), Decimal(0))
        assert parts == whole
        assert parts == sum(Decimal(t[ledger]) for s in steps for t in s.facts["totals"])
        files = [c[ledger] for s in steps for f in s.facts["files"] for c in f["currencies"].values()]
        assert parts == sum(Decimal(f["stored"]) for f in files)
        days = [d[ledger] for s in steps for p in s.facts["days"].values() for d in p.values()]
        assert parts == sum(Decimal(d) for d in days)
