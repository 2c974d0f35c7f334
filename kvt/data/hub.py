"""Read data sets named hf:NAME or hf:NAME:CONFIGURATION with Hugging Face's library `datasets`.

`datasets` runs no code of a data set. NAME is a data set on the Hugging Face hub, or a folder that
`datasets.load_dataset` reads or `DatasetDict.save_to_disk` has written.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvt.data.files import state_of
from kvt.data.tensor_files import splits_among
from kvt.data.texts import LEARNED, PIECE, Corpus, Group, plain
from kvt.system.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "hf:"


def is_hub(named: str | Path) -> bool:
    return str(named).startswith(PREFIX)


def base_name(named: str) -> str:
    """Return the last part of the name of a data set, without its configuration.

    >>> base_name("hf:Salesforce/wikitext:wikitext-2-raw-v1")
    'wikitext'
    """
    return os.path.basename(os.path.abspath(named.removeprefix(PREFIX).partition(":")[0]))


def load(named: str, *needed: str) -> "dict[str, Dataset]":
    """Return a dict from "train", "val" and "test" to the rows of each split; raise UserError without the `needed`."""
    import datasets  # an optional dependency

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # else `datasets` also logs errors that it raises
    name, _, configuration = named.removeprefix(PREFIX).partition(":")
    name = os.path.expanduser(name)
    is_saved = os.path.isfile(os.path.join(name, datasets.config.DATASETDICT_JSON_FILENAME))
    try:
        found = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, configuration or None)
    except Exception as error:  # the network and the readers of the formats raise errors of many types
        reason = " ".join(str(error).split())
        raise UserError(f"{named} cannot be loaded ({reason:.300}): check the name and the network") from error
    names, _ = splits_among(found, named)
    if missing := [split for split in needed if split not in names]:
        raise UserError(f"{named} has splits {', '.join(found)}, but no split {missing[0]}: choose another data set")
    return {split: found[name] for split, name in names.items()}


def column(named: str, rows: "Dataset", kind: str) -> str:
    """Return the only column of a kind, which is the name of a type or "string"; raise UserError otherwise."""
    kinds = {name: type(feature).__name__ for name, feature in rows.features.items()}
    kinds |= {name: "string" for name, feature in rows.features.items() if getattr(feature, "dtype", "") == "string"}
    found = [name for name, other in kinds.items() if other == kind]
    if len(found) != 1:
        have = ", ".join(f"{name} ({other})" for name, other in kinds.items())
        remedy = "read this data set by a data class of your own"
        raise UserError(f"{named} has columns {have}, not one column of type {kind}: {remedy}")
    return found[0]


def list_images(named: str) -> tuple[list[str], Mapping[str, Iterable[tuple[BytesIO, int]]], list[str]]:
    """Return classes, encoded images and labels of each split, and the files that hold them.

    A data set needs one column of type Image, and one column of type ClassLabel.
    """
    splits = load(named, "train", "test")
    import datasets

    image, label = (column(named, splits["train"], kind) for kind in ("Image", "ClassLabel"))
    classes = splits["train"].features[label].names
    for split, rows in splits.items():
        if rows.features != splits["train"].features or not {*rows[label]} <= {*range(len(classes))}:
            raise UserError(f"{named}: {split} has other columns or classes than train, or images without a class")
    encoded = {split: rows.cast_column(image, datasets.Image(decode=False)) for split, rows in splits.items()}
    found = {split: ((_content(row[image]), row[label]) for row in rows) for split, rows in encoded.items()}
    return classes, found, _files(splits)


def _content(image: Mapping[str, Any]) -> BytesIO:
    return BytesIO(image["bytes"] or Path(image["path"]).read_bytes())


def _files(splits: "Mapping[str, Dataset]") -> list[str]:
    return [file["filename"] for rows in splits.values() for file in rows.cache_files]


def read_texts(named: str) -> dict[str, str]:
    """Return a dict from "train", and "val" if there is this split, to its documents, joined by line ends."""
    corpus = HubCorpus(Path(named))
    return {
        split: "\n".join(plain(text).removesuffix("\n") for text in rows[corpus.column] if text is not None)
        for split, rows in corpus.splits.items()
    }


def read_pairs(named: str, *languages: str) -> dict[str, list[tuple[str, ...]]]:
    """Return a dict from each split to its pairs of sentences, from two columns or a column of type Translation."""
    pairs = {}
    for split, rows in load(named, "train", "val", "test").items():
        flat = rows.flatten()  # of a column "translation", the columns translation.de and translation.en
        names = {name.rpartition(".")[2]: name for name in flat.column_names}
        if not {*languages} <= {*names}:
            raise UserError(f"{named} has columns {', '.join(names)}: choose one with {' and '.join(languages)}")
        texts = ([plain(text or "") for text in flat[names[language]]] for language in languages)
        pairs[split] = [*zip(*texts, strict=True)]
    return pairs


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """The documents of a data set: each row of the split "train", followed by each row of "val".

    The rows are read from memory-mapped files. A group is a range of rows.
    """

    @cached_property
    def splits(self) -> "dict[str, Dataset]":
        found = load(str(self.root), "train")
        return {split: found[split] for split in ("train", "val") if split in found}

    @cached_property
    def column(self) -> str:
        return column(str(self.root), self.splits["train"], "string")

    @property
    def left_out(self) -> None:
        return None

    @property
    def identity(self) -> str:
        return "\n".join([str(self.root), *(f"{path} {state_of(path)}" for path in _files(self.splits))])

    def pieces(self) -> Iterator[Group]:
        for split, rows in self.splits.items():
            step = max(1, PIECE * len(rows) // max(1, rows.data.nbytes))
            for start in range(0, len(rows), step):
                yield [(Path(split), start, min(start + step, len(rows)))]

    def read(self, group: Group) -> Iterator[tuple[str, bool]]:
        for split, start, stop in group:
            yield from ((plain(text), True) for text in self.splits[str(split)][start:stop][self.column] if text)

    def sample(self) -> Iterator[str]:
        for group in islice(self.pieces(), LEARNED // PIECE):
            yield from (text for text, _ in self.read(group))

    @property
    def validation_pieces(self) -> int:
        return sum(group[0][0] == Path("val") for group in self.pieces())
