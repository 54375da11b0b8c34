"""Pareto fronts: which configurations nothing else beats, and what beats the others.

Points with exact values per objective in, a verdict per point out. A point is dominated when another is at least as good in
every objective and better in one; points that are equal in all of them are all on the front. Values are handed to the library
as ranks among the distinct exact values, so that two costs that differ in the last digit never become one float. Knows no
table, no clock, no disk. Source: https://multi-objective.github.io/moocore/python/ (`is_nondominated`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import moocore
import numpy as np
import numpy.typing as npt

from tasks.errors import UsageError

Exact: TypeAlias = int | float | Decimal | Fraction


@dataclass(frozen=True)
class Objective:
    """What configurations are compared by.

    Args:
        name: name of the objective.
        highest: True when more is better.
        about: what it is, with its unit.
    """

    name: str
    highest: bool
    about: str


COST = "cost"
OBJECTIVES = (
    Objective(COST, False, "money for one unit of work, in the currency of the bill"),
    Objective("quality", True, "value of a quality metric of which more is better"),
    Objective("loss", False, "value of a quality metric of which less is better"),
    Objective("throughput", True, "work a second"),
    Objective("latency", False, "mean time of a step, iteration or batch, ms"),
    Objective("energy", False, "J for one unit of work"),
)
"""In the order in which a set names them; cost is always one of them."""

_BY_NAME = {o.name: o for o in OBJECTIVES}


@dataclass(frozen=True)
class Point:
    """One configuration.

    Args:
        label: what it is called in messages and in `dominated_by`.
        group: only points of one group are compared: currency, kind of work, what is counted.
        values: value by objective; an objective that is not known is absent.
        reason: why it cannot be compared whatever its values, or None.
    """

    label: str
    group: tuple[str, ...]
    values: Mapping[str, Exact]
    reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of one point.

    Args:
        on_front: None when it was compared with nothing.
        objectives: the objectives it was compared in.
        size: points of its set, itself included; 0 when it was compared with nothing.
        dominated_by: label of one point of the front that is at least as good in all of them and better in one.
        why: why it was not compared.
    """

    on_front: bool | None
    objectives: tuple[str, ...] = ()
    size: int = 0
    dominated_by: str | None = None
    why: str | None = None


def fronts(points: Sequence[Point]) -> list[Verdict]:
    """A verdict per point, in the order given; it depends on the points alone, not on their order.

    A point that lacks an objective is compared only with points of its group that have the same objectives: a missing value is
    neither good nor bad. A point without a cost, or with nothing beside it, is compared with none.

    Raises:
        UsageError: a value is NaN or infinite, or an objective is unknown; names the configuration. Carries found, expected.
    """
    sets: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    verdicts: list[Verdict] = []
    exact = [_exact(point) for point in points]
    for i, point in enumerate(points):
        known = tuple(o.name for o in OBJECTIVES if o.name in point.values)
        why = point.reason or _alone(known)
        verdicts.append(Verdict(None, known, why=why))
        if why is None:
            sets.setdefault((point.group, known), []).append(i)
    for (_, known), members in sets.items():
        ranks = _ranks([[exact[i][name] for name in known] for i in members], known)
        labels = [points[i].label for i in members]
        for i, beaten_by in zip(members, _beaten_by(ranks, labels), strict=True):
            verdicts[i] = Verdict(beaten_by is None, known, len(members), beaten_by)
    return verdicts


def _alone(known: Sequence[str]) -> str | None:
    if COST not in known:
        return "its cost is not known"
    return "nothing is known of it beside its cost" if len(known) < 2 else None


def _exact(point: Point) -> dict[str, Fraction]:
    values = {}
    for name, value in point.values.items():
        if name not in _BY_NAME:
            raise UsageError(
                f"configuration {point.label}: unknown objective {name}. Expected one of {', '.join(_BY_NAME)}.",
                found=name,
                expected=tuple(_BY_NAME),
            )
        if not _is_finite(value):
            raise UsageError(
                f"configuration {point.label}: {name} is {value}; expected a finite number. Leave the objective out where "
                "its value is not known.",
                found=str(value),
                expected="a finite number",
                config=point.label,
                objective=name,
            )
        values[name] = Fraction(value)
    return values


def _is_finite(value: Exact) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite()
    return math.isfinite(value) if isinstance(value, float) else True


def _ranks(rows: Sequence[Sequence[Fraction]], known: Sequence[str]) -> npt.NDArray[np.float64]:
    """Rank of each value among the distinct values of its objective, least first and best first: shape (points, objectives)."""
    columns = []
    for values, name in zip(zip(*rows, strict=True), known, strict=True):
        order = sorted(set(values), reverse=_BY_NAME[name].highest)
        place = {value: float(n) for n, value in enumerate(order)}
        columns.append([place[value] for value in values])
    return np.array(columns, np.float64).T


def _beaten_by(ranks: npt.NDArray[np.float64], labels: Sequence[str]) -> list[str | None]:
    """Label of the cheapest point of the front that dominates each point, ties by the other objectives and the label."""
    on_front: npt.NDArray[Any] = moocore.is_nondominated(ranks, keep_weakly=True)
    best = sorted(np.flatnonzero(on_front).tolist(), key=lambda i: (*ranks[i], labels[i]))
    front = ranks[best]
    found: list[str | None] = []
    for i, kept in enumerate(on_front):
        if kept:
            found.append(None)
            continue
        beats = np.all(front <= ranks[i], axis=1) & np.any(front < ranks[i], axis=1)
        found.append(labels[best[int(np.argmax(beats))]])
    return found
