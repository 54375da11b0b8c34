"""Deliveries and usage days: which snapshot of a billing period is in force, which part of a charge is of which day.

Stored charges with their class in, one row per charge and UTC day out; watermarks and totals beside them. Knows no file,
no disk, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.units import DAY_NS, HOUR_NS

SPREAD_CLASSES = ("machine", "dependant")
"""Classes whose usage-based charges are spread over days even when they are longer than one."""
LEDGERS = (("BilledCost", "x_DayBilledCost"), ("EffectiveCost", "x_DayEffectiveCost"), ("ListCost", "x_DayListCost"))
TOTALS = ("BillingPeriodStart", "BillingAccountId", "SubAccountId", "InvoiceId", "BillingCurrency")
"""What Law 1 (c) adds up by, beside the delivery."""


@dataclass(frozen=True)
class Delivery:
    """One accepted delivery: when it was delivered (sortable text) and the billing periods it speaks for."""

    source: str
    delivery: str
    delivered_at: str
    periods: tuple[str, ...]


def in_force(deliveries: Iterable[Delivery]) -> dict[tuple[str, str], str]:
    """The delivery in force for each (source, billing period): the newest by (delivered_at, delivery).

    Each delivery is a snapshot that replaces the one before for the periods it speaks for (billing.md R2).
    """
    newest: dict[tuple[str, str], tuple[str, str]] = {}
    for one in deliveries:
        for period in one.periods:
            key = (one.source, period)
            newest[key] = max(newest.get(key, ("", "")), (one.delivered_at, one.delivery))
    return {key: newest[key][1] for key in sorted(newest)}


def instant_text(ns: int) -> str:
    """ISO 8601 text of an instant, in whole seconds, with Z."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=ns // 1_000_000_000)).strftime("%Y-%m-%dT%H:%M:%SZ")


def day_text(day: int) -> str:
    """ISO date of a day number since 1970."""
    return instant_text(day * DAY_NS)[:10]


def day_start_ns(day: str) -> int:
    """Start of a UTC day given as an ISO date, ns."""
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 1_000_000_000


def split_days(charges: pa.Table) -> pa.Table:
    """One row per charge and UTC day that it is about.

    Usage-based charges of up to 24 hours are spread over the days they touch, longer ones only when their class is
    machine or dependant; everything else is whole on the day of ChargePeriodStart. A day's part is a difference of
    running floors on the absolute amount, so it depends on the charge alone and the parts add up to it.

    Args:
        charges: stored charges with x_Class.

    Returns:
        The same columns, and x_UsageDate, x_IsHomeDay, x_DayBilledCost, x_DayEffectiveCost, x_DayListCost.

    Source: ledger.md 4.3 and 4.4.
    """
    start, end = _ns(charges["ChargePeriodStart"]), _ns(charges["ChargePeriodEnd"])
    length = end - start
    usage_based = np.asarray(pc.fill_null(pc.equal(charges["ChargeFrequency"], "Usage-Based"), False))
    fits = (length <= DAY_NS) | np.asarray(pc.is_in(charges["x_Class"], value_set=pa.array(SPREAD_CLASSES)))
    spread = usage_based & fits & (length > 0)
    first = start // DAY_NS
    last = np.where(spread, (end - 1) // DAY_NS, first)
    count = last - first + 1
    row = np.repeat(np.arange(len(charges)), count)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    day = first[row] + within
    whole = count[row] == 1
    out = charges if bool(np.all(count == 1)) else charges.take(pa.array(row))
    parts = {
        "x_UsageDate": pa.array(day.astype(np.int32), pa.int32()).cast(pa.date32()),
        "x_IsHomeDay": pa.array(within == 0),
    }
    since = np.clip(day * DAY_NS - start[row], 0, length[row])
    until = np.clip((day + 1) * DAY_NS - start[row], 0, length[row])
    for ledger, part in LEDGERS:
        parts[part] = _part(charges[ledger], row, whole, since, until, length[row])
    for name, column in parts.items():
        out = out.append_column(name, column)
    return out


def _part(
    amounts: pa.ChunkedArray,
    row: npt.NDArray[np.int64],
    whole: npt.NDArray[np.bool_],
    since: npt.NDArray[np.int64],
    until: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
) -> pa.Array:
    units, valid = money.to_units(amounts)
    part = units[row]
    cut = np.flatnonzero(~whole)
    if len(cut):
        total, span = part[cut], length[cut]
        part = part.copy()
        part[cut] = money.telescope(total, until[cut], span) - money.telescope(total, since[cut], span)
    return money.from_units(part, valid[row])


def _ns(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    return np.asarray(values.cast(pa.int64())).astype(np.int64)


def watermarks(charges: pa.Table) -> tuple[dict[str, dict[str, int]], dict[str, list[str]]]:
    """How far each service has been billed: greatest ChargePeriodEnd of usage rows, floored to the hour (Azure: day).

    Args:
        charges: stored charges of one delivery, with x_Cloud and x_Class, one row a charge.

    Returns:
        By billing period: ns UTC by "cloud|account|service"; and those of them that hold machine rows.

    Source: ledger.md 4.13.
    """
    usage_based = pc.fill_null(pc.equal(charges["ChargeFrequency"], "Usage-Based"), False)
    usage = charges.filter(pc.and_(pc.equal(charges["ChargeCategory"], "Usage"), usage_based))
    if not len(usage):
        return {}, {}
    service = pc.fill_null(usage["ServiceName"], "")
    groups = (
        pa.table(
            {
                "period": usage["BillingPeriodStart"].cast(pa.int64()),
                "cloud": usage["x_Cloud"],
                "key": pc.binary_join_element_wise(usage["x_Cloud"], usage["BillingAccountId"], service, "|"),
                "end": usage["ChargePeriodEnd"].cast(pa.int64()),
                "machine": pc.equal(usage["x_Class"], "machine"),
            }
        )
        .group_by(["period", "cloud", "key"])
        .aggregate([("end", "max"), ("machine", "max")])
    )
    marks: dict[str, dict[str, int]] = {}
    machines: dict[str, list[str]] = {}
    for one in sorted(groups.to_pylist(), key=lambda g: (g["period"], g["key"])):
        period, grain = instant_text(one["period"]), DAY_NS if one["cloud"] == "azure" else HOUR_NS
        marks.setdefault(period, {})[one["key"]] = one["end_max"] // grain * grain
        if one["machine_max"]:
            machines.setdefault(period, []).append(one["key"])
    return marks, machines


def clamp(marks: Mapping[str, int], day: str) -> dict[str, int]:
    """Watermarks held to one day: at least its start, at most its end, so later bills do not change a billed day."""
    start = day_start_ns(day)
    return {key: min(max(marks[key], start), start + DAY_NS) for key in sorted(marks)}


def totals(charges: pa.Table) -> list[dict[str, Any]]:
    """Rows and Σ stored of both ledgers by TOTALS, as sorted plain values; money as decimal text.

    Args:
        charges: stored charges, one row a charge.

    Sums of what `overflows` let pass fit 38 digits.
    """
    counted = dict(_sums(charges, TOTALS, ("BilledCost", "EffectiveCost"), count=True))
    out = []
    for key, (billed, effective, rows) in counted.items():
        facts: dict[str, Any] = dict(zip(TOTALS, key, strict=True))
        facts["BillingPeriodStart"] = instant_text(int(facts["BillingPeriodStart"]))
        out.append(facts | {"rows": int(rows), "BilledCost": billed, "EffectiveCost": effective})
    return sorted(out, key=lambda f: [f[n] or "" for n in TOTALS])


BRIDGE = ("x_Cloud", "BillingAccountId", "BillingPeriodStart", "BillingCurrency")
"""What the bridge from stored rows to addresses is drawn for."""


def bridge(charges: pa.Table, parts: pa.Table) -> list[dict[str, Any]]:
    """What the bridge needs of a delivery, by BRIDGE: stored sums, commitments, and the sums of each usage day, as text.

    Args:
        charges: stored charges, one row a charge.
        parts: the same charges split over usage days, as `split_days` gives them.

    Source: ledger.md section 2; billed - commitment purchases + used + unused = effective.
    """
    commitment = pc.or_(charges["CommitmentDiscountId"].is_valid(), charges["CapacityReservationId"].is_valid())
    purchase = pc.and_(pc.equal(charges["ChargeCategory"], "Purchase"), commitment)
    chosen = {
        "stored": None,
        "purchases": purchase,
        "used": pc.equal(charges["CommitmentDiscountStatus"], "Used"),
        "unused": pc.equal(charges["CommitmentDiscountStatus"], "Unused"),
    }
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, mask in chosen.items():
        for key, sums in _sums(
            charges if mask is None else charges.filter(mask), BRIDGE, ("BilledCost", "EffectiveCost")
        ):
            found.setdefault(key, {"days": {}})[name] = sums
    for key, sums in _sums(parts, (*BRIDGE, "x_UsageDate"), ("x_DayBilledCost", "x_DayEffectiveCost")):
        found[key[:-1]]["days"][key[-1].isoformat()] = sums
    names = ("cloud", "account", "period", "currency")
    rows = [dict(zip(names, key, strict=True)) | facts for key, facts in sorted(found.items())]
    return [row | {"period": instant_text(int(row["period"]))} for row in rows]


def _sums(
    table: pa.Table, key: Sequence[str], amounts: Sequence[str], *, count: bool = False
) -> Iterator[tuple[tuple[Any, ...], list[str]]]:
    """Groups of a table and the sum of each amount, as text, then the rows when counted; instants as ns."""
    place = table.schema.get_field_index("BillingPeriodStart")
    table = table.set_column(place, "BillingPeriodStart", table["BillingPeriodStart"].cast(pa.int64()))
    wanted = [(name, "sum") for name in amounts]
    sums = table.group_by(list(key)).aggregate([*wanted, (amounts[0], "count")])
    for row in sums.to_pylist():
        texts = [plain(row[f"{name}_sum"]) for name in amounts]
        yield tuple(row[k] for k in key), [*texts, str(row[f"{amounts[0]}_count"])] if count else texts


def plain(amount: Decimal) -> str:
    """Decimal text without an exponent and without zeros at the end."""
    text = format(amount, "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text) if amount else "0"


def sum_money(values: pa.ChunkedArray) -> Decimal:
    """Exact sum of a decimal(38, 12) column."""
    units, _ = money.to_units(values)
    if units.dtype == object:
        return money.decimal(sum(int(u) for u in units))
    high, low = units >> 32, units & ((1 << 32) - 1)
    return money.decimal((int(high.sum()) << 32) + int(low.sum()))


def overflows(values: pa.ChunkedArray) -> bool:
    """True when a sum over some of the rows could need more than 38 digits: that is an error, never a wrap."""
    units, _ = money.to_units(values)
    return bool(len(units)) and int(np.abs(units).max()) * len(units) >= 10**38
