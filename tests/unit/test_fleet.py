"""The fleet that tells the truth: exact FLOPs, telemetry that adds up, and addresses that add up to the bill."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from fractions import Fraction
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seedance.schema import DEVICE_SAMPLES, OP_WINDOWS, STEP_WINDOWS, TELEMETRY
from seedance.shard import parse_name, read_shard
from tasks.core.shards import examine
from tests.fleet import (
    Fleet,
    FleetSpec,
    Timeline,
    Truth,
    build,
    charges,
    deliveries,
    full_spec,
    observe,
    random_spec,
    telemetry_files,
    tiny_spec,
    true_ledger,
    usage_days,
    with_switches,
)
from tests.fleet.arithmetic import half_even, largest_remainder, units
from tests.fleet.model import HOUR, MILLION, SECOND
from tests.fleet.shapes import backward, forward, training_step
from tests.fleet.telemetry import op_key
from tests.fleet.timeline import is_sampled
from tests.fleet.write import bill_files

LAST_DAY = date(2027, 1, 1)
BILLED: dict[str, Any] = dict.fromkeys(
    (
        "cluster_fee",
        "network_fees",
        "reservation",
        "capacity_reservation",
        "nested_credits",
        "neighbour_month",
        "two_months",
        "closed_correction",
        "second_currency",
    ),
    True,
)
"""Switches of the bill alone."""
SPECS = {
    "tiny": tiny_spec(1),
    "full": full_spec(2),
    "days": with_switches(full_spec(3), daily_machine_rows=True, unbilled=True),
    "open": with_switches(full_spec(4), bill_until=2, unbilled=True),
    "azure": full_spec(6, cloud="azure", **BILLED, scale_set=True),
    "gcp": full_spec(7, cloud="gcp", **BILLED, daily_machine_rows=True, mps=True),
    "sampled": tiny_spec(5, sample_ppm=2_000, gap=True, serve=True, shared_gpu=True),
}
every_spec = pytest.mark.parametrize("name", list(SPECS))


@cache
def fleet_of(name: str) -> tuple[Fleet, Timeline]:
    """A fleet and what happened in it."""
    fleet = build(SPECS[name])
    return fleet, observe(fleet)


@cache
def truth_of(name: str) -> Truth:
    """The true ledger of a fleet's own day."""
    fleet, timeline = fleet_of(name)
    return true_ledger(fleet, timeline=timeline)


@cache
def rows_of(name: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table that can be read, both drops together."""
    first, second, corrupt, twice = telemetry_files(*fleet_of(name))
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path, data in {**first, **second}.items():
        table = parse_name(path).table
        if path not in corrupt and path not in twice:
            found[table] += read_shard(data, TELEMETRY[table], where=path)[1].to_pylist()
    return found


def at(value: Any) -> int:
    """ns UTC of an instant."""
    return int(value.value)


FLOPS = [
    ("llama-3-8b", 1, 1, 32, 15_009_841_152, None),
    ("llama-3-8b", 1, 128, 32, 1_929_782_493_184, 3_859_564_986_368),
    ("llama-3-8b", 1, 2_048, 32, 32_938_104_193_024, None),
    ("llama-3-8b", 1, 8_192, 32, 158_140_695_838_720, None),
    ("resnet-50", 1, 0, 16, 8_178_368_512, 16_120_709_120),
    ("bert-base", 1, 128, 12, 22_348_431_360, None),
    ("bert-base", 1, 384, 12, 70_666_813_440, None),
    ("bert-base", 1, 512, 12, 96_637_943_808, None),
]


@pytest.mark.parametrize(("network", "batch", "seq", "blocks", "ahead", "back"), FLOPS)
def test_flops_of_a_network_are_the_published_integers(
    network: str, batch: int, seq: int, blocks: int, ahead: int, back: int | None
) -> None:
    assert sum(op.flops for op in forward(network, batch, seq, blocks)) == ahead
    assert back is None or sum(op.flops for op in backward(network, batch, seq, blocks)) == back


def test_layers_of_a_shorter_network_keep_their_flops() -> None:
    whole = {op.layer: op.flops for op in forward("llama-3-8b", 1, 128, 32) if op.kind == "matmul"}
    short = {op.layer: op.flops for op in forward("llama-3-8b", 1, 128, 2) if op.kind == "matmul"}
    assert whole["model.layers.0.mlp"] == 2 * 176_160_768 * 128
    assert whole["lm_head"] == 2 * 128 * 4_096 * 128_256
    assert short == {name: whole[name] for name in short}


def test_backward_is_twice_forward_by_layer_except_at_the_stem() -> None:
    ahead = {(op.layer, op.kind): op.flops for op in forward("resnet-50", 4, 0, 16)}
    back = {(op.layer, op.kind): op.flops for op in backward("resnet-50", 4, 0, 16)}
    assert back.pop(("conv1", "conv2d")) == ahead.pop(("conv1", "conv2d")) == 4 * 236_027_904
    assert back == {key: 2 * flops for key, flops in ahead.items()}


def test_the_optimiser_counts_no_model_flops_and_one_kernel_is_uncounted() -> None:
    ops = {op.layer: op for op in training_step("llama-3-8b", 1, 128, 1)}
    assert ops["(optimizer)"].flops == ops["(grad_sync)"].flops == 0
    assert [name for name, op in ops.items() if not op.is_counted] == ["model.rotary_emb"]


@every_spec
def test_equal_specs_give_equal_bytes(name: str) -> None:
    fleet = build(SPECS[name])
    assert telemetry_files(fleet, observe(fleet)) == telemetry_files(*fleet_of(name))
    assert bill_files(fleet) == bill_files(fleet_of(name)[0])


def test_another_seed_is_another_fleet() -> None:
    first, second = (telemetry_files(f, observe(f))[0] for f in (build(tiny_spec(1)), build(tiny_spec(2))))
    assert not set(first) & set(second)


@every_spec
def test_every_shard_passes_the_collectors_checks_except_the_damaged(name: str) -> None:
    first, second, corrupt, _ = telemetry_files(*fleet_of(name))
    reasons = {
        path: examine(path, parse_name(path), data, last_day=LAST_DAY).reason
        for path, data in {**first, **second}.items()
    }
    assert [path for path, reason in reasons.items() if reason is not None] == corrupt


@every_spec
def test_the_parts_of_a_step_window_add_up_to_its_wall_time(name: str) -> None:
    for row in rows_of(name)[STEP_WINDOWS.name]:
        gap = row["input_stall_ns"] + row["checkpoint_ns"] + row["held_idle_ns"]
        assert row["active_ns"] + gap == row["wall_ns"]
        assert row["sampled_units"] <= row["units"] and row["sampled_active_ns"] <= row["active_ns"]


@every_spec
def test_exclusive_time_adds_up_to_sampled_active_time(name: str) -> None:
    spec = SPECS[name]
    sides: tuple[dict[Any, int], dict[Any, int]] = defaultdict(int), defaultdict(int)
    tables = ((STEP_WINDOWS, "sampled_active_ns"), (OP_WINDOWS, "exclusive_ns"))
    for side, (table, column) in zip(sides, tables, strict=True):
        for row in rows_of(name)[table.name]:
            window = at(row["window_start_utc"]) // (spec.op_window_s * SECOND)
            side[row["job_id"], row["attempt"], row["rank"], row["batch_size"], window] += row[column]
    assert sides[0] == sides[1]


@every_spec
def test_op_rows_carry_their_key_and_the_flops_of_all_units(name: str) -> None:
    fleet, timeline = fleet_of(name)
    for row in rows_of(name)[OP_WINDOWS.name]:
        parts = (row["layer"], row["pass"], row["op"], row["phase"], row["batch_size"], row["dtype"])
        assert row["op_key"] == op_key(*parts)
        assert row["busy_ns"] >= row["exclusive_ns"] and row["sampled_calls"] <= row["calls"]
    flops = sum(row["flops"] for row in rows_of(name)[OP_WINDOWS.name])
    expected = 0
    for (tenant, _, _, batch), total in timeline.totals.items():
        work = fleet.tenants[tenant].work
        assert work is not None
        one = forward(work.network, batch, work.seq, work.blocks)
        one += backward(work.network, batch, work.seq, work.blocks) if work.phase == "train" else []
        expected += total.units * sum(op.flops for op in one)
    assert flops == expected


def test_an_op_key_is_the_signed_blake2b_64_of_its_parts() -> None:
    digest = hashlib.blake2b(b"lm_head|fwd|matmul|train|1|bf16", digest_size=8).digest()
    assert op_key("lm_head", "fwd", "matmul", "train", 1, "bf16") == int.from_bytes(digest, "big", signed=True)


def test_ranks_sample_the_same_units_and_squares_are_of_single_units() -> None:
    timeline = fleet_of("sampled")[1]
    sampled: dict[Any, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for step in timeline.steps:
        sampled[step.tenant, step.batch, step.window_s // 3_600][step.rank] += step.sampled_units
    assert all(len(set(ranks.values())) == 1 for ranks in sampled.values())
    assert all(min(ranks.values()) >= 1 for ranks in sampled.values())
    single = [row for row in timeline.ops if row.sampled_units == 1]
    assert single and all(row.us2 == (row.exclusive // 1_000) ** 2 for row in single)
    many = [row for row in timeline.ops if row.sampled_units > 1]
    assert many and all(row.us2 * row.sampled_units >= (row.exclusive // 1_000) ** 2 for row in many)


def test_sampling_is_a_hash_of_job_attempt_and_unit() -> None:
    flags = [is_sampled("job", 0, unit, 100_000) for unit in range(20_000)]
    assert flags != [is_sampled("job", 1, unit, 100_000) for unit in range(20_000)]
    assert 1_800 < sum(flags) < 2_200
    assert all(is_sampled("job", 0, unit, MILLION) for unit in range(100))


@every_spec
def test_readings_and_step_windows_cover_exactly_what_the_truth_calls_observed(name: str) -> None:
    fleet, _ = fleet_of(name)
    lost = fleet.lost_readings(with_late=True)
    numbers = {machine.stated_id: n for n, machine in enumerate(fleet.machines)}
    covered: dict[tuple[str, int], set[int]] = defaultdict(set)
    period = SPECS[name].period_s * SECOND
    for row in rows_of(name)[DEVICE_SAMPLES.name]:
        start = at(row["sampled_at_utc"]) - row["covered_ns"]
        assert row["covered_ns"] == period
        if row["state"] == "ok":
            assert (numbers[row["instance_id"]], (start - fleet.spec.day_ns) // HOUR) not in lost
            covered[row["gpu_uuid"], start // HOUR].add(start)
    for row in rows_of(name)[STEP_WINDOWS.name]:
        start = at(row["window_start_utc"])
        covered[row["device_uuid"], start // HOUR] |= set(range(start, start + row["window_ns"], period))
    found: dict[Any, int] = defaultdict(int)
    for (_, hour), vector in truth_of(name).observed.items():
        for place, ns in vector.items():
            found[place.device, fleet.spec.day_ns // HOUR + hour] += ns
    assert found == {key: len(starts) * period for key, starts in covered.items()}


def test_time_of_layers_is_told_exactly_when_every_unit_is_sampled() -> None:
    fleet, _ = fleet_of("tiny")
    told: dict[Any, int] = defaultdict(int)
    for row in rows_of("tiny")[OP_WINDOWS.name]:
        if row["pass"] in ("fwd", "bwd", "optim"):
            hour = (at(row["window_start_utc"]) - fleet.spec.day_ns) // HOUR
            told[hour, row["job_id"], row["layer"], row["pass"], row["op"]] += row["exclusive_ns"]
    true: dict[Any, int] = defaultdict(int)
    for (hour, job, _, _), layers in truth_of("tiny").layer_ns.items():
        for layer, ns in layers.items():
            true[hour, job, layer.layer, layer.direction, layer.op] += ns
    assert told == true


def test_layers_found_from_samples_are_near_the_truth_and_categories_are_exact() -> None:
    timeline = fleet_of("sampled")[1]
    seen: dict[Any, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    active: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for step in timeline.steps:
        key = step.tenant, step.rank, step.window_s // 3_600, step.batch
        active[key][0] += step.active
        active[key][1] += step.sampled_active
    for op in timeline.ops:
        key = op.tenant, op.rank, op.window_s // 3_600, op.batch
        seen[key][op.op.layer, op.op.direction, op.op.kind] += op.exclusive
    off = 0
    for key, total in timeline.totals.items():
        all_of, part = active[key]
        assert total.active == all_of
        for place, ns in total.ops.items():
            estimate = seen[key][place] * all_of / part
            if place[1] in ("comm", "copy", "none"):
                assert seen[key][place] * all_of == ns * part
            assert abs(estimate - ns) <= 0.1 * ns
            off += estimate != ns
    assert off


def _sums(truths: Iterable[Truth]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for truth in truths:
        for a in truth.addresses:
            if a.estimated is None:
                for i, value in enumerate((a.billed, a.effective, a.listed, a.promotional)):
                    found[a.charge][i] += value or 0
    return {label: tuple(v) for label, v in found.items()}


@every_spec
def test_addresses_add_up_to_each_charge_over_all_days_in_both_ledgers(name: str) -> None:
    fleet, timeline = fleet_of(name)
    for delivery in range(1, len(deliveries(fleet)) + 1):
        truths = [
            true_ledger(fleet, timeline=timeline, delivery=delivery, day_ns=day) for day in usage_days(fleet, delivery)
        ]
        for truth in truths:
            assert _sums([truth]) == truth.day_parts
        expected: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for charge in charges(fleet, delivery):
            for i, amount in enumerate((charge.billed, charge.effective, charge.listed, charge.promotional)):
                expected[charge.label][i] += units(amount)
        assert _sums(truths) == {label: tuple(amounts) for label, amounts in expected.items()}


@pytest.mark.parametrize("seed", range(8))
def test_addresses_add_up_whatever_switches_are_thrown(seed: int) -> None:
    fleet = build(random_spec(seed))
    timeline = observe(fleet)
    for day in usage_days(fleet):
        truth = true_ledger(fleet, timeline=timeline, day_ns=day)
        assert _sums([truth]) == truth.day_parts


@every_spec
def test_time_of_each_machine_hour_adds_up_to_the_billed_span_of_every_gpu(name: str) -> None:
    fleet, _ = fleet_of(name)
    truth = truth_of(name)
    counts = {machine.instance_id: machine.facts.gpu_count for machine in fleet.machines}
    assert truth.spans
    for (machine, hour), span in truth.spans.items():
        vector = truth.vectors[machine, hour]
        # A row of a whole day bills nothing of the hours in which its machine did not run: what was seen stays as it is.
        seen = sum(truth.observed.get((machine, hour), {}).values())
        assert sum(vector.values()) == (counts[machine] * span if span else seen)
        assert min(vector.values(), default=0) >= 0


@every_spec
def test_layers_add_up_to_the_work_of_their_pools(name: str) -> None:
    truth = truth_of(name)
    work, layers = [0, 0, 0], [0, 0, 0]
    for a in truth.addresses:
        if a.place.category == "work":
            for i, value in enumerate((a.billed, a.effective, a.estimated)):
                work[i] += value or 0
    for row in truth.layers:
        for i, value in enumerate((row.billed, row.effective, row.estimated)):
            layers[i] += value or 0
    assert work == layers and any(work)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "azure"])
def test_doubles_of_the_export_read_back_as_the_decimals_of_the_bill(name: str) -> None:
    fleet, _ = fleet_of(name)
    files = [data for path, data in bill_files(fleet) if path.endswith(".parquet")]
    table = pa.concat_tables([pq.read_table(pa.BufferReader(data)) for data in files])
    assert table.schema.field("BilledCost").type == pa.float64()
    found = sorted((str(x["BilledCost"]), str(x["EffectiveCost"])) for x in table.to_pylist())
    assert found == sorted((str(float(c.billed)), str(float(c.effective))) for c in charges(fleet))


def test_largest_remainder_and_half_even_round_as_the_ledger_says() -> None:
    assert largest_remainder(10, [1, 1, 1]) == [4, 3, 3]
    assert largest_remainder(-10, [1, 1, 1]) == [-4, -3, -3]
    assert largest_remainder(0, [0, 5]) == [0, 0]
    assert [half_even(Fraction(n, 2)) for n in (1, 3, 5, -1, -3)] == [0, 2, 2, 0, -2]


def test_a_tiny_fleet_is_small() -> None:
    first, second, _, _ = telemetry_files(*fleet_of("tiny"))
    assert len(first) + len(second) <= 12 and sum(map(len, first.values())) < 300_000


def test_a_spec_whose_windows_do_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError):
        FleetSpec(period_s=7)
