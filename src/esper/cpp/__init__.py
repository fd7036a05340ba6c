"""Our C++: compiles it on first use, loads it through ctypes, and keeps the libraries in the cache folder of the user.

    <cache>/esper/cpp/<name>-<digest>.so      name: fingerprint of the inputs; digest: SHA-256 of the file's bytes

Compiling takes seconds, because no PyTorch headers are included. A library is rebuilt whenever its sources, the
compiler, its options or the processor change. $ESPER_CXXFLAGS adds options, such as -fsanitize=address.

A library is code. It is loaded only from a folder that nobody else can write, and only if its bytes match the digest;
otherwise it is removed and rebuilt. A new one is renamed into place, so processes may build at the same time.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import TypeVar

from esper.leyline.errors import ConfigError, in_shell
from esper.leyline.files import sync_file
from esper.leyline.ranks import group

_SOURCES = Path(__file__).parent
_OPTIONS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC",
)  # fmt: skip
_LONG_VECTORS = "-mprefer-vector-width=512"
"""Compilers prefer shorter vectors even where the processor has these, which is 6 % slower here."""
_SECONDS = 300
L = TypeVar("L")


def compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: $CXX, which may contain options, or the first of c++, g++ and clang++ found."""
    named = os.environ.get("CXX")
    for command in [named] if named else ["c++", "g++", "clang++"]:
        try:
            name, *options = shlex.split(command)
        except ValueError:  # empty, or unbalanced quotes
            continue
        if path := shutil.which(name):
            return (path, *options)
    return None


def load(
    source: str | Path, bind: Callable[[Path], L], *, what: str, alternative: str, options: tuple[str, ...] = ()
) -> L:
    """Compile `source` (below this folder) unless it is cached, and return `bind(library)`, which loads it.

    `options` are given to the compiler. Error messages name `what` needs the library, and the `alternative`.

    Raises:
        ConfigError: there is no compiler, it failed, or the library cannot be stored or loaded safely.
    """
    path, command = _SOURCES / source, compiler()
    if command is None:
        named = os.environ.get("CXX")
        found = f"CXX names {named!r}, which is not there" if named else "none of c++, g++ and clang++ is there"
        raise ConfigError(f"{what} needs a C++ compiler, but {found}; {alternative}.")
    try:
        target = _output([*command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
        long = (_LONG_VECTORS,) if b"__AVX512F__" in target else ()
        options = (*_OPTIONS, *options, *long, *shlex.split(os.environ.get("ESPER_CXXFLAGS", "")))
        name = f"{path.stem}-{fingerprint(command, target, options, path.parent)}"
        build = [*command, *options, str(path), "-o"]

        def make(draft: Path) -> None:
            if in_shell() and group().is_first:
                with suppress(OSError):  # of a terminal that was closed
                    print(f"esper: compiling {what} for this machine, once", file=sys.stderr, flush=True)
            _output([*build, str(draft)])

        with library(cache_folder(), name, make) as built:
            return bind(built)
    except _CompilerError as error:
        raise ConfigError(f"{command[0]} could not compile {what} ({error}); {alternative}.") from error
    except OSError as error:
        raise ConfigError(
            f"the library of {what} cannot be stored or loaded ({error}); set XDG_CACHE_HOME to a folder of yours from "
            f"which programs may be run, or {alternative}."
        ) from error


def fingerprint(command: Sequence[str], target: bytes, options: Sequence[str], sources: Path) -> str:
    """Digest of the compiler, its predefined macros (`target`, which depend on the processor), options and sources."""
    digest = hashlib.sha256(repr((command, target, options)).encode())
    for source in sorted(sources.iterdir()):
        digest.update(f"{source.name}:{source.stat().st_size}:".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


class _CompilerError(Exception):
    """The compiler failed."""


def _output(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _CompilerError(f"took more than {_SECONDS} s") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines()
        first_error = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise _CompilerError(first_error.strip())
    return done.stdout


# -- the cache --------------------------------------------------------------------------------------------------------

_OTHERS_MAY_WRITE = 0o022
_DRAFT, _LEFT = ".draft-", 3600.0
"""Name of a library that is being compiled, and seconds after which nobody is compiling it any more."""


def cache_folder() -> Path | None:
    """`esper/cpp` in $XDG_CACHE_HOME or $HOME/.cache; None if neither is set."""
    named, home = (Path(os.environ.get(variable, "")) for variable in ("XDG_CACHE_HOME", "HOME"))
    if not named.is_absolute():
        named = home / ".cache"
    return named / "esper" / "cpp" if named.is_absolute() else None


@contextmanager
def library(folder: Path | None, name: str, make: Callable[[Path], object]) -> Iterator[Path]:
    """The library of this name; after the `with` block the file may be gone, but a loaded library stays loaded.

    Args:
        folder: the cache; if it is None or not writable, a temporary folder of this process is used.
        name: fingerprint of what the library is made of.
        make: writes the library.

    Raises:
        ConfigError: another user owns the folder or may write into it.
    """
    found = _intact(folder, name) if folder is not None and _is_private(folder) else None
    if found is not None:
        yield found
        return
    draft = None if folder is None else _draft(folder)
    if folder is not None and draft is not None:
        try:
            make(draft)
            found = _install(draft, folder, name)
        finally:
            draft.unlink(missing_ok=True)
        yield found
        return
    with TemporaryDirectory(prefix="esper-") as own:
        make(Path(own) / f"{name}.so")
        yield Path(own) / f"{name}.so"


def _is_private(folder: Path) -> bool:
    """False if there is no such folder; raises ConfigError if others can write it."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & _OTHERS_MAY_WRITE:
        problem = f"can be written by others (mode {status.st_mode & 0o777:o})"
    else:
        return True
    raise ConfigError(
        f"{folder} {problem}, and libraries in it would be executed; expected a folder that only user {os.geteuid()} "
        "can write. Remove it, or set XDG_CACHE_HOME to a folder of your own."
    )


def _intact(folder: Path, name: str) -> Path | None:
    """The library whose bytes match the digest in its name; others of that name are removed."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.name == f"{name}-{_digest(path)}.so":
            return path
        path.unlink(missing_ok=True)
    return None


def _draft(folder: Path) -> Path | None:
    """An empty file in the folder, which is created if needed; None if it is not writable."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _is_private(folder)
        for left in folder.glob(f"{_DRAFT}*"):  # of a process that was killed
            if time.time() - left.stat().st_mtime > _LEFT:
                left.unlink(missing_ok=True)
        handle, path = mkstemp(prefix=_DRAFT, suffix=".so", dir=folder)
    except OSError:
        return None
    os.close(handle)
    return Path(path)


def _install(draft: Path, folder: Path, name: str) -> Path:
    with draft.open("rb+") as file:
        sync_file(file.fileno())
    return draft.replace(folder / f"{name}-{_digest(draft)}.so")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
