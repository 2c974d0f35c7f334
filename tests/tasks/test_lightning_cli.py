"""Tasks and data are ordinary: Lightning's own command line and its plain Trainer train, test and load them."""

import email
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.cli import LightningCLI

import kvt
from kvt.system import UserError
from kvt.tasks import DigitLists, ListTask, Task, TaskData
from kvt.tasks.base import known_classes
from tests.conftest import CONFIGS
from tests.helpers.small_tasks import TASKS

QUIET = {
    **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False},
    **{"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 2, "limit_test_batches": 1},
}
SIZES = {"train_size": 64, "val_size": 16, "test_size": 16, "batch_size": 8}
SMALL = {
    "AnomalyTask": ("SetAnomalies", {"batch_size": 8}),
    "CharacterTask": ("Characters", {"length": 12, "batch_size": 8}),
    "ImageTask": ("Images", {"dataset": "mnist", "val_size": 6, "batch_size": 4}),
    "LanguageModelTask": ("TextTokens", {"text": Path(email.__file__).parent, "pattern": "*mime.py", "length": 24}),
    "ListTask": ("DigitLists", {"length": 6, **SIZES}),
    "NumberTask": ("HumanNumbers", {"batch_size": 8}),
    "RecallTask": ("Recall", {"vocab": 16, "length": 12, "pairs": 2, "longest": 24, **SIZES}),
    "TranslationTask": ("SentencePairs", {"max_len": 12, "batch_size": 4}),
}
"""The data class of each task, and settings of small data."""


def lists(**settings):
    return DigitLists(length=6, **SIZES | settings)


@pytest.mark.parametrize("name", TASKS)
def test_lightnings_command_line_trains_saves_and_tests_each_task(name, in_tmp_dir):
    data, settings = SMALL[name]
    words = [f"--data.{key}={value}" for key, value in settings.items()]
    words += ["--model.attn=kv+pos", "--model.dim=8", "--model.depth=1", "--model.heads=2", "--seed_everything=0"]
    given = {"trainer_defaults": QUIET, "save_config_callback": None}
    cli = LightningCLI(TASKS[name], known_classes()[data], args=words, run=False, **given)
    cli.trainer.fit(cli.model, cli.datamodule)
    if "test" in cli.datamodule.splits:
        assert "test/loss" in cli.trainer.test(datamodule=cli.datamodule, ckpt_path="best", verbose=False)[0]
    path = cli.trainer.checkpoint_callback.best_model_path
    inputs = cli.model.inputs(cli.datamodule.example(0))
    outputs = cli.model.eval()(*inputs)
    for task in (TASKS[name].load_from_checkpoint(path).eval(), kvt.load(path)):
        assert torch.equal(task(*inputs), outputs)
        assert task.hparams["spec"] == cli.datamodule.spec


class Linked(LightningCLI):
    """Makes the model before the optimiser that the configuration names."""

    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_lightnings_command_line_reads_each_configuration(path, in_tmp_dir):
    sections = yaml.safe_load(path.read_text())
    modes = {"subclass_mode_model": True, "subclass_mode_data": True, "save_config_callback": None, "run": False}
    given = {"args": ["--config", str(path)], "trainer_defaults": QUIET, "seed_everything_default": 0}
    cli = (Linked if "optimizer" in sections else LightningCLI)(Task, TaskData, **given, **modes)
    for made, section in ((cli.model, sections["model"]), (cli.datamodule, sections["data"])):
        assert f"kvt.tasks.{type(made).__name__}" == section["class_path"]
        assert section["init_args"].items() <= made.hparams.items()


def test_a_task_without_spec_is_made_for_the_data_of_the_trainer(in_tmp_dir):
    data, task, trainer = lists(), ListTask(attn="kv", dim=8, heads=2), L.Trainer(**QUIET)
    trainer.validate(task, data, verbose=False)
    trainer.fit(task, data)
    tested = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
    other, path = ListTask(data.spec, attn="kv", dim=8, heads=2), trainer.checkpoint_callback.best_model_path
    assert L.Trainer(**QUIET).test(other, data, ckpt_path=path, verbose=False) == tested
    assert task.hparams == other.hparams


def test_the_weights_of_a_task_without_spec_are_averaged():
    average = EMAWeightAveraging(decay=0.5)
    task = ListTask(dim=8, heads=2)
    L.Trainer(**QUIET, enable_checkpointing=False, callbacks=[average]).fit(task, lists())
    assert average._average_model.module.state_dict().keys() == task.state_dict().keys()


def test_a_task_without_spec_needs_data_with_one():
    data = lists()
    data.setup("validate")
    with pytest.raises(UserError, match=r"ListTask needs spec=data\.spec"):
        L.Trainer(**QUIET).validate(ListTask(), data.val_dataloader())


def test_several_validation_loaders_have_one_mean():
    class Halves(DigitLists):
        def val_dataloader(self):
            halves = zip(*(part.split(12) for part in self.splits["val"]), strict=True)
            return [self.make_batches(*half, batch_size=8) for half in halves]

    task = ListTask(lists().spec, dim=8, heads=2)
    (whole,) = L.Trainer(**QUIET).validate(task, lists(), verbose=False)
    assert L.Trainer(**QUIET).validate(task, Halves(length=6, **SIZES), verbose=False) == [pytest.approx(whole)] * 2


def test_the_schedule_of_an_endless_run_names_arguments_of_the_trainer():
    with pytest.raises(UserError, match="max_epochs=-1: schedule=cosine spans all steps of the run: give the Trainer"):
        L.Trainer(**QUIET | {"max_epochs": -1}).fit(ListTask(dim=8, heads=2), lists())
