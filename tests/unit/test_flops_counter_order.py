"""FlopCounter among exceptions, generators, other modes, threads and operators that nobody knows: it leaves nothing behind."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from seedance.errors import CountError
from seedance.flops import FlopCounter, OpCount, Profile, count_copy, register_formula
from tests.flops_models import ONE, Block, Matrix, flops, rows, square, stack

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = stack()
    yield
    assert stack() == before


# --- what goes wrong, and what stays ---------------------------------------------------------------------------------


def test_an_exception_in_forward_leaves_no_frame() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("planned")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.w = Fails(), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ValueError, match="planned"):
                self.fails(x)
            return x @ self.w

    net = Outer()
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
    assert flops(counter.profile) == {("(model)", "fwd"): ONE, ("(model)", "bwd"): ONE}
    with pytest.raises(ValueError, match="planned"), FlopCounter(net):
        net.fails(rows())


def test_a_step_that_fails_does_not_swallow_the_next_one() -> None:
    class Bad(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("planned")

    net = nn.Sequential(square())
    bad, good = Bad(net.parameters(), lr=0.1), torch.optim.SGD(net.parameters(), lr=0.1)
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="planned"):
                bad.step()
        good.step()
        net(rows()).sum().backward()
    assert flops(counter.profile) == {("0", "fwd"): 2 * ONE, ("0", "bwd"): 2 * ONE}


def test_a_generator_runs_outside_its_module() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = square(), square()

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for _ in range(3):
                x = self.a(x)
                yield self.b(x)

    net = Steps()
    with FlopCounter(net) as counter:
        torch.stack(list(net(rows(grad=True)))).sum().backward()
    assert flops(counter.profile) == {
        ("a", "fwd"): 3 * ONE,
        ("b", "fwd"): 3 * ONE,
        ("a", "bwd"): 6 * ONE,
        ("b", "bwd"): 6 * ONE,
    }


class Passes(TorchDispatchMode):
    """A mode of the user."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("order", "counted", "called"),
    [
        ("counter mode -mode -counter", 3, 1),
        ("mode counter -counter -mode", 1, 3),
        ("mode counter -mode -counter", 2, 2),
        ("counter mode -counter -mode", 2, 2),
        ("mode counter mode -counter -mode -mode", 2, 5),
    ],
)
def test_modes_of_the_user_come_and_go_in_any_order(order: str, counted: int, called: int) -> None:
    """After each step the model runs once."""
    net, x, mode, counter = square(), rows(), Passes(), FlopCounter()
    steps: dict[str, Callable[[], Any]] = {
        "counter": counter.__enter__,
        "-counter": counter.stop,
        "mode": mode.__enter__,
        "-mode": lambda: mode.__exit__(None, None, None),
    }
    calls = 0
    for step in order.split():
        steps[step]()
        is_on = torch._C._len_torch_dispatch_stack() > 0
        assert dispatch._is_in_torch_dispatch_mode is is_on
        assert dispatch._is_in_non_infra_torch_dispatch_mode is is_on
        assert dispatch._is_in_any_mode_without_ignore_compile_internals is is_on
        before = mode.calls
        net(x)
        calls += mode.calls > before
    assert counter.profile.flops == counted * ONE
    assert calls == called


def test_stopped_in_another_thread_it_counts_no_more_and_goes_when_stopped_at_home() -> None:
    counter = FlopCounter()
    with counter:
        other = threading.Thread(target=counter.stop)
        other.start()
        other.join()
        rows() @ torch.ones(8, 8)
        assert counter.profile.flops == 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_counting_changes_no_bit(mode: Callable[[], Any]) -> None:
    def run(is_counted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Flatten(), nn.Linear(48, 8))
        adam = torch.optim.AdamW(net.parameters())
        seen = []
        for _ in range(3):
            with mode(), FlopCounter(net) if is_counted else nullcontext():
                loss = net(torch.randn(4, 4, 8)).pow(2).sum()
                if loss.requires_grad:
                    loss.backward()
                    adam.step()
                    adam.zero_grad()
            seen.append(loss.detach().clone())
        return [*seen, *net.state_dict().values(), torch.random.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_a_copy_made_meanwhile_has_no_hook() -> None:
    net = nn.Sequential(square())
    with FlopCounter(net):
        made = copy.deepcopy(net)
    assert not made[0]._forward_hooks and not made[0]._forward_pre_hooks


def test_a_counter_counts_one_block() -> None:
    counter = FlopCounter()
    with counter:
        pass
    with pytest.raises(CountError, match="was used before") as caught, counter:
        pass
    assert caught.value.reason == "used"


def test_counters_inside_each_other_count_the_same() -> None:
    net = Block()
    with FlopCounter(net) as outer, FlopCounter(net) as inner:
        net(rows()).sum().backward()
    assert outer.profile.by_block(9) == inner.profile.by_block(9)
    assert outer.profile.hw_flops == 5 * ONE


def test_tensor_subclasses_are_counted_by_what_they_do() -> None:
    class Wrapped(torch.Tensor):
        inside: torch.Tensor

        @staticmethod
        def __new__(cls, inside: torch.Tensor) -> Wrapped:
            made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
            made.inside = inside
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = [one.inside if isinstance(one, Wrapped) else one for one in args]
            return Wrapped(func(*plain, **(kwargs or {})))

    with FlopCounter() as counter:
        torch.mm(Wrapped(rows()), torch.ones(8, 8))
    assert counter.profile.flops == ONE
    assert sum(op.calls for op in counter.profile.ops if op.op == "matmul") == 1


# --- operators ---------------------------------------------------------------------------------------------------------


def test_scripted_parts_are_counted_as_they_run_and_never_copied() -> None:
    with warnings.catch_warnings():
        # Of copying, too: as an error that says TorchScript it would pass for the refusal.
        warnings.simplefilter("ignore", DeprecationWarning)
        net = nn.Sequential(torch.jit.trace(Block(), rows()), square())
        with pytest.raises(CountError, match="TorchScript, which has no copy"):
            count_copy(net, (rows(),), training=True)
    assert all(one.grad is None for one in net.parameters())
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
    assert flops(counter.profile) == {
        ("0", "fwd"): 2 * ONE,
        ("1", "fwd"): ONE,
        ("1", "bwd"): 2 * ONE,
        ("0", "bwd"): 3 * ONE,
    }


def test_a_copy_goes_backward_through_complex_outputs_too() -> None:
    net = nn.Linear(8, 8, bias=False, dtype=torch.complex64)
    copied = count_copy(net, (torch.randn(4, 8, dtype=torch.complex64),), training=True)
    assert flops(copied) == {("(model)", "fwd"): ONE, ("(model)", "bwd"): ONE}


def test_lazy_parameters_get_their_shapes_while_counted() -> None:
    net = nn.Sequential(nn.LazyLinear(8, bias=False), square())
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
    assert flops(counter.profile) == {("0", "fwd"): ONE, ("1", "fwd"): ONE, ("1", "bwd"): 2 * ONE, ("0", "bwd"): ONE}


def test_what_has_no_formula_is_listed_by_name_calls_and_time() -> None:
    library = torch.library.Library("flops_counter_test", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x @ x, "CPU")
    x = torch.ones(8, 8)
    net = Matrix(lambda x, w: torch.ops.flops_counter_test.mystery(x))
    with FlopCounter(nn.Sequential(net)) as counter:
        for _ in range(3):
            net(x)
    (listed,) = counter.profile.uncounted
    assert (listed.name, listed.calls) == ("flops_counter_test.mystery", 3)
    assert listed.host_ns is not None and counter.profile.host_ns is not None
    assert 0 < listed.host_ns <= counter.profile.host_ns
    (row,) = [op for op in counter.profile.ops if op.op == "uncounted"]
    assert (row.layer, row.variant, row.calls, row.uncounted_calls, row.flops) == ("0", listed.name, 3, 3, 0)

    register_formula("flops_counter_test.mystery", lambda args, kwargs, out: 2 * 8**3)
    with FlopCounter() as counter:
        torch.ops.flops_counter_test.mystery(x)
    assert (counter.profile.flops, counter.profile.uncounted) == (1024, ())

    def fails(args: Any, kwargs: Any, out: Any) -> int:
        raise IndexError

    register_formula("flops_counter_test.mystery", fails)
    with FlopCounter() as counter:
        torch.ops.flops_counter_test.mystery(x)
    assert [one.name for one in counter.profile.uncounted] == ["flops_counter_test.mystery"]


def test_branches_and_loops_count_what_ran() -> None:
    from torch._higher_order_ops.while_loop import while_loop_op

    x = torch.ones(4, 4)
    with FlopCounter() as counter:
        torch.ops.higher_order.cond(torch.tensor(True), lambda x: (x @ x,), lambda x: (x @ x @ x,), (x,))
    assert counter.profile.flops == 2 * 4**3
    with FlopCounter() as counter:
        while_loop_op(lambda i, y: i < 3, lambda i, y: (i + 1, y @ y), (torch.tensor(0), x), ())
    assert counter.profile.flops == 3 * 2 * 4**3


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda: torch.ones(8, 8) + torch.ones(8, 1).expand(8, 8), 4 * (64 + 8 + 64)),
        (lambda: nn.functional.embedding(torch.arange(3), torch.ones(100, 8)), 3 * 8 + 4 * (24 + 24)),
        (lambda: torch.ones(8, 8).copy_(torch.ones(8, 8)), 4 * (64 + 64)),
        (lambda: torch.ones(8, 8).add_(torch.ones(8, 8)), 4 * (64 + 64 + 64)),
        (lambda: torch.ones(100, 8).index_add_(0, torch.arange(3), torch.ones(3, 8)), 3 * 8 + 4 * (24 + 24 + 24)),
        (lambda: torch.ones(8, 8).mul(2.0), 4 * (64 + 64)),
        (lambda: (lambda x: x * x)(torch.ones(8, 8)), 4 * (64 + 64)),
        (lambda: torch._foreach_add_([torch.ones(8), torch.ones(8)], 1.0), 4 * (16 + 16)),
        (lambda: torch.ones(8, 8).t().reshape(2, 32)[0], 4 * (64 + 64)),
    ],
    ids=["expand", "gather", "overwrite", "in place", "scatter", "scalar", "same twice", "list", "views"],
)
def test_bytes(run: Callable[[], Any], moved: int) -> None:
    with FlopCounter() as counter:
        run()
    made = [op for op in counter.profile.ops if op.op not in ("random",)]
    assert sum(op.bytes_ideal for op in made) == moved


def test_names_and_prefix() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.module = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    net = Wrapper(nn.Sequential(Wrapper(square()), Block()))
    with FlopCounter(net, prefix="stage1.") as counter, torch.no_grad():
        net(rows())
    assert [(op.layer, op.layer_index) for op in counter.profile.ops if op.flops] == [
        ("stage1.0", 0),
        ("stage1.1.a", 2),
        ("stage1.1.b", 3),
    ]


def test_profiles_add_up() -> None:
    net = Block()
    with FlopCounter(net) as counter:
        net(rows()).sum().backward()
    one = counter.profile
    assert one.plus(one).ops == one.scaled(2).ops
    assert one.scaled(3).hw_flops == 3 * one.hw_flops
    assert one.scaled(3).host_ns == 3 * (one.host_ns or 0)
    assert Profile((OpCount("a.b", 0, "matmul", "bwd", "fp32", "", 1, 2, 5, 4, 8, 0),)).by_block(1, model=True) == {
        ("a", "bwd", "fp32"): 2
    }
