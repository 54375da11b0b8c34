"""Explain: where the money of a charge went, or what a job or a resource pays for, from the head commits of days.

Reads the immutable objects that the commits name, never `report/`, and writes nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from schemas.billing import CHARGES
from schemas.ledger import ADDRESSES, JOB_DAILY, LAYERS, RESOURCE_DAILY
from schemas.usage import JOB_RUNS, LAYER_HOURLY
from seedance.schema import Table
from tasks.core import explain as core
from tasks.core.levels import Node, as_dict, fold, prune, walk
from tasks.core.named import charge_of, named
from tasks.core.spelling import one_spelling
from tasks.errors import LayoutError, UsageError
from tasks.io.lake import Commit, Lake
from tasks.progress import tell
from tasks.settings import Settings

_OF_CHARGE = (CHARGES, ADDRESSES, LAYERS, LAYER_HOURLY)
_OF_JOB = (CHARGES, ADDRESSES, LAYERS, LAYER_HOURLY, JOB_RUNS, JOB_DAILY)
_OF_RESOURCE = (CHARGES, ADDRESSES, RESOURCE_DAILY)


@dataclass(frozen=True)
class Question:
    """What is to be explained.

    Args:
        kind: charge, job or resource.
        given: key or beginning of one, or id or name.
        first_day: oldest UTC usage day, YYYY-MM-DD; None for every committed day.
        last_day: newest, included.
        ledger: both, cash or amortised: which amounts people are shown.
        most: parts of a level that people are shown.
        depth: levels that people are shown.
    """

    kind: str
    given: str
    first_day: str | None = None
    last_day: str | None = None
    ledger: str = "both"
    most: int = 10
    depth: int = 8

    @property
    def where(self) -> str:
        """The days in words."""
        if self.first_day is None:
            return "on any committed day"
        return (
            f"on {self.first_day}" if self.first_day == self.last_day else f"from {self.first_day} to {self.last_day}"
        )


@dataclass(frozen=True)
class Explained:
    """The answer: the question, the id that was meant, the committed days that were read, and the whole trees."""

    question: Question
    name: str
    days: Sequence[str]
    trees: Sequence[Node]
    layers: Sequence[Node] = ()
    """Of a job: its work once more, by layer."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Nothing: an explanation stands whole or is an error."""

    def shown(self, *, lines: int | None = None) -> tuple[list[Node], int]:
        """The trees for people, folded, and how many levels they have below the first line.

        Args:
            lines: no more lines than that: the deepest levels are left out, all of them alike, until it is met.
        """
        folded = [fold(tree, self.question.most) for tree in (*self.trees, *self.layers)]
        for levels in range(self.question.depth, -1, -1):
            trees = [prune(tree, levels) for tree in folded]
            if lines is None or sum(1 for tree in trees for _ in walk(tree)) <= lines:
                break
        return trees, levels

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON values, nothing folded; amounts are decimal texts."""
        return {
            "kind": self.question.kind,
            "name": self.name,
            "days": list(self.days),
            "trees": [as_dict(t) for t in self.trees],
            **({"layers": [as_dict(t) for t in self.layers]} if self.question.kind == "job" else {}),
        }


def explain_days(settings: Settings, question: Question) -> Explained:
    """From a charge to its addresses, or from a job or resource back to its charges; every level adds up.

    Raises:
        UsageError: nothing, or more than one thing, is meant; names candidates or the nearest.
        LayoutError: days were committed by another release; names them.
        LawError: a level does not add up; names it.
    """
    lake = Lake.open(settings.lake, buckets=settings.buckets)
    heads = _heads(lake, question)
    kind, where = question.kind, question.where
    _assert_readable(heads, {"charge": _OF_CHARGE, "job": _OF_JOB, "resource": _OF_RESOURCE}[kind])
    if kind == "charge":
        key = charge_of(question.given, _charges(lake, heads), where)
        books = _books(lake, heads, _OF_CHARGE)
        return Explained(question, key, _days(heads), core.explain_charge(books, key))
    if kind == "job":
        job = named(kind, question.given, _jobs(lake, heads), where)
        books = _books(lake, heads, _OF_JOB)
        return Explained(question, job, _days(heads), core.explain_job(books, job), core.layers_of_job(books, job))
    column, resource = _resource(lake, heads, question)
    books = _books(lake, heads, _OF_RESOURCE)
    return Explained(question, resource, _days(heads), core.explain_resource(books, resource, column))


def _heads(lake: Lake, question: Question) -> list[Commit]:
    committed = lake.committed_days()
    first, last = question.first_day or "", question.last_day or "9999"
    wanted = [day for day in committed if first <= day <= last]
    if not wanted:
        told = f"{committed[0]} to {committed[-1]} ({len(committed)} days)" if committed else "none"
        raise UsageError(
            f"explain: no day is committed {question.where if committed else 'yet'} in {lake.store.url}. Committed are: "
            f"{told}. Run the night for the day, or ask for another one.",
            found=question.where,
            expected=told,
        )
    return [head for head in map(lake.head, wanted) if head is not None]


def _assert_readable(heads: Sequence[Commit], specs: Sequence[Table]) -> None:
    """Refuse days whose tables are of another version than this code reads."""
    others = {}
    for head in heads:
        versions = {spec.name: head.handles[spec.name].version for spec in specs if spec.name in head.handles}
        differ = [
            f"{spec.name} version {versions.get(spec.name, 'none')}, expected {spec.version}"
            for spec in specs
            if versions.get(spec.name) != spec.version
        ]
        if differ:
            others[head.day] = differ[0]
    if others:
        first, last = min(others), max(others)
        raise LayoutError(
            f"explain: {len(others):,} day(s) from {first} to {last} were committed by another release ({first}: found "
            f"{others[first]}). Run `python -m flows.backfill --first-day {first} --last-day {last}`, or ask for other days.",
            expected="tables of this release",
            found=others[first],
        )


def _days(heads: Sequence[Commit]) -> list[str]:
    return [head.day for head in heads]


def _books(lake: Lake, heads: Sequence[Commit], specs: Sequence[Table]) -> list[core.Book]:
    books = []
    for n, head in enumerate(heads):
        tell(n, len(heads), head.day)
        tables = {spec.name: lake.read(head.handles[spec.name], spec) for spec in specs}
        books.append(core.Book(head.day, head.n, head.body.get("cause"), head.body.get("bills", []), tables))
    return books


def _charges(lake: Lake, heads: Sequence[Commit]) -> dict[str, str]:
    """What each charge is, in words, by key; estimates too."""
    known: dict[str, str] = {}
    columns = [
        "x_ChargeKey",
        "ServiceName",
        "ResourceId",
        "ChargePeriodStart",
        "BilledCost",
        "EffectiveCost",
        "BillingCurrency",
    ]
    for head in heads:
        for row in lake.read(head.handles[CHARGES.name], CHARGES, columns).to_pylist():
            since = row["ChargePeriodStart"].isoformat()[:16]
            amounts = (
                f"BilledCost {row['BilledCost']:f}, EffectiveCost {row['EffectiveCost']:f} {row['BillingCurrency']}"
            )
            known[row["x_ChargeKey"]] = ", ".join(
                x for x in (row["ServiceName"], row["ResourceId"], since, amounts) if x
            )
        keys = lake.read(head.handles[ADDRESSES.name], ADDRESSES, ["x_ChargeKey"])["x_ChargeKey"]
        known |= {k: "estimate" for k in pc.unique(keys).to_pylist() if k.startswith(core.ESTIMATE)}
    return known


def _jobs(lake: Lake, heads: Sequence[Commit]) -> dict[str, str]:
    """Names of the jobs that have money, by id."""
    known: dict[str, str] = {}
    for head in heads:
        ids = pc.unique(lake.read(head.handles[ADDRESSES.name], ADDRESSES, ["x_JobId"])["x_JobId"]).to_pylist()
        runs = lake.read(head.handles[JOB_RUNS.name], JOB_RUNS, ["job_id", "name"]).to_pylist()
        names = {row["job_id"]: row["name"] for row in runs if row["name"] is not None}
        known |= {i: names.get(i, known.get(i, i)) for i in ids if i is not None}
    return known


def _resource(lake: Lake, heads: Sequence[Commit], question: Question) -> tuple[str, str]:
    """The column that has the resource, and its value: a resource of the bill before a machine before a device."""
    known: dict[str, dict[str, str]] = {column: {} for column in core.RESOURCES}
    for head in heads:
        table = one_spelling(lake.read(head.handles[ADDRESSES.name], ADDRESSES, ["x_Cloud", *core.RESOURCES]))
        for column, ids in known.items():
            ids |= {i: i for i in pc.unique(table[column]).to_pylist() if i is not None}
    wanted = question.given.casefold()
    for column, ids in known.items():
        if question.given in ids or wanted in {i.casefold() for i in ids}:
            return column, named("resource", question.given, ids, question.where)
    every = {i: i for ids in known.values() for i in ids}
    return core.RESOURCES[0], named("resource", question.given, every, question.where)


def days_between(first: dt.date | None, last: dt.date | None) -> tuple[str | None, str | None]:
    """The days of a question as text; one day where there is no last, every day where there is none at all."""
    if first is None:
        return None, None
    return first.isoformat(), (last or first).isoformat()
