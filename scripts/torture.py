"""Ill-treats the commands, and sees that nothing is lost, nothing hangs, and every error is one paragraph.

    python scripts/torture.py files              each call that touches a file fails, or is the last before a kill
    python scripts/torture.py signals --tries 500     signals at random instants of a run
    python scripts/torture.py inputs --tries 10000    damaged files, read by every command that reads them
    python scripts/torture.py settings --tries 300    wild settings and command lines
    python scripts/torture.py values --tries 300      NaN, infinity and huge numbers in what one host trains with
    python scripts/torture.py soak --minutes 30       memory, open files and sizes of a long run

Every trial has a number, and `--only NUMBER` repeats it; with the commit and the seed it is the same again. Commands
run in processes forked from this one, which has imported everything. Whatever is interrupted is done again, or
continued, and must then be equal to what it is without interruption: digest, steps and best host included.
"""

import contextlib
import ctypes
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal, NamedTuple

import torch
import tyro

SHIM = Path(__file__).with_name("file_faults.c")
LONGEST = 30.0
"""Seconds after which a command counts as hanging."""
MEMORY = 8 << 30
"""Bytes that a command may address."""
CHANGES, ALL = ("kill", "half", "ENOSPC", "EINVAL", "ENOSYS"), ("EIO", "EACCES")
"""Faults of calls that change files, and of those that read too."""
FAULTS = {name: {"kill": 0, "half": -1}.get(name) or getattr(errno, name, 0) for name in (*CHANGES, *ALL)}


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What all kinds of trials have."""

    seed: int = 0
    only: int | None = None
    """The number of one trial."""

    def is_left_out(self, number: int) -> bool:
        """Whether another one is wanted."""
        return self.only not in (None, number)


class Ended(NamedTuple):
    """How a command ended; `code` is negative for a signal, None where it hung and was killed."""

    code: int | None
    text: str
    seconds: float

    @property
    def fault(self) -> str:
        """What is wrong with the way it ended, apart from its result; empty if nothing is."""
        if self.code is None:
            return f"no end after {LONGEST:.0f} s"
        if "Traceback (most recent call last)" in self.text or "Exception ignored" in self.text:
            return "traceback"
        if self.code not in (0, 2, 130, -signal.SIGKILL):
            return f"exit code {self.code}"
        said = [line for line in self.text.splitlines() if line.startswith("esper: ")]
        return "no word of an error" if self.code == 2 and not said and "Error" not in self.text else ""


class Job:
    """A command, or any other `work` that returns an exit code, in a forked process; `before` it and `after` it too."""

    def __init__(
        self,
        work: list[str] | Callable[[], int],
        log: Path,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self.log, self.began = log, time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, written), (2, written)):
                os.dup2(target, number)
            from esper.cli import main

            before()
            if isinstance(work, list):
                sys.argv[1:] = work
            code = main() if isinstance(work, list) else work()
            after()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def ended(self, longest: float = LONGEST) -> Ended:
        """Wait for its end."""
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            seconds = time.monotonic() - self.began
            if done or seconds > longest:
                break
            time.sleep(0.003)
        code: int | None = os.waitstatus_to_exitcode(status) if done else None
        if not done:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        return Ended(code, self.log.read_text(encoding="utf-8", errors="replace"), seconds)


# What is done ---------------------------------------------------------------------------------------------------------

_NETWORK = ("ppo.feature_width=8", "ppo.hidden_width=8", "ppo.update_epochs=1", "ppo.num_minibatches=2")
_SET = ("--set", *_NETWORK, "lifecycle.min_training_epochs=1", "checkpoint_every=1", "governor.snapshot_every=2")


def train(task: str, run: Path, rounds: int = 3) -> list[str]:
    """A training of a second."""
    sizes = ("--num-envs", "3", "--episode-length", "4", "--rounds", str(rounds), "--seed", "1")
    return ["train", "--task", task, *sizes, "--out", str(run), *_SET]


def run_result(run: Path) -> object:
    """Digest, every step, and the bytes of the best host."""
    from esper.telemetry.record.reader import open_record

    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    with open_record([run]) as record:
        rows = record.query("select round, t, host, val_acc, total_params, growth from steps order by round, t, host")
        said = list(record.warnings)
    best = run / "checkpoints" / "best-host.safetensors"
    return summary["state_digest"], repr(rows), best.read_bytes() if best.exists() else b"", said


_TIMES = re.compile(r'"(seconds|update_seconds|started|minutes)": [0-9.eE+-]+')


def files_result(folder: Path, left: str) -> object:
    """The bytes of all files that a command left in a folder, without times and the path of the folder.

    A write that is killed leaves a hidden draft.
    """
    from esper.leyline.files import is_draft

    return {
        str(path.relative_to(folder)): _TIMES.sub("", path.read_text(encoding="latin-1").replace(str(folder), ""))
        for path in sorted((folder / left).rglob("*"))
        if path.is_file() and path.suffix not in (".npz", ".png") and not is_draft(path)
    }


@dataclass(frozen=True)
class Operation:
    """A command, how it is continued, and what it leaves; `needs` are put into the folder first."""

    command: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    result: Callable[[Path], object]
    needs: tuple[str, ...] = ()


def _resumed(task: str, folder: Path) -> list[str]:
    run = folder / "run"
    return ["train", "--resume", str(run)] if (run / "config.toml").exists() else train(task, run)


def operations() -> dict[str, Operation]:
    """What writes files, by name."""

    def same(command: Callable[[Path], list[str]], left: str, *needs: str) -> Operation:
        return Operation(command, command, lambda folder: files_result(folder, left), needs)

    return {
        **{task: Operation(lambda folder, task=task: train(task, folder / "run"),
                           partial(_resumed, task), lambda folder: run_result(folder / "run"))
           for task in ("null", "digits")},
        "export": same(lambda f: ["export", str(f / "run"), "--out", str(f / "net"), "--overwrite"], "net", "run"),
        "evaluate": same(lambda f: ["evaluate", str(f / "run"), "wait_only", "--num-envs", "2", "--out",
                                    str(f / "evaluation")], "evaluation", "run"),
        "search": same(lambda f: ["search", "null", "--num-envs", "2", "--episode-length", "6", "--budget", "200",
                                  "--out", str(f / "found")], "found"),
        "report": same(lambda f: ["report", str(f / "run"), "--num-envs", "0", "--out", str(f / "page.html")], ".",
                       "run"),
    }  # fmt: skip


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Files(Trials):
    """Let each call that touches a file fail, or kill before it."""

    operations: tuple[str, ...] = ()
    """All where none is given."""
    faults: tuple[str, ...] = (*CHANGES, *ALL)
    every: int = 1
    """Try each so-many-th call; which ones is drawn with the seed."""

    def faults_of(self, kind: tuple[str, ...]) -> list[str]:
        """Those of a kind that are tried."""
        return [name for name in self.faults if name in kind]


def main_files(given: Files) -> Iterator[str]:
    """A line for each fault found."""
    shim, draw, number = ctypes.CDLL(None), random.Random(given.seed), 0
    with TemporaryDirectory() as place:
        home = Path(place)
        finished = _finished_run(home)
        for name, operation in operations().items():
            if given.operations and name not in given.operations:
                continue

            def folder_of(trial: str, operation: Operation = operation) -> Path:
                folder = home / trial
                folder.mkdir()
                if operation.needs:
                    shutil.copytree(finished, folder / "run")
                return folder

            wrong, tried = Counter[str](), Counter[str]()
            for reads, faults in ((0, given.faults_of(CHANGES)), (1, given.faults_of(ALL))):
                folder = folder_of("undisturbed")
                read, write = os.pipe()
                arm = partial(shim.faults_arm, bytes(folder), 0, 0, reads)
                tell = lambda write=write: os.write(write, str(shim.faults_count()).encode())  # noqa: E731
                ended = Job(operation.command(folder), home / "log", arm, tell).ended(300)
                assert ended.code == 0, ended
                calls, want = int(os.read(read, 20)), operation.result(folder)
                shutil.rmtree(folder)
                for fault in faults:
                    for call in range(1 + draw.randrange(given.every), calls + 1, given.every):
                        number += 1
                        if given.is_left_out(number):
                            continue
                        folder = folder_of(str(number))
                        arm = partial(shim.faults_arm, bytes(folder), call, FAULTS[fault], reads)
                        said = _trial(operation, folder, home / "log", arm, want)
                        tried[fault] += 1
                        wrong[fault] += bool(said)
                        if said:
                            yield f"{number}: {name}, {fault} at call {call}: {said}"
                        shutil.rmtree(folder)
            print(f"{name}: tried {dict(tried)}, wrong {dict(wrong)}", flush=True)


def _trial(operation: Operation, folder: Path, log: Path, arm: Callable[[], object], want: object) -> str:
    """What is wrong after a fault, when the command has been given again; empty if nothing is."""
    first = Job(operation.command(folder), log, arm).ended()
    if first.fault:
        return f"{first.fault}\n{first.text[-1500:]}"
    with contextlib.suppress(Exception):  # not all there yet
        if operation.result(folder) == want:
            return ""
    second = Job(operation.again(folder), log).ended()
    if second.code != 0:
        return f"after {first.code}: again exit code {second.code}\n{first.text[-600:]}\n--\n{second.text[-1500:]}"
    try:
        return "" if operation.result(folder) == want else f"the result differs\n{first.text[-600:]}"
    except Exception as error:
        return f"the result cannot be read: {error!r}\n{first.text[-600:]}"


def _finished_run(home: Path) -> Path:
    run = home / "finished"
    ended = Job(train("digits", run), home / "log").ended(120)
    assert ended.code == 0, ended
    return run


# Signals --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Signals(Trials):
    """Send signals at random instants, up to three in one run, and continue it."""

    tries: int = 500
    tasks: tuple[str, ...] = ("null", "digits")
    signals: tuple[str, ...] = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


def main_signals(given: Signals) -> Iterator[str]:
    """A line for each fault found."""
    with TemporaryDirectory() as place:
        home, sent = Path(place), Counter[str]()
        undisturbed = {}
        for task in given.tasks:
            ended = Job(train(task, home / task, 6), home / "log").ended(120)
            undisturbed[task] = run_result(home / task), ended.seconds
        number = 0
        while sum(sent.values()) < given.tries:
            number += 1
            draw = random.Random(f"{given.seed} {number}")
            task, times = draw.choice(given.tasks), draw.randint(1, 3)
            want, seconds = undisturbed[task]
            if given.is_left_out(number):
                sent["-"] += times
                continue
            folder = home / str(number)
            folder.mkdir()
            history = []
            for left in range(times, -1, -1):
                run = folder / "run"
                has_begun = (run / "config.toml").exists()
                if (run / "summary.json").exists():
                    break
                job = Job(["train", "--resume", str(run)] if has_begun else train(task, run, 6), home / "log")
                if left:
                    time.sleep(0.01 + draw.uniform(0, 1.1 * seconds / times))
                    kind = draw.choice(given.signals)
                    os.kill(job.pid, getattr(signal, kind))
                    sent[kind] += 1
                    history.append(kind)
                ended = job.ended()
                history.append(f"{ended.code}")
                if ended.fault:
                    yield f"{number}: {task} {history}: {ended.fault}\n{ended.text[-1500:]}"
            try:
                if run_result(run) != want:
                    yield f"{number}: {task} {history}: the result differs"
            except Exception as error:
                yield f"{number}: {task} {history}: {error!r}\n{ended.text[-1500:]}"
            shutil.rmtree(folder)
        print(f"{number} runs, signals {dict(sent)}", flush=True)


# Inputs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Inputs(Trials):
    """Damage a file, and give it to each command that reads it."""

    tries: int = 10_000
    """Damaged files, each read once."""
    by: Literal["functions", "commands"] = "functions"
    """What reads them: a function of esper, or a whole command."""
    files: str = ""
    """Only files whose name contains this."""


_NUMBERS = (None, True, -1, 0, 1, 10**19, 1e308, -1e308, float("nan"), float("inf"), 0.5)
_OTHERS = ("", "x", "\0", "\ud800", "~nobody/x", "/" + "a" * 5000, [], ["x"], [None], {}, {"x": 1}, [[[]]])


def _leaves(tree: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    yield path
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list):
        pairs = enumerate(tree)
    for key, value in pairs:
        yield from _leaves(value, (*path, key))


def nonsense(tree: object, draw: random.Random, evil: str) -> object:
    """The same JSON value with one part replaced, removed or added."""
    path = draw.choice(list(_leaves(tree)))
    values = (*_NUMBERS, *_OTHERS, evil)
    if not path:
        return draw.choice(values)
    parent: object = tree
    for key in path[:-1]:
        parent = parent[key]  # type: ignore[index]
    match draw.randrange(8), parent:
        case 0, dict() | list():
            del parent[path[-1]]  # type: ignore[arg-type]
        case 1, dict():
            parent[draw.choice(("x", "", "\0", "name"))] = draw.choice(values)
        case 2, dict() | list():
            deep: object = "x"
            for _ in range(draw.choice((3, 3000, 100_000))):
                deep = [deep]
            parent[path[-1]] = draw.choice((deep, "9" * 5000, list(range(1000))))  # type: ignore[index]
        case _, dict() | list():
            parent[path[-1]] = draw.choice(values)  # type: ignore[index]
    return tree


def _as_text(value: object) -> str:
    """JSON of a value of any depth."""
    depth = 0
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 100_000 + "]" * 100_000 if depth == 0 else ""


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, inserted, removed, repeated, or cut off."""
    at, much = draw.randrange(len(content) + 1), draw.choice((1, 2, 8, 100, 5000))
    filler = draw.choice((draw.randbytes(much), b"\0" * much, b"\xff" * much, b"[" * much, b'"' * much))
    return {
        0: content[:at],
        1: content[:at] + filler + content[at:],
        2: content[:at] + filler + content[at + much :],
        3: content[:at] + content[at + much :],
        4: content + content[at:],
        5: draw.choice((b"", b"\n", b"null", b"[" * 100_000, b"{}", b"[]", draw.randbytes(1000))),
    }[draw.randrange(6)]


def _replaced_by_no_file(path: Path, draw: random.Random) -> str:
    """Something that is not a regular file in its place."""
    kind = draw.choice(("FIFO", "folder", "dangling link", "loop", "endless", "full", "socket", "nothing"))
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            import socket

            with socket.socket(socket.AF_UNIX) as own, contextlib.chdir(path.parent):
                own.bind(path.name)
        case "nothing":
            pass
        case _:
            targets = {"dangling link": "nowhere", "loop": path.name, "endless": "/dev/zero", "full": "/dev/full"}
            path.symlink_to(targets[kind])
    return kind


def damage(path: Path, draw: random.Random, evil: str) -> str:
    """Damage a file; returns how."""
    content = path.read_bytes()
    how = draw.choice(("bytes", "bytes", "nonsense", "nonsense", "nonsense", "no file"))
    mode = path.stat().st_mode
    if how == "no file":
        path.unlink()
        return _replaced_by_no_file(path, draw)
    changed = None
    if how == "nonsense":
        if path.suffix == ".json":
            changed = _as_text(nonsense(json.loads(content), draw, evil)).encode()
        elif path.suffix == ".jsonl":
            lines = content.splitlines()
            at = draw.randrange(len(lines))
            lines[at] = _as_text(nonsense(json.loads(lines[at]), draw, evil)).encode()
            changed = b"\n".join(lines) + b"\n"
        elif path.suffix == ".toml":
            import tomli_w

            with contextlib.suppress(TypeError, AttributeError, RecursionError, UnicodeEncodeError):
                changed = tomli_w.dumps(nonsense(tomllib.loads(content.decode()), draw, evil)).encode()  # type: ignore[arg-type]
        elif path.suffix == ".safetensors" and "net" not in path.parts:
            from esper.runs.state_file import read_state, write_state

            about, state = read_state(path)
            name = draw.choice(sorted(state))
            if draw.random() < 0.3:
                state[name] = draw.choice((state[name].flatten()[:1], state[name].double(), state[name] * float("nan")
                                           if state[name].is_floating_point() else -state[name].long()))  # fmt: skip
                if draw.random() < 0.5:
                    del state[name]
            else:
                about = nonsense(about, draw, evil)  # type: ignore[assignment]
            with contextlib.suppress(RecursionError):
                write_state(path, about, state)
            return "nonsense with a valid checksum"
    path.write_bytes(damaged_bytes(content, draw) if changed is None else changed)
    path.chmod(mode)
    return "bytes" if changed is None else how


def _readers(folder: Path) -> dict[str, list[list[str] | Callable[[], int]]]:
    """The commands that read the files of a folder, by folder."""
    run, net, found = (str(folder / name) for name in ("run", "net", "found"))
    sizes = ("--num-envs", "2")

    def load() -> int:
        import esper
        from esper.leyline.errors import EsperError

        try:
            print(esper.load(net))
        except EsperError as error:
            print(f"esper: {error}", file=sys.stderr)
            return 2
        return 0

    return {
        "run": [
            ["train", "--resume", run, "--rounds", "4"],
            ["evaluate", run, "wait_only", *sizes, "--out", str(folder / "run" / "evaluation")],
            ["report", run],
            ["query", run, "select * from steps limit 3"],
            ["query", run],
            ["export", run, "--out", str(folder / "new")],
            ["grow", "digits", "--method", run, "--out", str(folder / "new")],
        ],
        "net": [load, ["export", net, "--out", str(folder / "new")]],
        "found": [["evaluate", f"{found}/{name}", "--task", "null", *sizes, "--episode-length", "6"]
                  for name in ("best_schedule.json", "search.json")],
    }  # fmt: skip


def _inputs(home: Path) -> Path:
    """A run that was evaluated and reported, a network and policies."""
    work = home / "whole"
    run = _finished_run(home).rename(home / "run")
    work.mkdir()
    run = run.rename(work / "run")
    jobs = [
        ["evaluate", str(run), "wait_only", "--num-envs", "2", "--out", str(run / "evaluation")],
        ["report", str(run)],
        ["export", str(run), "--out", str(work / "net")],
        ["search", "null", "--num-envs", "2", "--episode-length", "6", "--budget", "200", "--out", str(work / "found")],
    ]
    for job in jobs:
        ended = Job(job, home / "log").ended(120)
        assert ended.code == 0, ended
    return work


def _functions(folder: Path, file: Path) -> list[Callable[[], object]]:
    """The functions that read a file, without what the commands do then."""
    from esper.api.run import Run
    from esper.export.network import load
    from esper.runs.assembly.presets import config_of_run
    from esper.runs.training import best_host, checkpoint
    from esper.tamiyo.policy_files import read_policy
    from esper.telemetry.record.reader import open_record
    from esper.telemetry.report.page import payloads_of
    from esper.telemetry.serve.runs import Row

    run, states = folder / "run", folder / "run" / "checkpoints"

    def record() -> object:
        with open_record([run]) as found:
            return payloads_of(found, lambda *_: None)

    def overview() -> object:
        row = Row("run", run)
        row.look()
        row.read_on(time.monotonic() + LONGEST)
        return row

    if file.parts[0] == "net":
        return [lambda: load(folder / "net")]
    if file.parts[0] == "found":
        return [lambda: read_policy(folder / file, _null_spec())]
    if file.suffix == ".safetensors":
        return [lambda: best_host.read(states) if "host" in file.name else checkpoint.load_newest(states)]
    every = [record, overview, lambda: config_of_run(run), lambda: (Run(run).summary, Run(run).rounds)]
    return every[:2] if file.suffix == ".parquet" else every


@cache
def _null_spec() -> Any:
    from esper.runs.assembly.assemble import engine_of
    from esper.runs.assembly.presets import resolve

    config = resolve({"task": "null", "num_envs": 2, "episode_length": 6})
    return engine_of(config, None, torch.device("cpu")).spec


def _read(numbers: Iterable[int], given: Inputs, whole: Path, files: list[Path], evil: Path) -> int:
    """Damage files and read them in this process; prints what is wrong."""
    from esper.leyline.errors import EsperError, in_a_sentence

    for number in numbers:
        draw = random.Random(f"{given.seed} {number}")
        file, folder = draw.choice(files), whole.parent / str(number)
        shutil.copytree(whole, folder)
        how = damage(folder / file, draw, str(evil))
        print(f"{number}: {file} {how}", flush=True)
        try:
            with in_a_sentence():
                draw.choice(_functions(folder, file))()
        except EsperError:
            pass
        except BaseException:
            import traceback

            traceback.print_exc()
        shutil.rmtree(folder)
    return 0


BATCH = 20
"""Damaged files that one process reads."""


def main_inputs(given: Inputs) -> Iterator[str]:
    """A line for each fault found."""
    with TemporaryDirectory() as place:
        home = Path(place)
        whole = _inputs(home)
        marker, evil = home / "executed", home / "evil.py"
        evil.write_text(f"open({str(marker)!r}, 'w')\n")
        files = [path.relative_to(whole) for path in sorted(whole.rglob("*"))
                 if path.is_file() and given.files in str(path) and path.suffix not in (".html", ".py")]  # fmt: skip
        kinds, slowest = Counter[str](), ("", 0.0)
        numbers = [number for number in range(1, given.tries + 1) if not given.is_left_out(number)]
        for number in [] if given.by == "commands" else numbers[::BATCH]:
            batch = [n for n in numbers if number <= n < number + BATCH]
            ended = Job(partial(_read, batch, given, whole, files, evil), home / "log").ended(LONGEST + BATCH)
            kinds[given.by] += len(batch)
            if ended.fault or marker.exists():
                yield f"{ended.fault or 'a file was executed'}\n{ended.text[-3000:]}"
                marker.unlink(missing_ok=True)
                for left in home.iterdir():
                    if left.name.isdecimal():
                        shutil.rmtree(left)
        for number in numbers if given.by == "commands" else []:
            draw = random.Random(f"{given.seed} {number}")
            file, folder = draw.choice(files), home / str(number)
            shutil.copytree(whole, folder)
            how = damage(folder / file, draw, str(evil))
            reader = draw.choice(_readers(folder)[file.parts[0]])
            ended = Job(reader, home / "log").ended()
            what = f"{number}: {file} {how}, {reader[0] if isinstance(reader, list) else 'load'}"
            kinds[how] += 1
            slowest = max(slowest, (what, ended.seconds), key=lambda pair: pair[1])
            if marker.exists():
                marker.unlink()
                yield f"{what}: a file that was named in it was executed"
            if ended.fault:
                yield f"{what}: {ended.fault}\n{ended.text[-1500:]}"
            shutil.rmtree(folder)
        print(f"{sum(kinds.values())} damaged files {dict(kinds)}; slowest command {slowest}", flush=True)


# Settings -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings(Trials):
    """Give settings and options wild values."""

    tries: int = 300


_WILD = ("-1", "0", "1", "2", "3", "1e9", "1e308", "nan", "inf", "-inf", str(10**6), str(10**9), str(10**12),
         str(10**19), "1e-300", "true", "x", '""', "[]", '["x"]', "{}", '"\\u0000"', "~nobody/x", "/" + "a" * 5000,
         "0.5", "0.999999999")  # fmt: skip


def main_settings(given: Settings) -> Iterator[str]:
    """A line for each fault found."""
    from esper.runs.assembly.presets import resolve
    from esper.runs.assembly.values import flat, plain

    names = sorted(flat(plain(resolve({"task": "null"}))))
    with TemporaryDirectory() as place:
        home = Path(place)
        slowest = ("", 0.0)
        for number in range(1, given.tries + 1):
            draw = random.Random(f"{given.seed} {number}")
            if given.is_left_out(number):
                continue
            run = home / str(number)
            chosen = [f"{name}={draw.choice(_WILD)}" for name in draw.sample(names, draw.choice((1, 1, 1, 2)))]
            task = draw.choice(("null", "digits"))
            ended = Job([*train(task, run, 1), *chosen], home / "log").ended()
            slowest = max(slowest, (f"{number}: {task} {chosen}", ended.seconds), key=lambda pair: pair[1])
            if ended.fault:
                yield f"{number}: {task} {' '.join(chosen)[:200]}: {ended.fault}\n{ended.text[-1500:]}"
            shutil.rmtree(run, ignore_errors=True)
        print(f"{given.tries} settings; slowest {slowest}", flush=True)


# Values ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Values(Trials):
    """Put NaN, infinity and huge numbers into what a host trains with; the other hosts must not notice."""

    tries: int = 300
    executors: tuple[str, ...] = ("streamed", "native")


_HOSTS, _STEPS, _STRANGE = 4, 12, (float("nan"), float("inf"), -float("inf"), 1e30, -1e38, 0.0)


def _episode(executor: str, step: int, change: Callable[[dict[str, torch.Tensor]], object]) -> list[Any]:
    """What the steps report of an episode of digits whose state is changed before a step, and its state at the end."""
    from esper.leyline.tensor_dataclass import named_tensors
    from esper.runs.assembly.assemble import dataset_of, device_of, engine_of
    from esper.runs.assembly.clients import baseline_of
    from esper.runs.assembly.presets import resolve

    sizes = {"num_envs": _HOSTS, "episode_length": _STEPS, "threads": 1, "lifecycle": {"min_training_epochs": 1}}
    config = resolve({"task": "digits", "executor": executor, "governor": {"snapshot_every": 2}} | sizes)
    device, reports = device_of(config), list[Any]()
    engine = engine_of(config, dataset_of(config, device), device, on_step=reports.append)
    client = baseline_of("heuristic", config, engine.spec)
    engine.reset(client, episode=0)
    for t in range(_STEPS):
        if t == step:
            state, own = engine.state_dict(), client.state_dict()
            change(state)
            engine.load_state_dict(state, client)
            client.load_state_dict(own)
        engine.step(client)
    engine.end_episode()
    engine.outcome()
    panics = torch.tensor([[int(reason) for reason in report.panic_reason] for report in reports]).T
    found = [x for report in reports for x in vars(report).values() if getattr(x, "shape", ())[:1] == (_HOSTS,)]
    weights = [x for name, x in engine.state_dict().items() if name.startswith("executor.population")]
    control = [x for _, x in named_tensors(engine.state) if x.shape[:1] == (_HOSTS,)]
    return [panics, *(torch.tensor(x) for x in found), *(x.reshape(_HOSTS, -1) for x in weights), *control]


def _put(draw: random.Random, host: int, said: list[str], state: dict[str, torch.Tensor]) -> None:
    """Put a strange number into some weights, moments or buffers of a host; `said` gets what, and where."""
    name = draw.choice([name for name, x in state.items() if name.startswith("executor.population.") and x.numel()])
    value, share = draw.choice(_STRANGE), draw.choice((1e-4, 0.1, 1.0))
    row = state[name].view(_HOSTS, -1)[host]
    row[torch.rand(row.shape, generator=torch.Generator().manual_seed(draw.randrange(2**31))) < share] = value
    row[draw.randrange(len(row))] = value
    said += [name.removeprefix("executor.population."), str(value)]


def main_values(given: Values) -> Iterator[str]:
    """A line for each fault found."""
    tried = Counter[str]()
    want = {executor: _episode(executor, -1, lambda _: None) for executor in given.executors}
    for number in range(1, given.tries + 1):
        draw = random.Random(f"{given.seed} {number}")
        executor, host, step = draw.choice(given.executors), draw.randrange(_HOSTS), draw.randrange(1, _STEPS)
        if given.is_left_out(number):
            continue
        said = list[str]()
        place = f"{number}: {executor}, host {host}, step {step}"
        try:
            found = _episode(executor, step, partial(_put, draw, host, said))
        except Exception as error:
            yield f"{place}, {said}: {error!r}"
            continue
        tried[said[0]] += 1
        others = [i for i in range(_HOSTS) if i != host]
        pairs = enumerate(zip(found, want[executor], strict=True))
        differ = [i for i, (a, b) in pairs if not torch.equal(a[others].nan_to_num(12.3), b[others].nan_to_num(12.3))]
        if differ:
            yield f"{place}, {said}: other hosts differ in {differ[:9]}"
        if said[0] == "host.params" and said[1] in ("nan", "inf", "-inf") and not found[0][host].any():
            yield f"{place}, {said}: nothing was reported"
    print(f"{sum(tried.values())} values {dict(tried)}", flush=True)


# Soak -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Soak(Trials):
    """Look at the memory, the open files and the sizes of a long run."""

    minutes: float = 30.0
    task: str = "null"


def _looked_at(pid: int, run: Path) -> dict[str, float]:
    """What a run has and has written, as it is now."""
    status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = Counter[str]()
    for path in run.rglob("*"):
        with contextlib.suppress(OSError):  # a checkpoint that is removed now
            sizes[path.relative_to(run).parts[0]] += path.lstat().st_size if path.is_file() else 0
    return {
        "MB of memory": int(status["VmRSS"].split()[0]) / 1024,
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "MB of checkpoints": sizes["checkpoints"] / 1e6,
        "rounds": sum(1 for _ in (run / "metrics.jsonl").open("rb")),
        "kB of metrics a round": sizes["metrics.jsonl"] / 1e3,
        "kB of events a round": sizes["events.jsonl"] / 1e3,
        "kB of record a round": sizes["record"] / 1e3,
    }


def main_soak(given: Soak) -> Iterator[str]:
    """A line for each figure that is more than 5 % higher in the last quarter of the time than in the second one."""
    with TemporaryDirectory() as place:
        home, looks = Path(place), list[dict[str, float]]()
        run, ends = home / "run", time.monotonic() + 60 * given.minutes
        job = Job(train(given.task, run, 10**6), home / "log")
        while time.monotonic() < ends:
            time.sleep(60 * given.minutes / 200)
            if (run / "metrics.jsonl").exists():
                looks.append(_looked_at(job.pid, run))
        os.kill(job.pid, signal.SIGINT)
        ended = job.ended(60 * given.minutes + LONGEST)
        if ended.code != 130 or ended.fault:
            yield f"{ended.fault or ended.code}\n{ended.text[-1500:]}"
        quarter = len(looks) // 4
        for name in looks[0]:
            figures = [look[name] / (look["rounds"] if "a round" in name else 1) for look in looks]
            second, last = (sorted(part)[quarter // 2] for part in (figures[quarter : 2 * quarter], figures[-quarter:]))
            print(f"{name}: {second:.1f}, later {last:.1f}", flush=True)
            if name != "rounds" and last > 1.05 * second:
                yield f"{name} grows from {second:.2f} to {last:.2f}"


# ----------------------------------------------------------------------------------------------------------------------


MODES = {"files": (Files, main_files), "signals": (Signals, main_signals), "inputs": (Inputs, main_inputs),
         "settings": (Settings, main_settings), "values": (Values, main_values), "soak": (Soak, main_soak)}  # fmt: skip


def main(mode: str, arguments: list[str]) -> int:
    """Print what is wrong, and how much was tried."""
    built = os.environ.get("TORTURE_SHIM")
    if built is None:  # begin again with the shim, which is loaded before everything else
        built = str(Path(mkdtemp(), "faults.so"))
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", built, str(SHIM), "-ldl"], check=True)
        variables = os.environ | {"TORTURE_SHIM": built, "LD_PRELOAD": built, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], variables)
    shutil.rmtree(Path(built).parent)
    import esper.api.grow
    import esper.cli
    import esper.runs.evaluation.search
    import esper.telemetry.report.page  # noqa: F401

    kind, run = MODES[mode]
    faults = 0
    for line in run(tyro.cli(kind, args=arguments, prog=f"torture.py {mode}")):  # type: ignore[operator]
        faults += 1
        print(line, flush=True)
    print(f"{faults} faults")
    return min(faults, 1)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in MODES:
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    print(__doc__)
    sys.exit(2)
