"""Imports go one way: flows → tasks → tasks.io, tasks.core → schemas → seedance; and what a job in training loads is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = ("flows", "tasks", "schemas", "seedance", "infra", "tests", "samples")

ALLOWED = {
    "flows": {"flows", "tasks", "schemas", "seedance"},
    "tasks": {"tasks", "schemas", "seedance"},
    "tasks.io": {"tasks.io", "tasks.core", "tasks.errors", "tasks.settings", "schemas", "seedance"},
    "tasks.core": {"tasks.core", "tasks.errors", "schemas", "seedance"},
    "schemas": {"schemas", "seedance"},
    "seedance": {"seedance"},
    "infra": set[str](),
    "tests.fleet": {"tests.fleet", "schemas", "seedance"},
}
"""What a package may import of ours; the longest name that fits a module decides."""

FORBIDDEN = {
    "tasks.core": {"prefect", "dask", "distributed", "fsspec", "s3fs", "boto3", "duckdb", "pydantic_settings", "rich"},
    "seedance": {"prefect", "dask", "distributed", "duckdb", "pydantic", "pydantic_settings", "rich", "numpy", "boto3"},
    "schemas": {"prefect", "dask", "distributed", "fsspec", "duckdb", "pydantic"},
    "flows": {"boto3", "botocore", "s3fs", "fsspec", "duckdb", "dask", "distributed", "numpy", "pyarrow"},
}
"""What a package must not import of others."""

TRAINING = {"torch", "transformers", "lightning", "safetensors", "accelerate"}
"""What only a job in training or serving has: never needed to import anything else of ours."""

COUNT_IN_TORCH = ("abstract_attention", "counter", "fake", "modes", "operation", "shadow")
PROBE_IN_TORCH = ("counting", "memory", "models", "patches", "probe", "session", "signature", "trace", "units")
AT_IMPORT = {
    **{f"seedance.flops.{module}": {"torch"} for module in COUNT_IN_TORCH},
    **{f"seedance.probe.{module}": {"torch"} for module in PROBE_IN_TORCH},
    "seedance.probe.huggingface": {"transformers"},
    "seedance.probe.lightning": {"lightning"},
}
"""Modules that import these when they are imported themselves; all others import without."""

WHEN_CALLED = {
    "seedance.flops.abstract_attention": {"transformers"},
    "seedance.flops.count": {"torch", "transformers"},
    "seedance.probe.clock": {"torch"},
}
"""Modules that import these inside functions alone."""

RESIDENT = ("seedance", "seedance.auto", "seedance.run", "seedance.flops", "seedance.probe")
"""Packages whose modules run inside the job: importing pyarrow costs it 50 MB or more, so a child process does that."""

HEAVY = {"pyarrow", "fsspec", "numpy", "pandas"}
CHILDREN = {"seedance.upload"}
"""Modules that only a process of its own imports."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours with its dotted name."""
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


class Import(NamedTuple):
    """Line and full dotted name of what is imported, and when: at import, in a call, or by a type checker alone."""

    line: int
    name: str
    when: str


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Everything a file imports."""
    found, todo = [], [(node, "at import") for node in ast.parse(path.read_text(encoding="utf-8")).body]
    while todo:
        node, when = todo.pop(0)
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name, when) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
            found += [Import(node.lineno, name, when) for name in names]
        elif isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            todo += [(inside, "for types") for inside in node.body] + [(inside, when) for inside in node.orelse]
        else:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and when == "at import":
                when = "in a call"
            todo += [(inside, when) for inside in ast.iter_child_nodes(node)]
    return tuple(found)


def packages(path: Path, *when: str) -> set[str]:
    """Top-level packages that a file imports then."""
    return {found.name.split(".")[0] for found in imports(path) if found.when in when}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def rule(table: dict[str, set[str]], module: str) -> set[str] | None:
    """The entry with the longest name that the module lies in."""
    fits = [package for package in table if within(module, package)]
    return table[max(fits, key=len)] if fits else None


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    allowed, forbidden = rule(ALLOWED, module), rule(FORBIDDEN, module)
    wrong = []
    for line, name, _ in imports(MODULES[module]):
        if name.startswith("."):
            wrong.append(f"line {line}: a relative import; write the full name")
        ours = name.split(".")[0] in OURS
        if ours and allowed is not None and not any(within(name, package) for package in allowed):
            wrong.append(f"line {line}: {name}; {module} may import {', '.join(sorted(allowed)) or 'nothing of ours'}")
        if forbidden is not None and any(within(name, package) for package in forbidden):
            wrong.append(f"line {line}: {name} is kept out of {module}")
    assert not wrong, f"{MODULES[module]}:\n" + "\n".join(wrong)


def owner(name: str) -> str | None:
    """Our module that an imported name lies in."""
    fits = [module for module in MODULES if within(name, module)]
    return max(fits, key=len) if fits else None


def loaded(module: str, *when: str) -> dict[str, str]:
    """What a module loads, itself and through ours, at import or in calls too: package or module, and who asks for it."""
    found: dict[str, str] = {}
    todo, seen = [module], set[str]()
    while todo:
        at = todo.pop()
        if at in seen or at in CHILDREN:
            continue
        seen.add(at)
        todo += [parent for n in range(1, at.count(".") + 1) if (parent := at.rsplit(".", n)[0]) in MODULES]
        for asked in imports(MODULES[at]):
            if asked.when in when:
                ours = owner(asked.name)
                found.setdefault(ours or asked.name.split(".")[0], at)
                todo += [ours] if ours else []
    return found


RUNS_IN_JOBS = sorted(m for m in MODULES if m in RESIDENT[:3] or any(within(m, p) for p in RESIDENT[3:]))


def test_the_tables_name_modules_that_exist() -> None:
    assert {*AT_IMPORT, *WHEN_CALLED, *CHILDREN, *RESIDENT} <= MODULES.keys()


@pytest.mark.parametrize("module", [m for m in MODULES if not within(m, "tests") and not within(m, "samples")])
def test_torch_and_its_kin_are_loaded_where_it_is_said(module: str) -> None:
    at_import, in_a_call = (packages(MODULES[module], when) & TRAINING for when in ("at import", "in a call"))
    assert at_import <= AT_IMPORT.get(module, set())
    assert in_a_call <= AT_IMPORT.get(module, set()) | WHEN_CALLED.get(module, set())


@pytest.mark.parametrize("module", RUNS_IN_JOBS)
def test_what_runs_in_a_job_never_loads_pyarrow(module: str) -> None:
    found = {name: by for name, by in loaded(module, "at import", "in a call").items() if name in HEAVY}
    assert not found, f"{module} would load {found}"


def test_a_job_that_loads_the_probe_has_no_pyarrow() -> None:
    """The same, seen in a process: what needs no torch loads none, and nothing of ours loads pyarrow beside torch."""
    brings = {m: TRAINING & loaded(m, "at import").keys() for m in RUNS_IN_JOBS}
    light = [m for m in RUNS_IN_JOBS if not brings[m]]
    with_torch = [m for m in RUNS_IN_JOBS if brings[m] == {"torch"}]
    assert light and with_torch
    code = (
        "import importlib, sys\n"
        f"for m in {light}: importlib.import_module(m)\n"
        f"assert not {{*{sorted(HEAVY | TRAINING)}}} & sys.modules.keys(), sorted(sys.modules)\n"
        f"import torch\nbefore = {{*{sorted(HEAVY)}}} & sys.modules.keys()\n"
        f"for m in {with_torch}: importlib.import_module(m)\n"
        f"assert {{*{sorted(HEAVY)}}} & sys.modules.keys() == before, sorted(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_no_task_imports_a_flow() -> None:
    tasks = {m: path for m, path in MODULES.items() if within(m, "tasks")}
    found = [(m, n) for m, path in tasks.items() for _, n, _ in imports(path) if within(n, "flows")]
    assert not found


def test_flow_modules_hide_nothing() -> None:
    """A flow module named as a package would hide it when a tool puts `flows/` first on the import path."""
    names = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    assert not names & set(sys.stdlib_module_names)
    assert not names & {*OURS, *FORBIDDEN["tasks.core"], *FORBIDDEN["seedance"], "pyarrow", "yaml"}


def test_modules_and_functions_stay_readable() -> None:
    long = []
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > 500:
            long.append(f"{module}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno
                if lines > 80:
                    long.append(f"{module}.{node.name}: {lines} lines")
    assert not long


def test_every_module_says_what_it_is() -> None:
    full = {m: path for m, path in MODULES.items() if path.name != "__init__.py"}
    bare = [m for m, path in full.items() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not bare
