"""The overhead of a step of `kvt fit`: the Trainer, hooks, metrics, loader, callbacks and logger.

The same model, data, optimiser, schedule and clipping run in a bare loop and in the Trainer of the command line, in
alternating steps. A sample is the mean of twenty steps, one of which is logged. The table has medians and quartiles.
`kvt fit --config reverse --profiler simple` shows the time of each hook.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import lightning as L
import torch
from comparison import milliseconds

from kvt.bench import quartiles, spread
from kvt.markdown import markdown_table
from kvt.run.config import RunConfig
from kvt.run.fit import train
from kvt.tasks import DigitLists, ListTask
from kvt.tasks.base import make_optimizer
from kvt.tasks.schedules import cosine_warmup

CONFIG = Path(__file__).resolve().parents[1] / "experiments" / "configs" / "reverse.yaml"
SAMPLE = 20
"""Number of steps per sample, and number of steps from one logged step of the Trainer to the next."""


class Rival(L.Callback):
    """A callback that does a step of the bare loop before each step of the Trainer, and times both."""

    def __init__(self, steps: Iterator[None]) -> None:
        self.steps = steps
        self.own: list[float] = []
        self.trainers: list[float] = []
        self._since: float | None = None

    def on_train_batch_start(self, *_: object) -> None:
        start = perf_counter()
        if self._since is not None:
            self.trainers.append(start - self._since)
        next(self.steps)
        self._since = perf_counter()
        self.own.append(self._since - start)


def bare(settings: Mapping[str, int], total: int) -> Iterator[None]:
    """Do a step of a plain training loop, then yield, for one epoch."""
    data = DigitLists(train_size=settings["train_size"], batch_size=settings["batch_size"])
    data.setup("fit")
    inputs, targets = data.splits["train"]
    task = ListTask(data.spec, dim=settings["dim"])
    model = task.model.train()
    optimizer = make_optimizer(task)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_warmup(task.hparams["warmup"], total))
    for rows in torch.randperm(len(inputs)).split(data.batch_size):
        logits = model(inputs[rows])
        loss = torch.nn.functional.cross_entropy(logits.movedim(-1, 1), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        schedule.step()
        yield


def fit(settings: Mapping[str, int], callback: L.Callback) -> None:
    """Train as `kvt fit` does, in a temporary folder."""
    own = {"max_epochs": 1, "accelerator": "cpu", "val_size": 16}
    with TemporaryDirectory() as folder, StringIO() as said, redirect_stdout(said), redirect_stderr(said):
        train(RunConfig.from_yaml(CONFIG).changed(**own, **settings), f"{folder}/run", callbacks=[callback])


def samples(seconds: Sequence[float]) -> list[float]:
    """Return the means over complete blocks of twenty steps, without the first block, which includes warm-up.

    >>> samples([9.0] * 20 + [1.0] * 10 + [3.0] * 10 + [5.0])
    [2.0]
    """
    starts = range(SAMPLE, len(seconds) - SAMPLE + 1, SAMPLE)
    return [sum(seconds[start : start + SAMPLE]) / SAMPLE for start in starts]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    asked = parser.parse_args(argv)

    settings = {"train_size": asked.steps * asked.batch_size, "batch_size": asked.batch_size, "dim": asked.dim}
    rival = Rival(bare(settings, asked.steps))
    fit(settings, rival)
    plain, ours = samples(rival.own), samples(rival.trainers)
    more = [mine - own for mine, own in zip(ours, plain, strict=False)]
    percent = [100 * difference / own for difference, own in zip(more, plain, strict=False)]
    rows = [[name, milliseconds(each)] for name, each in {"bare loop": plain, "kvt fit": ours, "more": more}.items()]
    print(markdown_table([["a step", "ms"], *rows, ["more, %", spread(quartiles(percent))]]))


if __name__ == "__main__":
    main()
