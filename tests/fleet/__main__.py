"""`python -m tests.fleet --out DIR --seed N --day YYYY-MM-DD [--switches gap,spot,disk=daily,…]`: writes a fleet."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from tests.fleet import (
    FleetSpec,
    build,
    bundled_spec,
    full_spec,
    observe,
    random_spec,
    tiny_spec,
    truth_summary,
    with_switches,
    write_fleet,
)

SHAPES: dict[str, Callable[[], FleetSpec]] = {
    "plain": FleetSpec,
    "tiny": tiny_spec,
    "full": full_spec,
    "bundled": bundled_spec,
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
    spec = random_spec(options.seed or 0) if options.shape == "random" else SHAPES[options.shape]()
    given = {name: value for name, value in (("seed", options.seed), ("day", options.day)) if value is not None}
    fleet = build(with_switches(spec, **given, **parse_switches(options.switches)))
    timeline = observe(fleet)
    written = write_fleet(fleet, options.out, timeline=timeline)
    (options.out / "truth.json").write_text(truth_summary(fleet, timeline=timeline), encoding="utf-8")
    shards = len(written.telemetry) + len(written.late)
    print(f"{shards} shards and {len(written.bill) + len(written.restated)} bill files in {options.out}")


if __name__ == "__main__":
    main()
