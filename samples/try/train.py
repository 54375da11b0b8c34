"""A small language model on text that comes with Python, as anybody would train it: nothing here knows of the probe.

Two ranks on one CPU, gradients over gloo, one checkpoint on the way, and one loader worker of two that is slow on purpose.
The same losses every time. From the root of the repository, with the probe and without a line of code for it:

    torchrun --standalone --nproc-per-node 2 -m seedance.run samples/try/train.py
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

STEPS = int(os.environ.get("STEPS", "48"))
BATCH, CONTEXT, WIDTH, HEADS, BLOCKS = 8, 128, 128, 4, 3
SLOW_S = 0.06
"""What the slow worker loses on each sample."""


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of the documentation of Python's language: bytes, and the bytes that follow them."""

    def __init__(self) -> None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.bytes) // CONTEXT - 1

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        worker = get_worker_info()
        if worker is not None and worker.id == 1:
            time.sleep(SLOW_S)
        piece = self.bytes[number * CONTEXT : (number + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(data: Dataset[tuple[Tensor, Tensor]]) -> DataLoader[tuple[Tensor, Tensor]]:
    """This rank's part of the text, loaded by two workers."""
    sampler = DistributedSampler(data, seed=0)
    return DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=2, prefetch_factor=1, drop_last=True)


def main() -> None:
    """Train, and write one checkpoint half-way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("gloo")
    is_first = torch.distributed.get_rank() == 0
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    folder = Path(os.environ.get("CHECKPOINTS") or tempfile.mkdtemp(prefix="try-"))
    for step, (x, y) in zip(range(STEPS), batches(Text()), strict=False):
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_first and (step + 1) % 12 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        if is_first and step + 1 == STEPS // 2:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "half.pt")
    torch.distributed.barrier()
    time.sleep(0.2)  # gloo's threads drop the last gradients late: torch 2.13 aborts when one does so while Python ends
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
