"""Kill a night at one of its writes, run it again, and compare what readers see: `python -m tests.integration.crash_runner`.

One warm parent forks every night, so that a point costs a night and no imports. Prints one JSON line with the
number of writes, then one a point: {"point", "when", "write", "same"}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - DuckDB looks for it at its first table: once here, not once a night

from tasks import gates
from tasks.io.lake import Lake
from tests import nights

Watch = Callable[[str, str, str], None]


def forked(lake: Path, fleet: Path, day: str, watch: Watch | None) -> int:
    """Run a night in a forked child; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        opened = Lake.open
        if watch is not None:
            Lake.open = lambda url, *, buckets=8: opened(url, buckets=buckets, watch=watch)  # type: ignore[method-assign,assignment,misc]
        run = nights.run(nights.settings_for(fleet, lake), day)
        code = 1 if run.failed else 0
        if run.failed:
            print(run.failed, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - the child must not return into the parent's code
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    os._exit(code)


def count_writes(lake: Path, fleet: Path, day: str) -> dict[str, list[str]]:
    """Every write of an undisturbed night, in order: those begun, and those done (a create of what exists is never done)."""
    log = lake.with_suffix(".log")

    def note(when: str, op: str, path: str) -> None:
        with log.open("a") as out:
            out.write(f"{when} {op} {path}\n")

    status = forked(lake, fleet, day, note)
    if status:
        raise SystemExit(f"the undisturbed night failed with status {status}")
    lines = log.read_text().splitlines()
    return {when: [line.split(" ", 1)[1] for line in lines if line.startswith(when)] for when in ("before", "after")}


def killer(point: int, moment: str) -> Watch:
    """Kill this process before or after write number `point`."""
    seen = {"before": 0, "after": 0}

    def watch(when: str, op: str, path: str) -> None:
        if when == moment and seen[when] == point:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[when] += 1

    return watch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--day", required=True)
    parser.add_argument("--every", type=int, default=1, help="take one point in so many")
    parser.add_argument("--first", type=int, default=0, help="first point taken")
    args = parser.parse_args()
    gates.check("collect", args.day, {}, [gates.Measure("warm, count", 0, 0)])  # its library is imported once, too
    calm = args.work / "calm"
    writes = count_writes(calm, args.fleet, args.day)
    wanted = nights.published(calm)
    points = [(i, when) for when, found in writes.items() for i in range(len(found))][args.first :: args.every]
    facts: dict[str, Any] = {
        "writes": len(writes["before"]),
        "points": sum(map(len, writes.values())),
        "published": len(wanted),
    }
    print(json.dumps(facts), flush=True)
    for point, when in points:
        lake = args.work / f"{point}-{when}"
        killed = forked(lake, args.fleet, args.day, killer(point, when))
        again = forked(lake, args.fleet, args.day, None)
        found = nights.published(lake)
        facts = {
            "point": point,
            "when": when,
            "write": writes[when][point],
            "killed": os.WIFSIGNALED(killed),
            "again": again,
            "same": found == wanted,
        }
        if found != wanted:
            facts["differs"] = sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))
        print(json.dumps(facts), flush=True)
        shutil.rmtree(lake)
    return 0


if __name__ == "__main__":
    sys.exit(main())
