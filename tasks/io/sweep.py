"""Take garbage out of a lake: what `tasks.core.garbage` names, and leases that have changed hands.

A run can name again what a sweep is about to delete: its step is then written after the sweep looked, or before. Before: the
sweep looks a second time after each batch and puts back what has been named meanwhile. After: whoever writes a step looks
whether its objects are there once it is written (`tasks.step.run_step`). Knows no clock. Source: infra/rules/lake.md 12.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from seedance.canonical import canonical
from seedance.store import Store
from tasks.core import garbage
from tasks.core.garbage import StepFacts
from tasks.errors import LayoutError
from tasks.io import leases
from tasks.io.handles import BROKEN, commit_numbers
from tasks.io.lake import Lake

RECORD = "sweep/unnamed.json"
BATCH_BYTES = 64 << 20
READS_AT_ONCE = 16


@dataclass(frozen=True)
class Swept:
    """What a sweep deletes, by path with size in bytes; and what nothing names that stays for now."""

    steps: dict[str, int]
    objects: dict[str, int]
    leases: dict[str, int]
    waiting: dict[str, int]

    @property
    def freed(self) -> int:
        """Bytes that go."""
        return sum(sum(sizes.values()) for sizes in (self.steps, self.objects, self.leases))


def sweep(lake: Lake, now_ns: int, *, dry_run: bool) -> Swept:
    """Delete what is garbage, in two passes: old steps that lead to no commit, and objects that nothing names.

    Args:
        lake: what to sweep.
        now_ns: ns UTC, to be compared with the times that the storage gives.
        dry_run: delete nothing and note nothing.

    Raises:
        LayoutError: a commit cannot be read, so nobody can say what it names; nothing was deleted.
    """
    store = lake.store
    commits = _commits(lake)
    written = store.written("steps")
    steps = {
        path: StepFacts(written[path], garbage.objects_in(text))
        for path, text in _texts(store, list(written))
        if text is not None
    }
    sizes = {entry.path: entry.bytes for folder in ("steps", "objects", "leases") for entry in store.list(folder)}
    objects = [path for path in sizes if path.startswith("objects/")]
    committed = frozenset[str]().union(*(garbage.objects_in(text) for text in commits.values()))
    found = garbage.find(now_ns, steps, committed, objects, _noted(store))
    old = leases.outdated([path for path in sizes if path.startswith("leases/")])
    if not dry_run:
        # Steps go before objects, so that none is left that names what is gone.
        for path in (*found.steps, *old):
            store.delete(path)
        _delete(store, found.objects, sizes, {*written, *commits})
        if found.unnamed or store.exists(RECORD):
            store.replace(RECORD, canonical(found.unnamed))
    return Swept(
        {path: sizes.get(path, 0) for path in found.steps},
        {path: sizes[path] for path in found.objects},
        {path: sizes[path] for path in old},
        {path: sizes[path] for path in found.unnamed},
    )


def _delete(store: Store, paths: Sequence[str], sizes: dict[str, int], seen: set[str]) -> None:
    for batch in _batches(paths, sizes):
        held = {path: store.get(path) for path in batch}
        for path in batch:
            store.delete(path)
        fresh = [entry.path for folder in ("steps", "days") for entry in store.list(folder) if entry.path not in seen]
        named = {name for _, text in _texts(store, fresh) for name in garbage.objects_in(text or b"")}
        seen.update(fresh)
        for path in sorted(named & held.keys()):
            data = held[path]
            if data is not None:
                store.put(path, data)


def _batches(paths: Sequence[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    batch: list[str] = []
    filled = 0
    for path in paths:
        if batch and filled + sizes[path] > BATCH_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(path)
        filled += sizes[path]
    if batch:
        yield batch


def _commits(lake: Lake) -> dict[str, bytes]:
    """The text of every commit, by path; a file of another name there counts too, for what it names.

    Raises:
        LayoutError: one cannot be read; carries url, path.
    """
    found: dict[str, bytes] = {}
    entries = lake.store.list("days")
    commits = {f"days/{day}/{n}.json" for day, numbers in commit_numbers(entries).items() for n in numbers}
    for path, text in _texts(lake.store, [entry.path for entry in entries]):
        if path not in commits:
            found[path] = text or b""
            continue
        try:
            is_whole = isinstance(json.loads(text or b""), dict)
        except BROKEN:
            is_whole = False
        if not is_whole or text is None:
            raise LayoutError(
                f"{lake.store.url}/{path}: expected a commit, found {len(text or b''):,} bytes that are none: what it names "
                "cannot be told, so nothing was deleted. Run `python -m flows.verify --repair`, then sweep again.",
                url=lake.store.url,
                path=path,
                expected="a commit",
                found=f"{len(text or b'')} bytes",
            )
        found[path] = text
    return found


def _texts(store: Store, paths: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    """Path and bytes of each, a few on their way at a time; None for what has been deleted since it was listed."""
    with ThreadPoolExecutor(1 if store.is_local else READS_AT_ONCE) as pool:
        for start in range(0, len(paths), 4 * READS_AT_ONCE):
            some = paths[start : start + 4 * READS_AT_ONCE]
            yield from zip(some, pool.map(store.get, some), strict=True)


def _noted(store: Store) -> dict[str, int]:
    """Since when which object is named by nothing; what cannot be read begins anew."""
    try:
        noted = json.loads(store.get(RECORD) or b"{}")
    except BROKEN:
        return {}
    pairs = noted.items() if isinstance(noted, dict) else ()
    return {path: at for path, at in pairs if isinstance(at, int) and not isinstance(at, bool)}
