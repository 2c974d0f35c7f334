"""Encode text as symbols of a vocabulary, as UTF-8 bytes or as byte pairs (as in GPT-2), and store tokens in files.

>>> Bytes().encode("ß!"), Bytes().text([195, 159, 33, 256])
([195, 159, 33], 'ß!')
>>> words = Vocabulary(["seven", "hundred"], separator=" ")
>>> words.begin("seven hundred seven"), words.text([0, 1])
([0, 1, 0], 'seven hundred')
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchtext.vocab import Vocab
from tqdm import tqdm

from kvt.data.files import once, require_file
from kvt.data.hub import HubCorpus
from kvt.data.texts import Corpus, decode_text, fingerprint, nfc
from kvt.system import UserError, atomically, sha256_of, write_atomically

IGNORE = -100  # target at positions that do not count in the loss: the `ignore_index` of torch's cross-entropy
UNK = "<unk>"  # replaces unknown symbols if the vocabulary contains it
END = "<|endoftext|>"  # text of the end token, which follows each document that is encoded as bytes or byte pairs
PART = 2**16  # least number of characters in a part of a text, except the last; CPU cores encode parts in parallel
PIECE = 2**20  # number of tokens whose bytes are counted at once
LEARNED = 2**26  # the largest number of characters of text from which byte pairs are learned
CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=[^\s/])|(?<=\S\r\n)(?=[^\s/])")
"""Places where the pre-tokenizers of GPT-2 and of GPT-4o (o200k) always split a text: before a space between two
letters; and after a line end, unless white space precedes the line end, or white space or "/" follows it."""


def build_vocab(symbols: Iterable[str], specials: Sequence[str] = (), min_freq: int = 1) -> list[str]:
    """Return the special symbols, then all others that occur at least `min_freq` times, the most frequent first.

    >>> build_vocab("to be or not to be".split(), specials=["<unk>"])
    ['<unk>', 'be', 'to', 'not', 'or']
    """
    return list(Vocab(Counter(symbols), min_freq=min_freq, specials=list(specials)).itos)


class Vocabulary:
    """A mapping between symbols and ids. An id is a position in `vocab`. Symbols with the same NFC have the same id.

    Args:
        vocab: the symbols. If `<unk>` is in this list, the id of `<unk>` replaces unknown symbols.
        separator: string between the symbols of a text: "" for characters, " " for words.
    """

    def __init__(self, vocab: Sequence[str], separator: str = "") -> None:
        self.vocab, self.separator = vocab, separator
        self.ids = {nfc(symbol): i for i, symbol in enumerate(vocab)}

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Return the ids of symbols; raise UserError for an unknown symbol if the vocabulary has no `<unk>`."""
        unknown = self.ids.get(UNK)
        encoded = []
        for symbol in symbols:
            if (i := self.ids.get(nfc(symbol), unknown)) is None:
                raise UserError(f"{symbol!r} is not in the model's vocabulary")
            encoded.append(i)
        return encoded

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.vocab[i] for i in ids]

    def begin(self, prompt: str) -> list[int]:
        """Return the ids of a prompt. The first symbol of `vocab` replaces an empty prompt."""
        prompt = prompt or self.vocab[0]
        if self.separator:
            return self.encode(prompt.split())
        composed = nfc(prompt)
        return self.encode(composed if self.ids.keys() >= {*composed} else prompt)  # `vocab` may lack composed letters

    def text(self, ids: Iterable[int]) -> str:
        return self.separator.join(self.decode(ids))

    def additions(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text that each id adds to the text of earlier ids."""
        return (self.separator + self.vocab[i] for i in ids)


class Bytes:
    """A tokenizer for text in UTF-8, with one token for each of the 256 byte values, and the end token `END`.

    `pieces` is a list of the bytes of each token. The end token, whose id is `end`, has no bytes.
    `tokens_of(definition)` returns an equal tokenizer.
    """

    definition = "bytes"

    def __init__(self) -> None:
        self.pieces = [*(bytes([byte]) for byte in range(256)), b""]
        self.end = 256

    @cached_property
    def vocab(self) -> list[str]:
        """A list with the text that is shown for each token."""
        return [END if i == self.end else piece.decode("utf-8", "replace") for i, piece in enumerate(self.pieces)]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_parts(self, text: str) -> Iterator[Sequence[int] | np.ndarray]:
        """Yield the ids of a text in parts."""
        yield np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.vocab[i] for i in ids]

    def begin(self, prompt: str) -> list[int]:
        return [self.end, *self.encode(prompt)]

    def text(self, ids: Iterable[int]) -> str:
        """Return the text that all ids together encode; bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")

    def additions(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text that each id adds to the text of earlier ids; the end token adds `END`.

        >>> list(Bytes().additions([195, 159, 256, 97]))
        ['', 'ß', '<|endoftext|>', 'a']
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may consist of several tokens
        return (END if i == self.end else decoder.decode(self.pieces[i]) for i in ids)


class BytePairs(Bytes):
    """A byte-level BPE tokenizer of the library `tokenizers`; `definition` is the content of a tokenizer.json.

    Truncation, padding and dropout in the definition are ignored. A special token's name in a text is encoded as
    ordinary text, so that the end token occurs only at the end of documents. Raises UserError with `name` in the
    message if the definition is not that of a byte-level BPE.
    """

    def __init__(self, definition: str, name: str = "tokenizer") -> None:
        from tokenizers import Tokenizer  # an optional dependency

        try:
            self.tokenizer, kind = Tokenizer.from_str(definition), json.loads(definition)["model"]["type"]
        except Exception as error:  # `tokenizers` has no exception type of its own
            raise UserError(f"--tokenizer {name} is not a tokenizer.json ({error!s:.100})") from error
        letters = {letter: byte for byte, letter in _alphabet().items()}
        if kind != "BPE" or not letters.keys() <= self.tokenizer.get_vocab().keys():
            raise UserError(f"--tokenizer {name}: expected a byte-level BPE, as in GPT-2")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.model.dropout = None
        self.tokenizer.add_special_tokens([END])  # `definition` may lack it, or have it as an ordinary token
        self.tokenizer.encode_special_tokens = True  # as ordinary text
        ids = self.tokenizer.get_vocab()
        self.definition, self.end, self.name = definition, ids[END], name
        self.pieces = [b""] * (max(ids.values()) + 1)
        for piece, i in ids.items():
            self.pieces[i] = bytes(letters[letter] for letter in piece if letter in letters)
        for i, token in self.tokenizer.get_added_tokens_decoder().items():
            self.pieces[i] = b"" if i == self.end else token.content.encode()  # plain text, unlike `piece` above

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_parts(self, text: str) -> Iterator[Sequence[int] | np.ndarray]:
        """Yield the ids of a text in parts, encoded on all CPU cores; raise UserError if they decode to other text."""
        parts = _parts(text)
        while several := [*islice(parts, 64)]:
            encoded = self.tokenizer.encode_batch_fast(several, add_special_tokens=False)
            for part, found in zip(several, encoded, strict=True):
                if part != self.text(found.ids):
                    remedy = "remove normalizer and add_prefix_space from the file, or choose bpe"
                    raise UserError(f"--tokenizer {self.name} does not keep the text: {remedy}")
                yield found.ids


def tokens_of(definition: str, name: str = "tokenizer") -> Bytes:
    """Return the tokenizer of a definition: "bytes", or the content of a tokenizer.json. Errors contain `name`."""
    return Bytes() if definition == Bytes.definition else BytePairs(definition, name)


def read_tokenizer(path: Path) -> BytePairs:
    """Read the tokenizer.json of a byte-level BPE tokenizer; UserError if the file is missing or has other content."""
    require_file(path, "--tokenizer needs bytes, bpe, or the path of a tokenizer.json, such as GPT-2's")
    return BytePairs(decode_text(path.read_bytes(), f"--tokenizer {path}"), str(path))


def first_of(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts for `learn_pairs`, at most `LEARNED` characters in all; the last text may be cut."""
    left = LEARNED
    for text in texts:
        yield text[:left]
        if (left := left - len(text)) <= 0:
            return


def learn_pairs(texts: Iterator[str], vocab_size: int) -> str:
    """Train a byte-level BPE tokenizer on texts; return the content of its tokenizer.json.

    The tokenizer has at most `vocab_size` tokens, including 256 bytes and `END`. UserError if `vocab_size` < 258.
    """
    if vocab_size <= 257:
        raise UserError(f"vocab_size={vocab_size} must be above 257: 256 bytes and {END}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings: Any = {"initial_alphabet": sorted(_alphabet().values()), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], **settings)
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PART:
        cut = CUT.search(text, start + PART)
        stop = cut.start() if cut else len(text)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _alphabet() -> dict[int, str]:
    """Return GPT-2's character for each byte: its character in Latin-1 if visible, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


class TokenFile:
    """The tokens of a corpus, memory-mapped from `data_dir/.cache`. An end token follows each non-empty document."""

    def __init__(self, corpus: Corpus | HubCorpus, tokens: Bytes, data_dir: Path) -> None:
        self.corpus, self.tokens, self.data_dir = corpus, tokens, data_dir
        asked = fingerprint(f"4 {tokens.definition} {corpus.identity}")  # 4: version of the format
        self.folder = data_dir / ".cache" / f"tokens-{asked}"
        self.path, self.about = self.folder / "tokens.bin", self.folder / "about.json"
        self.dtype = np.dtype("<i2" if len(tokens.pieces) <= 2**15 else "<i4")

    def load(self) -> Tensor:
        """Return the tokens, int16 or int32 (T,); write the file first if it does not exist.

        Sets three attributes: `content`, a hash of the tokens; `not_utf8`, the files that the corpus left out because
        they are not UTF-8; and `cut`, the position at which the corpus's validation split begins, or None if the corpus
        has no such split. Raises UserError if the corpus has no text.
        """
        once(self.data_dir, self.about.exists, self._make)
        about = json.loads(self.about.read_text())
        self.content, self.not_utf8, self.cut = about["content"], about["not_utf8"], about["cut"]
        return torch.from_numpy(np.memmap(self.path, self.dtype, mode="c"))  # writable: torch warns otherwise

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        ends = []  # number of tokens up to the end of each split of the corpus
        with atomically(self.path) as part, part.open("wb") as file:
            for documents in self.corpus.splits().values():
                for text in tqdm(filter(None, documents), desc="documents", disable=None):
                    for ids in chain(self.tokens.encode_parts(text), [[self.tokens.end]]):
                        file.write(np.asarray(ids, self.dtype).tobytes())
                ends.append(file.tell() // self.dtype.itemsize)
            if not ends[-1]:
                raise UserError(f"--text {self.corpus.root} has no text, or contains only separators: choose another")
        about = {"tokens": ends[-1], "not_utf8": [*self.corpus.not_utf8], "cut": ends[0] if len(ends) > 1 else None}
        write_atomically(self.about, json.dumps(about | {"content": sha256_of(self.path)[:16]}))


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """Return the positions where documents begin, int64 (D,): 0, and the position after each `end` in `tokens[:-1]`."""
    return torch.cat([torch.zeros(1, dtype=torch.long), (tokens[:-1] == end).nonzero().squeeze(1) + 1])


def start_of_last(share: float, tokens: Tensor, pieces: Sequence[bytes]) -> int:
    """Return p such that `tokens[p:]` has about a fraction `share` of all bytes. `pieces` has each token's bytes."""
    sizes, step = np.array([len(piece) for piece in pieces]), PIECE
    parts = [part.numpy() for part in tokens.split(step)]
    ends = np.cumsum([sizes.take(part).sum() for part in parts])  # number of bytes up to the end of each part
    before = ends[-1] - round(share * int(ends[-1]))
    number = int(np.searchsorted(ends, before))
    of_part = sizes.take(parts[number])
    starts = ends[number] - of_part.sum() + of_part.cumsum() - of_part
    return number * step + int(np.searchsorted(starts, before))
