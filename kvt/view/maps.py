"""Plots of the attention maps of every layer and head for one input."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Circle
from matplotlib.text import Text
from torch import Tensor

from kvt.attention import (
    Attention,
    AttentionMap,
    asymmetry,
    cycle_lengths,
    eigenvalues,
    looked_at,
    record_maps,
    row_entropy,
    symmetric_share,
)
from kvt.system import UserError, atomically, printable, say

if TYPE_CHECKING:  # not imported at run time, because `kvt bench` imports this module and needs no tasks
    from kvt.tasks import Task

FORMATS = (".png", ".pdf", ".svg")
MAX_LABELLED = 40  # largest number of tokens for which the labels of a map are readable
FONT = 6.5  # size in points
REAL = 0.005  # an eigenvalue counts as real if the absolute value of its imaginary part is smaller
COLOURS = "viridis"
SIGNS = {" ": "␣", "\n": "↵", "\t": "→"}
Labels = tuple[list[str], list[str]] | None  # of the rows and of the columns of a map; None: no labels


class NotebookFigure(Figure):
    """A figure that Jupyter shows with any matplotlib backend."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


class Layer(NamedTuple):
    """The attention of one layer for one input."""

    name: str
    weights: Tensor  # the attention maps, (heads, N, M)
    scores: Tensor | None  # unmasked logits of self-attention, (heads, N, N); None: cross-attention, or no logits
    labels: Labels
    overlay: tuple[Tensor, Tensor] | None = None  # a picture (H, W, C), and weights (heads, H', W') to draw over it
    looked_at: Tensor | None = None  # int64 (heads, N): for each row, the other position with the largest mean weight
    symmetric: Tensor | None = None  # the share of W_Qᵀ W_K that is symmetric, (heads); NaN: unknown

    @property
    def eigenvalues(self) -> Tensor | None:
        """Eigenvalues of the maps, complex (heads, N); None if causal or not `sums_to_one`, or if `scores` is None."""
        looks_ahead = self.scores is not None and bool(self.weights.triu(1).any())
        return eigenvalues(self.weights) if looks_ahead and sums_to_one(self.weights) else None


class Example(NamedTuple):
    """The attention of all layers for one example of the validation split, or for a prompt."""

    number: int  # index of the example in the validation split; for a prompt, only a label
    caption: str
    layers: Sequence[Layer]


@torch.no_grad()
def examine(task: "Task", batch: Any, number: int = 0) -> Example:
    """Return the attention of all layers and a caption for a batch of one example. `task` must be in eval mode."""
    inputs = _inputs(task, batch)
    with record_maps(task.model) as maps:
        outputs = task(*inputs)
    layers = [_layer(found, 0, task.labels(found.layer, *inputs)) for found in maps]
    layers = [layer._replace(overlay=task.overlay(layer.weights, *inputs)) for layer in layers]
    return Example(number, task.caption(outputs, batch), layers)


def collect_maps(task: "Task", batch: Any) -> Sequence[Layer]:
    """Return the attention of all layers, in order, for a batch of one example. `task` must be in eval mode."""
    return examine(task, batch).layers


def _layer(found: AttentionMap, example: int, tokens: Labels) -> Layer:
    labels = tokens and ([*map(visible, tokens[0])], [*map(visible, tokens[1])])
    scores = None if found.scores is None else found.scores[example].float().cpu()
    return Layer(found.layer.removesuffix(".layer"), found.weights[example].float().cpu(), scores, labels, None)


def draw_maps(
    maps: Sequence[AttentionMap], title: str = "", example: int = 0, tokens: Sequence[str] | None = None
) -> Figure:
    """Draw the maps that `kvt.record_maps` recorded, in the style of `kvt maps`. Jupyter displays the returned figure.

    Args:
        maps: the attention maps of one forward pass; UserError if there are none.
        title: title of the figure.
        example: index of the example in the batch.
        tokens: N labels of rows and columns, drawn beside maps with N rows and N columns.
    """
    if not maps:
        raise UserError("no map was recorded: call the model inside `with kvt.record_maps(model) as maps:`")
    sizes = [found.weights.shape[-2:] for found in maps]
    labels = [([*tokens],) * 2 if tokens is not None and set(size) == {len(tokens)} else None for size in sizes]
    layers = [_layer(found, example, names) for found, names in zip(maps, labels, strict=True)]
    return draw(layers, title)


@torch.no_grad()
def add_looks(layers: Sequence[Layer], task: "Task", batches: Iterable[Any]) -> list[Layer]:
    """Return the layers. In layers with `scores`, the fields `looked_at` and `symmetric` have values.

    `looked_at` is computed from the mean of a layer's maps over `batches`: for each position, the other position with
    the largest weight, or the position itself if no other weight is positive. Maps that differ in size from the layer's
    `weights`, because of padding, are skipped. If all are skipped, the layer stays unchanged.
    """
    sums: dict[str, Tensor] = {}
    for batch in batches:
        with record_maps(task.model) as maps:
            task(*_inputs(task, batch))
        for layer, (name, weights, *_) in zip(layers, maps, strict=True):
            if layer.scores is not None and weights.shape[1:] == layer.weights.shape:
                sums[name] = sums.get(name, 0) + weights.sum(0).float().cpu()
    found = []
    for layer, map_ in zip(layers, maps, strict=True):
        if (total := sums.get(map_.layer)) is not None:
            target = looked_at(total)
            places = torch.arange(target.shape[-1])
            target = target.where(total.gather(-1, target.unsqueeze(-1)).squeeze(-1) > 0, places)
            attention = task.model.get_submodule(map_.layer)
            assert isinstance(attention, Attention)
            layer = layer._replace(looked_at=target, symmetric=symmetric_share(attention).cpu())
        found.append(layer)
    return found


def describe_looks(layers: Iterable[Layer]) -> list[str]:
    """Return a line per head of layers with `looked_at`: cycles of i → looked_at[i]; symmetry and eigenvalues if known.

    >>> layer = Layer("encoder.0", torch.zeros(1, 4, 4), None, None, None)
    >>> describe_looks([layer._replace(looked_at=torch.tensor([[1, 0, 3, 2]]), symmetric=torch.ones(1))])
    ['encoder.0, head 1: looks along 2 cycles of 2; 100 % of W_Qᵀ W_K is symmetric']
    """
    lines = []
    for layer in layers:
        if layer.looked_at is not None and layer.symmetric is not None:
            found = layer.eigenvalues
            spectra = [""] * len(layer.looked_at) if found is None else map(_describe_spectrum, found)
            heads = zip(layer.looked_at, layer.symmetric, spectra, strict=True)
            for head, (target, share, spectrum) in enumerate(heads, start=1):
                counts = Counter(cycle_lengths(target)).items()
                cycles = ", ".join(f"{count} cycle{'s' * (count > 1)} of {length}" for length, count in counts)
                known = f"; {100 * share:.0f} % of W_Qᵀ W_K is symmetric" * bool(share.isfinite())
                lines.append(f"{layer.name}, head {head}: looks along {cycles}{known}{spectrum}")
    return lines


def _describe_spectrum(spectrum: Tensor) -> str:
    off = spectrum.imag.abs().max()
    real = f"from {spectrum.real.min():.2f} to 1" if off < REAL else f"up to {off:.2f} off the real line"
    return f"; eigenvalues {real}"


def visible(token: str) -> str:
    """Return ␣, ↵ or → for a space, line feed or tab; else the token with unprintable characters escaped.

    >>> visible("a"), visible(" "), visible(chr(7))
    ('a', '␣', '\\\\x07')
    """
    return SIGNS.get(token, printable(token))


def draw(layers: Sequence[Layer], title: str, columns: int | None = None) -> Figure:
    """Return a figure of all maps. Every layer begins a new row of panels, and has a panel for every head.

    All maps share one colour scale. Red rings mark `Layer.looked_at`. An overlay has a panel next to its map. The last
    panel of a layer shows `eigenvalues`, unless they are None. `columns` is the number of panels in a row; by default,
    every layer fits into one row.
    """
    panels = 1 if layers[0].overlay is None else 2  # panels per head
    spectra = [layer.eigenvalues for layer in layers]
    needed = [panels * len(layer.weights) + (found is not None) for layer, found in zip(layers, spectra, strict=True)]
    wide = columns or max(needed)
    below = list(accumulate((-(-count // wide) for count in needed), initial=0))
    sheet = Sheet(below[-1], wide, layers, title)
    for number, layer in enumerate(layers):
        for head in range(len(layer.weights)):
            row, column = divmod(panels * head, wide)
            row += below[number]
            axes = sheet.panel(row, column)
            weights, scores = layer.weights[head], None if layer.scores is None else layer.scores[head]
            draw_map(axes, weights, layer.labels, sheet.scale, beside=column == 0)
            if layer.looked_at is not None:
                target = layer.looked_at[head]
                axes.scatter(target, range(len(target)), s=9, facecolors="none", edgecolors="red", linewidths=0.7)
            axes.set_title(f"head {head + 1}, {describe(weights, scores)}", fontsize=FONT, pad=2)
            if head == 0:
                axes.set_ylabel(f"{in_words(layer.name)}\nfrom", fontsize=FONT + 1)
            if row == below[-1] - 1:
                axes.set_xlabel("to", fontsize=FONT + 1)
            if layer.overlay is not None:
                _draw_overlay(sheet.panel(row, column + 1), *layer.overlay, head)
        if (spectrum := spectra[number]) is not None:
            row, column = divmod(needed[number] - 1, wide)
            _draw_eigenvalues(sheet.panel(row + below[number], column), spectrum)
    return sheet.figure


def titled(title: str, caption: str) -> str:
    return f"{title}: {caption}" if caption else title


def in_words(layer: str) -> str:
    """Return the name of a layer of kvt's models in words, and any other name unchanged.

    >>> in_words("encoder.0.attention"), in_words("decoder.1.cross_attention"), in_words("blocks.first")
    ('encoder, layer 1', 'decoder, layer 2, cross', 'blocks.first')
    """
    found = re.fullmatch(r"(\w+)\.(\d+)\.(cross_)?attention", layer)
    return f"{found[1]}, layer {int(found[2]) + 1}{', cross' if found[3] else ''}" if found else layer


class Sheet:
    """A figure for square panels in rows and columns, with title, colour bar and space for the labels of `layers`."""

    def __init__(self, rows: int, columns: int, layers: Sequence[Layer], title: str) -> None:
        self.side = max(_side(layer) for layer in layers)
        self.below = max(_room_for_labels(layer, 1) for layer in layers) + 0.3
        self.left = max(_room_for_labels(layer, 0) for layer in layers) + 0.5
        self.width = self.left + columns * (self.side + 0.12) + 0.5
        self.height = 0.6 + rows * (self.side + self.below)
        self.figure = NotebookFigure(figsize=(self.width, self.height), dpi=110)
        self.scale = _scale(layers)
        bar = self.figure.add_axes(
            (1 - 0.45 / self.width, 1 - (0.6 + self.side) / self.height, 0.08 / self.width, self.side / self.height)
        )
        self.figure.colorbar(ScalarMappable(self.scale, COLOURS), bar)
        bar.tick_params(length=2, pad=1, labelsize=FONT - 1)
        bar.set_title("weight", fontsize=FONT - 1, pad=2)
        self.figure.suptitle(title, fontsize=FONT + 2, y=1 - 0.12 / self.height, va="top", parse_math=False)

    def panel(self, row: int, column: int) -> Axes:
        """Add a panel, and return its axes; (0, 0) is at the top left."""
        x = self.left + column * (self.side + 0.12)
        y = self.height - 0.6 - row * (self.side + self.below) - self.side
        w, h = self.width, self.height
        return self.figure.add_axes((x / w, y / h, self.side / w, self.side / h))


def _scale(layers: Sequence[Layer]) -> PowerNorm:
    """Return a square-root scale of colours, so that small weights are visible.

    The scale ends at the largest weight, or at 1 if no weight is positive. If all rows of all maps sum to 1, the end is
    at least min(1, 8 / M), so that maps with nearly equal weights of about 1 / M look nearly uniform. M is the number
    of columns of the map with the fewest columns.
    """
    most = max(float(layer.weights.max()) for layer in layers)
    if all(sums_to_one(layer.weights) for layer in layers):
        most = min(1.0, max(most, *(8 / layer.weights.shape[-1] for layer in layers)))
    return PowerNorm(0.5, vmin=0, vmax=most if most > 0 else 1)


def draw_map(axes: Axes, weights: Tensor, labels: Labels, scale: PowerNorm, beside: bool = True) -> None:
    """Draw a map (N, M), labelled below and, if `beside`, at the left.

    A large map, or a map without `labels`, has numbers.
    """
    axes.imshow(weights, norm=scale, cmap=COLOURS, aspect="auto", interpolation="nearest")
    axes.tick_params(length=0, pad=1, labelsize=FONT - 1)
    rows, columns = labels if labels is not None and _is_readable(weights) else (None, None)
    if columns is not None:
        rotation = 90 if max(map(len, columns)) > 1 else 0
        axes.set_xticks(range(len(columns)), columns, rotation=rotation, parse_math=False)
    if not beside:
        axes.set_yticks([])
    elif rows is not None:
        axes.set_yticks(range(len(rows)), rows, parse_math=False)


def describe(weights: Tensor, scores: Tensor | None) -> str:
    """Describe a map: asymmetry of `scores`, if given, and the rows' mean entropy (mean sum if not `sums_to_one`)."""
    sums = sums_to_one(weights)
    rows = f"entropy {row_entropy(weights).mean():.2f}" if sums else f"row sum {weights.sum(-1).mean():.3g}"
    return rows if scores is None else f"asymmetry {asymmetry(scores).mean():.2f}, {rows}"


def sums_to_one(weights: Tensor) -> bool:
    """Return whether maps (…, N, M) have no negative weight, and each row sums to 1 (to 0 if fully masked)."""
    sums = weights.sum(-1)
    return bool((((sums - 1).abs() < 0.01) | (sums == 0)).all()) and bool((weights >= 0).all())


def pixels(figure: Figure) -> np.ndarray:
    """Return a figure as uint8 (height, width, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def require_ending(path: Path, endings: Sequence[str]) -> Path:
    """Return a path, and make its parent folder; raise UserError if the path has none of `endings`."""
    if path.suffix.lower() not in endings:
        raise UserError(f"--out {path}: the file name must end in {'one of ' * (len(endings) > 1)}{', '.join(endings)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's ending; print a message if fonts lack characters."""
    with atomically(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower(), dpi=200)
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in rcParams["font.family"]]
    texts = chain.from_iterable(text.get_text() for text in figure.findobj(Text))
    drawn = {ord("\n")}.union(*(font.get_charmap() for font in fonts))
    if missing := sorted({letter for letter in texts if ord(letter) not in drawn}):
        letters = "".join(missing[:20])
        say(f"{path}: its font has no {letters}, and shows boxes instead: kvt maps --html shows these characters")


def _inputs(task: "Task", batch: Any) -> tuple[Tensor, ...]:
    dtype = next(task.parameters()).dtype
    return tuple(t.to(task.device, dtype if t.is_floating_point() else None) for t in task.inputs(batch))


def _draw_overlay(axes: Axes, picture: Tensor, heat: Tensor, head: int) -> None:
    height, width, channels = picture.shape
    whole = (0, width, height, 0)
    axes.imshow(picture.squeeze(-1) if channels == 1 else picture, cmap="gray", extent=whole, aspect="auto")
    share = heat[head] / heat[head].max().clamp(min=1e-12)  # relative to the largest weight of a patch
    veil = torch.cat([torch.ones(*share.shape, 3), (0.85 * (1 - share))[..., None]], dim=-1)
    axes.imshow(veil, extent=whole, aspect="auto", interpolation="nearest")
    axes.set_title(f"head {head + 1}, what the class token sees", fontsize=FONT, pad=2)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_eigenvalues(axes: Axes, spectra: Tensor) -> None:
    """Draw eigenvalues, complex (heads, N), and the unit circle."""
    axes.add_patch(Circle((0, 0), 1, fill=False, color="0.7", linewidth=0.6))
    axes.axhline(0, color="0.7", linewidth=0.6)
    axes.axvline(0, color="0.7", linewidth=0.6)
    for head, spectrum in enumerate(spectra, start=1):
        axes.scatter(spectrum.real, spectrum.imag, s=9, alpha=0.7, linewidths=0, label=str(head))
    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), xticks=[-1, 0, 1], yticks=[])
    axes.tick_params(length=0, pad=1, labelsize=FONT - 1)
    axes.set_title("eigenvalues, complex plane", fontsize=FONT, pad=2)
    if len(spectra) > 1:
        axes.legend(title="head", fontsize=FONT - 1, title_fontsize=FONT - 1, loc="upper left", handletextpad=0)


def _is_readable(weights: Tensor) -> bool:
    return max(weights.shape[-2:]) <= MAX_LABELLED


def _side(layer: Layer) -> float:
    """Return the side of a square panel in inches."""
    return max(1.9, 0.11 * max(layer.weights.shape[1:]) if layer.labels and _is_readable(layer.weights) else 0.0)


def _room_for_labels(layer: Layer, side: int) -> float:
    """Return the space in inches for the longest label of the rows (`side` = 0) or of the columns (`side` = 1)."""
    return 0.05 + 0.06 * (max(map(len, layer.labels[side])) if layer.labels and _is_readable(layer.weights) else 2)
