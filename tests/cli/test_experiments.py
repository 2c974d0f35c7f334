"""Experiments from the command line to the result."""

import csv
import json
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, TextIOWrapper
from math import exp, log

import pytest
import torch
import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.attention import ATTENTION
from kvt.cli.main import main
from kvt.tasks import DigitLists, ImageTask, ListTask
from kvt.tasks.bleu import sacre_bleu
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import read_checkpoint
from kvt.training.run_dir import RunLogger, claim_version
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_IMAGES, SMALL_LISTS

SCRIPTS = sorted(path for path in (REPOSITORY / "experiments").glob("*.py") if "features" not in path.stem)
IMAGE_SETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")


@pytest.mark.parametrize("attn", ATTENTION)
@pytest.mark.parametrize("config", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
def test_every_attention_runs_every_task(experiment, in_tmp_dir, config, attn):
    assert experiment(config, "--attn", attn, "--fast_dev_run", "true", *SMALL[config]) == {}
    assert list(in_tmp_dir.iterdir()) == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_states_the_papers_protocol(path):
    config = yaml.safe_load(path.read_text())
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    if path.stem in IMAGE_SETS:
        epochs = {"mnist": 20, "fashion_mnist": 20, "cifar10": 40, "cifar100": 50}[path.stem]
        grey = "mnist" in path.stem
        assert (data["dataset"], trainer["max_epochs"], model["pos_dim"]) == (path.stem, epochs, 50)
        assert (data["batch_size"], model["patch"], data["augment"]) == ((200, 7, False) if grey else (128, 4, True))
    elif path.stem == "anomaly":
        assert (data["dataset"], data["backbone"], data["set_size"], data["val_size"]) == (
            "cifar100",
            "resnet34",
            10,
            0.1,
        )
        assert (data["anomaly_position"], model["dim"], model["depth"], model["heads"]) == ("random", 256, 4, 4)
        assert (model["pos_dim"], model["dropout"], model["lr"], model["warmup"]) == (10, 0.1, 5e-4, 100)
        assert trainer == {"max_epochs": 20, "gradient_clip_val": 2}
    elif path.stem == "characters":
        assert (data["length"], data["val_size"], data["batch_size"]) == (64, 0.1, 64)
        assert (model["dim"], model["depth"], model["heads"], model["pos_dim"]) == (192, 6, 3, 20)
        assert (model["dropout"], model["lr"], trainer["max_steps"]) == (0.2, 5e-4, 1000)
    elif path.stem == "human_numbers":
        assert (data["length"], data["val_size"], data["batch_size"], trainer["max_epochs"]) == (16, 0.2, 64, 15)
        assert (model["dim"], model["depth"], model["heads"], model["pos_dim"]) == (64, 4, 8, 10)
        assert (model["dropout"], model["feed_forward_dropout"], model["lr"]) == (0.1, 0.2, 1e-3)
    elif path.stem == "translation":
        assert (data["source"], data["target"], data["min_freq"], data["max_len"]) == ("de", "en", 1, 100)
        assert (data["batch_size"], trainer["max_epochs"], model["pos_dim"], model["warmup"]) == (50, 20, 10, 4000)
        assert (model["dropout"], model["smoothing"], model["lr"]) == (0.1, 0.1, 1.0)
    else:
        assert (data["task"], data["batch_size"], model["pos_dim"], model["warmup"]) == (path.stem, 128, 10, 5)
        assert (data["train_size"], data["val_size"], data["test_size"]) == (50_000, 1_000, 10_000)
        assert trainer == {"max_epochs": 2, "gradient_clip_val": 5}


@pytest.fixture
def run_folder(experiment):
    result = experiment("reverse", *SMALL_LISTS, "--attn", "kv+pos", "--log_every_n_steps", "2")
    return result["path"].parent


def test_a_run_leaves_all_that_is_promised(run_folder, in_tmp_dir):
    assert run_folder == in_tmp_dir / "lightning_logs" / "reverse" / "kv+pos" / "version_0"
    result = json.loads((run_folder / "result.json").read_text())
    checkpoint = read_checkpoint(run_folder / "checkpoints" / "best.ckpt")
    parameters = sum(t.numel() for t in checkpoint["state_dict"].values())
    assert result["parameters"] == parameters
    assert {"val/acc", "val/loss", "test/acc", "test/loss", "seconds", "tokens_per_second"} <= result.keys()
    assert {"packages", "machine", "config", "precision", "started"} <= result.keys()

    events = EventAccumulator(str(run_folder), size_guidance={"images": 0}).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"train/loss", "train/acc", "train/seconds", "train/tokens_per_second"} <= scalars
    assert {"val/loss", "val/acc", "test/acc", "best/val_acc", "best/test_acc"} <= scalars
    assert len(events.Images("attention")) == 2  # one a validation
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")


def test_the_summary_is_printed(experiment, capsys):
    result = experiment("reverse", *SMALL_LISTS)
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.count("  "))
    assert printed["test/acc"] == f"{result['test/acc']:.4f}"
    assert printed["run"] == "lightning_logs/reverse/kv/version_0"


@pytest.mark.slow
def test_the_tested_checkpoint_is_the_best_by_validation_accuracy(experiment):
    result = experiment("copy", *SMALL_LISTS, "--max_epochs", "6", "--lr", "0.3")
    events = EventAccumulator(str(result["path"].parent)).Reload()
    assert result["val/acc"] == pytest.approx(max(e.value for e in events.Scalars("val/acc")))


@pytest.mark.slow
def test_the_last_checkpoint_is_the_last(experiment):
    result = experiment("copy", *SMALL_LISTS, "--max_epochs", "6", "--lr", "0.3")
    checkpoints = result["path"].parent / "checkpoints"
    steps = {name: read_checkpoint(checkpoints / f"{name}.ckpt")["global_step"] for name in ("best", "last")}
    assert steps["last"] == 6 * 6
    assert steps["best"] < steps["last"]  # or this test would show nothing


@pytest.mark.slow
def test_seconds_and_throughput_are_those_of_the_whole_run(experiment):
    result = experiment("copy", *SMALL_LISTS, "--max_epochs", "6", "--lr", "0.3")
    assert result["seconds"] * result["tokens_per_second"] == pytest.approx(6 * 96 * 16)


def test_metrics_are_means_over_the_whole_split(experiment):
    """Whatever the batches: the last one of the test split is short."""
    result = experiment("reverse", *SMALL_LISTS)
    folder = result["path"].parent
    task = ListTask.load_from_checkpoint(folder / "checkpoints" / "best.ckpt").eval()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    data = DigitLists(**config["data"]["init_args"])
    data.setup("test")
    digits, targets = data.splits["test"]
    logits = task(digits)
    assert len(digits) % config["data"]["init_args"]["batch_size"]
    assert result["test/acc"] == pytest.approx((logits.argmax(-1) == targets).float().mean().item())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert result["test/loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_same_seed_same_run_other_seed_other_run(experiment):
    first, again, other = (experiment("sort", *SMALL_LISTS, "--seed", seed) for seed in "112")
    assert first["test/loss"] == again["test/loss"] != other["test/loss"]
    assert [r["config"]["seed_everything"] for r in (first, other)] == [1, 2]
    assert [r["path"].parent.name for r in (first, again, other)] == ["version_0", "version_1", "version_2"]


def test_a_saved_config_runs_again_exactly(experiment, run_folder):
    before = json.loads((run_folder / "result.json").read_text())
    again = experiment("reverse", "--config", str(run_folder / "config.yaml"))
    assert again["test/loss"] == before["test/loss"]
    assert again["attn"] == "kv+pos"


def test_images_train_reproducibly_with_augmentation(experiment):
    runs = [experiment("cifar10", *SMALL_IMAGES, "--max_epochs", "2", "--seed", "3") for _ in range(2)]
    assert runs[0]["val/loss"] == runs[1]["val/loss"]
    assert runs[0]["task"] == "cifar10"


def weights(run):
    return read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(experiment, in_tmp_dir):
    """Stopped in the middle of an epoch or at its end, resumed from there: the weights of a run never stopped."""
    setting = [*SMALL_LISTS, "--max_epochs", "3", "--accumulate_grad_batches", "3"]
    whole = experiment("reverse", *setting)["path"].parent
    keep = [
        "--trainer.callbacks+",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.callbacks.dirpath",
        "kept",
    ]
    keep += ["--trainer.callbacks.every_n_train_steps", "1", "--trainer.callbacks.save_top_k=-1"]
    experiment("reverse", *setting, *keep)
    kept = sorted((in_tmp_dir / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert len(kept) == read_checkpoint(kept[-1])["global_step"]
    for checkpoint in kept[1:-1:3]:
        resumed = experiment("reverse", *setting, "--ckpt_path", str(checkpoint))["path"].parent
        assert resumed != whole
        for name, tensor in weights(whole).items():
            assert torch.equal(tensor, weights(resumed)[name]), (checkpoint.name, name)


@pytest.mark.slow
def test_a_run_resumed_from_its_own_checkpoint_stays_in_its_folder(experiment, in_tmp_dir, monkeypatch):
    setting = [*SMALL_LISTS, "--max_epochs", "4", "--lr", "0.1"]
    whole = experiment("sort", *setting)
    killed = experiment("sort", *setting)["path"].parent
    config = (killed / "config.yaml").read_text()
    (killed / "result.json").unlink()
    (in_tmp_dir / "elsewhere").mkdir()
    monkeypatch.chdir(in_tmp_dir / "elsewhere")
    resumed = experiment("sort", "--ckpt_path", str(killed / "checkpoints" / "last.ckpt"), *setting)
    assert resumed["path"] == killed / "result.json"
    for name in ("val/acc", "val/loss", "test/acc", "test/loss"):
        assert resumed[name] == whole[name]
    assert (killed / "config.yaml").read_text() == config
    assert list((in_tmp_dir / "elsewhere").iterdir()) == []


def test_validate_test_and_predict_take_a_checkpoint_alone(kvt, run_folder, capsys):
    result = json.loads((run_folder / "result.json").read_text())
    checkpoint = str(run_folder / "checkpoints" / "best.ckpt")
    kvt("validate", "--ckpt_path", checkpoint)
    kvt("test", "--ckpt_path", checkpoint)
    assert f"{result['test/acc']:.6}"[:6] in capsys.readouterr().out
    kvt("predict", "--ckpt_path", checkpoint)
    assert "predictions in lightning_logs/reverse/kv+pos/version_0/predictions.csv" in capsys.readouterr().out
    lines = (run_folder / "predictions.csv").read_text().splitlines()
    assert lines[0] == "example,target,prediction,probability"
    assert len(lines) == 1 + 20


def test_a_checkpoint_alone_is_enough_wherever_it_lies(kvt, run_folder, in_tmp_dir, capsys):
    elsewhere = in_tmp_dir / "elsewhere" / "mine.ckpt"
    elsewhere.parent.mkdir()
    shutil.copy(run_folder / "checkpoints" / "best.ckpt", elsewhere)
    kvt("predict", "--ckpt_path", str(elsewhere))
    assert (elsewhere.parent / "predictions.csv").is_file()
    assert not (in_tmp_dir / "predictions.csv").exists()


def test_a_class_of_the_users_own(experiment, in_tmp_dir, monkeypatch):
    (in_tmp_dir / "sharper.py").write_text(
        "from kvt.attention import KV\n\n\n"
        "class Sharper(KV):\n"
        "    def gain_and_bias(self, n, m):\n"
        "        return self.output.weight.new_tensor(2.0), None\n"
    )
    monkeypatch.syspath_prepend(str(in_tmp_dir))
    result = experiment("reverse", *SMALL_LISTS, "--attn", "sharper.Sharper")
    assert result["path"].parent.parent.name == "Sharper"


def test_a_folder_of_the_users_own(experiment, small_data):
    result = experiment("cifar10", *SMALL_IMAGES, "--max_epochs", "1", "--root", str(small_data / "cifar100"))
    checkpoint = result["path"].parent / "checkpoints" / "best.ckpt"
    task = ImageTask.load_from_checkpoint(checkpoint)
    assert task.hparams["spec"]["classes"] == ["class0", "class1", "class2"]
    assert result["task"] == "cifar100"


def test_bf16_trains(experiment):
    for config in ("reverse", "cifar10"):
        result = experiment(
            config, *SMALL[config], "--attn", "kv+pos", "--precision", "bf16-mixed", "--max_epochs", "1"
        )
        assert result["precision"] == "bf16-mixed"
        assert result["test/loss"] < 10


def test_half_precision_all_through_trains_and_is_drawn(experiment):
    assert experiment("anomaly", *SMALL["anomaly"], "--precision", "bf16-true")["precision"] == "bf16-true"


def test_runs_started_at_once_never_share_a_folder(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        versions = list(pool.map(claim_version, [tmp_path / "reverse" / "kv"] * 64, [True] * 64))
    assert sorted(versions) == list(range(64))


def test_a_run_that_never_trained_removes_its_own_folder_only(tmp_path, monkeypatch):
    folder = tmp_path / "reverse" / "kv"
    trained, failed = RunLogger(folder), RunLogger(folder)
    assert (trained.version, failed.version) == ("version_0", "version_1")
    failed.experiment.add_text("note", "here")
    failed.discard()
    assert [path.name for path in folder.iterdir()] == ["version_0"]
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    other_process = RunLogger(folder)
    assert other_process.version == "version_0"
    other_process.discard()
    assert [path.name for path in folder.iterdir()] == ["version_0"]


def test_language_models_are_judged_by_validation_alone(experiment, kvt, mistake, small_data):
    """There is no test split; loss, perplexity and bits a character are the same number in three units."""
    result = experiment("characters", *SMALL["characters"])
    assert not [name for name in result if name.startswith("test/")]
    assert result["val/ppl"] == pytest.approx(exp(result["val/loss"]), rel=1e-5)
    assert result["val/bpc"] == pytest.approx(result["val/loss"] / log(2), rel=1e-5)
    checkpoint = str(result["path"].parent / "checkpoints" / "best.ckpt")
    kvt("predict", "--ckpt_path", checkpoint)
    with (result["path"].parent / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = (small_data / "tinyshakespeare" / "input.txt").read_text()
    assert text.endswith("".join(row["target"] for row in rows))
    assert all(len(row["prediction"]) == len(row["target"]) for row in rows)
    assert "no test split" in mistake(kvt, "test", "--ckpt_path", checkpoint)


@pytest.mark.parametrize(("steps", "validations"), [(2, [2]), (6, [3, 6]), (7, [3, 6, 7])])
def test_the_last_step_is_validated(experiment, steps, validations):
    folder = experiment("characters", *SMALL["characters"], "--max_steps", str(steps))["path"].parent
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step + 1 for event in events.Scalars("val/loss")] == validations
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == steps


@pytest.mark.parametrize("config", ["characters", "human_numbers", "translation"])
def test_tensorboard_shows_what_the_model_writes(experiment, config):
    folder = experiment(config, *SMALL[config])["path"].parent
    events = EventAccumulator(str(folder)).Reload()
    assert len(events.Tensors("sample/text_summary")) == len(events.Scalars("val/loss"))
    assert "vocab" not in (folder / "hparams.yaml").read_text()  # no vocabulary among the hyperparameters


@pytest.fixture
def translation(experiment):
    return experiment("translation", *SMALL["translation"])


def test_translation_reports_both_bleus_of_every_epoch_and_of_the_test_once(translation):
    events = EventAccumulator(str(translation["path"].parent)).Reload()
    for name in ("bleu", "bleu_paper", "ppl", "loss"):
        assert len(events.Scalars(f"val/{name}")) == 2
        assert len(events.Scalars(f"test/{name}")) == 1
    assert "tok:13a" in translation["notes"]["bleu"]
    assert "tok:13a" in str(events.summary_metadata["_hparams_/session_start_info"].plugin_data.content)


def test_predictions_of_a_translation_are_text_in_the_order_of_the_file(kvt, translation, small_data):
    folder = translation["path"].parent
    kvt("predict", "--ckpt_path", str(folder / "checkpoints" / "best.ckpt"))
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name, language in (("source", "de"), ("reference", "en")):
        lines = (small_data / "multi30k" / f"test_2016_flickr.{language}").read_text().splitlines()
        assert [row[name] for row in rows] == lines
    bleu, _ = sacre_bleu([row["translation"] for row in rows], [row["reference"] for row in rows])
    assert bleu == pytest.approx(translation["test/bleu"], abs=1e-4)


def test_a_checkpoint_alone_translates_and_writes(translation, experiment, monkeypatch, capsys, tmp_path_factory):
    """Without the data, somewhere else, and the same each time."""
    written = experiment("characters", *SMALL["characters"])["path"].parent
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("KVT_DATA_DIR", "nowhere")

    def kvt(*words: str) -> list[str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["kvt", *words])
        main()
        return capsys.readouterr().out.splitlines()

    words = ["translate", "--ckpt_path", str(translation["path"].parent / "checkpoints" / "best.ckpt")]
    sentences = ["der Hund läuft.", "", "ein Nilpferd sieht"]
    greedy, beam = kvt(*words, *sentences), kvt(*words, "--beam", "3", *sentences)
    assert len(greedy) == len(beam) == 3
    assert greedy[1] == beam[1] == ""
    for text in ("\n".join(sentences), "\r\n".join(sentences) + "\r\n"):
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(text.encode())))
        assert kvt(*words) == greedy
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"")))
    assert kvt(*words) == []

    words = [
        "generate",
        "--ckpt_path",
        str(written / "checkpoints" / "best.ckpt"),
        "--prompt",
        "To be",
        "--tokens",
        "40",
    ]
    first, again, other, greedy = (kvt(*words, *more) for more in ([], [], ["--seed", "1"], ["--temperature", "0"]))
    assert first == again
    assert len({*map("\n".join, (first, other, greedy))}) == 3
    assert "\n".join(first).startswith("To be")
    assert len("\n".join(first)) == 45


@pytest.mark.slow
def test_two_processes_translate_every_sentence_once(in_tmp_dir):
    script = [sys.executable, str(REPOSITORY / "experiments" / "translation.py"), *QUIET, *SMALL["translation"]]
    processes = ["--devices", "2", "--strategy", "ddp"]
    ended = subprocess.run([*script, *processes], check=True, capture_output=True, text=True)
    assert "Warning" not in ended.stderr
    (path,) = in_tmp_dir.rglob("result.json")
    result = json.loads(path.read_text())
    words = [
        "test",
        "--ckpt_path",
        str(path.parent / "checkpoints" / "best.ckpt"),
        "--devices",
        "1",
        "--strategy",
        "auto",
    ]
    cli = CLI([*words, *QUIET])
    for name in ("loss", "ppl", "bleu", "bleu_paper"):
        assert cli.trainer.callback_metrics[f"test/{name}"].item() == pytest.approx(result[f"test/{name}"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_with_twice_the_batch(in_tmp_dir):
    """In float64, and without dropout, of which each process draws its own."""
    script = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *QUIET, *SMALL_LISTS]
    exact = ["--precision", "64-true", "--dropout", "0", "--max_epochs", "3"]
    weights = []
    for flags in (["--devices", "2", "--strategy", "ddp"], ["--batch_size", "32"]):  # SMALL_LISTS says 16
        subprocess.run([*script, *exact, *flags], check=True, capture_output=True)
        newest = max(in_tmp_dir.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        weights.append(torch.load(newest, weights_only=True)["state_dict"])
    two, one = weights
    torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_two_processes_train_one_model(in_tmp_dir, kvt):
    script = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *QUIET, *SMALL_LISTS]
    ended = subprocess.run([*script, "--devices", "2", "--strategy", "ddp"], check=True, capture_output=True, text=True)
    assert "Warning" not in ended.stderr
    (path,) = in_tmp_dir.rglob("result.json")
    result = json.loads(path.read_text())
    assert path.parent.name == "version_0"
    assert result["seconds"] * result["tokens_per_second"] == pytest.approx(2 * 96 * 16)

    checkpoint = path.parent / "checkpoints" / "best.ckpt"
    task = ListTask.load_from_checkpoint(checkpoint).eval()
    data = DigitLists(**result["config"]["data"]["init_args"])
    digits, targets = data.load()["test"]
    assert result["test/acc"] == pytest.approx((task(digits).argmax(-1) == targets).float().mean().item())

    kvt("predict", "--ckpt_path", str(checkpoint))
    assert len((path.parent / "predictions.csv").read_text().splitlines()) == 1 + 20


def test_fit_alone_leaves_the_test_split_untouched(kvt, in_tmp_dir):
    kvt("fit", "--config", str(CONFIGS / "reverse.yaml"), *SMALL_LISTS)
    (result,) = in_tmp_dir.rglob("result.json")
    metrics = json.loads(result.read_text())
    assert "val/acc" in metrics
    assert "test/acc" not in metrics


def test_print_config_is_a_configuration(kvt, capsys, in_tmp_dir):
    with pytest.raises(SystemExit) as ended:
        CLI(["fit", "--config", str(CONFIGS / "cifar10.yaml"), "--attn", "qkv", "--print_config"])
    assert ended.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["attn"] == "qkv"


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_help_names_the_settings_of_the_task(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(REPOSITORY / "experiments" / f"{script}.py"), run_name="__main__")
    words = capsys.readouterr().out.split()
    assert {"--seed", "--attn", "--batch_size", "--max_epochs", "--fleet", "--compile"} <= {
        word.rstrip(",") for word in words
    }
