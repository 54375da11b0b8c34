"""Estimates: what machine-hours and volume-hours cost that the bill has not reached yet.

Observed hours, prices, watermarks and calibration factors in; price and estimate of each out. An estimate never enters a sum
of billed money; it stands in x_EstimatedCost on its own. Knows no disk, no clock. Source: infra/rules/ledger.md 4.13 and 5.
"""

from __future__ import annotations

import calendar
import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core import money
from tasks.core.categories import equals, machine_keys
from tasks.core.spans import HOUR_NS, MachineHours
from tasks.core.units import time_unit_ns

ALPHA_ONE: int = 10**money.DIGITS
"""Calibration factor 1, in units of 1e-12."""
GIB = 2**30
VOLUME_UNIT = "GiB-Mo"
"""PricingUnit of volumes: a GiB for a calendar month."""

VolumeHour = tuple[str, int]
"""`cloud|volume` and hour of the day."""


@dataclass(frozen=True)
class MachineFacts:
    """What the day's bill says of one machine: accounts and services of its rows, type, region, currencies, spot, meter."""

    accounts: frozenset[tuple[str, str | None, str | None]]
    instance_type: str | None
    region: str | None
    currencies: tuple[str, ...]
    is_spot: bool
    meter: str | None = None

    @property
    def owner(self) -> tuple[str | None, str | None, str | None]:
        """The first of its accounts, with sub-account and service."""
        return min(self.accounts, key=lambda a: tuple((x is None, x or "") for x in a), default=(None, None, None))

    @property
    def currency(self) -> str | None:
        """The currency of its rows; the first of several."""
        return min(self.currencies, default=None)


NO_FACTS = MachineFacts(frozenset(), None, None, (), False)
"""Of a machine that the day's bill does not name."""


@dataclass(frozen=True)
class Price:
    """A unit price in whole units of 1e-12 of its currency, and the rung of the ladder that it comes from."""

    units: int
    currency: str
    source: str


@dataclass(frozen=True)
class Estimate:
    """Estimate of one slot: amount by price and amount after alpha in whole units, None without a price.

    Args:
        slot: number of the machine-hour.
        span_ns: observed running time.
        list_units: price times span.
        units: the same after alpha.
        price: price and rung; None when no rung has one.
        provisional: the bill has not reached the hour; otherwise it was observed and not billed.
    """

    slot: int
    span_ns: int
    list_units: int | None
    units: int | None
    price: Price | None
    provisional: bool


@dataclass(frozen=True)
class Volume:
    """One volume in one hour in which hosts named it, with size and type: what it should cost, and whether that is an estimate.

    Args:
        key: `cloud|volume`.
        hour: hour of the day.
        machines: `cloud|instance` of the machines that it was attached to, sorted.
        size: bytes, as the host states them.
        kind: type in the provider's words.
        facts: of the first machine.
        list_units: price times size, for the hour; None without a price.
        units: the same after alpha.
        price: price and rung.
        provisional: no charge of the day touches the hour, and the bill has not reached it.
    """

    key: str
    hour: int
    machines: tuple[str, ...]
    size: int
    kind: str
    facts: MachineFacts
    list_units: int | None
    units: int | None
    price: Price | None
    provisional: bool


def machine_facts(charges: pa.Table) -> dict[str, MachineFacts]:
    """Facts of each machine that a machine row of the day names, by `cloud|instance`."""
    rows = charges.filter(pa.array(equals(charges["x_Class"], "machine")))
    columns = (
        "BillingAccountId",
        "SubAccountId",
        "ServiceName",
        "RegionId",
        "BillingCurrency",
        "x_InstanceType",
        "PricingCategory",
        "SkuMeter",
    )
    facts: dict[str, MachineFacts] = {}
    gathered: dict[str, list[tuple[str | None, ...]]] = {}
    values = [rows[c].to_pylist() for c in columns]
    for key, *row in zip(machine_keys(rows).to_pylist(), *values, strict=True):
        if key is not None:
            gathered.setdefault(key, []).append(tuple(row))
    for key, found in gathered.items():
        region, kind, meter = (min((str(r[i]) for r in found if r[i] is not None), default=None) for i in (3, 5, 7))
        accounts = frozenset((str(r[0]), r[1], r[2]) for r in found)
        currencies = tuple(sorted({str(r[4]) for r in found}))
        is_spot = {r[6] for r in found} == {"Dynamic"}
        facts[key] = MachineFacts(accounts, kind, region, currencies, is_spot, meter)
    return facts


def watermark_of(
    machine: str, facts: Mapping[str, MachineFacts], watermarks: Mapping[str, int], services: Mapping[str, set[str]]
) -> int | None:
    """Instant up to which the bill of a machine is there; None when its cloud has no bill.

    Of a machine that the bill names: the least watermark of its accounts and services. Of any other: the least of the
    services that bill machines in its cloud, or of all services where none does.
    """
    cloud = machine.split("|", 1)[0]
    known = facts.get(machine)
    if known is not None:
        found = [w for a, _, s in known.accounts if (w := watermarks.get(f"{cloud}|{a}|{s or ''}")) is not None]
        if found:
            return min(found)
    of_cloud = {key: w for key, w in watermarks.items() if key.split("|", 1)[0] == cloud}
    billing = services.get(cloud, set())
    chosen = [w for key, w in of_cloud.items() if not billing or key.rsplit("|", 1)[-1] in billing]
    return min(chosen) if chosen else None


def machine_services(charges: pa.Table) -> dict[str, set[str]]:
    """Services that bill machines, by cloud."""
    rows = charges.filter(pa.array(equals(charges["x_Class"], "machine")))
    found: dict[str, set[str]] = {}
    for cloud, service in zip(rows["x_Cloud"].to_pylist(), rows["ServiceName"].to_pylist(), strict=True):
        found.setdefault(cloud, set()).add(service or "")
    return found


class Ladder:
    """Unit prices, the first rung that has one: what the latest closed bill paid, then spot for spot machines, then list.

    Of several dates the latest at or before the day, else the undated one, else the earliest of later ones.

    Args:
        prices: rows of core_pricing__list.
        default_region: by cloud, region of what the day's bill does not place.
        day: UTC day, YYYY-MM-DD.
        contracted: `cloud|account|instance type|region` to "<price of a machine-hour> <currency>" of the latest closed bill.
    """

    def __init__(
        self,
        prices: pa.Table,
        default_region: Mapping[str, str],
        day: str,
        contracted: Mapping[str, str] | None = None,
    ) -> None:
        self._default = default_region
        self._contracted = contracted or {}
        rows = prices.to_pylist()
        self._hourly = {
            source: _rung(rows, day, source, category, lambda unit: time_unit_ns(unit) == HOUR_NS)
            for source, category in (("list", "Standard"), ("spot", "Dynamic"))
        }
        self._monthly = _rung(rows, day, "list", "Standard", lambda unit: unit == VOLUME_UNIT)

    def machine(self, cloud: str, instance_type: str | None, facts: MachineFacts) -> Price | None:
        """Price of one machine-hour; None when no rung knows that type in that region."""
        kind, region = instance_type or "", facts.region or self._default.get(cloud, "")
        listed = self._hourly["list"].get((cloud, kind, region))
        if facts.is_spot:
            return self._hourly["spot"].get((cloud, kind, region)) or listed
        agreed = self._contracted.get(f"{cloud}|{facts.owner[0] or ''}|{kind}|{region}")
        if agreed is None:
            return listed
        amount, currency = agreed.split(" ", 1)
        return Price(money.units(Decimal(amount)), currency, "contracted")

    def volume(self, cloud: str, kind: str, region: str | None) -> Price | None:
        """Price of a GiB for a month."""
        return self._monthly.get((cloud, kind, region or self._default.get(cloud, "")))


def _rung(
    rows: list[dict[str, str]], day: str, source: str, category: str, of_unit: Callable[[str], bool]
) -> dict[tuple[str, str, str], Price]:
    chosen = [r for r in rows if r["PricingCategory"] == category and of_unit(r["PricingUnit"])]
    chosen.sort(key=lambda r: str(r["BillingCurrency"]), reverse=True)
    dated = [r for r in chosen if r["x_AsOf"][:4].isdigit()]
    later = sorted((r for r in dated if r["x_AsOf"] > day), key=lambda r: str(r["x_AsOf"]), reverse=True)
    before = sorted((r for r in dated if r["x_AsOf"] <= day), key=lambda r: str(r["x_AsOf"]))
    undated = [r for r in chosen if not r["x_AsOf"][:4].isdigit()]
    return {  # of one key the last one stands
        (r["x_Cloud"], r["SkuId"], r["RegionId"]): Price(money.units(r["ListUnitPrice"]), r["BillingCurrency"], source)
        for r in (*later, *undated, *before)
    }


def machine_units(price: Price, span_ns: int) -> int:
    """Price per hour times span, half-even to whole units."""
    return money.half_even(price.units * span_ns, HOUR_NS)


def volume_units(price: Price, size: int, day: str) -> int:
    """Price of a volume of `size` bytes in one hour of the day's month, half-even to whole units."""
    date = dt.date.fromisoformat(day)
    return money.half_even(price.units * size, GIB * 24 * calendar.monthrange(date.year, date.month)[1])


def alpha_of(alphas: Mapping[str, int], cloud: str, account: str | None, family: str | None) -> int:
    """Calibration factor of one cloud, account and SKU family in units of 1e-12; 1 where nothing was learnt."""
    return alphas.get(f"{cloud}|{account or ''}|{family or ''}", ALPHA_ONE)


def calibrated(listed: int | None, alpha: int) -> int | None:
    """An estimate after alpha, half-even to whole units."""
    return None if listed is None else money.half_even(listed * alpha, ALPHA_ONE)


@dataclass(frozen=True)
class Terms:
    """What estimates of a day are made with.

    Args:
        day: UTC day, YYYY-MM-DD.
        day_ns: its start.
        facts, services, watermarks: of the day's bill.
        ladder: unit prices.
        alphas: calibration factors by `cloud|account|family`.
    """

    day: str
    day_ns: int
    facts: Mapping[str, MachineFacts]
    services: Mapping[str, set[str]]
    watermarks: Mapping[str, int]
    ladder: Ladder
    alphas: Mapping[str, int] = field(default_factory=dict)

    def is_open(self, machine: str, hour: int) -> bool:
        """Whether the machine's bill has not reached the hour: it begins at or after the watermark, or there is none."""
        mark = watermark_of(machine, self.facts, self.watermarks, self.services)
        return mark is None or self.day_ns + hour * HOUR_NS >= mark


def estimates(hours: MachineHours, terms: Terms) -> list[Estimate]:
    """An estimate for every observed slot that no usage row of a bill touches, in slot order.

    Slots before the watermark are not provisional: they were observed and not billed, a finding, and have no address.
    """
    found = []
    for number, slot in enumerate(hours.slots):
        if slot.touched or not slot.devices:
            continue
        provisional = terms.is_open(slot.machine, slot.hour)
        cloud, facts = slot.machine.split("|", 1)[0], terms.facts.get(slot.machine, NO_FACTS)
        price = terms.ladder.machine(cloud, slot.instance_type, facts)
        listed = None if price is None else machine_units(price, slot.running_ns)
        alpha = alpha_of(terms.alphas, cloud, facts.owner[0], slot.instance_type)
        after = calibrated(listed, alpha)
        found.append(Estimate(number, slot.running_ns, listed, after, price, provisional))
        if not provisional:
            slot.findings.add("unmatched")
        if price is None:
            slot.findings.add("no_price")
    return found


def stated_sizes(attachments: pa.Table, day_ns: int) -> dict[VolumeHour, tuple[int, str]]:
    """Size and type of each volume and hour: of the first of its machines that states both."""
    found: dict[VolumeHour, tuple[str, int, str]] = {}
    hour = (np.asarray(attachments["hour_utc"].cast(pa.int64())) - day_ns) // HOUR_NS
    names, machines = (
        pc.binary_join_element_wise(attachments["cloud"], attachments[c], "|").to_pylist()
        for c in ("object_id", "instance_id")
    )
    sizes, kinds = attachments["bytes"].to_pylist(), attachments["object_type"].to_pylist()
    for name, h, machine, size, kind in zip(names, hour.tolist(), machines, sizes, kinds, strict=True):
        if size is not None and kind is not None:
            found[name, h] = min(found.get((name, h), (machine, size, kind)), (machine, size, kind))
    return {key: (size, kind) for key, (_, size, kind) in found.items()}


def volumes(
    attachments: pa.Table, attached: Mapping[VolumeHour, list[str]], touched: set[VolumeHour], terms: Terms
) -> list[Volume]:
    """Every volume and hour whose size and type hosts stated, by volume and hour.

    Args:
        attachments: core_usage__attachments_hourly of the day.
        attached: machines of each volume and hour, sorted.
        touched: volumes and hours that a charge of the day names.
        terms: prices, watermarks and calibration factors.
    """
    found = []
    for (key, hour), (size, kind) in sorted(stated_sizes(attachments, terms.day_ns).items()):
        machines = tuple(attached[key, hour])
        cloud, facts = key.split("|", 1)[0], terms.facts.get(machines[0], NO_FACTS)
        price = terms.ladder.volume(cloud, kind, facts.region)
        listed = None if price is None else volume_units(price, size, terms.day)
        after = calibrated(listed, alpha_of(terms.alphas, cloud, facts.owner[0], kind))
        # The least watermark of several machines counts: the hour is open as soon as one of them is.
        provisional = (key, hour) not in touched and any(terms.is_open(m, hour) for m in machines)
        found.append(Volume(key, hour, machines, size, kind, facts, listed, after, price, provisional))
    return found
