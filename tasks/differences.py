"""The difference between two snapshots of a bill, as a table: what the newest deliveries changed, row by row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from schemas.restatements import CHANGES, DIFFERENCES
from seedance.schema import INSTANT
from tasks.closing import invoiced_accounts
from tasks.core import changes
from tasks.core.focus_values import parse_instant
from tasks.io.lake import Handle, Lake, Step
from tasks.io.parquet import narrow
from tasks.settings import Settings
from tasks.standing import InForce, former_in_force, handle_name, snapshots_in_force
from tasks.step import run_step, stage_key

STAGE = "bill_differences"


def report_differences(lake: Lake, settings: Settings) -> tuple[Step, bool]:
    """`report_bills__differences`: every bill in force against what was in force just before, row by row.

    Returns:
        The step, and whether it was there already. Its handle is for `Lake.publish_as_of`; facts: rows by x_Change, and
        closed, the rows of periods that were closed before.
    """
    force, former = snapshots_in_force(lake, settings), former_in_force(lake, settings)
    pairs = []
    for at in sorted({(one.source, one.period) for one in former}):
        sides = [[one for one in group if (one.source, one.period) == at] for group in (former, force)]
        pairs.append((at, sides[0], sides[1]))
    key = stage_key(
        STAGE,
        modules=("tasks.differences", "tasks.closing"),
        schemas=[CHARGES, DIFFERENCES],
        settings={
            "pairs": [[*at, *(sorted(one.delivery for one in side) for side in (old, new))] for at, old, new in pairs]
        },
        inputs=[h.sha256 for _, old, new in pairs for one in (*old, *new) for h in _handles(one).values()],
    )

    def compute() -> Step:
        tables = [DIFFERENCES.empty(), *(_difference(lake, at, old, new) for at, old, new in pairs)]
        table = pa.concat_tables(tables)
        counts = {kind: pc.sum(pc.equal(table["x_Change"], kind)).as_py() or 0 for kind in CHANGES}
        facts = counts | {"closed": pc.sum(table["x_Closed"]).as_py() or 0}
        return Step({DIFFERENCES.name: lake.handle(DIFFERENCES, None, [table])}, facts)

    return run_step(lake, STAGE, key, compute)


def _handles(one: InForce) -> dict[str, Handle]:
    prefix = handle_name(one.period, "")
    return {name: handle for name, handle in sorted(one.step.handles.items()) if name.startswith(prefix)}


def _difference(lake: Lake, at: tuple[str, str], old: Sequence[InForce], new: Sequence[InForce]) -> pa.Table:
    """The difference of one billing period; objects that both snapshots have are not read."""
    same = {p.path for one in old for h in _handles(one).values() for p in h.parts}
    same &= {p.path for one in new for h in _handles(one).values() for p in h.parts}
    table = changes.differences(*(_home_rows(lake, side, same) for side in (old, new)))
    who = pc.binary_join_element_wise(table["x_Cloud"], table["BillingAccountId"], "|")
    closed = pc.is_in(who, value_set=pa.array(sorted(invoiced_accounts(old)), pa.string()))
    source, period = at
    start = pa.array([parse_instant(period)] * len(table), pa.int64()).cast(INSTANT)
    facts = {"x_Source": pa.array([source] * len(table), pa.string()), "BillingPeriodStart": start, "x_Closed": closed}
    for name, column in facts.items():
        table = table.append_column(name, column)
    return table.select(list(DIFFERENCES.names)).cast(DIFFERENCES.arrow)


def _home_rows(lake: Lake, side: Sequence[InForce], left_out: Collection[str]) -> pa.Table:
    """Each charge once, with its delivery."""
    columns = sorted({"x_ChargeKey", "x_Occurrence", "x_IsHomeDay", *changes.ABOUT, *changes.MEASURES})
    tables = [narrow(CHARGES, columns).empty().append_column("x_Delivery", pa.array([], pa.string()))]
    for one in side:
        for handle in _handles(one).values():
            parts = tuple(part for part in handle.parts if part.path not in left_out)
            rows = lake.read(replace(handle, parts=parts), CHARGES, columns=columns)
            rows = rows.filter(rows["x_IsHomeDay"])
            tables.append(rows.append_column("x_Delivery", pa.array([one.delivery] * len(rows), pa.string())))
    return pa.concat_tables(tables)
