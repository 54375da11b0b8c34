"""Random layouts of MIG slices: every GPU of a machine-hour has its span to the nanosecond, whatever the order of rows."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.spans import observe, vectors, width
from tests.tables import DAY, SECOND, device, devices, ns
from tests.telling import Told, day_of, host, op, processes, readings, step, vector

S = SECOND
CATEGORIES = ("work", "held_idle", "idle", "unobserved", "startup")
Key = tuple[Any, ...]


def machine_hour(seed: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of core_usage__device_hourly of one machine in one hour, and a billed span."""
    rng = random.Random(seed)
    span = rng.choice([0, 1, 2, 1000, 1800 * S + 1, 2700 * S, 3600 * S])
    rows = []
    for gpu in range(rng.randint(1, 3)):
        total = rng.choice([4, 7])
        cut = [rng.randint(1, 4) for _ in range(rng.randint(0, 5))]
        names = [f"MIG-{rng.random()}" for _ in cut] or [f"GPU-{gpu}"]
        for i, name in enumerate(names):
            facts = {"parent_uuid": f"GPU-{gpu}", "mig_slices": cut[i], "mig_total": total} if cut else {}
            for category in rng.sample(CATEGORIES, rng.randint(1, 4)):
                job = rng.choice([None, "A", "B"]) if category in ("work", "held_idle", "startup") else None
                seen = rng.choice([1, 7, rng.randint(1, 1200 * S), rng.randint(1, 3600 * S) // 4])
                rows.append(device(DAY, category, 0, device=name, job=job, **facts) | {"ns": seen})
    return rows, span


def shared(amount: int, weights: list[int]) -> list[int]:
    """Largest remainder in exact fractions, the first of equal remainders first."""
    exact = [Fraction(amount * w, sum(weights)) for w in weights]
    parts = [int(e) for e in exact]
    order = sorted(range(len(weights)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: amount - sum(parts)]:
        parts[i] += 1
    return parts


def expected(rows: list[dict[str, Any]], span: int) -> dict[Key, int]:
    """The vector by the words of the rules, one device after the other."""
    by_device: dict[str, dict[Key, int]] = defaultdict(dict)
    gpus: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for r in rows:
        by_device[r["device_uuid"]][r["job_id"], r["attempt"], r["rank"], r["category"]] = r["ns"]
        if r.get("parent_uuid"):
            gpus[r["parent_uuid"]][r["device_uuid"]] = (r["mig_slices"], r["mig_total"])
    targets = dict.fromkeys(by_device, span)
    made: dict[Key, int] = {}
    for gpu, cut in gpus.items():
        names = sorted(cut)
        free = max(max(t for _, t in cut.values()) - sum(k for k, _ in cut.values()), 0)
        *parts, rest = shared(span, [*(cut[n][0] for n in names), free])
        targets |= dict(zip(names, parts, strict=True))
        made[gpu, None, None, None, "idle"] = rest
    for name, seen in by_device.items():
        lacking = max(span - sum(seen.values()), 0)
        if lacking:
            seen[None, None, None, "unobserved"] = seen.get((None, None, None, "unobserved"), 0) + lacking
        order = sorted(seen, key=lambda k: tuple((v is None, v or 0 if not isinstance(v, str) else v) for v in k))
        values = [seen[k] for k in order]
        if span and sum(values) != targets[name]:
            values = shared(targets[name], values)
        made |= {(name, *k): v for k, v in zip(order, values, strict=True)}
    return {k: v for k, v in made.items() if v}


def vector_of(rows: list[dict[str, Any]], span: int) -> tuple[dict[Key, int], pa.Table]:
    hours = observe(devices(*rows), ns(DAY))
    table = vectors(hours, {}, np.array([span]))
    names = ("device", "job", "attempt", "rank", "category")
    found = {tuple(r[n] for n in names): r["ns"] for r in table.to_pylist()}
    assert len(found) == len(table)
    (slot,) = hours.slots
    assert width(slot, {}) == slot.devices == len({r.get("parent_uuid") or r["device_uuid"] for r in rows})
    return found, table


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_every_gpu_has_its_span_to_the_nanosecond(seed: int, shuffler: random.Random) -> None:
    rows, span = machine_hour(seed)
    rows = list({tuple(r[k] for k in ("device_uuid", "job_id", "category")): r for r in rows}.values())
    found, table = vector_of(rows, span)
    assert found == expected(rows, span)
    if span:
        by_gpu: dict[str, int] = defaultdict(int)
        parents = {r["device_uuid"]: r.get("parent_uuid") or r["device_uuid"] for r in rows}
        for (name, *_), time in found.items():
            by_gpu[parents.get(name, name)] += time
        assert set(by_gpu.values()) == {span}
    shuffler.shuffle(rows)
    again = vector_of(rows, span)[1]
    assert table.equals(again)


@st.composite
def sliced_hours(draw: st.DrawFn) -> tuple[list[Told], list[tuple[str, int]]]:
    """One GPU in slices, each held by a job of its own or by nobody; the GPU itself may be read too."""
    layout = draw(
        st.lists(st.sampled_from([("1g.10gb", 1), ("3g.40gb", 3), ("1c.2g.20gb", 1)]), min_size=1, max_size=4)
    )
    seen, held, steps, ops = [], [], [], []
    for i, (profile, _) in enumerate(layout):
        name, length = f"MIG-{i}", draw(st.integers(1, 60)) * S
        busy = draw(st.booleans())
        facts: dict[str, Any] = {"mig_uuid": name, "mig_profile": profile, "process_count": int(busy)}
        seen += readings(0, length, S, gpu_util_ppm=None, **facts)
        if busy:
            who: dict[str, Any] = {"job_id": f"job-{i}", "device_uuid": name, "host_pid": i}
            held += processes(0, length, S, sm_util_ppm=None, **who)
            steps.append(step(0, length, active=length // 2, job_id=f"job-{i}", device_uuid=name))
            ops.append(op("x", 1, job_id=f"job-{i}", device_uuid=name))
    if draw(st.booleans()):
        seen += readings(0, 60 * S, S)
    return host(readings=seen, processes=held, steps=steps, ops=ops, period=S), layout


@settings(max_examples=30, deadline=None)
@given(sliced_hours(), st.randoms(use_true_random=False))
def test_slices_are_found_whatever_the_order_of_rows(
    told: tuple[list[Told], list[tuple[str, int]]], shuffler: random.Random
) -> None:
    shards, layout = told
    made = day_of(shards)
    assert vector(made) == {}
    rows = made["core_usage__device_hourly"].to_pylist()
    assert {(r["device_uuid"], r["parent_uuid"], r["mig_slices"]) for r in rows} == {
        (f"MIG-{i}", "GPU-1", slices) for i, (_, slices) in enumerate(layout)
    }
    mixed = []
    for footer, table in shards:
        order = list(range(table.num_rows))
        shuffler.shuffle(order)
        mixed.append((footer, table.take(pa.array(order, pa.int64()))))
    shuffler.shuffle(mixed)
    again = day_of(mixed)
    assert all(table.equals(again[name]) for name, table in made.items())
