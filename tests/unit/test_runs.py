"""Runs of jobs: what was stated last, units over ranks, and jobs that nobody stated."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from schemas.usage import JOB_RUNS
from seedance.schema import JOBS
from tests.shard_tables import SECOND, row
from tests.telling import begin, day_of, host, op, processes, readings, step

S = SECOND


def said(statement: str, at: int, **facts: Any) -> dict[str, Any]:
    """One statement, `at` s from the start of its hour."""
    made = {"job_id": "job-1", "attempt": 0, "name": "n", "team": "t", "labels": [("a", "1")], "kind": "train"}
    return row(JOBS, statement=statement, stated_at_utc=begin(3) + at * S, **(made | facts))


def runs(*buckets: Any) -> list[dict[str, Any]]:
    return day_of(*buckets)[JOB_RUNS.name].to_pylist()


def test_the_last_statement_wins_and_keeps_what_it_lacks() -> None:
    rows = [
        said("started", 1, team="old"),
        said("result", 5, quality=Decimal("2.5"), quality_metric="loss"),
        said("ended", 9, team="new", labels=[("b", "2"), ("a", "1")], exit_reason="completed"),
    ]
    for order in (rows, rows[::-1]):
        (run,) = runs(host(jobs=order))
        assert (run["team"], run["status"], run["quality"], run["quality_metric"]) == (
            "new",
            "ended",
            Decimal("2.5"),
            "loss",
        )
        assert run["labels"] == [("a", "1"), ("b", "2")] and run["exit_reason"] == "completed"
        assert (run["units"], run["ranks_seen"]) == (0, 0)
        assert (run["first_seen_utc"].second, run["last_seen_utc"].second) == (1, 9)


def test_at_one_instant_the_whole_job_speaks_last() -> None:
    rows = [said("beat", 1, team="job"), said("beat", 1, rank=0, team="rank 0"), said("beat", 1, rank=1, team="rank 1")]
    (run,) = runs(host(jobs=rows))
    assert (run["team"], run["ranks_seen"]) == ("job", 2)
    (run,) = runs(host(jobs=rows[1:]))
    assert run["team"] == "rank 1"


def test_statements_that_two_hosts_repeat_count_once() -> None:
    rows = [said("beat", 1)]
    assert runs(host(jobs=rows), host(jobs=rows, node="node-b")) == runs(host(jobs=rows))


def test_units_are_the_maximum_over_ranks_and_samples_their_sum() -> None:
    counts: dict[str, Any] = {"samples": 80, "tokens_in": 1_000, "tokens_out": 7, "requests": 3}
    rank0 = [step(0, 10, active=10, units=4, **counts), step(20, 10, active=10, units=5, batch_size=16, **counts)]
    rank1 = [step(0, 10, active=10, units=7, rank=1, device_uuid="GPU-2")]
    ops = [op("a", 10), op("a", 10, batch_size=16), op("a", 10, rank=1, device_uuid="GPU-2")]
    later = step(0, 10, hour=5, active=10, units=2)
    (run,) = runs(host(steps=rank0 + rank1, ops=ops), host(steps=[later], ops=[op("a", 10, hour=5)], hour=5))
    assert (run["units"], run["samples"], run["tokens_in"], run["tokens_out"], run["requests"]) == (
        11,
        160,
        2_000,
        14,
        6,
    )
    assert (run["name"], run["status"], run["labels"], run["ranks_seen"]) == (None, None, None, 2)
    assert (run["first_seen_utc"].hour, run["last_seen_utc"].hour) == (3, 5)


def test_a_job_seen_only_as_a_process_has_a_row() -> None:
    seen = processes(0, 20 * S, 10 * S, rank=None, attempt=None) + processes(0, 20 * S, 10 * S, job_id=None, host_pid=8)
    (run,) = runs(host(readings=readings(0, 20 * S, 10 * S), processes=seen))
    assert (run["job_id"], run["attempt"], run["name"], run["units"], run["ranks_seen"]) == ("job-1", 0, None, 0, 0)
    assert (run["first_seen_utc"].second, run["last_seen_utc"].second) == (10, 20)


def test_attempts_are_runs_of_their_own() -> None:
    rows = [said("started", 1), said("started", 2, attempt=1)]
    assert [(r["job_id"], r["attempt"]) for r in runs(host(jobs=rows))] == [("job-1", 0), ("job-1", 1)]
