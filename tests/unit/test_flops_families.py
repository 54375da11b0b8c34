"""The table of operators: every one of torch's has a family, every one with FLOPs a formula, and none is free by chance."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

import seedance.flops
from seedance.flops import formulas as f
from seedance.flops.families import COMM_FAMILIES, FAMILIES, FLOP_FAMILIES, FamilyError, family
from seedance.flops.operators import Cost, cost, register, register_formula, signatures
from tests.flop_recorder import operators


def test_parameters_are_those_of_torch() -> None:
    """A formula reads arguments by the names and places of the operator's declaration."""
    exceptions = {
        ("aten._scaled_dot_product_flash_attention", "quantized"),
        ("aten._slow_conv2d_backward", "grad_input"),
        ("aten.einsum", "sublist"),
    }
    # These register their operators when they are imported.
    importlib.import_module("torch.nn.attention.varlen")
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    operators.cache_clear()
    checked = 0
    for name, parameters in signatures().items():
        for one in operators().get(name, []):
            declared = tuple(argument.name for argument in one._schema.arguments)
            if not one._overloadname.endswith("out") and (name, one._overloadname) not in exceptions:
                assert parameters == declared[: len(parameters)], (name, one._overloadname)
                checked += 1
    assert checked > 150


def test_formulas_are_for_operators_that_exist() -> None:
    foreign = {"bitsandbytes", "flash_attn", "higher_order", "torch_attn", "torch_nn", "torchvision", "transformers"}
    missing = {name for name in signatures() if name not in operators() and name.split(".")[0] not in foreign}
    assert not missing


WITHOUT_FORMULA = {
    "aten._sparse_mm_reduce_impl_backward",  # reads positions of a gradient
    "aten._sparse_sparse_matmul",  # pairs depend on where elements are
    "aten.lstm_mps_backward",
    "aten.quantized_gru",
    "aten.quantized_lstm",
    "mkldnn_prepacked.conv2d_run",
    "quantized.quantized_gru_cell_dynamic",
    "quantized.quantized_lstm_cell_dynamic",
    "quantized.quantized_rnn_relu_cell_dynamic",
    "quantized.quantized_rnn_tanh_cell_dynamic",
}
"""Operators with FLOPs, not made of others, that are listed as uncounted when they run."""

OTHERS = {"_test", "_inductor_test", "onnx", "onnx_symbolic"}
"""Namespaces of torch's own tests and of its export, which no model runs."""

NO_FAMILY = re.compile(
    r"(aten|prims)\._?(fft_\w+|linalg_(?!matmul|multi_dot|vecdot)\w+|cholesky\w*|lu_\w+|matrix_(exp|power)\w*|orgqr|ormqr|qr|"
    r"geqrf|svd|det|logdet|slogdet|inverse|pinverse|triangular_solve|spsolve|stft|istft|foobar|test_\w+)"
)
"""Operators that no family has: transforms and decompositions, which do real work, and what torch tests itself with."""


@cache
def of_torch() -> frozenset[str]:
    """Operators that are there when torch is imported: others come with its compiler and with tests of this process."""
    code = "import torch; print(*torch._C._dispatch_get_all_op_names())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    return frozenset(".".join(re.split(r"::|\.", full)[:2]) for full in done.stdout.split())


def kinds(name: str) -> set[str | None]:
    overloads = operators()[name]
    return {family(name, pointwise=torch.Tag.pointwise in one.tags, view=one.is_view) for one in overloads}


def test_every_operator_of_torch_has_a_family() -> None:
    names = [name for name in operators() if name in of_torch() and name.split(".")[0] not in OTHERS]
    assert len(names) > 1500
    unknown = [name for name in names if "uncounted" in kinds(name) and not NO_FAMILY.fullmatch(name)]
    assert not unknown
    assert {kind for name in names for kind in kinds(name)} <= {*FAMILIES, None}


def test_every_operator_with_flops_has_a_formula() -> None:
    bearing = {name for name in operators() if name in of_torch() and kinds(name) & FLOP_FAMILIES}
    composite = {name for name in bearing if all(one._can_decompose() for one in operators()[name])}
    without = {name for name in bearing - composite if not {name, name.rstrip("_")} & signatures().keys()}
    assert without == WITHOUT_FORMULA & operators().keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.addmm", "matmul"),
        ("aten.addmm_", "matmul"),
        ("aten._scaled_mm", "matmul"),
        ("aten._scaled_dot_product_flash_attention_backward", "attention"),
        ("aten.convolution_backward", "convolution"),
        ("aten.embedding_dense_backward", "embedding"),
        ("aten.native_layer_norm_backward", "norm"),
        ("aten._log_softmax_backward_data", "softmax"),
        ("aten.gelu_backward", "activation"),
        ("aten.nll_loss_forward", "loss"),
        ("aten.mul", "elementwise"),
        ("aten._foreach_lerp_", "elementwise"),
        ("aten._foreach_norm", "reduction"),
        ("aten.max_pool2d_with_indices_backward", "reduction"),
        ("aten.copy_", "copy"),
        ("aten.cat", "copy"),
        ("aten.bernoulli_", "random"),
        ("aten.topk", "sort"),
        ("aten._fused_adamw_", "optimizer"),
        ("aten.view", None),
        ("aten.t_", None),
        ("aten.empty_like", None),
        ("c10d.allreduce_", "all_reduce"),
        ("_c10d_functional.all_gather_into_tensor", "all_gather"),
        ("_c10d_functional.wait_tensor", None),
        ("symm_mem.fused_all_gather_matmul", "matmul"),
        ("aten._fft_r2c", "uncounted"),
        ("aten._linalg_svd", "uncounted"),
    ],
)
def test_families(name: str, expected: str | None) -> None:
    assert kinds(name) == {expected}


def test_names_of_other_releases() -> None:
    assert family("c10d_functional.all_reduce", pointwise=False, view=False) == "all_reduce"
    assert family("c10d_functional.wait_tensor", pointwise=False, view=False) is None
    assert family("fsdp.chunk_cat", pointwise=False, view=False) == "copy"


def test_the_package_gives_what_it_says() -> None:
    assert all(getattr(seedance.flops, name) is not None for name in seedance.flops.__all__)
    assert set(seedance.flops.__all__) <= set(dir(seedance.flops))
    with pytest.raises(AttributeError, match=r"module 'seedance.flops' has no attribute 'FlopCount'"):
        seedance.flops.FlopCount  # noqa: B018


def test_families_are_closed() -> None:
    assert len(FAMILIES) == len(set(FAMILIES))
    assert set(FAMILIES) >= FLOP_FAMILIES | COMM_FAMILIES
    assert not FLOP_FAMILIES & COMM_FAMILIES


def test_unknown_operators_are_never_free() -> None:
    x = torch.empty(2, 3)
    assert family("mylib.fused_mlp", pointwise=False, view=False) == "uncounted"
    assert family("mylib.scale", pointwise=True, view=False) == "elementwise"
    assert family("mylib.window", pointwise=False, view=True) is None
    assert cost("mylib.fused_mlp", (x,), {}, x) is None
    assert cost("aten._fft_r2c", (x,), {}, x) is None
    assert cost("aten.gelu", (x,), {}, x) == Cost(0, 0, 0)


def test_a_formula_of_ones_own() -> None:
    x = torch.empty(4, 8)
    register_formula("test_lib.fused_mlp", lambda args, kwargs, out: 2 * args[0].shape[0] * 8 * 32 * 2)
    assert family("test_lib.fused_mlp", pointwise=False, view=False) == "matmul"
    assert cost("test_lib.fused_mlp", (x,), {}, x) == Cost(*(3 * [2 * 4 * 8 * 32 * 2]))

    @register("test_lib.flash", family="attention")
    def flash(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
        return Cost(10, 12, 20)

    assert family("test_lib.flash", pointwise=False, view=False) == "attention"
    assert cost("test_lib.flash", (), {}, None) == Cost(10, 12, 20)
    with pytest.raises(
        FamilyError, match=r"family of test_lib.other: expected one of matmul, .*; found 'gemm'"
    ) as error:
        register_formula("test_lib.other", lambda args, kwargs, out: 1, family="gemm")
    assert (error.value.name, error.value.found) == ("test_lib.other", "gemm")
    assert cost("test_lib.other", (), {}, None) is None


def test_sizes_that_are_no_numbers_are_not_guessed() -> None:
    class Ragged:
        dtype = torch.float32
        is_nested = True

        @property
        def shape(self) -> tuple[int, ...]:
            raise RuntimeError("a nested tensor has no shape")

    assert cost("aten.bmm", (Ragged(), Ragged()), {}, Ragged()) is None


def test_arguments_by_name() -> None:
    x, w = torch.empty(2, 4, 6, 6), torch.empty(8, 2, 3, 3)
    out = torch.empty(2, 8, 4, 4)
    named = {"input": x, "weight": w, "bias": None, "stride": [1, 1], "transposed": False, "groups": 2}
    assert cost("aten.convolution", (), named, out).flops == f.conv(2, 4, 8, (3, 3), (4, 4), 2)
