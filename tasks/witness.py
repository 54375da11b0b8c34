"""The second ledger: one day's charges and usage to addresses, spans and layers in SQL, compared to the digit.

`witness.sql` (up to the vectors of machine-hours) and `witness_money.sql` (from there to addresses, layers and the
comparison) hold all of the arithmetic, as one script in two files that each can be read in one go. They share no code with
`tasks.core`, so that a slip in either program shows as a difference. This module only hands tables over as integers and
words the verdict. Knows no Prefect, lake or clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import pyarrow as pa

from schemas.ledger import ADDRESSES, LAYERS, SPANS
from seedance.schema import INSTANT, Table
from tasks.errors import WitnessError

FILES = ("witness.sql", "witness_money.sql")
_SQL = "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in FILES)
SQL_DIGEST = hashlib.sha256(_SQL.encode()).hexdigest()
"""A day that was checked by other rules is checked again."""
_DIGITS = 12
NO_ALPHAS: Mapping[str, int] = MappingProxyType({})
"""Every estimate counts as it is priced."""
NO_PRICES: Mapping[str, str] = MappingProxyType({})
"""No closed bill says what machines cost."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_USAGE = {
    "charges_in": _names(
        "x_ChargeKey x_Occurrence x_UsageDate x_Cloud x_Class x_TieRule x_MachineId x_DependantId x_InstanceType "
        "x_DayBilledCost x_DayEffectiveCost x_DayListCost x_DayPromotionalCost x_PromotionalCost x_UnitsPerMachine "
        "x_UsageType BilledCost BillingAccountId BillingCurrency BillingPeriodStart CapacityReservationId "
        "CapacityReservationStatus ChargeCategory ChargeClass ChargeFrequency ChargePeriodEnd ChargePeriodStart "
        "CommitmentDiscountId CommitmentDiscountStatus ConsumedQuantity ConsumedUnit EffectiveCost InvoiceId "
        "ListCost PricingCategory PricingQuantity PricingUnit RegionId ServiceName SkuMeter SubAccountId"
    ),
    "device_in": _names(
        "hour_utc cloud instance_id instance_type device_uuid parent_uuid mig_slices mig_total job_id attempt rank category ns"
    ),
    "layer_in": _names("hour_utc job_id attempt instance_type layer pass op phase batch_size dtype category ns"),
    "attach_in": _names("hour_utc object_id cloud instance_id bytes object_type"),
    "prices_in": _names("x_Cloud SkuId RegionId PricingCategory x_AsOf ListUnitPrice PricingUnit BillingCurrency"),
}
"""The columns that witness.sql reads, by the name it knows the table by, in the order of `check`'s tables."""

_COSTS = _names(
    "x_DayBilledCost x_DayEffectiveCost x_DayListCost x_DayPromotionalCost BilledCost EffectiveCost ListCost "
    "x_EstimatedCost x_PromotionalCost"
)
_OURS = ("x_EstimatedCost", "x_PromotionalCost")
_COMPARED = {
    ADDRESSES.name: (ADDRESSES, "addresses", ("BilledCost", "EffectiveCost", "ListCost", *_OURS)),
    LAYERS.name: (LAYERS, "layers", ("BilledCost", "EffectiveCost", *_OURS)),
    SPANS.name: (SPANS, "spans", ("x_Ns",)),
}


@dataclass(frozen=True)
class _Settings:
    """What the day's tables do not say; each as in `check`."""

    gpu_counts: Mapping[str, int]
    watermarks: Mapping[str, int]
    alphas: Mapping[str, int]
    contracted: Mapping[str, str]
    day: str
    default_region: Mapping[str, str]
    quantum_digits: int


@dataclass(frozen=True)
class CategoryTotal:
    """Sums of one category in one currency; None where no address of the category has an amount in that ledger."""

    currency: str
    category: str
    billed: Decimal | None
    effective: Decimal | None
    estimated: Decimal | None


@dataclass(frozen=True)
class WitnessReport:
    """What both ledgers agree on.

    Attributes:
        day: UTC day, YYYY-MM-DD.
        rows: rows compared, by table.
        totals: sums by currency and category, sorted, of the cash ledger, the amortised ledger and the estimates.
    """

    day: str
    rows: Mapping[str, int]
    totals: tuple[CategoryTotal, ...]

    def facts(self) -> dict[str, Any]:
        """The report as JSON values without floats: amounts are decimal texts."""
        totals = [
            {
                "currency": t.currency,
                "category": t.category,
                "billed": _text(t.billed),
                "effective": _text(t.effective),
                "estimated": _text(t.estimated),
            }
            for t in self.totals
        ]
        return {"day": self.day, "rows": dict(self.rows), "totals": totals}


def check(
    charges: pa.Table,
    device_hourly: pa.Table,
    layer_hourly: pa.Table,
    attachments: pa.Table,
    gpu_counts: Mapping[str, int],
    prices: pa.Table,
    watermarks: Mapping[str, int],
    day: str,
    default_region: Mapping[str, str],
    addresses: pa.Table,
    layers: pa.Table,
    spans: pa.Table,
    *,
    alphas: Mapping[str, int] = NO_ALPHAS,
    contracted: Mapping[str, str] = NO_PRICES,
    quantum_digits: int = _DIGITS,
    threads: int = 1,
) -> WitnessReport:
    """What the second ledger and the first agree on, when they agree in every row.

    Args:
        charges: `core_billing__charges`; rows of other usage days are left aside.
        device_hourly: `core_usage__device_hourly` of the day.
        layer_hourly: `core_usage__layer_hourly` of the day.
        attachments: `core_usage__attachments_hourly` of the day, with size and type of volumes.
        gpu_counts: GPUs by instance type.
        prices: `core_pricing__list`.
        watermarks: ns UTC by "cloud|account|service", cut to the day or not.
        day: UTC day, YYYY-MM-DD.
        default_region: by cloud, region of the price of a machine that no bill row places.
        addresses: `core_cost__addresses` under test.
        layers: `core_cost__layers` under test.
        spans: `core_cost__spans` under test.
        alphas: calibration factors in units of 1e-12 by "cloud|account|family", the account empty where a machine has none;
            what is not named counts 1.
        contracted: "<price of a machine-hour> <currency>" by "cloud|account|instance type|region", of the latest closed bill.
        quantum_digits: decimal digits of the least unit of money, at most 12.
        threads: threads of the engine.

    Raises:
        WitnessError: a row is missing on either side, stands twice, or holds another amount. Names the first such
            address, both amounts and the number of differences per table (where, expected, found, differences,
            address).

    Source: infra/rules/ledger.md 1 to 5.
    """
    usage = (charges, device_hourly, layer_hourly, attachments, prices)
    ledger = {ADDRESSES.name: addresses, LAYERS.name: layers, SPANS.name: spans}
    settings = _Settings(gpu_counts, watermarks, alphas, contracted, day, default_region, quantum_digits)
    with duckdb.connect(":memory:", config={"threads": threads}) as engine:
        _run(engine, usage, settings, ledger)
        given = {name: len(table) for name, table in ledger.items()}
        _refuse_differences(engine, day, given, quantum_digits)
        return WitnessReport(day, given, _totals(engine, quantum_digits))


def compute(
    charges: pa.Table,
    device_hourly: pa.Table,
    layer_hourly: pa.Table,
    attachments: pa.Table,
    gpu_counts: Mapping[str, int],
    prices: pa.Table,
    watermarks: Mapping[str, int],
    day: str,
    default_region: Mapping[str, str],
    *,
    alphas: Mapping[str, int] = NO_ALPHAS,
    contracted: Mapping[str, str] = NO_PRICES,
    quantum_digits: int = _DIGITS,
    threads: int = 1,
) -> dict[str, pa.Table]:
    """The second ledger itself: the compared columns of addresses, layers and spans, by table name, sorted by key.

    Arguments as for `check`. Amounts are decimal(38, 12), spans ns.
    """
    usage = (charges, device_hourly, layer_hourly, attachments, prices)
    settings = _Settings(gpu_counts, watermarks, alphas, contracted, day, default_region, quantum_digits)
    ledger = {name: spec.empty() for name, (spec, _, _) in _COMPARED.items()}
    with duckdb.connect(":memory:", config={"threads": threads}) as engine:
        _run(engine, usage, settings, ledger)
        return {name: _fetch(engine, name, quantum_digits) for name in _COMPARED}


def _run(
    engine: duckdb.DuckDBPyConnection,
    usage: tuple[pa.Table, ...],
    settings: _Settings,
    ledger: Mapping[str, pa.Table],
) -> None:
    """Hand everything over under the names that witness.sql expects, and run it."""
    digits = settings.quantum_digits
    for (name, columns), table in zip(_USAGE.items(), usage, strict=True):
        engine.register(name, _integers(table, columns, digits))
    for name, (spec, short, amounts) in _COMPARED.items():
        engine.register(f"{short}_in", _integers(ledger[name], (*spec.key, *amounts), digits))
    engine.register("settings_in", _settings_row(settings))
    engine.register("counts_in", _by_key(settings.gpu_counts, ("itype",), "gpus"))
    engine.register("marks_in", _by_key(settings.watermarks, ("cloud", "account", "service"), "ns"))
    engine.register("alphas_in", _by_key(settings.alphas, ("cloud", "account", "family"), "alpha"))
    engine.register("contracted_in", _contracted(settings.contracted))
    engine.register("regions_in", _regions(settings.default_region))
    engine.execute(_SQL)


def _by_key(values: Mapping[str, int], names: Sequence[str], value: str) -> pa.Table:
    """A mapping as a table: a column for each part of the keys, which `|` joins, and one of the values."""
    keys = [key.split("|", len(names) - 1) for key in values]
    parts = {name: pa.array([key[i] for key in keys], pa.string()) for i, name in enumerate(names)}
    return pa.table(parts | {value: pa.array(list(values.values()), pa.int64())})


def _contracted(prices: Mapping[str, str]) -> pa.Table:
    """Contracted prices as a table, in whole units of 1e-12."""
    keys = [key.split("|", 3) for key in prices]
    parts = {
        name: pa.array([k[i] for k in keys], pa.string())
        for i, name in enumerate(("cloud", "account", "sku", "region"))
    }
    amounts, currencies = zip(*(text.split(" ", 1) for text in prices.values()), strict=True) if prices else ((), ())
    price = pa.array([Decimal(amount) for amount in amounts], pa.decimal128(38, _DIGITS))
    units = _scaled(pa.chunked_array([price]), 0)
    return pa.table(parts | {"price": units, "currency": pa.array(currencies, pa.string())})


def _regions(regions: Mapping[str, str]) -> pa.Table:
    return pa.table(
        {"cloud": pa.array(list(regions), pa.string()), "region": pa.array(list(regions.values()), pa.string())}
    )


def _settings_row(settings: _Settings) -> pa.Table:
    midnight = datetime.fromisoformat(settings.day).replace(tzinfo=UTC)
    return pa.table(
        {
            "day": pa.array([midnight.date()]),
            "day_ns": pa.array([int(midnight.timestamp()) * 1_000_000_000], pa.int64()),
            "coarse": pa.array([10 ** (_DIGITS - settings.quantum_digits)], pa.int64()),
        }
    )


def _integers(table: pa.Table, names: Sequence[str], digits: int) -> pa.Table:
    """The named columns with instants as ns and decimals as whole numbers of their least unit, decimal(38, 0)."""
    columns = {}
    for name in names:
        column = table.column(name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns", tz="UTC")).cast(pa.int64())
        elif pa.types.is_decimal(column.type):
            try:
                column = column.cast(pa.decimal128(38, digits if name in _COSTS else _DIGITS))
            except pa.ArrowInvalid as error:
                raise WitnessError(
                    f"witness: column {name} holds an amount that is no multiple of 1e-{digits} ({error}). Amounts are "
                    "quantised once, where a bill is read.",
                    where=name,
                    expected=f"a multiple of 1e-{digits}",
                    found=str(error),
                ) from error
            column = _scaled(column, 0)
        columns[name] = column
    return pa.table(columns)


def _scaled(column: pa.ChunkedArray, scale: int) -> pa.ChunkedArray:
    """The same 128-bit integers read with another scale: nothing is rounded, nothing can overflow."""
    kind = pa.decimal128(38, scale)
    chunks = [pa.Array.from_buffers(kind, len(c), c.buffers(), offset=c.offset) for c in column.chunks]
    return pa.chunked_array(chunks, kind)


def _fetch(engine: duckdb.DuckDBPyConnection, name: str, digits: int) -> pa.Table:
    spec, short, amounts = _COMPARED[name]
    names = (*spec.key, *amounts)
    chosen = ", ".join(f'"{n}"::DECIMAL(38, 0) AS "{n}"' if n in _COSTS else f'"{n}"' for n in names)
    table = engine.table(f"w_{short}").project(chosen).order(_order(spec)).to_arrow_table()
    columns = {}
    for name in names:
        column = table.column(name)
        if name in _COSTS:
            column = _scaled(column, digits)
        elif spec[name].type == INSTANT:
            column = column.cast(pa.int64())
        columns[name] = column.cast(spec[name].type)
    return pa.table(columns)


def _order(spec: Table) -> str:
    return ", ".join(f'"{name}"' for name in spec.key)


def _refuse_differences(engine: duckdb.DuckDBPyConnection, day: str, given: Mapping[str, int], digits: int) -> None:
    differences = {name: len(engine.table(f"d_{short}")) for name, (_, short, _) in _COMPARED.items()}
    if not any(differences.values()):
        return
    name = next(n for n, rows in differences.items() if rows)
    spec, short, amounts = _COMPARED[name]
    row = engine.table(f"d_{short}").order(_order(spec)).limit(1).to_arrow_table().to_pylist()[0]
    address = {n: _plain(row[n], spec, n) for n in spec.key}
    ours, theirs = _side(row, "ours", "", amounts, digits), _side(row, "theirs", "_ledger", amounts, digits)
    where = ", ".join(f"{n} {v}" for n, v in address.items() if v is not None)
    counts = ", ".join(f"{n} {rows:,}" for n, rows in differences.items())
    raise WitnessError(
        f"witness {day}: {name}: {differences[name]:,} row(s) differ; the ledger has {given[name]:,}. First: {where}: "
        f"witness.sql has {ours}, the ledger has {theirs}. Differences: {counts}. Nothing may be published; work this "
        "row out by hand from the rules of the ledger.",
        where=f"{name} {day}",
        expected=ours,
        found=theirs,
        differences=differences,
        address=address,
    )


def _side(row: Mapping[str, Any], side: str, suffix: str, amounts: Sequence[str], digits: int) -> str:
    """What one side has at an address, in words: only the amounts that differ, when both sides have one row."""
    if row[side] == 0:
        return "no such row"
    one_each = row["ours"] == 1 and row["theirs"] == 1
    shown = [a for a in amounts if not one_each or row[a] != row[f"{a}_ledger"]]
    values = []
    for amount in shown:
        value = row[f"{amount}{suffix}"]
        unit = "ns" if amount == "x_Ns" else ""
        text = "null" if value is None else str(value) if unit else _text(_money(value, digits))
        values.append(f"{amount} {text} {unit}".strip())
    return (f"{row[side]} rows of " if row[side] > 1 else "") + ", ".join(values)


def _plain(value: Any, spec: Table, name: str) -> Any:
    if value is None or spec[name].type != INSTANT:
        return value
    return datetime.fromtimestamp(int(value) // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _totals(engine: duckdb.DuckDBPyConnection, digits: int) -> tuple[CategoryTotal, ...]:
    rows = engine.table("w_totals").order("BillingCurrency, x_Category").fetchall()
    return tuple(CategoryTotal(*row[:2], *(_money(units, digits) for units in row[2:])) for row in rows)


def _money(units: Any, digits: int) -> Decimal | None:
    """Units of 10^-digits as an amount; exact, whatever the decimal context holds."""
    return None if units is None else Decimal(f"{int(units)}e-{digits}")


def _text(amount: Decimal | None) -> str | None:
    return None if amount is None else f"{amount:f}"
