"""A user's mistake: one line on stderr that names it, exit code 2, nothing left behind."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvt.cli import experiment as experiment_module
from kvt.cli.lightning_cli import run_words
from kvt.cli.main import main
from kvt.system.console import run
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_LISTS
from tests.helpers.hostile import require_refusal

FLAGS = [
    (
        "reverse",
        ["--attn", "kvpos"],
        ["kvpos", "did you mean 'kv+pos'", "qkv, kv, kv+pos, kv+phase, qkv+pos, x-kv, q-kv"],
    ),
    ("reverse", ["--batch_size", "60000"], ["batch_size=60000"]),
    ("reverse", ["--lr", "-1"], ["lr=-1.0"]),
    ("reverse", ["--lr", "fast"], ["--lr", "fast"]),
    ("reverse", ["--attn_kwargs.kv_head", "2"], ["kv_head", "did you mean 'kv_heads'"]),
    ("reverse", ["--seed", "-1"], ["--seed -1"]),
    ("reverse", ["--devices", "2", "--strategy", "ddp", "--val_size", "1"], ["batch_size=128", "2 processes"]),
    ("reverse", ["--strategy", "ModelParallelStrategy"], ["ModelParallelStrategy", "choose ddp"]),
    ("reverse", ["--val_check_interval", "1000"], ["val_check_interval 1000", "2 batches"]),
    ("reverse", ["--max_steps", "0"], ["at least one step", "--max_steps"]),
    ("reverse", ["--max_epochs", "0"], ["nothing was trained", "--max_epochs"]),
    ("reverse", ["--max_epochs", "-1"], ["--max_epochs -1", "all steps of the run", "--schedule constant"]),
    ("reverse", ["--model", "ImageTask"], ["ImageTask", "does not fit"]),
    ("cifar10", ["--milestones", "[-5]"], ["milestones"]),
    ("reverse", ["--max_epoch", "2"], ["--max_epoch", "did you mean --max_epochs"]),
    ("reverse", ["--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
    ("reverse", ["--ckpt_path", "nowhere.ckpt"], ["--ckpt_path", "nowhere.ckpt"]),
    ("cifar10", ["--patch", "5"], ["patch=5", "32x32"]),
    ("characters", ["--length", "5000"], ["516 characters", "length=5000"]),
    ("anomaly", ["--backbone", "resnet43"], ["'resnet43'", "did you mean 'resnet34'"]),
    ("anomaly", ["--features", "nowhere.pt", "--weights", "nowhere.pth"], ["drop --root and --weights"]),
]


def fit(*words: str) -> None:
    run(lambda: run_words(["fit", *words]))


@pytest.mark.parametrize(("config", "flags", "named"), FLAGS, ids=lambda value: "".join(value)[:40])
def test_flags(mistake, config, flags, named):
    small = ["--train_size", "256", "--test_size", "130"] if config == "reverse" else []
    line = mistake(fit, "--config", str(CONFIGS / f"{config}.yaml"), *QUIET[:2], *small, *flags)
    for words in named:
        assert words in line


YAMLS = {
    "unknown key of the model": ("model: {class_path: kvt.tasks.ListTask, init_args: {dims: 3}}", "dims"),
    "unknown section": ("modle: {attn: kv}", "modle"),
    "unknown class": ("model: {class_path: kvt.tasks.ListTusk}", "ListTusk"),
    "not a model": ("model: {class_path: torch.nn.Linear}", "Linear"),
    "wrong type": ("trainer: {max_epochs: many}", "many"),
    "a word for a truth value": ("model: {init_args: {attn: no}}", "--attn: "),
    "no class": ("model: {init_args: {dim: 3}}", "dim=3"),
    "broken": ("model: [", "mine.yaml"),
    "not a mapping": ("- 1\n- 2", "mine.yaml"),
    "empty": ("", "mine.yaml"),
}


@pytest.mark.parametrize("name", YAMLS)
def test_configurations(mistake, in_tmp_dir, name):
    text, named = YAMLS[name]
    Path("mine.yaml").write_text(text)
    line = mistake(fit, "--config", str(CONFIGS / "reverse.yaml"), "--config", "mine.yaml")
    assert named in line


def test_no_configuration_at_all(mistake):
    assert "--config" in mistake(fit)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_commands_that_need_a_checkpoint(mistake, command):
    config = str(CONFIGS / "reverse.yaml")
    assert "--ckpt_path" in mistake(lambda: run(lambda: run_words([command, "--config", config])))


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_checkpoint_is_not_measured_on_another_split(mistake, trained, small_data, command):
    """In which images of the training would be among those of the validation."""
    words = [command, "--ckpt_path", str(trained("cifar10")), "--data_dir", str(small_data), *QUIET]
    for flag, was, now in (("--seed", 0, 1), ("--val_size", 6, 7)):
        found = mistake(lambda flag=flag, now=now: run(lambda: run_words([*words, flag, str(now)])))
        assert f"made with {flag[2:]}={was}" in found
        assert "drop the flag" in found
    run(lambda: run_words([*words, "--batch_size", "5"]))


@pytest.mark.parametrize(
    ("command", "config", "flags", "named"),
    [
        ("test", "reverse", [*SMALL_LISTS, "--attn", "qkv"], "attn=kv, not qkv"),
        ("test", "reverse", [], "dim=16, not 64"),
        ("test", "cifar10", [], "another task than ImageTask"),
        ("fit", "reverse", [*SMALL_LISTS, "--lr", "0.5"], "lr=0.001, not 0.5"),
        ("fit", "reverse", [*SMALL_LISTS, "--task", "sort"], "task=reverse, not sort"),
        ("fit", "reverse", [*SMALL_LISTS, "--seed", "3"], "seed=0, not 3"),
    ],
)
def test_settings_that_a_checkpoint_was_not_made_with(mistake, trained, command, config, flags, named):
    words = [command, "--config", str(CONFIGS / f"{config}.yaml"), "--ckpt_path", str(trained("reverse")), *flags]
    assert named in mistake(lambda: run(lambda: run_words(words)))


ASKED = [
    ("generate", ["--prompt", "€"], "'€' is not in the model's vocabulary"),
    ("generate", ["--temperature", "nan"], "temperature"),
    ("generate", ["--promt", "x"], "--promt"),
    ("maps", ["--example", "20"], "example=20 must be from 0 to 19"),
    ("maps", ["--out", "maps.gif"], "--out maps.gif: the file name must end in one of .png, .pdf, .svg, .html"),
    ("maps", ["--out", "nowhere/maps.png"], "--out nowhere/maps.png: cannot write to nowhere"),
    ("translate", ["--beam", "999999", "Hund"], "beam=999999 must be at most 1000"),
    ("translate", [" ".join(["Hund"] * 11)], "sentence 1 has 11 words; this model reads at most 10"),
    ("translate", ["Hund", "Hund \udcff"], "sentence 2 is not UTF-8 at byte 5"),
]


TASKS = {"generate": "characters", "maps": "reverse", "translate": "translation"}
"""A task whose checkpoints a command takes; generate and translate take those of no other."""


@pytest.fixture
def ask(mistake, monkeypatch):
    """Runs a `kvt` command that must end with one line, which it returns."""

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["kvt", *words])
        return mistake(main)

    return call


@pytest.mark.parametrize(("command", "words", "named"), ASKED, ids=lambda value: "".join(value)[:30])
def test_what_is_asked_of_a_trained_model(ask, trained, command, words, named):
    assert named in ask(command, "--ckpt_path", str(trained(TASKS[command])), *words)


@pytest.mark.parametrize("command", ["generate", "maps", "translate"])
def test_a_command_without_its_model(ask, trained, command):
    assert "ckpt_path" in ask(command)
    assert "nowhere.ckpt" in ask(command, "--ckpt_path", "nowhere.ckpt")
    for other in {*TASKS} - {command} if command != "maps" else ():
        assert "this command needs" in ask(command, "--ckpt_path", str(trained(TASKS[other])))


@pytest.mark.parametrize(
    "config", ["mnist", "fashion_mnist", "cifar10", "cifar100", "anomaly", "characters", "translation"]
)
@pytest.mark.usefixtures("offline")
def test_no_data_and_no_network(mistake, tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("empty")
    line = mistake(fit, "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, "--data_dir", str(folder))
    assert str(folder) in line
    assert "--data_dir" in line
    assert "put " in line


def test_the_scripts_choice(mistake, monkeypatch):
    def script(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["synthetic.py", *words])
        file = str(REPOSITORY / "experiments" / "synthetic.py")
        experiment_module.experiment(file, "", ["reverse", "sort"], option="task")

    assert "choose from" in mistake(script, "--task", "revers")
    assert "--task" in mistake(script, "--task")
    assert "drop --task" in mistake(script, "--task", "sort", "--resume", "lightning_logs/reverse/kv/version_0")
    assert "--ckpt_path : no such file" in mistake(script, "--ckpt_path", "")


def python(words: list[str], cwd: Path | str, **more: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=variables, capture_output=True, text=True)


def test_a_file_of_ones_own_hides_no_package_from_the_command(tmp_path):
    (tmp_path / "attr.py").write_text("x = 1\n")
    ended = python(["-m", "kvt", "runs"], tmp_path)
    assert "pass one with runs" in require_refusal(ended.returncode, ended.stderr)


def test_mistakes_within_ones_own_modules_keep_their_traceback(in_tmp_dir, monkeypatch):
    Path("helper_of_mine.py").write_text("x = 1\n")
    Path("class_of_mine.py").write_text("import helper_of_mine\ndef use(): return helper_of_mine.y\n")
    monkeypatch.syspath_prepend(".")
    with pytest.raises(AttributeError):
        run(lambda: import_module("class_of_mine").use())


def test_outputs_are_checked_before_anything_is_read(mistake, monkeypatch):
    Path("reports").touch()
    monkeypatch.setattr("kvt.study.runner.make_runs", lambda *_, **__: pytest.fail("they were made"))
    monkeypatch.setattr("sys.argv", ["kvt", "reproduce", "table2", "--scale", "smoke", "--folder", "."])
    assert "reports is not a folder: choose another" in mistake(main)


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)


def test_run_needs_a_task(says, capsys):
    with pytest.raises(SystemExit):
        says("run", "--attn", "kv")
    assert "kvt run needs a task" in capsys.readouterr().err


def test_run_trains_and_tests_a_task_and_fit_does_not_test(says, in_tmp_dir):
    for number, words in enumerate((["run", "reverse"], ["fit", "--config", "reverse"])):
        says(*words, *QUIET, *SMALL["reverse"], "--max_epochs", "1")
        result = Path(f"lightning_logs/reverse/kv/version_{number}/result.json").read_text()
        assert ("test/acc" in result) == (words[0] == "run")
