"""Published and measured FLOPs of single operators, forward and backward, as the framework runs them on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from seedance.flops import FlopCounter, Profile

torch.set_num_threads(1)


def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, device="meta", requires_grad=grad)


def run(function: Callable[[], torch.Tensor]) -> tuple[Profile, int, int]:
    """Profile, FLOPs forward and FLOPs backward."""
    with FlopCounter() as counter:
        function().sum().backward()
    ops = counter.profile.ops
    assert counter.profile.uncounted == ()
    return counter.profile, *(sum(op.flops for op in ops if op.pass_ == pass_) for pass_ in ("fwd", "bwd"))


def conv(
    kind: Any, c_in: int, c_out: int, kernel: int, shape: tuple[int, ...], **named: int
) -> Callable[[], torch.Tensor]:
    return lambda: kind(c_in, c_out, kernel, device="meta", **named)(tensor(*shape))


class Lora(nn.Module):
    """A frozen layer with a trained low-rank path beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4096, 4096, bias=False, device="meta").requires_grad_(False)
        self.a = nn.Linear(4096, 16, bias=False, device="meta")
        self.b = nn.Linear(16, 4096, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


IMAGE = (8, 64, 56, 56)

ROWS: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "linear": (lambda: nn.Linear(4096, 11008, device="meta")(tensor(8, 4096)), 721_420_288, 1_442_840_576),
    "linear 3-D": (lambda: nn.Linear(768, 3072, device="meta")(tensor(2, 128, 768)), 1_207_959_552, 2_415_919_104),
    "bmm": (lambda: torch.bmm(tensor(4, 32, 64), tensor(4, 64, 16)), 262_144, 524_288),
    "baddbmm": (lambda: torch.baddbmm(tensor(4, 32, 16), tensor(4, 32, 64), tensor(4, 64, 16)), 262_144, 524_288),
    "matmul 4-D": (lambda: tensor(2, 8, 32, 64) @ tensor(2, 8, 64, 32), 2_097_152, 4_194_304),
    "einsum": (
        lambda: torch.einsum("bhqd,bhkd->bhqk", tensor(2, 8, 32, 64), tensor(2, 8, 48, 64)),
        3_145_728,
        6_291_456,
    ),
    "conv2d": (conv(nn.Conv2d, 64, 128, 3, IMAGE, padding=1), 3_699_376_128, 7_398_752_256),
    "conv2d groups": (conv(nn.Conv2d, 64, 128, 3, IMAGE, padding=1, groups=32), 115_605_504, 231_211_008),
    "conv2d depthwise": (conv(nn.Conv2d, 64, 64, 3, IMAGE, padding=1, groups=64), 28_901_376, 57_802_752),
    "conv2d stem": (conv(nn.Conv2d, 3, 64, 7, (1, 3, 224, 224), stride=2, padding=3), 236_027_904, 472_055_808),
    "conv2d dilation": (conv(nn.Conv2d, 64, 64, 3, (1, 64, 32, 32), padding=2, dilation=2), 75_497_472, 150_994_944),
    "conv1d": (conv(nn.Conv1d, 80, 384, 3, (1, 80, 3000), padding=1), 552_960_000, 1_105_920_000),
    "conv3d": (conv(nn.Conv3d, 3, 64, 3, (1, 3, 8, 32, 32), padding=1), 84_934_656, 169_869_312),
    "transposed": (conv(nn.ConvTranspose2d, 64, 32, 4, (1, 64, 16, 16), stride=2, padding=1), 16_777_216, 33_554_432),
    "transposed groups": (
        conv(nn.ConvTranspose2d, 64, 32, 4, (1, 64, 16, 16), stride=2, padding=1, groups=4),
        4_194_304,
        8_388_608,
    ),
    "LoRA": (lambda: Lora()(tensor(128, 4096)), 4_328_521_728, 4_362_076_160),
    "LoRA first": (lambda: Lora()(tensor(128, 4096, grad=False)), 4_328_521_728, 50_331_648),
    "trained": (
        lambda: nn.Linear(4096, 4096, bias=False, device="meta")(tensor(128, 4096)),
        4_294_967_296,
        8_589_934_592,
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("meta")(tensor(4, 64)),
        65_536,
        131_072,
    ),
    "GRU": (lambda: nn.GRU(64, 128, device="meta")(tensor(10, 2, 64))[0], 2_949_120, 5_898_240),
    "mv": (lambda: tensor(64, 32).mv(tensor(32)), 4096, 4096),
}
"""What runs, FLOPs forward, FLOPs backward. The gradient of mv to its matrix is an outer product, made elementwise."""


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    function, forward, backward = ROWS[name]
    profile, *found = run(function)
    if name == "GRU":  # step by step: nothing goes back into the state before the first one
        backward -= 2 * 2 * 3 * 128 * 128
    assert found == [forward, backward]
    assert profile.hw_flops == profile.flops == profile.flops_full
    assert profile.host_ns is None


def attention(heads: int, causal: bool) -> Callable[[], torch.Tensor]:
    def attend() -> torch.Tensor:
        query, key = torch.ones(2, 8, 128, 64, requires_grad=True), torch.ones(2, heads, 128, 64, requires_grad=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return nn.functional.scaled_dot_product_attention(query, key, key, is_causal=causal, enable_gqa=heads != 8)

    return attend


@pytest.mark.parametrize(
    ("heads", "causal", "forward", "backward"),
    [(8, False, 67_108_864, 134_217_728), (8, True, 33_816_576, 67_633_152), (2, False, 67_108_864, 134_217_728)],
    ids=["full", "causal", "grouped heads"],
)
def test_attention(heads: int, causal: bool, forward: int, backward: int) -> None:
    profile, *found = run(attention(heads, causal))
    assert found == [forward, backward]
    assert profile.hw_flops == forward + backward * 5 // 4
    assert profile.flops_full == 67_108_864 + 134_217_728


def test_lstm() -> None:
    lstm, x = nn.LSTM(64, 128), torch.ones(10, 2, 64, requires_grad=True)
    _, *found = run(lambda: lstm(x)[0])
    assert found == [3_932_160, 7_864_320]
