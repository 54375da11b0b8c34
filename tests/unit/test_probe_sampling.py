"""Which units are sampled, and how the rate follows its cost."""

from __future__ import annotations

import pytest

from seedance.probe.sampling import AHEAD, MOST_PPM, Draw, Rate, is_sampled
from tests.fleet import timeline

MS = 1_000_000
KNOWN = [22, 41, 42, 46, 116, 120, 148, 176, 268, 269, 274, 287, 300, 328, 361]


def test_known_units() -> None:
    """The same units on every host and in every release."""
    assert [u for u in range(400) if is_sampled("job-1", 0, u, 20_000)] == KNOWN
    assert [u for u in range(400) if is_sampled("job-1", 1, u, 20_000)] != KNOWN


def test_units_drawn_some_at_a_time_are_the_same() -> None:
    """In order, with some left out, from where they began before, and each at a rate of its own."""
    draw = Draw("job-1", 0)
    assert [u for u in range(400) if draw.is_sampled(u, 20_000)] == KNOWN
    units = [0, 1, AHEAD - 1, AHEAD, 5, 6, 3 * AHEAD, 3 * AHEAD - 1, *range(7, 2_000, 7)]
    for n, unit in enumerate(units):
        p_ppm = (1_000_000, 300_000, 0)[n % 3]
        assert draw.is_sampled(unit, p_ppm) == is_sampled("job-1", 0, unit, p_ppm)


@pytest.mark.parametrize("p_ppm", [1, 5_000, 20_000, 999_999])
def test_the_pipelines_own_fleet_samples_alike(p_ppm: int) -> None:
    mine = [is_sampled("job-é", 3, u, p_ppm) for u in range(3_000)]
    assert mine == [timeline.is_sampled("job-é", 3, u, p_ppm) for u in range(3_000)]


def test_all_and_none() -> None:
    assert all(is_sampled("j", 0, u, 1_000_000) for u in range(100))
    assert not any(is_sampled("j", 0, u, 0) for u in range(100))


def test_a_lower_rate_samples_a_part_of_what_a_higher_one_does() -> None:
    """Ranks whose rates differ a little still sample together."""
    low, high = ({u for u in range(5_000) if is_sampled("j", 0, u, p)} for p in (9_000, 20_000))
    assert low < high


def test_as_many_are_sampled_as_the_rate_says() -> None:
    found = sum(is_sampled("j", 0, u, 20_000) for u in range(100_000))
    assert abs(found - 2_000) < 4 * 45  # sd of a binomial with n 100,000 and p 0.02: 44


def test_the_rate_is_half_a_percent_of_the_run_at_most() -> None:
    rate = Rate()
    assert rate.p_ppm == MOST_PPM == 20_000
    rate.unit(100 * MS)
    rate.sample(10 * MS)  # 0.005 * 100 / 10 = 1/20: the limit of 1/50 holds
    assert rate.p_ppm == 20_000
    rate = Rate()
    rate.unit(100 * MS)
    rate.sample(100 * MS)  # 0.5 %
    assert rate.p_ppm == 5_000
    rate.sample(100 * MS)
    rate.sample(300 * MS)  # the median stays
    assert (rate.cost_ns, rate.p_ppm) == (100 * MS, 5_000)


def test_a_guess_of_the_cost_speaks_until_a_sample_does() -> None:
    rate = Rate(cost_ns=100 * MS)
    assert rate.p_ppm == 20_000
    rate.unit(50 * MS)
    assert rate.p_ppm == 2_500
    rate.sample(10 * MS)  # allowed now: 25,000
    assert rate.p_ppm == 2_500
    for expected in (5_000, 10_000, 20_000, 20_000):
        rate.window(10_000 * MS, 0)
        assert rate.p_ppm == expected


def test_the_probes_own_time_above_half_a_percent_halves_the_rate() -> None:
    rate = Rate()
    rate.unit(100 * MS)
    rate.sample(1)
    rate.window(10_000 * MS, 50 * MS)  # exactly half a percent
    assert rate.p_ppm == 20_000
    rate.window(10_000 * MS, 50 * MS + 1)
    rate.window(10_000 * MS, 99 * MS)
    assert rate.p_ppm == 5_000
    for _ in range(40):
        rate.window(10_000 * MS, 99 * MS)
    assert rate.p_ppm == 1  # never 0: it could not grow again
    for _ in range(14):
        rate.window(10_000 * MS, 0)
    assert rate.p_ppm == 16_384
    rate.window(10_000 * MS, 0)
    assert rate.p_ppm == 20_000


def test_the_rate_follows_units_that_become_longer_and_shorter() -> None:
    rate = Rate()
    rate.sample(100 * MS)
    for _ in range(31):
        rate.unit(100 * MS)
    rate.window(10_000 * MS, 0)
    assert rate.p_ppm == 5_000
    for _ in range(31):
        rate.unit(1_000 * MS)
    rate.window(10_000 * MS, 0)
    assert rate.p_ppm == 10_000
    for _ in range(16):
        rate.unit(10 * MS)
    rate.window(10_000 * MS, 0)
    assert (rate.unit_ns, rate.p_ppm) == (10 * MS, 500)


def test_switched_off_it_stays_off() -> None:
    rate = Rate(most_ppm=0)
    rate.unit(100 * MS)
    rate.sample(-5)
    for probe_ns in (0, 1_000 * MS, 0):
        rate.window(10_000 * MS, probe_ns)
        assert rate.p_ppm == 0


def test_all_units_can_be_sampled() -> None:
    rate = Rate(most_ppm=1_000_000, budget_ppm=1_000_000)
    rate.unit(100 * MS)
    rate.sample(1 * MS)
    assert rate.p_ppm == 1_000_000
