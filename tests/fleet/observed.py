"""From what happened to what could be known: observed time of each device and hour by category, and time of each layer.

Takes the timeline, not the shards; knows only which readings never arrived. Knows no bill.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tests.fleet.model import HOUR_S, MILLION, SECOND, Fleet, Tenant
from tests.fleet.timeline import FIXED, Timeline, periods, present


class Place(NamedTuple):
    """Where time and money go. The order of the fields is the order of addresses."""

    device: str | None
    job: str | None
    attempt: int | None
    rank: int | None
    category: str


class Layer(NamedTuple):
    """What work is made of, in the order that ties follow."""

    layer: str
    direction: str
    op: str
    phase: str
    batch: int
    dtype: str


Vector = dict[Place, int]
LayerTime = dict[tuple[int, str, int, str], dict[Layer, int]]
"""(hour, job, attempt, instance type) to ns of each layer."""


def observed_time(timeline: Timeline, *, with_late: bool = True) -> dict[tuple[int, int], Vector]:
    """Observed ns of each (machine, hour), by place.

    Args:
        timeline: what happened.
        with_late: whether the shards of the second drop are there.
    """
    fleet = timeline.fleet
    lost = fleet.lost_readings(with_late=with_late)
    found: dict[tuple[int, int], Vector] = {}
    for number, machine in enumerate(fleet.machines):
        if not machine.has_agent:
            continue
        readings: dict[int, list[int]] = defaultdict(list)
        for start, _, usable in periods(fleet, number):
            if usable and (number, start // HOUR_S) not in lost:
                readings[start // HOUR_S].append(start)
        for hour in range(24):
            vector: Vector = defaultdict(int)
            for index in machine.readable((hour + 1) * HOUR_S - 1):
                _stepping(timeline, number, index, hour, vector)
                _readings(timeline, number, index, readings[hour], vector)
            # A GPU is replaced by its slices for the whole of an hour in which one of them was seen.
            named = {place.device for place in vector}
            replaced = {gpu for slice_, gpu in machine.gpu_of.items() if slice_ in named}
            kept = {place: ns for place, ns in vector.items() if ns and place.device not in replaced}
            if kept:
                found[number, hour] = kept
    return found


def _tenants(fleet: Fleet, number: int, index: int) -> list[tuple[int, int, Tenant]]:
    """(number, rank, tenant) of everyone who sits on a device at some time."""
    return [(n, t.seats.index((number, index)), t) for n, t in enumerate(fleet.tenants) if (number, index) in t.seats]


def _stepping(timeline: Timeline, number: int, index: int, hour: int, vector: Vector) -> None:
    """Adds the units of an hour. Of tenants that step at once each gets its share, and both the remainder alike.

    What declared shares leave free is nobody's; `_readings` adds it.
    """
    device = timeline.fleet.machines[number].device(index)
    working = [
        (who, rank, tenant)
        for who, rank, tenant in _tenants(timeline.fleet, number, index)
        if any(key[:3] == (who, rank, hour) for key in timeline.totals)
    ]
    shared = [w for w in working if w[2].share_ppm < MILLION]
    assert not shared or len(shared) == len(working), "a device has either tenants that share it or one at a time"
    is_declared = any(tenant.declared_by for _, _, tenant in working)
    rest = MILLION - sum(tenant.share_ppm for _, _, tenant in shared) if shared and not is_declared else 0
    for who, rank, tenant in working:
        spent = _unit_time(timeline, who, rank, hour)
        wall = sum(spent.values())
        for category, ns in spent.items():
            vector[Place(device, tenant.job_id, tenant.attempt, rank, category)] += _part(ns, tenant.share_ppm)
        if rest:
            vector[Place(device, tenant.job_id, tenant.attempt, rank, "held_idle")] += _part(wall, rest) // len(shared)


def _part(ns: int, ppm: int) -> int:
    whole, odd = divmod(ns * ppm, MILLION)
    assert odd == 0, f"{ns} ns do not divide by {ppm} ppm"
    return whole


def _unit_time(timeline: Timeline, who: int, rank: int, hour: int) -> Mapping[str, int]:
    """ns of each category in all units of a rank and hour."""
    spent: dict[str, int] = defaultdict(int)
    for key, total in timeline.totals.items():
        if key[:3] == (who, rank, hour):
            spent["input_stall"] += total.input_stall
            spent["checkpoint"] += total.checkpoint
            spent["held_idle"] += total.held_idle
            for (_, direction, op), ns in total.ops.items():
                spent[category_of(direction, op)] += ns
    return spent


def category_of(direction: str, op: str) -> str:
    """Category of an operation's time: a segment without operation says itself what it is."""
    if direction == "none":
        return op
    return "communication" if direction in ("comm", "copy") else "work"


def _readings(timeline: Timeline, number: int, index: int, starts: list[int], vector: Vector) -> None:
    """Adds the time of usable readings outside the units: startup, held time by what the device showed, idle.

    Idle is what nobody holds: all of a reading without a process, and what declared shares leave free at any time.
    """
    fleet = timeline.fleet
    machine, period = fleet.machines[number], fleet.spec.period_s * SECOND
    nobody = Place(machine.device(index), None, None, None, "idle")
    for start in starts:
        if index not in machine.readable(start) or machine.is_cut(index, start):
            continue
        on = present(fleet, number, index, start)
        if any(stretch.kind == "steps" and not tenant.declared_by for tenant, stretch in on):
            continue
        free, busy_ppm = period, max((stretch.busy_ppm for _, stretch in on), default=0)
        for tenant, stretch in on:
            held = _part(period, tenant.share_ppm)
            free -= held
            rank = tenant.seats.index((number, index))
            who = nobody if tenant.job_id is None else Place(nobody.device, tenant.job_id, tenant.attempt, rank, "")
            if stretch.kind == "startup":
                vector[who._replace(category="startup")] += held
            elif stretch.kind == "held":
                busy = held * busy_ppm // MILLION
                vector[who._replace(category="unattributed_busy")] += busy
                vector[who._replace(category="held_idle")] += held - busy
        assert free >= 0, f"tenants of {nobody.device} hold more than there is"
        vector[nobody] += free


def layer_time(timeline: Timeline) -> LayerTime:
    """Time of the work of every recorded unit, sampled or not, by layer."""
    fleet = timeline.fleet
    found: LayerTime = defaultdict(lambda: defaultdict(int))
    for (who, rank, hour, batch), total in timeline.totals.items():
        tenant = fleet.tenants[who]
        assert tenant.work is not None and tenant.job_id is not None
        kind = fleet.machines[tenant.seats[rank][0]].instance_type
        for (layer, direction, op), ns in total.ops.items():
            if direction not in FIXED:
                key = Layer(layer, direction, op, tenant.work.phase, batch, tenant.work.dtype)
                found[hour, tenant.job_id, tenant.attempt, kind][key] += _part(ns, tenant.share_ppm)
    return found
