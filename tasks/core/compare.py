"""Estimate beside bill, hour by hour: what a machine or a volume should cost by price, and what its own usage rows charge.

Placed charges, observed hours and prices in; pairs out, each with the parts that its difference is made of. The reconciliation
reports them, the calibration adds them up. Knows no disk, no clock. Source: infra/rules/ledger.md 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tasks.core import money
from tasks.core.allocate import Parts
from tasks.core.categories import equals, object_keys
from tasks.core.estimate import NO_FACTS, Estimate, Price, Terms, Volume, VolumeHour, machine_units
from tasks.core.spans import BILLING_GRAIN_NS, MachineHours, Slot

CAUSES = ("rate", "missing_resource", "commitment", "credit", "lateness")
"""What the difference between a bill and an estimate can come from."""


@dataclass
class Paid:
    """What usage rows charge for one machine or volume in one hour, in whole units.

    Args:
        cash: BilledCost.
        amortised: EffectiveCost.
        promotional: of it, what promotions took off; zero or negative.
        commitment: what rows under a commitment cost beyond their list value; None where one states no list value.
        is_committed: there are such rows.
        meters: SkuMeter and tie rule of the rows, which together tell meters apart.
        currencies, services: of the rows.
    """

    cash: int = 0
    amortised: int = 0
    promotional: int = 0
    commitment: int | None = 0
    is_committed: bool = False
    meters: set[str] = field(default_factory=set)
    currencies: set[str] = field(default_factory=set)
    services: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Pair:
    """One machine or volume in one hour.

    Args:
        key: `cloud|resource`.
        hour: hour of the day.
        is_machine: false for volumes.
        family: SKU family: instance type, else meter; type of a volume.
        account, service: that pay.
        currency: of the bill, else of the price.
        price: unit price and rung.
        listed: price times what was observed; None without a price or telemetry.
        paid: what the bill charges; None until billed.
        observed_ns, billed_ns: running time seen and span billed; None for volumes, and where there is none.
        state: provisional, billed or unmatched.
        findings: what does not fit.
    """

    key: str
    hour: int
    is_machine: bool
    family: str | None
    account: str | None
    service: str | None
    currency: str | None
    price: Price | None
    listed: int | None
    paid: Paid | None
    observed_ns: int | None
    billed_ns: int | None
    state: str
    findings: tuple[str, ...]

    @property
    def cloud(self) -> str:
        """Cloud of the resource."""
        return self.key.split("|", 1)[0]

    @property
    def comparable(self) -> bool:
        """Observed, priced and billed by usage rows, all in the currency of the price: nothing is converted."""
        if self.listed is None or self.paid is None or self.price is None:
            return False
        return self.paid.currencies == {self.price.currency}

    def causes(self) -> dict[str, int]:
        """Bill less estimate in whole units, by cause; adds up to it exactly. Only of comparable pairs.

        The bill's time less the observed time at the price is `missing_resource` where the bill has more (something ran
        that was not seen) and `lateness` where it has less. Promotions are `credit`. What rows under a commitment cost
        beyond list is `commitment`; all of the rest where their list value is unknown. The rest is `rate`.
        """
        assert self.listed is not None and self.paid is not None and self.price is not None
        found = dict.fromkeys(CAUSES, 0)
        spanned = self.listed
        if self.billed_ns is not None and abs(self.billed_ns - (self.observed_ns or 0)) > BILLING_GRAIN_NS:
            spanned = machine_units(self.price, self.billed_ns)
        time = spanned - self.listed
        found["missing_resource" if time > 0 else "lateness"] = time
        found["credit"] = self.paid.promotional
        rest = self.paid.amortised - self.paid.promotional - spanned
        found["commitment"] = rest if self.paid.commitment is None else self.paid.commitment
        found["rate"] = rest - found["commitment"]
        return found


def machine_paid(
    charges: pa.Table, parts: Parts, slots: list[list[int]], own: npt.NDArray[np.bool_]
) -> dict[int, Paid]:
    """What each machine's own usage rows charge, by slot.

    Args:
        charges: rows of core_billing__charges of the day.
        parts: their parts by hour.
        slots: slots of each part; the first is the machine's own.
        own: shape (charges,), the rows whose quantity is a billed span.
    """
    reader = _Reader(charges, parts)
    found: dict[int, Paid] = {}
    for i in np.nonzero(own[parts.row])[0].tolist():
        reader.add(found.setdefault(slots[i][0], Paid()), i)
    return found


def volume_paid(charges: pa.Table, parts: Parts) -> tuple[set[VolumeHour], dict[VolumeHour, Paid]]:
    """Volumes and hours that any charge of the day names, and what their own usage rows charge in them.

    Args:
        charges: rows of core_billing__charges of the day.
        parts: their parts by hour.
    """
    objects = object_keys(charges).to_pylist()
    usage = equals(charges["ChargeCategory"], "Usage") & ~np.asarray(charges["ChargeClass"].is_valid())
    for name in ("BilledCost", "EffectiveCost"):
        usage &= np.asarray(money.to_units(charges[name])[0] >= 0, bool)
    named = np.array([name is not None for name in objects], bool)
    reader = _Reader(charges, parts)
    touched: set[VolumeHour] = set()
    found: dict[VolumeHour, Paid] = {}
    for i in np.nonzero(named[parts.row])[0].tolist():
        key = (objects[int(parts.row[i])], int(parts.hour[i]))
        touched.add(key)
        if usage[int(parts.row[i])]:
            reader.add(found.setdefault(key, Paid()), i)
    return touched, found


class _Reader:
    """Adds up parts of charges."""

    def __init__(self, charges: pa.Table, parts: Parts) -> None:
        self._parts = parts
        names = ("SkuMeter", "BillingCurrency", "ServiceName", "x_TieRule")
        self._meter, self._currency, self._service, self._rule = (charges[n].to_pylist() for n in names)
        committed = np.asarray(charges["CommitmentDiscountId"].is_valid())
        self._committed = committed | equals(charges["PricingCategory"], "Committed")
        self._has_list = np.asarray(charges["ListCost"].is_valid())

    def add(self, paid: Paid, part: int) -> None:
        row = int(self._parts.row[part])
        names = ("BilledCost", "EffectiveCost", "x_PromotionalCost", "ListCost")
        cash, amortised, promotional, listed = (int(self._parts.amounts[n][part]) for n in names)
        paid.cash += cash
        paid.amortised += amortised
        paid.promotional += promotional
        if self._committed[row]:
            paid.is_committed = True
            known = paid.commitment is not None and self._has_list[row]
            paid.commitment = (paid.commitment or 0) + amortised - promotional - listed if known else None
        paid.meters.add(f"{self._meter[row] or ''}/{self._rule[row] or ''}")
        paid.currencies.add(self._currency[row])
        if self._service[row] is not None:
            paid.services.add(self._service[row])


def compare(
    hours: MachineHours,
    terms: Terms,
    paid: Mapping[int, Paid],
    estimated: Iterable[Estimate],
    volumes: Iterable[Volume],
    volumes_paid: Mapping[VolumeHour, Paid],
) -> list[Pair]:
    """Every machine-hour that was observed or billed, and every volume-hour whose size and type hosts stated.

    Args:
        hours: slots of the day, with billed spans and findings.
        terms: prices and what the bill says of machines.
        paid: what the bill charges, by slot.
        estimated: slots that were observed and that no usage row touches.
        volumes: volumes and hours.
        volumes_paid: what the bill charges for them.
    """
    states = {e.slot: "provisional" if e.provisional else "unmatched" for e in estimated}
    pairs = [
        _of_machine(slot, terms, paid.get(number) if slot.billed_ns is not None else None, states.get(number, "billed"))
        for number, slot in enumerate(hours.slots)
        if slot.billed_ns is not None or slot.devices
    ]
    for volume in volumes:
        billed = volumes_paid.get((volume.key, volume.hour))
        if volume.provisional or billed is not None:
            pairs.append(_of_volume(volume, billed))
    return pairs


def _of_machine(slot: Slot, terms: Terms, paid: Paid | None, state: str) -> Pair:
    facts = terms.facts.get(slot.machine, NO_FACTS)
    price = terms.ladder.machine(slot.machine.split("|", 1)[0], slot.instance_type, facts)
    # Without telemetry the running time is unknown, not zero: there is nothing to set beside the bill.
    listed = None if price is None or not slot.devices else machine_units(price, slot.running_ns)
    findings = set(slot.findings) if slot.devices else {*slot.findings, "no_telemetry"}
    return Pair(
        key=slot.machine,
        hour=slot.hour,
        is_machine=True,
        family=slot.instance_type or facts.meter,
        account=facts.owner[0],
        service=facts.owner[2],
        currency=_currency(paid, price),
        price=price,
        listed=listed,
        paid=paid,
        observed_ns=slot.running_ns,
        billed_ns=slot.billed_ns,
        state=state,
        findings=_found(findings, paid, price),
    )


def _of_volume(volume: Volume, paid: Paid | None) -> Pair:
    service = volume.facts.owner[2] if paid is None else min(paid.services, default=None)
    return Pair(
        key=volume.key,
        hour=volume.hour,
        is_machine=False,
        family=volume.kind,
        account=volume.facts.owner[0],
        service=service,
        currency=_currency(paid, volume.price),
        price=volume.price,
        listed=volume.list_units,
        paid=paid,
        observed_ns=None,
        billed_ns=None,
        state="billed" if paid is not None else "provisional",
        findings=_found({"no_price"} if volume.price is None and paid is None else set(), paid, volume.price),
    )


def _currency(paid: Paid | None, price: Price | None) -> str | None:
    if paid is not None and paid.currencies:
        return min(paid.currencies)
    return None if price is None else price.currency


def _found(findings: set[str], paid: Paid | None, price: Price | None) -> tuple[str, ...]:
    """Nothing is converted: a bill in another currency than the price, or in several, is not compared."""
    other = paid is not None and (
        len(paid.currencies) > 1 or (price is not None and paid.currencies != {price.currency})
    )
    return tuple(sorted({*findings, "other_currency"} if other else findings))
