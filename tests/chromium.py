"""A Chromium that is installed, for tests of pages; they are skipped where there is none."""

import shutil
from collections.abc import Iterator
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
