"""The tree of a day: what is folded, how large it gets, and what has no name."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from seedance.schema import MONEY
from tasks.core.tree import AMOUNTS, LEAST, NO_JOB, PLACE, Node, assert_adds_up, cost_tree, leaves, negatives
from tasks.errors import LawError


def rows(level: str, places: list[tuple[str | None, str]], amount: str = "1") -> pa.Table:
    """Rows of USD on one cloud: job, and its category or layer."""
    columns = {
        "BillingCurrency": pa.array(["USD"] * len(places)),
        "x_Cloud": pa.array(["aws"] * len(places)),
        "x_JobId": pa.array([job for job, _ in places], pa.string()),
        level: pa.array([name for _, name in places], pa.string()),
    }
    money = pa.array([Decimal(amount)] * len(places), MONEY)
    return pa.table(columns | dict.fromkeys(AMOUNTS, money))


def count(node: Node) -> int:
    return 1 + sum(map(count, node.children))


def test_a_large_day_is_folded_until_a_browser_can_show_it() -> None:
    jobs, parts = 150, 150
    work = rows("x_Category", [(f"job-{n}", "work") for n in range(jobs)], str(parts))
    layers = rows("x_Layer", [(f"job-{n}", f"layer.{m}") for n in range(jobs) for m in range(parts)])
    (whole,) = cost_tree(work, layers, nodes=10**9)
    (root,) = cost_tree(work, layers)
    assert count(whole) > 20_000 and count(root) <= 4_000
    assert_adds_up(root)
    assert root.units == whole.units == dict.fromkeys(AMOUNTS, jobs * parts * 10**12)
    shown = root.children[0].children
    assert LEAST <= len(shown) < jobs and shown[-1].kind == "rest"
    assert shown[-1].name == f"({jobs - len(shown) + 1} smaller)" and shown[-1].folded == jobs - len(shown) + 1
    (small,) = cost_tree(work, layers, nodes=1)
    assert len(small.children[0].children) == LEAST  # no tree is cut to nothing
    assert sum(leaf.units["BilledCost"] or 0 for leaf in leaves(small)) == small.units["BilledCost"]


def test_layers_that_do_not_add_up_to_their_work_are_no_tree() -> None:
    work = rows("x_Category", [("j", "work")])
    assert cost_tree(work, rows("x_Layer", [("j", "l")]))
    with pytest.raises(
        LawError, match=r"category 'work': BilledCost is 1.000000000000, its parts add up to 0.999999999999"
    ):
        cost_tree(work, rows("x_Layer", [("j", "l")], "0.999999999999"))


def test_a_job_that_is_called_like_none_is_not_none() -> None:
    (root,) = cost_tree(rows("x_Category", [(NO_JOB, "work"), (None, "idle")]), rows("x_Layer", []))
    jobs = root.children[0].children
    assert [job.name for job in jobs] == [NO_JOB, NO_JOB]
    assert {job.children[0].name for job in jobs} == {"work", "idle"}


def places(*found: tuple[str, str, str, str | None, str]) -> pa.Table:
    """Addresses without a job of the category unobserved: currency, cloud, kind of charge, resource, BilledCost."""
    currency, cloud, kind, resource, amount = zip(*found, strict=True)
    columns = {
        "BillingCurrency": currency, "x_Cloud": cloud, "x_JobId": [None] * len(found),
        "x_Category": ["unobserved"] * len(found), "ChargeCategory": kind, "ResourceId": resource,
    }  # fmt: skip
    assert set(columns) == set(PLACE)
    texts = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    return pa.table(texts | {"BilledCost": pa.array([Decimal(a) for a in amount], MONEY)})


def test_a_refund_is_told_though_its_category_is_above_zero() -> None:
    day = places(
        ("USD", "aws", "Usage", "i-1", "9"),
        ("USD", "aws", "Usage", "i-1", "-0.5"),
        ("USD", "aws", "Credit", "i-1", "-2"),
        ("EUR", "azure", "Usage", "/Sets/GPU", "-0.25"),
        ("EUR", "azure", "Usage", "/sets/gpu", "-0.000000000001"),
        ("USD", "gcp", "Credit", None, "-7"),
    )
    assert negatives(day, "BilledCost") == [
        (("EUR", "azure", NO_JOB, "unobserved", "Usage", "/sets/gpu"), Decimal("-0.250000000001")),
        (("USD", "gcp", NO_JOB, "unobserved", "Credit", "(no resource)"), Decimal(-7)),
        (("USD", "aws", NO_JOB, "unobserved", "Credit", "i-1"), Decimal(-2)),
        (("USD", "aws", NO_JOB, "unobserved", "Usage", "i-1"), Decimal("-0.5")),
    ]


def test_many_places_below_zero_are_folded_and_none_is_lost() -> None:
    day = places(*(("USD", "aws", "Usage", f"i-{n}", f"-{n}") for n in range(1, 8)), ("EUR", "gcp", "Tax", None, "-1"))
    found = negatives(day, "BilledCost", most=3)
    assert [(path[-1], value) for path, value in found] == [
        ("(no resource)", -1), ("i-7", -7), ("i-6", -6), ("(5 smaller)", -15)
    ]  # fmt: skip
