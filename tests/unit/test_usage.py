"""The hour of a device: gaps, startup, what was busy, what nobody saw, several holders, edges of the hour; energy; places."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from schemas.partials import REPEATS
from schemas.usage import DEVICE_HOURLY, LAYER_HOURLY
from seedance.schema import DEVICE_SAMPLES
from tasks.core import usage
from tasks.errors import LawError
from tests.shard_tables import SECOND
from tests.telling import (
    DAY,
    HOUR_NS,
    Rows,
    begin,
    day_of,
    host,
    layer_ns,
    op,
    processes,
    readings,
    step,
    vector,
)
from tests.unit.test_layers import example_ops, example_step

S = SECOND


def test_the_worked_example_to_the_nanosecond() -> None:
    """2,000 ns of startup, 47,000 ns of units; the reading covers both, and the bill's last 1,000 ns are nobody's here."""
    made = day_of(
        host(
            readings=readings(0, 49_000, 1_000),
            processes=processes(0, 49_000, 1_000),
            steps=[example_step() | {"window_start_utc": begin(3) + 2_000}],
            ops=example_ops(),
            period=1_000,
        )
    )
    assert vector(made) == {
        ("job-1", "startup"): 2_000,
        ("job-1", "work"): 25_939,
        ("job-1", "communication"): 5_986,
        ("job-1", "checkpoint"): 60,
        ("job-1", "input_stall"): 6_400,
        ("job-1", "held_idle"): 8_615,
    }
    assert sum(vector(made).values()) == 49_000
    assert {r["evidence"] for r in made[DEVICE_HOURLY.name].to_pylist()} == {"measured"}


def test_no_process_is_idle() -> None:
    made = day_of(host(readings=readings(0, 100 * S, 10 * S, process_count=0)))
    assert vector(made) == {(None, "idle"): 100 * S}


def test_a_call_that_counts_no_process_beats_a_process_row() -> None:
    made = day_of(host(readings=readings(0, 100 * S, 10 * S, process_count=0), processes=processes(0, 100 * S, 10 * S)))
    assert vector(made) == {(None, "idle"): 100 * S}


def test_a_job_without_a_unit_is_starting_if_it_began_today() -> None:
    seen: Any = {"readings": readings(0, 100 * S, 10 * S)}
    today = day_of(host(**seen, processes=processes(0, 100 * S, 10 * S, started=-HOUR_NS)))
    assert vector(today) == {("job-1", "startup"): 100 * S}
    before = day_of(host(**seen, processes=processes(0, 100 * S, 10 * S, started=-4 * HOUR_NS)))
    assert vector(before) == {("job-1", "unattributed_busy"): 50 * S, ("job-1", "held_idle"): 50 * S}


def test_startup_is_decided_over_the_hours_of_the_day() -> None:
    def quiet(hour: int) -> list[Any]:
        held = processes(0, HOUR_NS, 100 * S, hour=hour, started=(3 - hour) * HOUR_NS)
        return host(readings=readings(0, HOUR_NS, 100 * S, hour=hour), processes=held, hour=hour, period=100 * S)

    unit = step(600 * S, 10 * S, hour=4, active=10 * S)
    busy = host(
        readings=readings(0, HOUR_NS, 100 * S, hour=4),
        processes=processes(0, HOUR_NS, 100 * S, hour=4, started=-HOUR_NS),
        steps=[unit],
        ops=[op("a", 10 * S, hour=4)],
        hour=4,
        period=100 * S,
    )
    made = day_of(quiet(3), busy, quiet(5))
    assert vector(made, hour=3) == {("job-1", "startup"): HOUR_NS}
    rest = HOUR_NS - 610 * S
    assert vector(made, hour=4) == {
        ("job-1", "startup"): 600 * S,
        ("job-1", "work"): 10 * S,
        ("job-1", "unattributed_busy"): rest // 2,
        ("job-1", "held_idle"): rest // 2,
    }
    assert vector(made, hour=5) == {("job-1", "unattributed_busy"): HOUR_NS // 2, ("job-1", "held_idle"): HOUR_NS // 2}


def test_an_unclaimed_process_holds_without_a_job() -> None:
    made = day_of(
        host(
            readings=readings(0, 90 * S, 10 * S, gpu_util_ppm=333_333),
            processes=processes(0, 90 * S, 10 * S, job_id=None),
        )
    )
    assert vector(made) == {
        (None, "unattributed_busy"): 9 * 3_333_330_000,
        (None, "held_idle"): 90 * S - 9 * 3_333_330_000,
    }


def test_without_process_rows_counted_processes_hold_without_a_job() -> None:
    made = day_of(host(readings=readings(0, 100 * S, 10 * S, gpu_util_ppm=200_000)))
    assert vector(made) == {(None, "unattributed_busy"): 20 * S, (None, "held_idle"): 80 * S}


def test_a_failed_process_call_is_not_idle() -> None:
    """Without the count nobody knows whether the device is held: what was busy was busy, the rest is unobserved."""
    made = day_of(host(readings=readings(0, 100 * S, 10 * S, process_count=None, gpu_util_ppm=300_000)))
    assert vector(made) == {(None, "unattributed_busy"): 30 * S, (None, "unobserved"): 70 * S}
    blind = day_of(host(readings=readings(0, 100 * S, 10 * S, process_count=None, gpu_util_ppm=None)))
    assert vector(blind) == {(None, "unobserved"): 100 * S}


def test_utilisation_falls_back_to_sm_activity_then_to_unobserved() -> None:
    held = processes(0, 20 * S, 10 * S, started=-4 * HOUR_NS)
    rows = readings(0, 10 * S, 10 * S, gpu_util_ppm=None, sm_active_ppm=100_000) + readings(
        10 * S, 20 * S, 10 * S, gpu_util_ppm=None
    )
    made = day_of(host(readings=rows, processes=held))
    assert vector(made) == {
        ("job-1", "unattributed_busy"): S,
        ("job-1", "held_idle"): 9 * S,
        ("job-1", "unobserved"): 10 * S,
    }
    assert vector(day_of(host(readings=readings(0, 10 * S, 10 * S, gpu_util_ppm=None, process_count=0)))) == {
        (None, "idle"): 10 * S
    }


def test_a_reading_covers_three_periods_at_most_and_only_if_it_is_ok() -> None:
    late = readings(0, 10 * S, 10 * S, process_count=0) + readings(0, 100 * S, 100 * S, process_count=0)
    assert vector(day_of(host(readings=late))) == {(None, "idle"): 40 * S}
    lost = readings(0, 50 * S, 10 * S, process_count=0) + readings(
        50 * S, 90 * S, 10 * S, process_count=0, state="lost"
    )
    assert vector(day_of(host(readings=lost))) == {(None, "idle"): 50 * S}


def test_readings_that_overlap_count_once() -> None:
    rows = readings(0, 30 * S, 10 * S, process_count=0) + readings(5 * S, 35 * S, 10 * S, process_count=0)
    assert vector(day_of(host(readings=rows))) == {(None, "idle"): 35 * S}


def test_a_reading_over_the_edge_of_the_hour_is_cut() -> None:
    """Busy parts of the two hours add up to the whole reading's."""
    facts: Any = {"gpu_util_ppm": 333_333, "process_count": 1}
    back = readings(-3 * S - 1, 7 * S - 1, 10 * S, hour=4, **facts)
    made = day_of(
        host(readings=readings(0, HOUR_NS - 3 * S - 1, (HOUR_NS - 3 * S - 1) // 1, **facts), period=HOUR_NS),
        host(readings=back, hour=4),
    )
    assert sum(vector(made, hour=3).values()) == HOUR_NS
    assert sum(vector(made, hour=4).values()) == 7 * S - 1
    whole = (HOUR_NS - 3 * S - 1) * 333_333 // 10**6 + 10 * S * 333_333 // 10**6
    assert vector(made, hour=3)[None, "unattributed_busy"] + vector(made, hour=4)[None, "unattributed_busy"] == whole
    assert made[DEVICE_HOURLY.name].column("instance_id").to_pylist() == ["i-0a"] * 4


def test_what_reaches_back_into_a_stepping_hour_changes_nothing_there() -> None:
    """Step windows go first, wherever the reading of their time lies."""
    before = host(
        readings=readings(0, HOUR_NS - 4 * S, 4 * S),
        processes=processes(0, HOUR_NS - 4 * S, 4 * S),
        steps=[step(0, HOUR_NS, active=HOUR_NS)],
        ops=[op("a", HOUR_NS)],
        period=4 * S,
    )
    after = host(
        readings=readings(-4 * S, 4 * S, 8 * S, hour=4),
        processes=processes(-4 * S, 4 * S, 8 * S, hour=4, started=-HOUR_NS),
        hour=4,
    )
    assert vector(day_of(before, after), hour=3) == {("job-1", "work"): HOUR_NS}
    assert vector(day_of(after), hour=3) == {("job-1", "startup"): 4 * S}


def test_a_reading_before_midnight_is_another_days() -> None:
    made = day_of(host(readings=readings(-5 * S, 5 * S, 10 * S, hour=0, process_count=0), hour=0))
    assert sum(made[DEVICE_HOURLY.name].column("ns").to_pylist()) == 5 * S


def test_units_longer_than_windows_take_their_time_from_what_their_job_claims() -> None:
    """Units of 25 s written in windows of 10 s where they end: the time between is not busy twice."""
    units = [step(first * S, 10 * S, active=25 * S) for first in (115, 140, 165)]
    made = day_of(
        host(
            readings=readings(0, 200 * S, 5 * S, gpu_util_ppm=1_000_000),
            processes=processes(20 * S, 200 * S, 5 * S, started=20 * S),
            steps=units,
            ops=[op("a", 75 * S)],
            period=5 * S,
        )
    )
    # Three windows of 10 s hold 75 s: 45 s come from the 25 + 30 s that the job claims between and after them.
    assert vector(made) == {
        (None, "unattributed_busy"): 20 * S,
        ("job-1", "startup"): 95 * S,
        ("job-1", "work"): 75 * S,
        ("job-1", "unattributed_busy"): 10 * S,
    }


def test_excess_comes_from_startup_when_nothing_else_is_left() -> None:
    made = day_of(
        host(
            readings=readings(0, 100 * S, 10 * S),
            processes=processes(0, 100 * S, 10 * S),
            steps=[step(50 * S, 50 * S, active=70 * S)],
            ops=[op("a", S)],
        )
    )
    assert vector(made) == {("job-1", "startup"): 30 * S, ("job-1", "work"): 70 * S}


def test_windows_that_hold_less_than_their_length_leave_held_idle() -> None:
    made = day_of(
        host(
            readings=readings(0, 100 * S, 10 * S),
            processes=processes(0, 100 * S, 10 * S),
            steps=[step(0, 100 * S, active=60 * S)],
            ops=[op("a", S)],
        )
    )
    assert vector(made) == {("job-1", "work"): 60 * S, ("job-1", "held_idle"): 40 * S}
    unread = day_of(host(steps=[step(0, 100 * S, active=60 * S)], ops=[op("a", S)]))
    assert vector(unread) == {("job-1", "work"): 60 * S}


def shared(
    *, utils: tuple[int | None, int | None], limits: tuple[int | None, int | None] = (None, None)
) -> dict[str, pa.Table]:
    """Two jobs that step on one device for 100 s."""
    who: list[dict[str, Any]] = [{"job_id": "A", "host_pid": 1}, {"job_id": "B", "host_pid": 2}]
    seen: Rows = []
    for facts, util, limit in zip(who, utils, limits, strict=True):
        seen += processes(0, 100 * S, 10 * S, sm_util_ppm=util, mps_limit_ppm=limit, **facts)
    steps = [step(0, 100 * S, active=80 * S, stall=20 * S, job_id=f["job_id"]) for f in who]
    return day_of(
        host(
            readings=readings(0, 100 * S, 10 * S, process_count=2),
            processes=seen,
            steps=steps,
            ops=[op("a", S, job_id=f["job_id"]) for f in who],
        )
    )


def test_sharing_below_one_leaves_held_idle_evenly() -> None:
    made = shared(utils=(500_000, 300_000))
    assert vector(made) == {
        ("A", "work"): 40 * S,
        ("A", "input_stall"): 10 * S,
        ("A", "held_idle"): 10 * S,
        ("B", "work"): 24 * S,
        ("B", "input_stall"): 6 * S,
        ("B", "held_idle"): 10 * S,
    }
    assert layer_ns(made) == {"a": 64 * S}
    assert {r["evidence"] for r in made[DEVICE_HOURLY.name].to_pylist()} == {"measured"}


def test_shares_above_one_scale_to_one() -> None:
    made = shared(utils=(900_000, 600_000))
    assert vector(made) == {
        ("A", "work"): 48 * S,
        ("A", "input_stall"): 12 * S,
        ("B", "work"): 32 * S,
        ("B", "input_stall"): 8 * S,
    }


@pytest.mark.parametrize("utils", [(None, None), (400_000, None)])
def test_unknown_shares_are_even_and_say_so(utils: tuple[int | None, int | None]) -> None:
    made = shared(utils=utils)
    assert vector(made) == {(j, c): ns for j in "AB" for c, ns in (("work", 40 * S), ("input_stall", 10 * S))}
    assert {r["evidence"] for t in (DEVICE_HOURLY, LAYER_HOURLY) for r in made[t.name].to_pylist()} == {"assumed"}


def test_mps_limits_share_and_leave_the_rest_idle() -> None:
    made = shared(utils=(None, None), limits=(500_000, 250_000))
    assert vector(made) == {
        (None, "idle"): 25 * S,
        ("A", "work"): 40 * S,
        ("A", "input_stall"): 10 * S,
        ("B", "work"): 20 * S,
        ("B", "input_stall"): 5 * S,
    }


def test_odd_nanoseconds_of_shared_time_add_up() -> None:
    made = shared(utils=(333_333, 333_334))
    assert sum(vector(made).values()) == 100 * S
    work = {r["job_id"]: r["ns"] for r in made[DEVICE_HOURLY.name].to_pylist() if r["category"] == "work"}
    assert {r["job_id"]: r["ns"] for r in made[LAYER_HOURLY.name].to_pylist()} == work


def test_a_notebook_beside_a_job_takes_its_share() -> None:
    seen = processes(0, 100 * S, 10 * S, job_id="A", sm_util_ppm=600_000) + processes(
        0, 100 * S, 10 * S, job_id=None, host_pid=9, sm_util_ppm=400_000
    )
    made = day_of(
        host(
            readings=readings(0, 100 * S, 10 * S, process_count=2, gpu_util_ppm=500_000),
            processes=seen,
            steps=[step(0, 100 * S, active=100 * S, job_id="A")],
            ops=[op("a", S, job_id="A")],
        )
    )
    assert vector(made) == {("A", "work"): 60 * S, (None, "unattributed_busy"): 20 * S, (None, "held_idle"): 20 * S}


def test_processes_of_one_rank_are_one_holder() -> None:
    seen = processes(0, 100 * S, 10 * S, host_pid=1) + processes(
        0, 100 * S, 10 * S, host_pid=2, rank=None, attempt=None
    )
    made = day_of(
        host(
            readings=readings(0, 100 * S, 10 * S, process_count=2),
            processes=seen,
            steps=[step(0, 100 * S, active=100 * S)],
            ops=[op("a", S)],
        )
    )
    assert vector(made) == {("job-1", "work"): 100 * S}


def test_a_fraction_that_kubernetes_declares_leaves_the_rest_idle() -> None:
    """A single holder too: 0.3 of a GPU is what it was given, and the other 0.7 are nobody's."""
    held = processes(0, 100 * S, 10 * S, owner_source="k8s", sm_util_ppm=None, mps_limit_ppm=300_000)
    made = day_of(
        host(
            readings=readings(0, 100 * S, 10 * S),
            processes=held,
            steps=[step(0, 100 * S, active=80 * S, stall=20 * S)],
            ops=[op("a", S)],
        )
    )
    assert vector(made) == {("job-1", "work"): 24 * S, ("job-1", "input_stall"): 6 * S, (None, "idle"): 70 * S}


def test_more_than_an_hour_is_an_error() -> None:
    with pytest.raises(
        LawError, match=r"device GPU-1 of node-a in the hour 2026-11-27T03: .* 3,600,000,000,001 ns, at most"
    ) as error:
        day_of(host(steps=[step(0, 10 * S, active=HOUR_NS + 1)], ops=[op("a", 1)]))
    assert error.value.law == "time" and error.value.expected == HOUR_NS + 1


def energies(tables: dict[str, pa.Table]) -> dict[tuple[str | None, str], int | None]:
    return {(r["job_id"], r["category"]): r["energy_mj"] for r in tables[DEVICE_HOURLY.name].to_pylist()}


def test_energy_follows_time() -> None:
    made = day_of(
        host(
            readings=readings(0, 100 * S, 10 * S, energy_mj=1_001),
            processes=processes(20 * S, 100 * S, 10 * S, started=20 * S),
            steps=[step(40 * S, 60 * S, active=45 * S, stall=15 * S)],
            ops=[op("a", S)],
        )
    )
    # Readings of the first 20 s count a process that no row names.
    assert energies(made) == {
        (None, "unattributed_busy"): 1_001,
        (None, "held_idle"): 1_001,
        ("job-1", "startup"): 2_002,
        ("job-1", "work"): 4_505,
        ("job-1", "input_stall"): 1_501,
    }
    assert set(energies(day_of(host(readings=readings(0, 100 * S, 10 * S)))).values()) == {None}


def test_energy_of_a_cut_reading_adds_up() -> None:
    made = day_of(
        host(readings=readings(HOUR_NS - 10 * S, HOUR_NS, 10 * S, process_count=0, energy_mj=7)),
        host(readings=readings(-3 * S, 7 * S, 10 * S, hour=4, process_count=0, energy_mj=9), hour=4),
    )
    found = {r["hour_utc"].hour: r["energy_mj"] for r in made[DEVICE_HOURLY.name].to_pylist()}
    assert found == {3: 7, 4: 7}  # 3 of the 10 s repeat time that is read already: their 2 mJ are not given twice


def test_places_come_from_readings_then_footers_then_other_hours() -> None:
    unit: Any = {"steps": [step(0, 10, active=10)], "ops": [op("a", 10)]}
    only_steps = day_of(host(**unit))[DEVICE_HOURLY.name].to_pylist()[0]
    assert (only_steps["cloud"], only_steps["instance_id"], only_steps["instance_type"], only_steps["gpu_model"]) == (
        "aws",
        "i-0a",
        "g5.xlarge",
        None,
    )
    nothing: Any = {"cloud": None, "instance_id": None, "instance_type": None}
    later = host(readings=readings(0, 10 * S, 10 * S, hour=4), hour=4)
    made = day_of(host(**unit, **nothing), later)
    rows = [r for r in made[DEVICE_HOURLY.name].to_pylist() if r["hour_utc"].hour == 3]
    assert [(r["instance_id"], r["instance_type"], r["gpu_model"]) for r in rows] == [
        ("i-0a", "g5.xlarge", "NVIDIA A10G")
    ]
    assert [(r["instance_type"], r["gpu_model"]) for r in made[LAYER_HOURLY.name].to_pylist()] == [
        ("g5.xlarge", "NVIDIA A10G")
    ]
    alone = day_of(host(**unit, **nothing))
    assert [r["instance_id"] for r in alone[DEVICE_HOURLY.name].to_pylist()] == [None]
    own = day_of(host(readings=readings(0, 10 * S, 10 * S, instance_id="i-own"), processes=[]))
    assert {r["instance_id"] for r in own[DEVICE_HOURLY.name].to_pylist()} == {"i-own"}


def test_a_host_that_changes_its_name_is_one_machine() -> None:
    early = host(readings=readings(0, 100 * S, 10 * S, process_count=0, energy_mj=3))
    later = host(readings=readings(100 * S, 150 * S, 10 * S, process_count=0), node="node-b")
    made = day_of(early, later)[DEVICE_HOURLY.name].to_pylist()
    assert [(r["node"], r["ns"], r["energy_mj"]) for r in made] == [("node-a", 150 * S, 30)]
    whole = [host(readings=readings(0, HOUR_NS, 100 * S, process_count=0), node=n, period=100 * S) for n in ("a", "b")]
    with pytest.raises(LawError, match="7,200,000,000,000 ns over several host names") as error:
        day_of(*whole)
    assert error.value.law == "time" and error.value.found == 2 * HOUR_NS


def test_a_step_window_across_a_change_of_the_host_s_name_does_not_fail_the_day() -> None:
    """The window of node-a ends 10 s after readings began to come from node-b: these 10 s are the window's."""
    early = host(
        readings=readings(0, 1800 * S, 100 * S),
        processes=processes(0, 1800 * S, 100 * S),
        steps=[step(0, 1810 * S, active=1810 * S)],
        ops=[op("a", S)],
        period=100 * S,
    )
    later = host(readings=readings(1800 * S, HOUR_NS, 100 * S, process_count=0), node="node-b", period=100 * S)
    assert vector(day_of(early, later)) == {("job-1", "work"): 1810 * S, (None, "idle"): 1790 * S}
    first = host(readings=readings(0, 1800 * S, 100 * S, process_count=0), node="node-a", period=100 * S)
    second = host(
        readings=readings(1800 * S, HOUR_NS, 100 * S),
        processes=processes(1800 * S, HOUR_NS, 100 * S),
        steps=[step(1790 * S, 1810 * S, active=1600 * S)],
        ops=[op("a", S)],
        node="node-b",
        period=100 * S,
    )
    assert vector(day_of(first, second)) == {
        ("job-1", "work"): 1600 * S,
        ("job-1", "held_idle"): 210 * S,
        (None, "idle"): 1790 * S,
    }


def test_rows_that_come_twice_count_once() -> None:
    one = readings(0, 100 * S, 10 * S, process_count=0)
    changed = [r | {"temperature_c": 99, "process_count": 1} for r in readings(50 * S, 60 * S, 10 * S)]
    repeated = host(readings=one) + host(readings=one[:3] + changed)
    for order in (repeated, repeated[::-1]):
        made = usage.partial(order)
        assert made[REPEATS.name].to_pylist() == [{"table": DEVICE_SAMPLES.name, "duplicates": 3, "conflicts": 1}]
        assert vector(usage.finish(usage.merge([made]), DAY)) == {(None, "idle"): 100 * S}
    ops = host(ops=[op("a", 6), op("b", 3)]) + host(ops=[op("a", 6)]) + host(steps=[step(0, 9, active=9)])
    assert layer_ns(day_of(ops)) == {"a": 6, "b": 3}


def test_a_bucket_is_one_hour() -> None:
    with pytest.raises(LawError, match="a bucket holds one hour; found shards of 2026-11-27T03, 2026-11-27T04"):
        usage.partial(host(readings=readings(0, S, S)) + host(readings=readings(0, S, S, hour=4), hour=4))


def test_nothing_at_all_gives_empty_tables() -> None:
    assert {t.num_rows for t in usage.finish(usage.merge([]), DAY).values()} == {0}
