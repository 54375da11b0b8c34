"""Tier: what lies in the checkpoint folders, where the policy wants it, and which moves pay. A dry run: nothing is moved.

Publishes `report_checkpoints__inventory` and `report_checkpoints__moves` as of a day; writes nothing else, and nothing in the
folders.
"""

from __future__ import annotations

import datetime as dt
import os
import tomllib
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.checkpoints import INVENTORY, MOVES, VERDICTS
from schemas.usage import JOB_RUNS
from seedance.errors import SeedanceError
from tasks.core import tiering
from tasks.core.tier_policy import Policy, parse
from tasks.errors import LayoutError, SettingsError, UsageError
from tasks.io.checkpoints import is_local, list_folder
from tasks.io.lake import Lake
from tasks.settings import Settings

PRICES = Path(__file__).parent / "rules" / "storage_tiers.csv"
ENDED = "ended"
EXAMPLES = 10


def load_policy(path: str) -> Policy:
    """The policy of a TOML file; relative folders are relative to the file's own.

    Raises:
        SettingsError: the file cannot be read, a key is unknown, or a value is out of bounds; carries key, where, nearest.
    """
    file = Path(path)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"), parse_float=Decimal)
    except (ValueError, OSError) as error:
        raise SettingsError(
            f"tier policy {path} cannot be read as TOML: {error}. Pass the path of a policy such as samples/tiers.toml.",
            where=path,
        ) from error
    policy = parse(values, where=path)
    folder = file.resolve().parent
    beside = tuple(str(folder / f) if "://" not in f else f for f in policy.folders)
    return policy.model_copy(update={"folders": beside})


def plan_tiers(settings: Settings, policy_path: str, folders: Iterable[str], as_of: str) -> dict[str, Any]:
    """List the folders, plan and price the moves, publish both tables as of a day.

    Args:
        settings: where the lake is.
        policy_path: the policy file.
        folders: folders instead of those of the policy; none: those of the policy.
        as_of: UTC day, YYYY-MM-DD; ages are counted to its end.

    Returns:
        {as_of, policy, folders, ended: jobs known to have ended, stays: number of entries that the policy leaves where they
        are, by what holds them, stay: some of these with why, examples: entries of each verdict} and the totals of
        `tiering.totals`; amounts are text.

    Raises:
        SettingsError: the policy cannot be used.
        UsageError: no folder is named, or one is not there.
        StoreError: a folder cannot be listed.
    """
    policy = load_policy(policy_path)
    prices = tiering.parse_prices(PRICES.read_text(encoding="utf-8"), policy, where=f"tasks/rules/{PRICES.name}")
    chosen = sorted({_whole(f) for f in folders} or {_whole(f) for f in policy.folders})
    if not chosen:
        raise UsageError(
            f"no checkpoint folder is named: neither as a parameter nor as folders in {policy_path}.",
            found="nothing",
            expected="a folder",
        )
    lake = Lake.open(settings.lake, buckets=settings.buckets)
    day = dt.date.fromisoformat(as_of)
    ended = ended_jobs(lake, settings, day)
    inventory, moves = [INVENTORY.empty()], [MOVES.empty()]
    for folder in chosen:
        found = list(list_folder(folder))
        moment = tiering.Moment(_end_ns(day), tiering.find_newest(found, policy), ended)
        for part in found:
            entries, wanted = tiering.plan(folder, part, policy, prices, moment, local=is_local(folder))
            inventory.append(entries)
            moves.append(wanted)
    entries, wanted = pa.concat_tables(inventory), pa.concat_tables(moves)
    for spec, table in ((INVENTORY, entries), (MOVES, wanted)):
        lake.publish_as_of(lake.handle(spec, None, [table]), as_of)
    head = {"as_of": as_of, "policy": policy_path, "folders": chosen, "ended": sorted(ended)}
    return head | tiering.totals(entries, wanted) | _stays(entries, policy) | {"examples": _examples(entries, wanted)}


def ended_jobs(lake: Lake, settings: Settings, day: dt.date) -> frozenset[str]:
    """Jobs whose newest attempt is known to have ended, from the committed days within the look-back.

    A day that cannot be read says nothing: its jobs count as running, which keeps more in place.
    """
    first = (day - dt.timedelta(days=settings.look_back_days)).isoformat()
    last: dict[str, tuple[tuple[int, str], bool]] = {}
    for name in lake.committed_days():
        if not first <= name <= day.isoformat():
            continue
        try:
            head = lake.head(name)
            handle = None if head is None else head.handles.get(JOB_RUNS.name)
            if handle is None:
                continue
            rows = lake.read(handle, JOB_RUNS, ["job_id", "attempt", "status", "exit_reason"])
        except (SeedanceError, LayoutError):
            continue
        for row in rows.to_pylist():
            at = (row["attempt"], name)
            if row["job_id"] not in last or at > last[row["job_id"]][0]:
                last[row["job_id"]] = (at, row["status"] == ENDED or row["exit_reason"] is not None)
    return frozenset(job for job, (_, is_over) in last.items() if is_over)


def _stays(inventory: pa.Table, policy: Policy) -> dict[str, Any]:
    """How many entries stay by what holds them, and the first of each with why."""
    stays: dict[str, int] = {}
    stay: list[dict[str, str]] = []
    names = ["x_Folder", "x_Path", "x_StorageClass", "x_AgeDays", "x_Pin", "x_Tier", "x_Problem"]
    for batch in inventory.select(names).sort_by([("x_Folder", "ascending"), ("x_Path", "ascending")]).to_batches():
        for entry in batch.to_pylist():
            found = tiering.stays(entry, policy)
            if found is not None:
                stays[found[0]] = stays.get(found[0], 0) + 1
                if stays[found[0]] <= EXAMPLES:
                    path = f"{entry['x_Folder']}/{entry['x_Path']}"
                    stay.append({"path": path, "held_by": found[0], "why": found[1]})
    return {"stays": dict(sorted(stays.items())), "stay": stay}


def _examples(inventory: pa.Table, moves: pa.Table) -> dict[str, list[dict[str, str]]]:
    """The moves that save most, kept entries that would save most, and entries that cannot be used; ten of each at most."""
    found: dict[str, list[dict[str, str]]] = {}
    for verdict in VERDICTS:
        own = moves.filter(pc.equal(moves["x_Verdict"], verdict))
        order = [("x_Saved", "descending"), ("x_Folder", "ascending"), ("x_Path", "ascending")]
        found[verdict] = [
            {
                "path": f"{r['x_Folder']}/{r['x_Path']}",
                "from": r["x_FromClass"],
                "to": r["x_ToClass"],
                "net": "" if r["x_Net"] is None else f"{r['x_Net']:f}",
                "why": r["x_Why"] or "",
            }
            for r in own.take(pc.sort_indices(own, sort_keys=order)[:EXAMPLES]).to_pylist()
        ]
    broken = inventory.filter(pc.is_valid(inventory["x_Problem"])).sort_by(
        [("x_Folder", "ascending"), ("x_Path", "ascending")]
    )
    found["unusable"] = [
        {"path": f"{r['x_Folder']}/{r['x_Path']}", "why": r["x_Problem"]} for r in broken.slice(0, EXAMPLES).to_pylist()
    ]
    return found


def _whole(folder: str) -> str:
    """A folder under one name, whichever way it was written: local paths are absolute, no slash at the end."""
    if is_local(folder):
        return os.path.normpath(Path(folder.removeprefix("file://")).absolute())
    return folder.rstrip("/")


def _end_ns(day: dt.date) -> int:
    return ((day - dt.date(1970, 1, 1)).days + 1) * tiering.DAY_NS
