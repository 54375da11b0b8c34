"""Segments of a spool to Arrow tables that meet their declarations; what does not is refused row by row, with a reason.

Reads what `seedance.probe.spool` wrote, and what a killed writer or a full disk left of it. One bad row costs itself and no
other. Rows are taken in the order of segments and lines, so the same segments give the same tables. Knows no storage but
the files that it is given, and no clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pyarrow as pa

from seedance.durations import HOUR_NS
from seedance.probe.spool import FORMAT, SEGMENT, clean_node, clean_text, hour_of, hour_text
from seedance.schema import DEVICE_SAMPLES, INSTANT, LABELS, PROCESS_SAMPLES, TELEMETRY, Column, Table

CHUNK_ROWS = 4096
"""Rows that are held as Python objects at a time."""
_READINGS = (DEVICE_SAMPLES.name, PROCESS_SAMPLES.name)
"""Their rows name the node, and one of another node would have the whole shard refused."""


@dataclass(frozen=True)
class Header:
    """What a segment says about its node; see `seedance.probe.spool.Spool`."""

    node: str
    cloud: str | None
    instance_id: str | None
    instance_type: str | None
    period_ns: int
    clock_offset_ns: int


@dataclass(frozen=True)
class Refusal:
    """One row that does not go."""

    segment: str
    """Name of the segment."""
    line: int
    """Line in it, from 1."""
    reason: str
    """What was expected and found."""
    text: str
    """The line as it was found; bytes that are no UTF-8 spelled out."""


@dataclass
class Group:
    """Rows of one node, hour and table."""

    spec: Table
    hour: str
    table: pa.Table
    origins: list[tuple[str, int]]
    """Segment and line of each row."""

    def refuse(self, rows: Iterable[int], reason: str) -> list[Refusal]:
        """Refusals of these rows, by their numbers."""
        made = []
        for number in rows:
            row = self.table.slice(number, 1)
            plain = {n: _plain(row.column(n)) for n in row.column_names}
            text = json.dumps([self.spec.name, plain], separators=(",", ":"), default=str)
            made.append(Refusal(*self.origins[number], reason, text))
        return made


@dataclass
class Read:
    """What segments hold."""

    groups: dict[tuple[str, str, str], Group] = field(default_factory=dict)
    """By node, hour and name of the table, in that order."""
    headers: dict[tuple[str, str], Header] = field(default_factory=dict)
    """By node and hour; of several, the one that knows most about its machine, then the last by name."""
    refused: list[Refusal] = field(default_factory=list)
    torn_lines: int = 0
    """Lines without an end, or with two ends in one: a writer was killed, or its disk was full."""
    lost_rows: int = 0
    """Rows that writers say they lost before they could write them."""


Check = Callable[[object], Any]
"""Gives a value as Arrow takes it, or raises why it is none of its column's."""


class _Wrong(ValueError):
    """Why a row is refused."""


def read_segments(paths: Iterable[Path]) -> Read:
    """Everything in these segments, sorted by name.

    Raises:
        OSError: a segment cannot be read.
    """
    read = Read()
    parts: dict[tuple[str, str, str], _Rows] = {}
    for path in sorted(paths, key=lambda p: p.name):
        name = SEGMENT.fullmatch(path.name)
        if name is not None:
            _read_segment(path, name["hour"], read, parts)
    for key in sorted(parts):
        group = parts[key].group(key[1])
        if group.table.num_rows:
            read.groups[key] = _once(group, read)
    return read


def fit(spec: Table, row: object, hour: str) -> dict[str, Any]:
    """The row as Arrow takes it.

    Raises:
        ValueError: it does not meet the declaration or lies outside the hour; says which column, expected and found.
    """
    if not isinstance(row, dict):
        raise _Wrong(f"expected an object, found {_found(row)}")
    checks = _CHECKS[spec.name]
    if not row.keys() <= checks.keys():
        unknown = next(name for name in row if name not in checks)
        raise _Wrong(f"unknown column {unknown!r:.80}: expected those of {spec.name} version {spec.version}")
    fitted = {}
    for name, check in checks.items():
        value = row.get(name)
        if value is None:
            if not spec[name].null:
                raise _Wrong(f"{name}: expected a value, found none")
        else:
            value = check(value)
        fitted[name] = value
    found = hour_of(spec.name, row)
    if found is None or hour_text(found) != hour:
        raise _Wrong(f"expected an instant in the hour {hour}, found {'none' if found is None else hour_text(found)}")
    return fitted


class _Rows:
    """Collects rows of one node, hour and table."""

    def __init__(self, spec: Table) -> None:
        self.spec = spec
        self._pending: list[dict[str, Any]] = []
        self._chunks: list[pa.Table] = []
        self._origins: list[tuple[str, int]] = []

    def add(self, row: dict[str, Any], segment: str, line: int) -> None:
        self._pending.append(row)
        self._origins.append((segment, line))
        if len(self._pending) >= CHUNK_ROWS:
            self._flush()

    def group(self, hour: str) -> Group:
        self._flush()
        table = pa.concat_tables(self._chunks) if self._chunks else self.spec.empty()
        return Group(self.spec, hour, table, self._origins)

    def _flush(self) -> None:
        if self._pending:
            self._chunks.append(pa.Table.from_pylist(self._pending, schema=self.spec.arrow))
            self._pending = []


def _read_segment(path: Path, hour: str, read: Read, parts: dict[tuple[str, str, str], _Rows]) -> None:
    header: Header | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                read.torn_lines += 1
                continue
            if not line.strip():
                continue
            try:
                value = _parse(line)
                if number == 1:
                    header = _header(value)
                    known = read.headers.get((header.node, hour))
                    if known is None or _knowledge(header) >= _knowledge(known):
                        read.headers[header.node, hour] = header
                    continue
                if header is None:
                    raise _Wrong("the segment has no header")
                if isinstance(value, dict) and isinstance(value.get("lost_rows"), int):
                    read.lost_rows += value["lost_rows"]
                    continue
                table, row = _pair(value)
                fitted = fit(TELEMETRY[table], row, hour)
                if table in _READINGS and fitted["node"] != header.node:
                    raise _Wrong(f"node: expected {header.node}, found {_found(fitted['node'])}")
            except _Torn:
                read.torn_lines += 1
                read.refused.append(Refusal(path.name, number, "a line that is no JSON", _spelled(line)))
            except _Wrong as error:
                read.refused.append(Refusal(path.name, number, str(error), _spelled(line)))
            else:
                parts.setdefault((header.node, hour, table), _Rows(TELEMETRY[table])).add(fitted, path.name, number)


class _Torn(ValueError):
    """A line that is no JSON."""


def _parse(line: bytes) -> object:
    try:
        # Decimals as they are written: a float would change them.
        return json.loads(line, parse_float=Decimal, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _Torn(str(error)) from error


def _no_number(text: str) -> Decimal:
    return Decimal(text)  # NaN and infinities: each column says what it thinks of them


def _pair(value: object) -> tuple[str, object]:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise _Wrong(f"expected [table, row], found {_found(value)}")
    if value[0] not in TELEMETRY:
        raise _Wrong(f"unknown table {value[0]!r:.80}: expected one of {', '.join(TELEMETRY)}")
    return value[0], value[1]


def _header(value: object) -> Header:
    if not isinstance(value, dict) or value.get("seedance_spool") != FORMAT:
        raise _Wrong(f"expected a header of format {FORMAT}, found {_found(value)}")
    node, period_ns, offset_ns = value.get("node"), value.get("period_ns"), value.get("clock_offset_ns")
    if not isinstance(node, str) or clean_node(node) != node:
        raise _Wrong(f"header: expected a node's name, found {_found(node)}")
    if not isinstance(period_ns, int) or not 0 <= period_ns <= HOUR_NS:
        raise _Wrong(f"header: expected period_ns from 0 to {HOUR_NS:,} ns, found {_found(period_ns)}")
    if not isinstance(offset_ns, int) or not -(2**63) <= offset_ns < 2**63:
        raise _Wrong(f"header: expected clock_offset_ns of 64 bits, found {_found(offset_ns)}")
    cloud, instance_id, instance_type = (_word(value, name) for name in ("cloud", "instance_id", "instance_type"))
    return Header(node, cloud, instance_id, instance_type, period_ns, offset_ns)


def _word(header: dict[str, Any], name: str) -> str | None:
    word = header.get(name)
    if word is not None and not isinstance(word, str):
        raise _Wrong(f"header: expected {name} as text or null, found {_found(word)}")
    return clean_text(word)


def _knowledge(header: Header) -> int:
    return sum(fact is not None for fact in (header.cloud, header.instance_id, header.instance_type))


def _text(column: Column) -> Check:
    def check(value: object) -> str:
        if not isinstance(value, str):
            raise _unfit(column, "text", value)
        if column.values is not None and value not in column.values:
            raise _unfit(column, f"one of {', '.join(column.values)}", value)
        return value if value.isascii() else clean_text(value) or ""

    return check


def _whole(column: Column) -> Check:
    bits = 64 if column.type == INSTANT else column.type.bit_width
    low = -(2 ** (bits - 1)) if column.min is None else column.min
    high = 2 ** (bits - 1) - 1 if column.max is None else column.max

    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _unfit(column, "an integer", value)
        if not low <= value <= high:
            raise _unfit(column, f"{low:,} to {high:,} {column.unit or ''}".rstrip(), value)
        return value

    return check


def _decimal(column: Column) -> Check:
    def check(value: object) -> Decimal:
        """A decimal of the column's digits, the last of them rounded half to even."""
        if isinstance(value, bool) or not isinstance(value, (str, int, Decimal)):
            raise _unfit(column, "a decimal", value)
        try:
            number = Decimal(value)
            if number.is_finite():
                number = number.quantize(Decimal(1).scaleb(-column.type.scale), ROUND_HALF_EVEN)
        except (InvalidOperation, ValueError) as error:
            raise _unfit(column, str(column.type), value) from error
        if not number.is_finite() or len(number.as_tuple().digits) > column.type.precision:
            raise _unfit(column, str(column.type), value)
        return number

    return check


def _labels(column: Column) -> Check:
    def check(value: object) -> list[tuple[str, str]]:
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list):
            raise _unfit(column, "labels", value)
        labels: dict[str, str] = {}
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(x, str) for x in pair):
                raise _unfit(column, "labels of text to text", value)
            labels[clean_text(pair[0]) or ""] = clean_text(pair[1]) or ""
        return sorted(labels.items())

    return check


def _check_of(column: Column) -> Check:
    if column.type == LABELS:
        return _labels(column)
    if pa.types.is_string(column.type):
        return _text(column)
    if pa.types.is_decimal(column.type):
        return _decimal(column)
    return _whole(column)


_CHECKS = {spec.name: {column.name: _check_of(column) for column in spec.columns} for spec in TELEMETRY.values()}


def _once(group: Group, read: Read) -> Group:
    """The rows whose key is not that of a row before; one repeated key and collect would refuse the whole shard."""
    table = group.table.select(group.spec.key)
    table = table.append_column("row", pa.array(range(table.num_rows), pa.int64()))
    first = table.group_by(list(group.spec.key), use_threads=False).aggregate([("row", "min")])
    if first.num_rows == table.num_rows:
        return group
    keep = sorted(first.column("row_min").to_pylist())
    again = sorted({*range(table.num_rows)}.difference(keep))
    reason = f"repeats the key ({', '.join(group.spec.key)}) of a row before: expected each row once"
    read.refused += group.refuse(again, reason)
    return Group(group.spec, group.hour, group.table.take(pa.array(keep)), [group.origins[i] for i in keep])


def _unfit(column: Column, expected: str, found: object) -> _Wrong:
    return _Wrong(f"{column.name}: expected {expected}, found {_found(found)}")


def _found(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else f'{text[:77]}...'}"


def _spelled(line: bytes) -> str:
    return line.rstrip(b"\n").decode("utf-8", "backslashreplace")


def _plain(values: pa.ChunkedArray) -> Any:
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    return values[0].as_py()
