"""Read documents from a UTF-8 file, or from a folder of UTF-8 files."""

import hashlib
import os
import sysconfig
import unicodedata
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from kvt.data.files import require_file, state_of
from kvt.system import UserError

LIBRARY = Path(sysconfig.get_path("stdlib"))  # Python's standard library (PSF licence), which every user has
PACKAGES = ("site-packages", "__pycache__")  # folders left out: in LIBRARY, they contain other packages and bytecode


def read_text(path: Path, remedy: str = "name a text file") -> str:
    """Return the text of a file (see `decode_text`); raise UserError if the file is missing, empty or not UTF-8."""
    require_file(path, remedy)
    if text := decode_text(path.read_bytes(), str(path)):
        return text
    raise UserError(f"{path} is empty: choose another file")


def decode_text(raw: bytes, name: str) -> str:
    """Decode UTF-8, and apply `plain` to the text; raise a UserError with `name` if the bytes are not UTF-8."""
    try:
        return plain(raw.decode("utf-8"))  # "utf-8-sig" would count error positions without the byte order mark
    except UnicodeDecodeError as error:
        remedy = "convert it, e.g. Western European text from Windows with iconv -f cp1252 -t UTF-8"
        raise UserError(f"{name} is not UTF-8 at byte {error.start}: {remedy}") from error


def fingerprint(text: str) -> str:
    """Return a hash of a text as 16 hexadecimal digits."""
    return hashlib.sha256(f"{len(text)} {text}".encode(errors="surrogateescape")).hexdigest()[:16]


def plain(text: str) -> str:
    r"""Return a text without its byte order mark, and with \r\n replaced by \n."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def nfc(text: str) -> str:
    """Return a text in Unicode's form NFC, in which "ü" is one character, not "u" and a combining mark."""
    return unicodedata.normalize("NFC", text)


class Corpus:
    """The documents of a UTF-8 file, or of the UTF-8 files in a folder and its subfolders.

    The files of a folder are sorted by a hash of their relative paths, so that the last files, which are used for
    validation, are a random selection. In a folder, files that are empty or not UTF-8, files and folders with names
    that begin with a dot, and the folders `PACKAGES` are left out.

    Args:
        root: path of a UTF-8 file, or of a folder.
        pattern: shell pattern for the names of files in the folder, such as "*.txt".
        separator: string between the documents of a file; None means that every file is one document.
    """

    def __init__(self, root: Path, pattern: str = "*", separator: str | None = None) -> None:
        self.root, self.pattern, self.separator = root, pattern, separator
        self.not_utf8: list[str] = []  # the files that `documents` has left out because they are not UTF-8

    @cached_property
    def files(self) -> list[Path]:
        """The non-empty files: `root`, or the matches of `pattern` in folder `root`; UserError if there are none."""
        listed = [self.root] if self.root.is_file() else self._listed()
        if files := [path for path in listed if path.is_file() and path.stat().st_size]:
            return sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(self.root))).digest())
        remedy = "name a file, or a folder of files"
        raise UserError(f"--text {self.root}: no file with content matches --pattern {self.pattern!r}: {remedy}")

    @property
    def identity(self) -> str:
        """A string that changes with the separator, and with the paths, sizes and times (`state_of`) of the files."""
        return "\n".join([repr(self.separator), *(f"{path.resolve()} {state_of(path)}" for path in self.files)])

    def splits(self) -> dict[str, Iterator[str]]:
        """Return a dict with the documents, under the key "text"."""
        return {"text": self.documents()}

    def documents(self) -> Iterator[str]:
        self.not_utf8 = []
        for path in self.files:
            try:
                text = decode_text(path.read_bytes(), f"--text {path}")
            except UserError:
                if path == self.root:
                    raise
                self.not_utf8.append(str(path.relative_to(self.root)))
            else:
                yield from text.split(self.separator) if self.separator else [text]

    def _listed(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.root, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in PACKAGES]
            shown = (name for name in names if not name.startswith("."))
            yield from (Path(folder, name) for name in shown if fnmatchcase(name, self.pattern))
