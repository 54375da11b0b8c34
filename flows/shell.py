"""Flows from a shell: `python -m flows.<name> --help`; arguments come from the parameter model, `--json` is for programs."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flows.night import Run
from flows.params import Where
from seedance.errors import SeedanceError
from tasks import progress
from tasks.errors import PipelineError
from tasks.io import show
from tasks.summary import artifact_rows, finding_text, history, notes

P = TypeVar("P", bound=Where)


def main(
    flow: Callable[[P], Awaitable[Any]],
    model: type[P],
    name: str,
    *,
    for_programs: Callable[[Any], dict[str, Any]] | None = None,
    for_people: Callable[[Any], None] | None = None,
) -> int:
    """Parse arguments, run the flow, print what it did; the exit status: 0, 1 when something failed, 2 for wrong arguments.

    Args:
        flow: what is run; its result has `failed`, a reason by whatever failed.
        model: its parameters.
        name: the module of the command.
        for_programs: the result as JSON values; that of a run when None.
        for_people: prints the result; that of a run when None.
    """
    parser = _parser(model, name, flow.__doc__ or "")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    try:
        params = model(**{k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        for problem in error.errors():
            field = "--" + str(problem["loc"][0]).replace("_", "-") if problem["loc"] else name
            found = f", found {problem['input']!r}" if problem["loc"] else ""  # of several, the message names them
            print(f"{field}: {problem['msg']}{found}", file=sys.stderr)
        return 2
    try:
        params.load()  # a wrong settings file is told before a server is started
        hide_traces()
        with _seen(as_json):
            run = asyncio.run(_run(flow, params))
    except (PipelineError, SeedanceError) as error:
        told = error.facts.get("run")
        if told is None:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            if as_json:
                print(json.dumps({"failed": {name: f"{type(error).__name__}: {error}"}}, indent=1))
            return 1
        run = told
    if as_json:
        print(json.dumps((for_programs or as_dict)(run), indent=1, default=str))
    else:
        (for_people or tell)(run)
    return 1 if run.failed else 0


async def _run(flow: Callable[[P], Awaitable[Any]], params: P) -> Any:
    return await flow(params)


class _Told(logging.Filter):
    """Leaves out traces of errors that have a message of their own: the command prints it once, at its end."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, PipelineError | SeedanceError | ValidationError)


def hide_traces() -> None:
    """In a command, an error of ours is told in one line."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_Told())


@contextmanager
def _seen(as_json: bool) -> Iterator[None]:
    """A line in the terminal that says how far the work is; nothing where nobody looks."""
    out = show.console(error=True)
    if as_json or not out.is_terminal:
        yield
        return
    with out.status("starting") as status:

        def hear(done: int, of: int, what: str) -> None:
            status.update(what if of < 2 else f"{what} ({done + 1} of {of})")

        with progress.listening(hear):
            yield


def _parser(model: type[BaseModel], name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m flows.{name}", description=about.split("\n\n", 1)[0])
    for field, facts in model.model_fields.items():
        flag = "--" + field.replace("_", "-")
        if facts.annotation is bool:
            parser.add_argument(flag, action="store_true", default=None, help=facts.description)
        else:
            parser.add_argument(flag, required=facts.is_required(), help=facts.description)
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    return parser


def as_dict(run: Run) -> dict[str, Any]:
    """The run as JSON values, with billed, addressed and difference beside the totals; amounts are text."""
    return vars(run) | {"money": artifact_rows(run), "notes": notes(run)}


def tell(run: Run) -> None:
    """Print stages, deliveries, money and what failed, for people."""
    out = show.console()
    for d in run.deliveries:
        words = f"bill {d['source']}: {d['name']}: {d['status']}"
        refused = d["status"] == "refused"
        out.print(words if refused else f"{words}, {d['rows']:,} rows", style="bold red" if refused else None)
    if run.admitted:
        out.print(f"telemetry: {run.admitted:,} new shards")
    for day, count in run.quarantined.items():
        out.print(f"{day}: {count} shard(s) in quarantine; see report_quality__runs and quarantine/", style="yellow")
    out.print(show.stage_table(run.stages))
    if run.totals:
        out.print(show.money_table(run.days, run.totals, run.billed))
    for day, found in run.findings.items():
        out.print(f"{day}: findings: {finding_text(found)}", soft_wrap=True)
    for line in history(run):
        out.print(line)
    for note in notes(run):
        out.print(note, style="yellow")
    for path in run.repaired:
        out.print(f"repaired {path}")
    for what, why in run.failed.items():
        show.console(error=True).print(f"failed {what}: {why}", style="bold red")
