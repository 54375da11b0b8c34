"""What really happened: every unit of every job, with the time of each of its operations, in whole microseconds.

Units tile the stepping time of a rank without a hole: the first begins where a window begins, the last ends where one ends,
and none crosses an hour or the edge of a gap. Within an hour all units of one batch size are active equally long, and the
communication in them takes equally long; only the layers vary, by a few per cent. So the money of a job and category does
not depend on which units were sampled, and the money of a layer does. Knows no table, no file, no bill.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.fleet import shapes
from tests.fleet.model import HOUR_S, MILLION, Fleet, Machine, Stretch, Tenant
from tests.fleet.shapes import Op

US = 1_000
"""Nanoseconds of a microsecond."""
SPEED: dict[str, tuple[float, float]] = {
    "NVIDIA A100": (140e12, 1.2e12),
    "NVIDIA A100 40GB": (140e12, 1.2e12),
    "NVIDIA A100 80GB": (145e12, 1.6e12),
    "NVIDIA A100 80GB PCIe": (130e12, 1.5e12),
    "NVIDIA A10G": (50e12, 0.45e12),
    "NVIDIA H100": (350e12, 2.4e12),
    "NVIDIA L4": (55e12, 0.22e12),
    "NVIDIA T4": (25e12, 0.24e12),
}
"""FLOP/s and bytes/s that the operations reach; only the proportions of the true times come from here."""
NETWORK_BYTES_S = {
    "NVIDIA A100": 120e9,
    "NVIDIA A100 40GB": 120e9,
    "NVIDIA A100 80GB": 120e9,
    "NVIDIA A100 80GB PCIe": 20e9,
    "NVIDIA A10G": 20e9,
    "NVIDIA H100": 200e9,
    "NVIDIA L4": 10e9,
    "NVIDIA T4": 5e9,
}
FIXED = ("comm", "copy", "none")
"""Passes whose time is equal in each unit of an hour and batch size."""

Ints = npt.NDArray[np.int64]


class StepRow(NamedTuple):
    """Units of one rank and batch size that end in one window; times in ns."""

    tenant: int
    rank: int
    batch: int
    window_s: int
    units: int
    wall: int
    active: int
    input_stall: int
    checkpoint: int
    held_idle: int
    sampled_units: int
    sampled_active: int


class OpRow(NamedTuple):
    """One operation of one rank and batch size in one op window; exclusive time in ns, squares in us^2."""

    tenant: int
    rank: int
    batch: int
    window_s: int
    op: Op
    units: int
    sampled_units: int
    exclusive: int
    us2: int


@dataclass
class Totals:
    """All units of one rank and batch size in one hour, sampled or not; times in ns."""

    units: int = 0
    active: int = 0
    input_stall: int = 0
    checkpoint: int = 0
    held_idle: int = 0
    ops: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    """(layer, pass, op) to time."""


@dataclass(frozen=True)
class Piece:
    """Stepping time of a tenant without an hour edge or the edge of a gap inside; its units are numbered from first_unit."""

    start_s: int
    end_s: int
    first_unit: int
    batches: tuple[int, ...]
    """Batch size of each unit."""
    gaps_of: frozenset[int]
    """Machines whose telemetry lacks this piece."""


@dataclass
class Timeline:
    """The units of a fleet: as telemetry can tell them (`steps`, `ops`), and all that was recorded (`totals`)."""

    fleet: Fleet
    steps: list[StepRow] = field(default_factory=list)
    ops: list[OpRow] = field(default_factory=list)
    totals: dict[tuple[int, int, int, int], Totals] = field(default_factory=dict)
    """(tenant, rank, hour, batch size)."""
    sample_ppm: dict[int, int] = field(default_factory=dict)
    """Units that are sampled, by tenant."""

    @cached_property
    def stepping(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """(tenant, rank) to the intervals, in s, whose steps were recorded; none crosses an hour."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, tenant in enumerate(self.fleet.tenants):
            for rank, (machine, _) in enumerate(tenant.seats):
                kept = [(p.start_s, p.end_s) for p in pieces(self.fleet, tenant) if machine not in p.gaps_of]
                found[number, rank] = kept
        return found


def observe(fleet: Fleet) -> Timeline:
    """Runs every tenant that has work."""
    timeline = Timeline(fleet)
    for number, tenant in enumerate(fleet.tenants):
        if tenant.work is not None:
            _run_tenant(timeline, number, tenant)
    return timeline


def pieces(fleet: Fleet, tenant: Tenant) -> list[Piece]:
    """Stepping time of a tenant in order, with the batch size of every unit."""
    work = tenant.work
    if work is None:
        return []
    machines = {machine for machine, _ in tenant.seats}
    gaps = [g for g in fleet.gaps if g.machine in machines]
    edges = {t for g in gaps for t in (g.start_s, g.end_s)}
    shuffle = random.Random(f"pieces/{fleet.spec.seed}/{tenant.job_id}/{tenant.attempt}")
    found: list[Piece] = []
    unit = 0
    for stretch in (s for s in tenant.stretches if s.kind == "steps"):
        cuts = edges | set(range(0, stretch.end_s, HOUR_S)) | {stretch.start_s, stretch.end_s}
        inside = sorted(t for t in cuts if stretch.start_s <= t <= stretch.end_s)
        for start, end in pairwise(inside):
            count = max(1, (end - start) * MILLION // work.unit_us)
            batches = tuple(shuffle.choice(work.batches) for _ in range(count))
            lost = frozenset(g.machine for g in gaps if g.start_s <= start and end <= g.end_s)
            found.append(Piece(start, end, unit, batches, lost))
            unit += count
    return found


def operations(tenant: Tenant, batch: int) -> list[Op]:
    """Operations of one unit."""
    work = tenant.work
    assert work is not None
    make = shapes.training_step if work.phase == "train" else shapes.serving_batch
    return make(work.network, batch, work.seq, work.blocks)


def is_sampled(job_id: str | None, attempt: int, unit: int, ppm: int) -> bool:
    """Whether a unit is sampled: by a hash of job, attempt and unit, never of the rank."""
    if ppm >= MILLION:
        return True
    digest = hashlib.blake2b(f"{job_id}|{attempt}|{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") * MILLION < ppm << 64


def periods(fleet: Fleet, number: int) -> Iterator[tuple[int, int, bool]]:
    """(start, end, usable) of every reading that the agent of a machine takes, in s; none in a gap that is not marked."""
    machine, period = fleet.machines[number], fleet.spec.period_s
    gaps = [g for g in fleet.gaps if g.machine == number]
    for start in range(machine.agent_s, machine.end_s, period):
        inside = [g for g in gaps if g.start_s <= start < g.end_s]
        if not inside or inside[0].is_marked:
            yield start, start + period, not inside


def present(fleet: Fleet, number: int, index: int, second: int) -> list[tuple[Tenant, Stretch]]:
    """Tenants on a device at an instant, with what they do."""
    return [
        (tenant, stretch)
        for tenant in fleet.tenants
        if (number, index) in tenant.seats
        for stretch in tenant.stretches
        if stretch.start_s <= second < stretch.end_s
    ]


def _run_tenant(timeline: Timeline, number: int, tenant: Tenant) -> None:
    fleet = timeline.fleet
    parts = pieces(fleet, tenant)
    ppm = timeline.sample_ppm[number] = _enough(tenant, parts, fleet.spec.sample_ppm)
    flags = [
        np.array([is_sampled(tenant.job_id, tenant.attempt, p.first_unit + i, ppm) for i in range(len(p.batches))])
        for p in parts
    ]
    for rank, (machine, index) in enumerate(tenant.seats):
        bases = {b: _base_us(operations(tenant, b), fleet.machines[machine], index, rank) for b in tenant.work.batches}  # type: ignore[union-attr]
        runs = [
            _run_piece(timeline, number, rank, piece, sampled, bases)
            for piece, sampled in zip(parts, flags, strict=True)
            if machine not in piece.gaps_of
        ]
        # Two pieces around a gap may lie in one op window.
        joined: dict[tuple[int, int, int], OpRow] = {}
        for run in runs:
            for place, row in run:
                old = joined.get((row.window_s, row.batch, place))
                joined[row.window_s, row.batch, place] = (
                    row
                    if old is None
                    else old._replace(
                        units=old.units + row.units,
                        sampled_units=old.sampled_units + row.sampled_units,
                        exclusive=old.exclusive + row.exclusive,
                        us2=old.us2 + row.us2,
                    )
                )
        timeline.ops.extend(joined[key] for key in sorted(joined))


def _enough(tenant: Tenant, parts: list[Piece], ppm: int) -> int:
    """The rate, doubled until every hour has a sampled unit of each batch size that occurs in it."""
    while True:
        seen: dict[tuple[int, int], bool] = {}
        for piece in parts:
            for i, batch in enumerate(piece.batches):
                key = piece.start_s // HOUR_S, batch
                seen[key] = seen.get(key, False) or is_sampled(tenant.job_id, tenant.attempt, piece.first_unit + i, ppm)
        if all(seen.values()):
            return ppm
        ppm = min(MILLION, 2 * ppm)


def _base_us(ops: list[Op], machine: Machine, index: int, rank: int) -> Ints:
    """Time of each operation in a mean unit, us; ranks differ a little, and a slice is as fast as its part of the GPU."""
    piece, whole = machine.slice_at(index), machine.compute_slices
    part = 1.0 if piece is None else piece.compute / whole
    flops_s, bytes_s = (part * speed for speed in SPEED[machine.facts.gpu_model])
    wire = NETWORK_BYTES_S[machine.facts.gpu_model]
    found: list[int] = []
    for op in ops:
        seconds = op.bytes / wire if op.direction in ("comm", "copy") else op.flops / flops_s + op.bytes / bytes_s
        found.append(max(40, round(seconds * 1e6 * (1_000 + 3 * rank) / 1_000)))
    worked = sum(us for us, op in zip(found, ops, strict=True) if op.direction not in FIXED)
    return np.array(
        [worked // 50 if op.direction == "none" else us for us, op in zip(found, ops, strict=True)], np.int64
    )


def _run_piece(
    timeline: Timeline, number: int, rank: int, piece: Piece, sampled: npt.NDArray[np.bool_], bases: dict[int, Ints]
) -> list[tuple[int, OpRow]]:
    """Adds the step rows and totals of one rank in one piece; returns its op rows with the place of their operation."""
    fleet = timeline.fleet
    tenant = fleet.tenants[number]
    rng = np.random.Generator(np.random.PCG64([fleet.spec.seed, number, rank, piece.start_s]))
    batches = np.array(piece.batches, np.int64)
    active = np.zeros(len(batches), np.int64)
    for batch, base in bases.items():
        active[batches == batch] = base.sum()
    checkpoint, waiting, held = _gap_us(tenant, piece, active, rng)
    ends = piece.start_s * MILLION + np.cumsum(active + checkpoint + waiting + held)
    assert ends[-1] == piece.end_s * MILLION
    columns = np.stack([np.ones_like(ends), active, waiting, checkpoint, held])
    _add_steps(timeline, (number, rank), piece, (batches, ends, sampled), columns)
    rows: list[tuple[int, OpRow]] = []
    op_window = fleet.spec.op_window_s
    windows = (ends - 1) // (op_window * MILLION) * op_window
    for batch in sorted(bases):
        mine = np.flatnonzero(batches == batch)
        if not len(mine):
            continue
        ops = operations(tenant, batch)
        times = _jitter(bases[batch], ops, len(mine), rng)
        total = timeline.totals.setdefault((number, rank, piece.start_s // HOUR_S, batch), Totals())
        total.units += len(mine)
        total.active += int(active[mine].sum()) * US
        total.input_stall += int(waiting[mine].sum()) * US
        total.checkpoint += int(checkpoint[mine].sum()) * US
        total.held_idle += int(held[mine].sum()) * US
        for op, spent in zip(ops, times.sum(axis=0).tolist(), strict=True):
            total.ops[op.layer, op.direction, op.kind] += spent * US
        for window in np.unique(windows[mine]).tolist():
            here = windows[mine] == window
            chosen = times[here & sampled[mine]]
            spent, squares = chosen.sum(axis=0).tolist(), (chosen * chosen).sum(axis=0).tolist()
            for place, op in enumerate(ops):
                row = OpRow(
                    number, rank, batch, window, op, int(here.sum()), len(chosen), spent[place] * US, squares[place]
                )
                rows.append((place, row))
    return rows


def _gap_us(tenant: Tenant, piece: Piece, active: Ints, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Gaps of the units, us: blocking saves, waiting for input, and the rest; together they fill the piece."""
    work = tenant.work
    assert work is not None
    room = (piece.end_s - piece.start_s) * MILLION - int(active.sum())
    assert room >= 0, (
        f"{tenant.job_id}: units of {work.unit_us} us are shorter than their operations ({int(active.max())} us)"
    )
    checkpoint = np.zeros_like(active)
    if work.checkpoint_every:
        saves = np.flatnonzero((np.arange(len(active)) + piece.first_unit + 1) % work.checkpoint_every == 0)
        saves = saves[: room // 2 // work.checkpoint_us]
        checkpoint[saves] = work.checkpoint_us
    rest = room - int(checkpoint.sum())
    weights = rng.integers(80, 121, len(active))
    gaps = rest * weights // int(weights.sum())
    gaps[-1] += rest - int(gaps.sum())
    waiting = gaps * work.input_ppm // MILLION
    return checkpoint, waiting, gaps - waiting


def _jitter(base: Ints, ops: list[Op], units: int, rng: np.random.Generator) -> Ints:
    """Times of the operations in each unit, us, shape (units, operations): layers vary, every row has the same sum."""
    free = np.array([place for place, op in enumerate(ops) if op.direction not in FIXED])
    times = np.tile(base, (units, 1))
    room = np.minimum(base[free], np.roll(base[free], -1)) // 20
    moved = rng.integers(-room, room + 1, (units, len(free)))
    times[:, free] += moved - np.roll(moved, 1, axis=1)
    return times


def _add_steps(
    timeline: Timeline,
    who: tuple[int, int],
    piece: Piece,
    units: tuple[Ints, Ints, npt.NDArray[np.bool_]],
    columns: Ints,
) -> None:
    """Adds a row for each window and batch size; a window in which no unit ends gets one without units."""
    batches, ends, sampled = units
    length = timeline.fleet.spec.window_s
    windows = (ends - 1) // (length * MILLION) * length
    for window in range(piece.start_s, piece.end_s, length):
        here = windows == window
        sizes = np.unique(batches[here]).tolist() or [piece.batches[0]]
        for batch in sizes:
            mine = here & (batches == batch)
            count, active, waiting, saved, held = columns[:, mine].sum(axis=1).tolist()
            seen = mine & sampled
            timeline.steps.append(
                StepRow(
                    *who,
                    batch,
                    window,
                    count,
                    (active + waiting + saved + held) * US,
                    active * US,
                    waiting * US,
                    saved * US,
                    held * US,
                    int(seen.sum()),
                    int(columns[1, seen].sum()) * US,
                )
            )
