"""Programs run in a fresh environment that has the built wheel: by Python alone, and with the probe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def environment(folder: Path) -> Path:
    """The Python of a fresh environment with the wheel installed; all else it finds in this one."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=240)
    python = folder / "env/bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=240)
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    here = next(p for p in sys.path if p.endswith("site-packages"))
    Path(site.strip(), "others.pth").write_text(f"{here}\n")
    return python


class Runs:
    """Runs programs in a folder, with the spool beside it."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder, self.spool = python, folder / "program", folder / "spool"
        self.always: dict[str, str] = {}
        """Variables of every run."""
        self.folder.mkdir()

    def write(self, name: str, text: str) -> Path:
        """A file of the program."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def __call__(self, *words: str, status: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """What the fresh Python makes of these words."""
        done = subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env=self.environ(variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        if status is not None:
            assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def environ(self, variables: Mapping[str, str]) -> dict[str, str]:
        """This process's variables without what leads Python elsewhere."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "SEEDANCE_"))}
        return {**kept, "OMP_NUM_THREADS": "1", "SEEDANCE_SPOOL": str(self.spool), **self.always, **variables}

    def same(self, *words: str, status: int = 0, **variables: str) -> str:
        """Output of a program that is the same with `-m seedance.run` and without; and what Python alone says of it."""
        bare, ours = (
            self(*words, status=status, **variables),
            self("-m", "seedance.run", *words, status=status, **variables),
        )
        assert ours.stdout == bare.stdout
        assert ours.stderr == bare.stderr
        return bare.stdout + bare.stderr

    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        """What is in the spool: table and row each."""
        lines = [line for file in sorted(self.spool.rglob("*.jsonl")) for line in file.read_text().splitlines()]
        return [(item[0], item[1]) for item in map(json.loads, lines) if isinstance(item, list)]

    def of(self, table: str) -> list[dict[str, Any]]:
        """Rows of one table."""
        return [row for name, row in self.rows() if name == f"raw_telemetry__{table}"]
