"""Arrow columns to integer arrays and back, groups and sums: the vector tools of the reduction.

Groups are numbered in the order of their key (code points of UTF-8, numbers as numbers, nulls last), so whatever follows
from a group's number does not depend on the order of rows. Knows no telemetry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seedance.schema import COUNT, Column, Table

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Wide = npt.NDArray[np.int64] | npt.NDArray[np.object_]
"""int64, or Python integers where int64 could be left."""
Columns = dict[str, Ints]
"""Equal-length integer columns by name."""

UNKNOWN = -1
"""Stands for null in columns that hold no negative values."""


def flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks or [pa.array([], whole.type)])


def ints(column: pa.ChunkedArray | pa.Array, null: int = UNKNOWN) -> Ints:
    """Integers or instants as int64, shape (n,); nulls as `null`."""
    array = flat(column)
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    if array.null_count:
        array = pc.fill_null(array, pa.scalar(null, array.type))
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def order_codes(column: pa.ChunkedArray | pa.Array) -> tuple[Ints, int]:
    """A number per row in the order of its value, and how many numbers there can be; null is the greatest."""
    array = flat(column)
    if pa.types.is_integer(array.type) or pa.types.is_timestamp(array.type):
        values = ints(array, 0)
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        if high - low >= 1 << 62:
            distinct, values = np.unique(values, return_inverse=True)
            low, high = 0, len(distinct)
        codes = values - low
        if array.null_count:
            codes = np.where(np.asarray(array.is_valid()), codes, high - low + 1)
        return codes.astype(np.int64), high - low + 2
    coded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    words = coded.dictionary
    rank = np.empty(len(words) + 1, np.int64)
    # Unified dictionaries have no value twice; if one had, equal text would still get one number.
    distinct = pc.unique(words).sort()
    rank[:-1] = ints(pc.index_in(words, value_set=distinct))
    rank[-1] = len(distinct)
    return rank[ints(coded.indices, len(words))], len(distinct) + 1


def number_groups(columns: Iterable[pa.ChunkedArray | pa.Array]) -> tuple[Ints, Ints]:
    """Group of each row, numbered in the order of the key, and the first row of each group."""
    numbers: Ints | None = None
    size = 1
    for column in columns:
        codes, width = order_codes(column)
        if numbers is None:
            numbers, size = codes, width
            continue
        if size * width >= 1 << 62:
            distinct, numbers = np.unique(numbers, return_inverse=True)
            size = len(distinct)
            if size * width >= 1 << 62:
                values, codes = np.unique(codes, return_inverse=True)
                width = len(values)
        numbers = numbers * width + codes
        size *= width
    if numbers is None or len(numbers) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    return group.astype(np.int64), first.astype(np.int64)


def all_distinct(columns: Iterable[pa.ChunkedArray | pa.Array]) -> bool:
    """Whether no two rows are equal in all the columns; none may hold nulls. Much cheaper than to number the groups."""
    numbers: Ints | None = None
    size = 1
    for column in columns:
        array = flat(column)
        if not pa.types.is_integer(array.type):
            array = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
            codes, width = ints(array.indices), len(array.dictionary)
        else:
            codes = ints(array)
            low = int(codes.min()) if len(codes) else 0
            codes, width = codes - low, (int(codes.max()) - low + 1 if len(codes) else 1)
        if size * width >= 1 << 62:
            return False
        numbers = codes if numbers is None else numbers * width + codes
        size *= max(width, 1)
    return numbers is None or len(numbers) < 2 or bool(np.diff(np.sort(numbers)).all())


def match_groups(left: pa.Table, right: pa.Table, keys: Sequence[str]) -> tuple[Ints, Ints, pa.Table]:
    """Common group numbers of two tables' rows, and the keys of the groups in order."""
    both = pa.concat_tables([plain(left.select(keys)), plain(right.select(keys))])
    group, first = number_groups(both.columns)
    return group[: left.num_rows], group[left.num_rows :], both.take(pa.array(first))


def plain(table: pa.Table) -> pa.Table:
    """The table without dictionaries and field comments, so that tables of any origin can be put together."""
    columns = [c.cast(c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    return pa.table(columns, names=table.column_names)


def sums(group: Ints, size: int, values: Ints) -> Ints:
    """Sum of the values of each group, shape (size,)."""
    total = np.zeros(size, np.int64)
    np.add.at(total, group, values)
    return total


def offsets(group: Ints, size: int) -> Ints:
    """Where each group's rows begin, for rows sorted by group; shape (size + 1,)."""
    return np.searchsorted(group, np.arange(size + 1)).astype(np.int64)


def expand(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Every i of begin[k] <= i < end[k], and its k."""
    count = end - begin
    owner = np.repeat(np.arange(len(begin), dtype=np.int64), count)
    place = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    return begin[owner] + place, owner


def pick(columns: Mapping[str, Ints], index: Ints | Flags) -> Columns:
    """These rows of each column."""
    return {name: values[index] for name, values in columns.items()}


def join(*parts: Mapping[str, Ints]) -> Columns:
    """Rows of several sets of columns, one after the other; a column that one lacks is 0 there."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    sizes = [len(next(iter(part.values()))) if part else 0 for part in parts]
    return {
        name: np.concatenate([part.get(name, np.zeros(n, np.int64)) for part, n in zip(parts, sizes, strict=True)])
        for name in names
    }


def fold(columns: Columns, keys: Sequence[str]) -> Columns:
    """Rows with equal keys added up, in the order of the keys."""
    if not len(columns[keys[0]]):
        return columns
    order = np.lexsort([columns[k] for k in reversed(keys)])
    sorted_ = pick(columns, order)
    change = np.zeros(len(order), bool)
    change[0] = True
    for k in keys:
        change[1:] |= sorted_[k][1:] != sorted_[k][:-1]
    start = np.flatnonzero(change)
    return {name: values[start] if name in keys else np.add.reduceat(values, start) for name, values in sorted_.items()}


def merge_rows(table: pa.Table, spec: Table, greatest: Sequence[str] = ()) -> pa.Table:
    """Rows with the same key made one, in the order of the key.

    Summed columns add up, those of `greatest` keep their greatest value, others their least.

    Raises:
        OverflowError: a sum of an int64 column passes int64.
    """
    table = plain(table.select(spec.names))
    group, first = number_groups(table.column(k) for k in spec.key)
    order = np.argsort(group, kind="stable")
    rows = table.take(pa.array(order)).combine_chunks()
    if len(first) < len(group):
        start = np.flatnonzero(np.diff(group[order], prepend=-1))
        columns = [
            values.take(pa.array(start)) if c.name in spec.key else _merged(values, c, start, c.name in greatest)
            for c, values in zip(spec.columns, rows.columns, strict=True)
        ]
        rows = pa.table(columns, names=list(spec.names))
    return pa.table([flat(c) for c in rows.cast(spec.arrow).columns], schema=spec.arrow)


def _merged(values: pa.ChunkedArray, column: Column, start: Ints, greatest: bool) -> pa.Array:
    """One value for each stretch of rows that begins at `start`."""
    if pa.types.is_decimal(column.type):
        return counts(run_sums(whole_numbers(values), start))
    if values.null_count or not pa.types.is_integer(column.type):
        owner = np.repeat(np.arange(len(start)), np.diff(np.append(start, len(values))))
        found = grouped(
            pa.table({"owner": pa.array(owner), "value": values}),
            ["owner"],
            {"value": "sum" if column.summed else "max" if greatest else "min"},
        )
        return flat(found.column("value"))
    if not column.summed:
        return pa.array((np.maximum if greatest else np.minimum).reduceat(ints(values), start)).cast(column.type)
    total = run_sums(ints(values), start)
    if total.dtype == object:
        raise OverflowError(f"{column.name}: expected a sum of less than 2^63 {column.unit}, found {max(total)}.")
    return pa.array(total).cast(column.type)


def run_sums(values: Wide, start: Ints) -> Wide:
    """Sum of each stretch of values that begins at `start`; Python integers where int64 could wrap and does."""
    if not len(start):
        return np.zeros(0, np.int64)
    if values.dtype == object:
        return np.add.reduceat(values, start)
    longest = int(np.diff(np.append(start, len(values))).max())
    # As unsigned numbers negative values are huge, and take the exact way too.
    if int(values.view(np.uint64).max()) * longest < 1 << 63:
        return np.add.reduceat(values, start)
    high, low = np.add.reduceat(values >> 32, start), np.add.reduceat(values & 0xFFFF_FFFF, start)
    exact: Wide = np.array([(int(h) << 32) + int(v) for h, v in zip(high, low, strict=True)], object)
    return exact.astype(np.int64) if max(abs(int(v)) for v in exact) < 1 << 63 else exact


def whole_numbers(column: pa.ChunkedArray | pa.Array) -> Wide:
    """A decimal(38, 0) column without nulls as integers."""
    array = flat(column)
    if not len(array):
        return np.zeros(0, np.int64)
    words = np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset : 2 * (array.offset + len(array))]
    low, high = words[0::2], words[1::2]
    if np.array_equal(high, low >> 63):
        return low.copy()
    return np.array([int(v) for v in array.to_pylist()], object)


def unite(columns: Columns, keys: Sequence[str]) -> Columns:
    """Intervals (keys, begin, end) with those of equal keys that touch or overlap made one, in order."""
    if not len(columns["begin"]):
        return columns
    order = np.lexsort([columns["end"], columns["begin"], *[columns[k] for k in reversed(keys)]])
    rows = pick(columns, order)
    same = np.ones(len(order) - 1, bool)
    for k in keys:
        same &= rows[k][1:] == rows[k][:-1]
    number = np.concatenate([[0], np.cumsum(~same)])
    # Groups lie behind one another on one axis, so that one running maximum serves all.
    low = int(rows["begin"].min())
    base = number * (int(rows["end"].max()) - low + 2) - low
    reach = np.maximum.accumulate(base + rows["end"])
    new = np.concatenate([[True], ~same | ((base + rows["begin"])[1:] > reach[:-1])])
    start = np.flatnonzero(new)
    made = pick(rows, start)
    made["end"] = np.maximum.reduceat(rows["end"], start)
    return made


def grouped(table: pa.Table, keys: Sequence[str], how: Mapping[str, str] | None = None) -> pa.Table:
    """Each distinct key once, in the order in which keys first come, with columns aggregated under their names.

    Args:
        table: any rows.
        keys: columns that make a group; null equals null.
        how: "sum", "min" or "max" by column.
    """
    how = how or {}
    # One thread: with several, the order of groups is chance.
    made = plain(table.select([*keys, *how])).group_by(list(keys), use_threads=False).aggregate(list(how.items()))
    return pa.table({**{k: made.column(k) for k in keys}, **{n: made.column(f"{n}_{h}") for n, h in how.items()}})


def distinct_rows(table: pa.Table, key: Sequence[str]) -> tuple[pa.Table, int, int]:
    """The table with each key once, and how many rows repeated another one, or contradicted it.

    Of several rows with one key, the first in the order of all columns stays.
    """
    group, first = number_groups(table.column(k) for k in key)
    if len(first) == table.num_rows:
        return table, 0, 0
    bare = plain(table)
    order = pc.sort_indices(
        bare,
        sort_keys=[(n, "ascending") for n in bare.column_names if not pa.types.is_nested(bare.schema.field(n).type)],
    )
    rows, numbers = bare.take(order), group[np.asarray(order)]
    _, kept = np.unique(numbers, return_index=True)
    whole, _ = number_groups(rows.columns)
    same = whole == whole[kept][numbers]
    return rows.take(pa.array(kept)), int(same.sum()) - len(kept), int((~same).sum())


def counts(values: Wide) -> pa.Array:
    """Integers (int64 or Python's) as decimal(38, 0)."""
    if values.dtype == object:
        return pa.array([int(v) for v in values], COUNT)
    words = np.empty(2 * len(values), np.int64)
    words[0::2], words[1::2] = values, values >> 63
    return pa.Array.from_buffers(COUNT, len(values), [None, pa.py_buffer(words)])


def nullable(values: Ints, type_: pa.DataType) -> pa.Array:
    """Integers as an Arrow column in which UNKNOWN is null."""
    return pa.array(values, pa.int64(), mask=values == UNKNOWN).cast(type_)
