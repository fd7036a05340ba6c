"""C++ is compiled once and kept where only its owner can write; every way in which that can fail names the way out."""

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from esper import cpp as build
from esper.cpp import cache_folder, compiler, fingerprint, load
from esper.leyline.errors import ConfigError, read_in_a_shell

ANSWER = 'extern "C" int answer() { return %d; }'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache folder of this test, not yet made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "esper" / "cpp"


@pytest.fixture
def source(tmp_path):
    """A library with one function."""
    (tmp_path / "cpp").mkdir()
    path = tmp_path / "cpp" / "tiny.cpp"
    path.write_text(ANSWER % 42)
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a compiler that is a shell script."""

    def make(script):
        path = tmp_path / "bin" / "my-c++"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


def answer_of(source):
    return load(source, lambda path: ctypes.CDLL(str(path)).answer(), what="the test", alternative="do without")


def only(folder):
    (path,) = folder.iterdir()  # no draft is left beside it
    return path


# -- the cache ------------------------------------------------------------------------------------------------------


def test_it_is_compiled_once_and_kept_for_its_owner_alone(cache, source):
    assert answer_of(source) == 42
    kept = only(cache)
    made = kept.stat().st_mtime_ns
    assert cache.stat().st_mode & 0o777 == 0o700
    assert answer_of(source) == 42
    assert only(cache).stat().st_mtime_ns == made


def test_a_command_says_that_it_compiles(cache, source, capsys):
    answer_of(source)
    assert capsys.readouterr().err == ""
    only(cache).unlink()
    with read_in_a_shell():
        answer_of(source)
        answer_of(source)
    assert capsys.readouterr().err == "esper: compiling the test for this machine, once\n"


def test_everything_it_is_made_of_is_in_its_name(tmp_path):
    for folder, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.h").write_text(text)
    (tmp_path / "b" / "x.h").rename(tmp_path / "b" / "y.h")
    made_of = [
        (("g++",), b"AVX2", ["-O3"], tmp_path / "a"),
        (("clang++",), b"AVX2", ["-O3"], tmp_path / "a"),
        (("g++",), b"AVX512", ["-O3"], tmp_path / "a"),
        (("g++",), b"AVX2", ["-O2"], tmp_path / "a"),
        (("g++",), b"AVX2", ["-O3"], tmp_path / "b"),
        (("g++",), b"AVX2", ["-O3"], tmp_path / "c"),
    ]
    assert len({fingerprint(*parts) for parts in made_of}) == len(made_of)
    assert fingerprint(*made_of[0]) == fingerprint(*made_of[0])


def test_what_a_killed_compilation_left_goes_but_not_what_another_process_compiles(cache, source):
    cache.mkdir(parents=True, mode=0o700)
    old, new = cache / ".draft-old.so", cache / ".draft-new.so"
    for draft, age in ((old, 7200), (new, 60)):
        draft.touch()
        os.utime(draft, (time.time() - age,) * 2)
    assert answer_of(source) == 42
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("left", [b"", b"half", None], ids=["empty", "truncated", "altered"])
def test_a_broken_library_is_made_again(cache, source, left):
    answer_of(source)
    kept = only(cache)
    whole = kept.read_bytes()
    kept.unlink()  # this process has it mapped
    kept.write_bytes({b"": b"", b"half": whole[: len(whole) // 2], None: whole[:-1] + b"x"}[left])
    assert answer_of(source) == 42
    assert only(cache).read_bytes() == whole


def test_a_library_appears_under_its_name_only_when_it_is_complete(cache, source, fake, tmp_path):
    fake(f'{compiler()[0]} "$@"; for last; do :; done; stat -c %i "$last" > {tmp_path / "inode"}')
    assert answer_of(source) == 42
    assert only(cache).stat().st_ino == int((tmp_path / "inode").read_text())  # what the compiler wrote was renamed


@pytest.mark.slow
def test_processes_that_build_at_once_all_get_a_whole_library(cache, source):
    code = "import ctypes, sys; from esper.cpp import load; "
    code += "load(sys.argv[1], lambda path: ctypes.CDLL(str(path)), what='x', alternative='y')"
    with ThreadPoolExecutor(3) as pool:
        runs = pool.map(
            lambda _: subprocess.run([sys.executable, "-c", code, source], capture_output=True, text=True), range(3)
        )
    assert [(run.returncode, run.stderr) for run in runs] == [(0, "")] * 3
    only(cache)


# -- its folder -----------------------------------------------------------------------------------------------------


def test_the_cache_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "esper" / "cpp"
    for nothing in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert cache_folder() == tmp_path / "home" / ".cache" / "esper" / "cpp"
    monkeypatch.setenv("HOME", "")
    assert cache_folder() is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o777])
def test_a_folder_that_others_can_write_is_refused_before_anything_in_it_is_run(cache, source, mode):
    answer_of(source)
    cache.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"can be written by others \(mode {mode:o}\).*; expected .* Remove it, or set XDG"
    ):
        answer_of(source)


def test_a_folder_of_somebody_else_is_refused(cache, source, monkeypatch):
    answer_of(source)
    owner = cache.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, and .* only user {owner + 1} can write"):
        answer_of(source)


@pytest.mark.parametrize("home", ["file/in/the/way", ""])
def test_without_a_folder_it_is_compiled_for_this_process_alone(tmp_path, source, monkeypatch, home):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "temporary").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / home) if home else "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert answer_of(source) == 42
    assert list((tmp_path / "temporary").iterdir()) == []
    assert (tmp_path / "file").read_text() == "in the way"


# -- the compiler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processor", "expected"), [("#define __AVX512F__ 1", True), ("#define __AVX2__ 1", False)])
def test_long_vectors_are_asked_for_where_the_processor_has_them(cache, source, tmp_path, fake, processor, expected):
    options = tmp_path / "options"
    fake(f'case "$*" in *-dM*) echo "{processor}";; *) echo "$*" > {options}; echo "error: enough" >&2; exit 1;; esac')
    with pytest.raises(ConfigError, match="enough"):
        answer_of(source)
    assert ("-mprefer-vector-width=512" in options.read_text()) == expected


def test_the_compiler_may_have_options_as_with_ccache(cache, source, fake, monkeypatch):
    path = fake('shift; exec c++ "$@"')
    monkeypatch.setenv("CXX", f"'{path}' g++")
    assert compiler() == (str(path), "g++")
    assert answer_of(source) == 42


def test_options_for_debugging_are_added(cache, source, monkeypatch):
    source.write_text(ANSWER.replace("%d", "NUMBER"))
    monkeypatch.setenv("ESPER_CXXFLAGS", "-DNUMBER=7 -g")
    assert answer_of(source) == 7


def test_without_a_compiler_the_way_out_is_named(cache, source, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler() is None
    with pytest.raises(
        ConfigError, match=r"the test needs a C\+\+ .* none of c\+\+, g\+\+ and clang\+\+ is .*; do without"
    ):
        answer_of(source)
    for named in ("no-such-compiler", "g++ 'half a quote"):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(ConfigError, match=re.escape(f"CXX names {named!r}, which is not there")):
            answer_of(source)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('for last; do :; done; echo half > "$last"; exit 1', "no message"),
        (
            'for last; do :; done; echo text > "$last"',
            r"library of the test cannot be .*; set XDG_CACHE_HOME to .*, or",
        ),
        (
            "echo 'error: nothing was not declared' >&2; exit 1",
            r"could not compile the test \(.*nothing.*\); do without",
        ),
        ("exec sleep 60", r"took more than 0.5 s"),
    ],
    ids=["dies", "writes no library", "refuses the source", "hangs"],
)
def test_a_compiler_that_fails_leaves_nothing_half_done_and_names_the_way_out(
    cache, source, fake, monkeypatch, script, message
):
    fake(f'case "$*" in *-dM*) exit 0;; esac; {script}')
    monkeypatch.setattr(build, "_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=message):
        answer_of(source)
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]
