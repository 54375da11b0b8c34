"""Bytes of a bill file to rows as Arrow tables: CSV, gzipped CSV or Parquet, told by the bytes and never by the name.

Knows no charge, no storage and no clock.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tasks.core.focus_values import Place

GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
NULLS = ["", "NULL", "null"]
"""Bare words that mean null in text files; in quotes they are names, except empty text."""
BLOCK_BYTES = 16 << 20
BATCH_ROWS = 1 << 17


def suffix(data: bytes) -> str:
    """File name suffix for bytes: .parquet, .csv.gz or .csv, told by the bytes and not by a name."""
    return ".parquet" if data[:4] == PARQUET else ".csv.gz" if data[:2] == GZIP else ".csv"


def read_tables(data: bytes, place: Place) -> Iterator[tuple[Place, pa.Table]]:
    """Batches of a bill file, each with the number of its first row.

    Args:
        data: CSV, gzipped CSV or Parquet, told by its first bytes. Columns of CSV come as text, unquoted NULL and empty
            fields as null; columns of Parquet keep their Arrow types.
        place: source and file, for messages.

    Raises:
        DeliveryError: the file has no bytes, is truncated, or not readable. A header without rows gives no batch.
    """
    if not data:
        raise place.refuse(
            None, "a bill", "a file of 0 bytes", "An empty export is not a bill of zero: check the provider's export."
        )
    row = 1
    try:
        for table in _parquet(data) if data[:4] == PARQUET else _text(data, place):
            if len(table):
                yield Place(place.source, place.file, row), table
            row += len(table)
    except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        kind = {".parquet": "Parquet", ".csv.gz": "gzipped CSV", ".csv": "CSV"}[suffix(data)]
        raise place.refuse(
            None,
            f"readable {kind}",
            f"{type(error).__name__}: {str(error)[:300]}",
            "The file is damaged or truncated: copy it again, or export the period again.",
        ) from error


def _parquet(data: bytes) -> Iterator[pa.Table]:
    file = pq.ParquetFile(pa.BufferReader(data))
    for batch in file.iter_batches(batch_size=BATCH_ROWS):
        yield pa.Table.from_batches([batch])


def _text(data: bytes, place: Place) -> Iterator[pa.Table]:
    stream: Any = gzip.GzipFile(fileobj=io.BytesIO(data)) if data[:2] == GZIP else io.BytesIO(data)
    first = stream.readline().decode("utf-8-sig")
    stream.seek(0)
    names = next(csv.reader([first]), [])
    if len({n.strip().casefold() for n in names}) < len(names):
        again = next(n for n in names if [m.strip().casefold() for m in names].count(n.strip().casefold()) > 1)
        raise place.refuse(again, "each column once", "it twice", "Remove one of the two from the export.")
    reader = pacsv.open_csv(
        stream,
        read_options=pacsv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
        parse_options=pacsv.ParseOptions(newlines_in_values=True),
        convert_options=pacsv.ConvertOptions(
            column_types={n: pa.string() for n in names},
            default_column_type=pa.string(),
            null_values=NULLS,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    for batch in reader:
        yield pa.Table.from_batches([batch])
