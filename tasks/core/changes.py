"""What one snapshot of a bill changed against another: which usage of a half-day is the same, and row by row the difference.

Rows are compared as multisets: two equal rows are two charges, and order means nothing. Stored charges in, digests and
differences out. Knows no file, no disk, no clock. Source: infra/rules/ledger.md 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import focus
from tasks.core.snapshots import SPREAD_CLASSES, instant_text
from tasks.core.units import DAY_NS, HOUR_NS

HALF_NS = 12 * HOUR_NS
MEASURES = tuple(c.name for c in focus.STORED if not focus.in_key(c.name, c.type))
"""Columns that are no part of a charge's key: what can change from delivery to delivery."""
LANES = 2
_WORD = 1 << 64

Windows = dict[str, dict[str, dict[str, list[str | None]]]]
"""By billing period, "cloud|account" and usage day: a digest of each half-day, None where no usage touches it."""


def row_digests(rows: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.uint64]:
    """128 bits of each row's key and these columns, shape (rows, LANES)."""
    names = ("x_ChargeKey", *(name for name in columns if rows[name].null_count < len(rows)))
    parts = {name: rows[name].cast(pa.string()).combine_chunks() for name in names}
    texts = focus.content_keys(parts).to_pylist()
    words = b"".join(bytes.fromhex(text)[: 8 * LANES] for text in texts)
    return np.frombuffer(words, ">u8").astype(np.uint64).reshape(len(texts), LANES)


def window_digests(parts: pa.Table) -> Windows:
    """Digests of the usage of each half-day: equal where the same rows were delivered, whatever their order.

    Only rows that are spread over hours count: a fee of the month that grows daily says nothing about an hour. The
    invoice is left out: that one was issued changes no amount. A digest is a sum over its rows, so that of several files
    of one bill is the sum of theirs.

    Args:
        parts: charges split over usage days, as `split_days` gives them.
    """
    start, end = (np.asarray(parts[f"ChargePeriod{e}"].cast(pa.int64())).astype(np.int64) for e in ("Start", "End"))
    usage = pc.and_(pc.equal(parts["ChargeCategory"], "Usage"), pc.equal(parts["ChargeFrequency"], "Usage-Based"))
    fits = (end - start <= DAY_NS) | np.asarray(pc.is_in(parts["x_Class"], value_set=pa.array(SPREAD_CLASSES)))
    chosen = np.flatnonzero(np.asarray(pc.fill_null(usage, False)) & fits & (end > start))
    rows = parts.take(pa.array(chosen))
    day = np.asarray(rows["x_UsageDate"].cast(pa.int32())).astype(np.int64)
    digests = row_digests(rows, [name for name in MEASURES if name != "InvoiceId"])
    owner = pc.binary_join_element_wise(rows["x_Cloud"], rows["BillingAccountId"], "|")
    found: Windows = {}
    for half in (0, 1):
        begin = day * DAY_NS + half * HALF_NS
        inside = np.flatnonzero((start[chosen] < begin + HALF_NS) & (end[chosen] > begin))
        groups = pa.table(
            {"period": rows["BillingPeriodStart"].cast(pa.int64()), "who": owner, "day": rows["x_UsageDate"]}
        )
        for at, lanes in _sums(groups.take(pa.array(inside)), digests[inside]):
            by_day = found.setdefault(instant_text(at["period"]), {}).setdefault(at["who"], {})
            by_day.setdefault(at["day"].isoformat(), [None, None])[half] = "".join(f"{lane:016x}" for lane in lanes)
    return found


def _sums(groups: pa.Table, digests: npt.NDArray[np.uint64]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Each distinct group, sorted, and the sum of its digests modulo 2**64 in each lane."""
    names = groups.column_names
    numbered = groups.append_column("row", pa.array(np.arange(len(groups))))
    order = pc.sort_indices(numbered, sort_keys=[(n, "ascending") for n in (*names, "row")])
    ordered = groups.take(order)
    new = np.zeros(len(groups), bool)
    new[:1] = True
    for name in names:
        codes = np.asarray(ordered[name].combine_chunks().dictionary_encode().indices)
        new[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(new)
    if len(starts):
        sums = np.add.reduceat(digests[np.asarray(order)], starts, axis=0)
        yield from zip(ordered.take(pa.array(starts)).to_pylist(), sums.tolist(), strict=True)


def together(digests: Sequence[str]) -> str:
    """Digest of the rows of several files, from their own digests."""
    lanes = (sum(int(d[16 * n : 16 * n + 16], 16) for d in digests) % _WORD for n in range(LANES))
    return "".join(f"{lane:016x}" for lane in lanes)


def invoiced(charges: pa.Table) -> dict[str, dict[str, bool]]:
    """Whether every row of an account bears an InvoiceId, by billing period and "cloud|account".

    Args:
        charges: stored charges of one delivery with x_Cloud.
    """
    table = pa.table(
        {
            "period": charges["BillingPeriodStart"].cast(pa.int64()),
            "who": pc.binary_join_element_wise(charges["x_Cloud"], charges["BillingAccountId"], "|"),
            "known": charges["InvoiceId"].is_valid(),
        }
    )
    found: dict[str, dict[str, bool]] = {}
    for row in table.group_by(["period", "who"]).aggregate([("known", "min")]).sort_by("who").to_pylist():
        found.setdefault(instant_text(row["period"]), {})[row["who"]] = bool(row["known_min"])
    return dict(sorted(found.items()))


def complete(
    now: Mapping[str, Mapping[int, Sequence[str]]], before: Mapping[str, Mapping[int, Sequence[str]]], closed: set[str]
) -> dict[str, set[int]]:
    """Halves of a day in which an account's usage can be taken as complete, by "cloud|account", for one billing period.

    Args:
        now: digests of the deliveries in force by "cloud|account" and half, 0 or 1.
        before: those of the deliveries in force before them.
        closed: accounts all of whose rows of the period bear an InvoiceId.

    Returns:
        Halves that hold usage now, and hold the same as before or are closed.
    """
    found: dict[str, set[int]] = {}
    for who, halves in now.items():
        for half, digests in halves.items():
            former = before.get(who, {}).get(half)
            if who in closed or (former is not None and together(former) == together(digests)):
                found.setdefault(who, set()).add(half)
    return found


# --- the difference of two snapshots ---------------------------------------------------------------------------------

ABOUT = (
    "x_Cloud", "BillingAccountId", "x_UsageDate", "ResourceId", "ServiceName", "ChargeCategory", "ChargeClass", "BillingCurrency",
)  # fmt: skip
"""What a difference says of its charge; the same before and after, because it is part of the key."""
BEFORE_AND_AFTER = ("BilledCost", "EffectiveCost", "InvoiceId")


def differences(before: pa.Table, after: pa.Table) -> pa.Table:
    """Rows of two snapshots of one billing period that are not the same in both.

    Equal rows cancel one to one. Of what is left, rows of one key are paired in the order of their occurrence: a pair
    has changed; without a partner a row was added or removed.

    Args:
        before, after: x_ChargeKey, x_Occurrence, x_Delivery, ABOUT and MEASURES, one row a charge.

    Returns:
        x_ChargeKey, x_Change, and by side x_Occurrence, x_Delivery and BEFORE_AND_AFTER (former values as x_Former…), and
        ABOUT. What of a measure is added up over it is the difference of the two totals.
    """
    old, new = _uncancelled(before, after)
    keys = [side["x_ChargeKey"].to_pylist() for side in (old, new)]
    pairs: dict[tuple[str, int], list[int | None]] = {}
    for side, names in enumerate(keys):
        seen: dict[str, int] = {}
        for row, key in enumerate(names):
            rank = seen[key] = seen.get(key, -1) + 1
            pairs.setdefault((key, rank), [None, None])[side] = row
    order = sorted(pairs)
    left, right = (pa.array([pairs[p][side] for p in order], pa.int64()) for side in (0, 1))
    out: dict[str, Any] = {"x_ChargeKey": pa.array([key for key, _ in order], pa.string())}
    kinds = {(True, False): "removed", (False, True): "added", (True, True): "changed"}
    told = [kinds[a is not None, b is not None] for a, b in (pairs[p] for p in order)]
    out["x_Change"] = pa.array(told, pa.string())
    for name in ABOUT:
        out[name] = pc.coalesce(new[name].take(right), old[name].take(left))
    for name in ("x_Occurrence", "x_Delivery", *BEFORE_AND_AFTER):
        out[name] = new[name].take(right)
        out[f"x_Former{name.removeprefix('x_')}"] = old[name].take(left)
    return pa.table(out)


def _uncancelled(before: pa.Table, after: pa.Table) -> tuple[pa.Table, pa.Table]:
    """What is left of each side when equal rows cancel one to one, by key and occurrence."""
    sides = [t.sort_by([("x_ChargeKey", "ascending"), ("x_Occurrence", "ascending")]) for t in (before, after)]
    digests = np.concatenate([row_digests(side, MEASURES) for side in sides])
    _, codes = np.unique(digests, axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    own = (codes[: len(before)], codes[len(before) :])
    size = int(codes.max()) + 1 if len(codes) else 0
    common = np.minimum(*(np.bincount(c, minlength=size) for c in own)) if size else np.zeros(0, np.int64)
    kept = []
    for side, code in zip(sides, own, strict=True):
        order = np.argsort(code, kind="stable")
        starts = np.r_[0, np.flatnonzero(np.diff(code[order])) + 1] if len(order) else np.zeros(0, np.int64)
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        stays = np.sort(order[rank >= common[code[order]]])
        kept.append(side.take(pa.array(stays)))
    return kept[0], kept[1]
