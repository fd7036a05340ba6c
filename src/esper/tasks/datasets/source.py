"""Where the files of a data set lie below the data folder."""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import final

from esper.leyline.errors import DataError, option


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of one data set.

    Attributes:
        name: name of the data set.
        alternatives: complete sets of files, each as paths below the data folder; the first one that exists is read.
        or_gz: whether FILE.gz may take the place of FILE.
    """

    name: str
    alternatives: tuple[tuple[str, ...], ...]
    or_gz: bool = False

    def find(self, data_dir: Path | None) -> tuple[Path, ...]:
        """The files of one alternative, in its order.

        Raises:
            DataError: no folder is named, it does not exist, or a file is missing in it.
        """
        if data_dir is None:
            raise DataError(
                f"{self.name} is read from files but no folder was named; name the one that holds them with "
                f"{option('data_dir')}, data_dir in a configuration file, or the environment variable ESPER_DATA."
            )
        if not data_dir.is_dir():
            raise DataError(f"{data_dir}: there is no such folder; name the one that holds {self.expected}.")
        candidates = [tuple(self._existing(data_dir / name) for name in names) for names in self.alternatives]
        best = max(candidates, key=lambda files: sum(path.is_file() for path in files))
        missing = [str(path) for path in best if not path.is_file()]
        if missing:
            raise DataError(
                f"{data_dir}: found no {', no '.join(missing)}; expected {self.expected}; put it there or name another "
                "folder."
            )
        return best

    def folder(self, data_dir: Path | None) -> Path | None:
        """The folder in which `find` finds the first file, or None."""
        try:
            return self.find(data_dir)[0].parent
        except DataError:
            return None

    @property
    def expected(self) -> str:
        """The files in words, e.g. "text/a.txt or a.txt", "a, b (or .gz) in the data folder or its folder c"."""
        if len(self.alternatives[0]) == 1:
            return " or ".join(name for (name,) in self.alternatives)
        names = ", ".join(PurePath(name).name for name in self.alternatives[0])
        folders = [str(PurePath(first).parent) for first, *_ in self.alternatives]
        inner = " or ".join(folder for folder in folders if folder != ".")
        return f"{names}{' (or .gz)' * self.or_gz} in the data folder or its folder {inner}"

    def _existing(self, path: Path) -> Path:
        compressed = path.with_name(f"{path.name}.gz")
        return compressed if self.or_gz and compressed.is_file() and not path.is_file() else path


def in_folders(names: tuple[str, ...], *folders: str) -> tuple[tuple[str, ...], ...]:
    """Alternatives of the same files in any of the folders."""
    return tuple(tuple(str(PurePath(folder) / name) for name in names) for folder in folders)


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); name another file or check permissions."
        ) from error
