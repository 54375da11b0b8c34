"""Kill a writer or an uploader at each of its steps on disk, upload again, and say which rows arrived.

`python -m tests.integration.upload_runner writer|uploader|chain --work DIR`. A step is any open, rename, link, remove,
folder made or removed, truncation, lock, write and sync below the work folder; the process dies (SIGKILL) just before it.
One warm parent forks every process. Prints one JSON line a point: {"point", "step", "attempted", "written", "arrived",
"left", ...}; the last says how many steps there are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - Arrow looks for it at its first table: once here, not in every fork
import pyarrow.parquet as pq

from seedance.probe.spool import HOUR_NS, Spool
from seedance.schema import EVENTS, JOBS, STEP_WINDOWS
from seedance.shard import parse_name, read_footer
from seedance.upload import upload
from tests.shard_tables import NODE, START, row

STEPS = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.truncate",
    "fcntl.flock",
    "fcntl.lockf",
}
KILLED = 9


def arm(work: Path, point: int, note: Callable[[str], None]) -> None:
    """Kill this process before its step number `point`, counted from 0; -1 never. Each step is noted first."""
    seen = [0]
    below = str(work)

    def step(what: str) -> None:
        number, seen[0] = seen[0], seen[0] + 1
        note(what)
        if number == point:
            os.kill(os.getpid(), KILLED)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event not in STEPS:
            return
        path = args[0]
        # Folders are removed by names within a folder that is open.
        if (
            not isinstance(path, (str, os.PathLike))
            or str(path).startswith(below)
            or event in ("os.remove", "os.rmdir")
        ):
            step(f"{event} {str(path).removeprefix(below)}")

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            if fd > 2 and str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(below):
                step(f"os.{name}")
            return real(fd, *args)

        setattr(os, name, call)

    counted("write")
    counted("fsync")
    sys.addaudithook(audit)


def forked(act: Callable[[], None]) -> int:
    """Do something in a child; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 0
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - the child must not return into the parent's code
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 2
    os._exit(code)


def told(act: Callable[[Callable[[str], None]], None]) -> tuple[int, list[str]]:
    """What a child says, line by line, before it ends or dies; its wait status."""
    read, write = os.pipe()

    def child() -> None:
        os.close(read)
        # The real write: this is no step.
        act(lambda line, real=os.write: real(write, f"{line}\n".encode()))  # type: ignore[misc]

    pid = os.fork()
    if not pid:
        try:
            child()
        except BaseException as error:  # noqa: BLE001 - as above
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(2)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        found = lines.read().splitlines()
    return os.waitpid(pid, 0)[1], found


def job(rank: int, hour: int = 0, **values: Any) -> tuple[str, dict[str, Any]]:
    return JOBS.name, row(JOBS, rank=rank, stated_at_utc=START + hour * HOUR_NS, **values)


def finish(work: Path) -> dict[str, Any]:
    """Upload what is left, and say what there is then; in a child, since Arrow's threads would not outlive a fork."""
    (work / "spool").mkdir(parents=True, exist_ok=True)  # a writer can die before it has made it

    def read(say: Callable[[str], None]) -> None:
        _assert_done(upload(work / "spool", str(work / "drop"), final=True))
        for path in sorted((work / "drop").rglob("*.parquet")):
            name, file = parse_name(str(path)), pq.ParquetFile(path)
            assert read_footer(path).rows == file.metadata.num_rows
            rows = file.read(["event_id" if name.table == EVENTS.name else "rank"]).column(0).to_pylist()
            say(json.dumps({"shard": name.path, "rows": [[name.table, row] for row in rows]}))

    status, lines = told(read)
    shards = [json.loads(line) for line in lines]
    left = sorted(str(p.relative_to(work)) for p in (work / "spool").rglob("*") if p.is_file() and p.name != "lock")
    refused = [line for p in sorted((work / "spool").glob("refused/*.jsonl")) for line in p.read_text().splitlines()]
    facts = {"status": status, "left": left, "refused": len(refused), "shards": [s["shard"] for s in shards]}
    return facts | {"rows": [row for s in shards for row in s["rows"]]}


def _assert_done(done: Any) -> None:
    assert done.problem is None, done.problem


# --- what is killed --------------------------------------------------------------------------------------------------


def write(work: Path, point: int) -> tuple[int, list[str]]:
    """Eight writes over three hours, one of which comes again after it was closed; `row n` when a row was written."""

    def act(say: Callable[[str], None]) -> None:
        arm(work, point, lambda what: say(f"step {what}"))
        with Spool(work / "spool", NODE) as spool:
            for n, hour in enumerate((0, 0, 1, 1, 2, 0, 2, 2)):
                assert spool.write([job(2 * n, hour), job(2 * n + 1, hour)]) == 2
                say(f"row {2 * n}")
                say(f"row {2 * n + 1}")

    return told(act)


def prepare(work: Path) -> None:
    """A spool with two closed hours of two writers, a row to refuse, a dead writer's torn segment, a batch half made."""

    def live() -> None:
        for first in (0, 10):
            with Spool(work / "spool", NODE) as spool:
                spool.write([job(first + n, n % 2) for n in range(6)])
                spool.write([(EVENTS.name, row(EVENTS, at_utc=START + n, event_id=f"{first}-{n}")) for n in range(2)])
                spool.write([(STEP_WINDOWS.name, row(STEP_WINDOWS, rank=first))])
        with Spool(work / "spool", NODE) as spool:
            spool.write([job(90), job(91, attempt=-1)])
        new = work / "spool" / "batches" / ".new-5"
        new.mkdir(parents=True)
        segment = min((work / "spool" / "closed").iterdir())
        segment.rename(new / segment.name)

    def dead() -> None:
        spool = Spool(work / "spool", NODE)
        spool.write([job(95)])
        os.kill(os.getpid(), KILLED)

    assert forked(live) == 0
    assert forked(dead) == KILLED
    (segment,) = (work / "spool" / "open").iterdir()
    with segment.open("ab") as file:
        file.write(b'["raw_telemetry__jobs",{"jo')


def send(work: Path, point: int) -> tuple[int, list[str]]:
    def act(say: Callable[[str], None]) -> None:
        arm(work, point, say)
        _assert_done(upload(work / "spool", str(work / "drop"), final=True))

    return told(act)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("writer", "uploader", "chain"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take one point in so many")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / "model"
    if args.what != "writer":
        prepare(model)
    if args.what == "chain":
        for seed in range(12):
            chain(args.work / str(seed), model, seed)
        return 0
    run = write if args.what == "writer" else send
    calm = args.work / "calm"
    if args.what == "uploader":
        shutil.copytree(model, calm)
    status, steps = run(calm, -1)
    assert status == 0, status
    steps = [line for line in steps if not line.startswith("row ")]
    for point in range(0, len(steps), args.every):
        work = args.work / "point"
        if args.what == "uploader":
            shutil.copytree(model, work)
        status, said = run(work, point)
        facts = {"point": point, "step": steps[point], "killed": status == KILLED, "steps": len(said)}
        facts["written"] = [int(line[4:]) for line in said if line.startswith("row ")]
        print(json.dumps(facts | finish(work)), flush=True)
        shutil.rmtree(work)
    print(json.dumps({"steps": steps} | finish(calm)), flush=True)
    return 0


def chain(work: Path, model: Path, seed: int) -> None:
    """An uploader that is killed at a random step, and so is the next, until one is through."""
    shutil.copytree(model, work)
    rng = random.Random(seed)
    kills = 0
    while send(work, rng.randrange(40))[0] == KILLED:
        kills += 1
    print(json.dumps({"seed": seed, "kills": kills} | finish(work)), flush=True)
    shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
