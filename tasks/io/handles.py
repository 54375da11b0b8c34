"""What stages hand to one another: small values that name immutable objects, with one canonical text each.

Also how the lake's own texts are read back (layout, step, commit, record of a day) when they may have been cut or edited
from outside. Knows no storage: `tasks/io/lake.py` makes and follows them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any

from seedance.canonical import canonical
from seedance.errors import SchemaError
from seedance.shard import ShardName
from seedance.store import Entry
from tasks.errors import LayoutError

LAYOUT = 1
MOST_BUCKETS = 4096
BROKEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a text of ours raises when it is cut, edited, or of another shape."""

log = logging.getLogger(__name__)


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
    """Revision `n` of a day, from 1. body: {parent, key, data_key, handles, bills, prices, alphas, cause, facts}."""

    day: str
    n: int
    body: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Key of the run that made it."""
        return str(self.body["key"])

    @property
    def sha256(self) -> str:
        """Digest of its text."""
        return hashlib.sha256(canonical(self.body)).hexdigest()

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


def bucket_count(raw: bytes, url: str) -> int:
    """Buckets of the lake whose lake.json this is.

    Raises:
        LayoutError: another layout, or not ours; carries url, expected, found.
    """
    try:
        facts = json.loads(raw)
        layout, buckets = facts["layout"], facts["buckets"]
    except BROKEN as error:
        raise LayoutError(
            f"{url}/lake.json is not ours: {raw[:80]!r}. Expected layout and buckets. {_restore(url)}",
            url=url,
            expected=LAYOUT,
            found=None,
        ) from error
    if type(layout) is int and layout > LAYOUT:
        raise LayoutError(
            f"{url}: the lake has layout {layout}, and this code writes {LAYOUT}. Use the newer code that made it.",
            url=url,
            expected=LAYOUT,
            found=layout,
        )
    if type(layout) is not int or layout != LAYOUT:
        raise _no_layout(url, "layout", LAYOUT, layout)
    if type(buckets) is not int or not 1 <= buckets <= MOST_BUCKETS:
        raise _no_layout(url, "buckets", f"a whole number from 1 to {MOST_BUCKETS}", buckets)
    return buckets


def layout_gone(url: str, made: Iterable[str]) -> LayoutError:
    """The error of a lake that has days or steps and no lake.json."""
    return LayoutError(
        f"{url}: expected lake.json, found none beside {' and '.join(f'{name}/' for name in made)}: it was deleted. "
        f"{_restore(url)}",
        url=url,
        expected="lake.json",
        found=None,
    )


def read_commit(raw: bytes, day: str, n: int, url: str) -> Commit:
    """A commit from its text.

    Raises:
        LayoutError: the text is cut or edited; carries url, path, expected, found.
    """
    path = f"days/{day}/{n}.json"
    try:
        commit = Commit(day, n, json.loads(raw))
        _ = commit.key, commit.handles  # both are read from the text
    except BROKEN as error:
        raise LayoutError(
            f"{url}/{path}: expected a commit as JSON with its key and handles, found {len(raw):,} bytes that are none "
            f"({error}). Restore the file from a copy, or delete it and run the day again: it is then committed again.",
            url=url,
            path=path,
            expected="a commit",
            found=f"{len(raw)} bytes",
        ) from error
    return commit


def read_step(raw: bytes, path: str) -> Step | None:
    """A step from its text; None, with a warning, when the text is cut or edited: steps can be made again."""
    try:
        step = Step.from_json(raw)
        for handle in step.handles.values():
            handle.to_json()
        if isinstance(step.facts, dict):
            return step
    except BROKEN:
        pass
    log.warning("%s is not a step (%d bytes, cut or edited): it is made again", path, len(raw))
    return None


def record_text(commit: Commit, etags: Mapping[str, str], parts: Mapping[str, str]) -> bytes:
    """What `report/_days` says about a day.

    Args:
        commit: the head that the day's files are from.
        etags: tags of the files by path, as the store gives them.
        parts: digests of their bytes by path.
    """
    record = {"commit": commit.n, "sha256": commit.sha256, "etags": etags, "parts": parts}
    return canonical({**record, "check": _check_of(record)})


def _check_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical({name: value for name, value in record.items() if name != "check"})).hexdigest()


def read_record(raw: bytes | None, path: str) -> dict[str, Any]:
    """What `report/_days` says about a day; empty, with a warning, when it cannot be read: it is written again."""
    if raw is None:
        return {}
    try:
        record = json.loads(raw)
        whole = record.get("check") in (None, _check_of(record))  # None: written before records had one
        if whole and all(isinstance(record.get(n, {}), dict) for n in ("etags", "parts")):
            return dict(record)
    except (*BROKEN, SchemaError):
        pass
    log.warning("%s is not a record of a day (%d bytes, cut or edited): it is written again", path, len(raw))
    return {}


def commit_numbers(entries: Iterable[Entry]) -> dict[str, list[int]]:
    """Commit numbers by day, from a listing below `days/`; any other file there is left alone, with a warning."""
    days: dict[str, list[int]] = {}
    for entry in entries:
        _, _, rest = entry.path.partition("/")
        day, _, file = rest.partition("/")
        stem = file.removesuffix(".json")
        if is_day(day) and file.endswith(".json") and stem.isascii() and stem.isdigit() and stem[0] != "0":
            days.setdefault(day, []).append(int(stem))
        else:
            log.warning("%s is not the name of a commit (days/YYYY-MM-DD/<n>.json) and is ignored", entry.path)
    return days


def is_day(day: str) -> bool:
    """True for a date of the calendar, YYYY-MM-DD."""
    try:
        return date.fromisoformat(day).isoformat() == day
    except ValueError:
        return False


def _no_layout(url: str, name: str, expected: Any, found: Any) -> LayoutError:
    return LayoutError(
        f"{url}/lake.json: expected {name} {expected}, found {found!r}. {_restore(url)}",
        url=url,
        expected=expected,
        found=found,
    )


def _restore(url: str) -> str:
    text = canonical({"buckets": 8, "layout": LAYOUT}).decode()
    return (
        f"Restore it from a copy, or write {text} into {url}/lake.json with the bucket count that the lake was made with "
        "(setting buckets of the first run, 8 unless it was set); another count makes every stage run again."
    )
