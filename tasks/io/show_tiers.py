"""A plan of checkpoint moves for people: tables for the terminal, a page and rows for Prefect.

Amounts of totals are printed with all their digits: what is shown adds up to the total that is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tasks.core.tiering import LOCAL
from tasks.io.show import amount

UNKNOWN = "unknown"
LOCAL_PRICE = "local_usd_per_gb_month"
"""Key of the policy that gives local disk a price."""
DRY = "Dry run: nothing is moved or deleted."
AMOUNTS = (
    ("storage saved a month", "x_SavedPerMonth"),
    ("storage saved over the stay", "x_Saved"),
    ("− requests", "x_RequestCost"),
    ("− retrieval", "x_RetrievalCost"),
    ("− minimum durations", "x_MinimumCost"),
    ("= net", "x_Net"),
)
WHAT = {"hot": "hot: stays", "warm": "warm", "cold": "cold", "expired": "expired: older than the policy keeps anything"}


def size(value: int) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    number, units = float(value), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units:
        if number < 1024 or unit == units[-1]:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError(value)


def entry_table(facts: Mapping[str, Any]) -> Table:
    """Entries and bytes by tier and pin."""
    table = Table(title=f"Checkpoints as of {facts['as_of']}", title_justify="left")
    table.add_column("what")
    for name in ("entries", "size"):
        table.add_column(name, justify="right")
    for tier, told in facts["tiers"].items():
        table.add_row(WHAT[tier], f"{told['objects']:,}", size(told["bytes"]))
    for pin, told in facts["pins"].items():
        table.add_row(f"pinned: {pin}", f"{told['objects']:,}", size(told["bytes"]))
    if facts["unusable"]:
        table.add_row("cannot be used", f"{facts['unusable']:,}", "")
    table.add_section()
    table.add_row("all", f"{facts['objects']:,}", size(facts["bytes"]), style="bold")
    return table


def money_table(facts: Mapping[str, Any]) -> Table:
    """What the moves that pay add up to, beside those that do not."""
    table = Table(title=f"Moves, {facts['currency']} at list price", title_justify="left")
    table.add_column("")
    for name in ("moves that pay", "kept: no known gain"):
        table.add_column(name, justify="right")
    sides = (facts["moves"], facts["kept"])
    table.add_row("entries", *(f"{side['objects']:,}" for side in sides))
    table.add_row("size", *(size(side["bytes"]) for side in sides))
    for words, column in AMOUNTS:
        bold = "bold" if column == "x_Net" else None
        table.add_row(words, *(_known(side[column]) for side in sides), style=bold)
    return table


def lines(facts: Mapping[str, Any]) -> list[str]:
    """What is to be known beside the tables, one line each."""
    told = [f"folder {folder}" for folder in facts["folders"]]
    month = _known(facts["cost_per_month"])
    told.append(f"storage of a month at list price: {month}{'' if month == UNKNOWN else ' ' + facts['currency']}")
    if facts["unpriced"]:
        told.append(_unpriced(facts["unpriced"], facts["unpriced_classes"]))
    if facts["stays"]:
        told.append("stay, by what holds them: " + ", ".join(f"{k} {n:,}" for k, n in facts["stays"].items()))
    told += [f"stays {e['path']}: {e['held_by']}: {e['why']}" for e in facts["stay"]]
    rest = sum(facts["stays"].values()) - len(facts["stay"])
    if rest:
        told.append(f"{rest:,} more stay; report_checkpoints__inventory has age, tier and pin of each")
    told += [f"cannot be used: {e['path']}: {e['why']}" for e in facts["examples"]["unusable"]]
    told += [f"move {e['path']}: {e['from']} → {e['to']}, net {amount(e['net'])}" for e in facts["examples"]["move"]]
    told += [f"keep {e['path']} in {e['from']}: {e['why']}" for e in facts["examples"]["keep"]]
    return [*told, DRY]


def markdown(facts: Mapping[str, Any]) -> str:
    """The same as a page of Markdown; names from folders appear as code, never as markup."""
    out = [f"# Checkpoints as of {facts['as_of']}", "", DRY, "", "| what | entries | size |", "|---|---:|---:|"]
    rows = [(WHAT[tier], told) for tier, told in facts["tiers"].items()]
    rows += [(f"pinned: {pin}", told) for pin, told in facts["pins"].items()]
    out += [f"| {what} | {told['objects']:,} | {size(told['bytes'])} |" for what, told in rows]
    if facts["unusable"]:
        out.append(f"| cannot be used | {facts['unusable']:,} | |")
    out += [
        f"| **all** | {facts['objects']:,} | {size(facts['bytes'])} |",
        "",
        *(f"- {_code(x)}" for x in lines(facts)),
    ]
    return "\n".join(out) + "\n"


def rows(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows of the table artifact: each amount of the moves that pay and of those that do not."""
    sides = (("moves that pay", facts["moves"]), ("kept: no known gain", facts["kept"]))
    counts = [{"what": "entries"} | {name: str(side["objects"]) for name, side in sides}]
    return counts + [
        {"what": words} | {name: side[column] or UNKNOWN for name, side in sides} for words, column in AMOUNTS
    ]


def _known(value: str | None) -> str:
    return UNKNOWN if value is None else amount(value)


def _unpriced(count: int, classes: Sequence[str]) -> str:
    """How many entries have no price, and what gives them one."""
    told = [f"entries without a price, in no sum (cost {UNKNOWN}): {count:,} in {', '.join(classes)}"]
    if LOCAL in classes:
        told.append(f"{LOCAL_PRICE} in the policy sets what a GB on local disk costs a month")
    if set(classes) - {LOCAL}:
        told.append("prices of other classes are rows of tasks/rules/storage_tiers.csv")
    return "; ".join(told)


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("\n", " ") + "`"
