"""Op time: the sweep, sums over windows, sampled strata, what stands in for missing samples, bounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.usage import LAYER_HOURLY
from seedance.schema import OP_WINDOWS
from tasks.core.arrays import plain
from tasks.core.layers import Segment, sum_ops, sweep
from tasks.errors import LawError
from tests.shard_tables import table
from tests.telling import JOB, SECOND, day_of, host, layer_ns, op, step, vector

L0, L1, S = "L0|fwd|matmul|train|8|bf16", "L1|fwd|matmul|train|8|bf16", "S|fwd|matmul|train|8|bf16"
AR = "AR|comm|all_reduce[dp]|train|8|bf16"
EXAMPLE = [Segment(L0, 260, 480), Segment(L1, 480, 700), Segment(S, 659, 780), Segment(AR, 680, 900)]
EXCLUSIVE = {L0: 220, L1: 200, S: 100, AR: 120, "held_idle": 100}


def test_sweep_of_the_worked_example() -> None:
    assert sweep(EXAMPLE, 260, 1_000) == EXCLUSIVE
    for order in itertools.permutations(EXAMPLE):
        assert sweep(order, 260, 1_000) == EXCLUSIVE


def test_sweep_goes_compute_communication_copy() -> None:
    copy = "C|copy|d2h|train|8|bf16"
    assert sweep([Segment(copy, 0, 30), Segment(AR, 0, 20), Segment(L0, 0, 10)], 0, 30) == {L0: 10, AR: 10, copy: 10}


def test_sweep_gives_odd_ns_to_the_first_keys() -> None:
    assert sweep([Segment(S, 0, 11), Segment(L0, 0, 11), Segment(L1, 0, 11)], 0, 11) == {L0: 4, L1: 4, S: 3}


def test_a_key_that_overlaps_itself_counts_once() -> None:
    assert sweep([Segment(L0, 0, 10), Segment(L0, 5, 15), Segment(S, 0, 10)], 0, 20) == {L0: 10, S: 5, "held_idle": 5}


def test_sweep_of_nothing_is_idle_and_cuts_at_its_ends() -> None:
    assert sweep([], 5, 9, empty="unattributed_busy") == {"unattributed_busy": 4}
    assert sweep([Segment(L0, -5, 3), Segment(L0, 90, 120)], 0, 100) == {L0: 13, "held_idle": 87}
    assert sweep([Segment(L0, 200, 300)], 0, 100) == {"held_idle": 100}


def example_ops(**facts: Any) -> list[dict[str, Any]]:
    """Op rows of the sampled unit of the worked example."""
    named = {"L0": {}, "L1": {}, "S": {}, "AR": {"pass": "comm", "op": "all_reduce[dp]"}}
    rows = [
        op(name, EXCLUSIVE[key], **more, **facts)
        for (name, more), key in zip(named.items(), (L0, L1, S, AR), strict=True)
    ]
    return [*rows, op("(none)", 100, **{"pass": "none", "op": "held_idle", "dtype": "none", "flops": 0}, **facts)]


def example_step(**facts: Any) -> dict[str, Any]:
    return step(
        0,
        47_000,
        active=36_913,
        stall=6_400,
        save=60,
        held=3_627,
        sampled_active_ns=740,
        sampled_units=1,
        units=47,
        **facts,
    )


def test_stratum_of_the_worked_example() -> None:
    made = day_of(host(steps=[example_step()], ops=example_ops()))
    assert layer_ns(made) == {"L0": 10_974, "L1": 9_977, "S": 4_988, "AR": 5_986}
    assert vector(made) == {
        ("job-1", "work"): 10_974 + 9_977 + 4_988,
        ("job-1", "communication"): 5_986,
        ("job-1", "checkpoint"): 60,
        ("job-1", "input_stall"): 6_400,
        ("job-1", "held_idle"): 4_988 + 3_627,
    }
    assert sum(vector(made).values()) == 47_000


def test_windows_variants_and_row_order_add_up() -> None:
    rows = [
        op("a", 30),
        op("b", 10),
        op("a", 5, variant="split"),
        op("a", 25, window_start_utc=op("a", 0)["window_start_utc"] + 300 * SECOND),
    ]
    forward, backward = (sum_ops(table(OP_WINDOWS, r)) for r in (rows, rows[::-1]))
    by_layer = [
        sorted((r["layer"], r["exclusive_ns"], int(r["calls"])) for r in t.to_pylist()) for t in (forward, backward)
    ]
    assert by_layer[0] == by_layer[1] == [("a", 60, 30), ("b", 10, 10)]


def test_text_may_be_dictionary_encoded() -> None:
    whole = table(OP_WINDOWS, [op("a", 1), op("a", 2), op("b", 4)])
    coded = pa.table(
        {
            n: c.dictionary_encode() if pa.types.is_string(c.type) else c
            for n, c in zip(whole.column_names, whole.columns, strict=True)
        }
    )
    assert plain(sum_ops(coded)).equals(sum_ops(whole))


def test_flops_beyond_int64_stay_exact() -> None:
    big = 2**63 - 1
    made = sum_ops(table(OP_WINDOWS, [op("a", 1, flops=big, window_start_utc=i) for i in range(3)])).to_pylist()
    assert int(made[0]["flops"]) == 3 * big
    tables = day_of(
        host(steps=[step(0, 100, active=100)], ops=[op("a", 100, flops=big)]),
        host(
            steps=[step(0, 100, active=100, rank=1, device_uuid="GPU-2")],
            ops=[op("a", 100, flops=big, rank=1, device_uuid="GPU-2")],
            node="node-b",
        ),
    )
    assert [int(r["flops"]) for r in tables[LAYER_HOURLY.name].to_pylist()] == [2 * big]


def test_time_beyond_int64_is_an_error() -> None:
    with pytest.raises(OverflowError, match="busy_ns of one op in one hour passes int64"):
        sum_ops(table(OP_WINDOWS, [op("a", 2**63 - 1, window_start_utc=i) for i in range(2)]))


def test_sampled_time_that_no_op_explains_is_busy() -> None:
    made = day_of(host(steps=[step(0, 1_000, active=1_000)], ops=[op("a", 600)]))
    assert vector(made) == {("job-1", "work"): 600, ("job-1", "unattributed_busy"): 400}
    assert layer_ns(made) == {"a": 600}


def test_parts_beyond_the_wall_are_an_error() -> None:
    with pytest.raises(LawError, match=r"device GPU-1 of node-a .* wall_ns 90 ns, found 10 ns more") as error:
        day_of(host(steps=[step(0, 100, active=100, wall_ns=90)], ops=[op("a", 100)]))
    assert (error.value.law, error.value.expected, error.value.found) == ("time", 90, 100)


def other(rank: int) -> dict[str, Any]:
    return {**JOB, "rank": rank, "device_uuid": f"GPU-{rank + 1}"}


def unsampled_step(first: int, active: int, **facts: Any) -> dict[str, Any]:
    return step(first, active, active=active, **{"sampled_active_ns": 0, "sampled_units": 0} | facts)


def evidence(tables: dict[str, pa.Table], device: str, category: str = "work", hour: int = 3) -> list[str]:
    rows = tables["core_usage__device_hourly"].to_pylist()
    return [
        r["evidence"] for r in rows if (r["device_uuid"], r["category"], r["hour_utc"].hour) == (device, category, hour)
    ]


def test_without_a_sample_the_hours_other_ranks_stand_in() -> None:
    made = day_of(
        host(steps=[step(0, 900, active=900)], ops=[op("a", 600), op("b", 300)]),
        host(steps=[unsampled_step(0, 100, **other(1))], node="node-b"),
    )
    assert vector(made, device="GPU-2") == {("job-1", "work"): 100}
    assert layer_ns(made) == {"a": 667, "b": 333}
    assert evidence(made, "GPU-1") == ["measured"] and evidence(made, "GPU-2") == ["interpolated"]
    assert {r["evidence"] for r in made[LAYER_HOURLY.name].to_pylist()} == {"interpolated"}


def test_without_a_sample_in_the_hour_the_days_stands_in() -> None:
    made = day_of(
        host(steps=[step(0, 900, active=900)], ops=[op("a", 600), op("b", 300)]),
        host(steps=[unsampled_step(0, 100, hour=4)], hour=4),
    )
    assert layer_ns(made, hour=4) == {"a": 67, "b": 33}
    assert evidence(made, "GPU-1", hour=4) == ["interpolated"]


def test_without_any_sample_flops_share() -> None:
    rows = [
        op("a", 0, flops=300, sampled_calls=0),
        op("b", 0, flops=100, sampled_calls=0),
        op("c", 0, flops=0, sampled_calls=0),
    ]
    made = day_of(host(steps=[unsampled_step(0, 1_000)], ops=rows))
    assert layer_ns(made) == {"a": 750, "b": 250, "c": 0}
    assert evidence(made, "GPU-1") == ["assumed"]
    assert {r["layer"]: r["evidence"] for r in made[LAYER_HOURLY.name].to_pylist()}["a"] == "assumed"


def test_without_own_op_rows_the_jobs_flops_share() -> None:
    rows = [op("a", 0, flops=2**62, sampled_calls=0, **other(1)), op("b", 0, flops=2**62, sampled_calls=0, **other(1))]
    made = day_of(host(steps=[unsampled_step(0, 1_001), unsampled_step(0, 10, **other(1))], ops=rows))
    assert vector(made) == {("job-1", "work"): 1_001}
    assert layer_ns(made) == {"a": 506, "b": 505}


def test_with_nothing_at_all_it_was_busy() -> None:
    made = day_of(host(steps=[unsampled_step(0, 1_000)]))
    assert vector(made) == {("job-1", "unattributed_busy"): 1_000}
    assert evidence(made, "GPU-1", "unattributed_busy") == ["assumed"]
    assert made[LAYER_HOURLY.name].num_rows == 0


def test_another_batch_size_does_not_stand_in() -> None:
    made = day_of(host(steps=[step(0, 100, active=100), unsampled_step(200, 50, batch_size=16)], ops=[op("a", 100)]))
    assert vector(made) == {("job-1", "work"): 100, ("job-1", "unattributed_busy"): 50}


@pytest.mark.parametrize(
    ("method", "layer", "expected"),
    [
        ("events", "a", "measured"),
        ("graph", "(graph)", "measured"),
        ("graph", "a", "interpolated"),
        ("formula", "a", "assumed"),
    ],
)
def test_evidence_of_a_method(method: str, layer: str, expected: str) -> None:
    made = day_of(host(steps=[step(0, 100, active=100)], ops=[op(layer, 100, method=method)]))
    assert [r["evidence"] for r in made[LAYER_HOURLY.name].to_pylist()] == [expected]
    assert evidence(made, "GPU-1") == [expected]


def bounds(steps: list[dict[str, Any]], ops: list[dict[str, Any]]) -> dict[str, int]:
    made = day_of(host(steps=steps, ops=ops))
    return {r["layer"]: r["bound_ppm"] for r in made[LAYER_HOURLY.name].to_pylist()}


def test_bounds() -> None:
    rows = [op("a", 600_000), op("b", 400_000)]
    assert bounds([step(0, 10**6, active=10**6)], rows) == {"a": 0, "b": 0}
    one = step(0, 10**8, active=10**8, units=100, sampled_units=1, sampled_active_ns=10**6)
    assert bounds([one], rows) == {"a": 1_000_000, "b": 1_000_000}


def test_bound_covers_the_truth_of_sampled_units() -> None:
    """1,000 units of two layers whose times vary; 40 of them sampled."""
    random = np.random.default_rng(5)
    a, b = (random.integers(low, 2 * low, 1_000) * 1_000 for low in (40_000, 9_000))
    chosen = random.choice(1_000, 40, replace=False)
    rows = [
        op(name, int(t[chosen].sum()), exclusive_us2=int(((t[chosen] // 1_000) ** 2).sum()))
        for name, t in (("a", a), ("b", b))
    ]
    whole, sampled = int((a + b).sum()), int((a + b)[chosen].sum())
    steps = [step(0, whole, active=whole, units=1_000, sampled_units=40, sampled_active_ns=sampled)]
    made = {r["layer"]: r for r in day_of(host(steps=steps, ops=rows))[LAYER_HOURLY.name].to_pylist()}
    for name, times in (("a", a), ("b", b)):
        error = abs(made[name]["ns"] - int(times.sum())) * 10**6 / whole
        assert error < made[name]["bound_ppm"] < 200_000


def test_calls_without_a_formula_keep_their_time() -> None:
    made = day_of(host(steps=[step(0, 1_000, active=1_000)], ops=[op("a", 900, uncounted_calls=5), op("b", 100)]))
    assert {r["layer"]: r["uncounted_ns"] for r in made[LAYER_HOURLY.name].to_pylist()} == {"a": 450, "b": 0}
