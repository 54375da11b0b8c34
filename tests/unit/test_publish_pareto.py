"""The Pareto stage on a lake: which days count, what is written where, and that a second run changes nothing."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pyarrow.parquet as pq
import pytest
import yaml

from schemas.ledger import JOB_DAILY, LAYER_DAILY, SPANS
from schemas.pareto import PARETO
from schemas.usage import JOB_RUNS
from tasks.io.lake import Lake
from tasks.pareto import SCHEMA, publish_pareto
from tasks.settings import Settings
from tests.tables import SECOND, build


def commit(lake: Lake, day: str, *runs: tuple[str, str, str]) -> None:
    """A day with runs of (job, configuration, cost)."""
    date = dt.date.fromisoformat(day)
    moment = dt.datetime.combine(date, dt.time(), dt.UTC)
    jobs = build(
        JOB_RUNS,
        [{"job_id": job, "config_id": config} for job, config, _ in runs],
        attempt=0, model="bert", kind="serve", hardware_profile="1xT4", quantisation="int8", first_seen_utc=moment,
        last_seen_utc=moment, ranks_seen=1, units=10, samples=1000, tokens_in=0, tokens_out=0, requests=0,
        wall_ns=10 * SECOND, rank_units=10,
    )  # fmt: skip
    daily = build(
        JOB_DAILY,
        [{"x_JobId": job, "BilledCost": Decimal(cost), "EffectiveCost": Decimal(cost)} for job, _, cost in runs],
        x_UsageDate=date, x_Cloud="aws", BillingCurrency="USD", x_State="billed", x_Attempt=0, x_Category="work",
    )  # fmt: skip
    tables = {JOB_RUNS: jobs, JOB_DAILY: daily, SPANS: SPANS.empty(), LAYER_DAILY: LAYER_DAILY.empty()}
    handles = {spec.name: lake.handle(spec, day, [table]) for spec, table in tables.items()}
    lake.commit(day, {"key": f"{day} {runs}", "handles": handles})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(lake=str(tmp_path / "lake"), look_back_days=2)


def written(lake: Path) -> dict[str, int]:
    """Every file with the time of its last change."""
    return {p.relative_to(lake).as_posix(): p.stat().st_mtime_ns for p in lake.rglob("*") if p.is_file()}


def test_the_days_of_the_look_back_count(settings: Settings) -> None:
    lake = Lake.open(settings.lake, buckets=1)
    commit(lake, "2026-10-01", ("old", "before", "1"))
    commit(lake, "2026-10-02", ("a", "cheap", "1"))
    commit(lake, "2026-10-03", ("a", "cheap", "2"), ("b", "dear", "4"))
    commit(lake, "2026-10-05", ("late", "after", "1"))
    facts = publish_pareto(lake, settings, "2026-10-04")
    assert facts == {
        "days": 2, "configurations": 2, "on_front": 1, "dominated": 1, "incomparable": 0,
        "nameless": {"runs": 0, "cost": {}}, "mixed": {"runs": 0, "cost": {}}, "skipped": {},
        "paths": [
            "exports/pareto/2026-10-04/pareto.json",
            "exports/pareto/2026-10-04/pareto.yaml",
            "exports/pareto/pareto.schema.json",
        ],
    }  # fmt: skip
    root = Path(lake.store.url)
    rows = pq.read_table(root / "report" / PARETO.name / "as_of_date=2026-10-04" / "data.parquet").to_pylist()
    assert [(r["x_ConfigId"], r["x_Cost"], r["x_Work"], r["x_OnFront"], r["x_DominatedBy"]) for r in rows] == [
        ("cheap", Decimal(3), 2000, True, None),
        ("dear", Decimal(4), 1000, False, "cheap"),
    ]
    front = json.loads((root / facts["paths"][0]).read_text())
    listing = yaml.safe_load((root / facts["paths"][1]).read_text())
    schema = json.loads((root / facts["paths"][2]).read_text())
    for body in (front, listing):
        jsonschema.validate(body, schema)
    assert front["timestamp"] == "2026-10-05T00:00:00Z"
    assert [(p["config_id"], p["cost_usd"]) for p in front["pareto_points"]] == [("cheap", 1.5)]
    assert [(c["config_id"], c["hardware_profile"], c["quantization_scheme"]) for c in listing["configurations"]] == [
        ("cheap", "1xT4", "int8"),
        ("dear", "1xT4", "int8"),
    ]
    assert schema == json.loads(SCHEMA.read_text())


def test_a_second_run_writes_nothing(settings: Settings) -> None:
    lake = Lake.open(settings.lake, buckets=1)
    commit(lake, "2026-10-03", ("a", "cheap", "2"), ("b", "dear", "4"))
    first = publish_pareto(lake, settings, "2026-10-03")
    before = written(Path(lake.store.url))
    assert publish_pareto(lake, settings, "2026-10-03") == first
    assert written(Path(lake.store.url)) == before


def test_a_day_that_cannot_be_read_is_named_and_the_others_count(settings: Settings) -> None:
    lake = Lake.open(settings.lake, buckets=1)
    commit(lake, "2026-10-02", ("a", "cheap", "1"))
    commit(lake, "2026-10-03", ("b", "dear", "4"))
    lake.commit("2026-10-04", {"key": "empty", "handles": {}})
    head = lake.head("2026-10-03")
    assert head is not None
    Path(lake.store.url, head.handles[JOB_DAILY.name].parts[0].path).write_bytes(b"gone")
    facts = publish_pareto(lake, settings, "2026-10-04")
    assert (facts["days"], facts["configurations"]) == (1, 1)
    assert list(facts["skipped"]) == ["2026-10-03", "2026-10-04"]
    assert facts["skipped"]["2026-10-03"].startswith("StoreError:")
    assert "has no core_jobs__runs, report_cost__job_daily" in facts["skipped"]["2026-10-04"]


def test_a_lake_without_days_has_an_empty_front(settings: Settings) -> None:
    lake = Lake.open(settings.lake, buckets=1)
    facts = publish_pareto(lake, settings, "2026-10-04")
    assert (facts["days"], facts["configurations"], facts["on_front"]) == (0, 0, 0)
    assert json.loads(lake.store.read(facts["paths"][0]))["pareto_points"] == []
