"""Documents: UTF-8 files, and folders of them, of any size."""

import codecs
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
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
FORMATS = {  # what files of other formats begin with
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
"""Matches places where the pre-tokenizers of GPT-2 and its successors always split a text.

That is before a space between letters, and behind a line end between others than white space.
"""


def read_text(path: Path, remedy: str = "name a text file") -> str:
    """Return the text of a UTF-8 file, see `decode_pieces`; raise UserError if it is missing, empty or not UTF-8."""
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
    """Return the text of a file, see `decode_pieces`."""
    return "".join(decode_pieces([raw], name))


def decode_pieces(pieces: Iterable[bytes], name: str) -> Iterator[str]:
    r"""Decode the pieces of a UTF-8 file, without a byte order mark at its beginning and with \n for \r\n.

    Raises UserError, naming the file and its format or encoding as far as these can be told, if it is not UTF-8, or if
    more than a tenth of it is NUL: UTF-16 without a mark, and what others have made of it, may be UTF-8 by its bytes.
    """
    marked, size, zeros = None, 0, [0, 0]  # at even and odd places
    for raw in pieces:
        if not size:
            if other := next((told for start, told in FORMATS.items() if re.match(start, raw)), None):
                raise UserError(f"{name} is {other}")
            marked = next((encoding for mark, encoding in MARKS.items() if raw.startswith(mark)), None)
        if raw.count(0):
            zeros = [count + raw[(size + odd) % 2 :: 2].count(0) for odd, count in enumerate(zeros)]
        try:
            text = raw.decode("utf-8")  # not "utf-8-sig", whose errors count bytes from behind the mark
        except UnicodeDecodeError as error:
            if marked:
                raise UserError(f"{name} is {marked}: convert it, e.g. iconv -f {marked} -t UTF-8") from error
            _require_few_zeros(zeros, size + len(raw), name)
            remedy = "convert it, Western European text from Windows by iconv -f cp1252 -t UTF-8"
            raise UserError(f"{name} is not UTF-8 at byte {size + error.start}: {remedy}") from error
        yield text.replace("\r\n", "\n") if size else plain(text)
        size += len(raw)
    _require_few_zeros(zeros, size, name)


def _require_few_zeros(zeros: list[int], size: int, name: str) -> None:
    if size and sum(zeros) * 10 > size:
        reason = f"{sum(zeros):,} of its {size:,} bytes are NUL"
        encoding = "UTF-16BE" if zeros[0] > zeros[1] else "UTF-16LE"
        remedy = f"convert the original, e.g. iconv -f {encoding} -t UTF-8"
        raise UserError(f"{name} is UTF-16 or no text: {reason}: {remedy}")


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
        """The files that `decode_pieces` reads without an error; raises UserError if there is none."""
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
            text = _bytes(path, start, stop).decode("utf-8").replace("\r\n", "\n")  # `texts` has tried it
            text = text if start else text.removeprefix("\ufeff")
            *documents, last = text.split(self.separator) if self.separator else [text]
            yield from ((document, True) for document in documents if document)
            if last:
                yield last, stop == path.stat().st_size

    @property
    def validation_pieces(self) -> int:
        """Number of pieces, the last ones, that are the corpus's own validation split."""
        return 0

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
        lines = [re.escape(line.encode()) for line in (self.separator or "").split("\n")]
        mark = re.compile(rb"\r?\n".join(lines).removeprefix(rb"\r?"))
        with path.open("rb") as file:
            while size - start > PIECE:
                file.seek(start)
                block, stop = file.read(2 * PIECE), PIECE
                while block[stop] & 0xC0 == 0x80 or block[stop - 1 : stop + 1] == b"\r\n":
                    stop -= 1  # within a character, or the end of a line
                if self.separator:  # from the start on, so that separators are those that `split` finds
                    found = (match.end() for match in mark.finditer(block))
                    stop = next((end for end in found if end >= PIECE), stop)
                else:
                    text = block[stop:].decode("utf-8", "ignore")
                    cut = CUT.search(text, 1) or re.search("(?<=\n)", text)  # at worst behind any line end
                    stop += len(text[: cut.start()].encode()) if cut else 0
                ranges.append((path, start, start + stop))
                start += stop
        return [*ranges, (path, start, size)] if start < size else ranges


def _bytes(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)
