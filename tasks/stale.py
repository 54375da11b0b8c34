"""Which published days are stale: a marker beside the reports of a day that could not be published as its inputs now are.

`report/_stale/<day>.json` says since when, why, and which commit still stands (null when there is none). It is made by the
first run that fails the day, kept by the next ones, and taken away by the first that does not. Source: infra/rules/lake.md 16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from seedance.canonical import canonical
from tasks.errors import LayoutError
from tasks.io.handles import BROKEN, is_day
from tasks.io.lake import Lake

FOLDER = "report/_stale"


def mark(lake: Lake, failed: Mapping[str, str], first_day: str, last_day: str, now: str) -> None:
    """Bring the markers to what a run found.

    Args:
        lake: where the reports are.
        failed: reason by whatever failed; only usage days count.
        first_day: oldest usage day that the run looked at.
        last_day: newest. Markers of days outside are left alone.
        now: instant of the run, ISO 8601 in UTC.
    """
    days = {what: why for what, why in failed.items() if is_day(what)}
    there = days_marked(lake)
    for day in there:
        if day not in days and first_day <= day <= last_day:
            lake.store.delete(_path(day))
    for day, why in sorted(days.items()):
        former = read(lake, day) if day in there else {}
        marker = {"since": former.get("since", now), "why": why, "commit": _standing(lake, day)}
        if marker != former:
            lake.store.replace(_path(day), canonical(marker))


def days_marked(lake: Lake) -> list[str]:
    """Days that have a marker, sorted."""
    names = [entry.path.removeprefix(f"{FOLDER}/").removesuffix(".json") for entry in lake.store.list(FOLDER)]
    return sorted(name for name in names if is_day(name))


def read(lake: Lake, day: str) -> dict[str, object]:
    """The marker of a day: since, why, commit; empty without one, and for a text that is none."""
    try:
        marker = json.loads(lake.store.get(_path(day)) or b"{}")
    except BROKEN:
        return {}
    return marker if isinstance(marker, dict) else {}


def _standing(lake: Lake, day: str) -> int | None:
    try:
        head = lake.head(day)
    except LayoutError:  # cut or edited: `verify` says so
        return None
    return None if head is None else head.n


def _path(day: str) -> str:
    return f"{FOLDER}/{day}.json"
