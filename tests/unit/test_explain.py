"""Explanations of small days: every level adds up, what does not is named, and hostile text stays text."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from rich.console import Console

from schemas.billing import CHARGES
from schemas.ledger import ADDRESSES, JOB_DAILY, LAYERS, RESOURCE_DAILY
from schemas.usage import JOB_RUNS, LAYER_HOURLY
from tasks.core import levels
from tasks.core.explain import Book, explain_charge, explain_job, explain_resource, layers_of_job
from tasks.core.ledger import Inputs, settle
from tasks.core.levels import AMOUNTS, Node, walk
from tasks.core.named import charge_of, named
from tasks.core.reports import job_daily, resource_daily
from tasks.errors import LawError, UsageError
from tasks.io import show_tree
from tests.tables import DAY, SCALE_SET, charge, charges, device, devices, layer, member
from tests.tables import layers as layer_table
from tests.unit.test_ledger import inputs, machine, quanta, worked_example
from tests.witness_day import prices

UNIT = Decimal("1e-12")
EVIL = "a`b[red]\x1b[31m<script>alert(1)</script>\u202e\n"


def book(day: Inputs, bills: tuple[str, ...] = ("test/delivery-1",)) -> Book:
    """The committed day that inputs lead to."""
    ledger, date = settle(day), dt.date.fromisoformat(day.day)
    tables = {
        CHARGES.name: day.charges,
        ADDRESSES.name: ledger.addresses,
        LAYERS.name: ledger.layers,
        LAYER_HOURLY.name: day.layer_hourly,
        JOB_RUNS.name: day.jobs,
        JOB_DAILY.name: job_daily(date, ledger.addresses, ledger.spans, day.jobs),
        RESOURCE_DAILY.name: resource_daily(date, ledger.addresses, ledger.spans),
    }
    return Book(day.day, 2, "bill", bills, tables)


@cache
def example() -> Book:
    return book(worked_example())


def of(node: Node, kind: str) -> list[Node]:
    return [n for _, n in walk(node) if n.kind == kind]


def money(node: Node) -> tuple[Decimal | None, ...]:
    """Amounts of a node in the quantum of the worked example."""
    return tuple(None if u is None else Decimal(u) / 10_000 for u in node.units)


def off_by_one(table: pa.Table, row: int, column: str) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] += UNIT
    return table.set_column(table.column_names.index(column), column, pa.array(values, table.schema.field(column).type))


def with_table(day: Book, name: str, table: pa.Table) -> Book:
    return replace(day, tables={**day.tables, name: table})


# --- from a charge -------------------------------------------------------------------------------------------------------


def test_charge_goes_down_to_layers_and_adds_up_on_the_way() -> None:
    (root,) = explain_charge([example()], "covered")
    assert (root.kind, root.name, money(root)[:2]) == ("charge", "covered", (0, 3))
    facts = dict(root.facts)
    assert facts["delivery"] == "test/delivery-1" and facts["ConsumedQuantity"] == "0.600000000000"
    assert facts["ChargePeriodStart"] == "2026-10-01T10:00:00Z" and "InvoiceId" not in facts
    (day,) = root.children
    assert (day.name, day.facts) == ("2026-10-01", (("revision", "2, because of bill"),))
    (hour,) = day.children
    (one,) = hour.children
    assert [hour.name, one.name] == ["2026-10-01 10:00", "i-1"]
    assert [d.name for d in one.children] == ["GPU-0", "GPU-1"]
    assert {(a.name, money(a)[1]) for a in of(root, "address")} == {
        ("A attempt 0 rank 0: work", Decimal("0.2917")), ("A attempt 0 rank 0: input_stall", Decimal("0.2083")),
        ("B attempt 0 rank 0: work", Decimal("0.7500")), ("idle", Decimal("0.2500")), ("idle", Decimal("1.5000")),
    }  # fmt: skip
    assert [(n.name.split(",")[0], money(n)[1]) for n in of(root, "layer")] == [
        ("L1", Decimal("0.7500")), ("L1", Decimal("0.2084")), ("L2", Decimal("0.0833")),
    ]  # fmt: skip


def test_pool_tells_what_the_layers_hold_in_all() -> None:
    """The pool of A's on-demand work holds the disk's too; L1's row in the layers stands beside the part of this charge."""
    (root,) = explain_charge([example()], "demand")
    pools = {n.name.split()[0]: n for n in of(root, "pool")}
    assert sorted(pools) == ["A", "B"]
    facts = dict(pools["A"].facts)
    assert facts["addresses in it"] == "2"
    assert facts["whole pool"].startswith(f"BilledCost {Decimal('0.3121') * 10_000 * UNIT:.12f}")
    rows = {
        r["x_Layer"]: r["BilledCost"]
        for r in example().tables[LAYERS.name].to_pylist()
        if r["x_JobId"] == "A" and r["BilledCost"]
    }
    for node in pools["A"].children:
        assert dict(node.facts)["whole pool"].startswith(f"BilledCost {rows[node.name.split(',')[0]]:f}")
    assert levels.total(n.units for n in pools["A"].children) == pools["A"].units


def test_every_charge_of_the_day_has_a_tree_that_starts_at_its_bill() -> None:
    for row in example().tables[CHARGES.name].to_pylist():
        (root,) = explain_charge([example()], row["x_ChargeKey"])
        assert money(root)[:2] == (row["BilledCost"] / UNIT / 10_000, row["EffectiveCost"] / UNIT / 10_000)
        leaves = [n for _, n in walk(root) if not n.children]
        assert levels.total(n.units for n in leaves) == root.units


def test_a_scale_set_under_two_spellings_is_one_resource() -> None:
    bill = charges(machine("m", "2", **member(0)), machine("n", "1", **member(1)))
    day = book(inputs(bill, devices()))
    (root,) = explain_resource([day], SCALE_SET.lower(), "ResourceId")
    assert root.units[0] == 3 * 10**12
    assert {node.name for node in of(root, "charge")} == {"m", "n"}


def two_days(first_amount: str = "-0.000000000007") -> list[Book]:
    """A disk's refund of 7 units over 30 hours: 20 on one day, 10 on the next, where it has another delivery."""
    row = charge(
        "disk", first_amount, start=DAY + dt.timedelta(hours=4), hours=30, x_Class="dependant", x_DependantId="v"
    )
    days = []
    for n, part in enumerate(("-0.000000000004", "-0.000000000003")):
        facts = {
            "x_UsageDate": DAY.date() + dt.timedelta(days=n),
            "x_DayBilledCost": Decimal(part),
            "x_DayEffectiveCost": Decimal(part),
        }
        day = inputs(charges(row | facts), devices(), day=f"2026-10-0{n + 1}")
        days.append(book(day, (f"test/delivery-{n}", "other/delivery")))
    return days


def test_charge_over_two_days_has_both_or_says_what_lies_elsewhere() -> None:
    days = two_days()
    (root,) = explain_charge(days, "disk")
    assert [(d.name, d.units[0]) for d in root.children] == [("2026-10-01", -4), ("2026-10-02", -3)]
    assert dict(root.facts)["delivery"] == "test/delivery-1"
    (part,) = explain_charge(days[:1], "disk")
    assert [d.units[0] for d in part.children] == [-4, -3]
    assert part.children[1].name == "1 other day(s): not asked for, not committed, or committed from another bill"


def test_days_that_have_the_whole_charge_and_not_its_amount_are_named() -> None:
    days = two_days()
    wrong = [
        with_table(d, CHARGES.name, set_all(d.tables[CHARGES.name], "BilledCost", Decimal("-0.000000000008")))
        for d in days
    ]
    with pytest.raises(
        LawError, match=r"charge disk occurrence 0: BilledCost is -0\.000000000008, its parts on 2 days add up to"
    ):
        explain_charge(wrong, "disk")


def set_all(table: pa.Table, column: str, value: Any) -> pa.Table:
    field = table.schema.field(column)
    return table.set_column(table.column_names.index(column), field, pa.array([value] * len(table), field.type))


def test_deliveries_that_state_other_amounts_are_trees_of_their_own() -> None:
    first, second = two_days()
    second = with_table(
        second, CHARGES.name, set_all(second.tables[CHARGES.name], "EffectiveCost", Decimal("-0.000000000009"))
    )
    trees = explain_charge([first, second], "disk")
    assert [(t.units[1], [d.units[1] for d in t.children]) for t in trees] == [(-7, [-4, -3]), (-9, [-3, -6])]


def test_rows_of_equal_key_are_trees_of_their_own() -> None:
    bill = charges(charge("twin", "1"), charge("twin", "2", x_Occurrence=1))
    trees = explain_charge([book(inputs(bill, devices()))], "twin")
    assert [(dict(t.facts)["occurrence"], t.units[0]) for t in trees] == [("0", 10**12), ("1", 2 * 10**12)]


def test_estimate_has_hours_and_no_bill() -> None:
    seen = devices(
        device(DAY, "work", 1800, job="A", instance_type="two.gpu"), device(DAY, "idle", 900, instance_type="two.gpu")
    )
    work = layer_table(
        layer(DAY, "A", "L1", 2, instance_type="two.gpu"), layer(DAY, "A", "L2", 1, instance_type="two.gpu")
    )
    day = replace(
        worked_example(), charges=charges(), device_hourly=seen, layer_hourly=work, prices=one_price(), watermarks={}
    )
    (root,) = explain_charge([book(day)], "estimate:aws/i-1")
    assert (root.kind, root.units) == ("estimate", (None, None, 6 * 10**12, None))
    assert "none yet" in dict(root.facts)["bill"]
    assert [n.units[2] for n in of(root, "layer")] == [1_333_333_333_333, 666_666_666_667]
    (job,) = explain_job([book(day)], "A")
    assert dict(of(job, "charge")[0].facts) == {"bill": "none yet"}


def one_price() -> pa.Table:
    return prices({"SkuId": "two.gpu", "ListUnitPrice": Decimal(8)})


# --- back from a job or a resource ------------------------------------------------------------------------------------


def test_job_goes_back_to_its_charges() -> None:
    (root,) = explain_job([example()], "A")
    assert dict(root.facts)["currency"] == "USD" and dict(root.facts)["team"] == "team-A"
    assert [(c.name, money(c)[:2]) for c in root.children] == [
        ("work", (Decimal("0.3121"), Decimal("0.6038"))), ("input_stall", (Decimal("0.2229"), Decimal("0.4312"))),
    ]  # fmt: skip
    (hour,) = root.children[0].children
    assert sorted((c.name, money(c)[1]) for c in hour.children) == [
        ("covered", Decimal("0.2917")), ("demand", Decimal("0.3111")), ("disk", Decimal("0.0010")),
    ]  # fmt: skip
    assert dict(next(c for c in hour.children if c.name == "disk").facts)["ResourceId"] == "vol-1"


def test_job_over_several_days_and_currencies() -> None:
    bill = charges(machine("a", "3", quantity="0.5"), machine("b", "4", quantity="0.5", BillingCurrency="EUR"))
    seen = devices(device(DAY.replace(hour=10), "work", 3600, job="A"))
    work = layer_table(layer(DAY.replace(hour=10), "A", "L1", 1))
    day = inputs(bill, seen, work)
    trees = explain_job([book(day)], "A")
    assert [(dict(t.facts)["currency"], t.units[0]) for t in trees] == [("EUR", 2 * 10**12), ("USD", 15 * 10**11)]
    by_layer = layers_of_job([book(day)], "A")
    assert [(dict(t.facts)["currency"], t.units[0]) for t in by_layer] == [("EUR", 2 * 10**12), ("USD", 15 * 10**11)]


def test_work_of_a_job_by_layer() -> None:
    """The worked example: A's work over both of its pools, layer by layer, as much as the category work."""
    (root,) = layers_of_job([example(), replace(example(), day="2026-10-02")], "A")
    (tree,) = explain_job([example()], "A")
    assert root.units == levels.total([tree.children[0].units] * 2)
    assert [(n.name, money(n)[:2]) for n in root.children] == [
        ("L1", (2 * Decimal("0.2229"), 2 * Decimal("0.4313"))), ("L2", (2 * Decimal("0.0892"), 2 * Decimal("0.1725"))),
    ]  # fmt: skip
    assert layers_of_job([example()], "nobody") == []


def test_layers_without_money_are_no_layers_of_the_job() -> None:
    """A pair of rows of one layer, one with its time and one with its FLOPs: only the first has money."""
    day = example()
    rows = day.tables[LAYERS.name].filter(pc.equal(day.tables[LAYERS.name]["x_JobId"], "A"))
    empty = rows.slice(0, 1)
    for name, value in (("x_Op", "matmul_of_it"), ("BilledCost", Decimal(0)), ("EffectiveCost", Decimal(0))):
        at = empty.schema.get_field_index(name)
        empty = empty.set_column(at, name, pa.array([value], empty.schema.field(name).type))
    more = with_table(day, LAYERS.name, pa.concat_tables([day.tables[LAYERS.name], empty]))
    (root,), (before,) = layers_of_job([more], "A"), layers_of_job([day], "A")
    assert root == before
    wrong = with_table(day, LAYERS.name, off_by_one(rows, 0, "EffectiveCost"))
    with pytest.raises(LawError, match="work of job A by layer: EffectiveCost is"):
        layers_of_job([wrong], "A")


def test_resource_is_a_resource_a_machine_or_a_device() -> None:
    (disk,) = explain_resource([example()], "vol-1", "ResourceId")
    assert money(disk)[0] == Decimal("0.2500")
    assert [c.name for c in disk.children] == ["idle", "work", "input_stall"]
    (box,) = explain_resource([example()], "i-1", "x_MachineId")
    assert money(box)[1] == Decimal("6.2104")
    (gpu,) = explain_resource([example()], "GPU-0", "x_DeviceId")
    assert {n.name for n in of(gpu, "job")} == {"A", "B", "(no job)"}
    for root in (disk, box, gpu):
        assert levels.total(n.units for n in of(root, "charge")) == root.units


# --- what does not add up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["BilledCost", "EffectiveCost", "x_PromotionalCost"])
def test_one_unit_off_is_an_error_that_names_the_level(column: str) -> None:
    table = example().tables[ADDRESSES.name]
    place = next(
        i for i, r in enumerate(table.to_pylist()) if r["x_ChargeKey"] == "demand" and r["x_Category"] == "idle"
    )
    wrong = with_table(example(), ADDRESSES.name, off_by_one(table, place, column))
    with pytest.raises(
        LawError, match=rf"charge demand / day 2026-10-01: {column} is .* its 1 parts add up to"
    ) as refusal:
        explain_charge([wrong], "demand")
    assert refusal.value.found == refusal.value.expected + 1
    assert refusal.value.ledger == column
    with pytest.raises(LawError, match=r"x_DeviceId GPU-[01], 2026-10-01, idle, USD: the daily report"):
        explain_resource([wrong], table.to_pylist()[place]["x_DeviceId"], "x_DeviceId")


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        (LAYERS.name, lambda day: explain_charge([day], "covered")),
        (LAYERS.name, lambda day: explain_job([day], "A")),
        (JOB_DAILY.name, lambda day: explain_job([day], "A")),
    ],
)
def test_layers_and_reports_are_held_against_the_addresses(name: str, ask: Callable[[Book], object]) -> None:
    rows = example().tables[name].to_pylist()
    place = next(i for i, r in enumerate(rows) if r["x_JobId"] == "A" and r["EffectiveCost"])
    wrong = with_table(example(), name, off_by_one(example().tables[name], place, "EffectiveCost"))
    with pytest.raises(
        LawError, match="pool A attempt 0" if name == LAYERS.name else "job A, 2026-10-01, .*: the daily report"
    ):
        ask(wrong)


def test_missing_addresses_rows_and_op_times_are_named() -> None:
    none = with_table(example(), ADDRESSES.name, ADDRESSES.empty())
    with pytest.raises(
        LawError, match=r"charge tax 0, day 2026-10-01: BilledCost is .*its 0 addresses add up to nothing"
    ):
        explain_charge([none], "tax")
    with pytest.raises(LawError, match="the day's charges have no such row"):
        explain_job([with_table(example(), CHARGES.name, CHARGES.empty())], "A")
    with pytest.raises(LawError, match="no op time"):
        explain_charge([with_table(example(), LAYER_HOURLY.name, LAYER_HOURLY.empty())], "covered")


def test_a_level_of_nothing_known_is_not_a_level_of_zero() -> None:
    leaf = Node("day", "d", (0, None, None, None))
    with pytest.raises(LawError, match=r"EffectiveCost is 0\.000000000000, its 1 parts add up to nothing"):
        levels.assert_levels(Node("charge", "c", (0, 0, None, None), (), (leaf,)))


# --- folding, words, hostile text -------------------------------------------------------------------------------------


def many(count: int) -> Node:
    parts = tuple(Node("hour", f"h{n:02}", (n, -n, None, 0)) for n in range(count))
    return Node("day", "d", levels.total(p.units for p in parts), (), parts)


@pytest.mark.parametrize(("count", "most"), [(5, 5), (6, 5), (100, 2)])
def test_folded_parts_are_counted_and_summed(count: int, most: int) -> None:
    folded = levels.fold(many(count), most)
    levels.assert_levels(folded)
    assert len(folded.children) == min(count, most)
    assert sum(c.folded or 1 for c in folded.children) == count
    if count > most:
        assert folded.children[-1].name == f"… {count - most + 1} more"
        assert [c.name for c in folded.children[:-1]] == [f"h{n:02}" for n in range(most - 1)]


def test_pruning_takes_levels_away_and_no_money() -> None:
    node = Node("charge", "c", many(3).units, (), (many(3),))
    assert [d for d, _ in walk(levels.prune(node, 1))] == [0, 1]
    assert levels.prune(node, 0).units == node.units


def test_json_has_exact_text_amounts() -> None:
    (root,) = explain_charge([example()], "covered")
    told = json.loads(json.dumps(levels.as_dict(root)))
    assert told["EffectiveCost"] == f"{Decimal(quanta('3')):.12f}" and told["x_EstimatedCost"] is None
    assert told["children"][0]["children"][0]["name"] == "2026-10-01 10:00"


def printed(node: Node, ledger: str = "both") -> str:
    out = io.StringIO()
    console = Console(
        file=out, markup=False, highlight=False, emoji=False, width=4000, force_terminal=True, color_system="truecolor"
    )
    for tree in show_tree.trees([node], ledger):
        console.print(tree)
    return out.getvalue()


def test_hostile_names_are_printed_as_text() -> None:
    bill = charges(machine("evil", "3", Tags=EVIL, x_MachineId=EVIL, ResourceId=EVIL))
    seen = devices(device(DAY.replace(hour=10), "work", 3600, job=EVIL, machine=EVIL, device=EVIL))
    work = layer_table(layer(DAY.replace(hour=10), EVIL, EVIL, 1))
    (root,) = explain_charge([book(inputs(bill, seen, work))], "evil")
    safe = "a`b[red]\\x1b[31m<script>alert(1)</script>\\u202e\\x0a"
    text = printed(root)
    assert safe in text
    assert "\x1b[31m" not in text and "\u202e" not in text
    page = show_tree.page("charge", [root], "both", 8)
    assert f"``{safe}``" in page and "\x1b" not in page
    assert all(line.lstrip().startswith(("-", "#", "Shown")) for line in page.splitlines() if line)
    assert {r["name"] for r in show_tree.table([root])} >= {safe}


@pytest.mark.parametrize(
    ("text", "span"), [("a", "`a`"), ("`a", "`` `a ``"), ("a``b", "```a``b```"), ("", "`  `"), (" ", "`   `")]
)
def test_code_spans_hold_any_text(text: str, span: str) -> None:
    assert show_tree.code(text) == span


@pytest.mark.parametrize(
    ("ledger", "shown", "hidden"),
    [
        ("both", AMOUNTS[:2], AMOUNTS[2:]),
        ("cash", AMOUNTS[:1], AMOUNTS[1:]),
        ("amortised", AMOUNTS[1:2], (AMOUNTS[0], *AMOUNTS[2:])),
    ],
)
def test_the_choice_of_ledger_hides_the_other(ledger: str, shown: tuple[str, ...], hidden: tuple[str, ...]) -> None:
    line = show_tree.amounts(Node("charge", "c", (1, 2, None, 0)), ledger)
    assert all(name in line for name in shown) and not any(name in line for name in hidden)
    assert "x_PromotionalCost" in show_tree.amounts(Node("charge", "c", (1, 2, None, -3)), "both")


# --- ids ------------------------------------------------------------------------------------------------------------------

KEYS = {f"{n:064x}": f"charge {n}" for n in range(16, 40)}


def test_beginning_of_a_key_is_enough_when_it_is_one() -> None:
    key = f"{16:064x}"
    assert charge_of(key, KEYS, "here") == key
    assert charge_of("estimate:aws/i", KEYS | {"estimate:aws/i-1": "estimate"}, "here") == "estimate:aws/i-1"


def test_beginning_of_several_keys_lists_them_and_says_how_many_more() -> None:
    with pytest.raises(UsageError, match=r"charge 00 is the beginning of 24 charges here\. Give more") as refusal:
        charge_of("00", KEYS, "here")
    assert str(refusal.value).endswith("… 14 more") and "charge 16" in str(refusal.value)
    assert len(refusal.value.candidates) == 24


def test_unknown_key_names_those_that_begin_most_alike() -> None:
    with pytest.raises(UsageError, match="none of 24 charges here has that key") as refusal:
        charge_of(f"{0x1F:064x}"[:-1] + "x", KEYS, "here")
    assert refusal.value.candidates[0].startswith("0" * 62 + "1")
    with pytest.raises(UsageError, match="there are none; run the night"):
        charge_of("a", {}, "here")


def test_jobs_go_by_id_by_name_or_by_another_case() -> None:
    known = {"job-1": "llama", "job-2": "bert", "job-3": "bert", "/sub/VM-1": "/sub/VM-1"}
    assert named("job", "job-1", known, "here") == named("job", "llama", known, "here") == "job-1"
    assert named("job", "/SUB/vm-1", known, "here") == "/sub/VM-1"
    with pytest.raises(UsageError, match="job bert is the name of 2 jobs here") as refusal:
        named("job", "bert", known, "here")
    assert refusal.value.candidates == ["job-2", "job-3"]


@pytest.mark.parametrize(
    ("given", "first"), [("lama", "job-1"), ("jb-2", "job-2"), ("vm-1", "/sub/VM-1"), ("jbo-3\x1b[0m", "job-3")]
)
def test_unknown_name_gives_the_nearest(given: str, first: str) -> None:
    known = {"job-1": "llama", "job-2": "bert", "job-3": "resnet", "/sub/VM-1": "/sub/VM-1"}
    with pytest.raises(UsageError, match="has that id or name") as refusal:
        named("job", given, known, "here")
    assert refusal.value.candidates[0] == first and "\x1b" not in str(refusal.value)
