"""Real layer dimensions to operations with exact FLOPs: Llama-3-8B, ResNet-50 v1.5, BERT-base.

Each network is a list of operations by module, pass and family, at block level as the probe hooks them. FLOPs are integers
from tensor shapes; bias, norms, softmax, gathers count 0. Knows no GPU, no time, no money.

Source: FLOP conventions of the project (1 multiply-add = 2 FLOPs, padding in full, full attention scores, backward twice
the forward, except the gradient of the image at a stem).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BYTES = 2
"""Bytes of one element: 16-bit weights and activations."""


@dataclass(frozen=True)
class Op:
    """What one operation family of one module does in one unit of work.

    Args:
        layer: module path, or a name in parentheses where no module stands behind it.
        kind: op family.
        direction: fwd, bwd, optim, comm or none, as column `pass` has it.
        index: position of the module in the network; -1 without a module.
        calls: calls in one unit.
        flops: model FLOPs of one unit, all calls together.
        bytes: least memory traffic of one unit, bytes.
        is_counted: False where no formula exists, so that its calls are uncounted.
    """

    layer: str
    kind: str
    direction: str
    index: int
    calls: int
    flops: int
    bytes: int
    is_counted: bool = True


@dataclass(frozen=True)
class _Piece:
    layer: str
    kind: str
    index: int
    calls: int
    flops: int
    weights: int
    activations: int
    backward_flops: int


def _matmul(layer: str, index: int, shapes: list[tuple[int, int, int]]) -> _Piece:
    """Matrix products (M, K, N) of one module."""
    flops = sum(2 * m * k * n for m, k, n in shapes)
    weights = sum(k * n for _, k, n in shapes)
    activations = sum(m * k + m * n for m, k, n in shapes)
    return _Piece(layer, "matmul", index, len(shapes), flops, weights, activations, 2 * flops)


def _scores(layer: str, index: int, batch: int, heads: int, size: int, seq: int) -> _Piece:
    """Attention scores and their product with the values, every query against every key."""
    flops = 4 * batch * heads * seq * seq * size
    return _Piece(layer, "attention", index, 1, flops, 0, 4 * batch * heads * seq * size, 2 * flops)


def _free(layer: str, kind: str, index: int, weights: int, activations: int) -> _Piece:
    """Bandwidth-bound work that counts no FLOPs by rule."""
    return _Piece(layer, kind, index, 1, 0, weights, activations, 0)


def llama3_8b(batch: int, seq: int, blocks: int = 32) -> list[_Piece]:
    """Llama-3-8B by block: 32 blocks of 4,096 wide, 32 query and 8 key-value heads of 128, MLP 14,336, vocabulary 128,256.

    Args:
        batch: sequences.
        seq: tokens in each.
        blocks: leave the later blocks out, so that a test fleet stays small; each layer's FLOPs stay exact.
    """
    width, heads, size, kv, hidden, vocabulary = 4_096, 32, 128, 8, 14_336, 128_256
    tokens = batch * seq
    found = [_free("model.embed_tokens", "embedding", 0, tokens * width, tokens * width)]
    for i in range(blocks):
        attention = [(tokens, width, heads * size), (tokens, width, kv * size), (tokens, width, kv * size)]
        found.append(_matmul(f"model.layers.{i}.self_attn", 1 + 2 * i, [*attention, (tokens, heads * size, width)]))
        found.append(_scores(f"model.layers.{i}.self_attn", 1 + 2 * i, batch, heads, size, seq))
        mlp = [(tokens, width, hidden), (tokens, width, hidden), (tokens, hidden, width)]
        found.append(_matmul(f"model.layers.{i}.mlp", 2 + 2 * i, mlp))
    found.append(_free("model.norm", "rms_norm", 1 + 2 * blocks, width, 2 * tokens * width))
    found.append(_matmul("lm_head", 2 + 2 * blocks, [(tokens, width, vocabulary)]))
    return found


def bert_base(batch: int, seq: int, blocks: int = 12) -> list[_Piece]:
    """BERT-base with its pooler: 12 blocks of 768 wide, 12 heads of 64, MLP 3,072; the pooler sees the first token."""
    width, heads, size, hidden = 768, 12, 64, 3_072
    tokens = batch * seq
    found = [_free("embeddings", "embedding", 0, tokens * width, tokens * width)]
    for i in range(blocks):
        name = f"encoder.layer.{i}"
        found.append(_matmul(f"{name}.attention", 1 + 3 * i, [(tokens, width, width)] * 4))
        found.append(_scores(f"{name}.attention", 1 + 3 * i, batch, heads, size, seq))
        found.append(_matmul(f"{name}.intermediate", 2 + 3 * i, [(tokens, width, hidden)]))
        found.append(_matmul(f"{name}.output", 3 + 3 * i, [(tokens, hidden, width)]))
    found.append(_matmul("pooler", 1 + 3 * blocks, [(batch, width, width)]))
    return found


def _conv(batch: int, c_in: int, c_out: int, kernel: int, out: int, stride: int = 1) -> tuple[int, int, int]:
    """FLOPs, weights and activations of one square convolution with `out` x `out` positions; padding counts in full."""
    flops = 2 * batch * c_in * c_out * kernel * kernel * out * out
    before = out * stride
    return flops, c_in * c_out * kernel * kernel, batch * (c_in * before * before + c_out * out * out)


def resnet50(batch: int, seq: int = 0, blocks: int = 16) -> list[_Piece]:
    """ResNet-50 v1.5 (stride in the 3x3) on 224 x 224 images, by bottleneck; `seq` is not used.

    The image needs no gradient: the stem's backward is one product, not two.
    """
    del seq
    stem, weights, moved = _conv(batch, 3, 64, 7, 112, 2)
    found = [_Piece("conv1", "conv2d", 0, 1, stem, weights, moved, stem)]
    c_in, number = 64, 0
    for stage, (depth, narrow, out) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)], start=1):
        for place in range(depth):
            # The first block of stages 2 to 4 halves the image in its 3x3, so its 1x1 still sees the larger one.
            stride = 2 if place == 0 and stage > 1 else 1
            convs = [
                _conv(batch, c_in, narrow, 1, out * stride),
                _conv(batch, narrow, narrow, 3, out, stride),
                _conv(batch, narrow, 4 * narrow, 1, out),
            ]
            if place == 0:
                convs.append(_conv(batch, c_in, 4 * narrow, 1, out, stride))
            number += 1
            if number <= blocks:
                flops, weights, moved = (sum(c[part] for c in convs) for part in range(3))
                found.append(
                    _Piece(f"layer{stage}.{place}", "conv2d", number, len(convs), flops, weights, moved, 2 * flops)
                )
            c_in = 4 * narrow
    found.append(_matmul("fc", number + 1, [(batch, 2_048, 1_000)]))
    return found


NETWORKS: dict[str, Callable[[int, int, int], list[_Piece]]] = {
    "llama-3-8b": llama3_8b,
    "bert-base": bert_base,
    "resnet-50": resnet50,
}
PARAMETERS = {"llama-3-8b": 8_030_261_248, "bert-base": 109_482_240, "resnet-50": 25_557_032}


def forward(network: str, batch: int, seq: int, blocks: int) -> list[Op]:
    """Forward operations of one batch."""
    return [
        Op(p.layer, p.kind, "fwd", p.index, p.calls, p.flops, BYTES * (p.weights + p.activations))
        for p in NETWORKS[network](batch, seq, blocks)
    ]


def backward(network: str, batch: int, seq: int, blocks: int) -> list[Op]:
    """Backward operations of one batch, last layer first: two products for each of the forward's."""
    return [
        Op(p.layer, p.kind, "bwd", p.index, 2 * p.calls, p.backward_flops, BYTES * 2 * (p.weights + p.activations))
        for p in reversed(NETWORKS[network](batch, seq, blocks))
    ]


def training_step(network: str, batch: int, seq: int, blocks: int) -> list[Op]:
    """One optimiser step of one micro-batch: forward, backward, an uncounted custom kernel, optimiser, gradient exchange."""
    parameters = PARAMETERS[network]
    return [
        *forward(network, batch, seq, blocks),
        Op("model.rotary_emb", "custom", "fwd", 1, 1, 0, BYTES * batch * seq * 128, is_counted=False),
        *backward(network, batch, seq, blocks),
        Op("(optimizer)", "adamw", "optim", -1, 1, 0, 16 * parameters),
        Op("(grad_sync)", "all_reduce[dp]", "comm", -1, blocks, 0, BYTES * parameters),
        Op("(none)", "held_idle", "none", -1, 1, 0, 0),
    ]


def serving_batch(network: str, batch: int, seq: int, blocks: int) -> list[Op]:
    """One engine iteration: forward, result copied to the host, a stretch whose kernels nobody names."""
    return [
        *forward(network, batch, seq, blocks),
        Op("(model)", "copy_d2h", "copy", -1, 1, 0, 4 * batch * 1_000),
        Op("(none)", "unattributed_busy", "none", -1, 1, 0, 0),
        Op("(none)", "held_idle", "none", -1, 1, 0, 0),
    ]
