"""Errors of the part that runs on GPU hosts.

    SeedanceError
    ├── SchemaError      a table does not meet its declaration
    ├── StoreError       storage refused, or cannot keep the promise of create
    │   └── Exists       the object is there already
    ├── ShardError       a shard cannot be written or read
    └── CountError       FLOPs of a model cannot be counted

Each carries its facts as attributes, so that callers need not parse text, and keeps them when it crosses a process.
"""

from __future__ import annotations

import pickle
from typing import Any


class WithFacts(Exception):
    """Mechanism of both error roots, never raised itself: keyword facts become attributes and survive pickling."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} carries no fact {name!r}; it has {', '.join(facts) or 'none'}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Facts can hold what a worker process cannot pickle (a lock in a client object); text of it is then enough.
        return _revive, (type(self), str(self), {k: _portable(v) for k, v in self.facts.items()})


class SeedanceError(WithFacts):
    """Root of the errors raised by `seedance`; keyword facts become attributes, and stand in `facts`."""


class SchemaError(SeedanceError):
    """A table does not meet its declaration: table, column, expected, found, rows, where."""


class StoreError(SeedanceError):
    """Storage refused, or cannot keep the promise of create: url, path."""


class Exists(StoreError):
    """The object is there already: path."""


class ShardError(SeedanceError):
    """A shard cannot be written or read: path, reason."""


class CountError(SeedanceError):
    """FLOPs of a model cannot be counted: model, path, reason, as far as they apply."""


def _revive(kind: type[WithFacts], message: str, facts: dict[str, Any]) -> WithFacts:
    return kind(message, **facts)


def _portable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return str(value)
    return value
