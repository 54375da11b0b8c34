"""Least memory traffic of an operator: every input read once, every output written once, from shapes alone.

What an operator needs not touch is left out: rows that a gather does not read, what a fill overwrites, the repeats of an
expanded tensor. Caches, workspaces and kernels that read twice are not modelled: this is the denominator of a roofline.
Knows no framework: a tensor is what has `nbytes` and `stride()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GATHERS = frozenset(
    {
        "aten.embedding",
        "aten.index",
        "aten.index_select",
        "aten.gather",
        "aten.take",
        "aten._unsafe_index",
        "aten._unsafe_masked_index",
        "aten._embedding_bag",
        "aten._embedding_bag_forward_only",
        "aten.masked_select",
    }
)
"""Operators that read only those rows of their first tensor that they return (a bag returns less than it reads)."""

GROUPED = frozenset({"aten._grouped_mm", "aten._scaled_grouped_mm", "transformers.grouped_mm_fallback"})
"""Products of rows with one of many matrices each: at most as many matrices are read as there are rows."""

SCATTERS = frozenset(
    {
        "aten.index_put",
        "aten._index_put_impl",
        "aten._unsafe_index_put",
        "aten.index_add",
        "aten.index_copy",
        "aten.index_fill",
        "aten.scatter",
        "aten.scatter_add",
        "aten.scatter_reduce",
        "aten.masked_scatter",
    }
)
"""Operators whose in-place form touches only those rows of its first tensor that it writes."""

OVERWRITES = frozenset(
    {
        "aten.copy_",
        "aten.fill_",
        "aten.zero_",
        "aten.uniform_",
        "aten.normal_",
        "aten.random_",
        "aten.bernoulli_",
        "aten.exponential_",
        "aten.cauchy_",
        "aten.log_normal_",
        "aten.geometric_",
        "aten._foreach_copy_",
        "aten._foreach_zero_",
    }
)
"""Operators that write their first tensors without reading them."""


def traffic(name: str, inputs: Sequence[Any], outputs: Sequence[Any], *, mutates: bool) -> int:
    """Bytes that an operator must move.

    Args:
        name: operator with namespace, without overload.
        inputs: tensors that it was given, in order, without those that it only writes.
        outputs: tensors that it wrote; those that it was given among them.
        mutates: it writes tensors that it was given.
    """
    if name in GATHERS:
        written = stored(outputs)
        first = stored(inputs[:1])
        return stored(inputs[1:]) + min(first, _rows_read(name, inputs, written)) + written
    if name in GROUPED and len(inputs) > 1 and len(inputs[0].shape) == 2 and len(inputs[1].shape) == 3:
        rows, matrices = int(inputs[0].shape[0]), max(int(inputs[1].shape[0]), 1)
        read = _stored(inputs[1]) * min(rows, matrices) // matrices
        return stored((inputs[0], *inputs[2:])) + read + stored(outputs)
    if mutates and name.rstrip("_") in SCATTERS:
        # Of the tensor that is written only the rows of the source count: read and written, for most of these add.
        source = max((_stored(one) for one in inputs[1:]), default=0)
        return stored(inputs[1:]) + 2 * min(source, _stored(inputs[0]))
    return stored(inputs) + stored(outputs)


def stored(tensors: Iterable[Any]) -> int:
    """Bytes of distinct elements of distinct tensors."""
    found = list(tensors)
    if len(found) > 1:
        found = list({id(one): one for one in found}.values())
    return sum(map(_stored, found))


def _stored(tensor: Any) -> int:
    """Bytes of one tensor, the repeats of an expanded dimension once; 0 for what has no elements that can be counted."""
    try:
        size = tensor.nbytes
        strides = tensor.stride()
    except (RuntimeError, NotImplementedError, AttributeError):
        return _sparse(tensor)
    if size and 0 in strides:
        for extent, stride in zip(tensor.shape, strides, strict=True):
            if stride == 0:
                size //= extent
    return int(size)


def _sparse(tensor: Any) -> int:
    """Bytes of the values and indices of a sparse tensor."""
    try:
        parts = (
            [tensor._values(), tensor._indices()]
            if "sparse_coo" in str(tensor.layout)
            else [tensor.values(), *(getattr(tensor, name)() for name in _COMPRESSED[str(tensor.layout)])]
        )
    except (RuntimeError, NotImplementedError, AttributeError, KeyError):
        return 0
    return sum(int(part.nbytes) for part in parts)


_COMPRESSED = {
    "torch.sparse_csr": ("crow_indices", "col_indices"),
    "torch.sparse_bsr": ("crow_indices", "col_indices"),
    "torch.sparse_csc": ("ccol_indices", "row_indices"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices"),
}


def _rows_read(name: str, inputs: Sequence[Any], written: int) -> int:
    if not name.startswith("aten._embedding_bag") or len(inputs) < 2:
        return written
    weight, indices = inputs[0], inputs[1]
    rows = max(int(weight.shape[0]), 1)
    return int(weight.nbytes) // rows * int(indices.numel())
