"""esper mcp: a client starts it as a process and asks."""

import json
import os
import sys
from pathlib import Path

import pytest

from esper.cli import main
from served_runs import write_run


@pytest.mark.slow
def test_a_client_starts_the_command_and_asks_over_its_standard_input(tmp_path: Path):
    import anyio
    from mcp import Client, StdioServerParameters

    write_run(tmp_path / "a run")
    arguments = ["-m", "esper", "mcp", str(tmp_path)]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))

    async def ask() -> str:
        async with Client(server) as client:
            return (await client.call_tool("list_runs", {})).content[0].text

    (row,) = json.loads(anyio.run(ask))["runs"]
    assert (row["run"], row["objective"]) == ("a run", 20.0)


def test_a_folder_that_is_not_there_is_refused_on_the_other_stream(tmp_path, capsys):
    assert main(["mcp", str(tmp_path / "missing")]) == 2
    shown = capsys.readouterr()
    assert "does not exist; name a run directory" in shown.err
    assert shown.out == ""


def test_without_the_package_the_extra_is_named(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "esper.telemetry.serve.assistants", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp", str(tmp_path)]) == 2
    assert "pip install 'esper-growth[mcp]'" in capsys.readouterr().err
