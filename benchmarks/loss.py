"""The cost of the last layer and the label-smoothed loss of translation, forward and backward, kvt's and dense.

The sizes are 50 sentences of 13 tokens, width 128 and 19,000 words. *dense* computes the log-softmax of all logits, an
equally large tensor of smoothed targets, and torch's `KLDivLoss`. Memory is the peak of a call, without weights and
input.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from comparison import begin, flags, milliseconds, times
from torch import Tensor, nn

from kvt.bench.measure import peak_bytes, timed
from kvt.bench.table import number
from kvt.models.losses import label_smoothed_kl
from kvt.system.quoting import markdown_table

TOKENS, DIM, SYMBOLS = 50 * 13, 128, 19_000
SMOOTHING, PAD = 0.1, 1

Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def ours(generator: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """Return the loss of `TranslationTask`."""
    loss, _ = label_smoothed_kl(hidden, generator.weight, generator.bias, target, smoothing=SMOOTHING, pad=PAD)
    return loss


def dense(generator: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """Return the loss of Borji 2023, §3.5: targets are 1 − ε for the true word, ε / (V − 2) for others but padding."""
    log_probability = F.log_softmax(generator(hidden), dim=-1)
    symbols = log_probability.shape[-1]
    smoothed = torch.full_like(log_probability, SMOOTHING / (symbols - 2))
    smoothed.scatter_(1, target.unsqueeze(1), 1 - SMOOTHING)
    smoothed[:, PAD] = 0
    smoothed.masked_fill_((target == PAD).unsqueeze(1), 0.0)
    return nn.KLDivLoss(reduction="sum")(log_probability, smoothed) / (target != PAD).sum()


LOSSES: dict[str, Loss] = {"kvt": ours, "dense": dense}


def training(loss: Loss, generator: nn.Linear, hidden: Tensor, target: Tensor) -> Callable[[], object]:
    """Return the function to measure, which computes the gradients and discards them."""
    wanted = [hidden, *generator.parameters()]
    return lambda: torch.autograd.grad(loss(generator, hidden, target), wanted)


def main(argv: Sequence[str] | None = None) -> None:
    asked = begin(flags(__doc__, repeats=21), argv)
    generator = nn.Linear(DIM, SYMBOLS)
    hidden = torch.randn(TOKENS, DIM, requires_grad=True)
    target = torch.randint(PAD + 1, SYMBOLS, (TOKENS,))
    calls = {name: training(loss, generator, hidden, target) for name, loss in LOSSES.items()}
    peak = {name: peak_bytes(call) for name, call in calls.items()}
    samples = timed(calls, asked.repeats)
    rows = []
    for name, seconds in samples.items():
        memory = number(peak[name], 2**20), number(peak[name] / peak["kvt"])
        rows.append([name, milliseconds(seconds), times(seconds, samples["kvt"]), *memory])
    print("", markdown_table([["", "ms", "× kvt", "peak MiB", "× kvt"], *rows]), sep="\n")


if __name__ == "__main__":
    main()
