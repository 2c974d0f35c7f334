"""Read data sets named hf:NAME or hf:NAME:CONFIGURATION with Hugging Face's library `datasets`.

NAME is the name of a data set on the Hugging Face hub, or the path of a folder with Parquet, Arrow, CSV, JSON, text or
image files. A changed folder is read again, not from an older cache of `datasets`. Files outside the folder are never
read, even if a file inside refers to them. A suffix chooses columns: #image=COLUMN,label=COLUMN or #text=COLUMN.
"""

import glob
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple

from kvt.data.image_files import ImageFile, Listing
from kvt.data.tensor_files import splits_among
from kvt.data.texts import LEARNED, PIECE, Corpus, Group, plain
from kvt.system.console import say
from kvt.system.errors import UserError, unknown
from kvt.system.files import list_files, state_of
from kvt.system.quoting import printable

if TYPE_CHECKING:
    from datasets import Dataset, Features

PREFIX = "hf:"


class _Named(NamedTuple):
    name: str  # name of a data set on the hub, or path of a folder
    configuration: str | None
    columns: dict[str, str]  # maps "image", "label" or "text" to the name of a column


def is_hub(named: str | Path) -> bool:
    return str(named).startswith(PREFIX)


def base_name(named: str) -> str:
    """Return the last part of the name of a data set, without configuration and columns.

    >>> base_name("hf:Salesforce/wikitext:wikitext-2-raw-v1")
    'wikitext'
    """
    return os.path.basename(os.path.abspath(_parse(named).name))


def list_images(named: str) -> Listing:
    """List the images of a data set, with their classes.

    If a column has the type ClassLabel, its names are the classes. Otherwise, the distinct strings or integers of the
    label column in the split "train" are the classes. Classes of different splits are matched by name, because splits
    may number classes differently. Raises UserError if no column has images, if no column has classes, or if the class
    of an image does not occur in "train".
    """
    splits = _load(named, "train", "test")
    import datasets  # imported here, because it is slow to import; `_load` has imported it

    features = splits["train"].features
    image = _column(named, features, "image", lambda feature: isinstance(feature, datasets.Image))
    label = _column(named, features, "label", lambda feature: isinstance(feature, datasets.ClassLabel), is_discrete)
    classes: dict[Any, int] = {}
    found: dict[str, list[ImageFile]] = {}
    for split, rows in splits.items():
        names, values = getattr(rows.features[label], "names", None), rows[label][:]
        known = range(len(names)) if names else {*values} - {None}
        if unlabelled := [i for i, value in enumerate(values) if value not in known]:
            raise UserError(f"{named} {split}[{unlabelled[0]}] has no class: choose a data set without missing labels")
        values = [names[value] for value in values] if names else values
        if split == "train":
            classes = {name: number for number, name in enumerate(names or sorted({*values}))}
        if strange := [i for i, value in enumerate(values) if value not in classes]:
            is_what = f"{named} {split}[{strange[0]}] has the class {values[strange[0]]}"
            raise UserError(f"{is_what}, but train has no image of this class: remove such images")
        encoded = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        found[split] = [
            ImageFile(f"{named} {split}[{i}]", classes[value], partial(_content, encoded, image, i, _parse(named).name))
            for i, value in enumerate(values)
        ]
    files = [file["filename"] for rows in splits.values() for file in rows.cache_files]
    return Listing(base_name(named), [*map(str, classes)], found, files, f"{image} {label}")


def read_texts(named: str) -> dict[str, str]:
    """Return a dict that maps "train", and also "val" if the data set has this split, to the text of the split.

    The text consists of all documents, joined by line ends. The documents are the column named "text", or the only
    column of strings. If there is no such column, a UserError lists all columns.
    """
    splits = _load(named, "train")
    column = _column(named, splits["train"].features, "text", is_strings)
    return {split: _joined(splits[split][column]) for split in ("train", "val") if split in splits}


def read_pairs(named: str, *languages: str) -> dict[str, list[tuple[str, ...]]]:
    """Return a dict that maps each split to a list of pairs of sentences, one sentence for each language.

    The sentences come from two columns with the names of the languages, or from one column of type Translation.
    """
    splits = _load(named)
    pairs = {}
    for split, rows in splits.items():
        whole = next(
            (name for name, kind in rows.features.items() if {*languages} <= {*getattr(kind, "languages", ())}), None
        )
        if whole is None and not {*languages} <= {*rows.features}:
            raise _no_column(named, rows.features, f"choose a data set with columns {' and '.join(languages)}")
        columns = [[row[name] for row in rows[whole]] if whole else rows[name] for name in languages]
        pairs[split] = [tuple(plain(text or "") for text in texts) for texts in zip(*columns, strict=True)]
    return pairs


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """The documents of a data set: the rows of the split "train", followed by the rows of "val".

    If each row is a single line, as in WikiText, the rows of a split together form one document. The rows are read from
    memory-mapped files. A group is a range of rows.
    """

    @cached_property
    def _splits(self) -> dict[str, "Dataset"]:
        named = str(self.root)
        splits = _load(named, "train")
        column = _column(named, splits["train"].features, "text", is_strings)
        return {split: splits[split].select_columns([column]) for split in ("train", "val") if split in splits}

    @property
    def left_out(self) -> None:
        return None

    @property
    def identity(self) -> str:
        return "\n".join([str(self.root), *(f"{split} {rows._fingerprint}" for split, rows in self._splits.items())])

    def pieces(self) -> Iterator[Group]:
        for split, rows in self._splits.items():
            step = max(1, PIECE * len(rows) // max(1, rows.data.nbytes))
            for start in range(0, len(rows), step):
                yield [(Path(split), start, min(start + step, len(rows)))]

    def read(self, group: Group) -> Iterator[tuple[str, bool]]:
        for split, start, stop in group:
            rows = self._splits[str(split)]
            (column,) = rows.column_names
            documents = [plain(text) for text in rows[start:stop][column] if text is not None]
            if self._are_lines:
                yield "".join(text if text.endswith("\n") else f"{text}\n" for text in documents), stop == len(rows)
            else:
                yield from ((text, True) for text in documents if text)

    def sample(self) -> Iterator[str]:
        size = 0
        for text, _ in chain.from_iterable(map(self.read, self.pieces())):
            yield text
            if (size := size + len(text)) >= LEARNED:
                return

    @property
    def validation_pieces(self) -> int:
        return sum(group[0][0] == Path("val") for group in self.pieces())

    @cached_property
    def _are_lines(self) -> bool:
        rows = self._splits["train"]
        first = [text for text in rows[:1000][rows.column_names[0]] if text]
        return any(text.endswith("\n") for text in first) and not any("\n" in text[:-1] for text in first)


def is_strings(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def is_discrete(feature: Any) -> bool:
    return is_strings(feature) or getattr(feature, "dtype", "").startswith(("int", "uint", "bool"))


def _joined(documents: Iterable[str | None]) -> str:
    """Join documents with exactly one line end after each document but the last, which is left as it is."""
    rows = [plain(document) for document in documents if document is not None]
    return "\n".join(row.removesuffix("\n") for row in rows) + "\n" * bool(rows and rows[-1].endswith("\n"))


def _column(
    named: str,
    features: "Features",
    role: str,
    fits: Callable[[Any], bool],
    may_be: Callable[[Any], bool] | None = None,
) -> str:
    """Choose the column that #role= names, else the column named `role`, else the first column whose type `fits`.

    In the first two cases, `may_be` (default: `fits`) decides whether the type of the column is allowed. If several
    columns of images or of classes fit, the first of them is chosen, and a message names the other columns. Raises
    UserError if no column fits, or if several columns of text fit.
    """
    fitting, possible = (
        [name for name, feature in features.items() if test(feature)] for test in (fits, may_be or fits)
    )
    if (chosen := _parse(named).columns.get(role)) is not None:
        if chosen not in possible:
            raise UserError(f"{named}: {unknown(f'column of type {role}', chosen, possible)}")
        return chosen
    if role in possible:
        return role
    if not fitting or (role == "text" and len(fitting) > 1):
        raise _no_column(named, features, f"choose the {role} with {named}#{role}=COLUMN")
    if len(fitting) > 1:
        say(printable(f"{named}: {role} is {fitting[0]}; choose {' or '.join(fitting[1:])} with #{role}=COLUMN"))
    return fitting[0]


def _no_column(named: str, features: "Features", remedy: str) -> UserError:
    columns = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in features.items())
    return UserError(f"{named} has columns {columns}: {remedy}")


def _load(named: str, *needed: str) -> dict[str, "Dataset"]:
    """Return a dict from "train", "val" and "test" to the rows of each split that has rows.

    Raises UserError if a split in `needed` is missing.
    """
    import datasets  # an optional dependency

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # else `datasets` also logs errors that it raises
    name, configuration, _ = _parse(named)
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise UserError(f"{named}: no such folder")
    if name.isidentifier() and not os.path.isdir(name) and find_spec(f"datasets.packaged_modules.{name}"):
        raise UserError(f"{named}: {name} is the name of a file format: give the folder of the files, hf:FOLDER")
    place = name
    try:
        place = _snapshot(Path(name)) if os.path.isdir(name) else name
        if configuration is None and os.path.isfile(os.path.join(place, datasets.config.DATASETDICT_JSON_FILENAME)):
            found = _load_saved(place)
        else:
            found = _load_files(place, configuration)
    except UserError as error:
        raise UserError(f"{named}: {error}") from error
    except Exception as error:  # the network and the readers of the formats raise errors of many types
        reason = " ".join(str(error).replace(place, os.path.abspath(name)).split())
        remedy = "check the name and the network, or download the data set and give its folder, hf:FOLDER"
        raise UserError(f"{named} cannot be loaded ({reason:.300}): {remedy}") from error
    names, others = splits_among(found, named)
    if others:
        say(printable(f"{named}: unused splits: {', '.join(others)}"))
    splits = {split: found[name] for split, name in names.items() if len(found[name])}
    if missing := [split for split in needed if split not in splits]:
        raise UserError(f"{named} has splits {', '.join(found)}, but no split {missing[0]}: choose another data set")
    return splits


def _load_saved(folder: str) -> dict[str, "Dataset"]:
    """Load a data set that DatasetDict.save_to_disk wrote; `load_dataset` would mix up class names of the splits."""
    import datasets

    found = datasets.load_from_disk(folder, keep_in_memory=False)
    for file in (file["filename"] for rows in found.values() for file in rows.cache_files):
        if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder)):
            raise UserError(f"the data set refers to a file outside its folder: {file}")
    return dict(found)


def _load_files(place: str, configuration: str | None) -> dict[str, "Dataset"]:
    """Load a data set from the hub or a folder; each split of Parquet or Arrow files keeps its own class names."""
    import datasets

    builder = datasets.load_dataset_builder(place, configuration)
    kind = type(builder.config).__name__.removesuffix("Config").lower()
    whole: dict[str, Any] = {"keep_in_memory": False}  # explicit, so that environment variables have no effect
    if kind == "csv":  # read "NA" and "null" as ordinary words
        whole |= {"keep_default_na": False, "na_values": [""]}
    if kind not in ("parquet", "arrow") or not os.path.isdir(place):
        return dict(datasets.load_dataset(place, configuration, **whole))
    found = {}
    for split, files in builder.config.data_files.items():  # one call for all splits would mix up their classes
        paths = [glob.escape(file) for file in dict.fromkeys(files)]
        rows = found[str(split)] = datasets.load_dataset(kind, data_files=paths, split="train", **whole)
        classes = {name: feature for name, feature in rows.features.items() if isinstance(feature, datasets.ClassLabel)}
        for path in paths if classes else ():
            own = datasets.load_dataset(kind, data_files=[path], split="train", streaming=True).features
            if any(own.get(name) != feature for name, feature in classes.items()):
                reason = f"{os.path.basename(path)} and {os.path.basename(paths[0])} number their classes differently"
                raise UserError(f"{reason}: give all files of a split the same classes, with Dataset.cast_column")
    return found


def _parse(named: str) -> _Named:
    """Split hf:NAME:CONFIGURATION#image=COLUMN,label=COLUMN into its parts."""
    place, _, chosen = named.removeprefix(PREFIX).rpartition("#")
    if not place or "=" not in chosen:
        place, chosen = named.removeprefix(PREFIX), ""
    columns = dict(word.partition("=")[::2] for word in chosen.split(",") if word)
    if strange := columns.keys() - {"image", "label", "text"}:
        raise UserError(f"{named}: {unknown('choice', min(strange), ('image', 'label', 'text'))}")
    name, _, configuration = place.partition(":")
    if not name:
        raise UserError(f"{named} names no data set: expected hf:NAME or hf:FOLDER")
    return _Named(os.path.expanduser(name), configuration or None, columns)


def _snapshot(folder: Path) -> str:
    """Return the path of a folder of links to the files of `folder`; the path depends on their sizes and times.

    The cache of `datasets` identifies a file by path and modification time, so it could return old content of a changed
    file. Because changed files have a new path, `datasets` reads them again. README.md gets no link, because README.md
    may refer to web addresses and to files outside the folder.
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
        with suppress(OSError):  # another process has made the snapshot meanwhile
            part.rename(snapshot)
        shutil.rmtree(part, ignore_errors=True)
    return str(snapshot)


def _content(rows: "Dataset", column: str, index: int, name: str) -> bytes:
    image = rows[index][column]
    if image is None:
        raise ValueError("the image is missing")
    if image["bytes"] is not None:
        content: bytes = image["bytes"]
        return content
    from datasets import config

    path = Path(os.path.abspath(image["path"]))
    places = (name, config.HF_DATASETS_CACHE, config.HF_CACHE_HOME)
    if not any(path.is_relative_to(os.path.abspath(place)) for place in places):
        raise ValueError(f"the image file is outside the data set's folder: {path}")
    return path.read_bytes()
