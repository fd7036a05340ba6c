import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

from esper.telemetry.report.page import SCRIPTS, asset, digest, document, embedded, payloads_of
from toy_record import full_record


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_page_loads_nothing_and_runs_its_own_scripts_alone():
    page = document({"runs": []}, "a run")
    elements = Elements(page).found
    assert not [attrs for _, attrs in elements if {"src", "href", "srcset", "data"} & attrs.keys()]
    assert not [attrs for _, attrs in elements if any(name.startswith("on") for name in attrs)]
    policy = next(attrs["content"] for tag, attrs in elements if tag == "meta" and "http-equiv" in attrs)
    assert "default-src 'none'" in policy
    assert all(f"'sha256-{digest(asset(name))}'" in policy for name in SCRIPTS)


def test_names_and_data_cannot_leave_their_place():
    hostile = "</script><script>alert(1)</script><!--"
    page = document({"runs": [{"run": hostile}]}, hostile)
    assert hostile not in page
    assert [tag for tag, _ in Elements(page).found].count("script") == 1 + len(SCRIPTS)
    assert json.loads(embedded({"x": hostile})) == {"x": hostile}


def test_the_page_is_small_without_its_data():
    assert len(document({}, "").encode()) < 2_000_000


def test_the_libraries_are_those_of_the_notice():
    notice = files("esper.telemetry.report").joinpath("assets", "NOTICE.md").read_text("utf-8")
    sums = dict(re.findall(r"\| (\S+\.js) \|.*\| ([0-9a-f]{64}) \|", notice))
    assert sums == {name: hashlib.sha256(asset(name).encode()).hexdigest() for name in ("d3.min.js", "plot.min.js")}


def test_payloads_are_announced_as_they_are_made():
    seen = []
    found = payloads_of(full_record(), lambda done, total, name: seen.append((done, total, name)))
    assert [name for _, _, name in seen] == list(found)
    assert seen[0][:2] == (0, len(found))
