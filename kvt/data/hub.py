"""Data sets by name, as Hugging Face's library `datasets` reads them: hf:NAME or hf:NAME:CONFIGURATION.

NAME is that of a data set of the hub, or a folder of Parquet, Arrow, CSV, JSON, text or image files.
"""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvt.data.image_files import ImageFile, Listing
from kvt.system.errors import UserError

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
            ImageFile(f"{named} {split}[{i}]", label, partial(_content, encoded, images[0], i))
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
    try:
        import datasets  # an extra
    except ModuleNotFoundError as error:
        raise UserError(f'{named} needs: pip install "kvt[datasets]"') from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs errors that it raises, too
    name, configuration = _parse(named)
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise UserError(f"{named}: no such folder")
    try:
        found = datasets.load_dataset(name, configuration, keep_in_memory=False)  # whatever the environment asks for
    except Exception as error:  # of many types: of the network, of each format
        reason = " ".join(str(error).split())
        remedy = "check the name and the network, or download it and name its folder, hf:FOLDER"
        raise UserError(f"{named} cannot be loaded ({reason:.300}): {remedy}") from error
    splits = {SPLITS[split]: rows for split, rows in found.items() if split in SPLITS and len(rows)}
    if missing := [split for split in needed if split not in splits]:
        raise UserError(f"{named} has {', '.join(found)}, but no split {missing[0]}: choose another data set")
    return splits


def _parse(named: str) -> tuple[str, str | None]:
    """Split hf:NAME:CONFIGURATION into the name, or folder, and the configuration."""
    name, _, configuration = named.removeprefix(PREFIX).partition(":")
    return os.path.expanduser(name), configuration or None


def _content(rows: "Dataset", column: str, index: int) -> bytes:
    image = rows[index][column]
    if image is None:
        raise ValueError("there is none")
    return Path(image["path"]).read_bytes() if image["bytes"] is None else image["bytes"]


def _columns(features: "Features") -> str:
    return "columns " + ", ".join(f"{name} ({type(feature).__name__})" for name, feature in features.items())
