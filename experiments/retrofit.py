"""Converts models of the grid "retrofit" to attentions with fewer projections, trains them further, and compares.

    python experiments/retrofit.py [SCALE] [FOLDER] [WORKERS]

The script writes into FOLDER, by default lightning_logs/study:

* the runs of the grid, which train each attention from scratch;
* the best checkpoint of each qkv run, converted to each attention, and to qkv itself;
* runs that train the converted checkpoints further, for 1, 5 and 20 % of the steps, each with its own learning rate
  schedule. Checkpoints converted by least squares are also trained with the qkv run as a teacher.

Finished runs are not repeated. The results are FOLDER/reports/retrofit-SCALE/losses.md, and losses.csv with a row for
each loss.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import pandas as pd
import torch

from kvt.attention import ATTENTION
from kvt.attention.convert import HOW
from kvt.exchange.convert import convert
from kvt.reports.names import label
from kvt.reports.statistics import compare, with_reach
from kvt.run.config import short_hash
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.run import make_trainer
from kvt.run.same import load_data
from kvt.study.grid import Grid, Run, read_grid
from kvt.study.outcomes import State, read_outcome
from kvt.study.runner import make_runs
from kvt.system.console import silence_libraries
from kvt.system.files import atomically, write_atomically
from kvt.system.quoting import markdown_table
from kvt.tasks import Task

PARTS = (1, 5, 20)  # per cent of the steps
FIRST = "qkv"
LOSS = "val/loss"
COLUMNS = ["task", "attention", "how", "per cent", "seed", "loss"]

TEXT = """\
Validation loss of {first}, trained for all steps of the grid: {losses} nats. The table shows how much greater the
losses of other models are, in nats. "right after": {first} converted to another attention. "1 %" and so on: the
converted model, trained further for this part of the steps. "from the start": a model with this attention, trained for
all steps. "taught" models also learn to match the logits of {first}. Numbers are means over seeds. With at least three
seeds, the 95 % t interval over pairs of runs with the same seed follows."""


@dataclass(frozen=True)
class Converted(Run):
    """A run that begins from the converted weights of another run, its source.

    Its name is a hash of the configuration, the source and the conversion. A teacher is always the source; `how` ends
    in "taught" then, and the hash leaves out the teacher's path.
    """

    source: Run
    how: str

    @cached_property
    def name(self) -> str:
        return short_hash({"run": replace(self.config, teacher=None).name, "source": self.source.name, "how": self.how})


def hows(run: Run) -> list[str]:
    """Return the values of `HOW` by which a model with three projections can be converted to a run's attention."""
    shared = ATTENTION[run.config.imports["attn"]].projections
    keeps = {"keep_k": shared != "qkv", "keep_v": shared[1] == shared[2], "least_squares": shared != "qkv"}
    return [how for how in HOW if keeps.get(how, True)]


def sources(grid: Grid) -> Iterator[tuple[Run, Run]]:
    """Yield each run of a grid with the run of attention `FIRST` that has the same settings and seed."""
    first = {(run.task, str(run.setting), run.seed): run for run in grid.runs if run.attention == FIRST}
    for run in grid.runs:
        yield run, first[run.task, str(run.setting), run.seed]


def converted_checkpoint(run: Run, source: Run, how: str, root: Path) -> Path:
    """Return the path of the source's best weights converted to a run's attention, with their validation loss."""
    path = root / "retrofit" / f"{source.name}-{run.name}-{how}.ckpt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        model = run.config.model["init_args"]
        best = Checkpoint(source.best_checkpoint(root))
        saved = convert(best, model["attn"], how, model.get("attn_kwargs") or {}, {})
        del saved["optimizer_states"]  # so that training begins anew from the weights
        with atomically(path) as part:
            torch.save(saved, part)
            saved["metrics"] = measured(Checkpoint(part), run)
            torch.save(saved, part)
    return path


def measured(checkpoint: Checkpoint, run: Run) -> dict[str, float]:
    """Return the metrics of a checkpoint, validated with the Trainer settings of a run."""
    trainer = make_trainer(run.config, logger=False, devices=1, enable_progress_bar=False)
    task: Task = checkpoint.load_task(Task)  # type: ignore[type-abstract]
    return dict(trainer.validate(task, load_data(checkpoint), verbose=False)[0])


def trained_on(run: Run, source: Run, how: str, part: int, path: Path, teacher: Path | None = None) -> Converted:
    """Return the run that trains a converted checkpoint for `part` per cent of the steps."""
    settings = {name: max(1, run.value(name) * part // 100) for name in ("max_steps", "warmup") if run.value(name)}
    config = replace(run.config.changed(**settings), ckpt_path=str(path.resolve()))
    if teacher is not None:
        how, config = f"{how}, taught", replace(config, teacher=str(teacher.resolve()))
    return Converted(run.task, {**run.settings, **settings, "how": how}, run.seed, config, source, how)


def losses(rows: pd.DataFrame) -> str:
    """Return a Markdown page with a table of losses for each task, and a row for each attention and conversion."""
    parts = ["# Can a trained model drop a projection?"]
    for task, of_task in rows.groupby("task", sort=False):
        first = of_task[(of_task.attention == FIRST) & (of_task["how"] == "")].set_index("seed").loss
        told = TEXT.format(first=label(FIRST), losses=", ".join(f"{loss:.3f}" for loss in first))
        lines = [["", "", "right after", *(f"{part} %" for part in PARTS), "from the start"]]
        for attention, own in of_task.groupby("attention", sort=False):
            start = _above(own[own["how"] == ""], first) if attention != FIRST else ""
            for how in own["how"].unique():
                cells = [_above(own[(own["how"] == how) & (own["per cent"] == part)], first) for part in (0, *PARTS)]
                if how:
                    lines.append([label(attention), how, *cells, start])
        parts += [f"## {task}", told, str(markdown_table(lines))]
    return "\n\n".join(parts) + "\n"


def _above(rows: pd.DataFrame, first: "pd.Series[float]") -> str:
    pairs = rows[rows.seed.isin(first.index)]
    if not len(pairs):
        return "–"
    found = compare(pairs.loss, pairs.seed.map(first), pairs.task, pairs.seed)
    return with_reach(found.difference, found.spread.reach)


def main(scale: str = "laptop", folder: str = "lightning_logs/study", workers: str | None = None) -> None:
    grid, root = read_grid("retrofit", scale), Path(folder)
    number = None if workers is None else int(workers)
    make_runs(grid.runs, root, workers=number)
    rows, runs = [], []
    for run, source in sources(grid):
        rows.append([run.task, run.attention, "", 100, run.seed, _loss(run, root)])
        ways = [] if _loss(source, root) is None else hows(run)
        for how in ways:
            path = converted_checkpoint(run, source, how, root)
            rows.append([run.task, run.attention, how, 0, run.seed, Checkpoint(path).saved["metrics"][LOSS]])
            teachers = [None, source.best_checkpoint(root)] if how == ways[-1] else [None]
            runs += [(part, trained_on(run, source, how, part, path, by)) for by, part in product(teachers, PARTS)]
    make_runs([run for _, run in runs], root, workers=number)
    rows += [[run.task, run.attention, run.how, part, run.seed, _loss(run, root)] for part, run in runs]
    table = pd.DataFrame(rows, columns=COLUMNS).dropna()
    out = root / "reports" / grid.report
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "losses.csv", table.to_csv(index=False))
    write_atomically(out / "losses.md", page := losses(table))
    print(page)


def _loss(run: Run, root: Path) -> float | None:
    outcome = read_outcome(run.folder(root), run.config, history=False)
    return outcome.result[LOSS] if outcome.state == State.FINISHED else None


if __name__ == "__main__":
    silence_libraries()
    main(*sys.argv[1:])
