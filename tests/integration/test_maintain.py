"""What people run beside the nights: plan, verify and its repair, sweep, rebuild; and two nights at once."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flows.maintain import Answer, plan_answer, rebuild_answer, sweep_answer, verify_answer
from flows.night import Run, run_stage
from schemas.ledger import SPANS
from seedance.canonical import canonical
from seedance.shard import parse_name
from tasks import maintain, publish
from tasks.core.garbage import DAY_NS
from tasks.errors import LawError, UsageError
from tasks.io import leases
from tasks.io.lake import Lake
from tasks.settings import BillSource, Settings
from tasks.steps import directly
from tasks.summary import notes
from tests import nights
from tests.fleet import build, tiny_spec, write_fleet

ROOT = Path(__file__).resolve().parents[2]
SPEC = tiny_spec(13, spot=True, gap=True, dark=True)
DAY = SPEC.day
FIRST = (dt.date.fromisoformat(DAY) - dt.timedelta(days=35)).isoformat()
"""The first day of a look-back of 35 days."""
KILLED_NIGHT = """
import os, signal, sys
from pathlib import Path
from tasks.io.lake import Lake
from tests import nights

def kill(moment, operation, path):
    if (moment, operation) == ("before", "create") and path.startswith("days/"):
        os.kill(os.getpid(), signal.SIGKILL)

opened = Lake.open
Lake.open = lambda url, *, buckets=8: opened(url, buckets=buckets, watch=kill)
nights.run(nights.settings_for(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[3])
"""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny fleet, and the lake of an undisturbed night over it."""
    folder = tmp_path_factory.mktemp("calm")
    write_fleet(build(SPEC), folder / "fleet")
    assert nights.run(nights.settings_for(folder / "fleet", folder / "lake"), DAY).failed == {}
    return folder


@pytest.fixture
def lake(calm: Path, tmp_path: Path) -> Path:
    """A copy of that lake."""
    shutil.copytree(calm / "lake", tmp_path / "lake")
    return tmp_path / "lake"


@pytest.fixture
def settings(calm: Path, lake: Path) -> Settings:
    return nights.settings_for(calm / "fleet", lake, lease_seconds=1)


def verified(settings: Settings, *, repair: bool = False) -> Answer:
    return asyncio.run(verify_answer(settings, None, None, repair, directly))


def planned(settings: Settings, *, recode: bool = False) -> Answer:
    return asyncio.run(plan_answer(settings, DAY, None, recode, directly))


def lost(answer: Answer) -> set[str]:
    return {one["path"] for one in answer.facts["lost"]}


def committed_files(lake: Path) -> list[str]:
    """Everything that the committed day stands on: its commit, its record, its objects, what is published of it."""
    store = Lake.open(str(lake))
    head = store.head(DAY)
    assert head is not None
    parts = [part.path for handle in head.handles.values() for part in handle.parts]
    prices = [part["path"] for part in head.body["prices"]["parts"]]
    shown = [f"report/{name}/usage_date={DAY}/data.parquet" for name in head.handles if name.startswith("report_")]
    return sorted({f"days/{DAY}/1.json", f"report/_days/{DAY}.json", *parts, *prices, *shown})


def shards_of_an_hour(lake: Path) -> list[Path]:
    """All shards of the last hour that has some."""
    hours = sorted({p.name for p in (lake / "raw").glob(f"*/date={DAY}/hour=*")})
    return sorted((lake / "raw").glob(f"*/date={DAY}/{hours[-1]}/*.parquet"))


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_finds_whatever_is_deleted_or_altered(settings: Settings, lake: Path) -> None:
    assert verified(settings).failed == {}
    files = committed_files(lake)
    assert len(files) > 15
    for name in files:
        file = lake / name
        whole = file.read_bytes()
        altered = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
        for harmed in (None, altered, whole[: len(whole) // 2]):
            file.unlink(missing_ok=True)
            if harmed is not None:
                file.write_bytes(harmed)
            answer = verified(settings)
            assert name in lost(answer), (
                f"{name}: {'gone' if harmed is None else f'{len(harmed)} of {len(whole)} bytes'}"
            )
            assert "python -m flows.verify --repair" in answer.failed[name]
        file.write_bytes(whole)
    assert verified(settings).failed == {}


def every_object(lake: Path) -> list[Path]:
    return [lake / name for name in committed_files(lake) if name.startswith(("objects/", "report/"))]


def one_of_each_altered(lake: Path) -> list[Path]:
    """The addresses, the charges and a report keep their size and lose their content."""
    names = [n for n in committed_files(lake) if "core_cost__addresses" in n or "charges" in n or "data.parquet" in n]
    partials = sorted((lake / "objects").glob("partial_*/*.parquet")) or sorted((lake / "objects").glob("*usage*/*"))
    return [lake / name for name in names] + partials[:3]


@pytest.mark.parametrize(
    ("which", "alter"),
    [(every_object, False), (one_of_each_altered, True), (lambda lake: [lake / f"days/{DAY}/1.json"], False),
     (lambda lake: [lake / f"days/{DAY}/1.json"], True)],
    ids=["everything gone", "some altered", "commit gone", "commit cut"],
)  # fmt: skip
def test_repair_brings_back_the_same_bytes(
    settings: Settings, lake: Path, calm: Path, which: Callable[[Path], list[Path]], alter: bool
) -> None:
    files = which(lake)
    assert files
    for file in files:
        data = file.read_bytes()
        file.unlink()
        if alter:
            file.write_bytes(data[:9] + b"\x00" + data[10:])
    assert verified(settings).failed != {}
    answer = verified(settings, repair=True)
    assert answer.failed == {}
    assert set(answer.facts["repaired"]) >= {f.relative_to(lake).as_posix() for f in files if "partial_" not in str(f)}
    assert nights.published(lake) == nights.published(calm / "lake")
    assert nights.run(settings, DAY).causes == {}, "the day is as it was: nothing is due"


def test_a_commit_that_was_cut_is_kept_aside(settings: Settings, lake: Path) -> None:
    file = lake / f"days/{DAY}/1.json"
    file.write_bytes(file.read_bytes()[:100])
    assert verified(settings, repair=True).failed == {}
    (aside,) = (lake / "quarantine" / "commits").glob("*.json")
    assert json.loads(aside.read_text())["path"] == f"days/{DAY}/1.json"
    assert aside.with_suffix(".bytes").stat().st_size == 100


def test_what_cannot_be_had_again_is_named_with_what_helps(settings: Settings, lake: Path) -> None:
    shard = min((lake / "raw").glob("*device_samples/**/*.parquet"))
    shard.unlink()
    (gone,) = [lake / n for n in committed_files(lake) if "core_cost__addresses" in n]
    gone.unlink()
    name = gone.relative_to(lake).as_posix()
    answer = verified(settings.model_copy(update={"telemetry": None}), repair=True)
    assert lost(answer) == {name}
    assert f"python -m flows.publish --day {DAY}" in answer.failed[name]
    assert len(Lake.open(str(lake)).commits(DAY)) == 1, "a repair commits nothing that was not committed before"
    run = asyncio.run(run_stage(settings, DAY, directly, "publish"))  # what the answer names helps
    assert (run.failed, run.commits) == ({}, {DAY: 2}) and verified(settings).failed == {}


def test_a_former_commit_that_is_lost_is_told_with_what_helps(settings: Settings, lake: Path) -> None:
    (lake / "days" / DAY / "1.json").rename(lake / "days" / DAY / "2.json")
    answer = verified(settings, repair=True)
    assert lost(answer) == {f"days/{DAY}/1.json"}
    assert answer.failed[f"days/{DAY}/1.json"].endswith("nothing computes again: put it back from a copy of the lake")


def test_nothing_that_was_read_is_not_everything_that_is_whole(settings: Settings) -> None:
    answer = asyncio.run(verify_answer(settings, "2030-01-01", None, False, directly))
    assert "no day is committed" in answer.lines[0] and "nothing was read" in answer.lines[0]


def test_a_page_that_is_lost_or_of_a_former_commit_is_made_again(settings: Settings, lake: Path) -> None:
    page = lake / "page" / f"usage_date={DAY}" / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert nights.run(settings, DAY).causes == {} and page.read_bytes() == before
    min((lake / "raw").glob("*device_samples/**/*.parquet")).unlink()
    quiet = settings.model_copy(update={"telemetry": None})
    assert asyncio.run(run_stage(quiet, DAY, directly, "publish")).commits == {DAY: 2}
    assert b"Revision 1 of the day" in page.read_bytes()
    assert nights.run(quiet, DAY).causes == {} and b"Revision 2 of the day" in page.read_bytes()


# --- plan -----------------------------------------------------------------------------------------------------------


def test_plan_says_what_is_due_and_what_is_missing(settings: Settings, lake: Path, calm: Path, tmp_path: Path) -> None:
    fresh = nights.settings_for(calm / "fleet", tmp_path / "fresh")
    answer = planned(fresh)
    waiting = len(list((calm / "fleet" / "telemetry").rglob("*.parquet")))
    assert (answer.rows, sum(answer.facts["waiting"].values())) == ([], waiting)
    answer = planned(settings)
    assert (answer.facts["due"], answer.facts["first_day"], answer.facts["last_day"]) == ([], FIRST, DAY)
    assert answer.lines[0] == f"looked at {FIRST} to {DAY}: no day is due: nothing would be computed"
    dark = {m.instance_id for m in build(SPEC).machines if not m.has_agent}
    assert {m["name"] for m in answer.facts["completeness"][DAY]["missing"] if m["reason"] == "billed"} == dark != set()
    assert any("billed, and no telemetry names it" in line for line in answer.lines)
    for shard in shards_of_an_hour(lake):  # the same hosts again, two hours later
        later = shard.parent.with_name("hour=03") / shard.name
        later.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shard, later)
    hosts = {parse_name(shard.relative_to(lake).as_posix()).producer for shard in shards_of_an_hour(lake)}
    answer = planned(settings)
    (due,) = answer.facts["due"]
    assert (due["day"], due["cause"], due["head"], due["revision"]) == (DAY, "shard", 1, 2)
    assert answer.lines[0] == f"looked at {FIRST} to {DAY}: 1 day(s) due"
    complete = answer.facts["completeness"][DAY]
    assert {m["name"]: m["hours"] for m in complete["missing"] if m["reason"] == "gap"} == dict.fromkeys(hosts, "2")
    assert (complete["seen"][2], complete["expected"][2], complete["seen"][3]) == (0, len(hosts), len(hosts))
    assert nights.published(lake) == nights.published(calm / "lake"), "planning changes nothing that readers see"


def test_a_day_of_a_former_release_is_planned(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintain, "SPANS", replace(SPANS, version=SPANS.version + 1))
    answer = planned(settings)
    assert answer.failed == {} and DAY in answer.facts["completeness"]


def test_a_damaged_file_of_the_drop_folder_is_told_though_no_day_is_due(settings: Settings, tmp_path: Path) -> None:
    shard = min(Path(str(settings.telemetry)).glob("*device_samples/**/*.parquet"))
    damaged = tmp_path / "drop" / shard.relative_to(str(settings.telemetry))
    damaged.parent.mkdir(parents=True)
    damaged.with_name(f"{damaged.stem[:-16]}{'ab' * 8}.parquet").write_bytes(shard.read_bytes()[:-9])
    run = nights.run(settings.model_copy(update={"telemetry": str(tmp_path / "drop")}), DAY)
    assert run.causes == {} and run.admitted == 1
    assert "1 file(s) of the drop folder have other bytes than their names say" in run.told[0]


# --- sweep ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_commit_does_not_stop_a_sweep(settings: Settings, lake: Path) -> None:
    (lake / "days" / "notes.txt").write_text("not a commit")
    assert asyncio.run(sweep_answer(settings, False, time.time_ns(), directly)).failed == {}


def test_a_lake_that_was_swept_is_whole_and_goes_on(settings: Settings, lake: Path, calm: Path) -> None:
    now = time.time_ns()
    before = sorted(p for p in lake.rglob("*") if p.is_file())
    dry = asyncio.run(sweep_answer(settings, False, now + 31 * DAY_NS, directly))
    assert dry.facts["steps"] and sorted(p for p in lake.rglob("*") if p.is_file()) == before
    for days in (31, 38):
        swept = asyncio.run(sweep_answer(settings, True, now + days * DAY_NS, directly))
    assert swept.facts["objects"] and swept.facts["bytes"] > 1000
    assert {p.split("/")[0] for p in (*dry.facts["steps"], *swept.facts["objects"])} == {"steps", "objects"}
    assert verified(settings).failed == {}
    assert nights.published(lake) == nights.published(calm / "lake")
    assert nights.run(settings, DAY).causes == {}
    for file in every_object(lake):
        file.unlink()
    assert verified(settings, repair=True).failed == {}, "what was swept can be made again"
    assert nights.published(lake) == nights.published(calm / "lake")


def test_a_sweep_names_what_goes_and_what_waits_and_says_why(settings: Settings, lake: Path) -> None:
    for n in range(12):
        (lake / "objects" / f"lost{n:02}").write_bytes(b"12")
    dry = asyncio.run(sweep_answer(settings, False, time.time_ns() + 31 * DAY_NS, directly))
    gone, waiting = dry.facts["steps"], dry.facts["waiting"]
    assert len(waiting) > 12 and len(gone) > 0
    for when, kind, sizes in (("would be deleted", "step", gone), ("waits", "object", waiting)):
        assert [r[2] for r in dry.rows if r[:2] == (when, kind)] == list(sizes)[:10]
    (line,) = [line for line in dry.lines if line.startswith("waits: ")]
    assert "no kept commit and no step names them" in line
    assert f"; {len(waiting) - 10} more than are named here" in line
    (line,) = [line for line in dry.lines if " step(s)" in line]
    assert "over 30 days old, and no kept commit names an object of theirs" in line


# --- rebuild --------------------------------------------------------------------------------------------------------


def test_a_lake_that_is_made_from_raw_alone_publishes_the_same_bytes(
    settings: Settings, calm: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    nowhere = settings.model_copy(
        update={
            "telemetry": "/nowhere",
            "bills": tuple(b.model_copy(update={"url": "/nowhere"}) for b in settings.bills),
        }
    )
    answer = asyncio.run(rebuild_answer(nowhere, str(new), None, directly))
    assert answer.failed == {} and answer.facts["commits"] == {DAY: 1}
    reports = answer.facts["reports"]
    assert len(reports["same"]) >= 4 and not (reports["differ"] or reports["missing"] or reports["new"])
    old = {n: d for n, d in nights.published(calm / "lake").items() if "usage_date=" in n}
    assert {n: d for n, d in nights.published(new).items() if "usage_date=" in n} == old
    with pytest.raises(UsageError, match="a lake with commits"):
        asyncio.run(rebuild_answer(nowhere, str(new), None, directly))


def test_a_lake_is_made_with_every_bill_that_raw_has_whatever_the_settings_name(
    settings: Settings, calm: Path, tmp_path: Path
) -> None:
    nameless = settings.model_copy(update={"bills": (BillSource(name="other", url="/nowhere"),)})
    answer = asyncio.run(rebuild_answer(nameless, str(tmp_path / "new"), None, directly))
    assert (answer.failed, answer.facts["copied"]["sources"]) == ({}, ["aws"])
    assert answer.facts["reports"]["same"] and not answer.rows
    assert "with bills of aws" in answer.lines[0]


def test_a_lake_that_is_made_with_other_reports_fails_and_names_them(
    settings: Settings, lake: Path, tmp_path: Path
) -> None:
    (altered,) = (lake / "report" / "report_cost__job_daily").glob("usage_date=*/data.parquet")
    altered.write_bytes(altered.read_bytes()[:-1])
    only_there = altered.parent.with_name("usage_date=2026-01-01") / altered.name
    only_there.parent.mkdir()
    shutil.copyfile(altered, only_there)
    answer = asyncio.run(rebuild_answer(settings, str(tmp_path / "new"), None, directly))
    names = [path.relative_to(lake).as_posix() for path in (altered, only_there)]
    assert list(answer.failed) == names and [path for _, path in answer.rows] == names
    assert "differ" in answer.failed[names[0]] and "not made again" in answer.failed[names[1]]


def test_bills_in_the_lake_that_the_settings_do_not_name_are_told(settings: Settings, lake: Path) -> None:
    assert not [note for note in notes(nights.run(settings, DAY)) if "raw/bills" in note]
    for bills in ((), (BillSource(name="other", url=str(lake.parent)),)):
        told = [n for n in notes(nights.run(settings.model_copy(update={"bills": bills}), DAY)) if "raw/bills" in n]
        assert len(told) == 1 and "1 source(s) of bills that the settings do not name: aws." in told[0]


# --- stale ----------------------------------------------------------------------------------------------------------


def test_a_day_that_cannot_be_published_is_marked_until_it_can(
    settings: Settings, lake: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = lake / "report" / "_stale" / f"{DAY}.json"
    assert not marker.exists()
    shutil.copytree(calm / "fleet", lake.parent / "fleet")
    settings = settings.model_copy(update={"telemetry": str(lake.parent / "fleet" / "telemetry")})
    for shard in shards_of_an_hour(lake):
        shard.unlink()
        (lake.parent / "fleet" / "telemetry" / shard.relative_to(lake / "raw")).unlink()
    before = {n: d for n, d in nights.published(lake).items() if "usage_date=" in n}
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise LawError("law 1 (money): it does not add up", law=1)

        patch.setattr(publish, "assert_periods", refuse)
        assert DAY in nights.run(settings, DAY).failed
        told = json.loads(marker.read_text())
        assert (
            told["commit"] == 1
            and told["why"].startswith("LawError: law 1 (money)")
            and told["since"].endswith("+00:00")
        )
        marker.write_bytes(canonical(told | {"since": "2026-01-01T00:00:00+00:00"}))
        assert DAY in nights.run(settings, DAY).failed
        assert json.loads(marker.read_text())["since"] == "2026-01-01T00:00:00+00:00", "it was stale since then"
        assert {n: d for n, d in nights.published(lake).items() if "usage_date=" in n} == before
        assert planned(settings).facts["stale"][DAY]["commit"] == 1
    assert nights.run(settings, DAY).commits == {DAY: 2}
    assert not marker.exists()


# --- two nights -----------------------------------------------------------------------------------------------------


def test_of_two_nights_at_once_one_computes_and_the_other_waits(
    calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = nights.settings_for(calm / "fleet", tmp_path / "lake", lease_seconds=120)
    reached, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    opened, main = Lake.open, threading.get_ident()

    def hold(moment: str, operation: str, path: str) -> None:
        if (moment, operation) == ("before", "create") and path.startswith("days/") and not reached.is_set():
            reached.set()
            assert go_on.wait(120)

    def sleep(seconds: float) -> None:
        assert threading.get_ident() == main, "only the second night waits"
        waits.set()
        go_on.set()
        time.sleep(seconds)

    monkeypatch.setattr(Lake, "open", lambda url, *, buckets=8, watch=None: opened(url, buckets=buckets, watch=hold))
    monkeypatch.setattr(leases.take, "__kwdefaults__", {"monotonic": time.monotonic, "sleep": sleep})
    first: list[Run] = []
    thread = threading.Thread(target=lambda: first.append(nights.run(settings, DAY)))
    thread.start()
    try:
        assert reached.wait(120)
        second = nights.run(settings, DAY)
    finally:
        go_on.set()
        thread.join(120)
    assert waits.is_set() and first[0].failed == second.failed == {}
    assert (first[0].causes, second.causes) == ({DAY: None}, {})
    names = [s["stage"] for s in second.stages]
    assert "take_turns" in names and "reconcile_days" not in names
    assert second.commits == {DAY: 1} and second.totals == first[0].totals
    assert _same_files(tmp_path / "lake", calm / "lake")


@pytest.fixture(scope="module")
def killed(calm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lake of a night that was killed before its commit, with its lease."""
    lake = tmp_path_factory.mktemp("killed") / "lake"
    words = [sys.executable, "-c", KILLED_NIGHT, str(calm / "fleet"), str(lake), DAY]
    assert subprocess.run(words, cwd=ROOT, check=False, timeout=280).returncode == -signal.SIGKILL
    return lake


@pytest.mark.parametrize("host", ["this one", "another"])
def test_a_killed_night_blocks_the_next_one_for_the_time_to_live_at_most(
    calm: Path, killed: Path, tmp_path: Path, host: str
) -> None:
    lake = tmp_path / "lake"
    shutil.copytree(killed, lake)
    held = lake / "leases" / DAY / "1.json"
    body = json.loads(held.read_text())
    assert body["released"] is False and not (lake / "days").exists()
    if host == "another":
        held.write_bytes(canonical(body | {"host": "another-host"}))
    run = nights.run(nights.settings_for(calm / "fleet", lake, lease_seconds=2), DAY)
    assert run.failed == {} and run.commits == {DAY: 1}
    waited = sum(s["ms"] for s in run.stages if s["stage"] == "take_turns")
    assert 1_900 <= waited < 20_000 if host == "another" else waited == 0
    assert sorted(p.name for p in held.parent.iterdir()) == ["1.json", "2.json"]
    assert json.loads((held.parent / "2.json").read_text())["released"] is True
    assert _same_files(lake, calm / "lake")


def _same_files(one: Path, two: Path) -> bool:
    return nights.published(one) == nights.published(two)


def test_no_lake_is_made_inside_another(settings: Settings, lake: Path) -> None:
    with pytest.raises(UsageError, match=r"raw lies inside the lake .* Expected a folder or URL outside of it"):
        asyncio.run(rebuild_answer(settings, str(lake / "raw"), None, directly))
    assert not (lake / "raw" / "lake.json").exists()
