"""Experiments from the command line to the result."""

import json
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, TextIOWrapper

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.attention import ATTENTION
from kvt.run.cli import KvtCLI
from kvt.run.fit import make_folder
from kvt.run.load_checkpoint import read_checkpoint
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_LISTS, slow
from tests.helpers.runs import REVERSE

PAGES = ("answer", "lacks", "claims", "efficientnet_features")  # scripts that are no task
SCRIPTS = sorted(path for path in (REPOSITORY / "experiments").glob("*.py") if path.stem not in PAGES)
CONFIG_NAMES = [path.stem for path in sorted(CONFIGS.glob("*.yaml"))]


REST = slow(*(("translation", attn) for attn in ATTENTION if attn != "kv+pos"))


@pytest.mark.parametrize(("config", "attn"), [*((name, "kv+pos") for name in CONFIG_NAMES), *REST])
def test_every_task_and_every_attention_runs(experiment, in_tmp_dir, config, attn):
    assert experiment(config, "--attn", attn, "--fast_dev_run", "true", *SMALL[config]) == {}
    assert list(in_tmp_dir.iterdir()) == []


def test_run_tests_the_task_that_it_trains_and_fit_does_not(says, in_tmp_dir):
    for number, words in enumerate((["run", "reverse"], ["fit", "--config", "reverse"])):
        says(*words, *QUIET, *SMALL_LISTS, "--max_epochs", "1")
        result = (in_tmp_dir / f"lightning_logs/reverse/kv/version_{number}/result.json").read_text()
        assert ("test/acc" in result) == (words[0] == "run")


def test_without_a_terminal_there_is_a_line_a_validation(says):
    flags = ["--accelerator", "cpu", "--max_steps", "10", "--val_check_interval", "4", "--log_every_n_steps", "2"]
    lines = [line for line in says("fit", "--config", "reverse", *SMALL_LISTS, *flags) if line.startswith("epoch ")]
    assert [line.partition(":")[0] for line in lines] == ["epoch 0, step 4", "epoch 0, step 6", "epoch 1, step 10"]
    assert all("val/acc 0." in line and "loss" in line for line in lines)


@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_files_events_and_a_printed_summary(experiment, in_tmp_dir, capsys):
    flags = ["--attn", "kv+pos", "--log_every_n_steps", "2"]
    run_folder = experiment("reverse", *SMALL_LISTS, *flags)["path"].parent
    assert run_folder == in_tmp_dir / "lightning_logs" / "reverse" / "kv+pos" / "version_0"
    result = json.loads((run_folder / "result.json").read_text())
    checkpoint = read_checkpoint(run_folder / "checkpoints" / "best.ckpt")
    assert result["parameters"] == sum(t.numel() for t in checkpoint["state_dict"].values())
    assert {"val/acc", "val/loss", "test/acc", "test/loss"} <= result.keys()
    assert {"packages", "machine", "config", "precision", "started"} <= result.keys()
    assert result["seconds"] * result["tokens_per_second"] == pytest.approx(2 * 96 * 16)

    events = EventAccumulator(str(run_folder), size_guidance={"images": 0}).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"train/loss", "train/acc", "train/seconds", "train/tokens_per_second"} <= scalars
    assert {"val/loss", "val/acc", "when_best/val_acc", "when_best/test_acc"} <= scalars
    for layer in (1, 2):
        assert len(events.Images(f"visual/attention/encoder, layer {layer}")) == 2  # one a validation
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")

    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.count("  "))
    assert printed["test/acc"] == f"{result['test/acc']:.4f}"
    assert printed["run"] == "lightning_logs/reverse/kv+pos/version_0"


def test_validate_test_and_predict_take_a_checkpoint_alone(kvt, experiment, in_tmp_dir, capsys):
    result = experiment("reverse", *SMALL_LISTS, "--attn", "kv+pos")
    checkpoint = result["path"].parent / "checkpoints" / "best.ckpt"
    kvt("validate", "--ckpt_path", str(checkpoint))
    kvt("test", "--ckpt_path", str(checkpoint))
    assert f"{result['test/acc']:.6}"[:6] in capsys.readouterr().out
    kvt("predict", "--ckpt_path", str(checkpoint))
    assert "predictions in lightning_logs/reverse/kv+pos/version_0/predictions.csv" in capsys.readouterr().out
    lines = result["path"].with_name("predictions.csv").read_text().splitlines()
    assert lines[0] == "example,target,prediction,probability"
    assert len(lines) == 1 + 20
    elsewhere = in_tmp_dir / "elsewhere"
    elsewhere.mkdir()
    for name in ("mine", "other"):  # neither replaces the predictions of the other
        shutil.copy(checkpoint, elsewhere / f"{name}.ckpt")
        kvt("predict", "--ckpt_path", str(elsewhere / f"{name}.ckpt"))
    for name in ("mine", "other"):
        assert (elsewhere / f"predictions-{name}.csv").read_text().splitlines() == lines
    assert len([*elsewhere.iterdir()]) == 4


def test_a_checkpoint_alone_translates_and_writes(experiment, pictures, says, monkeypatch, tmp_path_factory):
    """Without the data, in another folder, and the same each time."""
    translation, written = (experiment(name, *SMALL[name]) for name in ("translation", "characters"))
    best, text = (str(run["path"].parent / "checkpoints" / "best.ckpt") for run in (translation, written))
    assert "vocab" not in written["path"].with_name("hparams.yaml").read_text()
    events, judged = (EventAccumulator(str(run["path"].parent)).Reload() for run in (translation, written))
    assert len(judged.Tensors("sample/text_summary")) == len(judged.Scalars("val/loss"))
    assert len(events.Tensors("sample/text_summary")) == 2
    for name in ("bleu", "bleu_paper", "ppl", "loss"):
        assert len(events.Scalars(f"val/{name}")) == 2
        assert len(events.Scalars(f"when_best/test_{name}")) == 1
    assert "tok:13a" in translation["notes"]["bleu"]
    assert "tok:13a" in str(events.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("KVT_DATA_DIR", "nowhere")

    words = ["translate", "--ckpt_path", best]
    sentences = ["der Hund läuft.", "", "ein Nilpferd sieht"]
    greedy, beam = says(*words, *sentences), says(*words, "--beam", "3", *sentences)
    assert len(greedy) == len(beam) == 3
    assert greedy[1] == beam[1] == ""
    for lines in ("\n".join(sentences), "\r\n".join(sentences) + "\r\n"):
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(lines.encode())))
        assert says(*words) == greedy
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"")))
    assert says(*words) == []

    words = ["generate", "--ckpt_path", text, "--prompt", "To be", "--tokens", "40"]
    first, again, other, greedy = (says(*words, *more) for more in ([], [], ["--seed", "1"], ["--temperature", "0"]))
    assert first == again
    assert len({*map("\n".join, (first, other, greedy))}) == 3
    assert "\n".join(first).startswith("To be")
    assert len("\n".join(first)) == 45
    several = says(*words, "--num_samples", "2")
    assert "\n".join(several) == "\n---\n".join(map("\n".join, (first, other)))


def test_runs_started_at_once_never_share_a_folder(in_tmp_dir):
    cli = KvtCLI(REVERSE.as_dict())
    with ThreadPoolExecutor(16) as pool:
        versions = list(pool.map(lambda _: make_folder(cli, None, resume=False, writes=True), range(64)))
    assert sorted(path.name for path in versions) == sorted(f"version_{number}" for number in range(64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("synthetic.py", [*SMALL_LISTS, "--batch_size", "32"]),
        ("characters.py", [*SMALL["characters"], "--batch_size", "8"]),
        ("mnist.py", [*SMALL["mnist"], "--batch_size", "6"]),
        ("language_model.py", [*SMALL["language_model"], "--batch_size", "8"]),
        ("language_model.py", [*SMALL["language_model"], "--recompute", "true", "--batch_size", "8"]),
    ],
)
def test_two_processes_take_the_steps_of_one_with_twice_the_batch(in_tmp_dir, script, flags):
    """In float64, and without dropout, of which each process draws its own."""
    words = [sys.executable, str(REPOSITORY / "experiments" / script), *QUIET, *flags, "--precision", "64-true"]
    words += ["--dropout", "0"] * (script != "mnist.py")
    *_, size = flags
    for two in ([], ["--devices", "2", "--strategy", "ddp", "--batch_size", str(int(size) // 2)]):
        subprocess.run([*words, *two], check=True, capture_output=True)
    folders = sorted(path.parent for path in in_tmp_dir.rglob("result.json"))
    one, two = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in folders)
    torch.testing.assert_close(two["state_dict"], one["state_dict"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(two["optimizer_states"], one["optimizer_states"], rtol=1e-9, atol=1e-9)
    scores = [json.loads((run / "result.json").read_text())["val/loss"] for run in folders]
    assert scores[1] == pytest.approx(scores[0], rel=1e-9)


@pytest.mark.parametrize("script", [SCRIPTS[0].stem, *slow(*(path.stem for path in SCRIPTS[1:]))])
def test_help_names_the_settings_of_the_task(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(REPOSITORY / "experiments" / f"{script}.py"), run_name="__main__")
    words = capsys.readouterr().out.split()
    assert {"--seed", "--attn", "--batch_size", "--max_epochs", "--compile"} <= {word.rstrip(",") for word in words}
