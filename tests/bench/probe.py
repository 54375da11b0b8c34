"""What the probe costs a training step on a CPU, beside the bare loop, torch's FlopCounterMode and torch.profiler.

Fresh processes, one thread each, take turns on one core (see `_pairs.py`); steps of 50 to 80 ms; the probe as it is set by
default. `overhead` is the time of all the probe's steps over that of the bare ones, samples and windows written among it, a
trimmed mean over groups of processes; `overhead_upper` is the upper end of its 95 % interval by bootstrap over groups, which the
budget of 1 % is held against. `overhead_cpu` is the same of CPU time, with all threads, steadier on a machine that is shared.
Each group has two bare processes: `control` is one over the other, what the measure finds where there is nothing. Attaching and
the counting run come once and are told apart. Nothing is asserted. Putting shards in place is another process's work, not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seedance.probe.probe import attach
from tests.bench._pairs import BARE, Measured, measure
from tests.bench._training import USUAL, Training
from tests.bench._turns import trimmed_mean
from tests.bench._worker import PEERS, PROBED

GROUPS = int(os.environ.get("BENCH_PROBE_GROUPS", "40"))
ROUNDS = 24
"""Turns of each process: a turn of five bare steps over another scatters by 3 %, so that six turns leave 1 %."""
KINDS = (*BARE, PROBED)
BUDGET_PERCENT = 1.0
MEMORY_RUNS = 5
STEP_WINDOWS = "raw_telemetry__step_windows"


def spooled(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a spool."""
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            told = json.loads(line)
            if isinstance(told, list):
                yield told[0], told[1]


def run() -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(USUAL, KINDS, Path(folder), groups=GROUPS, rounds=ROUNDS, rare=tuple(PEERS))
        rows = [*overhead_rows(measured), *_unit_rows(measured, Path(folder)), _memory_row()]
        return [*rows, _spool_row(Path(folder) / "spooled", measured.bare_s())]


def overhead_rows(measured: Measured, name: str = "probe") -> list[dict[str, Any]]:
    """The probe's cost beside its peers' and the budget, point and upper bound."""
    runs = len(measured.groups)
    rows = [_row(f"{name}.step", measured.bare_s() * 1e3, "ms", runs=runs)]
    point, _, upper = measured.percent(PROBED)
    rows.append(_row(f"{name}.overhead_upper", upper, "% (95 %)", "budget", BUDGET_PERCENT, runs=runs))
    for kind, peer in PEERS.items():
        rows.append(_row(f"{name}.overhead", point, "%", peer, measured.percent(kind)[0], runs=runs))
    point, _, upper = measured.percent(PROBED, "cpu")
    rows.append(_row(f"{name}.overhead_cpu", point, "%", runs=runs))
    rows.append(_row(f"{name}.overhead_cpu_upper", upper, "% (95 %)", "budget", BUDGET_PERCENT, runs=runs))
    point, low, upper = measured.percent("control", over=("bare",))
    rows.append(_row(f"{name}.control", point, "%", runs=runs))
    rows.append(_row(f"{name}.control_lower", low, "% (95 %)", runs=runs))
    rows.append(_row(f"{name}.control_upper", upper, "% (95 %)", runs=runs))
    return rows


def _unit_rows(measured: Measured, folder: Path) -> list[dict[str, Any]]:
    told = [group.told[PROBED] for group in measured.groups]
    samples = measured.samples_s(PROBED)
    units = [row for table, row in spooled(folder) if table == STEP_WINDOWS]
    share = sum(row["sampled_units"] for row in units) / sum(row["units"] for row in units)
    first = statistics.median(one.first for one in told)
    return [
        _row("probe.sampled_unit", trimmed_mean(samples) * 1e3, "ms more", runs=len(samples)),
        _row("probe.sampled_share", share * 100, "% of units", runs=len(told)),
        _row("probe.counting_step", first * 1e3, "ms", "bare step", measured.bare_s() * 1e3, runs=len(told)),
        _row("probe.attach", statistics.median(one.attach for one in told) * 1e3, "ms", runs=len(told)),
        _row("probe.detach", statistics.median(one.detach for one in told) * 1e3, "ms", runs=len(told)),
    ]


def _spool_row(folder: Path, step_s: float) -> dict[str, Any]:
    """Bytes on disk a step: what one window of each table takes, spread over the time that it lasts."""
    training = Training(**USUAL)
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
