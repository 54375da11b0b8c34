"""What the allocator of a device says: read without changing what the user sees of it.

Source: torch.cuda.memory_stats; peaks are since the process began, or since the user last reset them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from seedance.probe.unit import Memory

Stats = Mapping[str, Any]


class MemoryReader:
    """Reads the allocator once a window; retries and errors are what came since the reading before.

    Args:
        stats: figures of the allocator by name; None for a device without one.
    """

    def __init__(self, stats: Callable[[], Stats] | None) -> None:
        self._stats = stats
        self._retries: int | None = None
        self._ooms: int | None = None

    def read(self) -> Memory | None:
        """The allocator now; None where there is none."""
        if self._stats is None:
            return None
        stats = self._stats()
        retries, ooms = int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))
        made = Memory(
            allocated_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
            reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            active_bytes=int(stats.get("active_bytes.all.peak", 0)),
            inactive_split_bytes=int(stats.get("inactive_split_bytes.all.peak", 0)),
            alloc_retries=_since(self._retries, retries),
            ooms=_since(self._ooms, ooms),
        )
        self._retries, self._ooms = retries, ooms
        return made


def reader_of(device: torch.device | None) -> MemoryReader:
    """The reader of the device that a model is on."""
    if device is None or device.type != "cuda":
        return MemoryReader(None)
    return MemoryReader(lambda: torch.cuda.memory_stats(device))


def _since(former: int | None, now: int) -> int:
    # The user may have reset the counters in between.
    return 0 if former is None else max(now - former, 0) if now >= former else now
