"""What an attention costs in whole models: training steps of the paper's models, all attentions in turns.

A step is forward, backward and Adam, on random inputs. Each cell is the median of its milliseconds and, in brackets, of
its ratio to the first attention, taken round by round, with quartiles.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvt.bench.measure import Stopwatch, in_turns, quartiles
from kvt.tasks import CharacterTask, ImageTask, ListTask

IMAGES = {"channels": 3, "height": 32, "width": 32, "classes": list("abcdefghij"), "mean": [0.5], "std": [0.2]}
CHARACTERS = {"symbols": [chr(33 + number) for number in range(65)], "length": 64}


def lists(attn: str, length: int, dim: int) -> tuple[nn.Module, Tensor]:
    task = ListTask({"symbols": 10, "length": length}, attn, dim=dim, depth=2, heads=4)
    return task.model, torch.randint(10, (64, length))


def images(attn: str, dim: int) -> tuple[nn.Module, Tensor]:
    return ImageTask(IMAGES, attn, dim=dim, depth=2, heads=4).model, torch.randn(64, 3, 32, 32)


def characters(attn: str) -> tuple[nn.Module, Tensor]:
    return CharacterTask(CHARACTERS, attn).model, torch.randint(65, (64, 64))


MODELS: dict[str, Callable[[str], tuple[nn.Module, Tensor]]] = {
    "lists, n 64, d 64": lambda attn: lists(attn, 64, 64),
    "lists, n 128, d 64": lambda attn: lists(attn, 128, 64),
    "lists, n 64, d 256": lambda attn: lists(attn, 64, 256),
    "lists, n 128, d 256": lambda attn: lists(attn, 128, 256),
    "CIFAR, n 65, d 64": lambda attn: images(attn, 64),
    "CIFAR, n 65, d 256": lambda attn: images(attn, 256),
    "characters, n 64, d 192": characters,
}


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).logsumexp(-1).mean().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--attn", nargs="+", default=["kv", "kv+pos", "qkv"], help="the attentions to measure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()

    print(f"| model | {' | '.join(asked.attn)} |\n|---|{'---|' * len(asked.attn)}")
    for name, make in MODELS.items():
        watches = []
        for attn in asked.attn:
            model, x = make(attn)
            watches.append(Stopwatch(training_step(model.to(asked.device), x.to(asked.device)), asked.device))
        samples = in_turns([watch.sample for watch in watches], asked.repeats)
        cells = []
        for seconds in samples:
            _, median, _ = quartiles(seconds)
            low, ratio, high = quartiles([ours / first for ours, first in zip(seconds, samples[0], strict=True)])
            cells.append(f"{1000 * median:.1f} ms ({ratio:.2f}; {low:.2f}–{high:.2f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
