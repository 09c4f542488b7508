"""A real browser for tests: Debian's Chromium, driven by Playwright. A page that complains or asks for anything fails its test.

A conftest takes what its tests need: ``from browser_service import browser, open_page``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from services import UNFIT, MissingServiceError, command, needs, required

#: How long the browser may take for anything, in seconds: test machines are slow when many tests run.
LIMIT_S = 300.0


@dataclass
class Opened:
    """A page in a browser. ``page`` is Playwright's; ``errors`` and ``requests`` are what must stay empty."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def go(self, address: str) -> None:
        """Go to what stands behind the #, and wait until it is shown."""
        self.page.evaluate("(address) => { location.hash = address; }", address)
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: what was asked for is drawn."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own waiting evaluates text in the page, which forbids it."""
        self.page.evaluate(
            """([limit]) => new Promise((done, failed) => {
              const end = performance.now() + limit;
              const look = () => {
                if (CONDITION) done();
                else if (performance.now() > end) failed(new Error("not within the limit"));
                else requestAnimationFrame(look);
              };
              look();
            })""".replace("CONDITION", condition),
            [LIMIT_S * 1000],
        )
        self.settle()

    def text(self, selector: str) -> str:
        """Return the text of the first element."""
        return str(self.page.locator(selector).first.inner_text())


def chromium(*, install: bool) -> str:
    """Return the path of Chromium.

    Raises:
        MissingServiceError: it or Playwright is not on this machine.
    """
    try:
        import playwright.sync_api  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise MissingServiceError(f"{error.name} is not installed: pip install playwright") from error
    if install:
        done = command("services", "install", "chromium")
        if done.returncode == UNFIT:
            raise MissingServiceError(done.stderr.strip())
        assert done.returncode == 0, done.stderr
    path = os.environ.get("MLHPC_CHROMIUM") or shutil.which("chromium")
    if path is None:
        raise MissingServiceError("no chromium; `ci/services install chromium` installs it")
    return path


def launch(playwright: Any, path: str) -> Any:
    """Start the browser. Chromium does not run as root with its sandbox; it sees nothing here but files of tests."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    arguments += ["--disable-dev-shm-usage", "--js-flags=--expose-gc", "--enable-precise-memory-info"]
    return playwright.chromium.launch(executable_path=path, args=arguments, timeout=LIMIT_S * 1000)


# Not of the session: Playwright keeps an event loop running in this thread, which other tests of the process cannot bear.
@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One browser for the tests of a module."""
    install = "chromium" in required(request.config)
    path = needs(request.config, "chromium", lambda: chromium(install=install))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = launch(playwright, path)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Open a file: ``open_page(path, "#view=nodes", width=390, dark=True)``; fails where it complained or asked for anything."""
    opened: list[Opened] = []
    contexts: list[Any] = []

    def call(path: Path, address: str = "", *, width: int = 1280, height: int = 900, dark: bool = False, **more: Any) -> Opened:  # fmt: skip
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", **more)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LIMIT_S * 1000)
        found = Opened(page)
        opened.append(found)
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("console", lambda message: found.errors.append(message.text))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(f"{path.as_uri()}{address}")
        if more.get("java_script_enabled", True):
            page.wait_for_selector("html[data-ready]", state="attached")
            found.settle()
        return found

    yield call
    for one in opened:
        own, *others = one.requests
        assert own.startswith("file:"), one.requests
        assert not others, f"the page asked for {others}"
        assert not one.errors, f"the console says {one.errors}"
    for context in contexts:
        context.close()
