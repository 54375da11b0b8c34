"""Slices, declared limits and fractions of a fleet: what is read of them, and how a billed hour divides, by hand."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest

from seedance.schema import DEVICE_SAMPLES, PROCESS_SAMPLES, TELEMETRY
from seedance.shard import parse_name, read_shard
from tests.fleet import Fleet, FleetSpec, Place, Timeline, build, observe, telemetry_files, tiny_spec, true_ledger
from tests.fleet.fitted import NOWHERE, fitted
from tests.fleet.model import HOUR, MILLION, SECOND, Machine, Slice, Stretch, Tenant
from tests.fleet.observed import Vector, observed_time

CLOUDS = ("aws", "azure", "gcp")
every_cloud = pytest.mark.parametrize("cloud", CLOUDS)


def machine_of(kind: str, *profiles: str) -> Machine:
    """A machine whose first GPU is cut."""
    return Machine("i-1", kind, "node", 0, 3_600, 0, slices=tuple(Slice(0, p) for p in profiles))


def at(device: str, category: str, job: str | None = None) -> Place:
    """A place; a job has attempt and rank 0."""
    return Place(device, job, None if job is None else 0, None if job is None else 0, category)


def cut_fleet(seconds: dict[str, int] | None = None) -> tuple[Machine, list[str], Vector]:
    """A GPU in slices of 3, 2 and 1 of 7: a job on the first, seen for 3,000 s, and nobody on the others."""
    machine = machine_of("p5.4xlarge", "3g.40gb", "2g.20gb", "1g.10gb")
    slices = [machine.device(1 + n) for n in range(3)]
    seen = {
        at(slices[0], "work", "J"): 2_400 * SECOND,
        at(slices[0], "held_idle", "J"): 600 * SECOND,
        at(slices[1], "idle"): 3_600 * SECOND,
        at(slices[2], "idle"): 1_800 * SECOND,
    }
    return machine, slices, seen


def test_a_span_goes_over_slices_by_compute_and_the_rest_is_idle() -> None:
    machine, slices, seen = cut_fleet()
    found = fitted(machine, seen, HOUR)
    # 3, 2, 1 and 1 sevenths: 1,542,857,142,857.1, 1,028,571,428,571.4 and twice 514,285,714,285.7, which get the two odd ns.
    # Of the first, 2,400, 600 and 600 of 3,600: 1,028,571,428,571.3 and twice 257,142,857,142.8, which get the two odd ns.
    assert found == {
        at(slices[0], "held_idle", "J"): 257_142_857_143,
        at(slices[0], "work", "J"): 1_028_571_428_571,
        at(slices[0], "unobserved"): 257_142_857_143,
        at(slices[1], "idle"): 1_028_571_428_571,
        at(slices[2], "idle"): 257_142_857_143,
        at(slices[2], "unobserved"): 257_142_857_143,
        at(machine.device(0), "idle"): 514_285_714_286,
    }
    assert sum(found.values()) == HOUR


def test_slices_that_were_seen_for_more_than_the_span_are_scaled_and_nothing_of_them_is_unobserved() -> None:
    machine, slices, seen = cut_fleet()
    found = fitted(machine, seen, 7)
    assert found == {
        at(slices[0], "work", "J"): 2,
        at(slices[0], "held_idle", "J"): 1,
        at(slices[1], "idle"): 2,
        at(slices[2], "idle"): 1,
        at(machine.device(0), "idle"): 1,
    }


@pytest.mark.parametrize(
    ("profiles", "compute", "rest"),
    [
        (("4g.40gb", "3g.40gb"), (4, 3), 0),
        (("1c.3g.40gb", "2c.3g.40gb", "2g.20gb"), (1, 2, 2), 2),
        (("1g.10gb+me", ""), (1, 1), 5),
        (("4g.40gb", "4g.40gb"), (4, 4), 0),
    ],
)
def test_compute_slices_come_from_the_profile(profiles: tuple[str, ...], compute: tuple[int, ...], rest: int) -> None:
    machine = machine_of("p5.4xlarge", *profiles)
    seen = {at(machine.device(1 + n), "idle"): HOUR for n in range(len(profiles))}
    span = sum(compute) + rest
    found = fitted(machine, seen, span * SECOND)
    wanted = {at(machine.device(1 + n), "idle"): k * SECOND for n, k in enumerate(compute)}
    assert found == wanted | ({at(machine.device(0), "idle"): rest * SECOND} if rest else {})


def test_slices_of_one_gpu_count_once_and_gpus_that_nobody_reads_are_unobserved() -> None:
    machine = machine_of("p4d.24xlarge", "3g.20gb", "4g.20gb")
    whole = machine.device(5)
    seen = {at(machine.device(8), "idle"): HOUR, at(machine.device(9), "idle"): HOUR, at(whole, "idle"): HOUR}
    found = fitted(machine, seen, HOUR)
    assert found[NOWHERE] == 6 * HOUR and found[at(whole, "idle")] == HOUR
    assert sum(found.values()) == 8 * HOUR
    assert found[at(machine.device(8), "idle")] + found[at(machine.device(9), "idle")] == HOUR


def held_fleet(*limits: int) -> Fleet:
    """A GPU for an hour: one notebook all the time, half of it busy, and a second one from the middle on."""
    spec = FleetSpec(hours=1, period_s=600, window_s=600, op_window_s=600)
    machine = Machine("i-1", "g6.xlarge", "node", 0, 3_600, 0)
    tenants = [
        Tenant(((0, 0),), 0, (Stretch("held", start, 3_600, busy),), share_ppm=limit, declared_by="mps")
        for start, busy, limit in zip((0, 1_800), (500_000, 250_000), limits, strict=False)
    ]
    return Fleet(spec, (machine,), tuple(tenants))


def test_declared_limits_share_time_alone_and_together_and_leave_the_rest_idle() -> None:
    fleet = held_fleet(600_000, 300_000)
    found = observed_time(Timeline(fleet))[0, 0]
    gpu = fleet.machines[0].device(0)
    # 0.6 of 3,600 s and 0.3 of 1,800 s, half of each busy, as the busier of the two makes the device.
    assert found == {
        at(gpu, "unattributed_busy"): 1_350 * SECOND,
        at(gpu, "held_idle"): 1_350 * SECOND,
        at(gpu, "idle"): 900 * SECOND,
    }


def test_a_single_holder_under_a_limit_leaves_the_rest_idle() -> None:
    fleet = held_fleet(600_000)
    found = observed_time(Timeline(fleet))[0, 0]
    assert found[at(fleet.machines[0].device(0), "idle")] == 1_440 * SECOND


def test_limits_above_the_whole_are_refused() -> None:
    with pytest.raises(AssertionError, match="hold more than there is"):
        observed_time(Timeline(held_fleet(600_000, 500_000)))


@cache
def seen(cloud: str, switch: str, seed: int = 3) -> tuple[Fleet, dict[str, list[dict[str, Any]]], Machine]:
    """A fleet with one switch, its rows, and the machine of the switch."""
    fleet = build(tiny_spec(seed, cloud=cloud, **{switch: True}))
    first, second, _, _ = telemetry_files(fleet, observe(fleet))
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path, data in {**first, **second}.items():
        table = TELEMETRY[parse_name(path).table]
        rows[table.name] += read_shard(data, table, where=path)[1].to_pylist()
    machine = fleet.machines[-1]
    assert machine.instance_type == fleet.spec.profile.types[switch]
    return fleet, rows, machine


@every_cloud
def test_under_mig_utilisation_is_not_available_and_the_gpu_is_read_beside_its_slices(cloud: str) -> None:
    _, rows, machine = seen(cloud, "mig")
    uuids = {machine.device(n) for n in range(machine.facts.gpu_count)}
    readings = [r for r in rows[DEVICE_SAMPLES.name] if r["gpu_uuid"] in uuids]
    slices = [r for r in readings if r["mig_uuid"]]
    assert {(r["mig_uuid"], r["gpu_uuid"]) for r in slices} == set(machine.gpu_of.items())
    assert {r["mig_profile"] for r in slices} == {piece.profile or None for piece in machine.slices}
    assert all(r["gpu_util_ppm"] is None and r["power_mw"] is None for r in slices)
    cut = {machine.device(piece.gpu) for piece in machine.slices}
    last = max(r["sampled_at_utc"] for r in readings)
    parents = [r for r in readings if r["sampled_at_utc"] == last and not r["mig_uuid"] and r["gpu_uuid"] in cut]
    assert {r["gpu_uuid"] for r in parents} == cut
    assert all(r["gpu_util_ppm"] is None and r["power_mw"] is not None for r in parents)
    assert all(r["sm_util_ppm"] is None for r in rows[PROCESS_SAMPLES.name] if r["device_uuid"].startswith("MIG-"))


@every_cloud
def test_a_gpu_has_no_time_of_its_own_in_an_hour_in_which_its_slices_were_seen(cloud: str) -> None:
    spec = tiny_spec(1, cloud=cloud, mig=True)
    fleet = build(spec)
    (number,) = [n for n, m in enumerate(fleet.machines) if m.slices]
    machine = fleet.machines[number]
    cut = {machine.device(piece.gpu) for piece in machine.slices}
    for (n, hour), vector in observed_time(observe(fleet)).items():
        if n == number:
            devices = {place.device for place in vector}
            is_cut = (hour + 1) * 3_600 > machine.cut_s
            assert (devices & set(machine.gpu_of)) == (set(machine.gpu_of) if is_cut else set())
            assert not (devices & cut) if is_cut else cut <= devices


@every_cloud
@pytest.mark.parametrize(("switch", "owner"), [("mps", "mps"), ("fractions", "k8s")])
def test_limits_are_told_beside_the_process_and_say_who_declared_them(cloud: str, switch: str, owner: str) -> None:
    fleet, rows, machine = seen(cloud, switch)
    mine = [r for r in rows[PROCESS_SAMPLES.name] if r["device_uuid"] == machine.device(0)]
    limits = {t.job_id: t.share_ppm for t in fleet.tenants if t.declared_by}
    assert {(r["job_id"], r["mps_limit_ppm"]) for r in mine} == set(limits.items())
    assert {r["owner_source"] for r in mine} == {owner} and {r["sm_util_ppm"] for r in mine} == {None}
    at_once: dict[Any, int] = defaultdict(int)
    for row in mine:
        at_once[row["sampled_at_utc"]] += 1
    assert set(at_once.values()) == {1, 2}


@every_cloud
@pytest.mark.parametrize("switch", ["mig", "mps", "fractions"])
@pytest.mark.parametrize("seed", range(3))
def test_time_of_every_gpu_adds_up_to_the_span(cloud: str, switch: str, seed: int) -> None:
    fleet = build(tiny_spec(seed, cloud=cloud, **{switch: True}))
    truth = true_ledger(fleet)
    machine = fleet.machines[-1]
    hours = [hour for (name, hour), span in truth.spans.items() if name == machine.instance_id and span]
    assert hours
    for hour in hours:
        by_gpu: dict[str, int] = defaultdict(int)
        for place, ns in truth.vectors[machine.instance_id, hour].items():
            assert place.device is not None and ns > 0
            by_gpu[machine.gpu_of.get(place.device, place.device)] += ns
        assert set(by_gpu.values()) == {truth.spans[machine.instance_id, hour]}
        assert len(by_gpu) == machine.facts.gpu_count


@every_cloud
def test_jobs_under_limits_get_their_part_of_every_unit(cloud: str) -> None:
    fleet, _, machine = seen(cloud, "mps")
    timeline = observe(fleet)
    vectors = observed_time(timeline)
    for who, tenant in enumerate(fleet.tenants):
        if tenant.declared_by:
            for hour in range(2):
                worked = sum(
                    ns
                    for key, total in timeline.totals.items()
                    if (key[0], key[2]) == (who, hour)
                    for (_, direction, _), ns in total.ops.items()
                    if direction == "fwd"
                )
                place = at(machine.device(0), "work", tenant.job_id)
                assert vectors[len(fleet.machines) - 1, hour][place] * MILLION == worked * tenant.share_ppm > 0
