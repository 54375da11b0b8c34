"""Deliveries of Azure (a folder a run, with a manifest) and of Google (sets of Parquet files with nested records)."""

from __future__ import annotations

import json
import os
import re
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import bill
from tasks.io.lake import Lake
from tasks.summary import notes
from tests.bills import billed, csv_bytes, export, row, settings, statuses, stored, write
from tests.exports import GCE, SET, azure, azure_run, credit, gcp_bytes, gcp_row, gcp_set

NIGHT_1, NIGHT_2, NIGHT_3 = (f"2026-11-{day}T05:11:13.2812345Z" for day in (11, 12, 13))
DAY = "2026-11-10"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


def charges(lake: Lake, plan: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stored(lake, plan).to_pylist()
    return found


# --- Azure -----------------------------------------------------------------------------------------------------------


def test_the_newest_run_of_a_period_counts(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    azure_run(drop, [azure(BilledCost="1")], run="zz", submitted=NIGHT_1)
    assert statuses(bill.ingest(lake, plan)) == ["accepted"]
    rows = [azure(BilledCost="1.5"), azure(BilledCost="2", ResourceId=SET.replace("Gpu", "Other"))]
    azure_run(drop, rows, run="aa", submitted=NIGHT_2, parts=2)
    assert statuses(bill.ingest(lake, plan)) == ["known", "accepted"]
    assert billed(lake, plan) == Decimal("3.5")
    (former,) = bill.former_in_force(lake, plan)
    assert former.step.facts["totals"][0]["BilledCost"] == "1"
    azure_run(drop, [azure(BilledCost="7")], run="mm", submitted="2026-10-31T23:59:59Z")
    bill.ingest(lake, plan)
    assert billed(lake, plan) == Decimal("3.5")


def test_runs_that_are_there_at_the_first_look_are_states_of_one_another(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    for run, submitted, cost in (("a", NIGHT_2, "2"), ("b", NIGHT_1, "1"), ("c", NIGHT_3, "3")):
        azure_run(drop, [azure(BilledCost=cost)], run=run, submitted=submitted)
    bill.ingest(lake, plan)
    assert billed(lake, plan) == 3
    (former,) = bill.former_in_force(lake, plan)
    assert former.step.facts["totals"][0]["BilledCost"] == "2"


@pytest.mark.parametrize(
    ("changes", "without", "reason"),
    [
        ({}, (1,), "incomplete: part focus/20261101-20261130/n2/part_1_0001.csv.gz is missing"),
        ({"blobCount": 3}, (), r"incomplete: it promises 3 part\(s\) and names 2"),
        ({"byteCount": 5}, (), "incomplete: it promises 5 bytes, and its parts have"),
        ({"blobs": []}, (), "incomplete: it names no part"),
        ({"blobs": None}, (), "incomplete: it has no manifest.json"),
        ({"dataRowCount": 9}, (), "expected 9 rows, as its manifest says, found 2"),
        ({"exportConfig.type": "ActualCost"}, (), "type 'ActualCost'; expected FocusCost"),
        ({"exportConfig.timeFrame": "WeekToDate"}, (), "time frame 'WeekToDate'"),
        ({"runInfo.startDate": "2026-11-05T00:00:00"}, (), "billing periods from 2026-11-05 on"),
        ({"runInfo": 7}, (), "not a manifest of an Azure export"),
        ({"byteCount": "many"}, (), "not a manifest of an Azure export"),
        (
            {"blobs": 2 * [{"blobName": "focus/20261101-20261130/n2/part_0_0001.csv.gz"}], "byteCount": None},
            (),
            "2 times",
        ),
    ],
)
def test_a_run_that_is_not_whole_is_refused_and_the_former_stands(
    lake: Lake, drop: Path, changes: dict[str, Any], without: tuple[int, ...], reason: str
) -> None:
    plan = settings(drop)
    azure_run(drop, [azure(BilledCost="1")], run="n1", submitted=NIGHT_1)
    bill.ingest(lake, plan)
    rows = [azure(BilledCost="5"), azure(BilledCost="6")]
    azure_run(drop, rows, run="n2", submitted=NIGHT_2, parts=2, manifest=changes, without=without)
    for _ in range(2):
        entries = bill.ingest(lake, plan)
        assert sorted(statuses(entries)) == ["known", "refused"]
        (refused,) = (e for e in entries if e["status"] == "refused")
        assert re.search(reason, refused["reason"]), refused["reason"]
        assert billed(lake, plan) == 1
    azure_run(drop, [azure(BilledCost="9")], run="n3", submitted=NIGHT_3)
    bill.ingest(lake, plan)
    assert billed(lake, plan) == 9


def test_of_two_runs_of_one_time_one_counts_and_the_other_says_so(lake: Lake, drop: Path) -> None:
    for run in "ab":
        azure_run(drop, [azure(BilledCost="1", x_Run=run)], run=run, submitted=NIGHT_1)
    entries = bill.ingest(lake, settings(drop))
    assert statuses(entries) == ["accepted", "accepted"]
    (told,) = (e for e in entries if e["message"])
    (other,) = (e for e in entries if not e["message"])
    assert re.search(f"found {other['name']} of the same time.*Run the export again", told["message"])
    assert [one.delivery for one in bill.snapshots_in_force(lake, settings(drop))] == [other["delivery"]]
    run = SimpleNamespace(has_bills=True, older=[], stale=[], told=[], without_money={}, deliveries=entries)
    assert notes(run) == [told["message"]]
    azure_run(drop, [azure(BilledCost="1")], run="c", submitted=NIGHT_2)
    assert [e["message"] for e in bill.ingest(lake, settings(drop))] == [None] * 3


def test_a_part_with_other_bytes_is_incomplete(lake: Lake, drop: Path) -> None:
    folder = azure_run(drop, [azure()], run="n1", submitted=NIGHT_1)
    (part,) = folder.glob("part*")
    part.write_bytes(part.read_bytes()[:-9])
    (entry,) = bill.ingest(lake, settings(drop))
    assert "bytes, and the manifest says" in entry["reason"]


def test_a_manifest_of_aws_that_names_a_part_twice_is_refused(lake: Lake, drop: Path) -> None:
    manifest = export(drop, [row()])
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(body | {"dataFiles": 2 * body["dataFiles"]}))
    (entry,) = bill.ingest(lake, settings(drop))
    assert "names part gpu-00000.csv.gz 2 times; expected each part once" in entry["reason"]


def test_a_copy_of_a_file_in_a_set_is_refused_and_the_set_before_stands(lake: Lake, drop: Path) -> None:
    """Rows that are equal in every column are real money, and a file that stands twice is not."""
    gcp_set(drop, "a.parquet", [gcp_row("core"), gcp_row("core")])
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"]
    gcp_set(drop, "a (1).parquet", [gcp_row("core"), gcp_row("core")])
    (entry,) = bill.ingest(lake, settings(drop))
    assert re.search(r"a \(1\).parquet and .*a.parquet with the same 2 rows, byte for byte", entry["message"])
    assert billed(lake, settings(drop)) == 2


def test_the_container_may_lie_above_or_below_the_source(lake: Lake, drop: Path) -> None:
    azure_run(drop / "account" / "container", [azure(BilledCost="3")], run="n1", submitted=NIGHT_1)
    for url in (drop, drop / "account" / "container", drop / "account" / "container" / "focus"):
        assert statuses(bill.ingest(lake, settings(url)))[-1] in ("accepted", "known")
        assert billed(lake, settings(url)) == 3


def test_plain_text_with_a_mark_and_headers_in_another_case(lake: Lake, drop: Path) -> None:
    lower = {name[0].lower() + name[1:]: value for name, value in azure(BilledCost="4").items()}
    azure_run(drop, [lower], run="n1", submitted=NIGHT_1, packed=False, mark=True)
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"]
    (found,) = charges(lake, settings(drop))
    assert (found["BilledCost"], found["x_Class"], found["x_InstanceType"]) == (
        4,
        "machine",
        "Standard_NC24ads_A100_v4",
    )
    assert found["x_MachineId"] == f"{SET.lower()}/virtualmachines/7"


def test_an_export_without_rows_is_not_a_bill_of_zero(lake: Lake, drop: Path) -> None:
    azure_run(drop, [], run="n1", submitted=NIGHT_1)
    (entry,) = bill.ingest(lake, settings(drop))
    assert "a header and no row" in entry["reason"]
    folder = azure_run(drop, [azure()], run="n2", submitted=NIGHT_2, manifest={"byteCount": None, "blobs": [
        {"blobName": "focus/20261101-20261130/n2/part_0_0001.csv.gz"}
    ]})  # fmt: skip
    next(folder.glob("part*")).write_bytes(b"")
    (entry,) = (e for e in bill.ingest(lake, settings(drop)) if "n2" in e["name"])
    assert "a file of 0 bytes" in entry["reason"]


@pytest.mark.parametrize("changes", [{}, {"blobs": None}, {"runInfo": 7}])
def test_what_is_wrong_with_an_older_run_does_not_matter(lake: Lake, drop: Path, changes: dict[str, Any]) -> None:
    azure_run(drop, [azure()], run="n1", submitted=NIGHT_1, parts=2, without=(0,), manifest=changes)
    azure_run(drop, [azure(BilledCost="2")], run="n2", submitted=NIGHT_2)
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"]


# --- Google ----------------------------------------------------------------------------------------------------------


def test_rows_of_one_machine_hour_are_meters_of_one_machine(lake: Lake, drop: Path) -> None:
    gcp_set(drop, "000.parquet", [gcp_row(m) for m in ("core", "ram", "gpu", "ssd")])
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"]
    found = {c["x_TieRule"]: c for c in charges(lake, settings(drop))}
    assert {rule: c["x_UnitsPerMachine"] for rule, c in found.items()} == {
        "gcp-gpu-core": 208,
        "gcp-gpu-ram": 1872,
        "gcp-gpu-gpu": 8,
        "gcp-machines": None,
    }
    assert {c["x_MachineId"] for c in found.values()} == {GCE}
    assert {c["x_InstanceType"] for c in found.values()} == {"a3-highgpu-8g"}
    assert [found[r]["x_Class"] for r in ("gcp-gpu-ram", "gcp-machines")] == ["machine", "untied"]
    assert found["gcp-gpu-core"]["Tags"] == '{"team":"vision"}'
    assert found["gcp-gpu-core"]["x_Credits"] is None


def test_a_file_that_comes_late_is_a_new_state_of_the_set(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    gcp_set(drop, "000.parquet", [gcp_row("core", cost="2")])
    bill.ingest(lake, plan)
    late = gcp_row("core", cost="3", ChargePeriodStart="2026-11-10T11:00:00Z", ChargePeriodEnd="2026-11-10T12:00:00Z")
    path = gcp_set(drop, "001.parquet", [late, gcp_row("core", cost="2")])
    (entry,) = bill.ingest(lake, plan)
    assert (entry["status"], entry["rows"]) == ("accepted", 3)
    assert billed(lake, plan) == 7
    assert [one.step.facts["rows"] for one in bill.former_in_force(lake, plan)] == [1]
    path.unlink()
    bill.ingest(lake, plan)
    assert billed(lake, plan) == 2


def test_doubles_and_decimals_give_the_same_charges(lake: Lake, drop: Path) -> None:
    rows = [gcp_row("core", cost="0.1", x_Credits=[credit("PROMOTION", "-0.3"), credit("DISCOUNT", "-0.000000001")])]
    found = []
    for doubles in (False, True):
        folder = drop / str(doubles)
        (folder / "BILLING_PERIOD=2026-11").mkdir(parents=True)
        (folder / "BILLING_PERIOD=2026-11" / "a.parquet").write_bytes(gcp_bytes(rows, doubles=doubles))
        bill.ingest(lake, settings(folder))
        found.append(charges(lake, settings(folder)))
    assert found[0] == found[1]
    assert found[0][0]["x_PromotionalCost"] == Decimal("-0.3")


def test_promotions_are_told_apart_from_other_credits(lake: Lake, drop: Path) -> None:
    nested = [credit("PROMOTION", "-1"), credit("PROMOTION", "-2.5"), credit("FREE_TIER", "-4")]
    fee = {
        "ChargeCategory": "Purchase",
        "ChargeFrequency": "Recurring",
        "CommitmentDiscountId": "cud-1",
        "ResourceId": None,
    }
    rows = [
        gcp_row("core", x_Credits=nested),
        gcp_row("ram", cost="-9", ChargeCategory="Credit", x_Credits=[credit("PROMOTION", "-1")]),
        gcp_row("gpu"),
        gcp_row("ssd", cost="0.5", **fee, x_Credits=[credit("FEE_UTILIZATION_OFFSET", "-1.5")]),
    ]
    gcp_set(drop, "a.parquet", rows)
    gcp_set(drop, "b.parquet", [gcp_row("ssd", **fee)])
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"]
    found = sorted((c["SkuId"], c["x_PromotionalCost"], c["x_Class"]) for c in charges(lake, settings(drop)))
    assert found == [
        ("SKU-core", Decimal("-3.5"), "machine"),
        ("SKU-gpu", 0, "machine"),
        ("SKU-ram", -9, "machine"),
        ("SKU-ssd", 0, "commitment_unused"),
        ("SKU-ssd", 0, "untied"),
    ]
    (facts,) = bill.period_facts(lake, settings(drop), [])
    assert facts["purchases"] == 10**12


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"x_Credits": [credit("LOYALTY", "-1")]}, "column x_Credits: expected a credit type among .*'LOYALTY'"),
        ({"BillingPeriodStart": "2026-12-01T08:00:00Z", "BillingPeriodEnd": "2027-01-01T08:00:00Z"}, "folder, 2026-11"),
        ({"ChargeCategory": "Gift"}, "column ChargeCategory: expected one of .*'Gift'"),
    ],
)
def test_what_is_unknown_is_refused(lake: Lake, drop: Path, wrong: dict[str, Any], reason: str) -> None:
    gcp_set(drop, "a.parquet", [gcp_row("core"), gcp_row("ram", **wrong)])
    (entry,) = bill.ingest(lake, settings(drop))
    assert entry["status"] == "refused"
    assert re.search(reason, entry["reason"]), entry["reason"]


def test_folders_below_a_set_are_refused(lake: Lake, drop: Path) -> None:
    path = gcp_set(drop, "a.parquet", [gcp_row("core")])
    (path.parent / "run2").mkdir()
    (path.parent / "run2" / "a.parquet").write_bytes(path.read_bytes())
    (entry,) = bill.ingest(lake, settings(drop))
    assert "folders below a set of files" in entry["reason"]


def test_exports_of_three_clouds_can_lie_under_one_url(lake: Lake, drop: Path) -> None:
    azure_run(drop / "azure", [azure(BilledCost="1")], run="n1", submitted=NIGHT_1)
    gcp_set(drop / "gcp", "a.parquet", [gcp_row("core", cost="2")])
    export(drop / "aws", [row(BilledCost="4")])
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"] * 3
    assert billed(lake, settings(drop)) == 7
    assert {c["x_Cloud"] for c in charges(lake, settings(drop))} == {"aws", "azure", "gcp"}


# --- FOCUS 1.4 -------------------------------------------------------------------------------------------------------


def later(**changes: str) -> dict[str, str]:
    """A row of an export without ProviderName and PublisherName."""
    return {n: v for n, v in row(**changes).items() if n not in ("ProviderName", "PublisherName")}


@pytest.mark.parametrize(
    ("names", "cloud"),
    [
        ({"ServiceProviderName": "Google Cloud", "HostProviderName": "AWS", "InvoiceIssuerName": "AWS"}, "gcp"),
        ({"ServiceProviderName": "", "HostProviderName": "Microsoft", "InvoiceIssuerName": "AWS"}, "azure"),
        ({"InvoiceIssuerName": "Amazon Web Services, Inc."}, "aws"),
        ({"ServiceProviderName": "Model House", "HostProviderName": "AWS"}, "model house"),
    ],
)
def test_the_cloud_of_an_export_without_provider(lake: Lake, drop: Path, names: dict[str, str], cloud: str) -> None:
    write(drop / "a.csv", csv_bytes([later(**names)]))
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"]
    assert [c["x_Cloud"] for c in charges(lake, settings(drop))] == [cloud]


def test_an_export_that_names_no_provider_is_refused(lake: Lake, drop: Path) -> None:
    write(drop / "a.csv", csv_bytes([later()]))
    write(drop / "b.csv", csv_bytes([later(ServiceProviderName="AWS"), later(ServiceProviderName="")]))
    first, second = sorted(bill.ingest(lake, settings(drop)), key=lambda e: str(e["name"]))
    assert "ProviderName or ServiceProviderName" in first["reason"]
    assert (
        "a provider in every row, in ServiceProviderName or HostProviderName or InvoiceIssuerName" in second["reason"]
    )


def test_manifests_with_a_mark_are_read(lake: Lake, drop: Path) -> None:
    folder = azure_run(drop, [azure()], run="n1", submitted=NIGHT_1)
    path = folder / "manifest.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(json.loads(path.read_text())).encode())
    os.utime(path, (1_790_000_000,) * 2)
    assert statuses(bill.ingest(lake, settings(drop))) == ["accepted"]
