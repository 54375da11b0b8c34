"""Machine-hours: what the bill charges for each, and how its devices, jobs and categories share that span.

Charges and observed time in; for each machine-hour a vector of (device, job, attempt, rank, category) with integer
nanoseconds out, adding up to billed span times devices (the second law). Knows no money, no disk, no clock.
Source: infra/rules/ledger.md 4.5 to 4.7, infra/rules/telemetry.md 4.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.units import time_unit_ns

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
BILLING_GRAIN_NS = 1_000_000_000
"""Machines are billed by the second: less than that between bill and telemetry is rounding, not a finding."""
ADDRESS = ("device", "job", "attempt", "rank", "category")
"""Columns that order the rows of a vector: code-point order, nulls last."""

VECTOR = pa.schema(
    [
        ("slot", pa.int64()),
        ("device", pa.string()),
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
        running_ns: observed running time, the maximum over devices.
        devices: devices that telemetry saw.
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
    hours = MachineHours([], {}, VECTOR.empty_table())
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
    table = _in_order(pa.table(columns, schema=VECTOR))
    hours.observed = table
    types: dict[int, str] = {}
    for place, kind in zip(number[inverse].tolist(), rows["instance_type"].to_pylist(), strict=True):
        if kind is not None:
            types[place] = min(kind, types.get(place, kind))
    starts, per_device = _device_totals(table)
    slots = np.asarray(table["slot"])[starts]
    for place, total in zip(slots.tolist(), per_device.tolist(), strict=True):
        slot = hours.slots[place]
        slot.running_ns = max(slot.running_ns, total)
        slot.devices += 1
        slot.observed_ns += total
        slot.instance_type = types.get(place)
    return hours


def quantity_ns(charge: Mapping[str, object]) -> int | None:
    """Time quantity of one usage row in units of 1e-12 ns, exact; None where the row states no time.

    ConsumedQuantity where its unit is a unit of time, else PricingQuantity where its unit is.
    """
    for amount, unit in (("ConsumedQuantity", "ConsumedUnit"), ("PricingQuantity", "PricingUnit")):
        quantity, per = charge[amount], time_unit_ns(charge[unit])  # type: ignore[arg-type]
        if quantity is not None and per is not None:
            return money.units(quantity) * per  # type: ignore[arg-type]
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


def vectors(hours: MachineHours, gpu_counts: Mapping[str, int], spans: npt.NDArray[np.int64]) -> pa.Table:
    """The weight vector of every slot.

    Args:
        hours: slots with their observed rows.
        gpu_counts: devices of an instance type, rounded up.
        spans: shape (slots,), ns that each device of the slot is to get; 0 keeps the observed rows as they are.

    Returns:
        Rows of VECTOR with ns > 0, by slot and address; a slot without any such row has one row, device null, unobserved, ns 0.
    """
    rows, slots = hours.observed, hours.slots
    starts, observed = _device_totals(rows)
    counts = np.diff(np.append(starts, len(rows)))
    slot_of = np.asarray(rows["slot"])[starts] if len(rows) else np.zeros(0, np.int64)
    span = spans[slot_of]
    over = (span > 0) & (observed > span)
    ns = np.asarray(rows["ns"]).copy()
    if over.any():
        ns = np.where(
            np.repeat(over, counts),
            money.apportion(np.where(over, span, observed), np.append(starts, len(rows)), ns),
            ns,
        )
    per_row = pa.array(np.repeat(observed, counts), pa.int64())
    fitted = rows.set_column(rows.schema.get_field_index("ns"), "ns", pa.array(ns, pa.int64()))
    fitted = fitted.set_column(rows.schema.get_field_index("observed_ns"), "observed_ns", per_row)
    short = np.nonzero(span > observed)[0]
    gap = _unobserved(
        slot_of[short],
        rows["device"].take(pa.array(starts[short], pa.int64())),
        span[short] - observed[short],
        observed[short],
        "gap",
    )
    missing = []
    for number, slot in enumerate(slots):
        width = max(gpu_counts.get(slot.instance_type or "", 1), slot.devices, 1)
        if spans[number] > 0 and width > slot.devices:
            missing.append((number, (width - slot.devices) * int(spans[number]), "gap" if slot.devices else "no_agent"))
    unseen = [
        _unobserved(np.array([m[0]]), pa.nulls(1, pa.string()), np.array([m[1]]), np.array([0]), m[2]) for m in missing
    ]
    table = pa.concat_tables([fitted, gap, *unseen])
    table = table.filter(pc.greater(table["ns"], 0))
    empty = np.setdiff1d(np.arange(len(slots)), np.asarray(table["slot"]))
    reasons = pa.array(["gap" if slots[i].devices else "no_agent" for i in empty], pa.string())
    filler = _unobserved(
        empty, pa.nulls(len(empty), pa.string()), np.zeros(len(empty), np.int64), np.zeros(len(empty), np.int64), "gap"
    )
    filler = filler.set_column(filler.schema.get_field_index("reason"), "reason", reasons)
    return _merge(_in_order(pa.concat_tables([table, filler])))


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
    slot: npt.NDArray[np.int64],
    device: pa.Array,
    ns: npt.NDArray[np.int64],
    observed: npt.NDArray[np.int64],
    reason: str,
) -> pa.Table:
    n = len(slot)
    columns = {
        "slot": pa.array(slot, pa.int64()),
        "device": device,
        "category": pa.array(["unobserved"] * n, pa.string()),
        "reason": pa.array([reason] * n, pa.string()),
        "ns": pa.array(ns, pa.int64()),
        "observed_ns": pa.array(observed, pa.int64()),
    }
    return pa.table([columns.get(f.name, pa.nulls(n, f.type)) for f in VECTOR], schema=VECTOR)


def _device_totals(rows: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First row of each (slot, device) in an ordered table, and the observed ns of that device."""
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    slot = np.asarray(rows["slot"])
    device = np.asarray(pc.dictionary_encode(rows["device"].combine_chunks()).indices)
    new = np.append(True, (slot[1:] != slot[:-1]) | (device[1:] != device[:-1]))
    starts = np.nonzero(new)[0].astype(np.int64)
    return starts, np.add.reduceat(np.asarray(rows["ns"]), starts)


def _in_order(table: pa.Table) -> pa.Table:
    keys = [("slot", "ascending"), *((name, "ascending") for name in ADDRESS)]
    return table.take(pc.sort_indices(table, sort_keys=keys)).combine_chunks()
