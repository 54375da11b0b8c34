"""Checks of one shard and of a set of shards: every bad input is told with what failed, where, expected and found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import pyarrow as pa
import pytest

from seedance.schema import (
    DEVICE_SAMPLES,
    EVENTS,
    JOBS,
    OP_WINDOWS,
    PROCESS_SAMPLES,
    STEP_WINDOWS,
    TELEMETRY,
    Table,
)
from seedance.shard import parse_name, read_footer, read_shard
from tasks.core.shard_rows import group_numbers, iso
from tasks.core.shards import Examined, bucket_of, check_shard, compare_ops, examine, settle
from tests.shard_tables import (
    HOUR_NS,
    NODE,
    ROWS,
    SECOND,
    START,
    named,
    ops,
    processes,
    rewritten,
    row,
    samples,
    shard,
    steps,
    table,
)

TODAY = date(2026, 11, 29)
Bend = Callable[[list[dict[str, Any]]], None]


def look(spec: Table, rows: Sequence[dict[str, Any]], *, seq: int = 0) -> Examined:
    """What `examine` says about a shard that a host wrote of these rows."""
    path, data = shard(spec, rows, seq=seq)
    return examine(f"raw/{path}", parse_name(path), data, last_day=TODAY)


def reason_of(spec: Table, data: bytes, **name: Any) -> str:
    """Why these bytes, under a name with their own sha256, are refused."""
    path, shard_name = named(spec, data, **name)
    seen = examine(path, shard_name, data, last_day=TODAY)
    assert seen.reason is not None
    assert seen.table is None
    return seen.reason


@pytest.mark.parametrize("name", sorted(TELEMETRY))
def test_good_shards_of_every_table_pass(name: str) -> None:
    seen = look(TELEMETRY[name], ROWS[name])
    assert seen.reason is None
    assert seen.rows == len(ROWS[name])
    assert seen.table is not None
    assert seen.table.num_rows == seen.rows


@pytest.mark.parametrize("name", sorted(TELEMETRY))
def test_a_shard_without_rows_passes(name: str) -> None:
    seen = look(TELEMETRY[name], [])
    assert (seen.reason, seen.rows) == (None, 0)


def test_a_truncated_file_is_told_with_both_digests() -> None:
    path, data = shard(STEP_WINDOWS, steps())
    cut = data[:-100]
    seen = examine(path, parse_name(path), cut, last_day=TODAY)
    assert seen.rows is None
    assert seen.reason == (
        f"raw_telemetry__step_windows 2026-11-27T03 node-a: expected sha256 {hashlib.sha256(data).hexdigest()[:16]}… "
        f"as the name says, found {hashlib.sha256(cut).hexdigest()[:16]}… over {len(cut):,} bytes. The object was cut, "
        "changed or renamed. Upload the shard again from the host."
    )


def test_bytes_that_are_not_parquet() -> None:
    reason = reason_of(STEP_WINDOWS, shard(STEP_WINDOWS, steps())[1][:-100])
    assert reason.startswith("raw_telemetry__step_windows 2026-11-27T03 node-a: not a Parquet file: ")
    assert reason.endswith("Upload the shard again from the host.")
    assert "not a Parquet file" in reason_of(EVENTS, b"")


def test_a_changed_page_is_refused_though_its_name_fits() -> None:
    data = bytearray(shard(STEP_WINDOWS, steps(200))[1])
    data[200] ^= 0xFF
    reason = reason_of(STEP_WINDOWS, bytes(data))
    assert "cannot be read" in reason


def test_an_unknown_table() -> None:
    _, data = shard(EVENTS, ROWS[EVENTS.name])
    path = f"raw_telemetry__moods/date=2026-11-27/hour=03/{NODE}-0-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
    seen = examine(path, parse_name(path), data, last_day=TODAY)
    assert seen.reason is not None
    assert "unknown table. Expected one of raw_telemetry__device_samples, " in seen.reason


def test_no_footer() -> None:
    data = rewritten(shard(EVENTS, ROWS[EVENTS.name])[1], footer=None)
    assert "no footer: the Parquet metadata has no key 'seedance'" in reason_of(EVENTS, data)


@pytest.mark.parametrize(
    ("fact", "value", "told"),
    [
        ("schema_version", 2, "expected schema version 1, found 2. Bring the agent of the host and this pipeline"),
        ("table", "raw_telemetry__jobs", "expected table raw_telemetry__events as the name says, found "),
        ("hour", "2026-11-27T04", "expected hour 2026-11-27T03 as the name says, found 2026-11-27T04 in the footer"),
        ("producer", "node-b", "expected producer node-a as the name says, found node-b in the footer"),
        ("node", "node-b", "expected node node-a as the name says, found node-b in the footer"),
        ("rows", 3, "expected 3 rows as the footer says, found 2"),
        ("hour", 3, "footer field hour: 3 is not text"),
        ("rows", None, "footer field rows: None is not an integer"),
        ("node", "\ud800", "found ? in the footer"),
    ],
)
def test_a_footer_that_contradicts(fact: str, value: Any, told: str) -> None:
    data = shard(EVENTS, ROWS[EVENTS.name])[1]
    facts = read_footer(data).__dict__ | {fact: value}
    assert told in reason_of(EVENTS, rewritten(data, footer=json.dumps(facts).encode()))


def test_a_period_of_nothing() -> None:
    data = shard(DEVICE_SAMPLES, samples())[1]
    facts = read_footer(data).__dict__ | {"period_ns": 0}
    told = "expected a sampling period above 0 ns and of at most 3,600,000,000,000 ns, found 0 ns"
    assert told in reason_of(DEVICE_SAMPLES, rewritten(data, footer=json.dumps(facts).encode()))


@pytest.mark.parametrize(
    ("spec", "fact", "value", "told"),
    [
        (
            DEVICE_SAMPLES,
            "period_ns",
            HOUR_NS + 1,
            "above 0 ns and of at most 3,600,000,000,000 ns, found 3,600,000,000,001",
        ),
        (
            DEVICE_SAMPLES,
            "period_ns",
            2**63 // 3 + 1,
            "above 0 ns and of at most 3,600,000,000,000 ns, found 3,074,457,345",
        ),
        (PROCESS_SAMPLES, "period_ns", -5, "above 0 ns and of at most 3,600,000,000,000 ns, found -5 ns"),
        (PROCESS_SAMPLES, "period_ns", 2**63, "above 0 ns and of at most 3,600,000,000,000 ns, found 9,223,372,036,"),
        (JOBS, "period_ns", 2**70, "of 0 ns or more and of at most 3,600,000,000,000 ns, found 1,180,591,620,"),
        (STEP_WINDOWS, "clock_offset_ns", 10**30, "expected clock_offset_ns of 64 bits, found 1,000,000,000,"),
        (EVENTS, "last_ns", -(2**64), "expected last_ns of 64 bits, found -18,446,744,073,"),
    ],
)
def test_footers_that_no_sampling_can_have(spec: Table, fact: str, value: int, told: str) -> None:
    data = shard(spec, ROWS[spec.name])[1]
    facts = read_footer(data).__dict__ | {fact: value}
    assert told in reason_of(spec, rewritten(data, footer=json.dumps(facts).encode()))


def test_an_hour_is_a_period() -> None:
    data = shard(DEVICE_SAMPLES, samples())[1]
    facts = read_footer(data).__dict__ | {"period_ns": HOUR_NS}
    path, name = named(DEVICE_SAMPLES, good := rewritten(data, footer=json.dumps(facts).encode()))
    assert examine(path, name, good, last_day=TODAY).reason is None


MOST = 25 * HOUR_NS


@pytest.mark.parametrize(
    ("spec", "column", "most", "unit"),
    [
        (OP_WINDOWS, "exclusive_ns", MOST, "ns"), (OP_WINDOWS, "busy_ns", 128 * MOST, "ns"),
        (OP_WINDOWS, "sampled_calls", 2**53, "count"), (STEP_WINDOWS, "units", 2**53, "count"),
        (STEP_WINDOWS, "samples", 2**53, "count"), (STEP_WINDOWS, "tokens_in", 2**53, "count"),
        (STEP_WINDOWS, "tokens_out", 2**53, "count"), (STEP_WINDOWS, "requests", 2**53, "count"),
        (STEP_WINDOWS, "sampled_active_ns", MOST, "ns"), (DEVICE_SAMPLES, "energy_mj", 360_000_000_000, "mJ"),
    ],
)  # fmt: skip
def test_amounts_that_no_host_can_have_had(spec: Table, column: str, most: int, unit: str) -> None:
    first, *rest = ROWS[spec.name]
    alone = [r | {column: 0} | ({"units": 0, "sampled_units": 0} if "units" in r else {}) for r in rest]
    if most < 2**53:  # busy time of one row at its most is more than a shard may hold
        assert look(spec, [first | {column: most}, *alone]).reason is None
    for found in (most + 1, 2**62, 2**63 - 1):
        reason = look(spec, [first | {column: found}, *alone]).reason
        assert reason is not None
        assert f"have more {column} than " in reason
        assert f"expected at most {most:,} {unit}, found {found:,} {unit} at " in reason


def test_energy_after_a_gap_is_that_of_the_gap() -> None:
    rows = samples()
    rows[0] |= {"covered_ns": 3 * HOUR_NS, "energy_mj": 3 * 360_000_000_000}
    assert look(DEVICE_SAMPLES, rows).reason is None
    rows[0]["energy_mj"] += 1
    assert "more energy_mj than 100 kW over the covered time" in str(look(DEVICE_SAMPLES, rows).reason)


@pytest.mark.parametrize(
    ("spec", "column", "each", "most"),
    [
        (STEP_WINDOWS, "tokens_in", 2**52, 2**53), (STEP_WINDOWS, "units", 2**52, 2**53),
        (OP_WINDOWS, "busy_ns", 64 * MOST, 2**53), (STEP_WINDOWS, "probe_ns", 2**62, 2**63 - 1),
        (DEVICE_SAMPLES, "nvlink_tx_bytes", 2**62, 2**63 - 1),
    ],
)  # fmt: skip
def test_sums_of_a_shard_leave_room_for_others(spec: Table, column: str, each: int, most: int) -> None:
    rows = [r | {column: each} for r in (ROWS[spec.name] * 2)[: len(ROWS[spec.name])]]
    reason = look(spec, rows).reason
    assert reason is not None
    assert f"rows have too much {column} together: expected a sum of at most {most:,} " in reason
    assert f"found {each * len(rows):,} " in reason
    assert reason.endswith("Write what was added since the former row, and not a total or a clock.")


def test_what_is_summed_as_decimals_and_what_is_not_summed_may_be_great() -> None:
    great = 2**63 - 1
    wide = dict.fromkeys(("calls", "flops", "hw_flops", "bytes_ideal", "uncounted_calls", "exclusive_us2"), great)
    assert look(OP_WINDOWS, [r | wide for r in ROWS[OP_WINDOWS.name]]).reason is None
    levels = dict.fromkeys(("memory_used_bytes", "memory_total_bytes"), great)
    assert look(DEVICE_SAMPLES, samples(**levels)).reason is None


def test_a_day_that_has_not_come() -> None:
    path, data = shard(EVENTS, ROWS[EVENTS.name])
    seen = examine(path, parse_name(path), data, last_day=date(2026, 11, 26))
    assert seen.reason == (
        "raw_telemetry__events 2026-11-27T03 node-a: expected a day up to 2026-11-26 (UTC), the latest that can have "
        "been observed, found 2026-11-27. Set the clock of the host; the shard is tried again when that day has come."
    )
    footer, rows = read_shard(data, EVENTS, where=path)
    name = parse_name(path)
    assert check_shard(footer, rows, EVENTS, name, last_day=date(2026, 11, 26)) == seen.reason
    assert check_shard(footer, rows, EVENTS, name, last_day=TODAY) is None


def swap(column: str, values: pa.Array) -> Callable[[pa.Table], pa.Table]:
    """A change that puts other values into one column."""
    return lambda t: t.set_column(t.column_names.index(column), column, values)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.drop_columns(["wall_ns"]), "missing column wall_ns"),
        (lambda t: t.append_column("mood", pa.array([1, 2, 3])), "unknown column mood"),
        (swap("wall_ns", pa.array(["1", "2", "3"])), "wall_ns: expected int64, found string"),
        (swap("wall_ns", pa.array([1e10, 1e10, float("nan")])), "wall_ns: expected int64 (this column is summed"),
        (swap("wall_ns", pa.array([10**10, None, 10**10])), "wall_ns: expected no nulls, found null (1 row(s))"),
        (swap("wall_ns", pa.array([10**10, -5, 10**10])), "wall_ns: expected at least 0 ns, found -5 ns"),
        (swap("phase", pa.array(["train", "nap", "train"])), "phase: expected one of train, prefill"),
        (swap("batch_size", pa.array([1, 2, 2**40])), "batch_size: expected int32, found a int64 that does not fit"),
    ],
)
def test_rows_that_do_not_meet_the_declaration(change: Callable[[pa.Table], pa.Table], told: str) -> None:
    reason = reason_of(STEP_WINDOWS, rewritten(shard(STEP_WINDOWS, steps())[1], change=change))
    assert told in reason
    assert reason.startswith("raw_telemetry__step_windows 2026-11-27T03 node-a: ")
    assert reason.endswith("The shard is tried again when the reader changes.")


def test_a_range_of_ppm() -> None:
    data = shard(DEVICE_SAMPLES, samples())[1]
    bad = rewritten(data, change=swap("gpu_util_ppm", pa.array([0, 1_000_001, None], pa.int32())))
    assert "gpu_util_ppm: expected at most 1000000 ppm, found 1000001 ppm" in reason_of(DEVICE_SAMPLES, bad)


def test_text_that_is_not_utf8_is_refused_and_not_raised() -> None:
    odd = pa.array([b"\xff", b"a", b"b"]).view(pa.string())
    data = rewritten(shard(DEVICE_SAMPLES, samples())[1], change=swap("gpu_uuid", odd))
    seen = examine(*named(DEVICE_SAMPLES, data), data, last_day=TODAY)
    assert seen.reason is not None
    assert "gpu_uuid is not UTF-8 text" in seen.reason


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (DEVICE_SAMPLES, (START + 1, START + HOUR_NS), (START, START + HOUR_NS + 1)),
        (PROCESS_SAMPLES, (START + 1, START + HOUR_NS), (START, START + HOUR_NS + 1)),
        (OP_WINDOWS, (START, START + HOUR_NS - 1), (START - 1, START + HOUR_NS)),
        (STEP_WINDOWS, (START, START + HOUR_NS - 1), (START - 1, START + HOUR_NS)),
        (JOBS, (START, START + HOUR_NS - 1), (START - 1, START + HOUR_NS)),
        (EVENTS, (START, START + HOUR_NS - 1), (START - 1, START + HOUR_NS)),
    ],
)
def test_the_edges_of_the_hour(spec: Table, good: tuple[int, int], bad: tuple[int, int]) -> None:
    clock = next(c.name for c in spec.columns if pa.types.is_timestamp(c.type))
    assert look(spec, [row(spec, **{clock: at}) for at in good]).reason is None
    for at in bad:
        reason = look(spec, [row(spec, **{clock: good[0]}), row(spec, **{clock: at})]).reason
        assert reason is not None
        assert f"1 of 2 rows outside the hour: expected {clock} " in reason
        assert f"{clock} {iso(at)}. Write each row into the shard of its hour" in reason


def test_rows_that_repeat_the_key() -> None:
    reason = look(DEVICE_SAMPLES, [*samples(), *samples(1)]).reason
    assert reason is not None
    assert (
        "1 of 4 rows repeat the key (gpu_uuid, mig_uuid, sampled_at_utc): expected each once, found again gpu_uuid "
        "GPU-1, mig_uuid null, sampled_at_utc 2026-11-27T03:00:01.000000000Z. Write each row once." in reason
    )


def test_rows_of_another_node() -> None:
    reason = look(PROCESS_SAMPLES, [*processes(1), processes()[1] | {"node": "node-b"}]).reason
    assert reason is not None
    assert "1 of 2 rows are of another node: expected node-a, found node-b at device_uuid " in reason


def test_readings_that_overlap_by_one_ns() -> None:
    rows = samples()
    rows[2]["covered_ns"] += 1
    reason = look(DEVICE_SAMPLES, rows).reason
    assert reason is not None
    assert (
        "1 of 3 readings overlap the former reading of the same gpu_uuid, mig_uuid: expected a start at or after "
        "2026-11-27T03:00:02.000000000Z, found 2026-11-27T03:00:01.999999999Z, 1 ns too early, at gpu_uuid " in reason
    )
    rows[2]["state"] = "driver error"
    assert look(DEVICE_SAMPLES, rows).reason is None, "what is not ok is not a reading"
    rows = processes()
    rows[1]["covered_ns"] += 1
    assert "1 ns too early" in str(look(PROCESS_SAMPLES, rows).reason)


def test_readings_of_two_devices_may_share_the_time() -> None:
    slices = samples(mig_uuid="MIG-1") + samples(mig_uuid="MIG-2") + samples() + samples(uuid="GPU-2")
    assert look(DEVICE_SAMPLES, slices).reason is None


def bend_window(rows: list[dict[str, Any]]) -> None:
    rows[0]["window_ns"] += 1


def bend_end(rows: list[dict[str, Any]]) -> None:
    rows[2] |= {"window_start_utc": START + HOUR_NS - 9 * SECOND}


def bend_sum(rows: list[dict[str, Any]]) -> None:
    rows[1]["wall_ns"] += 7


def bend_part(rows: list[dict[str, Any]]) -> None:
    rows[1]["active_ns"] = 2**63 - 1


def bend_units(rows: list[dict[str, Any]]) -> None:
    rows[0]["sampled_units"] = 11


def bend_sampled(rows: list[dict[str, Any]]) -> None:
    rows[1]["sampled_active_ns"] = 6 * SECOND + 1


def bend_wall(rows: list[dict[str, Any]]) -> None:
    for one in rows:
        one |= {"wall_ns": 1_200 * SECOND, "active_ns": 1_196 * SECOND}
    rows[2] |= {"wall_ns": 1_200 * SECOND + 1, "active_ns": 1_196 * SECOND + 1, "phase": "eval"}


AT_10 = (
    "job_id job-1, attempt 0, rank 0, device_uuid device_uuid, phase train, batch_size 0, window_start_utc "
    "2026-11-27T03:00:10.000000000Z"
)


@pytest.mark.parametrize(
    ("bend", "told"),
    [
        (bend_window, "1 of 3 windows overlap the former window of the same job_id, attempt, rank, device_uuid, "
         "phase, batch_size: expected a start at or after 2026-11-27T03:00:10.000000001Z, found "
         f"2026-11-27T03:00:10.000000000Z, 1 ns too early, at {AT_10}. Count no time twice."),
        (bend_end, "1 of 3 windows end after the hour: expected window_ns of at most 9,000,000,000 ns, found "),
        (bend_sum, "1 of 3 windows whose wall_ns is not the sum of active_ns, input_stall_ns, checkpoint_ns, "
         f"held_idle_ns: expected 10,000,000,000 ns, found 10,000,000,007 ns at {AT_10}. Give each ns of a unit one "),
        (bend_part, "1 of 3 windows have more active_ns than an hour: expected at most 3,600,000,000,000 ns, found "
         f"9,223,372,036,854,775,807 ns at {AT_10}. Cut wall time at the hour."),
        (bend_units, "have more sampled_units than units: expected at most 10 units, found 11 units at "),
        (bend_sampled, "1 of 3 windows have more sampled_active_ns than active_ns: expected at most 6,000,000,000 ns, "
         f"found 6,000,000,001 ns at {AT_10}. Sampled time is a part of the active time."),
        (bend_wall, "1 of 1 ranks have more wall time than the hour: expected a sum of wall_ns of at most "
         "3,600,000,000,000 ns, found 3,600,000,000,001 ns for job_id job-1, attempt 0, rank 0, device_uuid "),
    ],
)  # fmt: skip
def test_step_windows_that_cannot_be(bend: Bend, told: str) -> None:
    rows = steps()
    bend(rows)
    reason = look(STEP_WINDOWS, rows).reason
    assert reason is not None
    assert told in reason


def test_only_the_first_unit_of_the_hour_may_have_begun_before_it() -> None:
    rows = steps()
    rows[0] |= {"units": 0, "sampled_units": 0, "sampled_active_ns": 0}
    rows[1]["sampled_active_ns"] = 60 * SECOND  # the unit's wall was cut at the hour, its op shares were not
    assert look(STEP_WINDOWS, rows).reason is None
    rows[2]["sampled_active_ns"] = 60 * SECOND
    assert "1 of 3 windows have more sampled_active_ns" in str(look(STEP_WINDOWS, rows).reason)


def test_ranks_do_not_share_a_limit() -> None:
    rows = [one | {"rank": rank} for rank in range(3) for one in steps(360)]
    assert look(STEP_WINDOWS, rows).reason is None


def test_the_same_bytes_count_once_under_the_first_path() -> None:
    one, two = look(EVENTS, ROWS[EVENTS.name], seq=0), look(EVENTS, ROWS[EVENTS.name], seq=1)
    assert one.name.sha16 == two.name.sha16
    assert settle([two, one]) == ([one], {}, {two.path: one.path})


def test_two_contents_of_one_sequence_number() -> None:
    few, many = look(STEP_WINDOWS, steps(2)), look(STEP_WINDOWS, steps(3))
    for order in ([few, many], [many, few]):
        kept, refused, twins = settle(order)
        assert (kept, twins) == ([many], {})
        assert refused == {
            few.path: "raw_telemetry__step_windows 2026-11-27T03 node-a: conflict: expected one content for sequence "
            f"number 0, found {many.name.sha16} with 3 rows, which counts, and {few.name.sha16} with 2 rows. Look for "
            "two agents on the host."
        }
    equal = [look(STEP_WINDOWS, steps(2, units=u)) for u in (10, 11)]
    assert settle(equal)[0] == [min(equal, key=lambda s: s.name.sha16)]


def test_two_shards_of_one_hour_that_share_rows() -> None:
    one, two = look(STEP_WINDOWS, steps(3), seq=0), look(STEP_WINDOWS, steps(3, first=2), seq=1)
    kept, refused, _ = settle([two, one])
    assert kept == [one]
    told = refused[two.path]
    assert f"conflict with 0-{one.name.sha16} of the same node and hour; together: 1 of 6 rows repeat the key" in told
    apart = look(STEP_WINDOWS, steps(3, first=3), seq=1)
    assert settle([apart, one]) == ([one, apart], {}, {})


@pytest.mark.parametrize(
    ("spec", "one", "two", "told"),
    [
        (DEVICE_SAMPLES, samples(), [samples(1)[0] | {"sampled_at_utc": START + 3 * SECOND + 1}], "too early"),
        (STEP_WINDOWS, steps(358), [one | {"phase": "eval"} for one in steps(3)], "more wall time than the hour"),
    ],
)
def test_two_shards_of_one_hour_that_share_time(
    spec: Table, one: list[dict[str, Any]], two: list[dict[str, Any]], told: str
) -> None:
    kept, refused, _ = settle([look(spec, one, seq=1), look(spec, two, seq=0)])
    assert [s.name.seq for s in kept] == [1]
    assert told in next(iter(refused.values()))


def test_op_rows_are_compared_with_step_rows() -> None:
    step = table(STEP_WINDOWS, steps())
    whole = compare_ops([step], [table(OP_WINDOWS, ops(2 * SECOND, SECOND))])
    assert (whole.strata, whole.mismatched) == (1, 0)
    short = compare_ops([step], [table(OP_WINDOWS, ops(2 * SECOND, SECOND - 1))])
    assert (short.mismatched, short.sampled_active_ns, short.exclusive_ns) == (1, 3 * SECOND, 3 * SECOND - 1)
    others = table(STEP_WINDOWS, [one | {"rank": 1} for one in steps()])
    assert compare_ops([step, others], [table(OP_WINDOWS, ops(3 * SECOND))]).mismatched == 0, "rank 1 writes no op rows"
    assert compare_ops([], []).strata == 0


def test_sums_of_op_rows_do_not_wrap() -> None:
    most = 2**63 - 1
    totals = compare_ops([table(STEP_WINDOWS, steps())], [table(OP_WINDOWS, ops(most, most, most))])
    assert totals.exclusive_ns == 3 * most


def test_buckets_depend_on_the_node_alone() -> None:
    assert bucket_of("node-a", 8) == int(hashlib.sha256(b"node-a").hexdigest(), 16) % 8
    assert {bucket_of(f"n{i}", 8) for i in range(200)} == set(range(8))


def test_group_numbers_stay_apart_when_the_product_would_leave_int64() -> None:
    n = 300
    columns = {f"c{i}": pa.array([(j * 7 + i) % n for j in range(n)]) for i in range(9)}
    numbers = group_numbers(pa.table(columns), list(columns))
    assert len(set(numbers.tolist())) == n
    twice = pa.concat_tables([pa.table(columns)] * 2)
    assert group_numbers(twice, list(columns)).tolist()[:n] == group_numbers(twice, list(columns)).tolist()[n:]
