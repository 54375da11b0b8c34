"""What a model of a configuration costs per unit of work: plain values, and how they are shown to people and programs.

Knows no framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_STEPS = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class Work:
    """One kind of work.

    Args:
        name: prefill, decode, train step, forward.
        units: tokens, or samples, that it computes, over the whole batch.
        flops: model FLOPs, causal attention exact.
        flops_full: model FLOPs with whole attention scores.
        hw_flops: as executed: with recomputation.
        forward_flops: part of `flops` that is forward.
        recompute_flops: part of `hw_flops` that a checkpoint runs again.
        weight_bytes: weights, gradients, optimizer state and cache, each moved as often as it must be.
        operator_bytes: what the operators move when nothing is fused: each reads its inputs and writes its outputs once.
    """

    name: str
    units: int
    flops: int
    flops_full: int
    hw_flops: int
    forward_flops: int
    recompute_flops: int
    weight_bytes: int
    operator_bytes: int


@dataclass(frozen=True)
class ModelCount:
    """A model and its kinds of work.

    Args:
        model: class of the model.
        config: file that describes it.
        dtype: dtype of weights and computation, short.
        batch: sequences or samples at once.
        unit: what work is counted in: token or sample.
        parameters: all of them, shared ones once.
        matmul_parameters: those that matrix products and convolutions read.
        active_parameters: those that one token meets: of the experts only the chosen ones.
        parameter_bytes: all of them in memory.
        cache_bytes_per_token: keys and values of one token of one sequence, all layers; None without a cache.
        work: what was counted.
        uncounted: operators without a formula, by name.
        notes: what to know about these numbers.
    """

    model: str
    config: str
    dtype: str
    batch: int
    unit: str
    parameters: int
    matmul_parameters: int
    active_parameters: int
    parameter_bytes: int
    cache_bytes_per_token: int | None
    work: tuple[Work, ...]
    uncounted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For programs: exact integers under the names of the fields."""
        return asdict(self)

    def as_text(self) -> str:
        """For people: tables with thousands separators and units beside them."""
        lines = [f"{self.model} of {self.config}: {self.dtype}, batch {self.batch:,}", ""]
        lines += _aligned(self._facts())
        lines += ["", *_aligned([_work_head(self.unit), *map(_work_row, self.work)])]
        lines += ["", *_aligned([_traffic_head(self.unit), *map(_traffic_row, self.work)])]
        lines += ["", *_LEGEND]
        if self.uncounted:
            lines.append(f"No formula, not in these numbers: {', '.join(self.uncounted)}.")
        return "\n".join([*lines, *self.notes])

    def _facts(self) -> list[Sequence[str]]:
        facts: list[Sequence[str]] = [
            ("parameters", f"{self.parameters:,}", _in_words(self.parameters)),
            ("in matrix products", f"{self.matmul_parameters:,}", _in_words(self.matmul_parameters)),
            (f"active per {self.unit}", f"{self.active_parameters:,}", _in_words(self.active_parameters)),
            ("bytes of parameters", f"{self.parameter_bytes:,}", scaled(self.parameter_bytes, "B")),
        ]
        if self.cache_bytes_per_token is not None:
            cache = self.cache_bytes_per_token
            facts.append(("bytes of cache per token", f"{cache:,}", scaled(cache, "B")))
        return facts


def _work_head(unit: str) -> Sequence[str]:
    return ("work", f"{unit}s", "model FLOPs", "", f"per {unit}", "whole scores", "hardware", "of it again")


def _traffic_head(unit: str) -> Sequence[str]:
    return ("traffic in bytes", "at least", "", f"per {unit}", "FLOP/byte", "operators alone", "")


_LEGEND = (
    "One multiply-add is 2 FLOPs. Model FLOPs count causal attention exactly, and nothing twice; whole scores count it in",
    "full. Hardware adds what fused attention and checkpoints compute again. Traffic is the least: weights, gradients,",
    "optimizer state and cache as often as they must move; operators alone: each reads its inputs and writes its outputs.",
)


def _work_row(work: Work) -> Sequence[str]:
    return (
        work.name,
        f"{work.units:,}",
        f"{work.flops:,}",
        scaled(work.flops, "FLOP"),
        scaled(work.flops, "FLOP", work.units),
        f"{work.flops_full:,}",
        f"{work.hw_flops:,}",
        f"{work.recompute_flops:,}",
    )


def _traffic_row(work: Work) -> Sequence[str]:
    intensity = work.flops / work.weight_bytes if work.weight_bytes else 0
    return (
        work.name,
        f"{work.weight_bytes:,}",
        scaled(work.weight_bytes, "B"),
        scaled(work.weight_bytes, "B", work.units),
        f"{intensity:,.1f}",
        f"{work.operator_bytes:,}",
        scaled(work.operator_bytes, "B"),
    )


def _in_words(count: int) -> str:
    word, size = ("billion", 10**9) if count >= 10**9 else ("million", 10**6)
    return f"{count / size:,.2f} {word}"


def scaled(amount: int, unit: str, per: int = 1) -> str:
    """An amount, or its part `per` unit, with three or four digits and a decimal prefix: `140.6 TFLOP`."""
    value, step = amount / max(per, 1), 0
    while value >= 999.95 and step < len(_STEPS) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if step == 0 and value == int(value) else 1 if value >= 100 else 2
    return f"{value:.{digits}f} {_STEPS[step]}{unit}".rstrip()


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
