"""Grids. A grid is a YAML file that lists the tasks, settings and seeds of a study's runs at several scales."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product, zip_longest
from math import nan, prod
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from kvt.attention import AttentionFactory
from kvt.attention.factory import parse_attention
from kvt.run.config import NOT_COMPARED, RunConfig, in_short, short_hash
from kvt.run.folder import BEST
from kvt.run.sections import BUILT, TRAINER
from kvt.system import (
    CONFIGS,
    GRIDS,
    UserError,
    find_yaml,
    parse_settings,
    printable,
    read_yaml,
    require_positive,
    unknown,
    yaml_names,
)

Axes = dict[str, list[Any]]  # maps a setting to its values; a value that is a mapping sets several settings
ScaleDiff = dict[str, tuple[list[Any], list[Any]]]
"""The differences between a scale and the full scale, as pairs: values at the scale, values at the full scale.

A key is "<task>: <setting>", "study: seeds" or "study: tasks". The pair of "<task>: <ATTENTIONS>" has the attentions
that exist in only one of the two scales."""

ATTENTIONS = "attentions of one scale alone"
OF_ATTENTION = ("attn", "attn_kwargs", "share_layers")
"""The settings of a task that make up `Run.attention`."""
FULL = "paper"  # the scale with which other scales are compared
ONLY = "full"  # the scale of a grid without the key `scales`
MAX_RUNS = 1_000_000  # they take 2 GB of memory; a grid with more runs is a mistake, such as 30 axes of two values

Settings = dict  # with dict[str, Any], jsonargparse would parse the values
Tasks = dict[str, Settings | None] | list[str]
"""A dict that maps a task to its own axes, or a list of tasks."""
Columns = dict[str, Settings] | list[str] | None
"""A dict that maps a column to the settings of its runs, or a list with a task for each column. None: all tasks."""


@dataclass(frozen=True)
class Scale:
    """A scale of a grid: the tasks, axes and seeds of a scale replace those of the grid."""

    about: str = ""
    tasks: Tasks | None = None
    axes: Settings | None = None
    seeds: list[int] | None = None


@dataclass(frozen=True)
class ClaimsEntry:
    """Claims about a column or pool of a table at one scale; a difference below the margin, in points, is as good."""

    scale: str
    column: str
    pairs: list[tuple[str, str]]
    margin: float = 1.0


@dataclass(frozen=True)
class TableEntry:
    """The entry of a grid's YAML file for one table of its report; docs/guides/studies.md describes the keys."""

    metric: str
    over_training: bool = False
    margin: float = 1.0
    solved: list[str] | Settings = field(default_factory=list)
    columns: Columns = None
    pools: dict[str, list[str]] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    claims: list[ClaimsEntry] | None = None  # the comparisons that have a verdict; None: all
    published: dict[str, dict[str, float | tuple[float, float]]] = field(default_factory=dict)
    relabelled: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        require_positive(margin=self.margin)

    @property
    def published_pairs(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The published numbers as pairs: the mean, and the standard deviation over settings, NaN if it is unknown."""
        return {
            attention: {column: value if isinstance(value, tuple) else (value, nan) for column, value in cells.items()}
            for attention, cells in self.published.items()
        }


@dataclass(frozen=True)
class GridFile:
    """The content of a grid's YAML file; docs/guides/studies.md describes the keys."""

    tasks: Tasks
    axes: Settings
    seeds: list[int]
    scales: dict[str, Scale | None] = field(default_factory=lambda: {ONLY: None})
    title: str | None = None
    sections: list[str] = field(default_factory=lambda: ["differences", "tables", "curves", "notes"])
    """This key and the keys below are for reports."""
    columns: Columns = None
    tables: list[TableEntry] | None = None  # see `kvt.reports.tables.tables_of`
    curves: list[list[str]] = field(default_factory=lambda: [["val/loss", "train/loss"]])
    best_of: str | None = None
    against: dict[str, str] = field(default_factory=dict)
    set: Settings = field(default_factory=dict)  # replaces the axes with these names in all tasks and scales

    @classmethod
    def parse(cls, content: Any) -> "GridFile":
        """Return the grid with the content of a YAML file; raise UserError if a key or the type of a value is wrong."""
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--grid", type=cls)
        try:
            file: GridFile = parser.instantiate(parser.parse_object({"grid": content})).grid
        except ArgumentError as error:
            raise UserError(" ".join(str(error).replace("grid.", "").split())) from error
        for seeds in (file.at(scale)[1] for scale in file.scales):
            if not seeds or not all(0 <= seed < 2**32 for seed in seeds):
                raise UserError(f"seeds {seeds}: expected numbers from 0 to {2**32 - 1}")
        return file

    def at(self, scale: str) -> tuple[dict[str, Axes], list[int]]:
        """Return a dict that maps each task of a scale to the task's axes, and the seeds of the scale."""
        changes, own = self.scales[scale] or Scale(), _as_mapping(self.tasks)
        found: dict[str, Axes] = {}
        for task, axes in (own if changes.tasks is None else _as_mapping(changes.tasks)).items():
            merged = self.axes | (own.get(task) or {}) | (changes.axes or {}) | (axes or {}) | self.set
            found[task] = {name: value if isinstance(value, list) else [value] for name, value in merged.items()}
        return found, changes.seeds or self.seeds


def _as_mapping(tasks: Tasks) -> dict[str, Settings | None]:
    return dict.fromkeys(tasks) if isinstance(tasks, list) else tasks


class TaskFile:
    """A task's YAML file. The axes of a grid replace its settings by short name, such as `dim` for `model.dim`."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        base = RunConfig.from_yaml(path)
        trainer = {name: value for name, value in base.trainer.items() if f"trainer.{name}" in TRAINER}
        self._base = replace(base, trainer=trainer, ckpt_path=None)
        parts = {section: getattr(base, section)["init_args"] for section in BUILT} | {"trainer": trainer}
        named = {name: section for section, part in parts.items() for name in part if name != "task"}
        self.section_of = {name: part for name, part in named.items() if f"{part}.{name}" not in NOT_COMPARED}
        self.section_of["optimizer"] = ""

    def value(self, axis: str, value: Any) -> dict[str, Any]:
        """Return what a value of an axis sets, as the types that classes declare: one setting, or all in a mapping.

        Raises UserError if a setting is invalid.
        """
        known = self.section_of.keys()
        several = isinstance(value, dict) and (axis not in known or value.keys() <= known)
        settings = value if several else {axis: value}
        attn, arguments = parse_attention(str(settings.get("attn")))
        settings = {**settings, "attn": attn, "attn_kwargs": arguments} if arguments else settings
        if strange := [name for name in settings if name not in known]:
            raise unknown(f"setting of {self.name}:", strange[0], sorted(known))
        changed = self._base.changed(**settings)
        typed = {**changed.trainer, **changed.data["init_args"], **changed.model["init_args"]}
        typed["optimizer"] = changed.optimizer
        return {name: typed[name] for name in settings}

    def config(self, settings: Mapping[str, Any], seed: int) -> RunConfig:
        """Return a run's configuration with these parsed settings. Runs share unchanged sections to save memory."""
        sections: dict[str, Any] = {"seed_everything": seed}
        for name, value in settings.items():
            section = self.section_of[name]
            (sections.setdefault(section, {}) if section else sections)[name] = value
        return self._base.merged(sections)


@dataclass(frozen=True)
class Run:
    task: str  # the name of the task's YAML file, which may differ from the setting `task` of the data
    settings: Mapping[str, Any]  # the parsed values of the axes
    seed: int
    config: RunConfig

    @cached_property
    def name(self) -> str:
        return self.config.name

    @cached_property
    def shape(self) -> str:
        """A hash of the settings that affect a run's duration: all except seed, learning rate and kind of data."""
        return short_hash(self.config.flat | dict.fromkeys(("seed", "model.lr", "data.task")))

    @property
    def attention(self) -> str:
        """The attention with its arguments: "kv", "kv, kv_heads 1", "qkv, share_layers 2", "my_module.MyAttention"."""
        model = self.config.model["init_args"]
        shared = {"share_layers": number} if (number := model.get("share_layers", 1)) > 1 else {}
        details = [f"{name} {value}" for name, value in {**(model.get("attn_kwargs") or {}), **shared}.items()]
        return ", ".join([model["attn"], *details])

    @property
    def setting(self) -> dict[str, Any]:
        """The settings without `OF_ATTENTION`. Reports compare runs for which these settings are equal."""
        return {name: value for name, value in self.settings.items() if name not in OF_ATTENTION}

    @property
    def values(self) -> dict[str, Any]:
        """A dict that maps short names to all settings of the run, including "task" and "seed"."""
        model, data = (part["init_args"] for part in (self.config.model, self.config.data))
        others = {"optimizer": self.config.optimizer, "task": self.task, "seed": self.seed}
        return {**self.config.trainer, **data, **model, **others}

    def value(self, name: str) -> Any:
        """Return the value of a setting by its short name, including "seed" and "task". None if the name is unknown."""
        return self.values.get(name)

    def folder(self, root: Path) -> Path:
        return root / self.task / self.config.imports["attn"].rpartition(".")[2] / self.name

    def best_checkpoint(self, root: Path) -> Path:
        return self.folder(root) / BEST

    def describe(self, names: Sequence[str]) -> str:
        """Describe the run with the settings in `names`, for example "sort qkv dim=32 heads=4 seed=0"."""
        words = (self.task, self.attention, self.text(names), f"seed={self.seed}")
        return printable(" ".join(filter(None, words)))

    def text(self, names: Sequence[str]) -> str:
        return " ".join(f"{name}={in_short(value)}" for name, value in self.setting.items() if name in names)


@dataclass(frozen=True)
class Grid:
    """The runs of a grid at a scale, in the order of training: all runs with the first seed are first."""

    name: str
    scale: str
    file: GridFile
    runs: tuple[Run, ...]
    of_all_scales: tuple[Run, ...]  # the runs at all scales, whose names and settings tables may use
    scale_diff: ScaleDiff

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """The names of the settings that differ among the runs, without the settings `OF_ATTENTION`."""
        return varying_settings(self.runs)

    @property
    def report(self) -> str:
        """The name of the report's folder."""
        return f"{self.name}-{self.scale}"

    @property
    def title(self) -> str:
        return self.file.title or self.name

    @property
    def about(self) -> str:
        return (self.file.scales[self.scale] or Scale()).about.strip()


def select(runs: Sequence[Run], wanted: Mapping[str, Any], where: str) -> Sequence[Run]:
    """Return the runs whose settings have the values `wanted`, a dict by short name that may include "seed" and "task".

    Raises a UserError that names `where` if no run has a setting of this name, or if no run has the values.
    """
    for name, value in wanted.items():
        if not (having := [run for run in runs if name in run.values]):
            raise unknown(f"setting in {where}:", name, sorted(runs[0].values))
        if not (runs := [run for run in having if has(run, name, value)]):
            raise unknown(f"{name} in {where}:", value, dict.fromkeys(str(in_short(run.value(name))) for run in having))
    return runs


def has(run: Run, name: str, wanted: Any) -> bool:
    """Return whether a run's setting has the value `wanted`, compared as numbers or as text."""
    ours = run.value(name)
    try:
        return float(ours) == float(wanted)  # YAML reads 1e-3 as a string
    except (TypeError, ValueError):
        return bool(ours == wanted) or str(in_short(ours)) == str(in_short(wanted))


def deduplicate(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without repetitions; raise UserError if two tasks contain the same run."""
    found: dict[str, Run] = {}
    for run in runs:
        if (other := found.setdefault(run.name, run)).task != run.task:
            same = run.describe(varying_settings(runs)).removeprefix(f"{run.task} ")
            raise UserError(f"{other.task} and {run.task} contain the same run, {same}: remove it from one of them")
    return [*found.values()]


def varying_settings(runs: Iterable[Run]) -> tuple[str, ...]:
    """Return the names of the settings that differ among the runs, without the settings `OF_ATTENTION`."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.setting.items():
            values.setdefault(name, set()).add(str(value))
    return tuple(name for name, found in values.items() if len(found) > 1)


def read_grid(named: str | Path, scale: str | None = None, changes: Sequence[str] = ()) -> Grid:
    """Return a grid at one of its scales.

    The grid gives a task as a path that ends in .yaml and is relative to the grid's folder, or as a name. A name stands
    for the file ../configs/<name>.yaml relative to the grid's folder, or else for kvt/configs/<name>.yaml.

    Args:
        named: path of the grid's YAML file, or name of a grid in kvt/grids.
        scale: name of a scale; default: laptop if the grid has it, else its first scale.
        changes: words such as norm=post, which replace axes of the grid.

    Raises:
        UserError: the file is missing or invalid, or the scale is unknown.
    """
    path = find_yaml(str(named), GRIDS)
    try:
        file = replace(GridFile.parse(read_yaml(path, "the grid")), set=parse_settings(changes, "--set"))
        if scale is None:
            scale = "laptop" if "laptop" in file.scales else next(iter(file.scales))
        if scale not in file.scales:
            raise unknown("--scale", scale, file.scales)
        at = {each: runs_of(path, file, each) for each in file.scales}
        _require_attentions(at[scale])
        of_all_scales = tuple(run for runs in at.values() for run in runs)
        seeds = [file.at(each)[1] for each in (scale, FULL) if each in at]
        scale_diff = _scale_diff(at[scale], at[FULL], *seeds) if FULL in at else {}
        return Grid(",".join([path.stem, *changes]), scale, file, tuple(at[scale]), of_all_scales, scale_diff)
    except FileNotFoundError as error:
        names = ", ".join(yaml_names(GRIDS))
        raise UserError(f"{path}: no such grid; kvt has {names}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def runs_of(path: Path, file: GridFile, scale: str, tasks: Collection[str] | None = None) -> list[Run]:
    """Return the distinct runs of a grid at a scale, of all tasks or of the tasks named in `tasks`.

    The runs are in the order of training: for each seed, the first setting of each task, then each second setting.
    """
    axes, seeds = file.at(scale)
    axes = axes if tasks is None else {task: axes[task] for task in tasks}
    counts = [prod(map(len, values.values())) for values in axes.values()]
    if not counts or 0 in counts or len(seeds) * sum(counts) > MAX_RUNS:
        raise UserError(f"has no tasks, an empty axis, or more than {MAX_RUNS:,} runs")
    files = [TaskFile(_find_task(path, task)) for task in axes]
    names = [task.name for task in files]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"tasks: {len(twice)} are called {twice[0]}: rename a file")
    by_task = [
        [Run(task.name, settings, seeds[0], task.config(settings, seeds[0])) for settings in _settings(task, values)]
        for task, values in zip(files, axes.values(), strict=True)
    ]
    of_a_seed = [run for group in zip_longest(*by_task) for run in filter(None, group)]
    pairs = product(seeds, of_a_seed)
    return deduplicate([replace(r, seed=s, config=replace(r.config, seed_everything=s)) for s, r in pairs])


def _settings(task: TaskFile, axes: Axes) -> Iterator[dict[str, Any]]:
    for chosen in product(*([task.value(axis, value) for value in values] for axis, values in axes.items())):
        settings: dict[str, Any] = {}
        for part in chosen:
            if twice := settings.keys() & part.keys():
                raise UserError(f"{twice.pop()} of {task.name} is set by two axes")
            settings |= part
        yield settings


def _find_task(grid: Path, task: str) -> Path:
    if task.endswith(".yaml"):
        return grid.parent / task
    beside = grid.absolute().parent.parent / "configs" / f"{task}.yaml"
    return beside if beside.is_file() else CONFIGS / f"{task}.yaml"


def _require_attentions(runs: Sequence[Run]) -> None:
    names = ("attn", "attn_kwargs", "dim", "heads", "pos_dim")
    for attn, attn_kwargs, dim, heads, pos_dim in _distinct([run.value(name) for name in names] for run in runs):
        try:
            if dim and heads:  # not for models that have a size in place of them
                AttentionFactory(attn, attn_kwargs, heads=heads, pos_dim=pos_dim, max_len=16)(dim)
        except (UserError, ImportError) as error:
            raise UserError(f"attn {attn}: {error}") from None


def _scale_diff(ours: Sequence[Run], theirs: Sequence[Run], seeds: list[int], full_seeds: list[int]) -> ScaleDiff:
    tasks, full_tasks = (_distinct(run.task for run in runs) for runs in (ours, theirs))
    compared = {"study: tasks": (tasks, full_tasks)}
    for task in [task for task in tasks if task in full_tasks]:
        mine, full = ([run for run in runs if run.task == task] for runs in (ours, theirs))
        for name in dict.fromkeys(name for run in (*mine, *full) for name in run.setting):
            values = [_distinct(run.value(name) for run in runs) for runs in (mine, full)]
            compared[f"{task}: {name}"] = values[0], values[1]
        names = [_distinct(run.attention for run in runs) for runs in (mine, full)]
        alone = [[attention for attention in names[i] if attention not in names[1 - i]] for i in (0, 1)]
        compared[f"{task}: {ATTENTIONS}"] = alone[0], alone[1]
    compared["study: seeds"] = seeds, full_seeds
    return {name: (a, b) for name, (a, b) in compared.items() if {*map(repr, a)} != {*map(repr, b)}}


def _distinct(values: Iterable[Any]) -> list[Any]:
    return [*{repr(value): value for value in values}.values()]
