"""Deliveries and usage days: which snapshot of a billing period is in force, which part of a charge is of which day.

Stored charges with their class in, one row per charge and UTC day out; watermarks and totals beside them. Knows no file,
no disk, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.focus_values import map_distinct
from tasks.core.units import DAY_NS, HOUR_NS, MOST_TIME_NS, time_unit_ns

SPREAD_CLASSES = ("machine", "dependant")
"""Classes whose usage-based charges are spread over days even when they are longer than one."""
LEDGERS = (
    ("BilledCost", "x_DayBilledCost"),
    ("EffectiveCost", "x_DayEffectiveCost"),
    ("ListCost", "x_DayListCost"),
    ("x_PromotionalCost", "x_DayPromotionalCost"),
)
"""Amounts of a charge, and their parts on a day."""
TOTALS = ("BillingPeriodStart", "BillingAccountId", "SubAccountId", "InvoiceId", "BillingCurrency")
"""What Law 1 (c) adds up by, beside the delivery."""


@dataclass(frozen=True)
class Listed:
    """One accepted delivery as it stands at its source.

    Args:
        delivery: id, which its bytes give.
        name: manifest or file, for people.
        group: file, or export and billing period: what a newer delivery of the same group replaces.
        delivered_at: sortable UTC text.
        main: the provider's own pointer names it as the newest of its group.
        periods: billing periods it speaks for.
        here: False for what was taken away and still stands for these periods.
        files: path and tag of each file when it was listed; tag None where the storage gives none.
    """

    delivery: str
    name: str
    group: str
    delivered_at: str
    main: bool
    periods: tuple[str, ...]
    here: bool = True
    files: tuple[tuple[str, str | None], ...] = ()


def next_listing(former: Sequence[Listed], here: Sequence[Listed], broken: Collection[str]) -> list[Listed]:
    """What stands at a source now: what is there, what it could not replace, and what it says nothing about.

    Args:
        former: the listing before.
        here: accepted deliveries that are at the source now.
        broken: groups with a delivery that was refused or is incomplete; what they held before stands.

    Returns:
        Sorted. What was taken away stays for the billing periods that nothing else covers now: the periods of a listing
        are those of the newest state of the source that has any delivery for them.
    """
    known = {(one.group, one.delivery) for one in here}
    present = [*here, *(f for f in former if f.group in broken and (f.group, f.delivery) not in known)]
    covered = {period for one in present for period in one.periods}
    gone = []
    for one in former:
        rest = tuple(p for p in one.periods if p not in covered)
        if rest:
            gone.append(replace(one, periods=rest, here=False, files=()))
    return sorted([*present, *gone], key=lambda one: (one.group, one.delivered_at, one.main, one.delivery, one.name))


def contenders(listed: Iterable[Listed]) -> dict[str, list[Listed]]:
    """Deliveries that may count for each billing period, newest first: of a group its newest, of equal bytes one.

    Newest is the greatest by time, then the one the provider's pointer names, then id. Each delivery is a snapshot that
    replaces the one before.

    Source: infra/rules/lake.md 8; AWS Data Exports documentation, export delivery.
    """
    best: dict[tuple[str, str], Listed] = {}
    for one in listed:
        for period in one.periods:
            key = (period, one.group)
            best[key] = max(best.get(key, one), one, key=lambda d: (d.delivered_at, d.main, d.delivery))
    found: dict[str, dict[str, Listed]] = {}
    for (period, _), one in sorted(best.items()):
        same = found.setdefault(period, {})
        same[one.delivery] = max(same.get(one.delivery, one), one, key=lambda d: (d.delivered_at, d.name))
    order = {p: sorted(same.values(), key=lambda d: (d.delivered_at, d.delivery)) for p, same in found.items()}
    return {period: order[period][::-1] for period in sorted(order)}


def rivals(listed: Sequence[Listed]) -> dict[tuple[str, str], str]:
    """Deliveries that lose to another of the same group and time by id alone: (delivery, name) to the name of the winner."""
    found: dict[tuple[str, str], str] = {}
    for one in listed:
        better = [d for d in listed if d.group == one.group and set(d.periods) & set(one.periods)]
        best = max(better, key=lambda d: (d.delivered_at, d.main, d.delivery))
        if (best.delivered_at, best.main) == (one.delivered_at, one.main) and best.delivery != one.delivery:
            found[one.delivery, one.name] = best.name
    return found


def superseded_by(keys: Sequence[pa.Array]) -> list[int | None]:
    """For each delivery, newest first, which newer one shares a charge with it; None where none does.

    Deliveries without a charge in common are parts of one bill (files of one export, one file per account). One that
    shares a charge with a newer one is an older state of it.

    Args:
        keys: distinct charge keys of each delivery, text.
    """
    seen = pa.array([], pa.string())
    owner = np.zeros(0, np.int64)
    out: list[int | None] = []
    for number, own in enumerate(keys):
        at = pc.index_in(own, value_set=seen)
        shared = np.asarray(at.drop_null()).astype(np.int64)
        out.append(int(owner[shared].min()) if len(shared) else None)
        fresh = own.filter(at.is_null())
        seen = pa.concat_arrays([seen, fresh])
        owner = np.append(owner, np.full(len(fresh), number))
    return out


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
        The same columns, and x_UsageDate, x_IsHomeDay and the day's parts of LEDGERS.

    Source: infra/rules/ledger.md 4.3 and 4.4.
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

    Source: infra/rules/ledger.md 4.13.
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


def period_ends(charges: pa.Table) -> dict[str, int]:
    """End of each billing period, ns UTC; of rows that differ the latest."""
    starts = charges["BillingPeriodStart"].cast(pa.int64())
    table = pa.table({"start": starts, "end": charges["BillingPeriodEnd"].cast(pa.int64())})
    ends = table.group_by("start").aggregate([("end", "max")]).sort_by("start")
    return {
        instant_text(start): end
        for start, end in zip(*(ends[n].to_pylist() for n in ("start", "end_max")), strict=True)
    }


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

    A fee from which what was used is taken off already (class commitment_unused) is no purchase: it is all unused.

    Source: infra/rules/ledger.md 2 and 5; billed - commitment purchases + used + unused = effective.
    """
    commitment = pc.or_(charges["CommitmentDiscountId"].is_valid(), charges["CapacityReservationId"].is_valid())
    rest = pc.equal(charges["x_Class"], "commitment_unused")
    purchase = pc.and_(pc.equal(charges["ChargeCategory"], "Purchase"), pc.and_not(commitment, rest))
    chosen = {
        "stored": None,
        "purchases": purchase,
        "used": pc.equal(charges["CommitmentDiscountStatus"], "Used"),
        "unused": pc.or_(pc.fill_null(pc.equal(charges["CommitmentDiscountStatus"], "Unused"), False), rest),
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


BRIDGED = (
    "stored_billed", "stored_effective", "scheduled_billed", "scheduled_effective", "purchases", "used", "unused",
)  # fmt: skip
_NOTHING = {"BilledCost": {"raw_minus_stored": "0"}}


def add_bridge(facts: dict[str, Any], row: Mapping[str, Any], standing: Collection[str]) -> None:
    """Add one row of `bridge` to BRIDGED in whole units; parts on days that are not `standing` are scheduled."""

    def both(name: str) -> tuple[int, int]:
        billed, effective = row.get(name, ("0", "0"))
        return money.units(billed), money.units(effective)

    for name, amount in zip(("stored_billed", "stored_effective"), both("stored"), strict=True):
        facts[name] += amount
    facts["purchases"] += both("purchases")[0]
    for name in ("used", "unused"):
        billed, effective = both(name)
        facts[name] += effective - billed
    for day, (billed_text, effective_text) in row["days"].items():
        if day not in standing:
            facts["scheduled_billed"] += money.units(billed_text)
            facts["scheduled_effective"] += money.units(effective_text)


def lost(facts: Mapping[str, Any]) -> dict[str, Decimal | None]:
    """Σ raw − Σ stored of BilledCost by currency; None where something was lost and the currency has several keys.

    Args:
        facts: of a delivery: rows of `bridge`, and what rounding took from each file.
    """
    rows = [row["currency"] for row in facts["bridge"]]
    sums: dict[str, Decimal | None] = {}
    for currency in set(rows):
        rests = (f["currencies"].get(currency, _NOTHING)["BilledCost"]["raw_minus_stored"] for f in facts["files"])
        gone = sum((Decimal(rest) for rest in rests), Decimal(0))
        sums[currency] = gone if not gone or rows.count(currency) == 1 else None
    return sums


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


TIMES = (("ConsumedQuantity", "ConsumedUnit"), ("PricingQuantity", "PricingUnit"))
"""Where a row states time, first that is in a unit of time."""
MOST_HOURS = MOST_TIME_NS / HOUR_NS * (1 + 1e-9)
"""MOST_TIME_NS with room for the error of doubles."""


def too_long(rows: pa.Table) -> tuple[str, int] | None:
    """Column and row of the first time quantity of a machine beyond MOST_TIME_NS, or None.

    Rows that name no machine may sum up a whole account: nothing is multiplied by their time.

    Args:
        rows: stored charges with x_MachineId and x_UnitsPerMachine.
    """
    for amount, unit in TIMES:
        wrong = pc.and_(pc.greater(_hours(rows, amount, unit), MOST_HOURS), rows["x_MachineId"].is_valid())
        if pc.any(wrong).as_py():
            return amount, int(pc.index(wrong, pa.scalar(True)).as_py())
    return None


def too_long_together(rows: pa.Table) -> tuple[str, str] | None:
    """Machine and day of the first sum of time quantities beyond MOST_TIME_NS, or None.

    Args:
        rows: all stored charges of a delivery, none of them `too_long`.
    """
    hours = pc.coalesce(*(_hours(rows, amount, unit) for amount, unit in TIMES))
    day = pc.strftime(rows["ChargePeriodStart"].cast(pa.timestamp("s", "UTC")), format="%Y-%m-%d")
    table = pa.table({"machine": rows["x_MachineId"], "meter": rows["SkuMeter"], "day": day, "hours": hours})
    sums = table.filter(table["machine"].is_valid()).group_by(["machine", "meter", "day"]).aggregate([("hours", "sum")])
    sums = sums.filter(pc.greater(sums["hours_sum"], MOST_HOURS))
    found = sorted(zip(sums["machine"].to_pylist(), sums["day"].to_pylist(), strict=True))
    return found[0] if found else None


def _hours(rows: pa.Table, amount: str, unit: str) -> pa.ChunkedArray:
    """Hours of one machine in a quantity, as doubles: a bound does not need more; null where it is no time."""
    per = _array(rows["x_UnitsPerMachine"])
    known = pc.if_else(pc.greater(per, 0), per, pa.scalar(None, per.type))
    plain = map_distinct(_array(rows[unit]), lambda u: (time_unit_ns(u) or 0) / HOUR_NS or None, pa.float64())
    metered = map_distinct(
        _array(rows[unit]), lambda u: (time_unit_ns(u, metered=True) or 0) / HOUR_NS or None, pa.float64()
    )
    each = pc.if_else(per.is_valid(), pc.divide(metered, known.cast(pa.float64())), plain)
    return pa.chunked_array([pc.multiply(pc.abs(_array(rows[amount])).cast(pa.float64()), each)])


def _array(values: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)


def overflows(values: pa.ChunkedArray) -> bool:
    """True when a sum over some of the rows could need more than 38 digits: that is an error, never a wrap."""
    units, _ = money.to_units(values)
    return bool(len(units)) and int(np.abs(units).max()) * len(units) >= 10**38
