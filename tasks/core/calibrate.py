"""The calibration factor: what bills have been beside estimates, folded window by window, and why they differ.

Pairs of billed hours in; window sums, factors and verdicts out, all in whole numbers. A day's window sums depend on that day
alone and the fold on the sums alone, so a factor does not depend on how often or in which order days were run. Knows no disk,
no clock. Source: infra/rules/ledger.md 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core import money
from tasks.core.compare import CAUSES, Pair
from tasks.core.estimate import ALPHA_ONE

DAYS = 14
"""Days before a day whose windows count."""
WINDOW_HOURS = 12
LEAST, MOST = ALPHA_ONE * 98 // 100, ALPHA_ONE * 102 // 100
"""The band: a factor never leaves it, whatever the bill says."""
PPM = 1_000_000
DEVIATION_PPM, BAND_PPM = 15_000, 20_000
"""A ratio of bill to estimate further from 1 than the first is a finding; beyond the second it wants out of the band."""
WHOLE_DAYS = ("azure",)
"""Clouds that bill by the day: one window a day."""

Row = dict[str, Any]
"""Sums of one window, cloud, account, SKU family and set of meters: JSON values, amounts in whole units."""
_KEY = ("window", "cloud", "account", "family", "meters")


def window_of(cloud: str, hour: int) -> int:
    """Number of the window of the day that an hour lies in."""
    return 0 if cloud in WHOLE_DAYS else hour // WINDOW_HOURS


def window_sums(day: str, pairs: Iterable[Pair], complete: Mapping[str, Sequence[int]] | None) -> list[Row]:
    """Sums of a day over its comparable pairs, sorted: estimate, bill, what the difference is made of.

    Args:
        day: UTC day, YYYY-MM-DD.
        pairs: machine-hours and volume-hours of the day.
        complete: windows that count, by `cloud|account`: those of which the bill is known to be whole; None takes all.
    """
    found: dict[tuple[str, ...], Row] = {}
    for pair in pairs:
        if not pair.comparable:
            continue
        assert pair.listed is not None and pair.paid is not None
        account, number = pair.account or "", window_of(pair.cloud, pair.hour)
        if complete is not None and number not in complete.get(f"{pair.cloud}|{account}", ()):
            continue
        window = f"{day}T{number * WINDOW_HOURS:02d}"
        key = (window, pair.cloud, account, pair.family or "", "|".join(sorted(pair.paid.meters)))
        row = found.setdefault(key, dict(zip(_KEY, key, strict=True)) | dict.fromkeys(("estimate", "bill", "hours"), 0))
        row["estimate"] += pair.listed
        row["bill"] += pair.paid.amortised
        row["hours"] += 1
        for cause, units in pair.causes().items():
            row[cause] = row.get(cause, 0) + units
    return [found[key] for key in sorted(found)]


def key_of(cloud: str, account: str | None, family: str | None) -> str:
    """What a calibration factor is known by."""
    return f"{cloud}|{account or ''}|{family or ''}"


def step(alpha: int, estimate: int, bill: int) -> int:
    """One window folded into a factor: half-way to bill over estimate, half-even, held to the band.

    Args:
        alpha: factor so far, units of 1e-12.
        estimate: whole units before any factor; positive.
        bill: whole units.
    """
    return min(max(money.half_even(alpha * estimate + bill * ALPHA_ONE, 2 * estimate), LEAST), MOST)


def fold(rows: Iterable[Row]) -> dict[str, int]:
    """Calibration factors by `cloud|account|family`, and by `cloud||family` where one account alone has the family.

    Windows are folded oldest first from 1, whatever order they come in; a window without an estimate is skipped. The
    second key serves estimates of machines whose account no bill has named yet.
    """
    sums: dict[str, dict[str, list[int]]] = {}
    accounts: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        key = key_of(row["cloud"], row["account"], row["family"])
        window = sums.setdefault(key, {}).setdefault(row["window"], [0, 0])
        window[0] += row["estimate"]
        window[1] += row["bill"]
        accounts.setdefault((row["cloud"], row["family"]), set()).add(row["account"])
    alphas = {}
    for key, windows in sums.items():
        alpha = ALPHA_ONE
        for name in sorted(windows):
            estimate, bill = windows[name]
            if estimate > 0:
                alpha = step(alpha, estimate, bill)
        alphas[key] = alpha
    for (cloud, family), names in accounts.items():
        if len(names) == 1:
            alphas[key_of(cloud, None, family)] = alphas[key_of(cloud, min(names), family)]
    return dict(sorted(alphas.items()))


@dataclass(frozen=True)
class Verdict:
    """What the bill of one SKU family is beside its estimates.

    Args:
        ratio_ppm: bill over estimate, ppm, rounded half to even.
        findings: `deviation` beyond 1.5 %, `out_of_band` beyond 2 % as well.
        cause: the greatest part of the difference in its direction; None without a finding.
        parts: bill less estimate by cause, whole units.
    """

    ratio_ppm: int
    findings: tuple[str, ...]
    cause: str | None
    parts: Mapping[str, int]

    def facts(self) -> dict[str, Any]:
        """As JSON values; amounts as text."""
        parts = {name: str(money.decimal(units)) for name, units in self.parts.items()}
        return {"ratio_ppm": self.ratio_ppm, "findings": list(self.findings), "cause": self.cause, "parts": parts}


def verdicts(rows: Iterable[Row]) -> dict[str, Verdict]:
    """What the windows say of each `cloud|account|family`: how far bill and estimates lie apart, and why.

    Hours of meters that are a part of what other hours of the family have (a GPU without its cores) miss a resource: what
    they cost less than by price counts there and not as a rate.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of(row["cloud"], row["account"], row["family"]), []).append(row)
    return {key: found for key in sorted(groups) if (found := _verdict(groups[key])) is not None}


def _verdict(rows: Sequence[Row]) -> Verdict | None:
    estimate, bill = (sum(row[name] for row in rows) for name in ("estimate", "bill"))
    if estimate <= 0:
        return None
    parts = {cause: sum(row[cause] for row in rows) for cause in CAUSES}
    sets = {frozenset(row["meters"].split("|")) for row in rows}
    for row in rows:
        own = frozenset(row["meters"].split("|"))
        if row["rate"] < 0 and any(own < other for other in sets):
            parts["rate"] -= row["rate"]
            parts["missing_resource"] += row["rate"]
    apart = abs(bill - estimate) * PPM
    limits = (("deviation", DEVIATION_PPM), ("out_of_band", BAND_PPM))
    findings = tuple(name for name, limit in limits if apart > limit * estimate)
    sign = 1 if bill > estimate else -1
    cause = max(CAUSES, key=lambda name: sign * parts[name]) if findings else None
    return Verdict(money.half_even(bill * PPM, estimate), findings, cause, parts)


def read_verdicts(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Verdict]:
    """Verdicts from what `Verdict.facts` gave."""
    return {
        key: Verdict(
            one["ratio_ppm"],
            tuple(one["findings"]),
            one["cause"],
            {name: money.units(amount) for name, amount in one["parts"].items()},
        )
        for key, one in facts.items()
    }
