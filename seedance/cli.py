"""The `seedance` command on a GPU host or a laptop: arguments in, plain text out. Knows no pipeline and no cloud."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from seedance import __version__
from seedance.describe import HEAD, describe, headline
from seedance.errors import SeedanceError, ShardError
from seedance.schema import TELEMETRY, Table


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        Exit status: 0 when all is well, 1 when what was asked about is wrong, 2 when the question was.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return int(args.run(args))
    except SeedanceError as error:
        print(f"seedance: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seedance", description="Cost of GPU work: what runs on GPU hosts and laptops.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    version = commands.add_parser("version", help="print the version", description="Print the version.")
    version.set_defaults(run=_version)
    tables = commands.add_parser(
        "tables",
        help="print the telemetry contracts",
        description="List the tables that hosts write, or the columns of one: type, unit, null rule, range, meaning.",
    )
    tables.add_argument("name", nargs="?", metavar="NAME", help="a table, with or without raw_telemetry__")
    tables.set_defaults(run=_tables)
    check = commands.add_parser(
        "check-shard",
        help="hold a shard file to its contract",
        description="Read a shard, hold it to its footer, its name and its table's declaration, and print the footer.",
    )
    check.add_argument("file", metavar="FILE", type=Path, help="a Parquet shard")
    check.set_defaults(run=_check_shard)
    return parser


def _version(_: argparse.Namespace) -> int:
    print(f"seedance {__version__}")
    return 0


def _tables(args: argparse.Namespace) -> int:
    if args.name is None:
        _print_rows([(t.name, f"v{t.version}", f"{len(t.columns)} columns", t.about) for t in TELEMETRY.values()])
        return 0
    spec = TELEMETRY.get(args.name) or TELEMETRY.get(f"raw_telemetry__{args.name}")
    if spec is None:
        print(f"seedance: no table {args.name}. Tables: {', '.join(TELEMETRY)}.", file=sys.stderr)
        return 2
    _print_table(spec)
    return 0


def _print_table(spec: Table) -> None:
    print(headline(spec))
    print(f"key and sort order: {', '.join(spec.key)}")
    print()
    _print_rows([HEAD, *(describe(c) for c in spec.columns)])


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _check_shard(args: argparse.Namespace) -> int:
    from seedance.shard import read_footer, read_shard  # reads Parquet: not needed by the other commands

    file: Path = args.file
    try:
        data = file.read_bytes()
    except OSError as error:
        print(f"seedance: cannot read {file}: {error.strerror}.", file=sys.stderr)
        return 2
    footer = read_footer(data)
    spec = TELEMETRY.get(footer.table)
    if spec is None:
        raise ShardError(
            f"{file}: table {footer.table!r} is not one that this version knows ({', '.join(TELEMETRY)}).",
            path=str(file),
            reason="unknown table",
        )
    _, rows = read_shard(data, spec, where=str(file))
    digest = hashlib.sha256(data).hexdigest()[:16]
    if not file.stem.endswith(f"-{digest}"):
        raise ShardError(
            f"{file}: the name does not end in -{digest}, the digest of its bytes: the file was altered or renamed. "
            "Take the original from the host's spool.",
            path=str(file),
            reason="digest differs from name",
        )
    print(json.dumps(asdict(footer), indent=2, sort_keys=True))
    print(f"{file.name}: {rows.num_rows:,} rows of {spec.name}, as declared.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
