"""Texts as windows of tokens, each with the next token at every place.

    tokens    a b c d e f g h i          context T = 4
    window 0  x = a b c d   y = b c d e
    window 1  x = e f g h   y = f g h i

Windows are stored as the smallest integers that hold them and padding, and become int64 on the device: a quarter of
the memory, for a text of gigabytes as for a batch.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.files import expanded
from esper.tasks.datasets import Dataset, PlainValue, Source, Split, read_bytes, stratified_split
from esper.tasks.losses import PADDING

Tokens = npt.NDArray[np.int32]
END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""Names under which tokenizers know the end of a text; the first one found is used."""


@final
@dataclass(frozen=True)
class ByteTokenizer:
    """Each byte is a token; 256 ends a text."""

    vocabulary: ClassVar[int] = 257
    end: ClassVar[int] = 256
    identity: ClassVar[str] = "bytes"

    def encode(self, texts: Iterable[bytes]) -> Iterator[Tokens]:
        """The bytes of each text."""
        return (np.frombuffer(text, dtype=np.uint8).astype(np.int32) for text in texts)

    def check(self, path: Path, content: bytes) -> None:
        """All bytes are tokens."""


@final
@dataclass(frozen=True)
class TokenizerFile:
    """A `tokenizer.json`, run by the library `tokenizers`; made by `read_tokenizer`."""

    path: str
    sha256: str
    vocabulary: int
    end: int

    @property
    def identity(self) -> PlainValue:
        """Digest of the file."""
        return ("tokenizer.json", self.sha256)

    def encode(self, texts: Iterable[bytes]) -> Iterator[Tokens]:
        """Tokens of each text, which is UTF-8; special tokens are not added."""
        library = _library(Path(self.path), self.content())
        for text in texts:
            yield np.array(library.encode(text.decode(), add_special_tokens=False).ids, dtype=np.int32)

    def content(self) -> bytes:
        """The file; raises DataError if it is gone or was changed."""
        path = Path(self.path)
        content = read_bytes(path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise DataError(f"{path}: changed since it was named as tokenizer; start the program again.")
        return content

    def check(self, path: Path, content: bytes) -> None:
        """Refuse what is not UTF-8."""
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: found the byte 0x{content[error.start]:02x} at offset {error.start}, which is not UTF-8; "
                "convert the file, or use byte tokens."
            ) from error


Tokenizer = ByteTokenizer | TokenizerFile
"""Turns texts into tokens 0 .. vocabulary - 1, of which `end` ends a text; `identity` is what decides them."""


def read_tokenizer(path: Path) -> TokenizerFile:
    """The tokenizer in a `tokenizer.json`.

    Raises:
        DataError: the file is missing or broken, names no end of text, or the library is not installed.
    """
    path = expanded(path).absolute()
    content = read_bytes(path)
    ids: dict[str, int] = _library(path, content).get_vocab(with_added_tokens=True)
    end = next((ids[name] for name in END_TOKENS if name in ids), None)
    if end is None:
        raise DataError(f"{path}: found none of {', '.join(END_TOKENS)} among {len(ids)} tokens; add one that ends a "
                        "text to added_tokens.")  # fmt: skip
    digest = hashlib.sha256(content).hexdigest()
    return TokenizerFile(str(path), digest, max(ids.values()) + 1, end)


def _library(path: Path, content: bytes) -> Any:  # noqa: ANN401 -- the library is optional
    """The library's tokenizer of a file."""
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path} needs the library tokenizers, which is not installed; install esper-growth[text], or use byte "
            "tokens."
        ) from error
    try:
        tokenizer = LibraryTokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"{path}: is not a tokenizer.json ({error}); name another file, or use byte tokens.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# -- windows -----------------------------------------------------------------------------------------------------------

SHAKESPEARE = Source(
    name="tinyshakespeare",
    alternatives=(("text/tinyshakespeare.txt",), ("tinyshakespeare.txt",), ("tinyshakespeare/input.txt",)),
)
STORIES = Source(
    name="tinystories",
    alternatives=tuple(
        (folder + name,)
        for folder in ("text/", "", "tinystories/")
        for name in ("TinyStories-train.txt", "TinyStoriesV2-GPT4-train.txt", "tinystories-sample.txt")
    ),
)
SEPARATOR = b"<|endoftext|>"
LEAST_STORIES = 12
"""So that each split gets one."""


@final
@dataclass(frozen=True)
class TokenInputs:
    """Stored integers become indices of a token table."""

    def __call__(self, x: Int[Tensor, "*R"]) -> Int[Tensor, "*R"]:
        """The same numbers as int64."""
        return x.to(torch.int64)


@final
@dataclass(frozen=True)
class Shakespeare:
    """Loader of tinyshakespeare: bytes; of n, the first 81 % are for training, the next 9 % for validation.

    `val_windows` is the most windows of the validation part that are used, spread evenly over it; None for all.
    """

    context: int
    val_windows: int | None = None
    vocabulary: ClassVar[int] = 256

    def __call__(self, data_dir: Path | None, run_seed: int) -> Dataset:
        """Windows x, y [n, context] of each part; no window crosses a border, what fills none is left out.

        Raises:
            DataError: no folder is named, the file is missing, or a part is shorter than a window.
        """
        (path,) = SHAKESPEARE.find(data_dir)
        content = read_bytes(path)
        tokens, n = np.frombuffer(content, dtype=np.uint8), len(content)
        parts = tokens[: n * 81 // 100], tokens[n * 81 // 100 : n * 9 // 10], tokens[n * 9 // 10 :]
        for name, part in zip(("train", "validation", "test"), parts, strict=True):
            if len(part) <= self.context:
                raise DataError(
                    f"{path}: found {n} bytes, of which {len(part)} are the {name} part, expected at least "
                    f"{self.context + 1} (context + 1) there; use a longer text or a shorter context."
                )
        splits = [windows(part.astype(np.int16), self.context) for part in parts]
        return _dataset(SHAKESPEARE, path, content, splits, self, ByteTokenizer(), {})


@final
@dataclass(frozen=True)
class Stories:
    """Loader of tinystories: a tenth of the stories is for the test, a tenth of the others for validation.

    `val_windows` as for `Shakespeare`.
    """

    context: int
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    val_windows: int | None = None

    def __call__(self, data_dir: Path | None, run_seed: int) -> Dataset:
        """Windows x, y [n, context]; the last one of a story is padded.

        Raises:
            DataError: no folder is named, the file is missing, or holds too few stories or not UTF-8 for a tokenizer.
        """
        (path,) = STORIES.find(data_dir)
        content = read_bytes(path)
        self.tokenizer.check(path, content)
        *whole, _ = content.split(SEPARATOR)  # what comes after the last separator is not a complete story
        stories = [story for text in whole if (story := text.strip())]
        if (n := len(stories)) < LEAST_STORIES:
            raise DataError(
                f"{path}: found {n} stories, expected at least {LEAST_STORIES}, each ended by {SEPARATOR.decode()}; "
                "use the official file or a part of it."
            )
        one_class = torch.zeros(n, dtype=torch.int64)
        by_split = stratified_split(one_class, (n // 10, (n - n // 10) // 10), 1, run_seed)
        encode, storage = self.tokenizer.encode, np.dtype(np.int16 if self.tokenizer.vocabulary <= 2**15 else np.int32)
        parts = (encode(stories[i] for i in part.tolist()) for part in by_split)
        test, val, train = (padded_windows(part, self.context, self.tokenizer.end, storage) for part in parts)
        more = {"tokenizer": self.tokenizer.identity, "split_seed": run_seed}
        return _dataset(STORIES, path, content, (train, val, test), self, self.tokenizer, more)


def windows(tokens: np.ndarray, context: int) -> Split:
    """Windows of one long text of at least context + 1 tokens; x and y share its memory."""
    count = (len(tokens) - 1) // context
    text = torch.from_numpy(tokens)
    return Split(text[: count * context].view(count, context), text[1 : count * context + 1].view(count, context))


def padded_windows(texts: Iterable[Tokens], context: int, end: int, storage: np.dtype) -> Split:
    """Windows of separate texts, each text followed by `end`.

    The last window of a text is filled with `end`, and its targets after the first `end` with PADDING.
    """
    encoded = [text.astype(storage) for text in texts]
    first = np.cumsum([0, *(-(-len(text) // context) for text in encoded)])
    x = np.full((first[-1], context), end, dtype=storage)
    y = np.full((first[-1], context), PADDING, dtype=storage)
    for text, start, stop in zip(encoded, first[:-1], first[1:], strict=True):
        x[start:stop].reshape(-1)[: len(text)] = text
        y[start:stop].reshape(-1)[: len(text)] = np.append(text[1:], storage.type(end))
    return Split(torch.from_numpy(x), torch.from_numpy(y))


def _dataset(
    source: Source,
    path: Path,
    content: bytes,
    splits: Sequence[Split],
    loader: Shakespeare | Stories,
    tokenizer: Tokenizer,
    more: Mapping[str, PlainValue],
) -> Dataset:
    """The windows of the training, validation and test part; `more` decides them besides the file."""
    train, val, test = splits
    val = val.spaced(min(len(val), loader.val_windows or len(val)))
    identity = {
        "name": source.name,
        "source": str(path.parent.resolve()),
        "files": ((path.name, hashlib.sha256(content).hexdigest()),),
        "context": loader.context,
        "sizes": (len(train), len(val), len(test)),
        **more,
    }
    return Dataset(identity=identity, train=train, val=val, test=test, inputs=TokenInputs(), tokenizer=tokenizer)
