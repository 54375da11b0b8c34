"""Signatures of calls, what is counted when, and what is known of shapes and steps that nobody counted."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from seedance.flops.profile import OpCount, Profile
from seedance.probe.counting import Counting, op_names, step_profile
from seedance.probe.signature import look
from seedance.probe.units import MOST_CALLS
from tests.probe_runs import Net, probing, rows, step, totals

X = torch.linspace(-1, 1, 32).reshape(4, 8)
SECOND = 1_000_000_000


# --- signatures -------------------------------------------------------------------------------------------------------


class Cache:
    """Holds tensors, as a cache of keys and values does."""

    def __init__(self, length: int, layers: int = 1) -> None:
        self.layers = [
            SimpleNamespace(keys=torch.zeros(2, length), values=torch.zeros(2, length)) for _ in range(layers)
        ]

    def get_seq_length(self) -> int:
        raise AssertionError("on a device this waits")


class Opaque:
    """Holds nothing that can be read."""

    __slots__ = ("inside",)


def test_what_a_signature_tells_apart() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {}),
        ((X.double(),), {}),
        ((X[:3],), {}),
        ((ids,), {}),
        ((), {"input_ids": ids}),
        ((), {"input_ids": ids, "use_cache": True}),
        ((), {"input_ids": ids, "use_cache": False}),
        ((ids, 3), {}),
        ((ids, 4), {}),
        (([X, (X, {"a": X})],), {}),
        (([X, (X, {"b": X})],), {}),
        ((Cache(3),), {}),
        ((Cache(4),), {}),
        ((Cache(4, layers=500),), {}),
        ((Cache(5, layers=500),), {}),
        ((Cache(5, layers=501),), {}),
        ((), {}),
    ]
    found = [look(*call).signature for call in calls]
    assert None not in found
    assert len(set(found)) == len(found)
    assert look((X,), {}).signature == look((X + 1,), {}).signature
    assert look((X, 0.5), {}).signature == look((X, 0.25), {}).signature  # a float decides no shape


def test_what_is_not_understood_has_no_signature() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
    sparse = torch.eye(3).to_sparse()
    deep: Any = X
    for _ in range(12):
        deep = [deep]
    for value in (Opaque(), nested, sparse, deep, [X] * 2_000, iter([X])):
        assert look((value,), {}).signature is None


def test_batch_size_and_tokens() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert look((X,), {})[1:] == (4, 0)
    assert look((torch.tensor(1.0), ids), {"mask": ids})[1:] == (2, 10)
    assert look((), {"pixels": torch.zeros(3, 3, 8, 8)})[1:] == (3, 0)
    assert look((), {})[1:] == (0, 0)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_each_shape_is_counted_once_and_later_ones_are_looked_up(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probing(model, tmp_path, max_sample_ppm=0):
        for batch in (4, 2, 4, 2, 4):
            step(model, optimizer, torch.randn(batch, 8))
    made = [row for row in rows(tmp_path, "op_windows") if row["layer"] == "blocks.1.up" and row["op"] == "matmul"]
    flops = {row["batch_size"]: 0 for row in made}
    for row in made:
        flops[row["batch_size"]] += row["flops"]
    assert flops == {4: 3 * 3 * 2 * 4 * 64, 2: 2 * 3 * 2 * 2 * 64}


def test_a_shape_is_counted_for_each_dtype_of_autocast(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probing(model, tmp_path, max_sample_ppm=0):
        for dtype in (None, torch.bfloat16, None, torch.float16, torch.bfloat16, None, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                step(model, optimizer, X)
    flops: dict[str, int] = {}
    for row in rows(tmp_path, "op_windows"):
        if row["layer"] == "blocks.1.up" and row["op"] == "matmul":
            flops[row["dtype"]] = flops.get(row["dtype"], 0) + row["flops"]
    each = 3 * 2 * 4 * 64
    assert flops == {"fp32": 3 * each, "bf16": 3 * each, "fp16": 2 * each}


def test_only_so_many_shapes_are_counted_at_once(tmp_path: Path) -> None:
    class Varied(Net):
        def forward(self, x: torch.Tensor, much: int = 0) -> torch.Tensor:
            return super().forward(x.repeat(2**much, 1))  # no polynomial

    model = Varied()
    with probing(model, tmp_path, max_sample_ppm=0), torch.no_grad():
        for much in range(8):
            model(torch.randn(1, 8), much)
    ops = rows(tmp_path, "op_windows")
    # 0 to 3 were free, and 6 is twice as far as what was counted.
    assert sum(row["uncounted_calls"] for row in ops) == 3
    assert sum(row["flops"] for row in ops) == (1 + 2 + 4 + 8 + 64) * 2 * (4 * 64 + 8)


def test_shapes_that_differ_in_one_length_need_four_counts(tmp_path: Path) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v  # type: ignore[no-any-return]

    model = Attends()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = (7, 1, 12, 5, 9, 4, 30, 3, 6)
    with probing(model, tmp_path, max_sample_ppm=0):
        for length in lengths:
            step(model, optimizer, torch.randn(2, length, 8))
    ops = rows(tmp_path, "op_windows")
    assert sum(row["uncounted_calls"] for row in ops) == 0
    linear, scores = sum(2 * 2 * n * 8 * 24 for n in lengths), sum(2 * 2 * 2 * n * n * 8 for n in lengths)
    assert sum(row["flops"] for row in ops if row["op"] == "matmul") == 2 * linear + 3 * scores


def test_after_a_minute_one_more_is_counted() -> None:
    now = [0]
    model = nn.Linear(8, 8)
    failed: list[Exception] = []
    counting = Counting(lambda: model, is_compiled=lambda: False, on_error=failed.append, clock=lambda: now[0])

    def counts(batch: int) -> bool:
        counting.begin_call(model, (batch,), (X,), {}, may_count=True)
        was = counting.counter is not None
        model(torch.randn(batch, 8))
        counting.end_call(failed=False, ends_unit=True)
        counting.take()
        return was

    assert [counts(batch) for batch in range(1, 7)] == [True, True, True, True, False, False]
    now[0] += 61 * SECOND
    assert [counts(batch) for batch in (1, 5, 6)] == [False, True, False]
    counting.stop()


def test_calls_that_share_a_backward_pass_are_counted_together(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def pair() -> None:
        (model(X) - model(X)).square().mean().backward()
        optimizer.step()

    with probing(model, tmp_path, max_sample_ppm=0):
        pair()
        step(model, optimizer, X)
        pair()
        step(model, optimizer, X)
    once = 3 * 2 * 4 * (4 * 64 + 8) - 2 * 4 * 64
    assert sum(row["flops"] for row in rows(tmp_path, "op_windows")) == (2 + 1 + 2 + 1) * once
    assert totals(tmp_path)["samples"] == 4 * 4  # a pair of calls is one group of samples


def test_a_call_without_a_backward_pass_has_none_of_its_flops(tmp_path: Path) -> None:
    """Samples of a trained model with its dropout on, and with gradients that nobody asks for."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward, backward = 2 * 4 * (64 + 16), 2 * 4 * (64 + 2 * 16)
    with probing(model, tmp_path, max_sample_ppm=0):
        for _ in range(3):
            step(model, optimizer, X)
        # As many calls as may be one unit of accumulated gradients; then each is one.
        for _ in range(MOST_CALLS + 10):
            model(X)
    found = rows(tmp_path, "op_windows")
    assert sum(row["flops"] for row in found if row["pass"] == "bwd") == 3 * backward
    assert sum(row["flops"] for row in found if row["pass"] == "fwd") == (3 + MOST_CALLS + 10) * forward


def test_a_model_that_changes_is_counted_anew(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probing(model, tmp_path, max_sample_ppm=0, step_window_ns=10**8):
        for _ in range(2):
            step(model, optimizer, X)
        for parameter in model.blocks.parameters():
            parameter.requires_grad_(False)
        for _ in range(3):
            time.sleep(0.11)
            step(model, optimizer, X)
    flops = sum(row["flops"] for row in rows(tmp_path, "op_windows") if row["pass"] == "bwd")
    whole, head = 2 * 2 * 4 * (4 * 64 + 8) - 2 * 4 * 64, 2 * 4 * 8
    assert flops in {2 * whole + 3 * head, 3 * whole + 2 * head, 4 * whole + head}


def test_the_step_of_an_optimizer_is_counted_with_its_state(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with probing(model, tmp_path, max_sample_ppm=0):
        for _ in range(5):
            step(model, optimizer, X)
    found = [row for row in rows(tmp_path, "op_windows") if row["layer"] == "(optimizer)"]
    assert {row["pass"] for row in found} == {"optim"}
    by_dtype = {row["dtype"]: row for row in found if row["op"] == "optimizer"}
    assert by_dtype["fp32"]["calls"] >= 5


def test_what_a_step_moves_without_looking() -> None:
    frozen = nn.Parameter(torch.zeros(100), requires_grad=False)
    moved = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(5))]
    optimizer = torch.optim.Adam([*moved, frozen])
    for parameter in moved:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    (op,) = step_profile(optimizer).ops
    state = 2 * (15 * 4 * 2 + 2 * 4)  # two moments each and a step count each, read and written
    assert (op.layer, op.op, op.pass_, op.dtype, op.calls) == ("(optimizer)", "optimizer", "optim", "fp32", 1)
    assert op.bytes_ideal == 3 * 15 * 4 + state
    assert step_profile(torch.optim.SGD([frozen], lr=1.0)).ops == ()


def test_names_of_ops_that_were_timed_as_one() -> None:
    def op(layer: str, name: str, flops: int, dtype: str = "fp32", moved: int = 1) -> OpCount:
        return OpCount(layer, 0, name, "fwd", dtype, "", 1, flops, flops, flops, moved, 0)

    profile = Profile(
        (
            op("one", "matmul", 8, "bf16"),
            op("one", "norm", 0, "fp32", 99),
            op("two", "matmul", 8),
            op("two", "attention", 4, "bf16"),
            op("two", "copy", 0),
            op("none", "norm", 0),
            op("none", "activation", 0, "bf16", 3),
            op("alone", "softmax", 0),
        )
    )
    assert op_names([profile, profile]) == {
        ("one", "fwd"): ("matmul", "bf16"),
        ("two", "fwd"): ("fused:attention+matmul", "fp32"),
        ("none", "fwd"): ("fused:activation+norm", "bf16"),
        ("alone", "fwd"): ("softmax", "fp32"),
    }
