"""FLOPs of operations from the sizes of what they work on: integers in, integers out, no framework.

One multiply-add is 2 FLOPs. Biases, norms, activations, softmax, rotary embeddings and losses are 0 in model FLOPs:
`elementwise_ops` counts them apart. Backward functions give model FLOPs unless they say hardware: model FLOPs leave out
whatever is computed a second time. Sizes are ints of 0 or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from types import MappingProxyType

from seedance.errors import SeedanceError

OPS_PER_ELEMENT: Mapping[str, int] = MappingProxyType(
    {
        "softmax": 5,
        "layer_norm": 8,
        "rms_norm": 4,
        "gelu": 8,
        "silu_gate": 5,
        "rope": 3,
        "cross_entropy": 5,
        "adamw": 15,
    }
)
"""Arithmetic per element of what is 0 in model FLOPs; for cross-entropy an element is a logit, for AdamW a parameter."""


class FormulaError(SeedanceError):
    """Sizes that no operation can have: formula, expected, found."""


def matmul(m: int, k: int, n: int, batch: int = 1) -> int:
    """FLOPs of `batch` products of an m x k by a k x n matrix; `batch` after broadcasting."""
    return 2 * batch * m * k * n


def mv(m: int, k: int) -> int:
    """FLOPs of an m x k matrix by a vector."""
    return 2 * m * k


def dot(k: int) -> int:
    """FLOPs of the inner product of two vectors of k elements: 2k, as everywhere here, not 2k - 1."""
    return 2 * k


def outer(m: int, n: int) -> int:
    """FLOPs of the outer product of two vectors: nothing is summed, so each element is one multiplication."""
    return m * n


def linear(tokens: int, k: int, n: int) -> int:
    """FLOPs of a linear layer of k inputs and n outputs; `tokens` is the product of all leading sizes."""
    return matmul(tokens, k, n)


def linear_backward(tokens: int, k: int, n: int, *, input_grad: bool = True, weight_grad: bool = True) -> int:
    """FLOPs of the backward of a linear layer: one product for each gradient that is wanted."""
    return (input_grad + weight_grad) * linear(tokens, k, n)


def einsum(equation: str, shapes: Sequence[Sequence[int]], *, elementwise: bool = True) -> int:
    """FLOPs of an Einstein sum, contracted from left to right, as the framework does without a path.

    Args:
        equation: as `torch.einsum` takes it: letters, commas, `...`, an arrow with the output or none.
        shapes: sizes of each operand.
        elementwise: count steps that sum nothing, one multiplication an element; the framework runs those as elementwise
            products, which are 0 in model FLOPs.

    A step of two operands costs the product of the sizes of all its indices, twice where any is summed. An index that no
    later operand and no output has is summed as soon as it is met; sums of one operand are additions, not counted.

    Raises:
        FormulaError: operands, letters and sizes do not fit.
    """
    terms, output, sizes = _parse(equation, shapes)
    kept, later = terms[0], terms[1:]
    total = 0
    for position, term in enumerate(later):
        needed = output.union(*later[position + 1 :])
        alone = (kept ^ term) - needed
        union = (kept | term) - alone
        products = prod(sizes[index] for index in union)
        if union - needed:
            total += 2 * products
        elif elementwise:
            total += products
        kept = union & needed
    return total


def _parse(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[list[set[str]], set[str], dict[str, int]]:
    """Indices of each operand and of the output, and their sizes. Where an operand has size 1 it has no such index."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise _no_einsum(equation, f"expected {len(terms)} operands; found {len(shapes)}")
    named = [_letters(equation, term, shape) for term, shape in zip(terms, shapes, strict=True)]
    sizes: dict[str, int] = {}
    for letters, shape in zip(named, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            known = sizes.setdefault(letter, size)
            if 1 not in (known, size) and known != size:
                raise _no_einsum(equation, f"index {letter!r} is {known} in one operand and {size} in another")
            sizes[letter] = size if known == 1 else known
    if arrow:
        output = set(right.replace("...", "")) | (set(_BROADCAST) if "..." in right else set())
    else:
        once = {letter for letter in sizes if sum(letters.count(letter) for letters in named) == 1}
        output = once | set(_BROADCAST)
    present = [
        {letter for letter, size in zip(letters, shape, strict=True) if size != 1}
        for letters, shape in zip(named, shapes, strict=True)
    ]
    return present, output, sizes


_BROADCAST = "0123456789#$%&*+/:;<=>?@^|~"
"""Names of the dimensions that `...` stands for, from the last."""


def _letters(equation: str, term: str, shape: Sequence[int]) -> str:
    spread = max(len(shape) - len(term.replace("...", "")), 0) if "..." in term else 0
    letters = term.replace("...", _BROADCAST[:spread][::-1])
    if len(letters) != len(shape):
        raise _no_einsum(equation, f"expected {len(letters)} sizes for {term!r}; found {tuple(shape)}")
    return letters


def _no_einsum(equation: str, why: str) -> FormulaError:
    return FormulaError(f"einsum {equation!r}: {why}", formula="einsum")


def conv_output(size: int, kernel: int, *, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """Size of the output of a convolution along one dimension."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def conv_transpose_output(
    size: int, kernel: int, *, stride: int = 1, padding: int = 0, output_padding: int = 0, dilation: int = 1
) -> int:
    """Size of the output of a transposed convolution along one dimension."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def conv(batch: int, c_in: int, c_out: int, kernel: Sequence[int], out_spatial: Sequence[int], groups: int = 1) -> int:
    """FLOPs of a convolution in any number of dimensions; positions in the padding count in full.

    Args:
        batch: samples.
        c_in: input channels.
        c_out: output channels.
        kernel: sizes of the kernel; dilation and stride enter through the output alone.
        out_spatial: sizes of the output.
        groups: groups of channels, a divisor of both; `c_in` for a depthwise convolution.
    """
    _grouped("conv", c_in, c_out, groups)
    return 2 * batch * (c_in // groups) * c_out * prod(kernel) * prod(out_spatial)


def conv_transpose(
    batch: int, c_in: int, c_out: int, kernel: Sequence[int], in_spatial: Sequence[int], groups: int = 1
) -> int:
    """FLOPs of a transposed convolution: every input position is multiplied with the whole kernel.

    Args:
        batch: samples.
        c_in: input channels.
        c_out: output channels.
        kernel: sizes of the kernel.
        in_spatial: sizes of the INPUT.
        groups: groups of channels, a divisor of both.
    """
    _grouped("conv_transpose", c_in, c_out, groups)
    return 2 * batch * c_in * (c_out // groups) * prod(kernel) * prod(in_spatial)


def _grouped(formula: str, c_in: int, c_out: int, groups: int) -> None:
    if groups < 1 or c_in % groups or c_out % groups:
        raise FormulaError(
            f"{formula}: expected groups that divide {c_in} input and {c_out} output channels; found {groups}",
            formula=formula,
            found=groups,
        )


def attention_pairs(sq: int, sk: int, causal: bool = False, window: int | None = None, cache: int | None = None) -> int:
    """Pairs of a query and a key that attention looks at, for one head of one sample.

    Args:
        sq: queries.
        sk: keys, the cached ones among them.
        causal: a query sees no key after its own position.
        window: a query sees at most this many keys: its own and those before it; without `causal` as many after it.
        cache: keys before the first query; sk - sq when causal and not given, so that the last query sees every key.
    """
    offset = (sk - sq if causal else 0) if cache is None else cache
    reach = None if window is None else window - 1
    return banded_pairs(sq, sk, offset=offset, left=reach, right=0 if causal else reach)


def banded_pairs(sq: int, sk: int, *, offset: int = 0, left: int | None = None, right: int | None = None) -> int:
    """Pairs (i, j) with 0 <= i < sq, 0 <= j < sk and -left <= j - (i + offset) <= right; None is no limit."""
    upper = sq * sk if right is None else _pairs_up_to(sq, sk, offset + right)
    lower = 0 if left is None else _pairs_up_to(sq, sk, offset - left - 1)
    return max(upper - lower, 0)


def _pairs_up_to(sq: int, sk: int, limit: int) -> int:
    """Pairs with j - i <= limit: the sum over i of i + limit + 1 clamped to 0..sk, as a difference of triangles."""
    first = limit + 1
    return _triangle(sq + first) - _triangle(first) - _triangle(sq + first - sk) + _triangle(first - sk)


def _triangle(n: int) -> int:
    return n * (n - 1) // 2 if n > 0 else 0


def attention(batch: int, q_heads: int, pairs: int, dk: int, dv: int | None = None) -> int:
    """FLOPs of the two products of attention, scores and values.

    Args:
        batch: samples.
        q_heads: QUERY heads: fewer heads of keys and values change bytes and projections, not these.
        pairs: pairs of a query and a key that count, `attention_pairs`.
        dk: size of a head of queries and keys.
        dv: size of a head of values; `dk` when not given.
    """
    return 2 * batch * q_heads * pairs * (dk + (dk if dv is None else dv))


def attention_backward(
    batch: int, q_heads: int, pairs: int, dk: int, dv: int | None = None, *, recompute: bool = False
) -> int:
    """FLOPs of the backward of attention: four products; with `recompute` a fifth, for the scores.

    Model FLOPs are those without `recompute`; fused kernels do run the fifth: 2.5 times the forward when dk = dv.
    """
    twice = 2 * attention(batch, q_heads, pairs, dk, dv)
    return twice + (2 * batch * q_heads * pairs * dk if recompute else 0)


def lstm(
    batch: int, steps: int, inputs: int, hidden: int, layers: int = 1, directions: int = 1, projection: int = 0
) -> int:
    """FLOPs of an LSTM: four gates per layer and direction, and the projection of the hidden state where there is one.

    Args:
        batch: sequences.
        steps: steps of each.
        inputs: features of the input.
        hidden: features of a gate.
        layers: stacked layers; each takes what all directions of the one below put out.
        directions: 1, or 2 when bidirectional.
        projection: features that the hidden state is projected to; 0 for none.
    """
    return _recurrent(4, batch * steps, inputs, hidden, layers, directions, projection)


def gru(batch: int, steps: int, inputs: int, hidden: int, layers: int = 1, directions: int = 1) -> int:
    """FLOPs of a GRU: three gates per layer and direction; arguments as `lstm`."""
    return _recurrent(3, batch * steps, inputs, hidden, layers, directions, 0)


def rnn(batch: int, steps: int, inputs: int, hidden: int, layers: int = 1, directions: int = 1) -> int:
    """FLOPs of a plain recurrent network: one gate per layer and direction; arguments as `lstm`."""
    return _recurrent(1, batch * steps, inputs, hidden, layers, directions, 0)


def _recurrent(gates: int, tokens: int, inputs: int, hidden: int, layers: int, directions: int, projection: int) -> int:
    state = projection or hidden
    total = 0
    for layer in range(layers):
        fed = inputs if layer == 0 else directions * state
        total += directions * 2 * tokens * (gates * hidden * (fed + state) + hidden * projection)
    return total


def moe(
    tokens: int,
    hidden: int,
    expert: int,
    top_k: int,
    experts: int,
    *,
    matrices: int = 3,
    shared: int = 0,
) -> int:
    """FLOPs of a mixture of experts: the router, `top_k` experts for each token, and the experts that all share.

    Args:
        tokens: tokens.
        hidden: features of the model.
        expert: features inside one expert, which is seldom that of a dense layer.
        top_k: experts that a token goes to.
        experts: experts that the router scores; 0 without a router.
        matrices: products of one expert: 3 with a gate, else 2.
        shared: features inside the experts that every token goes to, together; 0 for none.
    """
    router = matmul(tokens, hidden, experts)
    return router + matrices * matmul(tokens, hidden, top_k * expert + shared)


def lora(tokens: int, k: int, n: int, rank: int) -> int:
    """FLOPs of a linear layer with a low-rank adapter beside it."""
    return linear(tokens, k, n) + matmul(tokens, k, rank) + matmul(tokens, rank, n)


def lora_backward(tokens: int, k: int, n: int, rank: int, *, input_grad: bool = True) -> int:
    """FLOPs of the backward of `lora` with the base frozen.

    Both adapters have gradients of their weights, and the second one of its input; the base and the first adapter have
    a gradient of their input only when that is wanted (`input_grad`): not in the first trained layer.
    """
    down, up = matmul(tokens, k, rank), matmul(tokens, rank, n)
    return (linear(tokens, k, n) + down if input_grad else 0) + down + 2 * up


def elementwise_ops(op: str, elements: int) -> int:
    """Arithmetic of what is 0 in model FLOPs, by the rule of `OPS_PER_ELEMENT`.

    Raises:
        FormulaError: no rule for `op`.
    """
    if op not in OPS_PER_ELEMENT:
        raise FormulaError(
            f"elementwise_ops: expected one of {', '.join(OPS_PER_ELEMENT)}; found {op!r}",
            formula="elementwise_ops",
            found=op,
        )
    return OPS_PER_ELEMENT[op] * elements


def speculative_tokens(draft_tokens: int, acceptance: Fraction) -> Fraction:
    """Tokens that one round of speculative decoding is expected to emit, each draft accepted independently."""
    return sum((acceptance**i for i in range(draft_tokens + 1)), Fraction(0))


def speculative(target: int, draft: int, draft_tokens: int, acceptance: Fraction) -> Fraction:
    """Hardware FLOPs per emitted token of speculative decoding; model FLOPs are `target`.

    Args:
        target: FLOPs of the large model for one token.
        draft: FLOPs of the small one.
        draft_tokens: tokens that the small model proposes in a round; the large one checks one more.
        acceptance: share of proposals that are accepted, 0 to 1.
    """
    work = (draft_tokens + 1) * target + draft_tokens * draft
    return work / speculative_tokens(draft_tokens, acceptance)
