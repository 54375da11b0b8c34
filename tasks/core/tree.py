"""A day's money as a tree: currency, cloud, job, category, layer, each level adding up to the one above, digit for digit.

Addresses and layer money in; nodes with exact amounts out, ready for a page or a terminal. Knows no plotting library, no disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from seedance.schema import MONEY
from tasks.core import money
from tasks.core.spelling import one_spelling
from tasks.errors import LawError

AMOUNTS = ("BilledCost", "EffectiveCost", "x_EstimatedCost")
NO_JOB = "(no job)"
KINDS = ("currency", "cloud", "job", "category", "layer")
MISSING = {"job": NO_JOB, **{kind: f"(no {kind})" for kind in KINDS if kind != "job"}}
PLACE = {
    "BillingCurrency": "currency",
    "x_Cloud": "cloud",
    "x_JobId": "job",
    "x_Category": "category",
    "ChargeCategory": "charge category",
    "ResourceId": "resource",
}
"""What names money below zero, and what each is called where it is missing."""
LEAST = 10
"""Children that a node shows, however large the day is."""


@dataclass
class Node:
    """One node of the tree.

    Args:
        name: what people read; not trusted: it may hold anything a tag or a layer name holds.
        kind: one of KINDS, or `rest` for what was folded.
        units: amount by column of AMOUNTS in whole units of 1e-12; None where no address has one.
        children: greatest first.
        folded: number of nodes that a `rest` stands for.
    """

    name: str
    kind: str
    units: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(AMOUNTS))
    children: list[Node] = field(default_factory=list)
    folded: int = 0

    def add(self, units: Mapping[str, int | None]) -> None:
        """Add amounts; null adds nothing."""
        for name in AMOUNTS:
            extra = units[name]
            if extra is not None:
                self.units[name] = (self.units[name] or 0) + extra


def cost_tree(addresses: pa.Table, layers: pa.Table, *, most: int = 200, nodes: int = 4_000) -> list[Node]:
    """The tree of a day, one root a currency, currencies in order.

    Args:
        addresses: rows of core_cost__addresses.
        layers: rows of core_cost__layers of the same day.
        most: children that a node shows; the smallest beyond are folded into one that says how many they are.
        nodes: of the whole tree; nodes show fewer children, down to LEAST, until it is met: a browser is slow with more.

    Raises:
        LawError: a level does not add up to the one above; names it.
    """
    roots: dict[str | None, Node] = {}
    index: dict[tuple[str | None, ...], Node] = {}
    for path, units in _groups(addresses, ("BillingCurrency", "x_Cloud", "x_JobId", "x_Category")):
        for depth in range(1, len(path) + 1):
            _node(roots, index, path[:depth]).add(units)
    for path, units in _groups(layers, ("BillingCurrency", "x_Cloud", "x_JobId", "x_Layer")):
        *place, layer = path
        _node(roots, index, (*place, "work", layer)).add(units)
    for node in index.values():
        node.children.sort(key=_size)
    found = [roots[name] for name in sorted(roots, key=lambda name: (name is None, name or ""))]
    while most > LEAST and sum(_shown(root, most) for root in found) > nodes:
        most = max(most * 3 // 4, LEAST)
    for root in found:
        assert_adds_up(root)
        _fold(root, most)
    return found


def _groups(table: pa.Table, key: tuple[str, ...]) -> Iterable[tuple[tuple[str | None, ...], dict[str, int | None]]]:
    found = table.group_by(list(key), use_threads=False).aggregate([(name, "sum") for name in AMOUNTS])
    names = [found[k].to_pylist() for k in key]
    amounts = [found[f"{name}_sum"].to_pylist() for name in AMOUNTS]
    for n in range(len(found)):
        values = (None if a[n] is None else money.units(a[n]) for a in amounts)
        yield tuple(c[n] for c in names), dict(zip(AMOUNTS, values, strict=True))


def _node(
    roots: dict[str | None, Node], index: dict[tuple[str | None, ...], Node], path: tuple[str | None, ...]
) -> Node:
    found = index.get(path)
    if found is None:
        name, kind = path[-1], KINDS[len(path) - 1]
        found = index[path] = Node(MISSING[kind] if name is None else name, kind)
        if len(path) == 1:
            roots[path[0]] = found
        else:
            _node(roots, index, path[:-1]).children.append(found)
    return found


def _size(node: Node) -> tuple[int, str]:
    return -max(abs(u or 0) for u in node.units.values()), node.name


def assert_adds_up(node: Node) -> None:
    """Children add up to their parent, in each ledger on its own.

    Raises:
        LawError: names the node, both amounts.
    """
    if node.children:
        for name in AMOUNTS:
            told = sum(c.units[name] or 0 for c in node.children)
            if told != (node.units[name] or 0):
                raise LawError(
                    f"{node.kind} {node.name!r}: {name} is {money.decimal(node.units[name] or 0)}, its parts add up to "
                    f"{money.decimal(told)}. Run the day again from its charges.",
                    where=node.name,
                    expected=node.units[name],
                    found=told,
                )
    for child in node.children:
        assert_adds_up(child)


def _shown(node: Node, most: int) -> int:
    """Nodes that are left of a tree when it is folded."""
    kept = node.children if len(node.children) <= most else node.children[: most - 1]
    return 1 + len(node.children[len(kept) :][:1]) + sum(_shown(child, most) for child in kept)


def _fold(node: Node, most: int) -> None:
    if len(node.children) > most:
        small = node.children[most - 1 :]
        rest = Node(f"({len(small):,} smaller)", "rest", folded=len(small))
        for one in small:
            rest.add(one.units)
        node.children = [*node.children[: most - 1], rest]
    for child in node.children:
        _fold(child, most)


def leaves(node: Node) -> Iterable[Node]:
    """The nodes without children, in order."""
    if not node.children:
        yield node
    for child in node.children:
        yield from leaves(child)


def amount(node: Node, column: str) -> Decimal | None:
    """Amount of a node in one ledger."""
    units = node.units[column]
    return None if units is None else money.decimal(units)


def negatives(addresses: pa.Table, column: str, *, most: int = 200) -> list[tuple[tuple[str, ...], Decimal]]:
    """What is below zero in one ledger, with its place, by currency and least first: no area can show it.

    Only addresses below zero are added up, so that a refund is told even where other money of its place outweighs it.

    Args:
        addresses: rows of core_cost__addresses.
        column: one of AMOUNTS.
        most: places of a currency; the smallest beyond are folded into one that says how many they are.
    """
    below = one_spelling(addresses.filter(pc.less(addresses[column], pa.scalar(Decimal(0), MONEY))))
    groups = below.group_by(list(PLACE), use_threads=False).aggregate([(column, "sum")])
    named = (pc.fill_null(groups[name].cast(pa.string()), f"(no {what})").to_pylist() for name, what in PLACE.items())
    by_currency: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for value, *path in zip(groups[f"{column}_sum"].to_pylist(), *named, strict=True):
        by_currency.setdefault(path[0], []).append((money.units(value), tuple(path)))
    found: list[tuple[tuple[str, ...], Decimal]] = []
    for currency in sorted(by_currency):
        places = sorted(by_currency[currency])
        if len(places) > most:
            small = places[most - 1 :]
            places = [*places[: most - 1], (sum(u for u, _ in small), (currency, f"({len(small):,} smaller)"))]
        found += [(path, money.decimal(units)) for units, path in places]
    return found
