"""Headless Chromium that can reach this machine alone, and what a page said while it was open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request, sync_playwright

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


class _Shared:
    """One browser for the pages that are open at a time. Its library keeps an event loop that counts as running in this thread
    until it is stopped, so it goes with the last page: tests of other files start loops of their own."""

    playwright: Playwright | None = None
    browser: Browser | None = None
    pages = 0


def _browser() -> Browser:
    if _Shared.browser is None:
        _Shared.playwright = sync_playwright().start()
        _Shared.browser = _Shared.playwright.chromium.launch(
            executable_path=executable(), headless=True, args=ARGUMENTS, env=environment()
        )
    _Shared.pages += 1
    return _Shared.browser


def _done() -> None:
    _Shared.pages -= 1
    if _Shared.pages == 0 and _Shared.browser is not None and _Shared.playwright is not None:
        _Shared.browser.close()
        _Shared.playwright.stop()
        _Shared.browser = _Shared.playwright = None


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

    context = _browser().new_context(viewport={"width": width, "height": height})
    try:
        opened = context.new_page()
        opened.on("console", log)
        opened.on("request", ask)
        opened.on("pageerror", lambda error: heard.errors.append(str(error)))
        yield opened, heard
    finally:
        context.close()
        _done()
