"""`plan`, `verify`, `sweep` and `rebuild` as flows under Prefect and from a shell."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import ArtifactSort

from flows import maintain, params
from flows.shell import main
from tests import nights
from tests.fleet import build, tiny_spec, write_fleet

pytestmark = pytest.mark.usefixtures("prefect_harness")
SPEC = tiny_spec(12, day="2026-10-05", tax=False)
MODELS = {"plan": params.Plan, "verify": params.Verify, "sweep": params.Sweep, "rebuild": params.Rebuild}
Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fleet, the lake of a night over it, and its settings file."""
    folder = tmp_path_factory.mktemp("maintained")
    write_fleet(build(SPEC), folder)
    nights.run(nights.settings_for(folder, folder / "lake"), SPEC.day)
    text = 'lake = "lake"\ntelemetry = "telemetry"\nworkers = 1\n[[bills]]\nname = "aws"\nurl = "bills/aws"\n'
    (folder / "seedance.toml").write_text(text)
    return folder


@pytest.fixture
def shell(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Runs a command; its exit status, and what it printed to each stream."""

    def run(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, "--settings", str(folder / "seedance.toml"), *words])
        flow = getattr(importlib.import_module(f"flows.{name}"), name)
        status = main(flow, MODELS[name], name, for_programs=maintain.as_dict, for_people=maintain.tell)
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def answered(shell: Shell, name: str, *words: str) -> tuple[int, dict[str, Any]]:
    status, out, _ = shell(name, *words, "--json")
    return status, json.loads(out)


async def artifact(key: str) -> str:
    """The newest artifact of a key."""
    async with get_client() as server:
        found = await server.read_artifacts(sort=ArtifactSort.CREATED_DESC)
    return next(str(a.data) for a in found if a.key == key)


def test_plan(shell: Shell) -> None:
    status, out, _ = shell("plan", "--last-day", SPEC.day)
    assert status == 0 and "no day is due" in out
    status, facts = answered(shell, "plan", "--last-day", SPEC.day, "--first-day", SPEC.day)
    assert (status, facts["due"], facts["failed"]) == (0, [], {})
    assert (facts["first_day"], facts["last_day"]) == (SPEC.day, SPEC.day)
    assert f"looked at {SPEC.day} to {SPEC.day}: no day is due" in asyncio.run(artifact("plan-answer"))
    status, _, told = shell("plan", "--last-day", "2999-01-01")
    assert status == 2 and "is in the future" in told


def test_verify_ends_with_1_when_something_is_lost_and_repairs(shell: Shell, folder: Path) -> None:
    status, out, _ = shell("verify")
    assert status == 0 and "all as committed" in out
    (report,) = folder.glob("lake/report/report_cost__job_daily/usage_date=*/data.parquet")
    report.write_bytes(report.read_bytes()[:-1])
    status, facts = answered(shell, "verify")
    assert status == 1
    assert [one["path"] for one in facts["lost"]] == [report.relative_to(folder / "lake").as_posix()]
    status, out, told = shell("verify")
    assert status == 1 and "python -m flows.verify --repair" in told and "1 lost" in out
    status, facts = answered(shell, "verify", "--repair")
    assert (status, facts["lost"]) == (0, []) and len(facts["repaired"]) == 1
    assert answered(shell, "verify")[0] == 0


def test_sweep_says_bytes_and_deletes_only_when_told(shell: Shell, folder: Path) -> None:
    for n in (1, 2):  # another run had the day since
        (folder / "lake" / "leases" / "2026-01-01").mkdir(parents=True, exist_ok=True)
        (folder / "lake" / "leases" / "2026-01-01" / f"{n}.json").write_text("{}")
    status, out, _ = shell("sweep")
    assert status == 0 and "bytes would be deleted (dry run; --delete does it)" in out
    status, facts = answered(shell, "sweep")
    assert (status, facts["deleted"], facts["leases"]) == (0, False, {"leases/2026-01-01/1.json": 2})
    status, out, _ = shell("sweep", "--delete")
    assert status == 0 and "bytes deleted" in out
    assert answered(shell, "sweep")[1]["leases"] == {}
    assert answered(shell, "verify")[0] == 0


def test_rebuild(shell: Shell, folder: Path, tmp_path: Path) -> None:
    status, facts = answered(shell, "rebuild", "--into", str(tmp_path / "new"))
    assert (status, facts["commits"]) == (0, {SPEC.day: 1})
    assert facts["reports"]["same"] and not facts["reports"]["differ"]
    nameless = folder / "nameless.toml"
    nameless.write_text('lake = "lake"\nworkers = 1\n')
    status, facts = answered(shell, "rebuild", "--settings", str(nameless), "--into", str(tmp_path / "nameless"))
    assert (status, facts["reports"]["differ"], facts["copied"]["sources"]) == (0, [], ["aws"])
    (report,) = folder.glob("lake/report/report_cost__job_daily/usage_date=*/data.parquet")
    whole = report.read_bytes()
    report.write_bytes(whole[:-1])
    status, _, told = shell("rebuild", "--into", str(tmp_path / "differs"))
    report.write_bytes(whole)
    assert status == 1 and f"failed {report.relative_to(folder / 'lake').as_posix()}: its bytes differ" in told
    status, _, told = shell("rebuild", "--into", str(folder / "lake"))
    assert status == 1 and "Expected a folder or URL where there is no lake yet" in told


@pytest.mark.parametrize("name", MODELS)
def test_every_command_has_help(name: str, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        shell(name, "--help")
    assert ended.value.code == 0 and "--json" in capsys.readouterr().out
