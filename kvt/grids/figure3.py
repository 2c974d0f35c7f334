"""Report section of the grid `figure3`: attention maps as in the paper's Figure 3, for each task and attention."""

from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from kvt.attention import row_entropy
from kvt.reports.report import Results, Section
from kvt.reports.tables import label
from kvt.run.load_checkpoint import Checkpoint
from kvt.study.grid import Grid, Run
from kvt.tasks import Task
from kvt.view.maps import FONT, Layer, Sheet, collect_maps, describe, draw_map, in_words


def maps(grid: Grid, results: Results) -> Iterator[Section]:
    """Once all runs have finished, yield maps of the first run of each task and attention, if each has best.ckpt."""
    runs: dict[tuple[str, str], Run] = {}
    for run in grid.runs:
        runs.setdefault((run.task, run.attention), run)
    if results.root is None or len(results.finished) < len(results.runs):
        return
    paths = {cell: run.best_checkpoint(results.root) for cell, run in runs.items()}
    if all(path.is_file() for path in paths.values()):
        checkpoints = {cell: Checkpoint(paths[cell], run.config.imports) for cell, run in runs.items()}
        yield Section(figures={"maps": draw_maps(checkpoints)})


def draw_maps(checkpoints: Mapping[tuple[str, str], Checkpoint]) -> Figure:
    """For each task (row) and attention (column), draw one example's map: the layer of least entropy, mean of heads."""
    chosen = {cell: _least_entropy(checkpoint) for cell, checkpoint in checkpoints.items()}
    title = "Where each model looks: the layer of least entropy, mean of its heads"
    tasks, attentions = ([*dict.fromkeys(names)] for names in zip(*chosen, strict=True))
    sheet = Sheet(len(tasks), len(attentions), list(chosen.values()), title)
    for (task, attention), layer in chosen.items():
        row, column = tasks.index(task), attentions.index(attention)
        axes, numbers = sheet.panel(row, column), describe(layer.weights, layer.scores)
        draw_map(axes, layer.weights.mean(0), layer.labels, sheet.scale)
        axes.set_title(f"{label(attention)}, {in_words(layer.name)}\n{numbers}", fontsize=FONT, pad=2)
        if column == 0:
            axes.set_ylabel(task, fontsize=FONT + 2)
    return sheet.figure


def _least_entropy(checkpoint: Checkpoint) -> Layer:
    layers = collect_maps(checkpoint.load_task(Task), checkpoint.load_data().example(0))  # type: ignore[type-abstract]
    return min(layers, key=lambda layer: row_entropy(layer.weights).mean())
