"""The overview in a real browser: filter, groups, baseline, columns, and that they survive new rounds."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import browser_tests, chromium, drawn, page, until
from served_runs import add_round, serving, write_run

pytestmark = browser_tests
RUN, J = "td:first-child a", "td:nth-child(3)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of one configuration with 100·J of 20, 40 and 60 in round 2, and a run with other rounds and 10."""
    folder = tmp_path_factory.mktemp("written") / "runs"
    for seed in range(3):
        with_factor(write_run(folder / f"sweep/base-s{seed}", seed=seed), 1 + seed)
    other = write_run(folder / "other", rounds=1)
    (other / "metrics.jsonl").write_text(
        (other / "metrics.jsonl").read_text().replace('"seconds": 2.0', '"seconds": 92100')
    )
    (other / "config.toml").write_text((other / "config.toml").read_text().replace("rounds = 4", "rounds = 9"))
    return folder


def with_factor(run: Path, factor: int) -> None:
    """Multiply 100·J of each round."""
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    texts = [json.dumps(line | {"objective_mean": factor * line["objective_mean"]}) for line in lines]
    metrics.write_text("\n".join(texts) + "\n")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "runs"))


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with serving(folder) as address:
        yield address


def texts(tab: Any, column: str) -> list[str]:
    """A column of the table."""
    return tab.locator(f"#overview tbody tr > {column}").all_inner_texts()


def chart(tab: Any) -> list[list[str]]:
    """The data of the chart."""
    drawn(tab)
    tab.get_by_role("button", name="Data of 100·J by round").click()
    rows = tab.locator("#overview figure tbody tr").all()
    tab.get_by_role("button", name="Data of 100·J by round").click()
    return [row.locator("td").all_text_contents() for row in rows]


ALL = ["other", "sweep/base-s0", "sweep/base-s1", "sweep/base-s2"]


def names(tab: Any) -> list[str]:
    return tab.locator("#overview .scroll:not(figure *) tbody tr td:first-child a").all_inner_texts()


def test_many_runs_are_drawn_when_they_are_asked_for_and_long_values_fit(browser, folder, address):
    for i in range(210):
        shutil.copytree(folder / "other", folder / f"many/of-them-in-a-longer-path/{i:03}")
    metrics = folder / "many/of-them-in-a-longer-path/000/metrics.jsonl"
    line = {"round": 34424, "objective_mean": 394.23, "objective_std": 19.94, "seconds": 92100}
    metrics.write_text(json.dumps(json.loads(metrics.read_text()) | line) + "\n")
    with page(browser, address, 1400) as tab:
        assert "34424 / 9" in tab.inner_text("#overview")
        assert "25 h 35 min" in tab.inner_text("#overview")
        assert tab.evaluate("(() => { const s = document.querySelector('#overview > div > .scroll');"
                            "return s.scrollWidth - s.clientWidth; })()") <= 0  # fmt: skip
        until(tab, lambda: len(names(tab)) == 200)
        assert tab.locator("#overview .keys li").count() == 12
        assert "The first 12 rows" in tab.inner_text("#overview figure")
        tab.get_by_role("button", name="Show 14 more rows").click()
        until(tab, lambda: len(names(tab)) == 214)
        assert "all=1" in tab.url


@pytest.mark.parametrize(
    ("text", "regular", "found"),
    [
        ("SWEEP", False, ALL[1:]),
        ("s[02]$", False, []),
        ("s[02]$", True, [ALL[1], ALL[3]]),
        ("^(other|digits)$", True, ALL),  # the task of all
        ("s(", True, ALL),
    ],
)
def test_runs_are_filtered_and_the_address_shows_the_same(browser, address, text, regular, found):
    with page(browser, address) as tab:
        assert names(tab) == ALL
        tab.get_by_label("regular expression").set_checked(regular)
        tab.get_by_role("searchbox", name="Filter").fill(text)
        until(tab, lambda: names(tab) == found)
        is_wrong = text == "s("
        until(tab, lambda: tab.locator(".finding", has_text="not a regular expression").count() == is_wrong)
        until(tab, lambda: "filter=" in tab.url)
        if found not in (ALL, []):
            assert f"{len(found)} of 4 runs are shown" in tab.inner_text("#overview")
        link = tab.url
    with page(browser, link) as tab:
        assert names(tab) == found
        assert tab.get_by_role("searchbox", name="Filter").input_value() == text
        assert tab.get_by_label("regular expression").is_checked() == regular


def test_seeds_of_a_configuration_become_a_mean_and_a_band(browser, address):
    with page(browser, address) as tab:
        assert not tab.get_by_label("Band").is_visible()
        tab.get_by_label("group runs").check()
        until(tab, lambda: names(tab) == ["other", "sweep/base-s*"])
        first, J_ = (
            tab.locator(f"#overview tbody tr:nth-child(2) {cell}").last.inner_text() for cell in ("td:first-child", J)
        )
        assert (first.split("\n")[-1], J_) == ("sweep/base-s* 3 seeds", "40.00 ± 20.00")
        key = tab.locator("#overview .keys").inner_text()
        assert "sweep/base-s*, 3 seeds" in key
        assert "band: ± standard deviation of the seeds" in key
        assert chart(tab) == [["other", "1", "10", "–", "–"], ["sweep/base-s*, 3 seeds", "1", "20", "10", "30"],
                              ["sweep/base-s*, 3 seeds", "2", "40", "20", "60"]]  # fmt: skip
        tab.get_by_label("Band").select_option("range")
        until(tab, lambda: "band: lowest to highest seed" in tab.locator("#overview .keys").inner_text())
        link = tab.url
        tab.get_by_role("link", name="sweep/base-s*").click()
        tab.wait_for_selector("#result tbody tr:nth-child(3)")  # the seeds are compared
    with page(browser, link) as tab:
        assert "band: lowest to highest seed" in tab.locator("#overview .keys").inner_text()


def test_curves_of_different_length_have_a_mean_on_the_coarser_grid(browser, folder, address):
    line = json.loads((folder / "sweep/base-s0/metrics.jsonl").read_text().splitlines()[0])
    for seed, rounds in ((0, 61), (1, 4), (2, 3)):
        lines = [json.dumps(line | {"round": n, "objective_mean": 10.0 * n}) for n in range(1, rounds + 1)]
        (folder / f"sweep/base-s{seed}/metrics.jsonl").write_text("\n".join(lines) + "\n")
    with page(browser, f"{address}/?group=1&filter=base&band=range") as tab:
        until(tab, lambda: "still being read" not in tab.inner_text("#overview"))
        rows = [row[1:] for row in chart(tab)]
        # points of two rounds: 15 of all; 35 of two and 30 of the third, whose point is its third round alone
        assert rows[0] == ["2", "15", "15", "15"]
        assert [float(text) for text in rows[1]] == pytest.approx([4, 100 / 3, 30, 35])
        assert rows[-1] == ["61", "610", "610", "610"]


def test_a_pinned_run_is_first_and_others_say_their_difference(browser, address):
    with page(browser, address) as tab:
        tab.get_by_role("button", name="baseline sweep/base-s1").click()
        until(tab, lambda: names(tab) == [ALL[2], ALL[0], ALL[1], ALL[3]])
        assert tab.locator("#overview tr[aria-current]").count() == 1
        assert [text.split("\n")[1:] for text in texts(tab, J)] == [[], ["−30.00"], ["−20.00"], ["+20.00"]]
        tab.get_by_role("button", name="100·J ± sd").click()
        until(tab, lambda: names(tab) == [ALL[2], ALL[3], ALL[1], ALL[0]])
        tab.get_by_role("searchbox", name="Filter").fill("other")
        until(tab, lambda: names(tab) == [ALL[2], "other"])  # also where the filter leaves it out
        link = tab.url
    with page(browser, link) as tab:
        assert names(tab) == [ALL[2], "other"]
        tab.get_by_role("button", name="baseline sweep/base-s1").click()
        until(tab, lambda: names(tab) == ["other"])
        assert "pin=" not in tab.url
    with page(browser, f"{address}/?pin=gone") as tab:
        assert "The baseline gone is not here" in tab.inner_text("#overview")


def test_columns_are_chosen(browser, address):
    headings = "#overview thead th"
    with page(browser, address) as tab:
        assert "steps" not in tab.locator(headings).all_inner_texts()
        tab.get_by_text("Columns", exact=True).click()
        tab.get_by_label("task", exact=True).uncheck()
        tab.get_by_label("steps", exact=True).check()
        until(tab, lambda: "steps" in tab.locator(headings).all_inner_texts())
        assert "task" not in tab.locator(headings).all_inner_texts()
        link, shown = tab.url, tab.locator(headings).all_inner_texts()
    with page(browser, link) as tab:
        assert tab.locator(headings).all_inner_texts() == shown


def test_new_rounds_and_runs_leave_the_view_as_it_is(browser, folder, address):
    with page(browser, f"{address}/?group=1&pin=other&filter=s") as tab:
        tab.get_by_label("compare sweep/base-s*").check()
        box = tab.get_by_role("searchbox", name="Filter")
        box.press("End")
        box.type("w")
        write_run(folder / "aa-sweep/new", rounds=1, seed=7)
        until(tab, lambda: "4 seeds" in tab.inner_text("#overview"))
        box.type("e")
        add_round(folder / "other", 2)
        until(tab, lambda: "20.00" in texts(tab, J)[0])
        until(tab, lambda: tab.url.endswith("filter=swe&group=1&pin=other"), 20.0)
        assert tab.evaluate("document.activeElement.value") == "swe"
        assert tab.get_by_label("compare other").is_checked() is False
        tab.get_by_label("group runs").uncheck()
        until(tab, lambda: len(names(tab)) == 5)
        checked = [name for name in names(tab) if tab.get_by_label(f"compare {name}").is_checked()]
        assert checked == ALL[1:]  # by name, not by place


def test_a_run_has_one_colour_in_the_chart_and_in_the_table_which_stays(browser, address):
    strokes = """() => Object.fromEntries([...document.querySelectorAll('#overview > div > .scroll tbody tr')]
        .map((tr) => [tr.querySelector('a').innerText,
            [...tr.querySelectorAll('.mark line, td path')].map((e) => e.getAttribute('stroke'))]))"""
    lines = """[...document.querySelectorAll('#overview .keys li')]
        .map((li) => [li.innerText, li.querySelector('line').getAttribute('stroke')])"""
    with page(browser, address) as tab:
        drawn(tab)
        before = tab.evaluate(strokes)
        assert len({colors[0] for colors in before.values()}) == 4
        assert {name: colors[0] for name, colors in before.items()} == dict(tab.evaluate(lines))
        assert before["sweep/base-s1"][0] == before["sweep/base-s1"][1]
        tab.get_by_role("searchbox", name="Filter").fill("s2")
        until(tab, lambda: names(tab) == [ALL[3]])
        assert tab.evaluate(strokes) == {ALL[3]: before[ALL[3]]}
