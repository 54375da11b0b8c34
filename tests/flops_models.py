"""Small models whose FLOPs are known, and what a counter must leave as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer
from torch.utils import _python_dispatch as dispatch

from seedance.flops import Profile

ONE = 2 * 4 * 8 * 8
"""FLOPs of 4 rows by a matrix of 8 x 8."""


def stack() -> tuple[Any, ...]:
    """What a counter must leave as it was."""
    return (
        torch._C._len_torch_dispatch_stack(),
        dispatch._is_in_torch_dispatch_mode,
        dispatch._is_in_non_infra_torch_dispatch_mode,
        dispatch._is_in_any_mode_without_ignore_compile_internals,
        len(hooks._global_forward_hooks),
        len(hooks._global_forward_pre_hooks),
        len(hooks._global_forward_hooks_always_called),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
    )


def flops(profile: Profile) -> dict[tuple[str, str], int]:
    """Executed FLOPs by layer and pass."""
    return {(layer, pass_): found for (layer, pass_, _), found in profile.by_block(9).items()}


def square() -> nn.Linear:
    return nn.Linear(8, 8, bias=False)


def rows(*, grad: bool = False) -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=grad)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class Matrix(nn.Module):
    """A layer whose parameter meets its input in a function of the test."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.w)
