"""Compiles C++ sources on first use and loads them through ctypes.

Compiling takes seconds, because no PyTorch headers are included. A library is rebuilt whenever its sources, the
compiler, its options or the processor change. $ESPER_CXXFLAGS adds options, such as -fsanitize=address.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from esper.cpp.cache import cache_folder, library
from esper.leyline.errors import ConfigError

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
        with library(cache_folder(), name, lambda draft: _output([*build, str(draft)])) as built:
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
