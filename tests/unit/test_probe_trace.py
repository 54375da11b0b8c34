"""Time of a sampled unit goes to the layer and pass that spent it: known sleeps are found where they were put, to the ns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import seedance
from seedance.probe.clock import HostClock
from seedance.probe.trace import (
    BWD_IN,
    BWD_OUT,
    FWD_IN,
    FWD_OUT,
    GRAPH_END,
    RUN_IN,
    RUN_OUT,
    STEP_IN,
    STEP_OUT,
    Trace,
)
from tests.probe_runs import Net, check_split, probing, rows, step, times

MS = 1_000_000
NAP_NS = 30 * MS
"""A sleep is never shorter than this, and on a busy machine not much longer; nothing else takes as long."""
SLACK_NS = 15 * MS
"""How much longer a sleep may be, with what surrounds it."""
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Nap(torch.autograd.Function):
    """Sleeps forward, backward, or both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ns: int, backward_ns: int) -> torch.Tensor:
        ctx.backward_ns = backward_ns
        time.sleep(forward_ns / 1e9)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.backward_ns / 1e9)
        return grads[0].clone(), None, None


class Sleepy(nn.Linear):
    """A linear layer that sleeps."""

    def __init__(self, forward_ns: int = 0, backward_ns: int = 0) -> None:
        super().__init__(8, 8)
        self.naps = forward_ns, backward_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Nap.apply(super().forward(x), *self.naps)  # type: ignore[no-any-return]


class Part(nn.Module):
    """Two layers, and work of its own between them."""

    def __init__(self, up: nn.Module, own: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.up, self.own, self.down = up, own, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(Nap.apply(self.up(x), *self.own))


class Model(nn.Module):
    """Parts one after another."""

    def __init__(self, *parts: nn.Module, run: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.parts, self.run = nn.Linear(8, 8), nn.ModuleList(parts), run or (lambda part, x: part(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = self.run(part, x)
        return x


def sampled(model: nn.Module, folder: Path, *, steps: int = 3, x: torch.Tensor = X) -> dict[tuple[str, str], int]:
    """Times of some units after the first, which is counted and no sample."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with probing(model, folder):
        for _ in range(1 + steps):
            step(model, optimizer, x)
    sums = check_split(folder)
    assert sums["sampled_units"] == steps
    return times(folder)


def check_naps(found: dict[tuple[str, str], int], naps: dict[tuple[str, str], int]) -> None:
    """These places slept so many times, and no other did."""
    for place, count in naps.items():
        assert found[place] >= count * NAP_NS, place
    for place, ns in found.items():
        assert place in naps or ns < NAP_NS, (place, ns)


def test_sleeps_are_found_in_the_layer_and_pass_that_slept(tmp_path: Path) -> None:
    model = Model(Part(Sleepy(NAP_NS)), Part(Sleepy(0, NAP_NS)))
    check_naps(sampled(model, tmp_path), {("parts.0.up", "fwd"): 3, ("parts.1.up", "bwd"): 3})


def test_work_of_a_block_itself_is_not_its_layers(tmp_path: Path) -> None:
    model = Model(Part(nn.Linear(8, 8), own=(NAP_NS, NAP_NS)), Part(nn.Linear(8, 8)))
    check_naps(sampled(model, tmp_path), {("parts.0", "fwd"): 3, ("parts.0", "bwd"): 3})


def test_the_first_layer_has_its_backward_time_though_nothing_comes_before_it(tmp_path: Path) -> None:
    model = Model(Part(nn.Linear(8, 8)))
    model.first = Sleepy(0, NAP_NS)
    check_naps(sampled(model, tmp_path), {("first", "bwd"): 3})


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_sleeps_forward_again_in_its_recompute(tmp_path: Path, reentrant: bool) -> None:
    def run(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(part, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = Model(Part(Sleepy(NAP_NS, NAP_NS)), Part(nn.Linear(8, 8)), run=run)
    found = sampled(model, tmp_path)
    check_naps(found, {("parts.0.up", p): 3 for p in ("fwd", "bwd", "recompute")})


def test_a_reused_layer_has_the_time_of_all_its_calls(tmp_path: Path) -> None:
    layer = Sleepy(NAP_NS, NAP_NS)
    found = sampled(Model(layer, Part(nn.Linear(8, 8)), layer), tmp_path)
    check_naps(found, {("parts.0", "fwd"): 6, ("parts.0", "bwd"): 6})
    calls = [row for row in rows(tmp_path, "op_windows") if (row["layer"], row["pass"]) == ("parts.0", "fwd")]
    assert sum(row["sampled_calls"] for row in calls) == 6


def test_a_layer_with_several_inputs_and_outputs(tmp_path: Path) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Sleepy(0, NAP_NS), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"pair": (self.left(x), self.right(x)), "none": None}

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.several = nn.Linear(8, 8), Several()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = self.several(self.first(x))["pair"]
            return left * right  # type: ignore[no-any-return]

    check_naps(sampled(Two(), tmp_path), {("several.left", "bwd"): 3})


def test_layers_that_hand_their_input_on_do_not_take_the_time_of_the_layer_before(tmp_path: Path) -> None:
    """Dropout that drops nothing and layers left empty end with the very tensor that the layer before them made."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(x), x

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(8, 8), Sleepy(0, NAP_NS)
            self.empty, self.drop, self.pair = nn.Identity(), nn.Dropout(0.0), Pair()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bent, plain = self.pair(self.drop(self.empty(self.layer(self.first(x)))))
            return bent + plain  # type: ignore[no-any-return]

    check_naps(sampled(Ends(), tmp_path), {("layer", "bwd"): 3})


def test_an_optimizer_that_sleeps_and_one_that_calls_the_model(tmp_path: Path) -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            time.sleep(NAP_NS / 1e9)
            return loss

    for name, has_closure in (("plain", False), ("closure", True)):
        model = Model(Sleepy(NAP_NS))
        optimizer = Slow(model.parameters(), lr=0.01)

        def closure() -> torch.Tensor:
            loss = model(X).sum()  # noqa: B023 - called within the loop
            loss.backward()
            return loss

        with probing(model, tmp_path / name):
            for _ in range(4):
                if has_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        check_split(tmp_path / name)
        check_naps(times(tmp_path / name), {("parts.0", "fwd"): 3, ("(optimizer)", "optim"): 3})


def test_what_no_layer_covers_is_nobodys(tmp_path: Path) -> None:
    model = Model(Part(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with probing(model, tmp_path):
        for _ in range(4):
            loss = model(X).sum()
            time.sleep(NAP_NS / 1e9)
            loss.backward()
            optimizer.step()
    check_split(tmp_path)
    check_naps(times(tmp_path), {("(none)", "none"): 3})
    assert {row["op"] for row in rows(tmp_path, "op_windows") if row["layer"] == "(none)"} == {"unattributed_busy"}


def test_named_regions_are_layers_and_waits_are_waits(tmp_path: Path) -> None:
    model = Model(Part(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @seedance.region("labels")
    def label() -> None:
        time.sleep(NAP_NS / 1e9)

    with probing(model, tmp_path):
        for _ in range(4):
            with seedance.region("input"):
                time.sleep(NAP_NS / 1e9)
            with seedance.region("checkpoint"):
                time.sleep(2 * NAP_NS / 1e9)
            loss = model(X).sum()
            label()
            loss.backward()
            optimizer.step()
    sums = check_split(tmp_path)
    check_naps(times(tmp_path), {("(labels)", "fwd"): 3})
    assert 3 * NAP_NS <= sums["input_stall_ns"] < 3 * (NAP_NS + SLACK_NS)
    assert 6 * NAP_NS <= sums["checkpoint_ns"] < 6 * (NAP_NS + SLACK_NS)
    assert sums["input_wait_ns"] >= sums["input_stall_ns"] + NAP_NS  # what came before the first unit is no gap
    label()  # without a probe it only does its work


def test_phases_that_are_named_are_those_of_units(tmp_path: Path) -> None:
    model = Net().eval()
    with probing(model, tmp_path), torch.no_grad():
        with seedance.region("prefill"):
            model(torch.ones(3, 8))
        for _ in range(2):
            with seedance.region("decode"), seedance.region("other"):
                model(torch.ones(3, 8))
        model(torch.ones(3, 8))
    found = {(r["phase"], r["batch_size"]): (r["units"], r["samples"]) for r in rows(tmp_path, "step_windows")}
    assert found == {("prefill", 4): (1, 3), ("decode", 4): (2, 6), ("eval", 3): (1, 3)}


class Busy:
    """Takes its time to be saved."""

    def __reduce__(self) -> Any:
        time.sleep(2 * NAP_NS / 1e9)
        return Busy, ()


class Slow(Dataset[torch.Tensor]):
    """A data set that takes its time."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            time.sleep(NAP_NS / 1e9)
        return X[index % 4]


def test_a_slow_loader_is_input_stall_and_a_save_is_checkpoint(tmp_path: Path) -> None:
    model = Model(Part(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    with probing(model, tmp_path / "spool"):
        for number, x in enumerate(DataLoader(Slow(), batch_size=4)):
            step(model, optimizer, x)
            if number == 2:
                torch.save([model.state_dict(), Busy()], tmp_path / "model.pt")
    sums = check_split(tmp_path / "spool")
    assert sums["units"] == 5
    # Before the first unit nothing is a gap: it is startup.
    assert 4 * NAP_NS <= sums["input_stall_ns"] < 4 * (NAP_NS + SLACK_NS)
    assert sums["input_stall_ns"] <= sums["input_wait_ns"] < 5 * (NAP_NS + SLACK_NS)
    assert 2 * NAP_NS <= sums["checkpoint_ns"] < 2 * (NAP_NS + SLACK_NS)


def test_waits_behind_the_models_work_are_counted_and_are_no_stall(tmp_path: Path) -> None:
    model = Model(Part(nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with probing(model, tmp_path):
        for _ in range(3):
            loss = model(X).sum()
            with seedance.region("input"):
                time.sleep(NAP_NS / 1e9)
            loss.backward()
            optimizer.step()
    sums = check_split(tmp_path)
    assert sums["input_stall_ns"] == 0
    assert sums["input_wait_ns"] >= 3 * NAP_NS


def test_the_gap_and_the_active_time_are_where_they_were_spent(tmp_path: Path) -> None:
    model = Model(Sleepy(NAP_NS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter_ns()
    with probing(model, tmp_path, max_sample_ppm=0):
        for number in range(5):
            if number:
                time.sleep(NAP_NS / 1e9)
            step(model, optimizer, X)
    wall = time.perf_counter_ns() - begin
    sums = check_split(tmp_path)
    assert sums["units"] == 5
    assert sums["sampled_units"] == 0
    assert 4 * NAP_NS <= sums["held_idle_ns"] < 4 * (NAP_NS + SLACK_NS)
    assert 5 * NAP_NS <= sums["active_ns"] <= wall - sums["held_idle_ns"]


def test_time_and_counts_have_one_key(tmp_path: Path) -> None:
    sampled(Model(Part(nn.Linear(8, 8)), Part(nn.Linear(8, 8))), tmp_path)
    made = [row for row in rows(tmp_path, "op_windows") if row["layer"] == "parts.1.down"]
    assert {(row["pass"], row["op"], row["dtype"]) for row in made if row["exclusive_ns"]} == {
        ("fwd", "matmul", "fp32"),
        ("bwd", "matmul", "fp32"),
    }
    counted = [row for row in made if row["op"] == "matmul" and row["flops"]]
    assert sum(row["flops"] for row in counted) == 4 * 3 * 2 * 4 * 8 * 8  # units, forward and twice backward
    assert {row["layer_index"] for row in made} == {made[0]["layer_index"]}
    assert made[0]["layer_index"] > 0


# --- marks, without a model -------------------------------------------------------------------------------------------


def trace_of(names: list[str], marks: list[tuple[int, int, int]], parents: list[int], *, synced: bool = False) -> Trace:
    """A trace with these calls (layer|pass) and marks (instant, kind, call)."""
    made = Trace({}, HostClock(), is_synced=synced, on_error=pytest.fail)
    made._places = [tuple(name.split("|")) for name in names]  # type: ignore[misc]
    made._parents = parents
    made.marks = [tuple(mark) for mark in marks]  # type: ignore[misc]
    return made


def of(trace: Trace, begin: int, end: int) -> dict[Any, int]:
    found = trace.times([mark for mark, _, _ in trace.marks], begin, end)
    assert sum(one.ns for one in found.values()) == end - begin
    return {place and "|".join(place): one.ns for place, one in found.items() if one.ns}


def test_innermost_calls_have_the_time() -> None:
    trace = trace_of(
        ["m|fwd", "a|fwd", "b|fwd"],
        [(10, FWD_IN, 0), (12, FWD_IN, 1), (20, FWD_OUT, 1), (23, FWD_IN, 2), (40, FWD_OUT, 2), (41, FWD_OUT, 0)],
        [-1, 0, 0],
    )
    assert of(trace, 0, 50) == {None: 10 + 9, "m|fwd": 2 + 3 + 1, "a|fwd": 8, "b|fwd": 17}


def test_backward_time_goes_from_output_to_input_else_to_the_next_mark() -> None:
    marks = [(0, RUN_IN, -1), (5, BWD_IN, 0), (5, BWD_IN, 2), (9, BWD_OUT, 2), (12, BWD_IN, 1), (30, RUN_OUT, -1)]
    trace = trace_of(["m|fwd", "a|fwd", "b|fwd"], marks, [-1, 0, 0])
    # Until 5 it is nobody's; b until its input's gradient; the model itself; then a, whose input has none.
    assert of(trace, 0, 31) == {None: 5 + 1, "b|bwd": 4, "m|bwd": 3, "a|bwd": 18}


def test_of_calls_that_end_with_one_tensor_the_innermost_has_the_time() -> None:
    for order in ((0, 1), (1, 0)):
        marks = [(0, RUN_IN, -1), *((2, BWD_IN, call) for call in order), (8, BWD_OUT, 1), (9, BWD_OUT, 0)]
        trace = trace_of(["m|fwd", "a|fwd"], [*marks, (10, RUN_OUT, -1)], [-1, 0])
        assert of(trace, 0, 10) == {None: 2 + 1, "a|bwd": 6, "m|bwd": 1}


def test_a_call_that_hands_its_input_on_is_passed_by() -> None:
    marks = [(0, RUN_IN, -1), (2, BWD_IN, 0), (2, BWD_OUT, 1), (2, BWD_IN, 1), (7, BWD_OUT, 0), (9, RUN_OUT, -1)]
    trace = trace_of(["a|fwd", "b|fwd"], [*marks, *((at + 10, *rest) for at, *rest in marks)], [-1, -1])
    # Run through a second time, the graph has the same again.
    assert of(trace, 0, 20) == {None: 2 * (2 + 2) + 1 + 1, "a|bwd": 2 * 5}


def test_gradients_are_averaged_after_the_graph_is_done() -> None:
    marks = [(0, RUN_IN, -1), (1, BWD_IN, 0), (6, GRAPH_END, -1), (9, RUN_OUT, -1)]
    assert of(trace_of(["a|fwd"], marks, [-1], synced=True), 0, 9) == {None: 1, "a|bwd": 5, "(grad_sync)|comm": 3}
    assert of(trace_of(["a|fwd"], marks, [-1]), 0, 9) == {None: 1 + 3, "a|bwd": 5}


def test_recomputation_comes_between_and_the_backward_pass_goes_on() -> None:
    marks = [
        *((0, RUN_IN, -1), (2, BWD_IN, 0), (3, FWD_IN, 1), (7, FWD_OUT, 1)),
        *((9, BWD_OUT, 0), (10, RUN_OUT, -1)),
    ]
    trace = trace_of(["a|fwd", "a|recompute"], marks, [-1, -1])
    assert of(trace, 0, 10) == {None: 3, "a|bwd": 1 + 2, "a|recompute": 4}


def test_a_step_is_the_optimizers_once_the_model_is_done_in_it() -> None:
    marks = [
        *((1, STEP_IN, -1), (2, FWD_IN, 0), (4, FWD_OUT, 0), (5, RUN_IN, -1), (8, RUN_OUT, -1)),
        *((11, STEP_OUT, -1), (12, STEP_IN, -1), (15, STEP_OUT, -1)),
    ]
    assert of(trace_of(["a|fwd"], marks, [-1]), 0, 16) == {
        None: 1 + 1 + 1 + 3 + 1 + 1,
        "a|fwd": 2,
        "(optimizer)|optim": 3 + 3,
    }


def test_calls_that_were_left_without_a_word_end_with_what_they_are_part_of() -> None:
    marks = [(0, FWD_IN, 0), (1, FWD_IN, 1), (5, FWD_OUT, 0), (6, FWD_OUT, 1)]
    assert of(trace_of(["m|fwd", "a|fwd"], marks, [-1, 0]), 0, 8) == {"m|fwd": 1, "a|fwd": 4, None: 3}


def test_a_region_around_the_model_is_a_layer_of_what_the_model_leaves(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probing(model, tmp_path):
        for _ in range(3):
            with seedance.region("loss"):
                loss = model(torch.randn(2, 4)).square().mean()
                time.sleep(0.02)
            time.sleep(0.01)
            loss.backward()
            optimizer.step()
    made = rows(tmp_path, "op_windows")
    inside = sum(row["exclusive_ns"] for row in made if row["layer"] == "(loss)")
    outside = sum(row["exclusive_ns"] for row in made if row["layer"] == "(none)")
    assert inside >= 2 * 20_000_000 and outside >= 2 * 10_000_000
    assert any(row["layer"] == "0" and row["pass"] == "fwd" and row["exclusive_ns"] for row in made)
