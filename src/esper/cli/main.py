"""Which command was asked for, and what is said when it fails.

Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

import io
import os
import sys
from typing import Annotated

import tyro

from esper.cli.evaluate import Evaluate, evaluate
from esper.cli.options import EXIT_ERROR, EXIT_STOPPED
from esper.cli.tasks import Tasks, tasks
from esper.cli.train import Train, train
from esper.leyline.errors import EsperError

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Tasks, tyro.conf.subcommand("tasks")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 2 refused, 130 ended early by a signal)."""
    # Threads that wait by spinning take the core from those that work when a machine is shared; read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no box characters is no reason to fail
    try:
        command: Train | Evaluate | Tasks = tyro.cli(
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
        return tasks(command)
    except EsperError as error:
        print(f"esper: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # `esper --help | head`; what is left in the buffer would fail when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("esper: ended at once", file=sys.stderr)
        return EXIT_STOPPED
