"""Who may read: each request that is refused, with its reason, and those that are not."""

import pytest
from starlette.testclient import TestClient

from esper.telemetry.serve.app import FRAMED, HEADERS, application
from esper.telemetry.serve.runs import Runs

EVERYWHERE = ("/", "/run", "/assets/live.js", "/api/overview", "/api/runs?run=a", "/api/events", "/nowhere")
LOCAL = "http://127.0.0.1:8080"


@pytest.fixture
def client(runs: Runs) -> TestClient:
    return TestClient(application(runs), base_url=LOCAL)


@pytest.fixture
def guarded(runs: Runs) -> TestClient:
    return TestClient(application(runs, token="pass word"), base_url="http://192.168.1.5:8080")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/assets/live.js", "/api/overview", "/api/events"])
def test_nothing_but_reading_is_possible(client, method, path):
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost.evil", "[127.0.0.1"]
)
@pytest.mark.parametrize("path", EVERYWHERE)
def test_a_foreign_name_that_points_here_is_refused(client, host, path):
    answer = client.get(path, headers={"Host": host})
    assert (answer.status_code, answer.text) == (400, "Invalid host header")


def test_a_name_that_was_allowed_is_answered(runs):
    client = TestClient(application(runs, names=("gpu-box",)), base_url=LOCAL)
    assert client.get("/", headers={"Host": "gpu-box:8080"}).status_code == 200
    assert client.get("/", headers={"Host": "localhost"}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/api/events", "/api/overview"])
def test_pages_of_others_get_neither_events_nor_data(client, headers, path):
    answer = client.get(path, headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", EVERYWHERE)
@pytest.mark.parametrize("headers", [{}, {"Host": "evil.example"}, {"Host": "[evil"}])
@pytest.mark.parametrize("token", [None, "wrong", "pass", "pass word "])
def test_without_the_token_nothing_is_shown(guarded, path, headers, token):
    answer = guarded.get(path, params=None if token is None else {"token": token}, headers=headers)
    assert answer.status_code == 401
    assert "needs its token" in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("token", ["pass word", "\u5bc6\u7801; x=1"])
def test_the_token_in_the_address_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(runs, token):
    client = TestClient(application(runs, token=token), base_url="http://192.168.1.5:8080")
    answer = client.get("/", params={"token": token})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("esper-8080=")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert client.get("/api/overview").status_code == 200  # the client kept it
    client.cookies.clear()
    assert client.get("/api/overview", headers={"Cookie": "esper-8080=guess"}).status_code == 401


def test_servers_on_other_ports_and_foreign_cookies_do_not_log_out(runs):
    clients, cookies = {}, []
    for port in (8080, 8081):
        clients[port] = TestClient(application(runs, token=f"of {port}"), base_url=f"http://127.0.0.1:{port}")
        answer = clients[port].get("/", params={"token": f"of {port}"})
        cookies.append(answer.headers["set-cookie"].partition(";")[0])
        clients[port].cookies.clear()
    header = "; ".join(['settings={"dark": true, "x": [1]}', cookies[0], 'b=a"c', cookies[1]])
    for client in clients.values():
        assert client.get("/api/overview", headers={"Cookie": header}).status_code == 200


@pytest.mark.parametrize("path", [*EVERYWHERE[:-2], "/nowhere", "/api/runs?run=nope"])
def test_every_answer_forbids_foreign_scripts_and_frames_unless_they_were_asked_for(runs, client, path):
    headers = client.get(path).headers
    assert all(headers[name] == value for name, value in HEADERS.items())
    rules = headers["content-security-policy"].split("; ")
    assert [rule for rule in rules if rule.startswith("script-src")] == ["script-src 'self'"]
    assert (rules[-1], headers["x-frame-options"]) == ("frame-ancestors 'none'", "DENY")
    framed = TestClient(application(runs, frames=True), base_url=LOCAL).get(path).headers
    assert framed["content-security-policy"].split("; ") == rules[:-1]
    assert {name: framed.get(name) for name in HEADERS} == {**HEADERS, **FRAMED, "X-Frame-Options": None}


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "%2fetc%2fpasswd", "NOTICE.md"])
def test_only_files_of_the_page_are_given(client, name):
    assert client.get(f"/assets/{name}").status_code == 404
