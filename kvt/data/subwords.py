"""Texts as token ids and back: the bytes of UTF-8, or byte pairs (byte-level BPE, as of GPT-2).

>>> Bytes().encode("ß!"), Bytes().text([195, 159, 33, 256])
([195, 159, 33], 'ß!')
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path

from kvt.data.texts import decode_text
from kvt.system.errors import UserError
from kvt.system.files import require_file

END = "<|endoftext|>"
"""The token that follows each document."""
PART = 2**16  # characters of a text that one core encodes at a time


class Bytes:
    """The 256 bytes of UTF-8, and `END`.

    Attributes:
        pieces: the bytes of each token; none for `END`.
        end: the id of `END`.
        definition: what `tokens_of` makes the same tokens from.
    """

    definition = "bytes"

    def __init__(self) -> None:
        self.pieces = [*(bytes([byte]) for byte in range(256)), b""]
        self.end = 256

    @cached_property
    def vocab(self) -> list[str]:
        """How each token is shown."""
        return [END if i == self.end else piece.decode("utf-8", "replace") for i, piece in enumerate(self.pieces)]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Return the ids of each text."""
        return (text.encode() for text in texts)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return how each id is shown."""
        return [self.vocab[i] for i in ids]

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of all ids together; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


class BytePairs(Bytes):
    """A byte-level BPE of the library `tokenizers`, given as the content of its tokenizer.json.

    Of that, truncation, padding and dropout are not used, and the names of special tokens are text like any other:
    `END` stands where a document ends, and nowhere else.
    """

    def __init__(self, definition: str, name: str = "tokenizer") -> None:
        super().__init__()
        from tokenizers import Tokenizer  # an extra

        try:
            self.tokenizer = Tokenizer.from_str(definition)
            kind = json.loads(definition)["model"]["type"]
        except Exception as error:  # the library raises plain exceptions
            raise UserError(f"--tokenizer {name} is no tokenizer.json ({error!s:.100})") from error
        ids = self.tokenizer.get_vocab()
        letters = {letter: byte for byte, letter in _alphabet().items()}
        if kind != "BPE" or not letters.keys() <= ids.keys() or END not in ids:
            raise UserError(f"--tokenizer {name}: expected a byte-level BPE with {END}, as GPT-2's")
        self.definition, self.end, self.name = definition, ids[END], name
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.model.dropout = None
        self.tokenizer.add_special_tokens([END])  # as not every file has it
        self.tokenizer.encode_special_tokens = True  # as text
        self.pieces = [b""] * (max(ids.values()) + 1)
        for piece, i in ids.items():
            self.pieces[i] = bytes(letters[letter] for letter in piece if letter in letters)
        for i, token in self.tokenizer.get_added_tokens_decoder().items():
            self.pieces[i] = b"" if i == self.end else token.content.encode()  # is written as it is

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        """Encode texts on all cores, long ones in parts that end with a line; return the ids of each text.

        Raises UserError if the ids are not the text, as when the tokenizer makes it lower case first.
        """
        parts = [list(_parts(text)) for text in texts]
        found = iter(self.tokenizer.encode_batch_fast(list(chain(*parts)), add_special_tokens=False))
        encoded = [[i for _ in of_text for i in next(found).ids] for of_text in parts]
        for text, back in zip(texts, map(self.text, encoded), strict=True):
            if text != back:
                place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, back, strict=False)))
                there, here = (repr(string[max(place - 20, 0) : place + 20]) for string in (text, back))
                remedy = "remove its normalizer and add_prefix_space, or choose bpe"
                raise UserError(f"--tokenizer {self.name} does not keep the text, {there} becomes {here}: {remedy}")
        return encoded


def tokens_of(definition: str, name: str = "tokenizer") -> Bytes:
    """Return the tokens of a definition, "bytes" or the content of a tokenizer.json, which errors call `name`."""
    return Bytes() if definition == Bytes.definition else BytePairs(definition, name)


def read_tokenizer(path: Path) -> str:
    """Return the definition in a file; raise UserError if it is none."""
    require_file(path, "name bytes, bpe or a tokenizer.json")
    return BytePairs(decode_text(path.read_bytes(), f"--tokenizer {path}"), str(path)).definition


def learn_pairs(texts: Iterator[str], vocab_size: int) -> str:
    """Train a byte-level BPE on texts; return its tokenizer.json, of at most `vocab_size` tokens, `END` among them.

    Raises UserError if `vocab_size` leaves none besides the bytes.
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
        stop = text.find("\n", start + PART) + 1 or len(text)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _alphabet() -> dict[int, str]:
    """Return how GPT-2's vocabulary writes each byte: as its Latin-1 letter, those not printable from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
