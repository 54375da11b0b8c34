"""Pareto: what each configuration cost and did in the days up to a day, which of them nothing beats, and the exports of it.

Runs within publish, on days that are committed. Each day's runs are kept by the digests of what they are made from, so that a
night reads only the days that changed.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.ledger import JOB_DAILY, LAYER_DAILY, SPANS
from schemas.pareto import PARETO, PARETO_RUNS
from schemas.usage import JOB_RUNS
from seedance.errors import SeedanceError
from seedance.schema import Table
from tasks.core.configurations import day_runs, gather
from tasks.core.pareto_export import to_json, to_yaml
from tasks.errors import LayoutError
from tasks.io.lake import Commit, Lake, Step
from tasks.settings import Settings
from tasks.step import run_step, stage_key

FOLDER = "exports/pareto"
SCHEMA = Path(__file__).resolve().parents[1] / "schemas" / "pareto.schema.json"
_READ: tuple[Table, ...] = (JOB_RUNS, JOB_DAILY, SPANS, LAYER_DAILY)
_MODULES = ("tasks.pareto", "tasks.core.configurations")


def publish_pareto(lake: Lake, settings: Settings, as_of: str) -> dict[str, Any]:
    """`report_pareto__configs` as of a day, of the committed days within the look-back of the settings, and its exports.

    Args:
        lake: where the days are committed.
        settings: `look_back_days` says how many days before `as_of` count.
        as_of: UTC day, YYYY-MM-DD; later days do not count.

    Returns:
        {days, configurations, on_front, dominated, incomparable: counts; nameless, mixed: {runs, cost by currency} of jobs that
        name no configuration, and of jobs billed in several currencies; skipped: reason by day that could not be read; paths:
        of the exports}.

    Raises:
        UsageError: a value is not a finite number; names the configuration. Nothing was published.
    """
    last = dt.date.fromisoformat(as_of)
    first = (last - dt.timedelta(days=settings.look_back_days)).isoformat()
    runs: dict[dt.date, pa.Table] = {}
    skipped: dict[str, str] = {}
    for day in lake.committed_days():
        if not first <= day <= as_of:
            continue
        try:
            runs[dt.date.fromisoformat(day)] = _runs(lake, day)
        except (
            SeedanceError,
            LayoutError,
        ) as error:  # an object is damaged, or of code that knew less; the others count
            skipped[day] = f"{type(error).__name__}: {error}"
    table, verdicts, outside = gather(runs)
    lake.publish_as_of(lake.handle(PARETO, None, [table]), as_of)
    counts = [v.on_front for v in verdicts]
    return {
        "days": len(runs),
        "configurations": len(counts),
        "on_front": counts.count(True),
        "dominated": counts.count(False),
        "incomparable": counts.count(None),
        "skipped": skipped,
        "paths": _export(lake, table, last),
    } | outside


def _runs(lake: Lake, day: str) -> pa.Table:
    """`core_pareto__runs` of the head of a day."""
    head = lake.head(day)
    if head is None:
        raise LayoutError(f"{day} has no commit any more. Run it again.", expected="a commit", found=None)
    handles = {spec.name: head.handles.get(spec.name) for spec in _READ}
    missing = [name for name, handle in handles.items() if handle is None]
    if missing:
        raise LayoutError(
            f"commit {head.n} of {day} has no {', '.join(missing)}. Run the day again.", expected=missing, found=None
        )
    inputs = [handle.sha256 for handle in handles.values() if handle is not None]
    key = stage_key("pareto", modules=_MODULES, schemas=(*_READ, PARETO_RUNS), settings={}, inputs=inputs)
    step, _ = run_step(lake, "pareto", key, lambda: _reduce(lake, head))
    return lake.read(step.handles[PARETO_RUNS.name], PARETO_RUNS)


def _reduce(lake: Lake, head: Commit) -> Step:
    columns = {
        SPANS.name: ["x_JobId", "x_Attempt", "x_Ns", "x_EnergyMj"],
        LAYER_DAILY.name: ["x_JobId", "x_Attempt", "x_Flops"],
    }
    jobs, job_daily, spans, layer_daily = (
        lake.read(head.handles[spec.name], spec, columns.get(spec.name)) for spec in _READ
    )
    table = day_runs(jobs, job_daily, spans, layer_daily)
    return Step({PARETO_RUNS.name: lake.handle(PARETO_RUNS, head.day, [table])})


def _export(lake: Lake, table: pa.Table, as_of: dt.date) -> list[str]:
    """Write the exports where they differ, and the schema beside the days; their paths."""
    rows = table.to_pylist()
    files = {
        f"{FOLDER}/{as_of}/pareto.json": to_json(rows, as_of),
        f"{FOLDER}/{as_of}/pareto.yaml": to_yaml(rows, as_of),
        f"{FOLDER}/{SCHEMA.name}": SCHEMA.read_bytes(),
    }
    for path, data in files.items():
        if lake.store.get(path) != data:
            lake.store.replace(path, data)
    return sorted(files)
