"""A `tokenizer.json` of words, read by the library where it is installed and by a toy with the same functions."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from esper.leyline.errors import DataError
from esper.tasks.datasets.text import ByteTokenizer, Stories, read_tokenizer

WORDS = {"once": 0, "upon": 1, "a": 2, "time": 3, "?": 4}


class WordTokenizer:
    """Splits at spaces; what the library does with the files of these tests."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary

    @staticmethod
    def from_str(text: str) -> "WordTokenizer":
        file = json.loads(text)
        added = {token["content"]: token["id"] for token in file["added_tokens"]}
        return WordTokenizer({**file["model"]["vocab"], **added})

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        assert with_added_tokens
        return self.vocabulary

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(ids=[self.vocabulary.get(word, 4) for word in text.split()])


@pytest.fixture(params=["toy", "installed"])
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "installed":
        pytest.importorskip("tokenizers")
        return
    module = ModuleType("tokenizers")
    module.Tokenizer = WordTokenizer
    monkeypatch.setitem(sys.modules, "tokenizers", module)


def write_tokenizer(folder: Path, end: str = "<|endoftext|>", number: int = 9) -> Path:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    file = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "decoder": None, "added_tokens": [{"id": number, "content": end, **flags}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "?"},
    }  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file))
    return path


def test_bytes_need_no_library():
    (found,) = ByteTokenizer().encode(["é!".encode()])
    assert found.tolist() == [0xC3, 0xA9, 33]


@pytest.mark.usefixtures("_library")
def test_words_become_the_numbers_of_the_file(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path))
    # the end is token 5 for the library, which numbers added tokens after those of the model, and 9 for the toy
    assert tokenizer.end == tokenizer.vocabulary - 1
    found = list(tokenizer.encode([b"once upon a time", b"a zebra"]))
    assert [tokens.tolist() for tokens in found] == [[0, 1, 2, 3], [2, 4]]
    assert found[0].dtype == np.int32


@pytest.mark.usefixtures("_library")
def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer.json: found none of <\|endoftext\|>, </s>, .* among 6 tokens"):
        read_tokenizer(write_tokenizer(tmp_path, end="<pad>"))


@pytest.mark.usefixtures("_library")
def test_stories_of_words_end_with_the_token_of_the_tokenizer(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path))
    (tmp_path / "TinyStories-train.txt").write_text("once upon a time\n<|endoftext|>\n" * 20)
    data = Stories(context=6, tokenizer=tokenizer)(tmp_path, 0)
    assert data.test.x.tolist() == [[0, 1, 2, 3, tokenizer.end, tokenizer.end]] * 2
    assert data.test.y.tolist() == [[1, 2, 3, tokenizer.end, -1, -1]] * 2
    assert data.tokenizer == tokenizer
    bytes_instead = Stories(context=6)(tmp_path, 0)
    assert data.identity["tokenizer"] != bytes_instead.identity["tokenizer"]
    assert data.inputs(data.train.x).dtype == torch.int64


@pytest.mark.usefixtures("_library")
def test_bytes_that_are_no_text_are_refused_with_their_offset(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path))
    (tmp_path / "TinyStories-train.txt").write_bytes(b"once upon \xff time\n<|endoftext|>\n" * 20)
    with pytest.raises(DataError, match=r"TinyStories-train.txt: found the byte 0xff at offset 10, which is no UTF-8"):
        Stories(context=6, tokenizer=tokenizer)(tmp_path, 0)
    assert len(Stories(context=6)(tmp_path, 0).train)


@pytest.mark.usefixtures("_library")
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json: is no tokenizer.json"):
        read_tokenizer(path)
    with pytest.raises(DataError, match=r"nowhere.json: cannot be read \(No such file or directory\)"):
        read_tokenizer(tmp_path / "nowhere.json")


@pytest.mark.usefixtures("_library")
def test_a_tokenizer_that_changed_after_it_was_named_is_refused(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path))
    write_tokenizer(tmp_path, number=12)
    with pytest.raises(DataError, match="changed since it was named"):
        list(tokenizer.encode([b"once"]))


def test_without_the_library_the_way_to_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"needs the library tokenizers, .* install esper-growth\[text\]"):
        read_tokenizer(write_tokenizer(tmp_path))
