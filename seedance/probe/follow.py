"""Keeps the probe on the model of a trainer: attaches and detaches when told, and never raises.

What callbacks of trainers have in common; they have imported torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from seedance.probe import probe as probes
from seedance.probe.settings import PREFIX, from_environment

LOGGER = logging.getLogger("seedance.probe")


class Follower:
    """The probe of one trainer.

    Args:
        settings: settings of the probe that the user gave; held to what they may be at once.

    Raises:
        SettingsError: a setting cannot be used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from_environment(**settings)
        self.settings = dict(settings)
        self.failures = 0
        """Errors of ours that were kept from the trainer."""
        self.probe: probes.Probe | None = None
        """The probe while it is attached."""

    def follow(self, model: Any, /, *, is_called: bool = True, **known: Any) -> None:
        """Attach to a model, wrapped or not; when that is done, nothing.

        Args:
            model: the trainer's model, after it was wrapped and sharded.
            is_called: False where the trainer calls its parts alone.
            known: settings that the trainer knows, for what is set nowhere else.
        """
        try:
            if model is None or (self.probe is not None and self.probe.is_on):
                return
            said = {*self.settings, *(v.removeprefix(PREFIX).lower() for v in os.environ if v.startswith(PREFIX))}
            more = {name: value for name, value in known.items() if name not in said}
            self.probe = probes.attach(model, settings=from_environment(**more, **self.settings))
            session = probes.active()
            if session is not None and not is_called:
                session.lost_calls()
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer goes on
            self._fail(error)

    def leave(self, reason: str = "finished") -> None:
        """Detach; again is fine.

        Args:
            reason: why it ended, for the job's last statement.
        """
        try:
            probe, self.probe = self.probe, None
            if probe is not None:
                probe.detach(reason)
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer goes on
            self._fail(error)

    def state_result(self, metric: str, value: Any) -> None:
        """Say how good the job's result is."""
        try:
            if self.probe is not None:
                probes.result(**{metric: value})
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer goes on
            self._fail(error)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles, which trainers send to their processes, begin anew."""
        return {"settings": self.settings}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["settings"])  # type: ignore[misc]

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            LOGGER.warning(
                "probe: not attached to the trainer's model (%s: %s). Training goes on without it.",
                type(error).__name__,
                error,
            )
