"""The requirement files pin every package by version, run and dev by hash too, and name no place to fetch it from."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = ("run.txt", "dev.txt")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(file: str) -> dict[str, set[str]]:
    """Versions by package; more than one where they differ by Python version."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines():
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", line)
        if match:
            found.setdefault(match[1].lower(), set()).add(match[2])
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_package_is_pinned_and_hashed(file: str) -> None:
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"(?m)^\s*#.*\n?", "", text).strip())
    assert len(entries) > 50
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+(\[[^]]*\])?==\S+", entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


@pytest.mark.parametrize("file", (*FILES, "torch.txt"))
def test_no_address_is_named(file: str) -> None:
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"(?m)^\s*(-i|-f|--index-url|--extra-index-url|--find-links|-e)\b", text)
    assert not re.search(r"(?m)(^|\s)/\w+/", text), "a path of some machine"


def test_what_the_project_asks_for_is_what_is_pinned() -> None:
    groups = PROJECT["dependency-groups"]
    run = [*PROJECT["project"]["dependencies"], *groups["run"]]
    dev = [*run, *(r for r in groups["dev"] if isinstance(r, str))]
    for file, asked in (("run.txt", run), ("dev.txt", dev)):
        found = pins(file)
        for requirement in map(Requirement, asked):
            assert requirement.name in found, f"{requirement.name} is missing in {file}: run `make lock`"
            for version in found[requirement.name]:
                assert requirement.specifier.contains(version), f"{requirement} in {file} is {version}: run `make lock`"


def test_dev_holds_run_to_the_same_versions() -> None:
    run, dev = pins("run.txt"), pins("dev.txt")
    assert {name: dev.get(name) for name in run} == run


def torch_pins() -> dict[str, str]:
    """Version by package of torch.txt."""
    text = (ROOT / "requirements" / "torch.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines) and list(found) == sorted(map(canonicalize_name, found))
    return found


def test_torch_stands_beside_dev() -> None:
    """By version alone, so that pip may take the build that fits the machine; and nothing is pinned twice."""
    assert not torch_pins().keys() & pins("dev.txt").keys()
    for name, version in torch_pins().items():
        assert Version(importlib.metadata.version(name)).public == version, f"{name}: run `make dev`"


def test_torch_brings_nothing_unpinned() -> None:
    """All that its packages ask for is in torch.txt or dev.txt, but for the parts of CUDA that torch pins itself."""
    known = torch_pins().keys() | pins("dev.txt").keys()
    for name in torch_pins():
        for asked in map(Requirement, importlib.metadata.requires(name) or []):
            wanted = asked.marker is None or asked.marker.evaluate({"extra": ""})
            part_of_torch = name == "torch" and re.match(r"nvidia-|cuda-|triton$", asked.name)
            assert not wanted or part_of_torch or canonicalize_name(asked.name) in known, f"{name} asks for {asked}"


def test_what_dev_pins_stays_when_torch_comes() -> None:
    for name, versions in pins("dev.txt").items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another Python or system
        assert installed in versions, f"{name} is {installed}, dev.txt has {versions}: run `make dev`"


def test_extras_fit_what_is_tested() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for extra in ("torch", "hf", "lightning"):
        for requirement in map(Requirement, extras[extra]):
            assert requirement.specifier.contains(torch_pins()[requirement.name])


def test_s3fs_is_not_the_one_of_2020() -> None:
    """An unbounded s3fs beside boto3 resolves without an error to 0.4.2, which has no aiobotocore."""
    assert all(Version(v) >= Version("2026.9.0") for file in FILES for v in pins(file)["s3fs"])
    assert Version(importlib.metadata.version("s3fs")) >= Version("2026.9.0")


def test_the_wheel_asks_for_little() -> None:
    names = {Requirement(r).name for r in PROJECT["project"]["dependencies"]}
    assert names == {"fsspec", "pyarrow"}
