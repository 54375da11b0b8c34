"""What the probe costs a training step on a CPU, beside the bare loop, torch's FlopCounterMode and torch.profiler.

One process, one thread, one model; steps of 50 to 80 ms. Blocks of steps take turns in an order drawn anew each round. Switching,
and the first steps after it (among them the probe's counting run), lie between blocks and are told apart.

`overhead`: the median step of a block over the median step of the bare block of its round, a trimmed mean of that over rounds;
a median is deaf to bursts of other work, and to the one unit in fifty that is sampled, so what samples add is measured apart and
added by the share of units that were sampled. `overhead_cpu` is the same of CPU time, with all threads, steadier on a machine
that is shared. `overhead_mean`: whole blocks, with all that happens in them, windows written among it. The interval is the 95 %
one by bootstrap over rounds; its upper end is what the budget of 1 % is held against. Nothing is asserted. Putting shards in
place is another process's work and not in it.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from seedance.probe.probe import attach
from seedance.probe.sampling import is_sampled
from tests.bench._training import Training, usual_training
from tests.bench._turns import bounds, resampled, trimmed_mean, turns

ROUNDS = int(os.environ.get("BENCH_PROBE_ROUNDS", "120"))
STEPS = 15
RARE_EVERY, RARE_STEPS = 4, 10
"""The dearer kinds take part in every fourth round, with shorter blocks: their cost is large and soon known."""
WARM_UP = 3
SAMPLED_STEP = 4
"""The step of a `sampled` block whose unit is sampled."""
BUDGET_PERCENT = 1.0
MEMORY_RUNS = 5
STEP_WINDOWS = "raw_telemetry__step_windows"
PEERS = {"flop_counter": "FlopCounterMode", "profiler": "torch.profiler"}


@dataclass
class Switch:
    """Puts the training into one kind of step and back."""

    training: Training
    kind: str
    folder: Path
    took: dict[str, list[float]] = field(default_factory=lambda: {"attach": [], "detach": [], "first": []})
    probe: Any = None
    mode: Any = None
    blocks: int = 0

    def on(self) -> None:
        """Switch on and take the steps that are not measured."""
        self.blocks += 1
        job, start = self._job(), time.perf_counter()
        if self.kind in {"probe", "unsampled", "sampled"}:
            self.probe = attach(
                self.training.model,
                optimizer=self.training.optimizer,
                job_id=job,
                spool=self.folder / self.kind,
                **({"max_sample_ppm": 0} if self.kind == "unsampled" else {}),
            )
            assert self.probe.is_on
            self.took["attach"].append(time.perf_counter() - start)
        elif self.kind == "flop_counter":
            self.mode = FlopCounterMode(display=False)
            self.mode.__enter__()
        elif self.kind == "profiler":
            self.mode = torch.profiler.profile(activities=_activities(self.training))
            self.mode.__enter__()
        for number in range(WARM_UP):
            start = time.perf_counter()
            self.training.step()
            self.training.wait()
            if number == 0:
                self.took["first"].append(time.perf_counter() - start)
        gc.collect()

    def _job(self) -> str:
        """A job of which other units are sampled in each block; of `sampled` blocks one alone, at nearly any rate."""
        for number in itertools.count(self.blocks * 1_000_000):
            job = f"bench-{self.kind}-{number}"
            others = [n for n in range(WARM_UP + RARE_STEPS) if n != WARM_UP + SAMPLED_STEP]
            if self.kind != "sampled" or (
                is_sampled(job, 0, WARM_UP + SAMPLED_STEP, 500)
                and not any(is_sampled(job, 0, n, 50_000) for n in others)
            ):
                return job
        raise AssertionError

    def off(self) -> None:
        """Back to the bare loop."""
        start = time.perf_counter()
        if self.probe is not None:
            self.probe.detach()
            self.probe = None
            self.took["detach"].append(time.perf_counter() - start)
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None
        gc.collect()


def _activities(training: Training) -> list[Any]:
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU] if training.tokens.device.type == "cpu" else [activity.CPU, activity.CUDA]


@dataclass
class Block:
    """One block of steps: seconds of each by wall and CPU, and by wall for a step of the whole."""

    wall: list[float]
    cpu: list[float]
    mean: float


@dataclass
class Measured:
    """Blocks of each kind by round, and the switches that made them."""

    blocks: dict[str, dict[int, Block]]
    switches: dict[str, Switch]

    @property
    def bare_s(self) -> float:
        """Seconds of a bare step."""
        return statistics.median(block.mean for block in self.blocks["bare"].values())

    def ratios(self, kind: str, how: str) -> list[float]:
        """A kind's step over the bare one of the same round; by `how`: medians of wall or cpu, or the mean of whole blocks."""
        bare = self.blocks["bare"]
        return [_step(block, how) / _step(bare[number], how) for number, block in self.blocks[kind].items()]

    def samples(self, how: str) -> list[float]:
        """What each sample added, as a share of a step. It is worked out at the begin of the next unit: two steps have it."""
        found = []
        for block in self.blocks["sampled"].values():
            spent = block.cpu if how == "cpu" else block.wall
            usual = statistics.median(spent)
            found.append(sum(spent[SAMPLED_STEP : SAMPLED_STEP + 2]) / usual - 2)
        return found

    def percent(self, kind: str, how: str = "wall") -> tuple[float, float]:
        """What a kind costs over the bare loop, in per cent, and the upper end of its 95 % interval."""
        ratios = self.ratios(kind, how)
        point, found = trimmed_mean(ratios), resampled(ratios)
        if kind == "probe" and how != "mean":
            share, added = self.sampled_share, self.samples(how)
            point += share * trimmed_mean(added)
            found = [a + share * b for a, b in zip(found, resampled(added, seed=1), strict=True)]
        return (point - 1) * 100, (bounds(found)[1] - 1) * 100

    @property
    def sampled_share(self) -> float:
        """Share of the probe's units that were sampled."""
        rows = [row for table, row in spooled(self.switches["probe"].folder / "probe") if table == STEP_WINDOWS]
        return sum(row["sampled_units"] for row in rows) / sum(row["units"] for row in rows)


def _step(block: Block, how: str) -> float:
    return block.mean if how == "mean" else statistics.median(block.cpu if how == "cpu" else block.wall)


def measure(training: Training, folder: Path, *, rounds: int = ROUNDS, steps: int = STEPS) -> Measured:
    """Blocks of every kind in turns."""
    kinds = ("bare", "probe", "unsampled", "sampled", *PEERS)
    measured = Measured({kind: {} for kind in kinds}, {kind: Switch(training, kind, folder) for kind in kinds})
    for _ in range(2 * WARM_UP):
        training.step()
    for number, order in enumerate(turns(kinds, rounds)):
        for kind in order:
            is_rare = kind not in {"bare", "probe"}
            if is_rare and number % RARE_EVERY:
                continue
            measured.switches[kind].on()
            measured.blocks[kind][number] = _block(training, RARE_STEPS if is_rare else steps)
            measured.switches[kind].off()
    return measured


def _block(training: Training, steps: int) -> Block:
    wall, cpu = [time.perf_counter()], [time.process_time()]
    for _ in range(steps):
        training.step()
        wall.append(time.perf_counter())
        cpu.append(time.process_time())
    training.wait()
    mean = (time.perf_counter() - wall[0]) / steps
    return Block([b - a for a, b in itertools.pairwise(wall)], [b - a for a, b in itertools.pairwise(cpu)], mean)


def spooled(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a spool."""
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            told = json.loads(line)
            if isinstance(told, list):
                yield told[0], told[1]


def run() -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    training = usual_training()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(training, Path(folder))
        rows = [*overhead_rows(measured), *_unit_rows(measured), _memory_row()]
        return [*rows, _spool_row(training, Path(folder) / "spooled", measured.bare_s)]


def overhead_rows(measured: Measured, name: str = "probe") -> list[dict[str, Any]]:
    """The probe's cost beside its peers' and the budget, point and upper bound."""
    runs = len(measured.blocks["bare"])
    rows = [_row(f"{name}.step", measured.bare_s * 1e3, "ms", runs=runs)]
    found = {how: measured.percent("probe", how) for how in ("wall", "cpu", "mean")}
    point, upper = found["wall"]
    rows.append(_row(f"{name}.overhead_upper", upper, "% (95 %)", "budget", BUDGET_PERCENT, runs=runs))
    for kind, peer in PEERS.items():
        peer_point, peer_upper = measured.percent(kind)
        rows.append(_row(f"{name}.overhead", point, "%", peer, peer_point, runs=runs))
        rows.append(_row(f"{name}.overhead_upper", upper, "% (95 %)", peer, peer_upper, runs=runs))
    for how in ("cpu", "mean"):
        point, upper = found[how]
        rows.append(_row(f"{name}.overhead_{how}", point, "%", runs=runs))
        rows.append(_row(f"{name}.overhead_{how}_upper", upper, "% (95 %)", "budget", BUDGET_PERCENT, runs=runs))
    return rows


def _unit_rows(measured: Measured) -> list[dict[str, Any]]:
    switch, bare = measured.switches["probe"], measured.bare_s
    runs = len(measured.blocks["sampled"])
    us = statistics.median(statistics.median(block.cpu) for block in measured.blocks["bare"].values()) * 1e6
    unsampled = trimmed_mean(measured.ratios("unsampled", "cpu")) - 1
    first = statistics.median(switch.took["first"])
    return [
        _row("probe.unsampled_unit", unsampled * us, "us of CPU", runs=runs),
        _row("probe.sampled_unit", trimmed_mean(measured.samples("cpu")) * us, "us of CPU more", runs=runs),
        _row("probe.sampled_share", measured.sampled_share * 100, "% of units", runs=switch.blocks),
        _row("probe.counting_step", first * 1e3, "ms", "bare step", bare * 1e3, runs=switch.blocks),
        _row("probe.attach", statistics.median(switch.took["attach"]) * 1e3, "ms", runs=switch.blocks),
        _row("probe.detach", statistics.median(switch.took["detach"]) * 1e3, "ms", runs=switch.blocks),
    ]


def _spool_row(training: Training, folder: Path, step_s: float) -> dict[str, Any]:
    """Bytes on disk a step: what one window of each table takes, spread over the time that it lasts."""
    with attach(training.model, optimizer=training.optimizer, job_id="bench-spool", spool=folder):
        for _ in range(100):
            training.step()
    sizes: dict[str, dict[int, int]] = {}
    lasts: dict[str, int] = {}
    for table, row in spooled(folder):
        if "window_start_utc" in row:
            windows = sizes.setdefault(table, {})
            start = row["window_start_utc"]
            windows[start] = windows.get(start, 0) + len(json.dumps([table, row], separators=(",", ":"))) + 1
            lasts[table] = row["window_ns"]
    per_ns = sum(statistics.median(found.values()) / lasts[table] for table, found in sizes.items())
    return _row("probe.spool", per_ns * step_s * 1e9, "bytes a step", runs=1)


def _memory_row() -> dict[str, Any]:
    """Memory that a process holds more after some steps with the probe, its code included, less what it does without."""
    found: dict[str, list[int]] = {"probed": [], "bare": []}
    for _ in range(MEMORY_RUNS):
        for kind, bytes_ in found.items():
            done = subprocess.run(
                [sys.executable, "-m", "tests.bench._memory", kind], capture_output=True, text=True, check=True
            )
            bytes_.append(int(done.stdout.splitlines()[-1]))
    with_probe, bare = (statistics.median(bytes_) / 2**20 for bytes_ in found.values())
    return _row("probe.memory", with_probe - bare, "MB", "bare steps", bare, runs=MEMORY_RUNS, ratio=None)


def _row(
    name: str, value: float, unit: str, peer: str | None = None, peer_value: float | None = None, **facts: Any
) -> dict[str, Any]:
    ratio = peer_value / value if peer_value is not None and value > 0 else None
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "peer": peer,
        "peer_value": None if peer_value is None else round(peer_value, 4),
        "ratio": None if ratio is None else round(ratio, 3),
        "rows": None,
        "peak_mb": None,
        "runs": None,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    } | facts
