"""How far a table is from its contract: one row a declared column, with the number of values that break each promise.

Tables and their declarations in; counts out, small whatever the table's size, so that expectations run on them in no time.
Knows no disk, no clock, no expectation library. Source: the declarations in `schemas/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from seedance.schema import Column, Table

PROMISES = ("nulls", "below_min", "above_max", "outside_set", "repeated_keys")
"""What a contract promises to be zero; null in a row whose column promises nothing of the kind."""


def violations(table: pa.Table, spec: Table) -> list[dict[str, Any]]:
    """Counts of broken promises.

    Args:
        table: rows with at least the declared columns.
        spec: their contract.

    Returns:
        A row a column and one for the key: table, column, rows, each of PROMISES (a count, or None where the contract says
        nothing), and sample, the first offending value as text.
    """
    rows = [_column(table[c.name], c, spec.name) for c in spec.columns]
    return [*rows, _key(table, spec)]


def _column(values: pa.ChunkedArray, column: Column, table: str) -> dict[str, Any]:
    counts: dict[str, Any] = dict.fromkeys(PROMISES)
    sample = None
    if not column.null:
        counts["nulls"] = values.null_count
        sample = "null" if values.null_count else None
    tests = []
    if column.min is not None:
        tests.append(("below_min", pc.less(values, pa.scalar(column.min, column.type))))
    if column.max is not None:
        tests.append(("above_max", pc.greater(values, pa.scalar(column.max, column.type))))
    if column.values is not None:
        known = pc.is_in(values, value_set=pa.array(column.values, column.type))
        tests.append(("outside_set", pc.and_(values.is_valid(), pc.invert(known))))
    for name, bad in tests:
        counts[name] = pc.sum(bad).as_py() or 0
        if counts[name] and sample is None:
            sample = repr(values.filter(bad)[0].as_py())
    return {"table": table, "column": column.name, "rows": len(values), **counts, "sample": sample}


def _key(table: pa.Table, spec: Table) -> dict[str, Any]:
    counts: dict[str, Any] = dict.fromkeys(PROMISES)
    groups = table.select(list(spec.key)).group_by(list(spec.key), use_threads=False).aggregate([([], "count_all")])
    counts["repeated_keys"] = len(table) - len(groups)
    again = groups.filter(pc.greater(groups["count_all"], 1))
    sample = repr({k: str(v) for k, v in again.slice(0, 1).to_pylist()[0].items()}) if len(again) else None
    return {"table": spec.name, "column": "(key)", "rows": len(table), **counts, "sample": sample}


def together(tables: Iterable[tuple[pa.Table, Table]]) -> list[dict[str, Any]]:
    """`violations` of several tables, one list."""
    return [row for table, spec in tables for row in violations(table, spec)]


def told(row: Mapping[str, Any]) -> str:
    """A row of `violations` that breaks something, for people."""
    broken = ", ".join(f"{row[p]:,} {p.replace('_', ' ')}" for p in PROMISES if row[p])
    return f"{row['table']}.{row['column']}: {broken} in {row['rows']:,} rows, first {row['sample']}"
