"""Text files: one text, and sentences with their translations."""

import hashlib
import os
from pathlib import Path

from kvt.data.download import Remote, download
from kvt.data.tokenizer import require_words
from kvt.system.errors import UserError, unknown
from kvt.system.files import require_file
from kvt.system.memory import require_memory

Pairs = list[tuple[str, str]]
ROOM = 24
"""Bytes of memory that a byte of text takes in the end: as symbols, as their numbers, as a tensor of them."""

SHAKESPEARE = Remote(
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
    "/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    1_115_394,
)

MULTI30K = {
    name: Remote(
        "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a"
        f"/data/task1/raw/{name}.gz",
        sha256,
        size,
    )
    for name, sha256, size in (
        ("train.de", "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6", 637_044),
        ("train.en", "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f", 568_929),
        ("train.fr", "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c", 604_242),
        ("train.cs", "a65adb8b32e3bc664f21ecba7a6e7f6950fd1f405e135f7c312faabdb6255077", 593_827),
        ("val.de", "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a", 24_681),
        ("val.en", "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28", 21_650),
        ("val.fr", "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9", 23_001),
        ("val.cs", "b63226e05c4bd5dd6a42897d74b86a1b9d2c31498252c572b1ea7f7996927fcc", 22_096),
        ("test_2016_flickr.de", "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8", 22_890),
        ("test_2016_flickr.en", "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9", 21_077),
        ("test_2016_flickr.fr", "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90", 22_310),
        ("test_2016_flickr.cs", "200a4a74cc9560f051924abb9803be008d1908d77f747e9141aeb86dfd2797f1", 22_572),
    )
}
MULTI30K_LANGUAGES = ("de", "en", "fr", "cs")
MULTI30K_SPLITS = {"train": "train", "val": "val", "test": "test_2016_flickr"}


def read_text(path: Path) -> str:
    r"""The text of a UTF-8 file, without a byte order mark and with \n for \r\n.

    Raises:
        UserError: the file is missing, unreadable, empty or not UTF-8; it is named.
    """
    size = require_file(path, "name a text file").st_size
    require_memory(ROOM * size, f"{path}: {size:,} bytes of text")
    try:
        raw = path.read_bytes()
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
    return download(SHAKESPEARE, data_dir, "tinyshakespeare/input.txt")


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
    return [download(MULTI30K[name], data_dir, f"multi30k/{name}") for name in names]


def _own(split: str, source: str, target: str, root: Path) -> list[Path]:
    if not os.path.isdir(root):  # unlike Path.is_dir, no error where a folder on the way cannot be searched
        is_what = "a file, not a folder" if os.path.exists(root) else "missing"
        raise UserError(f"{root} is {is_what}: name a folder of train.{source}, train.{target} and so on")
    paths = [root / f"{split}.{language}" for language in (source, target)]
    for path in paths:
        if not os.path.exists(path):
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
        for number, line in enumerate(lines[path], start=1):
            require_words(line, f"{path}, line {number}")
    return list(zip(lines[source], lines[target], strict=True))


def _lines(path: Path) -> list[str]:
    # Not str.splitlines: it also splits at U+2028 and its like, and all translations below would shift.
    return [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]
