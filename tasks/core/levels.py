"""Levels of an explanation: nodes whose children add up to them, folded where they are many, and text that is safe to print.

Amounts are whole units of 1e-12 in one currency, None where nothing has an amount in that column. Knows no table and no
terminal.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.core import money
from tasks.errors import LawError

AMOUNTS = ("BilledCost", "EffectiveCost", "x_EstimatedCost", "x_PromotionalCost")
Units = tuple[int | None, ...]
"""One amount for each of AMOUNTS."""
NOTHING: Units = (None,) * len(AMOUNTS)
FOLDED = "folded"
"""Kind of the node that stands for what was folded."""
_UNSAFE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}


@dataclass(frozen=True)
class Node:
    """One part of an explanation.

    Args:
        kind: what it is (charge, day, hour, machine …).
        name: which one; not trusted, see `plain`.
        units: its amounts.
        facts: what is known of it, name and text, in order; not trusted.
        children: its parts; none where it is not divided any further.
        folded: how many parts this node stands for; 0 for a part of its own.
    """

    kind: str
    name: str
    units: Units
    facts: tuple[tuple[str, str], ...] = ()
    children: tuple[Node, ...] = ()
    folded: int = 0


def total(amounts: Iterable[Units]) -> Units:
    """Exact sum by column; None where no amount is known."""
    found = list(amounts)
    columns = ([u[i] for u in found if u[i] is not None] for i in range(len(AMOUNTS)))
    return tuple(sum(known) if known else None for known in ([v for v in c if v is not None] for c in columns))


def assert_levels(node: Node, above: tuple[str, ...] = ()) -> None:
    """Every level adds up to the one above it, digit for digit, in each ledger on its own.

    Raises:
        LawError: names the first level that does not; carries where, ledger, expected, found.
    """
    here = (*above, f"{node.kind} {node.name}")
    if node.children:
        found = total(child.units for child in node.children)
        for ledger, expected, sum_of in zip(AMOUNTS, node.units, found, strict=True):
            if expected != sum_of:
                raise not_equal(" / ".join(here), ledger, expected, sum_of, f"its {len(node.children):,} parts")
    for child in node.children:
        assert_levels(child, here)


def not_equal(where: str, ledger: str, expected: int | None, found: int | None, parts: str) -> LawError:
    """The error of a level that does not add up."""
    return LawError(
        f"law 1 (money): {plain(where)}: {ledger} is {amount(expected) or 'missing'}, {parts} add up to "
        f"{amount(found) or 'nothing'}. Nothing is shown; run the day again, and hold its commit to its objects with verify.",
        law="1",
        where=where,
        ledger=ledger,
        expected=expected,
        found=found,
    )


def fold(node: Node, most: int) -> Node:
    """The same with at most `most` parts a level: those beyond become one, with their number and their sum.

    Which parts stay follows the order of the level: the first in time, or the greatest.
    """
    kept = node.children
    if len(kept) > most:
        rest = kept[most - 1 :]
        kept = (
            *kept[: most - 1],
            Node(FOLDED, f"… {len(rest):,} more", total(r.units for r in rest), folded=len(rest)),
        )
    return replace(node, children=tuple(fold(child, most) for child in kept))


def prune(node: Node, depth: int) -> Node:
    """The same with so many levels below it; 0 leaves the node alone. What is cut off stays in the amounts above it."""
    return replace(node, children=tuple(prune(child, depth - 1) for child in node.children) if depth > 0 else ())


def walk(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    """Every node with its depth, parents before their parts."""
    yield depth, node
    for child in node.children:
        yield from walk(child, depth + 1)


def as_dict(node: Node) -> dict[str, Any]:
    """The node as JSON values: amounts are decimal texts."""
    told: dict[str, Any] = {"kind": node.kind, "name": node.name}
    told |= {name: amount(units) for name, units in zip(AMOUNTS, node.units, strict=True)}
    if node.facts:
        told["facts"] = dict(node.facts)
    if node.folded:
        told["folded"] = node.folded
    if node.children:
        told["children"] = [as_dict(child) for child in node.children]
    return told


def amount(units: int | None) -> str | None:
    """Units as decimal text with twelve digits."""
    return None if units is None else f"{money.decimal(units):f}"


def plain(text: str) -> str:
    """Text without anything that a terminal or a browser acts on: control, format and separator characters are spelled out.

    Tags, job names and layer names come from outside; an escape sequence in them must not colour, move or hide anything.
    """
    return "".join(c if unicodedata.category(c) not in _UNSAFE else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """Names in one line, safe to print; beyond `most`, how many more there are."""
    shown = ", ".join(plain(n) for n in names[:most])
    return shown if len(names) <= most else f"{shown}, … {len(names) - most:,} more"
