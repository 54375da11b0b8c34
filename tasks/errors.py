"""Errors of the pipeline.

    PipelineError
    ├── SettingsError      a setting is unknown, missing or out of bounds
    ├── UsageError         a command or a flow was asked for something that makes no sense
    ├── DeliveryError      a bill delivery is refused whole; the former one stands
    ├── LayoutError        a lake is of another layout than this code writes
    ├── DeterminismError   the same key gave other bytes
    ├── LawError           a law is broken: money or time does not add up
    ├── GateError          an expectation at the end of a stage does not hold
    └── WitnessError       the second ledger disagrees with the first

Storage and schema errors are those of `seedance.errors`. Each error carries its facts as attributes, so that callers
need not parse text, and keeps them when it crosses a process.
"""

from __future__ import annotations

from seedance.errors import WithFacts


class PipelineError(WithFacts):
    """Root of the errors raised by `tasks` and `flows`; keyword facts become attributes, and stand in `facts`."""


class SettingsError(PipelineError):
    """A setting is unknown, missing or out of bounds: key, where, found, expected or nearest."""


class UsageError(PipelineError):
    """A command or a flow was asked for something that makes no sense: found, expected."""


class DeliveryError(PipelineError):
    """A bill delivery is refused whole; the former one stands: source, delivery, path, reason."""


class LayoutError(PipelineError):
    """A lake is of another layout than this code writes: url, expected, found."""


class DeterminismError(PipelineError):
    """The same key gave other bytes: stage, key, expected, found."""


class LawError(PipelineError):
    """A law is broken, and nothing was published: law, where, expected, found."""


class GateError(PipelineError):
    """An expectation at the end of a stage does not hold, and nothing of the day was published: stage, day, failed."""


class WitnessError(PipelineError):
    """The second ledger disagrees with the first, and nothing was published: where, expected, found."""
