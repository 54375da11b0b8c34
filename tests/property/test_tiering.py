"""Plans of checkpoint moves: amounts against another way to compute them, and what holds for any listing and policy."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from schemas.checkpoints import FOUND
from tasks.core.tier_policy import Policy, parse
from tasks.core.tiering import DAY_NS, GB, Moment, StorageClass, find_newest, parse_prices, plan, price_move, totals
from tasks.tier import PRICES
from tests.tables import build

END = dt.datetime(2026, 10, 2, tzinfo=dt.UTC)
END_NS = int(END.timestamp()) * 10**9
AWS = ("S3 Standard", "S3 Standard-IA", "S3 Glacier Instant Retrieval")
TABLE = PRICES.read_text()
AMOUNTS = ("x_SavedPerMonth", "x_Saved", "x_RequestCost", "x_RetrievalCost", "x_MinimumCost", "x_Net")
BASE = {
    "cloud": "aws",
    "region": "us-east-1",
    "warm": {"class": AWS[0], "days": 90},
    "cold": {"class": AWS[2], "days": 900},
}
CLASSES = list(parse_prices(TABLE, parse(BASE, where="test"), where="t").by_name.values())
TWELVE = Decimal("1e-12")


def monthly(cls: StorageClass, size: int) -> Decimal:
    """A month of an object, term by term, from the table's own text."""
    row = next(line.split(",") for line in TABLE.splitlines() if line.split(",")[1] == cls.name)
    price, min_kb, over_kb, over_standard_kb = Decimal(row[4]), int(row[8]), int(row[9]), int(row[10])
    billed = max(Decimal(size), Decimal(min_kb) * 1024) + over_kb * 1024
    return billed / GB * price + Decimal(over_standard_kb) * 1024 / GB * Decimal("0.023")


@given(
    st.one_of(st.integers(0, 300_000), st.integers(0, 2**44)),
    st.sampled_from(CLASSES),
    st.sampled_from(CLASSES),
    st.integers(0, 400),
    st.integers(1, 3_000),
    st.decimals(0, 5, places=2),
    st.sampled_from([5 * 2**20, 2**26, 2**32]),
)
def test_amounts_are_those_of_another_computation(
    size: int, here: StorageClass, there: StorageClass, age: int, stay: int, reads: Decimal, part: int
) -> None:
    found = price_move(size, here, there, age, stay, reads, part)
    with localcontext() as context:
        context.prec = 80
        months = Decimal(stay) * 12 / 365
        before, after = monthly(here, size), monthly(there, size)
        read_here, read_there = (Decimal(c.read.numerator) / c.read.denominator for c in (here, there))
        fee_here, fee_there = (Decimal(c.retrieval.numerator) / c.retrieval.denominator for c in (here, there))
        pieces = -(-size // part) or 1
        writes = 1 if pieces == 1 else pieces + 2
        again, gb = reads * months, Decimal(size) / GB
        expected = {
            "x_SavedPerMonth": before - after,
            "x_Saved": (before - after) * months,
            "x_RequestCost": writes * Decimal(there.write.numerator) / there.write.denominator
            + pieces * read_here
            + again * pieces * (read_there - read_here),
            "x_RetrievalCost": gb * fee_here + again * gb * (fee_there - fee_here),
            "x_MinimumCost": (max(here.min_days - age, 0) * before + max(there.min_days - stay, 0) * after) * 12 / 365,
        }
        for name, value in expected.items():
            told = found[name]
            assert told is not None
            assert abs(told - value) <= TWELVE / 2 * Decimal("1.0000001"), name
        saved, *costs = (found[n] or Decimal(0) for n in AMOUNTS[1:5])
        assert found["x_Net"] == saved - sum(costs)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any order of days and classes, with and without pins, a pattern and a price of local disk."""
    days = sorted(draw(st.lists(st.integers(0, 400), min_size=3, max_size=3, unique=True)))
    return parse(
        {
            "cloud": "aws",
            "region": "us-east-1",
            "pattern": draw(st.sampled_from([None, r"^(?P<job>[^/]+)/step-(?P<step>\d+)/"])),
            "local_usd_per_gb_month": draw(st.sampled_from([None, Decimal("0.08"), Decimal(0)])),
            "hot": {"days": days[0], "newest": draw(st.integers(0, 3))},
            "warm": {
                "class": draw(st.sampled_from(AWS)),
                "days": days[1] + 1,
                "reads_per_month": draw(st.integers(0, 2)),
            },
            "cold": {"class": draw(st.sampled_from(AWS)), "days": days[2] + 2},
            "pins": {
                "best": draw(st.sampled_from([[], ["*best*"]])),
                "legal_hold": draw(st.sampled_from([[], ["a/*"]])),
            },
        },
        where="test",
    )


@st.composite
def listings(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Objects of three jobs and of none, of any class, some unusable."""
    apis = ["STANDARD", "STANDARD_IA", "GLACIER_IR", "GLACIER", "DEEP_ARCHIVE", "OUTPOSTS", None]
    rows: list[dict[str, Any]] = []
    for n in range(draw(st.integers(0, 20))):
        folder = draw(st.sampled_from(["a/step-1", "a/step-2", "b/step-1", "b/step-30", "c/step-1", "loose", "a/best"]))
        path = f"{folder}/{n}{draw(st.sampled_from(['', '-best']))}"
        if draw(st.integers(0, 9)) == 0:
            rows.append({"x_Path": path, "x_Problem": "gone"})
            continue
        written = END - dt.timedelta(hours=draw(st.integers(-24, 24 * 500)))
        row: dict[str, Any] = {"x_Path": path, "x_Bytes": draw(st.integers(0, 2**38)), "x_ModifiedUtc": written}
        row["x_ApiClass"] = draw(st.sampled_from(apis))
        if draw(st.booleans()):
            row["x_AccessedUtc"] = written + dt.timedelta(hours=draw(st.integers(1, 2_000)))
        rows.append(row)
    return rows


def make(rules: Policy, rows: list[dict[str, Any]], chunk: int, ended: frozenset[str], local: bool) -> list[pa.Table]:
    prices = parse_prices(TABLE, rules, where="t")
    parts = [build(FOUND, rows[i : i + chunk]) for i in range(0, len(rows), chunk)]
    moment = Moment(END_NS, find_newest(parts, rules), ended)
    planned = [plan("f", part, rules, prices, moment, local=local) for part in parts] or [
        plan("f", FOUND.empty(), rules, prices, moment, local=local)
    ]
    return [pa.concat_tables([p[i] for p in planned]).sort_by("x_Path") for i in (0, 1)]


@given(policies(), listings(), st.sampled_from([frozenset(), frozenset("ab")]), st.booleans(), st.integers(0, 2**32))
def test_what_holds_for_every_plan(
    rules: Policy, rows: list[dict[str, Any]], ended: frozenset[str], local: bool, seed: int
) -> None:
    inventory, moves = make(rules, rows, 7, ended, local)
    entries = {r["x_Path"]: r for r in inventory.to_pylist()}
    wanted = {r["x_Path"]: r for r in moves.to_pylist()}
    assert sorted(entries) == sorted(r["x_Path"] for r in rows)  # nothing dropped, nothing made up
    for path, entry in entries.items():
        if entry["x_Pin"] or entry["x_Problem"] or entry["x_Tier"] in ("hot", "expired", None):
            assert path not in wanted
        assert (entry["x_Tier"] is None) == bool(entry["x_Pin"] or entry["x_Problem"])
    for move in wanted.values():
        entry = entries[move["x_Path"]]
        tier = rules.warm if entry["x_Tier"] == "warm" else rules.cold
        assert move["x_ToClass"] == tier.storage_class != entry["x_StorageClass"]
        assert 0 < move["x_StayDays"] == tier.days - entry["x_AgeDays"]
        pays = move["x_Net"] is not None and move["x_Net"] > 0
        assert move["x_Verdict"] == ("move" if pays else "keep")
        assert (move["x_Why"] is None) == pays
    told = totals(inventory, moves)
    assert told["objects"] == len(rows)
    assert told["bytes"] == sum(r.get("x_Bytes", 0) for r in rows)
    assert told["objects"] == told["unusable"] + sum(
        side["objects"] for group in ("tiers", "pins") for side in told[group].values()
    )
    for verdict, side in (("move", told["moves"]), ("keep", told["kept"])):
        own = [m for m in wanted.values() if m["x_Verdict"] == verdict]
        assert (side["objects"], side["bytes"]) == (len(own), sum(m["x_Bytes"] for m in own))
        for name in AMOUNTS:
            assert Decimal(side[name]) == sum((m[name] for m in own if m[name] is not None), Decimal(0))
        costs = [Decimal(side[n]) for n in AMOUNTS[2:5]]
        assert Decimal(side["x_Net"]) == Decimal(side["x_Saved"]) - sum(costs)
    shuffled = random.Random(seed).sample(rows, len(rows))
    assert make(rules, shuffled, 3, ended, local) == [inventory, moves]


@given(policies(), listings(), st.integers(1, 400))
def test_time_only_makes_older(rules: Policy, rows: list[dict[str, Any]], later: int) -> None:
    """Looked at later, an entry is never in a hotter tier."""
    order = {"hot": 0, "warm": 1, "cold": 2, "expired": 3, None: 4}
    prices = parse_prices(TABLE, rules, where="t")
    found = build(FOUND, rows)
    tiers = []
    for end in (END_NS, END_NS + later * DAY_NS):
        moment = Moment(end, find_newest([found], rules))
        inventory, _ = plan("f", found, rules, prices, moment, local=False)
        tiers.append({r["x_Path"]: order[r["x_Tier"]] for r in inventory.to_pylist()})
    assert all(tiers[0][path] <= tiers[1][path] for path in tiers[0])
