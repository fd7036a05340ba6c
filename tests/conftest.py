"""Puts this folder on the import path, and what many tests need.

A finished run is made once per process, and copied where a test changes or continues it. The kinds are those of
`small_runs.OPTIONS`; rounds and further options make other runs, each once.

    run = shared_run("null", 3)                                 not to be changed; also for fixtures of modules
    run = finished_run("tiny", 2, "--set", "ppo.lr=1e-3")       a copy in the folder of the test
"""

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from beartype._check.code import codemain
from hypothesis import settings

codemain.getrandbits = random.Random(0).getrandbits  # shape checks choose items of a list without the global generator
settings.register_profile("busy machines", deadline=None)  # of an example: others may be at work
settings.load_profile("busy machines")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of the machine from all tests but those that ask for one: the others expect what a CPU does."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`shared_run(kind="null", rounds=3, *options)`: the one run of these settings, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("finished"), dict[tuple[object, ...], Path]()

    def run(kind: str = "null", rounds: int = 3, *options: str) -> Path:
        import small_runs

        key = (kind, rounds, *options)
        if key not in made:
            path = folder / str(len(made)) / "run"
            path.parent.mkdir()
            with redirect_stdout(StringIO()):
                assert small_runs.train(path, kind, rounds, *options) == 0
            made[key] = path
        return made[key]

    return run


@pytest.fixture
def finished_run(shared_run: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`finished_run(kind="null", rounds=3, *options, name="run")`: a copy in the folder of the test."""

    def copied(kind: str = "null", rounds: int = 3, *options: str, name: str = "run") -> Path:
        return Path(shutil.copytree(shared_run(kind, rounds, *options), tmp_path / name))

    return copied


@pytest.fixture(scope="session", autouse=True)
def _short_trials() -> Iterator[None]:
    """One batch tells the time of a pass, which no test compares with a clock: every run and growth begins with it."""
    from esper.tolaria import memory  # not before the import hook of the shape checks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_TRIAL", 0.0)
        yield


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Whether a file, or a folder with all that is in it, was synced as it is now; what is renamed must have been."""
    sizes: dict[int, int] = {}  # of each inode when it was synced last; none of a folder in which a name changed
    fsync, rename = os.fsync, os.rename

    def is_synced(path: Path) -> bool:
        found = path.lstat()
        synced = sizes.get(found.st_ino)
        return synced == found.st_size if stat.S_ISREG(found.st_mode) else synced is not None

    def whole(path: Path) -> bool:
        return all(map(is_synced, (path, *path.rglob("*"))))

    def note(descriptor: int) -> None:
        fsync(descriptor)
        sizes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def checked(source: Path, target: Path) -> None:
        assert whole(source), f"{source} gets the name {target} before it is on the disk"
        rename(source, target)
        sizes.pop(Path(target).parent.stat().st_ino, None)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", checked)
    return whole


@pytest.fixture
def no_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    """No listener but what the test registers itself."""
    from esper.telemetry import sinks

    monkeypatch.setattr(sinks, "_LISTENERS", {})


@pytest.fixture(autouse=True)
def _tasks_of_a_test_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is not listed in another."""
    from esper.tasks import registry  # not before the import hook of the shape checks

    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
