"""The page of a day: one HTML file that needs nothing else, neither a server nor a network.

Data goes in as JSON text, names reach the document as text alone, and a content security policy forbids every request. The same
day gives the same bytes. Knows how it looks; what it shows is computed in `tasks.core.tree` and in the reports.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from tasks.core.tree import AMOUNTS, Node, amount

HERE = Path(__file__).parent
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
LEDGER_NAMES = {
    "EffectiveCost": "EffectiveCost (amortised)",
    "BilledCost": "BilledCost (cash)",
    "x_EstimatedCost": "estimates, not billed yet",
}
ERRORS = ("mape_before", "weighted_mape_before", "mape_after", "weighted_mape_after")
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2", "#e45756", "#eeca3b", "#79706e", "#d67195")


def shown(value: Decimal | str | None) -> str:
    """Twelve digits after the point, thousands apart; empty for a missing amount."""
    return "" if value is None else f"{Decimal(value):,.12f}"


def render(day: str, roots: Sequence[Node], facts: Mapping[str, Any]) -> bytes:
    """The page as UTF-8 HTML.

    Args:
        day: UTC usage day.
        roots: the cost tree, one root a currency.
        facts: billed (both ledgers by currency), revision, hours (rows of estimate beside bill by hour and cloud), errors
            (rows: mean absolute percentage errors by cloud, service and currency), findings and quality (rows), negatives
            (places and amounts below zero by column of AMOUNTS).
    """
    nodes, ids = _nodes(roots)
    figures = {
        f"{root.name}|{column}": _icicle(root, ids, column)
        for root in roots
        for column in AMOUNTS
        if _has(root, column)
    }
    empty = json.loads(go.Figure(go.Icicle(ids=[], labels=[], parents=[], values=[])).to_json())
    payload = {
        "nodes": nodes,
        "figures": {f"{r.name}|{c}": figures.get(f"{r.name}|{c}", empty) for r in roots for c in AMOUNTS},
        "hours": _hours(facts["hours"]),
    }
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>Where the money of {day} went</title>",
        f"<style>{_asset('page.css')}</style></head><body>",
        f"<h1>Where the money of {day} went</h1>",
        f"<p>Revision {facts['revision']} of the day. Every amount has twelve digits and adds up exactly.</p>",
        _totals(roots, facts["billed"]),
        _explorer(),
        _negatives(facts["negatives"]),
        _estimates(facts["errors"]),
        _table(
            "Findings", "findings", ("finding", "cloud", "resources", "hours"), facts["findings"], "Nothing was found."
        ),
        _quality(facts["quality"]),
        f'<script type="application/json" id="data">{_embedded(payload)}</script>',
        f"<script>{_script()}</script>",
        f"<script>{_asset('page.js')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts).encode()


# --- the tree and its charts ------------------------------------------------------------------------------------------


def _nodes(roots: Sequence[Node]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    nodes: list[dict[str, Any]] = []
    ids: dict[int, str] = {}

    def walk(node: Node, parent: str, currency: str) -> None:
        ids[id(node)] = str(len(nodes) + 1)
        nodes.append(
            {
                "id": ids[id(node)],
                "parent": parent,
                "name": node.name,
                "kind": "" if node.kind == "rest" else node.kind,
                "currency": currency,
                "amounts": {c: None if amount(node, c) is None else shown(amount(node, c)) for c in AMOUNTS},
                "children": [],
            }
        )
        mine = nodes[-1]
        for child in node.children:
            walk(child, mine["id"], currency)
            mine["children"].append(ids[id(child)])

    for root in roots:
        walk(root, "", root.name)
    return nodes, ids


def _has(root: Node, column: str) -> bool:
    return root.units[column] is not None


def _icicle(root: Node, ids: Mapping[int, str], column: str) -> dict[str, Any]:
    """Areas are the leaves above zero; texts are exact and hold what is below zero as well."""
    order = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(_category_names(root))}
    rows: list[tuple[str, str, str, float, str, str]] = []

    def walk(node: Node, parent: str, category: str) -> bool:
        here = node.name if node.kind == "category" else category
        at = len(rows)
        leaf = not node.children
        units = node.units[column] or 0
        rows.append(
            (
                ids[id(node)],
                parent,
                _as_text(node.name),
                float(units) / 1e12 if leaf and units > 0 else 0.0,
                shown(amount(node, column)),
                order.get(here, "#c8ced6"),
            )
        )
        grown = leaf and units > 0
        for child in node.children:
            grown = walk(child, ids[id(node)], here) or grown
        if not grown:
            del rows[at:]
        return grown

    walk(root, "", "")
    columns = list(zip(*rows, strict=True)) if rows else [()] * 6
    figure = go.Figure(
        go.Icicle(
            ids=columns[0],
            parents=columns[1],
            labels=columns[2],
            values=columns[3],
            customdata=columns[4],
            marker={"colors": columns[5], "line": {"width": 1, "color": "#fff"}},
            texttemplate="%{label}<br>%{customdata}",
            hovertemplate="%{label}<br>%{customdata} " + _as_text(root.name) + "<extra></extra>",
            branchvalues="remainder",
            tiling={"orientation": "h"},
            maxdepth=4,
            sort=False,
        ),
        {"margin": {"t": 8, "l": 8, "r": 8, "b": 8}, "template": None, "uniformtext": {"minsize": 10, "mode": "hide"}},
    )
    return dict(json.loads(figure.to_json()))


def _category_names(root: Node) -> list[str]:
    return sorted({c.name for cloud in root.children for job in cloud.children for c in job.children})


def _as_text(name: str) -> str:
    """The chart library reads a few tags in labels: what a name holds must appear as it is."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _hours(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Estimate beside bill by hour: lines with marks of their own shape, so that no colour is needed to tell them apart."""
    if not rows:
        return None
    figure = go.Figure(layout={"margin": {"t": 24, "l": 64, "r": 16, "b": 40}, "template": None})
    names = sorted({(r["cloud"], r["currency"]) for r in rows})
    for n, (cloud, currency) in enumerate(names):
        mine = [r for r in rows if (r["cloud"], r["currency"]) == (cloud, currency)]
        for column, dash, symbol in (("estimated", "dot", "circle-open"), ("effective", "solid", "square")):
            figure.add_scatter(
                x=[r["hour"] for r in mine],
                y=[None if r[column] is None else float(r[column]) for r in mine],
                name=f"{_as_text(cloud)} {column}, {_as_text(currency)}",
                mode="lines+markers",
                line={"dash": dash, "color": COLOURS[n % len(COLOURS)]},
                marker={"symbol": symbol},
            )
    figure.update_yaxes(title="per hour", rangemode="tozero")
    return dict(json.loads(figure.to_json()))


# --- HTML -------------------------------------------------------------------------------------------------------------


def _explorer() -> str:
    options = "".join(f'<option value="{c}">{name}</option>' for c, name in LEDGER_NAMES.items())
    return (
        "<h2>From the bill to layers</h2><p>Select a row with the mouse or with the arrow keys and Enter; the chart shows what "
        "lies below it. Areas show what is above zero; every amount is exact.</p>"
        f'<div class="bar"><label>Ledger <select id="ledger">{options}</select></label>'
        '<button id="up" type="button">Up one level</button><strong id="place" aria-live="polite"></strong></div>'
        '<div class="split"><div id="chart" role="img" aria-label="Money by cloud, job, category and layer; the same as in the '
        'tree beside it"></div><ul id="tree" role="tree" aria-label="Money by cloud, job, category and layer"></ul></div>'
    )


def _totals(roots: Sequence[Node], billed: Mapping[str, Mapping[str, Decimal]]) -> str:
    rows = []
    for root in roots:
        wanted = billed.get(root.name, {})
        for what in ("billed", "addressed", "difference"):
            cells = []
            for column in ("BilledCost", "EffectiveCost"):
                told, want = amount(root, column) or Decimal(0), wanted.get(column, Decimal(0))
                value = {"billed": want, "addressed": told, "difference": want - told}[what]
                cells.append("0" if what == "difference" and not value else shown(value))
            cells.append(shown(amount(root, "x_EstimatedCost")) if what == "addressed" else "")
            name = ' class="sum"' if what == "difference" else ""
            numbers = "".join(f'<td class="n">{c}</td>' for c in cells)
            rows.append(f"<tr{name}><td>{html.escape(root.name)}</td><td>{what}</td>{numbers}</tr>")
    head = "<th>currency</th><th></th>" + "".join(
        f'<th class="n">{n}</th>' for n in ("BilledCost (cash)", "EffectiveCost (amortised)", "estimate")
    )
    body = "".join(rows) or '<tr><td colspan="5">No charge and no estimate on this day.</td></tr>'
    return f'<table id="totals"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _negatives(below: Mapping[str, Sequence[tuple[Sequence[str], Decimal]]]) -> str:
    """A row a place, with its amount in each ledger in which it lies below zero."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for column in LEDGER_NAMES:
        for path, value in below[column]:
            empty = {"where": " / ".join(path), **dict.fromkeys(LEDGER_NAMES, "")}
            rows.setdefault(tuple(path), empty)[column] = shown(value)
    columns = ("where", *(c for c in LEDGER_NAMES if below[c]))
    title = "Below zero: credits, refunds, corrections"
    return _table(title, "negatives", columns, list(rows.values()), "Nothing is below zero.")


def _estimates(errors: Sequence[Mapping[str, Any]]) -> str:
    """Mean absolute percentage errors as ratios, before and after calibration; a figure that is not known stays empty."""
    columns = ("cloud", "service", "currency", "hours", *ERRORS)
    rows = [{c: "" if r[c] is None else r[c] for c in columns} for r in errors]
    nothing = "No hour has both a bill and an estimate."
    table = _table("Estimated beside billed", "errors", columns, rows, nothing)
    about = (
        "<p>Mean absolute percentage errors as ratios (0.01 is one percent) over hours that have both. After calibration is "
        "empty on a day that the bill covers whole: it has no estimates to calibrate. Hours whose bill is in another currency "
        "than the price are left out.</p>"
    )
    return f"{table}{about}<div id='hours'></div>"


def _quality(rows: Sequence[Mapping[str, Any]]) -> str:
    """Checks that failed and what was counted; those that passed lie folded below."""
    head = "".join(f"<th>{n}</th>" for n in ("stage", "outcome", "check", "detail"))

    def table(name: str, some: Sequence[Mapping[str, Any]]) -> str:
        cells = []
        for r in some:
            outcome = html.escape(str(r["outcome"]))
            rest = "".join(f"<td>{html.escape(str(r[c] or ''))}</td>" for c in ("check", "detail"))
            cells.append(f'<tr><td>{html.escape(str(r["stage"]))}</td><td class="{outcome}">{outcome}</td>{rest}</tr>')
        body = "".join(cells) or '<tr><td colspan="4">None.</td></tr>'
        return f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    passed = [r for r in rows if r["outcome"] == "passed"]
    told = [r for r in rows if r["outcome"] != "passed"]
    folded = f"<details><summary>{len(passed):,} checks passed</summary>{table('passed', passed)}</details>"
    return f"<h2>Data quality</h2>{table('quality', told)}{folded}"


def _table(title: str, name: str, columns: Iterable[str], rows: Sequence[Mapping[str, Any]], nothing: str) -> str:
    if not rows:
        return f"<h2>{title}</h2><p>{nothing}</p>"
    names = list(columns)
    kinds = {c: ' class="n"' if c in ("hours", *LEDGER_NAMES, *ERRORS) else "" for c in names}
    head = "".join(f"<th{kinds[c]}>{c.replace('_', ' ')}</th>" for c in names)
    body = "".join(
        "<tr>" + "".join(f"<td{kinds[c]}>{html.escape(str(r[c]))}</td>" for c in names) + "</tr>" for r in rows
    )
    return f'<h2>{title}</h2><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _embedded(payload: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return (
        text.replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


@cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    return str(get_plotlyjs()).replace("</script", "<\\/script")
