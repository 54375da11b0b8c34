"""The table from operator names to FLOP formulas, and how a formula reads the arguments of a call.

Nothing here imports a framework: a tensor is whatever has `shape` and `dtype`. Formulas of the framework's own operators
are in `operators` and `attention_operators`; somebody else's are added with `register_formula`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from seedance.errors import SeedanceError
from seedance.flops import families


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs of one call of an operator.

    Args:
        flops: model FLOPs: causal attention exact, nothing twice.
        hw_flops: as executed: with the scores that a fused attention backward computes again.
        flops_full: model FLOPs with causal and windowed attention counted in full.
        is_bound: lengths inside the call are unknown, so that the FLOPs are the most that it can have run.
    """

    flops: int
    hw_flops: int
    flops_full: int
    is_bound: bool = False


ZERO = Cost(0, 0, 0)

UserFormula = Callable[[tuple[Any, ...], dict[str, Any], Any], "Cost | int | None"]
"""Takes arguments, keyword arguments and output of a call; gives its cost, its FLOPs, or None when it cannot tell."""


class Unsized(SeedanceError):
    """A tensor has no sizes that are plain integers, so that its operator cannot be counted: found."""


class Call:
    """One call of an operator: arguments by the names of its declaration, and its output."""

    __slots__ = ("_args", "_kwargs", "_names", "out", "read_values")

    def __init__(
        self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], out: object, read_values: bool
    ) -> None:
        self._names = names
        self._args = args
        self._kwargs = kwargs
        self.out = out
        self.read_values = read_values

    def get(self, name: str, default: Any = None) -> Any:
        """The argument of that name; `default` when the call does not have it."""
        if name in self._names:
            position = self._names.index(name)
            if position < len(self._args):
                return self._args[position]
        return self._kwargs.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    @property
    def args(self) -> tuple[Any, ...]:
        """Arguments by position, where overloads of one operator differ."""
        return self._args


Formula = Callable[[Call], "Cost | int | None"]

_FORMULAS: dict[str, tuple[tuple[str, ...], Formula]] = {}
_USERS: dict[str, UserFormula] = {}


def formula(names: str, parameters: str) -> Callable[[Formula], Formula]:
    """Decorator: the formula of the framework's operators in `names`.

    Args:
        names: operators, separated by spaces; `aten` is the namespace of those that have none.
        parameters: names of their parameters in order, as far as positions matter.
    """

    def add(function: Formula) -> Formula:
        for name in names.split():
            _FORMULAS[name if "." in name else f"aten.{name}"] = (tuple(parameters.split()), function)
        return function

    return add


def signatures() -> dict[str, tuple[str, ...]]:
    """Operators that have a formula, with the names of their parameters that it counts on."""
    return {name: parameters for name, (parameters, _) in _FORMULAS.items()}


def register(name: str, *, family: str = "matmul") -> Callable[[UserFormula], UserFormula]:
    """Decorator: the FLOP formula of an operator of yours, `@register("mylib.fused_mlp")`.

    Args:
        name: name with namespace and without overload; a formula that is there already is replaced.
        family: family that its rows carry.

    Raises:
        FamilyError: no such family.
    """

    def add(function: UserFormula) -> UserFormula:
        families.declare(name, family)
        _USERS[name] = function
        return function

    return add


def register_formula(name: str, function: UserFormula, *, family: str = "matmul") -> None:
    """Give an operator of yours a FLOP formula; see `register`."""
    register(name, family=family)(function)


def cost(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, *, read_values: bool = False
) -> Cost | None:
    """FLOPs of a call; None when its operator carries FLOPs and no formula fits, or nobody knows it.

    Args:
        name: name with namespace and without overload, `aten.addmm`.
        args: arguments by position.
        kwargs: arguments by name.
        out: what it returned.
        read_values: lengths of packed sequences may be read from tensors of a device, which waits for it. Those that
            lie in the host's memory are read anyway; what stays unknown gives a bound.
    """
    user = _USERS.get(name)
    if user is not None:
        return _as_cost(user(args, kwargs, out))
    found = _FORMULAS.get(name) or _FORMULAS.get(name.removesuffix("_"))
    if found is None:
        kind = families.family(name, pointwise=False, view=False)
        return None if kind in families.FLOP_FAMILIES or kind == "uncounted" else ZERO
    try:
        return _as_cost(found[1](Call(found[0], args, kwargs, out, read_values)))
    except Unsized:
        return None


def _as_cost(found: Cost | int | None) -> Cost | None:
    if found is None or isinstance(found, Cost):
        return found
    return Cost(found, found, found)


def shape(tensor: Any) -> tuple[int, ...]:
    """Sizes of a tensor.

    Raises:
        Unsized: it is ragged, or its sizes are symbols.
    """
    try:
        return tuple(int(size) for size in tensor.shape)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise Unsized(f"expected a tensor with plain sizes; found {type(tensor).__name__}: {error}") from error


def elements(tensor: Any) -> int:
    """Elements of a tensor, of a ragged one too.

    Raises:
        Unsized: they are not known.
    """
    try:
        return int(tensor.numel()) if getattr(tensor, "is_nested", False) else prod(shape(tensor))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise Unsized(f"expected a tensor with a known number of elements; found {type(tensor).__name__}") from error


def last(tensor: Any) -> int:
    """Size of the last dimension, which ragged tensors have too."""
    if getattr(tensor, "is_nested", False):
        try:
            return int(tensor.size(-1))
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unsized("expected a nested tensor whose last dimension is regular") from error
    return shape(tensor)[-1]


def rows(tensor: Any) -> int:
    """Product of all sizes but the last."""
    columns = last(tensor)
    return elements(tensor) // columns if columns else 0


def is_tensor(value: Any) -> bool:
    """It has sizes and a type of elements."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def first_tensor(out: Any) -> Any:
    """The output, or the first of several."""
    return out[0] if isinstance(out, list | tuple) and out else out


def integers(call: Call, tensor: Any) -> list[int] | None:
    """Values of a tensor of integers; None when they do not exist (no data) or may not be waited for."""
    kind = getattr(getattr(tensor, "device", None), "type", "cpu")
    if kind == "meta" or (kind != "cpu" and not call.read_values) or not hasattr(tensor, "tolist"):
        return None
    try:
        return [int(value) for value in tensor.tolist()]
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def wanted(mask: Iterable[Any] | None, *positions: int) -> int:
    """How many of the gradients at these positions a backward computes; all of them without a mask."""
    if mask is None:
        return len(positions)
    flags = list(mask)
    return sum(bool(flags[position]) for position in positions if position < len(flags))
