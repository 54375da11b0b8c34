"""FLOPs of real products, convolutions and recurrent layers, forward and backward: by formula, and by torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from seedance.flops import formulas as f
from seedance.flops.operators import Cost, cost
from tests.flop_recorder import Seen, randn, record, split, total

torch.set_num_threads(1)


def as_seen_by_torch(seen: list[Seen]) -> None:
    """What torch's registry counts is what we count."""
    for one in seen:
        assert one.torch is None or one.torch == one.cost.flops, one


LINEARS: dict[str, tuple[nn.Module, torch.Tensor, int, int]] = {
    "bias": (nn.Linear(64, 96), randn(8, 64), 2 * 8 * 64 * 96, 2),
    "no bias": (nn.Linear(64, 96, bias=False), randn(8, 64), 2 * 8 * 64 * 96, 2),
    "leading dimensions": (nn.Linear(12, 20), randn(2, 5, 12), 2 * 10 * 12 * 20, 2),
    "no input gradient": (nn.Linear(12, 20), randn(5, 12, grad=False), 2 * 5 * 12 * 20, 1),
    "frozen": (nn.Linear(12, 20).requires_grad_(False), randn(5, 12), 2 * 5 * 12 * 20, 1),
    "vector": (nn.Linear(12, 20), randn(12), 2 * 12 * 20, 2),
}


@pytest.mark.parametrize("case", LINEARS)
def test_linear(case: str) -> None:
    layer, x, forward, factor = LINEARS[case]
    assert split(lambda: layer(x)) == (forward, factor * forward)
    seen = record(lambda: layer(x), backward=True)
    as_seen_by_torch(seen)
    assert {one.name for one in seen} <= {"aten.addmm", "aten.mm"}


Sizes = tuple[int, ...]

# Sizes of the operands, what is done with them, FLOPs of the forward, the backward's share of it, an operator that ran.
PRODUCTS: dict[str, tuple[list[Sizes], Callable[..., Any], int, int, str]] = {
    "mm": ([(6, 7), (7, 8)], torch.mm, 2 * 6 * 7 * 8, 2, "aten.mm"),
    "addmm": ([(6, 8), (6, 7), (7, 8)], torch.addmm, 2 * 6 * 7 * 8, 2, "aten.addmm"),
    "bmm": ([(4, 32, 64), (4, 64, 16)], torch.bmm, 262144, 2, "aten.bmm"),
    "baddbmm": ([(4, 32, 16), (4, 32, 64), (4, 64, 16)], torch.baddbmm, 262144, 2, "aten.baddbmm"),
    "addbmm": ([(6, 8), (3, 6, 7), (3, 7, 8)], torch.addbmm, 2 * 3 * 6 * 7 * 8, 2, "aten.addbmm"),
    "matmul 4-D": ([(2, 8, 32, 64), (2, 8, 64, 32)], torch.matmul, 2097152, 2, "aten.bmm"),
    "matmul, broadcast": ([(3, 1, 4, 5), (2, 5, 6)], torch.matmul, 2 * 6 * 4 * 5 * 6, 2, "aten.bmm"),
    "einsum": (
        [(2, 8, 32, 64), (2, 8, 48, 64)],
        lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        3145728,
        2,
        "aten.bmm",
    ),
    # Of a product with a vector one gradient is an outer product, element by element, the other a product again.
    "mv": ([(64, 32), (32,)], torch.mv, 4096, 1, "aten.mv"),
    "addmv": ([(64,), (64, 32), (32,)], torch.addmv, 4096, 1, "aten.addmv"),
    "matmul by a vector": ([(64, 32), (32,)], torch.matmul, 4096, 1, "aten.mv"),
    "dot": ([(50,), (50,)], torch.dot, 100, 0, "aten.dot"),
    "vdot": ([(50,), (50,)], torch.vdot, 100, 0, "aten.vdot"),
    "inner": ([(3, 4), (5, 4)], torch.inner, 2 * 3 * 4 * 5, 2, "aten.mm"),
    "tensordot": (
        [(3, 4, 5), (5, 4, 6)],
        lambda a, b: torch.tensordot(a, b, [[1, 2], [1, 0]]),
        2 * 3 * 20 * 6,
        2,
        "aten.mm",
    ),
    "chain": (
        [(9, 2), (2, 9), (9, 3)],
        lambda *chain: torch.linalg.multi_dot(chain),
        2 * (2 * 9 * 3 + 9 * 2 * 3),
        2,
        "aten.mm",
    ),
    "far distances": ([(30, 4), (5, 4)], torch.cdist, 2 * 30 * 4 * 5, 2, "aten._euclidean_dist"),
    "near distances": ([(3, 4), (5, 4)], torch.cdist, 0, 0, "aten._cdist_forward"),
    # One multiplication an element; both gradients are products with vectors.
    "addr": ([(5, 6), (5,), (6,)], torch.addr, 30, 4, "aten.addr"),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case: str) -> None:
    sizes, function, forward, factor, name = PRODUCTS[case]
    operands = [randn(*size) for size in sizes]
    assert split(lambda: function(*operands)) == (forward, factor * forward)
    seen = record(lambda: function(*operands), backward=True)
    as_seen_by_torch(seen)
    assert name in {one.name for one in seen}


def test_what_torch_does_not_count() -> None:
    """Names of operators that its registry lacks; when it gets one, compare with it."""
    lacking = {
        "aten.mv",
        "aten.addmv",
        "aten.dot",
        "aten.vdot",
        "aten.addbmm",
        "aten._euclidean_dist",
        "aten._cdist_forward",
    }
    without: set[str] = set()
    for sizes, function, *_ in PRODUCTS.values():
        operands = [randn(*size) for size in sizes]
        without |= {one.name for one in record(lambda f=function, o=operands: f(*o)) if one.torch is None}
    assert without == lacking | {"aten.addr"}


def test_bilinear() -> None:
    """Three operands contracted from left to right, and three of such for the gradients."""
    layer, a, b = nn.Bilinear(3, 4, 5), randn(2, 3), randn(2, 4)
    forward = 2 * (2 * 5 * 3 * 4) + 2 * (2 * 5 * 4)
    assert total(record(lambda: layer(a, b))) == forward == f.einsum("ni,oij,nj->no", [(2, 3), (5, 3, 4), (2, 4)])
    backward = [one.cost.flops for one in record(lambda: layer(a, b), backward=True)[1:]]
    sizes = {"g": (2, 5), "w": (5, 3, 4), "a": (2, 3), "b": (2, 4)}
    letters = {"g": "no", "w": "oij", "a": "ni", "b": "nj"}

    def contracted(order: str, output: str) -> int:
        return f.einsum(f"{','.join(letters[c] for c in order)}->{output}", [sizes[c] for c in order])

    assert sorted(backward) == sorted([contracted("gwb", "ni"), contracted("agb", "oij"), contracted("awg", "nj")])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_einsum_as_it_runs(data: st.DataObject) -> None:
    """Any two or three operands: the formula is what the framework executes, contraction by contraction."""
    lengths = {c: data.draw(st.integers(1, 4)) for c in "abcdef"}
    term = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)
    terms = data.draw(st.lists(term, min_size=2, max_size=3))
    letters = sorted({c for t in terms for c in t})
    output = data.draw(st.lists(st.sampled_from(letters), unique=True, max_size=4))
    equation = f"{','.join(map(''.join, terms))}->{''.join(output)}"
    tensors = [torch.ones([lengths[c] for c in t]) for t in terms]
    executed = total(record(lambda: torch.einsum(equation, *tensors)))
    assert executed == f.einsum(equation, [t.shape for t in tensors], elementwise=False)


@dataclass(frozen=True)
class Conv:
    """Sizes of a convolution, and the layer that does it."""

    dims: int
    transposed: bool
    groups: int
    c_in: int
    c_out: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    size: int

    def layer(self) -> nn.Module:
        kind = f"Conv{'Transpose' if self.transposed else ''}{self.dims}d"
        made: nn.Module = getattr(nn, kind)(
            self.c_in, self.c_out, self.kernel, self.stride, self.padding, groups=self.groups, dilation=self.dilation
        )
        return made

    def flops(self, batch: int) -> int:
        kernel = (self.kernel,) * self.dims
        if self.transposed:
            return f.conv_transpose(batch, self.c_in, self.c_out, kernel, (self.size,) * self.dims, self.groups)
        out = f.conv_output(self.size, self.kernel, stride=self.stride, padding=self.padding, dilation=self.dilation)
        return f.conv(batch, self.c_in, self.c_out, kernel, (out,) * self.dims, self.groups)


@st.composite
def convs(draw: st.DrawFn) -> Conv:
    groups, kernel, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return Conv(
        dims=draw(st.integers(1, 3)),
        transposed=draw(st.booleans()),
        groups=groups,
        c_in=groups * draw(st.integers(1, 2)),
        c_out=groups * draw(st.integers(1, 2)),
        kernel=kernel,
        stride=draw(st.integers(1, 2)),
        padding=draw(st.integers(0, 1)) if kernel > 1 else 0,
        dilation=dilation,
        size=dilation * (kernel - 1) + 1 + draw(st.integers(0, 2)),
    )


@given(convs(), st.integers(1, 2), st.booleans())
@settings(max_examples=60, deadline=None)
def test_convolutions(conv: Conv, batch: int, input_grad: bool) -> None:
    x = randn(batch, conv.c_in, *(conv.size,) * conv.dims, grad=input_grad)
    layer = conv.layer()
    forward = conv.flops(batch)
    assert split(lambda: layer(x)) == (forward, (1 + input_grad) * forward)
    for one in record(lambda: layer(x), backward=True):
        # Of groups torch 2.13 counts the weight's gradient once for each: known to be wrong, and by how much.
        over = (conv.groups - 1) * forward if one.name == "aten.convolution_backward" else 0
        assert one.torch == one.cost.flops + over


@pytest.mark.parametrize(
    ("layer", "size", "flops", "torch_backward"),
    [
        (nn.Conv2d(64, 128, 3, padding=1, groups=32), (8, 64, 56, 56), 115605504, 3814981632),
        (nn.Conv2d(64, 64, 3, padding=1, groups=64), (8, 64, 56, 56), 28901376, 1878589440),
        (nn.ConvTranspose2d(64, 32, 4, 2, 1, groups=4), (1, 64, 16, 16), 4194304, 20971520),
        (nn.Conv2d(64, 64, 3, padding=2, dilation=2), (1, 64, 32, 32), 75497472, 150994944),
        (nn.Conv1d(80, 384, 3, padding=1), (1, 80, 3000), 552960000, 1105920000),
        (nn.Conv3d(3, 64, 3, padding=1), (1, 3, 8, 32, 32), 84934656, 169869312),
    ],
)
def test_published_convolutions(layer: nn.Module, size: tuple[int, ...], flops: int, torch_backward: int) -> None:
    """On the meta device, where only sizes exist."""
    layer, x = layer.to("meta"), torch.empty(size, device="meta", requires_grad=True)
    assert split(lambda: layer(x)) == (flops, 2 * flops)
    seen = record(lambda: layer(x), backward=True)
    assert sum(one.torch for one in seen if one.name == "aten.convolution_backward") == torch_backward


def test_convolution_over_time() -> None:
    x, weight = randn(7, 2, 4), randn(3, 4, 6)
    assert total(record(lambda: torch.conv_tbc(x, weight, torch.zeros(6), 1))) == 2 * 7 * 2 * 3 * 4 * 6


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers(layers: int, bidirectional: bool, batch_first: bool) -> None:
    directions, (steps, batch) = 2 if bidirectional else 1, (10, 2) if batch_first else (2, 10)
    for kind, formula, gates in ((nn.LSTM, f.lstm, 4), (nn.GRU, f.gru, 3), (nn.RNN, f.rnn, 1)):
        run = partial(kind(16, 24, layers, bidirectional=bidirectional, batch_first=batch_first), randn(2, 10, 16))
        flops = formula(batch, steps, 16, 24, layers, directions)
        seen = record(run, backward=True)
        # The first step starts from zeros, which want no gradient: its hidden matrix has one product less. A fused
        # kernel does not say so.
        skipped = 0 if kind is nn.LSTM else layers * directions * 2 * batch * gates * 24 * 24
        assert split(run) == (flops, 2 * flops - skipped)
        if kind is nn.LSTM:
            assert {one.name for one in seen} == {"aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"}
            assert all(one.torch is None for one in seen)
        as_seen_by_torch(seen)


def test_published_recurrent_layers() -> None:
    x = randn(2, 10, 64)
    lstm, gru = nn.LSTM(64, 128, batch_first=True), nn.GRU(64, 128, batch_first=True)
    assert split(lambda: lstm(x)) == (3932160, 7864320)
    assert total(record(lambda: gru(x))) == 2949120


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_lstm_with_projection_and_packed_sequences() -> None:
    layer, x = nn.LSTM(16, 24, 2, proj_size=8), randn(10, 3, 16)
    assert total(record(lambda: layer(x))) == f.lstm(3, 10, 16, 24, 2, 1, 8)
    packed = nn.utils.rnn.pack_sequence([randn(5, 16), randn(3, 16)])
    lstm, gru = nn.LSTM(16, 24), nn.GRU(16, 24)
    assert total(record(lambda: lstm(packed))) == f.lstm(1, 5 + 3, 16, 24)
    assert total(record(lambda: gru(packed))) == f.gru(1, 5 + 3, 16, 24)


def test_cells() -> None:
    x = randn(3, 16)
    for cell, formula in ((nn.LSTMCell(16, 24), f.lstm), (nn.GRUCell(16, 24), f.gru), (nn.RNNCell(16, 24), f.rnn)):
        assert total(record(lambda c=cell: c(x))) == formula(3, 1, 16, 24)


def test_gates_of_a_fused_cell_are_no_products() -> None:
    gates = torch.empty(2, 32, device="meta")
    for name in ("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell_backward_impl"):
        assert cost(f"aten.{name}", (gates, gates), {}, (gates,)) == Cost(0, 0, 0)


@pytest.mark.parametrize("weights", [False, True])
def test_cudnn_recurrent(weights: bool) -> None:
    """The fused kernels of devices, by the arguments that torch gives them."""
    x, hx = torch.empty(10, 2, 16, device="meta"), torch.empty(1, 2, 24, device="meta")
    flat = [torch.empty(s, device="meta") for s in ((96, 16), (96, 24), (96,), (96,))]
    shared = (2, 24, 0, 1, False, 0.0, True, False, [], None)
    forward = cost("aten._cudnn_rnn", (x, flat, 4, None, hx, hx, *shared), {}, (x,))
    assert forward == Cost(*(3 * [f.lstm(2, 10, 16, 24)]))
    args = (x, flat, 4, x, hx, hx, x, x, None, None, *shared, x, [True, True, True, weights])
    backward = cost("aten._cudnn_rnn_backward", args, {}, (x,))
    assert backward.flops == (1 + weights) * forward.flops
    shared = (*shared[:2], *shared[3:])
    assert cost("aten.miopen_rnn", (x, flat, 4, hx, hx, *shared), {}, (x,)) == forward
    args = (x, flat, 4, x, hx, hx, x, x, None, None, *shared, x, [True, True, True, weights])
    assert cost("aten.miopen_rnn_backward", args, {}, (x,)) == backward
