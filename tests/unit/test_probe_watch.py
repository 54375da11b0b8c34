"""Finding the module that does the work: whatever the program is like, it runs as before, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from seedance.probe.watch import INFERENCE_CALLS, ROUND_STEPS, Found, Watch, has_optimizer, owns

torch.set_num_threads(1)
X = torch.ones(4, 8)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Finds:
    """A watch and what it found."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self.watch = Watch(torch, self.found.append)
        self.watch.start()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        (found,) = self.found
        return found.modules

    @property
    def module(self) -> nn.Module:
        (module,) = self.modules
        return module


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    compile_module = nn.Module.compile
    hooks = dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
    yield
    assert nn.Module._compiled_call_impl is None
    assert nn.Module.compile is compile_module
    assert dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks) == hooks


def step(optimizer: torch.optim.Optimizer, *outputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    sum((y.square().sum() for y in outputs), torch.zeros(())).backward()
    optimizer.step()


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=1e-3)


# --- training -------------------------------------------------------------------------------------------------------


def test_the_trained_model_is_found_at_the_first_step() -> None:
    model, loss, seen = Net(), nn.CrossEntropyLoss(), Finds()
    optimizer = sgd(model)
    for _ in range(3):  # micro-batches
        loss(model(X), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    assert not seen.found
    step(optimizer, model(X))
    assert seen.module is model
    assert seen.found[0].optimizers == (optimizer,)
    assert seen.found[0].units_lost == 1
    assert not seen.watch.is_running
    step(optimizer, model(X))
    assert len(seen.found) == 1


def test_hooks_of_optimizers_do_not_change_while_torch_goes_through_them() -> None:
    """Others registered before and after ours are called each time; torch would raise if ours went away meanwhile."""
    calls: list[str] = []
    register = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook
    before = register(lambda *_: calls.append("before"))
    model, seen = Net(), Finds()
    after = register(lambda *_: (model(X), calls.append("after")))  # a hook that calls the model, as averaging does
    optimizer = sgd(model)
    for _ in range(3):
        step(optimizer, model(X))
    assert calls == ["before", "after"] * 3
    assert seen.module is model
    seen.watch.stop()
    before.remove(), after.remove()


def test_a_model_that_is_called_within_the_step_alone() -> None:
    """LBFGS calls it from its closure."""
    model, seen = Net(), Finds()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert seen.module is model
    seen.watch.stop()


def test_what_is_called_is_found_and_not_what_holds_it() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

    holder, seen = Holder(), Finds()
    optimizer = sgd(holder)
    for _ in range(2):
        step(optimizer, holder.net(X))
    assert seen.module is holder.net


def test_a_wrapper_is_found_before_what_it_wraps() -> None:
    model, seen = Net(), Finds()
    wrapper = nn.Sequential(model)
    wrapper(X), model(X)
    step(sgd(model), wrapper(X))
    wrapper(X)
    assert seen.module is wrapper


def test_of_equals_the_one_that_is_trained() -> None:
    """The bare model is evaluated first, its wrapper is trained then."""
    model, seen = Net(), Finds()
    wrapper = nn.Sequential(model)
    with torch.no_grad():
        for _ in range(INFERENCE_CALLS - 1):
            model(X)
    step(sgd(model), wrapper(X))
    model(X)
    assert seen.module is wrapper


def test_several_models_are_found_after_one_round_the_largest_first() -> None:
    generator, critic, seen = Net(32), Net(8), Finds()
    optimizers = sgd(critic), sgd(generator)
    step(optimizers[0], critic(generator(X)))
    step(optimizers[1], critic(generator(X)))
    assert not seen.found
    critic(X)
    assert seen.modules == (generator, critic)
    assert seen.found[0].optimizers == optimizers
    assert seen.found[0].units_lost == 2


@pytest.mark.parametrize("critic_steps", [1, 5])
def test_a_generator_that_is_called_before_the_critics_step_alone_is_found(critic_steps: int) -> None:
    """What it made trains the critic, cut off, and then itself: it is not called between the two steps."""
    generator, critic, seen = Net(32), Net(8), Finds()
    optimizers = sgd(critic), sgd(generator)
    for _ in range(2):
        for _ in range(critic_steps):
            made = generator(X)
            step(optimizers[0], critic(made.detach()))
        step(optimizers[1], critic(made))
    assert seen.modules == (generator, critic)
    assert seen.found[0].optimizers == optimizers
    assert seen.found[0].units_lost == critic_steps + 1


def test_a_model_that_nobody_trains_yet_is_not_waited_for_for_ever() -> None:
    model, later, seen = Net(), Net(64), Finds()
    optimizers = [sgd(model) for _ in range(ROUND_STEPS + 2)]
    for done, optimizer in enumerate(optimizers):
        step(optimizer, later(model(X)))
        assert bool(seen.found) == (done >= ROUND_STEPS)
    assert seen.module is model


def test_parts_that_share_an_optimizer_are_all_found() -> None:
    encoder, decoder, seen = Net(), Net(), Finds()
    optimizer = sgd(encoder, decoder)
    for _ in range(2):
        step(optimizer, decoder(encoder(X)))
    assert seen.modules == (encoder, decoder)
    assert seen.found[0].units_lost == 1


def test_frozen_models_beside_it_do_not_matter() -> None:
    teacher, student, seen = Net(64).requires_grad_(False), Net(), Finds()
    step(sgd(student), student(X), teacher(X).detach())
    teacher(X)
    assert seen.module is student


def test_a_model_that_is_gone_is_forgotten() -> None:
    seen = Finds()
    Net(64)(X)
    model = Net()
    step(sgd(model), model(X))
    model(X)
    assert seen.module is model


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_that_only_infers_is_found_after_some_calls(mode: Callable[[], Any]) -> None:
    gc.collect()  # optimizers of other tests
    model, helper, seen = Net().eval(), nn.Softmax(-1), Finds()
    with mode():
        for _ in range(INFERENCE_CALLS - 1):
            helper(helper(model(X)))
        assert not seen.found
        model(X)
    assert seen.module is model
    assert (seen.found[0].optimizers, seen.found[0].units_lost) == ((), 0)


def test_the_call_that_finds_it_goes_the_new_way() -> None:
    """Whatever `found` does to the module (a probe marks its calls) holds for the very call that led to it."""
    gc.collect()
    model, marks = Net().eval(), []

    def found(what: Found) -> None:
        (module,) = what.modules
        inner = module._call_impl
        module._compiled_call_impl = lambda *a: (marks.append("call"), inner(*a))[1]

    watch = Watch(torch, found)
    watch.start()
    with torch.no_grad():
        for _ in range(INFERENCE_CALLS):
            model(X)
    assert marks == ["call"]


def test_without_gradients_after_a_step_is_evaluation() -> None:
    other, seen = Net(), Finds()
    sgd(Net()).step()  # of a model that is never called
    with torch.no_grad():
        for _ in range(2 * INFERENCE_CALLS):
            other(X)
    assert not seen.found
    seen.watch.stop()


def test_an_evaluation_before_training_is_no_serving() -> None:
    model, seen = Net(), Finds()
    optimizer = sgd(model)
    with torch.no_grad():
        for _ in range(2 * INFERENCE_CALLS):
            model(X)
    assert not seen.found
    for _ in range(2):
        step(optimizer, model(X))
    assert seen.module is model
    assert seen.found[0].optimizers == (optimizer,)


def test_only_steps_stays_out_of_calls_until_there_is_one() -> None:
    found: list[Found] = []
    watch = Watch(torch, found.append, only_steps=True)
    watch.start()
    model = Net()
    optimizer = sgd(model)
    model(X).square().sum().backward()
    assert nn.Module._compiled_call_impl is None
    optimizer.step()
    assert not found
    model(X)
    assert [(f.modules, f.optimizers) for f in found] == [((), (optimizer,))]


# --- the program is as before ---------------------------------------------------------------------------------------


def graphs() -> tuple[Callable[..., Any], list[int]]:
    """A compiler that counts what it is given."""
    made: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        made.append(len(inputs))
        return graph.forward

    return compiler, made


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own look
@pytest.mark.parametrize("how", ["torch.compile", "in place", "blocks", "blocks in place", "function"])
def test_a_compiled_model_is_not_compiled_again_when_the_watch_ends(how: str) -> None:
    torch._dynamo.reset()
    seen = Finds()
    model = Net()
    compiler, made = graphs()
    call: Callable[..., torch.Tensor] = model
    options = {"backend": compiler, "fullgraph": True}
    if how == "torch.compile":
        call = torch.compile(model, **options)
    elif how == "in place":
        model.compile(**options)
    elif how == "blocks":
        model.blocks = nn.ModuleList([torch.compile(b, **options) for b in model.blocks])
    elif how == "blocks in place":
        for block in model.blocks:
            block.compile(**options)
    else:
        call = torch.compile(lambda x: model(x) + 1, **options)
    optimizer = sgd(model)
    step(optimizer, call(X))
    first = len(made)
    assert first
    for _ in range(3):
        step(optimizer, call(X))
    assert len(made) == first
    if how == "function":  # there is nothing to see in a function that is compiled whole
        assert not seen.found
        seen.watch.stop()
        step(optimizer, call(X))
        assert len(made) == first
    else:
        assert seen.module is (call if how == "torch.compile" else model)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_with_a_call_of_its_own_is_called_once(in_place: bool) -> None:
    calls: list[torch.Tensor] = []

    class Counts(Net):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            made: torch.Tensor = super().__call__(x)
            return made + 1

    model, seen = Counts(), Finds()
    if in_place:
        model.compile(backend="eager")
    optimizer = sgd(model)
    with torch.no_grad():
        expected = model.forward(X) + 1
    assert torch.equal(model(X), expected)
    optimizer.step()
    assert torch.equal(model(X), expected)
    assert seen.module is model
    assert len(calls) == 2
    torch._dynamo.reset()


def test_results_are_the_same_to_the_bit() -> None:
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(Net(), nn.Dropout(0.5), Net())
        seen = Finds() if watched else None
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(optimizer, model(torch.randn(4, 8)))
        assert seen is None or seen.found
        return [*model.parameters(), torch.randn(3)]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_copies_and_pickles_know_nothing_of_it() -> None:
    model = Net()
    seen = Finds()
    model(X)
    assert "_compiled_call_impl" not in model.__dict__
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(X), model(X))
    seen.watch.stop()


def test_an_error_in_forward_passes_and_the_watch_goes_on() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("bad batch")

    seen = Finds()
    with pytest.raises(ValueError, match="bad batch"):
        Fails()(X)
    model = Net()
    step(sgd(model), model(X))
    model(X)
    assert seen.module is model


def test_an_error_of_ours_is_told_once_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    def found(_: Found) -> None:
        raise RuntimeError("no such luck")

    watch = Watch(torch, found)
    watch.start()
    model = Net()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING, "seedance.probe"):
        for _ in range(3):
            step(optimizer, model(X))
    assert watch.failures == 1
    assert [r.message for r in caplog.records] == [
        "probe: the model could not be found (RuntimeError: no such luck). The job goes on without the probe. "
        "`seedance.attach(model)` attaches it by hand."
    ]


def test_two_watches_do_not_mix() -> None:
    """The second finds the way taken and keeps out of it."""
    first, second = Finds(), Finds()
    assert not second.watch.is_running
    model = Net()
    step(sgd(model), model(X))
    model(X)
    assert first.module is model
    assert not second.found


# --- helpers --------------------------------------------------------------------------------------------------------


def test_who_owns_what_an_optimizer_trains() -> None:
    model = Net()
    assert owns(model, sgd(model))
    assert owns(model.blocks[0], sgd(model))
    assert not owns(Net(), sgd(model))


def test_an_optimizer_is_seen_wherever_it_is() -> None:
    optimizer = torch.optim.Adam(Net().parameters())
    assert has_optimizer(torch)
    assert optimizer
