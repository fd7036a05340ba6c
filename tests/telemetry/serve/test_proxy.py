"""Below the path of a proxy, or of an application in which this one is mounted."""

import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from esper.cli import main
from esper.telemetry.serve.app import application
from esper.telemetry.serve.runs import Runs

LOCAL = "http://127.0.0.1:8080"


KINDS = ["keeps the path", "removes the path", "mounted", "root_path of the server", "mounted and with a path"]


@pytest.fixture(params=KINDS)
def client(runs: Runs, request: pytest.FixtureRequest) -> TestClient:
    """Asks as a proxy does."""
    if request.param == "mounted":
        app = Starlette(routes=[Mount("/esper", application(runs, token="open"))])
        return TestClient(app, f"{LOCAL}/esper", follow_redirects=False)
    if request.param == "root_path of the server":
        return TestClient(application(runs, token="open"), f"{LOCAL}/esper", root_path="/esper", follow_redirects=False)
    if request.param == "mounted and with a path":
        app = Starlette(routes=[Mount("/hub", application(runs, token="open", root="/esper"))])
        return TestClient(app, f"{LOCAL}/hub", follow_redirects=False)
    below = "/esper" if request.param == "keeps the path" else ""
    return TestClient(application(runs, token="open", root="/esper"), f"{LOCAL}{below}", follow_redirects=False)


def test_pages_data_and_files_are_answered_and_the_cookie_is_for_the_path_alone(client):
    answer = client.get("/run?run=a&token=open")
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert re.search(r"Path=(/hub)?/esper/(;|$)", cookie)
    header = {"Cookie": cookie.partition(";")[0]}
    links = re.findall(r'(?:src|href)="(\./[^"]+)"', answer.text)
    for path in ("/api/overview", "/api/runs?run=a", *(link.removeprefix(".") for link in links)):
        assert client.get(path, headers=header).status_code == 200
    missing = client.get("/nowhere", headers=header)
    assert missing.status_code == 404
    assert re.search(r"the overview is at (/hub)?/esper/\.", missing.text)
    assert "there is no data called" in client.get("/api/x?run=a", headers=header).json()["error"]


def test_the_guards_hold(client):
    for path in ("/", "/run", "/assets/live.js", "/api/overview", "/api/events", "/nowhere"):
        assert client.get(path).status_code == 401
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert client.get("/api/overview?token=open", headers=headers).status_code == 403
    assert client.post("/?token=open").status_code == 405


def test_names_of_hosts_are_checked_below_a_path(runs):
    for path in ("/esper/", "/", "/esper/api/overview"):
        client = TestClient(application(runs, root="/esper"), LOCAL)
        assert client.get(path).status_code == 200
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 400


def test_links_are_relative_so_the_path_gets_its_slash(runs):
    client = TestClient(application(runs, root="/esper"), LOCAL, follow_redirects=False)
    answer = client.get("/esper", params={"token": "open"})
    assert (answer.status_code, answer.headers["location"]) == (307, "/esper/?token=open")
    assert client.get("/esperanto").status_code == 404


@pytest.mark.parametrize("path", ["esper", "/a b", "/a//b", "/a?b", "/a/#", "http://x/"])
def test_what_is_no_path_is_refused(tmp_path: Path, capsys, path):
    assert main(["serve", str(tmp_path), "--root-path", path]) == 2
    assert f"--root-path is '{path}', expected the path of an address" in capsys.readouterr().err
