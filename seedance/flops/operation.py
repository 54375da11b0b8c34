"""What is known of an operator before it runs: name, family, which tensors it writes. Made once an operator.

Needs torch for its dtypes and tags only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from seedance.flops.families import COMM_FAMILIES, FLOP_FAMILIES, family
from seedance.flops.operators import Cost, cost
from seedance.flops.registry import ZERO
from seedance.flops.traffic import OVERWRITES

SHORT_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.complex32: "fp16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
    torch.uint8: "int8",
    torch.qint8: "int8",
    torch.quint8: "int8",
}
"""Compute dtypes by name; complex ones by their parts. Others keep the framework's name, 8-bit floats become fp8."""

UNCOUNTED = "uncounted"
"""Family of operators that no list knows."""

_BRANCHING = frozenset({"cond", "while_loop", "map_impl", "scan", "associative_scan", "invoke_subgraph"})
_NO_DTYPE = "none"
_PACKED = frozenset({"quantized", "_quantized", "onednn"})
"""Namespaces whose packed weights decide: 8-bit integers are multiplied, whatever dtype goes in."""


def short_dtype(dtype: torch.dtype) -> str:
    """Short name of a dtype: fp32, bf16, fp8, int8, int64."""
    found = SHORT_DTYPES.get(dtype)
    if found is None:
        name = str(dtype).removeprefix("torch.")
        found = f"fp{name[5]}" if name.startswith(("float8", "float4")) else name
        SHORT_DTYPES[dtype] = found
    return found


class Operation:
    """Facts of one operator.

    Args:
        func: an overload, or a higher-order operator.

    Attributes are plain: `name` (namespace and name without overload), `family` (None: no row), `is_composite` (it consists
    of other operators), `branches` (it calls functions), `mutates`, `is_comm`, `bears_flops`.
    """

    __slots__ = (
        "_is_int8",
        "_only_written",
        "_written",
        "bears_flops",
        "branches",
        "family",
        "is_comm",
        "is_composite",
        "mutates",
        "name",
    )

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        self.branches = False
        self.is_composite = False
        self._written: tuple[tuple[int, str], ...] = ()
        self._only_written: frozenset[str] = frozenset()
        if schema is None:
            self.name = f"higher_order.{func.name()}"
            self.branches = func.name() in _BRANCHING
            self.family = family(self.name, pointwise=False, view=False)
        else:
            self.name = str(schema.name).replace("::", ".")
            pointwise = torch.Tag.pointwise in func.tags
            self.family = family(self.name, pointwise=pointwise, view=func.is_view)
            # `prim.device` of a fake tensor is asked of the mode below, and can only be answered there.
            self.is_composite = func.namespace != "prim" and func._can_decompose() and not _has_own_kernel(func)
            written = [
                (place, argument)
                for place, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self._written = tuple((place, argument.name) for place, argument in written)
            self._only_written = frozenset(argument.name for _, argument in written if argument.kwarg_only)
        self.mutates = bool(self._written)
        self.is_comm = self.family in COMM_FAMILIES
        self.bears_flops = self.family in FLOP_FAMILIES
        self._is_int8 = self.bears_flops and self.name.split(".")[0] in _PACKED and "fp16" not in self.name

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[list[Any], list[Any]]:
        """Tensors that it read, and tensors that it wrote, in the order of its arguments."""
        written: list[Any] = []
        for place, name in self._written:
            _collect(args[place] if place < len(args) else kwargs.get(name), written)
        outputs = list(written)
        _collect(out, outputs)
        if written:
            outputs = list({id(one): one for one in outputs}.values())
        inputs: list[Any] = []
        for value in args:
            _collect(value, inputs)
        for name, value in kwargs.items():
            if name not in self._only_written:
                _collect(value, inputs)
        if written and self.name in OVERWRITES:
            only = {id(one) for one in written}
            inputs = [one for one in inputs if id(one) not in only]
        return inputs, outputs

    def dtype(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
        """Short name of the dtype that it computes in.

        That of its first floating tensor; an operator that multiplies 8-bit integers has theirs.
        """
        if self._is_int8:
            return "int8"
        if not inputs:
            return short_dtype(outputs[0].dtype) if outputs else _NO_DTYPE
        first = inputs[0].dtype
        if first.is_floating_point or first.is_complex or (self.bears_flops and first.itemsize == 1):
            return short_dtype(first)
        for one in inputs:
            if one.dtype.is_floating_point or one.dtype.is_complex:
                return short_dtype(one.dtype)
        return short_dtype(first)

    def cost(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost | None:
        """FLOPs of one call; None without a formula, or where a formula cannot read these arguments."""
        if not self.bears_flops and self.family != UNCOUNTED:
            return ZERO
        try:
            return cost(self.name, args, kwargs, out)
        except Exception:  # noqa: BLE001 - a formula, perhaps a user's, must not stop what it counts: the op is listed
            return None

    def group(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """`[dp]` for a collective over the mesh dimension dp; empty where its group has no such name."""
        for value in (*args, *kwargs.values()):
            name = _mesh_dimension(value)
            if name:
                return f"[{name}]"
        return ""


def _has_own_kernel(func: Any) -> bool:
    """Whether an operator that could be taken apart has a kernel of its own on processors that models run on."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in ("CPU", "CUDA", "MPS"))


def _collect(value: Any, into: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, into)


def _mesh_dimension(value: Any) -> str:
    """Name of the mesh dimension that a process group, or the name of one, stands for."""
    if isinstance(value, torch.Tensor | int | float | bool | list | tuple) or value is None:
        return ""
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        group = _resolve_process_group(value) if isinstance(value, str) else ProcessGroup.unbox(value)
        described = str(group.group_desc)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return ""
    return described.removeprefix("mesh_") if described.startswith("mesh_") else ""
