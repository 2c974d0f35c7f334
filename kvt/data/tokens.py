"""Encode text as symbols of a vocabulary, as UTF-8 bytes or as byte pairs (as in GPT-2), and store tokens in files.

>>> Bytes().encode("ß!"), Bytes().text([195, 159, 33, 256])
([195, 159, 33], 'ß!')
>>> words = Vocabulary(["seven", "hundred"], separator=" ")
>>> words.begin("seven hundred seven"), words.text([0, 1])
([0, 1, 0], 'seven hundred')
"""

import codecs
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchtext.vocab import Vocab
from tqdm import tqdm

from kvt.data.files import once, require_file
from kvt.data.texts import CUT, PIECE, Corpus, decode_text, fingerprint, nfc
from kvt.system.errors import UserError
from kvt.system.files import atomically, read_json, sha256_of, write_atomically

IGNORE = -100
"""The target at positions that do not count in the loss: the `ignore_index` of torch's cross-entropy."""
UNK = "<unk>"
"""The symbol that replaces unknown symbols if the vocabulary contains it."""
END = "<|endoftext|>"
"""The text of the end token, which follows each document that is encoded as bytes or byte pairs."""
PART = 2**16  # characters of a text that one CPU core encodes at a time


def build_vocab(symbols: Iterable[str], specials: Sequence[str] = (), min_freq: int = 1) -> list[str]:
    """Return the special symbols, then all symbols that occur at least `min_freq` times, in order of frequency.

    >>> build_vocab("to be or not to be".split(), specials=["<unk>"])
    ['<unk>', 'be', 'to', 'not', 'or']
    """
    return list(Vocab(Counter(symbols), min_freq=min_freq, specials=list(specials)).itos)


class Vocabulary:
    """Mapping between symbols and ids. The id of a symbol is its position in the list `vocab`.

    Symbols are compared in Unicode's form NFC.

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
        """Return a list with the ids of a prompt; an empty prompt is replaced by the first symbol of `vocab`."""
        prompt = prompt or self.vocab[0]
        if self.separator:
            return self.encode(prompt.split())
        composed = nfc(prompt)
        return self.encode(composed if self.ids.keys() >= {*composed} else prompt)

    def text(self, ids: Iterable[int]) -> str:
        return self.separator.join(self.decode(ids))

    def additions(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text that each id adds to the text of earlier ids."""
        return (self.separator + self.vocab[i] for i in ids)


class Bytes:
    """A tokenizer for text in UTF-8, with one token for each of the 256 bytes, and the end token `END`.

    Attributes:
        pieces: list with the bytes of each token; the end token has no bytes.
        end: the id of the end token.
        definition: string from which `tokens_of` makes an equal tokenizer.
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

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int] | np.ndarray]:
        """Return the ids of each text."""
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

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

    Truncation, padding and dropout in the definition are ignored. If a text contains the name of a special token, the
    name is encoded as ordinary text, so that the end token occurs only at the end of documents. The end token is `END`
    if the tokenizer has this token. Otherwise the end token is the "eos_token" of the definition, or the argument
    `end`, which is then added to the definition as "eos_token". If there is no such name, `END` is added as a token.
    """

    def __init__(self, definition: str, name: str = "tokenizer", end: str | None = None) -> None:
        from tokenizers import Tokenizer  # an optional dependency

        try:
            content = json.loads(definition)
            kind, named = content["model"]["type"], content.pop("eos_token", None)  # only kvt adds the key "eos_token"
            self.tokenizer = Tokenizer.from_str(json.dumps(content) if named else definition)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the Rust code of `tokenizers` is not an Exception
            raise UserError(f"--tokenizer {name} is not a tokenizer.json ({error!s:.100})") from error
        letters = {letter: byte for byte, letter in _alphabet().items()}
        if kind != "BPE" or not letters.keys() <= self.tokenizer.get_vocab().keys():
            raise UserError(f"--tokenizer {name}: expected a byte-level BPE, as in GPT-2")
        if self.tokenizer.token_to_id(END) is not None:
            end = END
        elif end := named or end:
            definition = json.dumps({**content, "eos_token": end})
        else:
            end = END
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.model.dropout = None
        self.tokenizer.add_special_tokens([end])  # in the file, the token may be missing or ordinary
        self.tokenizer.encode_special_tokens = True  # encode names of special tokens as ordinary text
        ids = self.tokenizer.get_vocab()
        self.definition, self.end, self.name = definition, ids[end], name
        self.pieces = [b""] * (max(ids.values()) + 1)
        for piece, i in ids.items():
            self.pieces[i] = bytes(letters[letter] for letter in piece if letter in letters)
        for i, token in self.tokenizer.get_added_tokens_decoder().items():
            self.pieces[i] = b"" if i == self.end else token.content.encode()  # not written in GPT-2's alphabet

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int] | np.ndarray]:
        """Encode texts on all CPU cores; return the ids of each text. A long text is encoded in parts (see `CUT`).

        Raises UserError if the decoded ids of a text differ from the text, for instance because the tokenizer converts
        text to lower case.
        """
        parts = [list(_parts(text)) for text in texts]
        found = iter(self.tokenizer.encode_batch_fast(list(chain(*parts)), add_special_tokens=False))
        encoded = [[i for _ in of_text for i in next(found).ids] for of_text in parts]
        for text, back in zip(texts, map(self.text, encoded), strict=True):
            if text != back:
                place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, back, strict=False)))
                there, here = (repr(string[max(place - 20, 0) : place + 20]) for string in (text, back))
                remedy = "remove normalizer and add_prefix_space from the file, or choose bpe"
                raise UserError(f"--tokenizer {self.name} does not keep the text, {there} becomes {here}: {remedy}")
        return encoded


def tokens_of(definition: str, name: str = "tokenizer") -> Bytes:
    """Return the tokenizer for a definition: "bytes", or the content of a tokenizer.json with `name` in messages."""
    return Bytes() if definition == Bytes.definition else BytePairs(definition, name)


def read_tokenizer(path: Path) -> BytePairs:
    """Read the tokenizer.json of a byte-level BPE tokenizer; raise UserError if the file has other content.

    If the tokenizer does not have the token `END`, the end token is the eos_token in tokenizer_config.json, a file in
    the folder of tokenizer.json.
    """
    require_file(
        path, "--tokenizer needs bytes, bpe, or the path of a tokenizer.json, such as GPT-2's from the Hugging Face hub"
    )
    end = (read_json(path.with_name("tokenizer_config.json")) or {}).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    return BytePairs(decode_text(path.read_bytes(), f"--tokenizer {path}"), str(path), end)


def learn_pairs(texts: Iterator[str], vocab_size: int) -> str:
    """Train a byte-level BPE tokenizer on texts; return the content of its tokenizer.json.

    The tokenizer has at most `vocab_size` tokens, including `END`. Raises UserError unless `vocab_size` exceeds the
    number of bytes, 256, plus 1 for `END`.
    """
    if vocab_size <= 257:
        raise UserError(f"vocab_size={vocab_size} must be above 257: 256 bytes and {END}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(_alphabet().values())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
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
    """Return a dict that maps each byte to the character that represents the byte in GPT-2's vocabulary.

    The character is the Latin-1 character of the byte if it is printable, otherwise a character from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


class TokenFile:
    """A memory-mapped file of the tokens of a corpus, in a folder below `data_dir`. An end token follows each document.

    The file is written once, and may be larger than the memory. If a process is killed while it writes the file, the
    next process continues after the last complete piece of text.
    """

    def __init__(self, corpus: Corpus, tokens: Bytes, data_dir: Path) -> None:
        self.corpus, self.tokens, self.data_dir = corpus, tokens, data_dir
        asked = fingerprint(f"3 {tokens.definition} {corpus.identity}")  # 3: version of the format
        self.folder = data_dir / ".cache" / f"tokens-{asked}"
        self.path, self.about = self.folder / "tokens.bin", self.folder / "about.json"
        self.dtype = np.dtype("<i2" if len(tokens.pieces) <= 2**15 else "<i4")

    def load(self) -> Tensor:
        """Return the tokens, int16 or int32 (T,), after writing the file unless it exists.

        Sets three attributes: `content`, a hash of the tokens; `left_out`, the `left_out` of the corpus at the time of
        writing; and `cut`, the position where a validation split given by the corpus begins, or None if there is none.
        Raises UserError if the file is damaged.
        """
        once(self.data_dir, self.about.exists, self._make)
        about = json.loads(self.about.read_text())
        self.content, self.left_out, self.cut = about["content"], about["left_out"], about["cut"]
        if not self.path.is_file() or self.path.stat().st_size != about["tokens"] * self.dtype.itemsize:
            raise UserError(f"{self.path} is damaged: remove {self.folder}, and kvt makes it again")
        return torch.from_numpy(np.memmap(self.path, self.dtype, mode="c"))  # writable, for torch

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*.tmp"):  # left by a killed process
            leftover.unlink()
        shards = []
        for number, group in enumerate(tqdm([*self.corpus.pieces()], desc="tokens", disable=None)):
            shards.append(self.folder / f"{number:06}.part")
            if not shards[-1].exists():
                write_atomically(shards[-1], self._encode([*self.corpus.read(group)]).tobytes())
        with atomically(self.path) as part, part.open("wb") as file:
            for shard in shards:
                with shard.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
        sizes, own = [shard.stat().st_size // self.dtype.itemsize for shard in shards], self.corpus.validation_pieces
        about = {"tokens": sum(sizes), "left_out": self.corpus.left_out, "cut": sum(sizes[:-own]) if own else None}
        if not about["tokens"]:
            raise UserError(f"--text {self.corpus.root} contains only separators: choose another --separator")
        write_atomically(self.about, json.dumps(about | {"content": sha256_of(self.path)[:16]}))
        for shard in shards:
            shard.unlink()

    def _encode(self, documents: Sequence[tuple[str, bool]]) -> np.ndarray:
        """Encode the pairs that `Corpus.read` yields, with the end token after every document that ends."""
        tokens = [np.empty(0, self.dtype)]
        for ids, (_, ends) in zip(self.tokens.encode_all([text for text, _ in documents]), documents, strict=True):
            tokens += [np.asarray(ids, self.dtype), *[np.array([self.tokens.end], self.dtype)] * ends]
        return np.concatenate(tokens)


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """Return the positions where documents begin, int64 (D,): 0, and the position after each `end` within the text."""
    starts, is_end = [torch.zeros(1, dtype=torch.long)], torch.empty(min(PIECE, len(tokens)), dtype=torch.bool)
    for first in range(0, len(tokens), PIECE):
        part = tokens[first : first + PIECE]
        torch.eq(part, end, out=is_end[: len(part)])  # one buffer for all parts: many large buffers fragment memory
        starts.append(first + 1 + is_end[: len(part)].nonzero().squeeze(1))
    found = torch.cat(starts)
    return found[found < len(tokens)]


def start_of_last(share: float, tokens: Tensor, pieces: Sequence[bytes]) -> int:
    """Return the position of the token that begins the last part of the text, a fraction `share` of all bytes."""
    sizes, step = np.array([len(piece) for piece in pieces]), PIECE // 8
    parts = [part.numpy() for part in tokens.split(step)]
    ends = np.cumsum([sizes.take(part).sum() for part in parts])  # number of bytes up to the end of each part
    before = ends[-1] - round(share * int(ends[-1]))
    number = int(np.searchsorted(ends, before))
    of_part = sizes.take(parts[number])
    starts = ends[number] - of_part.sum() + of_part.cumsum() - of_part
    return number * step + int(np.searchsorted(starts, before))
