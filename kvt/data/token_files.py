"""The tokens of texts of any size, as a memory-mapped file that is made once.

Texts are read, and tokens written, a piece at a time, so that memory does not grow with them. A run that is killed
while it makes the file goes on behind the last whole piece.
"""

import hashlib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvt.data.subwords import Bytes
from kvt.data.tensor_files import once
from kvt.data.texts import decode_text, fingerprint
from kvt.system.errors import UserError
from kvt.system.files import atomically, list_files, sha256_of, state_of, write_atomically

PIECE = 2**23  # bytes of text that are read and encoded at once
Group = list[tuple[Path, int, int]]
"""Byte ranges of files: path, start, and stop (exclusive)."""
LEARNED = 2**26  # bytes of text that byte pairs are learned from at most


@dataclass(frozen=True)
class Corpus:
    """The documents of a file or a folder: each file is one, or several with a separator between them.

    The order of a folder's files is random, and depends on their names alone, so that the last part is like the rest.

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
        if self.root.is_file():
            found = [self.root]
        else:
            hidden = ("site-packages", "__pycache__")
            found = [
                path
                for path in list_files(self.root)
                if fnmatchcase(path.name, self.pattern)
                and path.is_file()
                and not any(part in hidden for part in path.relative_to(self.root).parts)
            ]
            found.sort(key=lambda path: hashlib.sha256(os.fsencode(path.relative_to(self.root))).digest())
        if found := [path for path in found if path.stat().st_size]:
            return found
        remedy = "name a file, or a folder of them"
        raise UserError(f"--text {self.root}: no file with content matches --pattern {self.pattern!r}: {remedy}")

    @cached_property
    def texts(self) -> list[Path]:
        """The files that are texts throughout, see `decode_text`; raise UserError if none is."""
        texts, reasons = [], []
        for path in self.files:
            try:
                for start, stop in self._ranges(path):
                    _read(path, start, stop)
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
        """How many of the files are no texts, and the first of them; None if all are texts."""
        texts = set(self.texts)
        if not (others := [path.relative_to(self.root) for path in self.files if path not in texts]):
            return None
        return f"{len(others)} of {len(self.files)} files, which are not UTF-8, such as {others[0]}"

    @property
    def identity(self) -> str:
        """Which texts these are: names, sizes and times of the files, and the separator."""
        return "\n".join([repr(self.separator), *(f"{path.resolve()} {state_of(path)}" for path in self.files)])

    def pieces(self) -> Iterator[Group]:
        """Yield groups of ranges of bytes of files, about `PIECE` together, cut between documents or lines."""
        group: Group = []
        size = 0
        for path in self.texts:
            for start, stop in self._ranges(path):
                if group and size + stop - start > PIECE:
                    yield group
                    group, size = [], 0
                group.append((path, start, stop))
                size += stop - start
        yield group

    def read(self, group: Group) -> Iterator[tuple[str, bool]]:
        """Yield the documents in ranges of files, and whether each ends there: the last of a range may go on."""
        for path, start, stop in group:
            text = _read(path, start, stop)
            *documents, last = text.split(self.separator) if self.separator else [text]
            yield from ((document, True) for document in documents if document)
            if last:
                yield last, stop == path.stat().st_size

    def _ranges(self, path: Path) -> Iterator[tuple[int, int]]:
        size, start = path.stat().st_size, 0
        lines = (self.separator or "\n").encode().split(b"\n")
        mark = re.compile(rb"\r?\n".join(map(re.escape, lines)).removeprefix(rb"\r?"))
        with path.open("rb") as file:
            while size - start > PIECE:
                file.seek(start)
                block = file.read(2 * PIECE)
                # from the start on, so that separators are those that `split` finds; for a line any will do
                marks = mark.finditer(block, 0 if self.separator else PIECE - 1)
                found = next((match.end() for match in marks if match.end() >= PIECE), None)
                stop = found or PIECE
                while not found and (block[stop] & 0xC0 == 0x80 or block[stop - 1 : stop + 1] == b"\r\n"):
                    stop -= 1  # within a character, or the end of a line
                yield start, start + stop
                start += stop
        if start < size:
            yield start, size


def standard_library() -> Corpus:
    """Return the modules of this Python's standard library (PSF licence), which are a text that is at hand anywhere."""
    return Corpus(Path(sysconfig.get_path("stdlib")), "*.py")


class TokenFile:
    """The tokens of a corpus, each document followed by the tokens' `end`, in a folder below `data_dir`."""

    def __init__(self, corpus: Corpus, tokens: Bytes, data_dir: Path) -> None:
        self.corpus, self.tokens, self.data_dir = corpus, tokens, data_dir
        asked = fingerprint(f"2 {tokens.definition} {corpus.identity}")  # 1 had other tokens of the same definition
        self.folder = data_dir / ".cache" / f"tokens-{asked}"
        self.path, self.about = self.folder / "tokens.bin", self.folder / "about.json"
        self.dtype = np.dtype("<i2" if len(tokens.pieces) <= 2**15 else "<i4")

    def prepare(self) -> None:
        """Encode the texts, unless that is done; of several processes one does."""
        once(self.data_dir, self.about.exists, self._make)

    def load(self) -> Tensor:
        """Return the tokens, memory-mapped, int16 or int32 (T,); raise UserError if the file is not whole."""
        about = json.loads(self.about.read_text())
        self.content, self.left_out = about["content"], about["left_out"]  # a hash; that of the corpus as it was then
        if not self.path.is_file() or self.path.stat().st_size != about["tokens"] * self.dtype.itemsize:
            raise UserError(f"{self.path} is damaged: remove {self.folder}, and it is made again")
        return torch.from_numpy(np.memmap(self.path, self.dtype, mode="c"))  # copy on write: torch takes no read-only

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*.tmp"):  # of a killed process
            leftover.unlink()
        groups = list(self.corpus.pieces())
        shards = [self.folder / f"{number:06}.part" for number in range(len(groups))]
        sizes = [size_of(group) for group in groups]
        with tqdm(total=sum(sizes), desc="tokens", unit="B", unit_scale=True, disable=None) as bar:
            for shard, group, size in zip(shards, groups, sizes, strict=True):
                if not shard.exists():
                    write_atomically(shard, self._encode(self.corpus.read(group)).tobytes())
                bar.update(size)
        with atomically(self.path) as part, part.open("wb") as file:
            for shard in shards:
                with shard.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
        count = self.path.stat().st_size // self.dtype.itemsize
        if not count:
            raise UserError(f"--text {self.corpus.root}: nothing but separators: choose another --separator")
        content = sha256_of(self.path)[:16]
        write_atomically(
            self.about, json.dumps({"tokens": count, "content": content, "left_out": self.corpus.left_out})
        )
        for shard in shards:
            shard.unlink()

    def _encode(self, documents: Iterable[tuple[str, bool]]) -> np.ndarray:
        read = list(documents)
        end = np.array([self.tokens.end], self.dtype)
        rows: list[np.ndarray] = [np.empty(0, self.dtype)]
        for ids, (_, ends) in zip(self.tokens.encode_all([text for text, _ in read]), read, strict=True):
            rows.append(np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids, self.dtype))
            if ends:
                rows.append(end)
        return np.concatenate(rows).astype(self.dtype)


def _read(path: Path, start: int, stop: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return decode_text(file.read(stop - start), str(path))


def sample_of(corpus: Corpus) -> Iterator[str]:
    """Yield documents of at most `LEARNED` bytes together, or a little more, to learn byte pairs from."""
    size = 0
    for group in corpus.pieces():
        yield from (text for text, _ in corpus.read(group))
        size += size_of(group)
        if size >= LEARNED:
            return


def size_of(group: Group) -> int:
    """Return the total size of a group of ranges, in bytes."""
    return sum(stop - start for _, start, stop in group)


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """Return where documents begin, int64 (D,): at 0, and behind each `end` but one that is the last token."""
    starts, is_end = [torch.zeros(1, dtype=torch.long)], torch.empty(min(PIECE, len(tokens)), dtype=torch.bool)
    for first in range(0, len(tokens), PIECE):
        part = tokens[first : first + PIECE]
        torch.eq(part, end, out=is_end[: len(part)])  # in one buffer: many large ones leave the memory in pieces
        starts.append(first + 1 + is_end[: len(part)].nonzero().squeeze(1))
    found = torch.cat(starts)
    return found[found < len(tokens)]


def start_of_last(share: float, tokens: Tensor, pieces: Sequence[bytes]) -> int:
    """Return where the last `share` of the text, in bytes, begins: the place of a token."""
    sizes, step = np.array([len(piece) for piece in pieces]), PIECE // 8
    parts = [part.numpy() for part in tokens.split(step)]
    ends = np.cumsum([sizes.take(part).sum() for part in parts])  # bytes up to the end of each part; take is fast
    before = ends[-1] - round(share * int(ends[-1]))
    number = int(np.searchsorted(ends, before))
    of_part = sizes.take(parts[number])
    starts = ends[number] - of_part.sum() + of_part.cumsum() - of_part
    return number * step + int(np.searchsorted(starts, before))
