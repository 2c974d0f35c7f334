"""Text files: single texts, and parallel corpora."""

import codecs
import hashlib
from pathlib import Path

from kvt.data.download import Remote, download
from kvt.system.errors import UserError, unknown
from kvt.system.files import require_file

Pairs = list[tuple[str, str]]
MARKS = {  # byte order marks of what is not UTF-8; UTF-32's may begin with one of UTF-16's
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
}
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


def read_text(path: Path, remedy: str = "name a text file") -> str:
    """Return the text of a UTF-8 file, see `decode_text`; raise UserError if it is missing, empty or not UTF-8."""
    require_file(path, remedy)
    if text := decode_text(path.read_bytes(), str(path)):
        return text
    raise UserError(f"{path} is empty: choose another file")


def fingerprint(text: str) -> str:
    """Return a hash of a text as 16 hexadecimal digits; `result.json` records it as `content`."""
    return hashlib.sha256(f"{len(text)} {text}".encode(errors="surrogateescape")).hexdigest()[:16]


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
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        problem = f"is {marked}" if marked else f"is not UTF-8 at byte {error.start}"
        raise UserError(f"{name} {problem}: convert it, e.g. iconv -f {marked or 'latin1'} -t UTF-8") from error


def corpus_files(source: str, target: str, data_dir: Path, root: Path | None = None) -> dict[str, tuple[Path, Path]]:
    """Return the files of the source and the target sentences of "train", "val" and "test".

    They are `root/{train,val,test}.{source,target}`; without `root`, those of Multi30k in `data_dir/multi30k`, whose
    missing files are downloaded.
    """
    if source == target:
        raise UserError(f"source and target are both {source!r}: choose two languages")
    for language in (source, target):
        if root is None and language not in MULTI30K_LANGUAGES:
            raise unknown("language of Multi30k", language, MULTI30K_LANGUAGES)

    def find(split: str, language: str) -> Path:
        if root is not None:
            return root / f"{split}.{language}"
        name = f"{MULTI30K_SPLITS[split]}.{language}"
        return download(MULTI30K[name], data_dir, f"multi30k/{name}")

    return {split: (find(split, source), find(split, target)) for split in MULTI30K_SPLITS}


def read_pairs(source: Path, target: Path) -> Pairs:
    """Return the lines of two files in pairs, stripped of white space; raise UserError if their numbers differ."""
    ours, theirs = _lines(source), _lines(target)
    if len(ours) != len(theirs):
        lengths = f"{source} has {len(ours)} lines, {target} has {len(theirs)}"
        raise UserError(f"{lengths}: both need one sentence a line, in the same order")
    return list(zip(ours, theirs, strict=True))


def _lines(path: Path) -> list[str]:
    text = read_text(path, "add the file, or choose other languages or another --root")
    # not str.splitlines, which also splits at U+2028 and others: all later lines would shift
    return [line.strip() for line in text.removesuffix("\n").split("\n")]
