"""Restate: what a new revision of a usage day changed, as a table that goes into the revision's own commit."""

from __future__ import annotations

import logging
from dataclasses import replace

import pyarrow as pa

from schemas.ledger import ADDRESSES
from schemas.restatements import RESTATEMENTS
from seedance.errors import StoreError
from tasks.core import restate
from tasks.io.lake import Handle, Lake, Step
from tasks.io.parquet import narrow
from tasks.plan import DayPlan
from tasks.step import run_step, stage_key

STAGE = "restate"
log = logging.getLogger(__name__)


def restate_day(lake: Lake, plan: DayPlan, addresses: Handle) -> tuple[Step, bool]:
    """`report_restatements__daily` of a day that is about to be committed.

    Args:
        lake: where the parent commit is.
        plan: of the day; its parent is what the new revision is compared with.
        addresses: core_cost__addresses of the new revision.

    Returns:
        The step, whose handle belongs among those of the commit, and whether it was there already.

    Raises:
        StoreError: the storage refused; carries url, path.
        SchemaError: the parent's addresses lack a column that is compared.
    """
    parent = next((one for one in lake.commits(plan.day) if one.n == plan.parent), None) if plan.parent else None
    before = None if parent is None else _whole(lake, plan, parent.handles.get(ADDRESSES.name))
    former = None if parent is None else _whole(lake, plan, parent.handles.get(RESTATEMENTS.name))
    key = stage_key(
        STAGE,
        modules=("tasks.restate",),
        schemas=[ADDRESSES, RESTATEMENTS],
        settings={"day": plan.day, "revision": plan.revision, "cause": plan.cause},
        inputs=[h.sha256 for h in (addresses, before, former) if h is not None],
    )

    def compute() -> Step:
        sides = (
            _addresses(lake, before),
            _addresses(lake, addresses) if before is not None else _addresses(lake, None),
        )
        known = RESTATEMENTS.empty() if former is None else lake.read(former, RESTATEMENTS)
        table = restate.restatements(plan.day, *sides, known, revision=plan.revision, cause=plan.cause)
        return Step({RESTATEMENTS.name: lake.handle(RESTATEMENTS, plan.day, [table])})

    return run_step(lake, STAGE, key, compute)


def _whole(lake: Lake, plan: DayPlan, handle: Handle | None) -> Handle | None:
    """The handle; None, with a warning, where its objects are lost: a new revision is then the only way back."""
    try:
        for part in () if handle is None else handle.parts:
            lake.read_part(part)
    except StoreError as error:
        if "expected" not in error.facts:  # refused, not lost
            raise
        log.warning(
            "%s: what revision %d restates is not told, %s is lost", plan.day, plan.revision, error.facts["path"]
        )
        return None
    return handle


def _addresses(lake: Lake, handle: Handle | None) -> pa.Table:
    if handle is None:
        return narrow(ADDRESSES, list(restate.COLUMNS)).empty()
    # A parent that an older release wrote is read as its own version: what is compared stands in every one.
    return lake.read(handle, replace(ADDRESSES, version=handle.version), columns=list(restate.COLUMNS))
