"""A process that trains as it is told: `python -m tests.bench._worker JSON`, with the fields of `Job`.

It says `ready` once it is warm, then for each number that it reads takes so many steps and tells a `Block`. At the end of its
input it tells `Told`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from seedance.probe.probe import attach
from seedance.probe.sampling import MOST_PPM, is_sampled
from tests.bench._training import Training

WARM_UP = 8
"""Steps before the first that is measured; the probe's counting run is among them."""
PROBED = "probe"
PEERS = {"flop_counter": "FlopCounterMode", "profiler": "torch.profiler"}


@dataclass(frozen=True)
class Job:
    """What a process is to do: a kind of step, the size and device of the training, a folder, and the core to keep to."""

    kind: str
    size: dict[str, Any]
    folder: str
    core: int | None = None


@dataclass(frozen=True)
class Block:
    """Some steps: seconds of each by wall, CPU seconds of the process since the block before, places of the sampled ones."""

    wall: list[float]
    cpu: float
    sampled: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Told:
    """What came once, in seconds: attaching, the first step after it, and detaching."""

    attach: float = 0.0
    first: float = 0.0
    detach: float = 0.0


def main(job: Job) -> None:
    """Train."""
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})
    training = Training(**job.size)
    for _ in range(WARM_UP):
        training.step()
    training.wait()
    start = time.perf_counter()
    with ExitStack() as stack:
        kind = stack.enter_context(_kind(job, training))
        attached = time.perf_counter()
        training.step()
        training.wait()
        first = time.perf_counter()
        for _ in range(WARM_UP - 1):
            training.step()
        training.wait()
        gc.collect()
        print("ready", flush=True)
        _blocks(job, training)
        assert job.kind != PROBED or kind.is_on, "a probe that is off costs nothing"
        end = time.perf_counter()
    print(json.dumps(asdict(Told(attached - start, first - attached, time.perf_counter() - end))), flush=True)


def _blocks(job: Job, training: Training) -> None:
    """Steps as they are asked for."""
    unit, cpu = WARM_UP, time.process_time()
    for line in sys.stdin:
        steps = int(line)
        wall = _steps(training, steps)
        cpu, before = time.process_time(), cpu
        sampled = [n for n in range(steps) if job.kind == PROBED and is_sampled(job.folder, 0, unit + n, MOST_PPM)]
        print(json.dumps(asdict(Block(wall, cpu - before, sampled))), flush=True)
        unit += steps


def _kind(job: Job, training: Training) -> AbstractContextManager[Any]:
    """In this the steps are of the job's kind."""
    if job.kind == PROBED:
        return attach(training.model, optimizer=training.optimizer, job_id=job.folder, spool=Path(job.folder))
    if job.kind == "flop_counter":
        return FlopCounterMode(display=False)
    if job.kind == "profiler":
        activity = torch.profiler.ProfilerActivity
        on_gpu = [activity.CUDA] if training.tokens.device.type == "cuda" else []
        return torch.profiler.profile(activities=[activity.CPU, *on_gpu])
    return nullcontext()


def _steps(training: Training, steps: int) -> list[float]:
    wall = []
    for left in reversed(range(steps)):
        start = time.perf_counter()
        training.step()
        if not left:
            training.wait()
        wall.append(time.perf_counter() - start)
    return wall


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
