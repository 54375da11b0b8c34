"""Compiled models, compiled before and after attaching: the same bits, no graph break, no recompilation, no hook inside."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.modules import module as module_hooks

import seedance
from tests.probe_runs import Block, Net, Run, check_clean, check_same, probing, rows, run, step, surroundings, totals

X = torch.linspace(-1, 1, 32).reshape(4, 8)
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No compiled code from another test; what the compiler warns of is its own."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
    torch._dynamo.reset()


def trained(run: Run, called: Callable[..., torch.Tensor], model: nn.Module, *, steps: int = 4) -> None:
    """Train by whatever is called."""
    run.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = run.note(called(torch.randn(4, 8)).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def compiles() -> int:
    """Graphs that were compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def counted(train: Callable[[Run], None]) -> Callable[[Run], None]:
    """The same training from a fresh compiler, which notes how many graphs it made."""

    def fresh(run: Run) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        train(run)
        run.losses.append(str(compiles()).encode())

    return fresh


def attach_after_compile(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    run.attach(compiled)  # type: ignore[arg-type]
    trained(run, compiled, model)


def attach_the_inner_model_after_compile(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    run.attach(model)
    trained(run, compiled, model)


def attach_before_compile(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    run.attach(model)
    trained(run, torch.compile(model, backend=backend, fullgraph=True), model)


def compile_in_place_before(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    model.compile(backend=backend, fullgraph=True)
    run.attach(model)
    trained(run, model, model)


def compile_in_place_after(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    run.attach(model)
    model.compile(backend=backend, fullgraph=True)
    trained(run, model, model)


def compile_in_place_while_it_trains(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    run.attach(model)
    trained(run, model, model, steps=3)
    model.compile(backend=backend, fullgraph=True)
    trained(run, model, model, steps=3)


def compile_parts(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend=backend, fullgraph=True)
    run.attach(model)
    trained(run, model, model)


def compile_parts_in_place(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    run.attach(model)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    trained(run, model, model)


def compile_what_holds_the_model(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    run.attach(model)
    trained(run, torch.compile(nn.Sequential(model, nn.Tanh()), backend=backend, fullgraph=True), model)


def compile_a_function_that_calls_the_model(run: Run, backend: str) -> None:
    model = Net(dropout=0.3)
    run.attach(model)

    @torch.compile(backend=backend, fullgraph=True)
    def called(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2  # type: ignore[no-any-return]

    trained(run, called, model)


def compile_a_function_that_the_model_calls(run: Run, backend: str) -> None:
    class Calls(Net):
        def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return torch.compile(torch.sin, backend=backend, fullgraph=True)(block(x))  # type: ignore[no-any-return]

    model = Calls(dropout=0.3)
    run.attach(model)
    trained(run, model, model)


TRAININGS = [
    attach_after_compile,
    attach_the_inner_model_after_compile,
    attach_before_compile,
    compile_in_place_before,
    compile_in_place_after,
    compile_in_place_while_it_trains,
    compile_parts,
    compile_parts_in_place,
    compile_what_holds_the_model,
    compile_a_function_that_calls_the_model,
    compile_a_function_that_the_model_calls,
]


@pytest.mark.parametrize(
    ("train", "backend"),
    [
        *((train, backend) for train in TRAININGS for backend in BACKENDS),
        *((train, "inductor") for train in (attach_before_compile, compile_in_place_before)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_compiled_training_gives_the_same_bits_from_as_many_graphs(
    tmp_path: Path, train: Callable[[Run, str], None], backend: str
) -> None:
    check_same(counted(lambda run: train(run, backend)), tmp_path, {"sampled": 1_000_000, "unsampled": 0})
    for rate in ("sampled", "unsampled"):
        sums = totals(tmp_path / rate)
        expected = 6 if train is compile_in_place_while_it_trains else 4
        assert sums["units"] + sums["dropped_units"] == expected
        assert sums["units"] >= expected - 1


def test_compiled_units_are_counted_on_a_copy_and_never_sampled(tmp_path: Path) -> None:
    found = {}
    for name in ("eager", "compiled"):
        torch._dynamo.reset()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with probing(model, tmp_path / name):
            called = torch.compile(model, backend="eager") if name == "compiled" else model
            for _ in range(3):
                step(called, optimizer, X)  # type: ignore[arg-type]
        ops = rows(tmp_path / name, "op_windows")
        found[name] = sorted(
            (row["layer"], row["pass"], row["op"], row["dtype"], row["calls"], row["flops"], row["hw_flops"])
            for row in _added(ops)
            if row["flops"]
        )
    assert found["compiled"] == found["eager"]
    assert totals(tmp_path / "compiled")["sampled_units"] == 0
    assert totals(tmp_path / "eager")["sampled_units"] == 2


def _added(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Op rows with their windows added up."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in ops:
        key = (row["layer"], row["pass"], row["op"], row["dtype"])
        held = sums.setdefault(key, {**row, "calls": 0, "flops": 0, "hw_flops": 0})
        for name in ("calls", "flops", "hw_flops"):
            held[name] += row[name]
    return list(sums.values())


def test_what_is_compiled_during_a_counted_or_sampled_call_is_compiled_as_before(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Late(Net):
        compiles = False

        def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if self.compiles:
                called = torch.compile(block, backend="eager", fullgraph=True)
                if type(x) is torch.Tensor:  # else it is the copy without data that is counted
                    seen.append((torch._C._len_torch_dispatch_stack(), len(module_hooks._global_forward_hooks)))
                return called(x)  # type: ignore[no-any-return]
            return block(x)  # type: ignore[no-any-return]

    for counted_first in (True, False):
        torch._dynamo.reset()
        seen.clear()
        model = Late()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with probing(model, tmp_path / str(counted_first)):
            if not counted_first:
                step(model, optimizer, X)
            model.compiles = True
            for _ in range(3):
                step(model, optimizer, X)
        assert seen == [(0, 0)] * 6
        assert totals(tmp_path / str(counted_first))["sampled_units"] == 0


def test_a_probe_of_a_compiled_model_leaves_it_as_it_was(tmp_path: Path) -> None:
    model = Net()
    model.compile(backend="eager")
    held = model.__dict__["_compiled_call_impl"]
    around = surroundings()
    with probing(model, tmp_path):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
    assert model.__dict__["_compiled_call_impl"] is held
    assert surroundings() == around
    check_clean(model)


def test_a_model_compiled_in_place_meanwhile_stays_compiled_after_detaching(tmp_path: Path) -> None:
    model = Net()
    with probing(model, tmp_path):
        model.compile(backend="eager")
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
    made = compiles()
    assert made > 0
    assert model.__dict__["_compiled_call_impl"].__module__.startswith("torch.")
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)
    assert compiles() == made


def test_an_exported_and_a_traced_model_are_what_they_would_be(tmp_path: Path) -> None:
    model = Net().eval()
    expected = torch.export.export(model, (X,)).graph_module.code
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        code = torch.jit.trace(model, X).code  # type: ignore[no-untyped-call]
        with probing(model, tmp_path):
            assert torch.export.export(model, (X,)).graph_module.code == expected
            assert torch.jit.trace(model, X).code == code  # type: ignore[no-untyped-call]
            scripted = torch.jit.script(Block().eval())
    with seedance.attach(scripted, spool=tmp_path / "scripted") as probe:
        scripted(X)
    assert probe.failures == 0
    assert totals(tmp_path / "scripted")["units"] == 1
    assert run(lambda one: one.attach(scripted) and None).result() is not None
