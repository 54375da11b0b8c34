"""A fleet to folders: what has arrived, what arrives late, and the bill with its restatement.

`<root>/telemetry` is the first drop, `<root>/late/telemetry` the second; `<root>/bills/<cloud>` the first delivery of the
bill, `<root>/restated/bills/<cloud>` the second. Each second folder is copied over the first to let it happen. Fleets of
several clouds lie side by side in one root.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seedance.schema import DEVICE_SAMPLES, STEP_WINDOWS
from seedance.shard import parse_name
from tests.fleet import export, export_azure, export_gcp
from tests.fleet.arithmetic import UNIT
from tests.fleet.bill import Charge, charges, instant
from tests.fleet.model import Fleet
from tests.fleet.telemetry import Shard, shards
from tests.fleet.timeline import Timeline, observe
from tests.fleet.truth import Truth, true_ledger, usage_days

EXPORTS: dict[str, Callable[[Fleet, list[Charge], int], list[tuple[str, bytes]]]] = {
    "aws": export.export_files,
    "azure": export_azure.export_files,
    "gcp": export_gcp.export_files,
}
KEPT_PPM = 600_000
"""Part of a damaged shard's bytes that arrives."""


@dataclass
class Written:
    """What was written, as paths below the root."""

    telemetry: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    bill: list[str] = field(default_factory=list)
    restated: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    """Shards of the first drop that are cut short."""
    duplicates: list[str] = field(default_factory=list)
    """Shards of the first drop whose bytes are there under another sequence number."""


def telemetry_files(
    fleet: Fleet, timeline: Timeline
) -> tuple[dict[str, bytes], dict[str, bytes], list[str], list[str]]:
    """Shards of the first and of the second drop by path, and which of the first are damaged or come twice."""
    first: dict[str, bytes] = {}
    second: dict[str, bytes] = {}
    corrupt, twice = [], []
    for shard in shards(timeline):
        place = shard.machine, shard.hour
        if shard.table == DEVICE_SAMPLES.name and place in fleet.late:
            second[shard.path] = shard.data
        elif shard.table == DEVICE_SAMPLES.name and place in fleet.corrupt:
            first[shard.path] = shard.data[: len(shard.data) * KEPT_PPM // 1_000_000]
            corrupt.append(shard.path)
        else:
            first[shard.path] = shard.data
            if shard.table == STEP_WINDOWS.name and place in fleet.duplicated:
                twin = _twin(shard)
                first[twin] = shard.data
                twice.append(twin)
    return first, second, corrupt, twice


def _twin(shard: Shard) -> str:
    name = parse_name(shard.path)
    return f"{shard.path.rsplit('/', 1)[0]}/{name.producer}-{name.seq + 1_000}-{name.sha16}.parquet"


def write_fleet(fleet: Fleet, root: Path | str, *, timeline: Timeline | None = None) -> Written:
    """Writes both drops and both deliveries of a fleet."""
    base = Path(root)
    written = Written()
    first, second, corrupt, twice = telemetry_files(fleet, timeline or observe(fleet))
    written.telemetry = _put(base, "telemetry", first)
    written.late = _put(base, "late/telemetry", second)
    written.corrupt = [f"telemetry/{path}" for path in corrupt]
    written.duplicates = [f"telemetry/{path}" for path in twice]
    folder = f"bills/{fleet.spec.cloud}"
    written.bill = _put(base, folder, dict(bill_files(fleet, 1)))
    if fleet.spec.restated:
        written.restated = _put(base, f"restated/{folder}", dict(bill_files(fleet, 2)))
    return written


def bill_files(fleet: Fleet, delivery: int = 1) -> list[tuple[str, bytes]]:
    """Path below the bucket or container and bytes of each file of one delivery, as the fleet's cloud delivers it."""
    return EXPORTS[fleet.spec.cloud](fleet, charges(fleet, delivery), delivery)


def _put(root: Path, folder: str, files: dict[str, bytes]) -> list[str]:
    for path, data in files.items():
        target = root / folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return sorted(f"{folder}/{path}" for path in files)


def truth_summary(*told: tuple[Fleet, Timeline]) -> str:
    """True totals by usage day, cloud, currency and category of fleets side by side, as JSON; money as text."""
    days: dict[str, dict[str, dict[str, Any]]] = {}
    for fleet, timeline in told:
        for day_ns in usage_days(fleet):
            truth = true_ledger(fleet, timeline=timeline, day_ns=day_ns)
            days.setdefault(date_text(day_ns), {})[fleet.spec.cloud] = {
                currency: _totals(truth, currency) for currency in sorted({a.currency for a in truth.addresses})
            }
    return json.dumps({"days": dict(sorted(days.items()))}, indent=1) + "\n"


def _totals(truth: Truth, currency: str) -> dict[str, Any]:
    found = truth.by_category(currency)
    categories = {
        name: {"BilledCost": money(cash), "EffectiveCost": money(own), "x_EstimatedCost": money(estimate)}
        for name, (cash, own, estimate) in found.items()
    }
    total = {
        "BilledCost": money(sum(v[0] for v in found.values())),
        "EffectiveCost": money(sum(v[1] for v in found.values())),
    }
    return {"categories": categories, "total": total}


def date_text(day_ns: int) -> str:
    """The day of an instant, YYYY-MM-DD."""
    return instant(day_ns).date().isoformat()


def money(units: int) -> str:
    """Units of 1e-12 as decimal text."""
    whole, part = divmod(abs(units), UNIT)
    return f"{'-' if units < 0 else ''}{whole}.{part:012}"
