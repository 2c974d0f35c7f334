"""`--teacher`: a run that learns from another one, too."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from kvt import RunConfig, load, train
from kvt.cli.lightning_cli import run_words
from kvt.data.tokens import IGNORE
from kvt.run.load_checkpoint import Checkpoint
from kvt.system.console import run
from kvt.tasks import LanguageModelTask
from tests.conftest import CONFIGS, QUIET, SMALL
from tests.helpers.runs import checkpoint, equal, read_history, weights
from tests.helpers.small_tasks import LENGTH, OTHERS, TASKS, small_batch, small_task
from tests.run.test_one_run import Keep, killed_and_whole
from tests.run.test_overfit import small

LISTS = [*SMALL["reverse"], "--max_epochs", "2"]
STILL = {name: {"dropout": 0.0} for name in TASKS}
STILL["NumberTask"]["feed_forward_dropout"] = 0.0


def divergence(teacher: torch.Tensor, logits: torch.Tensor) -> float:
    """Return Σ p (log p − log q), place by place, of logits (P, C)."""
    found = []
    for theirs, ours in zip(teacher.double(), logits.double(), strict=True):
        p, q = (x.exp() / x.exp().sum() for x in (theirs, ours))
        found.append((p * (p / q).log()).sum())
    return float(torch.stack(found).mean())


def of_places(task, batch):
    """Return the logits at all places, by `forward` alone."""
    return task(*task.inputs(batch)).flatten(0, -2)


def batch_of(name):
    """Return a small batch whose features, if it has some, differ."""
    inputs, *others = small_batch(name)
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(inputs.shape, generator=generator) if inputs.is_floating_point() else inputs, *others)


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_of_training_is_the_tasks_own_and_the_divergence_from_the_teacher(name):
    task, teacher = small_task(name, attn="kv", **STILL[name]), small_task(name, attn="qkv")
    batch = batch_of(name)
    own = task.train().training_step(batch, 0)
    task.learn_from(teacher)
    loss = task.training_step(batch, 0)
    with torch.no_grad():
        added = divergence(of_places(teacher, batch), of_places(task, batch))
    assert added > 0
    assert loss.item() == pytest.approx(own.item() + added, rel=1e-4)
    assert task.eval().validation_step(batch, 0)["loss"] == task.compute_metrics(batch)["loss"]
    loss.backward()
    assert all(weight.grad is None for weight in teacher.parameters())
    assert not teacher.training


@pytest.mark.parametrize("name", TASKS)
def test_from_its_own_weights_a_task_has_nothing_to_learn(name):
    torch.manual_seed(0)
    task = small_task(name, attn="q-kv", **STILL[name]).train()
    batch = batch_of(name)

    def gradients() -> list[torch.Tensor]:
        task.zero_grad()
        loss = task.training_step(batch, 0)
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in task.parameters() if weight.grad is not None)]

    alone = gradients()
    names, count = [*task.state_dict()], task.num_parameters
    task.learn_from(copy.deepcopy(task))
    assert_close(gradients(), alone, atol=1e-6, rtol=1e-5)
    assert ([*task.state_dict()], task.num_parameters) == (names, count)


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_of_a_language_model_the_places_that_are_predicted_count_alone(objective):
    spec = {**OTHERS, "objective": objective}
    settings = {"dim": 8, "depth": 1, "heads": 2, "dropout": 0.0}
    task, teacher = (LanguageModelTask(spec, attn=attn, **settings) for attn in ("kv", "qkv"))
    tokens = torch.randint(256, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    targets = tokens.masked_fill(torch.tensor([[1, 0, 0, 1]]).bool(), IGNORE)
    batch = (tokens, targets, targets != IGNORE)
    own = task.train().training_step(batch, 0)
    task.learn_from(teacher)
    with torch.no_grad():
        logits, theirs = task(tokens)[:, 1:3], teacher(tokens)[:, 1:3]
    expected = own.item() + divergence(theirs.flatten(0, 1), logits.flatten(0, 1))
    assert task.training_step(batch, 0).item() == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def teacher(trained, in_tmp_dir) -> Path:
    return shutil.copytree(trained("reverse").parents[1], in_tmp_dir / "teacher")


def test_a_run_learns_from_the_best_checkpoint_of_another(experiment, teacher):
    before = weights(teacher, "best")
    alone = experiment("reverse", *LISTS, "--attn", "kv")
    taught = experiment("reverse", *LISTS, "--attn", "kv", "--teacher", str(teacher))
    folder = taught["path"].parent
    assert not equal(weights(folder, "last"), weights(alone["path"].parent, "last"))
    assert weights(folder, "last").keys() == weights(alone["path"].parent, "last").keys()
    assert taught["parameters"] == alone["parameters"]
    assert taught["config"]["teacher"] == str(teacher)
    assert str(teacher) in taught["notes"]["teacher"]
    assert equal(weights(teacher, "best"), before)
    assert load(folder).teachers == ()
    twice = RunConfig.from_run(folder).changed(precision="64-true", max_epochs=1)
    assert train(twice, test=False).metrics["val/loss"] > 0  # in whose precision the teacher is, too


@pytest.mark.parametrize("name", TASKS)
def test_the_divergence_is_of_softened_logits_times_the_temperature_squared(name):
    task, teacher = small_task(name, attn="kv", **STILL[name]), small_task(name, attn="qkv")
    batch = batch_of(name)
    own = task.train().training_step(batch, 0)
    task.learn_from(teacher, temperature=2.0, weight=0.25)
    with torch.no_grad():
        added = divergence(of_places(teacher, batch) / 2, of_places(task, batch) / 2)
    assert task.training_step(batch, 0).item() == pytest.approx(own.item() + 0.25 * 4 * added, rel=1e-4)


def test_a_continued_run_keeps_its_teacher_unless_told_otherwise(kvt, teacher):
    taught = ["--teacher", str(teacher), "--teacher_temperature", "2", "--teacher_weight", "0.5"]
    kvt("fit", "--config", "reverse", *LISTS, *taught)
    made = Path("lightning_logs/reverse/kv")
    last = ["--ckpt_path", str(made / "version_0/checkpoints/last.ckpt"), "--max_epochs", "3"]
    for flags, expected in (([], str(teacher)), (["--teacher", "null"], None)):
        kvt("fit", *last, *flags)
        folder = max(made.iterdir())
        config = RunConfig.from_run(folder)
        assert config.teacher == expected
        assert (config.teacher_temperature == 2) == (expected is not None)
        assert ("teacher" in checkpoint(folder, "last")) == (expected is not None)


def test_its_name_has_the_teacher_and_other_names_are_as_they_were():
    config = RunConfig.from_name("reverse")
    taught = config.changed(teacher="runs/qkv")
    assert config.teacher is None
    assert "teacher" not in config.flat
    assert taught.name != config.name
    assert RunConfig.from_flat(taught.flat).name == taught.name
    assert config.differences(taught) == [("teacher", None, "runs/qkv")]
    warm = taught.changed(teacher_temperature=2.0, teacher_weight=0.5)
    assert len({config.name, taught.name, warm.name, warm.changed(teacher_weight=1.0).name}) == 4
    assert RunConfig.from_flat(warm.flat).name == warm.name


def test_a_killed_run_goes_on_with_its_teacher(in_tmp_dir, teacher):
    config = small("reverse", attn="kv", teacher=str(teacher), dropout=0.2, log_every_n_steps=1)
    killed, whole = killed_and_whole(config, in_tmp_dir)
    assert read_history(killed) == read_history(whole)
    assert equal(weights(killed, "last"), weights(whole, "last"))


def test_a_teacher_that_has_moved_is_named_anew_and_another_one_is_refused(in_tmp_dir, teacher, mistake):
    config = small("reverse", attn="kv", teacher=str(teacher), dropout=0.2, log_every_n_steps=1)
    whole, killed = in_tmp_dir / "whole", in_tmp_dir / "killed"
    train(config, whole, callbacks=[Keep(whole, killed)])
    other = train(config.changed(teacher=None, attn="qkv", seed=1), in_tmp_dir / "other").folder
    moved = teacher.rename(in_tmp_dir / "moved")
    other.rename(teacher)

    def resume(*words):
        run(lambda: run_words(["run", "--resume", str(killed), *QUIET[:2], *words]))

    assert f"--teacher {teacher}/checkpoints/best.ckpt: its weights are not those of the run's teacher" in mistake(
        resume
    )
    resume("--teacher", str(moved))
    assert equal(weights(killed, "last"), weights(whole, "last"))
    digests = [json.loads((folder / "result.json").read_text())["teacher_sha256"] for folder in (killed, whole)]
    assert digests == [Checkpoint(moved).digest] * 2
    assert "a resumed run keeps its settings: drop --teacher" in mistake(
        lambda: run(lambda: run_words(["run", "--resume", str(teacher), "--teacher", str(moved)]))
    )


@pytest.mark.parametrize(
    ("made", "flags", "said"),
    [
        ("characters", [], "contains CharacterTask; this command needs ListTask"),
        ("sort", [], "made with task=sort, not reverse: choose a teacher with the run's data"),
        ("reverse", ["--length", "8"], "made with length=16, not 8: name the run's own data, or start a new run"),
    ],
)
def test_a_teacher_of_another_task_or_other_sizes_is_named(mistake, kvt, trained, made, flags, said):
    path = str(trained(made))
    words = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *LISTS, "--teacher", path, *flags]
    assert f"--teacher {path}: {said}" in mistake(kvt, *words)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--teacher", "nowhere"], "--teacher nowhere: no such file"),
        (["--teacher", "x", "--teacher_temperature", "0"], "--teacher_temperature=0.0 must be a number greater than 0"),
        (["--teacher_weight", "0.5"], "--teacher_weight 0.5: needs --teacher"),
    ],
)
def test_a_teacher_that_is_missing_and_strange_numbers_are_named(mistake, kvt, flags, said):
    assert said in mistake(kvt, "fit", "--config", str(CONFIGS / "reverse.yaml"), *LISTS, *flags)
