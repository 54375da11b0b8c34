"""Everything that is changed outside of this package while a probe is attached, and how it is put back exactly.

A model's calls are seen where torch itself looks for the compiled form of a module: one attribute of the instance, which
copies and pickles leave out. Backward passes, data loaders, saves and scaled steps are seen by wrapping one function each.
Whatever wraps one of ours meanwhile keeps working: a replaced function that cannot be put back only passes its call on.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, Protocol

import torch
import torch.utils.data.dataloader
from torch import nn
from torch.optim import optimizer as optimizers

Function = Callable[..., Any]
_ENTRY = "_compiled_call_impl"
_SAVES = (
    ("torch", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint", "async_save"),
    ("torch.distributed.checkpoint.state_dict_saver", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("transformers.integrations.accelerate", "save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)
"""Functions that write a checkpoint, where they are called by name; those that are imported already."""
_FRAMES = "torch._dynamo.eval_frame"
_MOST_FRAMES = 200
_graph_task = torch._C._current_graph_task_id
_is_compiling = torch.compiler.is_compiling


class Listener(Protocol):
    """What is told of what happens. No method raises."""

    is_on: bool

    @property
    def thread(self) -> int:
        """Thread of the models; 0 before the first call."""

    def begin(self, entry: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A marked module is called; False when nobody is to be told of its end."""

    def end(self, module: nn.Module, output: Any, error: BaseException | None) -> None:
        """Its call is over."""

    def begin_graph(self) -> bool:
        """A recorded graph of a device is replayed; False when nobody is to be told of its end."""

    def end_graph(self, error: BaseException | None) -> None:
        """The replay was given to the device."""

    def begin_run(self) -> None:
        """The autograd engine begins."""

    def end_run(self, *, failed: bool) -> None:
        """The autograd engine is done."""

    def begin_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def end_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        """An optimizer has stepped, or its step was skipped."""

    def rest(self) -> None:
        """Data are about to be fetched."""

    def waited(self, kind: str, begin_ns: int) -> None:
        """Host time was spent on `input` or `checkpoint` from then until now."""

    def compiles(self) -> None:
        """Something is about to be compiled."""

    def compiled(self) -> None:
        """Something was."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One attribute that was replaced."""

    owner: Any
    name: str
    original: Any
    replacement: Any


@dataclass(slots=True)
class _Mark:
    """One module whose calls are seen."""

    module: weakref.ref[nn.Module]
    entry: int
    call: Function
    former: Function | None


class Patches:
    """All changes of one attached session.

    Args:
        listener: told of what happens.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._changes: list[_Change] = []
        self._marks: dict[int, _Mark] = {}
        self._inside: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._wants_steps = False
        self._steps = 0

    # --- models -----------------------------------------------------------------------------------------------------

    def mark(self, module: nn.Module, entry: int) -> None:
        """See the calls of a module; again is fine."""
        known = self._marks.get(id(module))
        if known is not None and known.module() is module and module.__dict__.get(_ENTRY) is known.call:
            return
        former = module.__dict__.get(_ENTRY)
        call = _entry(self._listener, entry, weakref.ref(module), former)
        self._marks[id(module)] = _Mark(weakref.ref(module), entry, call, former)
        # Not by setattr: some modules hand their attributes on to the one that they wrap.
        module.__dict__[_ENTRY] = call
        self._inside.clear()

    def unmark(self, module: nn.Module) -> None:
        """Let a module's calls go their way."""
        mark = self._marks.pop(id(module), None)
        if mark is not None:
            _put_back(mark)
            self._inside.clear()

    def is_foreign(self, module: nn.Module) -> bool:
        """Whether a module was compiled in place."""
        mark = self._marks.get(id(module))
        held = module.__dict__.get(_ENTRY)
        if mark is not None and mark.call is held:
            held = mark.former
        return held is not None

    # --- functions --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Change what is to be changed."""
        loader = torch.utils.data.dataloader
        self._replace(torch.autograd, "_engine_run_backward", self._engine)
        self._replace(torch, "compile", self._compile)
        self._replace(nn.Module, "compile", self._compile_module)
        self._replace(nn.Module, "_replicate_for_data_parallel", self._replicate)
        self._replace(torch.amp.GradScaler, "step", self._scaled)
        self._replace(torch.cuda.CUDAGraph, "replay", self._graph)
        self._replace(loader.DataLoader, "__iter__", functools.partial(self._wait, "input"))
        self._replace(loader._BaseDataLoaderIter, "__next__", functools.partial(self._wait, "input"))
        self._wants_steps = True
        self.refresh()

    def refresh(self) -> None:
        """Change what was imported meanwhile. Called again and again, outside of a step."""
        if self._wants_steps and not self._handles and not is_in_step_hooks():
            self._handles = [
                optimizers.register_optimizer_step_pre_hook(self._begin_step),
                optimizers.register_optimizer_step_post_hook(self._end_step),
            ]
        for change in self._changes:
            if change.owner.__dict__.get(change.name) is change.original:  # somebody put back what we changed
                setattr(change.owner, change.name, change.replacement)
        frames = sys.modules.get(_FRAMES)
        if frames is not None and hasattr(frames, "OptimizedModule"):
            self._replace(frames.OptimizedModule, "__call__", self._optimized)
        for name, function in _SAVES:
            module = sys.modules.get(name)
            if module is not None and callable(module.__dict__.get(function)):
                self._replace(module, function, functools.partial(self._wait, "checkpoint"))

    def restore(self) -> bool:
        """Put everything back; False when step hooks must stay until torch is out of them: call again then."""
        self._wants_steps = False
        for mark in self._marks.values():
            _put_back(mark)
        self._marks.clear()
        self._inside.clear()
        for change in reversed(self._changes):
            if change.owner.__dict__.get(change.name) is change.replacement:
                setattr(change.owner, change.name, change.original)
        self._changes.clear()
        if self._handles and is_in_step_hooks():
            return False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return True

    def _replace(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        original = owner.__dict__.get(name)
        if original is None or any(c.owner is owner and c.name == name for c in self._changes):
            return
        replacement = make(original)
        setattr(owner, name, replacement)
        self._changes.append(_Change(owner, name, original, replacement))

    def _engine(self, original: Function) -> Function:
        listener, patches = self._listener, self

        @functools.wraps(original)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not listener.is_on or _is_compiling() or not patches._is_mine():
                return original(*args, **kwargs)
            listener.begin_run()
            try:
                result = original(*args, **kwargs)
            except BaseException:
                listener.end_run(failed=True)
                raise
            listener.end_run(failed=False)
            return result

        return _engine_run_backward

    def _is_mine(self) -> bool:
        thread = self._listener.thread
        return not thread or get_ident() == thread or _graph_task() != -1

    def _compile(self, original: Function) -> Function:
        listener = self._listener

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - the name it has
            if not listener.is_on or _is_compiling():
                return original(*args, **kwargs)
            listener.compiles()
            made = original(*args, **kwargs)
            listener.compiled()
            return made

        return compile

    def _compile_module(self, original: Function) -> Function:
        listener, patches = self._listener, self

        @functools.wraps(original)
        def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: A001 - the name it has
            mark = patches._marks.get(id(self))
            if not listener.is_on or mark is None or self.__dict__.get(_ENTRY) is not mark.call:
                original(self, *args, **kwargs)
                return
            original(self, *args, **kwargs)
            if self.__dict__.get(_ENTRY) is not mark.call:
                patches.mark(self, mark.entry)

        return compile

    def _replicate(self, original: Function) -> Function:
        patches = self

        @functools.wraps(original)
        def _replicate_for_data_parallel(self: nn.Module) -> Any:
            replica = original(self)
            mark = patches._marks.get(id(self))
            if mark is not None and replica.__dict__.get(_ENTRY) is mark.call:
                # Ours would call the module that it was made for, not the replica.
                _set(replica, mark.former)
            return replica

        return _replicate_for_data_parallel

    def _optimized(self, original: Function) -> Function:
        listener, patches = self._listener, self

        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not listener.is_on or _is_compiling():
                return original(self, *args, **kwargs)
            inside = patches._marks_inside(self)
            if not inside:
                return original(self, *args, **kwargs)
            # The compiler must not see our entries: they would be part of what it compiles, and of what it guards.
            hidden = [mark for one in inside if (mark := patches._hide(one)) is not None]
            try:
                if not listener.begin(hidden[0].entry if hidden else 0, self, args, kwargs):
                    return original(self, *args, **kwargs)
                try:
                    result = original(self, *args, **kwargs)
                except BaseException as error:
                    listener.end(self, None, error)
                    raise
                listener.end(self, result, None)
                return result
            finally:
                for mark in hidden:
                    patches._show(mark)

        return __call__

    def _marks_inside(self, module: Any) -> tuple[int, ...]:
        """Marked modules that a compiled one wraps."""
        found = self._inside.get(module)
        if found is None:
            found = tuple(id(one) for one in module.modules() if id(one) in self._marks)
            self._inside[module] = found
        return found

    def _hide(self, key: int) -> _Mark | None:
        mark = self._marks.get(key)
        module = None if mark is None else mark.module()
        if mark is None or module is None or module.__dict__.get(_ENTRY) is not mark.call:
            return None
        _set(module, mark.former)
        return mark

    def _show(self, mark: _Mark) -> None:
        module = mark.module()
        if module is not None and self._marks.get(id(module)) is mark and module.__dict__.get(_ENTRY) is mark.former:
            module.__dict__[_ENTRY] = mark.call

    def _wait(self, kind: str, original: Function) -> Function:
        listener = self._listener

        @functools.wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            if not listener.is_on:
                return original(*args, **kwargs)
            if kind == "input":
                listener.rest()
            begin = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                listener.waited(kind, begin)

        return wait

    def _scaled(self, original: Function) -> Function:
        listener, patches = self._listener, self

        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            steps = patches._steps
            result = original(self, optimizer, *args, **kwargs)
            if listener.is_on and patches._steps == steps:
                listener.end_step(optimizer, skipped=True)
            return result

        return step

    def _graph(self, original: Function) -> Function:
        listener = self._listener

        @functools.wraps(original)
        def replay(self: Any) -> Any:
            if not listener.is_on or not listener.begin_graph():
                return original(self)
            try:
                result = original(self)
            except BaseException as error:
                listener.end_graph(error)
                raise
            listener.end_graph(None)
            return result

        return replay

    def _begin_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._steps += 1
        if self._listener.is_on and self._is_mine():
            self._listener.begin_step(optimizer)

    def _end_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._listener.is_on and self._is_mine():
            self._listener.end_step(optimizer)


def _entry(listener: Listener, entry: int, of: weakref.ref[nn.Module], former: Function | None) -> Function:
    """What is called instead of a module's own call: torch comes here first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        module = of()
        assert module is not None  # it is being called
        inner = module._call_impl if former is None else former
        if _is_compiling() or not listener.begin(entry, module, args, kwargs):
            return inner(*args, **kwargs)
        try:
            result = inner(*args, **kwargs)
        except BaseException as error:
            listener.end(module, None, error)
            raise
        listener.end(module, result, None)
        return result

    return call


def _put_back(mark: _Mark) -> None:
    module = mark.module()
    if module is not None and module.__dict__.get(_ENTRY) is mark.call:
        _set(module, mark.former)


def _set(module: nn.Module, call: Function | None) -> None:
    if call is None:
        module.__dict__.pop(_ENTRY, None)
    else:
        module.__dict__[_ENTRY] = call


def is_in_backward() -> bool:
    """Whether this thread runs a part of a backward pass."""
    return bool(_graph_task() != -1)


def is_in_step() -> bool:
    """Whether an optimizer's step runs further up in this thread."""
    return any(map(_is_step, _frames()))


def _is_step(frame: FrameType) -> bool:
    return frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"


def is_in_step_hooks() -> bool:
    """Whether torch goes through its optimizer hooks further up in this thread: they must not change meanwhile.

    What the step itself calls (a closure that trains the model) is in between: the first hooks are done, the last ones wait.
    """
    called: FrameType | None = None
    for frame in _frames():
        if _is_step(frame):
            own_step = getattr(frame.f_locals.get("func"), "__code__", None)
            if called is None or called.f_code is not own_step:
                return True
        called = frame
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
