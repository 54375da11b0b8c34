"""Processes around a probe: forks, workers of loaders, ends of all kinds, disks and drop folders that do not take rows."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from seedance.probe.probe import active, attach
from seedance.shard import read_footer
from tests.probe_runs import (
    Net,
    Run,
    check_clean,
    check_same,
    check_split,
    probing,
    rows,
    run,
    step,
    surroundings,
    totals,
)

ROOT = Path(__file__).resolve().parents[2]
X = torch.linspace(-1, 1, 32).reshape(4, 8)
FULL = 1_000_000


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked child that does this."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_not_probed_and_writes_nothing(tmp_path: Path) -> None:
    model, around = Net(), surroundings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains() -> None:
        assert surroundings() == around
        check_clean(model)
        assert active() is None
        assert not probe.is_on
        for _ in range(3):
            step(model, optimizer, X)
        probe.detach()

    with attach(model, spool=tmp_path, max_sample_ppm=FULL) as probe:
        for _ in range(2):  # in the middle of a counted unit, and of a sampled one
            model(X)
            before = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*.jsonl"))
            assert in_child(trains) == 0
            assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*.jsonl")) == before
            step(model, optimizer, X)
    assert probe.failures == 0
    assert check_split(tmp_path)["units"] == 2


def test_a_forked_child_can_have_a_probe_of_its_own(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains() -> None:
        with probing(model, tmp_path / "child", job_id="child"):
            for _ in range(3):
                step(model, optimizer, X)

    with probing(model, tmp_path / "parent"):
        step(model, optimizer, X)
        assert in_child(trains) == 0
        step(model, optimizer, X)
    assert totals(tmp_path / "child")["units"] == 3
    assert totals(tmp_path / "parent")["units"] == 2


def test_workers_of_a_loader_are_not_probed(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        run.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            loader = DataLoader(torch.randn(32, 8), batch_size=4, num_workers=2)  # type: ignore[arg-type]
            for _ in range(2):
                for x in loader:
                    run.note(step(model, optimizer, x))

    check_same(train, tmp_path, {"sampled": FULL})
    assert check_split(tmp_path / "sampled")["units"] == 16
    assert totals(tmp_path / "sampled")["input_stall_ns"] > 0


def test_other_threads_pass_through(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop, failed = threading.Event(), []

    def serve() -> None:
        try:
            own = torch.optim.SGD(other.parameters(), lr=0.1)
            while not stop.is_set():
                step(other, own, X)
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    thread = threading.Thread(target=serve)
    with probing(model, tmp_path):
        step(model, optimizer, X)
        thread.start()
        for _ in range(20):
            step(model, optimizer, X)
        stop.set()
        thread.join()
    assert not failed
    assert check_split(tmp_path)["units"] == 21


def test_calls_of_several_threads_are_units_or_said_to_be_lost(tmp_path: Path) -> None:
    """There is one time line: a call within another thread's call has no place on it."""
    inside, outside = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is slow:
                inside.set()
                outside.wait(60)
            return x + 1

    def call(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                model(X)

    model, slow = Waits().eval(), threading.Thread(target=lambda: call(1))
    with probing(model, tmp_path):
        call(3)
        slow.start()
        assert inside.wait(60)
        call(5)
        outside.set()
        slow.join()
        call(2)
    sums = check_split(tmp_path)
    assert (sums["units"], sums["dropped_units"]) == (3 + 1 + 2, 5)


@pytest.mark.parametrize("trouble", ["no folder", "no permission", "full"])
def test_a_spool_that_takes_nothing_costs_rows_and_never_a_step(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        run.attach(model, step_window_ns=10**8, op_window_ns=10**8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            run.note(step(model, optimizer, torch.randn(4, 8)))

    expected = run(train).result()
    given: dict[str, Any] = {}
    spool = tmp_path / "spool"
    if trouble == "no folder":
        spool.write_text("a file, not a folder")
    elif trouble == "no permission":
        spool = Path("/proc/seedance-spool")
    else:
        given["spool_limit_bytes"] = 10
    made = run(train, spool, **given)
    assert made.result() == expected
    assert made.probes[0].failures == 0
    assert sum("Rows of telemetry are dropped" in record.message for record in caplog.records) == 1


SCRIPT = """
    import os, signal, sys, torch, seedance
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seedance.attach(model, job_id="job", spool={spool!r}, drop={drop!r}, upload_timeout_s=60)
    for _ in range(5):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    {end}
"""


def script(spool: Path, end: str, drop: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script that trains and ends without detaching."""
    text = textwrap.dedent(SCRIPT).format(spool=str(spool), drop=None if drop is None else str(drop), end=end)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environ, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("pass", 0, "finished"),
        ("sys.exit(3)", 3, "finished"),
        ("raise ZeroDivisionError", 1, "error: ZeroDivisionError"),
        ("os._exit(4)", 4, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
    ],
)
def test_a_process_that_ends_says_so_where_it_can(tmp_path: Path, end: str, status: int, reason: str | None) -> None:
    done = script(tmp_path, end)
    assert done.returncode == status, done.stderr
    said = rows(tmp_path, "jobs")
    assert [row["statement"] for row in said] == (["started", "ended"] if reason else ["started"])
    assert said[-1]["exit_reason"] == reason
    if reason:
        assert totals(tmp_path)["units"] == 5
        assert list((tmp_path / "closed").iterdir())


def test_at_the_end_a_child_sends_the_rows(tmp_path: Path) -> None:
    drop = tmp_path / "drop"
    done = script(tmp_path / "spool", "assert 'pyarrow' not in sys.modules", drop)
    assert done.returncode == 0, done.stderr
    shards = sorted(drop.rglob("*.parquet"))
    assert [path.relative_to(drop).parts[0] for path in shards] == [
        "raw_telemetry__jobs",
        "raw_telemetry__op_windows",
        "raw_telemetry__step_windows",
    ]
    assert sum(read_footer(path.read_bytes()).rows for path in shards) > 5
    assert not list((tmp_path / "spool" / "closed").iterdir())


def test_a_drop_folder_that_takes_nothing_is_told_and_the_rows_wait(tmp_path: Path) -> None:
    (tmp_path / "drop").write_text("a file, not a folder")
    done = script(tmp_path / "spool", "pass", tmp_path / "drop" / "below")
    assert done.returncode == 0, done.stderr
    assert "probe: the upload of" in done.stderr
    assert list((tmp_path / "spool" / "batches").iterdir())


def test_a_drop_folder_that_is_slow_is_not_waited_for_longer_than_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seedance.probe.settings import from_environment
    from seedance.probe.uploads import Uploads

    slow = tmp_path / "slow"
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(3)\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    uploads = Uploads(from_environment(spool=tmp_path, drop=str(tmp_path / "drop"), upload_timeout_s=0))
    with caplog.at_level(logging.WARNING):
        uploads.start_last()
        uploads.finish()
    assert "takes longer than 0 s" in caplog.text
    assert "ended with status" not in caplog.text
