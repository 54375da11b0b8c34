"""The explain flow: from a charge to its addresses, or from a job or resource back to its charges.

charge   ──► day ─► hour ─► machine ─► device ─► job and category ─► pool ─► layer
job      ──► category ─► hour ─► charge, and its work ─► layer ─► op
resource ──► category ─► job ─► hour ─► charge
"""

from __future__ import annotations

import sys

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.params import Explain
from flows.shell import main
from tasks.explain import Explained, explain_days
from tasks.io import show, show_tree
from tasks.steps import as_task

MOST_LINES = 2_000
"""Lines of an artifact; a page with more is slow to open."""


@flow(name="explain", persist_result=False)
async def explain(params: Explain) -> Explained:
    """Where the money of a charge went, or what a job or a resource pays for, adding up at each level."""
    answer: Explained = await as_task(explain_days, params.load(), params.question())
    shown, levels = answer.shown(lines=MOST_LINES)
    title = f"{answer.question.kind} {show_tree.code(answer.name)}"
    await acreate_markdown_artifact(
        show_tree.page(title, shown, params.ledger, levels),
        key="explain-tree",
        description="Every level adds up to the one above",
    )
    await acreate_table_artifact(
        show_tree.table(shown), key="explain-money", description="The same, a row a part; level 0 is the whole"
    )
    return answer


def tell(answer: Explained) -> None:
    """Print the trees for people."""
    shown, _ = answer.shown()
    for tree in show_tree.trees(shown, answer.question.ledger):
        show.console().print(tree)


if __name__ == "__main__":
    sys.exit(main(explain, Explain, "explain", for_programs=Explained.as_dict, for_people=tell))
