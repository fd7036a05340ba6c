"""esper serve: its address, its token, and what it refuses."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from esper.cli import main
from esper.cli.record import _is_local
from served_runs import write_run


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("192.168.1.5", False),
     ("gpu-box", False), ("", False)],
)  # fmt: skip
def test_only_addresses_of_the_machine_itself_need_no_token(host, local):
    assert _is_local(host) is local


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to serve is named"),
        (["{folder}/missing"], "does not exist; name a run directory"),
        (["{folder}", "--port", "70000"], "--port is 70000, expected 0 to 65535"),
        (["{folder}", "--port", "{taken}"], "choose another with --port"),
        (["{folder}", "--host", "256.1.1.1", "--port", "0"], "cannot be listened on"),
        (["{folder}", "--token", ""], "--token is empty"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_way_out(tmp_path, capsys, arguments, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", *(text.format(folder=tmp_path, taken=port) for text in arguments)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("host", "root", "needs_token"), [("127.0.0.1", "/esper", False), ("0.0.0.0", "", True)])
def test_the_printed_address_opens_the_page_and_an_interrupt_ends_it(
    tmp_path: Path, host: str, root: str, needs_token: bool
):
    run = write_run(tmp_path / "a run")
    options = ["--port", "0", "--host", host, "--root-path", f"{root}/"]
    command = [sys.executable, "-m", "esper", "serve", str(run), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r"(http://\S+)", line)
        assert found
        assert f"http://{host}:" in line
        assert re.search(rf":\d+{root}/run\?run=a%20run", line)
        assert ("&token=" in line) is needs_token
        address = found[1].replace("0.0.0.0", "127.0.0.1")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert b"<main" in answer.read()
        origin, _, query = address.partition("/run")
        data = f"{origin}/api/curves{query}"
        with urllib.request.urlopen(data, timeout=60) as answer:
            assert answer.read().startswith(b'{"a run":')
        stream = urllib.request.urlopen(data.replace("curves", "events"), timeout=60)
        assert stream.readline() == b"event: ready\n"
        process.send_signal(signal.SIGINT)
        with stream:
            assert b"" in iter(stream.readline, None)  # it ends by itself
        assert process.wait(60) == 0
        assert process.stderr
        assert process.stderr.read() == ""
