"""The `seedance` command on a GPU host or a laptop: arguments in, plain text out. Knows no pipeline and no cloud."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
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
    _add_upload(commands)
    _add_count(commands)
    return parser


def _add_upload(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    upload = commands.add_parser(
        "upload",
        help="send what is finished in a spool",
        description="Write the rows of a spool's finished hours to a drop folder: one shard a node, hour and table.",
        allow_abbrev=False,
    )
    upload.add_argument("--spool", required=True, metavar="DIR", type=Path, help="the folder that the probe writes to")
    upload.add_argument("--to", required=True, metavar="URL", help="folder or URL that shards go to")
    upload.add_argument("--final", action="store_true", help="the present hour too, when no process writes any more")
    upload.add_argument("--timeout", metavar="SECONDS", type=float, default=60.0, help="longest for one shard (60)")
    upload.set_defaults(run=_upload)


def _upload(args: argparse.Namespace) -> int:
    from seedance.upload import RETRIES, upload  # reaches for storage: not needed by the other commands

    for name, value in RETRIES.items():
        os.environ.setdefault(name, value)
    done = upload(args.spool, args.to, final=args.final, object_timeout_s=args.timeout)
    print(done)
    if done.problem is not None:
        print(f"seedance: {done.waiting_batches:,} batch(es) wait in {args.spool}: {done.problem}", file=sys.stderr)
    return 0 if done.problem is None else 1


def _add_count(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    count = commands.add_parser(
        "count",
        help="count FLOPs, parameters and memory traffic of a model",
        description="Count a model that a transformers configuration describes, on the meta device: no weights, no data.",
        epilog="Without --train, --prefill or --decode all that the model has is counted. Needs torch and transformers.",
        allow_abbrev=False,
    )
    count.add_argument("config", metavar="CONFIG.json", type=Path, help="configuration of a model, or its folder")
    count.add_argument("--batch", metavar="N", type=_natural, default=1, help="sequences or samples at once (1)")
    count.add_argument("--seq", metavar="N", type=_natural, help="tokens of a sequence (2048, or what the model takes)")
    count.add_argument("--context", metavar="N", type=_natural, help="keys that a decoded token sees (as --seq)")
    count.add_argument("--dtype", choices=("fp64", "fp32", "fp16", "bf16"), help="of weights and computation (config)")
    count.add_argument("--unfused", action="store_true", help="attention as two matrix products, not a fused kernel")
    count.add_argument("--checkpointing", action="store_true", help="training runs each block's forward again")
    count.add_argument("--json", action="store_true", help="print exact integers for programs")
    for kind in ("prefill", "decode", "train"):
        count.add_argument(f"--{kind}", dest="kinds", action="append_const", const=kind, help=f"count {kind}")
    count.set_defaults(run=_count)


def _natural(text: str) -> int:
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return value


def _count(args: argparse.Namespace) -> int:
    from seedance.flops.count import Sizes, count_config  # needs torch and transformers

    sizes = Sizes(args.batch, args.seq, args.context, args.dtype, not args.unfused, args.checkpointing)
    try:
        found = count_config(args.config, sizes, tuple(args.kinds or ()))
    except ModuleNotFoundError as error:
        hint = "Install them beside seedance: pip install 'seedance-cost[hf]'"
        print(f"seedance: count needs torch and transformers; {error.name} is missing. {hint}.", file=sys.stderr)
        return 2
    print(json.dumps(found.as_json(), indent=2) if args.json else found.as_text())
    return 0


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
