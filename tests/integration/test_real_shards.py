"""Days that only a probe speaks of: ranks on one CPU, no agent, no bill, a host that is said to be an instance of a cloud.

Such a day is open: its money is an estimate, list price times the time in which the device was seen, and adds up to it.
"""

from __future__ import annotations

import datetime as dt
import time
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.night import Run
from flows.shell import tell
from schemas.ledger import ADDRESSES, JOB_DAILY, LAYER_DAILY, LAYERS, RESOURCE_DAILY
from seedance.catalogue import gpu_instance
from tasks.core import money
from tasks.core.levels import walk
from tasks.explain import Question, explain_days
from tasks.io.lake import Lake
from tasks.settings import Settings
from tasks.summary import notes
from tests import nights, probed
from tests.probed import BOOT, HOUR_NS, MS, SECOND, Host, Job, Unit

DAY = "2026-10-04"
MIDNIGHT = int(dt.datetime(2026, 10, 4, tzinfo=dt.UTC).timestamp()) * SECOND
STEPS = 60
WORK = {
    ("embed", "fwd", "embedding"): 20,
    ("blocks.0", "fwd", "fused:activation+attention+matmul+norm"): 180,
    ("blocks.0", "bwd", "fused:activation+attention+matmul+norm"): 300,
    ("(optimizer)", "optim", "optimizer"): 100,
}
"""ms of a step that `probed.units` gives each layer."""


def two_ranks(start_ns: int, **facts: Any) -> list[list[Unit]]:
    return [probed.units(start_ns, STEPS, rank=rank, **facts) for rank in range(2)]


def price(host: Host = Host()) -> int:  # noqa: B008 - frozen
    """List price of a machine-hour in units of 1e-12."""
    assert host.cloud is not None and host.instance_type is not None
    found = gpu_instance(host.cloud, host.instance_type)
    assert found is not None and found.on_demand_usd_per_hour is not None
    return money.units(found.on_demand_usd_per_hour)


def night(folder: Path, day: str = DAY, *, lake: str = "lake") -> tuple[Run, Settings]:
    settings = Settings(lake=str(folder / lake), telemetry=str(folder / "drop"), workers=1, buckets=2)
    return nights.run(settings, day), settings


def report(folder: Path, name: str, day: str = DAY, *, lake: str = "lake") -> list[dict[str, Any]]:
    file = folder / lake / "report" / name / f"usage_date={day}" / "data.parquet"
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def by(rows: list[dict[str, Any]], *columns: str, value: str = "x_EstimatedCost") -> dict[Any, Any]:
    sums: dict[Any, Any] = defaultdict(Decimal)
    for row in rows:
        sums[tuple(row[c] for c in columns) if len(columns) > 1 else row[columns[0]]] += row[value]
    return dict(sums)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minute of two ranks at 10:00, each step a second: 0.3 s gap, of which input takes 0.2, and one save of a second."""
    made = tmp_path_factory.mktemp("probed")
    job = Job(facts={"name": "try", "model": "tiny"})
    probed.drop(made / "drop", Host(), job, two_ranks(MIDNIGHT + 10 * HOUR_NS, sampled=(3, 50), save_at=40))
    run, _ = night(made)
    assert run.failed == {} and run.quarantined == {} and run.findings == {}
    return made


SPAN = (STEPS - 1) * SECOND + 700 * MS + SECOND
"""From the first step's begin, which has no gap, to the end of the last, with the save."""


def test_money_is_list_price_times_the_time_that_the_device_was_seen(folder: Path) -> None:
    rows = report(folder, JOB_DAILY.name)
    assert {r["x_State"] for r in rows} == {"provisional"} and {r["BilledCost"] for r in rows} == {None}
    assert sum(r["x_EstimatedCost"] for r in rows) == money.decimal(money.half_even(price() * SPAN, HOUR_NS))
    assert sum(r["x_GpuNs"] for r in rows) == SPAN


def test_categories_have_the_time_that_the_ranks_say(folder: Path) -> None:
    """Two ranks at once have half of the device each, so a category has the mean of what they say."""
    found = by(report(folder, RESOURCE_DAILY.name), "x_Category", value="x_GpuNs")
    waits = sum(200 + 10 * rank for rank in range(2)) * (STEPS - 1) * MS // 2
    assert found == {
        "work": sum(WORK.values()) * STEPS * MS,
        "communication": 60 * STEPS * MS,
        "unattributed_busy": 40 * STEPS * MS,
        "checkpoint": SECOND,
        "input_stall": waits,
        "held_idle": 300 * (STEPS - 1) * MS - waits,
    }
    assert {r["x_DeviceId"] for r in report(folder, RESOURCE_DAILY.name)} == {BOOT}


def test_layers_have_the_work_and_add_up_to_it(folder: Path) -> None:
    rows = [r for r in report(folder, LAYER_DAILY.name) if r["x_Category"] == "work"]
    ns = {(r["x_Layer"], r["x_Pass"], r["x_Op"]): r["x_Ns"] for r in rows if r["x_Ns"]}
    assert ns == {key: ms * STEPS * MS for key, ms in WORK.items()}
    work = by(report(folder, JOB_DAILY.name), "x_Category")["work"]
    assert sum(r["x_EstimatedCost"] for r in rows) == work
    flops = {r["x_Pass"]: r["x_Flops"] for r in rows if r["x_Op"] == "matmul"}
    assert flops == {"fwd": 2 * STEPS * probed.FLOPS, "bwd": 4 * STEPS * probed.FLOPS}
    units = {(r["x_Units"], r["x_Samples"], r["x_TokensIn"]) for r in report(folder, JOB_DAILY.name)}
    assert units == {(STEPS, 8 * STEPS, 512 * STEPS)}


def test_an_estimate_adds_up_to_each_of_its_addresses_and_says_what_is_assumed(folder: Path) -> None:
    lake = Lake.open(str(folder / "lake"))
    head = lake.head(DAY)
    assert head is not None
    addresses = lake.read(head.handles[ADDRESSES.name], ADDRESSES).to_pylist()
    assert {(r["x_ChargeKey"], r["x_Rank"]) for r in addresses} == {("estimate:aws/i-laptop", r) for r in (0, 1)}
    # No process was read that says how the two ranks shared the CPU.
    assert {r["x_Evidence"] for r in addresses} == {"assumed"} and {r["x_CoveragePpm"] for r in addresses} == {10**6}
    layers = lake.read(head.handles[LAYERS.name], LAYERS).to_pylist()
    assert sum(r["x_EstimatedCost"] for r in layers) == by(addresses, "x_Category")["work"]


def test_the_page_the_table_and_the_explanation_name_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, settings = night(folder)
    assert run.stages[2]["days"] == 0
    tell(run)
    printed = capsys.readouterr().out
    page = (folder / "lake" / "page" / f"usage_date={DAY}" / "report.html").read_text()
    for name in ("input_stall", "checkpoint", "communication", "work"):
        amount = f"{by(report(folder, JOB_DAILY.name), 'x_Category')[name]:.12f}"
        assert f"│ aws   │ {name} " in printed and f"│ {amount} │ USD" in printed and amount in page
    assert "blocks.0" in page and "everything is an estimate" in printed
    answer = explain_days(settings, Question("job", "try", DAY, DAY))
    (tree,), (work,) = answer.trees, answer.layers
    assert {n.name: n.units[2] for n in tree.children} == {
        k: money.units(v) for k, v in by(report(folder, JOB_DAILY.name), "x_Category").items()
    }
    assert {n.name for _, n in walk(tree) if n.kind == "charge"} == {"estimate:aws/i-laptop"}
    assert [n.name for n in work.children] == ["blocks.0", "(optimizer)", "embed"]


def test_the_present_hour_can_be_run_and_run_again(tmp_path: Path) -> None:
    """Shards of the hour that passes; a later run's shard of the same hour makes the day's next revision."""
    hour = time.time_ns() // HOUR_NS * HOUR_NS
    day = dt.datetime.fromtimestamp(hour // SECOND, dt.UTC).date().isoformat()
    probed.drop(tmp_path / "drop", Host(), Job("one"), two_ranks(hour, sampled=(3,)))
    first, _ = night(tmp_path, day)
    assert first.failed == {} and first.commits == {day: 1}
    probed.drop(tmp_path / "drop", Host(), Job("two"), two_ranks(hour + 200 * SECOND, sampled=(3,)), seq=1)
    second, _ = night(tmp_path, day)
    assert second.failed == {} and second.commits == {day: 2} and second.causes == {day: "shard"}
    rows = report(tmp_path, JOB_DAILY.name, day)
    assert by(rows, "x_JobId", value="x_GpuNs") == {"one": SPAN - SECOND, "two": SPAN - SECOND}
    whole = money.half_even(price() * 2 * (SPAN - SECOND), HOUR_NS)
    assert sum(r["x_EstimatedCost"] for r in rows) == money.decimal(whole)


def test_a_run_over_midnight_has_its_money_on_both_days(tmp_path: Path) -> None:
    """The step that runs at midnight is cut there; a save lies across it as well."""
    start = MIDNIGHT - 30 * SECOND - 650 * MS
    probed.drop(tmp_path / "drop", Host(), Job(), two_ranks(start, sampled=(3, 50), save_at=30))
    run, _ = night(tmp_path)
    assert run.failed == {} and run.days == ["2026-10-03", DAY]
    rows = {day: report(tmp_path, JOB_DAILY.name, day) for day in run.days}
    ns = {day: sum(r["x_GpuNs"] for r in found) for day, found in rows.items()}
    assert ns == {"2026-10-03": MIDNIGHT - start, DAY: SPAN - (MIDNIGHT - start)}
    for day, found in rows.items():
        assert sum(r["x_EstimatedCost"] for r in found) == money.decimal(money.half_even(price() * ns[day], HOUR_NS))
        assert {"work", "input_stall", "checkpoint", "communication"} <= {r["x_Category"] for r in found}
    assert sum(r["x_GpuNs"] for found in rows.values() for r in found if r["x_Category"] == "checkpoint") == SECOND


def test_steps_longer_than_windows_do_not_count_twice(tmp_path: Path) -> None:
    """An hour of steps of a minute that the ranks end in different windows: it was refused as twice the hour."""
    start = MIDNIGHT + 10 * HOUR_NS - 5 * SECOND
    runs = [
        [Unit(at, at + SECOND, at + 60 * SECOND) for at in range(start + skew, start + 3800 * SECOND, 60 * SECOND)]
        for skew in (0, 6 * SECOND)
    ]
    probed.drop(tmp_path / "drop", Host(), Job(), runs)
    run, _ = night(tmp_path)
    assert run.failed == {}
    rows = report(tmp_path, RESOURCE_DAILY.name)
    assert HOUR_NS <= sum(r["x_GpuNs"] for r in rows) <= runs[1][-1].end_ns - start + 20 * SECOND


def test_no_sample_is_split_by_formula_and_no_formula_is_not_split(tmp_path: Path) -> None:
    start = MIDNIGHT + 10 * HOUR_NS
    probed.drop(tmp_path / "drop", Host(), Job(), two_ranks(start))
    night(tmp_path)
    rows = [r for r in report(tmp_path, LAYER_DAILY.name) if r["x_Category"] == "work"]
    ns = {r["x_Pass"]: r["x_Ns"] for r in rows}
    assert ns["bwd"] == 2 * ns["fwd"] and sum(ns.values()) == 700 * MS * STEPS
    for path in sorted((tmp_path / "drop").rglob("*.parquet")):
        if "op_windows" in str(path):
            path.unlink()
    run, _ = night(tmp_path, lake="without_ops")
    assert run.failed == {} and "work" not in {t["x_Category"] for t in run.totals}
    seen = by(report(tmp_path, JOB_DAILY.name, lake="without_ops"), "x_Category", value="x_GpuNs")
    assert seen["unattributed_busy"] == 700 * MS * STEPS


@pytest.mark.parametrize(
    "host",
    [
        Host(cloud="gcp", instance_id="1234567890", instance_type="a2-highgpu-1g"),
        Host(
            cloud="azure",
            instance_id="/subscriptions/S/resourceGroups/RG/providers/Microsoft.Compute/virtualMachines/VM",
            instance_type="Standard_NC4as_T4_v3",
        ),
    ],
    ids=["gcp", "azure"],
)
def test_other_clouds_are_priced_too(host: Host, tmp_path: Path) -> None:
    probed.drop(tmp_path / "drop", host, Job(), two_ranks(MIDNIGHT, sampled=(3,)))
    run, _ = night(tmp_path)
    span = SPAN - SECOND
    assert run.failed == {}
    found = sum(r["x_EstimatedCost"] for r in report(tmp_path, JOB_DAILY.name))
    assert found == money.decimal(money.half_even(price(host) * span, HOUR_NS))


def test_gpus_that_nobody_saw_are_unobserved(tmp_path: Path) -> None:
    """A machine of eight GPUs of which one device was seen: seven eighths of its money is unobserved, never idle."""
    host = Host(instance_type="p4d.24xlarge")
    probed.drop(tmp_path / "drop", host, Job(), two_ranks(MIDNIGHT, sampled=(3,)))
    night(tmp_path)
    found = by(report(tmp_path, RESOURCE_DAILY.name), "x_Category")
    whole = money.half_even(price(host) * (SPAN - SECOND), HOUR_NS)
    assert money.units(sum(found.values())) == whole and "idle" not in found
    assert abs(money.units(found["unobserved"]) - whole * 7 // 8) <= 1


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (Host(cloud=None, instance_id=None, instance_type=None), "59.7 s observed on hosts that no shard places"),
        (Host(instance_type="m5.large"), "no list price is known for aws m5.large"),
        (Host(instance_type=None), "no list price is known for aws (type not stated)"),
    ],
)
def test_time_without_money_is_told_each_night(host: Host, said: str, tmp_path: Path) -> None:
    probed.drop(tmp_path / "drop", host, Job(), two_ranks(MIDNIGHT, sampled=(3,)))
    for _ in range(2):
        run, _ = night(tmp_path)
        assert run.failed == {} and run.totals == []
        assert [line for line in notes(run) if said in line]
