"""Figure 3 of the paper: attention maps of three attentions in the five tasks on lists of digits."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from kvt.attention import row_entropy
from kvt.tasks import ListTask
from kvt.training.attention_plots import FONT, Layer, Sheet, collect_maps, describe, draw_map
from kvt.training.load_checkpoint import Checkpoint

TASKS = ("reverse", "sort", "swap", "sub", "copy")  # rows
ATTENTIONS = {"qkv": "QKV", "kv": "KV", "kv+pos": "KV+Pos"}  # columns and their headings


def draw_figure3(checkpoints: Mapping[tuple[str, str], Path]) -> Figure:
    """Draw a row for each task, a column for each attention: the mean over the heads of the layer of least entropy."""
    chosen = {cell: _least_entropy(path) for cell, path in checkpoints.items()}
    title = "Where each model looks: the layer of least entropy, mean of its heads"
    sheet = Sheet(len(TASKS), len(ATTENTIONS), list(chosen.values()), title)
    for row, task in enumerate(TASKS):
        for column, (attn, heading) in enumerate(ATTENTIONS.items()):
            layer = chosen[task, attn]
            axes, numbers = sheet.panel(row, column), describe(layer.weights, layer.scores)
            draw_map(axes, layer.weights.mean(0), layer.labels)
            axes.set_title(f"{heading}, {layer.name}\n{numbers}", fontsize=FONT, pad=2)
            if column == 0:
                axes.set_ylabel(task, fontsize=FONT + 2)
    return sheet.figure


def _least_entropy(checkpoint: Path) -> Layer:
    trained = Checkpoint(checkpoint)
    layers = collect_maps(trained.load_task(ListTask), trained.load_data().example(0))
    return min(layers, key=lambda layer: row_entropy(layer.weights).mean())
