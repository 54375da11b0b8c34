"""Stores of every kind for the tests here; each emulator is started once, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import stores


@pytest.fixture(scope="session")
def emulators() -> Iterator[Callable[[str], stores.Emulator]]:
    """Gives the running emulator of a kind."""
    running: dict[str, stores.Emulator] = {}
    with ExitStack() as stack:

        def get(kind: str) -> stores.Emulator:
            if kind not in running:
                running[kind] = stack.enter_context(stores.emulator(kind))
            return running[kind]

        yield get


@pytest.fixture
def url(emulators: Callable[[str], stores.Emulator], request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A new place in a store of the kind that the test is parametrised with (`indirect`), with its variables set."""
    kind = str(request.param)
    if kind == "local":
        yield str(tmp_path / "below")
        return
    running = emulators(kind)
    with stores.fresh(running.environment):
        yield f"{running.scheme}://{running.bucket()}/below"
