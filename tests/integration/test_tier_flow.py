"""The tier flow under Prefect: its artifacts, its command line, its form and what it refuses."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from pydantic import ValidationError

from flows.tier import Tier, main, tier
from tasks.errors import SettingsError
from tests.unit.test_checkpoints import fill, write_policy

pytestmark = pytest.mark.usefixtures("prefect_harness")


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str, str]:
    """Policy, checkpoint folder and lake."""
    fill(tmp_path / "ckpt")
    return write_policy(tmp_path), str(tmp_path / "ckpt"), str(tmp_path / "lake")


async def artifacts() -> dict[str, Any]:
    async with get_client() as server:
        return {a.key: a.data for a in await server.read_artifacts() if a.key is not None}


def test_the_flow_leaves_a_plan_to_look_at(place: tuple[str, str, str]) -> None:
    policy, folder, lake = place
    facts = asyncio.run(tier(Tier(policy=policy, folder=folder, lake=lake, day=dt.date(2026, 10, 1))))
    assert (facts["moves"]["objects"], facts["unusable"]) == (2, 1)
    found = asyncio.run(artifacts())
    assert "Dry run: nothing is moved or deleted." in str(found["tier-plan"])
    rows = {r["what"]: r for r in json.loads(str(found["tier-money"]))}
    assert rows["= net"]["moves that pay"] == facts["moves"]["x_Net"]


def test_the_command_prints_readable_totals(
    place: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, folder, lake = place
    words = ["tier", "--policy", policy, "--folder", folder, "--lake", lake, "--day", "2026-10-01"]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0
    text = capsys.readouterr().out
    assert "pinned: final" in text and "= net" in text and "Dry run: nothing is moved or deleted." in text
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    assert main() == 0
    told = json.loads(capsys.readouterr().out)
    assert f"{float(told['moves']['x_Net']):,.6f}"[:6] in text
    assert told["tiers"]["hot"]["objects"] == 3


def test_wrong_arguments_and_policies_are_told_without_a_trace(
    place: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, folder, lake = place
    monkeypatch.setattr(sys, "argv", ["tier", "--policy", policy, "--day", "2999-01-01"])
    assert main() == 2
    assert "--day: Value error, 2999-01-01 is in the future" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["tier", "--policy", policy, "--folder", f"{folder}/none", "--lake", lake])
    assert main() == 1
    assert "expected a folder, found nothing" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["tier", "--policy", f"{policy}.none", "--lake", lake, "--json"])
    assert main() == 1
    assert "cannot be read as TOML" in json.loads(capsys.readouterr().out)["failed"]["tier"]


def test_the_form_says_what_each_field_is() -> None:
    fields = Tier.model_json_schema()["properties"]
    assert list(fields) == ["settings", "lake", "policy", "folder", "day"]
    assert all(f["title"] and f["description"] for f in fields.values())
    with pytest.raises(ValidationError, match="at least 1 character"):
        Tier(policy="")


def test_a_wrong_policy_fails_the_run(place: tuple[str, str, str]) -> None:
    _, folder, lake = place
    with pytest.raises(SettingsError, match="cannot be read as TOML"):
        asyncio.run(tier(Tier(policy="none.toml", folder=folder, lake=lake)))
