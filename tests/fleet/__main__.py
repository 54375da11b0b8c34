"""`python -m tests.fleet --out DIR --seed N --day YYYY-MM-DD [--switches cloud=gcp,gap,disk=daily,…]`: writes a fleet.

The bundled shape is a fleet on each cloud, side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from tests.fleet import (
    FleetSpec,
    build,
    bundled_specs,
    full_spec,
    observe,
    random_spec,
    tiny_spec,
    truth_summary,
    with_switches,
    write_fleet,
)

SHAPES: dict[str, Callable[[], list[FleetSpec]]] = {
    "plain": lambda: [FleetSpec()],
    "tiny": lambda: [tiny_spec()],
    "full": lambda: [full_spec()],
    "bundled": bundled_specs,
}


def parse_switches(text: str) -> dict[str, object]:
    """`name` or `name=value`, between commas, to values of the spec's fields."""
    defaults = {f.name: f.default for f in fields(FleetSpec)}
    found: dict[str, object] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in defaults:
            raise SystemExit(f"unknown switch {name}; known are {', '.join(sorted(defaults))}")
        if isinstance(defaults[name], bool):
            found[name] = value not in ("0", "false", "no")
        elif name == "bill_until" or isinstance(defaults[name], int):
            found[name] = int(value)
        else:
            found[name] = value
    return found


def main(words: list[str] | None = None) -> None:
    """Writes telemetry, bill and `truth.json`, the true totals."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--shape", choices=[*SHAPES, "random"], default="plain", help="switches to begin with")
    parser.add_argument("--seed", type=int, help="another seed is another fleet")
    parser.add_argument("--day", help="UTC day, YYYY-MM-DD")
    parser.add_argument("--switches", default="", help="name or name=value, between commas")
    options = parser.parse_args(words)
    specs = [random_spec(options.seed or 0)] if options.shape == "random" else SHAPES[options.shape]()
    given = {name: value for name, value in (("seed", options.seed), ("day", options.day)) if value is not None}
    fleets = [build(with_switches(spec, **given, **parse_switches(options.switches))) for spec in specs]
    told = [(fleet, observe(fleet)) for fleet in fleets]
    shards = bills = 0
    for fleet, timeline in told:
        written = write_fleet(fleet, options.out, timeline=timeline)
        shards += len(written.telemetry) + len(written.late)
        bills += len(written.bill) + len(written.restated)
    (options.out / "truth.json").write_text(truth_summary(*told), encoding="utf-8")
    print(f"{shards} shards and {bills} bill files in {options.out}")


if __name__ == "__main__":
    main()
