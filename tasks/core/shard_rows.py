"""Turn the rows of one telemetry table of one node and hour into what is wrong with them, or nothing.

A problem is told by its lowest row (instant, then key), so it depends on the set of rows and never on their order.
Times are integer ns; nothing is rounded. Amounts that no host can have had are refused, so that no later sum leaves
int64. No rule has a tolerance except one: op shares are not cut at the hour while
wall time is (infra/rules/telemetry.md 2), so the first window in which a rank ends a unit may hold more sampled active time
than active time. Knows no file, no footer and no other hour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.telemetry import DEVICE_SAMPLES, EVENTS, JOBS, OP_WINDOWS, PROCESS_SAMPLES, STEP_WINDOWS
from seedance.schema import Table

HOUR_NS = 3_600_000_000_000
SECOND_NS = 1_000_000_000
CLOCKS = {
    DEVICE_SAMPLES.name: "sampled_at_utc",
    PROCESS_SAMPLES.name: "sampled_at_utc",
    OP_WINDOWS.name: "window_start_utc",
    STEP_WINDOWS.name: "window_start_utc",
    JOBS.name: "stated_at_utc",
    EVENTS.name: "at_utc",
}
"""The column that places a row in its hour."""
WALL_PARTS = ("active_ns", "input_stall_ns", "checkpoint_ns", "held_idle_ns")
RANK = ("job_id", "attempt", "rank", "device_uuid")
MOST_NS = 25 * HOUR_NS
"""Most time of one row and stream: a window of at most an hour, and a unit that ended in it and began a day before."""
STREAMS = 128
"""Kernels that one GPU runs side by side, at most (CUDA): raw busy time counts each."""
COUNT = 2**53
"""Most of anything counted by one row, and of any of these columns over one shard: a thousand shards still fit int64."""
POWER_MW = 100_000_000
"""100 kW: more than a whole rack takes through one device."""
LIMITS = {
    OP_WINDOWS.name: {"exclusive_ns": MOST_NS, "busy_ns": STREAMS * MOST_NS, "sampled_calls": COUNT},
    STEP_WINDOWS.name: {"sampled_active_ns": MOST_NS}
    | dict.fromkeys(("units", "samples", "tokens_in", "tokens_out", "requests"), COUNT),
}
"""Most that one row can hold, by table and column."""
WIDE = {"calls", "flops", "hw_flops", "bytes_ideal", "uncounted_calls", "exclusive_us2"}
"""Columns that are summed as decimals."""
LEVELS = {"memory_used_bytes", "memory_total_bytes"}
"""Columns that nothing sums: what there is, and not what was added."""

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Rows:
    """Rows of one table in one hour, with the order in which each group (the key without its instant) is one run.

    Args:
        table: the rows, as `conform` leaves them.
        spec: declaration of the table.
        node: host that they were read on.
        start_ns: begin of their hour, ns UTC.
        where: opens each message.
    """

    def __init__(self, table: pa.Table, spec: Table, *, node: str, start_ns: int, where: str) -> None:
        self.table, self.spec, self.node, self.where = table, spec, node, where
        self.start_ns, self.end_ns = start_ns, start_ns + HOUR_NS
        self.clock = CLOCKS[spec.name]
        self.groups = tuple(k for k in spec.key if k != self.clock)

    def ints(self, column: str) -> Ints:
        """A column as int64, instants as ns since 1970, nulls as 0."""
        values: Ints = pc.fill_null(self.table.column(column).cast(pa.int64()), 0).to_numpy()
        return values

    @cached_property
    def at(self) -> Ints:
        """Instant of each row, ns UTC."""
        return self.ints(self.clock)

    @cached_property
    def group(self) -> Ints:
        """Number of each row's group."""
        return group_numbers(self.table, self.groups)

    @cached_property
    def rank(self) -> Ints:
        """Number of each row's job, attempt, rank and device, from 0 without holes."""
        return np.unique(group_numbers(self.table, RANK), return_inverse=True)[1].astype(np.int64)

    @cached_property
    def order(self) -> Ints:
        """Row numbers by group, then instant."""
        return np.lexsort((self.at, self.group))

    def first(self, bad: Flags) -> tuple[int, str]:
        """The bad row of the lowest instant and key: its number, and its key in words."""
        rows = np.flatnonzero(bad)
        rows = rows[self.at[rows] == self.at[rows].min()]
        keys = self.table.select(self.groups).take(pa.array(rows)).to_pylist()
        ranks = [tuple((k[c] is None, 0 if k[c] is None else k[c]) for c in self.groups) for k in keys]
        lowest = min(range(len(keys)), key=ranks.__getitem__)
        words = [f"{c} {'null' if keys[lowest][c] is None else keys[lowest][c]}" for c in self.groups]
        return int(rows[lowest]), ", ".join([*words, f"{self.clock} {iso(int(self.at[rows[lowest]]))}"])


def row_problem(rows: Rows) -> str | None:
    """The first rule that rows of one shard break, or None."""
    if not rows.table.num_rows:
        return None
    checks: list[Check] = [_readable, _in_hour, _once]
    if rows.spec.name in (DEVICE_SAMPLES.name, PROCESS_SAMPLES.name):
        checks += [_one_node, _readings_apart]
    if rows.spec.name == STEP_WINDOWS.name:
        checks += [_windows_in_hour, _windows_apart, _parts_in_hour, _parts_add_up, _units_sampled, _time_sampled]
        checks += [_wall_in_hour]
    checks += [_possible, _powered, _sums_fit]
    return next((problem for check in checks if (problem := check(rows)) is not None), None)


def union_problem(rows: Rows) -> str | None:
    """The first rule that rows of several good shards of one node and hour break together, or None."""
    checks: list[Check] = [_once]
    if rows.spec.name in (DEVICE_SAMPLES.name, PROCESS_SAMPLES.name):
        checks += [_readings_apart]
    if rows.spec.name == STEP_WINDOWS.name:
        checks += [_windows_apart, _wall_in_hour]
    checks += [_sums_fit]
    return next((problem for check in checks if (problem := check(rows)) is not None), None)


Check = Callable[[Rows], str | None]


def group_numbers(table: pa.Table, columns: Sequence[str]) -> Ints:
    """A number per row, equal where all the columns are equal; null equals null."""
    numbers: Ints = np.zeros(table.num_rows, np.int64)
    size = 1
    for column in columns:
        coded = pc.dictionary_encode(table.column(column).combine_chunks(), null_encoding="encode")
        width = len(coded.dictionary)
        if size * width > 2**62:  # the product would leave int64: from here on, number only the groups that occur
            numbers = np.unique(numbers, return_inverse=True)[1].astype(np.int64)
            size = table.num_rows
        numbers = numbers * width + coded.indices.cast(pa.int64()).to_numpy()
        size *= width
    return numbers


def iso(at_ns: int) -> str:
    """An instant in words, with all nine digits of the second."""
    seconds, ns = divmod(at_ns, SECOND_NS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns:09}Z"


def _readable(rows: Rows) -> str | None:
    # Arrow takes text as it finds it, and fails much later, where it is turned into words.
    for column in rows.spec.columns:
        if not pa.types.is_primitive(column.type):
            try:
                rows.table.column(column.name).validate(full=True)
            except pa.ArrowInvalid as error:
                return f"{rows.where}: {column.name} is not UTF-8 text: {error}. Write the shard again."
    return None


def _in_hour(rows: Rows) -> str | None:
    # A reading ends at its instant, so the one taken as the hour ends is of this hour; all others begin at theirs.
    if rows.clock == "sampled_at_utc":
        bad = (rows.at <= rows.start_ns) | (rows.at > rows.end_ns)
        edges = f"after {iso(rows.start_ns)} and not after {iso(rows.end_ns)}"
    else:
        bad = (rows.at < rows.start_ns) | (rows.at >= rows.end_ns)
        edges = f"from {iso(rows.start_ns)} to before {iso(rows.end_ns)}"
    if not bad.any():
        return None
    return (
        f"{_share(rows, bad)} rows outside the hour: expected {rows.clock} {edges}, found {rows.first(bad)[1]}. Write "
        "each row into the shard of its hour, and check the clock offset of the host."
    )


def _once(rows: Rows) -> str | None:
    at, group = rows.at[rows.order], rows.group[rows.order]
    again = (group[1:] == group[:-1]) & (at[1:] == at[:-1])
    if not again.any():
        return None
    bad = _back(rows, rows.order[1:][again])
    return (
        f"{_share(rows, bad)} rows repeat the key ({', '.join(rows.spec.key)}): expected each once, found again "
        f"{rows.first(bad)[1]}. Write each row once."
    )


def _one_node(rows: Rows) -> str | None:
    bad = pc.not_equal(rows.table.column("node"), rows.node).to_numpy()
    if not bad.any():
        return None
    row, key = rows.first(bad)
    return (
        f"{_share(rows, bad)} rows are of another node: expected {rows.node}, found {rows.table.column('node')[row]} "
        f"at {key}. Write one shard a node."
    )


def _readings_apart(rows: Rows) -> str | None:
    # The agent takes covered_ns as the difference of two of its instants: neighbours touch, and need no tolerance.
    order = rows.order
    if rows.spec.name == DEVICE_SAMPLES.name:  # a row that is not "ok" is not a reading
        order = order[pc.equal(rows.table.column("state"), "ok").to_numpy()[order]]
    return _apart(rows, order, rows.at - rows.ints("covered_ns"), rows.at, "reading")


def _windows_apart(rows: Rows) -> str | None:
    return _apart(rows, rows.order, rows.at, rows.at + rows.ints("window_ns"), "window")


def _apart(rows: Rows, order: Ints, starts: Ints, ends: Ints, what: str) -> str | None:
    group = rows.group[order]
    late = (group[1:] == group[:-1]) & (starts[order][1:] < ends[order][:-1])
    if not late.any():
        return None
    bad = _back(rows, order[1:][late])
    row, key = rows.first(bad)
    former = order[int(np.flatnonzero(order == row)[0]) - 1]
    return (
        f"{_share(rows, bad)} {what}s overlap the former {what} of the same {', '.join(rows.groups)}: expected a start "
        f"at or after {iso(int(ends[former]))}, found {iso(int(starts[row]))}, {int(ends[former] - starts[row]):,} ns "
        f"too early, at {key}. Count no time twice."
    )


def _windows_in_hour(rows: Rows) -> str | None:
    left, window = rows.end_ns - rows.at, rows.ints("window_ns")
    bad = window > left
    if not bad.any():
        return None
    row, key = rows.first(bad)
    return (
        f"{_share(rows, bad)} windows end after the hour: expected window_ns of at most {int(left[row]):,} ns, found "
        f"{int(window[row]):,} ns at {key}. Cut windows at the hour."
    )


def _parts_in_hour(rows: Rows) -> str | None:
    # Also what keeps the sums of the next rules below int64.
    for column in ("wall_ns", *WALL_PARTS):
        problem = _at_most(rows, column, np.full(rows.table.num_rows, HOUR_NS), "an hour", "Cut wall time at the hour.")
        if problem is not None:
            return problem
    return None


def _parts_add_up(rows: Rows) -> str | None:
    wall = rows.ints("wall_ns")
    total = sum((rows.ints(c) for c in WALL_PARTS), np.zeros(len(wall), np.int64))
    bad = wall != total
    if not bad.any():
        return None
    row, key = rows.first(bad)
    return (
        f"{_share(rows, bad)} windows whose wall_ns is not the sum of {', '.join(WALL_PARTS)}: expected "
        f"{int(total[row]):,} ns, found {int(wall[row]):,} ns at {key}. Give each ns of a unit one place."
    )


def _units_sampled(rows: Rows) -> str | None:
    step = "Sampled units are a part of the units."
    return _at_most(rows, "sampled_units", rows.ints("units"), "units", step, unit="units")


def _time_sampled(rows: Rows) -> str | None:
    most = rows.ints("active_ns").copy()
    ended = rows.ints("units") > 0
    if ended.any():
        # The first unit that a rank ends may have begun in the former hour: its wall was cut, its op shares were not.
        earliest = np.full(int(rows.rank.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(earliest, rows.rank[ended], rows.at[ended])
        most[ended & (rows.at == earliest[rows.rank])] = np.iinfo(np.int64).max
    return _at_most(rows, "sampled_active_ns", most, "active_ns", "Sampled time is a part of the active time.")


def _possible(rows: Rows) -> str | None:
    for column, most in LIMITS.get(rows.spec.name, {}).items():
        limit = np.full(rows.table.num_rows, most)
        step = "Write what was added in the window, and not a total or a clock."
        problem = _at_most(rows, column, limit, "one can", step, unit=rows.spec[column].unit or "")
        if problem is not None:
            return problem
    return None


def _powered(rows: Rows) -> str | None:
    if rows.spec.name != DEVICE_SAMPLES.name:
        return None
    # A reading after a gap holds the energy of the gap, and its covered time can be less: an hour is always allowed.
    most = np.clip(rows.ints("covered_ns"), HOUR_NS, MOST_NS) // SECOND_NS * POWER_MW
    limit = f"{POWER_MW // 1_000_000} kW over the covered time (an hour at least)"
    step = "Write the energy since the former reading, null after a reset."
    return _at_most(rows, "energy_mj", most, limit, step, unit="mJ", what="readings")


def _sums_fit(rows: Rows) -> str | None:
    tight = {*LIMITS.get(rows.spec.name, {}), "energy_mj"}
    for column in rows.spec.columns:
        if not column.summed or column.type != pa.int64() or column.name in WIDE | LEVELS:
            continue
        values = rows.ints(column.name)
        found = (int((values >> 32).sum()) << 32) + int((values & 0xFFFF_FFFF).sum())
        most = COUNT if column.name in tight else int(np.iinfo(np.int64).max)
        if found > most:
            return (
                f"{rows.where}: {len(values):,} rows have too much {column.name} together: expected a sum of at most "
                f"{most:,} {column.unit}, found {found:,} {column.unit}. Write what was added since the former row, and "
                "not a total or a clock."
            )
    return None


def _at_most(
    rows: Rows, column: str, most: Ints, limit: str, step: str, *, unit: str = "ns", what: str = "windows"
) -> str | None:
    values = rows.ints(column)
    bad = values > most
    if not bad.any():
        return None
    row, key = rows.first(bad)
    return (
        f"{_share(rows, bad)} {what} have more {column} than {limit}: expected at most {int(most[row]):,} {unit}, "
        f"found {int(values[row]):,} {unit} at {key}. {step}"
    )


def _wall_in_hour(rows: Rows) -> str | None:
    wall = rows.ints("wall_ns")  # each at most an hour: seconds and the rest, summed apart, cannot leave int64
    seconds, rest = np.zeros((2, int(rows.rank.max()) + 1), np.int64)
    np.add.at(seconds, rows.rank, wall // SECOND_NS)
    np.add.at(rest, rows.rank, wall % SECOND_NS)
    seconds += rest // SECOND_NS
    over = (seconds > 3_600) | ((seconds == 3_600) & (rest % SECOND_NS > 0))
    if not over.any():
        return None
    row, _ = rows.first(over[rows.rank])
    found = int(seconds[rows.rank[row]]) * SECOND_NS + int(rest[rows.rank[row]]) % SECOND_NS
    who = ", ".join(f"{c} {rows.table.column(c)[row]}" for c in RANK)
    return (
        f"{rows.where}: {int(over.sum()):,} of {len(over):,} ranks have more wall time than the hour: expected a sum "
        f"of wall_ns of at most {HOUR_NS:,} ns, found {found:,} ns for {who}. Units of a rank follow one another: "
        "count each once."
    )


def _share(rows: Rows, bad: Flags) -> str:
    return f"{rows.where}: {int(bad.sum()):,} of {rows.table.num_rows:,}"


def _back(rows: Rows, numbers: Ints) -> Flags:
    bad = np.zeros(rows.table.num_rows, bool)
    bad[numbers] = True
    return bad
