"""One process's probe: models and patches in, rows in the spool out, and the end of it at any time.

Everything here that torch calls is guarded: whatever fails in the probe is counted, told once, and turns it off; the model and
its training never see it. Nothing runs in a thread. What must not change while torch goes through its hooks is put back at the
next call of a model.

Source: infra/rules/telemetry.md; statements about jobs, raw_telemetry__jobs.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from torch import nn

from seedance.durations import HOUR_NS
from seedance.probe.clock import Clock, Utc, clock_of
from seedance.probe.counting import Counting
from seedance.probe.hooks import HookManager
from seedance.probe.memory import MemoryReader, reader_of
from seedance.probe.models import Models, Target
from seedance.probe.patches import Patches, is_in_backward
from seedance.probe.report import Reporter
from seedance.probe.sampling import BUDGET_PPM, MILLION, Rate
from seedance.probe.settings import UNKNOWN, ProbeSettings
from seedance.probe.settle import Waits, window_end
from seedance.probe.spool import Spool
from seedance.probe.statements import Statements
from seedance.probe.unit import Unit
from seedance.probe.units import Timeline
from seedance.probe.uploads import Uploads
from seedance.probe.windows import PHASES, Windows

LOGGER = logging.getLogger("seedance.probe")
WAITS = ("checkpoint", "input")
"""Regions that are waits."""
OPAQUE = object()
"""An argument that says nothing: what is called with it is not counted."""
GRAPH = "graph"
"""Region of a recorded graph's replay: layer (graph)."""
BEAT_NS = 60_000_000_000
MOST_RANKS = 64
"""Ranks that all write op rows; of larger jobs those of eight replicas do."""
OP_REPLICAS = 8
NO_BUDGET = 10**15


class Session:
    """The probe of this process while at least one model is attached.

    Args:
        read: the settings as they are now: ranks and devices may be known only when the first unit begins.
        closed: called when the session is over.
    """

    def __init__(self, read: Callable[[], ProbeSettings], closed: Callable[[], None]) -> None:
        self._read, self._closed = read, closed
        self.settings = read()
        self.is_on = True
        self.failures = 0
        """Errors of the probe itself."""
        self.hooks = HookManager()
        self.waits = Waits()
        self.utc = Utc()
        self._attached_ns = time.time_ns()
        self._pid = os.getpid()
        self._gate = threading.Lock()
        self._caller = 0
        """Thread of the latest call of a model."""
        self._overlapping = 0
        """Calls of other threads while a model was called: there is one time line."""
        self._patches = Patches(self)
        self.models = Models(self._patches, self._forget_counts)
        self._is_done = False
        self._wants_tidy = False
        most_ppm = self.settings.max_sample_ppm
        # Who asks for each unit gets each unit, whatever it costs.
        self._rate = Rate(most_ppm=most_ppm, budget_ppm=NO_BUDGET if most_ppm >= MILLION else BUDGET_PPM)
        self._counting = Counting(self.models.whole, is_compiled=self.models.is_compiled, on_error=self.fail)
        self.timeline = Timeline(
            self.settings.job_id,
            self.settings.attempt,
            self,
            waits=self.waits,
            rate=self._rate,
            hooks=self.hooks,
            utc=self.utc,
            counting=self._counting,
            step_window_ns=self.settings.step_window_ns,
        )
        self._spool: Spool | None = None
        self._statements: Statements | None = None
        self._windows: Windows | None = None
        self._reporter: Reporter | None = None
        self._memory = MemoryReader(None)
        self._uploads: Uploads | None = None
        self._lost = 0
        self._beat_ns = 0
        self._hour = 0
        self._window: tuple[int, int] = (0, 0)
        """Wall time and the probe's own time of the present window, ns."""

    def _forget_counts(self) -> None:
        self._counting.forget()

    # --- models -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Change what is to be changed."""
        self._patches.install()
        atexit.register(self._at_exit)

    @property
    def targets(self) -> tuple[Target, ...]:
        """What is probed."""
        return self.models.targets

    def add(self, module: nn.Module, optimizer: Any) -> Target:
        """Probe a model; one that is probed already gets what wraps it marked too."""
        return self.models.add(module, optimizer)

    def remove(self, target: Target, reason: str) -> None:
        """Probe a model no longer; with the last one the session ends."""
        if target in self.targets:
            if len(self.targets) == 1:
                self.close(reason)
            else:
                self.models.remove(target)

    # --- what the patches tell (Listener) ---------------------------------------------------------------------------

    @property
    def thread(self) -> int:
        """Thread of the models; 0 before the first call."""
        return self.waits.thread

    @property
    def is_called(self) -> bool:
        """Whether a model is being called."""
        return self._gate.locked()

    def begin(self, entry: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A marked module is called. False within another call, or when nothing is to be told."""
        if not self._gate.acquire(blocking=False):
            if self._caller != get_ident() and not is_in_backward():
                self._overlapping += 1
            return False
        self._caller = get_ident()
        try:
            if self._wants_tidy:
                self._tidy()
            if self.is_on and self.timeline.may_begin():
                if self._overlapping:
                    lost, self._overlapping = self._overlapping, 0
                    self.drop(lost)
                self.timeline.begin_call(entry, module, args, kwargs)
                return True
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the model
            self.fail(error)
            self._tidy()
        except BaseException:
            self._gate.release()
            raise
        self._gate.release()
        return False

    def end(self, module: nn.Module | None, output: Any, error: BaseException | None) -> None:
        """Its call is over."""
        try:
            if self.is_on:
                self.timeline.end_call(module, output, error)
        except Exception as problem:  # noqa: BLE001 - nothing of ours may reach the model
            self.fail(problem)
        finally:
            try:
                if self._wants_tidy:
                    self._tidy()
            finally:
                self._gate.release()

    def begin_graph(self) -> bool:
        """A recorded graph is replayed outside of a model's call: it is work of the first model that nobody can look into."""
        roots = self.models.roots()
        if not roots or not self.begin(-1, roots[0], (OPAQUE,), {}):
            return False
        self._guard(self.timeline.begin_region, GRAPH)
        return True

    def end_graph(self, error: BaseException | None) -> None:
        """The replay was given to the device."""
        self._guard(self.timeline.end_region, GRAPH)
        self.end(None, None, error)

    def begin_run(self) -> None:
        """The autograd engine begins."""
        try:
            if self.is_on:
                self.timeline.begin_run()
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self.fail(error)

    def end_run(self, *, failed: bool) -> None:
        """The autograd engine is done."""
        try:
            if self.is_on:
                self.timeline.end_run(failed=failed)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self.fail(error)
        if self._wants_tidy and not self._gate.locked():
            self._tidy()

    def begin_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        try:
            if self.is_on:
                self.timeline.begin_step(optimizer)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self.fail(error)

    def end_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        """An optimizer has stepped, or its step was skipped."""
        try:
            if self.is_on:
                self.timeline.end_step(optimizer, skipped=skipped)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self.fail(error)

    def rest(self) -> None:
        """Data are about to be fetched."""
        self._guard(self._counting.rest)

    def waited(self, kind: str, begin_ns: int) -> None:
        """Host time was spent on `input` or `checkpoint` from then until now."""
        self._guard(self.waits.add, kind, begin_ns, perf_counter_ns())

    def compiles(self) -> None:
        """Something is about to be compiled: nothing may look on from here on."""
        self.models.is_compile_seen = True
        self._guard(self.timeline.step_aside)

    def compiled(self) -> None:
        """Something was: its class exists now."""
        self._guard(self._patches.refresh)

    def _guard(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if not self.is_on:
            return
        try:
            call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach training
            self.fail(error)

    # --- what the timeline asks (Surroundings) ----------------------------------------------------------------------

    def clock(self) -> Clock:
        """The clock of the device that the models are on; settings are final from here on."""
        self._begin()
        device = self.models.device()
        self._memory = reader_of(device)
        return clock_of(device)

    def lost_calls(self) -> None:
        """Steps come without calls of the models: their parts are called instead, so those are marked."""
        self.models.descend()

    def take(self, unit: Unit) -> None:
        """A unit is done: count it."""
        windows, reporter = self._windows, self._reporter
        if windows is None or reporter is None:
            return
        windows.add(unit)
        reporter.add(unit)
        wall, own = self._window
        self._window = wall + unit.end_ns - unit.start_ns, own + unit.probe_ns

    def drop(self, units: int) -> None:
        """Units are lost."""
        self._lost += units
        if self._windows is not None:
            self._windows.drop(self._lost)
            self._lost = 0

    def fail(self, error: Exception) -> None:
        """Something of ours failed: be off from now on, and put everything back where that is safe."""
        self.failures += 1
        self.is_on = False
        self._wants_tidy = True
        if self.failures == 1:
            LOGGER.warning(
                "probe: failed with %s: %s. It is off from now on; the job goes on as before. Please report it.",
                type(error).__name__,
                error,
                exc_info=error,
            )

    # --- rows -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first unit begins, or there will be none: who and where we are is known."""
        if self._windows is not None:
            return
        settings = self.settings = self._read()
        if settings.model == UNKNOWN and (roots := self.models.roots()):
            name = type(roots[0]).__name__
        else:
            name = settings.model
        replica = settings.rank // settings.ranks_per_replica
        self.timeline.identify(settings.job_id, settings.attempt)
        self._spool = Spool(
            settings.spool,
            settings.node,
            cloud=settings.cloud,
            instance_id=settings.instance_id,
            instance_type=settings.instance_type,
            period_ns=settings.step_window_ns,
            limit_bytes=settings.spool_limit_bytes,
        )
        self._windows = Windows(
            settings.job_id,
            settings.attempt,
            settings.rank,
            settings.device_uuid,
            settings.writes_samples,
            writes_ops=settings.world_size <= MOST_RANKS or replica < OP_REPLICAS,
            layers=self.models.layers,
            step_window_ns=settings.step_window_ns,
            op_window_ns=settings.op_window_ns,
        )
        self.drop(0)
        self._reporter = Reporter(settings)
        self._statements = Statements(settings, name)
        self._uploads = Uploads(settings)
        self._beat_ns = self._attached_ns
        self._spool.write([self._statements.say("started", self._attached_ns)])

    def due(self, end_ns: int) -> None:
        """A step window is over: rows to the spool, the sampling rate for the next one, and what comes now and then.

        Args:
            end_ns: end of a unit after it, UTC.
        """
        settings, windows, spool = self.settings, self._windows, self._spool
        statements, reporter, uploads = self._statements, self._reporter, self._uploads
        if windows is None or spool is None or statements is None or reporter is None or uploads is None:
            return
        settler = self.timeline.settler
        is_first = settler.due_ns == 0
        settler.due_ns = window_end(end_ns, settings.step_window_ns)
        if is_first:
            self._hour = end_ns // HOUR_NS
            return
        rows = windows.rows(end_ns)
        if end_ns - self._beat_ns >= BEAT_NS:
            self._beat_ns = end_ns
            rows.append(statements.say("beat", end_ns))
        spool.write(rows)
        wall, own = self._window
        self._window = (0, 0)
        self._rate.window(wall, own)
        reporter.log(end_ns)
        self.utc.follow()
        settler.rebases = True
        settler.memory = self._memory.read()
        self._patches.refresh()
        self.models.check()
        if end_ns // HOUR_NS != self._hour:
            self._hour = end_ns // HOUR_NS
            if settings.local_rank == 0:
                uploads.start()

    def state(self, metric: str, value: Decimal) -> None:
        """State a quality of the job."""
        self._guard(self._state, metric, value)

    def _state(self, metric: str, value: Decimal) -> None:
        self._begin()
        if self._statements is not None and self._spool is not None:
            self._spool.write([self._statements.say("result", self._now(), metric=metric, quality=value)])

    def begin_region(self, name: str) -> None:
        """A part that the user names begins."""
        if name in PHASES:
            self.timeline.phases.append(name)
        elif name not in WAITS:
            self._guard(self.timeline.begin_region, name)

    def end_region(self, name: str, begin_ns: int) -> None:
        """The part that began then ends."""
        if name in PHASES:
            if name in self.timeline.phases:
                self.timeline.phases.reverse()
                self.timeline.phases.remove(name)
                self.timeline.phases.reverse()
        elif name in WAITS:
            self._guard(self.waits.add, name, begin_ns, perf_counter_ns())
        else:
            self._guard(self.timeline.end_region, name)

    def _now(self) -> int:
        return perf_counter_ns() + self.utc.offset_ns

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, reason: str, *, waits: bool = False) -> None:
        """Write what is known and let go of everything. Never raises.

        Args:
            reason: why, for the statement that the job ended.
            waits: whether to wait for the upload.
        """
        if self._is_done:
            return
        was_on, self._is_done = self.is_on, True
        try:
            if was_on:
                self.timeline.finish()
                self._begin()
        except Exception as error:  # noqa: BLE001 - the job ends or goes on, whatever this is
            self.fail(error)
        self.is_on, self._wants_tidy = False, True
        self._write_rest(reason if was_on else None)
        if not self._gate.locked() or waits:
            self._tidy()
        atexit.unregister(self._at_exit)
        if self._uploads is not None and self.settings.drop is not None:
            if waits:
                self._attempt(self._uploads.finish)
            else:
                atexit.register(self._uploads.finish)
        self._closed()

    def _write_rest(self, reason: str | None) -> None:
        """Every row that is left; then the spool is closed."""
        spool, windows, statements = self._spool, self._windows, self._statements
        if spool is None or windows is None or statements is None:
            return

        def write() -> None:
            rows = windows.rows(self._now(), final=True)
            if reason is not None:
                rows.append(statements.say("ended", max(self._now(), statements.last_ns + 1), exit_reason=reason))
            spool.write(rows)

        self._attempt(write)
        self._attempt(spool.close)
        if self._uploads is not None:
            self._attempt(self._uploads.start_last)

    def _tidy(self) -> None:
        """Put everything back. What cannot be put back now is when a model is called next."""
        self._wants_tidy = False
        if not self._is_done:  # it failed: what it knows is kept
            self._is_done = True
            self._attempt(functools.partial(self.timeline.settler.resolve, final=True))
            self._write_rest(None)
            atexit.unregister(self._at_exit)
            self._attempt(self._closed)
        self._attempt(self.timeline.stop)
        self._attempt(self._restore)

    def _restore(self) -> None:
        if not self._patches.restore():
            self._wants_tidy = True
            self.models.mark_again()

    def _attempt(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the rest is still to be put back
            self.fail(error)
            self._wants_tidy = False

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            # At a prompt errors are told and the work goes on.
            error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
            self.close("finished" if error is None else f"error: {type(error).__name__}", waits=True)

    def disown(self) -> None:
        """In a forked child: nothing is written, and nothing is probed. The parent's session goes on in the parent."""
        self.is_on = False
        self._is_done = True
        self._gate = threading.Lock()
        self._attempt(self.timeline.stop)
        self._attempt(self._patches.restore)
        self._wants_tidy = False
