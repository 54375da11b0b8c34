"""Probing without a line of code: waits for torch to be imported, then for a model to be trained or to serve.

`seedance.pth` calls `activate` when Python starts with `SEEDANCE_DIAGNOSTIC=1`, and so does `python -m seedance.run`. Until the
process imports torch, one look-up an import is all there is; a process that never does pays nothing else. Every failure
here is counted, told once on the logger `seedance.probe`, and ends in a process without a probe.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WATCHED = "torch"
failures = 0
"""Errors of ours that were kept from the process."""
_state: Auto | None = None


def activate() -> None:
    """Probe what this process will train or serve. Once a process; never raises."""
    global _state  # noqa: PLW0603 - one a process
    if _state is not None:
        return
    try:
        _state = Auto()
        _state.wait()
    except Exception as error:  # noqa: BLE001 - whatever it is, the process goes on
        _fail(error)


def withdraw() -> None:
    """Stop looking for a model, and let go of the one that was found: somebody attaches by hand. Never raises."""
    if _state is not None:
        try:
            _state.stop()
        except Exception as error:  # noqa: BLE001 - whatever it is, the process goes on
            _fail(error)


class Auto:
    """One process's way from the import of torch to an attached probe."""

    def __init__(self) -> None:
        self._finder: _Finder | None = None
        self._watch: Any = None
        self._probes: list[Any] = []
        self._known = _Known((), None)
        self._lost = 0

    def wait(self) -> None:
        """Begin, now if torch is there, else when it is imported."""
        torch = sys.modules.get(WATCHED)
        if torch is not None and hasattr(torch, "nn"):
            self.start(torch)
        else:
            self._finder = _Finder(self)
            sys.meta_path.insert(0, self._finder)

    def start(self, torch: Any, known: _Known | None = None) -> None:
        """Look for the model from now on.

        Args:
            torch: the module `torch`.
            known: what is probed already.
        """
        from seedance.probe.settings import from_environment
        from seedance.probe.watch import Watch

        self._finder = None
        if from_environment().enabled:
            self._watch = Watch(torch, lambda found: self._attach(torch, found), known=known)
            self._watch.start()

    def stop(self) -> None:
        """Take everything away, the probe too."""
        finder, self._finder = self._finder, None
        if finder is not None:
            finder.stop()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        self._detach()

    def _attach(self, torch: Any, found: Any) -> None:
        """Models were found: probe them, unless the program does so itself."""
        from seedance.probe import probe as probes
        from seedance.probe.watch import has_optimizer

        self._watch = None
        former = probes.active()
        if former is not None and not any(one.is_on for one in self._probes):
            return
        _speak()
        self._probes = [one for one in self._probes if one.is_on]
        trains = found.optimizers or has_optimizer(torch)
        given: dict[str, Any] = {} if trains or "SEEDANCE_KIND" in os.environ else {"kind": "serve"}
        self._probes += [probes.attach(module, **given) for module in found.modules]
        session = probes.active()
        lost, self._lost = self._lost + found.units_lost, 0
        if session is not None and lost:
            _tell_lost(session, lost, at_once=former is session)
        self._known = _Known([*self._known.modules, *found.modules], session)
        self._await_step(torch, ends=not found.optimizers)

    def _await_step(self, torch: Any, *, ends: bool) -> None:
        """Look on for optimizers of other models: a program may train one after another.

        Args:
            torch: the module `torch`.
            ends: whether the probe ends then: what looked like serving was something before training.
        """
        from seedance.probe.watch import Watch

        def step(steps: Any) -> None:
            self._watch = None
            if not any(one.is_on for one in self._probes):
                return
            self._lost = steps.units_lost
            if ends:
                self._detach()
                self._known = _Known((), None)
                self.start(torch)
            else:
                self.start(torch, self._known)

        self._watch = Watch(torch, step, only_steps=True, known=self._known)
        self._watch.start()

    def _detach(self) -> None:
        attached, self._probes = self._probes, []
        for probe in attached:
            probe.detach()


class _Known:
    """What is probed already.

    Args:
        modules: the models; they are not held.
        session: the probe session that has them; None without any.
    """

    def __init__(self, modules: Sequence[Any], session: Any) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._session = session
        self._trained: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    @property
    def modules(self) -> list[Any]:
        """Those that still live."""
        return [module for of in self._modules if (module := of()) is not None]

    def has(self, optimizer: Any) -> bool:
        """Whether an optimizer trains one of the models, or did when it was first asked about."""
        from seedance.probe.watch import owns

        known = self._trained.get(optimizer)
        if known is None:
            known = self._trained[optimizer] = any(owns(module, optimizer) for module in self.modules)
        return known

    def is_called(self) -> bool:
        """Whether one of the models is being called."""
        return self._session is not None and bool(self._session.is_called)


def _tell_lost(session: Any, units: int, *, at_once: bool) -> None:
    """Count units that passed before there was a probe, once there is a window to count them in."""
    if at_once:
        session.drop(units)
        return

    def tell(_: Any) -> None:
        handle.remove()
        session.drop(units)

    handle = session.hooks.add("pre_batch", tell)


class _Finder:
    """Stands first among the finders until torch was imported, and finds nothing itself."""

    def __init__(self, auto: Auto) -> None:
        self._auto = auto
        self._is_looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find for torch, told to call back once it ran; nothing for all else."""
        if name != WATCHED or self._is_looking:
            return None
        try:
            self._is_looking = True
            spec = self._others(name, path, target)
            run = getattr(spec.loader, "exec_module", None) if spec is not None else None
            if spec is None or run is None:
                return spec
            return self._tell(spec, run)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other finders are asked
            self.stop()
            _fail(error)
            return None
        finally:
            self._is_looking = False

    def stop(self) -> None:
        """Leave the finders."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                return spec
        return None

    def _tell(self, spec: ModuleSpec, run: Any) -> ModuleSpec:
        loader: Any = spec.loader

        def exec_module(module: ModuleType) -> None:
            # Asking whether torch is there makes specs too: only the one that runs counts.
            run(module)
            try:
                self.stop()
                loader.__dict__.pop("exec_module", None)
                if self._auto._finder is self:
                    self._auto.start(module)
            except Exception as error:  # noqa: BLE001 - whatever it is, torch is imported
                _fail(error)

        loader.exec_module = exec_module
        return spec


def _speak() -> None:
    """Let the lines of the probe be seen where the program has set up no logging; its own set-up goes first."""
    import logging

    root = logging.getLogger()

    class Fallback(logging.StreamHandler[Any]):
        def emit(self, record: logging.LogRecord) -> None:
            if not root.handlers:
                super().emit(record)

    logger = logging.getLogger("seedance.probe")
    if not logger.handlers and logger.level == logging.NOTSET:
        handler = Fallback()
        handler.setFormatter(logging.Formatter("seedance: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.addFilter(lambda record: not root.handlers or record.levelno >= root.level)


def _fail(error: Exception) -> None:
    global failures  # noqa: PLW0603 - one a process
    failures += 1
    if failures == 1:
        import logging

        logging.getLogger("seedance.probe").warning(
            "probe: not active (%s: %s). The process goes on without it. `seedance.attach(model)` attaches it by hand.",
            type(error).__name__,
            error,
        )
