"""Where devices and volumes are: MIG slices and their GPUs, ids of Azure, what a statement says of a volume."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from schemas.usage import ATTACHMENTS, DEVICE_HOURLY, JOB_RUNS, LAYER_HOURLY
from seedance.schema import EVENTS
from tasks.core import places, usage
from tests.shard_tables import SECOND, row
from tests.telling import DAY, Rows, begin, day_of, host, op, processes, readings, step, vector

S = SECOND


def mig(name: str, profile: str = "3g.40gb", *, hour: int = 3, last: int = 100 * S, **facts: Any) -> Rows:
    """Readings of a slice of GPU-1 that nobody holds."""
    facts = {"process_count": 0, "gpu_model": "NVIDIA H100 80GB HBM3"} | facts
    return readings(0, last, 10 * S, hour=hour, mig_uuid=name, mig_profile=profile, **facts)


def cuts(made: dict[str, pa.Table]) -> set[tuple[Any, ...]]:
    names = ("device_uuid", "parent_uuid", "mig_slices", "mig_total")
    return {tuple(r[n] for n in names) for r in made[DEVICE_HOURLY.name].to_pylist()}


def test_slices_are_devices_and_their_gpu_is_none() -> None:
    rows = readings(0, 100 * S, 10 * S) + mig("MIG-1") + mig("MIG-2", "1c.3g.40gb")
    made = day_of(host(readings=rows + readings(0, 100 * S, 10 * S, device="GPU-2")))
    assert vector(made, device="MIG-1") == {(None, "idle"): 100 * S}
    assert vector(made) == {}
    assert cuts(made) == {("MIG-1", "GPU-1", 3, 7), ("MIG-2", "GPU-1", 1, 7), ("GPU-2", None, None, None)}


@pytest.mark.parametrize(
    ("profile", "model", "expected"),
    [
        ("3g.40gb", "NVIDIA H100 80GB HBM3", (3, 7)),
        ("7g.80gb", None, (7, 7)),
        ("1c.3g.40gb", "NVIDIA H100 80GB HBM3", (1, 7)),
        ("2c.4g.20gb", "NVIDIA A100-SXM4-40GB", (2, 7)),
        ("1g.10gb+me", "NVIDIA A100-SXM4-80GB", (1, 7)),
        ("MIG 2g.12gb", "NVIDIA A30", (2, 4)),
        ("4G.24GB", "nvidia a30 mig", (4, 4)),
        ("0g.1gb", "NVIDIA A30", (1, 4)),
        ("half", "NVIDIA A300X", (1, 4)),
        (None, "NVIDIA H100", (1, 7)),
    ],
)
def test_profiles_of_slices(profile: str | None, model: str | None, expected: tuple[int, int]) -> None:
    assert (places.slices(profile), places.total_slices(model)) == expected


def test_a_slice_that_no_reading_of_the_hour_describes_is_that_of_another_hour() -> None:
    facts: Any = {"device_uuid": "MIG-1", "hour": 4}
    later = host(steps=[step(0, 100 * S, active=100 * S, **facts)], ops=[op("a", S, **facts)], hour=4)
    assert cuts(day_of(host(readings=mig("MIG-1")), later)) == {("MIG-1", "GPU-1", 3, 7)}
    assert cuts(day_of(later)) == {("MIG-1", None, None, None)}


def test_a_gpu_with_slices_holds_no_time_and_keeps_what_its_units_did() -> None:
    """Whatever the GPU itself says in the hour: readings of the next hour that reach back, processes, step windows."""
    back = host(readings=readings(-5 * S, 5 * S, 10 * S, hour=4), hour=4)
    units = host(
        readings=mig("MIG-1"),
        processes=processes(0, 100 * S, 10 * S),
        steps=[step(0, 100 * S, active=80 * S, stall=20 * S, samples=9)],
        ops=[op("a", S)],
    )
    merged = usage.merge([usage.partial(b) for b in (units, back)])
    made = usage.finish(merged | {usage.DETAIL: usage.only(merged[usage.DETAIL], usage.detail_wanted(merged))}, DAY)
    assert cuts(made) == {("MIG-1", "GPU-1", 3, 7), ("GPU-1", None, None, None)}
    assert vector(made) == {} and vector(made, hour=4) == {
        (None, "unattributed_busy"): 2_500_000_000,
        (None, "held_idle"): 2_500_000_000,
    }
    (run,) = made[JOB_RUNS.name].to_pylist()
    assert (run["units"], run["samples"], run["wall_ns"], run["rank_units"]) == (10, 9, 100 * S, 10)
    assert [(r["ns"], r["flops"]) for r in made[LAYER_HOURLY.name].to_pylist()] == [(0, 1_000)]
    assert usage.replaced_ns(merged) == 100 * S


def volume(name: str, **facts: Any) -> dict[str, Any]:
    made = {
        "source": "kernel",
        "kind": "block_device",
        "object": name,
        "event_id": name,
        "at_utc": begin(3),
        "count": 1,
    }
    return row(EVENTS, **(made | facts))


def test_attachments() -> None:
    rows = [
        volume("vol-1"),
        volume("vol-1", event_id="again"),
        volume("vol-2", source="k8s"),
        volume("vol-3", kind="mount"),
    ]
    made = day_of(host(events=rows))[ATTACHMENTS.name].to_pylist()
    assert [(r["hour_utc"].hour, r["object_id"], r["cloud"], r["instance_id"]) for r in made] == [
        (3, "vol-1", "aws", "i-0a")
    ]
    nowhere = host(events=[volume("vol-1")], cloud=None, instance_id=None)
    assert day_of(nowhere)[ATTACHMENTS.name].num_rows == 0
    told = day_of(nowhere + host(readings=readings(0, 10 * S, 10 * S), cloud=None, instance_id=None))
    assert told[ATTACHMENTS.name].column("instance_id").to_pylist() == ["i-0a"]


def told(*payloads: str, **facts: Any) -> list[tuple[int | None, str | None]]:
    """Size and type that the day gives a volume of which these statements were made, one a second."""
    events = [volume("vol-1", event_id=f"e{i}", at_utc=begin(3) + i * S, payload=p) for i, p in enumerate(payloads)]
    found = [day_of(host(events=order, **facts))[ATTACHMENTS.name].to_pylist() for order in (events, events[::-1])]
    assert found[0] == found[1]
    return [(r["bytes"], r["object_type"]) for r in found[0]]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ('{"bytes": 107374182400, "type": "gp3"}', (107374182400, "gp3")),
        ('{"bytes": 0}', (0, None)),
        ('{"type": "pd-ssd"}', (None, "pd-ssd")),
        ("{}", (None, None)),
        ("", (None, None)),
        ("no JSON", (None, None)),
        ("[1]", (None, None)),
        ("null", (None, None)),
        ('{"bytes": "7", "type": 7}', (None, None)),
        ('{"bytes": true, "type": ""}', (None, None)),
        ('{"bytes": -1}', (None, None)),
        ('{"bytes": 1e9}', (None, None)),
        ('{"bytes": 9223372036854775807}', (2**63 - 1, None)),
        ('{"bytes": 9223372036854775808}', (None, None)),
        ('{"bytes": ' + "9" * 5000 + "}", (None, None)),
        ("[" * 100_000, (None, None)),
        ('{"type": "\\ud800"}', (None, None)),
    ],
)
def test_what_a_statement_says_of_a_volume(payload: str, expected: tuple[int | None, str | None]) -> None:
    assert told(payload) == [expected]


def test_the_last_statement_about_a_volume_stands() -> None:
    assert told('{"bytes": 1, "type": "gp2"}', '{"bytes": 2, "type": "gp3"}') == [(2, "gp3")]
    assert told('{"bytes": 1, "type": "gp2"}', '{"type": "gp3"}') == [(None, "gp3")]
    one, two = (volume("vol-1", event_id=e, payload=f'{{"bytes": {b}}}') for e, b in (("b", 1), ("a", 2)))
    hosts = [host(events=[one]), host(events=[two], node="node-b")]
    assert [r["bytes"] for r in day_of(*hosts)[ATTACHMENTS.name].to_pylist()] == [1]


def test_ids_of_azure_are_compared_without_case() -> None:
    name, disk = "/subscriptions/S/virtualMachines/Gpu-1", "/subscriptions/S/disks/Data"
    facts: Any = {"cloud": "azure", "instance_id": name}
    made = day_of(host(readings=readings(0, 10 * S, 10 * S, **facts), events=[volume(disk)], **facts))
    assert {r["instance_id"] for r in made[DEVICE_HOURLY.name].to_pylist()} == {name.lower()}
    assert [(r["instance_id"], r["object_id"]) for r in made[ATTACHMENTS.name].to_pylist()] == [
        (name.lower(), disk.lower())
    ]
    facts["cloud"] = "gcp"
    made = day_of(host(readings=readings(0, 10 * S, 10 * S, **facts), events=[volume(disk)], **facts))
    assert {r["instance_id"] for r in made[DEVICE_HOURLY.name].to_pylist()} == {name}
    assert [r["object_id"] for r in made[ATTACHMENTS.name].to_pylist()] == [disk]
