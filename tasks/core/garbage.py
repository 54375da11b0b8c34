"""What of a lake is garbage: steps that are old and lead to no commit, and objects that nothing names any more.

Two passes, so that nothing goes that somebody is about to name: a step goes when it is over thirty days old and no commit
names one of its objects; an object goes when nothing has named it for seven days. Commits and everything raw stay. Pure: knows
no storage and no clock. Source: infra/rules/lake.md 12.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

DAY_NS = 86_400_000_000_000
STEP_AGE_NS = 30 * DAY_NS
UNNAMED_NS = 7 * DAY_NS
_NAME = re.compile(rb'"(objects/[^"\\]+)"')


@dataclass(frozen=True)
class StepFacts:
    """One step: when it was written, ns UTC, and the objects that it names."""

    written_ns: int
    objects: frozenset[str]


@dataclass(frozen=True)
class Garbage:
    """What a sweep deletes, each sorted; and since when, ns UTC, each object that stays is named by nothing."""

    steps: list[str]
    objects: list[str]
    unnamed: dict[str, int]


def objects_in(text: bytes) -> frozenset[str]:
    """Paths of the objects that a step, a commit or any other canonical JSON text names, wherever it does."""
    return frozenset(name.decode() for name in _NAME.findall(text))


def find(
    now_ns: int,
    steps: Mapping[str, StepFacts],
    committed: Collection[str],
    objects: Iterable[str],
    unnamed: Mapping[str, int],
) -> Garbage:
    """What goes now.

    Args:
        now_ns: ns UTC.
        steps: by path.
        committed: objects that commits name.
        objects: paths of all objects.
        unnamed: what `Garbage.unnamed` of the sweep before said.
    """
    committed = set(committed)
    old = {
        path
        for path, step in steps.items()
        if now_ns - step.written_ns > STEP_AGE_NS and committed.isdisjoint(step.objects)
    }
    kept = committed.union(*(step.objects for path, step in steps.items() if path not in old))
    until_now = kept.union(*(steps[path].objects for path in old))
    # What only goes out of use with this sweep begins its seven days with it, whatever was noted about it before.
    since = {path: min(unnamed.get(path, now_ns), now_ns) if path not in until_now else now_ns for path in objects}
    loose = {path: at for path, at in since.items() if path not in kept}
    gone = sorted(path for path, at in loose.items() if now_ns - at >= UNNAMED_NS)
    return Garbage(sorted(old), gone, {path: at for path, at in sorted(loose.items()) if now_ns - at < UNNAMED_NS})
