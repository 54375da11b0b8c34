"""Every deployment of `prefect.yaml` resolves to a flow, and its parameters pass the flow's own validation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import construct_schedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

ROOT = Path(__file__).resolve().parent.parent.parent
FILE: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS: dict[str, dict[str, Any]] = {d["name"]: d for d in FILE["deployments"]}

each = pytest.mark.parametrize("name", DEPLOYMENTS)


def flow_of(name: str) -> Flow[..., Any]:
    return load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"])


@each
def test_entrypoint_is_the_flow_that_its_module_is_named_after(name: str) -> None:
    entrypoint = DEPLOYMENTS[name]["entrypoint"]
    match = re.fullmatch(r"flows\.(\w+)\.(\w+)", entrypoint)
    assert match, f"{entrypoint} is not dotted"
    assert match[1] == match[2]
    assert isinstance(flow_of(name), Flow)


@each
def test_parameters_pass_the_flow_s_own_validation(name: str) -> None:
    flow = flow_of(name)
    form = parameter_schema(flow.fn)
    given = DEPLOYMENTS[name].get("parameters", {})
    assert set(given) <= set(form.properties)
    # What a schedule leaves out nobody fills in; for a run on demand the form asks for it.
    if DEPLOYMENTS[name].get("schedules") or set(form.required or []) <= set(given):
        flow.validate_parameters(given)
    for field, shown in form.properties.items():
        assert shown, field


@each
def test_described_tagged_and_alone(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
    assert len(deployment["description"]) > 40
    assert deployment["tags"]
    assert deployment["concurrency_limit"]["limit"] == 1
    assert deployment["work_pool"]["name"] == "local-process"


def test_one_schedule_at_half_past_two_utc() -> None:
    schedules = {name: d["schedules"] for name, d in DEPLOYMENTS.items() if d.get("schedules")}
    assert list(schedules) == ["nightly"]
    (schedule,) = schedules["nightly"]
    assert (schedule["cron"], schedule["timezone"], schedule["active"]) == ("30 2 * * *", "UTC", True)
    assert schedule["slug"]
    assert DEPLOYMENTS["nightly"]["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"
    construct_schedule(cron=schedule["cron"], timezone=schedule["timezone"])


def test_every_flow_of_the_night_has_a_deployment() -> None:
    stages = {"collect", "reduce", "bill", "reconcile", "publish", "tier"}
    assert set(DEPLOYMENTS) == stages | {"nightly", "backfill", "explain", "plan", "verify", "sweep", "rebuild"}


def test_where_it_runs_is_said_and_not_baked_in() -> None:
    (step,) = FILE["pull"]
    assert step == {"prefect.deployments.steps.set_working_directory": {"directory": "{{ $SEEDANCE_HOME }}"}}
