"""From a charge to its addresses, and from a job or a resource back to its charges, as trees that add up at each level.

A charge goes to its days, hours, machines, devices and jobs, and its work on through the pools of the second rounding to
layers. A job or a resource goes to its categories, hours and charges, and a job's work to its layers. What the tables say
elsewhere is held against each tree: the bill's own rows, the layers, the daily reports. Tables in, nodes out; knows no lake and
no terminal.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.billing import CHARGES
from schemas.ledger import ADDRESSES, JOB_DAILY, LAYERS, RESOURCE_DAILY
from schemas.usage import CATEGORIES, JOB_RUNS, LAYER_HOURLY
from tasks.core import money
from tasks.core.levels import AMOUNTS, NOTHING, Node, Units, assert_levels, not_equal, total
from tasks.core.pools import (
    LAYER,
    Pool,
    Row,
    divide,
    hour_text,
    op_name,
    pool_key,
    pool_name,
    pools_of,
    rows_of,
    sums_of,
)
from tasks.core.spelling import one_spelling
from tasks.errors import LawError

ESTIMATE = "estimate:"
"""How the key of an estimate begins."""
RESOURCES = ("ResourceId", "x_MachineId", "x_DeviceId")
"""Columns of an address that a resource is looked for in, in this order."""
Facts = tuple[tuple[str, str], ...]

_AT = ADDRESSES.key
_OF_CHARGE = ("x_Reason", "x_Evidence", "x_CoveragePpm", "x_Team", "x_InstanceType")
_BILL = (
    "x_Cloud", "ServiceName", "ChargeCategory", "ChargeClass", "ChargeDescription", "x_UsageType", "ResourceId", "RegionId",
    "BillingAccountId", "SubAccountId", "BillingPeriodStart", "InvoiceId", "BillingCurrency", "ChargePeriodStart",
    "ChargePeriodEnd", "ConsumedQuantity", "ConsumedUnit", "PricingQuantity", "PricingUnit", "PricingCategory", "SkuMeter",
    "ListCost", "CommitmentDiscountId", "CommitmentDiscountStatus", "Tags", "x_Credits", "x_Class", "x_TieRule",
)  # fmt: skip
"""What is told of a bill's row, in this order, where the row has it."""
_BRIEF = ("ServiceName", "ChargeDescription", "x_UsageType", "ResourceId", "PricingCategory", "InvoiceId", "x_Source")
_JOB = ("name", "team", "project", "owner", "kind", "model")


@dataclass(frozen=True)
class Book:
    """One committed day.

    Args:
        day: UTC usage day, YYYY-MM-DD.
        revision: number of the commit.
        cause: why it was written again, None at revision 1.
        bills: deliveries that its charges come from, "source/delivery".
        tables: its tables by name, as many as the question needs.
    """

    day: str
    revision: int
    cause: str | None
    bills: Sequence[str]
    tables: Mapping[str, pa.Table]

    @property
    def facts(self) -> Facts:
        """The commit in words."""
        return (("revision", f"{self.revision}" + (f", because of {self.cause}" if self.cause else "")),)


@dataclass(frozen=True)
class Level:
    """One level of a tree: rows that agree in `columns` are one node."""

    kind: str
    columns: tuple[str, ...]
    name: Callable[[Row], str]
    facts: Callable[[Row], Facts] = lambda _: ()
    rank: Callable[[Row], Any] | None = None
    """What nodes are ordered by; None: the greatest amount first."""


def grow(
    rows: Sequence[Row], levels: Sequence[Level], tail: Callable[[Row], Sequence[Node]] | None = None
) -> list[Node]:
    """Nodes of the first level with the other levels below them; `tail` gives the parts of a row of the last level."""
    if not levels:
        return [node for row in rows for node in tail(row)] if tail else []
    level, groups = levels[0], dict[tuple[Any, ...], list[Row]]()
    for row in rows:
        groups.setdefault(tuple(row[c] for c in level.columns), []).append(row)
    found = []
    for key, group in groups.items():
        units, first = total(row["units"] for row in group), group[0]
        node = Node(level.kind, level.name(first), units, level.facts(first), tuple(grow(group, levels[1:], tail)))
        size = -max((abs(u) for u in units if u is not None), default=0) if level.rank is None else level.rank(first)
        found.append(((size, tuple((v is None, v) for v in key)), node))
    return [node for _, node in sorted(found, key=lambda pair: pair[0])]


HOUR = Level("hour", ("x_HourUtc",), lambda r: hour_text(r["x_HourUtc"]), rank=lambda r: r["x_HourUtc"])


# --- from a charge to its addresses ---------------------------------------------------------------------------------


def explain_charge(books: Sequence[Book], key: str) -> list[Node]:
    """Trees of the charges with a key, one for each occurrence, and for each delivery that states other amounts.

    Args:
        books: days in order, with charges, addresses, layers and layer hours.
        key: whole x_ChargeKey.

    Raises:
        LawError: a level does not add up; names it.
    """
    trees: dict[tuple[Any, ...], list[tuple[Book, Row, Node]]] = {}
    estimates: dict[int, list[tuple[Book, Node]]] = {}
    for book in books:
        addresses = _with_key(book.tables[ADDRESSES.name], key)
        of: dict[int, list[Row]] = {}
        for row in addresses:
            of.setdefault(row["x_Occurrence"], []).append(row)
        tail = _tail(book, addresses)
        if key.startswith(ESTIMATE):
            for number, rows in of.items():
                units = total(row["units"] for row in rows)
                estimates.setdefault(number, []).append((book, _day(book, units, rows, tail, "estimate")))
            continue
        for row in _bill_rows(book, [key]).values():
            number = row["x_Occurrence"]
            day = _day(book, row["day_units"], of.get(number, []), tail, f"charge {key[:16]} {number}")
            trees.setdefault((number, row["units"]), []).append((book, row, day))
    roots = [_charge(key, days) for _, days in sorted(trees.items(), key=lambda item: item[0][0])]
    roots += [_estimate(key, days) for _, days in sorted(estimates.items())]
    for root in roots:
        assert_levels(root)
    return roots


def _day(book: Book, units: Units, rows: Sequence[Row], tail: Callable[[Row], Sequence[Node]], where: str) -> Node:
    if not rows:
        raise not_equal(f"{where}, day {book.day}", AMOUNTS[0], units[0], None, "its 0 addresses")
    return Node("day", book.day, units, book.facts, tuple(grow(rows, _CHARGE_LEVELS, tail)))


def _charge(key: str, days: Sequence[tuple[Book, Row, Node]]) -> Node:
    """The tree of one row of a bill: its days, and what of it lies on days that were not read."""
    book, row, _ = days[-1]
    nodes = [node for _, _, node in days]
    told = total(node.units for node in nodes)
    rest = tuple(None if u is None else u - (t or 0) for u, t in zip(row["units"], told, strict=True))
    start, end = (dt.datetime.fromtimestamp(row[c] // 10**9, dt.UTC) for c in ("ChargePeriodStart", "ChargePeriodEnd"))
    last = max(start, end - dt.timedelta(seconds=1)).date()
    asked = {node.name for node in nodes}
    period = {(start.date() + dt.timedelta(days=n)).isoformat() for n in range((last - start.date()).days + 1)}
    if any(rest):
        if period <= asked:
            ledger = next(i for i, u in enumerate(rest) if u)
            where = f"charge {key} occurrence {row['x_Occurrence']}"
            raise not_equal(
                where, AMOUNTS[ledger], row["units"][ledger], told[ledger], f"its parts on {len(asked)} days"
            )
        away = len(period - asked)
        name = f"{away} other day(s): not asked for, not committed, or committed from another bill"
        nodes.append(Node("day", name, rest))
    bills = [b for b in book.bills if b.startswith(f"{row['x_Source']}/")]
    facts = (
        ("key", key),
        ("occurrence", str(row["x_Occurrence"])),
        ("delivery", ", ".join(bills)),
        *_facts(row, _BILL),
    )
    return Node("charge", key, row["units"], facts, tuple(nodes))


def _estimate(key: str, days: Sequence[tuple[Book, Node]]) -> Node:
    nodes = tuple(node for _, node in days)
    facts = (("key", key), ("bill", "none yet: the hours lie beyond the watermark, or no bill names the resource"))
    return Node("estimate", key, total(node.units for node in nodes), facts, nodes)


def _leaf(row: Row) -> str:
    if row["x_JobId"] is None:
        return str(row["x_Category"])
    rank = "" if row["x_Rank"] is None else f" rank {row['x_Rank']}"
    return f"{row['x_JobId']} attempt {row['x_Attempt']}{rank}: {row['x_Category']}"


_CHARGE_LEVELS = (
    HOUR,
    Level(
        "machine",
        ("x_MachineId",),
        lambda r: r["x_MachineId"] or "(no machine)",
        lambda r: _facts(r, ("x_InstanceType", "x_CoveragePpm")),
        lambda r: (r["x_MachineId"] is None, r["x_MachineId"]),
    ),
    Level(
        "device",
        ("x_DeviceId",),
        lambda r: r["x_DeviceId"] or "(no device)",
        rank=lambda r: (r["x_DeviceId"] is None, r["x_DeviceId"]),
    ),
    Level(
        "address",
        ("x_JobId", "x_Attempt", "x_Rank", "x_Category"),
        _leaf,
        lambda r: _facts(r, ("x_Reason", "x_Evidence", "x_Team")),
    ),
)


def _tail(book: Book, rows: Iterable[Row]) -> Callable[[Row], Sequence[Node]]:
    """What is below an address: for work, its pool and the layers of it."""
    jobs = {row["x_JobId"] for row in rows if row["x_Category"] == "work" and row["x_JobId"] is not None}
    pools: dict[tuple[Any, ...], Pool] = {}
    for job in sorted(jobs):
        addresses, layers, layer_hourly = (book.tables[spec.name] for spec in (ADDRESSES, LAYERS, LAYER_HOURLY))
        pools |= pools_of(addresses, layers, layer_hourly, job)

    def below(row: Row) -> Sequence[Node]:
        if row["x_Category"] != "work" or row["x_JobId"] is None:
            return ()
        key = pool_key(row)
        pool = pools[key]
        whole = [f"{n} {money.decimal(u):f}" for n, u in zip(AMOUNTS, pool.units, strict=True) if u]
        facts = (("whole pool", ", ".join(whole) or "0"), ("addresses in it", f"{pool.addresses:,}"))
        return (Node("pool", pool_name(key), row["units"], facts, tuple(divide(pool, row["units"]))),)

    return below


# --- from a job or a resource to its charges ------------------------------------------------------------------------


def explain_job(books: Sequence[Book], job: str) -> list[Node]:
    """Trees of a job, one a currency: category, hour, charge.

    Args:
        books: days in order, with charges, addresses, layers, layer hours, runs and the daily report of jobs.
        job: x_JobId.

    Raises:
        LawError: a level does not add up, or the report of jobs or the layers say something else; names it.
    """
    rows: list[Row] = []
    facts: Facts = ()
    for book in books:
        table = book.tables[ADDRESSES.name]
        mine = table.filter(pc.equal(table["x_JobId"], job))
        if not len(mine):
            continue
        _assert_report(f"job {job}, {book.day}", book.tables[JOB_DAILY.name], "x_JobId", job, mine)
        _tail(book, [{"x_JobId": job, "x_Category": "work"}])  # holds every pool of the job to its layers
        rows += _of_charges(book, mine)
        facts = facts or _job_facts(book.tables[JOB_RUNS.name], job)
    return _back("job", job, rows, facts, (_CATEGORY, HOUR, _CHARGE))


def layers_of_job(books: Sequence[Book], job: str) -> list[Node]:
    """The work of a job by layer, one tree a currency: what `explain_job` shows as the category work, divided another way.

    Args:
        books: as for `explain_job`.
        job: x_JobId.

    Raises:
        LawError: the layers do not add up to the work of the job's addresses; names the ledger.
    """
    rows: dict[str, list[Row]] = {}
    work: dict[str, list[Units]] = {}
    for book in books:
        table, layers = book.tables[ADDRESSES.name], book.tables[LAYERS.name]
        mine = pc.and_(pc.equal(table["x_JobId"], job), pc.equal(table["x_Category"], "work"))
        for row in sums_of(table.filter(mine), ["BillingCurrency"]):
            work.setdefault(row["BillingCurrency"], []).append(row["units"])
        for row in rows_of(layers.filter(pc.equal(layers["x_JobId"], job)), ("BillingCurrency", *LAYER)):
            rows.setdefault(row["BillingCurrency"], []).append(row)
    roots = []
    for currency, units in sorted(work.items()):
        root = Node("work", f"of job {job} by layer", total(units), (("currency", currency),))
        root = replace(root, children=tuple(grow(rows.get(currency, []), _LAYER_LEVELS)))
        assert_levels(root)
        roots.append(_paid(root))
    return roots


def explain_resource(books: Sequence[Book], resource: str, column: str) -> list[Node]:
    """Trees of a resource, one a currency: category, job, hour, charge.

    Args:
        books: days in order, with charges, addresses and the daily report of resources.
        resource: value of `column`, a ResourceId in its one spelling.
        column: one of RESOURCES.

    Raises:
        LawError: a level does not add up, or the report of resources says something else; names it.
    """
    rows: list[Row] = []
    for book in books:
        table = one_spelling(book.tables[ADDRESSES.name])
        mine = table.filter(pc.equal(table[column], resource))
        if not len(mine):
            continue
        if column in RESOURCE_DAILY.names:
            report = one_spelling(book.tables[RESOURCE_DAILY.name])
            _assert_report(f"{column} {resource}, {book.day}", report, column, resource, mine)
        rows += _of_charges(book, mine)
    job = Level("job", ("x_JobId",), lambda r: r["x_JobId"] or "(no job)")
    return _back("resource", resource, rows, (("looked for in", column),), (_CATEGORY, job, HOUR, _CHARGE))


def _back(kind: str, name: str, rows: Sequence[Row], facts: Facts, levels: Sequence[Level]) -> list[Node]:
    by_currency: dict[str, list[Row]] = {}
    for row in rows:
        by_currency.setdefault(row["BillingCurrency"], []).append(row)
    roots = []
    for currency, mine in sorted(by_currency.items()):
        more = (("currency", currency), *facts)
        roots.append(Node(kind, name, total(r["units"] for r in mine), more, tuple(grow(mine, levels))))
        assert_levels(roots[-1])
    return roots


def _paid(node: Node) -> Node:
    """Without parts that have no money: of an op with FLOPs, and with its time in a fused op, there are some."""
    return replace(node, children=tuple(_paid(child) for child in node.children if any(child.units)))


_LAYER_LEVELS = (
    Level("layer", ("x_Layer",), lambda r: str(r["x_Layer"])),
    Level("op", LAYER[1:], op_name),
)
_CATEGORY = Level(
    "category", ("x_Category",), lambda r: str(r["x_Category"]), rank=lambda r: CATEGORIES.index(r["x_Category"])
)
_CHARGE = Level(
    "charge",
    ("x_ChargeKey", "x_Occurrence"),
    lambda r: r["x_ChargeKey"] + (f" ({r['x_Occurrence']})" if r["x_Occurrence"] else ""),
    lambda r: r["facts"],
)


def _of_charges(book: Book, addresses: pa.Table) -> list[Row]:
    """Addresses added up by category, job, hour and charge, each with what its bill says."""
    by = ["BillingCurrency", "x_Category", "x_JobId", "x_HourUtc", "x_ChargeKey", "x_Occurrence"]
    rows = sums_of(addresses, by)
    bills = _bill_rows(book, {row["x_ChargeKey"] for row in rows})
    for row in rows:
        bill = bills.get((row["x_ChargeKey"], row["x_Occurrence"]))
        if bill is not None:
            row["facts"] = _facts(bill, _BRIEF)
        elif row["x_ChargeKey"].startswith(ESTIMATE):
            row["facts"] = (("bill", "none yet"),)
        else:
            raise LawError(
                f"law 1 (money): charge {row['x_ChargeKey']} has addresses on {book.day}, and the day's charges have no such "
                "row. Nothing is shown; run the day again.",
                law="1",
                where=row["x_ChargeKey"],
                expected="a row of the bill",
                found=None,
            )
    return rows


def _assert_report(where: str, report: pa.Table, column: str, value: str, addresses: pa.Table) -> None:
    """The daily report has the same amounts by category and currency as the addresses.

    Raises:
        LawError: names the category and currency.
    """
    by = ("BillingCurrency", "x_Category")
    sides = (addresses, report.filter(pc.equal(report[column], value)))
    sums = [{(row[by[0]], row[by[1]]): row["units"] for row in sums_of(side, by)} for side in sides]
    for key in sorted({*sums[0], *sums[1]}):
        here, there = (side.get(key, NOTHING) for side in sums)
        for ledger, expected, found in zip(AMOUNTS, there, here, strict=True):
            if expected != found:
                raise not_equal(
                    f"{where}, {key[1]}, {key[0]}: the daily report", ledger, expected, found, "the addresses"
                )


# --- rows ------------------------------------------------------------------------------------------------------------


def _with_key(addresses: pa.Table, key: str) -> list[Row]:
    mine = addresses.filter(pc.equal(addresses["x_ChargeKey"], key))
    columns = dict.fromkeys((*_AT, *_OF_CHARGE, "x_Cloud", "PricingCategory", "BillingAccountId", "SubAccountId"))
    columns |= dict.fromkeys(("BillingPeriodStart", "InvoiceId", "BillingCurrency", "x_State"))
    return rows_of(mine, tuple(columns))


def _bill_rows(book: Book, keys: Iterable[str]) -> dict[tuple[str, int], Row]:
    """Rows of the day's bill by key and occurrence, with the amounts of the whole charge and of its day."""
    table = book.tables[CHARGES.name]
    mine = table.filter(pc.is_in(table["x_ChargeKey"], pa.array(sorted(keys), pa.string())))
    whole = mine.append_column("x_EstimatedCost", pa.nulls(len(mine), mine.schema.field("BilledCost").type))
    of_day = ["x_DayBilledCost", "x_DayEffectiveCost", "x_EstimatedCost", "x_DayPromotionalCost"]
    rows = rows_of(whole, tuple(dict.fromkeys(("x_ChargeKey", "x_Occurrence", *_BILL, *_BRIEF))))
    for row, day in zip(rows, rows_of(whole, ("x_Occurrence",), amounts=of_day), strict=True):
        row["day_units"] = day["units"]
    return {(row["x_ChargeKey"], row["x_Occurrence"]): row for row in rows}


def _facts(row: Mapping[str, Any], names: Sequence[str]) -> Facts:
    """What the row says under these names, missing values left out, instants in UTC."""
    return tuple((name, _said(name, row[name])) for name in names if row.get(name) is not None)


def _said(name: str, value: Any) -> str:
    if name.endswith(("PeriodStart", "PeriodEnd")):
        return dt.datetime.fromtimestamp(value // 10**9, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{value:f}" if hasattr(value, "as_tuple") else str(value)


def _job_facts(runs: pa.Table, job: str) -> Facts:
    rows = runs.filter(pc.equal(runs["job_id"], job)).select(list(_JOB)).to_pylist()
    return _facts(rows[-1], _JOB) if rows else ()
