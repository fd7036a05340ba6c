"""A Chromium that is installed, for tests of pages; they are skipped where there is none."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip

browser_tests = [
    pytest.mark.slow,
    pytest.mark.skipif(PATH is None, reason="no Chromium is installed (apt-get install chromium)"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=PATH, args=list(FLAGS))
        yield opened
        opened.close()


@contextmanager
def page(browser: Any, url: str, width: int = 1200, scheme: str = "light", errors: bool = False) -> Iterator[Any]:
    """A page that is drawn. Unless `errors`, a message of its console and a foreign request fail the test."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    start = url.partition("?")[0].rsplit("/", 1)[0]
    tab.on("request", lambda request: None if request.url.startswith((start, "data:")) else said.append(request.url))
    tab.goto(url)
    tab.wait_for_selector("main[aria-busy=false]")
    yield tab
    tab.close()
    assert errors or said == []


def until(tab: Any, condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition; the page forbids the scripts that playwright's own wait would add."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        tab.wait_for_timeout(50)


def drawn(tab: Any) -> None:
    """Wait for the charts."""
    until(tab, lambda: tab.evaluate("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg'))"))


def cut(tab: Any) -> list[str]:
    """Texts of charts that their charts cut off."""
    return tab.evaluate("""[...document.querySelectorAll('.chart svg text')].filter((text) => {
        const chart = text.closest('.chart').getBoundingClientRect(), box = text.getBoundingClientRect();
        return box.width && (box.left < chart.left - 1 || box.right > chart.right + 1
            || box.top < chart.top - 1 || box.bottom > chart.bottom + 1);
    }).map((text) => text.textContent)""")


def inner_scrolls(tab: Any) -> list[str]:
    """Names of parts of the page with fewer than 60 rows that scroll by themselves, up and down."""
    return tab.evaluate("""[...document.querySelectorAll('main *')].filter((part) =>
        /auto|scroll/.test(getComputedStyle(part).overflowY) && part.scrollHeight > part.clientHeight + 1
        && part.querySelectorAll('tr').length < 60).map((part) => part.ariaLabel ?? part.className)""")
