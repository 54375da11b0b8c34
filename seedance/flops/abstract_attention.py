"""Attention that has shapes and a cost, for models of transformers on the meta device.

Their own attention shows a counter either two whole matrix products or nothing: no causal mask, no window. Here it is one
operator that knows which pairs of query and key it stands for, forward and backward. Needs torch; imported by the count
of a configuration alone.
"""

from __future__ import annotations

from typing import Any

import torch

from seedance.flops import formulas
from seedance.flops.operators import Cost, register

FUSED = "seedance_fused"
"""Name of attention as fused kernels do it: nothing outside the mask, the scores a second time in the backward."""

UNFUSED = "seedance_unfused"
"""Name of attention as two matrix products: whole scores, kept for the backward."""


def _run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int, fused: bool) -> torch.Tensor:
    raise NotImplementedError("seedance::attention has shapes only: run the model on the meta device")


def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int, fused: bool) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _run_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError("seedance::attention_backward has shapes only: run the model on the meta device")


def _backward_shapes(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    query, key, value, ctx.pairs, ctx.fused = inputs
    ctx.save_for_backward(query, key, value)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return (*torch.ops.seedance.attention_backward(grad, *ctx.saved_tensors, ctx.pairs, ctx.fused), None, None)


_attention = torch.library.custom_op("seedance::attention", _run, mutates_args=())
_attention.register_fake(_shape)
_attention.register_autograd(_gradients, setup_context=_save)
torch.library.custom_op("seedance::attention_backward", _run_backward, mutates_args=()).register_fake(_backward_shapes)


@register("seedance.attention", family="attention")
def _cost(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    (query, key, value, pairs, fused) = args
    sizes = query.shape[0], query.shape[1]
    exact = formulas.attention(*sizes, pairs, query.shape[3], value.shape[3])
    full = formulas.attention(*sizes, query.shape[2] * key.shape[2], query.shape[3], value.shape[3])
    return Cost(exact, exact if fused else full, full)


@register("seedance.attention_backward", family="attention")
def _backward_cost(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    (_, query, key, value, pairs, fused) = args
    sizes = query.shape[0], query.shape[1]
    heads = query.shape[3], value.shape[3]
    every = query.shape[2] * key.shape[2]
    return Cost(
        formulas.attention_backward(*sizes, pairs, *heads),
        formulas.attention_backward(*sizes, pairs if fused else every, *heads, recompute=fused),
        formulas.attention_backward(*sizes, every, *heads),
    )


def _interface(fused: bool) -> Any:
    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, None]:
        if query.shape[1] % key.shape[1]:
            raise ValueError(f"{query.shape[1]} heads of queries cannot share {key.shape[1]} heads of keys")
        causal = named.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        window = named.get("sliding_window") or getattr(module, "sliding_window", None)
        sq, sk = query.shape[2], key.shape[2]
        chunk = _chunk(module)
        if chunk is not None and sq == sk:
            whole, rest = divmod(sq, chunk)
            pairs = whole * formulas.attention_pairs(chunk, chunk, True) + formulas.attention_pairs(rest, rest, True)
            return torch.ops.seedance.attention(query, key, value, pairs, fused).transpose(1, 2), None
        pairs = formulas.attention_pairs(sq, sk, bool(causal), window if isinstance(window, int) else None, sk - sq)
        out = torch.ops.seedance.attention(query, key, value, pairs, fused)
        return out.transpose(1, 2), None

    return attention


def _chunk(module: Any) -> int | None:
    """Tokens of a chunk that attends to itself alone; None where a layer sees all. Decoding sees a whole one at most."""
    config, place = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds, size = getattr(config, "layer_types", None), getattr(config, "attention_chunk_size", None)
    is_chunked = isinstance(kinds, list) and isinstance(place, int) and kinds[place] == "chunked_attention"
    return size if is_chunked and isinstance(size, int) and size > 0 else None


def install() -> None:
    """Make both known to transformers under their names."""
    from transformers import AttentionInterface

    AttentionInterface.register(FUSED, _interface(True))
    AttentionInterface.register(UNFUSED, _interface(False))
