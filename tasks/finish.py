"""The end of a night: reports as of its day, the quality and the page of each computed day, and the record of the run.

Whatever of this fails is told; the days themselves are published by then.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from seedance.errors import SeedanceError
from tasks import differences, page, pareto, publish
from tasks.errors import PipelineError
from tasks.io.deliveries import listed_sources
from tasks.io.lake import Lake
from tasks.night import billed_of, heads, open_lake
from tasks.settings import Settings

log = logging.getLogger(__name__)


@dataclass
class Finished:
    """Paths that were repaired, committed days whose bill has changed since, notes for people, and what failed, by name."""

    repaired: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def finish(
    settings: Settings, as_of: str, run_id: str, rows: Mapping[str, list[dict[str, Any]]], facts: Mapping[str, Any]
) -> Finished:
    """Repair `report/`, publish what is as of a day, then quality and page of each computed day, and record the run.

    Args:
        settings: where the lake is.
        as_of: newest usage day of the run.
        run_id: id of the run.
        rows: checks of each day that was computed or that a gate refused, for report_quality__runs.
        facts: what is kept of the run.
    """
    lake = open_lake(settings)
    done = Finished(repaired=lake.repair())
    if lake.committed_days():
        _try(done, "report_bridge__monthly", lambda: done.stale.extend(publish.publish_bridge(lake, settings, as_of)))
        _try(done, "report_bills__differences", lambda: _differences(lake, settings, as_of))
        _try(done, "report_pareto__configs", lambda: done.notes.extend(_pareto(lake, settings, as_of)))
    _try(done, "raw/bills", lambda: done.notes.extend(_unnamed(lake, settings)))
    for day, checks in rows.items():
        publish.publish_quality(lake, day, checks)
    for day in sorted({*rows, *_lacking(lake, settings, as_of)}):
        _try(done, f"page of {day}", lambda day=day: _page(lake, settings, day))  # type: ignore[misc]
    publish.record_run(lake, run_id, facts)
    return done


def _try(done: Finished, name: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        if not isinstance(error, PipelineError | SeedanceError):
            log.error("%s failed in a way that has no message of its own", name, exc_info=error)
        done.failed[name] = f"{type(error).__name__}: {error}"


def _differences(lake: Lake, settings: Settings, as_of: str) -> None:
    step, _ = differences.report_differences(lake, settings)
    for handle in step.handles.values():
        lake.publish_as_of(handle, as_of)


def _pareto(lake: Lake, settings: Settings, as_of: str) -> list[str]:
    """Publish the front; what no configuration carries, for people."""
    facts = pareto.publish_pareto(lake, settings, as_of)
    about = {
        "nameless": "run(s) name no configuration and are in no row of report_pareto__configs",
        "mixed": "run(s) are billed in several currencies and are in no row of report_pareto__configs",
    }
    told = [f"{facts[name]['runs']:,} {words}" for name, words in about.items() if facts[name]["runs"]]
    return told + [f"{day} is not in report_pareto__configs: {why}" for day, why in sorted(facts["skipped"].items())]


def _unnamed(lake: Lake, settings: Settings) -> list[str]:
    """A note when raw/bills has sources that the settings do not name."""
    unnamed = sorted({*listed_sources(lake.store)} - {source.name for source in settings.bills})
    if not unnamed:
        return []
    told = f"raw/bills holds {len(unnamed)} source(s) of bills that the settings do not name: {', '.join(unnamed)}"
    return [f"{told}. Their charges count in no day; to have them counted, name each in [[bills]]"]


def _lacking(lake: Lake, settings: Settings, as_of: str) -> list[str]:
    """Days within the look-back whose page is not that of their head."""
    first = (dt.date.fromisoformat(as_of) - dt.timedelta(days=settings.look_back_days)).isoformat()
    return page.pages_wanted(lake, heads(settings, [d for d in lake.committed_days() if first <= d <= as_of]))


def _page(lake: Lake, settings: Settings, day: str) -> None:
    head = lake.head(day)
    if head is not None:  # a gate may refuse a day that was never published: it has checks and nothing to show
        page.publish_page(lake, head, billed_of(settings, [day]))
