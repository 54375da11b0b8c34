"""Finds the modules that do a process's work, without knowing its code: the outermost ones that are called and trained.

While it looks, every call of a module passes through one function, which is taken away again once they are found. It
is put where torch itself looks for the compiled form of a module, so that no hook is registered: hooks would be traced by
torch.compile, and taking them away would compile everything anew. A module that is compiled in place (`module.compile()`) has
its own entry there, which is wrapped. Given torch by its caller, which has it anyway.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

LOGGER = logging.getLogger("seedance.probe")
INFERENCE_CALLS = 20
"""Calls of one module without gradients after which it is what the process serves, if no optimizer has stepped."""
TRAINING_CALLS = 512
"""Calls with gradients after which an optimizer is not waited for any more: it may be none of torch's."""
ROUND_STEPS = 8
"""Optimizer steps after which no further optimizer is waited for: a critic often makes five before its generator."""
MOST_MODULES = 256
"""Outermost modules that are remembered."""


@dataclass(frozen=True)
class Found:
    """What was found.

    Args:
        modules: the outermost called modules that own the trained parameters, those with most of them first; without an
            optimizer the one that is called most; none where only steps were looked for.
        optimizers: whose parameters they are; empty where none has stepped.
        units_lost: optimizer steps that passed meanwhile.
    """

    modules: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    units_lost: int


class Known(Protocol):
    """What is probed already."""

    def has(self, optimizer: Any) -> bool:
        """Whether an optimizer trains it."""

    def is_called(self) -> bool:
        """Whether it is being called."""


class _Inside(threading.local):
    """Whether this thread is within a call."""

    call = False


@dataclass
class _Seen:
    """An outermost module: how often it was called to train it, and otherwise; with gradients at all."""

    module: weakref.ref[Any]
    has_parameters: bool
    training: int = 0
    inference: int = 0
    fresh: int = 0


@dataclass
class Watch:
    """Looks until it has found modules, was stopped, or failed; then nothing of it is left.

    An optimizer's modules are known when it has stepped; while modules are called that others train, one round of optimizers
    is waited for. Without any optimizer in the process, a module that is called again and again is what it serves.

    Args:
        torch: the module `torch`.
        found: what to do then; called where a call of a module begins, before it runs. Its errors are counted here and go
            no further.
        only_steps: find no modules but the first optimizer that steps, and stay out of calls until it has.
        known: what is probed already: its calls and steps are not looked at, and more is not looked for very long.
    """

    torch: Any
    found: Callable[[Found], None]
    only_steps: bool = False
    known: Known | None = None
    failures: int = 0
    is_running: bool = False
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _stepped: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _picks: dict[int, tuple[int, weakref.ref[Any]]] = field(default_factory=dict)
    _steps: int = 0
    _is_decided: bool = False
    _called: Any = None
    _compile: Any = None
    _wrapped: list[tuple[weakref.ref[Any], Any, Any]] = field(default_factory=list)
    _handle: Any = None
    _inside: _Inside = field(default_factory=_Inside)

    def start(self) -> None:
        """Begin to look. Raises what torch raises; then nothing is left of it."""
        try:
            self.is_running = self.only_steps or self._enter()
            if self.is_running:
                optimizers = sys.modules["torch.optim.optimizer"]  # `torch.optim` hides the name
                self._handle = optimizers.register_optimizer_step_post_hook(self._on_step)
        except Exception:
            self.stop()
            raise

    def stop(self) -> None:
        """Take everything away. Within a step torch goes through the hooks: ours stays, does nothing, and goes next time."""
        self.is_running = False
        kind = self.torch.nn.Module
        if self._called is not None and kind.__dict__.get("_compiled_call_impl") is self._called:
            kind._compiled_call_impl = None
        if self._compile is not None and getattr(kind.compile, "_seedance_watch", None) is self:
            kind.compile = self._compile
        for reference, stand_in, own in self._wrapped:
            module = reference()
            if module is not None and module.__dict__.get("_compiled_call_impl") is stand_in:
                module._compiled_call_impl = own
        self._wrapped.clear()
        self._seen.clear()
        self._stepped.clear()
        self._picks.clear()
        if self._handle is not None and not _is_in_step():
            handle, self._handle = self._handle, None
            handle.remove()

    def _enter(self) -> bool:
        """Come before every call of a module; False where somebody else has that place."""
        kind = self.torch.nn.Module
        if kind._compiled_call_impl is not None:
            return False
        self._called = kind._compiled_call_impl = _interceptor(self, self.torch)
        self._compile = kind.compile
        kind.compile = _compiling(self, kind.compile)
        return True

    def _wrap(self, module: Any) -> None:
        """Come before the compiled form of a module, where it has one of its own."""
        own = module.__dict__.get("_compiled_call_impl")
        if own is not None and not any(own is stand_in for _, stand_in, _ in self._wrapped):
            stand_in = _stand_in(self, self.torch, module, own)
            module._compiled_call_impl = stand_in
            self._wrapped.append((weakref.ref(module), stand_in, own))

    def _on_call(self, module: Any) -> None:
        """An outermost call begins. Never raises."""
        try:
            if self.is_running:
                self._look(module)
        except Exception as error:  # noqa: BLE001 - whatever it is, the call goes on
            self._fail(error)

    def _look(self, module: Any) -> None:
        if self._is_decided:
            # Not where the step was seen: hooks of optimizers must not come and go while torch goes through them.
            picks = sorted(self._picks.values(), key=lambda pick: -pick[0])
            self._decide([of() for _, of in picks], [of() for of in self._stepped.values()])
            return
        if self.known is not None and self.known.is_called():
            return  # a part of it
        seen = self._seen.get(id(module))
        if seen is None or seen.module() is not module:
            if len(self._seen) >= MOST_MODULES:
                self._seen.pop(next(iter(self._seen)))
            has_parameters = next(iter(module.parameters()), None) is not None
            seen = self._seen[id(module)] = _Seen(weakref.ref(module), has_parameters)
        if not seen.has_parameters:
            return
        has_grad = self.torch.is_grad_enabled()
        seen.fresh += has_grad
        if module.training and has_grad:
            seen.training += 1
        else:
            seen.inference += 1
        if self._steps:
            return
        # With an optimizer there, what does not train yet is an evaluation before training.
        # Looking for one takes long, so after 20 calls, 40, 80 ...
        rounds, rest = divmod(seen.inference, INFERENCE_CALLS)
        serves = rounds and not rest and not rounds & (rounds - 1) and not has_optimizer(self.torch)
        if seen.training >= TRAINING_CALLS or serves:
            self._decide([module], [])

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped. Never raises."""
        try:
            if not self.is_running or (self.known is not None and self.known.has(optimizer)):
                return
            self._steps += 1
            if self.only_steps and not self._is_decided:
                self._stepped[id(optimizer)] = weakref.ref(optimizer)
                self._is_decided = True
                self._enter()
            elif not self._is_decided:
                self._is_decided = self._step(optimizer)
                if self.known is not None and not self._picks and self._steps >= ROUND_STEPS:
                    self.stop()  # it trains no module: a picture, or words of a prompt
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._fail(error)

    def _step(self, optimizer: Any) -> bool:
        """Note whose parameters an optimizer trains; whether that is all there is to know."""
        # Not only since the last step: what a generator made once may serve the critic's step and its own.
        called = [seen for seen in self._seen.values() if seen.has_parameters and seen.fresh]
        roots = [module for seen in called if (module := seen.module()) is not None]
        if id(optimizer) not in self._stepped:
            sizes = _sizes(optimizer)
            # Of equals the one that was called first. What others have is not counted again: parts of what is called whole.
            for module in sorted(roots, key=lambda root: -_owned(root, sizes)):
                owned = _owned(module, sizes)
                if owned:
                    self._picks.setdefault(id(module), (owned, weakref.ref(module)))
                    for parameter in module.parameters():
                        sizes.pop(id(parameter), None)
            self._stepped[id(optimizer)] = weakref.ref(optimizer)
        picked = [module for _, of in self._picks.values() if (module := of()) is not None]
        own = {id(parameter) for module in picked for parameter in module.parameters()}
        is_all = not any(p.requires_grad and id(p) not in own for root in roots for p in root.parameters())
        return bool(picked) and (is_all or self._steps >= ROUND_STEPS)

    def _decide(self, modules: list[Any], optimizers: list[Any]) -> None:
        modules = [module for module in modules if module is not None]
        lost = self._steps
        self.stop()
        if self.torch.utils.data.get_worker_info() is not None:
            return  # a loader's worker transforms data; it is no job
        if modules or self.only_steps:
            self.found(Found(tuple(modules), tuple(one for one in optimizers if one is not None), lost))

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        try:
            self.stop()
        finally:
            LOGGER.warning(
                "probe: the model could not be found (%s: %s). The job goes on without the probe. "
                "`seedance.attach(model)` attaches it by hand.",
                type(error).__name__,
                error,
            )


def _is_in_step() -> bool:
    """Whether this thread is within the step of one of torch's optimizers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            return True
        frame = frame.f_back
    return False


def _interceptor(watch: Watch, torch: Any) -> Callable[..., Any]:
    """What stands in for `_call_impl` of every module that is not compiled itself."""
    is_compiling, inside = torch.compiler.is_compiling, watch._inside

    def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or inside.call:
            return module._call_impl(*args, **kwargs)
        inside.call = True
        try:
            watch._on_call(module)
            if watch.is_running:
                return module._call_impl(*args, **kwargs)
        finally:
            inside.call = False
        return _again(module)(*args, **kwargs)  # found: by whatever way calls go now

    _skip(call, torch)
    return call


def _stand_in(watch: Watch, torch: Any, module: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """The same for one module that was compiled in place."""
    is_compiling, inside, of = torch.compiler.is_compiling, watch._inside, weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or inside.call:
            return own(*args, **kwargs)
        inside.call = True
        try:
            watch._on_call(of())
            if watch.is_running:
                return own(*args, **kwargs)
        finally:
            inside.call = False
        found = of()
        return own(*args, **kwargs) if found is None else _again(found)(*args, **kwargs)

    _skip(call, torch)
    return call


def _again(module: Any) -> Callable[..., Any]:
    """How the call that torch has brought here begins anew: within `__call__`, which may do more than call, and has begun.

    A compiled module's own is made to hide from the compiler what is put on the module that it wraps, so it is gone through.
    """
    again: Callable[..., Any] = module if type(module).__name__ == "OptimizedModule" else module._wrapped_call_impl
    return again


def _compiling(watch: Watch, compile_module: Callable[..., None]) -> Callable[..., None]:
    """What stands in for `Module.compile`."""

    @functools.wraps(compile_module)
    def call(module: Any, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **kwargs)
        try:
            if watch.is_running:
                watch._wrap(module)
        except Exception as error:  # noqa: BLE001 - whatever it is, the module is compiled
            watch._fail(error)

    call._seedance_watch = watch  # type: ignore[attr-defined]
    return call


def _skip(function: Callable[..., Any], torch: Any) -> None:
    """Tell torch.compile to run this function as it is and to look at what it calls.

    Otherwise it would be compiled together with the model that it calls, and again without it once it is gone.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, skip)
    else:
        frames.skip_code(function.__code__)


def _owned(module: Any, sizes: dict[int, int]) -> int:
    """Elements of these parameters that a module has."""
    return sum(sizes.get(id(p), 0) for p in module.parameters())


def _sizes(optimizer: Any) -> dict[int, int]:
    """Elements of each parameter that an optimizer trains, by `id`."""
    return {id(p): int(p.numel()) for group in optimizer.param_groups for p in group["params"]}


def owns(module: Any, optimizer: Any) -> bool:
    """Whether a module has any parameter that an optimizer trains."""
    return _owned(module, _sizes(optimizer)) > 0


def has_optimizer(torch: Any) -> bool:
    """Whether any of torch's optimizers exists in this process: then it is there to train."""
    kind = torch.optim.Optimizer
    # By the type itself: asking a lazy object for its class would make it load what it stands for.
    return any(kind in type(thing).__mro__ for thing in gc.get_objects())
