"""What the arguments of a call say without reading any value: shapes and dtypes as a signature, batch size, tokens.

Two calls of one signature do the same work. Arguments that are not understood have none, and their units are uncounted.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

MOST_PARTS = 1_024
"""Parts of the arguments that are looked at; arguments of more are not understood."""
MOST_LAYERS = 4
"""Layers of a cache that are all looked at."""
DEEP = 8
"""Levels of nesting that are looked at."""
Signature = tuple[Any, ...]
_PLAIN = (bool, int, str, bytes, type(None))
_FREE = (float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, type, Enum)
"""Values that no shape depends on."""
_IGNORED = frozenset({"num_items_in_batch", "global_step", "step", "epoch"})
"""Arguments by these names differ from call to call and decide no shape."""
_IDS = (torch.int64, torch.int32)
_strided = torch.strided


class Inputs(NamedTuple):
    """What the arguments of a call say.

    Args:
        signature: shapes, dtypes and plain values; None when something in them is not understood.
        batch_size: first dimension of the first tensor that has one; 0 without any.
        tokens: elements of the first matrix of integers; 0 without any.
    """

    signature: Signature | None
    batch_size: int
    tokens: int


def look(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """Signature, batch size and tokens of a call's arguments; reads no values of tensors."""
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor and args[0].layout is _strided:
        # By far the most frequent call, in a few operations.
        tensor = args[0]
        shape = tensor.shape
        if not tensor.is_nested:
            is_ids = len(shape) == 2 and tensor.dtype in _IDS
            return Inputs((shape, tensor.dtype), shape[0] if shape else 0, shape[0] * shape[1] if is_ids else 0)
    parts: list[Any] = []
    found = [0, 0]
    try:
        is_understood = all(_read(value, parts, found, DEEP) for value in args) and _read_items(
            kwargs, parts, found, DEEP
        )
    except (RuntimeError, NotImplementedError, TypeError):  # a tensor without one shape, a name that cannot be hashed
        is_understood = False
    return Inputs(tuple(parts) if is_understood else None, found[0], found[1])


def _read(value: Any, parts: list[Any], found: list[int], deep: int) -> bool:
    """Add what a value says to a signature; False when it says nothing that can be relied on."""
    if len(parts) > MOST_PARTS:
        return False
    if isinstance(value, torch.Tensor):
        shape = value.shape
        parts += (shape, value.dtype)
        if shape:
            if not found[0]:
                found[0] = shape[0]
            if not found[1] and len(shape) == 2 and value.dtype in _IDS:
                found[1] = shape[0] * shape[1]
        return value.layout is _strided and not value.is_nested
    if isinstance(value, _PLAIN):
        parts.append(value)
        return True
    if isinstance(value, _FREE):
        return True
    if deep == 0:
        return False
    parts.append(type(value))
    if isinstance(value, Mapping):
        return _read_items(value, parts, found, deep - 1)
    if isinstance(value, list | tuple):
        return all(_read(one, parts, found, deep - 1) for one in value)
    if callable(value) and not isinstance(value, nn.Module) and not hasattr(value, "__dict__"):
        return True
    inside = getattr(value, "__dict__", None)  # a batch of a library, a cache of keys and values, a configuration
    layers = getattr(value, "layers", None)
    if (
        inside is not None
        and isinstance(layers, list)
        and len(layers) > MOST_LAYERS
        and hasattr(value, "get_seq_length")
    ):
        # Layers of a cache grow together: some tell for all, and there are hundreds.
        inside = {**inside, "layers": (len(layers), *layers[:2], *layers[-2:])}
    return inside is not None and _read_items(inside, parts, found, deep - 1)


def _read_items(values: Mapping[Any, Any], parts: list[Any], found: list[int], deep: int) -> bool:
    for name, value in values.items():
        if name in _IGNORED:
            continue
        parts.append(name)
        if not _read(value, parts, found, deep):
            return False
    return True
