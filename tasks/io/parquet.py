"""Tables to Parquet bytes and back: the only writer of the lake's tables.

Equal rows give equal bytes, in whatever order and chunks they come: sorted by the table's unique key, no dictionary
arrays, no field comments, one write call, fixed row groups and compression. `created_by` holds the library's version,
so this holds within one locked environment. Knows no storage and no stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seedance.errors import SchemaError, StoreError
from seedance.schema import Table, conform
from seedance.shard import COMPRESSION, COMPRESSION_LEVEL, ROW_GROUP_ROWS, add_missing, bare


def to_bytes(table: pa.Table, spec: Table) -> bytes:
    """The rows as one Parquet file, sorted by the key with nulls last.

    Args:
        table: rows that meet `spec`, in any order and any chunks.
        spec: declaration of the table.

    Raises:
        SchemaError: the rows do not meet the declaration, or two rows have one key (their order would be chance).
    """
    rows = conform(table, spec, where=f"write of {spec.name}").combine_chunks()
    rows = _sorted(rows, spec)
    sink = pa.BufferOutputStream()
    pq.write_table(
        bare(rows, {b"seedance.table": spec.name.encode(), b"seedance.version": str(spec.version).encode()}),
        sink,
        row_group_size=ROW_GROUP_ROWS,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
    )
    return bytes(sink.getvalue().to_pybytes())


def from_bytes(data: bytes, spec: Table, *, where: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a file that `to_bytes` wrote, held to the declaration; nullable columns it predates are null.

    Args:
        data: the whole file.
        spec: declaration of the table that is expected.
        where: path, for messages.
        columns: read these only, in the order of the declaration; None reads all.

    Raises:
        StoreError: not a Parquet file, or damaged.
        SchemaError: another table or version, or the rows do not meet the declaration.
    """
    wanted = spec if columns is None else narrow(spec, columns)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        metadata = file.schema_arrow.metadata or {}
        _check_label(metadata, spec, where)
        present = set(file.schema_arrow.names)
        rows = file.read(columns=None if columns is None else [n for n in wanted.names if n in present])
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{where}: not a readable Parquet file: {error}.", url=where, path=where) from error
    return conform(add_missing(rows, wanted), wanted, where=where)


def narrow(spec: Table, columns: Sequence[str]) -> Table:
    """The declaration with these columns only, in its own order.

    Raises:
        SchemaError: a name that is not declared.
    """
    unknown = [name for name in columns if name not in spec.names]
    if unknown:
        raise SchemaError(
            f"{spec.name} has no column {', '.join(unknown)}. Expected names of the data dictionary.",
            table=spec.name,
            column=unknown[0],
            expected="a declared column",
            found="absent",
        )
    kept = tuple(c for c in spec.columns if c.name in columns)
    return Table(spec.name, spec.about, tuple(k for k in spec.key if k in columns), kept, spec.version)


def _check_label(metadata: dict[bytes, bytes], spec: Table, where: str) -> None:
    found = (metadata.get(b"seedance.table", b"?").decode(), metadata.get(b"seedance.version", b"?").decode())
    if found != (spec.name, str(spec.version)):
        raise SchemaError(
            f"{where}: expected {spec.name} version {spec.version}, found {found[0]} version {found[1]}.",
            table=spec.name,
            column=None,
            expected=f"{spec.name} version {spec.version}",
            found=f"{found[0]} version {found[1]}",
            where=where,
        )


def _sorted(rows: pa.Table, spec: Table) -> pa.Table:
    if rows.num_rows < 2 or not spec.key:
        return rows
    rising, _ = _neighbours(rows, spec)
    if _all(rising):
        return rows  # most tables come sorted, and telling is far cheaper than sorting
    rows = rows.take(pc.sort_indices(rows, sort_keys=[(k, "ascending") for k in spec.key])).combine_chunks()
    rising, same = _neighbours(rows, spec)
    if not _all(rising):
        count = pc.sum(same).as_py() or 0
        first = rows.slice(pc.index(same, True).as_py(), 1).select(list(spec.key)).to_pylist()[0]
        raise SchemaError(
            f"write of {spec.name}: {count:,} row(s) have the key of another row, first {first}. Expected a unique key "
            f"({', '.join(spec.key)}): without it the order of rows, and the file's bytes, would be chance.",
            table=spec.name,
            column=spec.key[0],
            expected="unique key",
            found=first,
            rows=count,
            where=f"write of {spec.name}",
        )
    return rows


def _neighbours(rows: pa.Table, spec: Table) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """For each pair of neighbours: is the first key less than the second, and are the two equal. Nulls are greatest."""
    count = rows.num_rows - 1
    less = same = None
    for name in spec.key:
        column = rows.column(name)
        one, two = column.slice(0, count), column.slice(1, count)
        gone_one, gone_two = pc.is_null(one), pc.is_null(two)
        equal = pc.or_(pc.fill_null(pc.equal(one, two), False), pc.and_(gone_one, gone_two))
        lower = pc.or_(pc.fill_null(pc.less(one, two), False), pc.and_(pc.invert(gone_one), gone_two))
        less = lower if same is None else pc.or_(less, pc.and_(same, lower))
        same = equal if same is None else pc.and_(same, equal)
    return less, same


def _all(values: pa.ChunkedArray) -> bool:
    return bool(pc.all(values).as_py())
