"""Run every check on this machine's GPU and write what was found: `python -m tests.gpu.record FOLDER`.

FOLDER gets `checks.json` (facts of each check, versions, the device) and `shards.tar.gz` (what the probe wrote). Exit status: 0
when all checks passed or there is no GPU, 1 when one failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NEEDS_TORCH = "skipped: no torch in this Python; a GPU cannot be used without it."
NEEDS_GPU = "skipped: no NVIDIA GPU that torch can use ({why}); nothing was checked and nothing was written."


def main() -> int:
    """Check and record."""
    parser = argparse.ArgumentParser(prog="tests/gpu/record.sh", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", action="append", metavar="NAME", help="these checks alone")
    args = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print(NEEDS_TORCH)
        return 0
    import torch

    if not torch.cuda.is_available():
        print(NEEDS_GPU.format(why=f"torch {torch.__version__}"))
        return 0
    from tests.gpu import checks

    args.folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "device": checks.device_facts()}
    failed = 0
    for name in args.only or checks.CHECKS:
        start = time.monotonic()
        try:
            told[name] = checks.CHECKS[name]("cuda", args.folder)
            outcome = "ok"
        except checks.NotHere as missing:
            told[name], outcome = {"skipped": str(missing)}, f"skipped: {missing}"
        except Exception:  # noqa: BLE001 - every check gets its turn
            told[name], outcome = {"failed": traceback.format_exc()}, "FAILED"
            traceback.print_exc()
            failed += 1
        print(f"{name:10} {time.monotonic() - start:6.1f} s  {outcome}", flush=True)
        (args.folder / "checks.json").write_text(json.dumps(told, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"{len(told) - 2 - failed} passed or skipped, {failed} failed; see {args.folder / 'checks.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
