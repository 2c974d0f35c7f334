"""Documents: UTF-8 files, and folders of them, of any size."""

import codecs
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvt.system.errors import UserError
from kvt.system.files import list_files, require_file, state_of

PIECE = 2**23  # bytes of text that are read and encoded at once
LIBRARY = Path(sysconfig.get_path("stdlib"))
"""The modules of this Python's standard library (PSF licence), a text that is at hand anywhere."""
PACKAGES = ("site-packages", "__pycache__")  # folders that are no part of it
LEARNED = 2**26  # bytes of text that byte pairs are learned from at most
Group = list[tuple[Path, int, int]]
"""Byte ranges of files: path, start, and stop (exclusive)."""
MARKS = {  # byte order marks of what is not UTF-8; UTF-32's may begin with one of UTF-16's
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
}


def read_text(path: Path, remedy: str = "name a text file") -> str:
    """Return the text of a UTF-8 file, see `decode_text`; raise UserError if it is missing, empty or not UTF-8."""
    require_file(path, remedy)
    if text := decode_text(path.read_bytes(), str(path)):
        return text
    raise UserError(f"{path} is empty: choose another file")


def fingerprint(text: str) -> str:
    """Return a hash of a text as 16 hexadecimal digits; `result.json` records it as `content`."""
    return hashlib.sha256(f"{len(text)} {text}".encode(errors="surrogateescape")).hexdigest()[:16]


def plain(text: str) -> str:
    r"""Return a text without a byte order mark and with \n for \r\n."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def decode_text(raw: bytes, name: str) -> str:
    r"""Decode UTF-8, without a byte order mark and with \n for \r\n.

    Raises UserError, naming it and its encoding as far as that can be told, if it is not UTF-8, or if more than a tenth
    of it is NUL: UTF-16 without a mark, and what others have made of it, may be UTF-8 by its bytes.
    """
    marked = next((encoding for mark, encoding in MARKS.items() if raw.startswith(mark)), None)
    if not marked and raw.count(0) * 10 > len(raw):
        reason = f"{raw.count(0):,} of its {len(raw):,} bytes are NUL"
        raise UserError(f"{name} is UTF-16 or no text: {reason}: convert the original, e.g. iconv -f UTF-16LE -t UTF-8")
    try:
        # not "utf-8-sig", whose errors count bytes from behind the mark
        return plain(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"is {marked}" if marked else f"is not UTF-8 at byte {error.start}"
        raise UserError(f"{name} {problem}: convert it, e.g. iconv -f {marked or 'latin1'} -t UTF-8") from error


@dataclass(frozen=True)
class Corpus:
    """The documents of a file or a folder: each file is one, or several with a separator between them.

    They are read a piece at a time. The order of a folder's files is random, and depends on their names alone, so that
    the last part is like the rest.

    Args:
        root: a UTF-8 file, or a folder of them, searched in depth; files in it that are no texts are left out.
        pattern: of the names of files in the folder.
        separator: what separates documents within a file; None: a file is one document.
    """

    root: Path
    pattern: str = "*"
    separator: str | None = None

    @cached_property
    def files(self) -> list[Path]:
        """All files with content; raise UserError if there are none."""
        listed = [self.root] if self.root.is_file() else list_files(self.root, self.pattern, PACKAGES)
        if files := [path for path in listed if path.is_file() and path.stat().st_size]:
            return sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(self.root))).digest())
        remedy = "name a file, or a folder of them"
        raise UserError(f"--text {self.root}: no file with content matches --pattern {self.pattern!r}: {remedy}")

    @cached_property
    def texts(self) -> list[Path]:
        """The files whose content is text to the end, see `decode_text`; raise UserError if none is."""
        texts, reasons = [], []
        for path in self.files:
            try:
                for place in self._ranges(path):
                    _read(*place)
                texts.append(path)
            except UserError as error:
                if path == self.root:
                    raise
                reasons.append(str(error))
        if not texts:
            raise UserError(f"--text {self.root}: none of {len(reasons)} files is a text: {reasons[0]}")
        return texts

    @property
    def left_out(self) -> str | None:
        """Says how many of the files are not text, and names the first of them; None if all are."""
        texts = set(self.texts)
        if not (others := [path.relative_to(self.root) for path in self.files if path not in texts]):
            return None
        return f"{len(others)} of {len(self.files)} files, which are not UTF-8, such as {others[0]}"

    @property
    def identity(self) -> str:
        """Identifies the texts by names, sizes and times of the files, and by the separator."""
        return "\n".join([repr(self.separator), *(f"{path.resolve()} {state_of(path)}" for path in self.files)])

    def pieces(self) -> Iterator[Group]:
        """Yield groups of byte ranges, about `PIECE` bytes a group, cut between documents or lines."""
        group: Group = []
        size = 0
        for path in self.texts:
            for place, start, stop in self._ranges(path):
                if group and size + stop - start > PIECE:
                    yield group
                    group, size = [], 0
                group.append((place, start, stop))
                size += stop - start
        yield group

    def read(self, group: Group) -> Iterator[tuple[str, bool]]:
        """Yield the documents in a group, and whether each ends there: the last of a range may continue in the next."""
        for path, start, stop in group:
            text = _read(path, start, stop)
            *documents, last = text.split(self.separator) if self.separator else [text]
            yield from ((document, True) for document in documents if document)
            if last:
                yield last, stop == path.stat().st_size

    def sample(self) -> Iterator[str]:
        """Yield about the first `LEARNED` bytes of documents, from which byte pairs are learned."""
        size = 0
        for group in self.pieces():
            yield from (text for text, _ in self.read(group))
            size += sum(stop - start for _, start, stop in group)
            if size >= LEARNED:
                return

    def _ranges(self, path: Path) -> Group:
        """Split a file into byte ranges, each of at least `PIECE` bytes but the last."""
        ranges, size, start = [], path.stat().st_size, 0
        lines = (self.separator or "\n").encode().split(b"\n")
        mark = re.compile(rb"\r?\n".join(map(re.escape, lines)).removeprefix(rb"\r?"))
        with path.open("rb") as file:
            while size - start > PIECE:
                file.seek(start)
                block = file.read(2 * PIECE)
                # from the start on, so that separators are those that `split` finds; for a line any will do
                marks = mark.finditer(block, 0 if self.separator else PIECE - 1)
                after_mark = next((match.end() for match in marks if match.end() >= PIECE), None)
                stop = after_mark or PIECE
                while not after_mark and (block[stop] & 0xC0 == 0x80 or block[stop - 1 : stop + 1] == b"\r\n"):
                    stop -= 1  # within a character, or the end of a line
                ranges.append((path, start, start + stop))
                start += stop
        return [*ranges, (path, start, size)] if start < size else ranges


def _read(path: Path, start: int, stop: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return decode_text(file.read(stop - start), str(path))
