"""The C++ part is compiled once, and every way in which that can fail names the way out."""

import ctypes

import pytest

from esper.kasmina.native import compiled
from esper.kasmina.native.assembler import INSTRUCTION, Operation
from esper.kasmina.native.compiled import Library, cache_folder, cached_library, compiler, load_library, stride_of
from esper.leyline.errors import ConfigError


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compiler that is a shell script; returns a function that makes it."""

    def make(script):
        path = tmp_path / "bin" / "my-c++"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


@pytest.fixture
def quick(monkeypatch):
    """Compile in a fraction of the time: nothing is computed with it."""
    monkeypatch.setattr(compiled, "_OPTIONS", tuple(o for o in compiled._OPTIONS if o != "-O3"))


def test_a_process_loads_it_once():
    assert cached_library() is cached_library()


def test_it_is_compiled_once_and_kept(tmp_path, quick):
    assert isinstance(load_library(tmp_path / "esper"), Library)
    (kept,) = (tmp_path / "esper").iterdir()  # and no draft beside it
    made = kept.stat().st_mtime_ns
    load_library(tmp_path / "esper")
    assert [path.stat().st_mtime_ns for path in (tmp_path / "esper").iterdir()] == [made]


def test_another_processor_or_other_options_make_another_file():
    names = {
        compiled._fingerprint(*made_of) for made_of in ((b"AVX2", ["-O3"]), (b"AVX512", ["-O3"]), (b"AVX2", ["-O2"]))
    }
    assert len(names) == 3


@pytest.mark.parametrize(("processor", "expected"), [("#define __AVX512F__ 1", True), ("#define __AVX2__ 1", False)])
def test_long_vectors_are_asked_for_where_the_processor_has_them(tmp_path, fake, processor, expected):
    told = tmp_path / "told"
    fake(f'case "$*" in *-dM*) echo "{processor}";; *) echo "$*" > {told}; echo "error: enough" >&2; exit 1;; esac')
    with pytest.raises(ConfigError, match="enough"):
        load_library(tmp_path / "esper")
    assert ("-mprefer-vector-width=512" in told.read_text()) == expected


def test_a_folder_that_cannot_be_written_costs_the_next_process_a_compilation(tmp_path, quick):
    (tmp_path / "file").write_text("in the way")
    assert isinstance(load_library(tmp_path / "file" / "esper"), Library)
    assert (tmp_path / "file").read_text() == "in the way"


def test_the_cache_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "esper"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "esper"


def test_without_a_compiler_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler() is None
    with pytest.raises(ConfigError, match=r"none of c\+\+, g\+\+ and clang\+\+ is there; install one .* 'fused'"):
        load_library(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"CXX names 'no-such-compiler', which is not there"):
        load_library(tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path, fake):
    fake('echo "first line" >&2; echo "program.cpp:1: error: no such thing" >&2; exit 1')
    with pytest.raises(ConfigError, match=r"my-c\+\+ could not .*\(program.cpp:1: error: no such thing\); inst"):
        load_library(tmp_path / "esper")
    assert not (tmp_path / "esper").exists()


def test_a_compiler_that_hangs_is_given_up(tmp_path, fake, monkeypatch):
    fake("exec sleep 60")
    monkeypatch.setattr(compiled, "_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"took more than 0.2 s"):
        load_library(tmp_path)


def test_both_sides_know_the_same_operations_and_instructions():
    loaded = cached_library()
    assert isinstance(loaded, Library)  # its constructor compares names and size
    assert [operation.value for operation in Operation] == list(range(len(Operation)))
    assert INSTRUCTION.itemsize == 192
    assert INSTRUCTION.fields["offset"][1] % ctypes.sizeof(ctypes.c_int64) == 0


@pytest.mark.parametrize(("lanes", "stride"), [(1, 16), (16, 16), (17, 32), (64, 64), (360, 368)])
def test_rows_are_filled_up_to_a_multiple_of_sixteen(lanes, stride):
    assert stride_of(lanes) == stride
