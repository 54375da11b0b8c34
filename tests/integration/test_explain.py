"""Explanations of the bundled day: every kind of charge, every job, resources; the flow, its artifacts and its command."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from prefect.client.orchestration import get_client
from pydantic import ValidationError

from flows.explain import explain, tell
from flows.params import Explain
from flows.shell import main
from schemas.billing import CHARGES
from schemas.ledger import ADDRESSES
from tasks.core import money
from tasks.core.levels import AMOUNTS, Units, total, walk
from tasks.errors import LayoutError, UsageError
from tasks.explain import Explained, Question, explain_days
from tasks.io.lake import Lake
from tasks.settings import Settings, load
from tests import nights
from tests.conftest import ROOT

DAY = "2026-10-01"
SAMPLE = str(ROOT / "samples" / "seedance.toml")


@dataclass(frozen=True)
class Night:
    """The committed bundled day."""

    settings: Settings
    charges: pa.Table
    addresses: pa.Table
    totals: list[dict[str, Any]]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Night:
    settings = load(SAMPLE, lake=str(tmp_path_factory.mktemp("explain") / "lake"), workers=1)
    assert nights.run(settings, DAY).failed == {}
    lake = Lake.open(settings.lake)
    head = lake.head(DAY)
    assert head is not None
    tables = [lake.read(head.handles[spec.name], spec) for spec in (CHARGES, ADDRESSES)]
    return Night(settings, *tables, head.body["facts"]["totals"])


def ask(night: Night, kind: str, given: str, **facts: Any) -> Explained:
    return explain_days(night.settings, Question(kind, given, DAY, DAY, **facts))


def units(row: dict[str, Any], *names: str) -> Units:
    return tuple(None if n is None or row[n] is None else money.units(row[n]) for n in names)


def test_every_kind_of_charge_adds_up_from_its_bill_to_its_layers(night: Night) -> None:
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in night.charges.to_pylist():
        kind = ("x_Cloud", "x_Class", "ChargeCategory", "PricingCategory", "CommitmentDiscountStatus", "ServiceName")
        kinds.setdefault((*(row[k] for k in kind), row["EffectiveCost"] < 0), row)
    assert len(kinds) > 10
    seen = set()
    for row in kinds.values():
        answer = ask(night, "charge", row["x_ChargeKey"])
        tree = next(t for t in answer.trees if dict(t.facts)["occurrence"] == str(row["x_Occurrence"]))
        whole = units(row, "BilledCost", "EffectiveCost", "x_PromotionalCost")
        assert (tree.units[0], tree.units[1], tree.units[3]) == whole
        assert total(n.units for _, n in walk(tree) if not n.children) == tree.units
        seen |= {n.kind for _, n in walk(tree)}
        day = next(n for n in tree.children if n.name == DAY)
        assert day.units[:2] == units(row, "x_DayBilledCost", "x_DayEffectiveCost")
    assert seen == {"charge", "day", "hour", "machine", "device", "address", "pool", "layer"}


def test_jobs_and_what_has_no_job_are_the_whole_day(night: Night) -> None:
    jobs = [j for j in pc.unique(night.addresses["x_JobId"]).to_pylist() if j is not None]
    sums: dict[tuple[str, str], list[Units]] = defaultdict(list)
    for job in jobs:
        for tree in ask(night, "job", job).trees:
            assert total(n.units for _, n in walk(tree) if not n.children) == tree.units
            for category in tree.children:
                sums[dict(tree.facts)["currency"], category.name].append(category.units)
    for row in night.addresses.filter(pc.is_null(night.addresses["x_JobId"])).to_pylist():
        sums[row["BillingCurrency"], row["x_Category"]].append(units(row, *AMOUNTS))
    wanted: dict[tuple[str, str], list[Units]] = defaultdict(list)
    for row in night.totals:
        wanted[row["BillingCurrency"], row["x_Category"]].append(units(row, *AMOUNTS[:3]))
    assert {k: total(v)[:3] for k, v in sums.items()} == {k: _padded(v) for k, v in wanted.items()}


def _padded(amounts: list[Units]) -> Units:
    return total((*u, None) for u in amounts)[:3]


@pytest.mark.parametrize("column", ["ResourceId", "x_MachineId", "x_DeviceId"])
def test_a_resource_holds_the_addresses_that_name_it(night: Night, column: str) -> None:
    value = next(v for v in pc.unique(night.addresses[column]).to_pylist() if v is not None)
    if column == "x_MachineId" and value in pc.unique(night.addresses["ResourceId"]).to_pylist():
        column = "ResourceId"  # a resource of the bill goes before a machine of the same name
    answer = ask(night, "resource", value.upper() if column == "ResourceId" else value)
    assert answer.name == value and {dict(t.facts)["looked for in"] for t in answer.trees} == {column}
    mine = night.addresses.filter(pc.equal(night.addresses[column], value)).to_pylist()
    assert total(t.units for t in answer.trees) == total(units(r, *AMOUNTS) for r in mine)


def test_every_committed_day_is_read_unless_days_are_named(night: Night) -> None:
    job = pc.unique(night.addresses["x_JobId"]).drop_null().to_pylist()[0]
    assert explain_days(night.settings, Question("job", job)).days == [DAY]
    with pytest.raises(
        UsageError, match=r"no day is committed on 2026-09-30 .*Committed are: 2026-10-01 to 2026-10-01"
    ):
        explain_days(night.settings, Question("job", job, "2026-09-30", "2026-09-30"))
    with pytest.raises(UsageError, match="Nearest:\n  " + job):
        explain_days(night.settings, Question("job", job + "x", DAY, DAY))


def test_days_of_a_former_release_are_named_with_what_helps(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.explain._OF_JOB", (replace(ADDRESSES, version=ADDRESSES.version + 1),))
    with pytest.raises(LayoutError, match=f"backfill --first-day {DAY} --last-day {DAY}"):
        explain_days(night.settings, Question("job", "any"))


def test_few_lines_leave_out_the_deepest_levels(night: Night) -> None:
    key = next(r["x_ChargeKey"] for r in night.charges.to_pylist() if r["x_Class"] == "machine")
    answer = ask(night, "charge", key, most=3)
    whole, levels = answer.shown()
    few, fewer = answer.shown(lines=5)
    assert levels == 8 and fewer < levels
    assert sum(1 for t in few for _ in walk(t)) <= 5 < sum(1 for t in whole for _ in walk(t))
    none, zero = answer.shown(lines=0)
    assert zero == 0 and [t.children for t in none] == [()]


# --- the flow -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("prefect_harness")
def test_the_flow_leaves_a_page_and_a_table(night: Night) -> None:
    job = pc.unique(night.addresses["x_JobId"]).drop_null().to_pylist()[0]
    params = Explain(settings=SAMPLE, lake=night.settings.lake, job=job, day=DAY, most=3)
    answer: Explained = asyncio.run(explain(params))
    page, table = asyncio.run(_artifacts())
    assert page.startswith(f"# job `{job}`") and "… " in page and "BilledCost" in page
    rows = json.loads(table)
    assert {r["what"] for r in rows} >= {"job", "category", "hour", "charge", "folded"}
    roots = [r["EffectiveCost"] for r in rows if r["level"] == "0"]
    shown = (*answer.trees, *answer.layers)
    assert roots == [str(money.decimal(t.units[1] or 0)) if t.units[1] is not None else "" for t in shown]


async def _artifacts() -> tuple[str, str]:
    async with get_client() as server:
        found = {a.key: a.data for a in await server.read_artifacts()}
    return str(found["explain-tree"]), str(found["explain-money"])


@pytest.mark.usefixtures("prefect_harness")
def test_the_command_prints_a_tree_or_json(
    night: Night, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(r for r in night.charges.to_pylist() if r["x_Class"] == "machine")
    words = [
        "explain",
        "--settings",
        SAMPLE,
        "--lake",
        night.settings.lake,
        "--day",
        DAY,
        "--charge",
        row["x_ChargeKey"][:20],
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--most", "3", "--ledger", "amortised"])
    assert run() == 0
    text = capsys.readouterr().out
    assert f"charge {row['x_ChargeKey']}" in text and f"EffectiveCost {row['EffectiveCost']:,.12f}" in text
    assert "└── day 2026-10-01" in text and "BilledCost" not in text.splitlines()[0]
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    assert run() == 0
    told = json.loads(capsys.readouterr().out)
    assert told["name"] == row["x_ChargeKey"] and told["days"] == [DAY]
    assert told["trees"][0]["EffectiveCost"] == f"{row['EffectiveCost']:f}"
    monkeypatch.setattr(sys, "argv", [*words[:-2], "--job", "nobody"])
    assert run() == 1
    assert "UsageError: job nobody: none of" in capsys.readouterr().err


def run() -> int:
    return main(explain, Explain, "explain", for_programs=Explained.as_dict, for_people=tell)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "explain: Value error, give exactly one of charge, job and resource; found none"),
        (["--charge", "a", "--job", "b"], "give exactly one of charge, job and resource; found charge and job"),
        (["--charge", " "], "found none"),
        (["--job", "b", "--day", "2999-01-01"], "--day: Value error, 2999-01-01 is in the future"),
        (["--job", "b", "--last-day", DAY], "last_day 2026-10-01 is given without day"),
        (["--job", "b", "--day", DAY, "--last-day", "2026-09-01"], "day 2026-10-01 lies after last_day 2026-09-01"),
        (["--job", "b", "--ledger", "gold"], "--ledger: Input should be 'both', 'cash' or 'amortised'"),
        (["--job", "b", "--most", "1"], "--most: Input should be greater than or equal to 2"),
        (["--job", "b", "--depth", "9"], "--depth: Input should be less than or equal to 8"),
    ],
)
def test_the_command_refuses_bad_arguments(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["explain", *words])
    assert run() == 2
    assert message in capsys.readouterr().err


def test_the_form_says_what_each_field_is() -> None:
    fields = Explain.model_json_schema()["properties"]
    assert list(fields) == [
        "settings",
        "lake",
        "charge",
        "job",
        "resource",
        "day",
        "last_day",
        "ledger",
        "most",
        "depth",
    ]
    assert all(f["title"] and f["description"] for f in fields.values())
    assert fields["ledger"]["enum"] == ["both", "cash", "amortised"]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Explain.model_validate({"job": "a", "jobs": "b"})


def test_nothing_is_written(night: Night) -> None:
    before = sorted(p for p in Path(night.settings.lake).rglob("*"))
    ask(night, "resource", pc.unique(night.addresses["ResourceId"]).drop_null().to_pylist()[0])
    assert sorted(p for p in Path(night.settings.lake).rglob("*")) == before
