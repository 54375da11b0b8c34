"""What npm installs for the tests is pinned by version and digest, and names no place to fetch it from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "emulators"
PACKAGE: dict[str, Any] = json.loads((FOLDER / "package.json").read_text(encoding="utf-8"))
LOCK: dict[str, Any] = json.loads((FOLDER / "package-lock.json").read_text(encoding="utf-8"))


def test_every_package_is_pinned_by_digest_and_has_no_address() -> None:
    packages = {name: facts for name, facts in LOCK["packages"].items() if name}
    assert len(packages) > 100
    assert [name for name, facts in packages.items() if "resolved" in facts] == []
    assert [name for name, facts in packages.items() if not facts.get("integrity", "").startswith("sha512-")] == []


def test_what_is_asked_for_is_what_is_pinned() -> None:
    for name, version in PACKAGE["dependencies"].items():
        assert version[0].isdigit(), f"{name}: a range"
        assert LOCK["packages"][f"node_modules/{name}"]["version"] == version
