"""A day's accepted shards to jobs, device time, layer time and attachments: a step a bucket, a step an hour, one for the day.

A bucket is an hour of the hosts whose names hash to it; its step is keyed by its shards. An hour merges its buckets, so that
the day reads few objects: a late shard recomputes one bucket, its hour and the day's last step. Buckets and hours run
wherever `tasks.io.engine` puts them; what they make are objects of the lake, and only handles travel. Knows no bill and no
Prefect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.partials import PARTIALS, REPEATS
from schemas.telemetry import OP_WINDOWS, TELEMETRY
from schemas.usage import USAGE
from seedance.errors import ShardError
from seedance.shard import Footer, parse_name, read_footer, read_shard
from seedance.store import Store
from tasks.core import usage
from tasks.core.layers import OP_COLUMNS, OpRows
from tasks.core.shards import bucket_of
from tasks.errors import LawError
from tasks.io.engine import map_buckets
from tasks.io.lake import Handle, Lake, Step
from tasks.settings import Settings
from tasks.step import data_key, run_step, stage_key

BUCKET_STAGE = "reduce_bucket"
HOUR_STAGE = "reduce_hour"
DAY_STAGE = "reduce_day"
MODULES = ("tasks.reduce",)


@dataclass(frozen=True)
class Bucket:
    """One unit of work: where the lake is, and the shards of some hosts in one hour."""

    lake: str
    day: str
    hour: int
    number: int
    paths: tuple[str, ...]
    key: str
    """Key of its step: what it reads, and with what code."""


Item = TypeVar("Item", "Bucket", "Hour")


@dataclass(frozen=True)
class Hour:
    """The buckets of one hour, to be merged."""

    lake: str
    day: str
    hour: int
    parts: tuple[Step, ...]
    key: str


def reduce_day(lake: Lake, settings: Settings, day: str, accepted: Sequence[str]) -> tuple[Step, bool]:
    """Handles of the four tables of `schemas.usage` for a day, and whether they were there already.

    Args:
        lake: where shards and objects are.
        settings: scheduler and workers; neither changes a byte of the result.
        day: UTC day, YYYY-MM-DD.
        accepted: paths of the day's shards that count.

    Returns:
        The day's step; facts: buckets, shards, rows that came twice by table, and ns of units on GPUs that slices replace.

    Raises:
        LawError: time does not add up; carries law, where, expected, found.
        ShardError: a shard cannot be read; carries path, reason.
    """
    buckets = buckets_of(lake, day, accepted)
    parts = _made(lake, settings, BUCKET_STAGE, buckets, reduce_bucket)
    by_hour: dict[int, list[Step]] = defaultdict(list)
    for bucket, step in zip(buckets, parts, strict=True):
        by_hour[bucket.hour].append(step)
    hours = _made(lake, settings, HOUR_STAGE, _hours(lake, day, by_hour), merge_hour)
    key = stage_key(
        DAY_STAGE,
        modules=MODULES,
        schemas=(*PARTIALS.values(), *USAGE.values()),
        settings={"day": day},
        inputs=[handle.sha256 for step in hours for handle in step.handles.values()],
    )
    return run_step(lake, DAY_STAGE, key, lambda: _finish(lake, day, buckets, parts, hours))


def buckets_of(lake: Lake, day: str, accepted: Sequence[str]) -> list[Bucket]:
    """The day's shards by hour and hash of their host, in order."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for path in accepted:
        name = parse_name(path)
        if name.day.isoformat() != day:
            raise LawError(
                f"{path}: expected a shard of {day}. Reduce each day with its own shards.",
                law="bucket",
                where=path,
                expected=day,
                found=name.day.isoformat(),
            )
        # A shard's producer is its node: collect refuses any other.
        groups[name.hour, bucket_of(name.producer, lake.buckets)].append(path)
    code = stage_key(
        BUCKET_STAGE, modules=MODULES, schemas=(*TELEMETRY.values(), *PARTIALS.values()), settings={}, inputs=[]
    )
    made = []
    for (hour, number), paths in sorted(groups.items()):
        names = [parse_name(path) for path in paths]
        content = [f"{n.table}/{n.day}/{n.hour}/{n.producer}/{n.seq}/{n.sha16}" for n in names]
        key = data_key(BUCKET_STAGE, schemas=(), settings={"code": code}, inputs=content)
        made.append(Bucket(lake.store.url, day, hour, number, tuple(sorted(paths)), key))
    return made


def reduce_bucket(bucket: Bucket) -> Step:
    """The step of one bucket: its partial tables, computed now only when these shards have not been reduced."""
    # A plain Lake: opening one tries the store, and whoever started the day has done so.
    lake = Lake(Store(bucket.lake), 0)
    step, _ = run_step(lake, BUCKET_STAGE, bucket.key, lambda: _bucket(lake, bucket))
    return step


def merge_hour(hour: Hour) -> Step:
    """The step of one hour: its buckets merged, but for the detail, which stays where it is."""
    lake = Lake(Store(hour.lake), 0)
    step, _ = run_step(lake, HOUR_STAGE, hour.key, lambda: _merge(lake, hour))
    return step


@dataclass(frozen=True)
class OpFile:
    """A shard of op windows, each column read when it is asked for."""

    file: pq.ParquetFile
    path: str

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return int(self.file.metadata.num_rows)

    def column(self, name: str, /) -> pa.ChunkedArray:
        """One column; text is dictionary-encoded."""
        try:
            # In this thread: buckets run side by side, and Arrow's one pool of threads would make them wait for each other.
            return self.file.read(columns=[name], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self.path, error) from error


def read_for_reduction(data: bytes, path: str, *, is_only: bool) -> tuple[Footer, OpRows]:
    """Footer and rows of a shard that collect has accepted.

    Args:
        data: the bytes of the shard.
        path: for messages.
        is_only: no other shard of its host, hour and table is there: op windows are then read column by column as they
            are summed, without those that only tell rows apart.
    """
    spec = TELEMETRY[parse_name(path).table]
    if spec.name != OP_WINDOWS.name or not is_only:
        return read_shard(data, spec, where=path)
    text = [n for n in OP_COLUMNS if pa.types.is_string(spec[n].type)]
    try:
        return read_footer(data), OpFile(pq.ParquetFile(pa.BufferReader(data), read_dictionary=text), path)
    except (ShardError, pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> ShardError:
    reason = f"rows cannot be read: {error}"
    return ShardError(
        f"{path}: {reason}. It was accepted before: look for damage in the store.", path=path, reason=reason
    )


def _made(
    lake: Lake, settings: Settings, stage: str, items: Sequence[Item], compute: Callable[[Item], Step]
) -> list[Step]:
    """The step of each item, in order; only those that the lake lacks are sent out."""
    known = {item.key: lake.step(stage, item.key) for item in items}
    due = [item for item in items if known[item.key] is None]
    made = map_buckets(compute, due, scheduler=settings.scheduler, workers=settings.workers)
    steps = {key: step for key, step in known.items() if step is not None} | dict(
        zip((i.key for i in due), made, strict=True)
    )
    return [steps[item.key] for item in items]


def _hours(lake: Lake, day: str, by_hour: Mapping[int, Sequence[Step]]) -> list[Hour]:
    code = stage_key(HOUR_STAGE, modules=MODULES, schemas=PARTIALS.values(), settings={}, inputs=[])
    made = []
    for hour, parts in sorted(by_hour.items()):
        inputs = [handle.sha256 for step in parts for handle in step.handles.values()]
        key = data_key(HOUR_STAGE, schemas=(), settings={"code": code, "day": day, "hour": hour}, inputs=inputs)
        made.append(Hour(lake.store.url, day, hour, tuple(parts), key))
    return made


def _merge(lake: Lake, hour: Hour) -> Step:
    """Handles of the merged tables; of the detail, all objects as they are."""
    merged = usage.merge([_partials(lake, step) for step in hour.parts])
    handles = {n: lake.handle(PARTIALS[n], hour.day, [t]) for n, t in sorted(merged.items()) if t.num_rows}
    detail = [p for s in hour.parts if usage.DETAIL in s.handles for p in s.handles[usage.DETAIL].parts]
    parts = sorted(detail, key=lambda part: part.path)
    if parts:
        spec = PARTIALS[usage.DETAIL]
        handles[usage.DETAIL] = Handle(spec.name, spec.version, hour.day, tuple(parts))
    return Step(handles, {})


def _partials(lake: Lake, step: Step) -> dict[str, pa.Table]:
    """Every table of a step but the detail, which is as large as its shards."""
    return {n: lake.read(h, PARTIALS[n]) for n, h in step.handles.items() if n != usage.DETAIL}


def _bucket(lake: Lake, bucket: Bucket) -> Step:
    alone: dict[tuple[str, str], int] = defaultdict(int)
    for path in bucket.paths:
        alone[(name := parse_name(path)).table, name.producer] += 1
    shards = []
    for path in bucket.paths:
        name = parse_name(path)
        shards.append(read_for_reduction(lake.store.read(path), path, is_only=alone[name.table, name.producer] == 1))
    made = usage.partial(shards)
    repeats = made.pop(REPEATS.name)
    handles = {n: lake.handle(PARTIALS[n], bucket.day, [t]) for n, t in sorted(made.items()) if t.num_rows}
    return Step(handles, {"repeats": {r["table"]: [r["duplicates"], r["conflicts"]] for r in repeats.to_pylist()}})


def _finish(lake: Lake, day: str, buckets: Sequence[Bucket], parts: Sequence[Step], hours: Sequence[Step]) -> Step:
    merged = usage.merge([_partials(lake, step) for step in hours])
    wanted = usage.detail_wanted(merged)
    if wanted.num_rows:
        # Op rows of single ranks are as large as the day: they pass one object at a time, and few are kept.
        spec = PARTIALS[usage.DETAIL]
        objects = [p for step in hours if usage.DETAIL in step.handles for p in step.handles[usage.DETAIL].parts]
        detail = [usage.only(lake.read(Handle(spec.name, spec.version, day, (p,)), spec), wanted) for p in objects]
        merged[usage.DETAIL] = pa.concat_tables([spec.empty(), *detail])
    made = usage.finish(merged, day)
    repeats: dict[str, list[int]] = {}
    for step in parts:
        for table, found in step.facts["repeats"].items():
            repeats[table] = [a + b for a, b in zip(repeats.get(table, [0, 0]), found, strict=True)]
    facts = {
        "buckets": len(buckets),
        "shards": sum(len(b.paths) for b in buckets),
        "duplicate_rows": {t: r[0] for t, r in sorted(repeats.items())},
        "conflicting_rows": {t: r[1] for t, r in sorted(repeats.items())},
        "replaced_ns": usage.replaced_ns(merged),
    }
    return Step({n: lake.handle(USAGE[n], day, [t] if t.num_rows else []) for n, t in made.items()}, facts)
