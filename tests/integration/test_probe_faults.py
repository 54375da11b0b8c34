"""Whatever fails, in the model, in the probe or around it: training goes on with the same bits, and nothing is left behind."""

from __future__ import annotations

import functools
import importlib
import io
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import seedance
from seedance.probe.probe import active, attach
from tests.probe_runs import (
    Net,
    Run,
    check_clean,
    check_same,
    check_split,
    run,
    step,
    surroundings,
    totals,
)

ROOT = Path(__file__).resolve().parents[2]
X = torch.linspace(-1, 1, 32).reshape(4, 8)
FULL = 1_000_000


# --- failures of the model --------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Fails forward or backward when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        if where == "forward":
            raise ZeroDivisionError(where)
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.where == "backward":
            raise ZeroDivisionError(ctx.where)
        return grads[0], None


class Fragile(Net):
    """Fails in its first block when told to."""

    where = ""

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(block, x, use_reentrant=False)
        return Fails.apply(x, self.where)  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "interrupt"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_failure_that_is_caught_changes_nothing(tmp_path: Path, where: str, number: int) -> None:
    class Stops(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if getattr(self, "fails", False):
                raise ZeroDivisionError
            return super().step(closure)

    def train(run: Run) -> None:
        model = run.model(Fragile(dropout=0.3))
        run.attach(model)
        optimizer = Stops(model.parameters(), lr=0.1)
        for step_number in range(6):
            for attempt in range(2):
                failing = step_number == number and attempt == 0
                model.where = where if failing else ""
                optimizer.fails = failing and where == "optimizer"
                try:
                    if failing and where == "interrupt":
                        model.blocks[1].forward = _interrupt  # type: ignore[method-assign]
                    loss = run.note(model(torch.randn(4, 8)).sum())
                    loss.backward()
                    optimizer.step()
                    break
                except (ZeroDivisionError, KeyboardInterrupt):
                    model.blocks[1].__dict__.pop("forward", None)
                    optimizer.zero_grad()
            optimizer.zero_grad()
            run.losses.append(bytes([torch._C._len_torch_dispatch_stack() if number != step_number else 0]))

    check_same(train, tmp_path)
    for rate in ("sampled", "unsampled"):
        sums = check_split(tmp_path / rate)
        assert sums["units"] == 6
        # What failed trained nothing; a step that failed is not known from one that was never asked for.
        assert sums["samples"] == 4 * (7 if where == "optimizer" else 6)


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_failure_that_ends_training_leaves_nothing(tmp_path: Path) -> None:
    for number, where in enumerate(("forward", "backward")):
        model, around = Fragile(), surroundings()
        with pytest.raises(ZeroDivisionError), attach(model, spool=tmp_path / where, max_sample_ppm=FULL * number):
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
            model.where = where
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
        assert surroundings() == around
        check_clean(model)


def test_a_users_hook_that_fails_is_removed_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        probe = run.attach(model)
        if probe is not None:
            for point in ("pre_batch", "post_backward", "post_step"):
                probe.hooks.add(point, lambda _: 1 // 0, name=f"bad {point}")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            run.note(step(model, optimizer, torch.randn(4, 8)))

    made = check_same(train, tmp_path)
    assert made["default"].probes[0].hooks.failures == {
        f"bad {p}": 1 for p in ("pre_batch", "post_backward", "post_step")
    }
    assert sum("failed with ZeroDivisionError" in record.message for record in caplog.records) == 9


def test_users_hooks_may_detach_in_the_middle(tmp_path: Path) -> None:
    for point in ("pre_batch", "pre_forward", "post_forward", "post_backward", "pre_step", "post_step", "post_batch"):
        around = surroundings()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        others = [optimizers.register_optimizer_step_post_hook(lambda *_: None) for _ in range(2)]
        probe = attach(model, spool=tmp_path / point, max_sample_ppm=FULL)
        others += [optimizers.register_optimizer_step_pre_hook(lambda *_: None) for _ in range(2)]
        others += [optimizers.register_optimizer_step_post_hook(lambda *_: None) for _ in range(2)]
        step(model, optimizer, X)
        step(model, optimizer, X)
        probe.hooks.add(point, lambda _, probe=probe: probe.detach())
        for _ in range(3):
            step(model, optimizer, X)
        assert probe.failures == 0, point
        for other in others:
            other.remove()
        assert surroundings() == around, point
        check_clean(model)
        assert totals(tmp_path / point)["units"] in (1, 2, 3)


# --- failures of the probe --------------------------------------------------------------------------------------------

OURS = [
    "units.Timeline.begin_call",
    "units.Timeline.end_call",
    "units.Timeline.begin_run",
    "units.Timeline.end_run",
    "units.Timeline.begin_step",
    "units.Timeline.end_step",
    "units.Timeline.close",
    "units.Timeline.begin_region",
    "units.Timeline.may_begin",
    "units.look",
    "sampling.Draw.is_sampled",
    "units.Trace",
    "trace.Trace.start",
    "trace.Trace._call",
    "trace.Trace._note",
    "trace.Trace._hang",
    "trace.Trace._pop",
    "trace.Trace.times",
    "trace.Trace.seal",
    "counting.Counting.begin_call",
    "counting.Counting.end_backward",
    "counting.Counting.begin_step",
    "counting.Counting.end_step",
    "counting.Counting.take",
    "counting.Counting.rest",
    "counting.Counting._begin",
    "counting.Counter.quiet",
    "counting.Operation",
    "settle.op_names",
    "settle.Settler.add",
    "settle.Settler._settle",
    "settle.Settler.flush",
    "settle.Waits.add",
    "settle.Waits.take",
    "models.Models.names",
    "models.Models.whole",
    "models.Models.owns",
    "models.Models.is_compiled",
    "models.Models.check",
    "windows.Windows.add",
    "windows.Windows.rows",
    "spool.Spool.write",
    "spool.Spool.close",
    "report.Reporter.add",
    "report.Reporter.log",
    "statements.Statements.say",
    "sampling.Rate.unit",
    "sampling.Rate.sample",
    "sampling.Rate.window",
    "memory.MemoryReader.read",
    "patches.Patches.refresh",
    "session.clock_of",
    "session.Session.take",
    "session.Session._begin",
    "session.Session.due",
]
OTHERS = [
    "counter.FlopCounter.__enter__",
    "counter.FlopCounter._enter_module",
    "counter.FlopCounter._leave_module",
    "counter.FlopCounter._enter_optimizer",
    "counter.FlopCounter._where",
    "counter.FlopCounter._add",
    "counter.traffic",
]


def everything(run: Run) -> None:
    """A training that comes by all parts of the probe."""
    model = run.model(Net(dropout=0.3))
    probe = run.attach(model, step_window_ns=10**8, op_window_ns=10**8)
    if probe is not None:
        probe.hooks.add("post_step", lambda moment: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(torch.randn(24, 8), batch_size=4)  # type: ignore[arg-type]
    for number, x in enumerate(loader):
        with seedance.region("mine"):
            loss = run.note(model(x).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), io.BytesIO())
        if number % 2 and probe is not None:
            time.sleep(0.11)  # a window is over
    with torch.no_grad():
        run.note(model.eval()(X))
    seedance.result(accuracy=0.5)


def breaking(name: str, package: str, monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Let one of our functions raise at its n-th call; how often it was called."""
    module_name, *path = name.split(".")
    owner: Any = importlib.import_module(f"{package}.{module_name}")
    for part in path[:-1]:
        owner = getattr(owner, part)
    original = getattr(owner, path[-1])
    calls = [0]

    @functools.wraps(original, updated=())
    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise LookupError(f"injected into {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, path[-1], broken)
    return calls


@functools.cache
def bare(train: Callable[[Run], None]) -> dict[str, Any]:
    return run(train).result()


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("name", [*(f"probe.{n}" for n in OURS), *(f"flops.{n}" for n in OTHERS)])
def test_a_failure_of_the_probe_turns_it_off_and_nothing_else(
    tmp_path: Path, name: str, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    part, _, function = name.partition(".")
    around = surroundings()
    with monkeypatch.context() as patched:
        calls = breaking(function, f"seedance.{part}", patched, at)
        with caplog.at_level(logging.WARNING, "seedance.probe"):
            probed = run(everything, tmp_path, max_sample_ppm=0 if function.endswith("Rate.unit") else FULL)
    expected = bare(everything)
    result = probed.result()
    for key, value in expected.items():
        assert result[key] == value, key
    told = [record for record in caplog.records if record.name == "seedance.probe"]
    if calls[0] >= at:
        assert probed.probes[0].failures >= 1
        assert len(told) == 1
        assert "It is off from now on" in told[0].message
        assert f"injected into {function}" in told[0].message
    else:
        assert at > 1, f"{name} is never called"
        assert not told
    assert not probed.probes[0].is_on
    assert active() is None
    assert surroundings() == around
    for model in probed.models:
        check_clean(model)


def test_once_it_failed_all_is_put_back_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, around = Net(), surroundings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = attach(model, spool=tmp_path, max_sample_ppm=FULL)
    step(model, optimizer, X)
    with monkeypatch.context() as patched:
        breaking("units.Timeline.end_step", "seedance.probe", patched, 1)
        step(model, optimizer, X)
    assert not probe.is_on
    model(X)
    assert surroundings() == around
    check_clean(model)
    assert totals(tmp_path)["units"] == 1  # what was known is kept
    again = attach(model, spool=tmp_path / "again")
    step(model, optimizer, X)
    again.detach()
    assert again.failures == 0


def test_a_torch_that_is_not_as_expected_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, around = Net(), surroundings()
    with monkeypatch.context() as patched:
        breaking("patches.Patches.install", "seedance.probe", patched, 1)
        probe = attach(model, spool=tmp_path)
    assert not probe.is_on
    assert active() is None
    assert surroundings() == around
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
