"""Lists the runs in a folder, describes a single run, and draws learning curves of runs."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from math import inf
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from kvt.reports.class_defaults import defaults_of
from kvt.run.config import RunConfig, bare, in_short, read_paths
from kvt.run.folder import best_checkpoint, is_in_use, last_checkpoint
from kvt.run.sections import BUILT, GIVEN, TRAINER, Sections
from kvt.study.outcomes import CONFIG, Outcome, State, read_outcome, stored_config
from kvt.system.console import say, table
from kvt.system.errors import UserError, unknown
from kvt.system.files import CONFIGS, parse_yaml, yaml_line, yaml_names
from kvt.system.quoting import one_line, printable, shell_word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("seen_in_training", "parameters", "seconds", "precision", "commit")
"""Fields of result.json that the description of a run shows besides metrics and notes."""
SCORES = ("bleu", "bpb", "bpc", "acc", "loss")
"""Metrics by priority. The score of a run is the first of these metrics that the run's result has."""
WIDTH = 80
"""The width of the list in characters if the output is not a terminal."""
MAX_VALUE = 50
"""The largest number of characters of a setting's value in the list. A tokenizer would fill pages without it."""
INDENT = "    "
MOST_LABELLED = 10
"""The largest number of curves for which the legend of a panel lists each run."""
SHORTEST = 24
"""The smallest number of characters of a shortened path."""


@dataclass(frozen=True)
class StoredRun:
    """A run that was read from its folder.

    Attributes:
        path: the path of the folder as it is printed.
        folder: the absolute path.
        outcome: state and result of the run; its history is not read.
    """

    path: str
    folder: Path
    outcome: Outcome

    @property
    def config(self) -> RunConfig | None:
        """The stored configuration; None if config.yaml is damaged."""
        return self.outcome.config

    @property
    def task(self) -> str:
        return str(self.outcome.result.get("task") or self.folder.parent.parent.name)

    @property
    def attn(self) -> str:
        return str(self.settings.get("attn", "?"))

    @property
    def state(self) -> str:
        """The state in one word, such as "stopped" for a run that has not ended and that no process is training."""
        return {State.STARTED: "stopped", State.LOCKED: "running"}.get(self.outcome.state, str(self.outcome.state))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings by bare name, such as "dim", with "ckpt_path", the checkpoint that the run started from."""
        if not self.config:
            return {}
        parent = {"ckpt_path": self.config.ckpt_path} if self.config.ckpt_path else {}
        return {bare(name): value for name, value in self.config.stated.items()} | parent

    @property
    def score(self) -> tuple[str, float] | None:
        """Name and value of the score, which is the first metric of `SCORES` in the result. None without a result."""
        result = self.outcome.result
        names = [f"{stage}/{name}" for stage in ("test", "val") for name in SCORES]
        names += [name for name in result if name.startswith(("test/", "val/"))]
        return next(((name, result[name]) for name in names if name in result), None)

    def measured(self, name: str) -> tuple[str, float] | None:
        """Return a metric's name, such as "test/acc", and its value; None if the result lacks the metric."""
        return (name, self.outcome.result[name]) if name in self.outcome.result else None

    def better(self, name: str) -> str | None:
        """Return "more" or "less", whichever is better for a metric; None if the task does not declare a direction."""
        if (declared := self.outcome.result.get("better")) is not None:
            bare = name.partition("/")[2]
            return declared.get(bare, declared.get(re.sub(r"\d+", "{}", bare)))  # "acc_{}_back" for acc_4_back
        from kvt.reports.names import metric_of  # imports torch; needed only for results of older versions of kvt

        return metric_of(name).better

    @property
    def seconds(self) -> float | None:
        return self.outcome.result.get("seconds")

    @cached_property
    def when(self) -> datetime:
        """The time at which the run ended. For a run that has not ended, the time at which the run began."""
        written = datetime.fromtimestamp((self.folder / CONFIG).stat().st_mtime, UTC)
        return (self.outcome.result.get("finished") or written).astimezone()

    @cached_property
    def size(self) -> int:
        """Size of the folder in bytes."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def differing(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value, default) of each setting whose value is not the default of the task's YAML or class."""
        if self.config:
            usual = _usual(self.task, self.config.model["class_path"], self.config.data["class_path"])
            for name, value in self.config.stated.items():
                if value != usual.get(name):
                    yield bare(name), value, usual.get(name)
            if self.config.ckpt_path:
                yield "ckpt_path", self.config.ckpt_path, None


@cache
def _packaged() -> Mapping[str, tuple[dict[str, str], Sections]]:
    """Return a dict that maps the name of each task's YAML file in kvt to the file's classes and settings."""
    return {name: read_paths([str(CONFIGS / f"{name}.yaml")], {}) for name in yaml_names(CONFIGS)}


@cache
def _usual(task: str, model: str, data: str) -> Mapping[str, Any]:
    """Return the default settings of a task, by the names of `RunConfig.flat`, without importing its classes.

    The settings are the defaults of kvt's classes and the values of the task's YAML file. Only YAML files with the
    classes `model` and `data` are considered. The chosen file has the task's name, or the longest name with which the
    task's name begins. If no file has such a name, a file is chosen only if it is the only one considered.
    """
    paths = dict(zip(BUILT, (model, data), strict=True))
    defaults = {
        f"{section}.{name}": value
        for section, path in paths.items()
        if path.startswith("kvt.")
        for name, value in defaults_of(path.rpartition(".")[2]).items()
        if name not in GIVEN
    }
    same = {name: sections for name, (classes, sections) in _packaged().items() if classes == paths}
    named = [name for name in same if f"{task}_".startswith(f"{name}_")] or ([*same] if len(same) == 1 else [])
    stated = RunConfig.of(paths, same[max(named, key=len)]).stated if named else {"seed": 0, **TRAINER}
    return {**defaults, **stated}


def find_runs(root: Path) -> list[StoredRun]:
    """Return the runs in a folder and its subfolders, sorted by time."""
    return sorted((read_run(path.parent) for path in root.rglob(CONFIG)), key=lambda run: run.when)


def read_run(folder: Path) -> StoredRun:
    """Read a run from its folder. If a file is damaged, the message of the outcome names the damage."""
    config = None
    try:
        config = stored_config(folder)
        outcome = read_outcome(folder, history=False)
    except UserError as error:
        outcome = Outcome(State.DAMAGED, one_line(str(error)))
    if outcome.state == State.STARTED and is_in_use(folder):
        outcome = outcome._replace(state=State.LOCKED)
    return StoredRun(str(folder), folder.resolve(), outcome._replace(config=config))


def select(runs: Iterable[StoredRun], task: str | None, attn: str | None, where: Sequence[str]) -> list[StoredRun]:
    """Return the runs with this task, this attention and these settings, such as "dim=64".

    Raises:
        UserError: an entry of `where` has no "=", or no run has the setting.
    """
    found = [run for run in runs if task in (None, run.task) and attn in (None, run.attn)]
    for condition in where:
        name, equals, text = condition.partition("=")
        if not equals:
            raise UserError(f"--where {condition}: expected a setting and its value, such as dim=64")
        if found and not any(name in run.settings for run in found):
            raise unknown("setting of these runs in --where:", name, sorted({n for run in found for n in run.settings}))
        wanted: list[Any] = [text, parse_yaml(text, f"--where {condition}")]
        with suppress(ValueError):
            wanted.append(float(text))  # YAML reads 1e-3 as a string
        found = [run for run in found if run.settings.get(name) in wanted]
    return found


def rank(run: StoredRun, score: tuple[str, float] | None) -> float:
    """Return the sort key of a score: the score, negated if less is better. The best run is therefore last."""
    if score is None:
        return -inf
    name, value = score
    return -value if run.better(name) == "less" else value


COLUMNS = {
    "run": lambda run: run.path,
    "score": lambda run: rank(run, run.score),
    "seconds": lambda run: run.seconds or 0,
    "when": lambda run: run.when,
    "size": lambda run: run.size,
}
"""The sort key of each column of the list."""


def list_of(runs: Sequence[StoredRun], sort: str, width: float = inf) -> str:
    """Return the list as text with a line for each run, sorted by a column or by a metric.

    If `sort` is a metric, the list shows it as the score. Below each run stand the settings that distinguish the run
    from other runs of its task. If lines are longer than `width`, the last columns are left out. If lines are still too
    long, paths are shortened in the middle. The columns run and score and the sorted column are never left out.

    Raises:
        UserError: `sort` is neither a column nor a metric of a run.
    """
    metrics = dict.fromkeys(name for run in runs for name in run.outcome.result if "/" in name)
    if sort not in (*COLUMNS, *metrics):
        raise unknown("column or metric in --sort", sort, [*COLUMNS, *metrics])
    rows, own = [(*COLUMNS,)], _telling(runs)
    below = [""]
    for run in sorted(runs, key=COLUMNS.get(sort, lambda run: rank(run, run.measured(sort)))):
        shown = run.score if sort in COLUMNS else run.measured(sort)
        score = run.state if shown is None else f"{shown[0]} {shown[1]:.4f}"
        seconds = "" if run.seconds is None else f"{run.seconds:,.0f}"
        rows.append((printable(run.path), printable(score), seconds, f"{run.when:%m-%d %H:%M}", megabytes(run.size)))
        below.append("".join(f"\n{line}" for line in own[run.folder]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
    fitting = [*range(len(COLUMNS))]
    for n in fitting[:1:-1]:  # from the last column to the third column
        if sum(widths[n] + 2 for n in fitting) - 2 > width and rows[0][n] != sort:
            fitting.remove(n)
    widths[0] = int(min(widths[0], max(width - sum(widths[n] + 2 for n in fitting[1:]), SHORTEST)))
    rows = [(_shortened(row[0], widths[0]), *row[1:]) for row in rows]
    lines = ["  ".join(aligned[n](row[n], widths[n]) for n in fitting).rstrip() for row in rows]
    return "\n".join(map("".join, zip(lines, below, strict=True)))


def _shortened(path: str, width: int) -> str:
    """Return a path shortened to `width` characters. An ellipsis replaces the middle of the path."""
    end = (width - 1) * 2 // 3
    return path if len(path) <= width else f"{path[: width - 1 - end]}…{path[len(path) - end :]}"


def _telling(runs: Sequence[StoredRun]) -> dict[Path, list[str]]:
    """Return a dict that maps a run's folder to lines of settings that distinguish the run from others of its task.

    Values that all runs of the task share and values that are part of the run's path are left out.
    """
    by_task: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    lines = {}
    for group in by_task.values():
        own = [{name: value for name, value, _ in run.differing()} for run in group]
        names = {name for settings in own for name in settings}
        telling = [n for n in sorted(names) if any(s.get(n, ...) != own[0].get(n, ...) for s in own)]
        for run, settings in zip(group, own, strict=True):
            parts = run.folder.parts  # for a user's attention, the path has the class name without the module
            there = [n for n in telling if n in settings and str(settings[n]).rpartition(".")[2] not in parts]
            text = printable(", ".join(f"{name} {_brief(settings[name])}" for name in there))
            lines[run.folder] = wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return lines


def _brief(value: Any) -> str:
    """Return a setting's value in one line. Objects such as `EMAWeightAveraging(decay=0.99)` are never truncated."""
    shown = in_short(value)
    if shown is not value:
        return str(shown)
    text = yaml_line(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def card(run: StoredRun) -> str:
    """Describe a run: its state, the settings that are not defaults, the result, and commands that use the run."""
    outcome = run.outcome
    state = f"{run.state}: {outcome.message}" if outcome.message else run.state
    head = f"{run.path}: {run.task}, {run.attn}, {state}, {run.when:%Y-%m-%d %H:%M}, {megabytes(run.size)}"
    parts = [printable(head)]
    if settings := [*run.differing()]:
        width = max(len(name) for name, *_ in settings)
        lines = [
            f"  {name:<{width}}  {_brief(value)}" + ("" if usual is None else f"  (usually {_brief(usual)})")
            for name, value, usual in settings
        ]
        parts.append("\n".join(["settings that differ from the defaults:", *map(printable, lines)]))
    if outcome.result:
        metrics = {name: value for name, value in outcome.result.items() if "/" in name}
        others = {name: outcome.result[name] for name in SHOWN if outcome.result.get(name) is not None}
        parts.append(table({**metrics, **others, **outcome.result.get("notes", {})}))
    if commands := [*_commands(run)]:
        parts.append("\n".join(commands))
    return "\n\n".join(parts)


def _commands(run: StoredRun) -> Iterator[str]:
    """Yield commands that use a run. A run that started from a checkpoint has no command to repeat the run."""
    path = Path(run.path)
    best = best_checkpoint(path)
    if run.outcome.state == State.STARTED and last_checkpoint(path).exists():
        yield f"kvt fit --resume {shell_word(run.path)}"
    if best.exists():
        own = run.config.own_flags if run.config else ""
        if run.config and run.config.model["class_path"].startswith("kvt."):  # a user's model may have no maps
            yield f"kvt maps --ckpt_path {shell_word(best)}{own}"
        yield f"kvt {'test' if _has_test(run) else 'validate'} --ckpt_path {shell_word(best)}{own}"
    if run.config and not run.config.ckpt_path:
        yield f"kvt fit --config {shell_word(path / CONFIG)} --seed {run.settings['seed'] + 1}"


def _has_test(run: StoredRun) -> bool:
    """Return True if the run's data have a test split. Return False if they have no test split or if it is unknown."""
    seen, result = run.outcome.result.get("seen_in_training"), run.outcome.result
    return any(name.startswith("test/") for name in result) or (isinstance(seen, Mapping) and "test" in seen)


def draw(runs: Sequence[StoredRun]) -> "Figure":
    """Draw the validation score of each run against steps, with a panel for each task and metric.

    The legend of a panel lists up to `MOST_LABELLED` runs. For more runs, the legend lists their attentions.

    Raises:
        UserError: none of the runs has a curve.
    """
    from matplotlib.figure import Figure

    from kvt.reports.figures import line_styles
    from kvt.reports.names import metric_of

    attentions = {run.path: run.attn for run in runs}
    curves: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        outcome = read_outcome(run.folder)
        if outcome.state == State.DAMAGED:
            say(f"note: no curve of {run.path}: {outcome.message}")
        history = outcome.history
        metric = "" if run.score is None else f"val/{run.score[0].partition('/')[2]}"
        if history is not None and metric in history:
            curves.setdefault((run.task, metric), {})[run.path] = history[["step", metric]].dropna()
    if not curves:
        raise UserError("--plot: none of these runs has a curve")
    listed = sum(min(len(of_runs), MOST_LABELLED) for of_runs in curves.values())
    figure = Figure(figsize=(7.0, 3.2 * len(curves) + 0.17 * listed), layout="constrained")
    panels = figure.subplots(len(curves), squeeze=False)[:, 0]
    for panel, ((task, metric), of_runs) in zip(panels, curves.items(), strict=True):
        styles = line_styles(attentions[path] for path in of_runs) if len(of_runs) > MOST_LABELLED else {}
        for path, curve in of_runs.items():
            drawn = styles[attentions[path]].line | {"linewidth": 0.8} if styles else {"label": path}
            panel.plot(curve["step"], curve[metric], **drawn, marker="o" if len(curve) == 1 else None)
        for style in styles.values():
            panel.plot([], [], **style.line, label=style.label)
        panel.set(xlabel="optimiser step", ylabel=f"validation {metric_of(metric).label}")
        panel.set_title(printable(task), fontsize=9, parse_math=False)
        below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.15), "ncols": 4 if styles else 1}
        panel.legend(frameon=False, fontsize=7, **below)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
