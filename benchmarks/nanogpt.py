"""Training speed beside nanoGPT: tokens per second of `kvt run characters` and of nanoGPT's train.py.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt.py nanoGPT

*small* is the model of nanoGPT's README for a CPU: 4 layers, 4 heads, width 128, 64 characters, batches of 12. *large*
is its model for a GPU: 6 layers, 6 heads, width 384, 256 characters, with batches of 16 instead of 64. Neither has
dropout. kvt trains a model of the same size with each attention, with all callbacks of a run. Both programs run as
processes of their own, in turns, on the same random text of 65 symbols, without torch.compile. nanoGPT prints the time
of each step; the first step is left out. For kvt, a time is that between two logged steps, which are five steps apart.
A run's speed is computed from its median time.
"""

import csv
import pickle
import random
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from comparison import begin, flags, times

from kvt.markdown import markdown_table

SYMBOLS = string.ascii_letters + string.digits + " \n."
FILES = ("train.py", "model.py", "configurator.py")
EVERY = 5
"""Number of steps from one logged step of kvt to the next."""


class Size(NamedTuple):
    """The size of a model and of its batches."""

    layers: int
    heads: int
    dim: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.length * self.batch


SIZES = {"small": Size(4, 4, 128, 64, 12), "large": Size(6, 6, 384, 256, 16)}


def prepare(source: Path, folder: Path) -> None:
    """Write nanoGPT's program, and a random text in the formats of kvt and of nanoGPT, into a folder."""
    for name in FILES:
        shutil.copy(source / name, folder)
    ids = random.Random(0).choices(range(len(SYMBOLS)), k=100_000)
    (folder / "text.txt").write_text("".join(SYMBOLS[i] for i in ids))
    data = folder / "data" / "text"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        np.array(ids, dtype=np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(SYMBOLS)}))


def nanogpt(size: Size, steps: int, folder: Path) -> float:
    """Train nanoGPT; return tokens per second."""
    settings = {
        **{"dataset": "text", "device": "cpu", "compile": False, "eval_iters": 1, "gradient_accumulation_steps": 1},
        **{"n_layer": size.layers, "n_head": size.heads, "n_embd": size.dim, "block_size": size.length},
        **{"batch_size": size.batch, "max_iters": steps, "dropout": 0.0},
    }
    words = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]
    printed = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout
    seconds = [float(time) / 1000 for time in re.findall(r"^iter \d+: .*time ([\d.]+)ms", printed, re.MULTILINE)]
    return size.tokens / median(seconds[1:])


def ours(attn: str, size: Size, steps: int, folder: Path) -> float:
    """Train with kvt; return tokens per second."""
    settings = {
        **{"text": "text.txt", "attn": attn, "dim": size.dim, "depth": size.layers, "heads": size.heads},
        **{"length": size.length, "batch_size": size.batch, "dropout": 0, "activation": "gelu", "max_steps": steps},
        **{"val_check_interval": steps, "limit_val_batches": 1, "log_every_n_steps": EVERY},
        **{"accelerator": "cpu", "enable_progress_bar": "false"},
    }
    words = [*("-m", "kvt", "run", "characters"), *(f"--{name}={value}" for name, value in settings.items())]
    subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
    [history] = (folder / "lightning_logs").rglob("history.csv")
    with history.open() as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file) if row["train/loss"]]
    shutil.rmtree(folder / "lightning_logs")
    return EVERY * size.tokens / median(last - first for first, last in pairwise(seconds))


def main(argv: Sequence[str] | None = None) -> None:
    parser = flags(__doc__, repeats=5)
    parser.add_argument("nanogpt", type=Path, help="folder with nanoGPT's train.py")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--attn", nargs="+", default=["qkv", "kv"])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    asked = begin(parser, argv)
    if missing := [name for name in FILES if not (asked.nanogpt / name).is_file()]:
        parser.error(f"{asked.nanogpt} has no {missing[0]}: pass a clone of nanoGPT")

    rows = [["model", "attention", "nanoGPT tokens/s", "kvt tokens/s", "kvt / nanoGPT"]]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(asked.nanogpt, folder)
        for name in asked.sizes:
            speeds: dict[str, list[float]] = {}
            for _ in range(asked.repeats):
                speeds.setdefault("nanoGPT", []).append(nanogpt(SIZES[name], asked.steps, folder))
                for attn in asked.attn:
                    speeds.setdefault(attn, []).append(ours(attn, SIZES[name], asked.steps, folder))
            theirs = speeds["nanoGPT"]
            for attn in asked.attn:
                both = (f"{median(speed):,.0f}" for speed in (theirs, speeds[attn]))
                rows.append([name, attn, *both, times(speeds[attn], theirs)])
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
