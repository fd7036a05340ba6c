"""Makes docs/report.png and docs/serve.png from a run: the page of `esper report`, and a host in `esper serve`.

    python scripts/picture_pages.py RUN [--host 4] [--step 24]

Needs Chromium, and the packages of the extras `dev` and `serve`.
"""

import argparse
import shutil
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from esper.cli import main as esper
from esper.telemetry.serve.app import server_of
from esper.telemetry.serve.runs import Runs

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 1200


def main(arguments: list[str] | None = None) -> int:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--host", help="host of the newest round; the best one if it is left out")
    parser.add_argument("--step", help="step of the episode; the last one if it is left out")
    given = parser.parse_args(arguments)
    place = "".join(f"&{name}={value}" for name in ("host", "step") if (value := getattr(given, name)))
    with Runs(given.run) as runs, TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        if esper(["report", str(given.run), "--out", str(page)]):
            return 2
        server = server_of(runs)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        host = f"http://127.0.0.1:{port}/host?run={given.run.resolve().name}{place}"
        picture({page.as_uri(): (DOCS / "report.png", 1240), host: (DOCS / "serve.png", 1180)})
        server.should_exit = True
        thread.join()
    return 0


def picture(pages: dict[str, tuple[Path, int]]) -> None:
    """Write the top of each page, so many pixels high."""
    with sync_playwright() as driver:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for address, (file, height) in pages.items():
            tab = browser.new_page(viewport={"width": WIDTH, "height": height})
            tab.goto(address)
            tab.wait_for_selector(".chart svg")
            tab.wait_for_timeout(3000)  # all charts
            tab.screenshot(path=file)
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
