"""The library of kernels; how it is compiled and cached is tested in tests/cpp."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esper.tolaria.executors.native.machine import Library, cached_library, stride_of
from esper.tolaria.executors.native.program import INSTRUCTION, Operation

SANITIZED = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"


def test_both_sides_know_the_same_operations_and_instructions():
    assert isinstance(cached_library(), Library)  # its constructor compares names and size
    assert [operation.value for operation in Operation] == list(range(len(Operation)))
    assert INSTRUCTION.itemsize == 400
    assert INSTRUCTION.fields["offset"][1] % ctypes.sizeof(ctypes.c_int64) == 0


@pytest.mark.parametrize(("lanes", "eights", "sixteens"), [(1, 8, 16), (16, 16, 16), (17, 24, 32), (360, 360, 368)])
def test_rows_are_filled_up_to_a_multiple_of_the_lanes_of_this_processor(lanes, eights, sixteens):
    assert stride_of(lanes) == {8: eights, 16: sixteens}[cached_library().lanes]


def runtime(name):
    """A library of g++, which has to be loaded before Python."""
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_layers_and_whole_hosts_stay_within_their_memory_and_do_nothing_undefined():
    preloaded = [runtime("libasan.so"), runtime("libstdc++.so")]  # the second, or exceptions of PyTorch end the process
    if not Path(preloaded[0]).is_absolute():
        pytest.skip("g++ has no address sanitizer here")
    compiled = {**os.environ, "CXX": "g++", "ESPER_CXXFLAGS": SANITIZED}
    for dtype in ("float32", "float64"):  # the compiler is slow under a sanitizer; the library cannot be loaded without
        load = f"import torch; from {cached_library.__module__} import cached_library as load; load(torch.{dtype})"
        subprocess.run([sys.executable, "-c", load], env=compiled, capture_output=True, check=False)
    layers = ("native_machine", "native_optimizer", "native_convolutions", "native_sequences")
    whole = ("native_executor", "against_streamed")
    files = [f"tests/tolaria/executors/test_{name}.py" for name in (*layers, *whole)]
    some = f"{' or '.join(layers)} or neighbours or (against_streamed and native and train)"
    sanitized = {"LD_PRELOAD": " ".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", some, *files],
        cwd=Path(__file__).parents[3],
        env={**compiled, **sanitized},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
