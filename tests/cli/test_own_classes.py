"""A task, data and an attention of the user's own, by every door: flags, a YAML, a checkpoint, Python."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import kvt
from kvt.commands import execute, run_words
from kvt.run.load_checkpoint import Checkpoint
from kvt.system import run
from kvt.tasks import Task
from tests.conftest import QUIET, SMALL_LISTS

OWN = '''
from kvt.attention import KV
from kvt.tasks import DigitLists, ListTask


class Near(KV):
    """An attention."""


class Gained(ListTask):
    """A task that saves no hyperparameters itself, and hands most of its arguments on.

    Args:
        gain: multiplies the loss.
    """

    def __init__(self, spec, gain: float, **kwargs):
        super().__init__(spec, **kwargs)
        self.gain = gain

    def compute_metrics(self, batch):
        measured = super().compute_metrics(batch)
        return {**measured, "loss": self.gain * measured["loss"]}


class Lists(DigitLists):
    """Data of one's own.

    Args:
        least: the least digit.
    """

    def __init__(self, least: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.least = least

    def load(self):
        return {split: tuple(t.clamp(min=self.least) for t in pair) for split, pair in super().load().items()}
'''
CLASSES = ["--model", "own_task.Gained", "--data", "own_task.Lists"]
GIVEN = ["--gain", "2", "--least", "3", "--attn", "own_task.Near", *SMALL_LISTS, "--max_epochs", "1", *QUIET]


@pytest.fixture
def own(in_tmp_dir, monkeypatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(in_tmp_dir)
    for module, source in MODULES.items():
        Path(f"{module}.py").write_text(source)
    yield
    for module in MODULES:
        sys.modules.pop(module, None)


def trained(*words: str) -> dict:
    run(lambda: run_words(["run", *words, *GIVEN]))
    return json.loads(next(Path().rglob("result.json")).read_text())


@pytest.mark.parametrize("words", [CLASSES, ["--config", "mine.yaml"]], ids=["flags", "a YAML"])
def test_its_settings_have_bare_flags(own, words):
    """One that is required may be given by a flag or by a YAML."""
    model = {"class_path": "own_task.Gained", "init_args": {"lr": 0.01}}
    sections = {"model": model, "data": {"class_path": "own_task.Lists"}}
    Path("mine.yaml").write_text(yaml.safe_dump(sections))
    made = trained(*words)["config"]
    assert (made["model"]["init_args"]["gain"], made["data"]["init_args"]["least"]) == (2, 3)


def test_its_checkpoint_holds_all_its_settings_and_its_configuration_all_names(own):
    trained(*CLASSES)
    run_folder = next(Path().rglob("result.json")).parent
    assert run_folder.parent.name == "Near"
    best, config = str(run_folder / "checkpoints" / "best.ckpt"), str(run_folder / "config.yaml")
    run(lambda: run_words(["validate", "--ckpt_path", best, *CLASSES, "--attn", "own_task.Near", *QUIET]))
    named = {"model": "own_task.Gained", "data": "own_task.Lists", "attn": "own_task.Near"}
    assert Checkpoint(best, named).load_task(Task).gain == 2
    assert Checkpoint(best, named).load_data().least == 3
    execute("maps", ["--ckpt_path", best, *CLASSES, "--attn", "own_task.Near"])
    assert Path("maps.png").is_file()
    run(lambda: run_words(["test", "--ckpt_path", best, "--config", config, *QUIET]))


SETTLED = '''
from kvt.tasks import DigitLists, ListTask


class Lists(DigitLists):
    """Data without a setting."""

    def __init__(self):
        super().__init__(length=8, train_size=64, val_size=16, test_size=16, batch_size=16)


class Scaled(ListTask):
    """A task that gives its base other values than it takes."""

    def __init__(self, spec, lr: float = 0.5, warmup: int = 10, **kwargs):
        super().__init__(spec, lr=lr / 2, warmup=2 * warmup, **kwargs)
'''


def test_classes_that_settle_arguments_go_through_every_door(own):
    """From the command line, and from a checkpoint."""
    classes = ["--model", "settled.Scaled", "--data", "settled.Lists"]
    run(lambda: run_words(["run", *classes, "--dim", "16", "--lr", "0.4", "--max_epochs", "1", *QUIET]))
    folder = next(Path().rglob("result.json")).parent
    best = str(folder / "checkpoints" / "best.ckpt")
    for command in ("validate", "test", "predict"):
        run(lambda: run_words([command, "--ckpt_path", best, *classes, *QUIET]))  # noqa: B023
    run(lambda: run_words(["fit", "--ckpt_path", best, *classes, "--max_epochs", "2", *QUIET]))
    (folder / "result.json").unlink()
    run(lambda: run_words(["fit", "--resume", str(folder)]))
    execute("maps", ["--ckpt_path", best, *classes])
    assert kvt.load(best, model="settled.Scaled").lr == 0.2
    state = torch.load(folder / "checkpoints" / "last.ckpt")
    assert state["optimizer_states"][0]["param_groups"][0]["initial_lr"] == 0.2


MODULES = {"own_task": OWN, "settled": SETTLED}
