"""A run is one thing: its folder, its configuration and its result belong together, however it is made."""

import json
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import LambdaCallback

import kvt
from kvt.commands import run_words
from kvt.run.cli import KvtCLI
from kvt.run.folder import is_in_use
from kvt.run.load_checkpoint import Checkpoint
from kvt.system import UserError
from tests.conftest import QUIET, SMALL_LISTS
from tests.helpers.runs import REVERSE, contents, read_history, read_result


def test_python_trains_as_the_command_line_does(experiment, in_tmp_dir):
    result = kvt.train(REVERSE.changed(attn="qkv"))
    assert result.folder == in_tmp_dir / "lightning_logs" / "reverse" / "qkv" / "version_0"
    assert result.checkpoint == result.folder / "checkpoints" / "best.ckpt"
    theirs = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1", "--attn", "qkv")
    assert read_result(result.folder) == read_result(theirs["path"].parent)
    assert {name: result.metrics[name] for name in ("val/acc", "test/acc")}.items() <= theirs.items()
    assert len(result.history) == len(read_history(result.folder))


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 18}], ids=["epochs", "steps"])
def test_no_epoch_of_a_run_is_empty(in_tmp_dir, limit):
    epochs: list[int] = []
    count = LambdaCallback(on_train_batch_start=lambda trainer, *_: epochs.append(trainer.current_epoch))
    kvt.train(REVERSE.changed(**limit), callbacks=[count])
    assert epochs == [0] * 6 + [1] * 6 + [2] * 6


def test_a_configuration_is_the_same_from_its_folder_and_its_checkpoint(in_tmp_dir):
    """And changes by bare names alone, typed."""
    result = kvt.train(REVERSE)
    assert kvt.RunConfig.from_run(result.folder) == REVERSE
    found = Checkpoint(result.checkpoint).config
    assert (found["model"], found["seed_everything"]) == (REVERSE.model, 0)
    assert found["data"]["init_args"].items() <= REVERSE.data["init_args"].items()
    assert found["trainer"].items() <= REVERSE.trainer.items()
    assert REVERSE.changed(lr="1e-2", seed=3).model["init_args"]["lr"] == 0.01
    assert REVERSE.changed(seed=3).seed_everything == 3


def test_a_folder_holds_one_run(in_tmp_dir):
    kvt.train(REVERSE, "mine")
    before = contents(Path("mine"))
    with pytest.raises(UserError, match="mine"):
        kvt.train(REVERSE, "mine")
    assert contents(Path("mine")) == before


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_time": "00:00:00:00"}])
def test_limits_of_a_run_that_continues_another_cover_both(in_tmp_dir, limit):
    last = kvt.train(REVERSE).folder / "checkpoints" / "last.ckpt"
    with pytest.raises(UserError, match="max_epochs"):
        kvt.train(REVERSE.changed(**{"max_epochs": 2, "ckpt_path": str(last)} | limit))


def test_a_run_that_failed_is_left_to_others(in_tmp_dir):
    with pytest.raises(ZeroDivisionError):
        kvt.train(REVERSE, "mine", callbacks=[LambdaCallback(on_train_batch_end=lambda *_: 1 / 0)])
    assert not is_in_use(Path("mine"))
    assert kvt.train(REVERSE, "mine", resume=True).metrics


def test_callbacks_of_ones_own_find_the_folder_and_its_loggers(in_tmp_dir):
    """Those of the Trainer's settings, too, such as one that refuses to be set up without a logger."""
    monitor = {"class_path": "lightning.pytorch.callbacks.DeviceStatsMonitor", "init_args": {"cpu_stats": False}}
    found: list[tuple[str, bool]] = []
    asks = LambdaCallback(setup=lambda trainer, *_, stage: found.append((trainer.log_dir, bool(trainer.loggers))))
    folder = kvt.train(REVERSE.merged({"trainer": {"callbacks": monitor}}), callbacks=[asks]).folder
    assert found[0] == (str(folder), True)


def test_a_continued_training_is_a_new_run_that_names_its_parent(experiment, in_tmp_dir):
    parent = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1")["path"].parent
    before = contents(parent)
    last = str(parent / "checkpoints" / "last.ckpt")
    child = experiment("reverse", "--ckpt_path", last, *SMALL_LISTS, "--max_epochs", "3")
    assert child["path"].parent == parent.parent / "version_1"
    assert child["config"]["ckpt_path"] == last
    assert yaml.safe_load((child["path"].parent / "config.yaml").read_text()) == child["config"]
    assert contents(parent) == before
    first, *more = [int(row["step"]) for row in read_history(child["path"].parent)]
    assert read_history(child["path"].parent)[0] == read_history(parent)[0]
    assert more == [2 * first, 3 * first]


@pytest.mark.parametrize("logger", ["none", "[tensorboard,csv]", "false"])
def test_files_lie_in_the_folder_whatever_the_logger(experiment, in_tmp_dir, logger):
    folder = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1", "--logger", logger)["path"].parent
    assert folder == in_tmp_dir / "lightning_logs" / "reverse" / "kv" / "version_0"
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"config.yaml", "result.json", "history.csv", "best.ckpt", "last.ckpt"} <= files
    assert ("metrics.csv" in files) == ("csv" in logger)
    assert any("tfevents" in name for name in files) == ("tensorboard" in logger)
    assert [path.name for path in in_tmp_dir.iterdir()] == ["lightning_logs"]


def test_a_configuration_with_classes_of_the_trainer_is_repeated_and_resumed(experiment, in_tmp_dir):
    classes = ["--logger", "CSVLogger", "--logger.save_dir", "cs", "--profiler", "SimpleProfiler"]
    first = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1", *classes)
    folder = first["path"].parent
    assert first["config"]["trainer"]["logger"]["init_args"]["save_dir"] == "cs"
    again = experiment("reverse", "--config", str(folder / "config.yaml"))
    assert again["test/loss"] == first["test/loss"]
    assert again["path"].parent.name == "version_1"
    assert again["config"] == first["config"]
    (folder / "result.json").unlink()
    run_words(["run", "--resume", str(folder), *QUIET[:2]])
    resumed = json.loads((folder / "result.json").read_text())
    assert resumed["test/loss"] == first["test/loss"]
    assert len([*Path("cs").rglob("metrics.csv")]) == 3


def test_the_limits_of_a_run_do_not_limit_what_is_measured_later(in_tmp_dir, capsys):
    limits = {"limit_val_batches": 1, "limit_test_batches": 1, "batch_size": 4}
    run = kvt.train(REVERSE.changed(**limits), "limited").folder
    task, data = kvt.load(run), KvtCLI(REVERSE.as_dict()).datamodule
    data.setup("fit")
    for command, split in (("validate", "val"), ("test", "test")):
        run_words([command, "--ckpt_path", str(run / "checkpoints" / "best.ckpt")])
        whole = (task.predict(data.splits[split][0]) == data.splits[split][1]).float().mean()
        assert f"{float(whole):.4f}" in capsys.readouterr().out
