"""The runs in a folder: a list, the card of one, and a picture of their learning curves."""

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

from kvt.run.config import RunConfig, bare, in_short, read_paths
from kvt.run.folder import best_checkpoint, is_in_use, last_checkpoint
from kvt.run.sections import BUILT, GIVEN, TRAINER, Sections
from kvt.study.outcomes import CONFIG, Outcome, State, read_outcome, stored_config
from kvt.system.console import say, table
from kvt.system.errors import UserError, unknown
from kvt.system.files import CONFIGS, parse_yaml, yaml_line, yaml_names
from kvt.system.quoting import one_line, printable, shell_word
from kvt.system.signatures import defaults_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("seen_in_training", "parameters", "seconds", "precision", "commit")
"""Fields of result.json that a card shows besides metrics and notes."""
SCORES = ("bleu", "bpb", "bpc", "acc", "loss")
"""The metrics that may be a run's score, by priority: its score is the first that its result has."""
WIDTH = 80
"""The width of the list, in characters, where no terminal has another."""
MAX_VALUE = 50
"""How many characters of a setting's value are shown: a tokenizer's would fill pages."""
INDENT = "    "
MOST_LABELLED = 10
"""The number of curves in a panel up to which its legend lists each of them."""
SHORTEST = 24
"""How many characters of a path are shown at least."""


@dataclass(frozen=True)
class StoredRun:
    """A run that was read from its folder.

    Attributes:
        path: the folder, as it is shown.
        folder: the same, absolute.
        outcome: state and result of the run, without its history.
    """

    path: str
    folder: Path
    outcome: Outcome

    @property
    def config(self) -> RunConfig | None:
        """Its configuration, as it was stored; None if that is damaged."""
        return self.outcome.config

    @property
    def task(self) -> str:
        return str(self.outcome.result.get("task") or self.folder.parent.parent.name)

    @property
    def attn(self) -> str:
        return str(self.settings.get("attn", "?"))

    @property
    def state(self) -> str:
        """Its state in a word; one that has not finished, and that no process is making, has stopped."""
        return {State.STARTED: "stopped", State.LOCKED: "running"}.get(self.outcome.state, str(self.outcome.state))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings by bare name, such as "dim", and the checkpoint that the run continued from, "ckpt_path"."""
        if not self.config:
            return {}
        parent = {"ckpt_path": self.config.ckpt_path} if self.config.ckpt_path else {}
        return {bare(name): value for name, value in self.config.stated.items()} | parent

    @property
    def score(self) -> tuple[str, float] | None:
        """The name and the value of its score, the first of `SCORES` that it has; None without a result."""
        result = self.outcome.result
        names = [f"{stage}/{name}" for stage in ("test", "val") for name in SCORES]
        names += [name for name in result if name.startswith(("test/", "val/"))]
        return next(((name, result[name]) for name in names if name in result), None)

    def measured(self, name: str) -> tuple[str, float] | None:
        """Return a metric by its name, such as "test/acc", and its value; None if its result has no such metric."""
        return (name, self.outcome.result[name]) if name in self.outcome.result else None

    def better(self, name: str) -> str | None:
        """Return whether "more" or "less" of a metric is better, as its task says; None if it does not."""
        if (declared := self.outcome.result.get("better")) is not None:
            bare = name.partition("/")[2]
            return declared.get(bare, declared.get(re.sub(r"\d+", "{}", bare)))  # of a bin
        from kvt.reports.names import metric_of  # imports torch; for results of older versions

        return metric_of(name).better

    @property
    def seconds(self) -> float | None:
        return self.outcome.result.get("seconds")

    @cached_property
    def when(self) -> datetime:
        """When it ended, or if it has not, when it began."""
        written = datetime.fromtimestamp((self.folder / CONFIG).stat().st_mtime, UTC)
        return (self.outcome.result.get("finished") or written).astimezone()

    @cached_property
    def size(self) -> int:
        """Size of the folder in bytes."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def differing(self) -> Iterator[tuple[str, Any, Any]]:
        """Return name, value and usual value of each setting that differs from those of its task's YAML and classes."""
        if self.config:
            usual = _usual(self.task, self.config.model["class_path"], self.config.data["class_path"])
            for name, value in self.config.stated.items():
                if value != usual.get(name):
                    yield bare(name), value, usual.get(name)
            if self.config.ckpt_path:
                yield "ckpt_path", self.config.ckpt_path, None


@cache
def _packaged() -> Mapping[str, tuple[dict[str, str], Sections]]:
    """Return the classes and the settings in each YAML of kvt, by its name."""
    return {name: read_paths([str(CONFIGS / f"{name}.yaml")], {}) for name in yaml_names(CONFIGS)}


@cache
def _usual(task: str, model: str, data: str) -> Mapping[str, Any]:
    """Return the settings of a task of these classes, by the names of `RunConfig.flat`; nothing is imported.

    Those of its YAML, that of its name, with which a name of the user's may go on, or the only one of its classes; and
    the defaults of kvt's classes.
    """
    paths = dict(zip(BUILT, (model, data), strict=True))
    defaults = {
        f"{section}.{name}": value
        for section, path in paths.items()
        if path.startswith("kvt.")
        for name, value in defaults_of("kvt", "tasks", path.rpartition(".")[2]).items()
        if name not in GIVEN
    }
    same = {name: sections for name, (classes, sections) in _packaged().items() if classes == paths}
    named = [name for name in same if f"{task}_".startswith(f"{name}_")] or ([*same] if len(same) == 1 else [])
    stated = RunConfig.of(paths, same[max(named, key=len)]).stated if named else {"seed": 0, **TRAINER}
    return {**defaults, **stated}


def find_runs(root: Path) -> list[StoredRun]:
    """Return the runs below a folder, the latest last."""
    return sorted((read_run(path.parent) for path in root.rglob(CONFIG)), key=lambda run: run.when)


def read_run(folder: Path) -> StoredRun:
    """Read a run from its folder; one whose files are damaged says so in its outcome."""
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
    """Return the runs of a task, of an attention, and with settings, each as text: "dim=64".

    Raises:
        UserError: one is no setting, or no run has it.
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
            wanted.append(float(text))  # 1e-3 is a text to YAML
        found = [run for run in found if run.settings.get(name) in wanted]
    return found


def rank(run: StoredRun, score: tuple[str, float] | None) -> float:
    """Return a run's score to sort by, the best last: negative if less of it is better."""
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
    """Return the list as text, a line for each run, sorted by a column, or by a metric, which is then the score shown.

    Below it are settings unlike its task's that tell the run from others of it. Where a line would be longer than
    `width`, the last columns are left out, then paths are shortened in the middle. Run, score and the column by which
    the list is sorted stay.

    Raises:
        UserError: there is no such column, and no run has such a metric.
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
    for n in fitting[:1:-1]:  # from the last to the third
        if sum(widths[n] + 2 for n in fitting) - 2 > width and rows[0][n] != sort:
            fitting.remove(n)
    widths[0] = int(min(widths[0], max(width - sum(widths[n] + 2 for n in fitting[1:]), SHORTEST)))
    rows = [(_shortened(row[0], widths[0]), *row[1:]) for row in rows]
    lines = ["  ".join(aligned[n](row[n], widths[n]) for n in fitting).rstrip() for row in rows]
    return "\n".join(map("".join, zip(lines, below, strict=True)))


def _shortened(path: str, width: int) -> str:
    """Return a path of at most `width` characters, without its middle."""
    end = (width - 1) * 2 // 3
    return path if len(path) <= width else f"{path[: width - 1 - end]}…{path[len(path) - end :]}"


def _telling(runs: Sequence[StoredRun]) -> dict[Path, list[str]]:
    """Return for each run, by folder, lines with the settings that tell it from others of its task.

    Settings that all runs of the task have, or that the path has, are left out.
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
            parts = run.folder.parts  # which have the last part alone of an attention of one's own
            there = [n for n in telling if n in settings and str(settings[n]).rpartition(".")[2] not in parts]
            text = printable(", ".join(f"{name} {_brief(settings[name])}" for name in there))
            lines[run.folder] = wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return lines


def _brief(value: Any) -> str:
    """Return a setting's value in a line: classes whole, such as `EMAWeightAveraging(decay=0.99)`, other values cut."""
    shown = in_short(value)
    text = yaml_line(value) if shown is value else str(shown)
    return text if shown is not value or len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def card(run: StoredRun) -> str:
    """Return a run's card as text: state, settings that differ from its task's, result, commands that use it."""
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
        parts.append("\n".join(["settings of its own:", *map(printable, lines)]))
    if outcome.result:
        metrics = {name: value for name, value in outcome.result.items() if "/" in name}
        others = {name: outcome.result[name] for name in SHOWN if outcome.result.get(name) is not None}
        parts.append(table({**metrics, **others, **outcome.result.get("notes", {})}))
    if commands := [*_commands(run)]:
        parts.append("\n".join(commands))
    return "\n\n".join(parts)


def _commands(run: StoredRun) -> Iterator[str]:
    """Return the commands that use a run. One that continued another run has no other seed than that."""
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
    """Return whether the run's data are known to have a test split."""
    seen, result = run.outcome.result.get("seen_in_training"), run.outcome.result
    return any(name.startswith("test/") for name in result) or (isinstance(seen, Mapping) and "test" in seen)


def draw(runs: Sequence[StoredRun]) -> "Figure":
    """Draw the score of each run in validation against steps, a panel for each task and metric.

    Up to `MOST_LABELLED` runs of a panel are listed below it. If there are more, the panel lists their attentions.

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
