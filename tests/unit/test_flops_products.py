"""FLOPs of quantised, grouped, sparse and packed products, of libraries' operators, and of composites taken whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seedance.flops import formulas as f
from seedance.flops.operators import cost
from tests.flop_recorder import randn, record, total

torch.set_num_threads(1)


def test_int8_product() -> None:
    a, b = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 32, dtype=torch.int8)
    seen = record(lambda: torch._int_mm(a, b))
    assert [(one.name, one.cost.flops, one.torch) for one in seen] == [("aten._int_mm", 131072, None)]


def test_fp8_product() -> None:
    a = torch.ones(16, 32).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    seen = record(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16))
    assert total(seen) == f.matmul(16, 32, 16)
    assert [one.torch for one in seen] == [total(seen)]
    assert cost("aten._scaled_mm_v2", (a, a.t(), [], [], []), {}, a).flops == f.matmul(16, 32, 16)


def test_weights_of_few_bits() -> None:
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    weight, scales = torch.ones(16, 32, dtype=torch.int8), torch.ones(16, dtype=torch.bfloat16)
    assert total(record(lambda: torch._weight_int8pack_mm(x, weight, scales))) == f.linear(4, 32, 16)
    ops = torch.ops.aten
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    packed_weight = ops._convert_weight_to_int4pack_for_cpu(torch.ones(32, 64, dtype=torch.int32), 2)
    scales = torch.ones(2, 32, 2, dtype=torch.bfloat16)
    assert total(record(lambda: ops._weight_int4pack_mm_for_cpu(x, packed_weight, 32, scales))) == f.linear(3, 64, 32)
    out = torch.empty(3, 32)
    for name in ("aten._weight_int4pack_mm", "bitsandbytes.gemv_4bit", "aten._dyn_quant_matmul_4bit"):
        assert cost(name, (x, packed_weight), {}, out).flops == f.linear(3, 64, 32)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other:UserWarning")
def test_quantised_layers() -> None:
    dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 5)), {nn.Linear})
    x = randn(3, 6, grad=False)
    seen = record(lambda: dynamic(x))
    assert [(one.name, one.cost.flops) for one in seen] == [("quantized.linear_dynamic", f.linear(3, 6, 5))]
    layer = torch.ao.nn.quantized.Conv2d(4, 8, 3, groups=2)
    image = torch.quantize_per_tensor(torch.randn(1, 4, 8, 8), 0.1, 0, torch.quint8)
    seen = record(lambda: layer(image))
    assert [(one.name, one.cost.flops) for one in seen] == [("quantized.conv2d", f.conv(1, 4, 8, (3, 3), (6, 6), 2))]
    assert cost("quantized.conv2d", (image, object()), {}, image) is None


def test_packed_for_one_dnn() -> None:
    """What compiled code on a CPU calls; a reordered weight keeps its sizes."""
    ops, x, image = torch.ops.mkldnn, torch.randn(3, 8), torch.randn(1, 4, 6, 6)
    weight = ops._reorder_linear_weight(torch.randn(5, 8), 3)
    assert total(record(lambda: ops._linear_pointwise(x, weight, None, "none", [], ""))) == f.linear(3, 8, 5)
    kernel, sizes = torch.randn(8, 2, 3, 3), ([0, 0], [1, 1], [1, 1], 2)
    conv = f.conv(1, 4, 8, (3, 3), (4, 4), 2)
    packed = ops._reorder_convolution_weight(kernel, *sizes, [1, 4, 6, 6])
    run = partial(ops._convolution_pointwise, image, packed, None, *sizes, "none", [], "")
    assert total(record(run)) == conv
    other = torch.randn(1, 8, 4, 4)
    run = partial(ops._convolution_pointwise, image, other, kernel, None, *sizes, "add", 1.0, None, [], None)
    assert total(record(run)) == conv
    kernel, sizes = torch.randn(4, 4, 3, 3), ([0, 0], [0, 0], [1, 1], [1, 1], 2)
    packed = ops._reorder_convolution_transpose_weight(kernel, *sizes, [1, 4, 6, 6])
    run = partial(ops._convolution_transpose_pointwise, image, packed, None, *sizes, "none", [], "")
    assert total(record(run)) == f.conv_transpose(1, 4, 8, (3, 3), (6, 6), 2)


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((20, 16), (4, 16, 8), 2 * 20 * 16 * 8),
        ((4, 5, 16), (4, 16, 8), 2 * 4 * 5 * 16 * 8),
        ((6, 20), (20, 8), 2 * 6 * 20 * 8),
        ((4, 6, 16), (16, 20), 2 * 6 * 16 * 20),
    ],
)
def test_grouped_products(a: tuple[int, ...], b: tuple[int, ...], flops: int) -> None:
    """Ragged on the left, not at all, inside, on the right: a row meets one group's matrix."""
    x, y = (torch.empty(size, device="meta") for size in (a, b))
    for name in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
        assert cost(f"aten.{name}", (x, y), {}, x).flops == flops


def test_grouped_products_as_they_run() -> None:
    x, w = randn(20, 16), randn(4, 16, 8)
    ends = torch.tensor([5, 5, 12, 20], dtype=torch.int32)
    seen = record(lambda: 2 * F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends), backward=True)
    assert total(seen) == 3 * f.linear(20, 16, 8)


def test_sparse_products() -> None:
    """Only what is stored is multiplied."""
    eye, dense, vector = torch.eye(6), torch.randn(6, 5), torch.randn(6)
    stored = eye.to_sparse()
    assert total(record(lambda: torch.sparse.mm(stored, dense))) == 2 * 6 * 5
    assert total(record(lambda: stored @ dense)) == 2 * 6 * 5
    assert total(record(lambda: stored @ vector)) == 2 * 6
    assert cost("aten.mm", (dense.t(), stored), {}, dense).flops == 2 * 6 * 5
    assert cost("aten.mm", (stored, stored), {}, stored) is None
    assert cost("aten.sparse_sampled_addmm", (stored, eye, dense), {}, stored).flops == 2 * 6 * 6
    half = torch.empty(8, 16, device="meta")
    assert cost("aten._sparse_semi_structured_mm", (half, half, torch.empty(32, 4)), {}, half).flops == 2 * 8 * 32 * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_compressed_sparse_products() -> None:
    stored, blocks = torch.eye(6).to_sparse_csr(), torch.eye(6).to_sparse_bsr((2, 2))
    assert total(record(lambda: stored @ torch.randn(6, 5))) == 2 * 6 * 5
    assert cost("aten.mm", (blocks, torch.randn(6, 5)), {}, None).flops == 2 * 12 * 5


def composites() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Composite operators, which reach a mode whole in inference mode: the name, and a call of each."""
    x, w, b3, b4 = torch.randn(3, 8), torch.randn(5, 8), torch.randn(2, 3, 8), torch.randn(6, 1, 8, 3)
    for a in (x, b3, x[0]):
        yield "linear", partial(F.linear, a, w, torch.randn(5))
    for a, b in ((x, w.t()), (x, w[0]), (x[0], w.t()), (x[0], w[0]), (b3, w.t()), (b3, b4), (b4[0], x[:, :3])):
        yield "matmul", partial(torch.matmul, a, b)
    yield "einsum", partial(torch.einsum, "bij,...j->bi", b3, w[0])
    yield "inner", partial(torch.inner, x, w)
    yield "tensordot", partial(torch.tensordot, b3, w, [[2], [1]])
    yield "chain_matmul", partial(torch.ops.aten.chain_matmul, [x, w.t(), torch.randn(5, 9), torch.randn(9, 2)])
    yield "linalg_multi_dot", partial(torch.linalg.multi_dot, [x[0], w.t(), torch.randn(5, 9)])
    yield "linalg_vecdot", partial(torch.linalg.vecdot, x[0], w[0])
    yield "bilinear", partial(F.bilinear, b3, torch.randn(2, 3, 4), torch.randn(5, 8, 4))
    yield "cdist", partial(torch.cdist, torch.randn(30, 4), torch.randn(5, 4))
    for dims in (1, 2, 3):
        kernel, transposed = torch.randn(6, 2, *(3,) * dims), torch.randn(4, 3, *(3,) * dims)
        for batch in ((2,), ()):
            volume = torch.randn(*batch, 4, *(7,) * dims)
            yield f"conv{dims}d", partial(getattr(F, f"conv{dims}d"), volume, kernel, stride=2, groups=2)
            yield f"conv_transpose{dims}d", partial(getattr(F, f"conv_transpose{dims}d"), volume, transposed, groups=2)
    yield "conv2d", partial(F.conv2d, torch.randn(2, 4, 7, 7), torch.randn(6, 4, 3, 3), padding="same")
    q = torch.randn(2, 4, 6, 8)
    yield "scaled_dot_product_attention", partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    rows = nn.utils.rnn.pack_sequence([torch.randn(3, 8), torch.randn(2, 8)])
    for data in (b3, rows):
        yield "lstm", partial(nn.LSTM(8, 5, 2, bidirectional=True), data)
        yield "gru", partial(nn.GRU(8, 5, 2, bidirectional=True), data)
        yield "rnn_tanh", partial(nn.RNN(8, 5, 2), data)
        yield "rnn_relu", partial(nn.RNN(8, 5, nonlinearity="relu"), data)
    yield "lstm", partial(nn.LSTM(8, 5, proj_size=3, batch_first=True), b3)
    yield "lstm_cell", partial(nn.LSTMCell(8, 5), x)
    yield "gru_cell", partial(nn.GRUCell(8, 5), x)
    yield "rnn_tanh_cell", partial(nn.RNNCell(8, 5), x)
    yield "rnn_relu_cell", partial(nn.RNNCell(8, 5, nonlinearity="relu"), x)


@pytest.mark.parametrize(("name", "run"), [*composites()], ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_composites_count_as_their_parts(name: str, run: Callable[[], Any]) -> None:
    with torch.inference_mode():
        whole = record(run, whole=True)
        assert f"aten.{name}" in {one.name for one in whole}
        parts = record(run)
    assert f"aten.{name}" not in {one.name for one in parts}
    assert total(whole) == total(parts) == total(record(run)) > 0


@pytest.mark.parametrize("function", [torch.outer, torch.kron, torch.ger])
def test_outer_products_are_elementwise(function: Callable[..., Any]) -> None:
    """In every mode: without inference mode nothing tells them from any other product of elements."""
    a, b = torch.ones(3), torch.ones(4)
    with torch.inference_mode():
        assert total(record(partial(function, a, b), whole=True)) == 0
    assert total(record(partial(function, a, b))) == 0


def test_backwards_that_other_devices_have() -> None:
    x, w, grad = torch.empty(2, 3, 8), torch.empty(5, 8), torch.empty(2, 3, 5)
    one = f.linear(6, 8, 5)
    for name in ("linear_backward", "mkldnn_linear_backward"):
        assert cost(f"aten.{name}", (x, grad, w, [True, True, True]), {}, ()).flops == 2 * one
        assert cost(f"aten.{name}", (x, grad, w, [False, True, True]), {}, ()).flops == one
    assert cost("aten.mkldnn_linear_backward_input", ([2, 3, 8], grad, w), {}, x).flops == one
    assert cost("aten.mkldnn_linear_backward_weights", (grad, x, w, True), {}, ()).flops == one
    assert cost("aten.matmul_backward", (grad, x, w.t(), [True, False]), {}, ()).flops == one
    image, kernel, out = torch.empty(2, 4, 6, 6), torch.empty(8, 2, 3, 3), torch.empty(2, 8, 4, 4)
    one = f.conv(2, 4, 8, (3, 3), (4, 4), 2)
    args = (out, image, kernel, [1], [1], [1], False, [0], 2, [True, True, False])
    assert cost("aten.convolution_backward_overrideable", args, {}, ()).flops == 2 * one
    args = (image, out, kernel, [0], [1], [1], 2, [True, False, False])
    assert cost("aten.mps_convolution_backward", args, {}, ()).flops == one
    args = (out, image, torch.empty(8, 4, 3, 3), [3, 3], [1, 1], [0, 0], [False, True, False])
    assert cost("aten._slow_conv2d_backward", args, {}, ()).flops == f.conv(2, 4, 8, (3, 3), (4, 4))
    source, weight, grown = torch.empty(2, 4, 4, 4), torch.empty(4, 3, 3, 3), torch.empty(2, 6, 6, 6)
    args = (source, grown, weight, [0], [0], [1], [1], 2, [True, True])
    expected = 2 * f.conv_transpose(2, 4, 6, (3, 3), (4, 4), 2)
    assert cost("aten.mps_convolution_transpose_backward", args, {}, ()).flops == expected
    flags = (True, True, True)
    args = (image, kernel, [0], [1], [1], 2, *flags)
    assert cost("aten.cudnn_convolution", args, {}, out).flops == f.conv(2, 4, 8, (3, 3), (4, 4), 2)


def test_operators_of_libraries() -> None:
    x, experts, out = torch.empty(20, 16), torch.empty(4, 16, 8), torch.empty(20, 8)
    one = f.linear(20, 16, 8)
    assert cost("transformers.grouped_mm_fallback", (x, experts, None), {}, out).flops == one
    assert cost("transformers.grouped_mm_fallback_backward", (x, experts, None, out), {}, (x, experts)).flops == 2 * one
    assert cost("bitsandbytes.int8_linear_matmul", (x, torch.empty(8, 16)), {}, out).flops == one
    image, kernel, grown = torch.empty(2, 4, 6, 6), torch.empty(8, 4, 3, 3), torch.empty(2, 8, 4, 4)
    conv = f.conv(2, 4, 8, (3, 3), (4, 4))
    assert cost("torchvision.deform_conv2d", (image, kernel), {}, grown).flops == conv
    assert cost("torchvision._deform_conv2d_backward", (grown, image, kernel), {}, ()).flops == 2 * conv


def test_products_fused_with_communication() -> None:
    shard, weight, whole = torch.empty(2, 10, 16), torch.empty(16, 8), torch.empty(2, 40, 8)
    gathered = (None, [whole, whole])
    both = 2 * f.linear(80, 16, 8)
    assert cost("symm_mem.fused_all_gather_matmul", (shard, [weight, weight], 1, "tp"), {}, gathered).flops == both
    args = (torch.empty(2, 40, 16), weight, "sum", 1, "tp")
    assert cost("symm_mem.fused_matmul_reduce_scatter", args, {}, shard).flops == f.linear(80, 16, 8)


def test_chunked_loss_computes_its_gradients_in_the_forward() -> None:
    x, w, target = randn(64, 8), randn(11, 8), torch.zeros(64, dtype=torch.long)
    seen = record(lambda: F.linear_cross_entropy(x, w, target), backward=True)
    assert total(seen) == 3 * f.linear(64, 8, 11)
    args = (x, w, target, None, None, "mean", -100, 0.0, 16, "", torch.float32, False, True, False, False)
    found = cost("torch_nn._linear_cross_entropy_batch_chunked", args, {}, ())
    assert found.flops == 2 * f.linear(64, 8, 11)
