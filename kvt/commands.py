"""The `kvt` command. Each command in `COMMANDS` is a function, whose parameters are the flags of the command.

torch and Lightning take seconds to import. Functions therefore import these packages only when needed, so that the
help and the error for a mistyped command appear at once.
"""

import os
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from math import inf, isfinite
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args, get_origin

import yaml
from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from kvt import system
from kvt.run.config import RunConfig, bare, in_short, read_configs
from kvt.run.folder import is_in_use, run_of_checkpoint
from kvt.system import UserError, printable, tell, unknown, user_path
from kvt.version import __version__

COMMANDS = {  # maps a command to the import path of its function and to its line in `kvt --help`
    "generate": ("kvt.commands:generate", "continues a text with a trained language model"),
    "translate": ("kvt.commands:translate", "translates sentences with a trained model"),
    "maps": ("kvt.commands:maps", "draws attention maps of a trained model"),
    "runs": ("kvt.commands:runs", "lists runs"),
    "convert": ("kvt.commands:convert", "replaces the attention of a trained model"),
    "bench": ("kvt.bench:bench", "measures time, memory and FLOPs of each attention"),
    "study run": ("kvt.commands:study_run", "trains all runs of a grid"),
    "study report": ("kvt.commands:study_report", "writes the report of a grid"),
    "study record": ("kvt.commands:study_record", "collects the results of a grid, from any machines, in a record"),
    "reproduce": ("kvt.commands:reproduce", "trains the runs and writes the reports of the paper's results"),
}
LIGHTNING = {
    "run": "trains a model on a task, and tests it: kvt run reverse --attn kv",
    "fit": "trains a model on a task without testing it, or resumes a run",
    "validate": "measures a checkpoint on validation data",
    "test": "measures a checkpoint on test data",
    "predict": "writes a checkpoint's prediction for each example to a CSV",
}
TRAINING = ("run", "fit")  # `run` also tests, and accepts the name of the task without --config
RUN_FLAGS = ("config", "ckpt_path", "resume", "model", "data")  # they choose a task, its classes, a checkpoint or a run
EPILOG = """kvt run takes a task's name, or the path of your own YAML file; the next four commands take it after
--config (-c). --print_config prints all settings. "kvt run cifar10 --help" lists the flags of a task."""
MAX_CHARS = 50  # in `kvt runs`: largest length of an error, and of a setting, such as a whole tokenizer
FOLDER, TABLE1 = "lightning_logs/study", "table1"
FOLDERS, NOTHING, NO_KWARGS = [FOLDER], list[str](), dict[str, Any]()


def generate(
    ckpt_path: str,
    prompt: str = "",
    tokens: int = 500,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | None = None,
    num_samples: int = 1,
    seed: int = 0,
    attn: str | None = None,
    model: str | None = None,
) -> None:
    """Continue a text with a model of the task characters, human_numbers or language_model.

    Args:
        ckpt_path: path to a checkpoint of the task characters, human_numbers or language_model.
        prompt: beginning of the text; default: the most frequent character or word; for language_model, a new document.
        tokens: largest number of tokens to add: characters, words, or pieces of a tokenizer.
        temperature: sampling temperature; 0 picks the most likely token.
        top_k: number of most likely tokens from which to sample; default: all tokens.
        top_p: sample from the most likely tokens whose probabilities add up to this, such as 0.9; default: all tokens.
        stop: text after which generation stops, such as "." or a newline, $'\\n' in most shells. For language_model,
            "<|endoftext|>" is the end of a document.
        num_samples: number of texts. A line --- separates the texts. The first text does not depend on this number.
        seed: random seed.
        attn: import path of your attention class, such as my_attention.NearKV, if the checkpoint uses one. kvt imports
            only classes that you name, because importing a file runs its code.
        model: import path of your task class, such as my_task.MyTask, if the checkpoint uses one.
    """
    from kvt.tasks.language import LanguageTask

    system.require_positive(num_samples=num_samples)
    # does not call `tune`: for a batch of one, torch's default matrix products are twice as fast as oneDNN's
    _, task = _load(ckpt_path, LanguageTask, tuned=False, attn=attn, model=model)
    for number in range(num_samples):
        tell("---\n" * (number > 0), end="")
        for text in task.write(prompt, tokens, seed + number, stop, temperature=temperature, top_k=top_k, top_p=top_p):
            tell(text, end="")
        tell("")


def translate(
    *sentences: str, ckpt_path: str, beam: int = 1, attn: str | None = None, model: str | None = None
) -> None:
    """Translate sentences, and print each translation on one line.

    Args:
        sentences: sentences to translate; default: the lines of standard input.
        ckpt_path: path to a checkpoint of the task translation.
        beam: width of beam search; 1 is greedy search.
        attn: import path of your attention class, such as my_attention.NearKV, if the checkpoint uses one.
        model: import path of your task class, such as my_task.MyTask, if the checkpoint uses one.
    """
    from kvt.data.texts import decode_text
    from kvt.tasks import TranslationTask

    _, task = _load(ckpt_path, TranslationTask, attn=attn, model=model)
    given = [os.fsencode(sentence) for sentence in sentences] or sys.stdin.buffer.read().splitlines()
    texts = [decode_text(sentence, f"sentence {number}") for number, sentence in enumerate(given, start=1)]
    for translation in task.translate(texts, beam, progress=True):
        tell(translation)


def maps(
    ckpt_path: str,
    prompt: str | None = None,
    html: bool = False,
    out: str | None = None,
    example: int = 0,
    examples: int = 8,
    data_dir: str | None = None,
    root: str | None = None,
    text: str | None = None,
    features: str | None = None,
    weights: str | None = None,
    attn: str | None = None,
    model: str | None = None,
    data: str | None = None,
) -> None:
    """Draw the attention maps of a trained model for one input, or write a page to explore the maps of several inputs.

    A row of the picture is a layer, and has a map for each head. In a map, a cell is bright if the token of its row
    attends to the token of its column. In self-attention, the title of a map has the asymmetry ‖L − Lᵀ‖ / ‖L‖ of its
    logits L. The title also has the mean entropy of the map's rows in nats or, if they do not sum to 1, their mean sum.
    For images, the picture also shows the attention of the class token to the image.

    In self-attention, a ring marks, for each token, the other token to which it attends most, on average over up to
    256 examples. The command prints one line for each head with rings: the cycles that the rings form, the symmetric
    share of W_Qᵀ W_K, and where the eigenvalues of the drawn map lie; see docs/symmetry.md. With --prompt, there are
    neither rings nor lines. In self-attention without a causal mask, the last panel of a layer shows the
    eigenvalues of its maps if their rows sum to 1.

    --html writes one HTML file that works in any browser without a network. On the page, choose a layer and a head,
    and step through examples. Point at a cell to see its weight, at the token of a row or at a patch to see what it
    attends to, or at the token of a column to see what attends to it.

    Args:
        ckpt_path: path to a checkpoint of any task. The command needs the data of the run.
        prompt: text to use in place of an example, for the models of kvt generate. A prompt needs no data.
        html: write an HTML page; its default path is maps.html.
        out: path of the picture, .png, .pdf or .svg, or of the page, .html; default: maps.png.
        example: number of the validation example, from 0; with --html, the number of the first example.
        examples: with --html, the number of examples on the page, at most the size of the validation split.
        data_dir: folder of the data sets; default: the folder that the run used.
        root: new path of the folder that the run read with --root, if you moved the folder.
        text: new path of the run's text, if you moved the text.
        features: new path of the run's feature file, if you moved the file.
        weights: new path of the weights of the backbone, if you moved the weights.
        attn: import path of your attention class, such as my_attention.NearKV, if the checkpoint uses one.
        model: import path of your task class, such as my_task.MyTask, if the checkpoint uses one.
        data: import path of your data class, such as my_task.MyData, if the checkpoint uses one.
    """
    from kvt.tasks import Task
    from kvt.tasks.language import LanguageTask
    from kvt.view import maps as plots
    from kvt.view.viewer import ENDING, save_page

    system.require_positive(examples=examples)
    endings = [ENDING] if html else [*plots.FORMATS, ENDING]
    path = plots.require_ending(user_path(f"maps{endings[0]}" if out is None else out), endings)
    is_page = path.suffix.lower() == ENDING
    checkpoint, task = _load(ckpt_path, Task if prompt is None else LanguageTask, attn=attn, model=model, data=data)
    if prompt is None:
        places = {"data_dir": data_dir, "root": root, "text": text, "features": features, "weights": weights}
        task_data = checkpoint.load_data(**{name: path for name, path in places.items() if path is not None})
        batches = task_data.examples(example, examples if is_page else 1)
        title = f"{task_data.task_name}, {task.attn}"
    else:
        batches, title = iter([task.batch_of(prompt)]), task.attn
    examined = [plots.examine(task, batch, number) for number, batch in enumerate(batches, start=example)]
    if not (layers := examined[0].layers):
        raise UserError(f"--ckpt_path {ckpt_path}: no layer has attention_weights of kvt.attention.Attention to draw")
    if prompt is None:
        layers = plots.add_looks(layers, task, task_data.sample(256))
    for line in plots.describe_looks(layers):
        tell(line)
    if is_page:
        save_page(examined, title, ckpt_path, path)
    else:
        plots.save(plots.draw(layers, plots.titled(title, examined[0].caption)), path)
    tell(printable(path))


def _load(path: str, kind: Any, tuned: bool = True, **named: str | None) -> Any:
    """Return a `Checkpoint(path, named)`, and its task on the GPU, or on the CPU if there is no GPU."""
    import torch

    from kvt.run.load_checkpoint import Checkpoint
    from kvt.tune import tune

    if tuned:
        tune()
    checkpoint = Checkpoint(path, named)
    return checkpoint, checkpoint.load_task(kind).to("cuda" if torch.cuda.is_available() else "cpu")


def runs(*folders: str) -> None:
    """List runs: folder, task, attention, the settings that differ among runs of a task, state, and score.

    The score is the validation metric that chooses the best checkpoint of the run. Within a task, the best run is
    first, and runs without a finite score are last. A run without a score shows its error, if any. TensorBoard shows
    all settings and the curves.

    Args:
        folders: folders to search; default: lightning_logs.
    """
    import pandas as pd

    from kvt.study.outcomes import CONFIG, State, read_outcome

    places = [user_path(folder) for folder in folders or ("lightning_logs",)]
    found = {os.path.realpath(path.parent): path.parent for place in places for path in place.rglob(CONFIG)}
    if not found:
        raise UserError(f"no runs in {', '.join(map(str, places))}: pass a folder with runs, such as lightning_logs")
    rows = []
    for folder in found.values():
        state, message, result, _, config = read_outcome(folder)
        stated = {**config.stated, "ckpt_path": config.ckpt_path or ""} if config else {}
        settings = {printable(bare(name)): f"{in_short(value)!s:.{MAX_CHARS}}" for name, value in stated.items()}
        task = str(result.get("task", folder.resolve().parent.parent.name))
        now = ("running" if is_in_use(folder) else "stopped") if state == State.STARTED else str(state)
        metric = result.get("monitor", "val/loss")
        score, better = result.get(metric), result.get("better", {}).get(metric.partition("/")[2])
        told = message[:MAX_CHARS] if score is None else f"{metric} {score:.4f}"
        rank = {"more": -1, "less": 1}.get(better, 0) * score if score is not None and isfinite(score) else inf
        rows.append((task, rank, str(folder), settings.pop("attn", "?"), now, told, settings))
    rows.sort(key=lambda row: row[:3])
    listed = pd.DataFrame(rows, columns=["task", "rank", "folder", "attn", "state", "score", ""])
    named = pd.DataFrame([*listed[""]]).fillna("")
    differ = named.groupby(listed.task).nunique().gt(1).any()
    cells = [listed[["folder", "task", "attn"]], named[differ.index[differ]], listed[["state", "score"]]]
    tell(pd.concat(cells, axis=1).map(printable).to_string(index=False))


def convert(
    *runs: str, attn: str, how: str = "mean", attn_kwargs: dict[str, Any] = NO_KWARGS, out: str | None = None
) -> None:
    """Replace the attention of a trained model, for instance to merge its key and value projections.

    Measure the new checkpoint with kvt validate, and train it further with kvt fit:

        kvt convert lightning_logs/characters/qkv/version_0 --attn q-kv --how keep_v
        kvt validate --ckpt_path q-kv.ckpt
        kvt fit --ckpt_path q-kv.ckpt --max_steps 200

    A new attention without a phase and without --attn_kwargs keeps the model's outputs if projections are only split,
    or if the merged projections were equal. Further training begins at step 0, with a new state of the optimiser.

    Args:
        runs: a run's folder, which stands for its best checkpoint, or path to a checkpoint.
        attn: the new attention: qkv, kv, kv+phase, q-kv, k or k+phase. The run's attention must be qkv, kv, q-kv or k.
        how: how to merge projections. keep_k keeps the key projection. keep_v keeps the value projection. mean averages
            all merged projections.
        attn_kwargs: arguments of the new attention, such as --attn_kwargs.attend_self false. --attn_kwargs.kv_heads 1
            replaces all key and value heads by their mean. Arguments that you do not set keep the old model's values.
        out: path of the new checkpoint; default: the attention's name with .ckpt, in the working directory.
    """
    from kvt.run.callbacks import AtomicCheckpointIO
    from kvt.run.load_checkpoint import Checkpoint
    from kvt.tasks import Task
    from kvt.tasks.base import as_config
    from kvt.tasks.convert import convert_task

    if len(runs) != 1:
        raise UserError("kvt convert takes one run: pass its folder, or a checkpoint")
    if own := run_of_checkpoint(path := user_path(out or f"{attn}.ckpt")):
        raise UserError(f"--out {path}: is inside the folder of the run {own}: choose another folder")
    checkpoint = Checkpoint(user_path(runs[0]))
    source: Task = checkpoint.load_task(Task)  # type: ignore[type-abstract]
    task, saved = convert_task(source, attn, how, attn_kwargs), checkpoint.saved
    config = saved["config"] | {"model": as_config(task), "ckpt_path": None}
    new = {"hyper_parameters": dict(task.hparams), "config": config, "metrics": {}, "state_dict": task.state_dict()}
    data = {name: saved[name] for name in ("datamodule_hyper_parameters",) if name in saved}
    AtomicCheckpointIO().save_checkpoint({**data, **new, "epoch": 0, "global_step": 0}, path)
    tell(printable(path))


def study_run(
    *grids: str,
    scale: str | None = None,
    folder: str = FOLDER,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    list: bool = False,
    print_grid: bool = False,
    only: list[str] = NOTHING,
    set_: list[str] = NOTHING,
    from_: list[str] = NOTHING,
) -> None:
    """Train the runs of a grid that are not done yet.

    You may stop the command at any time. The same command resumes unfinished runs from their last checkpoints, and does
    not train failed runs again. Several commands, on one or several machines, may share a folder and its runs.

    Args:
        grids: YAML files, or names of kvt's grids, such as table2.
        scale: name of a scale of the grid, such as smoke, laptop or paper; default: laptop, or else the first scale.
        folder: folder of the runs. Each run is written to the subfolder <task>/<attn>/<name>.
        workers: number of runs to train at once. Each run gets a share of the cores, and one of the GPUs if there are
            any. Several runs may share a GPU. Default: the number of GPUs, or of cores if there is no GPU.
        ray: address of a Ray cluster, or "auto" for the cluster of this machine. All machines of the cluster must have
            the folder and the data at the same path.
        retry_failed: train failed runs again from their last checkpoint, or from the beginning if a file of the run is
            damaged or the folder has other settings.
        dry_run: print how many runs of each task are left, and the time that they will take, estimated from finished
            and recorded runs.
        list: print each run and its state, without training.
        print_grid: print the YAML file of the grid, to edit it as a grid of your own.
        only: train only the runs with these settings, such as --only task=sort dim=64. Here task and seed are settings.
        set_: replace or add axes in all tasks of the grid, such as --set norm=post lr=[1e-3,1e-4].
        from_: records, or folders of runs. The command does not train runs whose results are in these folders.
    """
    if print_grid:
        return tell("\n".join(system.find_yaml(grid, system.GRIDS).read_text() for grid in grids))
    how: Any = {"workers": workers, "ray": ray, "retry_failed": retry_failed, "dry_run": dry_run, "listed": list}
    _exit(_make(_read(grids, scale, only, set_), user_path(folder).resolve(), from_=from_, **how))


def study_report(
    *grids: str,
    scale: str | None = None,
    folder: str = FOLDER,
    out: str | None = None,
    set_: list[str] = NOTHING,
    from_: list[str] = NOTHING,
    format: str | None = None,
) -> None:
    """Write the report of a grid.

    The report consists of report.md with its pictures, tables.csv with the numbers of the tables, and runs.csv with a
    row for each run.

    Args:
        grids: YAML files, or names of kvt's grids, such as table2.
        scale: name of a scale of the grid; default: laptop, or else the first scale.
        folder: folder of the runs.
        out: folder of the report; default: reports/<grid>-<scale> in the folder of the runs.
        set_: the changes of the grid, as in kvt study run.
        from_: records, or folders of runs. The report uses their results instead of the runs in --folder.
        format: pdf also writes each picture as PDF, for papers.
    """
    if format not in (None, "pdf"):
        raise unknown("--format", format, ["pdf"])
    parsed, chosen = _read(grids, scale, changes=set_)
    from kvt.study.outcomes import read_outcomes
    from kvt.study.records import find_outcomes

    root = user_path(folder).resolve()
    targets = _targets(parsed, root, out)
    system.require_folder(root, "--folder", write=False)
    outcomes = [find_outcomes(chosen, from_) if from_ else read_outcomes(grid.runs, root) for grid in parsed]
    _report(parsed, outcomes, targets, None if from_ else root, format == "pdf")


def study_record(*grids: str, out: str, scale: str | None = None, from_: list[str] = FOLDERS) -> None:
    """Collect the results of a grid in a record: a small folder without checkpoints, to keep and to share.

    The command adds new results to an existing record. If a run was repeated, for instance on another machine, the
    record keeps all its different results.

    Args:
        grids: a YAML file, or the name of one of kvt's grids, such as table2.
        out: folder of the record.
        scale: name of a scale of the grid; default: laptop, or else the first scale.
        from_: folders of runs, and other records. The folders may have any names.
    """
    if len(grids) > 1:
        raise UserError("--out takes one record: pass one grid")
    (grid,), _ = _read(grids, scale)
    from kvt.study.records import widen_record

    system.require_folder(target := user_path(out), "--out")
    tell(widen_record(grid, target, from_))


def reproduce(
    *names: str,
    all: bool = False,
    scale: str = "laptop",
    folder: str = FOLDER,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    list: bool = False,
    only: list[str] = NOTHING,
) -> None:
    """Train the runs of kvt's grids, such as the paper's tables and figures, and write their reports.

    The reports of table2 and table3 contain the paper's Figures 2 and 4. You may stop the command at any time. The same
    command resumes the runs.

    Args:
        names: table2, table3, figure3, figure5, figure6, figure7, three-projections, cycles, shift, directions, leak,
            recall, keyless, cache, retrofit, follow-up, lengths or lacks; or table1, which measures the cost of
            attention with kvt bench.
        all: select all names.
        scale: smoke (minutes; checks the code with models that learn almost nothing), laptop (an evening) or paper
            (days).
        folder: folder of the runs and of the reports.
        workers: number of runs to train at once; default: the number of GPUs, or else of cores.
        ray: address of a Ray cluster, or "auto" for the cluster of this machine.
        retry_failed: train failed runs again.
        dry_run: print the number of finished runs, and the time that the other runs will take.
        list: print each run and its state, without training.
        only: train only the runs with these settings, such as --only task=sort dim=64. The reports contain all finished
            runs. table1 ignores these settings.
    """
    known = [*system.yaml_names(system.GRIDS), TABLE1]
    chosen = known if all else [*dict.fromkeys(names)]
    if not chosen:
        raise UserError(f"pass tables or figures, or --all: {', '.join(known)}")
    if strange := [name for name in chosen if name not in known]:
        raise unknown("table or figure", strange[0], known)
    root, failed = user_path(folder).resolve(), 0
    if grids := [str(system.GRIDS / f"{name}.yaml") for name in chosen if name != TABLE1]:
        how: Any = {"workers": workers, "ray": ray, "retry_failed": retry_failed, "dry_run": dry_run, "listed": list}
        failed = _make(_read(grids, scale, only), root, reports=True, **how)
    if TABLE1 in chosen and (dry_run or list):
        tell(f"{TABLE1} has no runs: kvt bench measures it in minutes")
    elif TABLE1 in chosen:
        from kvt.bench import bench

        (root / "reports").mkdir(parents=True, exist_ok=True)
        sizes: dict[str, Any] = {"n": [16], "d": [64], "repeats": 3} if scale == "smoke" else {}
        bench(**sizes, out=str(root / "reports" / TABLE1), plot=True)
    _exit(failed)


def _read(names: Sequence[str], scale: str | None, only: Sequence[str] = (), changes: Sequence[str] = ()) -> Any:
    """Return the grids and their runs. With `only`, return the runs with these settings and the grids of these runs."""
    if not names:
        raise UserError("pass a grid, such as table2")
    from kvt.reports.report import require_report
    from kvt.study.grid import deduplicate, read_grid, select

    grids = [read_grid(name, scale, changes) for name in names]
    for grid in grids:
        require_report(grid)
    chosen = deduplicate([run for grid in grids for run in grid.runs])
    chosen = [*select(chosen, system.parse_settings(" ".join(only).split(), "--only"), "--only")]
    return [grid for grid in grids if {run.name for run in grid.runs} & {run.name for run in chosen}], chosen


def _make(read: Any, root: Path, reports: bool = False, from_: Sequence[str] = (), **how: Any) -> int:
    """Train runs, write reports on their grids if `reports`, and print verdicts. Return the number of failed runs.

    `read` is a result of `_read`; `how` has arguments of `make_runs`. With `dry_run` or `listed` in `how`, only print
    a plan or a list, and return 0.
    """
    from kvt.reports.sections import verdicts
    from kvt.study.outcomes import read_outcomes
    from kvt.study.records import find_outcomes
    from kvt.study.runner import make_runs

    (grids, runs), plans = read, how["dry_run"] or how["listed"]
    recorded = {name: found for name, found in find_outcomes(runs, from_).items() if found}
    targets = _targets(grids, root) if reports and not plans else []
    failed = make_runs(runs, root, recorded=recorded, **how)
    if plans:
        return 0
    outcomes = [{**read_outcomes(grid.runs, root), **recorded} for grid in grids]
    if reports:
        _report(grids, outcomes, targets, root)
    for grid, found in zip(grids, outcomes, strict=True):
        for line in verdicts(grid, found):
            tell(line)
    return failed


def _targets(grids: Any, root: Path, out: str | None = None) -> list[Path]:
    """Return the folders of reports; raise UserError if kvt cannot write to one, or if two are equal."""
    targets = [root / "reports" / grid.report if out is None else user_path(out) for grid in grids]
    for target in targets:
        system.require_folder(target, "--folder" if out is None else "--out")
        if (count := targets.count(target)) > 1:
            raise UserError(f"{count} reports would be in {target}: write one at a time, each with its own --out")
    return targets


def _report(grids: Any, outcomes: Any, targets: Sequence[Path], root: Path | None, pdf: bool = False) -> None:
    from kvt.reports.report import write_report

    for grid, found, target in zip(grids, outcomes, targets, strict=True):
        for path in write_report(grid, found, target, root, pdf):
            tell(printable(os.path.relpath(path)))


def _exit(failed: int) -> None:
    if failed:
        sys.exit(f"error: {failed} runs failed: rerun with --retry_failed")


def experiment(script: str, description: str, choices: Sequence[str], option: str = "") -> None:
    """Train and test as `kvt run` does, with the flags of the command line and the tasks of a script.

    Args:
        script: `__file__` of the script.
        description: the first lines of its `--help`.
        choices: names of configurations in kvt/configs. The first name is the default.
        option: name of the flag that selects one of `choices`.
    """
    chosen = f" --{option} chooses among {', '.join(choices)}." if option else ""
    texts = {"prog": f"python {Path(script).parent.name}/{Path(script).name}", "description": description + chosen}
    system.run(lambda: run_words(["run", *sys.argv[1:]], choices, option, **texts))


def run_words(argv: Sequence[str], choices: Sequence[str] = (), option: str = "", **texts: str) -> None:
    """Execute the command `run`, `fit`, `validate`, `test` or `predict`.

    Args:
        argv: the command and its flags.
        choices: names of configurations that a script in experiments/ accepts; the first is the default.
        option: name of the flag that selects one of `choices`.
        texts: `prog` and `description` for `--help`.
    """
    from kvt.run import fit
    from kvt.run.cli import KvtCLI, parse_config, settings_parser
    from kvt.run.load_checkpoint import Checkpoint

    system.silence_libraries()  # importing Lightning has reset its log levels
    command, *words = argv
    flags, words = _run_flags(command, words, choices, option)
    texts = {"prog": f"kvt {command}", "usage": "%(prog)s [flags]", **texts}
    if not (flags.config or flags.ckpt_path or flags.model) and {"-h", "--help"} & {*words}:
        return settings_parser({}, **texts).print_help()
    named, resumed = {"attn": flags.attn, "model": flags.model, "data": flags.data}, flags.resume
    checkpoint = Checkpoint(flags.ckpt_path, named) if flags.ckpt_path is not None else None
    source = None if flags.config else checkpoint
    config = source.config if source else read_configs(flags.config, named)
    config |= {"ckpt_path": str(checkpoint.path)} if checkpoint else {}
    if command not in TRAINING:  # only the command's own flags limit the data that it measures
        limits = ("limit_", "overfit_batches", "fast_dev_run")
        config["trainer"] = {name: value for name, value in config["trainer"].items() if not name.startswith(limits)}
    if flags.print_config:
        return tell(yaml.safe_dump(parse_config(config, words), sort_keys=False), end="")
    if resumed and (resumed / "result.json").is_file():
        return tell(f"{printable(os.path.relpath(resumed))} already finished; see result.json")
    cli = KvtCLI(config, words, source, **texts)
    if command not in TRAINING:
        if path := getattr(fit, command)(cli):
            tell(f"predictions in {printable(os.path.relpath(path))}")
        return
    changed = [bare(name) for name, *_ in RunConfig(**cli.content).differences(RunConfig(**config))] if resumed else []
    if changed := [name for name in changed if name not in cli.datamodule.path_settings]:
        raise UserError(f"--resume {resumed}: a resumed run keeps its settings: drop --{changed[0]}")
    result = fit.train(cli, resumed, resume=resumed is not None, test=command == "run")
    if not result.metrics:
        return
    folder = {"run": os.path.relpath(result.folder)} if result.folder else {}
    tell(f"\n{system.table(result.metrics | cli.model.metric_notes | folder)}")


def _run_flags(command: str, words: list[str], choices: Sequence[str], option: str) -> tuple[Any, list[str]]:
    """Parse `RUN_FLAGS`, --attn and --print_config. Return them, and the words for `KvtCLI`: other flags and --attn.

    Raises UserError if --resume names no run, or stands beside another of `RUN_FLAGS`.
    """
    parser = system.OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    parser.add_argument("--attn", "--model.attn")
    parser.add_argument("--print_config", action="store_true")
    for flag in RUN_FLAGS[1:]:
        parser.add_argument(f"--{flag}")
    if option:
        parser.add_argument(f"--{option}", choices=choices)
    if command == "run" and not choices and words and not words[0].startswith("-"):
        words = ["--config", *words]
    flags, others = parser.parse_known_args(words)
    others += [f"--attn={flags.attn}"] * (flags.attn is not None)
    if flags.resume is not None:
        if given := [name for name in RUN_FLAGS if name != "resume" and getattr(flags, name)]:
            raise UserError(f"--resume {flags.resume}: a resumed run keeps its settings: drop --{given[0]}")
        flags.resume = user_path(flags.resume).resolve()
        flags.config = [str(flags.resume / "config.yaml")]
        if not os.path.isfile(flags.config[0]):
            raise UserError(f"--resume {flags.resume}: not the folder of a run: it has no config.yaml")
    elif choices and (vars(flags).get(option) or flags.ckpt_path is None):  # otherwise the checkpoint names the task
        flags.config.insert(0, vars(flags).get(option) or choices[0])
    return flags, others


def main() -> None:
    """Run the `kvt` command."""
    system.run(lambda: _run(sys.argv[1:]))


def _run(argv: Sequence[str]) -> None:
    if name := next((name for name in (" ".join(argv[:2]), *argv[:1]) if name in COMMANDS), None):
        execute(name, argv[len(name.split()) :])
    elif not argv:
        raise UserError("kvt needs a command: see kvt --help")
    elif argv[0] in LIGHTNING:
        run_words(argv, description=LIGHTNING[argv[0]])
    elif argv[0] in ("-h", "--help", "--version"):
        parser = system.OneLineParser("kvt", "kvt <command> [flags]", "Train and use models of any attention.", EPILOG)
        parser.add_argument("--version", action="version", version=f"kvt {__version__}")
        commands = parser.add_argument_group("commands; kvt <command> --help shows the flags of a command")
        for name, text in (LIGHTNING | {name: text for name, (_, text) in COMMANDS.items()}).items():
            commands.add_argument(name, help=text)
        parser.parse_args(argv[:1])
    else:
        raise unknown("command", argv[0], [*LIGHTNING, *COMMANDS])


def execute(name: str, words: Sequence[str]) -> None:
    """Run the command `name` of `COMMANDS` with the rest of the command line, split into words."""
    function, parser = command_parser(name)
    given = parser.parse_args([*words]).as_dict()
    kinds = {name: parameter.kind for name, parameter in signature(function).parameters.items()}
    unnamed = [word for name in kinds if kinds[name] is Parameter.VAR_POSITIONAL for word in given.pop(name, ())]
    function(*unnamed, **{name: given[name.rstrip("_")] for name in kinds if name.rstrip("_") in given})


def command_parser(name: str) -> tuple[Callable[..., None], ArgumentParser]:
    """Return the function of the command `name` of `COMMANDS`, and the parser of its flags.

    Each parameter of the function is a flag, except one like `*grids`, which gets the values without a flag. The
    parameters `from_` and `set_` have the flags --from and --set.
    """
    function: Callable[..., None] = resolve_name(COMMANDS[name][0])
    said = parse(function.__doc__ or "")
    explained = {parameter.arg_name: parameter.description for parameter in said.params}
    parser = _Parser(prog=f"kvt {name}", description=said.description, allow_abbrev=False, formatter_class=_Help)
    for parameter in signature(function).parameters.values():
        flag, kind, default = f"--{parameter.name.rstrip('_')}", parameter.annotation, parameter.default
        how: dict[str, Any] = {"required": True} if default is Parameter.empty else {"default": default}
        if parameter.kind is Parameter.VAR_POSITIONAL:
            flag, how = parameter.name, {"nargs": "*", "default": SUPPRESS}  # --help would print any other default
        elif kind is bool:
            how = {"action": "store_true"}
        elif get_origin(kind) is list:
            how |= {"nargs": "+", "type": get_args(kind)[0]}
        elif kind not in (str, str | None):  # without a type, the parser does not convert the text
            how |= {"type": kind}
        parser.add_argument(flag, help=explained[parameter.name], **how)
    return function, parser


class _Parser(system.OneLineParser, ArgumentParser):
    """A parser of the flags of a command."""


class _Help(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """A help formatter that keeps the lines of a docstring, some of which are commands to copy."""
