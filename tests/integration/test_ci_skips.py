"""Under CI=true a skipped test fails, unless it waits for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

TESTS = """
import pytest

def test_skips():
    pytest.skip("no reason at all")

@pytest.mark.skipif(True, reason="never here")
def test_marked():
    pass

@pytest.mark.gpu
def test_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False

def test_passes():
    pass
"""


def outcome(tmp_path: Path, ci: str, tests: str = TESTS) -> tuple[int, str]:
    (tmp_path / "test_some.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_skips_fail_under_ci(tmp_path: Path) -> None:
    status, said = outcome(tmp_path, "true")
    assert status == 1
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in said  # skipif acts before the test, so it is an error
    assert "skipped under CI=true: only a missing GPU may skip a test there" in said
    assert "no reason at all" in said
    assert "never here" in said


def test_skips_stand_elsewhere(tmp_path: Path) -> None:
    status, said = outcome(tmp_path, "")
    assert status == 0
    assert "1 passed, 3 skipped, 1 xfailed" in said


@pytest.mark.parametrize(("ci", "status"), [("true", 2), ("", 5)])
def test_a_module_that_skips_itself(tmp_path: Path, ci: str, status: int) -> None:
    tests = 'import pytest\npytest.skip("not this module", allow_module_level=True)\n'
    found, said = outcome(tmp_path, ci, tests)
    assert found == status
    assert "not this module" in said
