"""Figure 3 of the paper: where the three attentions look in the five tasks on lists of digits."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvt.attention import row_entropy
from kvt.system.errors import UserError
from kvt.tasks import DigitLists, ListTask
from kvt.tasks.synthetic import TASKS
from kvt.training.attention_plots import FONT, Layer, Sheet, describe, draw_map, look
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import Checkpoint, load_data, load_task
from kvt.training.run_dir import number_of_run

ATTENTIONS = {"qkv": "QKV", "kv": "KV", "kv+pos": "KV+Pos"}
"""The columns and their headings; the rows are the tasks in their order."""
TRAINER = {"max_epochs": 2, "gradient_clip_val": 5}
"""Of the protocol, as in the configurations of the tasks."""
WHOLE = {
    "max_steps": -1,
    "max_time": None,
    "limit_train_batches": None,
    "limit_val_batches": None,
    "overfit_batches": 0.0,
}
"""How the Trainer's settings stand where nothing is cut short."""

Settings = Mapping[str, Any]


def train_figure3(logs: Path, model: Settings = {}, data: Settings = {}) -> dict[tuple[str, str], Path]:  # noqa: B006
    """A finished run of each task with each attention: the newest with these settings, or else a new one.

    Args:
        logs: lightning_logs of the working directory, where runs land.
        model: settings of `ListTask`; default: the paper's.
        data: settings of `DigitLists`; default: the paper's, lists of 16 digits.

    Returns:
        The best checkpoint by (task, attention).
    """
    checkpoints = {}
    for task in TASKS:
        for attn in ATTENTIONS:
            ours = DigitLists(task=task, **data)
            finished = _finished(logs / task / attn, ListTask(ours.spec, attn, **model), ours)
            checkpoints[task, attn] = next(finished, None) or _train(task, attn, model, data)
            print(f"{task}, {attn}: {checkpoints[task, attn]}", flush=True)
    return checkpoints


def draw_figure3(checkpoints: Mapping[tuple[str, str], Path], example: int = 0) -> Figure:
    """A row a task, a column an attention: of each model the layer whose rows have the least entropy, its heads' mean.

    The numbers above a map are means over those heads, too.

    Args:
        checkpoints: by (task, attention), as `train_figure3` returns them.
        example: which list of the validation split.
    """
    chosen = {cell: _most_decided(path, example) for cell, path in checkpoints.items()}
    title = "Where each model looks: the layer of least entropy, mean of its heads"
    sheet = Sheet(len(TASKS), len(ATTENTIONS), list(chosen.values()), title)
    for row, task in enumerate(TASKS):
        for column, (attn, heading) in enumerate(ATTENTIONS.items()):
            layer = chosen[task, attn]
            axes = sheet.panel(row, column)
            draw_map(axes, layer.weights.mean(0), layer.labels)
            numbers = describe(layer.weights, layer.scores)
            axes.set_title(f"{heading}, {layer.name}\n{numbers}", fontsize=FONT, pad=2)
            if column == 0:
                axes.set_ylabel(task, fontsize=FONT + 2)
    return sheet.figure


def _most_decided(checkpoint: Path, example: int) -> Layer:
    layers = look(load_task(checkpoint, ListTask), load_data(checkpoint).example(example))
    return min(layers, key=lambda layer: row_entropy(layer.weights).mean())


def _finished(runs: Path, task: ListTask, data: DigitLists) -> Iterator[Path]:
    """Best checkpoints of the finished, whole runs with these settings, the newest first."""
    numbered = {number: run for run in runs.glob("version_*") if (number := number_of_run(run)) is not None}
    for _, run in sorted(numbered.items(), reverse=True):
        best = run / "checkpoints" / "best.ckpt"
        if (run / "result.json").is_file() and best.is_file():
            with suppress(UserError):  # of other settings
                (checkpoint := Checkpoint(best)).require_same_run(task, data)
                if (TRAINER | WHOLE).items() <= checkpoint.trainer_settings.items():
                    yield best


def _train(task: str, attn: str, model: Settings, data: Settings) -> Path:
    settings = {
        **{f"model.{name}": value for name, value in {"attn": attn, **model}.items()},
        **{f"data.{name}": value for name, value in {"task": task, **data}.items()},
        **{f"trainer.{name}": value for name, value in {"devices": 1, **TRAINER}.items()},
    }
    words = [f"--{name}={value}" for name, value in settings.items()]
    cli = CLI(["fit", "--model=ListTask", "--data=DigitLists", *words], test=True)
    assert cli.best is not None
    return Path(cli.best.best_model_path)
