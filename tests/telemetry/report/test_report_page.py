import json
from html.parser import HTMLParser

from esper.telemetry.report.page import SCRIPTS, asset, digest, document, embedded


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
