"""Rows of one node, hour and table to one Parquet shard named by its content, and back.

The footer says who wrote the shard and what it holds, so that a reader can judge it without its rows. Knows no storage
and no clock; what to do with a shard that is refused is the reader's business.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seedance.canonical import canonical
from seedance.errors import ShardError
from seedance.schema import INSTANT, Table, conform

FOOTER_KEY = b"seedance"
FOOTER_VERSION = 1
COMPRESSION = "zstd"
COMPRESSION_LEVEL = 3
ROW_GROUP_ROWS = 1 << 20

_NAME = re.compile(
    r"(?:^|/)(?P<table>[a-z0-9_]+)/date=(?P<day>\d{4}-\d\d-\d\d)/hour=(?P<hour>[01]\d|2[0-3])/"
    r"(?P<producer>[^/]+)-(?P<seq>\d+)-(?P<sha16>[0-9a-f]{16})\.parquet$"
)
_PRODUCER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Footer:
    """What a shard says about itself."""

    schema_version: int
    """Version of the table's declaration that the rows meet."""
    table: str
    """Name of the table."""
    producer: str
    """Who wrote it; the node's name, as in the shard's own name."""
    node: str
    """Host that the rows are about."""
    cloud: str | None
    """aws, azure, gcp, or the lower-case provider name; null when the host does not know."""
    instance_id: str | None
    """Instance in the form the bill uses; null when the host does not know."""
    instance_type: str | None
    """Instance type in the provider's words; null when the host does not know."""
    hour: str
    """Hour of the rows, UTC, YYYY-MM-DDTHH."""
    clock_offset_ns: int
    """Host clock minus true UTC, ns; 0 when it was not measured."""
    period_ns: int
    """Nominal sampling period, ns."""
    first_ns: int
    """First instant of the rows, ns UTC; the hour's start when there are none."""
    last_ns: int
    """Last instant of the rows, ns UTC; the hour's start when there are none."""
    rows: int
    """Rows in the shard."""


_TEXT_OR_NULL = {"cloud", "instance_id", "instance_type"}
_TEXT = {"table", "producer", "node", "hour"} | _TEXT_OR_NULL


@dataclass(frozen=True)
class ShardName:
    """What a shard's path says: table, UTC day and hour, producer, its sequence number, 16 hex digits of the sha256."""

    table: str
    day: date
    hour: int
    producer: str
    seq: int
    sha16: str

    @property
    def path(self) -> str:
        """`<table>/date=YYYY-MM-DD/hour=HH/<producer>-<seq>-<sha16>.parquet`."""
        return (
            f"{self.table}/date={self.day.isoformat()}/hour={self.hour:02d}/"
            f"{self.producer}-{self.seq}-{self.sha16}.parquet"
        )


def parse_name(path: str) -> ShardName:
    """The parts of a shard's name, from a path that ends with it.

    Raises:
        ShardError: the path is not a shard's; carries path and reason.
    """
    match = _NAME.search(path)
    reason = "expected <table>/date=YYYY-MM-DD/hour=HH/<producer>-<seq>-<sha16>.parquet"
    if match is None:
        raise ShardError(f"{path}: not the name of a shard: {reason}.", path=path, reason=reason)
    try:
        day = date.fromisoformat(match["day"])
    except ValueError as error:
        reason = f"{match['day']} is not a date"
        raise ShardError(f"{path}: not the name of a shard: {reason}.", path=path, reason=reason) from error
    return ShardName(match["table"], day, int(match["hour"]), match["producer"], int(match["seq"]), match["sha16"])


def content_sha16(data: bytes) -> str:
    """First 16 hex digits of the sha256 of a shard's bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def write_shard(
    table: pa.Table,
    spec: Table,
    *,
    producer: str,
    node: str,
    cloud: str | None,
    instance_id: str | None,
    instance_type: str | None,
    hour: str,
    seq: int,
    period_ns: int,
    clock_offset_ns: int = 0,
) -> tuple[str, bytes]:
    """One shard: its name below a drop folder, and its bytes. Equal rows give equal bytes in whatever order they come.

    Args:
        table: rows of one node and hour that meet `spec`.
        spec: declaration of the table.
        producer: who writes, [A-Za-z0-9._-]; the node's name.
        node: host that the rows are about.
        cloud, instance_id, instance_type: where the host runs, in the bill's words; None when it does not know.
        hour: UTC hour of the rows, YYYY-MM-DDTHH.
        seq: number of the shard among those of the producer, hour and table.
        period_ns: nominal sampling period, ns.
        clock_offset_ns: host clock minus true UTC, ns.

    Raises:
        SchemaError: the rows do not meet the declaration.
        ShardError: producer, hour or seq cannot stand in a name; carries path and reason.
    """
    start = _hour_start(hour)
    if not _PRODUCER.fullmatch(producer) or seq < 0:
        reason = f"producer {producer!r} or seq {seq} cannot stand in a file name"
        raise ShardError(f"shard of {spec.name} {hour}: {reason}.", path="", reason=reason)
    rows = conform(table, spec, where=f"shard of {producer} {hour}").combine_chunks()
    order = [*spec.key, *(c.name for c in spec.columns if c.name not in spec.key and not pa.types.is_nested(c.type))]
    rows = rows.take(pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in order]))
    first, last = _span(rows, spec, start)
    footer = Footer(
        spec.version,
        spec.name,
        producer,
        node,
        cloud,
        instance_id,
        instance_type,
        hour,
        clock_offset_ns,
        period_ns,
        first,
        last,
        rows.num_rows,
    )
    sink = pa.BufferOutputStream()
    pq.write_table(
        # Without field comments: a better comment must not change the bytes.
        bare(rows, {FOOTER_KEY: canonical(asdict(footer))}),
        sink,
        row_group_size=ROW_GROUP_ROWS,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        write_page_checksum=True,
    )
    data = sink.getvalue().to_pybytes()
    name = ShardName(spec.name, start.date(), start.hour, producer, seq, content_sha16(data))
    return name.path, data


def read_footer(data: bytes | str | Path) -> Footer:
    """The footer of a shard, from its bytes or from a local file, without reading its rows.

    Raises:
        ShardError: not Parquet, or no footer of ours in it; carries path and reason.
    """
    where = "shard" if isinstance(data, bytes) else str(data)
    return _footer(_open(data, where), where)


def read_shard(data: bytes, spec: Table, *, where: str) -> tuple[Footer, pa.Table]:
    """Footer and rows of a shard, held to the declaration; nullable columns it predates are null.

    Args:
        data: the whole file.
        spec: declaration of the table that is expected.
        where: path, for messages.

    Raises:
        ShardError: not Parquet, damaged, of another table or version, or another number of rows than the footer says.
        SchemaError: the rows do not meet the declaration.
    """
    file = _open(data, where)
    footer = _footer(file, where)
    if (footer.table, footer.schema_version) != (spec.name, spec.version):
        raise _refusal(
            where, f"expected {spec.name} version {spec.version}, found {footer.table} version {footer.schema_version}"
        )
    try:
        rows = file.read()
    except (pa.ArrowException, OSError) as error:
        raise _refusal(where, f"rows cannot be read: {error}") from error
    if rows.num_rows != footer.rows:
        raise _refusal(where, f"expected {footer.rows:,} rows as the footer says, found {rows.num_rows:,}")
    return footer, conform(add_missing(rows, spec), spec, where=where)


def add_missing(table: pa.Table, spec: Table) -> pa.Table:
    """The table with every nullable column that it lacks added as nulls: files older than an additive change."""
    for column in spec.columns:
        if column.null and column.name not in table.column_names:
            table = table.append_column(column.name, pa.nulls(table.num_rows, column.type))
    return table


def bare(table: pa.Table, metadata: dict[bytes, bytes]) -> pa.Table:
    """The same rows with this metadata on the table and none on its fields."""
    plain = [pa.field(f.name, f.type, f.nullable) for f in table.schema]
    return pa.table(table.columns, schema=pa.schema(plain, metadata))


def _open(data: bytes | str | Path, where: str) -> pq.ParquetFile:
    source = pa.BufferReader(data) if isinstance(data, bytes) else str(data)
    try:
        return pq.ParquetFile(source, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise _refusal(where, f"not a Parquet file: {error}") from error


def _footer(file: pq.ParquetFile, where: str) -> Footer:
    raw = (file.schema_arrow.metadata or {}).get(FOOTER_KEY)
    if raw is None:
        raise _refusal(where, "no footer: the Parquet metadata has no key 'seedance'")
    try:
        facts = json.loads(raw)
    except ValueError as error:
        raise _refusal(where, f"the footer is not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise _refusal(where, "the footer is not a JSON object")
    names = [f.name for f in fields(Footer)]
    missing = [name for name in names if name not in facts]
    if missing:
        raise _refusal(where, f"the footer lacks {', '.join(missing)}")
    for name in names:
        value = facts[name]
        fits = isinstance(value, str) if name in _TEXT else isinstance(value, int) and not isinstance(value, bool)
        if not fits and not (value is None and name in _TEXT_OR_NULL):
            raise _refusal(where, f"footer field {name}: {value!r} is not {'text' if name in _TEXT else 'an integer'}")
    # A field that this reader does not know comes from a newer producer, and adding one is allowed.
    return Footer(**{name: facts[name] for name in names})


def _span(rows: pa.Table, spec: Table, start: datetime) -> tuple[int, int]:
    """First and last instant of the rows in ns UTC, by the first column of the key that is an instant."""
    name = next((k for k in spec.key if spec[k].type == INSTANT), None)
    if name is None or not rows.num_rows:
        at = int(start.timestamp()) * 1_000_000_000
        return at, at
    ends = pc.min_max(rows.column(name).cast(pa.int64())).as_py()
    return int(ends["min"]), int(ends["max"])


def _hour_start(hour: str) -> datetime:
    try:
        return datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC)
    except ValueError as error:
        reason = f"hour {hour!r} is not of the form YYYY-MM-DDTHH"
        raise ShardError(f"shard: {reason}.", path="", reason=reason) from error


def _refusal(where: str, reason: str) -> ShardError:
    return ShardError(f"{where}: {reason}.", path=where, reason=reason)
