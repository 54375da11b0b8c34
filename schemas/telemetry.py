"""The shard contracts, as declared by their producer in `seedance.schema`."""

from seedance.schema import (
    DEVICE_SAMPLES,
    EVENTS,
    JOBS,
    OP_WINDOWS,
    PROCESS_SAMPLES,
    STEP_WINDOWS,
    TELEMETRY,
)

__all__ = ["DEVICE_SAMPLES", "EVENTS", "JOBS", "OP_WINDOWS", "PROCESS_SAMPLES", "STEP_WINDOWS", "TELEMETRY"]
