"""The command that runs server and worker: what it is given, and how it ends."""

from __future__ import annotations

import argparse
import signal

import pytest

from flows import ui


@pytest.mark.parametrize("text", ["0", "65536", "99999", "x", "-1", "1e3", "", "\u0663", "9" * 5000])
def test_a_port_that_cannot_be_asked_for_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a port from 1 to 65535, found"):
        ui.port_of(text)
    assert ui.port_of("4200") == 4200


def test_only_the_first_interrupt_is_one() -> None:
    former = [signal.getsignal(number) for number in ui.STOPS]
    try:
        for number in ui.STOPS:
            signal.signal(number, ui.interrupt)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in zip(ui.STOPS, former, strict=True):
            signal.signal(number, handler)
