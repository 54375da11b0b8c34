"""Whether a lake still holds what its commits promise, and the way back where it does not.

Every committed day: its commits can be read, every object of its head is there with its sha256, `report/` shows it byte for byte.
Repair computes lost objects again from `raw/` and brings `report/` back; it never commits other content than was committed.
Source: infra/rules/lake.md 17.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.parquet as pq

from seedance.canonical import canonical
from seedance.errors import SeedanceError, StoreError
from seedance.store import Store
from tasks import night, progress
from tasks.errors import LayoutError, PipelineError
from tasks.io.handles import BROKEN, Handle, Part, commit_numbers, read_commit, read_record
from tasks.io.lake import Commit, Lake
from tasks.plan import DayPlan, plan_one
from tasks.settings import Settings

READS_AT_ONCE = 16
REPAIR = "python -m flows.verify --repair"
GONE = "the commit is gone"


@dataclass(frozen=True)
class Lost:
    """One thing that is not as it was committed: usage day, path, what is wrong with it, and the command that helps."""

    day: str
    path: str
    problem: str
    command: str


@dataclass
class Verified:
    """What was looked at (days, objects and bytes read), what is lost, and what a repair brought back."""

    days: int = 0
    objects: int = 0
    bytes: int = 0
    lost: list[Lost] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)


def verify(settings: Settings, first_day: str | None = None, last_day: str | None = None) -> Verified:
    """Read every committed day of a range, or of the whole lake; writes nothing."""
    lake = night.open_lake(settings)
    found = Verified()
    numbers = commit_numbers(lake.store.list("days"))
    recorded = [e.path.removeprefix("report/_days/").removesuffix(".json") for e in lake.store.list("report/_days")]
    days = [day for day in sorted({*numbers, *recorded}) if (first_day or day) <= day <= (last_day or day)]
    checked: dict[str, str | None] = {}
    for number, day in enumerate(days):
        progress.tell(number, len(days), day)
        found.days += 1
        commits = [*_commits(lake, day, numbers.get(day, []))]
        found.lost += commits
        head = _head(lake, day, numbers.get(day, []), {lost.path for lost in commits})
        if head is not None:
            found.lost += _objects(lake, head, checked, found)
            found.lost += _report(lake, head)
    found.lost += _others(lake)
    return found


# --- what is wrong ---------------------------------------------------------------------------------------------------


def _commits(lake: Lake, day: str, numbers: Sequence[int]) -> Iterator[Lost]:
    """Commits of a day that are gone or cannot be read, and a head that is another than `report/` was made from."""
    at = f"report/_days/{day}.json"
    record = read_record(lake.store.get(at), at)
    recorded = record["commit"] if isinstance(record.get("commit"), int) else 0
    for n in range(1, max([*numbers, recorded]) + 1):
        path = f"days/{day}/{n}.json"
        raw = lake.store.get(path)
        if raw is None:
            yield Lost(day, path, GONE, REPAIR)
            continue
        try:
            _ = [*_parts(read_commit(raw, day, n, lake.store.url))]
        except (LayoutError, *BROKEN) as error:
            yield Lost(day, path, f"the commit cannot be read: {type(error).__name__}: {error}", REPAIR)
            continue
        digest = hashlib.sha256(raw).hexdigest()
        if n == recorded and record.get("sha256", digest) != digest:
            problem = f"the commit was altered: expected sha256 {record['sha256']}, as {at} has it, found {digest}"
            yield Lost(day, path, problem, REPAIR)


def _head(lake: Lake, day: str, numbers: Sequence[int], damaged: Collection[str]) -> Commit | None:
    """The newest commit, unless it was told to be damaged."""
    is_there = numbers and f"days/{day}/{max(numbers)}.json" not in damaged
    return lake.head(day) if is_there else None


def _objects(lake: Lake, head: Commit, checked: dict[str, str | None], found: Verified) -> Iterator[Lost]:
    """Objects of a head that are gone or altered, each read once whatever names it."""
    fresh = {part.path: part for part in _parts(head) if part.path not in checked}
    with ThreadPoolExecutor(1 if lake.store.is_local else READS_AT_ONCE) as pool:
        for part, problem in zip(
            fresh.values(), pool.map(lambda p: _problem(lake.store, p), fresh.values()), strict=True
        ):
            checked[part.path] = problem
            found.objects += 1
            found.bytes += part.bytes
    for path in sorted({part.path for part in _parts(head)}):
        problem = checked[path]
        if problem is not None:
            yield Lost(head.day, path, problem, REPAIR)


def _parts(head: Commit) -> Iterator[Part]:
    for handle in head.handles.values():
        yield from handle.parts
    yield from Handle.from_dict(head.body["prices"]).parts if head.body.get("prices") else ()


def _problem(store: Store, part: Part) -> str | None:
    data = store.get(part.path)
    if data is None:
        return "the object is gone"
    digest = hashlib.sha256(data).hexdigest()
    if digest != part.sha256:
        return f"the object was altered: expected sha256 {part.sha256} ({part.bytes:,} bytes), found {digest} ({len(data):,})"
    return None


def _report(lake: Lake, head: Commit) -> Iterator[Lost]:
    """Where `report/` does not show the head."""
    tables = {name: handle.parts[0] for name, handle in head.handles.items() if name.startswith("report_")}
    for name, part in sorted(tables.items()):
        path = f"report/{name}/usage_date={head.day}/data.parquet"
        data = lake.store.get(path)
        if data is None:
            yield Lost(head.day, path, "the report is gone", REPAIR)
        elif hashlib.sha256(data).hexdigest() != part.sha256:
            yield Lost(head.day, path, f"the report is not that of commit {head.n}", REPAIR)
    at = f"report/_days/{head.day}.json"
    raw = lake.store.get(at)
    record = read_record(raw, at)
    if record.get("commit") != head.n or set(record.get("parts", {}).values()) != {p.sha256 for p in tables.values()}:
        yield Lost(
            head.day,
            at,
            f"the record of the day is {'gone' if raw is None else f'not that of commit {head.n}'}",
            REPAIR,
        )


def _others(lake: Lake) -> Iterator[Lost]:
    """Published files that no commit names, such as the bridge: nothing says what was in them, but that they can be read."""
    for entry in lake.store.list("report"):
        if "/as_of_date=" not in entry.path or not entry.path.endswith(".parquet"):
            continue
        try:
            pq.ParquetFile(io.BytesIO(lake.store.read(entry.path))).read()
        except (pa.ArrowException, OSError, StoreError) as error:
            day = entry.path.partition("as_of_date=")[2].partition("/")[0]
            yield Lost("", entry.path, f"cannot be read: {error}", f"python -m flows.nightly --day {day}")


# --- the way back ----------------------------------------------------------------------------------------------------


def clear(settings: Settings, found: Verified) -> list[str]:
    """Take away what is damaged, so that it is made again: altered objects, and commits that cannot be read.

    Every object of the lake is read, also those that only steps name: on an altered one the stages would stumble. Commits go
    to `quarantine/commits/`.

    Returns:
        Days that have to be computed, oldest first; on the others `report/` alone was lost.
    """
    lake = night.open_lake(settings)
    if any(one.path.startswith(("objects/", "days/")) for one in found.lost):
        entries = lake.store.list("objects")
        for number, entry in enumerate(entries):
            progress.tell(number, len(entries), entry.path)
            stem = entry.path.rpartition("/")[2].removesuffix(".parquet")
            data = lake.store.get(entry.path)
            if data is not None and hashlib.sha256(data).hexdigest() != stem:
                lake.store.delete(entry.path)
    for one in found.lost:
        if one.path.startswith("days/"):
            _put_aside(lake.store, one)
    return sorted({one.day for one in found.lost if one.path.startswith(("objects/", "days/"))})


def plans_to_restore(settings: Settings, day: str, found: Verified) -> list[DayPlan]:
    """The plan of a day that lost something: as its head was made where the head is left, else the one of now.

    A plan as the head was made commits nothing: its key is the head's, or, where the code is another one, its parent is not the
    newest commit. A head that is lost is committed again.
    """
    lake = night.open_lake(settings)
    plans = plan_one(settings, day)
    head = lake.head(day)
    numbers = [int(one.path.rpartition("/")[2].removesuffix(".json")) for one in found.lost
               if one.day == day and one.path.startswith("days/")]  # fmt: skip
    if head is None or any(n > head.n for n in numbers):
        return plans
    return [
        replace(p, parent=head.body["parent"], cause=head.body["cause"])
        for p in plans
        if p.data_key == head.body["data_key"]
    ]


def show_heads(settings: Settings, found: Verified, failed: Mapping[str, str]) -> dict[str, str]:
    """Bring `report/` to the heads of the days that lost something; the reasons of those where it cannot be, beside `failed`."""
    lake = night.open_lake(settings)
    reasons = dict(failed)
    for day in sorted({one.day for one in found.lost if one.day}):
        try:
            lake.materialise(day)
        except (PipelineError, SeedanceError) as error:
            reasons.setdefault(day, f"{type(error).__name__}: {error}")
    return reasons


def judge(before: Verified, after: Verified, reasons: Mapping[str, str]) -> Verified:
    """What a repair brought back, and what is left with the command that helps then: only a new revision can follow."""
    left = {one.path for one in after.lost}
    after.repaired = sorted({one.path for one in before.lost} - left)
    unknown = "its inputs or the code have changed since, so that it cannot be made again"
    after.lost = [_left(one, reasons.get(one.day, unknown)) for one in after.lost]
    return after


def _left(lost: Lost, reason: str) -> Lost:
    """What is lost still, with why, and the command that helps; none does for a former commit, of which only copies are left."""
    if not lost.day:
        return lost
    if lost.path.startswith("days/") and lost.problem == GONE:
        copy = "it is a former one, which nothing computes again: put it back from a copy of the lake"
        return replace(lost, problem=f"{lost.problem}; {copy}", command="")
    command = f"python -m flows.publish --day {lost.day}"
    return replace(lost, problem=f"{lost.problem}; after the repair: {reason}", command=command)


def _put_aside(store: Store, lost: Lost) -> None:
    data = store.get(lost.path)
    if data is None:
        return
    digest = hashlib.sha256(data).hexdigest()[:16]
    at = f"quarantine/commits/{lost.day}-{lost.path.rpartition('/')[2].removesuffix('.json')}-{digest}"
    store.put(f"{at}.bytes", data)
    store.replace(f"{at}.json", canonical({"path": lost.path, "reason": lost.problem, "bytes": len(data)}))
    store.delete(lost.path)
