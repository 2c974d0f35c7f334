"""What each logger is told of a run, and where it keeps it."""

import json
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from tests.conftest import SMALL_LISTS

pytestmark = pytest.mark.usefixtures("in_tmp_dir")


def table(folder: Path) -> tuple[dict[str, object], list[str]]:
    """Return the hyperparameters of a run in TensorBoard, and the columns of metrics of the table that has it."""
    found = EventAccumulator(str(folder)).Reload().summary_metadata
    start = metadata.parse_session_start_info_plugin_data(found[metadata.SESSION_START_INFO_TAG].plugin_data.content)
    whole = metadata.parse_experiment_plugin_data(found[metadata.EXPERIMENT_TAG].plugin_data.content)
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert {info.name for info in whole.hparam_infos} == values.keys()
    return values, [info.name.tag for info in whole.metric_infos]


def test_all_runs_of_a_task_are_rows_of_one_table(experiment, kvt):
    """TensorBoard has the columns of any one of them, whichever it finds first."""
    words = ["--attn_kwargs", '{"kv_heads": 1}', "--attn", "q-kv", "--optimizer", "torch.optim.AdamW"]
    folders = [experiment("reverse", *SMALL_LISTS, *flags)["path"].parent for flags in ([], words)]
    third = Path("lightning_logs/reverse/kv/version_1")  # is not tested
    kvt("fit", "--config=reverse", *SMALL_LISTS, "--seed=3", "--limit_train_batches=1", "--log_every_n_steps=1")
    (plain, scores), (other, same), (short, untested) = map(table, [*folders, third])
    assert plain.keys() == other.keys() == short.keys()
    assert scores == same == [f"when_best/{name}" for name in ("val_loss", "val_acc", "test_loss", "test_acc")]
    assert untested == scores[:2]
    assert (plain["seed"], short["seed"]) == (0, 3)
    assert "kv_heads" in str(other["attn_kwargs"])
    assert "AdamW" in str(other["optimizer"])
    assert "limit_train_batches" in str(short["notes"])
    shown = EventAccumulator(str(third)).Reload().Tags()["scalars"]
    assert "when_best/val_acc" in shown
    assert "when_best/test_acc" not in shown, "what was not measured is no number"
    assert "train/lr" in shown


ALBUM = """
import json

from lightning.pytorch.loggers import CSVLogger


class Album(CSVLogger):
    def log_image(self, key, images, step):
        with open(f"{self.save_dir}.jsonl", "a") as file:
            file.write(json.dumps([key, step, images[0].shape]) + "\\n")
"""


@pytest.mark.usefixtures("pictures")
def test_a_logger_of_ones_own_gets_curves_hyperparameters_and_maps(experiment, monkeypatch):
    Path("my_album.py").write_text(ALBUM)
    monkeypatch.syspath_prepend(".")
    words = ["--logger", "my_album.Album", "--logger.save_dir", "mine", "--max_epochs", "1"]
    experiment("reverse", *SMALL_LISTS, *words)
    shown = [json.loads(line) for line in Path("mine.jsonl").read_text().splitlines()]
    assert {key for key, *_ in shown} == {f"visual/attention/encoder, layer {n}" for n in (1, 2)}
    assert all(step > 0 and shape[2] == 3 for _, step, shape in shown)
    (metrics,) = Path("mine").rglob("metrics.csv")
    assert {"train/loss", "val/loss", "when_best/test_acc"} <= {*metrics.read_text().splitlines()[0].split(",")}
    assert yaml.safe_load(metrics.with_name("hparams.yaml").read_text())["attn"] == "kv"
