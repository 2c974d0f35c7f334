"""Attention maps of a study, as in Figure 3 of the paper: of three attentions in five tasks on lists of digits."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from kvt.attention import row_entropy
from kvt.reports.names import label
from kvt.run.load_checkpoint import Checkpoint
from kvt.tasks import Task
from kvt.view.maps import FONT, Layer, Sheet, collect_maps, describe, draw_map, in_words


def draw_figure3(checkpoints: Mapping[tuple[str, str], Checkpoint]) -> Figure:
    """Draw a row for each task, a column for each attention: the mean over the heads of the layer of least entropy."""
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
