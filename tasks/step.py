"""Keys of stages, and the reuse of what a key has made.

A key names everything that can change a stage's bytes: the code it runs, the locked environment, the versions of its
tables, its settings, its inputs. The data key is the same without code and environment: it says whether a day is due,
since code alone never re-keys a committed day. Knows no storage beside the lake it is given, and no clock.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from seedance.canonical import canonical
from seedance.schema import Table
from tasks.io.lake import Lake, Step

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements" / "run.txt"
PURE = ("tasks.core.", "schemas.", "seedance.")
"""Code that stages share: what a stage imports of it counts in the stage's key without being named."""
WRITER_MODULES = ("seedance.schema", "seedance.shard", "tasks.io.parquet")
"""Modules that every stage's bytes depend on."""


def stage_key(
    stage: str,
    *,
    modules: Iterable[str],
    schemas: Iterable[Table],
    settings: Mapping[str, Any],
    inputs: Iterable[str],
) -> str:
    """Key of a stage: sha256 hex over all that can change its bytes.

    Args:
        stage: name of the stage.
        modules: import paths of the modules whose code it runs; their files' bytes count, and those of every pure
            module that they import, however deep. The modules that write tables are always in.
        schemas: declarations of the tables it reads and writes; name and version count.
        settings: the settings it declares, canonical JSON without floats.
        inputs: sha256 (of handles, shards, deliveries) of what it reads; their order does not count.

    Raises:
        ModuleNotFoundError: a module is not there.
        SchemaError: the settings hold a float or another type that is not JSON.
    """
    code = {name: _module_digest(name) for name in sorted(_with_imports({*modules, *WRITER_MODULES}))}
    return _digest({**_data(stage, schemas, settings, inputs), "modules": code, "requirements": _requirements_digest()})


def data_key(stage: str, *, schemas: Iterable[Table], settings: Mapping[str, Any], inputs: Iterable[str]) -> str:
    """Key of a stage without code and environment; arguments and errors as in `stage_key`."""
    return _digest(_data(stage, schemas, settings, inputs))


def run_step(lake: Lake, stage: str, key: str, compute: Callable[[], Step]) -> tuple[Step, bool]:
    """What the key made, computed now only when it has not been, or when an object that it made is gone.

    Args:
        lake: where steps are kept.
        stage: name of the stage.
        key: from `stage_key`.
        compute: puts the objects into the lake and returns their handles; a kill before it returns leaves no step.

    Returns:
        The step, and True when it was there already.

    Raises:
        DeterminismError: another run of the same key made other outputs meanwhile.
    """
    stored = lake.step(stage, key)
    if stored is not None:
        return stored, True
    made = lake.create_step(stage, key, compute())
    if lake.missing(made.handles.values()):  # a sweep took what was there already, before this step named it
        made = lake.create_step(stage, key, compute())
    return made, False


def _data(stage: str, schemas: Iterable[Table], settings: Mapping[str, Any], inputs: Iterable[str]) -> dict[str, Any]:
    return {
        "stage": stage,
        "schemas": {table.name: table.version for table in schemas},
        "settings": settings,
        "inputs": sorted(inputs),
    }


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def _with_imports(modules: set[str]) -> set[str]:
    """The modules and all that they import of PURE, directly or through one another."""
    found: set[str] = set()
    waiting = sorted(modules)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        path = _ours(name)
        if path.is_file():
            waiting += _imports(path.read_bytes())
    return found


@cache
def _imports(source: bytes) -> tuple[str, ...]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return tuple(sorted(n for n in names if n.startswith(PURE) and _ours(n).is_file()))


def _ours(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


def _module_digest(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.has_location:
        raise ModuleNotFoundError(f"{name}: a stage names this module in its key, and it has no file.", name=name)
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def _requirements_digest() -> str:
    return hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest() if REQUIREMENTS.is_file() else "none"
