"""Train a small model on this machine under the probe, price the day, and say where the money went: `make try`.

    python samples/try [FOLDER]

Everything it writes is in FOLDER, else beside this file: shards, the lake, the page. Each command is printed before it is run;
typed by hand they do the same.
"""

from __future__ import annotations

import datetime as dt
import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[0] = str(ROOT)

from seedance.errors import SeedanceError  # noqa: E402 - the root of the repository comes first
from tasks.errors import PipelineError  # noqa: E402
from tasks.explain import Question, explain_days  # noqa: E402
from tasks.io import show, show_tree  # noqa: E402
from tasks.settings import load  # noqa: E402

MACHINE = {"cloud": "aws", "instance-id": "i-mine", "instance-type": "g4dn.xlarge"}
"""What this machine is taken for; its list price is in seedance/data/gpu_instances.csv."""
SAMPLES_PPM = 1_000_000
"""Steps that are measured layer by layer, ppm: all, since a run this short has too few for one in fifty, the most by default."""


def main(folder: Path) -> int:
    """Train, price, explain; the exit status of what failed first."""
    began = dt.datetime.now(dt.UTC)
    job = f"try-{began:%Y%m%dT%H%M%SZ}"
    elsewhere = {"SEEDANCE_LAKE": folder / "lake", "SEEDANCE_TELEMETRY": folder / "telemetry"} if folder != HERE else {}
    night = [program("python"), "-m", "flows.nightly", "--settings", typed(HERE / "seedance.toml")]
    return (
        run(training(folder, job), OMP_NUM_THREADS="1", CHECKPOINTS=folder / "checkpoints")
        or run([*night, "--day", str(today())], **elsewhere)
        or explain(folder, job, began.date())
    )


def training(folder: Path, job: str) -> list[str]:
    """The command that trains: two ranks of train.py under the probe."""
    told = {"job": job, "name": "try", "spool": folder / "spool", "drop": folder / "telemetry", **MACHINE}
    words = [program("torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "seedance.run"]
    for name, value in {**told, "max-sample-ppm": SAMPLES_PPM}.items():
        words += [f"--{name}", typed(value)]
    return [*words, typed(HERE / "train.py")]


def program(name: str) -> str:
    """A program of this environment."""
    return typed(Path(sys.executable).with_name(name))


def typed(value: object) -> str:
    """A value as one types it in the root of the repository."""
    return str(value.relative_to(ROOT) if isinstance(value, Path) and value.is_relative_to(ROOT) else value)


def run(words: list[str], **variables: object) -> int:
    """Print a command and run it in the root of the repository; its exit status."""
    told = {name: typed(value) for name, value in variables.items()}
    print(" ".join(["$", *(f"{n}={shlex.quote(v)}" for n, v in told.items()), shlex.join(words)]), flush=True)
    return subprocess.run(words, cwd=ROOT, env=os.environ | told, check=False).returncode


def today() -> dt.date:
    """The UTC day of now: a run over midnight has two days, and a night looks at the day before, too."""
    return dt.datetime.now(dt.UTC).date()


def explain(folder: Path, job: str, day: dt.date) -> int:
    """What `make explain` says of the job: its categories, and its work by layer."""
    print(f"$ make explain SETTINGS={typed(HERE / 'seedance.toml')} DAY={day} JOB={job}", flush=True)
    question = Question("job", job, str(day), str(today()), most=16, depth=1)
    try:
        answer = explain_days(load(str(HERE / "seedance.toml"), lake=str(folder / "lake")), question)
    except (PipelineError, SeedanceError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    for tree in show_tree.trees(answer.shown()[0], question.ledger):
        show.console().print(tree)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE))
