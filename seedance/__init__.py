"""Cost of GPU work: what runs on GPU hosts and laptops.

`attach`, `detach`, `region`, `result` and `HookManager` are loaded when they are first used: `import seedance` alone loads
neither torch nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seedance.probe.hooks import HookManager
    from seedance.probe.probe import attach, detach, region, result

__version__ = "0.1.0"
__all__ = ["HookManager", "__version__", "attach", "detach", "region", "result"]

_HOMES = {
    "HookManager": "seedance.probe.hooks",
    "attach": "seedance.probe.probe",
    "detach": "seedance.probe.probe",
    "region": "seedance.probe.probe",
    "result": "seedance.probe.probe",
}
"""Where each lazy name lives."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
