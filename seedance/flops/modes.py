"""The dispatch mode of a counter, and how it comes and goes on a stack that it shares with modes of the user.

Whoever leaves a mode takes the topmost one off the stack, whichever that is, and restores the flags by which the compiler
decides whether to compile at all. So this mode goes under all others, where nobody takes it off by mistake and it sees
what really runs; it leaves from where it stands, and the flags become what they would be had it never been there. Needs
torch.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

Operator = Callable[[Any, tuple[Any, ...], dict[str, Any], bool], Any]
"""Runs an operator: the operator, its arguments, whether its tensors are fake."""

_HOOKS_TWICE = ("ignore", re.compile("Using `torch.compile.module.` when there are global hooks"), UserWarning, None, 0)
"""Hooks fire for the wrapper of a compiled module and for the module: the counter takes both for one layer."""

_PLAIN, _FAKE, _FOREIGN = 0, 1, 2
_kinds: dict[type, int] = {}


class CountingMode(TorchDispatchMode):  # type: ignore[misc]
    """Hands every operator on plain or fake tensors to a function; subclasses that act for themselves come first.

    Args:
        operator: called with the mode switched off.
    """

    supports_higher_order_operators = True

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self._operator: Operator | None = operator
        self._stance: Any = None
        self.has_met_subclasses = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else the first operator would import the compiler, and each one would pay for switching it off.
        return False

    def start(self, *, on_top: bool = False) -> None:
        """Put the mode on this thread's stack, and let compiled code run eager until it goes.

        Args:
            on_top: over the other modes of this thread; else under them.
        """
        if "torch._dynamo" in sys.modules:
            # Compiled code cannot be looked into, and refuses to run under a mode when it must not fall back to eager.
            self._stance = torch.compiler.set_stance("force_eager")
            _filters().insert(0, _HOOKS_TWICE)
        if on_top:
            self.__enter__()
        else:
            _put_under(self)

    def stop(self) -> bool:
        """Take the mode off this thread's stack; False when it is not there, and then it does nothing where it is."""
        self._operator = None
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
            if _HOOKS_TWICE in _filters():
                _filters().remove(_HOOKS_TWICE)
        return _take_off(self)

    def again(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what consists of operators, and count those."""
        dispatch._push_mode(self)
        try:
            return func(*args, **kwargs)
        finally:
            dispatch._pop_mode(None)

    def branches(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that calls functions (a condition, a loop), and count what they do."""

        def counted(value: Any) -> Any:
            if not callable(value) or isinstance(value, torch.Tensor):
                return value
            return lambda *inner, **named: self.again(value, inner, named)

        return func(*map(counted, args), **{name: counted(value) for name, value in kwargs.items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = False
        for one in types:
            kind = _kinds.get(one)
            if kind is None:
                kind = _kinds[one] = _kind(one)
            if kind == _FOREIGN:
                self.has_met_subclasses = True
                return NotImplemented
            is_fake = is_fake or kind == _FAKE
        if self._operator is None:
            return func(*args, **(kwargs or {}))
        return self._operator(func, args, kwargs or {}, is_fake)


def _filters() -> list[Any]:
    filters: Any = warnings.filters
    return filters  # type: ignore[no-any-return]


def _kind(of: type) -> int:
    name = f"{of.__module__}.{of.__qualname__}"
    if name == "torch._subclasses.fake_tensor.FakeTensor":
        return _FAKE
    # Parameters, lazy ones, and whatever only changes functions: they leave operators as they are.
    is_inert = getattr(of, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
    if is_inert or name.startswith("torch._subclasses.functional_"):
        return _PLAIN
    return _FOREIGN


Flags = tuple[bool, bool, bool]
"""Whether any mode is on, one that is no part of the framework, one that wants to see inside compiled code."""


def _put_under(mode: CountingMode) -> None:
    """Put a mode under all others of this thread, with an entry of the flags that were set without any of them."""
    above = [_pop() for _ in _stack()]
    above.reverse()
    base = _entry(above[0], above.count(above[0])) if above else _flags()
    for one in (mode, *above):
        dispatch._push_mode(one)
    mode.old_dispatch_mode_flags.append(base[0])
    mode.old_non_infra_dispatch_mode_flags.append(base[1])
    mode.old_without_ignore_compile_internals_dispatch_mode_flags.append(base[2])
    _set_flags((True, True, True), above)


def _take_off(mode: CountingMode) -> bool:
    """Remove a mode from this thread's stack, wherever it stands; False when it is not on it."""
    if not any(one is mode for one in _stack()):
        return False
    above: list[TorchDispatchMode] = []
    while (top := _pop()) is not mode:
        above.append(top)
    above.reverse()
    for one in above:
        dispatch._push_mode(one)
    base = _entry(mode, 1)
    for entries in (
        mode.old_dispatch_mode_flags,
        mode.old_non_infra_dispatch_mode_flags,
        mode.old_without_ignore_compile_internals_dispatch_mode_flags,
    ):
        entries.pop()
    _set_flags(base, above)
    return True


def _stack() -> list[TorchDispatchMode]:
    """Modes of this thread, the top last, without those of the framework, which have places of their own."""
    depth = torch._C._len_torch_dispatch_stack()
    modes = [torch._C._get_dispatch_stack_at(place) for place in range(depth)]
    return [one for one in modes if getattr(one, "_mode_key", None) is None]


def _pop() -> TorchDispatchMode:
    return dispatch._pop_mode(None)


def _flags() -> Flags:
    return (
        dispatch._is_in_torch_dispatch_mode,
        dispatch._is_in_non_infra_torch_dispatch_mode,
        dispatch._is_in_any_mode_without_ignore_compile_internals,
    )


def _entry(mode: TorchDispatchMode, place: int) -> Flags:
    """The flags that a mode will set when it leaves, its last entry but `place` - 1."""
    return (
        mode.old_dispatch_mode_flags[-place],
        mode.old_non_infra_dispatch_mode_flags[-place],
        mode.old_without_ignore_compile_internals_dispatch_mode_flags[-place],
    )


def _set_flags(flags: Flags, above: list[TorchDispatchMode]) -> None:
    """Set the flags that the modes above will restore, and those of now, as if they had been entered from `flags`."""
    left = {id(one): above.count(one) for one in above}  # a mode entered several times has its oldest entry first
    for one in above:
        place = -left[id(one)]
        left[id(one)] -= 1
        one.old_dispatch_mode_flags[place] = flags[0]
        one.old_non_infra_dispatch_mode_flags[place] = flags[1]
        one.old_without_ignore_compile_internals_dispatch_mode_flags[place] = flags[2]
        flags = (True, flags[1] or not one.is_infra_mode(), flags[2] or not one.ignore_compile_internals())
    dispatch._is_in_torch_dispatch_mode = flags[0]
    dispatch._is_in_non_infra_torch_dispatch_mode = flags[1]
    dispatch._is_in_any_mode_without_ignore_compile_internals = flags[2]
    dispatch.set_is_in_mode_without_ignore_compile_internals(flags[2])
