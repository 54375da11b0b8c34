"""`make try`: a real training run on this machine, its shards, the night, and what is said of the money at the end.

One run for all tests here: two ranks over gloo, one checkpoint, one slow loader worker, and nothing made up.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from schemas.ledger import ADDRESSES, JOB_DAILY, LAYER_DAILY
from schemas.usage import DEVICE_HOURLY
from seedance.catalogue import gpu_instance
from seedance.schema import TELEMETRY
from tasks.core import money
from tasks.core.spans import HOUR_NS
from tasks.io.lake import Lake

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, CONTEXT, WIDTH, VOCABULARY, RANKS = 48, 8, 128, 128, 256, 2
LINEAR = {  # matrix products of a token, in and out
    "head": (WIDTH, VOCABULARY),
    **{f"blocks.{i}.attention.qkv": (WIDTH, 3 * WIDTH) for i in range(3)},
    **{f"blocks.{i}.attention.out": (WIDTH, WIDTH) for i in range(3)},
    **{f"blocks.{i}.mlp.0": (WIDTH, 4 * WIDTH) for i in range(3)},
    **{f"blocks.{i}.mlp.2": (4 * WIDTH, WIDTH) for i in range(3)},
}
OTHER_LAYERS = {"embed", "position", "norm", "(optimizer)", *(f"blocks.{i}.attention" for i in range(3))}


class Tried:
    """What one run left behind."""

    def __init__(self, folder: Path, printed: str) -> None:
        self.folder, self.printed = folder, printed
        self.lake = Lake.open(str(folder / "lake"))
        self.days = self.lake.committed_days()
        (self.job,) = set(re.findall(r"--job (\S+)", printed))

    def report(self, name: str) -> list[dict[str, Any]]:
        """Rows of a daily report over the days of the run: one, or two around midnight."""
        files = [self.folder / "lake/report" / name / f"usage_date={day}/data.parquet" for day in self.days]
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def table(self, spec: Any) -> list[dict[str, Any]]:
        """Rows of a table of the days' heads."""
        heads = [self.lake.head(day) for day in self.days]
        return [row for head in heads if head for row in self.lake.read(head.handles[spec.name], spec).to_pylist()]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    folder = tmp_path_factory.mktemp("try")
    before = set((ROOT / "samples" / "try").iterdir())
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEEDANCE_")}
    done = subprocess.run(
        [sys.executable, "samples/try", str(folder)],
        cwd=ROOT,
        env=clean | {"PREFECT_HOME": str(folder / "prefect"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-5_000:]
    assert set((ROOT / "samples" / "try").iterdir()) - before <= {ROOT / "samples/try/__pycache__"}
    return Tried(folder, done.stdout)


def sums(rows: list[dict[str, Any]], column: str, value: str = "x_EstimatedCost") -> dict[str, Any]:
    found: dict[str, Any] = defaultdict(Decimal)
    for row in rows:
        found[row[column]] += row[value] or 0
    return dict(found)


def test_the_estimate_is_the_list_price_of_the_time_that_the_device_was_seen(tried: Tried) -> None:
    instance = gpu_instance("aws", "g4dn.xlarge")
    assert instance is not None and instance.on_demand_usd_per_hour is not None
    price = money.units(instance.on_demand_usd_per_hour)
    seen = sums(tried.table(DEVICE_HOURLY), "hour_utc", "ns")
    wanted = {hour: money.decimal(money.half_even(price * int(ns), HOUR_NS)) for hour, ns in seen.items()}
    addresses = tried.table(ADDRESSES)
    assert sums(addresses, "x_HourUtc") == wanted
    assert {r["x_State"] for r in addresses} == {"provisional"}
    assert {r["x_JobId"] for r in addresses} == {tried.job} and {r["x_Rank"] for r in addresses} == {0, 1}
    assert {r["x_DeviceId"].split(":")[0] for r in addresses} == {"cpu"}
    assert sum(sums(tried.report(JOB_DAILY.name), "x_Category").values()) == sum(wanted.values())


def test_the_money_is_in_the_categories_that_the_run_was_made_for(tried: Tried) -> None:
    found = sums(tried.report(JOB_DAILY.name), "x_Category")
    for name in ("work", "communication", "checkpoint", "input_stall", "held_idle"):
        assert found.pop(name) > 0, name
    assert found.keys() <= {"unattributed_busy"}
    assert (tried.folder / "checkpoints" / "half.pt").stat().st_size > 1_000_000


def test_the_layers_of_the_model_have_the_work_digit_for_digit(tried: Tried) -> None:
    rows = [r for r in tried.report(LAYER_DAILY.name) if r["x_Category"] == "work"]
    by_layer = sums(rows, "x_Layer")
    assert sum(by_layer.values()) == sums(tried.report(JOB_DAILY.name), "x_Category")["work"]
    for layer in {*LINEAR, *OTHER_LAYERS}:
        assert by_layer[layer] > 0, layer
    assert all(r["x_Dtype"] == "fp32" and r["x_BatchSize"] == BATCH for r in rows if r["x_Layer"] in LINEAR)


def test_flops_are_those_of_the_shapes(tried: Tried) -> None:
    """Every counted step of both ranks, forward once and backward twice; the first step goes by before the model is known."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for row in tried.report(LAYER_DAILY.name):
        if row["x_Layer"] in LINEAR and row["x_Op"] == "matmul":
            found[row["x_Layer"], row["x_Pass"]] += int(row["x_Flops"])
    steps = STEPS - 1
    assert found == {
        (layer, pass_): times * RANKS * steps * 2 * BATCH * CONTEXT * k * n
        for layer, (k, n) in LINEAR.items()
        for pass_, times in (("fwd", 1), ("bwd", 2))
    }
    units = {(r["x_UsageDate"], r["x_Units"], r["x_Samples"], r["x_TokensIn"]) for r in tried.report(JOB_DAILY.name)}
    assert sum(u for _, u, _, _ in units) == steps
    assert sum(s for _, _, s, _ in units) == RANKS * steps * BATCH
    assert sum(t for _, _, _, t in units) == RANKS * steps * BATCH * CONTEXT


def test_what_is_printed_names_them_and_adds_up(tried: Tried) -> None:
    amounts = {name: f"{value:.12f}" for name, value in sums(tried.report(JOB_DAILY.name), "x_Category").items()}
    for name, amount in amounts.items():
        assert re.search(rf"│ aws +│ {name} +│ +│ +│ {amount} │ USD", tried.printed)
        assert f"category {name}  x_EstimatedCost {amount}" in tried.printed
    work = tried.printed[tried.printed.index("work of job") :]
    parts = [Decimal(p) for p in re.findall(r"[├└]── .*x_EstimatedCost ([0-9.]+)", work)]
    assert len(parts) > 10 and sum(parts) == Decimal(amounts["work"])
    assert "layer blocks.0.mlp.0 " in work and "everything is an estimate" in tried.printed
    for day in tried.days:
        page = (tried.folder / "lake/page" / f"usage_date={day}" / "report.html").read_text()
        assert "blocks.2.attention.qkv" in page and tried.job in page


def test_every_row_that_was_measured_counts(tried: Tried) -> None:
    assert not list((tried.folder / "lake").glob("quarantine/**/*.json"))
    shards = sorted((tried.folder / "telemetry").rglob("*.parquet"))
    assert {s.relative_to(tried.folder / "telemetry").parts[0] for s in shards} == {
        name for name in TELEMETRY if name.split("__")[1] in ("jobs", "step_windows", "op_windows")
    }
    assert not list((tried.folder / "spool").rglob("*.jsonl"))
    losses = re.findall(r"step (\d+): loss (\d+\.\d+)", tried.printed)
    assert [int(step) for step, _ in losses] == [12, 24, 36, 48]
