"""The true address of every cent of a fleet's bill, by the rules of the ledger, in plain Python integers.

A second reading of the rules that shares no code with the pipeline: it takes the charges and what truly happened, and splits
money in whole units of 1e-12. Written for clarity; a small fleet takes a fraction of a second. Source: the ledger's rules 1-10.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from tests.fleet.arithmetic import UNIT, half_even, largest_remainder, order, telescoped, units
from tests.fleet.bill import Charge, charges
from tests.fleet.estimates import Estimate, Estimator
from tests.fleet.fitted import NOWHERE, fitted
from tests.fleet.model import DAY, HOUR, HOUR_S, Fleet
from tests.fleet.observed import Layer, LayerTime, Place, Vector, layer_time, observed_time
from tests.fleet.timeline import Timeline, observe

Money = tuple[int, int, int, int]
"""BilledCost, EffectiveCost, ListCost and what promotional credits paid, in units of 1e-12."""
MACHINE, DEPENDANT = "(machine)", "(dependant)"


class Address(NamedTuple):
    """A part of one charge at one place; money in units of 1e-12, None where the ledger has none."""

    charge: str
    """Label of the charge, or estimate:<cloud>/<instance>."""
    day_ns: int
    hour_ns: int
    machine: str | None
    """Instance whose time shares out the money."""
    place: Place
    billed: int | None
    effective: int | None
    listed: int | None
    estimated: int | None
    instance_type: str | None
    """Type of that instance."""
    pricing: str | None
    promotional: int | None = None
    payer: tuple[Any, ...] = ()
    """Account, sub-account, billing period, invoice and currency; empty where there is no bill."""

    @property
    def currency(self) -> str:
        """Currency of its money: the bill's, or that of list prices."""
        return str(self.payer[-1]) if self.payer else "USD"


class LayerMoney(NamedTuple):
    """Work of one pool at one layer; money in units of 1e-12."""

    hour_ns: int
    job: str
    attempt: int
    instance_type: str | None
    pricing: str | None
    layer: Layer
    ns: int
    billed: int | None
    effective: int | None
    estimated: int | None
    promotional: int | None


@dataclass
class Truth:
    """The true ledger of one usage day and one cloud."""

    day_ns: int
    cloud: str = "aws"
    addresses: list[Address] = field(default_factory=list)
    layers: list[LayerMoney] = field(default_factory=list)
    spans: dict[tuple[str, int], int] = field(default_factory=dict)
    """(instance, hour) to the billed span of one device, ns; absent where no usage row bills the hour."""
    vectors: dict[tuple[str, int], Vector] = field(default_factory=dict)
    """(instance, hour) to ns by place, after it was fitted to the billed span."""
    observed: dict[tuple[str, int], Vector] = field(default_factory=dict)
    """(instance, hour) to observed ns by place."""
    layer_ns: LayerTime = field(default_factory=dict)
    day_parts: dict[str, Money] = field(default_factory=dict)
    """Label to the part of the charge on this day; charges of one label together."""
    unmatched: list[tuple[str, int]] = field(default_factory=list)
    """(instance, hour) observed within the watermark and not billed."""

    def by_category(self, currency: str | None = None) -> dict[str, tuple[int, int, int]]:
        """Billed, effective and estimated units of each category; of one currency, in which list prices are USD."""
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for a in self.addresses:
            if currency in (None, a.currency):
                for i, value in enumerate((a.billed, a.effective, a.estimated)):
                    found[a.place.category][i] += value or 0
        return {name: (v[0], v[1], v[2]) for name, v in sorted(found.items())}


def true_ledger(
    fleet: Fleet,
    *,
    timeline: Timeline | None = None,
    delivery: int = 1,
    with_late: bool = True,
    day_ns: int | None = None,
    alphas: Mapping[str, int] | None = None,
    contracted: Mapping[str, str] | None = None,
) -> Truth:
    """The true ledger of one day.

    Args:
        fleet: the fleet.
        timeline: what happened, if it is known already.
        delivery: which delivery of the bill is in force.
        with_late: whether the shards of the second drop are there.
        day_ns: start of the usage day, ns UTC; None is the day of the fleet.
        alphas: "cloud|account|family" to the factor of estimates in units of 1e-12; missing is one.
        contracted: "cloud|account|instance type|region" to "price currency", as the last closed bill has it.
    """
    day = fleet.spec.day_ns if day_ns is None else day_ns
    ledger = _Ledger(fleet, charges(fleet, delivery), day)
    ledger.alphas, ledger.contracted = alphas or {}, contracted or {}
    if day == fleet.spec.day_ns:
        known = timeline or observe(fleet)
        ledger.truth.layer_ns = layer_time(known)
        ledger.see(observed_time(known, with_late=with_late))
    ledger.run()
    return ledger.truth


def usage_days(fleet: Fleet, delivery: int = 1) -> list[int]:
    """Start, in ns UTC, of every day on which the bill has a part."""
    found = set()
    for charge in charges(fleet, delivery):
        last = charge.end_ns - 1 if _is_spread(charge) else charge.start_ns
        found |= set(range(charge.start_ns // DAY, last // DAY + 1))
    return [number * DAY for number in sorted(found)]


def _is_spread(charge: Charge) -> bool:
    """Whether the charge goes over the days it touches; otherwise it books whole at its start."""
    if charge["ChargeFrequency"] != "Usage-Based":
        return False
    return charge.end_ns - charge.start_ns <= DAY or charge.kind in ("machine", "dependant")


def _four(amounts: list[int]) -> Money:
    billed, effective, listed, promotional = amounts
    return billed, effective, listed, promotional


class _Ledger:
    def __init__(self, fleet: Fleet, rows: Iterable[Charge], day: int) -> None:
        self.fleet, self.day = fleet, day
        self.truth = Truth(day, fleet.spec.cloud)
        self.all = list(rows)
        self.rows = [r for r in self.all if self._touches(r)]
        self.names = {m.instance_id: n for n, m in enumerate(fleet.machines)}
        self.machine_row_hours: dict[int, list[int]] = {}
        """Multi-hour machine rows (by id of the row) to ns in each hour of the day."""
        self.alphas: Mapping[str, int] = {}
        self.contracted: Mapping[str, str] = {}

    def _touches(self, row: Charge) -> bool:
        if not _is_spread(row):
            return row.start_ns // DAY == self.day // DAY
        return row.start_ns < self.day + DAY and row.end_ns > self.day

    def see(self, observed: dict[tuple[int, int], Vector]) -> None:
        """Takes what telemetry knows of this day."""
        self.truth.observed = {(self.fleet.machines[n].instance_id, h): v for (n, h), v in observed.items()}

    def run(self) -> None:
        """Rules 1 to 9 in order."""
        self.machines = {r.machine for r in self.rows if r.kind == "machine"} | {m for m, _ in self.truth.observed}
        self.attached = self._attachments()
        self._billed_spans()
        estimates = self._machine_estimates()
        for key in set(self.truth.spans) | set(self.truth.observed):
            self.truth.vectors[key] = self._vector(
                *key, is_estimated=any(key == (e.resource, e.hour) for e in estimates)
            )
        for row in self.rows:
            self._day_part(row)
            category = self._category(row)
            for hour, money in self._hour_parts(row, category):
                self._first_rounding(row, category, hour, money)
        for estimate in estimates:
            key = estimate.resource, estimate.hour
            self._estimated(estimate, self.truth.vectors[key], dict.fromkeys(self.truth.vectors[key], key[0]))
        for estimate in self.estimator.volume_hours(self.attached):
            self._estimated(estimate, *self._joined(estimate.resource, estimate.hour))
        self._second_rounding()

    # --- rule 1: what a row is ---------------------------------------------------------------------------------------

    def _category(self, row: Charge) -> str:
        if row.kind == "capacity_unused" and row["ChargeCategory"] == "Usage":
            return "capacity_unused"  # rule 5: what a bill says by the resource or a label counts like the status
        if row.kind == "commitment_unused":
            return "commitment_unused"  # a fee less what was used of it, before anything that looks like a purchase
        negative = row.billed < 0 or row.effective < 0
        commitment = row["CommitmentDiscountId"] or row["CapacityReservationId"]
        usage_type = row["x_UsageType"] or ""
        rules: list[tuple[bool, str]] = [
            (row["ChargeCategory"] == "Tax", "tax"),
            (row.kind == "rounding", "rounding"),
            (row["ChargeCategory"] == "Purchase" and bool(commitment), "commitment_purchase"),
            (row["CommitmentDiscountStatus"] == "Unused", "commitment_unused"),
            (
                row["CapacityReservationStatus"] == "Unused" or "UnusedBox" in usage_type or "UnusedDed" in usage_type,
                "capacity_unused",
            ),
            (row.kind == "support", "support"),
            (row.kind == "machine" or row.machine in self.machines, MACHINE),
            (row.dependant in self.attached, DEPENDANT),
            (row["ChargeCategory"] == "Credit", "credit"),
            (row["ChargeCategory"] == "Adjustment" or row["ChargeClass"] == "Correction", "adjustment"),
            (negative, "refund"),
            (row.kind in ("storage", "shared"), row.kind),
            (row.kind in ("untied", "dependant"), "untied"),
        ]
        return next((name for holds, name in rules if holds), "other_usage")

    def _attachments(self) -> dict[str | None, dict[int, list[str]]]:
        """Volume to hour to the instances that see it, as their agents say it."""
        found: dict[str | None, dict[int, list[str]]] = {}
        if self.day != self.fleet.spec.day_ns:
            return found
        for volume in self.fleet.volumes:
            for number, first, last in volume.attached:
                machine = self.fleet.machines[number]
                for hour in range(first, last):
                    if max(hour * HOUR_S, machine.agent_s) < min((hour + 1) * HOUR_S, machine.end_s):
                        found.setdefault(volume.volume_id, {}).setdefault(hour, []).append(machine.instance_id)
        return found

    # --- rules 2 and 3: hours and billed spans -----------------------------------------------------------------------

    def _overlaps(self, row: Charge) -> list[tuple[int, int, int]]:
        """(hour, start, end) of the hours of this day that a row touches, ns UTC."""
        start, end = max(row.start_ns, self.day), min(row.end_ns, self.day + DAY)
        hours = range((start - self.day) // HOUR, (end - 1 - self.day) // HOUR + 1)
        return [(h, max(start, self.day + h * HOUR), min(end, self.day + (h + 1) * HOUR)) for h in hours]

    def _is_span_row(self, row: Charge) -> bool:
        return (
            row.kind == "machine"
            and row["ChargeCategory"] == "Usage"
            and row["ChargeClass"] is None
            and row.billed >= 0
            and row.effective >= 0
            and row["CommitmentDiscountStatus"] != "Unused"
            and row["CapacityReservationStatus"] != "Unused"
        )

    def _billed_spans(self) -> None:
        """Span of each machine-hour: quantities added up over the rows of one meter, exactly; the largest meter counts.

        A meter is what SkuMeter says, and how many of it a machine has: cores and GiB may share a text.
        """
        exact: dict[tuple[str, int], dict[Any, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
        for row in filter(self._is_span_row, self.rows):
            assert row.machine is not None and row.hours is not None
            overlaps, meter = self._overlaps(row), (row["SkuMeter"] or "", row.units_per)
            # Hours of cores, GPUs or GiB over those of one machine, to 1e-12 ns.
            total = Fraction(half_even(row.hours * HOUR * UNIT / Fraction(row.units_per or 1)), UNIT)
            if len(overlaps) == 1:
                exact[row.machine, overlaps[0][0]][meter] += total
                continue
            whole = half_even(total)
            length = row.end_ns - row.start_ns
            part = telescoped(whole, overlaps[0][1] - row.start_ns, overlaps[-1][2] - row.start_ns, length)
            spread = self._spread(part, row.machine, overlaps)
            self.machine_row_hours[id(row)] = spread
            for (hour, _, _), ns in zip(overlaps, spread, strict=True):
                exact[row.machine, hour][meter] += ns
        self.truth.spans = {key: half_even(max(meters.values())) for key, meters in exact.items()}

    def _running(self, machine: str, hour: int) -> int:
        """Observed time of the device of a machine that was seen longest."""
        devices: dict[str | None, int] = defaultdict(int)
        for place, ns in self.truth.observed.get((machine, hour), {}).items():
            devices[place.device] += ns
        return max(devices.values(), default=0)

    def _spread(self, quantity: int, machine: str, overlaps: list[tuple[int, int, int]]) -> list[int]:
        """ns of a machine row over its hours: by running time, the shortfall to the earliest free time."""
        capacity = [end - start for _, start, end in overlaps]
        running = [min(self._running(machine, h), room) for (h, _, _), room in zip(overlaps, capacity, strict=True)]
        if quantity <= sum(running):
            return largest_remainder(quantity, running) if sum(running) else [0] * len(running)
        rest = quantity - sum(running)
        for i, room in enumerate(capacity):
            more = min(rest, room - running[i])
            running[i] += more
            rest -= more
        running[-1] += rest
        return running

    # --- rule 4: the vector of a machine-hour ------------------------------------------------------------------------

    def _vector(self, machine: str, hour: int, *, is_estimated: bool) -> Vector:
        """What was seen, fitted to the billed span, or to the longest time of a device where there is an estimate."""
        seen = self.truth.observed.get((machine, hour), {})
        span = self._running(machine, hour) if is_estimated else self.truth.spans.get((machine, hour))
        return fitted(self.fleet.machines[self.names[machine]], seen, span) if span else dict(seen)

    # --- rules 2, 5, 6, 7: money over hours and places ----------------------------------------------------------------

    def _money(self, row: Charge, part: Callable[[int], int]) -> Money:
        """The amounts of a row, each put through the same split."""
        amounts = (row.billed, row.effective, row.listed, row.promotional)
        return _four([part(units(amount)) for amount in amounts])

    def _day_part(self, row: Charge) -> None:
        money = self._day_money(row)
        old = self.truth.day_parts.get(row.label, (0, 0, 0, 0))
        self.truth.day_parts[row.label] = _four([a + b for a, b in zip(old, money, strict=True)])

    def _day_money(self, row: Charge) -> Money:
        if not _is_spread(row):
            return self._money(row, lambda amount: amount)
        return self._span_money(row, max(row.start_ns, self.day), min(row.end_ns, self.day + DAY))

    def _span_money(self, row: Charge, start: int, end: int) -> Money:
        """What of a row falls into [start, end), by the telescoped formula on the whole charge."""
        first, last, length = start - row.start_ns, end - row.start_ns, row.end_ns - row.start_ns
        return self._money(row, lambda amount: telescoped(amount, first, last, length))

    def _hour_parts(self, row: Charge, category: str) -> list[tuple[int, Money]]:
        """The day's money of a row by hour of the day."""
        follows = category == MACHINE and row["ChargeFrequency"] == "Usage-Based"
        if not _is_spread(row) and not follows:
            return [((row.start_ns - self.day) // HOUR, self._day_money(row))]
        overlaps = self._overlaps(row)
        if len(overlaps) == 1:
            return [(overlaps[0][0], self._day_money(row))]
        if follows:
            weights = self.machine_row_hours.get(id(row)) or [end - start for _, start, end in overlaps]
            if not sum(weights):
                weights = [1] + [0] * (len(overlaps) - 1)
            split = [largest_remainder(amount, weights) for amount in self._day_money(row)]
            return [(hour, _four([column[i] for column in split])) for i, (hour, _, _) in enumerate(overlaps)]
        return [(hour, self._span_money(row, start, end)) for hour, start, end in overlaps]

    def _first_rounding(self, row: Charge, category: str, hour: int, money: Money) -> None:
        if category == MACHINE:
            assert row.machine is not None
            vector = self.truth.vectors.get((row.machine, hour), {NOWHERE: 0})
            self._over(row, hour, money, vector, dict.fromkeys([*vector, NOWHERE], row.machine))
        elif category == DEPENDANT:
            self._over(row, hour, money, *self._joined(row.dependant, hour))
        else:
            self._over(row, hour, money, {Place(None, None, None, None, category): 1}, {})

    def _joined(self, dependant: str | None, hour: int) -> tuple[Vector, dict[Place, str | None]]:
        """Time of all machines on which something hangs in an hour, and the machine of each place."""
        joined: Vector = defaultdict(int)
        hosts: dict[Place, str | None] = {}
        for host in self.attached[dependant].get(hour, []):
            for place, ns in self.truth.vectors.get((host, hour), {}).items():
                joined[place] += ns
                hosts[place] = None if place in hosts else host
        return joined or {Place(None, None, None, None, "idle"): 1}, hosts

    def _over(self, row: Charge, hour: int, money: Money, vector: Vector, hosts: Mapping[Place, str | None]) -> None:
        """Shares each amount out by the ns of a vector, by largest remainder in the order of places.

        Args:
            row: the charge.
            hour: hour of the day.
            money: its part in the hour.
            vector: ns by place.
            hosts: machine of each place; without one where the money follows no machine.
        """
        places = sorted(vector, key=order)
        weights = [vector[place] for place in places]
        if not sum(weights):
            if NOWHERE not in vector:
                places = sorted([*places, NOWHERE], key=order)
            weights = [int(place == NOWHERE) for place in places]
        split = [largest_remainder(amount, weights) for amount in money]
        keep_all = not any(money)
        for i, place in enumerate(places):
            parts = _four([column[i] for column in split])
            if vector.get(place, 0) or any(parts) or keep_all:
                host = hosts.get(place)
                kind = None if host is None else self.fleet.machines[self.names[host]].instance_type
                self.truth.addresses.append(
                    Address(
                        row.label,
                        self.day,
                        self.day + hour * HOUR,
                        host,
                        place,
                        *parts[:3],
                        None,
                        kind,
                        row["PricingCategory"],
                        parts[3],
                        row.payer,
                    )
                )

    # --- rule 8: estimates -------------------------------------------------------------------------------------------

    def _machine_estimates(self) -> list[Estimate]:
        """Machine-hours that can only be estimated; those that the bill should have and has not are unmatched."""
        rows = [row for row in self.rows if row.kind == "machine" and row["ChargeCategory"] == "Usage"]
        billed = {(row.machine, hour) for row in rows for hour in self._touched(row)}
        self.estimator = Estimator(
            self.fleet, self.day, self.all, self.rows, self._touched, self.alphas, self.contracted
        )
        running = {key: self._running(*key) for key in self.truth.observed if key not in billed}
        found = list(self.estimator.machine_hours(running))
        self.truth.unmatched = sorted(set(running) - {(e.resource, e.hour) for e in found})
        return found

    def _touched(self, row: Charge) -> list[int]:
        """Hours of this day that a row touches; of one that books whole, the hour in which it begins."""
        return [h for h, _, _ in self._overlaps(row)] if _is_spread(row) else [(row.start_ns - self.day) // HOUR]

    def _estimated(self, estimate: Estimate, vector: Vector, hosts: Mapping[Place, str | None]) -> None:
        """Adds the addresses of an estimate: its amount over a vector, in the order of places."""
        places = sorted(vector, key=order)
        split = largest_remainder(estimate.amount, [vector[place] for place in places])
        label = f"estimate:{self.fleet.spec.cloud}/{estimate.resource}"
        hour_ns = self.day + estimate.hour * HOUR
        for place, part in zip(places, split, strict=True):
            host = hosts.get(place)
            kind = None if host is None else self.fleet.machines[self.names[host]].instance_type
            paid = None, None, None, part
            self.truth.addresses.append(Address(label, self.day, hour_ns, host, place, *paid, kind, estimate.pricing))

    # --- rule 9: layers ----------------------------------------------------------------------------------------------

    def _second_rounding(self) -> None:
        pools: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for a in self.truth.addresses:
            if a.place.category == "work":
                assert a.place.job is not None and a.place.attempt is not None
                use = a.hour_ns, a.place.job, a.place.attempt, a.instance_type
                for i, value in enumerate((a.billed, a.effective, a.estimated, a.promotional)):
                    pools[*use, a.pricing, a.estimated is not None, a.payer][i] += value or 0
        for (hour_ns, job, attempt, kind, pricing, is_estimate, _), money in sorted(pools.items(), key=repr):
            weights = self._layers((hour_ns - self.day) // HOUR, job, attempt, kind)
            layers = sorted(weights)
            split = [largest_remainder(amount, [weights[x] for x in layers]) for amount in money]
            for i, layer in enumerate(layers):
                cash, own, estimate, free = (column[i] for column in split)
                paid = (None, None, estimate, None) if is_estimate else (cash, own, None, free)
                self.truth.layers.append(LayerMoney(hour_ns, job, attempt, kind, pricing, layer, weights[layer], *paid))

    def _layers(self, hour: int, job: str, attempt: int, kind: str | None) -> dict[Layer, int]:
        exact = self.truth.layer_ns.get((hour, job, attempt, kind or ""))
        if exact:
            return dict(exact)
        anything: dict[Layer, int] = defaultdict(int)
        for (h, j, a, _), found in self.truth.layer_ns.items():
            if (h, j, a) == (hour, job, attempt):
                for layer, ns in found.items():
                    anything[layer] += ns
        return dict(anything)
