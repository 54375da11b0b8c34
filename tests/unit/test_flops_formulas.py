"""FLOP formulas: published integers to the digit, and every formula against loops that count multiply-adds one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedance.errors import SeedanceError
from seedance.flops import formulas as f

LLAMA_LAYERS, LLAMA_HEADS, LLAMA_HEAD = 32, 32, 128


def llama(tokens: int, pairs: int, logits: int | None = None) -> int:
    """Forward of Llama-3-8B: its projections, grouped-query attention, gated MLP and logits, layer by layer."""
    hidden, kv, inner, vocabulary = 4096, 8 * LLAMA_HEAD, 14336, 128256
    layer = (
        2 * f.linear(tokens, hidden, hidden)
        + 2 * f.linear(tokens, hidden, kv)
        + 3 * f.linear(tokens, hidden, inner)
        + f.attention(1, LLAMA_HEADS, pairs, LLAMA_HEAD)
    )
    return LLAMA_LAYERS * layer + f.linear(tokens if logits is None else logits, hidden, vocabulary)


def bert(tokens: int) -> int:
    """Forward of BERT-base: 12 layers, and the pooler on the first token."""
    layer = 4 * f.linear(tokens, 768, 768) + 2 * f.linear(tokens, 768, 3072)
    attention = f.attention(1, 12, f.attention_pairs(tokens, tokens), 64)
    return 12 * (layer + attention) + f.linear(1, 768, 768)


def resnet50(*, stride_in_3x3: bool) -> int:
    """Forward of ResNet-50 on one image of 224 x 224: its 53 convolutions and the classifier."""

    def conv(c_in: int, c_out: int, kernel: int, size: int, stride: int) -> tuple[int, int]:
        out = f.conv_output(size, kernel, stride=stride, padding=kernel // 2)
        return f.conv(1, c_in, c_out, (kernel, kernel), (out, out)), out

    total, size = conv(3, 64, 7, 224, 2)
    size = f.conv_output(size, 3, stride=2, padding=1)
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            s = stride if block == 0 else 1
            first, mid = conv(channels, width, 1, size, 1 if stride_in_3x3 else s)
            second, out = conv(width, width, 3, mid, s if stride_in_3x3 else 1)
            third, _ = conv(width, 4 * width, 1, out, 1)
            total += first + second + third
            if block == 0:
                total += conv(channels, 4 * width, 1, size, s)[0]
            channels, size = 4 * width, out
    return total + f.linear(1, 2048, 1000)


def mixtral(context: int) -> int:
    """Forward of one token of Mixtral-8x7B that sees `context` keys."""
    layer = (
        2 * f.linear(1, 4096, 4096)
        + 2 * f.linear(1, 4096, 1024)
        + f.moe(1, 4096, 14336, top_k=2, experts=8)
        + f.attention(1, 32, context, 128)
    )
    return 32 * layer + f.linear(1, 4096, 32000)


def twice(flops: int) -> tuple[int, int]:
    return flops, 2 * flops


MHA = {"batch": 2, "q_heads": 8, "dk": 64}
FULL, CAUSAL = f.attention_pairs(128, 128), f.attention_pairs(128, 128, causal=True)
WINDOW = f.attention_pairs(128, 128, causal=True, window=32)
STEM = f.conv(1, 3, 64, (7, 7), (112, 112))
LLAMA_128 = llama(128, 128 * 128)
LLAMA_RECOMPUTED = LLAMA_128 - f.linear(128, 4096, 128256) - LLAMA_LAYERS * f.linear(128, 14336, 4096)

# Forward and backward, as computed and as expected; None where no backward is stated. The integers were measured with
# torch 2.13.0 or computed by hand; where torch's own counter is known to be wrong, the right ones stand here.
REFERENCE: dict[str, tuple[tuple[int, int | None], tuple[int, int | None]]] = {
    "linear": (twice(f.linear(8, 4096, 11008)), (721420288, 1442840576)),
    "linear, leading dimensions": (twice(f.linear(2 * 128, 768, 3072)), (1207959552, 2415919104)),
    "bmm": (twice(f.matmul(32, 64, 16, batch=4)), (262144, 524288)),
    "baddbmm": (twice(f.matmul(32, 64, 16, 4)), (262144, 524288)),
    "matmul 4-D": (twice(f.matmul(32, 64, 32, batch=2 * 8)), (2097152, 4194304)),
    "einsum": (twice(f.einsum("bhqd,bhkd->bhqk", [(2, 8, 32, 64), (2, 8, 48, 64)])), (3145728, 6291456)),
    "mv": ((f.mv(64, 32), None), (4096, None)),
    "_int_mm": ((f.matmul(32, 64, 32), None), (131072, None)),
    "conv2d": (twice(f.conv(8, 64, 128, (3, 3), (56, 56))), (3699376128, 7398752256)),
    "conv2d groups=32": (twice(f.conv(8, 64, 128, (3, 3), (56, 56), 32)), (115605504, 231211008)),
    "conv2d depthwise": (twice(f.conv(8, 64, 64, (3, 3), (56, 56), 64)), (28901376, 57802752)),
    "conv2d stem": (twice(STEM), (236027904, 472055808)),
    "conv2d dilation 2": (twice(f.conv(1, 64, 64, (3, 3), (32, 32))), (75497472, 150994944)),
    "conv1d": (twice(f.conv(1, 80, 384, (3,), (3000,))), (552960000, 1105920000)),
    "conv3d": (twice(f.conv(1, 3, 64, (3, 3, 3), (8, 32, 32))), (84934656, 169869312)),
    "conv_transpose2d": (twice(f.conv_transpose(1, 64, 32, (4, 4), (16, 16))), (16777216, 33554432)),
    "conv_transpose2d groups=4": (twice(f.conv_transpose(1, 64, 32, (4, 4), (16, 16), 4)), (4194304, 8388608)),
    "SDPA full": ((f.attention(pairs=FULL, **MHA), f.attention_backward(pairs=FULL, **MHA)), (67108864, 134217728)),
    "SDPA full, fused backward": (
        (f.attention(pairs=FULL, **MHA), f.attention_backward(pairs=FULL, **MHA, recompute=True)),
        (67108864, 167772160),
    ),
    "SDPA causal exact": (
        (f.attention(pairs=CAUSAL, **MHA), f.attention_backward(pairs=CAUSAL, **MHA)),
        (33816576, 67633152),
    ),
    "SDPA causal half-rule": (
        (f.attention(pairs=FULL, **MHA) // 2, f.attention_backward(pairs=FULL, **MHA) // 2),
        (33554432, 67108864),
    ),
    "SDPA sliding window 32": (
        (f.attention(pairs=WINDOW, **MHA), f.attention_backward(pairs=WINDOW, **MHA)),
        (14745600, 29491200),
    ),
    "SDPA GQA": (twice(f.attention(2, 8, FULL, 64)), (67108864, 134217728)),
    "GRU": (twice(f.gru(2, 10, 64, 128)), (2949120, 5898240)),
    "LSTM": (twice(f.lstm(2, 10, 64, 128)), (3932160, 7864320)),
    "LoRA, input needs grad": (
        (f.lora(128, 4096, 4096, 16), f.lora_backward(128, 4096, 4096, 16)),
        (4328521728, 4362076160),
    ),
    "LoRA, input needs no grad": (
        (f.lora(128, 4096, 4096, 16), f.lora_backward(128, 4096, 4096, 16, input_grad=False)),
        (4328521728, 50331648),
    ),
    "linear fully trained": (
        (f.linear(128, 4096, 4096), f.linear_backward(128, 4096, 4096)),
        (4294967296, 8589934592),
    ),
    "mlp plain": (twice(2 * f.linear(4, 64, 64)), (65536, 131072)),
    "mlp checkpointed reentrant": (
        (2 * f.linear(4, 64, 64), 2 * f.linear_backward(4, 64, 64) + 2 * f.linear(4, 64, 64)),
        (65536, 196608),
    ),
    "mlp checkpointed non-reentrant": (
        (2 * f.linear(4, 64, 64), 2 * f.linear_backward(4, 64, 64) + f.linear(4, 64, 64)),
        (65536, 163840),
    ),
    "ResNet-50 v1.5": (
        (resnet50(stride_in_3x3=True), 2 * resnet50(stride_in_3x3=True) - STEM),
        (8178368512, 16120709120),
    ),
    "ResNet-50 v1": (
        (resnet50(stride_in_3x3=False), 2 * resnet50(stride_in_3x3=False) - STEM),
        (7715946496, 15195865088),
    ),
    "BERT-base 128": ((bert(128), None), (22348431360, None)),
    "BERT-base 384": ((bert(384), None), (70666813440, None)),
    "BERT-base 512": ((bert(512), None), (96637943808, None)),
    "Llama-3-8B 1": ((llama(1, 1), None), (15009841152, None)),
    "Llama-3-8B 128": (twice(LLAMA_128), (1929782493184, 3859564986368)),
    "Llama-3-8B 2048": ((llama(2048, 2048**2), None), (32938104193024, None)),
    "Llama-3-8B 8192": ((llama(8192, 8192**2), None), (158140695838720, None)),
    "Llama-3-8B 8192 causal": (
        (llama(8192, f.attention_pairs(8192, 8192, causal=True)), None),
        (140550657277952, None),
    ),
    "Llama-3-8B 8192 last logit": ((llama(8192, 8192**2, logits=1), None), (149534632050688, None)),
    "Llama-3-8B decode 1": ((llama(1, f.attention_pairs(1, 1, causal=True)), None), (15009841152, None)),
    "Llama-3-8B decode 2048": (
        (llama(1, f.attention_pairs(1, 2048, causal=True, cache=2047)), None),
        (16083058688, None),
    ),
    "Llama-3-8B decode 8192": ((llama(1, f.attention_pairs(1, 8192, causal=True)), None), (19304284160, None)),
    "Llama-3-8B 128 checkpointed": (
        (LLAMA_128, 2 * LLAMA_128 + LLAMA_RECOMPUTED),
        (1929782493184, 5173824978944),
    ),
    "Mixtral-8x7B": ((mixtral(0), None), (25497174016, None)),
    "Mixtral-8x7B decode 4096": ((mixtral(4096), None), (27644657664, None)),
}


@pytest.mark.parametrize("case", REFERENCE)
def test_reference_numbers(case: str) -> None:
    computed, expected = REFERENCE[case]
    assert computed == expected
    assert all(type(value) is int for value in computed if value is not None)


def test_every_case_of_the_reference_is_here() -> None:
    assert len(REFERENCE) == 48
    sums = {case: sum(both) for case, (both, _) in REFERENCE.items() if both[1] is not None}
    assert sums["linear"] == 2164260864
    assert sums["conv2d groups=32"] == 346816512
    assert sums["SDPA full, fused backward"] == 234881024
    assert sums["ResNet-50 v1.5"] == 24299077632 == 3 * resnet50(stride_in_3x3=True) - STEM
    assert sums["Llama-3-8B 128"] == 5789347479552
    assert sums["Llama-3-8B 128 checkpointed"] == 7103607472128


def test_published_parts_of_llama() -> None:
    assert llama(1, 0) == 15_009_316_864
    assert llama(1, 1) - llama(1, 0) == 524_288
    assert resnet50(stride_in_3x3=True) // 2 == 4_089_184_256


# Brute force: loops over what is multiplied, small enough to run.

size = st.integers(1, 4)
sizes = st.integers(0, 5)


def looped(*ranges: int) -> int:
    """FLOPs of one multiply-add for each combination of indices."""
    return 2 * sum(1 for _ in product(*map(range, ranges)))


@given(sizes, sizes, sizes, sizes)
def test_products_of_matrices(m: int, k: int, n: int, batch: int) -> None:
    assert f.matmul(m, k, n, batch) == looped(batch, m, n, k)
    assert f.linear(m, k, n) == looped(m, n, k)
    assert f.mv(m, k) == looped(m, k)
    assert f.dot(k) == looped(k)
    assert f.outer(m, n) == looped(m, n) // 2
    # dX is a product over n, dW over the tokens.
    assert f.linear_backward(m, k, n, weight_grad=False) == looped(m, k, n)
    assert f.linear_backward(m, k, n, input_grad=False) == looped(k, n, m)
    assert f.linear_backward(m, k, n) == looped(m, k, n) + looped(k, n, m)
    assert f.linear_backward(m, k, n, input_grad=False, weight_grad=False) == 0


@st.composite
def contractions(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]], dict[str, int]]:
    """An einsum of two operands in which every index is in both or in the output."""
    lengths = {c: draw(st.integers(2, 4)) for c in "abcde"}
    left = draw(st.sets(st.sampled_from("abcde"), min_size=1, max_size=4))
    right = draw(st.sets(st.sampled_from("abcde"), min_size=1, max_size=4))
    summed = draw(st.sets(st.sampled_from(sorted(left & right)))) if left & right else set()
    order = lambda letters: "".join(draw(st.permutations(sorted(letters))))  # noqa: E731
    terms = [order(left), order(right)]
    output = order((left | right) - summed)
    return f"{terms[0]},{terms[1]}->{output}", [tuple(lengths[c] for c in t) for t in terms], lengths


@given(contractions())
def test_einsum_of_two(case: tuple[str, list[tuple[int, ...]], dict[str, int]]) -> None:
    equation, shapes, lengths = case
    terms, output = equation.split("->")
    letters = sorted(set(terms) - {","})
    every = sum(1 for _ in product(*(range(lengths[c]) for c in letters)))
    assert f.einsum(equation, shapes) == every * (2 if set(letters) - set(output) else 1)


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("ij,jk->ik", [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
        ("ij,jk", [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
        ("i,j->ij", [(2,), (5,)], 2 * 5),
        ("...ij,...jk->...ik", [(7, 4, 2, 3), (7, 4, 3, 5)], 2 * 28 * 2 * 3 * 5),
        ("...ij,jk->...ik", [(7, 4, 2, 3), (3, 5)], 2 * 28 * 2 * 3 * 5),
        ("...ij,...jk", [(7, 1, 2, 3), (4, 3, 5)], 2 * 28 * 2 * 3 * 5),
        ("bij,bjk,bkl->bil", [(2, 3, 4), (2, 4, 5), (2, 5, 6)], 2 * 2 * (3 * 4 * 5 + 3 * 5 * 6)),
        ("ij,j,i->", [(3, 4), (4,), (3,)], 2 * (3 * 4 + 3)),
        # What only one operand has and nothing needs is summed before: additions, not products.
        ("ijz,jk->ik", [(2, 3, 9), (3, 5)], 2 * 2 * 3 * 5),
        ("ij->ji", [(2, 3)], 0),
        ("ii->i", [(3, 3)], 0),
        ("->", [()], 0),
    ],
)
def test_einsum_forms(equation: str, shapes: list[tuple[int, ...]], flops: int) -> None:
    assert f.einsum(equation, shapes) == flops


@pytest.mark.parametrize(
    ("equation", "shapes", "part"),
    [
        ("ij,jk->ik", [(2, 3)], "expected 2 operands; found 1"),
        ("ij,jk->ik", [(2, 3), (3,)], "expected 2 sizes for 'jk'; found (3,)"),
        ("ij,jk->ik", [(2, 3), (4, 5)], "index 'j' is 3 in one operand and 4 in another"),
    ],
)
def test_einsum_refuses_what_does_not_fit(equation: str, shapes: list[tuple[int, ...]], part: str) -> None:
    with pytest.raises(f.FormulaError) as error:
        f.einsum(equation, shapes)
    assert part in str(error.value)
    assert error.value.formula == "einsum"
    assert isinstance(error.value, SeedanceError)


@dataclass(frozen=True)
class Convolution:
    """A small convolution: of each dimension its size, and kernel, stride, padding and dilation."""

    batch: int
    c_in: int
    c_out: int
    groups: int
    dims: tuple[tuple[int, int, int, int, int], ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(kernel for _, kernel, _, _, _ in self.dims)

    def pairs(self) -> int:
        """Pairs of an input and an output channel of one group."""
        every = product(range(self.c_in), range(self.c_out))
        return sum(i * self.groups // self.c_in == o * self.groups // self.c_out for i, o in every)


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    """One or two dimensions, and every setting."""
    groups, dims = draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(1, 2))):
        kernel, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        fits = dilation * (kernel - 1) + 1 + draw(st.integers(0, 3))
        dims.append((fits, kernel, draw(st.integers(1, 2)), draw(st.integers(0, 1)), dilation))
    c_in, c_out = (groups * draw(st.integers(1, 2)) for _ in range(2))
    return Convolution(draw(st.integers(1, 2)), c_in, c_out, groups, tuple(dims))


@given(convolutions())
def test_convolution(case: Convolution) -> None:
    """Every output position reads the whole kernel, in the padding too; a channel meets those of its group alone."""
    outs = []
    for n, k, s, p, d in case.dims:
        starts = [at for at in range(-p, n + p, s) if at + d * (k - 1) <= n + p - 1]
        assert len(starts) == f.conv_output(n, k, stride=s, padding=p, dilation=d)
        outs.append(len(starts))
    positions = sum(1 for _ in product(range(case.batch), *map(range, outs)))
    counted = looped(positions, case.pairs(), *case.kernel)
    assert f.conv(case.batch, case.c_in, case.c_out, case.kernel, outs, case.groups) == counted


@given(convolutions(), st.integers(0, 1))
def test_transposed_convolution(case: Convolution, output_padding: int) -> None:
    """Every input position adds the whole kernel to the output; its size is where the last one can reach."""
    for n, k, s, p, d in case.dims:
        reached = {i * s + d * j for i in range(n) for j in range(k)}
        out = f.conv_transpose_output(n, k, stride=s, padding=p, output_padding=output_padding, dilation=d)
        assert out == max(reached) + 1 - 2 * p + output_padding
    ins = [n for n, *_ in case.dims]
    counted = looped(case.batch, *ins, case.pairs(), *case.kernel)
    assert f.conv_transpose(case.batch, case.c_in, case.c_out, case.kernel, ins, case.groups) == counted


@pytest.mark.parametrize("formula", [f.conv, f.conv_transpose])
@pytest.mark.parametrize("groups", [0, 3])
def test_groups_divide_both_channels(formula: Callable[..., int], groups: int) -> None:
    with pytest.raises(f.FormulaError, match=f"divide 4 input and 6 output channels; found {groups}"):
        formula(1, 4, 6, (3,), (8,), groups)


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_attention_pairs(sq: int, sk: int, causal: bool, window: int | None, cache: int | None) -> None:
    offset = cache if cache is not None else (sk - sq if causal else 0)
    seen = 0
    for i, j in product(range(sq), range(sk)):
        at = i + offset
        near = window is None or (at - window < j < at + window)
        seen += (not causal or j <= at) and near
    assert f.attention_pairs(sq, sk, causal, window, cache) == seen


@given(
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(-9, 9),
    st.one_of(st.none(), st.integers(0, 9)),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_banded_pairs(sq: int, sk: int, offset: int, left: int | None, right: int | None) -> None:
    seen = 0
    for i, j in product(range(sq), range(sk)):
        seen += (left is None or j - i - offset >= -left) and (right is None or j - i - offset <= right)
    assert f.banded_pairs(sq, sk, offset=offset, left=left, right=right) == seen


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 12))
def test_closed_forms_of_pairs(tokens: int, cache: int, window: int) -> None:
    assert f.attention_pairs(tokens, tokens, causal=True) == tokens * (tokens + 1) // 2
    with_cache = f.attention_pairs(tokens, cache + tokens, causal=True, cache=cache)
    assert with_cache == tokens * cache + tokens * (tokens + 1) // 2
    if tokens >= window:
        expected = window * (window + 1) // 2 + (tokens - window) * window
        assert f.attention_pairs(tokens, tokens, causal=True, window=window) == expected


@given(st.integers(1, 3), st.integers(1, 3), sizes, sizes, size, size)
def test_attention(batch: int, heads: int, sq: int, sk: int, dk: int, dv: int) -> None:
    pairs = f.attention_pairs(sq, sk)
    scores, values = looped(batch, heads, sq, sk, dk), looped(batch, heads, sq, sk, dv)
    assert f.attention(batch, heads, pairs, dk, dv) == scores + values
    # Backward: dV and dP over the values' size, dQ and dK over the keys'; a fused kernel has the scores to make again.
    assert f.attention_backward(batch, heads, pairs, dk, dv) == 2 * values + 2 * scores
    assert f.attention_backward(batch, heads, pairs, dk, dv, recompute=True) == 2 * values + 3 * scores
    assert f.attention(batch, heads, pairs, dk) == 2 * scores
    assert 2 * f.attention_backward(batch, heads, pairs, dk, recompute=True) == 5 * f.attention(batch, heads, pairs, dk)


@given(size, size, size, size, st.integers(1, 3), st.integers(1, 2), st.integers(0, 3))
def test_recurrent(batch: int, steps: int, inputs: int, hidden: int, layers: int, directions: int, proj: int) -> None:
    def counted(gates: int, state: int) -> int:
        total, fed = 0, inputs
        for _ in range(layers):
            for _ in product(range(directions), range(batch), range(steps)):
                total += looped(gates, hidden, fed) + looped(gates, hidden, state)
                total += looped(state, hidden) if state != hidden or proj else 0
            fed = directions * state
        return total

    assert f.lstm(batch, steps, inputs, hidden, layers, directions, proj) == counted(4, proj or hidden)
    if not proj:
        assert f.gru(batch, steps, inputs, hidden, layers, directions) == counted(3, hidden)
        assert f.rnn(batch, steps, inputs, hidden, layers, directions) == counted(1, hidden)


@given(sizes, size, size, st.integers(1, 3), st.integers(0, 4), st.integers(2, 3), sizes)
def test_mixture_of_experts(
    tokens: int, hidden: int, expert: int, top_k: int, experts: int, matrices: int, shared: int
) -> None:
    counted = 0
    for _ in range(tokens):
        counted += looped(experts, hidden)
        for _ in product(range(top_k), range(matrices)):
            counted += looped(expert, hidden)
        counted += matrices * looped(shared, hidden)
    assert f.moe(tokens, hidden, expert, top_k, experts, matrices=matrices, shared=shared) == counted


@given(size, size, size, size)
def test_low_rank_adapters(tokens: int, k: int, n: int, rank: int) -> None:
    base, down, up = looped(tokens, k, n), looped(tokens, k, rank), looped(tokens, rank, n)
    assert f.lora(tokens, k, n, rank) == base + down + up
    trained = looped(k, rank, tokens) + looped(rank, n, tokens) + looped(tokens, rank, n)
    assert f.lora_backward(tokens, k, n, rank, input_grad=False) == trained
    assert f.lora_backward(tokens, k, n, rank) == trained + base + looped(tokens, k, rank)


def test_elementwise_rules() -> None:
    expected = {
        "softmax": 5,
        "layer_norm": 8,
        "rms_norm": 4,
        "gelu": 8,
        "silu_gate": 5,
        "rope": 3,
        "cross_entropy": 5,
        "adamw": 15,
    }
    assert {op: f.elementwise_ops(op, 7) for op in expected} == {op: 7 * n for op, n in expected.items()}
    with pytest.raises(f.FormulaError, match=r"expected one of softmax, .*; found 'tanh'"):
        f.elementwise_ops("tanh", 7)


@given(st.integers(0, 6), st.fractions(0, 1, max_denominator=10))
def test_speculative_decoding(drafts: int, acceptance: Fraction) -> None:
    """A round emits the accepted prefix and one token of the large model: expectation over where it breaks."""
    emitted = sum(acceptance**i * (1 - acceptance) * (i + 1) for i in range(drafts)) + acceptance**drafts * (drafts + 1)
    assert f.speculative_tokens(drafts, acceptance) == emitted
    assert f.speculative(1000, 10, drafts, acceptance) * emitted == 1000 * (drafts + 1) + 10 * drafts


def test_speculative_example() -> None:
    assert f.speculative_tokens(4, Fraction(8, 10)) == Fraction(33616, 10000)
    assert round(float(f.speculative(1, 0, 4, Fraction(8, 10))), 3) == 1.487
