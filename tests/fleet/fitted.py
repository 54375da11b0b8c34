"""Observed time fitted to a billed span: every GPU gets the span, and slices share theirs by compute slices.

Knows one machine-hour, no bill and no money.
"""

from __future__ import annotations

from collections import defaultdict

from tests.fleet.arithmetic import largest_remainder, order
from tests.fleet.model import Machine
from tests.fleet.observed import Place, Vector

NOWHERE = Place(None, None, None, None, "unobserved")
"""Time of GPUs that no reading names."""


def fitted(machine: Machine, seen: Vector, span: int) -> Vector:
    """What was seen in one hour of a machine, fitted to a span of more than nothing.

    Args:
        machine: the machine.
        seen: observed ns by place.
        span: time that each GPU gets, ns.
    """
    gpus: dict[str, list[str]] = defaultdict(list)
    for device in sorted({place.device for place in seen if place.device is not None}):
        gpus[machine.gpu_of.get(device, device)].append(device)
    vector: Vector = {}
    for gpu, devices in gpus.items():
        vector |= _whole(seen, gpu, span) if devices == [gpu] else _cut(machine, seen, gpu, devices, span)
    missing = max(machine.facts.gpu_count, len(gpus), 1) - len(gpus)
    if missing:
        vector[NOWHERE] = missing * span
    return vector


def _with_rest(seen: Vector, device: str, span: int) -> Vector:
    """Rows of a device in address order; what it was seen for less than the span is unobserved."""
    rows = {place: seen[place] for place in sorted(seen, key=order) if place.device == device}
    rest = span - sum(rows.values())
    if rest > 0:
        rows[Place(device, None, None, None, "unobserved")] = rest
    return {place: rows[place] for place in sorted(rows, key=order)}


def _scaled(rows: Vector, total: int) -> Vector:
    times = largest_remainder(total, list(rows.values()))
    return {place: ns for place, ns in zip(rows, times, strict=True) if ns}


def _whole(seen: Vector, gpu: str, span: int) -> Vector:
    return _scaled(_with_rest(seen, gpu, span), span)


def _cut(machine: Machine, seen: Vector, gpu: str, slices: list[str], span: int) -> Vector:
    """The slices of one GPU. What no slice takes is idle: it could be had, and nobody asked for it."""
    compute = {machine.device(machine.facts.gpu_count + n): piece.compute for n, piece in enumerate(machine.slices)}
    weights = [compute[name] for name in slices]
    *parts, rest = largest_remainder(span, [*weights, max(machine.compute_slices - sum(weights), 0)])
    vector: Vector = {Place(gpu, None, None, None, "idle"): rest} if rest else {}
    for name, part in zip(slices, parts, strict=True):
        vector |= _scaled(_with_rest(seen, name, span), part)
    return vector
