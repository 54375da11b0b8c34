"""Snapshots against one another: differences are those of multisets, and digests know neither order nor split."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from seedance.catalogue import gpu_instances
from tasks.core import changes, focus, snapshots, ties
from tasks.core.focus_values import Place
from tests.bills import row, text_table

COSTS = ("0", "1", "-2.5", "0.000000000001")
HOURS = (0, 11, 12, 23)


@st.composite
def bills(draw: st.DrawFn) -> list[dict[str, str]]:
    """Rows of few keys and few amounts, so that duplicates, pairs and lone rows all happen."""
    rows = []
    for _ in range(draw(st.integers(0, 7))):
        hour = draw(st.sampled_from(HOURS))
        rows.append(
            row(
                ResourceId=draw(st.sampled_from(["i-0aaaabbbbccccdddd", "vol-0aaaabbbb", "bucket"])),
                BillingAccountId=draw(st.sampled_from(["1", "2"])),
                BilledCost=draw(st.sampled_from(COSTS)),
                EffectiveCost=draw(st.sampled_from(COSTS)),
                InvoiceId=draw(st.sampled_from(["", "I1"])),
                ChargeCategory=draw(st.sampled_from(["Usage", "Usage", "Tax"])),
                ChargePeriodStart=f"2026-11-10T{hour:02d}:00:00Z",
                ChargePeriodEnd=f"2026-11-10T{hour:02d}:59:00Z",
            )
        )
    return rows


def stored(rows: list[dict[str, str]], delivery: str = "d") -> pa.Table:
    table = focus.normalise(text_table([*rows, row()]), Place("s", "f")).rows.slice(0, len(rows))
    table = table.append_column("x_Occurrence", focus.occurrences(table))
    found = ties.tie(table, RULES, gpu_instances())
    for name in found.column_names:
        table = table.append_column(name, found[name])
    table = snapshots.split_days(table)
    return table.append_column("x_Delivery", pa.array([delivery] * len(table), pa.string()))


RULES = ties.parse_rules(",".join(ties.HEADER) + "\nm,machine,^aws$" + "," * (len(ties.HEADER) - 3) + "\n", where="t")
Told = tuple[str, Decimal, Decimal, str | None]


def told(table: pa.Table) -> Counter[Told]:
    names = ("x_ChargeKey", "BilledCost", "EffectiveCost", "InvoiceId")
    return Counter(tuple(r[n] for n in names) for r in table.to_pylist())  # type: ignore[misc]


@given(bills(), bills())
def test_differences_are_those_of_multisets(old: list[dict[str, str]], new: list[dict[str, str]]) -> None:
    before, after = stored(old, "old"), stored(new, "new")
    found = changes.differences(before, after).to_pylist()
    gone: Counter[Told] = Counter()
    come: Counter[Told] = Counter()
    for r in found:
        if r["x_Change"] != "added":
            gone[r["x_ChargeKey"], r["x_FormerBilledCost"], r["x_FormerEffectiveCost"], r["x_FormerInvoiceId"]] += 1
            assert r["x_FormerDelivery"] == "old"
        if r["x_Change"] != "removed":
            come[r["x_ChargeKey"], r["BilledCost"], r["EffectiveCost"], r["InvoiceId"]] += 1
            assert r["x_Delivery"] == "new"
    assert gone == told(before) - told(after)
    assert come == told(after) - told(before)
    for name in ("BilledCost", "EffectiveCost"):
        delta = sum((r[name] or 0) - (r[f"x_Former{name}"] or 0) for r in found)
        assert delta == sum(after[name].to_pylist()) - sum(before[name].to_pylist())
    kinds = Counter(r["x_ChargeKey"] for r in found if r["x_Change"] == "added")
    assert not kinds & Counter(r["x_ChargeKey"] for r in found if r["x_Change"] == "removed")
    keys = [(r["x_ChargeKey"], r["x_Occurrence"], r["x_FormerOccurrence"]) for r in found]
    assert len(set(keys)) == len(keys)


@given(bills(), st.permutations(range(7)), st.integers(0, 7))
def test_digests_of_windows_know_neither_order_nor_split(
    rows: list[dict[str, str]], order: list[int], cut: int
) -> None:
    shuffled = [rows[i] for i in order if i < len(rows)]
    whole = changes.window_digests(stored(rows))
    assert whole == changes.window_digests(stored(shuffled))
    some, rest = (changes.window_digests(stored(part)) for part in (shuffled[:cut], shuffled[cut:]))
    for period, accounts in whole.items():
        for who, days in accounts.items():
            for day, halves in days.items():
                for half, digest in enumerate(halves):
                    parts = [f.get(period, {}).get(who, {}).get(day, [None, None])[half] for f in (some, rest)]
                    there = [p for p in parts if p is not None]
                    assert (digest is None) == (not there)
                    assert digest is None or changes.together(there) == digest


@given(bills(), bills())
def test_digests_are_equal_exactly_where_usage_is(old: list[dict[str, str]], new: list[dict[str, str]]) -> None:
    tables = stored(old), stored(new)
    digests = [changes.window_digests(t) for t in tables]
    for account in ("1", "2"):
        for half in (0, 1):
            rows = [
                Counter(
                    (r["x_ChargeKey"], r["BilledCost"], r["EffectiveCost"])
                    for r in t.to_pylist()
                    if (r["BillingAccountId"], r["ChargeCategory"]) == (account, "Usage")
                    and (r["ChargePeriodStart"].hour >= 12) == bool(half)
                )
                for t in tables
            ]
            period, day = "2026-11-01T00:00:00Z", "2026-11-10"
            found = [d.get(period, {}).get(f"aws|{account}", {}).get(day, [None, None])[half] for d in digests]
            assert (found[0] == found[1]) == (rows[0] == rows[1])
            assert [f is None for f in found] == [not r for r in rows]


@given(bills())
def test_an_account_is_invoiced_when_every_row_is(rows: list[dict[str, str]]) -> None:
    found = changes.invoiced(stored(rows)).get("2026-11-01T00:00:00Z", {})
    expected: dict[str, bool] = {}
    for r in rows:
        who = f"aws|{r['BillingAccountId']}"
        expected[who] = expected.get(who, True) and bool(r["InvoiceId"])
    assert found == expected
