"""The flows under Prefect: nightly and each stage alone, their artifacts, their command lines and what they refuse."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from flows.backfill import backfill
from flows.bill import bill
from flows.collect import collect
from flows.night import NightFailed, Run
from flows.nightly import nightly
from flows.params import Backfill, Bills, Nightly, OneDay
from flows.publish import publish
from flows.reconcile import reconcile
from flows.reduce import reduce
from flows.shell import main
from tests import nights
from tests.fleet import FleetSpec, build, tiny_spec, write_fleet

pytestmark = pytest.mark.usefixtures("prefect_harness")


@pytest.fixture
def fleet(tmp_path: Path) -> tuple[FleetSpec, str]:
    """A tiny fleet and a settings file over it."""
    spec = tiny_spec(12, day="2026-10-05", tax=False)
    write_fleet(build(spec), tmp_path)
    file = tmp_path / "seedance.toml"
    file.write_text('lake = "lake"\ntelemetry = "telemetry"\nworkers = 1\n[[bills]]\nname = "aws"\nurl = "bills/aws"\n')
    return spec, str(file)


def test_nightly_publishes_and_leaves_artifacts(fleet: tuple[FleetSpec, str], tmp_path: Path) -> None:
    spec, file = fleet
    run: Run = asyncio.run(nightly(Nightly(settings=file, day=spec.day)))
    assert run.failed == {} and run.commits[spec.day] == 1
    assert (
        tmp_path / "lake" / "report" / "report_cost__job_daily" / f"usage_date={spec.day}" / "data.parquet"
    ).exists()
    page, table = asyncio.run(_artifacts("nightly"))
    assert spec.day in page and "| reconcile_days |" in page
    rows = json.loads(table)
    assert [r["BilledCost"] for r in rows if r["category"] == "difference"] == ["0.000000000000"]


async def _artifacts(name: str) -> tuple[str, str]:
    async with get_client() as client:
        found = {a.key: a.data for a in await client.read_artifacts()}
    return str(found[f"{name}-run"]), str(found[f"{name}-money"])


def test_each_stage_runs_alone_and_ends_in_what_the_night_publishes(
    fleet: tuple[FleetSpec, str], tmp_path: Path
) -> None:
    spec, file = fleet
    day = OneDay(settings=file, day=spec.day)
    assert asyncio.run(bill(Bills(settings=file, day=spec.day))).deliveries[0]["status"] == "accepted"
    assert asyncio.run(collect(day)).admitted > 0
    assert [s["computed"] for s in asyncio.run(reduce(day)).stages if s["stage"] == "reduce_days"] == [1]
    totals = asyncio.run(reconcile(day)).totals
    assert not (tmp_path / "lake" / "days").exists()
    assert asyncio.run(publish(day)).commits == {spec.day: 1}
    night = nights.settings_for(tmp_path, tmp_path / "other")
    assert {t["x_Category"] for t in nights.run(night, spec.day).totals} == {t["x_Category"] for t in totals}


def test_backfill_runs_a_range_and_recode_only_what_changed(fleet: tuple[FleetSpec, str]) -> None:
    spec, file = fleet
    wanted = Backfill(settings=file, first_day=spec.day, last_day=spec.day, recode=True)
    first = asyncio.run(backfill(wanted))
    assert first.commits == {spec.day: 1}
    assert asyncio.run(backfill(wanted)).causes == {}


def test_a_failed_source_fails_the_flow_after_publishing_the_rest(fleet: tuple[FleetSpec, str], tmp_path: Path) -> None:
    spec, file = fleet
    with Path(file).open("a") as out:
        out.write('[[bills]]\nname = "other"\nurl = "nowhere"\n')
    with pytest.raises(NightFailed, match=r"1 failed, the rest is published.*nowhere") as caught:
        asyncio.run(nightly(Nightly(settings=file, day=spec.day)))
    assert caught.value.facts["run"].commits == {spec.day: 1}
    with pytest.raises(NightFailed, match=r"1 failed, no day was due and no day is published anew\. .*nowhere"):
        asyncio.run(nightly(Nightly(settings=file, day=spec.day)))


def test_the_command_line_prints_for_people_and_programs(
    fleet: tuple[FleetSpec, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, file = fleet
    monkeypatch.setattr(sys, "argv", ["nightly", "--settings", file, "--day", spec.day])
    assert main(nightly, Nightly, "nightly") == 0
    assert "difference" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["nightly", "--settings", file, "--day", spec.day, "--json"])
    assert main(nightly, Nightly, "nightly") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["commits"] == {spec.day: 1} and told["causes"] == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--day", "2999-01-01"], "--day: Value error, 2999-01-01 is in the future"),
        (["--day", "yesterday"], "--day: Input should be a valid date"),
    ],
)
def test_the_command_line_refuses_bad_arguments(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nightly", *words])
    assert main(nightly, Nightly, "nightly") == 2
    assert message in capsys.readouterr().err


def test_an_unknown_settings_key_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seedance.toml").write_text('lake = "lake"\ntelemetri = "x"\n')
    monkeypatch.setattr(sys, "argv", ["nightly", "--settings", str(tmp_path / "seedance.toml"), "--day", "2026-10-05"])
    assert main(nightly, Nightly, "nightly") == 1
    assert "telemetri" in (told := capsys.readouterr().err) and "telemetry" in told


@pytest.mark.parametrize("name", ["nightly", "backfill", "collect", "reduce", "bill", "reconcile", "publish"])
def test_every_flow_has_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"flows.{name}")
    model = {"nightly": Nightly, "backfill": Backfill, "bill": Bills}.get(name, OneDay)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main(getattr(module, name), model, name)
    assert ended.value.code == 0 and "--json" in capsys.readouterr().out
