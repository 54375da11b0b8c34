"""FLOPs of the framework's matrix products: dense, batched, grouped, quantised, sparse, and what is one in disguise.

Quantised products cost what their full-width forms do; the compute dtype says by which peak to divide. Of a sparse matrix
only what is stored is multiplied; kernels for 2:4 sparsity count as dense, to be compared with the sparse peak.
"""

from __future__ import annotations

from math import prod
from typing import Any

from seedance.flops import formulas
from seedance.flops.registry import Call, elements, first_tensor, formula, last, rows, shape, wanted


@formula("mm _int_mm smm _scaled_mm _scaled_mm_v2", "self mat2")
@formula("_sparse_mm", "sparse dense")
@formula("hspmm", "mat1 mat2")
@formula("_sparse_mm_reduce_impl", "self other")
def _mm(call: Call) -> int | None:
    return _product(*call.args[:2])


@formula("addmm _addmm_activation _sparse_addmm sspaddmm", "self mat1 mat2")
def _addmm(call: Call) -> int | None:
    return _product(call["mat1"], call["mat2"])


def _product(a: Any, b: Any) -> int | None:
    """FLOPs of one matrix by another; None for two sparse ones, whose pairs no size tells."""
    (m, k), n = shape(a), shape(b)[1]
    if not _is_sparse(a) and not _is_sparse(b):
        return formulas.matmul(m, k, n)
    if _is_sparse(a) and _is_sparse(b):
        return None
    stored = _stored(a if _is_sparse(a) else b)
    return None if stored is None else 2 * stored * (n if _is_sparse(a) else m)


@formula("bmm", "self mat2")
def _bmm(call: Call) -> int:
    batch, m, k = shape(call["self"])
    return formulas.matmul(m, k, shape(call["mat2"])[2], batch)


@formula("baddbmm addbmm", "self batch1 batch2")
def _baddbmm(call: Call) -> int:
    batch, m, k = shape(call["batch1"])
    return formulas.matmul(m, k, shape(call["batch2"])[2], batch)


@formula("mv", "self vec")
def _mv(call: Call) -> int | None:
    return _by_vector(call["self"])


@formula("addmv", "self mat vec")
def _addmv(call: Call) -> int | None:
    return _by_vector(call["mat"])


def _by_vector(matrix: Any) -> int | None:
    if not _is_sparse(matrix):
        return formulas.mv(*shape(matrix))
    stored = _stored(matrix)
    return None if stored is None else 2 * stored


@formula("dot", "self tensor")
@formula("vdot", "self other")
def _dot(call: Call) -> int:
    return formulas.dot(elements(call["self"]))


@formula("linalg_vecdot", "x y")
def _vecdot(call: Call) -> int:
    """Of two vectors a dot product; of batches of them products and sums, element by element."""
    return formulas.dot(elements(call["x"])) if len(shape(call["x"])) == len(shape(call["y"])) == 1 else 0


@formula("addr", "self vec1 vec2")
def _addr(call: Call) -> int:
    return formulas.outer(elements(call["vec1"]), elements(call["vec2"]))


@formula("linear _mixed_dtypes_linear _sparse_semi_structured_linear", "input weight")
@formula("mkldnn_linear", "self weight")
def _linear(call: Call) -> int:
    source, weight = call.args[0], shape(call["weight"])
    return formulas.linear(rows(source), last(source), weight[0] if len(weight) > 1 else 1)


@formula("linear_backward mkldnn_linear_backward", "self grad_output weight output_mask")
def _linear_backward(call: Call) -> int:
    grad = call["grad_output"]
    one = formulas.linear(rows(grad), last(grad), last(call["self"]))
    return wanted(call["output_mask"], 0, 1) * one


@formula("mkldnn_linear_backward_input", "input_size grad_output weight")
@formula("mkldnn_linear_backward_weights", "grad_output input weight")
def _linear_gradient(call: Call) -> int:
    return formulas.linear(rows(call["grad_output"]), *shape(call["weight"]))


@formula(
    """
    mkldnn._linear_pointwise mkl._mkl_linear _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
    _weight_int4pack_mm_with_scales_and_zeros _dyn_quant_matmul_4bit _wrapped_quantized_linear_prepacked
    fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
    fbgemm_linear_int8_weight_fp32_activation quantized.linear quantized.linear_relu quantized.linear_leaky_relu
    quantized.linear_tanh quantized.linear_dynamic quantized.linear_relu_dynamic quantized.linear_dynamic_fp16
    quantized.linear_relu_dynamic_fp16 quantized.linear_dynamic_fp16_unpacked_weight
    quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32 quantized.int4mm_packed_weight_cpu _quantized.linear
    _quantized.linear_dynamic _quantized.wrapped_fbgemm_linear_fp16_weight _quantized.wrapped_quantized_linear
    _quantized._wrapped_quantized_linear_prepacked onednn.qlinear_pointwise onednn.linear_dynamic_fp16
    onednn.linear_relu_dynamic_fp16 sparse.qlinear sparse.qlinear_relu sparse.qlinear_dynamic
    sparse.qlinear_relu_dynamic
    """,
    "",
)
def _packed_linear(call: Call) -> int:
    """The weight is packed and shows no sizes: those of a row in and of a row out say all."""
    out = first_tensor(call.out)
    return formulas.linear(rows(out), last(call.args[0]), last(out))


@formula("matmul linalg_matmul", "self other")
@formula("quantized.matmul", "qa qb")
def _matmul(call: Call) -> int:
    return _batched(shape(call.args[0]), shape(call.args[1]))


@formula("matmul_backward", "grad self other mask")
def _matmul_backward(call: Call) -> int:
    return wanted(call["mask"], 0, 1) * _batched(shape(call["self"]), shape(call["other"]))


def _batched(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    return formulas.matmul(left[-2], left[-1], right[-1], prod(_broadcast(left[:-2], right[:-2])))


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    width = max(len(a), len(b))
    pairs = zip((1,) * (width - len(a)) + a, (1,) * (width - len(b)) + b, strict=True)
    return tuple(y if x == 1 else x for x, y in pairs)


@formula("inner", "self other")
def _inner(call: Call) -> int:
    a, b = call["self"], call["other"]
    # Of a scalar it is a plain product, element by element.
    return formulas.matmul(rows(a), last(a), rows(b)) if shape(a) and shape(b) else 0


@formula("tensordot", "self other dims_self")
def _tensordot(call: Call) -> int:
    a = shape(call["self"])
    summed = prod(a[dim] for dim in call["dims_self"])
    if not summed:
        return 0
    return formulas.matmul(prod(a) // summed, summed, elements(call["other"]) // summed)


@formula("einsum", "equation tensors")
def _einsum(call: Call) -> int:
    return formulas.einsum(call["equation"], [shape(tensor) for tensor in call["tensors"]], elementwise=False)


@formula("bilinear", "input1 input2 weight")
def _bilinear(call: Call) -> int:
    weight = shape(call["weight"])
    samples = rows(call["input1"])
    return formulas.einsum("ni,oij,nj->no", [(samples, weight[1]), weight, (samples, weight[2])])


@formula("_trilinear", "i1 i2 i3 expand1 expand2 expand3 sumdim")
def _trilinear(call: Call) -> int:
    """Three tensors multiplied and summed: dimensions that one of them lacks are named in its `expand`."""
    tensors = [(call["i1"], call["expand1"]), (call["i2"], call["expand2"]), (call["i3"], call["expand3"])]
    letters = "abcdefghijklmnopqrstuvwxyz"[: len(shape(call["i1"])) + len(call["expand1"])]
    terms = ["".join(c for d, c in enumerate(letters) if d not in lacking) for _, lacking in tensors]
    output = "".join(c for d, c in enumerate(letters) if d not in call["sumdim"])
    return formulas.einsum(f"{','.join(terms)}->{output}", [shape(tensor) for tensor, _ in tensors])


@formula("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", "self mat2")
def _grouped_mm(call: Call) -> int:
    """Products of groups whose sizes are data: every row of the ragged side meets one matrix, whatever its group."""
    a, b = shape(call["self"]), shape(call["mat2"])
    return formulas.matmul(a[-2], a[-1], b[-1], a[0] if len(a) == len(b) == 3 else 1)


@formula("_sparse_semi_structured_mm", "mat1 mat1_meta mat2")
@formula("_sparse_semi_structured_addmm", "input mat1 mat1_meta mat2")
def _semi_structured_mm(call: Call) -> int:
    return formulas.matmul(shape(call["mat1"])[0], *shape(call["mat2"]))


@formula("_cslt_sparse_mm", "compressed_A dense_B")
def _cslt_mm(call: Call) -> int:
    """The compressed matrix is a run of bytes: its rows are those of the output."""
    k, n = shape(call["dense_B"])
    return formulas.matmul(elements(first_tensor(call.out)) // n, k, n) if n else 0


@formula("sparse_sampled_addmm", "self mat1 mat2")
def _sampled_addmm(call: Call) -> int | None:
    """Only the positions that the sparse operand stores are computed."""
    stored = _stored(call["self"])
    return None if stored is None else 2 * stored * shape(call["mat1"])[-1]


@formula("_foreach_mm _native._foreach_mm_native_0", "self mat2")
def _foreach_mm(call: Call) -> int:
    return _sum_of_products(zip(call["self"], call["mat2"], strict=True))


@formula("inductor._mm_plus_mm", "a b c d")
def _mm_plus_mm(call: Call) -> int:
    return _sum_of_products(((call["a"], call["b"]), (call["c"], call["d"])))


def _sum_of_products(pairs: Any) -> int:
    return sum(formulas.matmul(shape(a)[0], *shape(b)) for a, b in pairs)


@formula("chain_matmul", "matrices")
@formula("linalg_multi_dot", "tensors")
def _chain(call: Call) -> int:
    """A chain of products in the cheapest order, which is the one that the framework takes."""
    shapes = [shape(tensor) for tensor in call.args[0]]
    first = shapes[0] if len(shapes[0]) == 2 else (1, *shapes[0])
    sizes = [first[0], first[1], *(s[1] if len(s) == 2 else 1 for s in shapes[1:])]
    best: dict[tuple[int, int], int] = {(i, i): 0 for i in range(len(shapes))}
    for span in range(1, len(shapes)):
        for start in range(len(shapes) - span):
            end = start + span
            best[start, end] = min(
                best[start, cut] + best[cut + 1, end] + formulas.matmul(sizes[start], sizes[cut + 1], sizes[end + 1])
                for cut in range(start, end)
            )
    return best[0, len(shapes) - 1]


@formula("cdist _cdist_forward", "x1 x2 p compute_mode")
def _cdist(call: Call) -> int:
    """A product of matrices where the framework uses one; else differences and sums, which are not FLOPs here."""
    a, b = shape(call["x1"]), shape(call["x2"])
    mode = call.get("compute_mode") or 0
    wide = a[-2] > 25 or b[-2] > 25
    if float(call.get("p", 2.0)) != 2 or mode == 2 or (mode == 0 and not wide):
        return 0
    return _distances(a, b)


@formula("_cdist_backward", "grad x1 x2")
def _cdist_backward(call: Call) -> int:
    return 0


@formula("_euclidean_dist", "x1 x2")
def _euclidean(call: Call) -> int:
    return _distances(shape(call["x1"]), shape(call["x2"]))


def _distances(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return _batched(a, (*b[:-2], b[-1], b[-2]))


def _is_sparse(tensor: Any) -> bool:
    return "sparse" in str(getattr(tensor, "layout", ""))


def _stored(tensor: Any) -> int | None:
    """Elements that a sparse tensor stores; None when it has no data."""
    try:
        if "sparse_bs" in str(tensor.layout):
            return elements(tensor.values())
        return int(tensor._nnz())
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
