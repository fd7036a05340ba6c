"""esper mcp: answers assistants about runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.options import placeholder
from esper.leyline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mcp:
    """Answer assistants about runs, by the Model Context Protocol on standard input and output.

    It only reads: runs, tables, one SELECT, a host. Assistants start this command themselves; docs/mcp.md shows how.
    """

    path: Annotated[tyro.conf.Positional[Path], placeholder("RUN|DIR")] = Path("runs")
    """A run directory, or a folder of run directories. (runs)"""


def mcp(command: Mcp) -> int:
    """Answer until standard input is closed."""
    try:
        from esper.telemetry.serve.assistants import server_of
    except ImportError as error:
        raise ConfigError(
            f"esper mcp needs the package mcp, and importing it failed ({error}); pip install 'esper-growth[mcp]', or "
            "ask with esper query."
        ) from error
    from esper.telemetry.serve.runs import Runs

    with Runs(command.path) as runs:
        server_of(runs).run("stdio")
    return 0
