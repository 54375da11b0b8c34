"""Counts a model without running it: on a copy that has shapes only, as it would run eager.

For models that must not be looked into while they run: compiled ones, whose code a dispatch mode would switch off. No
memory of the model's size is used, no kernel runs, nothing is communicated, and the model, its caches and its random
numbers stay as they are. A model whose control flow depends on computed values cannot be counted this way. Needs torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from seedance.flops.counter import CountError, FlopCounter
from seedance.flops.families import COMM_FAMILIES, family
from seedance.flops.profile import Profile
from seedance.flops.shadow import Shadows, is_kept_real, unwrapped


def count_copy(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool,
    prefix: str = "",
) -> Profile:
    """Count one call of a model on a copy without data.

    Args:
        module: the model, wrapped or not; its submodules are in training or evaluation mode as they are now.
        args: arguments by position, real tensors among them; they are not changed.
        kwargs: arguments by name.
        training: go backward too, from the output's `loss` when it has one, else from all its floating tensors.
        prefix: goes before every layer's name.

    Returns:
        What the model would do eager; no host times.

    Raises:
        CountError: the model needs computed values (`.item()`, data-dependent shapes), or an operator without shapes; or
            a part of it is TorchScript.
    """
    name = type(unwrapped(module)).__name__
    if any(isinstance(one, torch.jit.ScriptModule) for one in module.modules()):
        # Its code and parameters are one object that a copy would share: the real ones would get gradients.
        raise CountError(
            f"{name}: a part of it is TorchScript, which has no copy without data. Run it under a FlopCounter.",
            model=name,
            reason="TorchScript",
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    try:
        with _untouched():
            shadows = Shadows(mode)
            shadow = shadows.module(module)
            inputs, named = shadows.value(tuple(args)), shadows.value(dict(kwargs or {}))
            counter = FlopCounter(shadow, prefix=prefix)
            with mode, _Shapes(mode), nullcontext() if training else torch.no_grad():
                counter.start(on_top=True)
                try:
                    out = shadow(*inputs, **named)
                    if training:
                        _backward(out)
                finally:
                    counter.stop()
            return counter.profile
    except CountError:
        raise
    except Exception as error:
        raise CountError(
            f"{name}: cannot be counted without data: {type(error).__name__}: {_first_line(error)}. "
            "Run it eager under a FlopCounter, or give the operator a fake implementation.",
            model=name,
            reason=type(error).__name__,
        ) from error


def _backward(out: Any) -> None:
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    roots = [loss] if isinstance(loss, torch.Tensor) else list(floating(out))
    roots = [one for one in roots if one.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])


def floating(out: Any) -> Iterator[torch.Tensor]:
    """Tensors of an output that gradients can come to, however it is nested."""
    if isinstance(out, torch.Tensor):
        if out.is_floating_point() or out.is_complex():
            yield out
    elif isinstance(out, Mapping):
        for one in out.values():
            yield from floating(one)
    elif isinstance(out, list | tuple):
        for one in out:
            yield from floating(one)


@contextmanager
def _untouched() -> Iterator[None]:
    """Random numbers and the cache of casted weights as they were; numbers that a model draws here are not missed."""
    python, torch_state = random.getstate(), torch.random.get_rng_state()
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.random.set_rng_state(torch_state)
        random.setstate(python)


class _Shapes(TorchDispatchMode):  # type: ignore[misc]
    """Between the counter and the fake tensors: small integers are computed for real, and nothing is communicated."""

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _unsent(func, args)
        tensors = list(_tensors((*args, *kwargs.values())))
        comm = family(f"{func.namespace}.{func._opname}", pointwise=False, view=False) in COMM_FAMILIES
        if (
            func.namespace not in ("aten", "prims")
            or comm
            or any(isinstance(one, FakeTensor) or not is_kept_real(one) for one in tensors)
        ):
            return func(*args, **kwargs)
        try:
            out = None if any(_writes(func)) else func(*args, **kwargs)
        except Exception:  # a shape that depends on values: here they are known
            if not tensors:
                raise
            out = None
        if out is not None and not all(map(is_small_integer, _tensors((out,)))):
            return out
        if not tensors and not any(True for _ in _tensors((out,))):
            return out
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def is_small_integer(tensor: torch.Tensor) -> bool:
    """Whether a fake result could as well be computed."""
    return not tensor.is_meta and not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= 2**22


def _writes(func: Any) -> Iterator[bool]:
    return (one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _unsent(func: Any, args: tuple[Any, ...]) -> Any:
    """What a collective gives back at once: the tensors that it will fill, and the promise of that."""
    from torch._C._distributed_c10d import FakeWork

    made = [FakeWork().boxed() if "Work" in str(one.type) else args[0] for one in func._schema.returns]
    return made[0] if len(made) == 1 else tuple(made)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
