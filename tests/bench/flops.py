"""What counting costs: microseconds an operator of `FlopCounter`, beside torch's `FlopCounterMode`, on the same steps.

The step is a few ms long and nearly all overhead, which is the worst case. Both counters must give the same FLOPs: attention is
written as two matrix products, since torch's counter counts no fused attention on CPUs. The value is what a step takes longer,
over the operators that a dispatch mode sees in it. A counting run happens once per signature of shapes, never every step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from seedance.flops.counter import FlopCounter
from tests.bench._training import LAUNCH_BOUND, USUAL, Training
from tests.bench._turns import turns

ROUNDS = 40
WARM_UP = 3


class _Operators(TorchDispatchMode):
    """Counts operators that reach a dispatch mode."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def run() -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    return [*_rows("operator", Training(**LAUNCH_BOUND)), *_rows("step", Training(**USUAL))]


def _rows(name: str, training: Training) -> list[dict[str, Any]]:
    counters: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "bare": nullcontext,
        "ours": lambda: FlopCounter(training.model),
        "torch": lambda: FlopCounterMode(display=False),
    }
    for _ in range(WARM_UP):
        training.step()
    with _Operators() as operators:
        training.step()
    with FlopCounter(training.model) as ours, FlopCounterMode(display=False) as torchs:
        training.step()
    if name == "operator":
        assert ours.profile.flops == torchs.get_total_flops() > 0, "the two count different things"
    took: dict[str, list[float]] = {kind: [] for kind in counters}
    for order in turns(list(counters), ROUNDS):
        for kind in order:
            took[kind].append(_seconds(training, counters[kind]))
    bare, *found = (statistics.median(took[kind]) for kind in ("bare", "ours", "torch"))
    if name == "operator":
        value, peer_value = ((each - bare) / operators.calls * 1e6 for each in found)
        return [_row("us_per_operator", value, "us", peer_value, operators.calls)]
    value, peer_value = (each * 1e3 for each in found)
    return [
        _row("counted_step", value, "ms", peer_value, operators.calls),
        _row("bare_step", bare * 1e3, "ms", None, 0),
    ]


def _seconds(training: Training, counter: Callable[[], AbstractContextManager[Any]]) -> float:
    start = time.perf_counter()
    with counter():
        training.step()
    return time.perf_counter() - start


def _row(name: str, value: float, unit: str, peer_value: float | None, operators: int) -> dict[str, Any]:
    return {
        "name": f"flops.{name}",
        "value": round(value, 4),
        "unit": unit,
        "peer": None if peer_value is None else "FlopCounterMode",
        "peer_value": None if peer_value is None else round(peer_value, 4),
        "ratio": None if peer_value is None else round(peer_value / value, 3),
        "rows": operators or None,
        "peak_mb": None,
        "runs": ROUNDS,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
