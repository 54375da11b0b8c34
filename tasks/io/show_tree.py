"""Explanations for people: a tree for the terminal, a page and a table for the Prefect UI.

Names and facts come from bills and jobs and are shown as text, whatever they hold. Colour only repeats what the text says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.text import Text
from rich.tree import Tree

from tasks.core.levels import AMOUNTS, FOLDED, Node, amount, plain, walk
from tasks.io.show import amount as grouped

LEDGERS = {
    "both": AMOUNTS,
    "cash": ("BilledCost", "x_EstimatedCost"),
    "amortised": ("EffectiveCost", "x_EstimatedCost", "x_PromotionalCost"),
}
"""Columns that are shown for each choice of ledger; a promotion of 0 is left out."""


def trees(nodes: Iterable[Node], ledger: str) -> list[Tree]:
    """A tree for each node, ready to print."""
    return [_tree(node, ledger) for node in nodes]


def _tree(node: Node, ledger: str) -> Tree:
    tree = Tree(_label(node, ledger, whole=True), guide_style="dim")
    _grow(tree, node, ledger)
    return tree


def _grow(tree: Tree, node: Node, ledger: str) -> None:
    for child in node.children:
        _grow(tree.add(_label(child, ledger)), child, ledger)


def _label(node: Node, ledger: str, *, whole: bool = False) -> Text:
    label = Text(no_wrap=False, overflow="fold")
    if node.kind != FOLDED:
        label.append(f"{node.kind} ", style="dim")
    label.append(plain(node.name), style="italic" if node.kind == FOLDED else "bold")
    label.append("  " + amounts(node, ledger))
    facts = [f"{name}: {plain(value)}" for name, value in node.facts]
    if facts:
        label.append("\n  " + "\n  ".join(facts) if whole else f"  ({'; '.join(facts)})", style="dim")
    return label


def amounts(node: Node, ledger: str) -> str:
    """The amounts of a node with their columns, all twelve digits; what is missing is left out."""
    shown = zip(AMOUNTS, node.units, strict=True)
    told = [
        f"{name} {grouped(amount(units))}"
        for name, units in shown
        if name in LEDGERS[ledger] and units is not None and (units or name != "x_PromotionalCost")
    ]
    return ", ".join(told) or "no amount"


def page(title: str, nodes: Sequence[Node], ledger: str, levels: int) -> str:
    """The trees as Markdown: a nested list; everything that comes from outside stands in code spans."""
    lines = [f"# {title}", ""]
    for root in nodes:
        for depth, node in walk(root):
            name = node.name if node.kind == FOLDED else f"{node.kind} {code(node.name)}"
            facts = "; ".join(f"{fact} {code(value)}" for fact, value in node.facts)
            lines.append("  " * depth + f"- {name}: {amounts(node, ledger)}" + (f" ({facts})" if facts else ""))
        lines.append("")
    return "\n".join([*lines, f"Shown to {levels} level(s); `--json` on the command line gives all of it."])


def code(text: str) -> str:
    """Text as a Markdown code span, whatever backticks it holds."""
    safe = plain(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", safe)), default=0))
    pad = " " if safe.startswith("`") or safe.endswith("`") or not safe.strip() else ""
    return f"{fence}{pad}{safe}{pad}{fence}"


def table(nodes: Iterable[Node]) -> list[dict[str, str]]:
    """The trees as rows of text: level, what, name and every amount."""
    rows = []
    for root in nodes:
        for depth, node in walk(root):
            row = {"level": str(depth), "what": node.kind, "name": plain(node.name)}
            rows.append(row | {c: amount(u) or "" for c, u in zip(AMOUNTS, node.units, strict=True)})
    return rows
