"""One unit of work as the probe measured it: plain values, so that what is made of them can be tested without a framework.

Source: infra/rules/telemetry.md 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seedance.errors import SeedanceError
from seedance.flops.profile import Profile
from seedance.probe.spans import Interval, OpKey, Share


class WindowError(SeedanceError):
    """A unit or a setting that the tables cannot hold: what, expected, found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the allocator says of one unit."""

    allocated_bytes: int = 0
    """Allocated, peak."""
    reserved_bytes: int = 0
    """Reserved, peak."""
    active_bytes: int = 0
    """Active, peak."""
    inactive_split_bytes: int = 0
    """Inactive split, peak."""
    alloc_retries: int = 0
    """Retries since the unit before."""
    ooms: int = 0
    """Out-of-memory errors since the unit before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of work, or several marked together. Instants are ns in UTC, whatever clock measured them."""

    number: int
    """Number of the unit within the attempt; of several, the last."""
    start_ns: int
    """End of the unit before."""
    begin_ns: int
    """First mark of the unit's active time."""
    end_ns: int
    """Last mark."""
    phase: str
    """train, prefill, decode, mixed or eval."""
    batch_size: int
    """Local micro-batch, or sequences rounded to the captured size."""
    units: int = 1
    """How many units were marked together; what follows is of all of them where it does not say `each`."""
    samples: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    requests: int = 0
    checkpoint: tuple[Interval, ...] = ()
    """Host time in blocking saves."""
    input_wait: tuple[Interval, ...] = ()
    """Host time of waiting for input, hidden or not; each wait with one unit only."""
    host_begin_ns: int | None = None
    """Where the host's clock stood when it recorded `begin_ns`, if not there: the gap ends here on the host's clock."""
    probe_ns: int = 0
    """Host time of the probe itself."""
    sampled: bool = False
    """Whether `ops` was measured and counts; a forced sample does not."""
    ops: Mapping[OpKey, Share] | None = None
    """What `sweep` made of a sampled unit: exclusive times add up to end_ns - begin_ns."""
    profile: Profile | None = None
    """Calls and FLOPs of each unit; None: not counted. Profiles are told apart by identity: pass the same object again."""
    parts: tuple[Profile, ...] = ()
    """Calls and FLOPs of further micro-batches of each unit."""
    uncounted: int = 0
    """Micro-batches of each unit without a profile; a unit without any profile has one at least."""
    method: str = "host"
    """How ops were timed: events, kineto, graph, formula, host."""
    memory: Memory | None = None
    """Allocator; None: there is none, and the table gets zeros."""
