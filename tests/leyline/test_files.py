import errno
import os

import pytest

from esper.leyline.files import absolute, expanded, json_of, open_to_read, read_json, read_toml, replacing_folder


def test_only_regular_files_are_opened_and_a_pipe_is_not_waited_for(tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(OSError, match="not a regular file"):
            open_to_read(path)
    with pytest.raises(FileNotFoundError):
        open_to_read(tmp_path / "missing")


def test_a_file_larger_than_expected_is_not_read(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="has 11 bytes, more than the 10 expected") as raised:
        open_to_read(path, largest=10)
    assert raised.value.errno == errno.EFBIG
    with open_to_read(path, largest=11) as file:
        assert file.read() == b"x" * 11


def test_json_and_tables_are_read(tmp_path):
    (tmp_path / "a").write_text('{"x": [1, "é"]}', encoding="utf-8")
    (tmp_path / "b").write_text('x = [1, "é"]', encoding="utf-8")
    assert read_json(tmp_path / "a") == read_toml(tmp_path / "b") == {"x": [1, "é"]}


def test_values_that_are_nested_too_deeply_are_no_values(tmp_path):
    deep = "[" * 100_000
    (tmp_path / "deep").write_text(f"x = {deep}")
    for read in (lambda: json_of(deep), lambda: read_toml(tmp_path / "deep")):
        with pytest.raises(ValueError, match="nested too deeply"):
            read()


def test_the_home_of_somebody_unknown_is_a_name_like_any_other():
    assert str(expanded("~nobody-of-this-name/x")) == "~nobody-of-this-name/x"
    assert absolute(expanded("~/x")) == "~/x"


def test_a_folder_is_replaced_as_a_whole_and_drafts_of_others_stay_for_an_hour(tmp_path):
    young, old = (tmp_path / f".grown.draft-{name}" for name in ("young", "old"))
    for draft in (young, old):
        draft.mkdir()
    os.utime(old, (0, 0))
    for content in ("one", "two"):
        with replacing_folder(tmp_path / "grown") as folder:
            (folder / "file").write_text(content)
    with pytest.raises(FileNotFoundError), replacing_folder(tmp_path / "grown") as folder:
        (folder / "none" / "file").write_text("three")
    assert (tmp_path / "grown" / "file").read_text() == "two"
    assert sorted(tmp_path.iterdir()) == [young, tmp_path / "grown"]
