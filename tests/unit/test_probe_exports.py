"""What `seedance` gives: its names are there, and importing it brings nothing that they need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import seedance


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_is_light() -> None:
    loaded = "[m for m in sys.modules if m.startswith(('seedance', 'torch', 'pyarrow'))]"
    assert python(f"import sys, seedance; dir(seedance); print({loaded})") == "['seedance']"


def test_its_names_are_those_of_the_probe() -> None:
    from seedance.probe import hooks, probe

    assert seedance.HookManager is hooks.HookManager
    assert (seedance.attach, seedance.detach) == (probe.attach, probe.detach)
    assert (seedance.region, seedance.result) == (probe.region, probe.result)
    assert set(seedance.__all__) <= set(dir(seedance))
    with pytest.raises(AttributeError, match="module 'seedance' has no attribute 'atach'"):
        _ = seedance.atach  # type: ignore[attr-defined]


def test_its_modules_are_found_beside_its_names() -> None:
    assert python("from seedance import catalogue, HookManager; print(catalogue.__name__)") == "seedance.catalogue"


def test_the_version_is_a_literal_that_the_build_can_read() -> None:
    tree = ast.parse(Path(seedance.__file__).read_text(encoding="utf-8"))
    found = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert found == [seedance.__version__]


def test_a_setting_can_have_the_name_of_an_argument() -> None:
    """`model` is both the module and its name in reports."""
    assert (
        python(
            "import torch, seedance\n"
            "model = torch.nn.Linear(1, 1)\n"
            "with seedance.attach(model, model='gpt', enabled=True, max_sample_ppm=0) as probe:\n"
            "    print(probe.settings.model)"
        )
        == "gpt"
    )
