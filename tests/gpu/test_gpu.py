"""The checks of `record.sh` as tests; and what `record.sh` does where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import checks

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in checks.CHECKS if name != "overhead"])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    try:
        checks.CHECKS[name]("cuda", tmp_path)
    except checks.NotHere as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", ["flops", "identity", "shards"])
def test_what_needs_no_gpu_is_tried_without_one(name: str, tmp_path: Path) -> None:
    assert checks.CHECKS[name]("cpu", tmp_path)
    assert (tmp_path / "shards.tar.gz").exists() == (name == "shards")


@pytest.mark.parametrize("name", ["graphs", "energy"])
def test_what_needs_a_gpu_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(checks.NotHere, match="GPU"):
        checks.CHECKS[name]("cpu", tmp_path)


def test_the_script_skips_in_one_line(tmp_path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "tests/gpu/record.sh"), str(tmp_path / "out")],
        cwd=tmp_path,
        env=hidden,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: no NVIDIA GPU that torch can use (torch ")
    assert done.stdout.count("\n") == 1 and not (tmp_path / "out").exists()
