"""The page in a real browser: every section is drawn, nothing is complained about, and keys and small screens work."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import browser_tests, chromium, cut, inner_scrolls
from esper.telemetry.report.page import document, payloads_of
from toy_record import full_record

HOSTILE = "</script><img src=x onerror=alert(1)>"

pytestmark = browser_tests


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = full_record()
    for (table,) in record.database.execute("select table_name from duckdb_tables()").fetchall():
        copied = f"select * replace ('b{HOSTILE}' as run) from {table} where run = 'a'"
        record.database.execute(f"insert into {table} {copied}")
    record.database.execute("update episodes set fossilized = 1 - host where round = 2")  # host 1 has more points
    path = tmp_path_factory.mktemp("page") / "report.html"
    row = {"group": "everything", "kind": "all", "columns": ["age"]}
    row |= {f"{name}{half}": 0.5 for name in ("kl", "changed", "value") for half in ("", "_half")}
    found = {"controller": "after 2 rounds", "hosts": 2, "decisions": 8, "others": 1, "groups": [row]}
    (path.parent / "importance.json").write_text(json.dumps(found))
    record.database.execute("update runs set path = ? where run = 'a'", [str(path.parent)])
    path.write_text(document(payloads_of(record, lambda done, total, name: None), "report"), encoding="utf-8")
    return path


@pytest.fixture(params=[(1400, "light"), (390, "dark")], ids=["wide", "narrow"])
def tab(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, drawn; every message of its console and every request fails the test."""
    width, scheme = request.param
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    tab.goto(report.as_uri())
    tab.wait_for_selector("#settings table")
    yield tab
    tab.close()
    assert said == []


def test_every_section_is_drawn_and_fits_the_width(tab: Any) -> None:
    tab.wait_for_function("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg'))")
    drawn = tab.evaluate("Object.fromEntries([...document.querySelectorAll('section')].map((s) =>"
                         " [s.id, s.querySelectorAll('svg[role=img], table').length]))")  # fmt: skip
    names = "result curves hosts frontier seeds behaviour importance rewards ppo settings"
    assert list(drawn) == names.split()
    assert all(drawn.values()), drawn
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("[...document.querySelectorAll('svg')].every((s) => !s.outerHTML.includes('NaN'))")
    assert HOSTILE in tab.inner_text("h1")
    assert "{" not in tab.inner_text("header")  # words, no JSON
    assert (cut(tab), inner_scrolls(tab)) == ([], [])


def test_the_band_and_the_line_of_a_chart_are_named(tab: Any) -> None:
    for title in ("100·J", "Accuracy", "Growth"):
        key = tab.locator("#curves figure", has=tab.get_by_role("heading", name=title, exact=True)).locator(".keys")
        assert "line: mean, band: quartiles of the hosts" in key.inner_text()


def test_rounds_below_bars_are_whole_numbers(tab: Any) -> None:
    for section in ("behaviour", "rewards"):
        chart = tab.locator(f"#{section} figure", has_text="Over the rounds").locator(".chart")
        chart.scroll_into_view_if_needed()
        tab.wait_for_function("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg'))")
        assert chart.locator("[aria-label='x-axis tick label'] text").all_text_contents() == ["1", "2"]


def test_a_window_without_room_for_charts_causes_no_errors(tab: Any) -> None:
    tab.wait_for_function("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg'))")
    tab.set_viewport_size({"width": 176, "height": 900})
    tab.wait_for_timeout(300)  # errors in the console fail the test
    tab.set_viewport_size({"width": 500, "height": 900})
    tab.wait_for_function("document.querySelector('.chart svg').clientWidth > 400")


def test_the_host_that_is_shown_first_grew(tab: Any) -> None:
    assert tab.locator("#hosts p strong").inner_text().strip() == "Host 0:"


def test_a_far_alarm_is_said_and_does_not_flatten_the_curve(tab: Any) -> None:
    chart = tab.locator("#ppo figure", has_text="KL divergence").first
    assert "Beyond the chart: alarm above 0.1" in chart.inner_text()  # the values are 0.01
    assert "0.1" not in chart.locator("[aria-label='y-axis tick label'] text").all_text_contents()


def test_a_chart_opens_its_data(tab: Any) -> None:
    button = tab.get_by_role("button", name="Data of 100·J")
    button.focus()
    tab.keyboard.press("Space")
    assert button.get_attribute("aria-expanded") == "true"
    assert "10.5" in tab.locator("#curves table").first.inner_text()  # hosts with 10 and 11 in round 1


def test_a_chart_saves_its_data_as_csv(tab: Any, tmp_path: Path) -> None:
    with tab.expect_download() as found:
        tab.get_by_role("button", name="Save 100·J as CSV").click()
    found.value.save_as(tmp_path / "data.csv")
    assert found.value.suggested_filename == "100-J.csv"
    assert (tmp_path / "data.csv").read_text().splitlines()[:2] == [
        "series,round,value,low,high",
        "a,1,10.5,10.25,10.75",
    ]


def ticks(tab: Any) -> list[str]:
    return tab.locator("#curves .chart").first.locator("[aria-label='x-axis tick label'] text").all_text_contents()


def test_a_drag_shows_a_part_of_the_run_and_a_double_click_all_of_it(tab: Any) -> None:
    chart = tab.locator("#curves .chart").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + box["width"] - 18, box["y"] + 40)  # over the last value
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=3)
    assert tab.locator(".interval").count() == 1
    tab.mouse.up()
    field = tab.get_by_label("from", exact=True)
    assert 1.4 < float(field.input_value()) < 1.8  # rounds 1 and 2; the drag ended at 0.6 of the width
    tab.wait_for_selector("#curves .chart svg")
    assert ticks(tab) == ["2"]
    tab.locator("#curves .chart").first.dblclick(position={"x": 100, "y": 60})
    assert float(field.input_value()) == 1.0
    tab.wait_for_selector("#curves .chart svg")
    assert ticks(tab) == ["1", "2"]
