"""The page of a day in a browser: numbers, drill-down by mouse and keyboard, no request, no complaint, hostile names as text."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from playwright.sync_api import Page

from schemas.ledger import ADDRESSES, LAYERS
from tasks.core.tree import AMOUNTS, NO_JOB, cost_tree, negatives
from tasks.io.page import render
from tests.browser.chromium import Heard, page

HOUR = dt.datetime(2026, 10, 1, 5, tzinfo=dt.UTC)
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "<a href='javascript:document.title=1'>click</a> &amp; <b>bold</b>",
    "\u202egnp.exe \x1b[31m {{7*7}} ${7*7} %{customdata}",
)
FACTS: dict[str, Any] = {
    "revision": 3,
    "hours": [
        {"hour": "2026-10-01T05:00:00Z", "cloud": "aws", "currency": "USD", "estimated": Decimal(3), "effective": None},
        {"hour": "2026-10-01T06:00:00Z", "cloud": "aws", "currency": "USD", "estimated": None, "effective": Decimal(2)},
    ],
    "errors": [
        {
            "cloud": "aws",
            "service": HOSTILE[0],
            "currency": "USD",
            "hours": 2,
            "mape_before": "0.013000",
            "weighted_mape_before": "0.012000",
            "mape_after": None,
            "weighted_mape_after": None,
        }
    ],
    "findings": [{"finding": HOSTILE[0], "cloud": "aws", "resources": 1, "hours": 2}],
    "quality": [{"stage": "reduce", "check": HOSTILE[1], "outcome": "failed", "detail": HOSTILE[2]}],
}


def address(
    key: str, category: str, cash: str, own: str, *, job: str | None = None, cloud: str = "aws", **facts: Any
) -> dict[str, Any]:
    return {
        "x_ChargeKey": key,
        "x_Occurrence": 0,
        "x_HourUtc": HOUR,
        "x_Cloud": cloud,
        "x_Category": category,
        "x_JobId": job,
        "BilledCost": Decimal(cash),
        "EffectiveCost": Decimal(own),
        "BillingCurrency": "USD" if cloud == "aws" else "EUR",
        "ChargeCategory": "Usage",
    } | facts


def layer(job: str, name: str, cash: str, own: str) -> dict[str, Any]:
    where = {"x_HourUtc": HOUR, "x_Cloud": "aws", "x_JobId": job, "BillingCurrency": "USD", "x_Layer": name}
    return where | {"BilledCost": Decimal(cash), "EffectiveCost": Decimal(own)}


def table(spec: Any, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table([pa.array([r.get(c.name) for r in rows], c.type) for c in spec.columns], names=list(spec.names))


def below(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {column: negatives(table(ADDRESSES, rows), column) for column in AMOUNTS}


ROWS = [
    address("a", "work", "6", "9", job=HOSTILE[1]),
    address("a", "idle", "1.5", "2.25"),
    address("b", "credit", "-0.5", "-0.5", ChargeCategory="Credit"),
    address("e", "unobserved", "2", "2", ResourceId=HOSTILE[0]),
    address("f", "unobserved", "-2", "-2", ResourceId=HOSTILE[0]),
    address("c", "storage", "0.000000000001", "0.000000000001", cloud="gcp"),
    address("d", HOSTILE[3], "1", "1", cloud="gcp"),
]
LAYER_ROWS = [layer(HOSTILE[1], HOSTILE[0], "4", "6"), layer(HOSTILE[1], "model.layers.0", "2", "3")]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Heard]]:
    roots = cost_tree(table(ADDRESSES, ROWS), table(LAYERS, LAYER_ROWS))
    billed = {
        "USD": {"BilledCost": Decimal(7), "EffectiveCost": Decimal("10.75")},
        "EUR": {"BilledCost": Decimal("1.000000000001"), "EffectiveCost": Decimal("1.000000000001")},
    }
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(render("2026-10-01", roots, FACTS | {"billed": billed, "negatives": below(ROWS)}))
    with page() as (shown, heard):
        shown.goto(path.as_uri())
        shown.wait_for_selector("body[data-ready=true]")
        yield shown, heard
        asked = [url for url in heard.requests if not url.startswith(("file:", "data:", "blob:"))]
        assert asked == []
        assert heard.errors == []


def texts(shown: Page) -> list[list[str]]:
    return [row.inner_text().split("\t") for row in shown.locator("#totals tbody tr").all()]


def test_totals_are_those_of_the_ledger_and_the_difference_is_nothing(opened: tuple[Page, Heard]) -> None:
    found = texts(opened[0])
    assert ["EUR", "addressed", "1.000000000001", "1.000000000001", ""] in found
    assert ["USD", "billed", "7.000000000000", "10.750000000000", ""] in found
    assert ["USD", "addressed", "7.000000000000", "10.750000000000", ""] in found
    assert ["USD", "difference", "0", "0", ""] in found


def items(shown: Page) -> list[tuple[str, str]]:
    rows = shown.locator("#tree [role=treeitem] > .row").all()
    return [(r.locator(".name").inner_text(), r.locator(".amount").inner_text()) for r in rows if r.is_visible()]


def test_keyboard_alone_reaches_a_layer_and_comes_back(opened: tuple[Page, Heard]) -> None:
    shown, _ = opened
    shown.get_by_label("Ledger").select_option("EffectiveCost")
    shown.locator("#tree [role=treeitem]").first.focus()
    for key in ("End", "Enter"):  # USD is the last currency
        shown.keyboard.press(key)
    for _ in range(3):  # cloud, job, category
        shown.keyboard.press("ArrowRight")
        shown.keyboard.press("ArrowRight")
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("Enter")
    where = shown.locator("#place").inner_text()
    assert where.startswith("USD / aws / ") and " / work / " in where
    assert where.endswith(" / model.layers.0: 3.000000000000 USD")
    for _ in range(4):
        shown.locator("#up").press("Enter")
    assert shown.locator("#place").inner_text() == "USD: 10.750000000000 USD"


def test_mouse_drills_down_in_the_tree_and_in_the_chart(opened: tuple[Page, Heard]) -> None:
    shown, _ = opened
    shown.get_by_label("Ledger").select_option("BilledCost")
    root = shown.locator("#tree > [role=treeitem]", has_text="USD").first
    root.locator("> .row").click()
    shown.wait_for_timeout(800)  # the chart moves to its new root
    slices = shown.locator("#chart .slice text").all_text_contents()
    assert any("aws" in s for s in slices), slices
    shown.locator("#chart .slice", has_text="aws").first.click()
    shown.wait_for_timeout(800)
    assert shown.locator("#place").inner_text() == "USD / aws: 7.000000000000 USD"
    assert any("7.000000000000" in s for s in shown.locator("#chart .slice text").all_text_contents())


def test_every_level_that_is_shown_adds_up(opened: tuple[Page, Heard]) -> None:
    shown, _ = opened
    data = shown.evaluate("JSON.parse(document.getElementById('data').textContent).nodes")
    by_id = {n["id"]: n for n in data}
    assert len(data) > 10
    for node in data:
        for column in AMOUNTS:
            parts = [by_id[c]["amounts"][column] for c in node["children"]]
            known = [Decimal(p.replace(",", "")) for p in parts if p is not None]
            if known:
                assert sum(known) == Decimal(node["amounts"][column].replace(",", ""))


def test_hostile_names_appear_as_text_everywhere(opened: tuple[Page, Heard]) -> None:
    shown, _ = opened
    for _ in range(6):
        for item in shown.locator("#tree [role=treeitem][aria-expanded=false] > .row").all():
            if item.is_visible():
                item.click()
    names = [re.sub(r"^\W\s", "", name) for name, _ in items(shown)]
    assert any(HOSTILE[0] in n for n in names)
    assert any(HOSTILE[1] in n for n in names)
    assert any(NO_JOB in n for n in names)
    assert shown.title() == "Where the money of 2026-10-01 went"
    assert shown.locator("#tree img, #tree script, #tree a, #chart a, #chart img").count() == 0
    assert shown.locator("#findings td").first.inner_text() == HOSTILE[0]
    assert HOSTILE[2] in shown.locator("#quality").inner_text()
    assert shown.locator("#quality a, #quality b, #findings img").count() == 0
    shown.locator("#tree [role=treeitem]", has_text=HOSTILE[1]).last.locator("> .row").click()
    shown.wait_for_timeout(800)
    assert any(HOSTILE[1][:20] in t for t in shown.locator("#chart .slice text").all_text_contents())


def test_what_is_below_zero_stands_in_its_own_table(opened: tuple[Page, Heard]) -> None:
    shown, _ = opened
    rows = [r.inner_text().split("\t") for r in shown.locator("#negatives tbody tr").all()]
    place = f"USD / aws / {NO_JOB}"
    head = [cell.inner_text() for cell in shown.locator("#negatives th").all()]
    assert head == ["where", "EffectiveCost", "BilledCost"]
    assert [f"{place} / credit / Credit / (no resource)", "-0.500000000000", "-0.500000000000"] in rows
    assert [f"{place} / unobserved / Usage / {HOSTILE[0]}", "-2.000000000000", "-2.000000000000"] in rows
    assert shown.locator("#negatives img").count() == 0


def test_a_long_name_leaves_the_amounts_in_sight(opened: tuple[Page, Heard]) -> None:
    shown, _ = opened
    shown.locator("#negatives td").first.evaluate("cell => { cell.textContent = '/subscriptions/' + 'x'.repeat(600) }")
    assert shown.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_the_same_day_gives_the_same_bytes() -> None:
    def once() -> bytes:
        roots = cost_tree(table(ADDRESSES, ROWS[::-1]), table(LAYERS, LAYER_ROWS[::-1]))
        return render("2026-10-01", roots, FACTS | {"billed": {}, "negatives": below(ROWS[::-1])})

    assert once() == once()


def test_an_empty_day_has_a_page(tmp_path: Path) -> None:
    nothing = {
        "revision": 1,
        "hours": [],
        "errors": [],
        "findings": [],
        "quality": [],
        "billed": {},
        "negatives": below([]),
    }
    path = tmp_path / "empty.html"
    path.write_bytes(render("2026-10-02", cost_tree(table(ADDRESSES, []), table(LAYERS, [])), nothing))
    with page() as (shown, heard):
        shown.goto(path.as_uri())
        shown.wait_for_selector("body[data-ready=true]")
        assert "No charge and no estimate on this day." in shown.inner_text("body")
        shown.click("#up")
        shown.select_option("#ledger", "BilledCost")
        assert heard.errors == []


def test_a_click_folds_and_unfolds_and_the_chart_shows_markup_as_it_is(tmp_path: Path) -> None:
    name = "<b>bold</b> &amp; <i>it</i>"
    money = [address("a", "work", "1", "1", job=name)]
    roots = cost_tree(table(ADDRESSES, money), table(LAYERS, [layer(name, "l", "1", "1")]))
    path = tmp_path / "report.html"
    path.write_bytes(render("2026-10-01", roots, FACTS | {"billed": {}, "negatives": below(money)}))
    with page() as (shown, heard):
        shown.goto(path.as_uri())
        shown.wait_for_selector("body[data-ready=true]")
        root = shown.locator("#tree > [role=treeitem]")
        told = []
        for _ in range(3):
            told.append((root.get_attribute("aria-expanded"), [name for name, _ in items(shown)]))
            root.locator("> .row").click()
        assert [state for state, _ in told] == ["true", "false", "true"]
        assert [len(names) for _, names in told] == [2, 1, 2]
        texts = shown.locator("#chart .slice text").all_text_contents()
        assert any(text.startswith(name) for text in texts), texts
        assert heard.errors == []
