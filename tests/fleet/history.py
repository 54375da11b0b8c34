"""Many days of one small fleet, and bills that come late: what calibration has to learn, and what was right.

Every day the same machines and volumes run in the same hours. Each kind of machine and volume costs a hidden percentage more
or less than its list price, and every hour a little noise around that. Each night delivers the month so far without its last
hours, and of the hours before those only a part; the final delivery has everything, so it says what a night's estimates
should have been. `alphas` folds the calibration factor a second time, in exact fractions; shares no code with the pipeline.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from tests.fleet.arithmetic import UNIT, half_even, largest_remainder, telescoped, units
from tests.fleet.bill import charges
from tests.fleet.charge import TEN_DIGITS, Charge
from tests.fleet.estimates import volume_listed, volume_price
from tests.fleet.model import DAY, HOUR, MILLION, Fleet, FleetSpec, Machine, Volume
from tests.fleet.roster import repeated
from tests.fleet.telemetry import shards
from tests.fleet.timeline import observe
from tests.fleet.write import EXPORTS

FILLED = Decimal("0.5")
"""Part of quantity and costs that rows have while their hour is still filling."""
LOW, HIGH = 98 * UNIT // 100, 102 * UNIT // 100
"""Band of the factor."""
LOOK_BACK = 14
"""Days before a day whose bills its factor follows."""
DELIVERIES_A_DAY = 4
"""An export numbers its deliveries by quarters of a day."""


@dataclass(frozen=True)
class HistorySpec:
    """Facts of a history. Equal specs give equal bytes."""

    seed: int = 0
    days: int = 16
    first_day: str = "2026-10-01"
    cloud: str = "aws"
    first_hour: int = 9
    hours: int = 6
    """Hours of each day in which the machines run, from first_hour on."""
    late_hours: int = 11
    """The delivery of a night holds what ended this long before the end of its day."""
    filling_hours: int = 1
    """What ended in the last of these hours is there with a part of its quantity and costs."""
    noise_ppm: int = 10_000
    """Largest deviation of one row from its family's bias."""
    bias_ppm: Mapping[str, int] | None = None
    """Family to the hidden deviation from the list price; None is drawn by the seed."""
    invoice: str | None = None
    """Invoice on the rows of the final delivery."""

    @property
    def fleet(self) -> FleetSpec:
        """Spec of the fleet on its first day."""
        return FleetSpec(
            seed=self.seed,
            day=self.first_day,
            cloud=self.cloud,
            first_hour=self.first_hour,
            hours=self.hours,
            period_s=1_200,
            window_s=1_200,
            op_window_s=3_600,
            blocks=1,
            disk="hourly",
            volume_facts=True,
        )


@dataclass
class History:
    """A history and where it was written; see the attributes."""

    spec: HistorySpec
    root: Path
    days: tuple[str, ...]
    bias_ppm: dict[str, int]
    """Family to its hidden deviation; the right factor is one plus this."""
    family: dict[str, str]
    """Machine or volume to its family: instance type, or type of the volume. Volumes without a list price have none."""
    fleets: list[Fleet]
    rows: list[Charge] = field(default_factory=list)
    """Rows of the final delivery, in the order of time."""

    @property
    def folders(self) -> list[Path]:
        """What each night brings: shards of its day, and the bill so far."""
        return [self.root / "steps" / f"{night:03}" for night in range(len(self.days))]

    @property
    def final(self) -> Path:
        """The delivery after everything has been billed."""
        return self.root / "final"

    def deliver(self, night: int, drop: Path) -> None:
        """Lays a night's files over a drop."""
        self._lay(self.folders[night], drop)

    def deliver_final(self, drop: Path) -> None:
        """Lays the last delivery over a drop."""
        self._lay(self.final, drop)

    def _lay(self, folder: Path, drop: Path) -> None:
        # GCP exports replace the files of a month; the other clouds leave older deliveries where they are.
        for month in folder.rglob("BILLING_PERIOD=*") if self.spec.cloud == "gcp" else ():
            shutil.rmtree(drop / month.relative_to(folder), ignore_errors=True)
        shutil.copytree(folder, drop, dirs_exist_ok=True)

    # --- what is true -------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> dict[tuple[str, str, int], int]:
        """(machine or volume, day, hour) to EffectiveCost of the final delivery, units of 1e-12."""
        found: dict[tuple[str, str, int], int] = defaultdict(int)
        for row in self.rows:
            for resource, day, hour, amount in self._hour_parts(row):
                found[resource, day, hour] += amount
        return dict(found)

    def listed(self, resource: str, day: str | None = None) -> int:
        """List price of one hour of a machine or volume on a day, by default the first, units of 1e-12."""
        found = self._of(resource)
        if isinstance(found, Machine):
            return half_even(Fraction(found.facts.list_price) * UNIT)
        price = volume_price(self.spec.cloud, found.type, self.fleets[0].region)
        assert price is not None, f"{resource} has no list price"
        return volume_listed(price, found.size(0), _day_ns(day or self.days[0]))

    def provisional(self, night: int, day: str | None = None) -> list[tuple[str, int]]:
        """(machine or volume, hour) of a day, by default the night's own, that can only be estimated in that night."""
        day = day or self.days[night]
        rows = self.delivery(night)
        grain = DAY if self.spec.cloud == "azure" else HOUR
        mark = max((row.end_ns for row in rows), default=0) // grain * grain
        billed = {(r, d, h) for row in rows for r, d, h, _ in self._hour_parts(row)}
        start = _day_ns(day)
        return [
            (resource, hour)
            for resource in self.family
            for hour in self._running
            if (resource, day, hour) not in billed and start + hour * HOUR >= mark
        ]

    def delivery(self, night: int) -> list[Charge]:
        """Rows of the bill that a night delivers."""
        until = _day_ns(self.days[night]) + DAY - self.spec.late_hours * HOUR
        filling = until - self.spec.filling_hours * HOUR
        return [_part(row) if row.end_ns > filling else row for row in self.rows if row.end_ns <= until]

    def alphas(self, night: int, delivered: Sequence[int] | None = None, *, day: str | None = None) -> dict[str, int]:
        """Factors with which a night estimates a day, in units of 1e-12, by "cloud|account|family".

        Args:
            night: the night.
            day: the day; None is the night's own.
            delivered: the nights so far whose files were delivered and run, this one included; None is all of them.
        """
        nights = list(range(night + 1)) if delivered is None else list(delivered)
        if len(nights) < 2:
            return {}
        now, former = self.delivery(nights[-1]), self.delivery(nights[-2])
        factor: dict[str, int] = dict.fromkeys(self.family.values(), UNIT)
        moved = set()
        seen = {self.days[n] for n in nights}
        for past, first, after in self._windows(day or self.days[night]):
            start = _day_ns(past)
            if past not in seen or not _is_same(now, former, start + first * HOUR, start + after * HOUR):
                continue
            for family, (listed, paid) in self._sums(now, past, range(first, after)).items():
                folded = half_even(Fraction(factor[family] * listed + paid * UNIT, 2 * listed))
                factor[family] = min(max(folded, LOW), HIGH)
                moved.add(family)
        account = self.fleets[0].account
        return {f"{self.spec.cloud}|{who}|{family}": factor[family] for family in moved for who in (account, "")}

    def _windows(self, day: str) -> list[tuple[str, int, int]]:
        """(day, first hour, hour after) of the windows before a day, oldest first."""
        newest = date.fromisoformat(day)
        days = [(newest - timedelta(days=back)).isoformat() for back in range(LOOK_BACK, 0, -1)]
        halves = [(0, 24)] if self.spec.cloud == "azure" else [(0, 12), (12, 24)]
        return [(day, *half) for day in days for half in halves]

    def _sums(self, rows: Iterable[Charge], day: str, hours: range) -> dict[str, tuple[int, int]]:
        """Family to list price and EffectiveCost of the hours of a window that ran and are billed."""
        paid: dict[tuple[str, int], int] = defaultdict(int)
        for row in rows:
            for resource, on, hour, amount in self._hour_parts(row):
                if on == day and hour in hours and hour in self._running:
                    paid[resource, hour] += amount
        found: dict[str, tuple[int, int]] = {}
        for (resource, _), amount in paid.items():
            listed, own = found.get(self.family[resource], (0, 0))
            found[self.family[resource]] = listed + self.listed(resource, day), own + amount
        return found

    @property
    def _running(self) -> range:
        return range(self.spec.first_hour, self.spec.first_hour + self.spec.hours)

    def _of(self, resource: str) -> Machine | Volume:
        fleet = self.fleets[0]
        machines: dict[str, Machine | Volume] = {m.instance_id: m for m in fleet.machines}
        return (machines | {v.volume_id: v for v in fleet.volumes})[resource]

    def _hour_parts(self, row: Charge) -> list[tuple[str, str, int, int]]:
        """(machine or volume, day, hour, EffectiveCost units) of a row; of a machine's day, over the hours in which it ran.

        Rows that only follow a machine, such as local SSDs and bytes, are none of its meters and have no part.
        """
        resource = row.machine or row.dependant
        if resource not in self.family or (row.machine and row.kind != "machine"):
            return []
        start = row.start_ns // DAY * DAY
        day = (date(1970, 1, 1) + timedelta(days=start // DAY)).isoformat()
        hours = range((row.start_ns - start) // HOUR, (row.end_ns - start) // HOUR)
        amount = units(row.effective)
        if len(hours) == 1:
            parts = [amount]
        elif row.machine:
            parts = largest_remainder(amount, [int(hour in self._running) for hour in hours])
        else:
            parts = [telescoped(amount, n, n + 1, len(hours)) for n in range(len(hours))]
        return [(resource, day, hour, part) for hour, part in zip(hours, parts, strict=True) if part or row.dependant]


def write_history(spec: HistorySpec, root: Path | str) -> History:
    """Makes a history and writes what every night brings, and the final delivery."""
    history = make_history(spec, Path(root))
    for night, (folder, fleet) in enumerate(zip(history.folders, history.fleets, strict=True)):
        for shard in shards(observe(fleet)):
            _put(folder / "telemetry" / shard.path, shard.data)
        former = history.delivery(night - 1) if night else []
        _export(history, folder, history.delivery(night), former)
    rows = [replace(r, columns={**r.columns, "InvoiceId": spec.invoice}) if spec.invoice else r for r in history.rows]
    _export(history, history.final, rows, [])
    return history


def make_history(spec: HistorySpec, root: Path) -> History:
    """Makes a history; writes nothing."""
    first = date.fromisoformat(spec.first_day)
    days = tuple((first + timedelta(days=n)).isoformat() for n in range(spec.days))
    fleets = [repeated(spec.fleet, day) for day in days]
    family = {m.instance_id: m.instance_type for m in fleets[0].machines}
    priced = [v for v in fleets[0].volumes if volume_price(spec.cloud, v.type, fleets[0].region) is not None]
    family |= {v.volume_id: v.type or "" for v in priced}
    dice = random.Random(f"history/{spec.seed}/{spec.cloud}")
    drawn = {name: dice.choice((-1, 1)) * dice.randint(3_000, 18_000) for name in sorted(set(family.values()))}
    bias = {name: (spec.bias_ppm or {}).get(name, drawn[name]) for name in drawn}
    history = History(spec, root, days, bias, family, fleets)
    for fleet in fleets:
        rows = sorted(charges(fleet), key=lambda row: (row.start_ns, row.label))
        history.rows += [_biased(row, history, dice) for row in rows]
    return history


def _biased(row: Charge, history: History, dice: random.Random) -> Charge:
    """A row at its family's true price, and a little beside it; what the bill says of prices stays."""
    family = history.family.get(row.machine or row.dependant or "")
    if family is None:
        return row
    noise = dice.randint(-history.spec.noise_ppm, history.spec.noise_ppm)
    factor = Decimal((MILLION + history.bias_ppm[family]) * (MILLION + noise)).scaleb(-12)
    cost = (row.listed * factor).quantize(TEN_DIGITS)
    return replace(row, billed=cost, effective=cost, texts={})


def _part(row: Charge) -> Charge:
    """A row whose hour is still filling."""
    names = ("ConsumedQuantity", "PricingQuantity")
    quantities = {name: (row[name] * FILLED).quantize(TEN_DIGITS) for name in names if row[name] is not None}
    return replace(
        row,
        billed=(row.billed * FILLED).quantize(TEN_DIGITS),
        effective=(row.effective * FILLED).quantize(TEN_DIGITS),
        listed=(row.listed * FILLED).quantize(TEN_DIGITS),
        columns={**row.columns, **quantities},
        hours=None if row.hours is None else row.hours * Fraction(FILLED),
        texts={},
    )


def _is_same(now: Iterable[Charge], former: Iterable[Charge], start: int, end: int) -> bool:
    """Whether two deliveries say the same of the time from start to end."""

    def said(rows: Iterable[Charge]) -> list[tuple[str, int, int, Decimal, Decimal, str]]:
        inside = (row for row in rows if row.start_ns < end and row.end_ns > start)
        return sorted(
            (r.label, r.start_ns, r.end_ns, r.billed, r.effective, str(r["ConsumedQuantity"])) for r in inside
        )

    return said(now) == said(former)


def _export(history: History, folder: Path, rows: list[Charge], former: list[Charge]) -> None:
    """Writes the export of each month that a delivery changes."""
    for period in sorted({row["BillingPeriodStart"] for row in rows}):
        mine, old = ([row for row in side if row["BillingPeriodStart"] == period] for side in (rows, former))
        if mine == old:
            continue
        fleet = history.fleets[0]
        number = (max(row.end_ns for row in rows) - fleet.spec.day_ns) // (DAY // DELIVERIES_A_DAY)
        for path, data in EXPORTS[history.spec.cloud](fleet, mine, number + (folder == history.final)):
            _put(folder / "bills" / history.spec.cloud / path, data)


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _day_ns(day: str) -> int:
    return (date.fromisoformat(day) - date(1970, 1, 1)).days * DAY
