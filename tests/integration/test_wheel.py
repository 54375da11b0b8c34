"""The wheel: `seedance` and nothing else, and it works in an empty environment away from the checkout."""

from __future__ import annotations

import email
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from seedance import __version__

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed, without this process's import paths."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.whl")
    return found


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel asks for, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    asked = [Requirement(r) for r in metadata.get_all("Requires-Dist", [])]
    return [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def away(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it asks for: linked from this one, so that no network is needed."""
    folder = tmp_path_factory.mktemp("away")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    for requirement in requirements(wheel):
        dist = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(dist.version)
        for top in {Path(str(f)).parts[0] for f in dist.files or [] if ".." not in Path(str(f)).parts}:
            (site / top).symlink_to(Path(str(dist.locate_file(top))))
    return folder


def test_only_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"seedance"}
    assert {"seedance/data/gpus.csv", "seedance/data/gpu_instances.csv", "seedance/py.typed"} <= set(names)
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    packaged = {n for n in names if n.startswith("seedance/") and n.endswith(".py")}
    assert packaged == {str(p.relative_to(ROOT)) for p in (ROOT / "seedance").rglob("*.py")}


def test_it_asks_for_pyarrow_and_fsspec_alone(wheel: Path) -> None:
    assert {r.name for r in requirements(wheel)} == {"pyarrow", "fsspec"}


def test_every_module_imports_away_from_the_checkout(away: Path) -> None:
    modules = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in sorted((ROOT / "seedance").rglob("*.py"))
    ]
    code = f"import importlib; print([importlib.import_module(m).__file__ for m in {modules}][0])"
    found = Path(run(away / "env/bin/python", "-W", "error", "-c", code, cwd=away).strip())
    assert found.is_relative_to(away)


def test_its_data_is_there(away: Path) -> None:
    code = "from seedance import catalogue as c; print(c.gpu_count('aws', 'p4d.24xlarge'), c.peak_flops('Tesla T4', 'fp16'))"
    assert run(away / "env/bin/python", "-c", code, cwd=away) == f"8 {65 * 10**12}\n"


def test_the_command_runs(away: Path) -> None:
    command = away / "env/bin/seedance"
    assert run(command, "--help", cwd=away).startswith("usage: seedance ")
    assert run(command, "version", cwd=away) == f"seedance {__version__}\n"
    assert "raw_telemetry__op_windows" in run(command, "tables", cwd=away)
