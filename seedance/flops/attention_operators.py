"""FLOPs of the framework's attention operators: fused kernels forward and backward, packed sequences, encoder layers.

Model FLOPs count the pairs that a causal or windowed kernel looks at, exactly; the full product stands beside them. A
fused backward computes the scores again: that is in hardware FLOPs only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from seedance.flops import formulas
from seedance.flops.registry import Call, Cost, Formula, Unsized, elements, formula, integers, last, rows, shape

PACKING = "cum_seq_q cum_seq_k max_q max_k"
"""Parameters of packed sequences: where those of queries and of keys start, and the longest of each."""

SDPA = """
    scaled_dot_product_attention query key value attn_mask dropout_p is_causal
    _scaled_dot_product_flash_attention query key value dropout_p is_causal
    _scaled_dot_product_flash_attention_for_cpu query key value dropout_p is_causal
    _scaled_dot_product_efficient_attention query key value attn_bias compute_log_sumexp dropout_p is_causal
    _scaled_dot_product_cudnn_attention query key value attn_bias compute_log_sumexp dropout_p is_causal
    _scaled_dot_product_fused_attention_overrideable query key value attn_bias dropout_p is_causal
"""
SDPA_BACKWARD = f"""
    _scaled_dot_product_flash_attention_backward
        grad_out query key value out logsumexp {PACKING} dropout_p is_causal
    _scaled_dot_product_flash_attention_for_cpu_backward grad_out query key value out logsumexp dropout_p is_causal
    _scaled_dot_product_efficient_attention_backward
        grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal
    _scaled_dot_product_cudnn_attention_backward
        grad_out query key value out logsumexp philox_seed philox_offset attn_bias {PACKING} dropout_p is_causal
    _scaled_dot_product_fused_attention_overrideable_backward
        grad_out query key value attn_bias grad_input_mask out logsumexp {PACKING} dropout_p is_causal
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes that all sequences of a call share: samples, QUERY heads, sizes of a head of keys and of values."""

    batch: int
    heads: int
    dk: int
    dv: int


@dataclass(frozen=True, slots=True)
class Band:
    """Keys that a query sees: positions run from the first key, or so that the last query is at the last one.

    Args:
        to_last: the last query stands at the last key, else the first at the first.
        left: keys before its own position; None is no limit.
        right: keys after it; None is no limit.
    """

    to_last: bool = True
    left: int | None = None
    right: int | None = None

    def pairs(self, sq: int, sk: int) -> int:
        """Pairs of one head of one sample."""
        offset = sk - sq if self.to_last else 0
        return formulas.banded_pairs(sq, sk, offset=offset, left=self.left, right=self.right)


Count = Callable[[Heads, int, int, bool], Cost]
"""Cost from sizes, pairs that are looked at, pairs in full, and whether these are a bound."""


def forward(heads: Heads, pairs: int, full: int, is_bound: bool = False) -> Cost:
    """Cost of attention."""
    flops = formulas.attention(heads.batch, heads.heads, pairs, heads.dk, heads.dv)
    return Cost(flops, flops, formulas.attention(heads.batch, heads.heads, full, heads.dk, heads.dv), is_bound)


def backward(heads: Heads, pairs: int, full: int, is_bound: bool = False) -> Cost:
    """Cost of the backward of a fused kernel, which has no scores and computes them again."""
    sizes = heads.batch, heads.heads
    return Cost(
        formulas.attention_backward(*sizes, pairs, heads.dk, heads.dv),
        formulas.attention_backward(*sizes, pairs, heads.dk, heads.dv, recompute=True),
        formulas.attention_backward(*sizes, full, heads.dk, heads.dv),
        is_bound,
    )


def _sdpa(call: Call) -> Cost:
    return _heads_first(call, forward)


def _sdpa_backward(call: Call) -> Cost:
    return _heads_first(call, backward)


def _heads_first(call: Call, count: Count) -> Cost:
    """(samples, heads, sequence, size); a causal mask is aligned to the first key, whatever the lengths."""
    query, key, value = shape(call["query"]), shape(call["key"]), shape(call["value"])
    heads = Heads(prod(query[:-3]), query[-3] if len(query) > 2 else 1, query[-1], value[-1])
    band = Band(False, None, 0 if call.get("is_causal") else None)
    return count(heads, band.pairs(query[-2], key[-2]), query[-2] * key[-2], False)


def _declare(table: str, function: Formula) -> None:
    """Register one function for operators that differ in the order of their parameters alone."""
    words = table.split()
    starts = [i for i, word in enumerate(words) if "attention" in word]
    for start, end in pairwise([*starts, len(words)]):
        formula(words[start], " ".join(words[start + 1 : end]))(function)


_declare(SDPA, _sdpa)
_declare(SDPA_BACKWARD, _sdpa_backward)


@formula("_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps", "query key value")
@formula("_triton_scaled_dot_attention", "q k v")
def _math(call: Call) -> int:
    """Products of whole matrices, masked afterwards: nothing is left out."""
    query, key, value = (shape(tensor) for tensor in call.args[:3])
    return formulas.attention(prod(query[:-2]), 1, query[-2] * key[-2], query[-1], value[-1])


def sequences(call: Call, count: Count, band: Band, tensors: str = "query key value", packing: str = PACKING) -> Cost:
    """Attention with (samples, sequence, heads, size), or packed: (tokens, heads, size) and the starts of sequences.

    Args:
        call: the call.
        count: `forward` or `backward`.
        band: keys that a query sees.
        tensors: parameters of queries, keys and values.
        packing: parameters of packed sequences, in the order of `PACKING`.
    """
    query, key, value = (shape(call[name]) for name in tensors.split())
    starts_q, starts_k, longest_q, longest_k = (call.get(name) for name in packing.split())
    if starts_q is None or not shape(starts_q):
        heads = Heads(query[0] if len(query) > 3 else 1, query[-2], query[-1], value[-1])
        return count(heads, band.pairs(query[-3], key[-3]), query[-3] * key[-3], False)
    heads = Heads(1, query[-2], query[-1], value[-1])
    starts_k = starts_q if starts_k is None else starts_k
    known_q, known_k = integers(call, starts_q), integers(call, starts_k)
    if known_q is not None and known_k is not None:
        lengths = list(zip(_lengths(known_q), _lengths(known_k), strict=True))
        return count(heads, sum(band.pairs(*both) for both in lengths), sum(sq * sk for sq, sk in lengths), False)
    longest = int(longest_q or query[-3]), int(longest_k or key[-3])
    return count(heads, *_most(band, (query[-3], key[-3]), longest, shape(starts_q)[0] - 1), True)


def _lengths(starts: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(starts)]


def _most(band: Band, tokens: tuple[int, int], longest: tuple[int, int], number: int) -> tuple[int, int]:
    """The most pairs, in the band and in full, that so many sequences of these sums and maxima can have."""
    if tokens[0] == tokens[1] and longest[0] == longest[1] > 0:
        # Pairs grow faster than lengths: as many sequences as can be of the longest is the most there can be.
        whole, rest = divmod(tokens[0], longest[0])
        most = whole * band.pairs(*longest) + band.pairs(rest, rest)
        return most, whole * longest[0] ** 2 + rest**2
    full = min(number * longest[0] * longest[1], tokens[0] * longest[1], tokens[1] * longest[0])
    return full, full


def limit(size: int | None) -> int | None:
    """A reach as `Band` has it from one that is negative when it has no limit."""
    return None if size is None or size < 0 else int(size)


@formula("_flash_attention_forward", f"query key value {PACKING} dropout_p is_causal")
@formula("_flash_attention_forward_no_dropout_inplace", f"out query key value {PACKING} dropout_p is_causal")
def _flash(call: Call) -> Cost:
    return sequences(call, forward, _flash_band(call))


@formula("_flash_attention_backward", f"grad_out query key value out logsumexp {PACKING} dropout_p is_causal")
def _flash_backward(call: Call) -> Cost:
    return sequences(call, backward, _flash_band(call))


def _flash_band(call: Call) -> Band:
    right = 0 if call.get("is_causal") else limit(call.get("window_size_right"))
    return Band(True, limit(call.get("window_size_left")), right)


_EFFICIENT_PACKING = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


@formula("_efficient_attention_forward", f"query key value bias {_EFFICIENT_PACKING} dropout_p custom_mask_type")
def _efficient(call: Call) -> Cost:
    return sequences(call, forward, _efficient_band(call), packing=_EFFICIENT_PACKING)


@formula(
    "_efficient_attention_backward",
    f"""
    grad_out_ query key value bias out {_EFFICIENT_PACKING} logsumexp dropout_p philox_seed philox_offset
    custom_mask_type
    """,
)
def _efficient_backward(call: Call) -> Cost:
    return sequences(call, backward, _efficient_band(call), packing=_EFFICIENT_PACKING)


def _efficient_band(call: Call) -> Band:
    """Mask type 1 is causal from the first key, 2 from the last; a window holds the query's own position."""
    kind, window = int(call.get("custom_mask_type") or 0), call.get("window_size")
    return Band(kind != 1, int(window) - 1 if window else None, 0 if kind in (1, 2) else None)


@formula("_cudnn_attention_forward", f"query key value attn_bias {PACKING} compute_log_sumexp dropout_p is_causal")
def _cudnn(call: Call) -> Cost:
    return _cudnn_cost(call, forward)


@formula(
    "_cudnn_attention_backward",
    f"""
    grad_out query key value out logsumexp philox_seed philox_offset attn_bias {PACKING} dropout_p is_causal
    """,
)
def _cudnn_backward(call: Call) -> Cost:
    return _cudnn_cost(call, backward)


def _cudnn_cost(call: Call, count: Count) -> Cost:
    if call.get("cum_seq_q") is None:
        return _heads_first(call, count)
    return sequences(call, count, Band(False, None, 0 if call.get("is_causal") else None))


@formula("higher_order.flex_attention", "query key value score_mod block_mask")
def _flex(call: Call) -> Cost:
    return _flex_cost(call, forward)


@formula(
    "higher_order.flex_attention_backward",
    "query key value out logsumexp grad_out grad_logsumexp fw_graph joint_graph block_mask",
)
def _flex_backward(call: Call) -> Cost:
    return _flex_cost(call, backward)


def _flex_cost(call: Call, count: Count) -> Cost:
    """Of a masked attention whole blocks are computed; which pairs of a block its mask keeps is in a function.

    The block mask is (…, blocks of keys a row of blocks has, their indices, the same of those without a mask, …, rows and
    columns of a block, mask).
    """
    query, key, value = shape(call["query"]), shape(call["key"]), shape(call["value"])
    sq, sk = query[-2], key[-2]
    mask = call.get("block_mask")
    blocks = _blocks(call, mask, query[0], query[1]) if isinstance(mask, tuple) and len(mask) > 5 else None
    heads = Heads(1, 1, query[-1], value[-1])
    full = query[0] * query[1] * sq * sk
    return count(heads, full if blocks is None else min(blocks, full), full, True)


def _blocks(call: Call, mask: tuple[Any, ...], batch: int, heads: int) -> int | None:
    """Pairs in the blocks that are computed, over all samples and heads; None when the counts cannot be read."""
    counted = 0
    for numbers in (mask[2], mask[4]):
        if numbers is None:
            continue
        values = integers(call, numbers.flatten()) if hasattr(numbers, "flatten") else None
        sizes = shape(numbers)
        if values is None or len(sizes) != 3:
            return None
        counted += sum(values) * (batch // sizes[0]) * (heads // sizes[1])
    rows_of_block, columns_of_block = (size for size in mask[-3:-1])
    return counted * int(rows_of_block) * int(columns_of_block)


@formula("_native_multi_head_attention _triton_multi_head_attention", "query key value embed_dim")
def _multi_head(call: Call) -> int:
    """Projections of queries, keys, values and output, and attention between them, in one operator."""
    query, key, width = call["query"], call["key"], int(call["embed_dim"])
    projections = formulas.linear(2 * rows(query) + 2 * rows(key), last(query), width)
    return projections + formulas.attention(1, 1, _pairs(query, key), width)


@formula(
    "_transformer_encoder_layer_fwd",
    """
    src embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias use_gelu norm_first eps norm_weight_1 norm_bias_1
    norm_weight_2 norm_bias_2 ffn_weight_1
    """,
)
def _encoder_layer(call: Call) -> int:
    source, width = call["src"], int(call["embed_dim"])
    inner = elements(call["ffn_weight_1"]) // width
    products = formulas.linear(4 * rows(source), width, width) + 2 * formulas.linear(rows(source), width, inner)
    return products + formulas.attention(1, 1, _pairs(source, source), width)


def _pairs(query: Any, key: Any) -> int:
    """Pairs of a query and a key in all sequences of a batch, which may be ragged.

    Raises:
        Unsized: two ragged batches that are not one.
    """
    if not getattr(query, "is_nested", False):
        return rows(query) * shape(key)[-2]
    if query is not key:
        raise Unsized("expected one ragged batch for queries and keys; found two")
    return sum(int(sizes[0]) ** 2 for sizes in query._nested_tensor_size().tolist())
