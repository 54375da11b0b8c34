"""Statements, units and processes of a day to `core_jobs__runs`: one row a job and attempt.

The last statement (by instant, then rank, the whole job after its ranks, then statement) gives the descriptive facts; a
nullable fact that it lacks keeps the last value that was stated. Units are the maximum over ranks, since ranks step
together; samples, tokens and requests are sums, since one rank of a replica writes them; so are wall time and `rank_units`,
whose ratio is the mean time of a unit. Knows no device time.
Source: infra/rules/telemetry.md 1 and 2.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.partials import STATEMENTS_HEARD
from schemas.telemetry import JOBS
from schemas.usage import JOB_RUNS
from seedance.canonical import canonical
from seedance.schema import INSTANT
from tasks.core.arrays import grouped, merge_rows

KEPT = tuple(n for n in JOB_RUNS.names if n in JOBS.names and n not in ("job_id", "attempt"))
"""Facts that a run takes from its statements."""
RANK = ("job_id", "attempt", "rank")
SUMMED = ("samples", "tokens_in", "tokens_out", "requests", "wall_ns")


def statements(rows: pa.Table) -> pa.Table:
    """STATEMENTS_HEARD of rows of `raw_telemetry__jobs`."""
    key = [n for n in STATEMENTS_HEARD.key if n != "said"]
    said = [_said(row) for row in rows.select([n for n in JOBS.names if n not in key]).to_pylist()]
    made = pa.table([*(rows.column(n) for n in key), pa.array(said, pa.string())], schema=STATEMENTS_HEARD.arrow)
    return merge_rows(made, STATEMENTS_HEARD)


def finish(heard: pa.Table, steps: pa.Table, seen: pa.Table) -> pa.Table:
    """`core_jobs__runs` of a day.

    Args:
        heard: STATEMENTS_HEARD of the day.
        steps: STEPS of the day.
        seen: SEEN of the day; a process whose attempt nobody states counts as attempt 0.
    """
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    order = ["stated_at_utc", "rank", "statement", "said"]
    instants = heard.column("stated_at_utc").cast(pa.int64())
    ordered = heard.set_column(heard.schema.get_field_index("stated_at_utc"), "stated_at_utc", instants)
    for row in ordered.take(pc.sort_indices(ordered, sort_keys=[(n, "ascending") for n in order])).to_pylist():
        run = _run(runs, row["job_id"], row["attempt"])
        _see(run, row["rank"], row["stated_at_utc"], row["stated_at_utc"])
        told = json.loads(row["said"])
        run |= {n: told[n] for n in KEPT if told.get(n) is not None or not JOBS[n].null}
        run["status"] = row["statement"]
    for row in _by_rank(steps, SUMMED):
        run = _run(runs, row["job_id"], row["attempt"])
        _see(run, row["rank"], row["first_ns"], -row["last_ns"])
        run["units"] = max(run["units"], row["units"])
        run["rank_units"] += row["units"]
        for name in SUMMED:
            run[name] += row[name]
    for row in _processes(seen):
        run = _run(runs, row["job_id"], row["attempt"] or 0)
        _see(run, row["rank"], row["first_ns"], -row["last_ns"])
    return _table(runs)


def _said(row: dict[str, Any]) -> str:
    labels = sorted(row["labels"] or [])
    quality = None if row["quality"] is None else str(row["quality"])
    kept = {n: v for n, v in row.items() if n in KEPT}
    return canonical(kept | {"labels": [list(pair) for pair in labels], "quality": quality}).decode()


def _run(runs: dict[tuple[str, int], dict[str, Any]], job: str, attempt: int) -> dict[str, Any]:
    return runs.setdefault((job, attempt), {"ranks": set(), "units": 0, "rank_units": 0} | dict.fromkeys(SUMMED, 0))


def _see(run: dict[str, Any], rank: int | None, first: int, last: int) -> None:
    run["first"] = min(run.get("first", first), first)
    run["last"] = max(run.get("last", last), last)
    if rank is not None:
        run["ranks"].add(rank)


def _by_rank(steps: pa.Table, summed: tuple[str, ...]) -> list[dict[str, Any]]:
    how = {"first_ns": "min", "last_ns": "min"} | dict.fromkeys(("units", *summed), "sum")
    return list(grouped(steps, RANK, how).to_pylist())


def _processes(seen: pa.Table) -> list[dict[str, Any]]:
    claimed = seen.filter(pc.is_valid(seen.column("job_id")))
    return list(grouped(claimed, RANK, {"first_ns": "min", "last_ns": "min"}).to_pylist())


def _table(runs: dict[tuple[str, int], dict[str, Any]]) -> pa.Table:
    rows = []
    for (job, attempt), run in sorted(runs.items()):
        quality = run.get("quality")
        facts = {"quality": None if quality is None else Decimal(quality), "ranks_seen": len(run["ranks"])}
        labels = {"labels": [tuple(pair) for pair in run["labels"]] if "labels" in run else None}
        instants = {"first_seen_utc": run["first"], "last_seen_utc": run["last"]}
        rows.append(run | facts | labels | instants | {"job_id": job, "attempt": attempt})
    columns = []
    for column in JOB_RUNS.columns:
        values = [row.get(column.name) for row in rows]
        # Python's datetime has no ns: instants go in as integers.
        columns.append(
            pa.array(values, pa.int64()).cast(INSTANT) if column.type == INSTANT else pa.array(values, column.type)
        )
    return pa.table(columns, schema=JOB_RUNS.arrow)
