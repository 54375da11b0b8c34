"""`python -m seedance.run train.py …`: run a script or a module as Python itself would, with the probe looking on.

The script sees its own arguments, import path and `__main__`; its exit status and its traceback are what they would be
without us. Options are settings of the probe; they and `SEEDANCE_DIAGNOSTIC=1` go to its child processes as well.
"""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from seedance import auto

USAGE = """usage: python -m seedance.run [--SETTING VALUE]... (SCRIPT | -m MODULE) [ARGUMENT]...

Run a Python script or module with the probe attached to the model that it trains or serves.

  --drop URL        where finished shards are put (any fsspec URL); without it they stay in the spool
  --spool DIR       local folder that rows are kept in until then
  --job-id ID       job that this run belongs to (also --job)
  --usd-per-hour N  price of one device for an hour
  --team, --project, --owner, --name, ... NAME
                    every setting of the probe, as in the environment: SEEDANCE_TEAM is --team

In front of torchrun: torchrun --nproc-per-node 2 -m seedance.run train.py
"""
OURS = str(Path(__file__).parent) + os.sep
_kept: list[ModuleType] = []
"""The former `__main__`: a module that nobody holds is emptied."""


def main(argv: list[str] | None = None) -> None:
    """Run what the arguments name; does not return where it exits.

    Args:
        argv: arguments without the program's name; None takes the process's own.
    """
    options, target, is_module, arguments = _parse(list(sys.argv[1:] if argv is None else argv))
    os.environ.update(options)
    os.environ["SEEDANCE_DIAGNOSTIC"] = "1"
    auto.activate()
    try:
        if is_module:
            _fresh_main()
            sys.argv[:] = ["-m", *arguments]
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        else:
            sys.argv[:] = [target, *arguments]
            _run_script(target)
    except SystemExit:
        raise
    except BaseException:
        _hide_frames()
        raise


def _parse(words: list[str]) -> tuple[dict[str, str], str, bool, list[str]]:
    """Variables, script or module, whether it is a module, and its arguments."""
    from seedance.probe.settings import ALIASES, NAMES

    known = {name.replace("_", "-"): name for name in NAMES if name not in ("enabled", "diagnostic")}
    known |= {short.lower(): name for short, name in ALIASES.items()}
    options: dict[str, str] = {}
    while True:
        if not words:
            _refuse("no script and no -m MODULE")
        word = words.pop(0)
        if word in ("-h", "--help"):
            sys.stdout.write(USAGE)
            raise SystemExit(0)
        if word == "-m":
            if not words:
                _refuse("-m needs a module")
            return options, words[0], True, words[1:]
        if not word.startswith("-"):
            return options, word, False, words
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in known:
            _refuse(f"no option {word}")
        if not equals:
            if not words:
                _refuse(f"--{name} needs a value")
            value = words.pop(0)
        options[f"SEEDANCE_{known[name].upper()}"] = value


def _refuse(why: str) -> NoReturn:
    sys.stderr.write(f"python -m seedance.run: {why}\n\n{USAGE}")
    raise SystemExit(2)


def _run_script(script: str) -> None:
    """Run a file, or a folder or archive with a `__main__.py`, as `python SCRIPT` does."""
    # As Python does it: links and `..` stay.
    path = script if os.path.isabs(script) else f"{os.getcwd()}{os.sep}{script}"  # noqa: PTH109, PTH117
    if pkgutil.get_importer(path) is not None:
        _place_first(path)
        _fresh_main()
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    try:
        code = _code(path)
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    _place_first(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    space = _fresh_main().__dict__
    space["__file__"] = path
    space["__loader__"] = SourceFileLoader("__main__", path)
    exec(code, space)  # noqa: S102 - the script is what we were asked to run


def _code(path: str) -> CodeType:
    """Compiled script; a `.pyc` as it is. Not with this module's `from __future__`."""
    with io.open_code(path) as file:
        compiled = pkgutil.read_code(file) if path.endswith(".pyc") else None
    if compiled is not None:
        return compiled  # type: ignore[no-any-return]
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _place_first(folder: str) -> None:
    """Put the script's folder where Python put the folder that `-m` found us from."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _fresh_main() -> ModuleType:
    """An empty `__main__`, as a script finds it."""
    import builtins

    _kept.append(sys.modules["__main__"])
    module = ModuleType("__main__")
    module.__dict__.update(__annotations__={}, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    return module


def _hide_frames() -> None:
    """Leave our frames out of the traceback that is about to end the process; the script's own hook sees it so too."""
    former: Callable[..., Any] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = former
        try:
            seen: set[int] = set()
            todo: list[BaseException | None] = [error]
            while todo:
                one = todo.pop()
                if one is not None and id(one) not in seen:
                    seen.add(id(one))
                    todo += [one.__cause__, one.__context__]
                    one.__traceback__ = _trim(one.__traceback__)
        finally:
            former(kind, error, error.__traceback__)

    sys.excepthook = hook


def _trim(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on, without frames of `seedance`."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    first = max((at + 1 for at, file in enumerate(files) if file == __file__), default=0)
    kept = [frame for frame, file in list(zip(frames, files, strict=True))[first:] if not file.startswith(OURS)]
    for one, after in pairwise([*kept, None]):
        if one is not None:
            one.tb_next = after
    return kept[0] if kept else None


if __name__ == "__main__":
    main()
