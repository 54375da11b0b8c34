"""What stands at a bill source over time: files that change, go back, overlap or go away; damaged copies; two at once."""

from __future__ import annotations

import json
import logging
import os
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from seedance.errors import StoreError
from seedance.store import Store
from tasks import bill, standing
from tasks.io import deliveries
from tasks.io.bills import Source
from tasks.io.lake import Lake
from tests.bills import billed, csv_bytes, export, objects, row, settings, statuses, write

DAY = "2026-11-10"
OTHER = {"BillingAccountId": "222233334444", "ResourceId": "i-0eeeeffff00001111"}
SAME_SECOND = "20261111T060000Z-"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"))


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


def listings(lake: Lake) -> list[str]:
    return [e.path for e in lake.store.list("raw/bills/s0/present")]


def read_only(lake: Lake, drop: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that ingestion reads from the source from now on."""
    fetched: list[str] = []
    fetch = Source.fetch

    def note(self: Source, path: str) -> bytes:
        fetched.append(path.removeprefix(f"{drop}/"))
        return fetch(self, path)

    monkeypatch.setattr(Source, "fetch", note)
    return fetched


def test_a_file_that_goes_back_to_an_earlier_content_counts_with_it(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    found = []
    for second, cost in enumerate(("1", "9", "1")):
        write(drop / "a.csv", csv_bytes([row(BilledCost=cost)]), second)
        bill.ingest(lake, plan)
        found.append(billed(lake, plan))
    assert found == [1, 9, 1]


@pytest.mark.parametrize("layout", ["plain", "export"])
def test_content_under_an_older_time_counts(lake: Lake, drop: Path, layout: str) -> None:
    plan = settings(drop)
    for second, cost in ((500, "1"), (0, "9")):
        if layout == "plain":
            write(drop / "a.csv", csv_bytes([row(BilledCost=cost)]), second)
        else:
            manifest = export(drop, [row(BilledCost=cost)])
            os.utime(manifest, (1_790_000_000 + second,) * 2)
        assert statuses(bill.ingest(lake, plan)) == ["accepted"]
        assert billed(lake, plan) == Decimal(cost)


def test_two_files_of_one_billing_period_without_a_charge_in_common_count_together(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    write(drop / "1.csv", csv_bytes([row(BilledCost="1")]))
    write(drop / "2.csv", csv_bytes([row(BilledCost="2", **OTHER)]))
    write(drop / "3.csv", csv_bytes([row(BilledCost="2", **OTHER)]))
    assert statuses(bill.ingest(lake, plan)) == ["accepted", "accepted", "known"]
    assert billed(lake, plan) == 3
    handle, facts = bill.charges_of(lake, plan, DAY)
    assert (handle.rows, len(handle.parts), len(facts["bills"])) == (2, 2, 2)
    assert len(bill.snapshots_in_force(lake, plan)) == 2
    (one, two) = bill.period_facts(lake, plan, [DAY])
    assert one["stored_billed"] + two["stored_billed"] == 3 * 10**12
    write(drop / "2.csv", csv_bytes([row(BilledCost="5", **OTHER)]), second=9)
    entries = {e["name"]: e for e in bill.ingest(lake, plan)}
    assert {n: e["status"] for n, e in entries.items()} == {
        "1.csv": "known",
        "2.csv": "accepted",
        "3.csv": "superseded",
    }
    assert "with 2.csv, which is newer" in entries["3.csv"]["message"]
    assert billed(lake, plan) == 6


def test_files_of_equal_time_are_told_apart_by_id(drop: Path) -> None:
    found = []
    for name, order in (("x", "ab"), ("y", "ba")):
        folder = drop / name
        folder.mkdir()
        for file, cost in zip(order, ("1", "2"), strict=True):
            write(folder / f"{file}.csv", csv_bytes([row(BilledCost=cost)]))
        lake = Lake.open(str(drop / f"lake-{name}"))
        assert sorted(statuses(bill.ingest(lake, settings(folder)))) == ["accepted", "superseded"]
        found.append(billed(lake, settings(folder)))
    assert found[0] == found[1]


def test_a_file_that_is_taken_away_does_not_take_its_money_away(lake: Lake, drop: Path) -> None:
    october = {"BillingPeriodStart": "2026-10-01T00:00:00Z", "BillingPeriodEnd": "2026-11-01T00:00:00Z"}
    plan = settings(drop)
    write(drop / "october.csv", csv_bytes([row(BilledCost="1", **october)]))
    write(drop / "november.csv", csv_bytes([row(BilledCost="2")]))
    bill.ingest(lake, plan)
    (drop / "october.csv").unlink()
    bill.ingest(lake, plan)
    assert billed(lake, plan) == 3
    write(drop / "november.csv", csv_bytes([row(BilledCost="4")]), second=1)
    bill.ingest(lake, plan)
    (drop / "november.csv").unlink()
    assert statuses(bill.ingest(lake, plan)) == ["refused"]
    assert billed(lake, plan) == 5


def test_a_refused_file_leaves_what_it_should_have_replaced(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    write(drop / "1.csv", csv_bytes([row(BilledCost="1")]))
    write(drop / "2.csv", csv_bytes([row(BilledCost="2", **OTHER)]))
    bill.ingest(lake, plan)
    write(drop / "1.csv", b"", second=5)
    for _ in range(2):
        assert sorted(statuses(bill.ingest(lake, plan))) == ["known", "refused"]
        assert billed(lake, plan) == 3


def test_of_executions_of_one_second_the_main_manifest_decides(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    for execution, cost in (("aaaa", "1"), ("bbbb", "9"), ("cccc", "7"), ("dddd", "5"), ("eeee", "3")):
        manifest = export(drop, [row(BilledCost=cost)], execution=SAME_SECOND + execution)
        own = manifest.parent / (SAME_SECOND + execution) / manifest.name
        own.parent.mkdir()
        own.write_bytes(manifest.read_bytes())
        bill.ingest(lake, plan)
        assert billed(lake, plan) == Decimal(cost), execution
        if execution == "cccc":
            shutil.rmtree(own.parent)  # some exports keep no manifest of each execution


def test_two_exports_of_one_period_below_one_source_count_together(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    export(drop / "a", [row(BilledCost="1")], name="a")
    export(drop / "b", [row(BilledCost="2", **OTHER)], name="b")
    bill.ingest(lake, plan)
    assert billed(lake, plan) == 3


def test_an_altered_copy_is_never_parsed(lake: Lake, drop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = settings(drop)
    write(drop / "a.csv", csv_bytes([row()]))
    (entry,) = bill.ingest(lake, plan)
    copy = next(p for p in Path(lake.store.url, "raw/bills/s0", entry["delivery"]).iterdir() if p.suffix == ".csv")
    copy.write_bytes(csv_bytes([row(BilledCost="9")]))
    monkeypatch.setattr(standing, "MODULES", (*standing.MODULES, "tasks.errors"))
    with pytest.raises(StoreError, match="altered") as caught:
        bill.snapshots_in_force(lake, plan)
    assert copy.name in str(caught.value)
    assert caught.value.expected != caught.value.found
    assert caught.value.found in str(caught.value) and caught.value.expected in str(caught.value)


@pytest.mark.parametrize("body", [b"", b'{"source": "s0"', b"{}", b"[]", b"\xff"])
def test_a_damaged_acceptance_is_named_with_the_way_out(lake: Lake, drop: Path, body: bytes) -> None:
    plan = settings(drop)
    write(drop / "a.csv", csv_bytes([row()]))
    (entry,) = bill.ingest(lake, plan)
    path = f"raw/bills/s0/{entry['delivery']}/delivery.json"
    Path(lake.store.url, path).write_bytes(body)
    with pytest.raises(StoreError, match="is damaged") as caught:
        bill.snapshots_in_force(lake, plan)
    assert caught.value.path == path
    assert "Delete it, and run again" in str(caught.value)
    entries = bill.ingest(lake, plan)
    assert set(statuses(entries)) == {"refused"}
    assert all(path in entry["message"] for entry in entries)
    Path(lake.store.url, path).unlink()
    with pytest.raises(StoreError, match=r"no raw/bills.*run ingestion again"):
        bill.snapshots_in_force(lake, plan)
    assert statuses(bill.ingest(lake, plan)) == ["accepted"]
    assert billed(lake, plan) == Decimal("1.624")


@pytest.mark.parametrize("body", [b"", b'{"deliveries": [{}]}', b"[]"])
def test_a_damaged_listing_is_named_with_the_way_out(lake: Lake, drop: Path, body: bytes) -> None:
    other = write(drop / "other.csv", csv_bytes([row(**OTHER)]))
    folder = drop / "s0"
    folder.mkdir()
    write(folder / "a.csv", csv_bytes([row()]))
    plan = settings(folder, other)
    bill.ingest(lake, plan)
    (path,) = listings(lake)
    Path(lake.store.url, path).write_bytes(body)
    with pytest.raises(StoreError, match="is damaged") as caught:
        bill.snapshots_in_force(lake, plan)
    assert caught.value.path == path
    entries = bill.ingest(lake, plan)
    assert statuses(entries) == ["refused", "known"]
    assert path in entries[0]["message"]
    Path(lake.store.url, path).unlink()
    bill.ingest(lake, plan)
    assert billed(lake, plan) == Decimal("3.248")


def test_a_name_that_is_no_utf_8_is_escaped(lake: Lake, drop: Path) -> None:
    plan = settings(drop)
    Path(os.fsdecode(os.fsencode(drop) + b"/caf\xe9.csv")).write_bytes(csv_bytes([row(BilledCost="2")]))
    Path(os.fsdecode(os.fsencode(drop) + b"/bad\xe9.csv")).write_bytes(b"")
    entries = {e["name"]: e for e in bill.ingest(lake, plan)}
    assert {name: e["status"] for name, e in entries.items()} == {"caf\\xe9.csv": "accepted", "bad\\xe9.csv": "refused"}
    json.dumps(entries, ensure_ascii=False).encode()
    assert billed(lake, plan) == 2


@pytest.mark.parametrize("where", ["parse", "discover"])
def test_what_nobody_foresaw_refuses_one_delivery_or_source(
    lake: Lake,
    drop: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    folder = drop / "s0"
    folder.mkdir()
    write(folder / "a.csv", csv_bytes([row()]))
    write(folder / "b.csv", csv_bytes([row(**OTHER)]), second=1)
    other = write(drop / "c.csv", csv_bytes([row(ResourceId="i-0000000000000001")]))
    target: Any = deliveries if where == "parse" else Source
    real = getattr(target, where)

    def fail(*arguments: Any) -> Any:
        if where == "discover" and arguments[0].name == "s0":
            raise ZeroDivisionError("odd")
        if where == "parse" and arguments[2][0][0]["origin"].endswith("/a.csv"):
            raise ZeroDivisionError("odd")
        return real(*arguments)

    monkeypatch.setattr(target, where, fail)
    with caplog.at_level(logging.ERROR):
        entries = bill.ingest(lake, settings(folder, other))
    expected = ["refused", "accepted", "accepted"] if where == "parse" else ["refused", "accepted"]
    assert statuses(entries) == expected
    assert entries[0]["reason"] == "ZeroDivisionError: odd"
    assert "bill source s0" in entries[0]["message"] and "former one stands" in entries[0]["message"]
    assert "Traceback" in caplog.text and "odd" in caplog.text


def test_what_is_known_and_unchanged_is_not_read_again(lake: Lake, drop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = settings(drop)
    write(drop / "1.csv", csv_bytes([row(BilledCost="1")]))
    write(drop / "2.csv", csv_bytes([row(BilledCost="2", **OTHER)]))
    (drop / "3.csv").symlink_to(drop / "2.csv")
    fetched = read_only(lake, drop, monkeypatch)
    bill.ingest(lake, plan)
    assert sorted(fetched) == ["1.csv", "2.csv", "3.csv"]
    fetched.clear()
    assert statuses(bill.ingest(lake, plan)) == ["known"] * 3
    assert fetched == ["3.csv"]  # the link's own times say nothing of what it leads to
    assert len(listings(lake)) == 1
    fetched.clear()
    write(drop / "1.csv", csv_bytes([row(BilledCost="8")]))  # the same size and time of modification
    bill.ingest(lake, plan)
    assert sorted(fetched) == ["1.csv", "3.csv"]
    assert billed(lake, plan) == 10


def test_two_at_once_leave_the_newest_state(drop: Path) -> None:
    """The slower one looked at the source before the file changed, and lists it after the other one did."""
    file = write(drop / "a.csv", csv_bytes([row(BilledCost="1")]))
    plan = settings(file)
    url = str(drop / "lake")
    Lake.open(url)
    begun = False

    def watch(moment: str, operation: str, path: str) -> None:
        nonlocal begun
        if moment == "before" and "/present/" in path and not begun:
            begun = True
            write(file, csv_bytes([row(BilledCost="2")]), second=1)
            assert statuses(bill.ingest(Lake.open(url), plan)) == ["accepted"]

    slow = Lake(Store(url, watch=watch), 8)
    assert statuses(bill.ingest(slow, plan)) == ["known"]
    assert billed(Lake.open(url), plan) == 2
    assert [path[-6:] for path in listings(slow)] == ["1.json"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_write_leaves_what_a_quiet_run_leaves(drop: Path, moment: str) -> None:
    folder = drop / "bills"
    folder.mkdir()
    plan = settings(folder)
    for name, rows in (("1", [row(BilledCost="1")]), ("2", [row(BilledCost="2", **OTHER)]), ("3", [row(**OTHER)])):
        write(folder / f"{name}.csv", csv_bytes(rows), int(name))
    quiet = Lake.open(str(drop / "quiet"))
    bill.ingest(quiet, plan)
    expected, days = objects(quiet), bill.days_touched(quiet, plan)
    for number in range(1, 60):
        left = number

        def watch(when: str, operation: str, path: str) -> None:
            nonlocal left
            left -= when == moment
            if not left:
                raise Killed

        url = str(drop / f"{moment}-{number}")
        Lake.open(url)
        try:
            bill.ingest(Lake(Store(url, watch=watch), 8), plan)
        except Killed:
            lake = Lake.open(url)
            assert bill.days_touched(lake, plan) in ({}, days)
            bill.ingest(lake, plan)
            assert objects(lake) == expected, number
        else:
            assert number > 12
            break
    else:
        pytest.fail("the run never came to its end")
