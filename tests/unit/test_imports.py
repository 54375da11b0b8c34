"""Imports go one way: flows → tasks → tasks.io, tasks.core → schemas → seedance."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

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


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours with its dotted name."""
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports, at top level or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level
            else:
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"


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
    for line, name in imports(MODULES[module]):
        if name.startswith("."):
            wrong.append(f"line {line}: a relative import; write the full name")
        ours = name.split(".")[0] in OURS
        if ours and allowed is not None and not any(within(name, package) for package in allowed):
            wrong.append(f"line {line}: {name}; {module} may import {', '.join(sorted(allowed)) or 'nothing of ours'}")
        if forbidden is not None and any(within(name, package) for package in forbidden):
            wrong.append(f"line {line}: {name} is kept out of {module}")
    assert not wrong, f"{MODULES[module]}:\n" + "\n".join(wrong)


def test_no_task_imports_a_flow() -> None:
    tasks = {m: path for m, path in MODULES.items() if within(m, "tasks")}
    found = [(m, n) for m, path in tasks.items() for _, n in imports(path) if within(n, "flows")]
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
