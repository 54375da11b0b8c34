"""Counts of one unit of work by layer, pass, op and dtype: plain values, added and scaled exactly.

A counter makes a `Profile` once per signature of shapes; the probe multiplies it by the units that had that signature.
Knows no framework.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class OpCount:
    """What one op family did in one layer and pass of a unit.

    Args:
        layer: module path without wrapper segments, or a name in parentheses.
        layer_index: position of the layer in the model; -1 without a module.
        op: family, of `seedance.flops.families.FAMILIES`.
        pass_: fwd, bwd, recompute, optim, comm, copy.
        dtype: compute dtype: fp64, fp32, fp16, bf16, fp8, int8.
        variant: name of an op without a formula, where op is `uncounted`; else empty.
        calls: calls of the op.
        flops: model FLOPs: exact causal attention, nothing for recomputation.
        hw_flops: FLOPs with recomputation, by checkpoints and inside fused kernels.
        flops_full: as `flops`, with causal attention counted in full.
        bytes_ideal: least memory traffic: inputs read once, outputs written once.
        uncounted_calls: calls without a FLOP formula.
    """

    layer: str
    layer_index: int
    op: str
    pass_: str
    dtype: str
    variant: str
    calls: int
    flops: int
    hw_flops: int
    flops_full: int
    bytes_ideal: int
    uncounted_calls: int

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Layer, pass, op, dtype and variant: what counts are added over."""
        return self.layer, self.pass_, self.op, self.dtype, self.variant

    def plus(self, other: OpCount) -> OpCount:
        """The sum of two counts of one key."""
        return replace(
            self,
            calls=self.calls + other.calls,
            flops=self.flops + other.flops,
            hw_flops=self.hw_flops + other.hw_flops,
            flops_full=self.flops_full + other.flops_full,
            bytes_ideal=self.bytes_ideal + other.bytes_ideal,
            uncounted_calls=self.uncounted_calls + other.uncounted_calls,
        )

    def times(self, units: int) -> OpCount:
        """The count of that many units that are alike."""
        return replace(
            self,
            calls=self.calls * units,
            flops=self.flops * units,
            hw_flops=self.hw_flops * units,
            flops_full=self.flops_full * units,
            bytes_ideal=self.bytes_ideal * units,
            uncounted_calls=self.uncounted_calls * units,
        )


@dataclass(frozen=True, slots=True)
class Uncounted:
    """An op without a formula: its name, how often it ran, and host time in it while counting (None: not measured)."""

    name: str
    calls: int
    host_ns: int | None


@dataclass(frozen=True)
class Profile:
    """Everything that one unit did.

    Args:
        ops: counts, one a key, in order of first appearance.
        uncounted: ops without a formula, by name.
        host_ns: host time of all ops while counting; None when it says nothing about the work (a device, no data).
        is_bound: lengths inside a fused op are unknown here (packed sequences): FLOPs are the most that it can have run.
    """

    ops: tuple[OpCount, ...]
    uncounted: tuple[Uncounted, ...] = ()
    host_ns: int | None = None
    is_bound: bool = False

    @property
    def flops(self) -> int:
        """Model FLOPs."""
        return sum(op.flops for op in self.ops)

    @property
    def hw_flops(self) -> int:
        """FLOPs with recomputation."""
        return sum(op.hw_flops for op in self.ops)

    @property
    def flops_full(self) -> int:
        """Model FLOPs with causal attention in full."""
        return sum(op.flops_full for op in self.ops)

    def by_block(self, depth: int, *, model: bool = False) -> dict[tuple[str, str, str], int]:
        """FLOPs by the first `depth` segments of the layer, pass and dtype; without those that are 0.

        Args:
            depth: segments of a layer's path that make a block.
            model: model FLOPs, which fused and checkpointed runs share; else hardware FLOPs.
        """
        sums: dict[tuple[str, str, str], int] = {}
        for op in self.ops:
            key = (".".join(op.layer.split(".")[:depth]), op.pass_, op.dtype)
            sums[key] = sums.get(key, 0) + (op.flops if model else op.hw_flops)
        return {key: flops for key, flops in sums.items() if flops}

    def plus(self, other: Profile) -> Profile:
        """The sum of two profiles: micro-batches of one unit."""
        return Profile(
            merged([*self.ops, *other.ops]),
            _merged_uncounted([*self.uncounted, *other.uncounted]),
            None if self.host_ns is None or other.host_ns is None else self.host_ns + other.host_ns,
            self.is_bound or other.is_bound,
        )

    def scaled(self, units: int) -> Profile:
        """The profile of that many units that are alike."""
        return Profile(
            tuple(op.times(units) for op in self.ops),
            tuple(
                Uncounted(one.name, one.calls * units, None if one.host_ns is None else one.host_ns * units)
                for one in self.uncounted
            ),
            None if self.host_ns is None else self.host_ns * units,
            self.is_bound,
        )


def merged(ops: Iterable[OpCount]) -> tuple[OpCount, ...]:
    """Counts added by key, in order of first appearance."""
    sums: dict[tuple[str, str, str, str, str], OpCount] = {}
    for op in ops:
        former = sums.get(op.key)
        sums[op.key] = op if former is None else former.plus(op)
    return tuple(sums.values())


def _merged_uncounted(found: Iterable[Uncounted]) -> tuple[Uncounted, ...]:
    sums: dict[str, Uncounted] = {}
    for one in found:
        former = sums.get(one.name)
        if former is None:
            sums[one.name] = one
        else:
            known = former.host_ns is not None and one.host_ns is not None
            time = former.host_ns + one.host_ns if known else None  # type: ignore[operator]
            sums[one.name] = Uncounted(one.name, former.calls + one.calls, time)
    return tuple(sums.values())
