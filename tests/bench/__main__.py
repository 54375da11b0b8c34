"""Run the benchmarks: `python -m tests.bench [--only NAME]` prints one table and writes `tests/bench/latest.json`.

A row is {name, value, unit, peer, peer_value, ratio, rows, peak_mb, runs, at}; value is the best of `runs`, ratio is
peer_value / value, so above 1 means that we are better where less is better. With --only the rows of other benchmarks stay.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LATEST = FOLDER / "latest.json"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler tells each start and stop; read when torch is loaded
COLUMNS = ("name", "value", "unit", "peer", "peer_value", "ratio", "rows", "peak_mb", "runs")


def modules() -> list[str]:
    """Benchmarks: modules of this folder with a function `run` that returns rows named `<module>.…`."""
    return sorted(m.name for m in pkgutil.iter_modules([str(FOLDER)]) if not m.name.startswith("_"))


def show(rows: list[dict[str, Any]]) -> str:
    """The rows as one table of text."""
    cells = [list(COLUMNS), *([_text(row[c]) for c in COLUMNS] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", choices=modules(), help="run one benchmark")
    only = parser.parse_args().only
    chosen = [only] if only else modules()
    rows: list[dict[str, Any]] = []
    for name in chosen:
        rows += importlib.import_module(f"tests.bench.{name}").run()
    kept = json.loads(LATEST.read_text(encoding="utf-8")) if LATEST.is_file() else []
    kept = [row for row in kept if row["name"].split(".")[0] not in chosen]
    print(show(rows))
    LATEST.write_text(
        json.dumps(sorted(kept + rows, key=lambda r: (r["name"], r["peer"] or "")), indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
