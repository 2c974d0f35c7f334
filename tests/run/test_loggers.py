"""What each logger is told of a run, and where it keeps it."""

import csv
import os
from pathlib import Path

import pytest
from lightning_utilities.core.imports import RequirementCache
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

import kvt
from kvt.cli.lightning_cli import run_words
from kvt.run.loggers import _CSV
from kvt.run.run import Result
from kvt.system.console import run
from tests.conftest import QUIET, SMALL_LISTS
from tests.run.test_one_run import StopAtValidation

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
    kvt(
        "fit",
        "--config",
        "reverse",
        *SMALL_LISTS,
        "--seed",
        "3",
        "--limit_train_batches",
        "1",
        "--log_every_n_steps",
        "1",
    )  # is not tested
    (plain, scores), (other, same), (short, untested) = map(
        table, [*folders, Path("lightning_logs/reverse/kv/version_1")]
    )
    assert plain.keys() == other.keys() == short.keys()
    assert (
        scores == same == untested == [f"when_best/{name}" for name in ("val_loss", "val_acc", "test_loss", "test_acc")]
    )
    assert (plain["seed"], short["seed"]) == (0, 3)
    assert "kv_heads" in str(other["attn_kwargs"])
    assert "AdamW" in str(other["optimizer"])
    assert "limit_train_batches" in str(short["notes"])
    shown = EventAccumulator("lightning_logs/reverse/kv/version_1").Reload().Tags()["scalars"]
    assert "when_best/val_acc" in shown
    assert "when_best/test_acc" not in shown, "what was not measured is no number"
    assert "train/lr" in shown


def two_runs(logger: str) -> list[Result]:
    """Train twice in this process."""
    small = {"dim": 16, "depth": 1, "heads": 2, "length": 12, "max_steps": 4, "val_check_interval": 2, "threads": 1}
    config = kvt.RunConfig.from_name("characters").changed(**small, log_every_n_steps=2, accelerator="cpu")
    return [kvt.train(config.changed(logger=[logger], enable_progress_bar=False, seed=seed)) for seed in (0, 1)]


def resumed(logger: str) -> Result:
    """Train, stop at the first of three validations as by SIGTERM, and resume."""
    small = {"dim": 16, "depth": 1, "heads": 2, "length": 12, "max_steps": 6, "val_check_interval": 2, "threads": 1}
    settings = {"log_every_n_steps": 1, "accelerator": "cpu", "enable_progress_bar": False, "logger": [logger]}
    config = kvt.RunConfig.from_name("characters").changed(**small, **settings)
    folder = Path("lightning_logs/characters/kv/version_0")
    with pytest.raises(SystemExit):
        kvt.train(config, folder, callbacks=[StopAtValidation(2)])
    return kvt.train(config, folder, resume=True)


def test_the_csv_of_a_resumed_run_has_every_step_once():
    result = resumed("csv")
    with (result.folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    ours = [row["train/loss"] for row in result.history if "train/loss" in row]
    assert [float(row["train/loss"]) for row in rows] == pytest.approx(ours)
    assert len(ours) == 6


@pytest.mark.slow
def test_a_resumed_run_is_one_run_of_wandb(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    files = [*resumed("wandb").folder.rglob("*.wandb")]
    assert len(files) == 2  # which `wandb sync` joins by their id
    assert len({file.name for file in files}) == 1


def mlflow_client(monkeypatch, own: str | None):
    """Set the user's own database, or none; return a function from a result to the client of its database."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if own:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
    return lambda result: mlflow.MlflowClient(own or f"sqlite:///{result.folder / 'mlflow.db'}")


@pytest.mark.slow
@pytest.mark.parametrize("own", ["sqlite:///one.db", None])
def test_a_resumed_run_is_one_run_of_mlflow(monkeypatch, own):
    client_of = mlflow_client(monkeypatch, own)
    client = client_of(resumed("mlflow"))
    (only,) = client.search_runs([client.get_experiment_by_name("kvt").experiment_id])
    assert only.info.status == "FINISHED"
    assert len(client.get_metric_history(only.info.run_id, "train/loss")) == 6


@pytest.mark.slow
def test_a_resumed_run_is_one_run_of_trackio(monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(Path("tracked").resolve()))
    storage = pytest.importorskip("trackio.sqlite_storage")
    result = resumed("trackio")
    assert len(storage.SQLiteStorage.get_runs("kvt")) == 1
    logs = storage.SQLiteStorage.get_logs("kvt", "/".join(result.folder.parts[-3:]))
    assert len([log for log in logs if "train/loss" in log]) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_wandb_offline(monkeypatch):
    """Each run is one of its own, whose files lie in its folder, with curves, pictures and sample texts."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for result in two_runs("wandb"):
        files = [path.name for path in (result.folder / "wandb").rglob("*") if path.is_file()]
        assert len([name for name in files if name.endswith(".wandb")]) == 1
        assert len([name for name in files if name.startswith("encoder, layer 1_")]) == 2
        assert len([name for name in files if name.startswith("sample_")]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("own", ["sqlite:///all.db", None])
def test_mlflow(monkeypatch, own):
    """It writes into the run's folder, or where the user says, with all that W&B gets, and leaves no place behind."""
    client_of = mlflow_client(monkeypatch, own)
    results = two_runs("mlflow")
    assert os.environ.get("MLFLOW_TRACKING_URI") == own
    left = {path.name for path in Path().iterdir()}
    assert left == {"lightning_logs"} | ({"all.db", "mlruns"} if own else set())
    for seed, result in enumerate(results):
        client = client_of(result)
        runs = client.search_runs([client.get_experiment_by_name("kvt").experiment_id])
        assert len(runs) == (2 if own else 1)
        (found,) = (one for one in runs if one.data.params["seed"] == str(seed))
        assert found.data.params["attn"] == "kv"
        losses = {round(row["val/loss"], 5) for row in result.history if "val/loss" in row}
        assert {round(point.value, 5) for point in client.get_metric_history(found.info.run_id, "val/loss")} == losses
        assert found.data.metrics["when_best/val_loss"] == pytest.approx(result.metrics["val/loss"])
        files = {
            file.path for folder in ("images", "sample") for file in client.list_artifacts(found.info.run_id, folder)
        }
        assert {"sample/step_2.md", "sample/step_4.md"} <= files
        assert len([name for name in files if name.endswith(".png")]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_trackio(monkeypatch, capfd):
    """It gets what W&B gets, offline, and says what it says where notes are said."""
    monkeypatch.setenv("TRACKIO_DIR", str(Path("tracked").resolve()))  # it reads it when it is imported
    storage = pytest.importorskip("trackio.sqlite_storage")
    results = two_runs("trackio")
    assert capfd.readouterr().out == ""
    for seed, result in enumerate(results):
        name = "/".join(result.folder.parts[-3:])
        assert storage.SQLiteStorage.get_run_config("kvt", name)["seed"] == seed
        logs = storage.SQLiteStorage.get_logs("kvt", name)
        losses = [log["val/loss"] for log in logs if "val/loss" in log]
        assert losses == pytest.approx([row["val/loss"] for row in result.history if "val/loss" in row])
        assert logs[-1]["when_best/val_loss"] == pytest.approx(result.metrics["val/loss"])
        assert [log["step"] for log in logs if "sample" in log] == [2, 4]
        assert len([log for log in logs if "visual/attention/encoder, layer 1" in log]) == 2


def test_hyperparameters_are_known_while_a_run_trains(monkeypatch):
    """A run that is killed leaves them to its logger."""
    seen = {}

    class Watch(_CSV):
        def log_hyperparams(self, params, *rest):
            seen.setdefault("params", {}).update(params)

        def log_metrics(self, metrics, step=None):
            seen.setdefault("first", seen["params"].get("attn"))

    monkeypatch.setattr("kvt.run.loggers._CSV", Watch)
    config = kvt.RunConfig.from_name("reverse").changed(
        logger="csv", max_steps=1, train_size=64, val_size=8, test_size=8, batch_size=8
    )
    kvt.train(config.changed(enable_progress_bar=False, accelerator="cpu"))
    assert seen["first"] == "kv"


@pytest.mark.parametrize("logger", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_missing(mistake, in_tmp_dir, monkeypatch, logger):
    module = f"lightning.pytorch.loggers.{logger}._{logger.upper()}_AVAILABLE"
    monkeypatch.setattr(module, RequirementCache(f"{logger}>=99"))
    words = ["fit", "--config", "reverse", *QUIET, *SMALL_LISTS, "--logger", logger]
    assert f"pip install -U '{logger}" in mistake(lambda: run(lambda: run_words(words)))
