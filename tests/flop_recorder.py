"""Operators as they reach a dispatch mode, each with our cost and with the number of torch's own registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from seedance.flops.families import FLOP_FAMILIES, family
from seedance.flops.operators import Cost, cost

COUNTED = FLOP_FAMILIES | {"uncounted"}


@dataclass(frozen=True)
class Seen:
    """One call of an operator that carries FLOPs: its name, our cost, and what torch's own registry says, if anything."""

    name: str
    cost: Cost
    torch: int | None


class Recorder(TorchDispatchMode):
    """Notes every operator with FLOPs. Composite ones are taken apart, unless `whole` says to take them as they come."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.seen: list[Seen] = []
        self.uncounted: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else the first operator would import the compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.whole and func.namespace != "prim" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        name = func._schema.name.replace("::", ".")
        if family(name, pointwise=torch.Tag.pointwise in func.tags, view=func.is_view) in COUNTED:
            theirs = flop_registry.get(func._overloadpacket)
            number = theirs(*args, **kwargs, out_val=out) if theirs else None
            found = cost(name, args, kwargs, out)
            if found is None:
                self.uncounted.append(name)
            else:
                self.seen.append(Seen(name, found, number))
        return out


def record(run: Callable[[], Any], *, backward: bool = False, whole: bool = False) -> list[Seen]:
    """Operators with FLOPs that a function runs, and its backward; all of them must have a formula."""
    recorder = Recorder(whole=whole)
    with recorder:
        out = run()
        if backward:
            (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert not recorder.uncounted
    return recorder.seen


def total(seen: list[Seen]) -> int:
    """Model FLOPs of what was seen."""
    return sum(one.cost.flops for one in seen)


def split(run: Callable[[], Any]) -> tuple[int, int]:
    """FLOPs of a forward and of its backward."""
    forward = total(record(run))
    return forward, total(record(run, backward=True)) - forward


def randn(*size: int, grad: bool = True) -> torch.Tensor:
    """Random numbers that want a gradient."""
    return torch.randn(*size, requires_grad=grad)


@cache
def operators() -> dict[str, list[Any]]:
    """Every overload that torch has registered, by name without it."""
    found: dict[str, list[Any]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        one = getattr(packet, overload or "default", None)
        if isinstance(one, torch._ops.OpOverload):
            found.setdefault(f"{namespace}.{base}", []).append(one)
    return found
