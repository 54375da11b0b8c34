"""FLOPs of attention in all its forms: fused on the CPU, by hand, and the kernels of devices on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from seedance.flops import formulas as f
from seedance.flops.operators import Cost, cost
from tests.flop_recorder import Recorder, Seen, randn, record, total

torch.set_num_threads(1)


def attention(
    kernel: SDPBackend, *, heads: int = 8, kv_heads: int | None = None, sq: int = 16, sk: int = 16, causal: bool = False
) -> Callable[[], torch.Tensor]:
    q, k, v = randn(2, heads, sq, 8), randn(2, kv_heads or heads, sk, 8), randn(2, kv_heads or heads, sk, 8)

    def run() -> torch.Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads is not None)

    return run


def costs(seen: list[Seen], name: str) -> list[Cost]:
    return [one.cost for one in seen if one.name == name]


@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
@pytest.mark.parametrize(("sq", "sk"), [(16, 16), (5, 16), (1, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_three_ways(kv_heads: int | None, sq: int, sk: int, causal: bool) -> None:
    """Fused on the CPU, by the math kernel and by hand: the same full product, whatever the number of key heads."""
    full = f.attention(2, 8, sq * sk, 8)
    fused = record(attention(SDPBackend.FLASH_ATTENTION, kv_heads=kv_heads, sq=sq, sk=sk, causal=causal), backward=True)
    forward, backward = (
        costs(fused, f"aten._scaled_dot_product_flash_attention_for_cpu{which}")[0] for which in ("", "_backward")
    )
    # The framework aligns its causal mask to the first key.
    pairs = f.attention_pairs(sq, sk, causal=causal, cache=0)
    assert forward == Cost(f.attention(2, 8, pairs, 8), f.attention(2, 8, pairs, 8), full)
    assert backward == Cost(2 * forward.flops, 5 * forward.flops // 2, 2 * full)
    assert all(one.torch is None for one in fused), "torch counts it now: compare with it"
    math = record(attention(SDPBackend.MATH, kv_heads=kv_heads, sq=sq, sk=sk, causal=causal), backward=True)
    assert {one.name for one in math} == {"aten.bmm"}
    assert total(math) == 3 * full == sum(one.torch for one in math)
    if kv_heads is None:
        q, k = randn(2, 8, sq, 8), randn(2, 8, sk, 8)
        assert total(record(lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ k, backward=True)) == 3 * full


META = {"device": "meta", "dtype": torch.bfloat16}
KERNELS = ("flash", "efficient", "cudnn")


def kernel_calls(kernel: str, causal: bool, *, kv_heads: int = 8, dv: int = 64) -> list[Seen]:
    """Forward and backward of a device's kernel on the meta device, called as the framework does."""
    ops = torch.ops.aten
    q = torch.empty(2, 8, 128, 64, **META)
    k, v = torch.empty(2, kv_heads, 96 if not causal else 128, 64, **META), None
    v = torch.empty(2, kv_heads, k.shape[2], dv, **META)
    recorder = Recorder()
    with recorder:
        if kernel == "flash":
            out = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
            ops._scaled_dot_product_flash_attention_backward(
                out[0], q, k, v, out[0], out[1], out[2], out[3], out[4], out[5], 0.0, causal, out[6], out[7]
            )
        elif kernel == "efficient":
            out = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
            ops._scaled_dot_product_efficient_attention_backward(
                out[0], q, k, v, None, out[0], out[1], out[2], out[3], 0.0, [True, True, True, False], causal
            )
        else:
            out = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
            ops._scaled_dot_product_cudnn_attention_backward(
                out[0], q, k, v, out[0], out[1], out[6], out[7], None, out[2], out[3], 128, 128, 0.0, causal
            )
    return recorder.seen


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_devices(kernel: str, causal: bool) -> None:
    forward, backward = kernel_calls(kernel, causal)
    sk = 128 if causal else 96
    full, pairs = 128 * sk, 128 * 129 // 2 if causal else 128 * sk
    assert forward.cost == Cost(f.attention(2, 8, pairs, 64), f.attention(2, 8, pairs, 64), f.attention(2, 8, full, 64))
    assert backward.cost == Cost(
        f.attention_backward(2, 8, pairs, 64),
        f.attention_backward(2, 8, pairs, 64, recompute=True),
        f.attention_backward(2, 8, full, 64),
    )
    # Torch counts causal attention in full, and the recomputed scores of the backward with the model.
    assert forward.torch == forward.cost.flops_full
    assert backward.torch == f.attention_backward(2, 8, full, 64, recompute=True)


def test_published_attention() -> None:
    """q, k, v of [2, 8, 128, 64]."""
    forward, backward = kernel_calls("flash", True)
    assert (forward.cost.flops, backward.cost.flops) == (33816576, 67633152)
    assert (forward.cost.flops_full, backward.cost.flops_full) == (67108864, 134217728)
    q = torch.empty(2, 8, 128, 64, **META)
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    args = (q, q, q, q, out[0], out[1], None, None, 128, 128, 0.0, False, None, None)
    backward_cost = cost("aten._scaled_dot_product_flash_attention_backward", args, {}, (q, q, q))
    assert (backward_cost.flops, backward_cost.hw_flops) == (134217728, 167772160)


def test_heads_of_other_sizes_and_fewer_key_heads() -> None:
    q, k, v = (torch.empty(2, h, s, d, **META) for h, s, d in ((8, 10, 64), (2, 12, 64), (2, 12, 32)))
    out = torch.empty(2, 8, 10, 32, **META)
    for name, args in (
        ("_scaled_dot_product_fused_attention_overrideable", (q, k, v)),
        ("_scaled_dot_product_flash_attention", (q, k, v)),
        ("_scaled_dot_product_attention_math", (q, k, v)),
        ("scaled_dot_product_attention", (q, k, v)),
    ):
        found = cost(f"aten.{name}", args, {}, (out,))
        assert found == Cost(*(3 * [2 * 2 * 8 * 10 * 12 * (64 + 32)])), name
    args = (out, q, k, v, None, [True] * 4, out, out, None, None, 10, 12, 0.0, False, None, None)
    back = cost("aten._scaled_dot_product_fused_attention_overrideable_backward", args, {}, (q, k, v))
    assert back.flops == 2 * 2 * 2 * 8 * 10 * 12 * (64 + 32)
    assert back.hw_flops == back.flops + 2 * 2 * 8 * 10 * 12 * 64


def packed(lengths: list[int], heads: int, size: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return torch.empty(sum(lengths), heads, size, device="meta"), starts.to(device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_packed_sequences(causal: bool, window: int | None) -> None:
    """Each sequence sees itself alone; a causal mask of unequal lengths is aligned to the last key."""
    q, starts_q = packed([5, 3, 1], 4, 8)
    k, starts_k = packed([6, 3, 4], 2, 8)
    named = {"window_size_left": window, "window_size_right": window}
    args = (q, k, k, starts_q, starts_k, 5, 6, 0.0, causal, False)
    found = cost("aten._flash_attention_forward", args, named, (q,))

    def pairs(sq: int, sk: int) -> int:
        right = 0 if causal else window
        return f.banded_pairs(sq, sk, offset=sk - sq, left=window, right=right)

    expected = sum(pairs(sq, sk) for sq, sk in ((5, 6), (3, 3), (1, 4)))
    assert found.flops == f.attention(1, 4, expected, 8)
    assert found.flops_full == f.attention(1, 4, 30 + 9 + 4, 8)
    assert not found.is_bound
    back = cost("aten._flash_attention_backward", (q, q, k, k, q, q, *args[3:9], None, None), named, (q, k, k))
    assert (back.flops, back.hw_flops) == (2 * found.flops, 5 * found.flops // 2)
    flash = (q, k, k, starts_q, starts_k, 5, 6, 0.0, None, causal, -1 if window is None else window, window or -1)
    assert cost("flash_attn._flash_attn_varlen_forward", flash, {}, (q,)) == found
    flash = (q, q, k, k, q, q, q, k, k, *flash[3:])
    assert cost("flash_attn._flash_attn_varlen_backward", flash, {}, (q,)) == back
    varlen = (q, k, k, starts_q, starts_k, 5, 6, causal, None, [-1 if window is None else window] * 2)
    assert cost("torch_attn._varlen_attn", varlen, {}, (q,)) == found
    assert cost("torch_attn._varlen_attn_out", (q, *varlen), {}, (q,)) == found
    varlen = (q, q, k, k, q, q, *varlen[3:8], None, *varlen[8:])
    assert cost("torch_attn._varlen_attn_backward", varlen, {}, (q,)) == back


def test_packed_sequences_of_unknown_lengths_are_bounded() -> None:
    """Without data only sums and maxima are known: never less than any lengths that fit them, and said to be a bound."""
    lengths = [5, 3, 1, 4]
    q, starts = packed(lengths, 4, 8, device="meta")
    args = (q, q, q, starts, starts, 5, 5, 0.0, True, False)
    found = cost("aten._flash_attention_forward", args, {}, (q,))
    true = f.attention(1, 4, sum(n * (n + 1) // 2 for n in lengths), 8)
    assert found.is_bound
    assert true <= found.flops == f.attention(1, 4, 2 * 15 + 6, 8)
    assert found.flops_full == f.attention(1, 4, 2 * 25 + 9, 8)
    k, starts_k = packed([6, 6, 6, 6], 4, 8, device="meta")
    crossed = cost("aten._flash_attention_forward", (q, k, k, starts, starts_k, 5, 6, 0.0, False, False), {}, (q,))
    assert crossed.is_bound
    assert crossed.flops == f.attention(1, 4, 13 * 6, 8)


def test_packed_sequences_of_fake_tensors_are_bounded() -> None:
    q, starts = packed([5, 3], 4, 8)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(starts)
    found = cost("aten._flash_attention_forward", (q, q, q, fake, fake, 5, 5, 0.0, False, False), {}, (q,))
    assert (found.is_bound, found.flops) == (True, f.attention(1, 4, 25 + 9, 8))


def test_values_of_a_device_are_read_only_when_allowed() -> None:
    class OnDevice:
        """What a tensor on a GPU shows without being waited for."""

        shape = (4,)
        dtype = torch.int32
        device = torch.device("cuda", 0)
        read = 0

        def tolist(self) -> list[int]:
            self.read += 1
            return [0, 2, 3, 7]

    starts, q = OnDevice(), torch.empty(7, 4, 8, device="meta")
    args = (q, q, q, starts, starts, 4, 4, 0.0, False, False)
    assert cost("aten._flash_attention_forward", args, {}, (q,)).is_bound
    assert starts.read == 0
    found = cost("aten._flash_attention_forward", args, {}, (q,), read_values=True)
    assert (found.flops, found.is_bound) == (f.attention(1, 4, 4 + 1 + 16, 8), False)


@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_efficient_kernel_below_the_public_one(mask: int, window: int | None) -> None:
    """(samples, sequence, heads, size); mask 1 is causal from the first key, 2 from the last."""
    q, k = torch.empty(2, 5, 4, 8), torch.empty(2, 9, 4, 8)
    args = (q, k, k, None, None, None, None, None, 0.0, mask)
    found = cost("aten._efficient_attention_forward", args, {"window_size": window}, (q,))
    offset = 9 - 5 if mask != 1 else 0
    pairs = f.banded_pairs(5, 9, offset=offset, left=None if window is None else 2, right=0 if mask else None)
    assert found.flops == f.attention(2, 4, pairs, 8)
    args = (q, q, k, k, None, q, None, None, 5, 9, q, 0.0, None, None, mask, False)
    back = cost("aten._efficient_attention_backward", args, {"window_size": window}, (q, k, k))
    assert back.flops == 2 * found.flops


def test_cudnn_kernel_below_the_public_one() -> None:
    q = torch.empty(2, 4, 6, 8, device="meta")
    args = (q, q, q, None, None, None, 6, 6, False, 0.0, True)
    found = cost("aten._cudnn_attention_forward", args, {}, (q,))
    assert found.flops == f.attention(2, 4, 21, 8)
    args = (q, q, q, q, q, q, None, None, None, None, None, 6, 6, 0.0, True)
    assert cost("aten._cudnn_attention_backward", args, {}, (q, q, q)).flops == 2 * found.flops
    rows, starts = packed([4, 2], 4, 8)
    args = (rows, rows, rows, None, starts, starts, 4, 4, False, 0.0, True)
    assert cost("aten._cudnn_attention_forward", args, {}, (rows,)).flops == f.attention(1, 4, 10 + 3, 8)


def test_flex_attention_counts_the_blocks_that_it_computes() -> None:
    q = torch.empty(2, 4, 256, 16, device="meta")
    numbers = {"partial": torch.ones(1, 1, 4), "full": torch.tensor([[[0, 1, 2, 3]]])}
    mask = (256, 256, numbers["partial"], None, numbers["full"], None, None, None, None, None, 64, 64, lambda *_: True)
    found = cost("higher_order.flex_attention", (q, q, q, None, mask, 1.0, {}), {}, (q,))
    assert found.flops == f.attention(2, 4, (4 + 6) * 64 * 64, 16)
    assert found.flops_full == f.attention(2, 4, 256 * 256, 16)
    assert found.is_bound
    args = (q, q, q, q, q, q, q, None, None, mask, 1.0, {})
    back = cost("higher_order.flex_attention_backward", args, {}, (q, q, q))
    assert (back.flops, back.hw_flops) == (2 * found.flops, 5 * found.flops // 2)
    unread = (256, 256, numbers["partial"].to("meta"), *mask[3:])
    whole = cost("higher_order.flex_attention", (q, q, q, None, unread, 1.0, {}), {}, (q,))
    assert whole.flops == found.flops_full
    assert cost("higher_order.flex_attention", (q, q, q, None, None, 1.0, {}), {}, (q,)) == whole


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_encoder_layers_fused_and_not() -> None:
    """Under `no_grad` in eval an encoder layer is one operator: the same FLOPs as its parts, without padding less."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = randn(2, 9, 32, grad=False)
    parts = record(lambda: layer(x))
    with torch.no_grad():
        fused = record(lambda: layer(x))
    assert [one.name for one in fused] == ["aten._transformer_encoder_layer_fwd"]
    assert total(fused) == sum(one.cost.flops_full for one in parts)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 9, [False] * 5 + [True] * 4])
    with torch.no_grad():
        ragged = total(record(lambda: encoder(x, src_key_padding_mask=padding)))
    one = f.linear(9 + 5, 32, 4 * 32) + 2 * f.linear(9 + 5, 32, 64) + f.attention(1, 1, 81 + 25, 32)
    assert ragged == 2 * one


def test_multi_head_attention_fused_and_not() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), randn(2, 9, 32, grad=False)
    parts = total(record(lambda: layer(x, x, x)))
    with torch.no_grad():
        fused = record(lambda: layer(x, x, x))
    assert [one.name for one in fused] == ["aten._native_multi_head_attention"]
    assert total(fused) == parts == 4 * f.linear(18, 32, 32) + f.attention(2, 4, 81, 8)
