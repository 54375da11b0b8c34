"""Charges to addresses: hours of the day, the first rounding over machine time, the second over layers.

Charges, labels and machine-hour vectors in; addresses that add up to the charges' day parts out, digit for digit, in the cash
and in the amortised ledger separately. Knows no bill format, no telemetry format, no disk, no clock.
Source: infra/rules/ledger.md 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.categories import TIED_DEPENDANT, TIED_MACHINE, Labels, machine_keys, object_keys
from tasks.core.money import Ints
from tasks.core.spans import BILLING_GRAIN_NS, DAY_NS, HOUR_NS, MachineHours, quantity_ns, spread_quantity

LEDGERS = ("BilledCost", "EffectiveCost", "ListCost", "x_PromotionalCost")
"""Amounts that are divided, each on its own, over the same weights. The last is a part of the second: what promotions paid."""
Index = npt.NDArray[np.int64]
_SCALE = 10**money.DIGITS
_TIME_FACTS = (
    "ConsumedQuantity",
    "ConsumedUnit",
    "PricingQuantity",
    "PricingUnit",
    "SkuMeter",
    "x_TieRule",
    "x_UnitsPerMachine",
)
"""What a machine's row says of its time, and of which meter: rows of one SkuMeter and tie rule are one meter."""


@dataclass
class Parts:
    """Hour parts of charges: row of the charge, hour of the day, and the amount of each ledger in whole units."""

    row: Index
    hour: Index
    amounts: dict[str, Ints]

    def take(self, which: npt.NDArray[np.bool_] | Index) -> Parts:
        """The chosen parts."""
        return Parts(self.row[which], self.hour[which], {k: v[which] for k, v in self.amounts.items()})


def joined(parts: list[Parts]) -> Parts:
    """Several sets of parts as one."""
    amounts = {k: _concat([p.amounts[k] for p in parts]) for k in LEDGERS}
    return Parts(_concat([p.row for p in parts]), _concat([p.hour for p in parts]), amounts)


def _concat(arrays: list[Ints]) -> Ints:
    if not arrays:
        return np.zeros(0, np.int64)
    wide = any(a.dtype == object for a in arrays)
    return np.concatenate([a.astype(object) if wide else a for a in arrays])


@dataclass(frozen=True)
class Periods:
    """Charge periods in ns relative to the day, and what of them lies inside it."""

    start: Index
    end: Index
    low: Index
    high: Index

    @classmethod
    def of(cls, charges: pa.Table, day_ns: int) -> Periods:
        """Periods of all charges of the day that begins at day_ns."""
        start = np.asarray(charges["ChargePeriodStart"].cast(pa.int64())) - day_ns
        end = np.asarray(charges["ChargePeriodEnd"].cast(pa.int64())) - day_ns
        return cls(start, end, np.maximum(start, 0), np.minimum(end, DAY_NS))

    def inside(self, at: int) -> bool:
        """Whether the whole charge lies within the day."""
        return bool(self.low[at] == self.start[at] and self.high[at] == self.end[at])

    def share(self, quantity: int, at: int) -> int:
        """The day's part of a quantity of the whole charge, by the running floor of `money.telescope`."""
        start, length = int(self.start[at]), int(self.end[at] - self.start[at])
        return quantity * (int(self.high[at]) - start) // length - quantity * (int(self.low[at]) - start) // length

    def hours(self, rows: Index) -> tuple[Index, Index, Index, Index]:
        """Every (row, hour) that the rows touch, with the first and last ns of the overlap."""
        first = self.low[rows] // HOUR_NS
        last = np.maximum((self.high[rows] - 1) // HOUR_NS, first)
        count = last - first + 1
        row = np.repeat(rows, count)
        hour = np.repeat(first, count) + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        return row, hour, np.maximum(self.low[row], hour * HOUR_NS), np.minimum(self.high[row], (hour + 1) * HOUR_NS)


def day_part(name: str) -> str:
    """Column of core_billing__charges that holds an amount's part on the day."""
    return "x_Day" + name.removeprefix("x_")


def day_amounts(charges: pa.Table) -> dict[str, Ints]:
    """Day parts of the amounts, in whole units; a missing ListCost counts 0 and stays null in the addresses."""
    return {name: money.to_units(charges[day_part(name)])[0] for name in LEDGERS}


def hour_parts(charges: pa.Table, labels: Labels, day_ns: int, hours: MachineHours) -> Parts:
    """Every charge's day part over the hours of the day; fills in the billed span of each machine-hour on the way.

    Source: infra/rules/ledger.md 4.3 to 4.6.
    """
    periods = Periods.of(charges, day_ns)
    amounts = day_amounts(charges)
    rows = np.arange(len(charges))
    whole = labels.whole | (periods.high <= periods.low)
    tied = labels.category == TIED_MACHINE
    _note_machines(charges, rows[labels.touches], whole, periods, hours)
    found = [
        _at_start(rows[whole & ~labels.plain], periods, amounts),
        _by_formula(charges, rows[~whole & ~tied], periods),
        _by_running_time(charges, rows[labels.plain], whole, labels.spans, periods, amounts, hours),
        _by_capacity(rows[~whole & tied & ~labels.plain], periods, amounts),
    ]
    return joined([p for p in found if len(p.row)] or found)


def _note_machines(
    charges: pa.Table, rows: Index, whole: npt.NDArray[np.bool_], periods: Periods, hours: MachineHours
) -> None:
    """Hours that a machine's usage rows touch, and the instance type that they state there."""
    row, hour, _, _ = _hours(rows, whole, periods)
    keys, kinds = machine_keys(charges).to_pylist(), charges["x_InstanceType"].to_pylist()
    stated: dict[int, str] = {}
    for at, h in zip(row.tolist(), hour.tolist(), strict=True):
        number = hours.slot(keys[at], h)
        hours.slots[number].touched = True
        if kinds[at] is not None:
            stated[number] = min(kinds[at], stated.get(number, kinds[at]))
    for number, kind in stated.items():
        hours.slots[number].instance_type = kind


def _hours(rows: Index, whole: npt.NDArray[np.bool_], periods: Periods) -> tuple[Index, Index, Index, Index]:
    """Every (row, hour) with the overlap's first and last ns, by row; a charge that books whole has the hour it starts in."""
    booked = rows[whole[rows]]
    hour = np.clip(periods.start[booked] // HOUR_NS, 0, 23)
    begin = np.maximum(periods.low[booked], hour * HOUR_NS)
    end = np.maximum(begin, np.minimum(periods.high[booked], (hour + 1) * HOUR_NS))
    spread = periods.hours(rows[~whole[rows]])
    columns = [np.concatenate(pair) for pair in zip((booked, hour, begin, end), spread, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return columns[0][order], columns[1][order], columns[2][order], columns[3][order]


def _at_start(rows: Index, periods: Periods, amounts: Mapping[str, Ints]) -> Parts:
    hour = np.clip(periods.start[rows] // HOUR_NS, 0, 23)
    return Parts(rows, hour, {k: v[rows] for k, v in amounts.items()})


def _by_formula(charges: pa.Table, rows: Index, periods: Periods) -> Parts:
    row, hour, begin, end = periods.hours(rows)
    length = periods.end[row] - periods.start[row]
    amounts = {}
    for name in LEDGERS:
        full, _ = money.to_units(charges[name])
        upto = [money.telescope(full[row], edge - periods.start[row], length) for edge in (begin, end)]
        amounts[name] = upto[1] - upto[0]
    return Parts(row, hour, amounts)


def _by_capacity(rows: Index, periods: Periods, amounts: Mapping[str, Ints]) -> Parts:
    row, hour, begin, end = periods.hours(rows)
    return _weighted(rows, row, hour, end - begin, amounts)


def _weighted(rows: Index, row: Index, hour: Index, weight: Index, amounts: Mapping[str, Ints]) -> Parts:
    """Day amounts of rows over their hours by weight; all weights zero: the first hour."""
    if not len(rows):
        return Parts(row, hour, {k: v[row] for k, v in amounts.items()})
    start = _starts(row)
    empty = np.add.reduceat(weight, start[:-1]) == 0
    weight = weight.copy()
    weight[start[:-1][empty]] = 1
    return Parts(row, hour, {k: money.apportion(v[rows], start, weight) for k, v in amounts.items()})


def _by_running_time(
    charges: pa.Table,
    rows: Index,
    whole: npt.NDArray[np.bool_],
    spans: npt.NDArray[np.bool_],
    periods: Periods,
    amounts: Mapping[str, Ints],
    hours: MachineHours,
) -> Parts:
    """Plain usage of machines: ns of each row and hour; a machine's own rows summed by meter into its billed spans."""
    row, hour, begin, end = _hours(rows, whole, periods)
    facts = charges.select(_TIME_FACTS).append_column("key", machine_keys(charges)).take(pa.array(rows)).to_pylist()
    start = _starts(row)
    weight = np.zeros(len(row), np.int64)
    meters: dict[int, dict[tuple[str, str], int]] = {}
    for place, fact in enumerate(facts):
        at, span = int(rows[place]), range(int(start[place]), int(start[place + 1]))
        numbers = [hours.slot(fact["key"], int(hour[i])) for i in span]
        capacity = [int(end[i] - begin[i]) for i in span]
        running = [hours.slots[n].running_ns for n in numbers]
        shares = _row_ns(fact, running, capacity, None if whole[at] else periods, at)
        if len(span) > 1:
            weight[list(span)] = [s // _SCALE for s in shares]
        if spans[at]:
            for number, share in zip(numbers, shares, strict=True):
                meter = meters.setdefault(number, {})
                name = (fact["SkuMeter"] or "", fact["x_TieRule"] or "")
                meter[name] = meter.get(name, 0) + share
    for number, by_meter in meters.items():
        found = [money.half_even(max(exact, 0), _SCALE) for exact in by_meter.values()]
        hours.slots[number].billed_ns = max(found)
        if max(found) - min(found) > BILLING_GRAIN_NS:
            hours.slots[number].findings.add("meters_disagree")
    return _weighted(rows, row, hour, weight, amounts)


def _row_ns(
    fact: Mapping[str, object], running: list[int], capacity: list[int], periods: Periods | None, at: int
) -> list[int]:
    """ns of one row in each of its hours, in units of 1e-12 ns: exact within one hour, whole ns where it is spread.

    Args:
        fact: quantities and units of the row.
        running: observed running ns of each hour.
        capacity: ns of each hour that the charge covers.
        periods: charge periods; None for a row that books whole.
        at: number of the row.
    """
    stated = quantity_ns(fact)
    if stated is None:
        quantity = sum(capacity)
    elif periods is None or (len(capacity) == 1 and periods.inside(at)):
        return [stated]
    else:
        quantity = periods.share(money.half_even(max(stated, 0), _SCALE), at)
    if len(capacity) == 1:
        return [quantity * _SCALE]
    return [n * _SCALE for n in spread_quantity(quantity, running, capacity)]


def _starts(row: Index) -> Index:
    """First place of each run of equal rows, and the end."""
    if not len(row):
        return np.zeros(1, np.int64)
    return np.append(np.nonzero(np.append(True, row[1:] != row[:-1]))[0], len(row))


@dataclass(frozen=True)
class Addressed:
    """Addresses before they become a table: charge row, hour, vector row (-1 without one), category, amounts."""

    row: Index
    hour: Index
    vector: Index
    category: npt.NDArray[np.object_]
    amounts: dict[str, Ints]


def tie_slots(
    charges: pa.Table, parts: Parts, labels: Labels, hours: MachineHours, attached: Mapping[tuple[str, int], list[str]]
) -> list[list[int]]:
    """Slots whose time shares out each part: a machine's own, those of the machines that a dependant is attached to, or none.

    Args:
        attached: machines (`cloud|instance`) by (`cloud|object`, hour).
    """
    keys = machine_keys(charges).take(pa.array(np.unique(parts.row))).to_pylist()
    of_row = dict(zip(np.unique(parts.row).tolist(), keys, strict=True))
    objects = object_keys(charges).to_pylist() if TIED_DEPENDANT in labels.category else []
    slots: list[list[int]] = []
    for row, hour in zip(parts.row.tolist(), parts.hour.tolist(), strict=True):
        category = labels.category[row]
        if category == TIED_MACHINE:
            slots.append([hours.slot(of_row[row], hour)])
        elif category == TIED_DEPENDANT:
            slots.append(dependant_slots(hours, attached.get((objects[row], hour), []), hour))
        else:
            slots.append([])
    return slots


def attachments_of(attachments: pa.Table, day_ns: int) -> dict[tuple[str, int], list[str]]:
    """Machines (`cloud|instance`) that each object (`cloud|object`) hangs on, by object and hour of the day.

    Args:
        attachments: rows of core_usage__attachments_hourly of the day.
        day_ns: start of the day, ns UTC.
    """
    machines: dict[tuple[str, int], set[str]] = {}
    hour = (np.asarray(attachments["hour_utc"].cast(pa.int64())) - day_ns) // HOUR_NS
    keys, objects = (
        pc.binary_join_element_wise(attachments["cloud"], attachments[c], "|").to_pylist()
        for c in ("instance_id", "object_id")
    )
    for name, h, machine in zip(objects, hour.tolist(), keys, strict=True):
        machines.setdefault((name, h), set()).add(machine)
    return {k: sorted(v) for k, v in machines.items()}


def dependant_slots(hours: MachineHours, machines: list[str], hour: int) -> list[int]:
    """Machine-hours that share out what hangs on these machines in an hour: those that were billed or observed."""
    numbers = [hours.index[m, hour] for m in machines if (m, hour) in hours.index]
    return [n for n in numbers if hours.slots[n].billed_ns is not None or hours.slots[n].devices]


def first_rounding(parts: Parts, slots: list[list[int]], labels: Labels, vector: pa.Table) -> Addressed:
    """Hour parts over the rows of their machine-hours' vectors, by largest remainder, ties by address.

    A part without a machine keeps one address: its own category, or idle for a dependant that is detached in the hour.
    """
    part, place = rows_of(vector, slots)
    shared = {k: share_out(v, part, np.asarray(vector["ns"])[place]) for k, v in parts.amounts.items()}
    lone = np.nonzero(np.array([not s for s in slots], bool))[0]
    own = labels.category[parts.row[lone]].copy()
    own[own == TIED_DEPENDANT] = "idle"
    names = np.asarray(vector["category"].to_pylist() or [""], object)
    return Addressed(
        row=np.concatenate([parts.row[part], parts.row[lone]]),
        hour=np.concatenate([parts.hour[part], parts.hour[lone]]),
        vector=np.concatenate([place, np.full(len(lone), -1)]),
        category=np.concatenate([names[place] if len(place) else np.zeros(0, object), own]),
        amounts={k: _concat([shared[k], v[lone]]) for k, v in parts.amounts.items()},
    )


def rows_of(vector: pa.Table, slots: list[list[int]]) -> tuple[Index, Index]:
    """Rows of the vector that share each part out: those of its slots, all slots of a part in one address order.

    Args:
        vector: rows of spans.VECTOR by slot and address, of `spans.vectors`.
        slots: slots of each part; a part without any has no rows.

    Returns:
        Number of the part and of the row, equal parts next to each other.
    """
    slot_of = np.asarray(vector["slot"])
    first = np.searchsorted(slot_of, np.arange(int(slot_of.max()) + 2 if len(slot_of) else 1))
    single = np.array([len(s) == 1 for s in slots], bool)
    several = [i for i, s in enumerate(slots) if len(s) > 1]
    one = np.nonzero(single)[0]
    number = np.array([slots[i][0] for i in one], np.int64)
    count = first[number + 1] - first[number] if len(one) else number
    before = np.cumsum(count) - count
    place = np.repeat(first[number] - before, count) + np.arange(int(count.sum())) if len(one) else number
    pieces = [(np.repeat(one, count), place)]
    for i in several:
        rows = np.concatenate([np.arange(first[n], first[n + 1]) for n in sorted(slots[i])])
        pieces.append((np.full(len(rows), i), rows[_address_order(vector.take(pa.array(rows)))]))
    return np.concatenate([p for p, _ in pieces]), np.concatenate([r for _, r in pieces])


def share_out(amounts: Ints, part: Index, weight: Index) -> Ints:
    """Amounts over the rows of their parts by largest remainder, ties in row order; weights that are all 0: the first row.

    Args:
        amounts: whole units by part.
        part: part of each row, equal parts next to each other.
        weight: weight of each row.
    """
    start = _starts(part)
    owner = part[start[:-1]] if len(part) else part
    if not len(part) or not np.any(amounts[owner]):
        return np.zeros(len(part), np.int64)
    empty = np.add.reduceat(weight, start[:-1]) == 0
    if empty.any():
        weight = weight.copy()
        weight[start[:-1][empty]] = 1
    return money.apportion(amounts[owner], start, weight)


def _address_order(rows: pa.Table) -> Index:
    keys = [(name, "ascending") for name in ("device", "job", "attempt", "rank", "category", "slot")]
    return np.asarray(pc.sort_indices(rows, sort_keys=keys))
