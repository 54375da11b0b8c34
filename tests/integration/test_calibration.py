"""Calibration over a fleet's history: factors as the fleet's own arithmetic has them, the same however the nights were run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.ledger import ADDRESSES
from tasks.io.lake import Lake
from tasks.plan import plan_one
from tasks.settings import Settings
from tests import histories, nights
from tests.fleet.history import History, HistorySpec, write_history

NIGHTS = 16
LAST = NIGHTS - 1
JUDGED = range(11, NIGHTS)
"""Nights of which estimates are held to the targets: a factor needs some days of bills."""


@dataclass(frozen=True)
class Nightly:
    """A history that was run night by night: what each night learnt, estimates of the judged ones, drop and lake."""

    history: History
    learnt: list[Mapping[str, Any]]
    estimated: dict[int, histories.Estimated]
    root: Path

    @property
    def alphas(self) -> Mapping[str, int]:
        """Factors of the last night."""
        alphas: Mapping[str, int] = self.learnt[LAST]["alphas"]
        return alphas

    def copy(self, root: Path) -> Settings:
        """A lake with the same deliveries and shards in which nothing was learnt or committed yet; usage is there."""
        shutil.copytree(self.root / "lake", root / "lake")
        for name in ("steps/calibrate", "steps/calibrate_day", "steps/reconcile", "days"):
            shutil.rmtree(root / "lake" / name, ignore_errors=True)
        return histories.settings_for(self.history, self.root / "drop", root / "lake")


@pytest.fixture(scope="module")
def nightly(tmp_path_factory: pytest.TempPathFactory) -> Nightly:
    """Sixteen days on AWS with hidden biases in the band, noise and bills that come late; each night runs."""
    root = tmp_path_factory.mktemp("history")
    history = write_history(HistorySpec(seed=3, days=NIGHTS), root / "fleet")
    settings = histories.settings_for(history, root / "drop", root / "lake")
    learnt, estimated = [], {}
    for night, day in enumerate(history.days):
        history.deliver(night, root / "drop")
        lake = histories.take_in(settings)
        learnt.append(histories.learn(lake, settings, day)[1])
        if night in JUDGED:
            estimated[night] = histories.estimate(lake, settings, day)
    return Nightly(history, learnt, estimated, root)


def test_every_night_learns_what_the_fleet_knows(nightly: Nightly) -> None:
    for night, learnt in enumerate(nightly.learnt):
        assert learnt["alphas"] == nightly.history.alphas(night)
    assert nightly.learnt[0]["alphas"] == {}  # one delivery alone cannot tell what is complete
    assert set(nightly.learnt[LAST]["verdicts"]) == {key for key in nightly.alphas if "||" not in key}


def test_estimates_after_alpha_meet_the_bill_that_comes_later(nightly: Nightly) -> None:
    """Each judged night's ledger, settled with witness and laws on what was known then."""
    history = nightly.history
    for night, found in nightly.estimated.items():
        assert set(found.listed) == set(history.provisional(night))
        assert found.addressed == found.after
        assert all(found.listed[key] == history.listed(key[0], history.days[night]) for key in found.listed)
    biases = histories.biases(history, nightly.estimated)
    limits = histories.targets(history, biases)
    assert set(biases) == set(history.bias_ppm)
    for family, (before, after, hours) in biases.items():
        print(
            f"{family}: bias {before:+.3%} before alpha, {after:+.3%} after, over {hours} hours; at most {limits[family]:.1%}"
        )
        assert abs(after) <= limits[family]
    gpus = [family for family in biases if limits[family] == histories.GPU_TARGET]
    assert any(abs(biases[family][0]) > histories.GPU_TARGET for family in gpus)  # there was something to learn


def test_learning_everything_in_one_night_or_backwards_gives_the_same(nightly: Nightly, tmp_path: Path) -> None:
    settings = nightly.copy(tmp_path)
    lake = Lake.open(settings.lake)
    for night in (LAST, 3, LAST, LAST - 5, LAST):
        alphas = histories.learn(lake, settings, nightly.history.days[night])[1]["alphas"]
        assert night != LAST or alphas == nightly.alphas


def test_only_open_days_depend_on_the_days_before_them(nightly: Nightly, tmp_path: Path) -> None:
    """A late shard of a past day makes the open day due again; a day that the bill covers does not know of it."""
    settings = nightly.copy(tmp_path)
    days = nightly.history.days
    (opened,), (covered,) = (plan_one(settings, day) for day in (days[LAST], days[LAST - 1]))
    assert (opened.is_open, covered.is_open, covered.history) == (True, False, ())
    assert [past.day for past in opened.history] == list(days[LAST - 14 : LAST])
    assert opened.history[-1].complete == {"aws|111122223333": [0]}  # noon onwards was still filling
    shard = sorted((tmp_path / "lake" / "raw").glob(f"*/date={days[LAST - 3]}/*/*.parquet"))[0]
    producer, seq, _ = shard.stem.rsplit("-", 2)
    shutil.copyfile(shard, shard.with_name(f"{producer}-{int(seq) + 90:0{len(seq)}}-{'0' * 16}.parquet"))
    (later,), (same,) = (plan_one(settings, day) for day in (days[LAST], days[LAST - 1]))
    assert same.data_key == covered.data_key
    assert later.parts["shard"] != opened.parts["shard"] and later.parts["bill"] == opened.parts["bill"]


def test_two_deliveries_are_enough_and_fewer_looks_teach_less(nightly: Nightly, tmp_path: Path) -> None:
    """What is complete is told by the last two deliveries that were taken in, whatever came before them."""
    history = nightly.history
    settings = histories.settings_for(history, tmp_path / "drop", tmp_path / "lake")
    shutil.copytree(nightly.root / "lake", tmp_path / "lake")
    for name in ("raw/bills", "steps/calibrate", "steps/calibrate_day", "steps/reconcile"):
        shutil.rmtree(tmp_path / "lake" / name)
    for night in (LAST - 6, LAST - 1, LAST):
        history.deliver(night, tmp_path / "drop")
        lake = histories.take_in(settings)
        if night == LAST - 1:
            few = histories.learn(lake, settings, history.days[night])[1]["alphas"]
            assert few.keys() == nightly.alphas.keys() and few != nightly.learnt[night]["alphas"]
    assert histories.learn(lake, settings, history.days[LAST])[1]["alphas"] == nightly.alphas


def test_commits_backwards_or_twice_change_nothing(nightly: Nightly, tmp_path: Path) -> None:
    """Whole nights: the newest day is committed first, by backfill; its factors stay; estimates go when the bill passes."""
    settings = nightly.copy(tmp_path)
    days = nightly.history.days
    for night in (LAST, LAST - 1, LAST):
        assert not nights.run(settings, days[night], first_day=days[night]).failed
    lake = Lake.open(settings.lake)
    head = lake.head(days[LAST])
    assert head is not None and (head.n, head.body["alphas"]) == (1, nightly.alphas)
    assert _states(lake, days[LAST]) == {"billed", "provisional"}
    billed = lake.head(days[LAST - 1])
    assert billed is not None and billed.body["alphas"] is None  # the bill covers that day whole: nothing is estimated
    assert _states(lake, days[LAST - 1]) == {"billed"}

    nightly.history.deliver_final(tmp_path / "drop")
    shutil.copytree(tmp_path / "drop", nightly.root / "drop", dirs_exist_ok=True)
    assert not nights.run(settings, days[LAST], first_day=days[LAST]).failed
    head = lake.head(days[LAST])
    assert head is not None and (head.n, head.body["cause"]) == (2, "bill")
    assert _states(lake, days[LAST]) == {"billed"}


def _states(lake: Lake, day: str) -> set[str]:
    head = lake.head(day)
    assert head is not None
    return set(lake.read(head.handles[ADDRESSES.name], ADDRESSES)["x_State"].to_pylist())


@pytest.mark.parametrize("cloud", ["azure", "gcp"])
def test_the_other_clouds_learn_what_their_fleets_know(cloud: str, tmp_path: Path) -> None:
    """Azure bills whole days, so a day is one window; a machine on Google is the sum of its cores, memory and GPUs."""
    history = write_history(HistorySpec(seed=3, days=4, cloud=cloud), tmp_path / "fleet")
    settings = histories.settings_for(history, tmp_path / "drop", tmp_path / "lake")
    for night, day in enumerate(history.days):
        history.deliver(night, tmp_path / "drop")
        learnt = histories.learn(histories.take_in(settings), settings, day)[1]
        assert learnt["alphas"] == history.alphas(night)
    assert learnt["alphas"]
