"""Training with and without a probe: what came out, bit by bit, what the probe wrote, and what of it is left in the process."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import torch
import torch.utils.data.dataloader
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

import seedance
from seedance.probe.probe import Probe, active, attach
from seedance.schema import TELEMETRY, conform

torch.set_num_threads(1)

Train = Callable[["Run"], None]
"""Trains: makes its models in a `Run`, attaches by it, and reports to it what came out."""
RATES = {"sampled": 1_000_000, "unsampled": 0, "default": 20_000}
"""Units sampled of a million."""


class Block(nn.Module):
    """Two linear layers with dropout between them, around a residual."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(width, width), nn.Dropout(dropout), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks one after another; `calls` is how the model runs each."""

    def __init__(self, blocks: int = 2, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(blocks)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run one block."""
        return block(x)  # type: ignore[no-any-return]


@dataclass
class Run:
    """One training, probed or not.

    Args:
        spool: where the probe writes; None without a probe.
        settings: of the probe.
    """

    spool: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    losses: list[bytes] = field(default_factory=list)
    python: Any = None
    """State of Python's generator at the end."""

    def attach(self, model: nn.Module, **more: Any) -> Probe | None:
        """Attach a probe where this run has one."""
        if self.spool is None:
            return None
        self.probes.append(attach(model, spool=self.spool, **{**self.settings, **more}))
        return self.probes[-1]

    def model(self, model: nn.Module) -> nn.Module:
        """Note a model whose parameters are compared."""
        self.models.append(model)
        return model

    def note(self, value: torch.Tensor) -> torch.Tensor:
        """Note a value that is compared."""
        self.losses.append(bits(value))
        return value

    def result(self) -> dict[str, Any]:
        """All that training can be told by: parameters, buffers, gradients, noted values, states of the generators."""
        named = [(n, t) for m in self.models for n, t in [*m.named_parameters(), *m.named_buffers()]]
        return {
            "tensors": [(name, bits(tensor)) for name, tensor in named],
            "gradients": [(n, None if t.grad is None else bits(t.grad)) for n, t in named],
            "losses": self.losses,
            "torch": torch.random.get_rng_state().numpy().tobytes(),
            "python": self.python,
        }


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    plain = tensor.detach()
    full = getattr(plain, "full_tensor", None)
    plain = full() if full is not None else plain
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def run(train: Train, spool: Path | None = None, **settings: Any) -> Run:
    """Train once from the same seed, and detach."""
    torch.manual_seed(7)
    made = Run(spool, settings)
    with python_generator_alone():
        random.seed(7)
        try:
            train(made)
        finally:
            for probe in made.probes:
                probe.detach()
        made.python = random.getstate()
    return made


@contextmanager
def python_generator_alone() -> Iterator[None]:
    """Threads that run already draw from another generator meanwhile, as the keepalive of Prefect's websocket does at any time.

    Threads that begin in here draw from the usual one: a probe's would be seen.
    """
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    apart = random.Random()
    usual = {name: call for name, call in vars(random).items() if getattr(call, "__self__", None) is random._inst}

    def of_thread(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            drawn = getattr(apart, name) if threading.get_ident() in others else usual[name]
            return drawn(*given, **named)

        return call

    with patch.multiple(random, **{name: of_thread(name) for name in usual}):
        yield


def check_same(train: Train, folder: Path, rates: dict[str, int] | None = None, **settings: Any) -> dict[str, Run]:
    """Train without a probe and with one at each rate: the same bits, no failure, nothing left; the probed runs by rate."""
    bare = run(train).result()
    assert run(train).result() == bare, "the training itself is not reproducible"
    made = {}
    for name, ppm in (RATES if rates is None else rates).items():
        before = surroundings()
        probed = run(train, folder / name, max_sample_ppm=ppm, job_id=f"job-{name}", **settings)
        assert [probe.failures for probe in probed.probes] == [0] * len(probed.probes)
        result = probed.result()
        for part, value in bare.items():
            assert result[part] == value, f"{part} differ at the rate {name}"
        assert surroundings() == before
        for model in probed.models:
            check_clean(model)
        made[name] = probed
    return made


def surroundings() -> dict[str, Any]:
    """Everything in the process that a probe changes while it is attached."""
    import sys

    frames = sys.modules.get("torch._dynamo.eval_frame")
    loader = torch.utils.data.dataloader
    found: dict[str, Any] = {
        "global hooks": [
            list(getattr(module_hooks, name).values())
            for name in dir(module_hooks)
            if name.startswith("_global_") and isinstance(getattr(module_hooks, name), dict)
        ],
        "optimizer hooks": [
            list(optimizer_hooks._global_optimizer_pre_hooks.values()),
            list(optimizer_hooks._global_optimizer_post_hooks.values()),
        ],
        "modes": torch._C._len_torch_dispatch_stack(),
        "session": active(),
        "functions": [
            torch.autograd._engine_run_backward,
            torch.compile,
            torch.save,
            nn.Module.__dict__["compile"],
            nn.Module.__dict__["_replicate_for_data_parallel"],
            nn.Module.__dict__["_compiled_call_impl"],
            torch.amp.GradScaler.__dict__["step"],
            loader.DataLoader.__dict__["__iter__"],
            loader._BaseDataLoaderIter.__dict__["__next__"],
        ],
    }
    if frames is not None:
        # Imported meanwhile or not: what is compared is whether the class is as torch made it.
        found["optimized"] = frames.OptimizedModule.__dict__["__call__"].__module__
    else:
        found["optimized"] = "torch._dynamo.eval_frame"
    return found


def check_clean(model: nn.Module) -> None:
    """No hook, entry or other attribute of a probe is left in a model."""
    for module in model.modules():
        assert "seedance" not in repr(module.__dict__.get("_compiled_call_impl"))
        for name, value in module.__dict__.items():
            if name.endswith("_hooks"):
                assert not [one for one in value.values() if "seedance" in repr(one)], name
        for parameter in module.parameters():
            assert not parameter._backward_hooks
            assert not parameter._post_accumulate_grad_hooks


def dicts(model: nn.Module) -> list[dict[str, Any]]:
    """What each module of a model holds, to be compared later."""
    return [dict(module.__dict__) for module in model.modules()]


@contextmanager
def probing(model: nn.Module, folder: Path, **settings: Any) -> Iterator[Probe]:
    """A probe that samples every unit, with windows of a tenth of a second; it must not fail."""
    given = {"max_sample_ppm": 1_000_000, "step_window_ns": 10**8, "op_window_ns": 10**8, "job_id": "job"}
    with attach(model, spool=folder, **{**given, **settings}) as probe:
        yield probe
    assert probe.failures == 0


def rows(folder: Path, table: str | None = None) -> list[dict[str, Any]]:
    """Rows that a probe wrote, in order; each meets the declaration of its table."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            read = json.loads(line)
            if isinstance(read, list):
                found[read[0]].append(read[1])
    for name, many in found.items():
        check_rows(name, many)
    return found[f"raw_telemetry__{table}"] if table else [row for many in found.values() for row in many]


def check_rows(name: str, many: list[dict[str, Any]]) -> None:
    """Rows of a table fit its declaration, and no two have one key."""
    spec = TELEMETRY[name]
    arrays = []
    for column in spec.columns:
        values = [row.get(column.name) for row in many]
        if pa.types.is_map(column.type):
            values = [list((value or {}).items()) for value in values]
        if pa.types.is_decimal(column.type):
            values = [None if value is None else __import__("decimal").Decimal(value) for value in values]
        arrays.append(pa.array(values, column.type))
    conform(pa.table(arrays, names=list(spec.names)), spec, where=name)
    keys = [tuple(row.get(name) for name in spec.key) for row in many]
    assert len(set(keys)) == len(keys), f"{name}: two rows with one key"


def times(folder: Path) -> dict[tuple[str, str], int]:
    """Exclusive ns of sampled units by layer and pass."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows(folder, "op_windows"):
        sums[row["layer"], row["pass"]] += row["exclusive_ns"]
    return {place: ns for place, ns in sums.items() if ns}


def totals(folder: Path) -> dict[str, int]:
    """Sums of the step windows by column."""
    sums: dict[str, int] = defaultdict(int)
    for row in rows(folder, "step_windows"):
        for name, value in row.items():
            if isinstance(value, int):
                sums[name] += value
    return dict(sums)


def check_split(folder: Path) -> dict[str, int]:
    """Wall time is its parts, and op times are the sampled active time, to the ns; the sums of the step windows."""
    steps = totals(folder)
    gap = steps["input_stall_ns"] + steps["checkpoint_ns"] + steps["held_idle_ns"]
    assert steps["wall_ns"] == steps["active_ns"] + gap
    exclusive = sum(row["exclusive_ns"] for row in rows(folder, "op_windows"))
    assert exclusive == steps["sampled_active_ns"]
    return steps


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """One step of training; the loss."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


__all__ = ["Block", "Net", "Run", "seedance"]
