"""What a user reads when something is refused."""

import re
import sys

import pytest

from esper.leyline.errors import (
    ConfigError,
    OperatingSystemError,
    RegistryError,
    Stopped,
    in_a_sentence,
    in_words,
    nearest,
    refusing_exit,
    registering,
)


def test_a_name_that_is_nearly_right_is_suggested_before_all_that_are_known() -> None:
    assert nearest("nul", ["null", "digits"]) == "did you mean 'null'? Known names: digits, null."
    assert nearest("large", ["small", "paper"]) == "known names: paper, small."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied; check"),
        (OSError(18, "Invalid cross-device link", "a", None, "b"), "a -> b: Invalid cross-device link; check"),
        (OSError("something"), "something; check"),
        (MemoryError(), "there is not enough memory (MemoryError); use fewer hosts"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nat"),
            "can't allocate memory: you tried);",
        ),
        (ValueError("embedded null byte"), "a character that is not allowed: embedded null byte."),
        (RecursionError("deep"), "nested too deeply"),
    ],
)
def test_what_the_operating_system_refuses_is_a_sentence(error, said):
    with pytest.raises(OperatingSystemError, match=re.escape(said)) as raised, in_a_sentence():
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [ConfigError("the null byte"), ValueError("other"), RuntimeError("other"), BrokenPipeError(), KeyError("x")],
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, in_a_sentence():
        raise error
    assert raised.value is error


def test_an_exit_of_the_users_code_is_an_error_and_that_of_a_signal_is_not():
    with pytest.raises(ConfigError, match=r"ended the program \(sys.exit or SystemExit, 0\)"), refusing_exit():
        sys.exit(0)
    with pytest.raises(Stopped), refusing_exit():
        raise Stopped("stopped")


def test_an_exception_in_words_is_one_line_and_never_fails_itself():
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert in_words(KeyError("x")) == "KeyError: 'x'"
    assert in_words(ValueError("two\n lines.")) == "ValueError: two lines"
    assert in_words(SilentError()) == "SilentError"


def test_what_is_defined_again_takes_the_place_of_what_it_was():
    table: dict[str, object] = {"built in": 1}

    def defined(name: str) -> object:
        made = type("Made", (), {})
        made.__qualname__ = name
        return made

    for name in ("Made", "Made", "Other"):
        made = defined(name)
        if name == "Other":
            with pytest.raises(RegistryError, match="a part named 'mine' is registered already"):
                registering("part", "mine", table, lambda made: made)(made)
        else:
            registering("part", "mine", table, lambda made: made)(made)
            assert table["mine"] is made
    with pytest.raises(RegistryError, match="'built in' is registered already"):
        registering("part", "built in", table, lambda made: made)
