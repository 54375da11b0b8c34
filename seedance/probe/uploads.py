"""The short-lived child that turns what is finished in the spool into shards: writing Parquet stays out of the job.

Once an hour without waiting, and at the end of the process with a bounded wait. Without a drop folder there is none.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import seedance
from seedance.probe.settings import ProbeSettings

LOGGER = logging.getLogger("seedance.probe")
TAIL_BYTES = 2_000


class Uploads:
    """Starts uploaders of one process, one at a time.

    Args:
        settings: spool, drop folder, and how long to wait at the end.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._deadline = 0.0
        self._pid = os.getpid()

    def start(self, *, final: bool = False) -> None:
        """Send what is finished, in the background; nothing when there is no drop folder or the former child still runs.

        Args:
            final: the present hour too, when no process writes to the spool any more.
        """
        settings = self._settings
        if settings.drop is None:
            return
        if self._child is not None and self._child.poll() is None:
            if not final:
                return
            self._wait(settings.upload_timeout_s)
        self._tell()
        package = str(Path(seedance.__file__).resolve().parent.parent)
        environ = {name: value for name, value in os.environ.items() if name != "SEEDANCE_DIAGNOSTIC"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH"))))
        # The spool must not be the working folder: `-m` puts that on the import path.
        command = [sys.executable, "-m", "seedance", "upload", "--spool", str(settings.spool), "--to", settings.drop]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - read when the child has ended
        self._child = subprocess.Popen(
            [*command, *(["--final"] if final else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            env=environ,
            cwd="/",
            start_new_session=True,
        )

    def start_last(self) -> None:
        """The process lets go of the spool: send everything."""
        self._deadline = time.monotonic() + self._settings.upload_timeout_s
        self.start(final=True)

    def finish(self) -> None:
        """Wait for the last child as long as the settings say; it goes on by itself after that. Again is fine."""
        if os.getpid() != self._pid:
            return
        self._wait(max(self._deadline - time.monotonic(), 0))
        self._tell()

    def _wait(self, timeout_s: float) -> None:
        child = self._child
        if child is None:
            return
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            LOGGER.warning(
                "probe: the upload of %s to %s takes longer than %s s. It goes on in process %s; what it cannot send waits in "
                "the spool for `seedance upload`.",
                self._settings.spool,
                self._settings.drop,
                self._settings.upload_timeout_s,
                child.pid,
            )
            # Somebody else's from here on: asking for it again would be one more wait.
            child.returncode = 0

    def _tell(self) -> None:
        """Say what the former child complained about."""
        child, said = self._child, self._said
        self._child = self._said = None
        if child is None or said is None:
            return
        with said:
            if child.returncode:
                size = said.seek(0, os.SEEK_END)
                said.seek(max(size - TAIL_BYTES, 0))
                text = said.read().decode(errors="replace").strip()
                LOGGER.warning(
                    "probe: the upload of %s to %s ended with status %s: %s",
                    self._settings.spool,
                    self._settings.drop,
                    child.returncode,
                    text.splitlines()[-1] if text else "no word",
                )
