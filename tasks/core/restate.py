"""Restatements: by how much a revision of a usage day changed the money of each address group.

Addresses of two revisions in, signed differences out. Nothing is overwritten: the rows of earlier revisions stay as they
were. Knows no disk, no clock. Source: infra/rules/ledger.md 6.
"""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.restatements import RESTATEMENTS
from seedance.schema import MONEY
from tasks.core import money
from tasks.core.spelling import one_spelling

GROUP = RESTATEMENTS.key[2:]
"""What an address group agrees in."""
AMOUNTS = ("BilledCost", "EffectiveCost", "x_EstimatedCost")
COLUMNS = (*GROUP, *AMOUNTS)
"""Columns of addresses that are read."""


def restatements(
    day: str, before: pa.Table, after: pa.Table, former: pa.Table, *, revision: int, cause: str | None
) -> pa.Table:
    """Rows of report_restatements__daily of a day: those of its earlier revisions, and what this one changed.

    Args:
        day: UTC usage day, YYYY-MM-DD.
        before: addresses of the parent commit, at least COLUMNS.
        after: addresses of the new revision.
        former: the parent's restatements.
        revision: number of the new commit; at 1 there is nothing to compare with.
        cause: why the day runs again.

    Returns:
        Groups whose money is the same are left out. Summed over all revisions from 2 on, an amount is what the newest
        revision has less what the first had.

    Raises:
        ValueError: a revision beyond 1 without a cause.
    """
    if revision <= 1:
        return former
    if cause is None:
        raise ValueError(
            f"restatements: revision {revision} of {day} has no cause; expected one of those of a day's plan"
        )
    sides = [one_spelling(table.select(list(COLUMNS))) for table in (before, after)]
    rows = pa.concat_tables(sides).unify_dictionaries()
    sign = np.repeat([-1, 1], [len(side) for side in sides])
    signed = {name: _signed(rows[name], sign) for name in AMOUNTS}
    table = pa.table({**{n: rows[n] for n in GROUP}, **signed})
    sums = table.group_by(list(GROUP), use_threads=False).aggregate([(n, "sum") for n in AMOUNTS])
    totals = {n: sums[f"{n}_sum"].cast(MONEY) for n in AMOUNTS}
    changed = np.zeros(len(sums), bool)
    for total in totals.values():
        changed |= np.asarray(pc.fill_null(pc.not_equal(total, pa.scalar(0, MONEY)), False))
    facts = {
        "x_UsageDate": pa.array([dt.date.fromisoformat(day)] * len(sums), pa.date32()),
        "x_Revision": pa.array([revision] * len(sums), pa.int32()),
        "x_Cause": pa.array([cause] * len(sums), pa.string()),
    }
    found = pa.table({**facts, **{n: sums[n] for n in GROUP}, **totals}).filter(pa.array(changed))
    return pa.concat_tables([former, found.select(list(RESTATEMENTS.names)).cast(RESTATEMENTS.arrow)])


def _signed(amounts: pa.ChunkedArray, sign: money.Ints) -> pa.Array:
    units, valid = money.to_units(amounts)
    return money.from_units(units * sign, valid)
