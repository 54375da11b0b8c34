"""Steps in a process of their own, which then prints how many bytes it holds more than before the probe was imported."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path

from tests.bench._training import USUAL, Training

STEPS = 40


def held() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(probed: bool) -> None:
    """Steps without the probe, then as many with it, or without for comparison."""
    training = Training(**USUAL)
    for _ in range(STEPS):
        training.step()
    before = held()
    with tempfile.TemporaryDirectory() as folder:
        if probed:
            from seedance.probe.probe import attach

            attach(training.model, optimizer=training.optimizer, job_id="bench-memory", spool=Path(folder))
        for _ in range(STEPS):
            training.step()
        print(held() - before)
        if probed:
            from seedance.probe.probe import detach

            detach()


if __name__ == "__main__":
    main(sys.argv[1] == "probed")
