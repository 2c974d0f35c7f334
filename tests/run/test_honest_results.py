"""Every reported number equals one computed by hand from the checkpoint and the data.

The paper's BLEU over a whole split is in tests/tasks/test_translation.py.
"""

import csv
import json
import subprocess
import sys
from collections import defaultdict
from fractions import Fraction
from itertools import chain, islice
from math import exp, log, log2
from pathlib import Path

import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.data.tokens import IGNORE
from kvt.run.load_checkpoint import Checkpoint, load, read_checkpoint
from kvt.tasks import CharacterTask, LanguageModelTask, NumberTask, RecallTask, TranslationTask
from kvt.tasks.metrics import Mean
from kvt.tasks.translation import unpadded
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_LISTS, slow
from tests.helpers.runs import read_history

TASKS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
FAMILIES = ["reverse", "mnist", "anomaly", "characters", "translation", "language_model --loss_on=all --separator=."]
ALIKE = {"rel": 1e-5, "abs": 1e-6}  # of float32, added up in another order


# ---- means ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**20)), min_size=1, max_size=8), st.integers(0, 2**30))
def test_means_are_exact_beyond_a_thousand_million_predictions(batches, before):
    """float32 alone cannot count beyond 2²⁴."""
    mean = Mean()
    mean.update(torch.tensor(before), before)
    right, total = before, before
    for some, more in batches:
        some = min(some, more)
        mean.update(torch.tensor(some), more)
        right, total = right + some, total + more
    assert mean.compute().item() == pytest.approx(float(Fraction(right, total)), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_means_are_in_double_precision_whatever_the_losses_are(dtype):
    task = CharacterTask({"vocab": ["a", "b"], "length": 4}, dim=4, depth=1, heads=1).to(dtype=dtype)
    mean = task.means["val/ppl"]
    for _ in range(300):
        task.measure("val", {"ppl": torch.tensor(200, dtype=dtype)}, 70_001)  # exp(200) is beyond float32
    assert mean.compute().exp().item() == pytest.approx(exp(200), rel=1e-7)
    assert mean.to("meta").total.device.type == "meta"


# ---- the whole split, the last short batch with the rest -----------------------------------------


def classified(task, data, split):
    inputs, targets = next(iter(data.make_batches(*data.splits[split], batch_size=10_000, seed=data.seed)))
    logits = task(inputs).double().flatten(0, -2)
    loss = F.cross_entropy(logits, targets.flatten()).item()
    return {"loss": loss, "acc": (logits.argmax(-1) == targets.flatten()).double().mean().item()}


def read(task, data, split):
    losses, right = [], []
    for symbols, following in data.make_batches(*data.splits[split], batch_size=1):  # window by window
        logits = task.model(symbols)[following != IGNORE].double()
        losses += F.cross_entropy(logits, following[following != IGNORE], reduction="none").tolist()
        right += (logits.argmax(-1) == following[following != IGNORE]).tolist()
    loss = sum(losses) / len(losses)
    characters = {"bpc": loss / log(2)} if isinstance(task, CharacterTask) else {}
    return {"loss": loss, "acc": sum(right) / len(right), "ppl": exp(loss), **characters}


def written(task, data, split):
    """Row by row, over all targets that are predicted, and over the real ones: with loss_on=real, these alone."""
    losses, right, real = [], [], []
    for starts, stops in zip(*data.splits[split][:2], strict=True):
        stops = min(stops, starts + data.length + 1)
        row = [int(token) for token in data.splits[split][2][starts:stops]]
        row += [data.tokens.end] * (data.length + 1 - len(row))
        count = int(stops - starts) - 1 if data.loss_on == "real" else data.length
        logits, targets = task.model(torch.tensor([row[:-1]]))[0, :count].double(), torch.tensor(row[1:])[:count]
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
        right.append(logits.argmax(-1) == targets)
        real.append([token for place, token in enumerate(row[1:], 1) if place < stops - starts])
    every = torch.cat(losses)
    nats = sum(nll[: len(of_row)].sum().item() for nll, of_row in zip(losses, real, strict=True))
    tokens = [token for of_row in real for token in of_row]
    size = sum(len(data.tokens.pieces[token]) for token in tokens)
    return {
        **{
            "loss": every.mean().item(),
            "ppl": every.mean().exp().item(),
            "acc": torch.cat(right).double().mean().item(),
        },
        **{"real_ppl": exp(nats / len(tokens)), "bpb": nats / log(2) / size, "padding": 1 - len(tokens) / len(every)},
    }


def recalled(task, data, split):
    """Question by question; in a test by the distance of answers, 1, 2–3, 4–7 …, and by the questions of a sequence."""
    losses, right = [], defaultdict(list)
    for symbols, answers, distance in zip(*data.splits[split], strict=True):
        logits = task.model(symbols[None])[0].double()
        for place in (answers != IGNORE).nonzero().flatten().tolist():
            losses.append(F.cross_entropy(logits[place], answers[place]).item())
            right["acc"].append(int(logits[place].argmax()) == int(answers[place]))
            if split == "test" and distance[place]:
                right[f"acc_{2 ** int(log2(distance[place]))}_back"].append(right["acc"][-1])
            if split == "test":
                right[f"acc_{2 ** int(log2((answers != IGNORE).sum()))}_asked"].append(right["acc"][-1])
    for word in ("_asked", "_back"):  # a single bin tells nothing that "acc" does not
        if len(numbers := [name for name in right if name.endswith(word)]) == 1:
            del right[numbers[0]]
    return {"loss": sum(losses) / len(losses), **{name: sum(each) / len(each) for name, each in right.items()}}


def translated(task, data, split):
    """Sentence by sentence: the divergence from 0.9 on the truth and the rest on every other symbol but padding."""
    nll, divergence = [], []
    for source, target in zip(*map(unpadded, data.splits[split]), strict=True):
        log_p = task.model(torch.tensor([source]), torch.tensor([target[:-1]]))[0].double().log_softmax(-1)
        for row, truth in zip(log_p, target[1:], strict=True):
            wanted = torch.full_like(row, 0.1 / (len(row) - 2))
            wanted[truth], wanted[1] = 0.9, 0
            nll.append(-row[truth].item())
            divergence.append(F.kl_div(row, wanted, reduction="sum").item())
    texts = task.translate([source for source, _ in data.texts[split]])
    references = [[reference for _, reference in data.texts[split]]]
    bleu, chrf = (count(texts, references).score for count in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf))
    mean = sum(nll) / len(nll)
    return {"loss": sum(divergence) / len(divergence), "ppl": exp(mean), "bleu": bleu, "chrf": chrf}


def by_hand(run: Path, split: str, name: str = "best") -> dict[str, float]:
    checkpoint = run / "checkpoints" / f"{name}.ckpt"
    task, data = load(checkpoint), Checkpoint(checkpoint).load_data()
    ways = {CharacterTask: read, NumberTask: read, LanguageModelTask: written, RecallTask: recalled}
    way = (ways | {TranslationTask: translated}).get(type(task), classified)
    with torch.no_grad():
        return {f"{split}/{name}": value for name, value in way(task, data, split).items()}


@pytest.mark.parametrize("config", [*FAMILIES, *slow(*(name for name in TASKS if name not in FAMILIES))])
def test_the_result_is_that_of_the_best_checkpoint_on_the_whole_of_each_split(experiment, config):
    config, *flags = config.split()
    result = experiment(config, *SMALL[config], "--max_epochs", "1", *flags)
    splits = ["val"] if config in ("characters", "human_numbers", "language_model") else ["val", "test"]
    assert result.get("val/padding", 1) > 0 or not flags
    for split in splits:
        for name, value in by_hand(result["path"].parent, split).items():
            assert result[name] == pytest.approx(value, **ALIKE), name
    reported = {name for name in result if name.startswith(("val/", "test/"))} - {"val/bleu_paper", "test/bleu_paper"}
    assert reported == {name for split in splits for name in by_hand(result["path"].parent, split)}


@pytest.mark.parametrize(
    ("flags", "limited"),
    [
        ("--limit_val_batches 1 --limit_test_batches 0.5", {"limit_val_batches", "limit_test_batches"}),
        ("--limit_val_batches 100 --limit_test_batches 100", set()),  # the splits have fewer batches
        ("--limit_val_batches 1 --enable_checkpointing false", set()),  # the result has no validation
        ("--limit_test_batches 0", set()),
        ("--overfit_batches 2", {"limit_train_batches", "limit_val_batches"}),
    ],
)
def test_a_result_tells_which_data_were_limited(experiment, flags, limited):
    result = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1", *flags.split())
    assert {name for name, note in result["notes"].items() if "not all of the data" in note} == limited
    assert ("test/acc" in result) == (flags != "--limit_test_batches 0")


@pytest.mark.parametrize(
    ("task", "flags", "told"),
    [
        ("reverse", "--schedule constant --warmup 5", "5 steps in a run of 4: the learning rate reached at most"),
        ("reverse", "--schedule constant --warmup 4", None),
        ("reverse", "--schedule cosine --warmup 4", "4 steps in a run of 4"),  # the decay begins within the warm-up
        ("reverse", "--schedule cosine_to_tenth --warmup 40", "8% of 0.01"),
        ("translation", "--schedule noam --warmup 40", "10% of"),
        ("mqar", "--schedule constant --warmup 5 --stop_at 1e-9", "5 steps in a run of"),
    ],
)
def test_a_result_tells_the_highest_rate_of_a_run_that_ends_within_its_warmup(experiment, task, flags, told):
    """Steps are those of the optimiser: two batches each."""
    words = ["--max_steps", "4", "--accumulate_grad_batches", "2", "--lr", "0.01", "--log_every_n_steps", "1"]
    result = experiment(task, *SMALL[task], *words, *flags.split())
    note = result["notes"].get("warmup")
    assert (note is None) is (told is None)
    if told:
        highest = max(row["train/lr"] for row in history(result["path"].parent) if "train/lr" in row)
        assert told in note
        assert f"at most {highest:.3g}, " in note


@pytest.mark.slow
def test_the_tested_checkpoint_is_the_best_where_that_is_not_the_last(experiment):
    result = experiment("copy", *SMALL_LISTS, "--max_epochs", "6", "--lr", "0.1")
    best, last = (by_hand(result["path"].parent, "test", name) for name in ("best", "last"))
    assert result["test/loss"] == pytest.approx(best["test/loss"], **ALIKE)
    assert result["test/loss"] != pytest.approx(last["test/loss"], **ALIKE)


@pytest.mark.parametrize("config", ["reverse", *slow("mnist", "anomaly", "human_numbers", "translation")])
def test_training_reports_the_mean_of_all_it_was_shown(experiment, config):
    """At a learning rate that changes no weight, logged once an epoch."""
    still = ["--lr", "1e-30", "--max_epochs", "2"]
    still += [] if config == "mnist" else ["--dropout", "0"]
    still += ["--feed_forward_dropout", "0"] if config == "human_numbers" else []
    whole = experiment(config, *SMALL[config], *still, "--log_every_n_steps", "999")["path"].parent
    task, data = load(whole / "checkpoints" / "last.ckpt"), Checkpoint(whole / "checkpoints" / "last.ckpt").load_data()
    data.setup("fit")
    loader, logged = data.train_dataloader(), [row for row in history(whole) if "train/loss" in row]
    assert len(logged) == 2
    for epoch, row in enumerate(logged):
        loader.set_epoch(epoch)
        sums, count = defaultdict(float), 0
        with torch.no_grad():
            for batch in loader:
                measured, number = task.compute_metrics(batch), int(task.num_predictions(batch))
                count += number
                for metric in task.metrics:
                    if "train" in metric.stages:
                        sums[metric.name] += float(measured[metric.name]) * number
        for name, total in sums.items():
            assert row[f"train/{name}"] == pytest.approx(total / count, **ALIKE)


# ---- in half precision ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", *slow("bf16-mixed")])
def test_accuracy_counts_predictions_in_any_precision(experiment, precision):
    """It is a whole number of right ones, beyond those that half precision can count; gradients are clipped, too."""
    sizes = [*SMALL_LISTS, "--val_size", "301", "--test_size", "333", "--max_epochs", "1"]
    result = experiment("copy", *sizes, "--precision", precision)
    for name, predictions in (("val/acc", 301 * 16), ("test/acc", 333 * 16)):
        right = result[name] * predictions
        assert right > 256
        assert right == pytest.approx(round(right), abs=0.01)
    if dtype := {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision):
        checkpoint = result["path"].parent / "checkpoints" / "best.ckpt"
        task, data = load(checkpoint), Checkpoint(checkpoint).load_data()
        assert {weight.dtype for weight in task.parameters()} == {torch.float64 if precision == "64-true" else dtype}
        with torch.no_grad():
            expected = classified(task, data, "test")
        assert result["test/loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert result["test/acc"] == pytest.approx(expected["acc"], rel=1e-6)


# ---- the same everywhere -------------------------------------------------------------------------


def history(run: Path) -> list[dict[str, float]]:
    rows = [{name: float(value) for name, value in row.items() if value} for row in read_history(run)]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})  # each step once, in order
    return rows


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ("reverse", "--max_epochs 3 --accumulate_grad_batches 4 --log_every_n_steps 1"),
        ("translation", "--num_sanity_val_steps 2"),
        *slow(
            ("reverse", "--max_epochs 3 --lr 0.3 --log_every_n_steps 4"),
            ("reverse", "--max_epochs 1 --val_check_interval 2 --log_every_n_steps 3"),
            ("mnist", "--log_every_n_steps 2"),
            ("anomaly", "--max_epochs 2"),
            ("characters", "--num_sanity_val_steps 1"),
            ("human_numbers", "--max_epochs 2"),
        ),
    ],
)
def test_history_events_checkpoint_and_result_agree(experiment, config, flags):
    result = experiment(config, *SMALL[config], *flags.split())
    run = result["path"].parent
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    shown = defaultdict(dict)
    for name in events.Tags()["scalars"]:
        if name.startswith(("train/", "val/", "test/")):
            shown[name] = {event.step: event.value for event in events.Scalars(name)}
    kept = defaultdict(dict)
    for row in history(run):
        for name in row.keys() - {"step"}:
            kept[name][int(row["step"])] = row[name]
    assert kept.keys() >= {"train/loss", "val/loss"}
    for name, values in kept.items():
        assert shown[name].keys() == values.keys(), name
        for step, value in values.items():
            assert shown[name][step] == pytest.approx(value, rel=1e-6), (name, step)
    assert not [name for name in shown if name.startswith("val/") and name not in kept]

    best = read_checkpoint(run / "checkpoints" / "best.ckpt")
    row = next(row for row in history(run) if row["step"] == best["global_step"])
    judged = {name: value for name, value in row.items() if name.startswith("val/")}
    assert judged == best["metrics"] == {name: value for name, value in result.items() if name.startswith("val/")}
    task = load(run / "checkpoints" / "best.ckpt")
    assert result[task.monitor] == {"more": max, "less": min}[task.monitored().better](kept[task.monitor].values())
    for name, value in result.items():
        if name.startswith(("val/", "test/")):
            (event,) = events.Scalars(f"when_best/{name.replace('/', '_')}")
            assert event.value == pytest.approx(value, rel=1e-6)


# ---- predictions ---------------------------------------------------------------------------------


def predictions(kvt, run: Path) -> list[dict[str, str]]:
    kvt("predict", "--ckpt_path", str(run / "checkpoints" / "best.ckpt"))
    with (run / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("config", ["reverse", "characters", *slow("mnist", "anomaly")])
def test_the_predictions_are_as_right_as_the_result_says(experiment, kvt, config):
    result = experiment(config, *SMALL[config], "--max_epochs", "1")
    rows = predictions(kvt, result["path"].parent)
    if config == "characters":
        right = [one == other for row in rows for one, other in zip(row["target"], row["prediction"], strict=True)]
        assert sum(right) / len(right) == pytest.approx(result["val/acc"], rel=1e-6)
    else:
        pairs = [[row[name].strip("[]").split(",") for name in ("target", "prediction")] for row in rows]
        right = [sum(map(str.__eq__, target, other)) / len(target) for target, other in pairs]
        assert sum(right) / len(right) == pytest.approx(result["test/acc"], rel=1e-6)


# ---- two processes -------------------------------------------------------------------------------

SCRIPTS = {
    "characters": ["characters.py", *SMALL["characters"], "--batch_size", "2"],
    "mqar": ["recall.py", "--task=mqar", *SMALL["mqar"], "--fewest_pairs=1", "--batch_size=2", "--val_size=9"],
    "sort": ["synthetic.py", "--task", "sort", *SMALL_LISTS, "--batch_size", "3"],
    "translation": ["translation.py", *SMALL["translation"], "--batch_size", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("config", SCRIPTS)
def test_two_processes_report_what_one_finds_by_hand(in_tmp_dir, config):
    """Each example counts once, in splits that they cannot share evenly."""
    script, *flags = SCRIPTS[config]
    flags += [*QUIET, "--devices", "2", "--strategy", "ddp", "--max_epochs", "1"]
    subprocess.run([sys.executable, str(REPOSITORY / "experiments" / script), *flags], check=True, capture_output=True)
    (path,) = in_tmp_dir.rglob("result.json")
    result = json.loads(path.read_text())
    data = Checkpoint(best := path.parent / "checkpoints" / "best.ckpt").load_data()
    order = {"batch_size": data.batch_size, "seed": data.seed, "shuffle": True, "drop_last": data.drop_last}
    shares = [data.make_batches(*data.splits["train"], rank=rank, world_size=2, **order) for rank in (0, 1)]
    batches_of_both = chain(*(islice(share, 6 if config == "characters" else None) for share in shares))
    task = load(best)
    trained = sum(int(task.num_predictions(batch)) for batch in batches_of_both)
    rate = next(value for name, value in result.items() if name.endswith("_per_second"))
    assert rate * result["seconds"] == pytest.approx(trained)
    batches = {
        split: len(data.make_batches(*data.splits[split], batch_size=data.batch_size, seed=0)) for split in data.splits
    }
    assert any(number % 2 for split, number in batches.items() if split != "train")
    for split in data.splits.keys() - {"train"}:
        for name, value in by_hand(path.parent, split).items():
            assert result[name] == pytest.approx(value, **ALIKE), name
