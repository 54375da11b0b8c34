"""Headless Chromium that can reach this machine alone, and what a page said while it was open."""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Heard:
    """What a page asked for and complained about."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def executable() -> str:
    """Path of the browser.

    Raises:
        RuntimeError: none is installed; says which package has it.
    """
    found = next((p for name in NAMES if (p := shutil.which(name))), None)
    if found is None:
        raise RuntimeError("no Chromium found: install Debian's package chromium (apt-get install chromium)")
    return found


@cache
def browser() -> Browser:
    """One browser a process; the library cannot be started twice in one."""
    playwright = sync_playwright().start()
    started = playwright.chromium.launch(executable_path=executable(), headless=True, args=ARGUMENTS, env=environment())
    atexit.register(playwright.stop)
    atexit.register(started.close)
    return started


def environment() -> dict[str, str | float | bool]:
    """The environment without proxies."""
    return {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}


@contextmanager
def page(*, width: int = 1400, height: int = 1000) -> Iterator[tuple[Page, Heard]]:
    """A new page, and what it says."""
    heard = Heard()

    def log(message: ConsoleMessage) -> None:
        if message.type == "error":
            heard.errors.append(message.text)

    def ask(request: Request) -> None:
        heard.requests.append(request.url)

    context = browser().new_context(viewport={"width": width, "height": height})
    try:
        opened = context.new_page()
        opened.on("console", log)
        opened.on("request", ask)
        opened.on("pageerror", lambda error: heard.errors.append(str(error)))
        yield opened, heard
    finally:
        context.close()
