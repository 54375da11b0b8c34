"""Rows of the probe through the checks that a night makes of them, and sums over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa

from seedance.flops.profile import OpCount, Profile
from seedance.probe.spans import OpKey, Share
from seedance.probe.tally import COUNTS
from seedance.probe.windows import OP_TABLE, STEP_TABLE, Unit, Windows
from seedance.schema import TELEMETRY
from seedance.shard import parse_name
from tasks.core.shards import Examined, compare_ops, examine, settle
from tests.shard_tables import HOUR_NS, START, shard

Rows = Sequence[tuple[str, dict[str, Any]]]
S = 1_000_000_000
HOUR = HOUR_NS
FAR = START + 30 * HOUR
"""After everything that a test tells."""


def unit(start: int, begin: int, end: int, **facts: Any) -> Unit:
    """A unit with times in ns from the start of an hour."""
    place = {"number": 0, "phase": "train", "batch_size": 8}
    for name in ("checkpoint", "input_wait"):
        facts[name] = tuple((START + a, START + b) for a, b in facts.get(name, ()))
    return Unit(start_ns=START + start, begin_ns=START + begin, end_ns=START + end, **(place | facts))


def count(layer: str, op: str = "matmul", pass_: str = "fwd", *, index: int = 0, **facts: Any) -> OpCount:
    """A count of one op in bf16."""
    plain = {"dtype": "bf16", "variant": "", "calls": 1, "flops": 0, "bytes_ideal": 0, "uncounted_calls": 0}
    made = plain | {"hw_flops": facts.get("flops", 0), "flops_full": facts.get("flops", 0)} | facts
    return OpCount(layer, index, op, pass_, **made)


def profile(*ops: OpCount) -> Profile:
    """A profile of these counts."""
    return Profile(ops)


def hour_of(row: dict[str, Any]) -> str:
    """Hour of a row, as a shard's name says it."""
    return f"{datetime.fromtimestamp(row['window_start_utc'] // S, UTC):%Y-%m-%dT%H}"


def table_of(spec_name: str, rows: Iterable[dict[str, Any]]) -> pa.Table:
    """The rows as Arrow; a value that does not fit its type raises."""
    spec = TELEMETRY[spec_name]
    found = list(rows)
    assert all(tuple(sorted(r)) == tuple(sorted(spec.names)) for r in found)
    return pa.Table.from_pylist(found, schema=spec.arrow)


def sent(rows: Rows, *, seq: int = 0) -> list[Examined]:
    """Each hour's rows as a shard of each table, as collect examines it."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for name, row in rows:
        found[name, hour_of(row)].append(row)
    made = []
    for (name, hour), held in sorted(found.items()):
        path, data = shard(TELEMETRY[name], table_of(name, held), hour=hour, seq=seq)
        made.append(examine(path, parse_name(path), data, last_day=date.max - timedelta(days=1)))
    return made


def assert_accepted(*batches: Rows) -> None:
    """Collect accepts every shard, alone and with the others of its hour, and op time explains sampled time."""
    seen = [one for seq, rows in enumerate(batches) for one in sent(rows, seq=seq)]
    assert [one.reason for one in seen if one.reason] == []
    groups: dict[tuple[str, date, int], list[Examined]] = defaultdict(list)
    for one in seen:
        groups[one.name.table, one.name.day, one.name.hour].append(one)
    for group in groups.values():
        _, refused, twins = settle(group)
        assert (refused, twins) == ({}, {})
    hours = {(day, hour) for _, day, hour in groups}
    for day, hour in hours:
        pair = [[g.table for g in groups.get((name, day, hour), [])] for name in (STEP_TABLE, OP_TABLE)]
        assert compare_ops(*pair).mismatched == 0


def steps(rows: Rows) -> list[dict[str, Any]]:
    """Step rows, in order of their window."""
    return sorted((r for n, r in rows if n == STEP_TABLE), key=lambda r: (r["window_start_utc"], r["phase"]))


def ops(rows: Rows) -> list[dict[str, Any]]:
    """Op rows."""
    return [r for n, r in rows if n == OP_TABLE]


def total(rows: Iterable[dict[str, Any]], *columns: str) -> tuple[int, ...]:
    """Sums of columns."""
    found = list(rows)
    return tuple(sum(r[c] for r in found) for c in columns)


def counts_by_op(rows: Rows) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """COUNTS by layer, pass and op."""
    found: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for row in ops(rows):
        key = (row["layer"], row["pass"], row["op"])
        found[key] = tuple(a + row[c] for a, c in zip(found.get(key, (0,) * 5), COUNTS, strict=True))
    return found


def windows(**facts: Any) -> Windows:
    """Windows of rank 0 of a job."""
    return Windows("job-1", 0, 0, "GPU-1", facts.pop("writes_samples", True), **facts)


def rows_of(*units: Unit, **facts: Any) -> Rows:
    """All rows of these units."""
    made = windows(**facts)
    for one in units:
        made.add(one)
    return made.rows(FAR, final=True)


def key(layer: str, pass_: str = "fwd", op: str = "matmul", batch: int = 8) -> OpKey:
    """Key of an op in training, in bf16."""
    return OpKey(layer, pass_, op, "train", batch, "bf16")


def sampled(start: int, begin: int, end: int, *, layer: str = "L0", **facts: Any) -> Unit:
    """A unit whose whole active time is one op's."""
    shares = {key(layer, batch=facts.get("batch_size", 8)): Share(end - begin, end - begin, 1)}
    return unit(start, begin, end, sampled=True, ops=shares, **facts)


def timed(rows: Rows) -> list[dict[str, Any]]:
    """Op rows with time."""
    return [r for r in ops(rows) if r["exclusive_ns"]]
