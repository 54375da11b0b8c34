"""Which units are sampled, and how often that may be.

Whether a unit is sampled follows from job, attempt and its number, never from the rank: ranks that sampled different units
would slow every step of the job. A lower rate samples a part of what a higher one does. `Rate` keeps the cost of sampling
within its share of the run. Knows no clock and no framework.

Source: infra/rules/telemetry.md 2.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from statistics import median_low

MILLION = 1_000_000
MOST_PPM = 20_000
"""One unit in fifty."""
BUDGET_PPM = 5_000
"""Half a percent of the run: what sampling may cost, and what the probe's own host time may be."""
AHEAD = 64
"""Units that are drawn at once."""
REMEMBERED = 31
"""Latest figures that a median is taken over."""


def is_sampled(job_id: str, attempt: int, unit: int, p_ppm: int) -> bool:
    """Whether a unit is sampled at a rate: BLAKE2b-64 of job|attempt|unit, as a share of 2^64, is below it.

    Args:
        job_id, attempt: the job; equal on all its ranks.
        unit: number of the unit within the attempt.
        p_ppm: units to sample of a million.
    """
    return _place(job_id, attempt, unit) * MILLION < p_ppm << 64


def _place(job_id: str, attempt: int, unit: int) -> int:
    digest = blake2b(f"{job_id}|{attempt}|{unit}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Draw:
    """`is_sampled` of a job's units in turn, worked out for some at a time.

    Between two units a model has put all else out of the processor's caches: a hash for itself takes 25 us there, one among
    others 1 us.

    Args:
        job_id, attempt: the job.
    """

    def __init__(self, job_id: str, attempt: int) -> None:
        self._job_id, self._attempt = job_id, attempt
        self._first = 0
        self._places: list[int] = []

    def is_sampled(self, unit: int, p_ppm: int) -> bool:
        """Whether a unit is sampled at a rate.

        Args:
            unit: number of the unit within the attempt.
            p_ppm: units to sample of a million.
        """
        at = unit - self._first
        if not 0 <= at < len(self._places):
            self._first, at = unit, 0
            self._places = [_place(self._job_id, self._attempt, unit + n) for n in range(AHEAD)]
        return self._places[at] * MILLION < p_ppm << 64


class Rate:
    """How often to sample, so that it costs at most half a percent of the run.

    p = min(1/50, 0.5 % * T / cost), T and cost the running medians of a unit's time and of what a sample adds to it. A
    dearer sample lowers p at once. p grows only between windows, to at most twice what it was; where the probe's own
    time passed half a percent of a window, p is halved instead.

    Args:
        most_ppm: p at most, ppm; 0 switches sampling off.
        budget_ppm: share of the run that sampling may cost, ppm.
        cost_ns: first guess of what a sample adds to a unit, ns; None: p begins at `most_ppm`.
    """

    def __init__(self, *, most_ppm: int = MOST_PPM, budget_ppm: int = BUDGET_PPM, cost_ns: int | None = None) -> None:
        self._most_ppm = min(max(most_ppm, 0), MILLION)
        self._budget_ppm = budget_ppm
        self._units: deque[int] = deque(maxlen=REMEMBERED)
        self._costs: deque[int] = deque(maxlen=REMEMBERED)
        self._guess = cost_ns
        self._p_ppm = self._most_ppm
        self._wants_guess = cost_ns is not None

    @property
    def p_ppm(self) -> int:
        """Units to sample of a million."""
        return self._p_ppm

    @property
    def unit_ns(self) -> int | None:
        """Median time of the latest units that were not sampled, ns; None before the first."""
        return median_low(self._units) if self._units else None

    @property
    def cost_ns(self) -> int | None:
        """Median of what the latest samples added to their units, else the first guess, ns; None when neither is known."""
        return median_low(self._costs) if self._costs else self._guess

    def unit(self, unit_ns: int) -> None:
        """Note the time of a unit that was not sampled, ns; of several marked together, of one."""
        self._units.append(unit_ns)
        if self._wants_guess:  # the guess speaks only once a unit was seen
            self._wants_guess = False
            self._p_ppm = min(self._p_ppm, self._allowed())

    def sample(self, cost_ns: int) -> None:
        """Note what a sample added to its unit, ns; below 0, as noise can be, is 0."""
        self._costs.append(max(cost_ns, 0))
        self._p_ppm = min(self._p_ppm, self._allowed())

    def window(self, wall_ns: int, probe_ns: int) -> None:
        """Set p for the next window from what this one was: its wall time and the probe's own host time in it, ns."""
        if probe_ns * MILLION > self._budget_ppm * wall_ns:
            self._p_ppm = min(max(self._p_ppm // 2, 1), self._most_ppm)
        else:
            self._p_ppm = min(self._allowed(), 2 * self._p_ppm)

    def _allowed(self) -> int:
        """Ppm that the budget allows, at least 1, so that a rate that fell can grow again."""
        unit, cost = self.unit_ns, self.cost_ns
        if not unit or not cost:
            return self._most_ppm
        return min(max(self._budget_ppm * unit // cost, 1), self._most_ppm)
