"""Which checkpoint belongs in which storage class, and whether moving it there pays.

Rows of a listing and a policy in; `report_checkpoints__inventory` and `report_checkpoints__moves` out. All amounts are exact
fractions until each is rounded once, half to even, to 1e-12; totals add up the rounded ones. A GB is 2^30 bytes, as clouds
bill it, and a month the twelfth part of 365 days. Knows no disk, no network, no clock. Source: infra/rules/tiers.md.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
import heapq
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.checkpoints import INVENTORY, MOVES, PINS
from seedance.schema import INSTANT, Table, conform
from tasks.core import money
from tasks.core.tier_policy import Policy
from tasks.errors import SettingsError

CURRENCY = "USD"
LOCAL = "local"
GB = 2**30
KB = 2**10
MIB = 2**20
MONTH_DAYS = Fraction(365, 12)
DAY_NS = 86_400_000_000_000
INSTANT_RETRIEVAL = "instant"
_MOST = 2**63 - 1
_AMOUNTS = ("x_SavedPerMonth", "x_Saved", "x_RequestCost", "x_RetrievalCost", "x_MinimumCost", "x_Net")


@dataclass(frozen=True, eq=False)
class StorageClass:
    """One class of one cloud and region, or local disk. Money in USD.

    Args:
        name: as the price table names it.
        api: as the store's API names it; empty for further retrieval options of the same class.
        price: of a GB and month.
        retrieval: of a GB read.
        speed: how long a read takes to begin; `instant` for milliseconds.
        min_days: shortest time that is charged.
        min_bytes: smallest size that is charged.
        overhead: bytes charged beside each object, at this price.
        overhead_standard: the same at the price of the cloud's standard class.
        write: one request that writes.
        read: one request that reads.
        standard: price of a GB and month in the cloud's standard class.
    """

    name: str
    api: str
    price: Fraction
    retrieval: Fraction = Fraction(0)
    speed: str = INSTANT_RETRIEVAL
    min_days: int = 0
    min_bytes: int = 0
    overhead: int = 0
    overhead_standard: int = 0
    write: Fraction = Fraction(0)
    read: Fraction = Fraction(0)
    standard: Fraction = Fraction(0)

    def per_month(self, size: int) -> Fraction:
        """What an object of so many bytes costs here in a month."""
        billed = max(size, self.min_bytes) + self.overhead
        return (billed * self.price + self.overhead_standard * self.standard) / GB


@dataclass(frozen=True)
class Prices:
    """The classes of a policy's cloud and region, by name and by what the API calls them; local disk is one when priced."""

    by_name: Mapping[str, StorageClass]
    by_api: Mapping[str, str]


@dataclass(frozen=True)
class Moment:
    """When and among what a listing is looked at.

    Args:
        end_ns: end of the day, integer ns UTC.
        newest: checkpoints of each group that are its newest, the newest first.
        ended: jobs that are known to have ended.
    """

    end_ns: int
    newest: Mapping[tuple[str, str], Sequence[str]]
    ended: frozenset[str] = frozenset()


def parse_prices(text: str, policy: Policy, *, where: str) -> Prices:
    """The price table's classes of the policy's cloud and region; the policy's classes must be among them.

    Raises:
        SettingsError: the cloud has no prices in the region, or the policy names another class, or the cold one cannot be read
            at once; carries key, expected, found, and nearest.
    """
    rows = list(csv.DictReader(io.StringIO(text)))
    own = [r for r in rows if (r["cloud"], r["region"]) == (policy.cloud, policy.region)]
    if not own:
        known = sorted({f"{r['cloud']} {r['region']}" for r in rows})
        raise SettingsError(
            f"{where} has no prices of {policy.cloud} in {policy.region}; it has {', '.join(known)}. Add rows, or name another "
            "region.",
            key="region",
            expected=known,
            found=policy.region,
        )
    standard = max(Fraction(r["usd_per_gb_month"]) for r in own if r["min_days"] == "0")
    by_name = {r["class"]: _class(r, standard) for r in own}
    for key, tier in (("warm", policy.warm), ("cold", policy.cold)):
        if tier.storage_class not in by_name:
            near = difflib.get_close_matches(tier.storage_class, by_name, 1, 0.0)[0]
            raise SettingsError(
                f"{key}.class: {where} has no class {tier.storage_class} of {policy.cloud} in {policy.region}. Did you mean "
                f"{near}? Valid names: {', '.join(by_name)}.",
                key=f"{key}.class",
                expected=list(by_name),
                found=tier.storage_class,
                nearest=near,
            )
        speed = by_name[tier.storage_class].speed
        if speed != INSTANT_RETRIEVAL:
            raise SettingsError(
                f"{key}.class: a read from {tier.storage_class} begins after {speed}; a checkpoint must be readable at once to "
                "resume from. Name a class with instant retrieval.",
                key=f"{key}.class",
                expected=INSTANT_RETRIEVAL,
                found=speed,
            )
    by_api = {r["api_class"]: r["class"] for r in own if r["api_class"]}
    if policy.local_usd_per_gb_month is not None:
        by_name[LOCAL] = StorageClass(LOCAL, "", Fraction(policy.local_usd_per_gb_month))
    return Prices(by_name, by_api)


def _class(row: Mapping[str, str], standard: Fraction) -> StorageClass:
    return StorageClass(
        name=row["class"],
        api=row["api_class"],
        price=Fraction(row["usd_per_gb_month"]),
        retrieval=Fraction(row["retrieval_usd_per_gb"]),
        speed=row["retrieval"],
        min_days=int(row["min_days"]),
        min_bytes=int(row["min_object_kb"]) * KB,
        overhead=int(row["overhead_kb"]) * KB,
        overhead_standard=int(row["overhead_standard_kb"]) * KB,
        write=Fraction(row["write_usd_per_1k"]) / 1000,
        read=Fraction(row["read_usd_per_1k"]) / 1000,
        standard=standard,
    )


@dataclass(frozen=True)
class Name:
    """What a path says: job and step where the pattern has them, and the checkpoint that it is part of, in its group."""

    job: str | None
    step: int | None
    group: tuple[str, str]
    checkpoint: str


def read_name(path: str, policy: Policy) -> Name:
    """Job, step and checkpoint of a path. Objects of one job and step are one checkpoint; else each object is one."""
    found = re.search(policy.pattern, path) if policy.pattern else None
    parts = found.groupdict() if found else {}
    job, step = parts.get("job") or None, parts.get("step") or ""
    number = int(step) if step.isascii() and step.isdigit() and int(step) <= _MOST else None
    if job is not None:
        group = ("job", job)
    elif found is not None and number is not None:
        group = ("folder", path[: found.start("step")])
    else:
        group = ("folder", path.rpartition("/")[0])
    return Name(job, number, group, path if number is None else str(number))


def find_newest(tables: Iterable[pa.Table], policy: Policy) -> dict[tuple[str, str], list[str]]:
    """The newest checkpoints of each group, the newest first, by the latest write of any of their objects.

    One more than the policy asks for at least: the newest of a job that has ended is its final one.
    """
    latest: dict[tuple[str, str], dict[str, int]] = {}
    for table in tables:
        for row in _rows(table):
            if row["x_Problem"] is None:
                name = read_name(row["x_Path"], policy)
                group = latest.setdefault(name.group, {})
                group[name.checkpoint] = max(group.get(name.checkpoint, 0), row["x_ModifiedUtc"])
    count = max(policy.hot.newest, 1)
    return {
        group: heapq.nlargest(count, found, key=lambda c: (found[c], int(c) if c.isascii() and c.isdigit() else -1, c))
        for group, found in latest.items()
    }


def plan(
    folder: str, found: pa.Table, policy: Policy, prices: Prices, moment: Moment, *, local: bool
) -> tuple[pa.Table, pa.Table]:
    """Inventory and moves of a part of a folder's listing.

    Args:
        folder: path or URL of the folder.
        found: entries (`core_checkpoints__found`).
        policy: what to do with them.
        prices: what classes cost.
        moment: when and among what.
        local: whether the folder is on local disk.
    """
    inventory, moves = [], []
    for row in _rows(found):
        entry, move = _entry(row, policy, prices, moment, local=local)
        inventory.append(entry | {"x_Folder": folder})
        if move is not None:
            moves.append(move | {"x_Folder": folder})
    return _table(INVENTORY, inventory), _table(MOVES, moves)


def _entry(
    row: Mapping[str, Any], policy: Policy, prices: Prices, moment: Moment, *, local: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    entry = dict(row) | {"BillingCurrency": CURRENCY}
    if row["x_Problem"] is not None:
        return entry, None
    name = read_name(row["x_Path"], policy)
    api = row["x_ApiClass"] or ("" if local else "STANDARD")
    here = LOCAL if local else prices.by_api.get(api, api)
    age = max(0, moment.end_ns - max(row["x_ModifiedUtc"], row["x_AccessedUtc"] or 0)) // DAY_NS
    pin = _pin(row["x_Path"], name, policy, moment)
    tier = None if pin else _tier(name, age, policy, moment)
    now = prices.by_name.get(here)
    entry |= {"x_JobId": name.job, "x_Step": name.step, "x_StorageClass": here, "x_AgeDays": age}
    entry |= {"x_Pin": pin, "x_Tier": tier}
    entry["x_CostPerMonth"] = None if now is None else money.decimal(_units(now.per_month(row["x_Bytes"])))
    if tier not in ("warm", "cold"):
        return entry, None
    wanted = policy.warm if tier == "warm" else policy.cold
    if wanted.storage_class == here:
        return entry, None
    there, stay = prices.by_name[wanted.storage_class], wanted.days - age
    written = max(0, moment.end_ns - row["x_ModifiedUtc"]) // DAY_NS
    priced = price_move(row["x_Bytes"], now, there, written, stay, wanted.reads_per_month, policy.part_mib * MIB)
    move = {n: entry[n] for n in ("x_Path", "x_Bytes", "x_JobId", "x_Step", "x_Tier", "x_AgeDays", "BillingCurrency")}
    move |= {"x_FromClass": here, "x_ToClass": there.name, "x_StayDays": stay, **priced}
    return entry, move | _verdict(here, there, move)


def _pin(path: str, name: Name, policy: Policy, moment: Moment) -> str | None:
    for pin in PINS:
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in getattr(policy.pins, pin)):
            return pin
    newest = moment.newest.get(name.group, ())
    return "final" if name.job in moment.ended and newest and newest[0] == name.checkpoint else None


def _tier(name: Name, age: int, policy: Policy, moment: Moment) -> str:
    running = name.job is None or name.job not in moment.ended
    if age < policy.hot.days or (running and name.checkpoint in moment.newest.get(name.group, ())[: policy.hot.newest]):
        return "hot"
    if age < policy.warm.days:
        return "warm"
    return "cold" if age < policy.cold.days else "expired"


@lru_cache(maxsize=65_536)  # the shards of a checkpoint have one size and one age
def price_move(
    size: int, here: StorageClass | None, there: StorageClass, age: int, stay: int, reads_per_month: Decimal, part: int
) -> Mapping[str, Decimal | None]:
    """What moving one object saves and costs, in USD; all None where the price of its place is not known.

    Args:
        size: bytes.
        here: class where it lies; None when it has no price.
        there: class where it would go.
        age: days since it was written: at most so long has it been where it is.
        stay: days that it would stay there.
        reads_per_month: expected whole reads a month.
        part: bytes that one request carries at most.
    """
    if here is None:
        return MappingProxyType(dict.fromkeys(_AMOUNTS))
    months = stay / MONTH_DAYS
    pieces = max(1, -(-size // part))
    writes = pieces if pieces == 1 else pieces + 2  # an upload in parts is opened and closed
    before, after = here.per_month(size), there.per_month(size)
    gb = Fraction(size, GB)
    requests = writes * there.write + pieces * here.read
    retrieval = gb * here.retrieval
    if reads_per_month:
        reads = Fraction(reads_per_month) * months
        requests += reads * pieces * (there.read - here.read)
        retrieval += reads * gb * (there.retrieval - here.retrieval)
    early = (max(0, here.min_days - age) * before + max(0, there.min_days - stay) * after) / MONTH_DAYS
    monthly, saved, *costs = (
        _units(a) for a in (before - after, (before - after) * months, requests, retrieval, early)
    )
    found = (monthly, saved, *costs, saved - sum(costs))
    return MappingProxyType(dict(zip(_AMOUNTS, map(money.decimal, found), strict=True)))


def _verdict(here: str, there: StorageClass, move: Mapping[str, Any]) -> dict[str, Any]:
    net, monthly = move["x_Net"], move["x_SavedPerMonth"]
    if net is None:
        how = "state local_usd_per_gb_month in the policy" if here == LOCAL else "add it to the price table"
        return {"x_Verdict": "keep", "x_Why": f"the price of {here} is not known: {how}"}
    if net > 0:
        return {"x_Verdict": "move", "x_Why": None}
    if monthly <= 0:
        least = (
            f" ({there.name} charges at least {there.min_bytes:,} bytes)" if move["x_Bytes"] < there.min_bytes else ""
        )
        return {"x_Verdict": "keep", "x_Why": f"a month there costs {_text(-monthly)} USD more than here{least}"}
    parts = {"requests": "x_RequestCost", "retrieval": "x_RetrievalCost", "minimum durations": "x_MinimumCost"}
    costs = ", ".join(f"{_text(move[column])} USD for {what}" for what, column in parts.items() if move[column])
    why = f"it saves {_text(move['x_Saved'])} USD in {move['x_StayDays']} days and costs {costs}"
    return {"x_Verdict": "keep", "x_Why": why}


def stays(entry: Mapping[str, Any], policy: Policy) -> tuple[str, str] | None:
    """What holds an entry of the inventory where it is (pin, age, newest, expired, in place), and why.

    None for one that cannot be used, and for one that the policy wants elsewhere: of that, the move says why it stays.
    """
    if entry["x_Problem"] is not None:
        return None
    tier, age = entry["x_Tier"], entry["x_AgeDays"]
    if entry["x_Pin"] is not None:
        return "pin", f"pinned as {entry['x_Pin']}"
    if tier == "hot" and age < policy.hot.days:
        return "age", f"{age} days old; hot.days is {policy.hot.days}"
    if tier == "hot":
        return "newest", f"{age} days old, and part of one of the {policy.hot.newest} newest of its job or folder"
    if tier == "expired":
        return "expired", f"{age} days old; the policy keeps nothing beyond cold.days, {policy.cold.days}"
    wanted = (policy.warm if tier == "warm" else policy.cold).storage_class
    return ("in place", f"{tier}, and in {wanted} already") if entry["x_StorageClass"] == wanted else None


def totals(inventory: pa.Table, moves: pa.Table) -> dict[str, Any]:
    """What a plan adds up to: counts, bytes and amounts as text, of everything and of the moves that pay.

    An amount is None where entries would belong to it and none of them has a price.
    """
    rows = moves.select(["x_Verdict", "x_Bytes", *_AMOUNTS]).to_pylist()
    told: dict[str, Any] = {"objects": inventory.num_rows, "bytes": _sum(inventory["x_Bytes"]), "currency": CURRENCY}
    told["unusable"] = inventory.num_rows - inventory["x_Problem"].null_count
    for column, name in (("x_Tier", "tiers"), ("x_Pin", "pins")):
        grouped = inventory.group_by(column).aggregate([("x_Bytes", "sum"), ("x_Path", "count")]).to_pylist()
        told[name] = {
            r[column]: {"objects": r["x_Path_count"], "bytes": r["x_Bytes_sum"] or 0}
            for r in sorted(grouped, key=lambda r: r[column] or "")
            if r[column] is not None
        }
    usable = inventory.filter(pc.is_null(inventory["x_Problem"]))
    told["cost_per_month"] = _known(usable["x_CostPerMonth"].to_pylist())
    unpriced = usable.filter(pc.is_null(usable["x_CostPerMonth"]))
    told["unpriced"], told["unpriced_classes"] = unpriced.num_rows, sorted(set(unpriced["x_StorageClass"].to_pylist()))
    for verdict, name in (("move", "moves"), ("keep", "kept")):
        own = [r for r in rows if r["x_Verdict"] == verdict]
        amounts = {n: _known([r[n] for r in own]) for n in _AMOUNTS}
        told[name] = {"objects": len(own), "bytes": sum(r["x_Bytes"] for r in own)} | amounts
    return told


def _known(amounts: Sequence[Decimal | None]) -> str | None:
    """The sum as text; None where there are amounts and none of them is known."""
    return None if amounts and all(a is None for a in amounts) else f"{money.total(amounts):f}"


def _sum(column: pa.ChunkedArray) -> int:
    return sum(v for v in column.to_pylist() if v is not None)


def _units(amount: Fraction) -> int:
    """An exact amount in whole units of 1e-12, half to even."""
    return money.half_even(amount.numerator * 10**money.DIGITS, amount.denominator)


def _text(amount: Decimal) -> str:
    return f"{amount:f}".rstrip("0").rstrip(".")


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with instants as integers: Python's datetime has no ns."""
    for name in ("x_ModifiedUtc", "x_AccessedUtc"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table[name].cast(pa.int64()))
    return list(table.to_pylist())


def _table(spec: Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns = []
    for column in spec.columns:
        values = [row.get(column.name) for row in rows]
        instants = column.type == INSTANT
        columns.append(pa.array(values, pa.int64()).cast(INSTANT) if instants else pa.array(values, column.type))
    return conform(pa.table(columns, names=list(spec.names)), spec, where=spec.name)
