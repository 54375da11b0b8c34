"""What stages hand to one another: small values that name immutable objects, with one canonical text each.

Knows no storage: `tasks/io/lake.py` makes and follows them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from seedance.canonical import canonical
from seedance.shard import ShardName


@dataclass(frozen=True)
class Part:
    """One object of a table: path in the lake, rows, size in bytes, sha256 of the bytes."""

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Handle:
    """One table that a stage made: name, version of its declaration, usage day (None when it has none), objects."""

    table: str
    version: int
    day: str | None
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Rows over all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def sha256(self) -> str:
        """Digest of the canonical text; equal exactly when the table's bytes are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """JSON-shaped."""
        return {
            "table": self.table,
            "version": self.version,
            "day": self.day,
            "parts": [asdict(part) for part in self.parts],
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Handle:
        """From what `to_dict` gives."""
        return cls(facts["table"], facts["version"], facts["day"], tuple(Part(**part) for part in facts["parts"]))

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical(self.to_dict()).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Handle:
        """From what `to_json` gives."""
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class Step:
    """What one key of a stage made: its tables by name, and small facts without floats (counts, verdicts)."""

    handles: Mapping[str, Handle]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical JSON."""
        return canonical(
            {"handles": {name: handle.to_dict() for name, handle in self.handles.items()}, "facts": self.facts}
        ).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Step:
        """From what `to_json` gives."""
        body = json.loads(text)
        return cls({name: Handle.from_dict(facts) for name, facts in body["handles"].items()}, body["facts"])


@dataclass(frozen=True)
class Commit:
    """Revision `n` of a day, from 1. body: {parent, key, data_key, handles, bills, prices, alpha, cause, facts}."""

    day: str
    n: int
    body: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Key of the run that made it."""
        return str(self.body["key"])

    @property
    def handles(self) -> dict[str, Handle]:
        """Every table that the revision names, published or not."""
        return {name: Handle.from_dict(facts) for name, facts in self.body.get("handles", {}).items()}


@dataclass(frozen=True)
class ShardRef:
    """One shard in the lake: its name, its path, its size in bytes."""

    name: ShardName
    path: str
    bytes: int


def step_difference(stored: Step, computed: Step) -> list[str]:
    """A line for each table and fact in which two outputs of one key differ, saying what each has."""
    lines = []
    for name in sorted({*stored.handles, *computed.handles}):
        one, two = stored.handles.get(name), computed.handles.get(name)
        if one != two:
            lines.append(f"{name}: stored {_brief(one)}, computed {_brief(two)}")
    for name in sorted({*stored.facts, *computed.facts}):
        had, has = (_text(step.facts, name) for step in (stored, computed))
        if had != has:
            lines.append(f"fact {name}: stored {had}, computed {has}")
    return lines


def _brief(handle: Handle | None) -> str:
    if handle is None:
        return "nothing"
    objects = ", ".join(part.path for part in handle.parts) or "no object"
    return f"{handle.rows:,} rows of version {handle.version}, day {handle.day}, in {objects}"


def _text(facts: Mapping[str, Any], name: str) -> str:
    return canonical(facts[name]).decode() if name in facts else "nothing"
