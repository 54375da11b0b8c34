"""Two ranks over gloo: replicated and sharded training gives the same bits, and its communication has a place of its own."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.probe_runs import Net, Run, check_same, check_split, rows, times, totals

ROOT = Path(__file__).resolve().parents[2]
NAP_NS = 30_000_000
RATES = {"sampled": 1_000_000, "unsampled": 0}


def replicated(run: Run, rank: int) -> None:
    """DDP, attached to what is called."""
    model = DistributedDataParallel(run.model(Net(dropout=0.3)))
    run.attach(model)
    _steps(run, model, model.parameters())


def replicated_inside(run: Run, rank: int) -> None:
    """DDP, attached to the model before it was wrapped."""
    model = run.model(Net(dropout=0.3))
    run.attach(model)
    _steps(run, DistributedDataParallel(model), model.parameters())


def accumulated(run: Run, rank: int) -> None:
    """DDP that averages gradients with the last of three micro-batches."""
    model = DistributedDataParallel(run.model(Net(dropout=0.3)))
    run.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        for _ in range(2):
            with model.no_sync():
                run.note(model(torch.randn(4, 8)).square().mean()).backward()
        run.note(model(torch.randn(4, 8)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(run: Run, rank: int) -> None:
    """FSDP2, attached after it was sharded."""
    model = Net(dropout=0.3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    run.model(model)
    run.attach(model)
    _steps(run, model, model.parameters())


def sharded_later(run: Run, rank: int) -> None:
    """FSDP2, attached before it was sharded."""
    model = run.model(Net(dropout=0.3))
    run.attach(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    _steps(run, model, model.parameters())


def sharded_accumulated(run: Run, rank: int) -> None:
    """FSDP2 that reduces gradients with the last of two micro-batches."""
    model: Any = Net(dropout=0.3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    run.model(model)
    run.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        for number in range(2):
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(number == 1)
            run.note(model(torch.randn(4, 8)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


TRAININGS: list[Callable[[Run, int], None]] = [
    replicated,
    replicated_inside,
    accumulated,
    sharded,
    sharded_later,
    sharded_accumulated,
]


def _steps(run: Run, model: nn.Module, parameters: Any) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for _ in range(4):
        run.note(model(torch.randn(4, 8)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Nap(torch.autograd.Function):
    """Sleeps backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, nap_ns: int) -> torch.Tensor:
        ctx.nap_ns = nap_ns
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.nap_ns / 1e9)
        return grads[0].clone(), None


class Late(nn.Linear):
    """A layer whose backward pass comes late on one rank: the other one waits for its gradients."""

    def __init__(self, nap_ns: int) -> None:
        super().__init__(8, 8)
        self.nap_ns = nap_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Nap.apply(super().forward(x), self.nap_ns)  # type: ignore[no-any-return]


def waiting(run: Run, rank: int) -> None:
    """DDP where rank 1 is late."""
    model = DistributedDataParallel(nn.Sequential(Late(NAP_NS if rank else 0), nn.Linear(8, 8)))
    run.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(4, 8, requires_grad=True)
    for _ in range(4):
        dist.barrier()
        model(x).sum().backward()
        optimizer.step()


def work(folder: Path) -> None:
    """What each rank does: every training without a probe and with one, then the one that waits."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for train in TRAININGS:
        check_same(lambda run, train=train: train(run, rank), folder / train.__name__ / str(rank), RATES)
    made = Run(folder / "waiting" / str(rank), {"max_sample_ppm": 1_000_000, "job_id": "job"})
    waiting(made, rank)
    for probe in made.probes:
        probe.detach()
        assert probe.failures == 0
    dist.barrier()
    time.sleep(0.2)  # gloo's threads drop the last gradients late: torch 2.13 aborts when one does so while Python ends
    dist.destroy_process_group()
    (folder / f"done-{rank}").write_bytes(pickle.dumps([train.__name__ for train in TRAININGS]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have trained."""
    made = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environ = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(made)]
        ranks.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    told = [rank.communicate(timeout=280)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    return made


@pytest.mark.parametrize("train", TRAININGS, ids=lambda train: train.__name__)
def test_ranks_have_the_same_bits_and_units(folder: Path, train: Callable[[Run, int], None]) -> None:
    assert train.__name__ in pickle.loads((folder / "done-0").read_bytes())
    calls = {"accumulated": 3, "sharded_accumulated": 2}.get(train.__name__, 1)
    for rank in range(2):
        for rate in RATES:
            sums = check_split(folder / train.__name__ / str(rank) / rate)
            assert sums["units"] == 4
            assert sums["samples"] == 4 * 4 * calls  # each rank is a replica of its own
        assert {row["rank"] for row in rows(folder / train.__name__ / str(rank) / "sampled", "step_windows")} == {rank}


def test_ranks_sample_the_same_units_and_count_the_same_work(folder: Path) -> None:
    for train in TRAININGS:
        counted = []
        for rank in range(2):
            where = folder / train.__name__ / str(rank) / "sampled"
            flops = sum(row["flops"] for row in rows(where, "op_windows"))
            counted.append((totals(where)["sampled_units"], flops))
        assert counted[0] == counted[1]
        assert counted[0][0] >= 2, train.__name__
        assert counted[0][1] > 0


def test_work_is_counted_as_that_of_one_process(folder: Path) -> None:
    model = Net()
    per_call = 3 * 2 * 4 * 8 * (4 * 8 + 1) - 2 * 4 * 8 * 8  # the first layer's input has no gradient
    assert sum(p.numel() for n, p in model.named_parameters() if n.endswith("weight")) == 4 * 64 + 8
    for train in TRAININGS:
        calls = {"accumulated": 3, "sharded_accumulated": 2}.get(train.__name__, 1)
        for rate in RATES:
            where = folder / train.__name__ / "0" / rate
            assert sum(row["flops"] for row in rows(where, "op_windows")) == 4 * calls * per_call, train.__name__


def test_communication_has_rows_of_its_own(folder: Path) -> None:
    for train in TRAININGS:
        where = folder / train.__name__ / "0" / "unsampled"
        found = {(row["layer"], row["op"]) for row in rows(where, "op_windows") if row["pass"] == "comm"}
        if "sharded" in train.__name__:
            assert any(layer.startswith("blocks.") and "all_gather" in op for layer, op in found), train.__name__
            assert any("reduce_scatter" in op for _, op in found), train.__name__
        else:
            assert any(layer == "(grad_sync)" and "all_reduce" in op for layer, op in found), train.__name__


def test_a_rank_that_waits_for_gradients_waits_in_their_averaging(folder: Path) -> None:
    early, late = (times(folder / "waiting" / str(rank)) for rank in range(2))
    units = totals(folder / "waiting" / "0")["sampled_units"]
    assert units >= 3
    assert early["(grad_sync)", "comm"] >= units * NAP_NS * 0.8
    assert late["0", "bwd"] >= units * NAP_NS
    assert early["0", "bwd"] < units * NAP_NS / 2
    assert late.get(("(grad_sync)", "comm"), 0) < units * NAP_NS / 2


if __name__ == "__main__":
    work(Path(sys.argv[1]))
