"""FLOPs per (block, pass, dtype) are the same eager, compiled, checkpointed and fused; a counted model stays as it was.

What a compiled model really runs is read from the graphs that the compiler's backend is given: every product in them, with
its layer, by the framework's own formulas.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from seedance.errors import CountError
from seedance.flops import FlopCounter, Profile, count_copy
from tests.architectures import ARCHITECTURES, IDS, outputs, quiet_transformers

torch.set_num_threads(1)

Blocks = dict[tuple[str, str, str], int]


class Block(nn.Module):
    """Attention and an MLP, as most blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 12, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(2, 12, 32))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Blocks with embedding and head, checkpointed or not."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class Convolutions(nn.Module):
    """Convolutions with batch norm, as images are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.body, self.head = nn.Conv2d(8, 8, 3, dilation=2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def eager(model: nn.Module, *args: Any, **kwargs: Any) -> Profile:
    """One forward and backward under a counter."""
    with FlopCounter(model) as counter:
        outputs(model(*args, **kwargs)).backward()
    return counter.profile


# --- compiled -----------------------------------------------------------------------------------------------------------


def compiled_graphs(model: nn.Module, *args: Any, **kwargs: Any) -> dict[tuple[str, str], int]:
    """FLOPs by layer and pass of the products in the graphs that a compiler's backend gets, forward and backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: dict[tuple[str, str], int] = {}

    def reading(graph_pass: str) -> Callable[..., Any]:
        def read(graph: torch.fx.GraphModule, _: Any) -> Any:
            for node in graph.graph.nodes:
                packet = getattr(node.target, "_overloadpacket", None)
                if packet not in flop_registry:
                    continue
                given, named = torch.fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
                modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
                path = list(modules.values())[-1][0]
                layer = re.sub(r"^L\['\w+'\](\[\d+\])?\.?|\._orig_mod|slice\([^)]*\)\.?", "", path) or "(model)"
                again = graph_pass == "bwd" and node.meta.get("partitioner_tag") == "is_forward"
                key = layer, "recompute" if again else graph_pass
                found[key] = found.get(key, 0) + flop_registry[packet](*given, **named, out_val=node.meta["val"])
            return make_boxed_func(graph.forward)

        return read

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=reading("fwd"), bw_compiler=reading("bwd"))
    outputs(torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)).backward()
    return found


def without_dtype(profile: Profile) -> dict[tuple[str, str], int]:
    """Executed FLOPs by layer and pass."""
    found: dict[tuple[str, str], int] = {}
    for (layer, pass_, _), flops in profile.by_block(99).items():
        found[layer, pass_] = found.get((layer, pass_), 0) + flops
    return found


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "blocks": (Model, (IDS,), {}),
    "checkpointed": (lambda: Model(checkpointed=True), (IDS,), {}),
    "convolutions": (Convolutions, (torch.randn(2, 3, 16, 16),), {}),
    "llama": (ARCHITECTURES["llama"].make, (), {"input_ids": IDS, "use_cache": False}),
    "unet": (ARCHITECTURES["unet"].make, (torch.randn(2, 3, 32, 32),), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_counts_are_eager_counts_and_what_the_compiler_runs(name: str) -> None:
    make, args, kwargs = CASES[name]
    with quiet_transformers(), sdpa_kernel(SDPBackend.MATH):  # the framework's formulas know no other attention of CPUs
        model = make()
        counted = eager(model, *args, **kwargs)
        run = compiled_graphs(model, *args, **kwargs)
        copied = count_copy(torch.compile(model), args, kwargs, training=True)
    assert counted.by_block(99) == copied.by_block(99)
    assert [(op.key, op.calls, op.flops, op.hw_flops) for op in counted.ops if op.hw_flops] == [
        (op.key, op.calls, op.flops, op.hw_flops) for op in copied.ops if op.hw_flops
    ]
    assert copied.uncounted == () and copied.host_ns is None
    assert without_dtype(copied) == run


def test_compiled_parts_are_counted_eager_and_stay_compiled() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model, plain = Model(), Model()
    expected = eager(plain, IDS).by_block(99)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = whole(IDS)
    graphs = counters["stats"]["unique_graphs"]
    assert eager(whole, IDS).by_block(99) == expected
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert eager(model, IDS).by_block(99) == expected
    assert counters["stats"]["unique_graphs"] == graphs
    assert torch.equal(whole(IDS), before)


def test_a_mode_that_outlives_the_counter_does_not_keep_the_compiler_off() -> None:
    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    torch._dynamo.reset()
    mode, counter = Passes(), FlopCounter()
    counter.__enter__()
    mode.__enter__()
    counter.stop()
    mode.__exit__(None, None, None)
    compiled = torch.compile(lambda x: x * 2 + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))


# --- checkpointed and fused -----------------------------------------------------------------------------------------


def test_checkpoints_change_no_pass_but_recompute() -> None:
    plain, again = eager(Model(), IDS), eager(Model(checkpointed=True), IDS)
    assert plain.by_block(2, model=True) == again.by_block(2, model=True)
    found = again.by_block(2)
    recomputed = {key: flops for key, flops in found.items() if key[1] == "recompute"}
    assert {key: flops for key, flops in found.items() if key not in recomputed} == plain.by_block(2)
    last = 2 * 24 * 64 * 32  # of each block its last product is not needed again
    assert recomputed == {
        (block, "recompute", "fp32"): plain.by_block(2)[block, "fwd", "fp32"] - last
        for block in ("blocks.0", "blocks.1", "blocks.2")
    }
    assert again.hw_flops - again.flops - (plain.hw_flops - plain.flops) == sum(recomputed.values())


def test_fused_attention_changes_only_what_it_computes_again() -> None:
    model = Model()
    found = {}
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            found[backend] = eager(model, IDS)
    unfused, fused = found[SDPBackend.MATH], found[SDPBackend.FLASH_ATTENTION]
    assert unfused.by_block(2, model=True) == fused.by_block(2, model=True)
    scores = 2 * 2 * 4 * 12 * 12 * 8
    assert fused.hw_flops - unfused.hw_flops == 3 * scores  # one product of three blocks


def test_fused_recurrent_layers_cost_what_their_steps_do() -> None:
    fused, cell = nn.LSTM(8, 16), nn.LSTMCell(8, 16)

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = (torch.zeros(2, 16), torch.zeros(2, 16))
            total = torch.zeros(())
            for one in x:
                state = self.cell(one, state)
                total = total + state[0].sum()
            return total

    x = torch.randn(5, 2, 8, requires_grad=True)
    with FlopCounter() as counter:
        fused(x)[0].sum().backward()
    steps = eager(Steps(), x)
    forward = 2 * 5 * 2 * 4 * 16 * (8 + 16)
    assert [(key[1], n) for key, n in counter.profile.by_block(1).items()] == [("fwd", forward), ("bwd", 2 * forward)]
    # Step by step nothing goes back into the state before the first one.
    assert steps.flops == 3 * forward - 2 * 2 * 4 * 16 * 16


def test_grouped_experts_cost_what_single_ones_do() -> None:
    with quiet_transformers():
        model = ARCHITECTURES["mixtral"].make()
        single = eager(model, input_ids=IDS)
        model.set_experts_implementation("grouped_mm")
        grouped = eager(model, input_ids=IDS)
    assert single.by_block(3) == grouped.by_block(3)


# --- the copy leaves the model alone --------------------------------------------------------------------------------


class Restless(nn.Module):
    """Changes itself in every way that a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls, self.seen, self.state = 0, [torch.zeros(8)], {"last": None}
        self.lock = threading.Lock()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.calls += 1
            self.seen.append(x.detach())
            self.state["last"] = x
            self.mean.add_(x.mean(0).detach())
            return self.drop(self.norm(self.linear(x)))


def test_counting_a_copy_leaves_no_trace() -> None:
    model, x = Restless(), torch.randn(4, 8, requires_grad=True)
    called: list[str] = []
    model.linear.register_forward_hook(lambda *_: called.append("hook"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    profile = count_copy(model, (x,), training=True)
    assert profile.flops == 3 * 2 * 4 * 8 * 8
    assert torch.equal(torch.random.get_rng_state(), random)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(type(value) is nn.Parameter and value.grad is None for value in model.parameters())
    assert (model.calls, len(model.seen), model.state) == (0, 1, {"last": None})
    assert x.grad is None and called == []
    model(x).sum().backward()
    assert model.calls == 1 and called == ["hook"]


def test_inference_of_a_copy() -> None:
    model = Model().eval()
    with torch.no_grad(), FlopCounter(model) as counter:
        model(IDS)
    copied = count_copy(torch.compile(model), (IDS,), training=False)
    assert copied.by_block(99) == counter.profile.by_block(99)
    assert {op.pass_ for op in copied.ops} == {"fwd"}


def test_autocast_holds_for_a_copy() -> None:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_cache_enabled()
        copied = count_copy(model, (IDS,), training=True)
        assert torch.is_autocast_cache_enabled()
        counted = eager(model, IDS)
    assert copied.by_block(99) == counted.by_block(99)
    assert {dtype for _, _, dtype in copied.by_block(1)} == {"bf16"}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.LSTM(8, 16, num_layers=2, bidirectional=True), torch.randn(5, 2, 8)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), torch.randn(5, 8)),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), torch.randn(5, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
        (nn.Sequential(nn.Flatten(), nn.Linear(40, 8), nn.Softmax(-1)), torch.randn(2, 5, 8)),
        (torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), torch.randn(2, 8)),
    ],
    ids=["lstm", "weight norm", "spectral norm", "encoder layer", "sequential", "traced"],
)
def test_kinds_of_modules_that_can_be_copied(model: nn.Module, inputs: torch.Tensor) -> None:
    copied = count_copy(model, (inputs,), training=True)
    with FlopCounter(model) as counter:
        out = model(inputs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert copied.flops > 0
    assert copied.by_block(99) == counter.profile.by_block(99)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_copies_of_many_architectures(name: str) -> None:
    torch.manual_seed(0)
    with quiet_transformers():
        model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()
        if name in ("mixtral", "qwen3_moe", "deepseek_v3"):
            with pytest.raises(
                CountError, match="DynamicOutputShape"
            ):  # single experts take what the router gives them
                count_copy(model, kwargs=inputs, training=True)
            model.bfloat16().set_experts_implementation("grouped_mm")
        copied = count_copy(model, kwargs=inputs, training=True)
        assert copied.by_block(99) == eager(model, **inputs).by_block(99)


def test_padding_and_a_loss() -> None:
    with quiet_transformers():
        model = ARCHITECTURES["llama"].make()
        model.set_attn_implementation("sdpa")
        mask = torch.ones_like(IDS)
        mask[1, :5] = 0
        inputs = {"input_ids": IDS, "labels": IDS, "attention_mask": mask}
        copied = count_copy(model, kwargs=inputs, training=True)
        with FlopCounter(model) as counter:
            model(**inputs).loss.backward()
    assert copied.by_block(99) == counter.profile.by_block(99)


def test_small_integers_keep_their_values() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("steps", torch.tensor(3))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            longest = int(mask.sum(1).max())  # known, though nothing else is
            self.steps.add_(1)
            for _ in range(int(self.steps)):
                x = self.linear(x[:, :longest])
            return x[mask[:, :longest].bool()] if bool(mask.all()) else x

    model, mask = Masked(), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    profile = count_copy(model, (torch.randn(2, 4, 8), mask), training=False)
    assert profile.flops == 4 * 2 * (2 * 3) * 8 * 8
    assert int(model.steps) == 3 and int(mask.sum()) == 4


def test_a_model_that_needs_data_says_so() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if y.sum().item() > 0 else -y

    with pytest.raises(CountError, match="Looks: cannot be counted without data: DataDependent") as caught:
        count_copy(Looks(), (torch.randn(2, 8),), training=True)
    assert caught.value.model == "Looks"
    assert torch._C._len_torch_dispatch_stack() == 0


# --- distributed ----------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    """A group of one rank over gloo."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A group of several ranks of which one exists: collectives are called and do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def among(world_size: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ranks", [world_size], indirect=True)


def halves() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)))


def communication(profile: Profile) -> set[tuple[str, str]]:
    return {(op.layer, op.op) for op in profile.ops if op.pass_ == "comm"}


@pytest.mark.usefixtures("one_rank")
def test_data_parallel() -> None:
    model = halves()
    plain = eager(model, torch.randn(4, 8)).by_block(99)
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(4, 8)
    found = eager(wrapped, x)
    assert found.by_block(99) == plain
    assert communication(found) >= {("(grad_sync)", "all_reduce")}
    assert count_copy(wrapped, (x,), training=True).by_block(99) == plain


@among(2)
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fully_sharded(dtype: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, x = halves(), torch.randn(4, 8)
    plain = eager(model, x)
    for block in model:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    before = count_copy(model, (x,), training=True)
    found = eager(model, x)
    expected = {(*key[:2], "bf16" if dtype else "fp32"): n for key, n in plain.by_block(99).items()}
    assert found.by_block(99) == expected
    assert before.by_block(99) == count_copy(model, (x,), training=True).by_block(99) == expected
    assert {("0", "all_gather"), ("1", "all_gather"), ("1", "reduce_scatter")} <= communication(found)
    assert found.uncounted == ()
    assert all(isinstance(one, torch.distributed.tensor.DTensor) for one in model.parameters())


@among(2)
@pytest.mark.usefixtures("ranks")
def test_tensor_parallel_counts_local_shapes() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = halves(), torch.randn(4, 8)
    plain = eager(model, x).by_block(99)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = eager(model, x)
    assert found.by_block(99) == {key: flops // 2 for key, flops in plain.items()}
    assert {("0", "all_reduce"), ("1", "all_reduce")} <= communication(found)
    assert found.uncounted == ()
    copied = count_copy(model, (x,), training=True)
    assert copied.by_block(99) == found.by_block(99)
    assert communication(copied) == communication(found)


@among(4)
@pytest.mark.usefixtures("ranks")
def test_collectives_say_their_mesh_dimension() -> None:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with FlopCounter() as counter:
        torch.distributed.all_reduce(torch.ones(8), group=mesh.get_group("tp"))
        torch.distributed.all_reduce(torch.ones(8))
        functional.wait_tensor(functional.all_reduce(torch.ones(8), "sum", mesh.get_group("dp")))
    found = [(op.layer, op.op, op.bytes_ideal) for op in counter.profile.ops if op.pass_ == "comm"]
    assert found == [
        ("(step)", "all_reduce[tp]", 64),
        ("(step)", "all_reduce", 64),
        ("(step)", "all_reduce[dp]", 64),
    ]
