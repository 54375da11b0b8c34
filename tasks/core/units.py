"""Units of time in bills: the text of a unit in, nanoseconds out. Knows no table, no money, no clock.

Only plain units of time count. "vCPU-Hours", "GB-Months" or "LCU-Hours" measure something else times time, and the
length of a month varies. Where it is known how many units of a meter one machine has, "vCPU-Hours" are time as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType

SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS
DAY_NS = 24 * HOUR_NS

MOST_TIME_NS = 40_000 * HOUR_NS
"""Time that a bill may charge for one machine, in a row or in a day's rows of one meter: times 64 devices it fits int64."""

TIME_UNITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("hours", "hour", "hrs", "hr", "h"), HOUR_NS),
        **dict.fromkeys(("minutes", "minute"), MINUTE_NS),
        **dict.fromkeys(("seconds", "second"), SECOND_NS),
    }
)
"""Spellings seen in FOCUS exports, in lower case."""

METER_UNITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(
            (f"{what}{plural}" for what in ("gibibyte hour", "gib-hour", "gib hour") for plural in ("", "s")), HOUR_NS
        ),
        **dict.fromkeys((f"{what}-hour{plural}" for what in ("vcpu", "core", "gpu") for plural in ("", "s")), HOUR_NS),
        "giby.h": HOUR_NS,
    }
)
"""Hours of a part of a machine, in lower case: time where the row says how many such parts one machine has."""


def time_unit_ns(unit: str | None, *, metered: bool = False) -> int | None:
    """Nanoseconds of one unit of time, caseless; None when the unit is missing or no unit of time.

    Args:
        unit: text of the bill.
        metered: the row's x_UnitsPerMachine is known, so that hours of cores, GPUs or GiB count as hours too.

    Source: FOCUS ConsumedUnit and PricingUnit; spellings of AWS, Azure and Google exports; infra/rules/ledger.md 4.6.
    """
    if unit is None:
        return None
    name = unit.strip().lower()
    return TIME_UNITS.get(name) or (METER_UNITS.get(name) if metered else None)


def quantity_ns(quantity: Decimal, unit_ns: int) -> int:
    """A quantity of time in whole nanoseconds, half-even.

    Args:
        quantity: exact amount in units.
        unit_ns: ns of one unit, from `time_unit_ns`.
    """
    if not quantity.is_finite():
        raise ValueError(f"quantity_ns: {quantity} is not a finite quantity")
    numerator, divisor = quantity.as_integer_ratio()
    whole, rest = divmod(abs(numerator) * unit_ns, divisor)
    if 2 * rest > divisor or (2 * rest == divisor and whole % 2):
        whole += 1
    return -whole if numerator < 0 else whole
