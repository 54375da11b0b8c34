"""Prefect server, worker and deployments for one machine: `python -m flows.ui`, until it is interrupted.

Everything listens on loopback and keeps its state in PREFECT_HOME. The worker is stopped before the server, because a worker
that loses its server does not stop in good time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
POOL = "local-process"
PATIENCE_S = 180
"""How long a first start of the server may take."""
STOP_S = 30
STOPS = (signal.SIGINT, signal.SIGTERM)


class Process:
    """A child in a process group of its own, so that what it started ends with it."""

    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        command = [sys.executable, "-m", "prefect", *arguments]
        self.child = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)

    def stop(self) -> None:
        """Interrupt it as a keyboard does, and end what does not follow."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self.child.poll() is not None:
                return
            os.killpg(self.child.pid, number)
            try:
                self.child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                continue


def healthy(api: str) -> bool:
    """Whether the server answers."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_for(server: Process, api: str) -> None:
    """Wait until the server answers.

    Raises:
        SystemExit: it ended, or did not answer in time.
    """
    end = time.monotonic() + PATIENCE_S
    while not healthy(api):
        if server.child.poll() is not None:
            sys.exit(
                f"the Prefect server ended with status {server.child.returncode}; its port may be taken: try PORT=…"
            )
        if time.monotonic() > end:
            sys.exit(f"the Prefect server did not answer at {api}/health within {PATIENCE_S} s")
        time.sleep(0.2)


def deploy(environment: dict[str, str]) -> None:
    """The work pool, and every deployment of `prefect.yaml`.

    Raises:
        SystemExit: a command failed; its own message stands above.
    """
    for arguments in (
        ["work-pool", "create", POOL, "--type", "process", "--overwrite"],
        ["--no-prompt", "deploy", "--all"],
    ):
        command = [sys.executable, "-m", "prefect", *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"`prefect {' '.join(arguments)}` failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def interrupt(number: int, frame: FrameType | None) -> None:
    """The first interrupt ends the work; those after it are ignored, so that nothing is left running.

    Raises:
        KeyboardInterrupt: always.
    """
    for one in STOPS:
        signal.signal(one, signal.SIG_IGN)
    raise KeyboardInterrupt


def port_of(text: str) -> int:
    """A port from an argument.

    Raises:
        ArgumentTypeError: it is none that can be asked for.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, found {text!r}")
    return int(text)


def main() -> int:
    """Start all of it, say where it is, and stop it in order on an interrupt."""
    parser = argparse.ArgumentParser(prog="python -m flows.ui", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--port", type=port_of, default=4200, help="port of the server and its UI on 127.0.0.1")
    port = parser.parse_args().port
    api = f"http://127.0.0.1:{port}/api"
    environment = os.environ | {
        "PREFECT_API_URL": api,
        "PREFECT_UI_API_URL": api,
        "SEEDANCE_HOME": str(ROOT),
        "PREFECT_LOGGING_LEVEL": os.environ.get("PREFECT_LOGGING_LEVEL", "WARNING"),
    }
    if healthy(api):
        sys.exit(f"something answers at {api} already: stop it, or choose another port with PORT=…")
    for number in STOPS:
        signal.signal(number, interrupt)
    running: list[Process] = []
    try:
        running.append(Process("server", ["server", "start", "--host", "127.0.0.1", "--port", str(port)], environment))
        print("starting the Prefect server …", flush=True)
        wait_for(running[0], api)
        deploy(environment)
        running.append(Process("worker", ["worker", "start", "--pool", POOL, "--name", "local"], environment))
        print(f"deployments: http://127.0.0.1:{port}/v2/deployments    stop with Ctrl-C", flush=True)
        while all(p.child.poll() is None for p in running):
            time.sleep(0.5)
        ended = next(p for p in running if p.child.poll() is not None)
        print(f"the {ended.name} ended with status {ended.child.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for process in reversed(running):
            process.stop()


if __name__ == "__main__":
    sys.exit(main())
