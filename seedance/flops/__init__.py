"""FLOPs: formulas, the table of operators, counters of real models, and what hardware could do.

Names are loaded when they are first used; those that need torch load it then, and only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seedance.flops.counter import CountError, FlopCounter
    from seedance.flops.fake import count_copy
    from seedance.flops.families import FAMILIES, FLOP_FAMILIES, family
    from seedance.flops.operators import Cost, cost, register, register_formula
    from seedance.flops.profile import OpCount, Profile, Uncounted
    from seedance.flops.roofline import Hardware, UnknownGpu, bound, energy_efficiency, find_gpu

__all__ = [
    "FAMILIES",
    "FLOP_FAMILIES",
    "Cost",
    "CountError",
    "FlopCounter",
    "Hardware",
    "OpCount",
    "Profile",
    "Uncounted",
    "UnknownGpu",
    "bound",
    "cost",
    "count_copy",
    "energy_efficiency",
    "family",
    "find_gpu",
    "register",
    "register_formula",
]

_HOMES = {
    "counter": ("CountError", "FlopCounter"),
    "fake": ("count_copy",),
    "families": ("FAMILIES", "FLOP_FAMILIES", "family"),
    "operators": ("Cost", "cost", "register", "register_formula"),
    "profile": ("OpCount", "Profile", "Uncounted"),
    "roofline": ("Hardware", "UnknownGpu", "bound", "energy_efficiency", "find_gpu"),
}
"""Modules and the names that each gives; counter and fake need torch."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
