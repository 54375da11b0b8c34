"""Rows of a FOCUS 1.0 to 1.4 cost and usage export, as text or Arrow types, to stored charges with their content keys.

A batch of a file in; exact columns of core_billing__charges and what rounding took away out. Which columns identify a
charge is decided here. Knows no usage day, no tie rule, no other delivery, no file format and no disk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from seedance.schema import INSTANT, MONEY, Column
from tasks.core import nested_credits
from tasks.core.focus_values import (
    EXACT,
    Place,
    decimal_column,
    enum_column,
    first_row,
    instant_column,
    json_column,
    map_distinct,
    text_column,
)

OURS = ("x_ServiceCode", "x_UsageType", "x_Credits")
"""Columns of providers that FOCUS does not have and that are stored."""
ASIDE = ("x_SkuDetails", "x_SystemLabels", "x_CostType")
"""Columns of providers that only say what a row is tied to; read, and not stored."""
STORED: tuple[Column, ...] = tuple(c for c in CHARGES.columns if not c.name.startswith("x_") or c.name in OURS)
JSON_COLUMNS = ("Tags", "SkuPriceDetails", "AllocatedMethodDetails", "AllocatedTags", "x_SkuDetails", "x_SystemLabels")
COSTS = ("BilledCost", "EffectiveCost")
AMOUNTS = (*COSTS, "ListCost", "ContractedCost")
"""Costs of a charge that are summed somewhere."""
MANDATORY = (
    "BilledCost",
    "BillingAccountId",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "EffectiveCost",
    "ServiceName",
)
"""Columns without which a row has no amount, payer, time, kind or service. A provider column comes on top."""
PROVIDERS = ("ProviderName", "ServiceProviderName", "HostProviderName")
"""Who provides, first that is filled."""
LATER_PROVIDERS = ("ServiceProviderName", "HostProviderName", "InvoiceIssuerName")
"""Who provides in an export without ProviderName, which FOCUS 1.4 took away; first that is filled."""

NOT_IN_KEY = frozenset({"InvoiceId", "InvoiceDetailId", "AllocatedMethodDetails", "ContractApplied", "x_Credits"})
"""Beside costs, quantities and prices: the invoice, and objects that hold costs and quantities themselves."""
MEASURE = re.compile(
    r"(Cost|Price|Quantity|Amount|Discounts?|Credits?|Rate|Ratio)(In[A-Z]\w*)?$|RateDate$"
    r"|_(cost|price|quantity|amount|discounts?|credits?|rate|ratio)(_in_\w+)?$"
)
"""Names of further columns that hold costs, quantities or prices: no part of the key."""
LINEAGE = re.compile(
    r"(x_)?(id|row_?id|row_?number|record_?id|line_?item_?id)$"
    r"|x_(export|ingest|manifest|load(ed)?_?(at|id|time|date)|source_?(file|name|path|provider|type|version)|file)"
    r"|x_(snapshot|batch)_?(id|at|time|date)",
    re.IGNORECASE,
)
"""Names of further columns that say how a row came here. Exports' own row ids do not survive a refresh."""

SEPARATOR = "\x1f"
INCOMPLETE = "Ask the provider for a complete export."


@dataclass(frozen=True)
class Batch:
    """Stored charges of one batch.

    Args:
        rows: columns of STORED in order, then x_PromotionalCost, x_ChargeKey, x_Cloud and ASIDE; as many rows as came in.
        lost: Σ raw − Σ stored by (column, currency), for BilledCost and EffectiveCost; absent where nothing was lost.
    """

    rows: pa.Table
    lost: Mapping[tuple[str, str], Decimal]


def normalise(raw: pa.Table, place: Place) -> Batch:
    """Stored charges of one batch of a FOCUS export.

    Args:
        raw: the file's own columns, all text (NULL already made null) or Arrow types; header case does not matter.
        place: source, file and first row, for messages.

    Raises:
        DeliveryError: a mandatory column is missing, a column is there twice, or a value does not parse. Carries
            source, file, row, column, expected, found.

    Source: FOCUS specification 1.0 to 1.4, columns of Cost and Usage; infra/rules/ledger.md 1.
    """
    known, extra = _headers(raw.column_names, place)
    columns: dict[str, pa.Array] = {}
    lost: dict[str, list[tuple[int, Decimal]]] = {}
    for spec in STORED:
        if spec.name not in known:
            columns[spec.name] = pa.nulls(len(raw), spec.type)
            continue
        columns[spec.name] = _convert(raw.column(known[spec.name]), spec, place, lost)
        if not spec.null and columns[spec.name].null_count:
            row = first_row(columns[spec.name].is_null(), True)
            raise place.refuse(spec.name, "a value in every row", "null", INCOMPLETE, row=row)
    _check_periods(columns, place)
    aside = {n: _aside(raw.column(extra[n]), n, place) if n in extra else _nothing(raw) for n in ASIDE}
    further = {n: aside[n] if n in aside else raw.column(i) for n, i in extra.items()}
    columns["x_PromotionalCost"] = nested_credits.promotional(
        columns["ChargeCategory"], columns["EffectiveCost"], columns["x_Credits"]
    )
    columns["x_ChargeKey"] = _keys(columns, further, place)
    columns["x_Cloud"] = _clouds(columns, "ProviderName" in known, place)
    columns |= aside
    return Batch(pa.table(columns), _by_currency(lost, columns["BillingCurrency"]))


def _headers(names: Sequence[str], place: Place) -> tuple[dict[str, int], dict[str, int]]:
    """Positions of the stored columns by their FOCUS name, and of the others by their own."""
    spelled = {name.casefold(): name for name in (*(c.name for c in STORED), *ASIDE)}
    stored = {c.name for c in STORED}
    known: dict[str, int] = {}
    extra: dict[str, int] = {}
    for position, name in enumerate(names):
        clean = name.removeprefix("\ufeff").strip()
        key = spelled.get(clean.casefold(), clean)
        target = known if key in stored else extra
        if key in target:
            raise place.refuse(key, "each column once", "it twice", "Remove one of the two from the export.")
        target[key] = position
    missing = [n for n in MANDATORY if n not in known]
    if not any(n in known for n in (*PROVIDERS, *LATER_PROVIDERS)):
        missing.append("ProviderName or ServiceProviderName")
    if missing:
        raise place.refuse(
            missing[0],
            "the columns " + ", ".join(missing),
            f"{len(names)} columns without them",
            "This is no FOCUS cost and usage export: choose that table, with all columns.",
        )
    return known, extra


def _convert(
    values: pa.ChunkedArray, spec: Column, place: Place, lost: dict[str, list[tuple[int, Decimal]]]
) -> pa.Array:
    if spec.type == MONEY:
        converted, rest = decimal_column(values, spec.name, place)
        if rest and spec.name in COSTS:
            lost[spec.name] = rest
        return converted
    if spec.type == INSTANT:
        return instant_column(values, spec.name, place)
    if spec.values is not None:
        return enum_column(values, spec.name, spec.values, place)
    if spec.name == "x_Credits":
        return nested_credits.credits_column(values, spec.name, place)
    if spec.name in JSON_COLUMNS:
        return json_column(values, spec.name, place)
    return text_column(values, spec.name, place)


def _aside(values: pa.ChunkedArray, name: str, place: Place) -> pa.Array:
    return json_column(values, name, place) if name in JSON_COLUMNS else text_column(values, name, place)


def _nothing(raw: pa.Table) -> pa.Array:
    return pa.nulls(len(raw), pa.string())


def _check_periods(columns: Mapping[str, pa.Array], place: Place) -> None:
    for start, end in (("ChargePeriodStart", "ChargePeriodEnd"), ("BillingPeriodStart", "BillingPeriodEnd")):
        wrong = pc.less(columns[end], columns[start])
        if pc.any(wrong).as_py():
            row = first_row(wrong, True)
            late, early = (columns[name][row].cast(pa.string()).as_py() for name in (end, start))
            found = f"{late} before {early}"
            raise place.refuse(end, f"an end not before {start}", found, "Check the export's time zone.", row=row)


def _clouds(columns: Mapping[str, pa.Array], named: bool, place: Place) -> pa.Array:
    """Cloud of each row; `named` says that the export has a ProviderName."""
    names = PROVIDERS if named else LATER_PROVIDERS
    provider = pc.coalesce(*(columns[n] for n in names))
    if provider.null_count:
        row = first_row(provider.is_null(), True)
        raise place.refuse(names[0], f"a provider in every row, in {' or '.join(names)}", "null", INCOMPLETE, row=row)
    return map_distinct(provider, cloud_of, pa.string())


def cloud_of(provider: str) -> str:
    """aws, azure, gcp, or the provider's name in lower case."""
    name = provider.strip().lower()
    for cloud, starts in (("aws", ("aws", "amazon")), ("azure", ("microsoft", "azure")), ("gcp", ("google", "gcp"))):
        if name.startswith(starts):
            return cloud
    return name


def in_key(name: str, type: pa.DataType | None = None) -> bool:  # noqa: A002
    """True when a column identifies a charge: everything but costs, quantities, prices, the invoice and lineage.

    Args:
        name: FOCUS or provider column.
        type: type of a stored column, None for a column that is not stored.
    """
    if name in NOT_IN_KEY:
        return False
    if type is not None:
        return bool(type != MONEY)
    return not MEASURE.search(name) and not LINEAGE.match(name)


def _keys(columns: Mapping[str, pa.Array], extra: Mapping[str, pa.ChunkedArray], place: Place) -> pa.Array:
    parts: dict[str, pa.Array] = {}
    for spec in STORED:
        if in_key(spec.name, spec.type) and columns[spec.name].null_count < len(columns[spec.name]):
            array = columns[spec.name]
            parts[spec.name] = (array.cast(pa.int64()) if spec.type == INSTANT else array).cast(pa.string())
    for name, values in extra.items():
        if in_key(name):
            parts[name] = _further(values, name, place)
    return content_keys(parts)


def _further(values: pa.ChunkedArray, name: str, place: Place) -> pa.Array:
    """A column that is not stored, as text for the key; doubles by their shortest decimal."""
    if pa.types.is_floating(values.type):
        values = values.cast(pa.string())
    return text_column(values, name, place)


def content_keys(parts: Mapping[str, pa.Array]) -> pa.Array:
    """sha256 in hex of each row over `name=value` of its columns that are not null, in code-point order of the names.

    A column that is absent and one that is null give the same key, so an export that gains a column keeps its keys.

    Args:
        parts: text columns of one length, at least one.
    """
    named: list[pa.Array] = []
    for name in sorted(parts):
        array = parts[name]
        if pc.any(pc.match_substring_regex(array, r"[\\\x1f]")).as_py():
            array = pc.replace_substring(pc.replace_substring(array, "\\", "\\\\"), SEPARATOR, "\\u")
        named.append(pc.binary_join_element_wise(pa.scalar(name), array, "="))
    joined = pc.binary_join_element_wise(*named, SEPARATOR, null_handling="skip")
    return pa.array([hashlib.sha256(b).hexdigest() for b in joined.cast(pa.binary()).to_pylist()], pa.string())


def _by_currency(
    lost: Mapping[str, Sequence[tuple[int, Decimal]]], currency: pa.Array
) -> dict[tuple[str, str], Decimal]:
    sums: dict[tuple[str, str], Decimal] = {}
    for column, rests in lost.items():
        for row, rest in rests:
            key = (column, currency[row].as_py())
            sums[key] = EXACT.add(sums.get(key, Decimal(0)), rest)
    return sums


def occurrences(rows: pa.Table) -> pa.Array:
    """Number of each row among the rows of its key, from 0, in the order of the columns that are no part of the key.

    Rows that agree in those too are interchangeable. Neither the order of rows nor their split over files matters.

    Args:
        rows: all stored charges of one delivery, with x_ChargeKey.

    Source: infra/rules/ledger.md 1.
    """
    numbers = np.zeros(len(rows), np.int32)
    codes = rows["x_ChargeKey"].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    again = np.flatnonzero(np.bincount(codes)[codes] > 1) if len(codes) else np.zeros(0, np.int64)
    if len(again):
        rest = [c.name for c in STORED if not in_key(c.name, c.type)]
        some = rows.select(rest).take(pa.array(again)).append_column("code", pa.array(codes[again]))
        order = pc.sort_indices(some, sort_keys=[(n, "ascending") for n in ("code", *rest)]).to_numpy()
        sorted_codes = codes[again][order]
        starts = np.flatnonzero(np.r_[True, sorted_codes[1:] != sorted_codes[:-1]])
        place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        numbers[again[order]] = place
    return pa.array(numbers)
