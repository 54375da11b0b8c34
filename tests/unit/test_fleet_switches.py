"""Each switch of a fleet shows: in the files, in the bill, or in the truth."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seedance.errors import ShardError
from seedance.schema import DEVICE_SAMPLES, EVENTS, PROCESS_SAMPLES, STEP_WINDOWS, TELEMETRY
from seedance.shard import parse_name, read_shard
from tests.fleet import (
    Charge,
    Fleet,
    FleetSpec,
    Truth,
    build,
    bundled_spec,
    bundled_specs,
    charges,
    deliveries,
    observe,
    telemetry_files,
    tiny_spec,
    true_ledger,
    truth_summary,
    usage_days,
    with_switches,
    write_fleet,
)
from tests.fleet.__main__ import main, parse_switches
from tests.fleet.arithmetic import units
from tests.fleet.export import BUCKET, EXPORT, PREFIX, export_files
from tests.fleet.model import DAY, HOUR
from tests.fleet.write import bill_files

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@dataclass
class Seen:
    """A fleet with one switch, and everything that comes of it."""

    fleet: Fleet
    truth: Truth
    bill: list[Charge]
    rows: dict[str, list[dict[str, Any]]]

    def places(self, category: str) -> list[Any]:
        """Addresses of a category."""
        return [a for a in self.truth.addresses if a.place.category == category]

    def rows_like(self, **columns: Any) -> list[Charge]:
        """Rows of the bill with these values."""
        return [c for c in self.bill if all(c[name] == value for name, value in columns.items())]


def see(**switches: Any) -> Seen:
    """A tiny fleet with switches."""
    fleet = build(tiny_spec(7, **switches))
    timeline = observe(fleet)
    first, second, corrupt, _ = telemetry_files(fleet, timeline)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path, data in {**first, **second}.items():
        if path not in corrupt:
            rows[parse_name(path).table] += read_shard(data, TELEMETRY[parse_name(path).table], where=path)[
                1
            ].to_pylist()
    return Seen(fleet, true_ledger(fleet, timeline=timeline), charges(fleet), rows)


def _shared(seen: Seen) -> bool:
    jobs = defaultdict(set)
    for (machine, hour), vector in seen.truth.observed.items():
        for place in vector:
            if place.category == "work" and machine == seen.fleet.machines[1].instance_id:
                jobs[hour].add(place.job)
    shares = {r["sm_util_ppm"] for r in seen.rows[PROCESS_SAMPLES.name] if str(r["job_id"]).startswith("serve")}
    return all(len(found) == 2 for found in jobs.values()) and len(shares) == 2 and None not in shares


def _dark(seen: Seen) -> bool:
    machine = seen.fleet.machines[-1]
    silent = all(r["instance_id"] != machine.instance_id for r in seen.rows[DEVICE_SAMPLES.name])
    own = [a for a in seen.truth.addresses if a.machine == machine.instance_id]
    return silent and bool(own) and all(a.place.category == "unobserved" and a.place.device is None for a in own)


def _gap(seen: Seen) -> bool:
    marked = {r["state"] for r in seen.rows[DEVICE_SAMPLES.name]} - {"ok"}
    lost = [a for a in seen.places("unobserved") if a.place.device is not None]
    return bool(marked) and {a.machine for a in lost} == {m.instance_id for m in seen.fleet.machines}


def _plan(seen: Seen) -> bool:
    used, unused = (seen.rows_like(CommitmentDiscountStatus=status) for status in ("Used", "Unused"))
    fees = seen.rows_like(ChargeCategory="Purchase")
    covered = all(c.billed == 0 < c.effective for c in (*used, *unused))
    closes = sum(c.billed for c in fees) == sum(c.effective for c in (*used, *unused))
    cash = sum(a.billed for a in seen.places("commitment_purchase"))
    return bool(used and unused) and covered and closes and cash == sum(units(c.billed) for c in fees)


def _volume(seen: Seen, kind: str) -> bool:
    volume = seen.fleet.volumes[0]
    rows = seen.rows_like(ResourceId=volume.volume_id)
    named = [r for r in seen.rows[EVENTS.name] if (r["kind"], r["source"]) == ("block_device", "kernel")]
    idle = [a for a in seen.places("idle") if volume.volume_id in a.charge]
    tied = [a for a in seen.places("work") if volume.volume_id in a.charge]
    lengths = {c.end_ns - c.start_ns for c in rows}
    detached = any(a.place.device is None for a in idle)
    return bool(named and tied and detached) and lengths == {HOUR if kind == "hourly" else DAY}


def _refund(seen: Seen) -> bool:
    tied = [a for a in seen.truth.addresses if "Refund of instance hours" in a.charge]
    return bool(seen.places("refund")) and len({a.place for a in tied}) > 3 and all((a.billed or 0) <= 0 for a in tied)


def _overheads(seen: Seen) -> bool:
    wanted = ("support", "shared", "untied", "other_usage", "capacity_unused")
    return all(seen.places(category) for category in wanted)


def _late(seen: Seen) -> bool:
    before = true_ledger(seen.fleet, with_late=False)
    first, second, _, _ = telemetry_files(seen.fleet, observe(seen.fleet))
    lost = sum(sum(v.values()) for v in seen.truth.observed.values()) - sum(
        sum(v.values()) for v in before.observed.values()
    )
    return len(second) == 1 and not set(first) & set(second) and lost > 0 and before.day_parts == seen.truth.day_parts


def _restated(seen: Seen) -> bool:
    first, second = deliveries(seen.fleet)
    old, new = (true_ledger(seen.fleet, delivery=number).day_parts for number in (1, 2))
    return {c.label for c in first} != {c.label for c in second} and any(old[k] != new[k] for k in set(old) & set(new))


def _twins(seen: Seen) -> bool:
    labels = [c.label for c in seen.bill]
    twice = {label for label in labels if labels.count(label) == 2}
    return len(twice) == 1 and len(labels) - len(set(labels)) == 1


def _straddling(seen: Seen) -> bool:
    days = usage_days(seen.fleet)
    tomorrow = true_ledger(seen.fleet, day_ns=seen.fleet.spec.day_ns + DAY)
    week = [a for a in seen.truth.addresses if "Catalog-Storage" in a.charge]
    return len(days) >= 3 and {a.place.category for a in tomorrow.addresses} == {"untied"} and len(week) == 1


def _open(seen: Seen) -> bool:
    estimates = [a for a in seen.truth.addresses if a.estimated is not None]
    until = seen.fleet.spec.day_ns + HOUR
    past = all(c.end_ns <= until for c in seen.bill)
    return bool(estimates) and past and all(a.hour_ns >= until and a.billed is None for a in estimates)


def _daily(seen: Seen) -> bool:
    rows = [c for c in seen.bill if c.kind == "machine"]
    return len(rows) == 1 and rows[0].end_ns - rows[0].start_ns == DAY


def _told(seen: Seen) -> bool:
    stated = [json.loads(r["payload"]) for r in seen.rows[EVENTS.name] if r["kind"] == "block_device"]
    return {(p["bytes"] >> 30, p["type"]) for p in stated} == {(1_000, "gp3"), (1_200, "gp3")}


def _sliced(seen: Seen) -> bool:
    named = {r["mig_profile"] for r in seen.rows[DEVICE_SAMPLES.name] if r["mig_uuid"]}
    cut = {m.device(piece.gpu) for m in seen.fleet.machines for piece in m.slices}
    rest = [a for a in seen.places("idle") if a.place.device in cut]
    held = {a.place.job for a in seen.places("work") if str(a.place.device).startswith("MIG-")}
    return bool(named) and bool(rest) and len(held) == 3


def _limited(seen: Seen, owner: str) -> bool:
    limits = {r["mps_limit_ppm"] for r in seen.rows[PROCESS_SAMPLES.name] if r["owner_source"] == owner}
    idle = [a for a in seen.places("idle") if a.machine == seen.fleet.machines[-1].instance_id]
    jobs = {a.place.job for a in seen.places("work") if a.machine == seen.fleet.machines[-1].instance_id}
    return None not in limits and bool(limits) and bool(idle) and len(jobs) == 2


def _restart(seen: Seen) -> bool:
    return {a.place.attempt for a in seen.places("startup")} == {a.place.attempt for a in seen.places("work")} == {0, 1}


SHOWS: list[tuple[dict[str, Any], Callable[[Seen], bool]]] = [
    ({"partial_hours": True}, lambda s: any(span != HOUR for span in s.truth.spans.values())),
    ({"serve": True}, lambda s: any(str(a.place.job).startswith("serve-bert") for a in s.places("work"))),
    ({"shared_gpu": True}, _shared),
    ({"spot": True}, lambda s: all("Spot" in c["ChargeDescription"] for c in s.rows_like(PricingCategory="Dynamic"))),
    ({"spot": True}, lambda s: bool(s.rows_like(PricingCategory="Dynamic"))),
    ({"dark": True}, _dark),
    ({"unbilled": True}, lambda s: {m for m, _ in s.truth.unmatched} == {s.fleet.machines[-1].instance_id}),
    ({"gap": True, "serve": True}, _gap),
    ({"idle": True}, lambda s: any(a.place.device is not None for a in s.places("idle"))),
    ({"idle": False, "held": False}, lambda s: len({a.place.rank for a in s.places("work")}) == 4),
    ({"held": True}, lambda s: any(a.place.device and not a.place.job for a in s.places("held_idle"))),
    ({"restart": True}, _restart),
    ({"savings_plan": True, "partial_hours": True}, _plan),
    ({"daily_machine_rows": True}, _daily),
    ({"disk": "hourly"}, lambda s: _volume(s, "hourly")),
    ({"disk": "daily"}, lambda s: _volume(s, "daily")),
    ({"disk": ""}, lambda s: not s.fleet.volumes and all(r["kind"] != "block_device" for r in s.rows[EVENTS.name])),
    ({"lost_volume": True}, lambda s: any("gp3" in a.charge for a in s.places("untied"))),
    ({"volume_facts": True}, _told),
    ({"mig": True}, _sliced),
    ({"mps": True}, lambda s: _limited(s, "mps")),
    ({"fractions": True}, lambda s: _limited(s, "k8s")),
    ({"storage": True}, lambda s: bool(s.places("storage"))),
    ({"tax": True}, lambda s: bool(s.places("tax"))),
    ({"credit": True}, lambda s: sum(a.billed for a in s.places("credit")) < 0),
    ({"refund": True}, _refund),
    ({"transfer": True}, lambda s: any("DataTransfer" in a.charge for a in s.places("work"))),
    ({"overheads": True}, _overheads),
    ({"straddling": True}, _straddling),
    ({"twins": True}, _twins),
    ({"bill_until": 1}, _open),
    ({"invoice": "INV-1"}, lambda s: {c["InvoiceId"] for c in s.bill} == {"INV-1"}),
    ({"restated": True}, _restated),
    ({"late_shard": True}, _late),
]


@pytest.mark.parametrize(("switches", "shows"), SHOWS, ids=[str(s[0]) for s in SHOWS])
def test_a_switch_shows(switches: dict[str, Any], shows: Callable[[Seen], bool]) -> None:
    assert shows(see(**switches))


def test_every_switch_has_a_test_that_it_shows() -> None:
    shown = {name for switches, _ in SHOWS for name in switches}
    elsewhere = {"corrupt_shard", "duplicate_shard", "decimals", "parts", "bundled", "sample_ppm", "blocks"}
    on_clouds = {
        "cloud",
        "currency",
        "cluster_fee",
        "network_fees",
        "reservation",
        "capacity_reservation",
        "nested_credits",
        "neighbour_month",
        "two_months",
        "closed_correction",
        "second_currency",
        "scale_set",
    }
    of_time = {"mig", "mps", "fractions", "volume_facts"}
    shape = {"seed", "day", "first_hour", "hours", "period_s", "window_s", "op_window_s"}
    assert set(FleetSpec.__dataclass_fields__) == shown | elsewhere | shape | on_clouds | of_time


def test_a_damaged_shard_cannot_be_read_and_its_time_is_unobserved(tmp_path: Path) -> None:
    whole, damaged = tiny_spec(7), tiny_spec(7, corrupt_shard=True)
    written = write_fleet(build(damaged), tmp_path)
    assert len(written.corrupt) == 1 and DEVICE_SAMPLES.name in written.corrupt[0]
    with pytest.raises(ShardError):
        read_shard((tmp_path / written.corrupt[0]).read_bytes(), DEVICE_SAMPLES, where=written.corrupt[0])
    before, after = (true_ledger(build(spec)) for spec in (whole, damaged))
    machine = build(whole).machines[0].instance_id
    lost = {place for place in before.observed[machine, 1] if place not in after.observed[machine, 1]}
    assert {place.category for place in lost} >= {"idle", "unattributed_busy"}
    assert before.day_parts == after.day_parts and before.spans == after.spans


def test_a_shard_that_comes_twice_has_the_same_bytes_and_changes_nothing(tmp_path: Path) -> None:
    spec = tiny_spec(7, duplicate_shard=True)
    written = write_fleet(build(spec), tmp_path)
    (twin,) = written.duplicates
    name = parse_name(twin)
    (first,) = [p for p in written.telemetry if p != twin and name.sha16 in p]
    assert name.table == STEP_WINDOWS.name and parse_name(first).seq != name.seq
    assert (tmp_path / first).read_bytes() == (tmp_path / twin).read_bytes()
    assert true_ledger(build(spec)).addresses == true_ledger(build(tiny_spec(7))).addresses


@pytest.mark.parametrize("parts", [1, 3])
def test_an_export_has_the_layout_and_the_manifest_of_the_provider(parts: int) -> None:
    fleet = build(tiny_spec(7, parts=parts))
    files = export_files(fleet, charges(fleet))
    assert len(files) == parts + 1
    manifest = json.loads(files[-1][1])
    assert files[-1][0] == f"{PREFIX}/{EXPORT}/metadata/BILLING_PERIOD=2026-10/{EXPORT}-Manifest.json"
    assert manifest["dataFiles"] == [f"s3://{BUCKET}/{path}" for path, _ in files[:-1]]
    table = pa.concat_tables([pq.read_table(pa.BufferReader(data)) for _, data in files[:-1]])
    assert [c["name"] for c in manifest["columns"]] == table.column_names and len(table.column_names) == 57 + 5
    assert len(table) == len(charges(fleet))
    assert manifest["executionId"] in files[0][0]
    assert manifest["period"] == {"start": "2026-10-01T00:00:00.000Z", "end": "2026-11-01T00:00:00.000Z"}


def test_costs_are_decimals_where_the_switch_says_so() -> None:
    fleet = build(tiny_spec(7, decimals=True))
    data = export_files(fleet, charges(fleet))[0][1]
    table = pq.read_table(pa.BufferReader(data))
    assert table.schema.field("BilledCost").type == pa.decimal128(38, 12)
    assert sum(table["BilledCost"].to_pylist()) == sum((c.billed for c in charges(fleet)), Decimal(0))


def test_the_command_writes_a_fleet_and_its_true_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--out",
            str(tmp_path),
            "--shape",
            "tiny",
            "--seed",
            "9",
            "--day",
            "2026-11-03",
            "--switches",
            "spot,disk=daily",
        ]
    )
    assert "bill files" in capsys.readouterr().out
    totals = json.loads((tmp_path / "truth.json").read_text())
    assert set(totals["days"]) == {"2026-11-01", "2026-11-03"}
    assert list((tmp_path / "telemetry").rglob("*.parquet")) and list((tmp_path / "bills").rglob("*Manifest.json"))


def test_a_switch_that_is_not_known_is_refused() -> None:
    assert parse_switches("gap,serve=false,parts=2,disk=daily,bill_until=3") == {
        "gap": True, "serve": False, "parts": 2, "disk": "daily", "bill_until": 3,
    }  # fmt: skip
    with pytest.raises(SystemExit, match="unknown switch gaps"):
        parse_switches("gaps")


def _named(shards: dict[str, bytes]) -> dict[str, pa.Table]:
    """Rows of each shard by its name without the digest: another release of the writer may write other bytes."""
    return {
        path.rsplit("-", 1)[0]: read_shard(data, TELEMETRY[parse_name(path).table], where=path)[1]
        for path, data in shards.items()
    }


def test_the_samples_are_what_their_command_writes() -> None:
    told = [(fleet, observe(fleet)) for fleet in map(build, bundled_specs())]
    samples = ROOT / "samples"
    assert (samples / "truth.json").read_text(encoding="utf-8") == truth_summary(*told)
    drop = samples / "telemetry"
    found = {path.relative_to(drop).as_posix(): path.read_bytes() for path in drop.rglob("*.parquet")}
    first: dict[str, bytes] = {}
    for fleet, timeline in told:
        shards, second, _, _ = telemetry_files(fleet, timeline)
        assert not second and not set(shards) & set(first)
        first |= shards
    assert _named(found) == _named(first)
    for fleet, _ in told:
        export = samples / "bills" / fleet.spec.cloud
        bill = {path.relative_to(export).as_posix(): path.read_bytes() for path in export.rglob("*") if path.is_file()}
        files = dict(bill_files(fleet))
        assert set(bill) == set(files)
        for path, data in files.items():
            same = [pq.read_table(pa.BufferReader(x)) if path.endswith(".parquet") else x for x in (data, bill[path])]
            assert same[0] == same[1]
    sizes = [path.stat().st_size for path in samples.rglob("*") if path.is_file()]
    assert sum(sizes) < 7 * MIB and max(sizes) < MIB


def test_the_bundled_day_keeps_its_machines_and_lies_on_the_first_of_a_month() -> None:
    fleet = build(bundled_spec())
    kinds = [m.instance_type for m in fleet.machines]
    assert kinds == ["p4d.24xlarge", "g5.12xlarge", "g4dn.12xlarge", "g5.2xlarge"] and fleet.spec.day == "2026-10-01"
    assert [m.has_agent for m in fleet.machines] == [True, True, True, False]
    assert with_switches(fleet.spec, seed=1) != fleet.spec
