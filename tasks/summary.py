"""What a run tells: totals over its days, rows of the quality table, and the record that is kept of it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from importlib import metadata
from typing import Any

from tasks.core import money
from tasks.io.lake import Commit
from tasks.night import Outcome, Published

COLUMNS = ("BilledCost", "EffectiveCost", "x_EstimatedCost")


def add_up(totals: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Category totals of several days, amounts as text, as one list in order, amounts as decimals; null adds nothing."""
    sums: dict[tuple[str, str, str], dict[str, Decimal | None]] = {}
    for row in totals:
        total = sums.setdefault((row["x_Cloud"], row["BillingCurrency"], row["x_Category"]), dict.fromkeys(COLUMNS))
        for column in COLUMNS:
            if row[column] is not None:
                total[column] = money.total([total[column], row[column]])
    names = ("x_Cloud", "BillingCurrency", "x_Category")
    return [dict(zip(names, key, strict=True)) | sums[key] for key in sorted(sums)]


def head_totals(commits: Mapping[str, Commit]) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]]]:
    """Category totals over the days' heads, and the findings of each day that has some."""
    facts = {day: commit.body["facts"] for day, commit in sorted(commits.items())}
    totals = add_up(row for day in facts.values() for row in day["totals"])
    return totals, {day: of_day["findings"] for day, of_day in facts.items() if of_day["findings"]}


def without_money(commit: Commit) -> list[str]:
    """What was observed on a day and could get no money, in words; what a commit of an older release does not say is not told."""
    facts, told = commit.body["facts"], []
    if facts.get("lost_ns"):
        told.append(
            f"{facts['lost_ns'] / 1e9:,.1f} s observed on hosts that no shard places on a machine cost nothing here; say "
            "which machine a host is (for the probe: SEEDANCE_CLOUD, SEEDANCE_INSTANCE_ID, SEEDANCE_INSTANCE_TYPE)"
        )
    if facts.get("unpriced"):
        kinds = ", ".join(facts["unpriced"])
        told.append(f"no list price is known for {kinds}: what is not billed there has no estimate")
    return told


def finding_text(found: Mapping[str, int]) -> str:
    """Findings with the resource-hours that have them."""
    return ", ".join(f"{finding} {hours} resource-hour(s)" for finding, hours in found.items())


def history(run: Any) -> list[str]:
    """A line for each stretch of days with the same revision and cause."""
    lines: list[tuple[str, str, str]] = []
    for day in run.days:
        cause = run.causes.get(day)
        why = ("first" if cause is None else f"because of {cause}") if day in run.causes else "unchanged"
        what = f"revision {run.commits[day]}, {why}" if day in run.commits else "not committed"
        if lines and lines[-1][2] == what:
            lines[-1] = (lines[-1][0], day, what)
        else:
            lines.append((day, day, what))
    return [f"{first}: {what}" if first == last else f"{first} to {last}: {what}" for first, last, what in lines]


def notes(run: Any) -> list[str]:
    """What a reader of the totals has to know: what they leave out, and what was not run."""
    told = []
    if not run.has_bills:
        told.append("the settings name no bill source ([[bills]]): everything is an estimate")
    for days, what in (
        (run.older, "day(s) with charges lie before the look-back and are in no total; backfill them"),
        (run.stale, "committed day(s) whose bill has changed were not run again; backfill them"),
    ):
        if days:
            told.append(f"{len(days)} {what} ({days[0]} to {days[-1]})")
    told += [f"{day}: {said}" for day, lines in run.without_money.items() for said in lines]
    told += [d["message"] for d in run.deliveries if d["status"] != "refused" and d.get("message")]
    return [*told, *run.told]


def quality_rows(run_id: str, day: str, stages: Sequence[Outcome], published: Published) -> list[dict[str, Any]]:
    """Rows of report_quality__runs for one committed day."""
    base = {"x_RunId": run_id, "x_UsageDate": dt.date.fromisoformat(day)}
    rows: list[dict[str, Any]] = []
    for stage in stages:
        facts = stage.steps[day].facts
        common = base | {
            "x_Stage": stage.stage,
            "x_DurationMs": stage.duration_ms[day],
            "x_Reused": "reused" if day in stage.reused else "computed",
        }
        rows += [common | row for row in (*_CHECKS[stage.stage](facts), *stage.checks[day])]
    rows += [base | {"x_Stage": "publish"} | row for row in published.checks[day]]
    rows.append(
        base
        | {
            "x_Stage": "publish",
            "x_Check": "laws on what was read back, commit, report",
            "x_Outcome": "passed",
            "x_DurationMs": published.duration_ms[day],
            "x_Detail": f"revision {published.commits[day].n}",
        }
    )
    return rows


def refused_rows(run_id: str, stages: Sequence[Outcome], published: Published) -> dict[str, list[dict[str, Any]]]:
    """Rows of report_quality__runs for each day that a gate refused: what the gate found; the day's tables stay as they were."""
    found: dict[str, list[dict[str, Any]]] = {}
    told = [(stage.stage, stage.failed, stage.checks) for stage in stages]
    for name, failed, checks in (*told, ("publish", published.failed, published.checks)):
        for day in failed:
            base = {"x_RunId": run_id, "x_UsageDate": dt.date.fromisoformat(day), "x_Stage": name}
            if checks.get(day):
                found[day] = [base | row for row in checks[day]]
    return found


def _collect(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    share = sum(q["share_ppm"] for q in facts["quarantined"])
    rows = [
        {
            "x_Check": "shards",
            "x_Outcome": "counted",
            "x_RowsIn": facts["rows_in"],
            "x_RowsOut": facts["rows_accepted"],
            "x_RowsQuarantined": facts["rows_quarantined"],
            "x_QuarantinedPpm": min(share, 1_000_000),
            "x_Detail": ", ".join(f"{len(facts[k])} {k}" for k in ("accepted", "quarantined", "duplicates")),
        }
    ]
    return rows + [
        {
            "x_Check": f"quarantine {q['path']}",
            "x_Outcome": "failed",
            "x_RowsQuarantined": q["rows"],
            "x_QuarantinedPpm": q["share_ppm"],
            "x_Detail": q["reason"],
        }
        for q in facts["quarantined"]
    ]


def _reduce(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "x_Check": "time of each device and hour is within the hour",
            "x_Outcome": "passed",
            "x_Detail": ", ".join(f"{k} {v}" for k, v in sorted(facts.items()) if isinstance(v, int)),
        }
    ]


def _reconcile(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = finding_text(facts["findings"]) or "none"
    return [
        {
            "x_Check": "law 1: addresses add up to each charge",
            "x_Outcome": "passed",
            "x_RowsIn": facts["charges"],
            "x_RowsOut": facts["addresses"],
        },
        {
            "x_Check": "law 2: time adds up to billed spans",
            "x_Outcome": "passed",
            "x_RowsIn": facts["machine_hours"],
            "x_RowsOut": facts["spans"],
        },
        {
            "x_Check": "witness.sql agrees",
            "x_Outcome": "passed",
            "x_Detail": ", ".join(f"{k} {v}" for k, v in facts["witness"]["rows"].items()),
        },
        {"x_Check": "findings", "x_Outcome": "counted", "x_Detail": found},
        {
            "x_Check": "observed time on machines that nobody names",
            "x_Outcome": "counted",
            "x_Detail": f"{facts['lost_ns']} ns",
        },
    ]


_CHECKS = {"collect": _collect, "reduce": _reduce, "reconcile": _reconcile}


def run_facts(run: Any) -> dict[str, Any]:
    """The record of a run: when it ended, versions, stages with times, days, failures."""
    return {
        "run_id": run.run_id,
        "ended_at": dt.datetime.now(dt.UTC).isoformat(),
        "versions": {name: metadata.version(name) for name in ("pyarrow", "duckdb", "dask", "prefect", "numpy")},
        "stages": run.stages,
        "days": run.days,
        "commits": run.commits,
        "causes": run.causes,
        "deliveries": run.deliveries,
        "failed": run.failed,
    }


def artifact_rows(run: Any) -> list[dict[str, Any]]:
    """Rows of the table artifact: billed, addressed and difference per currency, since a page shows ten; then the categories."""
    rows = []
    for currency, wanted in sorted(run.billed.items()):
        mine = [t for t in run.totals if t["BillingCurrency"] == currency]
        found = {c: money.total(t[c] for t in mine) for c in COLUMNS}
        gap = {c: money.difference(wanted[c], found[c]) for c in COLUMNS[:2]}
        rows += [
            {"cloud": "", "category": name, "currency": currency, **_amounts(values)}
            for name, values in (("billed", wanted), ("addressed", found), ("difference", gap))
        ]
    return rows + [
        {"cloud": t["x_Cloud"], "category": t["x_Category"], "currency": t["BillingCurrency"], **_amounts(t)}
        for t in run.totals
    ]


def _amounts(values: Mapping[str, Any]) -> dict[str, str]:
    return {c: "" if values.get(c) is None else format(Decimal(values[c]), "f") for c in COLUMNS}


def artifact_text(run: Any) -> str:
    """The page of a run: days with revision and cause, stages with times, deliveries, failures."""
    lines = [f"# Up to {run.last_day}", "", *(f"- {line}" for line in history(run))]
    lines += [f"- {day}: findings: {finding_text(found)}" for day, found in run.findings.items()]
    lines += [f"- {note}" for note in notes(run)]
    lines += ["", "| stage | seconds | days | reused |", "|---|---|---|---|"]
    lines += [
        f"| {s['stage']} | {s['ms'] / 1000:.2f} | {s.get('days', '')} | {s.get('reused', '')} |" for s in run.stages
    ]
    if run.deliveries:
        lines += ["", "| bill source | delivery | status | rows |", "|---|---|---|---|"]
        lines += [f"| {d['source']} | {d['name']} | {d['status']} | {d['rows']} |" for d in run.deliveries]
    lines += ["", *(f"- failed: **{what}**: {why}" for what, why in run.failed.items())]
    return "\n".join(lines)
