"""What each unit did, without counting each unit: shapes of the inputs are a signature, and a signature is counted once.

A group is one micro-batch: the calls of the model up to a backward pass, and what follows up to the next call. The first
groups of a signature run under a `FlopCounter`; later ones are looked up. Where anything is compiled no counter may look
on, and a copy without data is counted instead. What was never counted is said to be uncounted.

Source: infra/rules/telemetry.md 2 and 3.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from seedance.flops.counter import FlopCounter
from seedance.flops.fake import count_copy
from seedance.flops.families import FLOP_FAMILIES
from seedance.flops.names import NO_LAYER, OPTIMIZER
from seedance.flops.operation import Operation, short_dtype
from seedance.flops.profile import OpCount, Profile
from seedance.probe.patches import is_in_step_hooks
from seedance.probe.shapes import Shapes
from seedance.probe.signature import Signature

FREE_COUNTS = 4
"""Counting runs of one kind of input that do not wait: as many as it takes to know all lengths."""
MOST_FREE_COUNTS = 16
"""Counting runs of all kinds that do not wait."""
COUNT_EVERY_NS = 60_000_000_000
"""Least time between two later ones."""
MOST_PROFILES = 4_096
"""Signatures that are remembered; a process with more of them has too many shapes to count."""
MOST_INFERRED_OPS = 100_000
"""Ops of inferred profiles a window of op rows: each profile is multiplied there, about 2 us an op."""
INFER_EVERY_NS = 300_000_000_000
MOST_CALLS = 4_096
"""Calls of a group whose signatures are remembered."""
MOST_STEP_COUNTS = 3
"""Units that are counted only to see the optimizer step once its state is there."""
UNCOUNTED = "uncounted"
FORWARD: Signature = ("forward",)
"""Ends the key of a group that a backward pass could have followed, and none did."""

_graph_task = torch._C._current_graph_task_id


class Counter(FlopCounter):
    """A `FlopCounter` that cannot hurt what it counts: its failures end the count, and it can fall silent anywhere.

    Removing hooks is left to `stop`: it must not happen while torch goes through them.
    """

    def __init__(self, module: nn.Module, on_error: Callable[[Exception], None]) -> None:
        super().__init__(module)
        self._on_error = on_error
        self.is_whole = True
        """False when the count is none."""
        self.wants_quiet = False
        """Whether it is to fall silent when the backward pass is over."""
        self.first_step = False
        """Whether the optimizer's step that it saw was the first one, which makes its state."""

    def quiet(self) -> None:
        """Count no more, and let operators go their own way. Not while an operator runs.

        Inside a backward pass the mode stays until the pass is over: the engine puts back what it found when it began.
        """
        self.wants_quiet = _graph_task() != -1
        if self._mode is not None and not self.wants_quiet and self._mode.stop():
            self._mode = None
            self._kept, self._root = [], None  # the model may go before the next unit begins

    def end(self) -> bool:
        """Be gone; False where that must wait: in a backward pass, or while torch goes through its optimizer hooks."""
        self.quiet()
        if self.wants_quiet or is_in_step_hooks():
            return False
        self.stop()
        return True

    def give_up(self) -> None:
        """Be no count."""
        self.is_whole = False

    def _fail(self, error: Exception) -> None:
        if self.is_whole:
            self.is_whole = False
            self._on_error(error)

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_fake: bool) -> Any:
        if not self.is_whole:
            return func(*args, **kwargs)
        try:
            if func not in self._operations:
                self._operations[func] = Operation(func)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._fail(error)
            return func(*args, **kwargs)
        return super()._operator(func, args, kwargs, is_fake)

    def _add(self, *details: Any) -> None:
        try:
            super()._add(*details)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._fail(error)

    def _enter_module(self, module: nn.Module, args: object) -> None:
        if self._mode is None:
            return
        try:
            super()._enter_module(module, args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._fail(error)

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        try:
            super()._leave_module(module, args, output)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self._fail(error)

    def _enter_optimizer(self, optimizer: object, args: object, kwargs: object) -> None:
        try:
            super()._enter_optimizer(optimizer, args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self._fail(error)

    def _leave_optimizer(self, optimizer: object, args: object, kwargs: object) -> None:
        try:
            super()._leave_optimizer(optimizer, args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self._fail(error)


class Counting:
    """Profiles by signature, and those of the unit that runs.

    Args:
        whole: the module whose layers are named; asked for when something is counted.
        is_compiled: whether anything in the process is compiled: then nothing may look on.
        on_error: told of a failure in here.
        clock: ns, monotonic.
    """

    def __init__(
        self,
        whole: Callable[[], nn.Module | None],
        *,
        is_compiled: Callable[[], bool],
        on_error: Callable[[Exception], None],
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._whole, self._is_compiled, self._on_error, self._clock = whole, is_compiled, on_error, clock
        self._known: dict[Signature, Profile] = {}
        self._shapes = Shapes()
        self._inferred_ns = self._inferred_ops = 0
        self._inferred: set[Signature] = set()
        """Signatures of profiles that were not counted."""
        self._firsts: set[Signature] = set()
        """Signatures that a known group begins with."""
        self._wanted: set[Signature] = set()
        """Signatures that an unknown group began with, though a known one does too."""
        self._hopeless: set[Signature] = set()
        self._steps: weakref.WeakKeyDictionary[Any, tuple[Profile, bool]] = weakref.WeakKeyDictionary()
        """Profile of each optimizer's step, and whether it was counted."""
        self._counted = 0
        self._last_ns = 0
        self._wants_step = False
        self._step_counts = 0
        self._group: list[Signature | None] = []
        self._is_backward = False
        self._has_grad = False
        """Whether a backward pass may follow the group."""
        self._parts: list[Profile] = []
        self._missed = 0
        self._is_wasted = False
        self._wasted: dict[int, tuple[Profile, Profile]] = {}
        self._retired: list[Counter] = []
        """Counts that are over and could not go yet."""
        self.counter: Counter | None = None
        """The count that runs."""

    # --- a unit -----------------------------------------------------------------------------------------------------

    def begin_call(
        self,
        module: nn.Module,
        signature: Signature | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        may_count: bool,
    ) -> None:
        """The model is about to be called; may begin to count.

        Args:
            module: what is called.
            signature: of this call: module, modes and inputs; None when they are not understood.
            args, kwargs: of the call; used here and not kept.
            may_count: False in a sampled unit, whose times a counter would spoil.
        """
        if self._retired:
            self._retired = [counter for counter in self._retired if not counter.end()]
        if self._is_backward:
            self._close()
        self._has_grad = self._has_grad or torch.is_grad_enabled()
        if len(self._group) < MOST_CALLS:
            self._group.append(signature)
        else:
            self._group[0] = None
        if signature is None or self.counter is not None:
            return
        if signature in self._firsts and signature not in self._wanted and not self._wants_step:
            return
        if not self._wants_step and not self._inferred.isdisjoint(_alone(signature)) and not self._is_due():
            return  # inferred from others: counted now and then, to see that it is right
        if self._is_compiled():
            self._count_copy(module, signature, args, kwargs)
        elif may_count and len(self._group) == 1 and not torch._C._len_torch_dispatch_stack():
            if self._wants_step:
                self._begin(signature)
            elif self._may_count(signature):
                self._note()
                self._begin(signature)

    def would_count(self, signature: Signature | None) -> bool:
        """Whether a unit that begins with this signature would be counted."""
        return (
            signature is not None
            and (signature not in self._firsts or signature in self._wanted)
            and not torch._C._len_torch_dispatch_stack()
            and self._may_count(signature)
        )

    def end_call(self, *, failed: bool, ends_unit: bool) -> None:
        """The call is over; what counts it goes on until the group is over."""
        if failed and self._group:
            self._group[-1] = None
            if self.counter is not None:
                self.counter.give_up()
                self.counter.quiet()
        if ends_unit:
            self._close()

    def end_backward(self, *, failed: bool) -> None:
        """The gradients of the group are there."""
        self._is_backward = True
        if self.counter is not None:
            if failed:
                self.counter.give_up()
            if failed or self.counter.wants_quiet:
                self.counter.quiet()

    def rest(self) -> None:
        """Something that is no part of a unit begins (data are fetched): a group whose gradients are there is over."""
        if self._is_backward and self.counter is not None:
            self.counter.quiet()

    def begin_step(self, optimizer: Any) -> None:
        """The optimizer is about to step."""
        if self.counter is not None:
            self.counter.first_step = not optimizer.state

    def end_step(self, optimizer: Any) -> None:
        """The optimizer has stepped: the step is part of the unit."""
        counter = self.counter
        if counter is not None:
            counter.quiet()
        known = self._steps.get(optimizer)
        if counter is not None and counter.is_whole and (known is None or not known[1]):
            ops = tuple(op for op in counter.profile.ops if op.layer == OPTIMIZER)
            if ops:
                known = self._steps[optimizer] = (Profile(ops), not counter.first_step)
        if known is None:
            known = self._steps[optimizer] = (step_profile(optimizer), False)
        self._wants_step = not known[1] and self._step_counts < MOST_STEP_COUNTS and not self._is_compiled()
        self._step_counts += self._wants_step
        self._is_backward = True
        self._parts.append(known[0])

    def skip_step(self) -> None:
        """The optimizer did not step, as its gradients were not finite: the unit's work was for nothing."""
        if self.counter is not None:
            self.counter.quiet()
        self._is_backward = self._is_wasted = True

    def take(self) -> tuple[list[Profile], int]:
        """Profiles of the unit's groups and steps, and how many groups have none."""
        self._close()
        parts, missed = self._parts, self._missed
        if self._is_wasted:
            parts = [self._waste(part) for part in parts]
        self._parts, self._missed, self._is_wasted = [], 0, False
        return parts, missed

    def _waste(self, part: Profile) -> Profile:
        """The same work without a use: hardware FLOPs, and no model FLOPs."""
        held = self._wasted.get(id(part))
        if held is None or held[0] is not part:
            ops = tuple(replace(op, flops=0, flops_full=0) for op in part.ops)
            if len(self._wasted) >= MOST_PROFILES:
                self._wasted.clear()
            held = self._wasted[id(part)] = (part, Profile(ops, part.uncounted, part.host_ns, part.is_bound))
        return held[1]

    def forget(self) -> None:
        """The model is another one now: everything is counted anew."""
        self._known.clear()
        self._shapes.clear()
        self._inferred.clear()
        self._firsts.clear()
        self._wanted.clear()
        self._hopeless.clear()

    def stop(self) -> None:
        """No count runs any more. Not while an operator runs."""
        self._retire()
        self._retired = [counter for counter in self._retired if not counter.end()]

    def step_aside(self) -> None:
        """The count that runs is none, and nothing of it may be in the way."""
        if self.counter is not None:
            self.counter.give_up()
            self.counter.end()

    def _retire(self) -> Counter | None:
        """End the count that runs; if it cannot go now it does at the next call."""
        counter, self.counter = self.counter, None
        if counter is not None and not counter.end():
            self._retired.append(counter)
        return counter

    # --- counts -----------------------------------------------------------------------------------------------------

    def _may_count(self, signature: Signature) -> bool:
        if len(self._known) - len(self._inferred) >= MOST_PROFILES:
            return False
        keys = _alone(signature)
        is_free = self._counted < MOST_FREE_COUNTS and max(map(self._shapes.points, keys)) < FREE_COUNTS
        return is_free or self._is_due() or any(map(self._shapes.is_far, keys))

    def _is_due(self) -> bool:
        """Whether it is a while since the last counting run."""
        return not self._counted or self._clock() - self._last_ns >= COUNT_EVERY_NS

    def _begin(self, signature: Signature) -> None:
        whole = self._whole()
        if whole is not None:
            self._wanted.discard(signature)
            counter = Counter(whole, self._on_error)
            counter.__enter__()
            self.counter = counter

    def _note(self) -> None:
        self._counted += 1
        self._last_ns = self._clock()

    def _count_copy(
        self, module: nn.Module, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count a call, and the backward pass that it will have, on a copy without data."""
        alone = (signature,)
        if alone in self._known or alone in self._hopeless or not self._may_count(signature):
            return
        self._note()
        try:
            profile = count_copy(module, args, kwargs, training=torch.is_grad_enabled())
        except Exception:  # noqa: BLE001 - many models cannot be counted without data: their units are uncounted
            self._hopeless.add(alone)
            return
        self._learn(alone, profile)
        self._firsts.add(signature)

    def _learn(self, key: Signature, profile: Profile) -> None:
        """Remember a count; what was inferred is forgotten when it does not agree."""
        if not self._shapes.add(key, profile):
            self._forget_inferred()
        self._known[key] = profile
        self._inferred.discard(key)

    def _infer(self, key: tuple[Signature | None, ...]) -> Profile | None:
        """The profile of a group that nobody counted, from others of which one length differs."""
        now = self._clock()
        if now - self._inferred_ns >= INFER_EVERY_NS:
            self._inferred_ns, self._inferred_ops = now, 0
        if None in key or self._inferred_ops >= MOST_INFERRED_OPS:
            return None
        found = self._shapes.infer(key)
        if found is not None:
            if len(self._known) >= MOST_PROFILES:
                self._forget_inferred()
            self._known[key] = found
            self._inferred.add(key)
            self._inferred_ops += len(found.ops)
        return found

    def _forget_inferred(self) -> None:
        for one in self._inferred:
            self._known.pop(one, None)
        self._inferred.clear()

    def _close(self) -> None:
        """A group is over: add its profile to the unit, from the counter or from memory."""
        group, self._group = self._group, []
        is_alone, self._is_backward, self._has_grad = self._has_grad and not self._is_backward, False, False
        counter = self._retire()
        if not group:
            return
        # The same calls with no backward pass after them did less.
        key = (*group, FORWARD) if is_alone else tuple(group)
        if counter is not None and counter.is_whole and None not in key:
            counted = counter.profile
            ops = tuple(op for op in counted.ops if op.layer != OPTIMIZER)
            self._learn(key, Profile(ops, counted.uncounted, counted.host_ns, counted.is_bound))
            self._firsts.update(one for one in key[:1] if one is not None)
        found = self._known.get(key) or self._infer(key)
        if found is not None:
            self._parts.append(found)
            return
        alone = [self._known.get((one,)) or self._infer((one,)) for one in group] if self._is_compiled() else [None]
        if None not in alone:
            self._parts += (one for one in alone if one is not None)
            return
        self._missed += 1
        first = key[0]
        if first is not None and None not in key and first in self._firsts and len(self._wanted) < MOST_PROFILES:
            self._wanted.add(first)


def _alone(signature: Signature) -> tuple[Signature, Signature]:
    """Keys of groups of this one call: with a backward pass or no gradients at all, and without one."""
    return (signature,), (signature, FORWARD)


def step_profile(optimizer: Any) -> Profile:
    """What an optimizer's step moves, from the sizes of what it reads and writes: for steps that nobody may look into."""
    moved = calls = 0
    dtype = "none"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            calls = 1
            dtype = short_dtype(parameter.dtype) if dtype == "none" else dtype
            size = parameter.numel() * parameter.element_size()
            state = sum(
                one.numel() * one.element_size()
                for one in optimizer.state.get(parameter, {}).values()
                if isinstance(one, torch.Tensor)
            )
            moved += 3 * size + 2 * state  # parameter read and written, gradient read; state read and written
    count = OpCount(OPTIMIZER, NO_LAYER, "optimizer", "optim", dtype, "", calls, 0, 0, 0, moved, 0)
    return Profile((count,) if calls else ())


def op_names(profiles: Iterable[Profile]) -> dict[tuple[str, str], tuple[str, str]]:
    """Op and dtype by layer and pass, for time that was measured of both as one.

    The only op with FLOPs gives its name; several, or none, are fused: their families, sorted. The dtype is that of most
    FLOPs, else of most bytes.

    Source: infra/rules/telemetry.md 2.
    """
    found: dict[tuple[str, str], list[OpCount]] = {}
    for profile in {id(one): one for one in profiles}.values():
        for op in profile.ops:
            found.setdefault((op.layer, op.pass_), []).append(op)
    return {place: (_op(ops), _dtype(ops)) for place, ops in found.items()}


def _op(ops: Sequence[OpCount]) -> str:
    bearing = sorted({op.op for op in ops if op.op in FLOP_FAMILIES})
    names = bearing or sorted({op.op for op in ops})
    return names[0] if len(names) == 1 else f"fused:{'+'.join(names)}"


def _dtype(ops: Sequence[OpCount]) -> str:
    sums: dict[str, tuple[int, int]] = {}
    for op in ops:
        flops, moved = sums.get(op.dtype, (0, 0))
        sums[op.dtype] = (flops + op.hw_flops, moved + op.bytes_ideal)
    return max(sorted(sums), key=sums.__getitem__)


def is_anything_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether torch.compile has been asked for anything in this process, or one of these modules is compiled."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:
        if any(backend is not None for backend in getattr(frames, "cached_backends", {}).values()):
            return True
        compiled = getattr(frames, "OptimizedModule", ())
        return any(isinstance(module, compiled) for module in modules)
    return False
