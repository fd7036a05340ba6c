"""esper serve and esper mcp: runs as a live page, and as answers to assistants."""

import ipaddress
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import tyro

from esper.cli.options import Flag, Names, Text, joined, placeholder
from esper.leyline.errors import ConfigError, importing, refusing
from esper.telemetry.progress import RunConsole

LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Show runs as a live page in the browser, which follows those that are training.

    It only reads. Without --host it can be reached from this machine alone; elsewhere a token is needed, which is in
    the address that is printed.
    """

    path: Annotated[tyro.conf.Positional[Path | None], placeholder("RUN|DIR")] = None
    """A run directory, or a folder with run directories below it."""
    port: int = 8080
    """Port to listen on; 0 chooses a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means all networks."""
    token: Text = None
    """Secret that the address must bring once. (generated where --host can be reached from elsewhere)"""
    allow_host: Annotated[Names, placeholder("NAME ...")] = ()
    """Further names by which browsers reach this machine, e.g. behind a proxy. (not needed with a token)"""
    root_path: Annotated[str, placeholder("/PATH")] = ""
    """Path below which a proxy shows the page, e.g. /esper. (the page is at /)"""
    allow_frames: Flag = False
    """Let other pages, such as a notebook, show this one in a frame."""


def serve(command: Serve) -> int:
    """Answer requests until interrupted."""
    with importing("esper serve needs starlette with uvicorn", "serve", "write a page with esper report"):
        from esper.telemetry.serve.app import LOCAL, server_of
    from esper.telemetry.serve.runs import Runs

    if command.path is None:
        raise ConfigError("nothing to serve is named; give a run directory or a folder of them: esper serve runs")
    if command.token == "":
        raise ConfigError("--token is empty; give a secret, or leave it out to have one made.")
    if not re.fullmatch(r"(/[\w.~-]+)*/?", command.root_path, re.ASCII):
        raise ConfigError(f"--root-path is {command.root_path!r}, expected the path of an address such as /esper.")
    root = command.root_path.rstrip("/")
    token = command.token if command.token or _is_local(command.host) else secrets.token_urlsafe(16)
    shown = f"[{command.host}]" if ":" in command.host else command.host
    names = (*LOCAL, socket.gethostname(), shown, *joined(command.allow_host))
    with Runs(command.path) as runs, _listening(command.host, command.port) as port:
        start = root + (f"/run?run={quote(runs.root.name)}" if runs.is_single else "/")
        secret = f"{'&' if '?' in start else '?'}token={quote(token)}" if token else ""
        RunConsole().say(f"{runs.root} at http://{shown}:{port.getsockname()[1]}{start}{secret} (Ctrl-C ends)")
        with suppress(KeyboardInterrupt):  # the way to end it
            served = server_of(runs, names=names, token=token, root=root, frames=command.allow_frames)
            served.run(sockets=[port])
    return 0


def _is_local(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens; raises ConfigError."""
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"--port is {port}, expected 0 to {LAST_PORT}.")
    way = "choose another with --port, e.g. --port 0 for a free one, or another --host"
    with refusing(ConfigError, f"{host}, port {port}, cannot be listened on", way):
        found = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return found


@dataclass(frozen=True, kw_only=True)
class Mcp:
    """Answer assistants about runs, by the Model Context Protocol on standard input and output.

    It only reads: runs, tables, one SELECT, a host. Assistants start this command themselves; docs/mcp.md shows how.
    """

    path: Annotated[tyro.conf.Positional[Path], placeholder("RUN|DIR")] = Path("runs")
    """A run directory, or a folder of run directories. (runs)"""


def mcp(command: Mcp) -> int:
    """Answer until standard input is closed."""
    with importing("esper mcp needs the package mcp", "mcp", "ask with esper query"):
        from esper.telemetry.serve.assistants import server_of
    from esper.telemetry.serve.runs import Runs

    with Runs(command.path) as runs:
        server_of(runs).run("stdio")
    return 0
