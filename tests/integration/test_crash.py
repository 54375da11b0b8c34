"""A night killed at its writes and run again leaves what an undisturbed night leaves.

Every create, put and replace of a night on a tiny day is numbered; the night dies (SIGKILL) before or after one of them, then
runs again. One point in ten is committed, `make soak` takes all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import build, tiny_spec, write_fleet

ROOT = Path(__file__).resolve().parents[2]
SPEC = tiny_spec(3, gap=True, savings_plan=True, disk="hourly", duplicate_shard=True)


def killed_nights(tmp_path: Path, every: int, first: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The undisturbed night's facts, and one entry a point."""
    write_fleet(build(SPEC), tmp_path / "fleet")
    work = tmp_path / "work"
    work.mkdir()
    words = [sys.executable, "-m", "tests.integration.crash_runner", "--fleet", tmp_path / "fleet", "--work", work,
             "--day", SPEC.day, "--every", every, "--first", first]  # fmt: skip
    done = subprocess.run([str(w) for w in words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    calm, *points = (json.loads(line) for line in done.stdout.splitlines())
    return calm, points


def assert_same(calm: dict[str, Any], points: list[dict[str, Any]], every: int) -> None:
    assert calm["writes"] > 40 and calm["published"] >= 6
    assert len(points) >= calm["points"] // every
    assert [p for p in points if not p["killed"]] == [], "a point that does not kill shows nothing"
    assert [p for p in points if p["again"] != 0 or not p["same"]] == []


def test_a_tenth_of_all_points(tmp_path: Path) -> None:
    calm, points = killed_nights(tmp_path, every=10, first=3)
    assert_same(calm, points, 10)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_points(tmp_path: Path) -> None:
    calm, points = killed_nights(tmp_path, every=1, first=0)
    assert_same(calm, points, 1)
