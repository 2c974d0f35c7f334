"""A study's grid: the runs that a YAML file asks for, at one of its scales."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from kvt.attention import ATTENTION, AttentionFactory
from kvt.study.config import TRAINER, Config, Configuration, Shape, fingerprint, shape_of
from kvt.system.errors import UserError, require_seed, unknown
from kvt.system.memory import MetaParameters
from kvt.system.yaml_io import read_yaml

Axes = dict[str, list[Any]]
"""Values by setting. A value that is itself a mapping sets several settings at once."""

AXES = ("tasks", "axes", "seeds")
"""What says which runs there are; a scale may say each anew."""
OPTIONAL_KEYS = ("title", "scales", "columns", "tables", "maps")
CONFIGS = Path("experiments/configs")
FULL = "paper"
"""The scale that the others are cut from."""
USUAL = "laptop"
"""The scale where none is named; of a grid without it, the first."""
MAX_RUNS = 10_000
"""Runs of a grid at a scale: six times the paper's greatest."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        task: the stem of its YAML, whatever the data's own setting of this name says.
        settings: the values of the axes, by setting.
        seed: of everything.
        config: all of it, resolved.
    """

    task: str
    settings: Mapping[str, Any]
    seed: int
    config: Config

    @cached_property
    def name(self) -> str:
        """A hash of the resolved configuration."""
        return fingerprint(self.config)

    @cached_property
    def shape(self) -> Shape:
        """What decides how long it takes."""
        return shape_of(self.config)

    @property
    def attention(self) -> str:
        """The attention with its details: "kv", "kv, kv_heads 1", "my_module.MyAttention"."""
        model = self.config["model"]["init_args"]
        details = [f"{name} {value}" for name, value in (model["attn_kwargs"] or {}).items()]
        return ", ".join([model["attn"], *details])

    @property
    def setting(self) -> dict[str, Any]:
        """The settings but the attention's: what runs must share to be compared."""
        return {name: value for name, value in self.settings.items() if name not in ("attn", "attn_kwargs")}

    def value(self, name: str) -> Any:
        """That of a setting, or of the seed, or the task's name; None where there is no such."""
        sections = (self.config["model"]["init_args"], self.config["data"]["init_args"], self.config["trainer"])
        return {**TRAINER, **sections[2], **sections[1], **sections[0], "task": self.task, "seed": self.seed}.get(name)

    def folder(self, root: Path) -> Path:
        """Where it lands."""
        return root / self.task / self.config["model"]["init_args"]["attn"].rpartition(".")[2] / self.name

    def describe(self, names: Sequence[str]) -> str:
        """Task, attention, the settings of these names and the seed: "sort qkv dim=32 heads=4 seed=0"."""
        return " ".join(word for word in (self.task, self.attention, self.text(names), f"seed={self.seed}") if word)

    def text(self, names: Sequence[str]) -> str:
        """The settings of these names: "dim=32 heads=4"."""
        return " ".join(f"{name}={value}" for name, value in self.setting.items() if name in names)


@dataclass(frozen=True)
class Grid:
    """The runs of a grid at a scale, and what a report should know of them.

    Attributes:
        name: of the file.
        scale: the chosen one.
        content: the file.
        runs: in the order to be made: first all with the first seed.
        cut: of each setting that has fewer values, or others, than at full scale: these and those. Settings are called
            "<task>: <setting>", and what concerns the whole study "study: seeds" and "study: tasks".
    """

    name: str
    scale: str
    content: Mapping[str, Any]
    runs: tuple[Run, ...]
    cut: Mapping[str, tuple[list[Any], list[Any]]]

    @property
    def title(self) -> str:
        """What the file calls itself, or its name."""
        return str(self.content.get("title", self.name))

    @property
    def about(self) -> str:
        """What the file says of the scale."""
        return str(self.content["scales"][self.scale].get("about", "")).strip()


def each_once(runs: Sequence[Run]) -> list[Run]:
    """These runs, each once.

    Raises:
        UserError: two tasks ask for the same run. It has one folder, and would be missing from one of the tasks.
    """
    found: dict[str, Run] = {}
    for run in runs:
        if (other := found.setdefault(run.name, run)).task != run.task:
            same = run.describe(varied(runs)).removeprefix(f"{run.task} ")
            raise UserError(f"{other.task} and {run.task} ask for the same run, {same}: leave it to one of them")
    return [*found.values()]


def varied(runs: Iterable[Run]) -> tuple[str, ...]:
    """The settings that have more than one value among these runs, but the attention's."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.setting.items():
            values.setdefault(name, set()).add(str(value))
    return tuple(name for name, found in values.items() if len(found) > 1)


def read_grid(path: Path, scale: str | None = None) -> Grid:
    """Reads a grid.

    Args:
        path: the YAML; its tasks are names of configurations, or paths beside it.
        scale: one of its `scales`; default: `USUAL`, or the first of a grid that has no such.

    Raises:
        UserError: no such file, scale, key, task or setting; an axis without a value; two axes for one setting; one run
            for two tasks; an attention that cannot be made; more runs than `MAX_RUNS`.
    """
    try:
        return _grid(path, scale)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _grid(path: Path, scale: str | None) -> Grid:
    content = _read(path)
    if scale is None:
        scale = USUAL if USUAL in content["scales"] else next(iter(content["scales"]))
    if scale not in content["scales"]:
        raise unknown("--scale", scale, content["scales"])
    seeds = _seeds(content, scale)
    runs = _runs(path, _axes(content, scale), seeds)
    _require_attentions(runs)
    cut: dict[str, tuple[list[Any], list[Any]]] = {}
    if scale != FULL and FULL in content["scales"]:
        full_seeds = _seeds(content, FULL)
        full = _runs(path, _axes(content, FULL), full_seeds[:1])  # the others have the same settings
        cut = _cut(runs, full) | ({"study: seeds": (seeds, full_seeds)} if set(seeds) != set(full_seeds) else {})
    return Grid(path.stem, scale, content, tuple(runs), cut)


def _cut(runs: Sequence[Run], full: Sequence[Run]) -> dict[str, tuple[list[Any], list[Any]]]:
    """What differs between the runs of two scales but the seeds, setting by setting: see `Grid.cut`."""
    ours, theirs = _by_task(runs), _by_task(full)
    compared = {"study: tasks": ([*ours], [*theirs])}
    for task in [task for task in ours if task in theirs]:
        for name in dict.fromkeys(name for run in (*ours[task], *theirs[task]) for name in run.settings):
            compared[f"{task}: {name}"] = _distinct(ours[task], name), _distinct(theirs[task], name)
    return {name: (a, b) for name, (a, b) in compared.items() if {*map(repr, a)} != {*map(repr, b)}}


def _by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run.task, []).append(run)
    return tasks


def _distinct(runs: Iterable[Run], name: str) -> list[Any]:
    """The values of a setting, each once."""
    return [*{repr(value): value for value in (run.value(name) for run in runs)}.values()]


def _require_attentions(runs: Sequence[Run]) -> None:
    """Makes each attention once, for a mistake there would cost a study.

    Raises:
        UserError: one cannot be made.
    """
    names = ("attn", "attn_kwargs", "dim", "heads", "pos_dim")
    models = [run.config["model"]["init_args"] for run in runs]
    known = [[model.get(name) for name in names] for model in models if {"dim", "heads"} <= model.keys()]
    for attn, attn_kwargs, dim, heads, pos_dim in {repr(values): values for values in known}.values():
        try:
            with MetaParameters() if attn in ATTENTION else nullcontext():  # one's own may look at its numbers
                AttentionFactory(attn, attn_kwargs, heads=heads, pos_dim=pos_dim, max_len=16)(dim)
        except (UserError, ImportError) as error:
            raise UserError(f"attn {attn}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path, "the grid")
    except FileNotFoundError as error:
        raise UserError("no such grid; experiments/grids holds those of the paper") from error
    if not isinstance(content, dict):
        raise UserError("must hold tasks:, axes:, seeds: and scales:")
    _require_keys(content, (*AXES, *OPTIONAL_KEYS))
    if missing := [key for key in ("tasks", "axes", "seeds", "scales") if not content.get(key)]:
        raise UserError(f"{missing[0]} is missing or empty")
    scales = {str(name): changes or {} for name, changes in _mapping("scales", content["scales"]).items()}
    for name, changes in scales.items():
        if not isinstance(changes, dict):
            raise UserError(f"scales: {name}: must hold about:, tasks:, axes: or seeds:")
        _require_keys(changes, ("about", *AXES))
        if "tasks" in changes and not changes["tasks"]:
            raise UserError(f"scales: {name}: tasks is empty: name some or take it out")
    return content | {"scales": scales}


def _require_keys(content: Mapping[str, Any], known: Sequence[str]) -> None:
    if strange := [key for key in content if key not in known]:
        raise unknown("key", strange[0], known)


def _seeds(content: Mapping[str, Any], scale: str) -> list[int]:
    seeds = content["scales"][scale].get("seeds", content["seeds"])
    if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise UserError(f"seeds: {seeds}: must be a list of numbers, such as [0, 1, 2]")
    for seed in seeds:
        require_seed(seed)
    return seeds


def _axes(content: Mapping[str, Any], scale: str) -> dict[str, Axes]:
    """The axes of each task at a scale."""
    changes = content["scales"][scale]
    own, changed = _tasks(content["tasks"]), _tasks(changes.get("tasks", content["tasks"]))
    common = _mapping("axes", content["axes"]), _mapping("axes", changes.get("axes"))
    return {
        task: {
            name: _values(task, name, value)
            for name, value in {**common[0], **own.get(task, {}), **common[1], **axes}.items()
        }
        for task, axes in changed.items()
    }


def _tasks(tasks: Any) -> dict[str, dict[str, Any]]:
    """Tasks with axes of their own, if any; given as a list or as a mapping."""
    if isinstance(tasks, list) and not any(isinstance(task, dict | list) for task in tasks):
        tasks = dict.fromkeys(tasks)
    found = {str(task): _mapping(f"tasks: {task}", axes) for task, axes in _mapping("tasks", tasks).items()}
    for name, count in Counter(map(_name, found)).items():
        if count > 1:
            raise UserError(f"tasks: {count} are called {name}: rename a file")
        if name[:1] in ("", "."):  # would land in the folder above, or in that of the locks
            raise UserError(f"tasks: '{name}' is no name for a task: rename the file")
    return found


def _name(task: str) -> str:
    """What a task is called: the stem of its YAML."""
    return Path(task.removesuffix(".yaml")).name


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise UserError(f"{where}: {value}: must be names with values")
    return value or {}


def _values(task: str, name: str, value: Any) -> list[Any]:
    if not (values := value if isinstance(value, list) else [value]):
        raise UserError(f"the axis {name} of {task} is empty: give it a value or take it out")
    return values


def _runs(path: Path, axes: Mapping[str, Axes], seeds: Sequence[int]) -> list[Run]:
    """All runs, each once: seed by seed, and of each the settings of all tasks in turn."""
    count = len(seeds) * sum(prod(map(len, values.values()), start=1.0) for values in axes.values())
    if count > MAX_RUNS:  # a float: of very many axes it is infinite, where a whole number would be too long to print
        raise UserError(f"asks for {count:,.0f} runs, {MAX_RUNS:,} are the most: take values out, or split it")
    return each_once([run for *_, run in sorted(_numbered(path, axes, seeds), key=lambda numbered: numbered[:3])])


def _numbered(path: Path, axes: Mapping[str, Axes], seeds: Sequence[int]) -> Iterator[tuple[int, int, int, Run]]:
    """All runs, each with the numbers of its seed, its settings and its task."""
    for t, (task, values) in enumerate(axes.items()):
        configuration = Configuration(_configuration(path, task))
        for c, chosen in enumerate(product(*values.values())):
            settings: dict[str, Any] = {}
            for axis, value in zip(values, chosen, strict=True):
                for name, one in _set(configuration, axis, value).items():
                    if name in settings:
                        raise UserError(f"{name} of {task} is set by two axes")
                    settings[name] = one
            for s, seed in enumerate(seeds):
                run = Run(_name(task), settings, seed, configuration.resolve(settings, seed))
                yield s, c, t, replace(run, settings={name: run.value(name) for name in settings})  # typed


def _configuration(path: Path, task: str) -> Path:
    """The file of a task: a path beside the grid's, or a name in configs/ beside its folder or of the checkout."""
    if task.endswith(".yaml"):
        return path.parent / task
    beside = path.absolute().parent.parent / "configs" / f"{task}.yaml"
    return beside if beside.is_file() else CONFIGS / f"{task}.yaml"


def _set(configuration: Configuration, axis: str, value: Any) -> dict[str, Any]:
    """What a value of an axis sets."""
    together = isinstance(value, dict) and not configuration.has(axis)
    settings = value if together else {axis: value}
    for name in settings:
        configuration.require(name, axis if together else None)
        if name in ("task", "seed"):
            raise UserError(f"{name} is no axis: name {name}s under {name}s:")
    return settings
