"""What the README shows is what happens: the money table of the bundled day, and the lines that read the reports."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import duckdb
import pytest
import torch

import seedance
from flows.shell import tell
from seedance.probe.settings import NAMES
from tests import nights

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lake of the bundled day in `lake/`, as `make nightly` leaves it."""
    folder = tmp_path_factory.mktemp("checkout")
    nights.run(nights.settings_for(ROOT / "samples", folder / "lake", buckets=8), "2026-10-01")
    return folder


def code(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)[number]


def test_the_money_table_is_the_one_that_is_printed(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell(nights.run(nights.settings_for(ROOT / "samples", lake / "lake"), "2026-10-01"))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = README[README.index("Where the money of") : README.index("2026-10-01: revision")].splitlines()
    assert len(shown) > 20
    assert [line for line in shown if line and line not in printed] == []


def test_the_run_of_one_s_own_machine_adds_up_as_it_is_shown() -> None:
    """What `make try` printed once: categories to the estimate, layers to the work. That it still prints so: test_try.py."""
    section = README[README.index("## Try it on your own machine") : README.index("## Ask it")]
    table = dict(re.findall(r"│ aws +│ (\w+) +│ +│ +│ ([0-9.]+) │ USD", section))
    (total,) = re.findall(r"│ +│ addressed +│ +│ +│ ([0-9.]+) │ USD", section)
    assert sum(map(Decimal, table.values())) == Decimal(total) and {"input_stall", "checkpoint"} < set(table)
    assert dict(re.findall(r"── category (\w+)  x_EstimatedCost ([0-9.]+)", section)) == table
    work = re.findall(r"── (?:layer .*|… \d+ more)  x_EstimatedCost ([0-9.]+)", section)
    assert sum(map(Decimal, work)) == Decimal(table["work"]) and len(work) > 10


def test_options_of_the_readme_are_settings_of_the_probe() -> None:
    words = re.findall(
        r"--([a-z-]+)", README[README.index("torchrun --standalone") : README.index("samples/try/train.py\n")]
    )
    assert len(words) > 5
    assert {w for w in words if w.replace("-", "_") not in NAMES} == {"standalone", "nproc-per-node"}


def test_the_duckdb_lines_give_the_same_money(lake: Path) -> None:
    query = code("sql").replace("lake/report", str(lake / "lake" / "report"))
    rows = duckdb.sql(query).fetchall()
    text = {r[:3]: (f"{r[3]:,.12f}", f"{r[4]:,.12f}") for r in rows}
    assert len(text) > 50
    for (cloud, currency, category), (cash, amortised) in text.items():
        line = rf"│ {cloud} +│ {category} +│ +{re.escape(cash)} │ +{re.escape(amortised)} │ +│ {currency} "
        assert re.search(line, README), (cloud, category)


def test_the_lines_down_to_the_device_find_idle_money(lake: Path) -> None:
    statements = code("sql", 1).replace("'lake/", f"'{lake}/lake/").split(";\n")
    with duckdb.connect() as engine:
        engine.execute(statements[0])
        rows = engine.execute(statements[1]).fetchall()
    assert len(rows) == 5 and all(device.startswith("GPU-") and money > 0 for _, device, money in rows)


def test_the_pandas_lines_run(lake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(lake)
    exec(compile(code("python", 1), "README.md", "exec"), {})
    assert "commitment_purchase" in capsys.readouterr().out


def test_the_lines_that_attach_the_probe_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    text = code("python").replace("s3://telemetry/shards", str(tmp_path / "shards"))
    batch = SimpleNamespace(x=torch.randn(4, 8), y=torch.zeros(4, dtype=torch.long))
    known = {"seedance": seedance, "model": torch.nn.Linear(8, 3), "loader": [batch] * 3}
    exec(compile(text, "README.md", "exec"), known | {"cross_entropy": torch.nn.functional.cross_entropy})
    spooled = "".join(path.read_text() for path in (tmp_path / "state").rglob("*.jsonl"))
    assert '"statement":"result"' in spooled and '"quality_metric":"accuracy"' in spooled


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([a-z]+)`", README)) | set(re.findall(r"^make ([a-z]+)$", README, re.M))
    assert named and named <= targets
