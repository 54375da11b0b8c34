"""A training gives the same bits with a probe and without, whatever it is like, and its units are what its steps are."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.probe_runs import Block, Net, Run, check_same, probing, rows, step, totals

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def loop(run: Run, model: nn.Module, *, steps: int = 5, optimizer: Any = torch.optim.AdamW) -> None:
    """Train a model by the usual loop."""
    run.model(model)
    run.attach(model)
    made = optimizer(model.parameters(), lr=1e-2)
    for _ in range(steps):
        run.note(step(model, made, torch.randn(4, 8)))


def test_only_a_thread_that_ran_before_may_draw_from_pythons_generator(tmp_path: Path) -> None:
    turn, drawn, is_over = threading.Event(), threading.Event(), threading.Event()

    def keepalive() -> None:
        bits = 0
        while turn.wait() and not is_over.is_set():
            turn.clear()
            bits += 32
            random.getrandbits(bits)  # more from turn to turn, so that no two trainings have the same beside them
            drawn.set()

    def beside(run: Run) -> None:
        loop(run, Net())
        turn.set()
        assert drawn.wait(60)
        drawn.clear()

    def draws(run: Run) -> None:
        if run.spool is not None:
            random.getrandbits(32)

    def draws_in_a_thread(run: Run) -> None:
        thread = threading.Thread(target=draws, args=(run,))
        thread.start()
        thread.join()

    other = threading.Thread(target=keepalive)
    other.start()
    try:
        check_same(beside, tmp_path / "beside")
        for train in (draws, draws_in_a_thread):
            with pytest.raises(AssertionError, match="python differ"):
                check_same(train, tmp_path / train.__name__)
    finally:
        is_over.set()
        turn.set()
        other.join()
    with pytest.raises(AssertionError, match="not reproducible"):
        check_same(lambda _: random.seed(), tmp_path / "seed")


def test_a_training_with_dropout_gives_the_same_bits(tmp_path: Path) -> None:
    check_same(lambda run: loop(run, Net(dropout=0.5)), tmp_path)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_training_gives_the_same_bits(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Net):
        def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def train(run: Run) -> None:
        model = run.model(Checkpointed(dropout=0.5))
        run.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            run.note(step(model, optimizer, torch.randn(4, 8, requires_grad=True)))

    check_same(train, tmp_path)


def test_reused_shared_and_lazy_modules_give_the_same_bits(tmp_path: Path) -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.lazy = Block(), nn.LazyLinear(8)
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.block.up.weight
            self.same = self.block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.block(x)
            return self.tied(self.lazy(self.same(x)))  # type: ignore[no-any-return]

    def train(run: Run) -> None:
        model = Reused()
        model.lazy(torch.zeros(1, 8))
        loop(run, model)

    check_same(train, tmp_path)


def test_modules_that_yield_give_the_same_bits(tmp_path: Path) -> None:
    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for part in self.parts:
                x = part(x)
                yield x

    def train(run: Run) -> None:
        model = run.model(Yields())
        run.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(6):
            results = model(torch.randn(4, 8))
            loss = (
                next(results) if number % 2 else sum(results)
            )  # a generator that is not run to its end, and one that is
            run.note(loss.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_same(train, tmp_path)


def test_gradient_accumulation_gives_the_same_bits_and_one_unit_a_step(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = run.model(Net(dropout=0.1))
        run.attach(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            for _ in range(3):
                run.note(model(torch.randn(4, 8)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_same(train, tmp_path)
    for rate in ("sampled", "unsampled"):
        sums = totals(tmp_path / rate)
        assert sums["units"] == 4
        assert sums["samples"] == 4 * 3 * 4


def test_scaled_steps_that_are_skipped_give_the_same_bits(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        run.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        for number in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = run.note(model(torch.randn(4, 8)).float().square().mean())
            scaler.scale(loss * (float("inf") if number in (1, 4) else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    check_same(train, tmp_path)
    assert totals(tmp_path / "unsampled")["units"] == 6  # a step that was skipped is a unit


def test_inference_gives_the_same_bits_and_a_unit_a_call(tmp_path: Path) -> None:
    def serve(run: Run) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = run.model(nn.TransformerEncoder(layer, 2)).eval()
        run.attach(model)
        with torch.inference_mode():
            for _ in range(4):
                run.note(model(torch.randn(2, 5, 8)).clone())
        with torch.no_grad():
            run.note(model(torch.randn(2, 5, 8)))

    check_same(serve, tmp_path)
    for rate in ("sampled", "unsampled"):
        assert [row["phase"] for row in rows(tmp_path / rate, "step_windows")] == ["eval"]
        assert totals(tmp_path / rate)["units"] == 5


def test_an_optimizer_that_calls_the_model_gives_the_same_bits(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        run.attach(model)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            return run.note(loss)

        for _ in range(3):
            optimizer.step(closure)

    check_same(train, tmp_path)
    for rate in ("sampled", "unsampled"):
        assert totals(tmp_path / rate)["units"] == 3


def test_steps_inside_the_backward_pass_give_the_same_bits(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        run.attach(model)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for parameter in model.parameters():

            def apply(p: torch.Tensor) -> None:
                optimizers[p].step()  # type: ignore[index]
                optimizers[p].zero_grad()  # type: ignore[index]

            run.handles.append(parameter.register_post_accumulate_grad_hook(apply))  # type: ignore[attr-defined]
        for _ in range(4):
            run.note(model(torch.randn(4, 8)).sum()).backward()
        for handle in run.handles:  # type: ignore[attr-defined]
            handle.remove()

    Run.handles = []  # type: ignore[attr-defined]
    try:
        check_same(train, tmp_path)
    finally:
        del Run.handles  # type: ignore[attr-defined]
    for rate in ("sampled", "unsampled"):
        assert totals(tmp_path / rate)["units"] == 4


def test_two_models_that_train_each_other_give_the_same_bits(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        maker, judge = run.model(Net()), run.model(nn.Sequential(Block(), nn.Linear(8, 1)))
        maker.head = nn.Linear(8, 8)
        run.attach(maker)
        run.attach(judge)
        making = torch.optim.Adam(maker.parameters())
        judging = torch.optim.Adam(judge.parameters())
        for _ in range(4):
            judging.zero_grad()
            made = maker(torch.randn(4, 8))
            run.note(judge(torch.randn(4, 8)).mean() - judge(made.detach()).mean()).backward()
            judging.step()
            making.zero_grad()
            run.note(judge(made).mean()).backward()
            making.step()

    made = check_same(train, tmp_path)
    assert totals(tmp_path / "unsampled")["units"] == 8
    layers = {row["layer"] for row in rows(tmp_path / "unsampled", "op_windows")}
    assert {"Net.blocks.0.up", "Sequential.0.down"} <= layers
    assert all(len(run.probes) == 2 for run in made.values())


def test_two_optimizers_that_step_after_one_another_are_one_unit(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        run.attach(model)
        first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        second = torch.optim.Adam(model.head.parameters())
        for _ in range(3):
            run.note(model(torch.randn(4, 8)).sum()).backward()
            first.step()
            second.step()
            model.zero_grad()

    check_same(train, tmp_path)
    for rate in ("sampled", "unsampled"):
        assert totals(tmp_path / rate)["units"] == 3


def test_a_model_trained_in_evaluation_mode_has_training_units(tmp_path: Path) -> None:
    check_same(lambda run: loop(run, Net().eval(), steps=3), tmp_path)
    sums = rows(tmp_path / "unsampled", "step_windows")
    assert {row["phase"] for row in sums} == {"train"}
    assert sum(row["units"] for row in sums) == 3


def test_a_model_whose_parts_are_called_has_units_all_the_same(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = run.model(Net())
        run.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            x = torch.randn(4, 8)
            for block in model.blocks:
                x = block(x)
            run.note(model.head(x).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_same(train, tmp_path)
    sums = totals(tmp_path / "unsampled")
    assert sums["units"] + sums["dropped_units"] == 6
    assert sums["units"] >= 4
    assert sums["samples"] >= 4 * 4


def test_calls_in_training_mode_without_a_step_become_units_of_their_own(tmp_path: Path) -> None:
    model = Net()
    with probing(model, tmp_path):
        for _ in range(80):
            model(X)
    sums = totals(tmp_path)
    assert sums["units"] == 80 - 64 + 1  # the first ones were taken for micro-batches of one unit
