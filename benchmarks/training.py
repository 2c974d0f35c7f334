"""The time of training steps of whole models: `kvt`'s models, the paper's formulas, and models of other libraries.

* lists: 128 lists of symbols per step; a step also fetches its batch.
* images: CIFAR's ViT, 128 images per step, which are already loaded (see pipeline.py). The ViT runs in float32, and
  under bf16 autocast unless the CPU emulates bfloat16.

A step is zero_grad, forward, loss, backward, Adam (fused, except in the paper's models) and a schedule. The columns
*torch* and *x-transformers* have the encoders of these libraries between `kvt`'s embedding and head (for images, those
of the paper's model), with `kvt`'s data, loss and optimiser. *vit-pytorch* is the ViT of that library. These three have
a query. Compare them with qkv for the effect of `kvt`'s code, and with kv for the combined effect of the code and the
missing query. Their columns give their time divided by `kvt`'s. The column *paper* has this ratio for the paper's model
with the attention of the row.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from comparison import PEERS, add_peers, begin, default_of_torch, flags, milliseconds, times
from paper import PaperLists, PaperViT
from peers import torch_encoder, vit_pytorch, x_transformers_encoder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kvt.bench import Samples, timed
from kvt.data.loader import Batches
from kvt.markdown import markdown_table
from kvt.tasks import ImageTask, ListTask
from kvt.tasks.schedules import cosine_warmup

ATTENTIONS = ("qkv", "kv", "kv+pos")
ENCODERS = {"torch": torch_encoder, "x-transformers": x_transformers_encoder}
BATCH, STEPS_AN_EPOCH = 128, 100
SYMBOLS, DROPOUT = 10, 0.1
CHANNELS, CLASSES = 3, 10

Step = Callable[[], object]
Peer = Callable[[Step], Step]
Precision = Callable[[], AbstractContextManager[object]]


class Lists(NamedTuple):
    """The size of a model of lists of `length` symbols."""

    dim: int
    depth: int
    heads: int
    length: int


class Images(NamedTuple):
    """The size of a ViT for square images of three channels and ten classes."""

    dim: int
    depth: int
    heads: int
    side: int = 32
    patch: int = 4


def our_batches(*tensors: Tensor) -> Batches:
    return Batches(*tensors, batch_size=BATCH, shuffle=True, drop_last=True)


def paper_batches(*tensors: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH, shuffle=True, drop_last=True)


def endless(batches: Iterable[Sequence[Tensor]]) -> Iterator[Sequence[Tensor]]:
    while True:
        yield from batches


def our_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.movedim(-1, 1), targets)


def paper_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def training_step(
    model: nn.Module,
    batches: Iterator[Sequence[Tensor]],
    device: str,
    precision: Precision = nullcontext,
    *,
    plain: bool = False,
) -> Step:
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), fused=not plain)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_warmup(5, 10_000))
    loss_of = paper_loss if plain else our_loss

    def step() -> None:
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        with precision():
            loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()

    return step


def our_lists(attn: str, size: Lists) -> nn.Module:
    spec = {"vocab_size": SYMBOLS, "length": size.length}
    return ListTask(spec, attn=attn, dim=size.dim, depth=size.depth, heads=size.heads).model


def paper_lists(attn: str, size: Lists) -> nn.Module:
    return PaperLists(attn, symbols=SYMBOLS, **size._asdict(), dropout=DROPOUT)


def our_images(attn: str, size: Images) -> nn.Module:
    classes = [str(number) for number in range(CLASSES)]
    shape = {"channels": CHANNELS, "height": size.side, "width": size.side}
    spec = shape | {"classes": classes, "mean": [0.5], "std": [0.2]}
    return ImageTask(spec, attn=attn, dim=size.dim, depth=size.depth, heads=size.heads, patch=size.patch).model


def paper_images(attn: str, size: Images) -> nn.Module:
    return PaperViT(attn, channels=CHANNELS, classes=CLASSES, **size._asdict())


def other_lists(size: Lists) -> dict[str, nn.Module]:
    """Return copies of `kvt`'s model with another library's encoder, by name of the library."""
    like: dict[str, Any] = {"hidden": 2 * size.dim, "activation": nn.ReLU, "dropout": DROPOUT, "norm_first": False}
    made = {name: our_lists("qkv", size) for name in ENCODERS}
    for name, model in made.items():
        model.encoder = ENCODERS[name](size.dim, size.depth, size.heads, **like)
    return made


def other_images(size: Images) -> dict[str, nn.Module]:
    """Return copies of the paper's ViT with another library's encoder, and the ViT of vit-pytorch, by library's name.

    `kvt`'s ViT cannot take another encoder, because it passes the argument `token` to its encoder.
    """
    like: dict[str, Any] = {"hidden": size.dim, "activation": nn.GELU, "dropout": 0.0, "norm_first": True}
    made = {name: paper_images("qkv", size) for name in ENCODERS}
    for name, model in made.items():
        model.encoder = ENCODERS[name](size.dim, size.depth, size.heads, **like)
    return made | {"vit-pytorch": vit_pytorch(channels=CHANNELS, classes=CLASSES, **size._asdict())}


def compare_lists(name: str, size: Lists, device: str, rounds: int, as_peer: Peer) -> None:
    digits = torch.randint(SYMBOLS, (STEPS_AN_EPOCH * BATCH, size.length))
    data = digits, digits.flip(-1)

    def step(model: nn.Module) -> Step:
        return training_step(model, endless(our_batches(*data)), device)

    def paper_step(model: nn.Module) -> Step:
        return training_step(model, endless(paper_batches(*data)), device, plain=True)

    steps = {attn: step(our_lists(attn, size)) for attn in ATTENTIONS}
    steps |= {f"paper {attn}": default_of_torch(paper_step(paper_lists(attn, size))) for attn in ATTENTIONS}
    steps |= {other: as_peer(step(model)) for other, model in other_lists(size).items()}
    samples = timed(steps, rounds)
    show(name, samples, samples)


def compare_images(name: str, size: Images, device: str, rounds: int, as_peer: Peer) -> None:
    batch = torch.randn(BATCH, CHANNELS, size.side, size.side), torch.randint(CLASSES, (BATCH,))
    steps: dict[tuple[str, str], Step] = {}
    precisions: dict[str, Precision] = {"float32": nullcontext}
    if device != "cpu" or torch.cpu._is_avx512_bf16_supported():
        precisions["bf16"] = partial(torch.autocast, device, torch.bfloat16)
    for precision, context in precisions.items():
        step = partial(training_step, batches=repeat(batch), device=device, precision=context)
        for attn in ATTENTIONS:
            steps[precision, attn] = step(our_images(attn, size))
            steps[precision, f"paper {attn}"] = default_of_torch(step(paper_images(attn, size), plain=True))
        for other, model in other_images(size).items():
            steps[precision, other] = as_peer(step(model))
    samples = timed(steps, rounds)
    by_precision = {wanted: {model: samples[p, model] for p, model in steps if p == wanted} for wanted in precisions}
    for precision, found in by_precision.items():
        show(f"{name}, {precision}", found, found)
    if "bf16" in precisions:
        show(f"{name}, bf16, the others float32", by_precision["bf16"], by_precision["float32"])


def show(name: str, ours: dict[str, Samples], others: dict[str, Samples]) -> None:
    """Print a table with a row for each attention.

    Its columns are the time of a step, the ratio to kv, and the ratios of the paper's model and of each library.
    """
    peers = [peer for peer in (*ENCODERS, "vit-pytorch") if peer in others]
    rows = []
    for attn in ATTENTIONS:
        compared = [others[f"paper {attn}"], *(others[peer] for peer in peers)]
        cells = [times(other, ours[attn]) for other in compared]
        rows.append([attn, milliseconds(ours[attn]), times(ours[attn], ours["kv"]), *cells])
    print("", markdown_table([[name, "ms", "× kv", "paper", *peers], *rows]), sep="\n", flush=True)


MODELS: dict[str, Callable[[str, int, Peer], None]] = {
    "lists-32": partial(compare_lists, "lists, d 32, n 16", Lists(32, 2, 2, 16)),
    "lists-64": partial(compare_lists, "lists, d 64, n 64", Lists(64, 2, 4, 64)),
    "lists-256": partial(compare_lists, "lists, d 256, n 128", Lists(256, 4, 4, 128)),
    "images": partial(compare_images, "CIFAR, d 256, n 65", Images(256, 4, 4)),
}


def main(argv: Sequence[str] | None = None) -> None:
    add_peers(parser := flags(__doc__, repeats=5))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="models to train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = begin(parser, argv)
    for name in asked.models:
        MODELS[name](asked.device, asked.repeats, PEERS[asked.peers])


if __name__ == "__main__":
    main()
