"""Read documents from UTF-8 files, or from folders of UTF-8 files, of any size."""

import codecs
import hashlib
import os
import re
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvt.data.files import require_file, state_of
from kvt.system.errors import UserError
from kvt.system.files import list_files

PIECE = 2**23  # number of bytes of text that are read and encoded at once
LIBRARY = Path(sysconfig.get_path("stdlib"))
"""The folder of Python's standard library (PSF licence), which every user of Python has as an example of text."""
PACKAGES = ("site-packages", "__pycache__")  # subfolders of LIBRARY that are not part of the standard library
LEARNED = 2**26  # the largest number of bytes of text from which byte pairs are learned
Group = list[tuple[Path, int, int]]
"""A list of byte ranges of files. A range has a path, a start and a stop, which is exclusive."""
MARKS = {  # byte order marks of other encodings; UTF-32 is first, as its mark begins with a mark of UTF-16
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
}
FORMATS = {  # maps patterns of the first bytes of other file formats to messages
    rb"\x1f\x8b": "gzip data: unpack it with gunzip",
    rb"\x28\xb5\x2f\xfd": "zstd data: unpack it with unzstd",
    rb"\xfd7zXZ\0": "xz data: unpack it with unxz",
    rb"BZh[1-9]1AY&SY": "bzip2 data: unpack it with bunzip2",
    rb"PK\x03\x04": "a zip archive: unpack it with unzip",
    rb"[\s\S]{257}ustar[\0 ]": "a tar archive: unpack it with tar -xf",
    rb"PAR1[\0-\x1f]": "a Parquet file: name its folder, as hf:FOLDER",
    rb"ARROW1\0": "an Arrow file: name its folder, as hf:FOLDER",
    rb"%PDF-": "a PDF: convert it with pdftotext",
    rb"\n[\s\S]\n\x05<unk>": "a SentencePiece model: convert it to tokenizer.json",
}
CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=[^\s/])|(?<=\S\r\n)(?=[^\s/])")
"""Pattern of positions where the pre-tokenizers of GPT-2 and its successors always split a text.

The positions are before a space between two letters, and after a line end that is not next to white space.
"""


def read_text(path: Path, remedy: str = "name a text file") -> str:
    """Return the text of a UTF-8 file, as `decode_pieces`; raise UserError if it is missing, empty or not UTF-8."""
    require_file(path, remedy)
    if text := decode_text(path.read_bytes(), str(path)):
        return text
    raise UserError(f"{path} is empty: choose another file")


def fingerprint(text: str) -> str:
    """Return a hash of a text as 16 hexadecimal digits; `result.json` records this hash as `content`."""
    return hashlib.sha256(f"{len(text)} {text}".encode(errors="surrogateescape")).hexdigest()[:16]


def plain(text: str) -> str:
    r"""Return a text without its byte order mark, and with \r\n replaced by \n."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def nfc(text: str) -> str:
    """Return a text in Unicode's form NFC, in which "ü" is one character, not "u" and a combining mark."""
    return unicodedata.normalize("NFC", text)


def decode_text(raw: bytes, name: str) -> str:
    """Return the text of a file with the bytes `raw`, as `decode_pieces`; messages call the file `name`."""
    return "".join(decode_pieces([raw], name))


def decode_pieces(pieces: Iterable[bytes], name: str) -> Iterator[str]:
    r"""Decode the pieces of a UTF-8 file; remove a byte order mark at the beginning, and replace \r\n by \n.

    Raises UserError if the file is not UTF-8, or if more than a tenth of its bytes are NUL, which suggests UTF-16
    without a byte order mark. The message names the file. It also names the format or encoding if kvt recognises it.
    """
    marked, size, zeros = None, 0, [0, 0]  # NUL bytes at even and at odd positions
    for raw in pieces:
        if not size:
            if other := next((told for start, told in FORMATS.items() if re.match(start, raw)), None):
                raise UserError(f"{name} is {other}")
            marked = next((encoding for mark, encoding in MARKS.items() if raw.startswith(mark)), None)
        if raw.count(0):
            zeros = [count + raw[(size + odd) % 2 :: 2].count(0) for odd, count in enumerate(zeros)]
        try:
            text = raw.decode("utf-8")  # positions in errors of "utf-8-sig" do not count the bytes of the mark
        except UnicodeDecodeError as error:
            if marked:
                raise UserError(f"{name} is {marked}: convert it, e.g. iconv -f {marked} -t UTF-8") from error
            _require_few_zeros(zeros, size + len(raw), name)
            remedy = "convert it, e.g. Western European text from Windows with iconv -f cp1252 -t UTF-8"
            raise UserError(f"{name} is not UTF-8 at byte {size + error.start}: {remedy}") from error
        yield text.replace("\r\n", "\n") if size else plain(text)
        size += len(raw)
    _require_few_zeros(zeros, size, name)


def _require_few_zeros(zeros: list[int], size: int, name: str) -> None:
    if size and sum(zeros) * 10 > size:
        reason = f"{sum(zeros):,} of its {size:,} bytes are NUL"
        encoding = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
        remedy = f"convert the original, e.g. iconv -f {encoding} -t UTF-8"
        raise UserError(f"{name} is UTF-16 or not a text: {reason}: {remedy}")


@dataclass(frozen=True)
class Corpus:
    """The documents of a UTF-8 file, or of the UTF-8 files in a folder. Documents are read in pieces.

    The files of a folder have a random order that depends only on the names of the files. Validation uses the last part
    of the corpus, which is therefore a random selection of files.

    Args:
        root: path of a UTF-8 file, or of a folder. Files in subfolders are included, and other files are left out.
        pattern: pattern of the names of files in the folder, such as "*.txt".
        separator: string between the documents of a file; None means that every file is one document.
    """

    root: Path
    pattern: str = "*"
    separator: str | None = None

    @cached_property
    def files(self) -> list[Path]:
        """All files that match `pattern` and are not empty; raises UserError if there are no such files."""
        listed = [self.root] if self.root.is_file() else list_files(self.root, self.pattern, PACKAGES)
        if files := [path for path in listed if path.is_file() and path.stat().st_size]:
            return sorted(files, key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(self.root))).digest())
        remedy = "name a file, or a folder of files"
        raise UserError(f"--text {self.root}: no file with content matches --pattern {self.pattern!r}: {remedy}")

    @cached_property
    def texts(self) -> list[Path]:
        """The files that `decode_pieces` reads without an error; raises UserError if there are no such files."""
        texts, reasons = [], []
        for path in self.files:
            try:
                for _ in decode_pieces((_bytes(*place) for place in self._ranges(path)), str(path)):
                    pass
                texts.append(path)
            except UserError as error:
                if path == self.root:
                    raise
                reasons.append(str(error))
        if not texts:
            raise UserError(f"--text {self.root}: none of {len(reasons)} files is a text, for example: {reasons[0]}")
        return texts

    @property
    def left_out(self) -> str | None:
        """A phrase with the number of files that are not text, and the first such file; None if all files are text."""
        texts = set(self.texts)
        if not (others := [path.relative_to(self.root) for path in self.files if path not in texts]):
            return None
        return f"{len(others)} of {len(self.files)} files, which are not UTF-8, such as {others[0]}"

    @property
    def identity(self) -> str:
        """A string that changes if the name, size or time of a file changes, or if the separator changes."""
        return "\n".join([repr(self.separator), *(f"{path.resolve()} {state_of(path)}" for path in self.files)])

    def pieces(self) -> Iterator[Group]:
        """Yield groups of byte ranges with about `PIECE` bytes per group; files are cut between documents or lines."""
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
        """Yield a pair for each document of a group: a text, and whether the document ends at the end of this text.

        The last document of a byte range may continue in the next byte range.
        """
        for path, start, stop in group:
            text = _bytes(path, start, stop).decode("utf-8").replace("\r\n", "\n")  # no error: `texts` has decoded it
            text = text if start else text.removeprefix("\ufeff")
            *documents, last = text.split(self.separator) if self.separator else [text]
            yield from ((document, True) for document in documents if document)
            if last:
                yield last, stop == path.stat().st_size

    @property
    def validation_pieces(self) -> int:
        """Number of pieces at the end of the corpus that form a validation split given by the corpus."""
        return 0

    def sample(self) -> Iterator[str]:
        """Yield the first documents, about `LEARNED` bytes of text in total, for learning byte pairs."""
        size = 0
        for group in self.pieces():
            yield from (text for text, _ in self.read(group))
            size += sum(stop - start for _, start, stop in group)
            if size >= LEARNED:
                return

    def _ranges(self, path: Path) -> Group:
        """Split a file into byte ranges; each byte range except the last has about `PIECE` bytes or more."""
        ranges, size, start = [], path.stat().st_size, 0
        lines = [re.escape(line.encode()) for line in (self.separator or "").split("\n")]
        mark = re.compile(rb"\r?\n".join(lines).removeprefix(rb"\r?"))
        with path.open("rb") as file:
            while size - start > PIECE:
                file.seek(start)
                block, stop = file.read(2 * PIECE), PIECE
                while block[stop] & 0xC0 == 0x80 or block[stop - 1 : stop + 1] == b"\r\n":
                    stop -= 1  # do not cut inside a character or between \r and \n
                if self.separator:  # find separators from the start, as `str.split` does
                    found = (match.end() for match in mark.finditer(block))
                    stop = next((end for end in found if end >= PIECE), stop)
                else:
                    text = block[stop:].decode("utf-8", "ignore")
                    cut = CUT.search(text, 1) or re.search("(?<=\n)", text)  # else cut after the next line end
                    stop += len(text[: cut.start()].encode()) if cut else 0
                ranges.append((path, start, start + stop))
                start += stop
        return [*ranges, (path, start, size)] if start < size else ranges


def _bytes(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
