"""Reads grids: YAML files that list the tasks, settings and seeds of a study's runs at one or more scales."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product, zip_longest
from math import nan, prod
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from kvt.attention.factory import find_attention, parse_attention
from kvt.run.config import NOT_COMPARED, RunConfig, in_short
from kvt.run.folder import BEST
from kvt.run.sections import BUILT, TRAINER
from kvt.system import CONFIGS, GRIDS, UserError, find_yaml, parse_settings, parse_yaml, unknown, yaml_names

Axes = dict[str, list[Any]]  # maps an axis to its values; a value may be a mapping of several settings
ScaleDiff = dict[str, tuple[list[Any], list[Any]]]  # see `_scale_diff`
ATTENTIONS = "attentions of one scale alone"
OF_ATTENTION = ("attn", "attn_kwargs", "share_layers")  # the settings in `Run.attention`
FULL = "paper"  # the scale with which other scales are compared
ONLY = "full"  # the scale of a grid without the key `scales`

Settings = dict  # with dict[str, Any], jsonargparse would parse strings in it as YAML
Tasks = dict[str, Settings | None] | list[str]  # maps a task to its own axes; or names of tasks
Columns = dict[str, Settings] | list[str] | None  # maps a column to its runs' settings; or names of tasks


@dataclass(frozen=True)
class Scale:
    """A scale of a grid. `tasks` and `seeds` replace the grid's unless they are None. `GridFile.at` merges the axes."""

    about: str = ""
    tasks: Tasks | None = None
    axes: Settings | None = None
    seeds: list[int] | None = None


@dataclass(frozen=True)
class ClaimsEntry:
    """Pairs of attentions with a verdict at one scale, in a column or a pool of columns. `margin` is in points."""

    scale: str
    column: str
    pairs: list[tuple[str, str]]
    margin: float = 1.0


@dataclass(frozen=True)
class TableEntry:
    """A table of a grid's report; docs/guides/studies.md describes most keys."""

    metric: str
    over_training: bool = False
    margin: float = 1.0
    solved: list[str] | Settings = field(default_factory=list)
    columns: Columns = None  # None: the grid's columns
    pools: dict[str, list[str]] = field(default_factory=dict)
    claims: list[ClaimsEntry] | None = None  # the comparisons that have a verdict; None: all have one
    published: dict[str, dict[str, float | tuple[float, float]]] = field(default_factory=dict)
    relabelled: dict[str, str] = field(default_factory=dict)  # maps the paper's wrong columns to the right ones
    note: str = ""

    @property
    def published_pairs(self) -> dict[str, dict[str, tuple[float, float]]]:
        """By attention and column: (published mean, standard deviation over settings). An unknown deviation is NaN."""
        return {
            attention: {column: value if isinstance(value, tuple) else (value, nan) for column, value in cells.items()}
            for attention, cells in self.published.items()
        }


@dataclass(frozen=True)
class GridFile:
    """The content of a grid's YAML file; docs/guides/studies.md describes most keys."""

    tasks: Tasks
    axes: Settings
    seeds: list[int]
    scales: dict[str, Scale | None] = field(default_factory=lambda: {ONLY: None})
    title: str | None = None
    sections: list[str] = field(default_factory=lambda: ["tables", "curves", "notes"])
    columns: Columns = None  # None: one for each task
    pairs: list[tuple[str, str]] = field(default_factory=list)  # to compare, besides each attention with the first
    tables: list[TableEntry] | None = None  # see `kvt.reports.tables.tables_of`
    curves: list[list[str]] = field(default_factory=lambda: [["val/loss", "train/loss"]])
    best_of: str | None = None  # see `kvt.reports.report.best_of`
    against: dict[str, str] = field(default_factory=dict)
    set: Settings = field(default_factory=dict)  # the axes from --set, for all tasks and scales

    @classmethod
    def parse(cls, content: Any) -> "GridFile":
        """Return the grid from the parsed content of a YAML file; raise UserError if a key or a type is wrong."""
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--grid", type=cls)
        try:
            file: GridFile = parser.instantiate(parser.parse_object({"grid": content})).grid
            return file
        except ArgumentError as error:
            raise UserError(str(error).replace("grid.", "")) from error

    def at(self, scale: str) -> tuple[dict[str, Axes], list[int]]:
        """Return the axes of a scale by task, and its seeds.

        Of the places that may set an axis, the last counts: grid, task in the grid, scale, task at the scale, `set`.
        """
        changes, found = self.scales[scale] or Scale(), dict[str, Axes]()
        own = _as_mapping(self.tasks)
        tasks = dict.fromkeys(own) if changes.tasks is None else _as_mapping(changes.tasks)
        for task, axes in tasks.items():
            merged = self.axes | (own.get(task) or {}) | (changes.axes or {}) | (axes or {}) | self.set
            found[task] = {name: value if isinstance(value, list) else [value] for name, value in merged.items()}
        return found, self.seeds if changes.seeds is None else changes.seeds


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
        """Return the parsed settings that a value of an axis stands for; raise UserError if a setting is invalid."""
        known = self.section_of.keys()
        several = isinstance(value, dict) and (axis not in known or value.keys() <= known)
        settings = value if several else {axis: value}
        attn, arguments = parse_attention(str(settings.get("attn")))
        settings = {**settings, "attn": attn, "attn_kwargs": arguments} if arguments else settings
        if strange := [name for name in settings if name not in known]:
            raise unknown(f"setting of {self.name}:", strange[0], sorted(known))
        if "attn" in settings:
            find_attention(attn)  # raises UserError
        changed = self._base.changed(**settings)
        parts = {**changed.trainer, **changed.data["init_args"], **changed.model["init_args"]}
        return {name: {**parts, "optimizer": changed.optimizer}[name] for name in settings}

    def config(self, settings: Mapping[str, Any], seed: int) -> RunConfig:
        """Return the configuration of a run with a seed, and with settings that `value` has returned."""
        sections: dict[str, Any] = {"seed_everything": seed}
        for name, value in settings.items():
            section = self.section_of[name]
            (sections.setdefault(section, {}) if section else sections)[name] = value
        return self._base.merged(sections)


@dataclass(frozen=True)
class Run:
    task: str  # the name of the task's YAML file, which may differ from the setting `task` of the data
    settings: Mapping[str, Any]  # maps the settings of the axes to their parsed values
    seed: int
    config: RunConfig

    @cached_property
    def name(self) -> str:
        return self.config.name

    @cached_property
    def size(self) -> int:
        """dim × depth × length × max_epochs, each 1 if unknown. Run times of a task are roughly proportional to it."""
        return abs(prod(self.value(name) or 1 for name in ("dim", "depth", "length", "max_epochs")))

    @property
    def attention(self) -> str:
        """The attention with its arguments and shared layers: "kv", "kv, kv_heads 1", "qkv, share_layers 2"."""
        model = self.config.model["init_args"]
        shared = {"share_layers": number} if (number := model.get("share_layers", 1)) > 1 else {}
        details = [f"{name} {value}" for name, value in {**(model.get("attn_kwargs") or {}), **shared}.items()]
        return ", ".join([model["attn"], *details])

    @property
    def setting(self) -> dict[str, Any]:
        """The settings without `OF_ATTENTION`. Reports compare runs of a task with equal `setting` and seed."""
        return {name: value for name, value in self.settings.items() if name not in OF_ATTENTION}

    @property
    def values(self) -> dict[str, Any]:
        """The settings of the Trainer, data and model by short name, and "optimizer", "task" and "seed"."""
        model, data = (part["init_args"] for part in (self.config.model, self.config.data))
        others = {"optimizer": self.config.optimizer, "task": self.task, "seed": self.seed}
        return {**self.config.trainer, **data, **model, **others}

    def value(self, name: str) -> Any:
        """Return the value of a setting by its short name; None if the name is unknown."""
        return self.values.get(name)

    def folder(self, root: Path) -> Path:
        return root / self.task / self.config.imports["attn"].rpartition(".")[2] / self.name

    def best_checkpoint(self, root: Path) -> Path:
        return self.folder(root) / BEST

    def describe(self, names: Sequence[str]) -> str:
        """Return, for example, "sort qkv dim=32 heads=4 seed=0" for the names dim and heads."""
        return " ".join(filter(None, (self.task, self.attention, self.text(names), f"seed={self.seed}")))

    def text(self, names: Sequence[str]) -> str:
        return " ".join(f"{name}={in_short(value)}" for name, value in self.setting.items() if name in names)


@dataclass(frozen=True)
class Grid:
    """The runs of a grid at a scale. All runs with the first seed come first."""

    name: str
    scale: str
    file: GridFile
    runs: tuple[Run, ...]
    of_all_scales: tuple[Run, ...]  # the runs at all scales; tables may name their tasks, attentions and settings
    scale_diff: ScaleDiff

    @cached_property
    def varying(self) -> tuple[str, ...]:
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
    """Return the runs whose `values` include `wanted`; raise a UserError that names `where` if there are none."""
    for name, value in wanted.items():
        if not (having := [run for run in runs if name in run.values]):
            raise unknown(f"setting in {where}:", name, sorted(runs[0].values))
        if not (runs := [run for run in having if _comparable(run.value(name)) == _comparable(value)]):
            raise unknown(f"{name} in {where}:", value, dict.fromkeys(str(in_short(run.value(name))) for run in having))
    return runs


def _comparable(value: Any) -> float | str:
    try:
        return float(value)  # YAML reads 1e-3 as a string
    except (TypeError, ValueError):
        return str(in_short(value))


def deduplicate(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without repetitions; raise UserError if two tasks contain the same run."""
    found: dict[str, Run] = {}
    for run in runs:
        if (other := found.setdefault(run.name, run)).task != run.task:
            raise UserError(f"{other.task} and {run.task} contain the same run: remove it from one of them")
    return [*found.values()]


def varying_settings(runs: Iterable[Run]) -> tuple[str, ...]:
    """Return the names of the settings that differ among the runs, without `OF_ATTENTION`."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.setting.items():
            values.setdefault(name, set()).add(str(value))
    return tuple(name for name, found in values.items() if len(found) > 1)


def read_grid(named: str | Path, scale: str | None = None, changes: Sequence[str] = ()) -> Grid:
    """Return a grid at one of its scales.

    The grid lists a task by a path that ends in .yaml, relative to the grid's folder, or by a name. A name stands for
    ../configs/<name>.yaml relative to the grid's folder if that file exists, or else for kvt/configs/<name>.yaml.

    Args:
        named: path of the grid's YAML file, or name of a grid in kvt/grids.
        scale: name of a scale; default: laptop if the grid has it, else its first scale.
        changes: words such as norm=post, which replace or add axes of the grid.

    Raises:
        UserError: the file is missing or invalid, or the scale is unknown.
    """
    path = find_yaml(str(named), GRIDS)
    try:
        file = replace(GridFile.parse(parse_yaml(path.read_bytes(), "the grid")), set=parse_settings(changes, "--set"))
        if scale is None:
            scale = "laptop" if "laptop" in file.scales else next(iter(file.scales))
        if scale not in file.scales:
            raise unknown("--scale", scale, file.scales)
        at = {each: _runs_of(path, file, each) for each in file.scales}
        of_all_scales = tuple(run for runs in at.values() for run in runs)
        scale_diff = _scale_diff(at[scale], at[FULL]) if FULL in at else {}
        return Grid(",".join([path.stem, *changes]), scale, file, tuple(at[scale]), of_all_scales, scale_diff)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such grid; kvt has {', '.join(yaml_names(GRIDS))}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _runs_of(path: Path, file: GridFile, scale: str) -> list[Run]:
    """Return the runs of a grid at a scale: for each seed, the first settings of all tasks, then the second …"""
    axes, seeds = file.at(scale)
    tasks = [TaskFile(_find_task(path, name)) for name in axes]
    by_task = [[*_settings(task, values)] for task, values in zip(tasks, axes.values(), strict=True)]
    if not (seeds and by_task and all(by_task)):
        raise UserError("has no tasks, no seeds or an empty axis")
    in_turn = [one for group in zip_longest(*by_task) for one in zip(tasks, group, strict=True) if one[1] is not None]
    made = ((*one, seed) for seed in seeds for one in in_turn)
    return deduplicate([Run(task.name, settings, seed, task.config(settings, seed)) for task, settings, seed in made])


def _settings(task: TaskFile, axes: Axes) -> Iterator[dict[str, Any]]:
    for chosen in product(*([task.value(axis, value) for value in values] for axis, values in axes.items())):
        settings = {name: value for part in chosen for name, value in part.items()}
        if len(settings) < sum(map(len, chosen)):
            raise UserError(f"{task.name}: two axes have the same setting: {', '.join(axes)}")
        yield settings


def _find_task(grid: Path, task: str) -> Path:
    if task.endswith(".yaml"):
        return grid.parent / task
    beside = grid.absolute().parent.parent / "configs" / f"{task}.yaml"
    return beside if beside.is_file() else CONFIGS / f"{task}.yaml"


def _scale_diff(ours: Sequence[Run], full: Sequence[Run]) -> ScaleDiff:
    """Return what differs between a scale and the scale `FULL`, as {key: (values at this scale, values at `FULL`)}.

    A key is "<task>: <setting>", "study: seeds", "study: tasks", or "<task>: " + `ATTENTIONS`. The values of the last
    key are the attentions that only this scale has, and the attentions that only `FULL` has.
    """

    def values(name: str, task: str | None = None) -> tuple[list[Any], list[Any]]:
        mine, theirs = (_distinct(run.value(name) for run in runs if task in (None, run.task)) for runs in (ours, full))
        return mine, theirs

    compared = {"study: tasks": (tasks := values("task"))}
    for task in [task for task in tasks[0] if task in tasks[1]]:
        for name in dict.fromkeys(name for run in (*ours, *full) if run.task == task for name in run.setting):
            compared[f"{task}: {name}"] = values(name, task)
        mine, theirs = ([run.attention for run in runs if run.task == task] for runs in (ours, full))
        alone = [one for one in mine if one not in theirs], [one for one in theirs if one not in mine]
        compared[f"{task}: {ATTENTIONS}"] = _distinct(alone[0]), _distinct(alone[1])
    compared["study: seeds"] = values("seed")
    return {name: pair for name, pair in compared.items() if {*map(repr, pair[0])} != {*map(repr, pair[1])}}


def _distinct(values: Iterable[Any]) -> list[Any]:
    return [*{repr(value): value for value in values}.values()]
