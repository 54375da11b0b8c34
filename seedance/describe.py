"""A declaration in words: what the command line and the data dictionary say about a column. Knows no layout."""

from __future__ import annotations

from seedance.schema import Column, Table

HEAD = ("column", "type", "unit", "null", "allowed", "meaning", "source")


def allowed(column: Column) -> str:
    """Values a column may hold, in words; empty when the type says it all."""
    if column.values is not None:
        return ", ".join(column.values)
    if column.min is not None and column.max is not None:
        return f"{column.min:,} to {column.max:,}"
    if column.min is not None:
        return f"from {column.min:,}"
    return "" if column.max is None else f"up to {column.max:,}"


def describe(column: Column) -> tuple[str, ...]:
    """One column as a row of text, in the order of HEAD."""
    kind = str(column.type).replace("timestamp[ns, tz=UTC]", "timestamp[ns, UTC]")
    null = "null" if column.null else ""
    return column.name, kind, column.unit or "", null, allowed(column), column.about, column.source


def headline(spec: Table) -> str:
    """What one row of a table is, with its version."""
    return f"{spec.name}, version {spec.version}: {spec.about}"
