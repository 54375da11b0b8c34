"""Who ran when in one sampled unit: marks at the borders of modules, and the exclusive time of each layer made of them.

Forward marks come from two global module hooks (hooks on modules would be copied and pickled with the model, and switch off
fused paths that look for them); backward marks from hooks on the graph nodes at a module's output and input, which go with
the graph. Both are gone when the unit ends. A mark is a clock reading, a kind and a call; everything else waits until the
unit is over. Never used where anything is compiled.

Source: infra/rules/telemetry.md 4.2; a layer's time is what none of its children covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as global_hooks

from seedance.flops.names import GRAD_SYNC, OPTIMIZER
from seedance.probe.clock import Clock, Mark

FWD_IN, FWD_OUT, BWD_IN, BWD_OUT, RUN_IN, RUN_OUT, STEP_IN, STEP_OUT, GRAPH_END = range(9)
"""Kinds of marks: a call of a module begins and ends, the gradient at its output and input is there, the autograd engine
runs, the optimizer steps, the engine is done with the graph and calls what waits for its end."""
MOST_MARKS = 100_000
"""Marks of a unit; a unit with more is given up."""
MOST_TENSORS = 4
"""Tensors of an output, and of an input, whose gradients are marked."""
HOOK_NS = 800
"""What calling a hook costs beside what it does itself, ns: measured 0.6 us for a module's, 0.8 us for a node's."""

Place = tuple[str, str]
"""Layer and pass."""
_NO_TASK = -1
_NONE = -1
_RUN, _STEP = -1, -2
_graph_task = torch._C._current_graph_task_id


class Time(NamedTuple):
    """Exclusive time of one layer and pass in a unit, ns, and its calls."""

    ns: int
    calls: int


class Trace:
    """Marks of one unit, between `start` and `stop`.

    Args:
        names: layer by `id` of the module; modules that are not in it are not marked.
        clock: takes the marks.
        is_synced: whether gradients are averaged over replicas at the end of the backward pass.
        on_error: told of the first failure in here; nothing is raised into the model.
    """

    def __init__(self, names: Mapping[int, tuple[str, int]], clock: Clock, *, is_synced: bool, on_error: Any) -> None:
        self._names = names
        self._mark = clock.spare
        self._is_synced = is_synced
        self._on_error = on_error
        self._thread = get_ident()
        self._handles: list[Any] = []
        self._runs = 0
        self._waits_for_end = False
        self._stack: list[int] = []
        self._modules: list[int] = []
        self._places: list[Place] = []
        self._parents: list[int] = []
        self._latest: dict[int, int] = {}
        """The latest forward call of each module."""
        self._sealed: int | None = None
        self._is_live = False
        self.marks: list[tuple[Mark, int, int]] = []
        self.cost_ns = 0
        """Host time that the marks took from the unit."""
        self.is_whole = True
        """False when marks are missing: the unit is no sample."""
        self.is_full = False
        """Whether there was no room for more."""

    def start(self) -> None:
        """Hook every module. Must not be called, nor `stop`, while torch goes through its global module hooks."""
        self._is_live = True
        self._handles = [
            global_hooks.register_module_forward_pre_hook(self._enter),
            global_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Take every hook off; again is fine."""
        self._is_live = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def seal(self) -> None:
        """The unit may be over: marks from here on count only if it is sealed again."""
        self._sealed = len(self.marks)

    def unsealed(self) -> list[Mark]:
        """Take off the marks that came after the last seal."""
        rest = self.marks[self._sealed :] if self._sealed is not None else []
        del self.marks[len(self.marks) - len(rest) :]
        return [mark for mark, _, _ in rest]

    def give_up(self) -> None:
        """Mark nothing more, and be no sample."""
        self.is_whole = self._is_live = False

    # --- marks ------------------------------------------------------------------------------------------------------

    def _note(self, kind: int, call: int) -> None:
        mark = self._mark()
        if mark is None or len(self.marks) >= MOST_MARKS:
            self.is_full = True
            self.give_up()
        else:
            self.marks.append((mark, kind, call))

    def _call(self, module: int, place: Place) -> int:
        call = len(self._modules)
        outer = self._stack[-1] if self._stack else _NONE
        if place[1] == "fwd":
            self._latest[module] = call
        elif outer == _NONE:  # run again by a checkpoint: part of what its first run was part of
            outer = self._parents[self._latest[module]] if module in self._latest else _NONE
        self._modules.append(module)
        self._places.append(place)
        self._parents.append(outer)
        self._stack.append(call)
        return call

    def _enter(self, module: Any, args: Any) -> None:
        begin = perf_counter_ns()
        try:
            found = self._names.get(id(module))
            task = _graph_task()
            if found is None or not self._is_live or (task == _NO_TASK and get_ident() != self._thread):
                return
            call = self._call(id(module), (found[0], "fwd" if task == _NO_TASK else "recompute"))
            if torch.is_grad_enabled():
                self._hang(args, call, BWD_OUT)
            self._note(FWD_IN, call)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._fail(error)
        self.cost_ns += perf_counter_ns() - begin + HOOK_NS

    def _leave(self, module: Any, _: Any, output: Any) -> None:
        begin = perf_counter_ns()
        try:
            if id(module) not in self._names or not self._is_live:
                return
            if _graph_task() == _NO_TASK and get_ident() != self._thread:
                return
            call = self._pop(id(module))
            if call == _NONE:
                return
            self._note(FWD_OUT, call)
            if torch.is_grad_enabled():
                self._hang(output, call, BWD_IN)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._fail(error)
        self.cost_ns += perf_counter_ns() - begin + HOOK_NS

    def _pop(self, module: int) -> int:
        stack = self._stack
        for place in range(len(stack) - 1, -1, -1):
            if self._modules[stack[place]] == module:
                call = stack[place]
                # What stands above was left without a word: by an interrupt, or a generator that nobody ran to its end.
                del stack[place:]
                return call
        return _NONE

    def _hang(self, values: Any, call: int, kind: int) -> None:
        """Mark when the gradients of some tensors are there: right before the node that made them runs."""
        hook = partial(self._gradient, call, kind)
        for node in _nodes(values, []):
            node.register_prehook(hook)

    def _gradient(self, call: int, kind: int, _: Any) -> None:
        if not self._is_live:
            return
        begin = perf_counter_ns()
        try:
            if self._waits_for_end and self._runs == 1:
                self._waits_for_end = False
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._end_graph)
            self._note(kind, call)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._fail(error)
        self.cost_ns += perf_counter_ns() - begin + HOOK_NS

    def _end_graph(self) -> None:
        if self._is_live:
            try:
                self._note(GRAPH_END, _NONE)
            except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
                self._fail(error)

    def begin_run(self) -> None:
        """The autograd engine begins; inside a run for a checkpoint, again."""
        self._runs += 1
        if self._runs == 1 and self._is_live:
            self._waits_for_end = True
            self._note(RUN_IN, _NONE)

    def end_run(self) -> None:
        """The autograd engine is done."""
        self._runs = max(self._runs - 1, 0)
        if self._runs == 0 and self._is_live:
            self._note(RUN_OUT, _NONE)

    def begin_step(self) -> None:
        """The optimizer's step begins."""
        if self._is_live:
            self._note(STEP_IN, _NONE)

    def end_step(self) -> None:
        """The optimizer's step is done."""
        if self._is_live:
            self._note(STEP_OUT, _NONE)

    def begin_region(self, name: str) -> None:
        """A part that the user names begins."""
        if self._is_live and get_ident() == self._thread:
            self._note(FWD_IN, self._call(_NONE, (f"({name})", "fwd")))

    def end_region(self, name: str) -> None:
        """The part ends."""
        if not self._is_live or get_ident() != self._thread:
            return
        for call in reversed(self._stack):
            if self._modules[call] == _NONE and self._places[call][0] == f"({name})":
                del self._stack[self._stack.index(call) :]
                self._note(FWD_OUT, call)
                return

    def _fail(self, error: Exception) -> None:
        self.give_up()
        self._on_error(error)

    # --- times ------------------------------------------------------------------------------------------------------

    def times(self, instants: Sequence[int], begin_ns: int, end_ns: int) -> dict[Place | None, Time]:
        """Exclusive time of each layer and pass; None: what no layer covers. Adds up to end_ns - begin_ns.

        Args:
            instants: when the marks were passed, one a mark, ns.
            begin_ns, end_ns: active time of the unit.
        """
        walk = _Walk(self._places, self._parents, self._is_synced)
        lasts = _last_work(self.marks)
        sums: dict[Place | None, list[int]] = {}
        owner: Place | None = None
        now = begin_ns
        for at, (instant, (_, kind, call)) in enumerate(zip(instants, self.marks, strict=True)):
            until = min(max(instant, now), end_ns)
            if until > now:
                sums.setdefault(owner, [0, 0])[0] += until - now
                now = until
            begun = walk.take(kind, call)
            if begun is not None:
                sums.setdefault(begun, [0, 0])[1] += 1
            owner = walk.owner(at >= lasts[at])
        if end_ns > now:
            # After the last mark nothing of the model ran.
            sums.setdefault(None, [0, 0])[0] += end_ns - now
        return {place: Time(ns, calls) for place, (ns, calls) in sums.items()}


class _Walk:
    """Goes through the marks of a unit and says whose time it is."""

    def __init__(self, places: Sequence[Place], parents: Sequence[int], is_synced: bool) -> None:
        self._places, self._parents, self._is_synced = places, parents, is_synced
        self._stack: list[int] = []
        self._open: set[int] = set()
        """Calls whose backward part has begun and not ended."""
        self._through: set[int] = set()
        """Calls that the gradient is through. What hands its input on has it at both ends at once, input first: no work."""
        self._seen: set[int] = set()
        self._backward = _NONE
        self._is_after = False

    def take(self, kind: int, call: int) -> Place | None:
        """Go past a mark; the layer and pass of a call that begins there."""
        stack = self._stack
        if kind == FWD_IN:
            stack.append(call)
            return self._places[call]
        if kind == FWD_OUT:
            if call in stack:
                del stack[stack.index(call) :]
        elif kind == BWD_IN:
            return self._begin(call)
        elif kind == BWD_OUT:
            self._end(call)
        elif kind == RUN_IN:
            stack.append(_RUN)
            self._is_after = False
        elif kind == RUN_OUT:
            if _RUN in stack:
                del stack[len(stack) - 1 - stack[::-1].index(_RUN) :]
            self._backward, self._is_after = _NONE, False
            self._open.clear()
            if _RUN not in stack:
                self._through.clear()
        elif kind == STEP_IN:
            stack.append(_STEP)
            return (OPTIMIZER, "optim")
        elif kind == STEP_OUT:
            if _STEP in stack:
                del stack[len(stack) - 1 - stack[::-1].index(_STEP) :]
        elif kind == GRAPH_END:
            self._is_after = True
            return (GRAD_SYNC, "comm") if self._is_synced else None
        return None

    def owner(self, is_step: bool) -> Place | None:
        """Whose time it is from here on.

        Args:
            is_step: whether nothing of the model runs any more in the optimizer's step: with a closure it does first.
        """
        top = self._stack[-1] if self._stack else None
        if top is None:
            return None
        if top == _STEP:
            return (OPTIMIZER, "optim") if is_step else None
        if top != _RUN:
            return self._places[top]
        if self._is_after:
            return (GRAD_SYNC, "comm") if self._is_synced else None
        return (self._places[self._backward][0], "bwd") if self._backward != _NONE else None

    def _begin(self, call: int) -> Place | None:
        """The gradient at a call's output is there. Of calls that end with one tensor, the innermost has the time."""
        if call in self._open or call in self._through:
            return None
        self._open.add(call)
        if not self._is_within(self._backward, call):
            self._backward = call
        if call in self._seen:
            return None
        self._seen.add(call)
        return (self._places[call][0], "bwd")

    def _end(self, call: int) -> None:
        """The gradient at a call's input is there: the time goes back to what the call is part of."""
        self._through.add(call)
        if call not in self._open:
            return
        self._open.discard(call)
        if not self._is_within(self._backward, call):
            return
        outer = self._parents[call]
        while outer != _NONE and outer not in self._open:
            outer = self._parents[outer]
        self._backward = outer

    def _is_within(self, call: int, outer: int) -> bool:
        while call > outer:  # a call's number is above that of what it is part of
            call = self._parents[call]
        return call == outer


def _last_work(marks: Sequence[tuple[Mark, int, int]]) -> list[int]:
    """For each mark, the latest mark of the model's work within the optimizer's step that it belongs to, else 0."""
    lasts = [0] * len(marks)
    steps: list[tuple[int, int]] = []
    for at, (_, kind, _) in enumerate(marks):
        if kind == STEP_IN:
            steps.append((at, 0))
        elif kind == STEP_OUT and steps:
            begin, last = steps.pop()
            lasts[begin:at] = [last] * (at - begin)
        elif kind in (FWD_OUT, RUN_OUT) and steps:
            steps[-1] = (steps[-1][0], at)
    return lasts


def _nodes(values: Any, found: list[Any]) -> list[Any]:
    """Nodes of the first few tensors of an input or output that a gradient comes to."""
    if isinstance(values, torch.Tensor):
        node = values.grad_fn
        if node is not None:
            found.append(node)
    elif isinstance(values, Mapping):
        for value in values.values():
            if len(found) < MOST_TENSORS:
                _nodes(value, found)
    elif isinstance(values, list | tuple):
        for value in values:
            if len(found) < MOST_TENSORS:
                _nodes(value, found)
    return found
