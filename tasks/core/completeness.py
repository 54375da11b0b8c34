"""Which hosts should have sent telemetry, and did not: producers expected against producers seen, by hour.

Expected are the producers that were seen before and after an hour, or up to the end of the day before and not since, and the
machines that a bill names in an hour in which nobody reported them. Works on names and ids alone. Pure.
Source: infra/rules/lake.md 18.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

HOURS = 24
GAP, SILENT, BILLED = "gap", "silent", "billed"
REASONS = {
    GAP: "seen before and after",
    SILENT: "seen up to the end of the day before, and not since",
    BILLED: "billed, and no telemetry names it",
}


@dataclass(frozen=True)
class Missing:
    """A producer or machine that was expected in hours of a day and not seen: hours 0 to 23, and why."""

    name: str
    hours: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Completeness:
    """One day: producers expected and seen in each of its hours, and what is missing, sorted by name."""

    expected: tuple[int, ...]
    seen: tuple[int, ...]
    missing: tuple[Missing, ...]


def completeness(
    seen: Mapping[int, Collection[str]],
    billed: Mapping[int, Collection[str]],
    observed: Mapping[int, Collection[str]],
) -> Completeness:
    """Producers and machines of a day.

    Args:
        seen: producers by hour, counted from the first hour of the day: -24 to 47 are the day before to the day after.
        billed: machines with a machine row by hour of the day, 0 to 23.
        observed: machines that telemetry names, likewise.
    """
    hours_of: dict[str, set[int]] = {}
    for hour, producers in seen.items():
        for producer in producers:
            hours_of.setdefault(producer, set()).add(hour)
    last_before = max((hour for hour, producers in seen.items() if hour < 0 and producers), default=None)
    missing = []
    for producer, hours in sorted(hours_of.items()):
        inside = [h for h in range(max(min(hours), 0), min(max(hours) + 1, HOURS)) if h not in hours]
        if inside:
            missing.append(Missing(producer, tuple(inside), GAP))
        if max(hours) < 0 and max(hours) == last_before:
            missing.append(Missing(producer, tuple(range(HOURS)), SILENT))
    for machine in sorted({m for machines in billed.values() for m in machines}):
        dark = [h for h in range(HOURS) if machine in billed.get(h, ()) and machine not in observed.get(h, ())]
        if dark:
            missing.append(Missing(machine, tuple(dark), BILLED))
    here = [len(set(seen.get(h, ()))) for h in range(HOURS)]
    lost = [sum(1 for m in missing if m.reason != BILLED and h in m.hours) for h in range(HOURS)]
    missing.sort(key=lambda m: (m.name, m.reason))
    return Completeness(tuple(a + b for a, b in zip(here, lost, strict=True)), tuple(here), tuple(missing))


def spans(hours: Sequence[int]) -> str:
    """Hours as people write them: 3, 5-7."""
    parts: list[list[int]] = []
    for hour in sorted(hours):
        if parts and hour == parts[-1][1] + 1:
            parts[-1][1] = hour
        else:
            parts.append([hour, hour])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
