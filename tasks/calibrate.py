"""Calibrate: what the bills of the days before have been beside estimates, as factors for a day that holds estimates.

Every past day is a step of its own, made from its charges in force, its usage and the prices: it knows no commit and no factor,
so the same inputs give the same factors however often the pipeline ran. The usage of a past day is that of collect and reduce.
"""

from __future__ import annotations

from typing import Any

from schemas.billing import CHARGES, PRICES
from schemas.usage import ATTACHMENTS, DEVICE_HOURLY
from tasks import collect, reduce
from tasks.core import calibrate
from tasks.core.placed import DayInputs, place
from tasks.io.lake import Lake, Step
from tasks.plan import DayPlan, Past
from tasks.settings import Settings
from tasks.step import run_step, stage_key

STAGE = "calibrate"
PAST_STAGE = "calibrate_day"
MODULES = ("tasks.calibrate",)
_SCHEMAS = (CHARGES, PRICES, DEVICE_HOURLY, ATTACHMENTS)


def calibrate_day(lake: Lake, settings: Settings, plan: DayPlan) -> tuple[Step, bool]:
    """Factors for the estimates of one day, from the windows of the days before it.

    Args:
        lake: where shards, charges and steps are.
        settings: region of what no bill has placed; scheduler and workers.
        plan: of the day; its `history` names the days before.

    Returns:
        A step without handles, and True when it was there already. Facts: `alphas`, units of 1e-12 by
        `cloud|account|family`; `verdicts`, what the windows say of each family; `windows`, how many were folded.

    Raises:
        LawError: the usage of a past day does not add up. ShardError: a past shard cannot be read.
    """
    past = [_past_day(lake, settings, plan, one) for one in plan.history]
    rows = [row for step in past for row in step.facts["rows"]]
    key = stage_key(STAGE, modules=MODULES, schemas=(), settings={"rows": rows}, inputs=())

    def compute() -> Step:
        judged = calibrate.verdicts(rows)
        facts = {
            "alphas": calibrate.fold(rows),
            "verdicts": {name: verdict.facts() for name, verdict in judged.items()},
            "windows": len({(r["window"], r["cloud"], r["account"], r["family"]) for r in rows}),
        }
        return Step({}, facts)

    return run_step(lake, STAGE, key, compute)


def _past_day(lake: Lake, settings: Settings, plan: DayPlan, past: Past) -> Step:
    """Window sums of one past day; facts: `rows` of `tasks.core.calibrate`."""
    collected, _ = collect.collect_day(lake, settings, past.day)
    accepted = collected.facts["accepted"]
    key = stage_key(
        PAST_STAGE,
        modules=(*MODULES, *collect.MODULES, *reduce.MODULES),
        schemas=_SCHEMAS,
        settings={
            "day": past.day,
            "default_region": settings.default_region.model_dump(),
            "complete": past.complete,
            "contracted": plan.contracted,
        },
        inputs=[past.charges.sha256, plan.prices.sha256, *accepted],
    )

    def compute() -> Step:
        usage, _ = reduce.reduce_day(lake, settings, past.day, accepted)
        placed = place(
            DayInputs(
                day=past.day,
                charges=lake.read(past.charges, CHARGES),
                device_hourly=lake.read(usage.handles[DEVICE_HOURLY.name], DEVICE_HOURLY),
                attachments=lake.read(usage.handles[ATTACHMENTS.name], ATTACHMENTS),
                prices=lake.read(plan.prices, PRICES),
                watermarks={},  # what is estimated on a past day is not compared
                default_region=settings.default_region.model_dump(),
                contracted=plan.contracted,
            )
        )
        rows: list[dict[str, Any]] = calibrate.window_sums(past.day, placed.pairs(), past.complete)
        return Step({}, {"rows": rows})

    if not past.complete or not past.charges.parts or not accepted:
        return Step({}, {"rows": []})
    return run_step(lake, PAST_STAGE, key, compute)[0]
