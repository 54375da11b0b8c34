"""Nights without Prefect: run one, and tell what it left behind."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from flows.night import Run, run_night
from tasks.settings import BillSource, Settings
from tasks.steps import directly

QUALITY = "report_quality__runs"


def settings_for(fleet: Path, lake: Path, **facts: object) -> Settings:
    """Settings of a lake over a fleet's drop folders, one bill source for each cloud that has one, on one worker."""
    clouds = sorted(path.name for path in (fleet / "bills").glob("*"))
    bills = tuple(BillSource(name=cloud, url=str(fleet / "bills" / cloud)) for cloud in clouds)
    defaults: dict[str, object] = {
        "lake": str(lake),
        "telemetry": str(fleet / "telemetry"),
        "bills": bills,
        "workers": 1,
        "buckets": 2,
    }
    return Settings(**(defaults | facts))  # type: ignore[arg-type]


def run(settings: Settings, day: str, *, first_day: str | None = None) -> Run:
    """One night up to a day."""
    return asyncio.run(run_night(settings, day, directly, first_day=first_day))


def published(lake: Path) -> dict[str, str]:
    """Digest of every file that readers see, the quality table excepted, and of every day's head commit."""
    files = {p.relative_to(lake).as_posix(): p for p in sorted((lake / "report").rglob("*")) if p.is_file()}
    found = {name: _digest(path) for name, path in files.items() if QUALITY not in name}
    for day in sorted((lake / "days").iterdir()):
        head = max(day.glob("*.json"), key=lambda p: int(p.stem))
        found[f"days/{day.name}/{head.stem}"] = _digest(head)
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
