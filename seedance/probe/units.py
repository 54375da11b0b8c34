"""Where units of work begin and end, and what is known of each: calls of the model and optimizer steps in, `Unit`s out.

A training unit begins with the first call of a model and ends with the optimizer's step; it stays open to a second optimizer
until the model is called again. Without training each outermost call is a unit. All work for the record is done where the
next unit begins, before its first mark, so that it stands in the gap.

Source: infra/rules/telemetry.md 2; the gap and the active time, 4.1 and 4.2.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch import nn

from seedance.probe.clock import Clock, HostClock, Mark, Utc
from seedance.probe.counting import Counting
from seedance.probe.hooks import HookManager
from seedance.probe.models import Models
from seedance.probe.patches import is_in_step
from seedance.probe.sampling import Draw, Rate
from seedance.probe.settle import OpenUnit, Settler, Waits
from seedance.probe.signature import Inputs, Signature, look
from seedance.probe.trace import Trace
from seedance.probe.unit import Unit

MOST_CALLS = 64
"""Calls of a model in training mode without a step, after which each call is a unit; more where more were seen."""
STRANGE_STEPS = 3
"""Steps of an optimizer with none of the model's parameters, after which it is taken for the model's own."""
STRAYS = 2
"""Steps without calls of a model, after which its parts are marked."""
SERVING = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class Moment:
    """What a hook is given: where training is.

    Args:
        point: one of `seedance.probe.hooks.POINTS`.
        unit: number of the unit within the attempt.
        phase: train, prefill, decode, mixed, eval.
        batch_size: local micro-batch.
        module: model that is called, else None.
        optimizer: optimizer that steps, else None.
        inputs: arguments of the call by position, else empty.
        output: what the call returned; else None.
    """

    point: str
    unit: int
    phase: str
    batch_size: int
    module: nn.Module | None = None
    optimizer: Any = None
    inputs: tuple[Any, ...] = ()
    output: Any = None


class Surroundings(Protocol):
    """What a timeline asks of whoever holds it."""

    models: Models

    def clock(self) -> Clock:
        """The clock of the device that the models are on."""

    def lost_calls(self) -> None:
        """Optimizer steps come without calls of the models."""

    def take(self, unit: Unit) -> None:
        """A unit is done."""

    def due(self, end_ns: int) -> None:
        """A step window is over: a unit ends after it, UTC."""

    def drop(self, units: int) -> None:
        """Units are lost."""

    def fail(self, error: Exception) -> None:
        """Something of ours failed."""


class Timeline:
    """The units of one process, one after the other.

    Args:
        job_id, attempt: whose units they are; decides which are sampled.
        around: models, clock, and where units go.
        waits: host time that patches and regions note.
        rate: how often to sample.
        hooks: what users hang on the points of a unit.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        around: Surroundings,
        *,
        waits: Waits,
        rate: Rate,
        hooks: HookManager,
        utc: Utc,
        counting: Counting,
        step_window_ns: int,
    ) -> None:
        self._around = around
        self._draw = Draw(job_id, attempt)
        self._waits, self._rate, self._hooks, self._counting = waits, rate, hooks, counting
        self.settler = Settler(around.take, around.drop, around.due, rate=rate, utc=utc, step_window_ns=step_window_ns)
        self._clock: Clock = HostClock()
        self._clock_known = False
        self._unit: OpenUnit | None = None
        self._number = 0
        self._last_end: Mark | None = None
        self._last_host = 0
        self._runs = 0
        self._steps = 0
        self._is_first_of_group = True
        self._trains_in_eval = False
        self._is_single = False
        self._calls_since_step = 0
        self._most_calls = MOST_CALLS
        self._strays = 0
        self._strangers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._has_stepped = False
        self._optimizer: weakref.ref[Any] | None = None
        """The latest one that was found to be the models'."""
        self.phases: list[str] = []
        """Phases that the user named, innermost last."""
        self._regions: list[tuple[int, str]] = []
        """Other parts that the user named and that go on: thread and name, innermost last."""

    def identify(self, job_id: str, attempt: int) -> None:
        """Whose units these are, known late."""
        self._draw = Draw(job_id, attempt)

    def may_begin(self) -> bool:
        """Whether a call is one that runs: not when it is recorded into a graph, or traced."""
        if torch._C._get_tracing_state() is not None:
            return False
        return self._clock.is_host or not torch.cuda.is_current_stream_capturing()

    def step_aside(self) -> None:
        """Something is about to be compiled: what looks on is given up."""
        unit = self._unit
        if unit is not None and unit.trace is not None:
            unit.trace.give_up()
            unit.trace.stop()
        self._counting.step_aside()

    # --- calls of a model -------------------------------------------------------------------------------------------

    def begin_call(self, entry: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is called, outermost."""
        begun = perf_counter_ns()
        has_grad = torch.is_grad_enabled()
        is_training = module.training
        found = look(args, kwargs)
        signature = None
        if found.signature is not None:
            signature = (entry, is_training, has_grad, _autocast(), found.signature)
        unit = self._unit
        if unit is not None and unit.is_done:
            self.close()
            unit = None
        is_new = unit is None
        if unit is None:
            unit = self._open(found, signature, has_grad and (is_training or self._trains_in_eval))
        unit.calls += 1
        unit.has_grad = unit.has_grad or has_grad
        self._calls_since_step += has_grad
        self._count_inputs(unit, found)
        self._counting.begin_call(module, signature, args, kwargs, may_count=unit.trace is None)
        if self._counting.counter is not None:
            unit.is_counted = True
        wanted = self._hooks.wanted
        if is_new and wanted("pre_batch"):
            self._fire("pre_batch", unit, module=module, inputs=args)
        if wanted("pre_forward"):
            self._fire("pre_forward", unit, module=module, inputs=args)
        if self._unit is not unit:  # a hook detached the probe
            return
        if not is_new:
            unit.own_ns += perf_counter_ns() - begun
            return
        if unit.trace is not None:
            unit.trace.start()
            for thread, name in self._regions:
                if thread == get_ident():
                    unit.trace.begin_region(name)
            if self._steps and is_in_step():  # the optimizer calls the model
                for _ in range(self._steps):
                    unit.trace.begin_step()
            else:
                self._steps = 0
        self._waits.thread = get_ident()
        unit.host_begin = now = perf_counter_ns()
        unit.own_ns += now - begun
        unit.begin = self._clock.mark()

    def end_call(self, module: nn.Module | None, output: Any, error: BaseException | None) -> None:
        """The call is over."""
        unit = self._unit
        if unit is None:
            return
        if unit.is_training and unit.calls >= self._most_calls:
            self._is_single = True
        if error is not None and unit.is_training:
            self._uncount_inputs(unit)
        ends = not unit.is_training or self._is_single
        if ends:
            unit.end = self._clock.again(unit.end)
            unit.host_end = perf_counter_ns()
            unit.is_done = True
            if unit.trace is not None:
                unit.trace.seal()
        if ends or error is not None:
            self._counting.end_call(failed=error is not None, ends_unit=ends)
        if error is None and self._hooks.wanted("post_forward"):
            self._fire("post_forward", unit, module=module, output=output)
        if ends and self._hooks.wanted("post_batch"):
            self._fire("post_batch", unit, module=module)

    def _open(self, found: Inputs, signature: Signature | None, is_training: bool) -> OpenUnit:
        """Begin a unit: everything but its first mark."""
        self._known_clock()
        phase = self.phases[-1] if self.phases else "train" if is_training else "eval"
        batch = found.batch_size
        if phase in SERVING and batch:
            batch = 1 << (batch - 1).bit_length()
        unit = self._unit = OpenUnit(self._number, phase, batch, is_training)
        self._number += 1
        self._is_first_of_group = True
        if (
            self._draw.is_sampled(unit.number, self._rate.p_ppm)
            and not self._around.models.is_compiled()
            and not self._counting.would_count(signature)  # once; then there is a name for the time that a sample finds
        ):
            models = self._around.models
            unit.trace = Trace(models.names(), self._clock, is_synced=models.is_synced(), on_error=self._around.fail)
        return unit

    def _known_clock(self) -> Clock:
        """The clock, which is known when the first unit begins: models move between devices before."""
        if not self._clock_known:
            self._clock, self._clock_known = self._around.clock(), True
        return self._clock

    def _count_inputs(self, unit: OpenUnit, found: Inputs) -> None:
        """Samples of a group are those of its largest call; tokens add up."""
        if self._is_first_of_group:
            self._is_first_of_group = False
            unit.group_batch = unit.group_tokens = 0
        if found.batch_size > unit.group_batch:
            unit.samples += found.batch_size - unit.group_batch
            unit.group_batch = found.batch_size
        unit.tokens_in += found.tokens
        unit.group_tokens += found.tokens

    def _uncount_inputs(self, unit: OpenUnit) -> None:
        """A group has failed: what it was given trains nothing, and may be given again."""
        unit.samples = max(unit.samples - unit.group_batch, 0)
        unit.tokens_in = max(unit.tokens_in - unit.group_tokens, 0)
        unit.group_batch = unit.group_tokens = 0
        self._is_first_of_group = True

    # --- backward and steps -----------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """The autograd engine begins."""
        self._runs += 1
        unit = self._unit
        if unit is not None and unit.trace is not None:
            unit.trace.begin_run()

    def end_run(self, *, failed: bool) -> None:
        """The autograd engine is done."""
        self._runs = max(self._runs - 1, 0)
        unit = self._unit
        if unit is None:
            return
        if unit.trace is not None:
            unit.trace.end_run()
        if self._runs == 0:
            if failed:
                self._uncount_inputs(unit)
            self._is_first_of_group = True
            self._counting.end_backward(failed=failed)
            if not failed and self._hooks.wanted("post_backward"):
                self._fire("post_backward", unit)

    def begin_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if not self._is_ours(optimizer):
            return
        unit = self._unit
        self._steps += 1
        if unit is not None:
            if unit.trace is not None:
                unit.trace.begin_step()
            self._counting.begin_step(optimizer)
        if self._hooks.wanted("pre_step"):
            self._fire("pre_step", unit, optimizer=optimizer)

    def end_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        """An optimizer has stepped, or would have if its gradients were finite: a unit ends."""
        begun = perf_counter_ns()
        if not self._is_ours(optimizer):
            return
        self._has_stepped = True
        self._steps = max(self._steps - 1, 0)
        unit = self._unit
        if self._is_single:
            self._is_single = False
            self._most_calls = max(self._most_calls, 8 * self._calls_since_step)
        self._calls_since_step = 0
        if unit is not None and not unit.is_training and unit.has_grad and unit.is_done:
            # A model that is trained in evaluation mode.
            self._trains_in_eval = unit.is_training = True
            unit.is_done = False
            unit.phase = self.phases[-1] if self.phases else "train"
        if unit is None or not unit.is_training or not unit.calls:
            self._stray(begun)
            return
        unit.end = self._clock.again(unit.end)
        unit.host_end = begun
        if unit.trace is not None:
            unit.trace.end_step()
            unit.trace.seal()
        if skipped:
            self._counting.skip_step()
        else:
            self._counting.end_step(optimizer)
        is_first, unit.is_done = not unit.is_done, True
        if not skipped and self._hooks.wanted("post_step"):
            self._fire("post_step", unit, optimizer=optimizer)
        if is_first and self._hooks.wanted("post_batch"):
            self._fire("post_batch", unit, optimizer=optimizer)
        unit.own_ns += perf_counter_ns() - begun

    def _is_ours(self, optimizer: Any) -> bool:
        known = self._optimizer
        if known is not None and known() is optimizer:
            return True
        if self._around.models.owns(optimizer):
            self._optimizer = weakref.ref(optimizer)
            return True
        if self._has_stepped or self._unit is None or not self._unit.calls:
            return False
        seen = self._strangers[optimizer] = self._strangers.get(optimizer, 0) + 1
        if seen <= 2 * STRANGE_STEPS:  # begin and end of each step
            return False
        self._around.models.adopt(optimizer)
        return True

    def _stray(self, now: int) -> None:
        """A step without a call of the model: it is called by another way, so the unit begins where its input was there."""
        self._strays += 1
        if self._strays == STRAYS:
            self._around.lost_calls()
        if self._unit is not None:
            self.close()
        clock = self._known_clock()
        if self._last_end is None:
            self._last_end, self._last_host = clock.mark(), now
            self._around.drop(1)
            return
        unit = OpenUnit(self._number, "train", 0, True)
        self._number += 1
        unit.host_begin = max(self._last_host, min(self._waits.last_ns, now))
        unit.begin = unit.host_begin if clock.is_host else self._last_end
        unit.end, unit.host_end, unit.is_done = clock.mark(), now, True
        self._unit = unit

    def set_counts(self, **counts: int) -> None:
        """Override samples, tokens_in, tokens_out or requests of the unit that runs."""
        if self._unit is not None:
            for name, count in counts.items():
                setattr(self._unit, name, count)

    def begin_region(self, name: str) -> None:
        """A part that the user names begins; units that begin inside belong to it."""
        self._regions.append((get_ident(), name))
        if self._unit is not None and self._unit.trace is not None:
            self._unit.trace.begin_region(name)

    def end_region(self, name: str) -> None:
        """The part ends."""
        for at in reversed(range(len(self._regions))):
            if self._regions[at] == (get_ident(), name):
                del self._regions[at]
                break
        if self._unit is not None and self._unit.trace is not None:
            self._unit.trace.end_region(name)

    def _fire(self, point: str, unit: OpenUnit | None, **facts: Any) -> None:
        if unit is None:
            self._hooks.fire(point, Moment(point, self._number, "train", 0, **facts))
        else:
            self._hooks.fire(point, Moment(point, unit.number, unit.phase, unit.batch_size, **facts))

    # --- ends of units ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The unit that runs is over for good: take what is known of it. One that has no end is dropped."""
        unit, self._unit = self._unit, None
        if unit is None:
            return
        if unit.trace is not None:
            unit.trace.stop()
            if unit.trace.is_full:
                self._around.models.coarsen()
            self._clock.release(unit.trace.unsealed())
        parts, missed = self._counting.take()
        if not unit.is_done or unit.begin is None or unit.end is None:
            self._around.drop(1)
            marks = () if unit.trace is None else tuple(mark for mark, _, _ in unit.trace.marks)
            self._clock.release((unit.begin, *marks))
            if unit.is_done and unit.end is not None:  # the next one begins here all the same
                self._last_end, self._last_host = unit.end, unit.host_end
            return
        start, self._last_end, self._last_host = self._last_end, unit.end, unit.host_end
        self.settler.add(unit, start, self._clock, parts, missed, self._waits.take(unit.host_end))

    def finish(self) -> None:
        """There will be no more units: all that is known leaves."""
        self.close()
        self.settler.resolve(final=True)

    def stop(self) -> None:
        """No hook and no count remains; the unit that runs is dropped."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.trace is not None:
            unit.trace.stop()
        self._counting.stop()


def _autocast() -> torch.dtype | None:
    """Compute dtype that autocast sets; None when it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return None
