"""The runs in a folder: a list, the card of one, and a picture of their learning curves."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvt.reports.names import metric_of
from kvt.run.config import RunConfig, bare
from kvt.run.folder import best_checkpoint, is_in_use, last_checkpoint
from kvt.run.results import table
from kvt.run.settings import TRAINER
from kvt.study.outcomes import CONFIG, Outcome, State, read_config, read_outcome, short
from kvt.system.console import say
from kvt.system.errors import UserError, unknown
from kvt.system.files import CONFIGS, parse_yaml, yaml_line, yaml_names
from kvt.system.quoting import printable, shell_word
from kvt.tasks import Task
from kvt.tasks.base import known_classes

SHOWN = ("seen_in_training", "parameters", "seconds", "precision", "commit")
"""Fields of result.json that a card shows besides metrics and notes."""


@dataclass(frozen=True)
class StoredRun:
    """A run that was read from its folder.

    Attributes:
        path: the folder, as it is shown.
        folder: the same, absolute.
        outcome: what it has come to, without its history.
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
        return "stopped" if self.outcome.state == State.STARTED else str(self.outcome.state)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings by bare name, such as "dim"."""
        return {bare(name): value for name, value in self.config.flat.items()} if self.config else {}

    @property
    def score(self) -> tuple[str, float] | None:
        """The name and the value of its score, the metric by which its task chooses; None without a result.

        A task that is not kvt's is not imported: its score is that of one of kvt's, a loss only if it has no other.
        """
        result = self.outcome.result
        path = self.config.model["class_path"].removeprefix("kvt.tasks.") if self.config else ""
        tasks = {name: cls for name, cls in known_classes().items() if issubclass(cls, Task)}
        own = tasks[path].monitored().name if path in tasks else None
        chosen_by = {task.monitored().name for task in tasks.values()}
        monitors = sorted(chosen_by, key=lambda name: (name != own, name == "loss", name))
        names = [f"{stage}/{name}" for stage in ("test", "val") for name in monitors]
        names += [name for name in result if name.startswith(("test/", "val/"))]
        return next(((name, result[name]) for name in names if name in result), None)

    def measured(self, name: str) -> tuple[str, float] | None:
        """Return a metric by its name, such as "test/acc", and its value; None if its result has no such metric."""
        return (name, self.outcome.result[name]) if name in self.outcome.result else None

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
        """Return name, value and usual value of each setting that differs from the YAML of the task, if kvt has one."""
        ours = self.task in yaml_names(CONFIGS)
        usual = RunConfig.from_name(self.task).flat if ours else {"seed": 0, **TRAINER}
        for name, value in self.config.flat.items() if self.config else ():
            if value != usual.get(name):
                yield bare(name), value, usual.get(name)


def find_runs(root: Path) -> list[StoredRun]:
    """Return the runs below a folder, the latest last."""
    return sorted((read_run(path.parent) for path in root.rglob(CONFIG)), key=lambda run: run.when)


def read_run(folder: Path) -> StoredRun:
    """Read a run from its folder; one whose files are damaged says so in its outcome."""
    config = None
    try:
        config = read_config(folder)
        outcome = read_outcome(folder, history=False)
    except UserError as error:
        outcome = Outcome(State.DAMAGED, short(str(error)))
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


def rank(score: tuple[str, float] | None) -> float:
    """Return a score to sort by, the best last: negative if less of it is better."""
    if score is None:
        return -inf
    name, value = score
    return -value if metric_of(name).better == "less" else value


COLUMNS = {
    "run": lambda run: run.path,
    "score": lambda run: rank(run.score),
    "seconds": lambda run: run.seconds or 0,
    "when": lambda run: run.when,
    "size": lambda run: run.size,
}
"""The sort key of each column of the list."""


def list_of(runs: Sequence[StoredRun], sort: str) -> str:
    """Return the list as text, a line for each run, sorted by a column, or by a metric, which is then the score shown.

    Raises:
        UserError: there is no such column, and no run has such a metric.
    """
    metrics = dict.fromkeys(name for run in runs for name in run.outcome.result if "/" in name)
    if sort not in (*COLUMNS, *metrics):
        raise unknown("column or metric in --sort", sort, [*COLUMNS, *metrics])
    rows = [(*COLUMNS,)]
    for run in sorted(runs, key=COLUMNS.get(sort, lambda run: rank(run.measured(sort)))):
        shown = run.score if sort in COLUMNS else run.measured(sort)
        score = run.state if shown is None else f"{shown[0]} {shown[1]:.4f}"
        seconds = "" if run.seconds is None else f"{run.seconds:,.0f}"
        rows.append((printable(run.path), printable(score), seconds, f"{run.when:%m-%d %H:%M}", megabytes(run.size)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
    lines = ["  ".join(put(cell, width) for put, cell, width in zip(aligned, row, widths, strict=True)) for row in rows]
    return "\n".join(map(str.rstrip, lines))


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
            f"  {name:<{width}}  {yaml_line(value)}" + ("" if usual is None else f"  (usually {yaml_line(usual)})")
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
    """Return the commands that use a run."""
    path = Path(run.path)
    best = best_checkpoint(path)
    if run.outcome.state == State.STARTED and last_checkpoint(path).exists():
        yield f"kvt fit --resume {shell_word(run.path)}"
    if best.exists():
        own = run.config.own_flags if run.config else ""
        yield f"kvt maps --ckpt_path {shell_word(best)}{own}"
        yield f"kvt test --ckpt_path {shell_word(best)}{own}"
    if run.config:
        yield f"kvt fit --config {shell_word(path / CONFIG)} --seed {run.settings['seed'] + 1}"


def draw(runs: Sequence[StoredRun]) -> Figure:
    """Draw the score of each run in validation against steps, a panel for each metric.

    Raises:
        UserError: none of the runs has a curve.
    """
    curves: dict[str, dict[str, pd.DataFrame]] = {}
    for run in runs:
        outcome = read_outcome(run.folder)
        if outcome.state == State.DAMAGED:
            say(f"note: no curve of {run.path}: {outcome.message}")
        history = outcome.history
        metric = "" if run.score is None else f"val/{run.score[0].partition('/')[2]}"
        if history is not None and metric in history:
            curves.setdefault(metric, {})[run.path] = history[["step", metric]].dropna()
    if not curves:
        raise UserError("--plot: none of these runs has a curve")
    figure = Figure(figsize=(7.0, 3.2 * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), squeeze=False)[:, 0]
    for panel, (metric, of_runs) in zip(panels, curves.items(), strict=True):
        for path, curve in of_runs.items():
            panel.plot(curve["step"], curve[metric], label=path, marker="o" if len(curve) == 1 else None)
        panel.set(xlabel="optimiser step", ylabel=f"validation {metric_of(metric).label}")
        panel.legend(frameon=False, fontsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
