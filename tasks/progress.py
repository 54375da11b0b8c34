"""How far long work is: a stage says what it has done of what is to be done, and whoever started it listens or does not.

The listener travels in the context, so that a stage is a plain function of its inputs and says nothing where nobody asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int, str], None]
"""Called with what is done, what is to be done, and what is being done now."""

_LISTENER: ContextVar[Listener | None] = ContextVar("progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Everything that is started inside tells this listener, and the one around it."""
    outer = _LISTENER.get()

    def both(done: int, of: int, what: str) -> None:
        listener(done, of, what)
        if outer is not None:
            outer(done, of, what)

    token = _LISTENER.set(both)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(done: int, of: int, what: str) -> None:
    """Say how far the work is.

    Args:
        done: units that are finished.
        of: units in all.
        what: the unit at work, such as a day.
    """
    listener = _LISTENER.get()
    if listener is not None:
        listener(done, of, what)
