"""Configurations after a night: their money is that of the ledger's jobs, and a second night changes nothing."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pyarrow.parquet as pq

from schemas.ledger import JOB_DAILY
from schemas.pareto import PARETO
from tasks.io.lake import Lake
from tasks.pareto import SCHEMA, publish_pareto
from tests import nights
from tests.fleet import build, tiny_spec, write_fleet


def test_what_configurations_cost_is_what_the_ledger_says_of_their_jobs(tmp_path: Path) -> None:
    spec = tiny_spec(12, day="2026-10-05")
    write_fleet(build(spec), tmp_path)
    settings = nights.settings_for(tmp_path, tmp_path / "lake")
    assert nights.run(settings, spec.day).failed == {}
    lake = Lake.open(settings.lake)
    facts = publish_pareto(lake, settings, spec.day)
    assert facts["skipped"] == {} and facts["configurations"] >= 1
    report = tmp_path / "lake" / "report"
    rows = pq.read_table(report / PARETO.name / f"as_of_date={spec.day}" / "data.parquet").to_pylist()
    jobs = [r for r in pq.read_table(report / JOB_DAILY.name).to_pylist() if r["x_JobId"] is not None]
    told = sum((r["x_Cost"] for r in rows if r["x_Cost"] is not None), Decimal(0))
    told += sum(Decimal(c) for side in ("nameless", "mixed") for c in facts[side]["cost"].values())
    ledger = sum((r["EffectiveCost"] or 0) - (r["x_PromotionalCost"] or 0) + (r["x_EstimatedCost"] or 0) for r in jobs)
    assert told == ledger > 0
    of_work = [r for r in rows if r["x_Cost"] is not None]
    assert all(r["x_CostPerWork"] > 0 and r["x_ThroughputPerSecond"] > 0 and r["x_LatencyMs"] > 0 for r in of_work)
    assert all(r["x_GpuNs"] > 0 and r["x_EnergyPerWork"] > 0 and r["x_TflopsPerGpu"] > 0 for r in of_work)
    jsonschema.validate(json.loads(lake.store.read(facts["paths"][0])), json.loads(SCHEMA.read_text()))
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "lake").rglob("*") if p.is_file()}
    assert publish_pareto(lake, settings, spec.day) == facts
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "lake").rglob("*") if p.is_file()} == before
