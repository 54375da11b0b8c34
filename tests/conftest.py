"""What every test starts from: a quiet Prefect, no settings of the shell, and no silent skip where CI runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("untimed", deadline=None)  # timings are never asserted
hypothesis.settings.load_profile("untimed")

# Prefect reads these once, when it is first imported.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_HOME", str(ROOT / ".prefect"))

# Two workers share two cores, and torch's pool of threads would fight for them; also read once. Models are made, never fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NO_SKIP = (
    "skipped under CI=true: only a missing GPU may skip a test there (mark it gpu, or bring what it needs). Reason: "
)


def in_ci() -> bool:
    """True where continuous integration runs."""
    return os.environ.get("CI", "").lower() == "true"


@pytest.fixture(autouse=True)
def _own_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the shell that started pytest never reach a test."""
    for name in list(os.environ):
        if name.startswith("SEEDANCE_") and name != "SEEDANCE_REAL_DATA":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def prefect_harness() -> Iterator[None]:
    """One temporary Prefect server for all flow tests of this process; starting it costs about 20 s."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


class _ByFile(LoadScopeScheduling):
    """A file's tests go to one worker, and so do all files that need the Prefect server: one server, not one a worker."""

    # pytest-xdist's own way to say this, xdist_group, has no effect from pytest 9.2 on: node ids are read-only there.
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "prefect" if _needs_prefect(file) else file


@cache
def _needs_prefect(file: str) -> bool:
    path = ROOT / file
    return path.is_file() and "prefect_harness" in path.read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Spread files over workers, under `--dist loadfile`."""
    return _ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under CI=true a skip is a failure, unless the test waits for a GPU."""
    report = yield
    if report.skipped and in_ci() and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself as a whole."""
    report = yield
    if report.skipped and in_ci():
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = NO_SKIP + reason


@pytest.fixture(autouse=True)
def nothing_is_compiled(request: pytest.FixtureRequest) -> None:
    """Tests of the probe begin as in a process of their own: where anything was compiled, no unit is sampled."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and request.path.name.startswith("test_probe"):
        dynamo.reset()
