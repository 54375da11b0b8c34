"""A training step for the benchmarks: a small decoder on made-up tokens, one thread, forward, backward and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

SEED = 20261130


class Block(nn.Module):
    """Attention and MLP with norms before them; attention by two matrix products, or by torch's fused kernel."""

    def __init__(self, width: int, heads: int, *, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        if self.is_fused:
            seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self.act(self.up(self.norm_mlp(x))))


class Decoder(nn.Module):
    """Token embedding, blocks, head."""

    def __init__(self, *, blocks: int, width: int, heads: int, vocabulary: int, is_fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, is_fused=is_fused) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """A model with its optimizer and one batch; `step()` is one optimizer step, `wait()` until it is over on the device."""

    def __init__(
        self,
        *,
        blocks: int,
        width: int,
        heads: int,
        vocabulary: int,
        batch: int,
        length: int,
        is_fused: bool = True,
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        model = Decoder(blocks=blocks, width=width, heads=heads, vocabulary=vocabulary, is_fused=is_fused)
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(vocabulary, (batch, length + 1)).to(device)
        self.wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step(self) -> None:
        """Forward, backward, update."""
        logits = self.model(self.tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


USUAL: dict[str, Any] = {"blocks": 6, "width": 192, "heads": 6, "vocabulary": 1_024, "batch": 2, "length": 128}
"""A step of 50 to 80 ms on one core: small, with as many operators a step as a model of its depth has anywhere."""
LAUNCH_BOUND: dict[str, Any] = {
    "blocks": 4,
    "width": 64,
    "heads": 4,
    "vocabulary": 64,
    "batch": 2,
    "length": 16,
    "is_fused": False,
}
"""A step of a few ms that is nearly all overhead of operators, without a fused kernel: torch's counter knows it all."""
