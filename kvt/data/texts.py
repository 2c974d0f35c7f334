"""Text files: single texts, and parallel corpora."""

import hashlib
import os
from pathlib import Path

from kvt.data.download import Remote, download
from kvt.system.errors import UserError, unknown
from kvt.system.files import require_file
from kvt.system.memory import require_memory

Pairs = list[tuple[str, str]]
MEMORY_PER_BYTE = 24
"""Bytes of memory that a byte of text takes in the end: as tokens, their ids and a tensor of them."""

SHAKESPEARE = Remote(
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
    "/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)

MULTI30K_URL = (
    "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw"
)
MULTI30K = {
    name: Remote(f"{MULTI30K_URL}/{name}.gz", sha256)
    for name, sha256 in {
        "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
        "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
        "train.fr": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
        "train.cs": "a65adb8b32e3bc664f21ecba7a6e7f6950fd1f405e135f7c312faabdb6255077",
        "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
        "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
        "val.fr": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
        "val.cs": "b63226e05c4bd5dd6a42897d74b86a1b9d2c31498252c572b1ea7f7996927fcc",
        "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
        "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
        "test_2016_flickr.fr": "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90",
        "test_2016_flickr.cs": "200a4a74cc9560f051924abb9803be008d1908d77f747e9141aeb86dfd2797f1",
    }.items()
}
MULTI30K_LANGUAGES = ("de", "en", "fr", "cs")
MULTI30K_SPLITS = {"train": "train", "val": "val", "test": "test_2016_flickr"}


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; see `decode_text`.

    Raises UserError, naming the file, if it is missing, unreadable, empty or not UTF-8.
    """
    size = require_file(path, "name a text file").st_size
    require_memory(MEMORY_PER_BYTE * size, f"{path}: {size:,} bytes of text")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): make it readable or name another") from error
    text = decode_text(raw, str(path))
    if not text:
        raise UserError(f"{path} is empty: put text there or name another file")
    return text


def fingerprint(*texts: str) -> str:
    """Return a hash that identifies a list of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()[:16]


def decode_text(raw: bytes, name: str) -> str:
    r"""Decode UTF-8, without a byte order mark and with \n for \r\n; raise UserError, naming it, if it is not UTF-8."""
    try:
        # not "utf-8-sig", whose errors count bytes from behind the mark
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        remedy = "convert it, e.g. iconv -f latin1 -t utf-8"
        raise UserError(f"{name} is not UTF-8 at byte {error.start}: {remedy}") from error


def tiny_shakespeare(data_dir: Path) -> Path:
    """Return `data_dir/tinyshakespeare/input.txt`, downloaded if it is missing."""
    return download(SHAKESPEARE, data_dir, "tinyshakespeare/input.txt")


def parallel_corpus(source: str, target: str, data_dir: Path, root: Path | None = None) -> dict[str, Pairs]:
    """Return the (source, target) sentences of "train", "val" and "test", stripped of white space.

    They are the lines of `root/{train,val,test}.{source,target}`; without `root`, those of Multi30k in
    `data_dir/multi30k`, whose missing files are downloaded.

    Raises UserError if a language is unknown or given twice, a file is missing, cannot be read or downloaded or has an
    empty line, or the two files of a split differ in length.
    """
    if source == target:
        raise UserError(f"source and target are both {source!r}: choose two languages")
    if root is None:
        files = {split: _multi30k_files(split, source, target, data_dir) for split in MULTI30K_SPLITS}
    else:
        files = {split: _own_files(split, source, target, root) for split in MULTI30K_SPLITS}
    return {split: _aligned(*pair) for split, pair in files.items()}


def _multi30k_files(split: str, source: str, target: str, data_dir: Path) -> list[Path]:
    for language in (source, target):
        if language not in MULTI30K_LANGUAGES:
            raise unknown("language of Multi30k", language, MULTI30K_LANGUAGES)
    names = [f"{MULTI30K_SPLITS[split]}.{language}" for language in (source, target)]
    return [download(MULTI30K[name], data_dir, f"multi30k/{name}") for name in names]


def _own_files(split: str, source: str, target: str, root: Path) -> list[Path]:
    if not os.path.isdir(root):
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
    return list(zip(lines[source], lines[target], strict=True))


def _lines(path: Path) -> list[str]:
    # not str.splitlines, which also splits at U+2028 and others: all later lines would shift
    return [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]
