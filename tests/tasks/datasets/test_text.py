"""Windows of texts; a `tokenizer.json` of words."""

import json
import os
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from esper.leyline.errors import DataError
from esper.tasks.datasets.text import (
    STORIES,
    ByteTokenizer,
    Shakespeare,
    Stories,
    padded_windows,
    read_tokenizer,
    windows,
)
from esper.tasks.losses import PADDING

INT16 = np.dtype(np.int16)


def test_windows_continue_where_the_one_before_ended_and_the_rest_is_left_out():
    split = windows(np.arange(10, 21, dtype=np.int16), context=4)
    assert split.x.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert split.y.tolist() == [[11, 12, 13, 14], [15, 16, 17, 18]]
    # 9 tokens are 2 windows of 4 and the last target, 8 are only one
    assert len(windows(np.zeros(9, dtype=np.int16), context=4)) == 2
    assert len(windows(np.zeros(8, dtype=np.int16), context=4)) == 1


def test_the_end_of_a_text_is_a_target_once_and_what_follows_does_not_count():
    texts = [np.array([5, 6, 7, 8, 9], dtype=np.int32), np.array([1, 2], dtype=np.int32)]
    split = padded_windows(texts, 4, 99, INT16)
    assert split.x.tolist() == [[5, 6, 7, 8], [9, 99, 99, 99], [1, 2, 99, 99]]
    assert split.y.tolist() == [[6, 7, 8, 9], [99, -1, -1, -1], [2, 99, -1, -1]]


@given(st.lists(st.lists(st.integers(0, 255), max_size=12), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_token_is_an_input_once_and_the_next_one_or_the_end_its_target(texts, context):
    split = padded_windows([np.array(text, dtype=np.int32) for text in texts], context, 256, INT16)
    counts = split.y != PADDING
    assert split.x[counts].tolist() == [token for text in texts for token in text]
    assert split.y[counts].tolist() == [token for text in texts if text for token in (*text[1:], 256)]


def write_shakespeare(folder: Path, content: bytes) -> Path:
    (folder / "tinyshakespeare.txt").write_bytes(content)
    return folder


def test_a_text_is_cut_into_three_parts_without_a_window_across_a_border(tmp_path):
    content = bytes(i % 256 for i in range(300))
    data = Shakespeare(context=10)(write_shakespeare(tmp_path, content), 0)
    # [0, 243), [243, 270), [270, 300): 24 windows of 242 next bytes, 2 of 26, 2 of 29
    assert data.identity["sizes"] == (24, 2, 2)
    assert data.inputs(data.train.x)[23].tolist() == list(range(230, 240))
    assert data.val.x[0].tolist() == [243, 244, 245, 246, 247, 248, 249, 250, 251, 252]
    assert data.val.y[1, -1] == 263 % 256
    assert data.test.x[0, 0] == 270 % 256
    assert data.inputs(data.test.x).dtype == torch.int64
    assert data.tokenizer == ByteTokenizer()


def test_a_part_of_the_validation_windows_is_spread_over_all_and_named_in_the_identity(tmp_path):
    folder = write_shakespeare(tmp_path, bytes(i % 256 for i in range(1000)))
    whole, part = Shakespeare(context=10)(folder, 0), Shakespeare(context=10, val_windows=3)(folder, 0)
    assert len(whole.val) == 8  # 89 next bytes of [810, 900)
    assert part.identity["sizes"] == (80, 3, 9)
    assert torch.equal(part.val.x, whole.val.x[[0, 2, 5]])
    assert torch.equal(part.val.y, whole.val.y[[0, 2, 5]])
    assert torch.equal(part.test.x, whole.test.x)
    assert len(Shakespeare(context=10, val_windows=50)(folder, 0).val) == 8


def test_a_text_shorter_than_the_context_is_refused(tmp_path):
    write_shakespeare(tmp_path, bytes(100))
    assert Shakespeare(context=8)(tmp_path, 0).identity["sizes"] == (10, 1, 1)  # 81, 9 and 10 bytes
    with pytest.raises(DataError, match=r"tinyshakespeare.txt: found 100 bytes, of which 9 are the validation part, "
                                        r"expected at least 10"):  # fmt: skip
        Shakespeare(context=9)(tmp_path, 0)


STORY = "story {:03d}."
FIRST = len(STORY.format(0).encode())


def write_stories(folder: Path, count: int, tail: str = "\nOne day") -> Path:
    text = "".join(f"\n{STORY.format(i)}\n<|endoftext|>" for i in range(count))
    (folder / "TinyStories-train.txt").write_text(text + tail)
    return folder


def stories_of(x: torch.Tensor) -> set[str]:
    return {bytes(row[:FIRST].tolist()).decode() for row in x}


def test_stories_are_split_whole_and_the_unfinished_last_one_is_dropped(tmp_path):
    data = Stories(context=16)(write_stories(tmp_path, 120), 1)
    # 120 / 10 = 12 for the test, (120 - 12) / 10 = 10 for validation
    assert data.identity["sizes"] == (98, 10, 12)
    parts = [stories_of(data.split(name).x) for name in ("train", "val", "test")]
    assert set.union(*parts) == {STORY.format(i) for i in range(120)}
    assert sum(len(part) for part in parts) == 120
    assert data.train.x[0, FIRST:].tolist() == [256] * (16 - FIRST)
    assert data.train.y[0, FIRST - 1 :].tolist() == [256, *[PADDING] * (16 - FIRST)]


@pytest.mark.parametrize(("count", "tail"), [(11, ""), (0, "no separator at all")])
def test_a_file_with_too_few_stories_is_refused(tmp_path, count, tail):
    with pytest.raises(DataError, match=rf"TinyStories-train.txt: found {count} stories, expected at least 12"):
        Stories(context=8)(write_stories(tmp_path, count, tail), 0)


@pytest.mark.skipif("ESPER_DATA" not in os.environ, reason="ESPER_DATA does not name a folder with the data sets")
def test_the_real_texts_are_read():
    folder = Path(os.environ["ESPER_DATA"])
    # 903,469 / 100,385 / 111,540 bytes
    assert Shakespeare(context=128)(folder, 0).identity["sizes"] == (7_058, 784, 871)
    data = Stories(context=256)(folder, 0)
    assert (data.train.y == 256).sum() + (data.val.y == 256).sum() + (data.test.y == 256).sum() == 2_316
    assert STORIES.find(folder)[0].name == "tinystories-sample.txt"


# -- tokenizers --------------------------------------------------------------------------------------------------------

WORDS = {"once": 0, "upon": 1, "a": 2, "time": 3, "?": 4}


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


def test_words_become_the_numbers_of_the_file(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.end == tokenizer.vocabulary - 1 == 5  # the library numbers added tokens after those of the model
    found = list(tokenizer.encode([b"once upon a time", b"a zebra"]))
    assert [tokens.tolist() for tokens in found] == [[0, 1, 2, 3], [2, 4]]
    assert found[0].dtype == np.int32


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer.json: found none of <\|endoftext\|>, </s>, .* among 6 tokens"):
        read_tokenizer(write_tokenizer(tmp_path, end="<pad>"))


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


def test_bytes_that_are_not_text_are_refused_with_their_offset(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path))
    (tmp_path / "TinyStories-train.txt").write_bytes(b"once upon \xff time\n<|endoftext|>\n" * 20)
    with pytest.raises(DataError, match=r"TinyStories-train.txt: found the byte 0xff at offset 10, which is not UTF-8"):
        Stories(context=6, tokenizer=tokenizer)(tmp_path, 0)
    assert len(Stories(context=6)(tmp_path, 0).train)


def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json: is not a tokenizer.json"):
        read_tokenizer(path)
    with pytest.raises(DataError, match=r"nowhere.json: cannot be read \(No such file or directory\)"):
        read_tokenizer(tmp_path / "nowhere.json")


def test_without_the_library_the_way_to_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"needs the library tokenizers, .* install esper-growth\[text\]"):
        read_tokenizer(write_tokenizer(tmp_path))
