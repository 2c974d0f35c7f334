"""Text files: one text, and sentences with their translations."""

import hashlib
from pathlib import Path

from kvt.data.download import download
from kvt.errors import UserError, unknown

Pairs = list[tuple[str, str]]

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
    "/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_MD5 = "6fb458f1232090904fb40fe944165e91"

MULTI30K_URL = (
    "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw"
)
MULTI30K_MD5 = {  # of the .gz
    "train.de": "81ff90b99829c0cd4b1b587d394afd39",
    "train.en": "0065d13af80720a55ca8153d126e6627",
    "train.fr": "6cb767741dcad3931f966fefbc05203f",
    "train.cs": "d9a5fc268917725a2b0efce3a0cc8607",
    "val.de": "6e0e229eb049e3fc99a1ef02fb2d5f91",
    "val.en": "2b69aa9253948ac9f67e94917272dd40",
    "val.fr": "93fc564584b7e5ba410c761ea5a1c682",
    "val.cs": "83cdc082f646b769095615384cf5c0ca",
    "test_2016_flickr.de": "efd67d314d98489b716b145475101932",
    "test_2016_flickr.en": "ff2c0fcb4893a13bd73414306bc250ae",
    "test_2016_flickr.fr": "08dc7cd4a662f31718412de95ca9bfe3",
    "test_2016_flickr.cs": "3104872229daa1bef3b401d44dd2220b",
}
MULTI30K_LANGUAGES = ("de", "en", "fr", "cs")
MULTI30K_SPLITS = {"train": "train", "val": "val", "test": "test_2016_flickr"}


def read_text(path: Path) -> str:
    r"""The text of a UTF-8 file, without a byte order mark and with \n for \r\n.

    Raises:
        UserError: the file is missing, unreadable, empty or not UTF-8; it is named.
    """
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is missing: put a text file there or name another") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: name a text file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): make it readable or name another") from error
    text = decode_text(raw, str(path))
    if not text:
        raise UserError(f"{path} is empty: put text there or name another file")
    return text


def fingerprint(*texts: str) -> str:
    """Tells one collection of texts from another."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()[:16]


def decode_text(raw: bytes, name: str) -> str:
    r"""The text of UTF-8 bytes, without a byte order mark and with \n for \r\n.

    Raises:
        UserError: they are not UTF-8; what they are is called by this name.
    """
    try:
        # Not "utf-8-sig": its errors count bytes from behind the mark.
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        remedy = "convert it, e.g. iconv -f latin1 -t utf-8"
        raise UserError(f"{name} is not UTF-8 at byte {error.start}: {remedy}") from error


def tiny_shakespeare(data_dir: Path) -> Path:
    """The file `data_dir/tinyshakespeare/input.txt`, downloaded if it is not there.

    Raises:
        UserError: it can be neither downloaded nor stored.
    """
    return download(SHAKESPEARE_URL, data_dir, "tinyshakespeare/input.txt", SHAKESPEARE_MD5)


def parallel_corpus(source: str, target: str, data_dir: Path, root: Path | None = None) -> dict[str, Pairs]:
    """The (source, target) sentences of "train", "val" and "test", without the white space around them.

    They are the lines of `root/{train,val,test}.{source,target}`; without `root`, those of Multi30k in
    `data_dir/multi30k`, where each file that is missing is downloaded.

    Raises:
        UserError: a language is unknown or there twice; a file is missing, cannot be read or downloaded, has
            an empty line, or is longer than its translation.
    """
    if source == target:
        raise UserError(f"source and target are both {source!r}: choose two languages")
    if root is None:
        files = {split: _multi30k(split, source, target, data_dir) for split in MULTI30K_SPLITS}
    else:
        files = {split: _own(split, source, target, root) for split in MULTI30K_SPLITS}
    return {split: _aligned(*pair) for split, pair in files.items()}


def _multi30k(split: str, source: str, target: str, data_dir: Path) -> list[Path]:
    for language in (source, target):
        if language not in MULTI30K_LANGUAGES:
            raise unknown("language of Multi30k", language, MULTI30K_LANGUAGES)
    names = [f"{MULTI30K_SPLITS[split]}.{language}" for language in (source, target)]
    return [download(f"{MULTI30K_URL}/{name}.gz", data_dir, f"multi30k/{name}", MULTI30K_MD5[name]) for name in names]


def _own(split: str, source: str, target: str, root: Path) -> list[Path]:
    if not root.is_dir():
        is_what = "a file, not a folder" if root.exists() else "missing"
        raise UserError(f"{root} is {is_what}: name a folder of train.{source}, train.{target} and so on")
    paths = [root / f"{split}.{language}" for language in (source, target)]
    for path in paths:
        if not path.exists():
            there = ", ".join(sorted(found.name for found in root.glob(f"{split}.*"))) or f"no {split}.*"
            raise UserError(f"{path} is missing: {root} has {there}; add the file or choose other languages")
    return paths


def _aligned(source: Path, target: Path) -> Pairs:
    lines = {path: _lines(path) for path in (source, target)}
    if len(lines[source]) != len(lines[target]):
        raise UserError(
            f"{source} has {len(lines[source])} lines, {target} has {len(lines[target])}: "
            "line n of one must translate line n of the other"
        )
    for path in (source, target):
        if "" in lines[path]:
            number = lines[path].index("") + 1
            raise UserError(f"{path}, line {number} is empty: remove the line from both files")
    return list(zip(lines[source], lines[target], strict=True))


def _lines(path: Path) -> list[str]:
    # Not str.splitlines: it also splits at U+2028 and its like, and all translations below would shift.
    return [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]
