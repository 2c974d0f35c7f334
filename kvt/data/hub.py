"""Data sets by name, as Hugging Face's library `datasets` reads them: hf:NAME or hf:NAME:CONFIGURATION.

NAME is that of a data set of the hub, or a folder of Parquet, Arrow, CSV, JSON, text or image files. A folder is read
as it is now, and nothing outside it, whatever its files name.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from kvt.data.image_files import ImageFile, Listing
from kvt.system.errors import UserError
from kvt.system.files import list_files, state_of

if TYPE_CHECKING:
    from datasets import Dataset, Features

PREFIX = "hf:"
SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


def is_hub(named: str | Path) -> bool:
    return str(named).startswith(PREFIX)


def base_name(named: str) -> str:
    """Return the last part of a data set's name.

    >>> base_name("hf:Salesforce/wikitext:wikitext-2-raw-v1")
    'wikitext'
    """
    return os.path.basename(os.path.abspath(_parse(named)[0]))


def list_images(named: str) -> Listing:
    """Return the images of a data set; raise UserError unless it has one column of images and one of their classes."""
    splits = _load(named, "train", "test")
    import datasets  # slow, and there by now

    features = splits["train"].features
    images, classes = (
        [name for name, feature in features.items() if isinstance(feature, kind)]
        for kind in (datasets.Image, datasets.ClassLabel)
    )
    if (len(images), len(classes)) != (1, 1):
        raise UserError(f"{named} has {_columns(features)}: exactly one Image and one ClassLabel are needed")
    found: dict[str, list[ImageFile]] = {}
    for split, rows in splits.items():
        labels = rows[classes[0]][:]
        if unlabelled := [i for i, label in enumerate(labels) if label is None or label < 0]:
            raise UserError(f"{named} {split}[{unlabelled[0]}] has no class: choose a data set in which all have one")
        encoded = rows.select_columns(images).cast_column(images[0], datasets.Image(decode=False))
        found[split] = [
            ImageFile(f"{named} {split}[{i}]", label, partial(_content, encoded, images[0], i, _parse(named)[0]))
            for i, label in enumerate(labels)
        ]
    files = [file["filename"] for rows in splits.values() for file in rows.cache_files]
    return Listing(base_name(named), features[classes[0]].names, found, files)


def read_texts(named: str) -> dict[str, str]:
    """Return the documents of "train", and of "val" if there is one, joined by line ends.

    They are the one column of strings, or the one called text; else UserError lists the columns.
    """
    splits = _load(named, "train")
    features = splits["train"].features
    strings = [
        name for name, feature in features.items() if getattr(feature, "dtype", "") in ("string", "large_string")
    ]
    column = strings[0] if len(strings) == 1 else "text"
    if column not in strings:
        raise UserError(f"{named} has {_columns(features)}: one of strings is needed, or one called text")
    return {
        split: "\n".join(document for document in splits[split][column] if document is not None)
        for split in ("train", "val")
        if split in splits
    }


def _load(named: str, *needed: str) -> dict[str, "Dataset"]:
    """Return the splits that have rows, as "train", "val" and "test"; raise UserError if a needed one is missing."""
    import datasets  # an extra

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs errors that it raises, too
    name, configuration = _parse(named)
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise UserError(f"{named}: no such folder")
    if name.isidentifier() and not os.path.isdir(name) and find_spec(f"datasets.packaged_modules.{name}"):
        raise UserError(f"{named}: {name} is a format, of whatever lies here: name the folder of the files, hf:FOLDER")
    place = name
    try:
        place = _snapshot(Path(name)) if os.path.isdir(name) else name
        found = datasets.load_dataset(place, configuration, keep_in_memory=False)  # whatever the environment asks for
    except Exception as error:  # of many types: of the network, of each format
        reason = " ".join(str(error).replace(place, os.path.abspath(name)).split())
        remedy = "check the name and the network, or download it and name its folder, hf:FOLDER"
        raise UserError(f"{named} cannot be loaded ({reason:.300}): {remedy}") from error
    splits = {SPLITS[split]: rows for split, rows in found.items() if split in SPLITS and len(rows)}
    if missing := [split for split in needed if split not in splits]:
        raise UserError(f"{named} has {', '.join(found)}, but no split {missing[0]}: choose another data set")
    return splits


def _parse(named: str) -> tuple[str, str | None]:
    """Split hf:NAME:CONFIGURATION into the name, or folder, and the configuration."""
    name, _, configuration = named.removeprefix(PREFIX).partition(":")
    if not name:
        raise UserError(f"{named} names no data set: expected hf:NAME, or hf:FOLDER")
    return os.path.expanduser(name), configuration or None


def _snapshot(folder: Path) -> str:
    """Return a folder of links to the files of another; there is one for each state of these files.

    `datasets` answers for a file by its path and time from a cache, though it may have changed: in another state it has
    another path. A README.md may name files anywhere, and addresses that are requested: it has no link.
    """
    from datasets import config

    unread = (config.REPOCARD_FILENAME, config.DATASETDICT_INFOS_FILENAME)
    files = [file for file in list_files(folder.resolve()) if file.name not in unread]
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file) + f"\0{state_of(file)}\n".encode())
    parent = Path(config.HF_DATASETS_CACHE) / "kvt" / digest.hexdigest()[:16]
    snapshot = parent / folder.resolve().name
    if not snapshot.exists():
        parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(dir=parent))
        part.chmod(0o755)  # other users may share the cache
        for file in files:
            link = part / file.relative_to(folder.resolve())
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
        with suppress(OSError):  # another process was faster
            part.rename(snapshot)
        shutil.rmtree(part, ignore_errors=True)
    return str(snapshot)


def _content(rows: "Dataset", column: str, index: int, name: str) -> bytes:
    image = rows[index][column]
    if image is None:
        raise ValueError("there is none")
    if image["bytes"] is not None:
        content: bytes = image["bytes"]
        return content
    from datasets import config

    path = Path(os.path.abspath(image["path"]))
    places = (name, config.HF_DATASETS_CACHE, config.HF_CACHE_HOME)
    if not any(path.is_relative_to(os.path.abspath(place)) for place in places):
        raise ValueError(f"its file is outside the data set: {path}")
    return path.read_bytes()


def _columns(features: "Features") -> str:
    return "columns " + ", ".join(f"{name} ({type(feature).__name__})" for name, feature in features.items())
