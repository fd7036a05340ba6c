"""The entry point: parses the command line, runs a command, and prints its errors.

Commands import torch only when they run, so that `--help` stays fast.
"""

import io
import os
import sys
from typing import Annotated

import tyro

from esper.cli.evaluate import Evaluate, evaluate
from esper.cli.export import Export, export
from esper.cli.grow import Grow, grow
from esper.cli.options import EXIT_ERROR, EXIT_STOPPED
from esper.cli.query import Query, query
from esper.cli.report import Report, report
from esper.cli.search import Search, search
from esper.cli.serve import Serve, serve
from esper.cli.tasks import Tasks, tasks
from esper.cli.train import Train, train
from esper.leyline.errors import EsperError

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Grow, tyro.conf.subcommand("grow")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Search, tyro.conf.subcommand("search")]
    | Annotated[Query, tyro.conf.subcommand("query")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Tasks, tyro.conf.subcommand("tasks")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 error, 130 stopped by a signal."""
    # Waiting OpenMP threads must not spin, which slows a shared machine; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals without box characters
    try:
        command: Train | Evaluate | Grow | Export | Search | Query | Report | Serve | Tasks = tyro.cli(
            Command,
            prog="esper",
            args=arguments,
            description="Networks that grow while they train, and a controller that learns to grow them.",
            config=(tyro.conf.DisallowNone,),
        )
        if isinstance(command, Train):
            return train(command)
        if isinstance(command, Evaluate):
            return evaluate(command)
        if isinstance(command, Grow):
            return grow(command)
        if isinstance(command, Export):
            return export(command)
        if isinstance(command, Search):
            return search(command)
        if isinstance(command, Query):
            return query(command)
        if isinstance(command, Report):
            return report(command)
        if isinstance(command, Serve):
            return serve(command)
        return tasks(command)
    except EsperError as error:
        print(f"esper: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # `esper --help | head`; else flushing the rest would fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("esper: stopped", file=sys.stderr)
        return EXIT_STOPPED
