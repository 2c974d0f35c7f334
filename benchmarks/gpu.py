"""Measure training steps on a GPU, and compare every attention on the GPU with the CPU.

Prints two Markdown tables. A step is the forward pass, the backward pass and the optimiser, on one batch that stays on
the device. The exit code is 1 if the verdict on an attention is "WRONG". `--device cpu --batch 2 --repeats 1` tries the
script without a GPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import product
from statistics import median

import torch
from torch import Tensor, nn

from kvt.attention import ATTENTION, AttentionFactory
from kvt.bench import machine, number, timed
from kvt.markdown import markdown_table
from kvt.tasks import CharacterTask, ImageTask, ListTask
from kvt.tasks.base import Task, make_optimizer
from kvt.tune import tune

ATTENTIONS = ("qkv", "kv", "kv+pos")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ERROR = {"float32": 1e-4, "bfloat16": 5e-2}
"""The largest relative error that counts as right."""
N, DIM, HEADS = 192, 256, 4


def images(attn: str, batch: int) -> tuple[Task, Sequence[Tensor]]:
    spec = {"channels": 3, "height": 32, "width": 32, "classes": list("abcdefghij"), "mean": [0.5], "std": [0.2]}
    pixels, labels = torch.randint(256, (batch, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (batch,))
    return ImageTask(spec, attn=attn, dim=256, depth=4, heads=4), (pixels, labels)


def lists(attn: str, batch: int) -> tuple[Task, Sequence[Tensor]]:
    digits = torch.randint(10, (batch, 16))
    return ListTask({"vocab_size": 10, "length": 16}, attn=attn), (digits, digits.flip(1))


def characters(attn: str, batch: int) -> tuple[Task, Sequence[Tensor]]:
    text = torch.randint(65, (batch, 65))
    spec = {"vocab": [chr(33 + i) for i in range(65)], "length": 64}
    return CharacterTask(spec, attn=attn), (text[:, :-1], text[:, 1:])


TASKS = {"images, 65 tokens": images, "lists, 16 tokens": lists, "characters, 64 tokens": characters}


def training_step(task: Task, batch: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that does a training step on the same batch each time."""
    task.to(device).train()
    optimizer, inputs = make_optimizer(task), tuple(part.to(device) for part in batch)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = task.training_step(inputs, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def steps(device: torch.device, batch: int, repeats: int) -> Iterator[list[str]]:
    """Yield a row for each task and attention: training steps per second in each number type."""
    for (name, make), attn in product(TASKS.items(), ATTENTIONS):
        calls = {kind: training_step(*make(attn, batch), device, dtype) for kind, dtype in TYPES.items()}
        yield [name, attn, *(number(1 / median(seconds)) for seconds in timed(calls, repeats).values())]


def passes(layer: nn.Module, x: Tensor, dtype: torch.dtype, *, causal: bool) -> list[Tensor]:
    """Return the output, the gradient of the input x, and the gradient of all weights as one vector, in float64.

    The gradients are those of Σ output · sign(x).
    """
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, dtype, enabled=dtype == torch.bfloat16):
        output = layer(x, causal=causal)
    of_x, *of_weights = torch.autograd.grad(output, [x, *layer.parameters()], x.detach().sign().to(output))
    found = output.detach(), of_x, torch.cat([gradient.flatten() for gradient in of_weights])
    return [each.double().cpu() for each in found]


def errors(attn: str, device: torch.device, dtype: torch.dtype, batch: int) -> list[float]:
    """Return max |found − exact| / max |exact| for each result of `passes`, the greater of causal and bidirectional.

    The exact numbers are those of float64 on the CPU.
    """
    torch.manual_seed(0)
    layer, x = AttentionFactory(attn, heads=HEADS, max_len=N, pos_dim=10)(DIM), 3 * torch.randn(batch, N, DIM)
    exact, layer = deepcopy(layer).double(), layer.to(device)
    worst = [0.0] * 3
    for causal in (False, True):
        found = passes(layer, x.to(device), dtype, causal=causal)
        wanted = passes(exact, x.double(), torch.float64, causal=causal)
        error = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]
        worst = [new if not new <= old else old for new, old in zip(error, worst, strict=True)]  # NaN stays
    return worst


def agreement(device: torch.device, batch: int) -> Iterator[list[str]]:
    """Yield a row for each attention and number type: errors of output and gradients, and "right" or "WRONG"."""
    for attn, (kind, dtype) in product(ATTENTION, TYPES.items()):
        found = errors(attn, device, dtype, batch)
        right = all(error <= ERROR[kind] for error in found)
        yield [attn, kind, *(f"{error:.1e}" for error in found), "right" if right else "WRONG"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=128, help="batch size (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="samples of each time (default: %(default)s)")
    asked = parser.parse_args(argv)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU: choose --device cpu")
    tune()
    device = torch.device(asked.device)
    head = ["task", "attention", *(f"{kind}, steps/s" for kind in TYPES)]
    print(f"{machine(asked.device)}; batch {asked.batch}, medians of {asked.repeats} samples", flush=True)
    print("", markdown_table([head, *steps(device, asked.batch, asked.repeats)]), sep="\n", flush=True)
    rows = [*agreement(device, min(asked.batch, 8))]
    head = ["attention", "type", "output", "gradient of the input", "gradients of the weights", "verdict"]
    print("", markdown_table([head, *rows]), sep="\n")
    return int(any(row[-1] == "WRONG" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
