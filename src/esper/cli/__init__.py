"""The entry point: parses the command line, runs a command, and prints its errors.

Commands import torch only when they run, so that `--help` stays fast.
"""

import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro

import esper
from esper.cli.evaluate import Evaluate, Search, evaluate, search
from esper.cli.grow import Export, Grow, export, grow
from esper.cli.options import EXIT_ERROR, EXIT_STOPPED, given_arguments, names_first
from esper.cli.record import Mcp, Query, Report, Serve, mcp, query, report, serve
from esper.cli.train import Tasks, Train, tasks, train
from esper.leyline.errors import (
    ConfigError,
    EsperError,
    Stopped,
    in_a_sentence,
    nearest,
    read_in_a_shell,
    refusing_exit,
)
from esper.telemetry.progress import RunConsole

COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "train": (Train, train),
    "evaluate": (Evaluate, evaluate),
    "grow": (Grow, grow),
    "export": (Export, export),
    "search": (Search, search),
    "query": (Query, query),
    "report": (Report, report),
    "serve": (Serve, serve),
    "mcp": (Mcp, mcp),
    "tasks": (Tasks, tasks),
}
"""The options of each command, and what it does."""
_OF_RANKS = ("train", "evaluate", "search")
"""Commands whose work ranks can share. The others look at the environment alone, because `is_launched` needs torch."""
_ABOUT = "Networks that grow while they train, and a controller that learns it (--version)"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 error, 130 stopped by a signal.

    Without `arguments` it is the whole process: signals end it like Ctrl-C, and output that cannot be written is left
    out, so that the work is done all the same.
    """
    if arguments is not None:
        return _run(arguments)
    outputs = _lasting_outputs()
    try:
        code = _run(sys.argv[1:])
    except SystemExit as error:  # of --help, and of wrong options
        code = error.code if isinstance(error.code, int) else EXIT_ERROR
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    for output in outputs:
        if output.refused is not None:
            print(f"esper: the output cannot be written ({output.refused.strerror})", file=sys.stderr)
            return EXIT_ERROR
    return code


def _run(given: list[str]) -> int:
    # Waiting OpenMP threads must not spin, which slows a shared machine; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "WORLD_SIZE" in os.environ:  # what goes wrong between ranks is said in a sentence, not in a C++ trace
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals without box characters
    given_arguments[:] = given
    if given[:1] == ["--version"]:
        print(f"esper {esper.__version__}")
        return 0
    try:
        with read_in_a_shell(), in_a_sentence(), _warnings_in_a_line():
            name = given[0] if given else ""
            if name not in COMMANDS and name and not name.startswith("-"):
                raise ConfigError(f"unknown command {name!r}; {nearest(name, COMMANDS)}")
            if name not in COMMANDS:
                all_of_them: Any = reduce(
                    or_, (Annotated[of, tyro.conf.subcommand(n)] for n, (of, _) in COMMANDS.items())
                )
                shown = io.StringIO()
                try:
                    with redirect_stdout(shown):
                        tyro.cli(all_of_them, prog="esper", args=given, description=_ABOUT)  # --help, or an error
                finally:  # the names are listed below; in the line of usage they are wider than a terminal
                    print(shown.getvalue().replace(f"[-h] {{{','.join(COMMANDS)}}}", "COMMAND [-h]"), end="")
            options, run = COMMANDS[name]
            if name not in _OF_RANKS and os.environ.get("WORLD_SIZE", "1") != "1" and "LOCAL_RANK" in os.environ:
                raise ConfigError(f"esper {name} works in one process; start it without torchrun.")
            config = (tyro.conf.DisallowNone,)
            command: Any = tyro.cli(options, prog=f"esper {name}", args=names_first(options, given[1:]), config=config)
            with refusing_exit():
                return run(command)
    except EsperError as error:
        if getattr(error, "is_printed", os.environ.get("LOCAL_RANK", "0") != "0"):  # by another rank
            return EXIT_ERROR
        print(f"esper: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:  # `esper --help | head`
        _drop_output()
        return 0
    except (KeyboardInterrupt, ImportError) as error:
        # where a compiled module was just being imported, Ctrl-C is the cause of an ImportError
        if isinstance(error, ImportError) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        print(f"esper: {error if isinstance(error, Stopped) else 'stopped'}", file=sys.stderr)
        return EXIT_STOPPED


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Each warning inside is printed once, by the first rank, without the place in the code."""
    usual, said = warnings.formatwarning, set[str]()

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = f"warning: {' '.join(str(message).split())}\n"
        is_new = text not in said and not RunConsole.silent
        said.add(text)
        return text if is_new else ""

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _drop_output() -> None:
    """What is still in the buffer of a closed pipe would fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Output(io.FileIO):
    """Standard output or error, which loses what a full disk or a closed terminal refuses; a closed pipe it says."""

    refused: OSError | None = None

    def write(self, data: Any, /) -> int:  # noqa: ANN401 -- a buffer
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.refused = error
            return len(data)


def _lasting_outputs() -> list[_Output]:
    """Make the streams of this process `_Output`, and signals a KeyboardInterrupt."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    outputs = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: output is refused, and errors, which could not say so, are lost
            closed = os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_WRONLY)
            stream = open(closed, "w", closefd=False)  # noqa: SIM115
        outputs.append(_Output(stream.fileno(), "w", closefd=False))
        lines = stream.line_buffering or name == "stderr"
        flushing = {"line_buffering": lines, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(outputs[-1]), stream.encoding, **flushing))
    return outputs
