"""The cost of the last layer and the loss for large vocabularies, and of a training step of a language model.

*translation* has 50 sentences of 13 tokens, width 128, 19,000 words and label smoothing. *language* has 4,096 tokens,
width 128 and 50,257 classes. Both measure the forward and the backward pass. *dense* computes the log-softmax of all
logits; for translation it also makes an equally large tensor of smoothed targets and calls torch's `KLDivLoss`. *torch*
is `F.linear_cross_entropy` in chunks, of torch 2.14 or later, for *language* only. *step* is a training step of
`language_model --size tiny --attn qkv` with a vocabulary of 50,257 tokens, a batch of 16 × 256 and Adam, beside GPT-2
of transformers with the same sizes and dropout, if transformers is installed. Time is CPU time, user and system, of all
threads. Memory is the peak of a call, without weights and input.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from time import process_time
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from comparison import begin, flags, milliseconds, times
from torch import Tensor, nn

from kvt.bench import number, peak_bytes
from kvt.data.tokens import Bytes
from kvt.markdown import markdown_table
from kvt.models.losses import Predictions, cross_entropy
from kvt.tasks import LanguageModelTask
from kvt.tasks.base import make_optimizer

TRANSLATION, LANGUAGE = (50 * 13, 19_000), (16 * 256, 50_257)  # tokens, classes
DIM, BATCH, LENGTH = 128, 16, 256
SMOOTHING, PAD = 0.1, 1
SETTINGS: dict[str, Any] = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}

Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]
Calls = dict[str, Callable[[], object]]


def ours(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """Return the loss of `LanguageTask`."""
    return cross_entropy(Predictions(hidden, target, head)).loss


def dense(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden), target)


def torchs(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, head.weight, target, linear_bias=head.bias, options=options)


def ours_smoothed(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """Return the loss of `TranslationTask`."""
    return cross_entropy(Predictions(hidden, target, head, PAD), SMOOTHING).loss


def dense_smoothed(head: nn.Linear, hidden: Tensor, target: Tensor) -> Tensor:
    """Return the loss of Borji 2023, §3.3, KL(t ‖ p), as a mean over targets that are not padding.

    The target probability t is 1 − ε for the true word, 0 for padding, and ε / (V − 2) for each other of V words.
    """
    log_probability = F.log_softmax(head(hidden), dim=-1)
    symbols = log_probability.shape[-1]
    smoothed = torch.full_like(log_probability, SMOOTHING / (symbols - 2))
    smoothed.scatter_(1, target.unsqueeze(1), 1 - SMOOTHING)
    smoothed[:, PAD] = 0
    smoothed.masked_fill_((target == PAD).unsqueeze(1), 0.0)
    return nn.KLDivLoss(reduction="sum")(log_probability, smoothed) / (target != PAD).sum()


LOSSES: dict[str, Loss] = {"kvt": ours_smoothed, "dense": dense_smoothed}
PLAIN: dict[str, Loss] = {"kvt": ours, "dense": dense}
if hasattr(nn, "LinearCrossEntropyOptions"):
    PLAIN["torch"] = torchs


def training(loss: Loss, head: nn.Linear, hidden: Tensor, target: Tensor) -> Callable[[], object]:
    """Return a function that computes a loss and its gradients: the call to measure."""
    wanted = [hidden, *head.parameters()]
    return lambda: torch.autograd.grad(loss(head, hidden, target), wanted)


def heads(losses: dict[str, Loss], tokens: int, symbols: int) -> Calls:
    head, hidden = nn.Linear(DIM, symbols), torch.randn(tokens, DIM, requires_grad=True)
    target = torch.randint(PAD + 1, symbols, (tokens,))
    return {name: training(loss, head, hidden, target) for name, loss in losses.items()}


def our_step(batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    vocabulary = Bytes()
    vocabulary.pieces += [b"?"] * (LANGUAGE[1] - len(vocabulary.pieces))
    with patch("kvt.tasks.language.tokens_of", return_value=vocabulary):
        task = LanguageModelTask({"tokenizer": "bytes", "length": LENGTH}, attn="qkv", size="tiny").train()
    optimizer = make_optimizer(task)
    whole = (*batch, torch.ones_like(batch[1], dtype=torch.bool))

    def step() -> None:
        optimizer.zero_grad()
        task.compute_metrics(whole)["loss"].backward()
        optimizer.step()

    return step


def gpt2_step(batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=LANGUAGE[1], use_cache=False, **SETTINGS)).train()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(batch[0], labels=batch[0]).loss.backward()
        optimizer.step()

    return step


def steps() -> Calls:
    tokens = torch.randint(LANGUAGE[1], (BATCH, LENGTH + 1))
    made: Calls = {"kvt": our_step((tokens[:, :-1], tokens[:, 1:]))}
    if find_spec("transformers"):
        made["GPT-2 of transformers"] = gpt2_step((tokens[:, :-1], tokens[:, 1:]))
    return made


def table(name: str, calls: Calls, rounds: int) -> Iterator[list[str]]:
    """Yield a row for each call: names, CPU milliseconds and peak memory, with ratios to kvt."""
    peak: dict[str, int] = {}
    samples: dict[str, list[float]] = {which: [] for which in calls}
    for which, call in calls.items():
        call()  # warms up
        peak[which] = peak_bytes(call)
    for _ in range(rounds):
        for which, call in calls.items():
            start = process_time()
            call()
            samples[which].append(process_time() - start)
    for which, seconds in samples.items():
        memory = number(peak[which], 2**20), number(peak[which] / peak["kvt"])
        yield [name, which, milliseconds(seconds), times(seconds, samples["kvt"]), *memory]


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags(__doc__, repeats=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = begin(parser, argv)
    torch.set_num_threads(asked.threads)
    made: dict[str, Callable[[], Calls]] = {
        "translation": partial(heads, LOSSES, *TRANSLATION),
        "language": partial(heads, PLAIN, *LANGUAGE),
        "step": steps,
    }
    rows = [row for name, make in made.items() for row in table(name, make(), asked.repeats)]
    print("", markdown_table([["", "", "CPU ms", "× kvt", "peak MiB", "× kvt"], *rows]), sep="\n")


if __name__ == "__main__":
    main()
