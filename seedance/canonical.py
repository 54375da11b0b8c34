"""JSON-shaped values to one text per value: what keys, handles, commits and shard footers are written in.

Sorted keys, no spaces, UTF-8, no floats. Knows no storage and no table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from seedance.errors import SchemaError


def canonical(value: Any) -> bytes:
    """The value as canonical JSON: equal values give equal bytes, on any machine.

    Args:
        value: mappings with text keys, sequences, text, integers, booleans and None, nested. Money goes in as text.

    Raises:
        SchemaError: a float (its text depends on how it was summed), a key that is not text, or any other type. Carries
            where and found.
    """
    return json.dumps(_plain(value, "$"), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _refusal(key, f"{where}.{key}", "a text key")
        return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    raise _refusal(value, where, "text, integer, boolean, null, list or mapping")


def _refusal(value: Any, where: str, expected: str) -> SchemaError:
    found = type(value).__name__
    return SchemaError(
        f"{where}: cannot be written as canonical JSON: expected {expected}, found {found} ({value!r}). "
        "Write ratios as ppm and money as text.",
        where=where,
        expected=expected,
        found=found,
    )
