"""The models of a session: what is marked of them, what their layers are called, which optimizers train them.

Models are not held: one that goes away takes its units with it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from seedance.flops.names import layer_names
from seedance.flops.shadow import unwrapped
from seedance.probe.counting import is_anything_compiled
from seedance.probe.patches import Patches

DESCENTS = 3
"""Levels below a model that are marked when the model itself is never called."""
ASK_AGAIN = 16
"""Times that an optimizer that is not ours is asked about before it is looked at again."""


class _Together(nn.Module):  # type: ignore[misc]
    """Several models as one, so that they have one set of names. They do not notice."""


@dataclass(eq=False)
class Target:
    """A model that is probed.

    Args:
        core: the model under its wrappers.
        modules: what is marked of it.
        descents: how far below the model calls are looked for.
    """

    core: weakref.ref[nn.Module]
    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    descents: int = 0


class Models:
    """The models of a session.

    Args:
        patches: marks modules.
        changed: called when the set of models is another one.
    """

    def __init__(self, patches: Patches, changed: Callable[[], None]) -> None:
        self._patches, self._changed = patches, changed
        self.targets: tuple[Target, ...] = ()
        """What is probed."""
        self.layers: dict[str, int] = {}
        """Position of each layer."""
        self.is_compile_seen = False
        """Whether anything is compiled; once it was, always."""
        self._entries = 0
        self._owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._print: int | None = None
        self._names: Mapping[int, tuple[str, int]] | None = None
        self._depth: int | None = None
        """Segments of the names that `names` gives; None: all."""

    def add(self, module: nn.Module, optimizer: Any) -> Target:
        """Probe a model; one that is probed already gets what wraps it marked too."""
        core = unwrapped(module)
        target = next((one for one in self.targets if one.core() is core), None)
        if target is None:
            target = Target(weakref.ref(core))
            self.targets += (target,)
            # Optimizers that were asked about before are asked about again.
            self._owners = weakref.WeakKeyDictionary({one: asked for one, asked in self._owners.items() if asked < 0})
            self._change()
        for one in (module, core):
            if type(one).__name__ != "OptimizedModule":  # its class is patched
                self._mark(target, one)
        if optimizer is not None:
            self.adopt(optimizer)
        return target

    def remove(self, target: Target) -> None:
        """Probe a model no longer."""
        self.targets = tuple(one for one in self.targets if one is not target)
        for module in target.modules:
            held = module()
            if held is not None:
                self._patches.unmark(held)
        self._change()

    def mark_again(self) -> None:
        """See the calls of all models once more: what could not be put back yet is then."""
        for target in self.targets:
            for module in target.modules:
                held = module()
                if held is not None:
                    self._patches.mark(held, 0)

    def _mark(self, target: Target, module: nn.Module) -> None:
        if all(known() is not module for known in target.modules):
            target.modules.append(weakref.ref(module))
        self._patches.mark(module, self._entries)
        self._entries += 1

    def descend(self) -> None:
        """Steps come without calls of the models: their parts are called instead, so those are marked."""
        for target in self.targets:
            if target.descents >= DESCENTS:
                continue
            target.descents += 1
            for module in [held for one in target.modules if (held := one()) is not None]:
                for child in _called_parts(module):
                    self._mark(target, child)

    def roots(self) -> list[nn.Module]:
        """The models that still live."""
        return [core for target in self.targets if (core := target.core()) is not None]

    def modules(self) -> Iterator[nn.Module]:
        """Everything in them."""
        for root in self.roots():
            yield from root.modules()

    def whole(self) -> nn.Module | None:
        """The model; several as parts of one, each under the name of its class."""
        roots = self.roots()
        if len(roots) <= 1:
            return roots[0] if roots else None
        made = _Together()
        for root in roots:
            name = kind = type(root).__name__
            number = 1
            while name in made._modules:
                number += 1
                name = f"{kind}{number}"
            made._modules[name] = root
        return made

    def names(self) -> Mapping[int, tuple[str, int]]:
        """Layer and position by `id` of each module that is worth a mark."""
        if self._names is None:
            whole = self.whole()
            found = {} if whole is None else layer_names(whole)
            self.layers.update(dict(found.values()))
            if self._depth is not None:
                found = {key: place for key, place in found.items() if _depth_of(place[0]) <= self._depth}
            self._names = found
        return self._names

    def coarsen(self) -> None:
        """There are too many modules to mark: leave out the deepest. Their time is that of what they are part of."""
        deepest = max((_depth_of(layer) for layer, _ in self.names().values()), default=1)
        self._depth, self._names = max(deepest - 1, 1), None

    def device(self) -> Any:
        """Device of the first parameter; None without any."""
        for root in self.roots():
            for parameter in root.parameters():
                return parameter.device
        return None

    def is_compiled(self) -> bool:
        """Whether anything is compiled."""
        if not self.is_compile_seen:
            self.is_compile_seen = is_anything_compiled(self.modules()) or any(
                map(self._patches.is_foreign, self.modules())
            )
        return self.is_compile_seen

    def is_synced(self) -> bool:
        """Whether the call that begins averages its gradients over replicas at its end."""
        parallel = sys.modules.get("torch.nn.parallel.distributed")
        kind = getattr(parallel, "DistributedDataParallel", None)
        if kind is None:
            return False
        marked = (module() for target in self.targets for module in target.modules)
        return kind._active_ddp_module is not None or any(isinstance(module, kind) for module in marked)

    def owns(self, optimizer: Any) -> bool:
        """Whether an optimizer trains one of the models. Says no for a while without looking again."""
        asked = self._owners.get(optimizer, 0)
        if asked < 0:
            return True
        if asked % ASK_AGAIN == 0:
            own = {id(parameter) for root in self.roots() for parameter in root.parameters()}
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                self.adopt(optimizer)
                return True
        self._owners[optimizer] = asked + 1
        return False

    def adopt(self, optimizer: Any) -> None:
        """An optimizer is the models'."""
        self._owners[optimizer] = -1

    def check(self) -> None:
        """Say that it is another model when parts came or went, or are trained that were not."""
        modules = tuple(map(id, self.modules()))
        trained = tuple(parameter.requires_grad for root in self.roots() for parameter in root.parameters())
        former, self._print = self._print, hash((modules, trained))
        if former is not None and former != self._print:
            self._change()

    def _change(self) -> None:
        self._names = None
        self._changed()


def _depth_of(layer: str) -> int:
    return layer.count(".") + 1


def _called_parts(module: nn.Module) -> list[nn.Module]:
    """Modules directly below one that can be called: lists and dicts of modules are not, their members are."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _called_parts(child)
        else:
            found.append(child)
    return found
