"""A day before its money is shared out: charges with labels and hours, machine-hours, and what has to be estimated.

Charges, usage and prices in; what the ledger divides and the calibration compares out. Knows no disk, no clock.
Source: infra/rules/ledger.md 4.1 to 4.6 and 4.13.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from tasks.core.allocate import Parts, attachments_of, hour_parts, tie_slots
from tasks.core.categories import Labels, label
from tasks.core.compare import Paid, Pair, compare, machine_paid, volume_paid
from tasks.core.estimate import (
    Estimate,
    Ladder,
    MachineFacts,
    Terms,
    Volume,
    VolumeHour,
    estimates,
    machine_facts,
    machine_services,
    volumes,
)
from tasks.core.spans import MachineHours, observe


@dataclass(frozen=True, kw_only=True)
class DayInputs:
    """What the hours of one day, its estimates and their comparison with the bill are a function of.

    Args:
        day: UTC usage day, YYYY-MM-DD.
        charges: rows of core_billing__charges with x_UsageDate on the day.
        device_hourly, attachments: usage tables of the day.
        prices: rows of core_pricing__list.
        watermarks: `cloud|account|service` to ns, clamped to the day.
        default_region: by cloud, region of machines that the day's bill does not name.
        alphas: calibration factors by `cloud|account|family`, in units of 1e-12; None on a day that is not calibrated.
        contracted: `cloud|account|instance type|region` to "<price of a machine-hour> <currency>" of the latest closed bill.
    """

    day: str
    charges: pa.Table
    device_hourly: pa.Table
    attachments: pa.Table
    prices: pa.Table
    watermarks: Mapping[str, int]
    default_region: Mapping[str, str]
    alphas: Mapping[str, int] | None = None
    contracted: Mapping[str, str] | None = None

    @property
    def day_ns(self) -> int:
        """Start of the day, ns UTC."""
        midnight = dt.datetime.combine(dt.date.fromisoformat(self.day), dt.time(), dt.UTC)
        return int(midnight.timestamp()) * 1_000_000_000


@dataclass(frozen=True)
class Placed:
    """Charges at their hours, and estimates.

    Args:
        hours: slots of the day with observed time and billed spans.
        labels, parts, slots: of the charges: what each is, its parts by hour, and whose time shares a part out.
        terms: what estimates are made with.
        estimated: observed slots that no usage row touches.
        volumes: volumes and hours whose size and type hosts stated.
        paid, volumes_paid: what machines' and volumes' own usage rows charge.
    """

    hours: MachineHours
    labels: Labels
    parts: Parts
    slots: list[list[int]]
    terms: Terms
    estimated: list[Estimate]
    volumes: list[Volume]
    paid: dict[int, Paid]
    volumes_paid: dict[VolumeHour, Paid]

    def pairs(self) -> list[Pair]:
        """Estimate beside bill, hour by hour."""
        return compare(self.hours, self.terms, self.paid, self.estimated, self.volumes, self.volumes_paid)


def place(inputs: DayInputs) -> Placed:
    """Label the day's charges, put them at their hours, and estimate what they do not reach."""
    charges, day_ns = inputs.charges, inputs.day_ns
    hours = observe(inputs.device_hourly, day_ns)
    seen = pa.array(sorted({s.machine for s in hours.slots}), pa.string())
    attached = attachments_of(inputs.attachments, day_ns)
    labels = label(charges, seen, pa.array(sorted({name for name, _ in attached}), pa.string()))
    parts = hour_parts(charges, labels, day_ns, hours)
    slots = tie_slots(charges, parts, labels, hours, attached)
    facts = machine_facts(charges)
    _type_slots(hours, facts)
    terms = Terms(
        inputs.day,
        day_ns,
        facts,
        machine_services(charges),
        inputs.watermarks,
        Ladder(inputs.prices, inputs.default_region, inputs.day, inputs.contracted),
        inputs.alphas or {},
    )
    estimated = estimates(hours, terms)
    touched, volumes_paid = volume_paid(charges, parts)
    return Placed(
        hours,
        labels,
        parts,
        slots,
        terms,
        estimated,
        volumes(inputs.attachments, attached, touched, terms),
        machine_paid(charges, parts, slots, labels.spans),
        volumes_paid,
    )


def _type_slots(hours: MachineHours, facts: Mapping[str, MachineFacts]) -> None:
    """An hour whose rows and readings state no instance type has that of the machine's other rows of the day."""
    for slot in hours.slots:
        if slot.instance_type is None and slot.machine in facts:
            slot.instance_type = facts[slot.machine].instance_type
