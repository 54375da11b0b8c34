"""Tables for people and JSON for programs: what a run did, and where the money of a day is.

Amounts are printed with all their twelve digits: what is shown adds up to the total that is shown. Colour only repeats what
the text says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table

from tasks.core import money

COLUMNS = ("BilledCost", "EffectiveCost", "x_EstimatedCost")


def amount(value: Decimal | str | None) -> str:
    """Twelve digits after the point, thousands apart; empty for a missing amount."""
    return "" if value is None else f"{Decimal(value):,.12f}"


def money_table(
    days: Sequence[str], totals: Sequence[Mapping[str, Any]], billed: Mapping[str, Mapping[str, Decimal]]
) -> Table:
    """Money by cloud and category in both ledgers, and, per currency, billed, addressed and their difference."""
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    table = Table(title=f"Where the money of {span} is", title_justify="left")
    table.add_column("cloud")
    table.add_column("category")
    for name in ("BilledCost (cash)", "EffectiveCost (amortised)", "estimate"):
        table.add_column(name, justify="right")
    table.add_column("currency")
    currencies = sorted({t["BillingCurrency"] for t in totals})
    for currency in currencies:
        rows = [t for t in totals if t["BillingCurrency"] == currency]
        for row in rows:
            table.add_row(row["x_Cloud"], row["x_Category"], *(amount(row[c]) for c in COLUMNS), currency)
        table.add_section()
        found = {c: money.total(r[c] for r in rows) for c in COLUMNS}
        wanted = billed.get(currency, {})
        table.add_row(
            "",
            "billed",
            amount(wanted.get("BilledCost", Decimal(0))),
            amount(wanted.get("EffectiveCost", Decimal(0))),
            "",
            currency,
        )
        told = [amount(found[c] if any(r[c] is not None for r in rows) else None) for c in COLUMNS]
        table.add_row("", "addressed", *told, currency, style="bold")
        gaps = [money.difference(wanted.get(c, Decimal(0)), found[c]) for c in COLUMNS[:2]]
        table.add_row(
            "",
            "difference",
            *("0" if not g else amount(g) for g in gaps),
            "",
            currency,
            style="bold green" if not any(gaps) else "bold red",
        )
        table.add_section()
    return table


def stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds, days and reuse of each stage."""
    table = Table(title="Stages", title_justify="left")
    for name, justify in (
        ("stage", "left"),
        ("seconds", "right"),
        ("days", "right"),
        ("computed", "right"),
        ("reused", "right"),
        ("what", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for s in stages:
        table.add_row(
            s["stage"],
            f"{s['ms'] / 1000:.2f}",
            *(str(s.get(c, "")) for c in ("days", "computed", "reused")),
            s.get("what", ""),
        )
    return table


def console(*, error: bool = False) -> Console:
    """A console that shows data as it is (a tag may look like markup) and keeps wide tables whole outside a terminal."""
    plain = Console(stderr=error, markup=False, highlight=False, emoji=False)
    return plain if plain.is_terminal else Console(stderr=error, markup=False, highlight=False, emoji=False, width=160)
