"""The wheel: `seedance` and what activates it, nothing else; it works in an empty environment away from the checkout."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from seedance import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = ("torch", "hf", "lightning")
MODULES = [
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for p in sorted((ROOT / "seedance").rglob("*.py"))
]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Output of a command that must succeed, without this process's import paths."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))} | variables
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


def requirements(wheel: Path, *extras: str) -> list[Requirement]:
    """What the wheel asks for, with the extras named alone."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    return asked(metadata.get_all("Requires-Dist", []), *extras)


def asked(lines: list[str], *extras: str) -> list[Requirement]:
    """Those of a distribution's requirements that hold here."""
    found = map(Requirement, lines)
    return [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))]


def environment(wheel: Path, folder: Path, *extras: str) -> Path:
    """An environment with the wheel and what it asks for: linked from this one, so that no network is needed."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    todo, seen = requirements(wheel, *extras), set[str]()
    for requirement in todo:
        dist = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(dist.version), f"{requirement}: {dist.version} is installed"
        wanted = {requirement.name.lower(), *(f"{requirement.name.lower()}[{e}]" for e in requirement.extras)}
        if wanted <= seen:
            continue
        seen |= wanted
        for top in {Path(str(f)).parts[0] for f in dist.files or [] if ".." not in Path(str(f)).parts}:
            if not (site / top).is_symlink():
                (site / top).symlink_to(Path(str(dist.locate_file(top))))
        if extras:  # what those ask for in turn: pyarrow and fsspec need nothing
            todo += asked(dist.requires or [], *requirement.extras)
    return folder


@pytest.fixture(scope="module")
def away(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it cannot do without."""
    return environment(wheel, tmp_path_factory.mktemp("away"))


def test_only_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"seedance", "seedance.pth"}
    assert {"seedance/data/gpus.csv", "seedance/data/gpu_instances.csv", "seedance/py.typed"} <= set(names)
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    packaged = {n for n in names if n.startswith("seedance/") and n.endswith(".py")}
    assert packaged == {str(p.relative_to(ROOT)) for p in (ROOT / "seedance").rglob("*.py")}


def test_it_asks_for_pyarrow_and_fsspec_alone(wheel: Path) -> None:
    assert {r.name for r in requirements(wheel)} == {"pyarrow", "fsspec"}


NEEDED = """
import importlib, json
needed = {}
for name in %r:
    try:
        assert importlib.import_module(name).__file__.startswith(%r)
    except ModuleNotFoundError as error:
        needed[name] = error.name.split(".")[0]
print(json.dumps(needed))
"""


def import_all(folder: Path, *options: str) -> dict[str, str]:
    """Import every module of the wheel; the package that each lacks which cannot be imported."""
    code = NEEDED % (MODULES, str(folder))
    return dict(json.loads(run(folder / "env/bin/python", *options, "-c", code, cwd=folder).splitlines()[-1]))


def test_every_module_imports_away_from_the_checkout(away: Path) -> None:
    """But for those of the probe that are of no use where there is no torch."""
    needed = import_all(away, "-W", "error")
    assert set(needed.values()) <= {"torch", "transformers", "lightning"}
    assert all(module.startswith(("seedance.flops.", "seedance.probe.")) for module in needed)


def test_the_probe_imports_beside_torch_and_its_kin(wheel: Path, tmp_path: Path) -> None:
    """The extras bring what every module needs."""
    try:
        importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no torch to link: run `make dev`")
    assert import_all(environment(wheel, tmp_path, *EXTRAS)) == {}


def test_the_path_file_loads_nothing_unless_asked(wheel: Path, away: Path) -> None:
    """`seedance.pth` runs whenever Python starts there: it must cost nothing, and never stop a program."""
    with zipfile.ZipFile(wheel) as archive:
        (line,) = archive.read("seedance.pth").decode().splitlines()
    assert line.startswith("import ") and "SEEDANCE_DIAGNOSTIC" in line
    code = "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('seedance', 'torch', 'pyarrow')))"
    python = away / "env/bin/python"
    assert run(python, "-c", code, cwd=away) == "[]\n"
    found = run(python, "-c", code, cwd=away, SEEDANCE_DIAGNOSTIC="1", SEEDANCE_SPOOL=str(away / "spool"))
    assert "'seedance.auto'" in found
    assert "torch" not in found and "pyarrow" not in found


def test_its_data_is_there(away: Path) -> None:
    code = "from seedance import catalogue as c; print(c.gpu_count('aws', 'p4d.24xlarge'), c.peak_flops('Tesla T4', 'fp16'))"
    assert run(away / "env/bin/python", "-c", code, cwd=away) == f"8 {65 * 10**12}\n"


def test_the_command_runs(away: Path) -> None:
    command = away / "env/bin/seedance"
    assert run(command, "--help", cwd=away).startswith("usage: seedance ")
    assert run(command, "version", cwd=away) == f"seedance {__version__}\n"
    assert "raw_telemetry__op_windows" in run(command, "tables", cwd=away)
