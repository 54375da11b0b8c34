"""Names and places of layers: the path of a module as its author wrote it, whatever wraps the model now.

The counter, the probe and the count of a configuration name layers by these rules alone, so that eager, compiled,
sharded and checkpointed runs of one model have the same keys. Knows no framework: a module is what has
`named_modules()`.
"""

from __future__ import annotations

from typing import Any

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes under which wrappers (data parallel, compiled, sharded, checkpointed) keep the module that they wrap."""

MODEL = "(model)"
"""What a model does in no layer of its own."""

STEP = "(step)"
"""What runs outside the model: a loss, gradient clipping."""

OPTIMIZER = "(optimizer)"
"""Between begin and end of the optimizer's step."""

GRAD_SYNC = "(grad_sync)"
"""Averaging of gradients over replicas."""

NO_LAYER = -1
"""Position of what is no layer."""


def layer_name(path: str) -> str:
    """Name of a layer from its path in `named_modules()`: without the segments that wrappers add, `(model)` for the root.

    Args:
        path: dotted path, empty for the root.
    """
    return ".".join(segment for segment in path.split(".") if segment and segment not in WRAPPERS) or MODEL


def layer_names(module: Any, *, prefix: str = "") -> dict[int, tuple[str, int]]:
    """Name and position of every module under a root, by `id()` of the module.

    A shared module has the first of its names. Positions count the names in the order in which the model declares them;
    a block comes where its first part does. The root is no layer: its position is -1.

    Args:
        module: the model; anything with `named_modules()`.
        prefix: goes before every name but the root's, `stage1.`.
    """
    found: dict[int, tuple[str, int]] = {}
    order: dict[str, int] = {}
    for path, one in module.named_modules():
        name = layer_name(path)
        if name == MODEL:
            found[id(one)] = (MODEL, NO_LAYER)
        else:
            found[id(one)] = (prefix + name, order.setdefault(name, len(order)))
    return found
