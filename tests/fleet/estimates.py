"""What a day's hours cost as long as no bill has them: list price times observed time, times a calibration factor.

Second writing of the rules on watermarks, estimates of machines and of volumes; takes the bill's rows and what was seen.
"""

from __future__ import annotations

import csv
from calendar import monthrange
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.fleet.arithmetic import UNIT, half_even
from tests.fleet.charge import Charge, instant
from tests.fleet.model import DAY, HOUR, Fleet, Machine

CATALOGUE = Path(__file__).parents[2] / "seedance" / "data" / "storage_prices.csv"


@cache
def volume_price(cloud: str, kind: str | None, region: str) -> Decimal | None:
    """List price of a volume type in USD per GiB-month; None where its cloud has none, such as for disks sold by tier."""
    with CATALOGUE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["cloud"], row["volume_type"], row["region"]) == (cloud, kind, region):
                return Decimal(row["usd_per_gib_month"])
    return None


def volume_listed(price: Decimal, size: int, day: int) -> int:
    """List price of a volume for one hour of a day, units of 1e-12.

    Args:
        price: per GiB-month, in its currency.
        size: bytes.
        day: start of the day, ns UTC; the price is spread over all hours of its month in UTC.
    """
    when = instant(day)
    return half_even(Fraction(price) * UNIT * size / (2**30 * 24 * monthrange(when.year, when.month)[1]))


class Estimate(NamedTuple):
    """One hour of one machine or volume that no bill has yet."""

    resource: str
    hour: int
    listed: int
    """At its price, units of 1e-12."""
    amount: int
    """Times alpha, units of 1e-12."""
    pricing: str
    """PricingCategory of the price."""


@dataclass
class Estimator:
    """Estimates of one day of a fleet.

    Args:
        fleet: the fleet.
        day: start of the day, ns UTC.
        bill: rows of the bills in force, of any day.
        rows: those of them that have a part on this day.
        hours_of: hours of the day that a row touches.
        alphas: "cloud|account|family" to the factor in units of 1e-12; missing is one.
        contracted: "cloud|account|instance type|region" to "price currency" of the last closed bill.
    """

    fleet: Fleet
    day: int
    bill: list[Charge]
    rows: list[Charge]
    hours_of: Callable[[Charge], Iterable[int]]
    alphas: Mapping[str, int] = field(default_factory=dict)
    contracted: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machines = {machine.instance_id: machine for machine in self.fleet.machines}
        services = {row["ServiceName"] for row in self.bill if row.kind == "machine"}
        ends: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row in self.bill:
            if row["ChargeCategory"] == "Usage" and row["ServiceName"] in services:
                ends[row["BillingAccountId"], row["ServiceName"]].append(row.end_ns)
        grain = DAY if self.fleet.spec.cloud == "azure" else HOUR
        self.marks = {who: min(max(found) // grain * grain, self.day + DAY) for who, found in ends.items()}
        self.named: dict[str | None, set[tuple[str, str]]] = defaultdict(set)
        """Machine to the accounts and services under which the day's bill has it."""
        self.prices: dict[str | None, set[str]] = defaultdict(set)
        """Machine to the pricing categories of its rows of the day."""
        for row in self.rows:
            if row.kind == "machine":
                self.named[row.machine].add((row["BillingAccountId"], row["ServiceName"]))
                self.prices[row.machine].add(row["PricingCategory"])

    def is_open(self, machine: str, hour: int) -> bool:
        """Whether the bills in force have not come to an hour of a machine."""
        marks = [self.marks[who] for who in self.named.get(machine, self.marks)]
        return not marks or self.day + hour * HOUR >= min(marks)

    def alpha(self, machine: str, family: str) -> int:
        """Factor of a family, under the account that the day's bill has for a machine."""
        account = min((who for who, _ in self.named.get(machine, ())), default="")
        return self.alphas.get(f"{self.fleet.spec.cloud}|{account}|{family}", UNIT)

    def machine_hours(self, running: Mapping[tuple[str, int], int]) -> Iterable[Estimate]:
        """Estimates of machine-hours that were seen, are not billed, and lie past the watermark.

        Args:
            running: (instance, hour) to the longest observed time of its devices, ns; those that no usage row touches.
        """
        for (machine, hour), ns in sorted(running.items()):
            if self.is_open(machine, hour):
                price, pricing = self._price(machine)
                listed = half_even(Fraction(price) * UNIT * ns / HOUR)
                amount = half_even(Fraction(listed * self.alpha(machine, self.machines[machine].instance_type), UNIT))
                yield Estimate(machine, hour, listed, amount, pricing)

    def _price(self, name: str) -> tuple[Decimal, str]:
        """Price of a machine's hour and its category: contracted, spot where the bill has nothing else, list."""
        machine: Machine = self.machines[name]
        account = min((who for who, _ in self.named.get(name, ())), default="")
        if self.prices.get(name) == {"Dynamic"}:
            spot = machine.facts.spot_price
            return (machine.facts.list_price, "Standard") if spot is None else (spot, "Dynamic")
        known = self.contracted.get(f"{self.fleet.spec.cloud}|{account}|{machine.instance_type}|{self.fleet.region}")
        return (Decimal(known.split()[0]) if known else machine.facts.list_price), "Standard"

    def volume_hours(self, attached: Mapping[str | None, Mapping[int, list[str]]]) -> Iterable[Estimate]:
        """Estimates of volumes that hang on a machine, state size and type, and are in no row of the bill.

        Args:
            attached: volume to hour to the instances that see it.
        """
        for volume in self.fleet.volumes:
            price = volume_price(self.fleet.spec.cloud, volume.type, self.fleet.region)
            touched = {h for row in self.rows if row.dependant == volume.volume_id for h in self.hours_of(row)}
            for hour, hosts in sorted(attached.get(volume.volume_id, {}).items()):
                if price is None or hour in touched or not any(self.is_open(host, hour) for host in hosts):
                    continue
                host = min(hosts)
                size = volume.size(volume.told(self.machines[host], hour)[-1])
                listed = volume_listed(price, size, self.day)
                amount = half_even(Fraction(listed * self.alpha(host, volume.type or ""), UNIT))
                yield Estimate(volume.volume_id, hour, listed, amount, "Standard")
