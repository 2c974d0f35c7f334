"""A task, data and an attention of the user's own, by every door: flags, a YAML, a checkpoint, Python."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvt.cli.main import execute
from kvt.system.console import run
from kvt.tasks import Task
from kvt.training.lightning_cli import run_words
from kvt.training.load_checkpoint import Checkpoint
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
    Path("own_task.py").write_text(OWN)
    yield
    sys.modules.pop("own_task", None)


def trained(*words: str) -> dict:
    run(lambda: run_words(["fit", *words, *GIVEN], test=True))
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
