"""Attach a probe to a model with one line, name what it does, state how good it is.

    probe = seedance.attach(model)          # or: with seedance.attach(model) as probe:
    ...                                     # train or serve as before
    probe.detach()                          # not needed at the end of a process

Several models of one process share one probe session: their units follow one another on one time line. Wrong arguments raise;
after that nothing here does, whatever happens to the probe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ContextDecorator, suppress
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from torch import nn

from seedance.errors import SeedanceError
from seedance.flops.shadow import unwrapped
from seedance.probe.hooks import HookManager
from seedance.probe.models import Target
from seedance.probe.session import Session
from seedance.probe.settings import ProbeSettings, from_environment
from seedance.probe.statements import quality_of
from seedance.probe.units import Moment

__all__ = ["AttachError", "Moment", "Probe", "active", "attach", "detach", "region", "result"]

_session: Session | None = None
_is_guarding_forks = False


class AttachError(SeedanceError):
    """A probe cannot be attached: expected, found."""


class Probe:
    """The probe of one model; made by `attach`. A context manager that detaches at its end."""

    def __init__(self, session: Session | None, target: Target | None) -> None:
        self._session, self._target = session, target
        self._hooks = HookManager() if session is None else session.hooks

    @property
    def is_on(self) -> bool:
        """Whether the model is probed: not after `detach`, a failure of the probe, or with `enabled=False`."""
        session = self._session
        return session is not None and session.is_on and self._target in session.targets

    @property
    def hooks(self) -> HookManager:
        """What is called at the points of a unit, with a `Moment`."""
        return self._hooks

    @property
    def settings(self) -> ProbeSettings | None:
        """The settings in force; None with `enabled=False`. Rank and device are final when the first unit begins."""
        return None if self._session is None else self._session.settings

    @property
    def failures(self) -> int:
        """Errors of the probe itself; after the first one it is off."""
        return 0 if self._session is None else self._session.failures

    def batch(
        self,
        *,
        samples: int | None = None,
        tokens: int | None = None,
        tokens_out: int | None = None,
        requests: int | None = None,
    ) -> None:
        """Say what the unit that runs does, where shapes do not tell: call it within the unit, or right after it.

        Args:
            samples, tokens, tokens_out, requests: of the whole unit on this rank; None leaves what was found.
        """
        given = {"samples": samples, "tokens_in": tokens, "tokens_out": tokens_out, "requests": requests}
        counts = {name: count for name, count in given.items() if count is not None}
        for name, count in counts.items():
            if type(count) is not int or count < 0:
                raise AttachError(
                    f"probe.batch: expected {name} as a whole number of 0 or more, found {count!r}.",
                    expected="a whole number of 0 or more",
                    found=repr(count),
                )
        if self._session is not None and self._session.is_on:
            self._session.timeline.set_counts(**counts)

    def detach(self, reason: str = "finished") -> None:
        """Put everything back, and write what is known; again is fine. Never raises.

        Args:
            reason: why the job ended, for its last statement.
        """
        session, target, self._target = self._session, self._target, None
        if session is not None and target is not None:
            session.remove(target, reason)

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_success = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.detach("finished" if is_success else f"error: {type(error).__name__}")


def attach(model: nn.Module, /, *, optimizer: Any = None, settings: ProbeSettings | None = None, **given: Any) -> Probe:
    """Probe a model from now on. For one that is probed already, its probe again.

    Args:
        model: what is called in training or serving, wrapped and compiled or not.
        optimizer: ends its units; only needed where the optimizer holds none of the model's parameters.
        settings: all settings; None: from the arguments, the environment and the launcher.
        given: settings by name, see `seedance.probe.settings.ProbeSettings`.

    Raises:
        AttachError: `model` is no module, or settings are given twice.
        SettingsError: a setting is unknown or cannot be used.
    """
    global _session  # noqa: PLW0603 - one a process
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach: expected a torch.nn.Module, found {type(model).__name__}. Pass the model that is called.",
            expected="torch.nn.Module",
            found=type(model).__name__,
        )
    if settings is not None and given:
        raise AttachError(
            f"attach: expected settings as one object or by name, found both ({', '.join(given)}).",
            expected="one of both",
            found=", ".join(given),
        )
    read = _reader(settings, given)
    if not read().enabled:
        return Probe(None, None)
    _withdraw()
    if _session is not None and not _session.is_on:
        _session = None
    if _session is None:
        _guard_forks()
        made = Session(read, lambda: _forget(made))
        _session = made
        try:
            made.start()
        except Exception as error:  # noqa: BLE001 - a torch that is not as we know it
            made.fail(error)
            made.close("failed")
            return Probe(made, None)
    session = _session
    try:
        return Probe(session, session.add(model, optimizer))
    except Exception as error:  # noqa: BLE001 - nothing of ours may stop the job
        session.fail(error)
        session.close("failed")
        return Probe(session, None)


def detach(model: nn.Module | None = None) -> None:
    """Probe a model no longer, or none at all. Never raises."""
    session = _session
    if session is None:
        return
    core = None if model is None else unwrapped(model)
    for target in session.targets:
        if core is None or target.core() is core:
            session.remove(target, "finished")


def active() -> Session | None:
    """The session of this process; None when no model is probed."""
    return _session if _session is not None and _session.is_on else None


class region(ContextDecorator):
    """Name a part of the program: `with seedance.region("decode"):`, or as a decorator.

    `checkpoint` and `input` are waits, and count as such between units. `train`, `prefill`, `decode`, `mixed` and `eval` are
    the phase of units that begin inside. Any other name is a layer of sampled units. Without a probe it does nothing.

    Args:
        name: of the part.
    """

    def __init__(self, name: str) -> None:
        if not name or "|" in name:
            raise AttachError(
                f"region: expected a name without |, found {name!r}.", expected="a name without |", found=repr(name)
            )
        self.name = name
        self._begun: list[tuple[Session | None, int]] = []

    def __enter__(self) -> region:
        session = active()
        self._begun.append((session, perf_counter_ns()))
        if session is not None:
            session.begin_region(self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, begun = self._begun.pop()
        if session is not None:
            session.end_region(self.name, begun)


def result(**metrics: Any) -> None:
    """State how good the job is: `seedance.result(accuracy=0.913)`. One statement a metric; without a probe, none.

    Raises:
        QualityError: a value is no finite number.
    """
    stated = {metric: quality_of(metric, value) for metric, value in metrics.items()}
    session = active()
    if session is not None:
        for metric, quality in stated.items():
            session.state(metric, quality)


def _reader(settings: ProbeSettings | None, given: dict[str, Any]) -> Callable[[], ProbeSettings]:
    if settings is not None:
        return lambda: settings
    return lambda: from_environment(**given)


def _withdraw() -> None:
    """The program attaches by hand: what looks for a model by itself is not needed."""
    auto = sys.modules.get("seedance.auto")
    if auto is not None and _session is None:
        auto.withdraw()


def _forget(session: Session) -> None:
    global _session  # noqa: PLW0603 - one a process
    if _session is session:
        _session = None


def _guard_forks() -> None:
    global _is_guarding_forks  # noqa: PLW0603 - one a process
    if not _is_guarding_forks:
        _is_guarding_forks = True
        os.register_at_fork(after_in_child=_disown)


def _disown() -> None:
    global _session
    session, _session = _session, None
    if session is not None:
        with suppress(Exception):
            session.disown()
