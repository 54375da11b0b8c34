"""The data dictionary page, written from the declarations: tables in, Markdown out. Knows no data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.billing import BILLING
from schemas.checkpoints import CHECKPOINTS
from schemas.ledger import LEDGER, REPORTS
from schemas.pareto import PARETO_TABLES
from schemas.restatements import RESTATED
from schemas.telemetry import TELEMETRY
from schemas.usage import USAGE
from seedance.describe import HEAD, describe
from seedance.schema import Table

PAGE = Path(__file__).resolve().parent.parent / "infra" / "dictionary.md"

GROUPS: Mapping[str, Mapping[str, Table]] = {
    "Telemetry: what GPU hosts write": TELEMETRY,
    "Usage: what the reduction makes of it": USAGE,
    "Billing: charges and prices": BILLING,
    "Ledger: every cent at its address": LEDGER,
    "Reports: what people and BI tools read": REPORTS,
    "Changes: between snapshots of a bill, between revisions of a day": RESTATED,
    "Configurations: what each costs and does, and what beats it": PARETO_TABLES,
    "Checkpoints: what lies where, and which moves pay": CHECKPOINTS,
}

OPENING = """# Data dictionary

Written by `python -m schemas.dictionary --write` from the declarations in `seedance/schema.py` and `schemas/`;
`make check` fails when it is stale. Instants are UTC, intervals half-open. Missing is null: never zero, never empty
text. Columns named in snake_case carry their unit last; columns named as FOCUS column IDs mean what FOCUS says, and
`x_` marks our own. Key columns are in bold.

How the values come about: [ledger](rules/ledger.md) (charges to addresses, with a glossary), [telemetry](rules/telemetry.md)
(shards, the split of time) and [lake](rules/lake.md) (what is written when, how to read it).
"""


def page() -> str:
    """The whole page as Markdown, ending in one newline."""
    parts = [OPENING, _contents()]
    for title, tables in GROUPS.items():
        parts.append(f"## {title}\n")
        parts.extend(_section(spec) for spec in tables.values())
    return "\n".join(parts).rstrip("\n") + "\n"


def _contents() -> str:
    rows = [
        (f"[`{spec.name}`](#{spec.name})", f"{spec.version}", f"{len(spec.columns)}", spec.about)
        for tables in GROUPS.values()
        for spec in tables.values()
    ]
    return _grid(("table", "version", "columns", "one row is"), rows)


def _section(spec: Table) -> str:
    names = set(spec.key)
    rows = []
    for column in spec.columns:
        name, *rest = describe(column)
        rows.append((f"**`{name}`**" if name in names else f"`{name}`", *rest))
    key = ", ".join(f"`{k}`" for k in spec.key)
    opening = f"Version {spec.version}. One row is {spec.about}. Key and sort order: {key}."
    return f"### {spec.name}\n\n{opening}\n\n{_grid(HEAD, rows)}"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns that are empty throughout are left out."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in kept], ["---"] * len(kept)]
    lines += [[row[i].replace("|", "\\|") for i in kept] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, write it, or check it; 1 when the check finds it stale."""
    parser = argparse.ArgumentParser(prog="python -m schemas.dictionary", description="The data dictionary page.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help=f"write {PAGE.parent.name}/{PAGE.name}")
    action.add_argument("--check", action="store_true", help="fail when the written page is stale")
    args = parser.parse_args(argv)
    text = page()
    if args.write:
        PAGE.write_text(text, encoding="utf-8")
    elif args.check:
        found = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else None
        if found != text:
            state = "missing" if found is None else "stale"
            print(f"{PAGE} is {state}: run `python -m schemas.dictionary --write`.", file=sys.stderr)
            return 1
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
