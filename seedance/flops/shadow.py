"""A copy of a model that has shapes and no data: to be run, counted and thrown away, without a trace in the model.

Parameters, buffers and arguments become fake tensors. Small integers and flags stay real, as copies, so that masks and
positions that steer control flow keep their values. Wrappers (compiled, data parallel, fully sharded) are left out, as are
hooks: what they do (communicate, log, time) is not the model's work, and must not happen twice. Needs torch.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

REAL_ELEMENTS = 2**22
"""Integer tensors above this size are weights or big masks: they become fake."""

_WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
_HOOKS = frozenset(
    {
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
_SHARED_TYPES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
    torch.fx.Graph,
)
_SHARED_PACKAGES = (
    "datasets",
    "lightning",
    "logging",
    "numpy",
    "pandas",
    "pytorch_lightning",
    "tokenizers",
    "torch._C",
    "torch.distributed",
    "transformers.tokenization",
    "wandb",
)
"""Packages whose objects (a trainer, data, a process group) are no part of a model though a model points at them."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module under wrappers that only change how it is called."""
    while (inside := _WRAPPERS.get(type(module).__name__)) is not None:
        module = getattr(module, inside)
    return module


def is_kept_real(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values may steer what a model does, and are cheap to keep."""
    kind = tensor.dtype
    return (
        kind in (torch.bool, torch.int16, torch.int32, torch.int64)
        and type(tensor) in (torch.Tensor, nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() <= REAL_ELEMENTS
    )


class Shadows:
    """Copies of modules and values, each made once.

    Args:
        mode: makes the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # an id stands for its object only as long as that lives
        self._unsharded: dict[int, tuple[torch.Size, torch.dtype | None]] = {}

    def module(self, root: nn.Module) -> nn.Module:
        """The shadow of a model."""
        root = unwrapped(root)
        inside = [unwrapped(one) for one in root.modules()]
        for one in inside:
            self._read_sharding(one)
            if id(one) not in self._memo:
                kind: Any = type(one)
                # A fully sharded module makes one of the class that it was before.
                self._remember(one, object.__new__(kind) if _sharding(one) is None else kind.__new__(kind))
        for one in list({id(one): one for one in inside}.values()):
            self._fill(self._memo[id(one)], one)
        shadow = self._memo[id(root)]
        assert isinstance(shadow, nn.Module)
        return shadow

    def value(self, value: Any) -> Any:
        """The shadow of anything: containers part by part, tensors fake, other objects by a deep copy or themselves."""
        found = self._memo.get(id(value))
        if found is not None:
            return found
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._remember(value, self.module(value))
        if isinstance(value, _SHARED_TYPES) or type(value).__module__.startswith(_SHARED_PACKAGES):
            return value
        inside = self._container(value)
        return self._object(value) if inside is _NO_CONTAINER else inside

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if kind in (list, deque, set, frozenset):
            return self._remember(value, kind(map(self.value, value)))
        if isinstance(value, tuple):
            parts = list(map(self.value, value))
            return self._remember(value, kind(*parts) if hasattr(value, "_fields") else kind(parts))
        if kind in (dict, OrderedDict):
            return self._remember(value, kind((name, self.value(one)) for name, one in value.items()))
        if kind is types.MethodType:
            return types.MethodType(value.__func__, self.value(value.__self__))
        if kind is functools.partial:
            named = {name: self.value(one) for name, one in value.keywords.items()}
            return functools.partial(self.value(value.func), *map(self.value, value.args), **named)
        if kind is weakref.ref:
            target = value()
            known = None if target is None else self._memo.get(id(target))
            return value if known is None else weakref.ref(known)
        return _NO_CONTAINER

    def _object(self, value: Any) -> Any:
        try:
            with FakeCopyMode(self._mode):
                made = copy.deepcopy(value, dict(self._memo))
        except Exception:  # noqa: BLE001 - a lock, a socket, anything: what cannot be copied is shared
            made = value
        return self._remember(value, made)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = self._unsharded.get(id(tensor))
        made: torch.Tensor
        if whole is not None:
            made = self._whole(tensor, *whole)
        elif is_kept_real(tensor):
            made = tensor.detach().clone()
        else:
            made = self._mode.from_tensor(tensor, static_shapes=True)
        self._remember(tensor, made)
        return made

    def _whole(self, shard: torch.Tensor, size: torch.Size, dtype: torch.dtype | None) -> nn.Parameter:
        """What a rank computes with when it has gathered a sharded parameter."""
        with self._mode:
            data = torch.empty(size, dtype=dtype or shard.dtype, device=shard.device)
            return nn.Parameter(data, requires_grad=shard.requires_grad)

    def _fill(self, shadow: nn.Module, module: nn.Module) -> None:
        into = shadow.__dict__
        for name, value in module.__dict__.items():
            if name in _HOOKS:
                into[name] = OrderedDict()
            elif name == "_compiled_call_impl":
                into[name] = None
            elif name in ("_parameters", "_buffers"):
                into[name] = {key: None if one is None else self.value(one) for key, one in value.items()}
            elif name == "_modules":
                into[name] = {
                    key: None if one is None else self._memo[id(unwrapped(one))] for key, one in value.items()
                }
            else:
                into[name] = self.value(value)
        for hook in module._forward_pre_hooks.values():
            if _is_part_of_model(hook):
                shadow.register_forward_pre_hook(self.value(hook))
        for hook in module._forward_hooks.values():
            if _is_part_of_model(hook):
                shadow.register_forward_hook(self.value(hook))
        self._cast(shadow, module)

    def _read_sharding(self, module: nn.Module) -> None:
        """Note whole sizes and compute dtypes of parameters that a fully sharded module keeps in pieces."""
        for group in getattr(_sharding(module), "_fsdp_param_groups", ()):
            for one in group.fsdp_params:
                for held in (getattr(one, "sharded_param", None), getattr(one, "_unsharded_param", None)):
                    if held is not None:
                        dtype = getattr(one, "param_dtype", None) or group.mp_policy.param_dtype
                        self._unsharded[id(held)] = (one._orig_size, dtype)
                        self._kept.append(held)

    def _cast(self, shadow: nn.Module, module: nn.Module) -> None:
        """Let the shadow of a fully sharded module cast its inputs as that does."""
        policy: Any = getattr(_sharding(module), "_mp_policy", None)
        dtype = getattr(policy, "param_dtype", None)
        if dtype is None or not policy.cast_forward_inputs:
            return

        def cast(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return _to(args, dtype), _to(kwargs, dtype)

        shadow.register_forward_pre_hook(cast, with_kwargs=True)

    def _remember(self, original: Any, made: Any) -> Any:
        self._memo[id(original)] = made
        self._kept.append(original)
        return made


_NO_CONTAINER = object()


def _is_part_of_model(hook: Any) -> bool:
    """Whether a hook makes a weight (old parametrisations) or lays out tensors over ranks (tensor parallelism)."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith(("torch.nn.utils.", "torch.distributed.tensor."))


def _sharding(module: nn.Module) -> Any:
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_to(one, dtype) for one in value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {name: _to(one, dtype) for name, one in value.items()}
    return value
