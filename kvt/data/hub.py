"""Read data sets named hf:NAME or hf:NAME:CONFIGURATION with Hugging Face's library `datasets`.

`datasets` runs no code of a data set. NAME is a data set on the Hugging Face hub, or a folder that
`datasets.load_dataset` can read or that `DatasetDict.save_to_disk` has written.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvt.data.files import available, state_of
from kvt.data.texts import plain
from kvt.system import UserError

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "hf:"


def is_hub(named: str | Path) -> bool:
    return str(named).startswith(PREFIX)


def base_name(named: str) -> str:
    """Return the last part of the name of a data set, without the configuration.

    >>> base_name("hf:Salesforce/wikitext:wikitext-2-raw-v1")
    'wikitext'
    """
    return os.path.basename(os.path.abspath(named.removeprefix(PREFIX).partition(":")[0]))


def load(named: str, kinds: Iterable[str], *needed: str) -> "tuple[dict[str, Dataset], list[str]]":
    """Return a dict from splits to data, and a list with the name of the only column of each kind in `kinds`.

    A kind is "string", or the class name of a feature, such as "Image". The split "validation" is renamed "val". Raises
    UserError if the data set cannot be read, a split in `needed` is missing, a kind has no column or several, or the
    splits have different columns.
    """
    import datasets  # an optional dependency

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # else `datasets` also logs errors that it raises
    name, _, configuration = os.path.expanduser(named.removeprefix(PREFIX)).partition(":")
    is_saved = os.path.isfile(os.path.join(name, datasets.config.DATASETDICT_JSON_FILENAME))
    with available(named, "check the name and the network"):
        found = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, configuration or None)
    splits = {"val" if split == "validation" else split: rows for split, rows in found.items()}
    if missing := {*needed} - {*splits}:
        raise UserError(f"{named} has splits {', '.join(found)}, but no split {min(missing)}: choose another data set")
    features = splits["train"].features
    types = {name: type(feature).__name__ for name, feature in features.items()}
    types |= {name: "string" for name, feature in features.items() if getattr(feature, "dtype", "") == "string"}
    columns = [name for kind in kinds for name in types if types[name] == kind]
    if [types[name] for name in columns] != [*kinds] or any(rows.features != features for rows in splits.values()):
        remedy = "read this data set by a data class of your own"
        raise UserError(f"{named} has columns {types}, not one column of {' and one of '.join(kinds)}: {remedy}")
    return splits, columns


def list_images(named: str) -> tuple[list[str], Mapping[str, Iterable[tuple[BytesIO, int]]], list[str]]:
    """Return class names, a dict from splits to iterators of (encoded image, label), and paths of Arrow files."""
    splits, (image, label) = load(named, ("Image", "ClassLabel"), "train", "test")
    import datasets

    encoded = {split: rows.cast_column(image, datasets.Image(decode=False)) for split, rows in splits.items()}
    found = {split: ((_content(row[image]), row[label]) for row in rows) for split, rows in encoded.items()}
    return splits["train"].features[label].names, found, _files(splits)


def _content(image: Mapping[str, Any]) -> BytesIO:
    return BytesIO(image["bytes"] or Path(image["path"]).read_bytes())


def _files(splits: "Mapping[str, Dataset]") -> list[str]:
    return [file["filename"] for rows in splits.values() for file in rows.cache_files]


class HubCorpus:
    """The documents of a data set: the strings of its only string column, without nulls. `root` names the data set."""

    not_utf8: tuple[str, ...] = ()

    def __init__(self, root: str) -> None:
        self.root = root

    @cached_property
    def _loaded(self) -> "tuple[dict[str, Dataset], list[str]]":
        return load(self.root, ["string"], "train")

    @property
    def identity(self) -> str:
        return "\n".join([self.root, *(f"{path} {state_of(path)}" for path in _files(self._loaded[0]))])

    def splits(self) -> dict[str, Iterator[str]]:
        """Return a dict that maps "train", and "val" if the data set has it, to the documents of the split."""
        splits, (column,) = self._loaded
        found = {split: splits[split][column] for split in ("train", "val") if split in splits}
        return {split: (plain(text) for text in texts if text is not None) for split, texts in found.items()}
