"""Machine-hours: what the bill charges for each, and how its devices, jobs and categories share that span.

Charges and observed time in; for each machine-hour a vector of (device, job, attempt, rank, category) with integer
nanoseconds out, adding up to billed span times devices (the second law). Knows no money, no disk, no clock.
Source: infra/rules/ledger.md 4.5 to 4.7, infra/rules/telemetry.md 4.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.units import time_unit_ns

Index = npt.NDArray[np.int64]
HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_SCALE = 10**money.DIGITS
BILLING_GRAIN_NS = 1_000_000_000
"""Machines are billed by the second: less than that between bill and telemetry is rounding, not a finding."""
ADDRESS = ("device", "job", "attempt", "rank", "category")
"""Columns that order the rows of a vector: code-point order, nulls last."""

VECTOR = pa.schema(
    [
        ("slot", pa.int64()),
        ("device", pa.string()),
        ("parent", pa.string()),
        ("job", pa.string()),
        ("attempt", pa.int16()),
        ("rank", pa.int32()),
        ("category", pa.string()),
        ("reason", pa.string()),
        ("ns", pa.int64()),
        ("energy_mj", pa.int64()),
        ("evidence", pa.string()),
        ("observed_ns", pa.int64()),
    ]
)


@dataclass
class Slot:
    """One machine in one hour of the day.

    Args:
        machine: `cloud|instance`.
        hour: 0 to 23.
        touched: a usage row of the bill touches the hour.
        billed_ns: span that the bill charges for one device; None when no usage row of the hour says so.
        instance_type: from the bill, else from telemetry, else None.
        running_ns: observed running time, the maximum over devices; a MIG slice is a device.
        devices: GPUs that telemetry saw; the slices of one count as one.
        observed_ns: observed time, summed over devices.
        findings: what does not fit.
    """

    machine: str
    hour: int
    touched: bool = False
    billed_ns: int | None = None
    instance_type: str | None = None
    running_ns: int = 0
    devices: int = 0
    observed_ns: int = 0
    findings: set[str] = field(default_factory=set)


@dataclass
class MachineHours:
    """Slots by machine and hour, in a fixed order; `index` finds a slot's number."""

    slots: list[Slot]
    index: dict[tuple[str, int], int]
    observed: pa.Table
    """Observed rows with their slot number, columns of VECTOR."""
    slices: Index
    """Compute slices of each device of `observed`, in its order; 0 for a whole GPU."""
    total: Index
    """Compute slices of the GPU that the device is cut from; 0 for a whole GPU."""

    def slot(self, machine: str, hour: int) -> int:
        """Number of the slot, made on first use."""
        found = self.index.get((machine, hour))
        if found is None:
            found = self.index[machine, hour] = len(self.slots)
            self.slots.append(Slot(machine, hour))
        return found


def observe(device_hourly: pa.Table, day_ns: int) -> MachineHours:
    """Slots of everything that telemetry saw on a known machine, with running time and devices.

    Args:
        device_hourly: rows of core_usage__device_hourly of one day.
        day_ns: start of the day.
    """
    hours = MachineHours([], {}, VECTOR.empty_table(), np.zeros(0, np.int64), np.zeros(0, np.int64))
    rows = device_hourly.filter(pc.and_(device_hourly["instance_id"].is_valid(), device_hourly["cloud"].is_valid()))
    rows = rows.filter(pc.greater(rows["ns"], 0))
    if not len(rows):
        return hours
    machine = pc.binary_join_element_wise(rows["cloud"], rows["instance_id"], "|").combine_chunks().dictionary_encode()
    names = machine.dictionary.to_pylist()
    hour = (np.asarray(rows["hour_utc"].cast(pa.int64())) - day_ns) // HOUR_NS
    code = np.asarray(machine.indices).astype(np.int64) * 24 + hour
    distinct, inverse = np.unique(code, return_inverse=True)
    order = sorted(range(len(distinct)), key=lambda i: (names[int(distinct[i]) // 24], int(distinct[i]) % 24))
    number = np.empty(len(distinct), np.int64)
    for place, i in enumerate(order):
        number[i] = hours.slot(names[int(distinct[i]) // 24], int(distinct[i]) % 24)
        assert number[i] == place
    columns = {
        "slot": pa.array(number[inverse]),
        "device": rows["device_uuid"],
        "parent": rows["parent_uuid"],
        "job": rows["job_id"],
        "attempt": rows["attempt"],
        "rank": rows["rank"],
        "category": rows["category"],
        "reason": pc.if_else(pc.equal(rows["category"], "unobserved"), "gap", pa.scalar(None, pa.string())),
        "ns": rows["ns"],
        "energy_mj": rows["energy_mj"],
        "evidence": rows["evidence"],
        "observed_ns": pa.nulls(len(rows), pa.int64()),
    }
    is_slice = np.asarray(rows["parent_uuid"].is_valid())
    stated = (("mig_slices", 1), ("mig_total", 0))
    cuts = [np.where(is_slice, np.asarray(pc.fill_null(rows[n], least)).astype(np.int64), 0) for n, least in stated]
    order_of = _address_order(pa.table(columns, schema=VECTOR))
    table = pa.table(columns, schema=VECTOR).take(order_of).combine_chunks()
    hours.observed = table
    types: dict[int, str] = {}
    for place, kind in zip(number[inverse].tolist(), rows["instance_type"].to_pylist(), strict=True):
        if kind is not None:
            types[place] = min(kind, types.get(place, kind))
    starts, per_device = _device_totals(table)
    hours.slices, hours.total = (c[np.asarray(order_of)][starts] for c in cuts)
    slots = np.asarray(table["slot"])[starts]
    gpus = pc.coalesce(table["parent"], table["device"]).take(pa.array(starts))
    for place, total in zip(slots.tolist(), per_device.tolist(), strict=True):
        slot = hours.slots[place]
        slot.running_ns = max(slot.running_ns, total)
        slot.observed_ns += total
        slot.instance_type = types.get(place)
    for place, _ in set(zip(slots.tolist(), gpus.to_pylist(), strict=True)):
        hours.slots[place].devices += 1
    return hours


def quantity_ns(charge: Mapping[str, object]) -> int | None:
    """Time quantity of one usage row in units of 1e-12 ns, exact; None where the row states no time.

    ConsumedQuantity where its unit is a unit of time, else PricingQuantity where its unit is. Of a meter that counts parts of
    a machine, such as cores, it is divided by how many of them one machine has, half to even; where nobody knows how many
    (0), such a quantity is no time of a machine.

    Source: infra/rules/ledger.md 4.6.
    """
    per: Any = charge["x_UnitsPerMachine"]
    parts = None if per is None else money.units(per)
    if parts is not None and parts <= 0:
        return None
    for amount, unit in (("ConsumedQuantity", "ConsumedUnit"), ("PricingQuantity", "PricingUnit")):
        quantity: Any = charge[amount]
        stated: Any = charge[unit]
        unit_ns = time_unit_ns(stated, metered=parts is not None)
        if quantity is not None and unit_ns is not None:
            exact = money.units(quantity) * unit_ns
            return exact if parts is None else money.half_even(exact * _SCALE, parts)
    return None


def spread_quantity(quantity: int, running: list[int], capacity: list[int]) -> list[int]:
    """A machine row's ns over the hours it touches: by running time, the shortfall to the earliest free hours.

    Args:
        quantity: ns that the bill charges in these hours together.
        running: observed running ns of each hour.
        capacity: ns of each hour that the charge period covers.

    Returns:
        ns of each hour, adding up to quantity; what exceeds all capacity goes to the last hour.

    Source: infra/rules/ledger.md 4.5.
    """
    known = [min(r, c) for r, c in zip(running, capacity, strict=True)]
    total = sum(known)
    if quantity <= total and total > 0:
        weights = np.array(known, np.int64)
        return [int(p) for p in money.apportion(np.array([quantity]), np.array([0, len(known)]), weights)]
    rest = quantity - total
    for i, limit in enumerate(capacity):
        extra = min(rest, limit - known[i])
        known[i] += extra
        rest -= extra
    known[-1] += rest
    return known


def vectors(hours: MachineHours, gpu_counts: Mapping[str, int], spans: Index) -> pa.Table:
    """The weight vector of every slot.

    Args:
        hours: slots with their observed rows.
        gpu_counts: devices of an instance type, rounded up.
        spans: shape (slots,), ns that each GPU of the slot is to get; 0 keeps the observed rows as they are.

    Returns:
        Rows of VECTOR with ns > 0, by slot and address; a slot without any such row has one row, device null, unobserved, ns 0.

    Source: infra/rules/ledger.md 4.7.
    """
    rows, slots = hours.observed, hours.slots
    starts, observed = _device_totals(rows)
    slot_of = np.asarray(rows["slot"])[starts] if len(rows) else np.zeros(0, np.int64)
    span = spans[slot_of]
    counts = np.diff(np.append(starts, len(rows)))
    known = rows.set_column(
        rows.schema.get_field_index("observed_ns"), "observed_ns", pa.array(np.repeat(observed, counts), pa.int64())
    )
    short = np.nonzero((span > 0) & (span > observed))[0]
    device = rows.take(pa.array(starts[short], pa.int64()))
    gap = _unobserved(slot_of[short], span[short] - observed[short], "gap", device=device, observed=observed[short])
    target, rest = _cut(hours, rows, starts, slot_of, span)
    table = _fit(_merge(_in_order(pa.concat_tables([known, gap]))), target)
    lacking = np.array([width(s, gpu_counts) - s.devices for s in slots], np.int64)
    seen = np.array([s.devices > 0 for s in slots], bool)
    reasons = (("gap", seen), ("no_agent", ~seen))
    missing = [(np.nonzero((spans > 0) & (lacking > 0) & m)[0], reason) for reason, m in reasons]
    unseen = [_unobserved(places, lacking[places] * spans[places], reason) for places, reason in missing]
    table = pa.concat_tables([table, rest, *unseen])
    table = table.filter(pc.greater(table["ns"], 0))
    empty = np.setdiff1d(np.arange(len(slots)), np.asarray(table["slot"]))
    chosen = [(empty[m[empty]], reason) for reason, m in reasons]
    filler = [_unobserved(places, np.zeros(len(places), np.int64), reason) for places, reason in chosen]
    return _in_order(pa.concat_tables([table, *filler]))


def width(slot: Slot, gpu_counts: Mapping[str, int]) -> int:
    """GPUs of a machine-hour: those of its instance type, or those that telemetry names, whichever is more; at least one."""
    return max(gpu_counts.get(slot.instance_type or "", 1), slot.devices, 1)


def _cut(hours: MachineHours, rows: pa.Table, starts: Index, slot_of: Index, span: Index) -> tuple[Index, pa.Table]:
    """What each observed device gets of the span: all of it, or of a GPU with slices the part of its compute slices.

    Returns:
        ns by device, its observed time where the slot has no span; and rows of VECTOR for the slices of a GPU that are no
        device: nobody was given them, so they are idle.
    """
    _, observed = _device_totals(rows)
    target = np.where(span > 0, span, observed)
    cut = np.nonzero((hours.slices > 0) & (span > 0))[0]
    if not len(cut):
        return target, VECTOR.empty_table()
    parent = rows["parent"].take(pa.array(starts[cut], pa.int64())).combine_chunks()
    codes = np.asarray(pc.rank(parent, tiebreaker="dense")).astype(np.int64)
    order = np.lexsort([cut, codes, slot_of[cut]])
    mine, codes, slot = cut[order], codes[order], slot_of[cut][order]
    first = np.nonzero(np.append(True, (slot[1:] != slot[:-1]) | (codes[1:] != codes[:-1])))[0]
    size = np.diff(np.append(first, len(mine)))
    gpu = np.repeat(np.arange(len(first)), size)
    free = np.maximum.reduceat(hours.total[mine], first) - np.add.reduceat(hours.slices[mine], first)
    start = np.append(first + np.arange(len(first)), len(mine) + len(first))
    weight = np.zeros(start[-1], np.int64)
    place = np.arange(len(mine)) + gpu
    weight[place], weight[start[1:] - 1] = hours.slices[mine], np.maximum(free, 0)
    parts = money.apportion(span[mine[first]], start, weight)
    target[mine] = parts[place]
    n = len(first)
    columns = {
        "slot": pa.array(slot[first], pa.int64()),
        "device": parent.take(pa.array(order[first])),
        "category": pa.array(["idle"] * n, pa.string()),
        "ns": pa.array(parts[start[1:] - 1], pa.int64()),
        "evidence": pa.array(["measured"] * n, pa.string()),
    }
    return target, pa.table([columns.get(f.name, pa.nulls(n, f.type)) for f in VECTOR], schema=VECTOR)


def _fit(rows: pa.Table, target: Index) -> pa.Table:
    """Rows by device with their ns scaled by largest remainder where a device is to have another total.

    Args:
        rows: in order, each address once.
        target: ns of each device, in the same order.
    """
    starts, found = _device_totals(rows)
    wrong = found != target
    if not wrong.any():
        return rows
    counts = np.diff(np.append(starts, len(rows)))
    chosen = np.nonzero(np.repeat(wrong, counts))[0]
    ns = np.asarray(rows["ns"]).copy()
    ns[chosen] = money.apportion(target[wrong], np.append(0, np.cumsum(counts[wrong])), ns[chosen])
    return rows.set_column(rows.schema.get_field_index("ns"), "ns", pa.array(ns, pa.int64()))


def _merge(table: pa.Table) -> pa.Table:
    """Rows of one address as one row: a gap joins the time whose readings had no utilisation."""
    new = np.zeros(len(table), bool)
    for name in ("slot", *ADDRESS):
        codes = np.asarray(pc.dictionary_encode(table[name].combine_chunks(), null_encoding="encode").indices)
        new |= np.append(True, codes[1:] != codes[:-1])[: len(table)]
    starts = np.nonzero(new)[0]
    if len(starts) == len(table):
        return table
    ns = np.add.reduceat(np.asarray(table["ns"]), starts)
    return table.take(pa.array(starts)).set_column(table.schema.get_field_index("ns"), "ns", pa.array(ns, pa.int64()))


def _unobserved(
    slot: Index, ns: Index, reason: str, *, device: pa.Table | None = None, observed: Index | None = None
) -> pa.Table:
    """Rows of VECTOR of unobserved time; of no device where none is given (rows of VECTOR that name them)."""
    n = len(slot)
    columns = {
        "slot": pa.array(slot, pa.int64()),
        "category": pa.array(["unobserved"] * n, pa.string()),
        "reason": pa.array([reason] * n, pa.string()),
        "ns": pa.array(ns, pa.int64()),
        "observed_ns": pa.array(np.zeros(n, np.int64) if observed is None else observed, pa.int64()),
    }
    if device is not None:
        columns |= {"device": device["device"], "parent": device["parent"]}
    return pa.table([columns.get(f.name, pa.nulls(n, f.type)) for f in VECTOR], schema=VECTOR)


def _device_totals(rows: pa.Table) -> tuple[Index, Index]:
    """First row of each (slot, device) in an ordered table, and the observed ns of that device."""
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    slot = np.asarray(rows["slot"])
    device = np.asarray(pc.dictionary_encode(rows["device"].combine_chunks()).indices)
    new = np.append(True, (slot[1:] != slot[:-1]) | (device[1:] != device[:-1]))
    starts = np.nonzero(new)[0].astype(np.int64)
    return starts, np.add.reduceat(np.asarray(rows["ns"]), starts)


def _in_order(table: pa.Table) -> pa.Table:
    return table.take(_address_order(table)).combine_chunks()


def _address_order(table: pa.Table) -> pa.Array:
    return pc.sort_indices(table, sort_keys=[("slot", "ascending"), *((name, "ascending") for name in ADDRESS)])
