"""Gates: every promise of every contract, and every measure, has a table that breaks it and stops the day."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from seedance.schema import INSTANT, Column, Table
from tasks import gates
from tasks.core import contracts
from tasks.core.contracts import violations
from tasks.errors import GateError
from tasks.gates import TABLES, Measure
from tasks.settings import Settings
from tests.tables import charge, charges, device, devices

DAY = "2026-10-01"
AT = dt.datetime(2026, 10, 1, tzinfo=dt.UTC)


def plain(column: Column, number: int = 0) -> Any:
    """A value that keeps the column's promises; distinct for distinct numbers where the type allows it."""
    if column.values is not None:
        return column.values[0]
    number += column.min or 0
    kind = column.type
    if pa.types.is_string(kind):
        return f"v{number}"
    if kind == INSTANT:
        return AT + dt.timedelta(hours=number)
    if pa.types.is_date(kind):
        return AT.date()
    if pa.types.is_boolean(kind):
        return True
    if pa.types.is_decimal(kind):
        return Decimal(number)
    if pa.types.is_map(kind):
        return []
    return kind.to_pandas_dtype()(number)


def rows(spec: Table, *changes: dict[str, Any]) -> pa.Table:
    """Rows that keep the contract but for the changes; not conformed, as something damaged would arrive."""
    made = [{c.name: plain(c, n) for c in spec.columns} | change for n, change in enumerate(changes)]
    fields = [pa.field(c.name, c.type) for c in spec.columns]
    return pa.table([pa.array([r[f.name] for r in made], f.type) for f in fields], schema=pa.schema(fields))


def broken() -> list[Any]:
    """(stage, table, promise, columns changed) for every promise of every contract that a gate holds."""
    found = []
    for stage, specs in TABLES.items():
        for spec in specs:
            for c in spec.columns:
                values: list[tuple[str, Any]] = []
                if not c.null:
                    values.append(("nulls", None))
                if c.values is not None:
                    values.append(("outside_set", "never heard of"))
                if c.min is not None:
                    values.append(("below_min", c.min - 1))
                if c.max is not None:
                    values.append(("above_max", c.max + 1))
                found += [pytest.param(stage, spec, p, {c.name: v}, id=f"{spec.name}.{c.name}-{p}") for p, v in values]
    return found


@pytest.mark.parametrize(("stage", "spec", "promise", "change"), broken())
def test_every_promise_of_every_contract_can_be_broken_and_is_seen(
    stage: str, spec: Table, promise: str, change: dict[str, Any]
) -> None:
    (column,) = change
    assert not any(r[p] for r in violations(rows(spec, {}, {}), spec) for p in contracts.PROMISES)
    found = [r for r in violations(rows(spec, {}, change), spec) if r[promise]]
    assert [(r["table"], r["column"], r[promise]) for r in found] == [(spec.name, column, 1)]


@pytest.mark.parametrize("stage", TABLES)
@pytest.mark.parametrize("promise", contracts.PROMISES)
def test_a_broken_promise_stops_the_day_at_its_stage(stage: str, promise: str) -> None:
    cases = [c.values for c in broken() if c.values[0] == stage and c.values[2] == promise]
    if promise == "repeated_keys":
        spec = TABLES[stage][0]
        table = pa.concat_tables([rows(spec, {}), rows(spec, {})])
    elif cases:
        _, spec, _, change = cases[0]
        table = rows(spec, {}, change)
    else:  # no contract of the stage promises it, so no expectation may claim it
        told = gates.check(stage, DAY, {s.name: rows(s, {}) for s in TABLES[stage]}, [])
        assert not any(promise.replace("_", " ") in r["x_Check"] for r in told)
        return
    with pytest.raises(GateError, match=f"gate of {stage}, {DAY}") as told:
        gates.check(stage, DAY, {spec.name: table}, [])
    assert spec.name in str(told.value)
    assert told.value.facts["stage"] == stage


def test_a_table_that_keeps_its_contract_passes_and_says_what_was_checked() -> None:
    for stage, specs in TABLES.items():
        found = gates.check(stage, DAY, {s.name: rows(s, {}, {}) for s in specs}, [])
        assert {r["x_Outcome"] for r in found} == {"passed"}
        assert any("nulls against the contract" in r["x_Check"] for r in found)
        assert any("repeated keys" in r["x_Check"] for r in found)


def test_empty_tables_pass() -> None:
    for stage, specs in TABLES.items():
        assert gates.check(stage, DAY, {s.name: s.empty() for s in specs}, [])


def test_quarantine_beyond_the_limit_stops_the_day_and_names_the_setting() -> None:
    facts = {"quarantined": [{"share_ppm": 200_000}, {"share_ppm": 100_000}]}
    measures = gates.collect_measures(facts, Settings(max_quarantined_ppm=299_999))
    with pytest.raises(GateError, match=r"expected 0 to 299,999, found 300,000.*max_quarantined_ppm"):
        gates.check("collect", DAY, {}, measures)
    assert gates.check("collect", DAY, {}, gates.collect_measures(facts, Settings(max_quarantined_ppm=300_000)))


def test_charges_in_the_wrong_place_stop_the_day() -> None:
    good = charges(charge("a", "1"))
    assert {r["x_Outcome"] for r in gates.check("bill", DAY, {}, gates.bill_measures(good))} == {"passed"}
    back = charges(charge("a", "1", hours=-1))
    with pytest.raises(GateError, match="end before they start"):
        gates.check("bill", DAY, {}, gates.bill_measures(back))
    elsewhere = charges(charge("a", "1") | {"x_UsageDate": dt.date(2026, 11, 1)})
    with pytest.raises(GateError, match="outside their period"):
        gates.check("bill", DAY, {}, gates.bill_measures(elsewhere))
    after = charges(charge("a", "1", hours=24) | {"x_UsageDate": dt.date(2026, 10, 2)})  # the end is exclusive
    with pytest.raises(GateError, match="outside their period, rows: expected 0 to 0, found 1"):
        gates.check("bill", DAY, {}, gates.bill_measures(after))
    assert gates.check("bill", DAY, {}, gates.bill_measures(charges(charge("a", "1", hours=0))))
    period = charges(charge("a", "1") | {"BillingPeriodEnd": AT})
    with pytest.raises(GateError, match="billing periods"):
        gates.check("bill", DAY, {}, gates.bill_measures(period))


def test_more_than_an_hour_in_an_hour_stops_the_day() -> None:
    fits = devices(device(AT, "work", 1_800), device(AT, "idle", 1_800))
    assert gates.check("reduce", DAY, {}, gates.reduce_measures(fits))
    with pytest.raises(GateError, match="longest device-hour"):
        gates.check("reduce", DAY, {}, gates.reduce_measures(devices(device(AT, "work", 3_600), device(AT, "idle", 1))))


def test_a_cent_that_is_lost_stops_the_day_in_its_ledger() -> None:
    bill = charges(charge("a", "1.00"))
    told = pa.table(
        {
            "BillingCurrency": ["USD"],
            "BilledCost": pa.array([Decimal("1.000000000001")], pa.decimal128(38, 12)),
            "EffectiveCost": pa.array([Decimal("1")], pa.decimal128(38, 12)),
        }
    )
    spans = pa.table({"x_Ns": [1, 3], "x_Category": ["unobserved", "work"]})
    with pytest.raises(
        GateError, match=r"BilledCost billed beside addressed, 1e-12 USD: expected 0 to 0, found 1"
    ) as e:
        gates.check("reconcile", DAY, {}, gates.reconcile_measures(bill, told, spans, Settings()))
    assert len(e.value.facts["failed"]) == 1
    with pytest.raises(GateError, match="max_unobserved_ppm"):
        measures = gates.reconcile_measures(charges(), told.slice(0, 0), spans, Settings(max_unobserved_ppm=249_999))
        gates.check("reconcile", DAY, {}, measures)


def test_a_report_that_does_not_add_up_stops_the_day() -> None:
    def table(amount: str) -> pa.Table:
        value = pa.array([Decimal(amount)], pa.decimal128(38, 12))
        return pa.table({"BilledCost": value, "EffectiveCost": value, "x_EstimatedCost": value})

    assert gates.check("publish", DAY, {}, gates.publish_measures(table("1"), {"report": table("1")}))
    with pytest.raises(GateError, match=r"report\.BilledCost beside the addresses"):
        gates.check("publish", DAY, {}, gates.publish_measures(table("1"), {"report": table("2")}))
    great = table("98765432109876543210.000000000001")  # far beyond 64 bits: told as it is
    with pytest.raises(GateError, match="found 98,765,432,109,876,543,209,000,000,000,001"):
        gates.check("publish", DAY, {}, gates.publish_measures(table("1"), {"report": great}))


def test_a_warning_is_told_and_does_not_stop() -> None:
    found = gates.check("collect", DAY, {}, [Measure("late, ppm", 5, 1, severity="warning")])
    assert [(r["x_Outcome"], r["x_Detail"]) for r in found] == [("failed", "expected 0 to 1, found 5")]


def test_an_unknown_figure_passes_and_says_so() -> None:
    (found,) = gates.check("reconcile", DAY, {}, [Measure("share, ppm", None, 1)])
    assert found["x_Outcome"] == "passed" and "found unknown" in found["x_Detail"]


def test_the_library_is_not_imported_with_the_flows() -> None:
    code = "import flows.nightly, sys; sys.exit('great_expectations' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
