"""Ranks that share one device and nothing else is known of: their time is never counted twice, and never more than passed."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.usage import DEVICE_HOURLY, LAYER_HOURLY
from tests import probed
from tests.probed import HOUR_NS, MS, SECOND, Unit
from tests.telling import begin, day_of, tell

MIDNIGHT = begin(0)
FIRST_HOUR = MIDNIGHT // HOUR_NS
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WINDOW_NS = probed.STEP_NS
JOB = probed.Job()


@st.composite
def ranks(draw: st.DrawFn) -> list[list[Unit]]:
    """Ranks that train one after another's step, each in units of its own lengths, within an hour and around its edges."""
    count = draw(st.integers(1, 4))
    start = MIDNIGHT + draw(st.sampled_from([0, 3, 3595, 7199])) * SECOND + draw(st.integers(0, 10_000)) * MS
    longest = draw(st.sampled_from([400, 9_000, 61_000, 700_000]))
    made = []
    for _ in range(count):
        at = start + draw(st.integers(0, 20_000)) * MS
        run: list[Unit] = []
        for gap, active in draw(
            st.lists(st.tuples(st.integers(0, longest), st.integers(1, longest)), min_size=1, max_size=40)
        ):
            begin = at + gap * MS
            run.append(Unit(at, begin, begin + active * MS, input_ns=gap * MS // 2))
            at = run[-1].end_ns
        made.append(run)
    return made


def by_hour(runs: list[list[Unit]]) -> dict[int, list[tuple[int, int]]]:
    """When some rank was at work in each hour, as stretches that do not overlap."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    for run in runs:
        at, finish = run[0].start_ns, run[-1].end_ns
        while at < finish:
            end = min(finish, (at // HOUR_NS + 1) * HOUR_NS)
            pieces.setdefault(at // HOUR_NS, []).append((at, end))
            at = end
    for hour, found in pieces.items():
        apart: list[tuple[int, int]] = []
        for first, last in sorted(found):
            if apart and first <= apart[-1][1]:
                apart[-1] = (apart[-1][0], max(last, apart[-1][1]))
            else:
                apart.append((first, last))
        pieces[hour] = apart
    return pieces


@QUICK
@given(ranks())
def test_a_shared_device_is_held_as_long_as_somebody_was_there(runs: list[list[Unit]]) -> None:
    made = day_of(*(tell(rows, hour=hour - FIRST_HOUR) for hour, rows in probed.by_hour(JOB, runs).items()))
    seen: dict[int, int] = {}
    for row in made[DEVICE_HOURLY.name].to_pylist():
        hour = int(row["hour_utc"].timestamp()) // 3600
        seen[hour] = seen.get(hour, 0) + row["ns"]
    there = {hour: sum(last - first for first, last in found) for hour, found in by_hour(runs).items()}
    assert seen.keys() == there.keys()
    for hour, ns in seen.items():
        # Where in its first and last window a rank was is not told; there each may be off by a window.
        slack = 0 if len(runs) == 1 else WINDOW_NS * len(runs)
        assert abs(ns - there[hour]) <= slack and ns <= HOUR_NS, (hour, ns, there[hour])
    work = sum(r["ns"] for r in made[DEVICE_HOURLY.name].to_pylist() if r["category"] == "work")
    assert work == sum(r["ns"] for r in made[LAYER_HOURLY.name].to_pylist() if r["category"] == "work")
