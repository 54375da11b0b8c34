"""Processes that train side by side and step in turns: what one kind of step costs over another.

Each kind has a process of its own, as a training has; they take turns in blocks of a few steps, in an order drawn anew each time,
on one core, so that whatever slows the machine slows them alike. Many turns even out what changes meanwhile. What stays with a
process for its life, such as where its memory happens to lie, no turns even out. So a group of processes gives one figure, and
the interval is taken over groups of fresh ones. All processes keep the memory that they once had (see `KEPT`).
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench._turns import bounds, resampled, trimmed_mean, turns
from tests.bench._worker import Block, Job, Told

STEPS = 5
"""Steps of a block."""
BARE = ("bare", "control")
"""Kinds of step without anything: two processes a group, since half of the noise of a ratio is in its reference."""

KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""What keeps glibc from giving memory back to the system and asking for it again in each step. As a process's memory happens to
lie, that is 0 to 980 page faults a step and up to 1.6 ms of 57 ms, the same for all of its life: bare processes over bare had
a standard deviation of 1.1 % with it and 0.4 % without. The probe adds none: 522 a step, bare ones beside it 577 and 517."""


@dataclass(frozen=True)
class Group:
    """Processes that took turns: the blocks of each kind, in the order of the turns, and what each told at its end."""

    blocks: dict[str, list[Block]]
    told: dict[str, Told]

    def step_s(self, *kinds: str, how: str = "wall") -> float:
        """Seconds of a step of these kinds, by wall or by CPU, of all that happened in the blocks."""
        blocks = [block for kind in kinds for block in self.blocks.get(kind, ())]
        spent = sum(block.cpu if how == "cpu" else sum(block.wall) for block in blocks)
        return spent / sum(len(block.wall) for block in blocks)


@dataclass(frozen=True)
class Measured:
    """Groups of processes."""

    groups: list[Group]

    def ratios(self, kind: str, how: str = "wall", over: Sequence[str] = BARE) -> list[float]:
        """A kind's step over the bare ones, for each group that has it."""
        groups = [group for group in self.groups if kind in group.blocks]
        return [group.step_s(kind, how=how) / group.step_s(*over, how=how) for group in groups]

    def percent(self, kind: str, how: str = "wall", over: Sequence[str] = BARE) -> tuple[float, float, float]:
        """What a kind costs over the bare steps, and both ends of its 95 % interval, in per cent."""
        ratios = self.ratios(kind, how, over)
        low, high = bounds(resampled(ratios))
        return (trimmed_mean(ratios) - 1) * 100, (low - 1) * 100, (high - 1) * 100

    def bare_s(self, how: str = "wall") -> float:
        """Seconds of a bare step."""
        return statistics.median(group.step_s(*BARE, how=how) for group in self.groups)

    def samples_s(self, kind: str) -> list[float]:
        """Seconds that each sampled step took more than the others of its block.

        The next step is counted with it, since it is there that a sample is worked out. Those at a block's end are left out.
        """
        found = []
        for block in itertools.chain.from_iterable(group.blocks[kind] for group in self.groups):
            others = [s for n, s in enumerate(block.wall) if n not in block.sampled and n - 1 not in block.sampled]
            for n in block.sampled:
                if n + 1 < len(block.wall) and n + 1 not in block.sampled and others:
                    found.append(block.wall[n] + block.wall[n + 1] - 2 * statistics.median(others))
        return found


def measure(
    size: dict[str, Any], kinds: Sequence[str], folder: Path, *, groups: int, rounds: int, rare: Sequence[str] = ()
) -> Measured:
    """Groups one after the other; `rare` kinds take part in every fifth, since their cost is large and soon known."""
    found = []
    for number in range(groups):
        here = [*kinds, *(rare if number % 5 == 0 else ())]
        found.append(_group(size, here, folder / str(number), rounds, number))
        if sys.stderr.isatty():
            end = "\n" if number + 1 == groups else ""
            print(f"\r{number + 1} of {groups} groups of processes", end=end, file=sys.stderr, flush=True)
    return Measured(found)


def _group(size: dict[str, Any], kinds: Sequence[str], folder: Path, rounds: int, number: int) -> Group:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    blocks: dict[str, list[Block]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        workers = {}
        for kind in turns(kinds, 1, seed=number)[0]:
            (folder / kind).mkdir(parents=True)
            told = json.dumps(asdict(Job(kind, size, str(folder / kind), cores[number % len(cores)])))
            command = [sys.executable, "-m", "tests.bench._worker", told]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            workers[kind] = stack.enter_context(subprocess.Popen(command, env=os.environ | KEPT, **pipes))
        for kind, worker in workers.items():
            assert _line(worker) == "ready\n", kind
        for order in turns(kinds, rounds, seed=number):
            for kind in order:
                workers[kind].stdin.write(f"{STEPS}\n")
                workers[kind].stdin.flush()
                blocks[kind].append(Block(**json.loads(_line(workers[kind]))))
        ended = {}
        for kind, worker in workers.items():
            worker.stdin.close()
            ended[kind] = Told(**json.loads(_line(worker)))
    assert all(worker.returncode == 0 for worker in workers.values())
    return Group(blocks, ended)


def _line(worker: subprocess.Popen[str]) -> str:
    line = worker.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise RuntimeError(f"a process that trains has ended with status {worker.wait()}; what it said is above")
    return line
