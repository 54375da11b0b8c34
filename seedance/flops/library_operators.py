"""FLOPs of operators that well-known libraries register: what would else be listed as uncounted in most training jobs.

Names and parameters are those of the libraries' own registrations. A kernel that a library calls without registering an
operator is seen by nobody, here as in every other counter.
"""

from __future__ import annotations

from seedance.flops import formulas
from seedance.flops.attention_operators import PACKING, Band, backward, forward, limit, sequences
from seedance.flops.registry import Call, Cost, elements, first_tensor, formula, last, rows, shape

_FLASH = "dropout_p softmax_scale causal window_size_left window_size_right"
_FLASH_STARTS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


@formula("flash_attn._flash_attn_forward", f"q k v {_FLASH}")
@formula("flash_attn._flash_attn_varlen_forward", f"q k v {_FLASH_STARTS} {_FLASH}")
def _flash(call: Call) -> Cost:
    return sequences(call, forward, _flash_band(call), "q k v", _FLASH_STARTS)


@formula("flash_attn._flash_attn_backward", f"dout q k v out softmax_lse dq dk dv {_FLASH}")
@formula("flash_attn._flash_attn_varlen_backward", f"dout q k v out softmax_lse dq dk dv {_FLASH_STARTS} {_FLASH}")
def _flash_backward(call: Call) -> Cost:
    return sequences(call, backward, _flash_band(call), "q k v", _FLASH_STARTS)


def _flash_band(call: Call) -> Band:
    right = 0 if call.get("causal") else limit(call.get("window_size_right"))
    return Band(True, limit(call.get("window_size_left")), right)


_VARLEN = "cu_seq_q cu_seq_k max_q max_k is_causal"


@formula("torch_attn._varlen_attn", f"query key value {_VARLEN} scale window_size")
@formula("torch_attn._varlen_attn_out", f"out query key value {_VARLEN} scale window_size")
def _varlen(call: Call) -> Cost:
    return sequences(call, forward, _pair_band(call), packing=PACKING.replace("cum_", "cu_"))


@formula("torch_attn._varlen_attn_backward", f"grad_out query key value out lse {_VARLEN} rng_state scale window_size")
def _varlen_backward(call: Call) -> Cost:
    return sequences(call, backward, _pair_band(call), packing=PACKING.replace("cum_", "cu_"))


def _pair_band(call: Call) -> Band:
    left, right = call.get("window_size") or (-1, -1)
    return Band(True, limit(left), 0 if call.get("is_causal") else limit(right))


@formula("transformers.grouped_mm_fallback", "input weight offs")
def _grouped(call: Call) -> int:
    return formulas.linear(rows(call["input"]), *shape(call["weight"])[1:])


@formula("transformers.grouped_mm_fallback_backward", "input weight offs grad_output")
def _grouped_backward(call: Call) -> int:
    return 2 * formulas.linear(rows(call["input"]), *shape(call["weight"])[1:])


@formula(
    "torch_nn._linear_cross_entropy_batch_chunked",
    """
    input linear_weight target linear_bias weight reduction ignore_index label_smoothing batch_chunk_size acc_policy
    acc_dtype allow_retain_graph compute_input_grad compute_linear_weight_grad
    """,
)
@formula("torch_nn._linear_cross_entropy_batch_chunked_no_reduction", "input linear_weight")
def _linear_cross_entropy(call: Call) -> int:
    """The forward has the gradients at hand and computes those that are wanted; the backward only scales them."""
    gradients = bool(call.get("compute_input_grad")) + bool(call.get("compute_linear_weight_grad"))
    return (1 + gradients) * formulas.linear(rows(call["input"]), last(call["input"]), shape(call["linear_weight"])[0])


@formula(
    """
    bitsandbytes.int8_linear_matmul bitsandbytes.int8_scaled_mm bitsandbytes.int8_mixed_scaled_mm
    bitsandbytes.gemv_4bit
    """,
    "A",
)
def _packed_linear(call: Call) -> int:
    out = first_tensor(call.out)
    return formulas.linear(rows(out), last(call["A"]), last(out))


@formula("symm_mem._async_input_mm", "a b")
@formula("symm_mem.fused_matmul_reduce_scatter symm_mem.fused_scaled_matmul_reduce_scatter", "A B")
def _product(call: Call) -> int:
    return formulas.linear(rows(call.args[0]), *shape(call.args[1]))


@formula("symm_mem.fused_all_gather_matmul symm_mem.fused_all_gather_scaled_matmul", "A Bs")
def _gathered_products(call: Call) -> int:
    """One gathered matrix by several: the outputs have the rows that only exist after the exchange."""
    gathered = call.out[1] if isinstance(call.out, list | tuple) else ()
    return sum(formulas.linear(rows(out), *shape(b)) for out, b in zip(gathered, call["Bs"], strict=True))


@formula("torchvision.deform_conv2d", "input weight")
def _deformed_conv(call: Call) -> int:
    weight = call["weight"]
    return 2 * elements(weight) * (elements(first_tensor(call.out)) // shape(weight)[0])


@formula("torchvision._deform_conv2d_backward", "grad input weight")
def _deformed_conv_backward(call: Call) -> int:
    return 2 * 2 * elements(call["weight"]) * (elements(call["grad"]) // shape(call["weight"])[0])
