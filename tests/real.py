"""Real exports and recordings, which are never committed: where they are, and what happens when they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def real_data(*parts: str) -> Path:
    """Path below SEEDANCE_REAL_DATA (else `../shared/data`); skips the test when absent, fails it under CI=true."""
    folder = Path(os.environ.get("SEEDANCE_REAL_DATA") or ROOT.parent / "shared" / "data")
    path = folder.joinpath(*parts)
    if path.exists():
        return path
    reason = f"no real data at {path}; set SEEDANCE_REAL_DATA to the folder that holds it"
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason)
    pytest.skip(reason)
