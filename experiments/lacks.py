"""Prints the numbers for docs/lacks.md: attention weights and key norms of the language models of the grid "lacks".

    python experiments/lacks.py FOLDER [SCALE]

FOLDER holds runs of `kvt study run lacks`. SCALE is laptop by default. The table has a row for each layer of each run
with a result.json. Weights are averaged over the middle half of validation windows, where tokens have many neighbours
on both sides.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from kvt.attention import Attention, record_maps
from kvt.markdown import markdown_table
from kvt.reports.tables import label
from kvt.run.load_checkpoint import Checkpoint
from kvt.study.grid import read_grid
from kvt.tasks import LanguageModelTask

LEANS = 1.5  # a head leans to a side if the weight on it is more than this many times the weight on the other side
WINDOWS = 256


def measured(task: LanguageModelTask, batches: Iterable[tuple[Tensor, ...]]) -> list[list[str]]:
    """Return a row of cells for each layer: its number, attention weights (`_looks`), squared key norms (`_keys`)."""
    mask = len(task.vocabulary.pieces) - 1  # id of the mask token, if the model has one
    layers = [module for module in task.modules() if isinstance(module, Attention)]
    lengths: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_pre_hook(
            lambda own, args, found=found: found.append(own.project(args[0])[1].square().sum(-1))  # (B, heads, N)
        )
        for layer, found in zip(layers, lengths, strict=True)
    ]
    with torch.no_grad(), record_maps(task.model) as maps:
        tokens = []
        for inputs, *_ in batches:
            task(inputs)
            tokens.append(inputs)
    for hook in hooks:
        hook.remove()
    inputs = torch.cat(tokens)  # (B, N)
    is_hidden = inputs == mask if not task.model.causal else torch.zeros_like(inputs, dtype=torch.bool)
    rows = []
    for number in range(len(layers)):
        weights = torch.cat([found.weights for found in maps[number :: len(layers)]])  # (B, heads, N, N)
        keys = torch.cat(lengths[number]).transpose(0, 1)  # (heads, B, N)
        rows.append([str(number + 1), *_looks(weights, is_hidden), *_keys(keys, inputs, is_hidden)])
    return rows


def _looks(weights: Tensor, is_hidden: Tensor) -> list[str]:
    """Return the cells "self, real" to "before" of `TITLES`: weights; "left, right" and "before" count heads."""
    length = weights.shape[-1]
    middle = torch.zeros_like(is_hidden)
    middle[:, length // 4 : 3 * length // 4] = True
    left, right = (weights.tril(-1).sum(-1), weights.triu(1).sum(-1))  # (B, heads, N)
    own = weights.diagonal(dim1=-2, dim2=-1)
    cells = []
    for places in (middle & ~is_hidden, middle & is_hidden):
        if not places.any():
            cells += ["–", "–", "–"]
            continue
        of_heads = [part.transpose(0, 1)[:, places].mean(-1) for part in (own, left, right)]
        more_left = (of_heads[1] > LEANS * of_heads[2]).sum().item()
        more_right = (of_heads[2] > LEANS * of_heads[1]).sum().item()
        cells += [f"{of_heads[0].mean():.2f}", f"{of_heads[0].max():.2f}", f"{more_left}, {more_right}"]
    offsets = range(-length // 4, length // 4 + 1)
    at = torch.stack(
        [weights.diagonal(offset, -2, -1)[..., length // 4 : length // 2].mean((0, -1)) for offset in offsets]
    )
    at[len(offsets) // 2] = -1  # leaves out the token itself
    before = (at.argmax(0) == len(offsets) // 2 - 1).sum().item()
    return [*cells, str(before)]


def _keys(keys: Tensor, inputs: Tensor, is_hidden: Tensor) -> list[str]:
    """Return the cells "keys, end / start", a range over heads of a ratio, and "mask shorter", a number of heads."""
    quarter = inputs.shape[1] // 4
    along = keys[..., -quarter:].mean((1, 2)) / keys[..., :quarter].mean((1, 2))  # (heads)
    cells = [f"{along.min():.2f} to {along.max():.2f}"]
    if not is_hidden.any():
        return [*cells, "–"]
    symbols = inputs[~is_hidden].bincount().topk(10).indices
    frequent = torch.stack([keys[:, inputs == symbol].mean(-1) for symbol in symbols.tolist()]).mean(0)
    return [*cells, str((keys[:, is_hidden].mean(-1) < frequent).sum().item())]


TITLES = [
    *("objective", "attention", "seed", "layer", "self, real", "most", "left, right"),
    *("self, hidden", "most", "left, right", "before", "keys, end / start", "mask shorter"),
]


def main(folder: str, scale: str = "laptop") -> None:
    lines = [TITLES]
    for run in read_grid("lacks", scale).runs:
        if not (run.folder(Path(folder)) / "result.json").is_file():
            continue
        checkpoint = Checkpoint(run.best_checkpoint(Path(folder)))
        windows = checkpoint.load_data().sample(WINDOWS)
        for row in measured(checkpoint.load_task(LanguageModelTask), windows):
            lines.append([run.value("objective"), label(run.attention), str(run.seed), *row])
    print(markdown_table(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
