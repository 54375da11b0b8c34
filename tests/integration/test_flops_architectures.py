"""FlopCounter beside the framework's own counter on many architectures, forward and backward, on the same run.

Where that counter is known to be wrong the test says so and names both numbers; what it does not know at all is in the
second half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.cond import cond_op
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seedance.flops import FlopCounter, Profile
from tests.architectures import ARCHITECTURES, IDS, outputs, quiet_transformers

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(past_key_values|sequential Mamba|torch.sparse|lengths|norm_first).*",
)

aten = torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with quiet_transformers():
        yield


def grouped_gradients(grad: Any, x: Any, w: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    """What the framework's counter ought to say of a convolution's backward: it takes a weight's gradient g times."""
    transposed, mask = rest[4], rest[7]
    positions = x if transposed else grad
    return 2 * positions[0] * prod(positions[2:]) * prod(w) * sum(map(bool, mask[:2]))


RIGHT = {aten.convolution_backward: grouped_gradients}


def by_module(profile: Profile, root: str) -> dict[str, int]:
    """FLOPs of every module with all that is inside it, under the names that the framework's counter gives."""
    sums: dict[str, int] = {}
    for op in profile.ops:
        parts = [root] if op.layer == "(model)" else [root, *op.layer.split(".")]
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            sums[name] = sums.get(name, 0) + op.flops
    return sums


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_forward_and_backward(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()
    with torch.no_grad(), FlopCounter(model) as ours, FlopCounterMode(display=False) as theirs:
        model(**inputs)
    assert ours.profile.flops == theirs.get_total_flops() > 0
    modules = by_module(ours.profile, type(model).__name__)
    for module, counts in theirs.get_flop_counts().items():
        if module != "Global":
            assert modules.get(module, 0) == sum(counts.values()), module

    with FlopCounter(model) as ours, FlopCounterMode(display=False, custom_mapping=RIGHT) as theirs:
        outputs(model(**inputs)).backward()
    assert ours.profile.flops == theirs.get_total_flops()
    assert ours.profile.flops == ours.profile.hw_flops == ours.profile.flops_full
    assert ours.profile.uncounted == ()


def test_every_layer_of_a_language_model_costs_twice_backward() -> None:
    """The framework's counter takes 516,096 for a projection of 245,760 and so on: hooks find no layer in a backward."""
    model = ARCHITECTURES["llama"].make()
    with FlopCounter(model) as ours, FlopCounterMode(display=False) as theirs:
        outputs(model(input_ids=IDS)).backward()
    found = ours.profile.by_block(9)
    layers = {layer for layer, _, _ in found}
    assert len(layers) == 2 * (7 + 1) + 1  # seven projections and the scores in each block, and the head
    assert all(found[layer, "bwd", "fp32"] == 2 * found[layer, "fwd", "fp32"] for layer in layers)
    name = "model.layers.0.self_attn.k_proj"
    assert (found[name, "fwd", "fp32"], found[name, "bwd", "fp32"]) == (24_576, 49_152)
    wrong = sum(theirs.get_flop_counts()[f"LlamaForCausalLM.{name}"].values())
    assert (wrong, sum(found[name, pass_, "fp32"] for pass_ in ("fwd", "bwd"))) == (172_032, 73_728)


# --- where the framework's counter of 2.13 is wrong: its number, and ours -------------------------------------------


def both(run: Callable[[], Any]) -> tuple[int, int]:
    """What the framework's counter says, and what we say (executed FLOPs)."""
    with FlopCounter() as ours, FlopCounterMode(display=False) as theirs:
        run()
    assert ours.profile.uncounted == ()
    return theirs.get_total_flops(), ours.profile.hw_flops


def convolution(kind: type[nn.Module], *sizes: int, shape: tuple[int, ...], **named: int) -> Callable[[], Any]:
    layer = kind(*sizes, bias=False, **named)
    x = torch.randn(shape, requires_grad=True)
    return lambda: layer(x).sum().backward()


@pytest.mark.parametrize(
    ("layer", "theirs", "ours"),
    [
        (
            (nn.Conv2d, 64, 128, 3, {"padding": 1, "groups": 32}, (8, 64, 56, 56)),
            115_605_504 + 3_814_981_632,
            346_816_512,
        ),
        ((nn.Conv2d, 64, 64, 3, {"padding": 1, "groups": 64}, (8, 64, 56, 56)), 28_901_376 + 1_878_589_440, 86_704_128),
        (
            (nn.ConvTranspose2d, 64, 32, 4, {"stride": 2, "padding": 1, "groups": 4}, (1, 64, 16, 16)),
            4_194_304 + 20_971_520,
            12_582_912,
        ),
    ],
    ids=["groups", "depthwise", "transposed groups"],
)
def test_groups_are_taken_g_times_in_the_gradient_of_the_weight(layer: Any, theirs: int, ours: int) -> None:
    kind, c_in, c_out, kernel, named, shape = layer
    assert both(convolution(kind, c_in, c_out, kernel, shape=shape, **named)) == (theirs, ours)


def heads(count: int = 8) -> torch.Tensor:
    return torch.randn(2, count, 128, 64, requires_grad=True)


def attend(query: torch.Tensor, key: torch.Tensor, **named: Any) -> None:
    nn.functional.scaled_dot_product_attention(query, key, key, **named).sum().backward()


def test_attention_of_cpus_is_not_counted() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert both(lambda: attend(heads(), heads())) == (0, 67_108_864 + 167_772_160)
    with sdpa_kernel(SDPBackend.MATH):
        assert both(lambda: attend(heads(), heads())) == (201_326_592, 201_326_592)


def test_causal_attention_is_counted_in_full() -> None:
    with sdpa_kernel(SDPBackend.MATH):  # runs whole scores, and is counted as such
        assert both(lambda: attend(heads(), heads(), is_causal=True)) == (201_326_592, 201_326_592)
    with FlopCounter() as counter, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attend(heads(), heads(), is_causal=True)
    assert counter.profile.flops == 101_449_728
    assert counter.profile.flops_full == 201_326_592
    assert counter.profile.hw_flops == 33_816_576 + 67_633_152 * 5 // 4


def test_grouped_heads_cost_what_their_queries_do() -> None:
    with FlopCounter() as counter, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attend(heads(), heads(2), enable_gqa=True)
    assert counter.profile.flops == 201_326_592


def test_fused_recurrent_layers_are_not_counted() -> None:
    lstm, x = nn.LSTM(64, 128), torch.randn(10, 2, 64, requires_grad=True)
    assert both(lambda: lstm(x)[0].sum().backward()) == (0, 11_796_480)
    gru = nn.GRU(64, 128)  # decomposes
    assert both(lambda: gru(x)) == (2_949_120, 2_949_120)


@pytest.mark.parametrize(
    ("run", "ours"),
    [
        (lambda: torch.randn(64, 32).mv(torch.randn(32)), 4096),
        (lambda: torch.addmv(torch.randn(64), torch.randn(64, 32), torch.randn(32)), 4096),
        (lambda: torch.dot(torch.randn(32), torch.randn(32)), 64),
        (lambda: torch.addbmm(torch.randn(8, 8), torch.randn(3, 8, 4), torch.randn(3, 4, 8)), 2 * 3 * 8 * 4 * 8),
        (lambda: torch.addr(torch.randn(8, 4), torch.randn(8), torch.randn(4)), 32),
        (lambda: torch._int_mm(torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 32, dtype=torch.int8)), 131_072),
        (lambda: nn.Bilinear(4, 4, 2)(torch.randn(2, 4), torch.randn(2, 4)), 2 * 2 * 2 * 4 * 4 + 2 * 2 * 2 * 4),
        (lambda: torch.sparse.mm(torch.eye(8).to_sparse(), torch.randn(8, 4)), 2 * 8 * 4),
    ],
    ids=["mv", "addmv", "dot", "addbmm", "addr", "_int_mm", "bilinear", "sparse"],
)
def test_products_that_are_not_counted(run: Callable[[], Any], ours: int) -> None:
    assert both(run) == (0, ours)


def test_grouped_experts_are_not_counted() -> None:
    model = ARCHITECTURES["mixtral"].make()
    with torch.no_grad(), FlopCounter() as ones, FlopCounterMode(display=False) as seen:
        model(input_ids=IDS)
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert both(lambda: model(input_ids=IDS)) == (479_232, 1_658_880)
    assert (seen.get_total_flops(), ones.profile.flops) == (1_658_880, 1_658_880)


def test_the_fast_path_of_an_encoder_is_not_counted() -> None:
    layer, x = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), torch.randn(2, 12, 32)
    counted = 2 * 24 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 2 * 12 * 12 * 32
    with torch.no_grad():
        assert both(lambda: layer(x)) == (0, counted)
    with sdpa_kernel(SDPBackend.MATH):
        assert both(lambda: layer(x)) == (counted, counted)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_dynamically_quantised_layers_are_not_counted() -> None:
    weight = torch.ones(16, 32)
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), None)
    with FlopCounter() as ours, FlopCounterMode(display=False) as theirs:
        torch.ops.quantized.linear_dynamic(torch.randn(4, 32), packed)
    assert theirs.get_total_flops() == 0
    assert ours.profile.by_block(1) == {("(step)", "fwd", "int8"): 2 * 4 * 32 * 16}


def test_the_larger_branch_is_taken() -> None:
    x = torch.ones(4, 4)
    branches = torch.tensor(True), lambda x: (x @ x,), lambda x: (x @ x @ x,), (x,)
    with FlopCounterMode(display=False) as theirs:
        cond_op(*branches)
    with FlopCounter() as ours:
        cond_op(*branches)
    assert (theirs.get_total_flops(), ours.profile.flops) == (256, 128)


def test_values_of_other_size_than_keys() -> None:
    query, value = torch.randn(2, 8, 128, 64), torch.randn(2, 8, 128, 32)
    with sdpa_kernel(SDPBackend.MATH):
        found = both(lambda: nn.functional.scaled_dot_product_attention(query, query, value))
    assert found == (2 * 2 * 8 * 128 * 128 * (64 + 32),) * 2
