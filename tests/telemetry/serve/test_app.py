"""The answers of the live page, and its stream of changes."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator

import pytest
from starlette.testclient import TestClient

from esper.telemetry.report.page import PAYLOADS
from esper.telemetry.serve.app import VIEWS, application, changes
from esper.telemetry.serve.runs import LIVE, Runs
from served_runs import add_round


@pytest.fixture
def client(runs: Runs) -> TestClient:
    return TestClient(application(runs), base_url="http://127.0.0.1")


@pytest.mark.parametrize("path", VIEWS)
def test_each_view_is_the_same_page_with_scripts_from_here_alone(client, path):
    page = client.get(path, params={"run": "a"}).text
    linked = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert all(link.startswith(("./assets/", "#", "data:,")) for link in linked)
    assert not re.search(r"<script[^>]*>[^<]", page)
    for link in linked:
        if link.startswith("."):
            answer = client.get(link.removeprefix("."))
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]


def test_the_page_shows_what_the_report_shows(client):
    assert PAYLOADS.keys() <= LIVE.keys()
    for name in LIVE:
        answer = client.get(f"/api/{name}", params={"run": "a"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
    (run,) = client.get("/api/runs?run=a").json()
    assert (run["run"], run["last"]["objective"], run["finished"]) == ("a", 20, False)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/runs?run=nope", 404, "there is no run 'nope' here"),
        ("/api/runs", 400, "no run is named"),
        ("/api/secrets?run=a", 404, "there is no data called 'secrets'"),
        ("/api/round?run=a&round=x", 400, "round is 'x', expected a number"),
        ("/api/host?run=a&host=-1", 400, "host is '-1', expected a number"),
        ("/api/host?run=a&host=77", 422, "round 2 has no host 77"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence(client, path, status, words):
    answer = client.get(path)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_a_run_that_is_removed_while_it_is_served_is_missed_with_a_sentence(client, folder):
    assert client.get("/api/runs?run=a").status_code == 200
    for run in folder.iterdir():
        shutil.rmtree(run)
    assert client.get("/api/runs?run=a").status_code == 404
    assert "holds no run yet" in client.get("/api/overview").json()["notes"][0]


def first_events(stream: AsyncIterator[str], acts: list) -> list[str]:
    """The events of a stream; each act happens before the next event is awaited."""

    async def collect() -> list[str]:
        found = [await anext(stream)]
        for act in acts:
            act()
            found.append(await asyncio.wait_for(anext(stream), 20))
        return found

    return asyncio.run(collect())


def test_a_stream_names_the_runs_that_change_appear_and_go(folder):
    found = first_events(
        changes(Runs(folder), frozenset(), poll=0.02),
        [
            lambda: add_round(folder / "a", 3),
            lambda: shutil.copytree(folder / "a", folder / "c"),
            lambda: shutil.rmtree(folder / "c"),
        ],
    )
    assert found[0] == 'event: ready\ndata: ["a", "b"]\n\n'
    assert found[1] == 'event: changed\ndata: ["a"]\n\n'
    assert all('"c"' in event for event in found[2:])
