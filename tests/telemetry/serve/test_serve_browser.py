"""The live page in a real browser: what a user does, the page of a running training, and the time of a frame."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from chromium import browser_tests, chromium, cut, drawn, inner_scrolls, page, until
from served_runs import add_round, serving, write_run

pytestmark = browser_tests
HOSTILE = "b<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_run(folder / "a", rounds=3, finished=True)
    write_run(folder / HOSTILE, rounds=1)
    write_run(folder / "new", rounds=0)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with serving(folder) as address:
        yield address


VIEWS = [
    "/",
    f"/?group=1&pin={HOSTILE}&sort=-100·J ± sd&columns=run,best,steps",
    "/run?run=a",
    f"/run?run=a&run={HOSTILE}",
    "/run?run=new",
    "/host?run=a",
    "/policy?run=a",
    "/anomalies?run=a",
]


NAMED = """[...document.querySelectorAll('button, input, select, a')].every((e) =>
    e.innerText?.trim() || e.ariaLabel || e.labels?.length)"""
"""Whether a screen reader can say what each control is."""


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_every_view_is_drawn_without_complaint_and_fits_the_width(browser, address, view, width, scheme):
    with page(browser, address + view, width, scheme) as tab:
        drawn(tab)
        text = tab.inner_text("main")
        assert [word for word in ("reading …", "[object", "NaN", "undefined", "not defined") if word in text] == []
        assert tab.locator("main section:visible").count() > 0
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.evaluate(NAMED)
        assert (cut(tab), inner_scrolls(tab)) == ([], [])
        assert "{" not in tab.inner_text("header")  # words, no JSON


STROKES = """(place) => [...document.querySelectorAll(place)].map((key) => [...key.querySelectorAll('li')]
    .filter((li) => /kept network|with all seeds/.test(li.innerText))
    .map((li) => [li.innerText.replace('accuracy, ', ''),
        ...['stroke', 'stroke-dasharray'].map((name) => li.querySelector('line').getAttribute(name))]))
    .filter((key) => key.length)"""
"""Names, colours and dashes of the two networks in each key of a page."""


def test_a_network_has_one_colour_and_dash_in_all_charts(browser, address):
    found = []
    for view in ("/run?run=a", "/host?run=a"):
        with page(browser, address + view, 1400) as tab:
            drawn(tab)
            found += tab.evaluate(STROKES, ".keys")
    assert len(found) == 3  # by round, at a glance, by step
    networks = [["kept network", "var(--blue)", "none"], ["with all seeds", "var(--vermillion)", "3 3"]]
    assert all(key == networks for key in found)


def test_the_overview_has_room_for_all_columns_and_the_steps_of_a_host_for_all_rows(browser, address):
    fits = "(() => {{ const s = document.querySelector('{}'); return s.{side} - s.{own}; }})()"
    with page(browser, address, 1400) as tab:
        assert tab.evaluate(fits.format("#overview .scroll", side="scrollWidth", own="clientWidth")) <= 0
    with page(browser, f"{address}/host?run=a", 1400) as tab:
        assert tab.evaluate(fits.format("#steps .scroll", side="scrollHeight", own="clientHeight")) <= 0


WORSE = "the best baseline, best_schedule, is better than trained: +15.69 in 100·J on 32 hosts."


def test_the_result_says_what_the_terminal_says(browser, tmp_path):
    run = write_run(tmp_path / "a", finished=True)
    best = {"round": 2, "host": 7, "objective": 96.43, "val": 97.5, "test": 96.4, "growth": 1.43}
    (run / "summary.json").write_text(json.dumps({"final_test_accuracy_mean": 81.94, "best_host": best}))
    found = [{"name": name, "objective": j} for name, j in (("trained", 80.63), ("best_schedule", 96.32))]
    document = {"task": "digits", "reference": "trained", "verdict": WORSE, "controllers": found}
    (run / "evaluation_after_training.json").write_text(json.dumps(document))
    with serving(tmp_path) as address, page(browser, f"{address}/run?run=a") as tab:
        tiles = dict(
            zip(*(tab.locator(f"#result .tile {part}").all_inner_texts() for part in ("b", "span")), strict=True)
        )
        assert tiles["81.9 %"] == "test accuracy of the network that is kept"
        assert tiles["80.63"].startswith("100·J on")
        assert "best constant schedule, best_schedule" in tiles["96.32"]
        assert "host 7 of round 2; validation 97.5 %, test 96.4 %, growth 1.43×" in tiles["96.43"]
        assert WORSE in tab.locator("#result .verdict").first.inner_text()
        assert tab.locator("#result .tile.main b").inner_text() == "80.63"


def test_a_run_within_its_second_round_causes_no_warning(browser, tmp_path):
    run = write_run(tmp_path / "live", rounds=1)
    with (run / "events.jsonl").open("a") as file:  # what a training writes before its round ends
        file.write(json.dumps({"kind": "germinated", "round": 2, "t": 1, "host": 0, "slot": "s0"}) + "\n")
        file.write('{"kind": "episode", "round": 2, "t"')
    with serving(tmp_path) as address:
        for view in ("/", "/run?run=live", "/host?run=live", "/anomalies?run=live"):
            with page(browser, address + view) as tab:
                assert tab.locator(".finding:visible").all_inner_texts() == []


def test_from_the_overview_to_a_step_of_a_host_and_back(browser, address):
    with page(browser, address) as tab:
        rows = lambda: tab.locator("#overview tbody tr td:first-child").all_inner_texts()  # noqa: E731
        heading = tab.get_by_role("button", name="100·J ± sd")
        heading.focus()
        tab.keyboard.press("Enter")
        until(tab, lambda: rows() == ["a", HOSTILE, "new"])  # 30, 10, none
        until(tab, lambda: tab.locator("th[aria-sort=descending]").count() == 1)  # the page may be drawn anew
        tab.get_by_role("button", name="100·J ± sd").click()
        until(tab, lambda: rows() == [HOSTILE, "a", "new"])
        assert "sort=100" in tab.url

        tab.get_by_role("link", name="a", exact=True).click()
        tab.wait_for_selector(".cell")
        assert tab.locator(".cell").count() == 3
        host = tab.locator(".cell").nth(1)
        assert "19.0 %" in host.inner_text()  # 10 + t + host in the last of eight steps
        tab.keyboard.press("ArrowLeft")
        until(tab, lambda: "18.0 %" in host.inner_text())
        until(tab, lambda: "step=7" in tab.url, 20.0)  # the address follows a moment later
        host.click()

        tab.wait_for_selector(".panel")
        assert "step=7" in tab.url
        assert "host=1" in tab.url
        panel = tab.locator(".panel")
        assert panel.locator("h3").first.inner_text() == "Step 7"
        for _ in range(3):
            tab.keyboard.press("ArrowLeft")
        until(tab, lambda: "fossilize" in panel.locator(".decision").inner_text())  # in step 4
        assert panel.locator(".chosen").inner_text().split() == ["fossilize", "10.0", "%"]
        assert "+0.2500" in panel.inner_text()
        until(tab, lambda: "step=4" in tab.url)
        tab.locator("#steps button", has_text="1").first.click()
        until(tab, lambda: "germinate s0, norm" in panel.inner_text())

        tab.go_back()
        tab.wait_for_selector(".cell")
        until(tab, lambda: "18.0 %" in tab.locator(".cell").nth(1).inner_text())  # where we left it
        tab.go_back()
        tab.wait_for_selector("#overview th[aria-sort=ascending]")


def test_chosen_runs_are_compared(browser, address):
    with page(browser, address) as tab:
        tab.get_by_label("compare a", exact=True).check()
        tab.get_by_label(f"compare {HOSTILE}").check()
        tab.get_by_role("button", name="Compare the chosen runs").click()
        tab.wait_for_selector("#result table")
        assert HOSTILE in tab.inner_text("#result")


def test_the_page_of_a_running_training_follows_it(browser, tmp_path):
    run = write_run(tmp_path / "live", rounds=1)
    with serving(tmp_path) as address, page(browser, f"{address}/run?run=live", errors=True) as tab:
        tab.wait_for_selector(".cell")
        assert tab.locator("#result .tile b").first.inner_text() == "10.00"
        tab.locator("#curves select").first.select_option("3")
        tab.evaluate("scrollTo(0, 400)")
        add_round(run, 2)
        until(tab, lambda: tab.locator("#result .tile b").first.inner_text() == "20.00")
        until(tab, lambda: tab.locator("#glance input[type=number]").input_value() == "2")
        assert tab.locator("#curves select").first.input_value() == "3"  # what was chosen stays
        assert abs(tab.evaluate("scrollY") - 400) < 5  # and so does the place
        shutil.rmtree(run)
        until(tab, lambda: "there is no run" in tab.inner_text("#result"))


def test_all_views_work_below_the_path_of_a_proxy(browser, folder):
    with serving(folder, token="open", root="/esper") as address, page(browser, f"{address}/esper?token=open") as tab:
        assert tab.url == f"{address}/esper/"
        tab.get_by_role("link", name="a", exact=True).click()
        tab.wait_for_selector(".cell")
        assert tab.url.startswith(f"{address}/esper/run?run=a")
        tab.locator(".cell").first.click()
        tab.wait_for_selector(".panel")
        assert tab.url.startswith(f"{address}/esper/host?")
        for name in ("Policy", "Anomalies", "Overview"):
            tab.get_by_role("navigation").get_by_role("link", name=name).click()
            tab.wait_for_selector("main[aria-busy=false]")
            assert tab.locator(".finding:has-text('answer')").count() == 0
        assert tab.url.startswith(f"{address}/esper/")
        until(tab, lambda: "Follows" in tab.inner_text("footer"))  # the stream of events
        assert [cookie["path"] for cookie in tab.context.cookies()] == ["/esper/"]


@contextmanager
def files_of(folder: Path) -> Iterator[str]:
    """Another server of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("frames", [False, True])
def test_a_notebook_shows_the_page_in_a_frame_only_where_it_was_allowed(browser, folder, tmp_path, frames):
    with serving(folder, token="open", frames=frames) as address, files_of(tmp_path) as other:
        frame = f'<!doctype html><iframe src="{address}/run?run=a&token=open" width=900 height=700></iframe>'
        (tmp_path / "notebook.html").write_text(frame)
        tab = browser.new_page()
        tab.goto(f"{other}/notebook.html")
        inner = tab.frames[1]
        if frames:
            inner.wait_for_selector("main[aria-busy=false] .tile")
            assert "10.0 → 30.0" in inner.inner_text("#result")
        else:
            assert inner.locator("main").count() == 0
        tab.close()


def test_the_token_leaves_the_address_and_stays_in_the_browser(browser, folder):
    with serving(folder, token="open") as address:
        with page(browser, f"{address}/run?run=a&token=open") as tab:
            assert "token" not in tab.url
            tab.reload()
            tab.wait_for_selector("main[aria-busy=false]")
            assert tab.locator("#result .tile").count() > 0
        other = browser.new_page()
        assert other.goto(f"{address}/run?run=a").status == 401
        other.close()
