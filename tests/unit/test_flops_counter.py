"""FlopCounter: which layer and pass every operator goes to, in every kind of execution."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from seedance.flops import FlopCounter
from tests.flops_models import ONE, Block, Matrix, flops, rows, square, stack

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = stack()
    yield
    assert stack() == before


# --- layers and passes ---------------------------------------------------------------------------------------------


def test_layers_and_passes() -> None:
    net = nn.Sequential(Block(), Block())
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
    assert flops(counter.profile) == {
        **{(f"{i}.{name}", "fwd"): ONE for i in "01" for name in "ab"},
        **{(name, "bwd"): 2 * ONE for name in ("1.b", "1.a", "0.b")},
        ("0.a", "bwd"): ONE,  # the input needs no gradient
    }
    first = next(op for op in counter.profile.ops if op.layer == "0.a")
    assert (first.layer, first.layer_index, first.op, first.dtype, first.calls) == ("0.a", 1, "matmul", "fp32", 1)
    assert (first.flops, first.hw_flops, first.flops_full) == (ONE, ONE, ONE)
    assert first.bytes_ideal == 4 * (32 + 64 + 32)
    assert ("(step)", "reduction") in {(op.layer, op.op) for op in counter.profile.ops}
    assert counter.profile.host_ns is not None and counter.profile.host_ns > 0
    assert counter.profile.uncounted == ()


def test_frozen_weights_cost_one_product_backward() -> None:
    net = nn.Sequential(square(), square())
    net[1].requires_grad_(False)
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
    assert flops(counter.profile)["1", "bwd"] == ONE


def test_a_module_called_twice_and_one_under_two_names() -> None:
    net = nn.ModuleDict({"first": square(), "other": square()})
    net["again"] = net["first"]
    with FlopCounter(net) as counter:
        x = net["first"](rows(grad=True))
        (net["again"](x) + net["other"](x)).sum().backward()
    found = flops(counter.profile)
    assert found == {
        ("first", "fwd"): 2 * ONE,
        ("other", "fwd"): ONE,
        ("first", "bwd"): 4 * ONE,
        ("other", "bwd"): 2 * ONE,
    }


def test_views_written_in_place_and_functions_of_ones_own() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x).clone()
        y[:, :4].mul_(x @ w[:, :4])
        y[:, 4:] += x @ w[:, 4:]
        return y

    net = nn.Sequential(Matrix(Product.apply), Matrix(in_place))
    with FlopCounter(net) as counter:
        net(rows(grad=True)).sum().backward()
    assert flops(counter.profile) == {
        ("0", "fwd"): ONE,
        ("1", "fwd"): ONE,
        ("0", "bwd"): 2 * ONE,
        ("1", "bwd"): 2 * ONE,
    }


def test_a_backward_that_builds_a_graph() -> None:
    net = nn.Sequential(square(), nn.Tanh(), square())
    x = rows(grad=True)
    with FlopCounter(net) as counter:
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
    found = flops(counter.profile)
    assert set(found) == {(layer, pass_) for layer in "02" for pass_ in ("fwd", "bwd")}
    # dX once; then the gradient of that product to both factors, and of the first product to its weight and input.
    assert found["0", "bwd"] == 5 * ONE


def test_a_gradient_inside_forward() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(square(), nn.Tanh(), square())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    net = Force()
    with FlopCounter(net) as counter:
        net(rows(grad=True))
    assert flops(counter.profile) == {
        ("energy.0", "fwd"): ONE,
        ("energy.2", "fwd"): ONE,
        ("energy.0", "bwd"): ONE,
        ("energy.2", "bwd"): ONE,
    }
    assert "recompute" not in {op.pass_ for op in counter.profile.ops}


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, inside: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


@pytest.mark.parametrize(("reentrant", "again"), [(True, 65_536), (False, 32_768)])
def test_checkpointed_modules(reentrant: bool, again: int) -> None:
    net = Checkpointed(mlp(), reentrant=reentrant)
    with FlopCounter(net) as counter:
        net(torch.randn(4, 64, requires_grad=True)).sum().backward()
    by_pass = dict.fromkeys(("fwd", "bwd", "recompute"), 0)
    for (_, pass_), found in flops(counter.profile).items():
        by_pass[pass_] += found
    assert by_pass == {"fwd": 65_536, "bwd": 131_072, "recompute": again}
    assert counter.profile.flops == counter.profile.flops_full == 196_608
    assert counter.profile.hw_flops == 196_608 + again
    recomputed = [op for op in counter.profile.ops if op.pass_ == "recompute" and op.hw_flops]
    assert {op.layer for op in recomputed} == ({"inside.0", "inside.2"} if reentrant else {"inside.0"})
    assert all(op.flops == op.flops_full == 0 for op in recomputed)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_has_no_module_to_enter(reentrant: bool) -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w)

    net = nn.Sequential(Matrix(lambda x, w: checkpoint(twice, x, w, use_reentrant=reentrant)))
    with FlopCounter(net) as counter:
        net(rows(grad=True)).sum().backward()
    assert flops(counter.profile) == {("0", "fwd"): 2 * ONE, ("0", "recompute"): 2 * ONE, ("0", "bwd"): 4 * ONE}


@pytest.mark.parametrize(("reentrant", "again"), [(True, 4), (False, 2)])
def test_checkpoints_inside_checkpoints(reentrant: bool, again: int) -> None:
    inside = nn.Sequential(square(), nn.Tanh(), square(), nn.Tanh())
    net = Checkpointed(Checkpointed(inside, reentrant=reentrant), reentrant=reentrant)
    with FlopCounter(net) as counter:
        net(rows(grad=True)).sum().backward()
    found = flops(counter.profile)
    assert {pass_: sum(n for (_, p), n in found.items() if p == pass_) for pass_ in ("fwd", "bwd", "recompute")} == {
        "fwd": 2 * ONE,
        "bwd": 4 * ONE,
        "recompute": again * ONE,
    }
    assert {layer for layer, _ in found} == {"inside.inside.0", "inside.inside.2"}


def test_what_a_selective_checkpoint_keeps_is_not_recomputed() -> None:
    keep = [torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, keep)
    net = mlp()
    with FlopCounter(net) as counter:
        x = torch.randn(4, 64, requires_grad=True)
        checkpoint(net, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert {pass_ for _, pass_ in flops(counter.profile)} == {"fwd", "bwd"}
    assert counter.profile.hw_flops == 196_608


def test_a_graph_through_a_checkpoint_is_no_recomputation() -> None:
    net = Checkpointed(nn.Sequential(square(), nn.Tanh(), square()), reentrant=False)
    x = rows(grad=True)
    with FlopCounter(net) as counter:
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    found = flops(counter.profile)
    assert found["inside.0", "bwd"] == found["inside.2", "bwd"] == ONE
    assert found["inside.0", "recompute"] == ONE


# --- kinds of execution ----------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Operators that are composite where no gradients are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(4, 6, 3), nn.Conv2d(4, 4, 3, groups=2)
        self.up, self.lstm, self.gru = nn.ConvTranspose2d(4, 4, 2), nn.LSTM(8, 8), nn.GRU(8, 8)
        self.bilinear, self.linear = nn.Bilinear(8, 8, 8), nn.Linear(8, 8)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.up(self.conv2(x.reshape(2, 4, 4, 4)))
        parts = [
            image.sum(),
            self.conv1(x.reshape(2, 4, 16)).sum(),
            self.lstm(x.reshape(4, 4, 8))[0].sum(),
            self.gru(x.reshape(4, 4, 8))[0].sum(),
            self.bilinear(x, x).sum(),
            self.heads(*[self.linear(x).reshape(2, 8, 8)] * 3)[0].sum(),
            torch.einsum("bi,bj->ij", x, x).sum(),
            (x.reshape(2, 8, 8) @ x.reshape(2, 8, 8)).sum(),
            x.mv(x[0]).sum() + torch.addmv(x[:, 0], x, x[0]).sum() + torch.outer(x[0], x[0]).sum(),
            nn.functional.scaled_dot_product_attention(*[x.reshape(2, 2, 4, 8)] * 3, is_causal=True).sum(),
        ]
        return sum(parts, torch.zeros(()))


def test_inference_mode_and_no_grad_and_eager_agree() -> None:
    net, x = Everything(), torch.randn(16, 8)
    found = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), FlopCounter(net) as counter:
            net(x)
        assert counter.profile.uncounted == ()
        found.append(counter.profile.by_block(9))
    assert found[0] == found[1] == found[2]
    assert sum(found[0].values()) > 0


def test_autocast_changes_the_dtype_alone() -> None:
    net, x = nn.Sequential(square(), nn.LayerNorm(8), square()), rows()
    with FlopCounter(net) as plain:
        net(x).sum().backward()
    with FlopCounter(net) as cast, torch.autocast("cpu", torch.bfloat16):
        net(x).sum().backward()
    assert {key: n for key, n in cast.profile.by_block(9).items() if key[2] != "bf16"} == {}
    assert {(*key[:2], "fp32"): n for key, n in cast.profile.by_block(9).items()} == plain.profile.by_block(9)
    assert any(op.op == "copy" and op.dtype == "fp32" for op in cast.profile.ops)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float64, "fp64"), (torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.half, "fp16")],
)
def test_dtypes(dtype: torch.dtype, name: str) -> None:
    a = torch.ones(4, 8, dtype=dtype)
    with FlopCounter() as counter:
        torch.mm(a, a.t())
    assert counter.profile.by_block(1) == {("(step)", "fwd", name): 2 * 4 * 8 * 4}


def test_integers_multiply_as_int8() -> None:
    a = torch.ones(32, 64, dtype=torch.int8)
    with FlopCounter() as counter:
        torch._int_mm(a, a.t())
    assert counter.profile.by_block(1) == {("(step)", "fwd", "int8"): 131_072}


def test_fake_tensors_have_no_times() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), FlopCounter() as counter:
        torch.randn(4, 8) @ torch.randn(8, 8)
    assert counter.profile.flops == ONE
    assert counter.profile.host_ns is None
    with FlopCounter() as counter:
        torch.empty(4, 8, device="meta") @ torch.empty(8, 8, device="meta")
    assert (counter.profile.flops, counter.profile.host_ns) == (ONE, None)


# --- optimizers --------------------------------------------------------------------------------------------------------


def test_the_optimizer_is_a_layer_and_a_pass() -> None:
    net = square()
    adam = torch.optim.AdamW(net.parameters())
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
        adam.step()
        adam.zero_grad()
        net(rows())
    found = {(op.layer, op.pass_, op.op) for op in counter.profile.ops}
    assert ("(optimizer)", "optim", "optimizer") in found
    assert {op for layer, pass_, op in found if pass_ == "optim"} == {"optimizer"}
    assert flops(counter.profile) == {("(model)", "fwd"): 2 * ONE, ("(model)", "bwd"): ONE}


def test_products_of_an_optimizer_keep_their_family() -> None:
    class Orthogonal(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad @ parameter.grad.t() @ parameter.grad)

    net = square()
    orthogonal = Orthogonal(net.parameters())
    net(rows()).sum().backward()
    with FlopCounter(net) as counter:
        orthogonal.step()
    assert flops(counter.profile) == {("(optimizer)", "optim"): 2 * 2 * 8**3}


def test_a_closure_runs_the_model_inside_the_step() -> None:
    net, x = nn.Sequential(square()), rows()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss

    with FlopCounter(net) as counter:
        sgd.step(closure)
    assert flops(counter.profile) == {("0", "fwd"): ONE, ("0", "bwd"): ONE}
