"""Credits nested in the rows of a bill, and what of a row's cost a promotion paid.

Google writes the credits of a row into the row: its costs hold them already. Repeated records or JSON text in, canonical
JSON text and exact amounts out. Knows no other row, no file format, no disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from seedance.schema import MONEY
from tasks.core import money
from tasks.core.focus_values import NUMBER, Place, canonical_json, map_distinct, one_array, text_column
from tasks.core.snapshots import plain

TYPES = (
    "COMMITTED_USAGE_DISCOUNT",
    "COMMITTED_USAGE_DISCOUNT_DOLLAR_BASE",
    "CREDIT_TYPE_UNSPECIFIED",
    "DISCOUNT",
    "FEE_UTILIZATION_OFFSET",
    "FREE_TIER",
    "PROMOTION",
    "RESELLER_MARGIN",
    "SUBSCRIPTION_BENEFIT",
    "SUSTAINED_USAGE_DISCOUNT",
)
"""Types of credits. Source: Google Cloud documentation, structure of detailed data export, credits.type."""
PROMOTION = "PROMOTION"
ADVICE = "Export credits as repeated records of id, name, full_name, type and amount."


def credits_column(values: pa.ChunkedArray | pa.Array, column: str, place: Place) -> pa.Array:
    """Nested credits as canonical JSON text: an array of objects in a fixed order, amounts as exact decimals; none is null.

    Args:
        values: repeated records (amount decimal, integer, double or text), or JSON text of such an array.
        column: its name, for messages.
        place: source, file and first row, for messages.

    Raises:
        DeliveryError: a value is no array of credits, an amount is no number, or a type is unknown.

    Source: infra/rules/ledger.md 1 and 4.1.
    """
    array = one_array(values, column, place)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), pa.string())
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        found = [_canonical(value, column, place, row) for row, value in enumerate(array.to_pylist())]
        return pa.array(found, pa.string())
    texts = text_column(array, column, place).to_pylist()
    return pa.array(
        [_canonical(_parsed(t, column, place, r), column, place, r) for r, t in enumerate(texts)], pa.string()
    )


def _parsed(text: str | None, column: str, place: Place, row: int) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text, parse_float=Decimal, parse_int=Decimal)
    except (ValueError, RecursionError) as error:
        raise place.refuse(column, "a JSON array of credits", repr(text[:80]), ADVICE, row=row) from error


def _canonical(value: Any, column: str, place: Place, row: int) -> str | None:
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise place.refuse(column, "an array of credits", repr(value)[:80], ADVICE, row=row)
    try:
        return "[" + ",".join(sorted(_credit(one, column, place, row) for one in value)) + "]"
    except ValueError as error:
        raise place.refuse(column, "credits of Unicode text", error, ADVICE, row=row) from error


def _credit(one: Mapping[str, Any], column: str, place: Place, row: int) -> str:
    """One credit as JSON text; its members that are null are absent."""
    facts = {name: value for name, value in one.items() if value is not None}
    kind, raw = facts.get("type"), str(facts.get("amount", ""))
    if kind not in TYPES:
        then = "An unknown kind of credit is never guessed: ask the provider what it means, and teach the reader."
        raise place.refuse(column, "a credit type among " + ", ".join(TYPES), repr(kind), then, row=row)
    if not NUMBER.fullmatch(raw):
        raise place.refuse(column, "an amount in every credit", repr(raw), ADVICE, row=row)
    units = money.units(raw)
    if abs(units) >= 10**38:
        raise place.refuse(column, "at most 26 digits before the point", repr(raw), "Check the export's unit.", row=row)
    return canonical_json(facts | {"amount": plain(money.decimal(units))})


def promotional(category: pa.Array, effective: pa.Array, nested: pa.Array) -> pa.Array:
    """What of EffectiveCost a promotional credit paid, decimal(38, 12): never null.

    Args:
        category: ChargeCategory.
        effective: EffectiveCost.
        nested: canonical text of `credits_column`.

    Returns:
        EffectiveCost of rows that are Credits, else the sum of the row's nested promotions.

    Source: infra/rules/ledger.md 1: promotions never lower unit costs.
    """
    paid = pc.fill_null(map_distinct(nested, _promotions, MONEY), pa.scalar(Decimal(0), MONEY))
    return pc.if_else(pc.equal(category, "Credit"), effective, paid)


def _promotions(text: str) -> Decimal:
    return money.decimal(sum(money.units(one["amount"]) for one in json.loads(text) if one["type"] == PROMOTION))
