"""Texts as numbers: bytes, or the tokens of a `tokenizer.json`."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from esper.leyline.errors import DataError
from esper.tasks.datasets import PlainValue, Tokens
from esper.tasks.datasets.source import read_bytes

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
        """Refuse what is no UTF-8."""
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: found the byte 0x{content[error.start]:02x} at offset {error.start}, which is no UTF-8; "
                "convert the file, or use byte tokens."
            ) from error


def read_tokenizer(path: Path) -> TokenizerFile:
    """The tokenizer in a `tokenizer.json`.

    Raises:
        DataError: the file is missing or broken, names no end of text, or the library is not installed.
    """
    path = path.expanduser().absolute()
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
        raise DataError(f"{path}: is no tokenizer.json ({error}); name another file, or use byte tokens.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
