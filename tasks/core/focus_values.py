"""Columns of a FOCUS export, as text or as Arrow types, to exact values; what does not parse is refused with its row.

Money and quantities become decimal(38, 12): text and decimals exactly, a double through the shortest decimal that reads
back to it, half-even beyond 12 digits. Instants become ns UTC. Missing is null. Knows no table, no file format, no disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seedance.schema import INSTANT, MONEY
from tasks.core import money
from tasks.errors import DeliveryError

PLAIN = r"^-?[0-9]{1,26}(?:\.[0-9]{1,12}0*)?$"
"""Decimals that fit as they are; everything else goes through Python's decimals."""
WHOLE_DIGITS = 26
NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
"""Legal numbers: no thousands sign, no leading plus; an exponent is legal. Source: FOCUS 1.2, Numeric Format."""
MOMENT = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})(?:[T ](\d{2}):(\d{2})(?::(\d{2})(?:\.(\d{1,9}))?)? ?(?:Z|z|UTC|([+-])(\d{2}):?(\d{2}))?)?",
    re.ASCII,
)
EXACT = Context(prec=1200)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
INT64 = 1 << 63
MOST_LEVELS = 64
"""Levels of a JSON object in a bill: real ones have one or two, and every reader stops somewhere."""


@dataclass(frozen=True)
class Place:
    """Where a batch of rows stands, for messages.

    Args:
        source: name of the bill source.
        file: path of the file below the source.
        first_row: number of the batch's first row in its file, from 1, the header not counted.
    """

    source: str
    file: str
    first_row: int = 1

    def refuse(
        self, column: str | None, expected: str, found: object, then: str, *, row: int | None = None
    ) -> DeliveryError:
        """The error that refuses the delivery; `row` counts from 0 within the batch."""
        number = None if row is None else self.first_row + row
        at = f", row {number:,} (header not counted)" if number is not None else ""
        named = f"column {column}: " if column else ""
        return DeliveryError(
            f"bill source {self.source}, {self.file}{at}: {named}expected {expected}, found {found}. "
            f"The delivery is refused whole and the former one stands. {then}",
            source=self.source,
            path=self.file,
            file=self.file,
            row=number,
            column=column,
            expected=expected,
            found=found,
            reason=f"{named}expected {expected}, found {found}{at}",
        )


def one_array(values: pa.ChunkedArray | pa.Array, column: str, place: Place) -> pa.Array:
    """The column as a single array, dictionaries decoded.

    Raises:
        DeliveryError: text that is not UTF-8; Parquet files hold whatever their writer put there.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
        if isinstance(values, pa.ChunkedArray):  # no chunks at all
            values = pa.array([], values.type)
    array = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    try:
        array.validate(full=True)
    except pa.ArrowException as error:
        raise _not_text(array, str(error), column, place) from error
    return array


def _not_text(array: pa.Array, problem: str, column: str, place: Place) -> DeliveryError:
    row = next((i for i, value in enumerate(array) if not _decodes(value)), None)
    found = "bytes that are not" if row is not None else problem[:200]
    return place.refuse(column, "UTF-8 text", found, "Write the column as UTF-8 text.", row=row)


def _decodes(value: pa.Scalar) -> bool:
    try:
        found = value.as_py()
        if isinstance(found, bytes):
            found.decode()
    except UnicodeDecodeError:
        return False
    return True


def text_column(values: pa.ChunkedArray | pa.Array, column: str, place: Place) -> pa.Array:
    """Text; empty text is null. Whole numbers, decimals and instants become their text; doubles are no identifiers."""
    array = one_array(values, column, place)
    if pa.types.is_nested(array.type):
        return json_column(array, column, place)
    if pa.types.is_floating(array.type) and array.null_count < len(array):
        found = next(v for v in array.to_pylist() if v is not None)
        raise place.refuse(column, "text", f"{array.type} {found!r}", "Export the column as text: doubles lose digits.")
    if array.type != pa.string():
        try:
            array = array.cast(pa.string())
        except pa.ArrowException as error:
            raise _not_text(array, str(array.type), column, place) from error
    return pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.string()), array)


def map_distinct(array: pa.Array, convert: Callable[[Any], Any], type: pa.DataType) -> pa.Array:  # noqa: A002
    """Each value through `convert`, called once per distinct value; null stays null."""
    encoded = array.dictionary_encode()
    converted = pa.array([None if v is None else convert(v) for v in encoded.dictionary.to_pylist()], type)
    return converted.take(encoded.indices)


def first_row(array: pa.Array, value: Any) -> int:
    """Row of the first occurrence of a value."""
    return int(pc.index(array, pa.scalar(value, array.type)).as_py())


def decimal_column(
    values: pa.ChunkedArray | pa.Array, column: str, place: Place
) -> tuple[pa.Array, list[tuple[int, Decimal]]]:
    """A column of money or quantities, decimal(38, 12), and what half-even rounding took away.

    Returns:
        The values, and (row, raw − stored) of every row where the two differ.

    Raises:
        DeliveryError: a value is no number, is not finite, or needs more than 26 digits before the point.
    """
    array = one_array(values, column, place)
    if pa.types.is_nested(array.type) or pa.types.is_temporal(array.type) or pa.types.is_boolean(array.type):
        raise place.refuse(column, "a number", str(array.type), "Export the column as decimal or as text.")
    if pa.types.is_decimal(array.type) and _fits(array.type):
        return array.cast(MONEY), []
    text = array.cast(pa.string())
    text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    plain = pc.match_substring_regex(text, PLAIN)
    trimmed = pc.replace_substring_regex(text, r"(\.[0-9]{12})0+$", r"\1")
    stored = pc.cast(pc.if_else(plain, trimmed, pa.scalar(None, pa.string())), MONEY)
    odd = np.flatnonzero(np.asarray(pc.fill_null(pc.invert(plain), False)))
    if not len(odd):
        return stored, []
    lost: list[tuple[int, Decimal]] = []
    replaced: list[Decimal] = []
    for row, raw in zip(odd.tolist(), text.take(pa.array(odd)).to_pylist(), strict=True):
        value, rest = _quantise(raw, column, place, row)
        replaced.append(value)
        if rest:
            lost.append((row, rest))
    mask = np.zeros(len(text), bool)
    mask[odd] = True
    return pc.replace_with_mask(stored, pa.array(mask), pa.array(replaced, MONEY)), lost


def _fits(kind: pa.DataType) -> bool:
    return bool(kind.scale <= money.DIGITS and kind.precision - kind.scale <= WHOLE_DIGITS)


def _quantise(raw: str, column: str, place: Place, row: int) -> tuple[Decimal, Decimal]:
    if not NUMBER.fullmatch(raw):
        raise place.refuse(
            column,
            "a decimal such as 1234.5 or 35.2E-7",
            repr(raw),
            "Export it without thousands separators, plus signs or words.",
            row=row,
        )
    units = money.units(raw)
    if abs(units) >= 10**38:
        raise place.refuse(column, "at most 26 digits before the point", repr(raw), "Check the export's unit.", row=row)
    value = money.decimal(units)
    return value, EXACT.subtract(Decimal(raw), value)


def instant_column(values: pa.ChunkedArray | pa.Array, column: str, place: Place) -> pa.Array:
    """Instants in ns UTC, from text (ISO 8601; no zone means UTC), timestamps of any unit, or dates.

    Raises:
        DeliveryError: a value is no instant, or lies outside 1677 to 2262.
    """
    array = one_array(values, column, place)
    kind = array.type
    if pa.types.is_null(kind):
        return pa.nulls(len(array), INSTANT)
    if pa.types.is_date(kind):
        array = array.cast(pa.timestamp("ms"))
        kind = array.type
    if pa.types.is_timestamp(kind):
        try:
            return array.cast(pa.timestamp("ns", tz=kind.tz)).cast(pa.int64()).cast(INSTANT)
        except pa.ArrowInvalid as error:
            raise place.refuse(column, "instants from 1678 to 2261", str(error), "Check the export's dates.") from error
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise place.refuse(column, "timestamps or ISO 8601 text", str(kind), "Export the column as timestamp or text.")

    def convert(raw: str) -> int | None:
        if raw == "":
            return None
        ns = parse_instant(raw)
        if ns is None:
            raise place.refuse(
                column,
                "an instant such as 2024-09-01T00:00:00Z",
                repr(raw),
                "Export times in ISO 8601, UTC.",
                row=first_row(array, raw),
            )
        return ns

    return map_distinct(array, convert, pa.int64()).cast(INSTANT)


def parse_instant(raw: str) -> int | None:
    """Integer ns UTC of ISO 8601 text (with a blank or T, a zone or none), or None. No zone means UTC."""
    match = MOMENT.fullmatch(raw.strip())
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(g or 0) for g in match.groups()[:6])
    try:
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    fraction, sign, off_hours, off_minutes = match.groups()[6:]
    offset = (int(off_hours or 0) * 3600 + int(off_minutes or 0) * 60) * (-1 if sign == "-" else 1)
    seconds = (moment - EPOCH) // timedelta(seconds=1) - offset
    ns = seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
    return ns if -INT64 < ns < INT64 else None


def enum_column(values: pa.ChunkedArray | pa.Array, column: str, allowed: Sequence[str], place: Place) -> pa.Array:
    """A closed set of values, read caseless and spelled as FOCUS spells it.

    Raises:
        DeliveryError: a value is not in the set.
    """
    array = text_column(values, column, place)
    spelled = {a.casefold(): a for a in allowed}

    def convert(raw: str) -> str:
        found = spelled.get(raw.strip().casefold())
        if found is None:
            raise place.refuse(
                column,
                "one of " + ", ".join(allowed),
                repr(raw),
                "An unknown kind of charge is never guessed: map it in the export, or teach the reader.",
                row=first_row(array, raw),
            )
        return found

    return map_distinct(array, convert, pa.string())


class _Number(str):
    """The text of a JSON number, kept as written."""


def canonical_json(value: Any, levels: int = MOST_LEVELS) -> str:
    """JSON text with sorted keys, no spaces, numbers as they were written.

    Raises:
        ValueError: more levels than that, or text that UTF-8 cannot hold.
    """
    if isinstance(value, dict | list | tuple) and not levels:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    if isinstance(value, dict):
        inner = (f"{_quote(str(k))}:{canonical_json(value[k], levels - 1)}" for k in sorted(value, key=str))
        return "{" + ",".join(inner) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(canonical_json(v, levels - 1) for v in value) + "]"
    if isinstance(value, _Number):
        return str(value)
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    return _quote(value if isinstance(value, str) else str(value))


def _quote(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a surrogate pair, {text[error.start]!a}") from error
    return json.dumps(text, ensure_ascii=False)


def json_column(values: pa.ChunkedArray | pa.Array, column: str, place: Place) -> pa.Array:
    """JSON objects as canonical text (sorted keys), from JSON text or from Arrow maps, structs and lists.

    Braces that an export leaves out are added. JSON null and empty text are null. Repeated records of key and value, as
    BigQuery exports labels, are an object as well; a key that comes more than once has the array of its values.

    Raises:
        DeliveryError: a value is no JSON object, has more than MOST_LEVELS levels, or half a surrogate pair.
    """
    array = one_array(values, column, place)

    if pa.types.is_nested(array.type):
        found = []
        for row, raw in enumerate(array.to_pylist()):
            value = _paired(_plain(raw, array.type))
            try:
                found.append(None if value is None else canonical_json(value))
            except (ValueError, RecursionError) as error:
                raise _unwritable(error, column, place, row) from error
        return pa.array(found, pa.string())
    array = text_column(array, column, place)

    def convert(raw: str) -> str | None:
        body = raw.strip()
        if body[:1] == '"':
            body = "{" + body + "}"
        try:
            value = json.loads(body, parse_float=_Number, parse_int=_Number)
        except RecursionError as error:
            raise _unwritable(error, column, place, first_row(array, raw)) from error
        except ValueError:
            value = body
        if value is None:
            return None
        if not isinstance(value, dict):
            row = first_row(array, raw)
            raise place.refuse(column, "a JSON object", repr(raw[:80]), "Export it as JSON object or map.", row=row)
        try:
            return canonical_json(value)
        except ValueError as error:
            raise _unwritable(error, column, place, first_row(array, raw)) from error

    return map_distinct(array, convert, pa.string())


def _unwritable(error: Exception, column: str, place: Place, row: int) -> DeliveryError:
    return place.refuse(
        column,
        f"a JSON object of Unicode text in at most {MOST_LEVELS} levels",
        error if isinstance(error, ValueError) else "many more levels",
        "Correct the value, or leave the column out of the export.",
        row=row,
    )


def _paired(value: Any) -> Any:
    """Records of key and value as an object, anything else as it is; no records are no object."""
    if not isinstance(value, list) or not all(isinstance(one, dict) and "key" in one for one in value):
        return value
    found: dict[str, list[str]] = {}
    for one in value:
        found.setdefault(str(one["key"]), []).append(str(one.get("value", "")))
    return {key: texts[0] if len(texts) == 1 else sorted(texts) for key, texts in found.items()} or None


def _plain(value: Any, kind: pa.DataType) -> Any:
    """An Arrow map, struct or list as dictionaries and lists; members of a struct that are null are absent."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {k: _plain(v, kind.item_type) for k, v in value}
    if pa.types.is_struct(kind):
        fields = {f.name: f.type for f in kind}
        return {k: _plain(v, fields[k]) for k, v in value.items() if v is not None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_plain(v, kind.value_type) for v in value]
    return value
