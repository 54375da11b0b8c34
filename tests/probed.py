"""Shards as a probe writes them: a training run of several ranks that share one CPU, with no agent and no bill beside it.

Rows are made from plain numbers, so that tests know what a day must hold. No code of the probe is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from seedance.schema import JOBS, OP_WINDOWS, STEP_WINDOWS, TELEMETRY
from seedance.shard import write_shard
from tests.shard_tables import row, table

MS = 1_000_000
SECOND = 1_000 * MS
HOUR_NS = 3600 * SECOND
STEP_NS, OP_NS = 10 * SECOND, 300 * SECOND
BOOT = "cpu:3f0f1d2c-5b7e-4c39-9a53-1f6a2d0b8c11"


@dataclass(frozen=True)
class Unit:
    """One optimizer step of one rank.

    Args:
        start_ns, begin_ns, end_ns: end of the unit before, first module, end; UTC.
        input_ns, checkpoint_ns: parts of the gap before `begin_ns`.
        ops: exclusive ns of a sampled unit by (layer, index, pass, op); what is left of the active time is nobody's. None:
            not sampled.
    """

    start_ns: int
    begin_ns: int
    end_ns: int
    input_ns: int = 0
    checkpoint_ns: int = 0
    ops: dict[tuple[str, int, str, str], int] | None = None

    @property
    def gap_ns(self) -> int:
        """Time before the unit's first module."""
        return self.begin_ns - self.start_ns


@dataclass(frozen=True)
class Host:
    """Where a run is: what the footers of its shards say."""

    node: str = "laptop"
    cloud: str | None = "aws"
    instance_id: str | None = "i-laptop"
    instance_type: str | None = "g4dn.xlarge"


@dataclass(frozen=True)
class Job:
    """What a run says about itself."""

    job_id: str = "try"
    world_size: int = 2
    device_uuid: str = BOOT
    facts: dict[str, Any] = field(default_factory=dict)


FLOPS = 10**9
"""Of the matrix products of a step, forward; twice as many backward."""
PASSES_OF_LAYER = (("fwd", 1), ("bwd", 2))


def units(
    start_ns: int, count: int, *, rank: int = 0, sampled: Sequence[int] = (), save_at: int | None = None
) -> list[Unit]:
    """A run of `count` steps of a second from `start_ns`: 0.3 s gap of which 0.2 s waits for input, 0.7 s active.

    Args:
        start_ns: begin of the first unit; it has no gap, as nothing ended before it.
        count: steps.
        rank: later ranks wait a little longer.
        sampled: numbers of sampled units.
        save_at: number of the step before which a checkpoint is written, a second long.
    """
    made, at = [], start_ns
    for number in range(count):
        save = SECOND if number == save_at else 0
        gap = 0 if number == 0 else 300 * MS + save
        wait = 0 if number == 0 else 200 * MS + rank * 10 * MS
        begin, end = at + gap, at + gap + 700 * MS
        ops = None
        if number in sampled:
            ops = {
                ("embed", 0, "fwd", "embedding"): 20 * MS,
                ("blocks.0", 1, "fwd", "fused:activation+attention+matmul+norm"): 180 * MS,
                ("blocks.0", 1, "bwd", "fused:activation+attention+matmul+norm"): 300 * MS,
                ("(grad_sync)", -1, "comm", "all_reduce[dp]"): 60 * MS,
                ("(optimizer)", -1, "optim", "optimizer"): 100 * MS,
            }
        made.append(Unit(at, begin, end, wait, save, ops))
        at = end
    return made


def _cut(unit: Unit) -> list[tuple[int, Unit, bool]]:
    """Pieces of a unit by hour: start of the hour, the piece, and whether the unit ends in it."""
    pieces, at = [], unit.start_ns
    while at // HOUR_NS != (unit.end_ns - 1) // HOUR_NS:
        edge = (at // HOUR_NS + 1) * HOUR_NS
        pieces.append((at, edge, False))
        at = edge
    pieces.append((at, unit.end_ns, True))
    made, save_ns, wait_ns = [], 0, 0
    for start, end, is_last in pieces:
        begin = min(max(unit.begin_ns, start), end)
        saved = min(unit.checkpoint_ns - save_ns, begin - start)
        waited = min(unit.input_ns - wait_ns, begin - start - saved)
        save_ns, wait_ns = save_ns + saved, wait_ns + waited
        piece = Unit(start, begin, end, waited, saved)
        made.append((start // HOUR_NS, piece, is_last))
    return made


def step_rows(job: Job, rank: int, run: Sequence[Unit], *, tokens: int = 512) -> list[dict[str, Any]]:
    """Rows of step windows on the grid of ten seconds, wall time cut at the hour."""
    rows: dict[int, dict[str, Any]] = {}
    for unit in run:
        for hour, piece, is_last in _cut(unit):
            edge = min(piece.end_ns, (hour + 1) * HOUR_NS) - 1
            start = max(edge // STEP_NS * STEP_NS, hour * HOUR_NS)
            at = rows.setdefault(
                start,
                row(
                    STEP_WINDOWS,
                    job_id=job.job_id,
                    rank=rank,
                    device_uuid=job.device_uuid,
                    batch_size=8,
                    window_start_utc=start,
                    window_ns=STEP_NS,
                ),
            )
            active = piece.end_ns - piece.begin_ns
            at["wall_ns"] += piece.end_ns - piece.start_ns
            at["active_ns"] += active
            at["input_stall_ns"] += piece.input_ns
            at["input_wait_ns"] += piece.input_ns
            at["checkpoint_ns"] += piece.checkpoint_ns
            at["held_idle_ns"] += piece.gap_ns - piece.input_ns - piece.checkpoint_ns
            if is_last:
                at["units"] += 1
                at["samples"] += 8 if rank == 0 else 0
                at["tokens_in"] += tokens if rank == 0 else 0
                if unit.ops is not None:
                    at["sampled_units"] += 1
                    at["sampled_active_ns"] += unit.end_ns - unit.begin_ns
    return [rows[k] for k in sorted(rows)]


def op_rows(job: Job, rank: int, run: Sequence[Unit]) -> list[dict[str, Any]]:
    """Rows of op windows on the grid of 300 seconds: time of sampled units, calls and FLOPs of every unit."""
    rows: dict[tuple[int, tuple[str, int, str, str]], dict[str, Any]] = {}

    def at(unit: Unit, key: tuple[str, int, str, str]) -> dict[str, Any]:
        layer, index, pass_, op = key
        start = (unit.end_ns - 1) // OP_NS * OP_NS
        text = "|".join((layer, pass_, op, "train", "8", "fp32"))
        found = row(
            OP_WINDOWS,
            job_id=job.job_id,
            rank=rank,
            device_uuid=job.device_uuid,
            op_key=int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True),
            variant="",
            method="host",
            window_start_utc=start,
            window_ns=OP_NS,
            layer=layer,
            layer_index=index,
            op=op,
            batch_size=8,
            dtype="fp32",
            **{"pass": pass_},
        )
        return rows.setdefault((start, key), found)

    for unit in run:
        for pass_, factor in PASSES_OF_LAYER:
            made = at(unit, ("blocks.0", 1, pass_, "matmul"))
            made["calls"] += 6 * factor
            made["flops"] += FLOPS * factor
            made["hw_flops"] += FLOPS * factor
        if unit.ops is not None:
            rest = unit.end_ns - unit.begin_ns - sum(unit.ops.values())
            for key, ns in (*unit.ops.items(), (("(none)", -1, "none", "unattributed_busy"), rest)):
                made = at(unit, key)
                made["sampled_calls"] += 1
                made["busy_ns"] += ns
                made["exclusive_ns"] += ns
                made["exclusive_us2"] += (ns // 1000) ** 2
    return [rows[k] for k in sorted(rows)]


def job_rows(job: Job, rank: int, run: Sequence[Unit]) -> list[dict[str, Any]]:
    """What a rank says of its job: that it began and that it ended."""
    said = (("started", run[0].begin_ns, None), ("ended", run[-1].end_ns, "finished"))
    return [
        row(
            JOBS,
            job_id=job.job_id,
            rank=rank,
            stated_at_utc=at,
            statement=statement,
            device_uuid=job.device_uuid,
            exit_reason=reason,
            dp=job.world_size,
            world_size=job.world_size,
            **job.facts,
        )
        for statement, at, reason in said
    ]


def by_hour(job: Job, runs: Sequence[Sequence[Unit]]) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Rows of all ranks by hour since 1970 and table."""
    made: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for rank, run in enumerate(runs):
        for spec, rows, instant in (
            (STEP_WINDOWS, step_rows(job, rank, run), "window_start_utc"),
            (OP_WINDOWS, op_rows(job, rank, run), "window_start_utc"),
            (JOBS, job_rows(job, rank, run), "stated_at_utc"),
        ):
            for one in rows:
                made.setdefault(one[instant] // HOUR_NS, {}).setdefault(spec.name, []).append(one)
    return made


def drop(folder: Path, host: Host, job: Job, runs: Sequence[Sequence[Unit]], *, seq: int = 0) -> list[str]:
    """Write the shards of all ranks into a drop folder, one a table and hour; their names."""
    names = []
    for hour, tables in sorted(by_hour(job, runs).items()):
        for name, rows in tables.items():
            spec = TELEMETRY[name]
            own = {"node": host.node} if "node" in spec.names else {}
            path, data = write_shard(
                table(spec, [row | own for row in rows]),
                spec,
                producer=host.node,
                node=host.node,
                cloud=host.cloud,
                instance_id=host.instance_id,
                instance_type=host.instance_type,
                hour=datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y-%m-%dT%H"),
                seq=seq,
                period_ns=STEP_NS,
            )
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
            names.append(path)
    return names
