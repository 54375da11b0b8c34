"""Call what users hang on the seven points of a unit, in order of priority, so that no failure of theirs reaches training.

A hook that raises is counted, told once in the log of `seedance.probe` and removed. A point without hooks costs one look-up.
Knows no framework: what a hook is given is whatever the caller of `fire` passes.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from seedance.errors import SeedanceError

POINTS = ("pre_batch", "post_batch", "pre_forward", "post_forward", "post_backward", "pre_step", "post_step")
"""Where hooks can hang, in the order in which a training unit passes them."""
Hook = Callable[[Any], object]
"""Takes the context of the point; what it returns is ignored."""

logger = logging.getLogger("seedance.probe")


class HookError(SeedanceError):
    """A hook that cannot be added: point, name."""


class Handle:
    """One hook on one point, to be removed again."""

    __slots__ = ("_manager", "fn", "is_active", "name", "place", "point")

    def __init__(self, manager: HookManager, point: str, fn: Hook, name: str, place: tuple[int, int]) -> None:
        self._manager = manager
        self.point = point
        self.fn = fn
        self.name = name
        self.place = place
        """Priority, then how many hooks were added before."""
        self.is_active = True

    def remove(self) -> None:
        """Take the hook off its point; once it is off, nothing."""
        self._manager._remove(self)

    def __repr__(self) -> str:
        return f"<hook {self.name} on {self.point}, priority {self.place[0]}{'' if self.is_active else ', removed'}>"


class HookManager:
    """Hooks by point. Safe to use from several threads; a hook may add and remove hooks, also itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: dict[str, tuple[Handle, ...]] = dict.fromkeys(POINTS, ())
        self._failures: dict[str, int] = {}
        self._added = 0

    @property
    def failures(self) -> Mapping[str, int]:
        """How often hooks failed, by name."""
        return MappingProxyType(self._failures)

    def add(self, point: str, fn: Hook, *, priority: int = 0, name: str | None = None) -> Handle:
        """Hang a hook on a point.

        Args:
            point: one of POINTS.
            fn: called with the context of the point.
            priority: smaller goes first; hooks of one priority go in the order in which they were added.
            name: what the log and `failures` call it; by default where it is defined.

        Raises:
            HookError: there is no such point, or the hook is no plain callable; carries point and name.
        """
        named = name if name is not None else _name_of(fn)
        if point not in POINTS:
            near = get_close_matches(str(point), POINTS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise HookError(
                f"hook {named}: expected a point of {', '.join(POINTS)}, found {point!r}.{hint}",
                point=point,
                name=named,
            )
        if (found := _unfit(fn)) is not None:
            raise HookError(
                f"hook {named} on {point}: expected a function of one argument, found {found}. Training waits for hooks: "
                "pass a plain function.",
                point=point,
                name=named,
            )
        with self._lock:
            handle = Handle(self, point, fn, named, (priority, self._added))
            self._added += 1
            self._hooks[point] = tuple(sorted((*self._hooks[point], handle), key=lambda h: h.place))
        return handle

    def wanted(self, point: str) -> bool:
        """Whether a point has a hook; for a name that is no point, no."""
        return bool(self._hooks.get(point))

    def fire(self, point: str, context: Any = None) -> None:
        """Call the hooks of a point in order.

        Hooks added meanwhile wait for the next time; those removed meanwhile are not called any more. What a hook raises
        goes no further, but for KeyboardInterrupt, SystemExit and the like.
        """
        for handle in self._hooks.get(point, ()):
            if not handle.is_active:
                continue
            try:
                handle.fn(context)
            except Exception as error:  # noqa: BLE001 - a user's hook can raise anything, and training goes on
                self._fail(handle, error)

    def clear(self) -> None:
        """Remove every hook."""
        with self._lock:
            for handles in self._hooks.values():
                for handle in handles:
                    handle.is_active = False
            self._hooks = dict.fromkeys(POINTS, ())

    def _remove(self, handle: Handle) -> None:
        with self._lock:
            handle.is_active = False
            self._hooks[handle.point] = tuple(h for h in self._hooks[handle.point] if h is not handle)

    def _fail(self, handle: Handle, error: Exception) -> None:
        handle.remove()
        with self._lock:
            count = self._failures.get(handle.name, 0) + 1
            self._failures[handle.name] = count
        if count == 1:
            logger.warning(
                "hook %s on %s failed with %s: %s. It was removed; training goes on without it. Mend it and add it again.",
                handle.name,
                handle.point,
                type(error).__name__,
                error,
                exc_info=error,
            )


def _unfit(fn: object) -> str | None:
    """Why this cannot be a hook: a call of it would not do its work."""
    if not callable(fn):
        return type(fn).__name__
    if inspect.iscoroutinefunction(fn):
        return "a coroutine function"
    return "a generator function" if inspect.isgeneratorfunction(fn) else None


def _name_of(fn: Any) -> str:
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{module}.{name}" if module else str(name)
