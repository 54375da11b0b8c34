"""Bias of estimates before and after calibration, in per cent of what was billed later.

Fleet histories of sixteen days on AWS and GCP with hidden biases inside the band, noise of 1 % a row and bills that come late:
every night takes in what was delivered, learns from the 14 days before, and estimates what the bill has not reached. The value
is the bias of all estimates of the last eight nights after alpha, the peer's the same before; Azure bills by the day, so its
noise is a third. The targets are 0.5 % for GPU instances and 0.8 % for storage.
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests import histories
from tests.fleet.history import HistorySpec, write_history

NIGHTS = 16
JUDGED = range(8, NIGHTS)
SPECS = (
    HistorySpec(seed=3, days=NIGHTS),
    HistorySpec(seed=5, days=NIGHTS, cloud="gcp"),
    HistorySpec(seed=7, days=NIGHTS, cloud="azure", noise_ppm=3_000),
)


def run() -> list[dict[str, Any]]:
    """Rows of the table: one a cloud and family."""
    return [row for spec in SPECS for row in _rows(spec)]


def _rows(spec: HistorySpec) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        history = write_history(spec, root / "fleet")
        settings = histories.settings_for(history, root / "drop", root / "lake")
        found = {}
        for night, day in enumerate(history.days):
            history.deliver(night, root / "drop")
            lake = histories.take_in(settings)
            if night in JUDGED:
                found[night] = histories.estimate(lake, settings, day)
    biases = histories.biases(history, found)
    limits = histories.targets(history, biases)
    return [
        {
            "name": f"calibrate.{spec.cloud}.{family}",
            "value": abs(after) * 100,
            "unit": "% bias",
            "peer": f"before alpha; at most {limits[family]:.1%}",
            "peer_value": abs(before) * 100,
            "ratio": abs(before) / abs(after) if after else None,
            "rows": hours,
            "peak_mb": None,
            "runs": 1,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        for family, (before, after, hours) in biases.items()
    ]
