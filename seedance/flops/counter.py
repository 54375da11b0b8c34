"""Counts what a model's operators do, by layer, pass and dtype, while it runs: a context manager around any part of a step.

The framework shows every operator to a dispatch mode. Its layer is found without guessing:

- forward: the module on top of a stack that global hooks keep;
- backward: autograd numbers its nodes in the order of the forward pass, so each node belongs to the module that ran when
  its number was given. This holds for reused modules, branches, views and custom functions;
- recomputation: a module entered inside the backward pass, or a function that a checkpoint runs again there.

Composite operators (all of them in inference mode) are taken apart under the same mode, so that eager, `no_grad` and
`inference_mode` agree. Tensor subclasses see their operators first; what they do with plain tensors is counted. Compiled
parts run eager meanwhile. Needs torch; reads no values and never synchronises.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim

from seedance.errors import CountError
from seedance.flops.modes import CountingMode
from seedance.flops.names import GRAD_SYNC, MODEL, NO_LAYER, OPTIMIZER, STEP, layer_names
from seedance.flops.operation import UNCOUNTED, Operation
from seedance.flops.profile import RECOMPUTE, OpCount, Profile, Uncounted
from seedance.flops.traffic import traffic

log = logging.getLogger("seedance.flops")

__all__ = ["CountError", "FlopCounter"]

Layer = tuple[str, int]

_IN_STEP: Layer = (STEP, NO_LAYER)
_IN_OPTIMIZER: Layer = (OPTIMIZER, NO_LAYER)
_IN_GRAD_SYNC: Layer = (GRAD_SYNC, NO_LAYER)
_NO_TASK = -1
_LEAF = 2**63
"""Numbers at or above belong to nodes that add gradients up: they come from no operator."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE

_graph_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_next_number = torch._C._autograd._get_sequence_nr
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class _Frame:
    """A module, or the optimizer's step, that is running."""

    __slots__ = ("layer", "module", "pass_", "task")

    def __init__(self, layer: Layer, module: object, task: int, pass_: str = "fwd") -> None:
        self.layer = layer
        self.module = module
        self.task = task
        self.pass_ = pass_


class _Thread:
    """What runs in one thread, and which layer got which of the numbers that autograd gives out there."""

    __slots__ = ("last", "layers", "numbers", "recomputing", "stack")

    def __init__(self) -> None:
        self.stack = [_Frame(_IN_STEP, None, _NO_TASK)]
        self.numbers: list[int] = []
        self.layers: list[Layer] = []
        self.last: Layer | None = None
        self.recomputing = _NO_TASK

    def note(self, number: int, layer: Layer) -> None:
        """From this number on nodes belong to this layer."""
        if self.numbers and self.numbers[-1] == number:
            self.layers[-1] = layer
        else:
            self.numbers.append(number)
            self.layers.append(layer)
        self.last = layer

    def layer_of(self, number: int) -> Layer | None:
        """Layer of a node; None for one that is older than the count."""
        place = bisect_right(self.numbers, number) - 1
        return self.layers[place] if place >= 0 else None


class FlopCounter:
    """Counts the operators that run inside a `with` block.

        with FlopCounter(model) as counter:
            model(x).sum().backward()
        print(counter.profile.flops)

    Args:
        module: the model whose layers are named; None: the first module that is called.
        prefix: goes before every layer's name: the place of a pipeline stage.

    One counter counts one block. Others, and other dispatch modes, may run around it, inside it or across its end.
    """

    def __init__(self, module: nn.Module | None = None, *, prefix: str = "") -> None:
        self._prefix = prefix
        self._names: dict[int, Layer] = {}
        self._kept: list[nn.Module] = []
        self._owners: dict[int, Layer] | None = None
        self._mode: CountingMode | None = None
        self._used = False
        self._handles: list[Any] = []
        self._threads: dict[int, _Thread] = {}
        self._home: _Thread | None = None
        self._numbered: dict[int, _Thread] = {}
        self._operations: dict[Any, Operation] = {}
        self._sums: dict[tuple[Layer, str, str, str, str], list[int]] = {}
        self._uncounted: dict[str, list[int]] = {}
        self._fake: Any = None
        self._host_ns = 0
        self._is_timed = True
        self._is_bound = False
        self._root = module
        if module is not None:
            self._adopt(module)

    # --- begin and end --------------------------------------------------------------------------------------------

    def __enter__(self) -> FlopCounter:
        return self.start()

    def start(self, *, on_top: bool = False) -> FlopCounter:
        """Begin the count, as `with` does.

        Args:
            on_top: see operators before other modes of this thread, instead of what those let through.

        Raises:
            CountError: the counter was used before.
        """
        if self._used:
            raise CountError(
                "FlopCounter: a counter counts one block and was used before. Make a new one.", reason="used"
            )
        self._used = True
        self._fake = torch._C._get_dispatch_mode(_FAKE)
        self._home = self._thread()
        self._home.note(_next_number(), _IN_STEP)
        try:
            self._handles = [
                hooks.register_module_forward_pre_hook(self._enter_module),
                hooks.register_module_forward_hook(self._leave_module, always_call=True),
                optim.register_optimizer_step_pre_hook(self._enter_optimizer),
                optim.register_optimizer_step_post_hook(self._leave_optimizer),
            ]
            self._mode = CountingMode(self._operator)
            self._mode.start(on_top=on_top)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the count: no hook and no mode remains, whatever was put on top meanwhile. Does nothing the second time."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._mode is not None:
            if self._mode.stop():
                self._mode = None
            else:
                log.warning("a FlopCounter was ended in another thread than it began in: end it there to take it off")
        self._kept = []

    @property
    def profile(self) -> Profile:
        """What was counted so far."""
        ops = tuple(
            OpCount(layer[0], layer[1], op, pass_, dtype, variant, *sums)
            for (layer, pass_, op, dtype, variant), sums in self._sums.items()
        )
        uncounted = tuple(
            Uncounted(name, calls, ns if self._is_timed else None) for name, (calls, ns) in self._uncounted.items()
        )
        return Profile(ops, uncounted, self._host_ns if self._is_timed else None, self._is_bound)

    # --- where: modules, optimizer, backward -----------------------------------------------------------------------

    def _adopt(self, module: nn.Module) -> None:
        # Ids are names only as long as their modules live.
        self._kept.append(module)
        known = layer_names(module, prefix=self._prefix)
        self._names = known | self._names

    def _thread(self) -> _Thread:
        ident = get_ident()
        found = self._threads.get(ident)
        if found is None:
            found = self._threads[ident] = _Thread()
        return found

    def _enter_module(self, module: nn.Module, _: object) -> None:
        thread = self._thread()
        layer = self._names.get(id(module))
        if layer is None:
            if self._root is not None or len(thread.stack) > 1:
                return
            self._root = module
            self._adopt(module)
            layer = (MODEL, NO_LAYER)
        task = _graph_task()
        if task != _NO_TASK:
            self._numbered_in(thread, task)  # settled before it looks as if this pass recomputed for itself
            thread.recomputing = task
        elif len(thread.stack) == 1 and thread is self._home:
            for other in self._threads.values():
                other.recomputing = _NO_TASK
        thread.stack.append(_Frame(layer, module, task))
        thread.note(_next_number(), layer)

    def _leave_module(self, module: nn.Module, _: object, __: object) -> None:
        thread = self._thread()
        stack = thread.stack
        for place in range(len(stack) - 1, 0, -1):
            if stack[place].module is module:
                # Frames above belong to modules that were left without a word: by a suspended generator or an interrupt.
                del stack[place:]
                thread.note(_next_number(), stack[-1].layer)
                return

    def _enter_optimizer(self, optimizer: object, _: object, __: object) -> None:
        self._leave_optimizer(optimizer, (), {})  # of a step that failed
        self._thread().stack.append(_Frame(_IN_OPTIMIZER, optimizer, _NO_TASK, "optim"))

    def _leave_optimizer(self, optimizer: object, _: object, __: object) -> None:
        stack = self._thread().stack
        for place in range(len(stack) - 1, 0, -1):
            if stack[place].module is optimizer:
                del stack[place:]
                return

    def _where(self) -> tuple[Layer, str]:
        """Layer and pass of the operator that runs now."""
        thread = self._thread()
        frame = thread.stack[-1]
        task = _graph_task()
        if task == _NO_TASK:
            if frame.layer is not thread.last:
                # After a backward pass that built a graph of its own. The operator's node has its number by now.
                thread.note(_next_number() - 1, frame.layer)
            return frame.layer, frame.pass_
        if frame.task == task:
            return frame.layer, RECOMPUTE
        node = _node()
        number = _LEAF if node is None else node._sequence_nr()
        if number >= _LEAF:
            return self._leaf(node), "bwd"
        layer = self._numbered_in(thread, task).layer_of(number) or _IN_STEP
        if torch.is_grad_enabled():
            # Nodes of a graph that the backward pass builds, or that a checkpoint builds again to go backward through.
            if layer is not thread.last:
                thread.note(_next_number() - 1, layer)
            if _is_rerun(node):
                thread.recomputing = task
                return layer, RECOMPUTE
        return layer, "bwd"

    def _numbered_in(self, thread: _Thread, task: int) -> _Thread:
        """The thread that gave out the numbers of a backward pass: each thread counts for itself.

        A device's backward thread gives out numbers only while it recomputes; a reentrant checkpoint goes backward through
        them in a pass of its own, inside the pass that recomputes.
        """
        home = self._home or thread
        if thread is home:
            return home
        found = self._numbered.get(task)
        if found is None:
            found = home if thread.recomputing in (_NO_TASK, task) else thread
            self._numbered[task] = found
        return found

    def _leaf(self, node: Any) -> Layer:
        """Layer of a node that adds up a parameter's gradient."""
        variable = getattr(node, "variable", None)
        if variable is None:
            return _IN_STEP
        if self._owners is None:
            self._owners = {}
            for root in self._kept:
                for module in root.modules():
                    for parameter in module._parameters.values():
                        self._owners.setdefault(id(parameter), self._names.get(id(module), _IN_STEP))
        return self._owners.get(id(variable), _IN_STEP)

    # --- what: operators --------------------------------------------------------------------------------------------

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_fake: bool) -> Any:
        """Run one operator and add it up. Called by the mode, which is off meanwhile."""
        what = self._operations.get(func)
        if what is None:
            what = self._operations[func] = Operation(func)
        mode = self._mode
        if mode is not None and (what.is_composite or what.branches):
            if what.branches:
                return mode.branches(func, args, kwargs)
            if not any(getattr(one, "is_nested", False) for one in args):
                return mode.again(func.decompose, args, kwargs)
        begin = perf_counter_ns()
        out = func(*args, **kwargs)
        ns = perf_counter_ns() - begin
        self._host_ns += ns
        if what.family is not None and not (is_fake and self._is_inference_of_shapes()):
            try:
                self._add(what, args, kwargs, out, ns, is_fake)
            except Exception:  # the operator ran: whoever called it must not see that it could not be counted
                log.exception("%s could not be counted", what.name)
                self._list(what, ns)
        return out

    def _is_inference_of_shapes(self) -> bool:
        """Whether fake tensors are somebody's way to learn shapes (of tensors laid out over ranks), beside the real work."""
        if self._fake is None:
            return self._mode is not None and self._mode.has_met_subclasses
        return torch._C._get_dispatch_mode(_FAKE) is not self._fake

    def _add(
        self, what: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, ns: int, is_fake: bool
    ) -> None:
        inputs, outputs = what.tensors(args, kwargs, out)
        if self._is_timed and (is_fake or not all(one.is_cpu for one in (*inputs[:1], *outputs[:1]))):
            self._is_timed = False  # the host only queues work, or there is none
        layer, pass_ = self._where()
        family = what.family or ""
        if what.is_comm:
            if pass_ == "bwd" and (layer is _IN_STEP or _is_leaf_now()):
                layer = _IN_GRAD_SYNC
            pass_ = "comm"
            family += what.group(args, kwargs)
        elif family == "copy" and inputs and outputs and inputs[0].device != outputs[0].device:
            pass_ = "copy"
        elif pass_ == "optim" and not what.bears_flops:
            family = "optimizer"
        cost = what.cost(args, kwargs, out)
        variant = what.name if family == UNCOUNTED and cost is None else ""
        key = (layer, pass_, family, what.dtype(inputs, outputs), variant)
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = [0, 0, 0, 0, 0, 0]
        sums[0] += 1
        sums[4] += traffic(what.name, inputs, outputs, mutates=what.mutates)
        if cost is None:
            sums[5] += 1
            self._list(what, ns)
        elif cost.hw_flops:
            self._is_bound = self._is_bound or cost.is_bound
            sums[2] += cost.hw_flops
            if pass_ != RECOMPUTE:
                sums[1] += cost.flops
                sums[3] += cost.flops_full

    def _list(self, what: Operation, ns: int) -> None:
        listed = self._uncounted.setdefault(what.name, [0, 0])
        listed[0] += 1
        listed[1] += ns


def _is_rerun(node: Any) -> bool:
    """Whether a checkpoint runs a function again, told apart from a backward pass that builds a graph."""
    top = _saved_tensor_hooks(True)
    if top is not None and "_recomputation_hook" in getattr(top[0], "__qualname__", ""):
        return True
    return "heckpoint" in node.name()


def _is_leaf_now() -> bool:
    node = _node()
    return node is None or node._sequence_nr() >= _LEAF
