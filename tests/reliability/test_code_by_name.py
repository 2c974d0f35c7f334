"""A checkpoint names classes. Those of kvt are looked for; any other only where the user names it too."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pydoc import locate

import pytest
import torch
import yaml

import kvt.tasks
from kvt.cli import CLI
from kvt.commands import execute
from kvt.console import run
from kvt.trust import is_ours
from tests.conftest import CONFIGS, QUIET, SMALL, SMALL_LISTS

OWN = """
open("imported", "a").close()
from lightning.pytorch.callbacks import Callback
from kvt.attention import KV
from kvt.tasks import CharacterTask, DigitLists, ListTask

class NearKV(KV):
    pass

class MyTask(ListTask):
    pass

class MyLists(DigitLists):
    pass

class MyCallback(Callback):
    pass
"""
USES = {
    "validate": lambda *words: CLI(["validate", *words, *QUIET]),
    "test": lambda *words: CLI(["test", *words, *QUIET]),
    "predict": lambda *words: CLI(["predict", *words, *QUIET]),
    "fit": lambda *words: CLI(["fit", *words, *QUIET]),
    "maps": lambda *words: execute("maps", words),
    "generate": lambda *words: execute("generate", [*words, "--tokens", "3"]),
}


@pytest.fixture
def own(in_tmp_dir, monkeypatch) -> Callable[..., str]:
    """Trains with classes of the user's own; the checkpoint is then all that is left of it in this process."""
    monkeypatch.syspath_prepend(in_tmp_dir)
    Path("own_code.py").write_text(OWN)

    def train(config: str, *flags: str) -> str:
        words = ["--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *SMALL[config], *flags]
        run(lambda: CLI(["fit", *words]))
        forget()
        return str(next(Path().rglob("last.ckpt")).rename("x.ckpt"))

    yield train
    sys.modules.pop("own_code", None)


def forget() -> None:
    """Whoever imports the code from now on leaves a trace."""
    sys.modules.pop("own_code", None)
    Path("imported").unlink(missing_ok=True)


def use(command: str, *words: str) -> Callable[[], None]:
    return lambda: run(lambda: USES[command]("--ckpt_path", "x.ckpt", *words))


@pytest.mark.parametrize("command", [*USES])
def test_an_attention_of_ones_own_must_be_named_too(own, mistake, command):
    config = "characters" if command == "generate" else "reverse"
    own(config, "--attn", "own_code.NearKV")
    line = mistake(use(command))
    assert "x.ckpt: uses own_code.NearKV, which is not part of kvt" in line
    assert line.endswith("add --attn own_code.NearKV")
    assert not Path("imported").exists()
    assert "--attn" in mistake(use(command, "--attn", "own_code.MyCallback"))
    assert not Path("imported").exists()
    use(command, "--attn", "own_code.NearKV")()
    assert Path("imported").exists()


@pytest.mark.parametrize("command", ["validate", "fit", "maps"])
def test_a_task_of_ones_own_must_be_named_too(own, mistake, command):
    own("reverse", "--model", "own_code.MyTask", "--data", "own_code.MyLists")
    assert mistake(use(command)).endswith("add --model own_code.MyTask")
    named = ["--model", "own_code.MyTask"]
    assert mistake(use(command, *named)).endswith("add --data own_code.MyLists")
    assert not Path("imported").exists()
    use(command, *named, "--data", "own_code.MyLists")()
    assert Path("imported").exists()


def test_a_runs_own_configuration_names_it(own):
    own("reverse", "--attn", "own_code.NearKV")
    config = next(Path().rglob("config.yaml"))
    use("test", "--config", str(config))()
    assert Path("imported").exists()


def rename(section: str, name: object) -> None:
    """Has the checkpoint name another class."""
    checkpoint = torch.load("x.ckpt")
    content = yaml.safe_load(checkpoint["config"])
    if section == "attn":
        content["model"]["init_args"]["attn"] = checkpoint["hyper_parameters"]["attn"] = name
    else:
        content[section]["class_path"] = name
    torch.save({**checkpoint, "config": yaml.safe_dump(content)}, "x.ckpt")


NO_CLASSES = [
    *("own_code", ".own_code", 5, ["own_code"], "kvt_evil.MyTask", "kvt", "kvt.", "kvt..own_code"),
    *("kvt.os", "kvt.tasks.os.system", "kvt.tasks.base.Metric", f"kvt.{'x' * 5000}"),
]


@pytest.mark.parametrize("section", ["model", "data", "attn"])
@pytest.mark.parametrize("command", [*USES])
def test_what_is_no_class_of_ours_is_not_imported(own, mistake, command, section):
    own("characters" if command == "generate" else "reverse")
    bare = ["qkv"] if section != "attn" else []  # an attention, and a module for whoever imports it
    for module in ("5", "['own_code']", "kvt_evil", "qkv"):
        Path(f"{module}.py").write_text(OWN)
    for name in [*(NO_CLASSES if command == "maps" else NO_CLASSES[:3]), *bare]:  # all read names in one way
        rename(section, name)
        if (command, section) == ("generate", "data") and is_ours(name) and isinstance(name, str):
            use(command)()  # it has no use for data
        else:
            assert "x.ckpt" in mistake(use(command)), name
        assert not Path("imported").exists(), name


@pytest.mark.parametrize("command", ["validate", "maps", "generate"])
def test_what_is_in_a_module_of_ours_is_not_all_ours(own, mistake, monkeypatch, command):
    own("reverse", "--model", "own_code.MyTask")
    monkeypatch.setattr(kvt.tasks, "Other", locate("own_code.MyTask"), raising=False)
    rename("model", "kvt.tasks.Other")
    assert "of a kvt.tasks.Other, where a" in mistake(use(command))


def test_an_attention_that_a_checkpoint_has_not(own, mistake):
    own("reverse")
    for command in ("maps", "validate"):
        assert "made with attn=kv, not qkv" in mistake(use(command, "--attn", "qkv"))


def test_only_training_needs_what_else_ran_with_it(own, mistake):
    own("reverse", "--trainer.callbacks+", "own_code.MyCallback")
    line = mistake(use("fit"))
    assert "x.ckpt: made with callbacks=[{" in line
    assert "--config" in line
    for command in ("validate", "test", "predict"):
        use(command)()
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("trainer", "logger", {"class_path": "own_code.MyCallback"}),
        ("trainer", "callbacks", "own_code.MyCallback"),
        ("trainer", "plugins", ["own_code.MyCallback"]),
        ("trainer", "strategy", "own_code.MyCallback"),
        ("trainer", "precision", "own_code.MyCallback"),
        ("trainer", "profiler", "own_code.MyCallback"),
        ("trainer", "devices", 4096),
        ("trainer", "num_nodes", 64),
        ("model", "attn_kwargs", {"score": {"class_path": "own_code.MyCallback"}}),
        ("data", "task", {"class_path": "own_code.MyCallback", "init_args": {}}),
    ],
)
def test_no_setting_of_a_checkpoint_brings_in_code_or_processes(own, mistake, section, name, value):
    own("reverse")
    checkpoint = torch.load("x.ckpt")
    content = yaml.safe_load(checkpoint["config"])
    where = content["trainer"] if section == "trainer" else content[section]["init_args"]
    where[name] = value
    torch.save({**checkpoint, "config": yaml.safe_dump(content)}, "x.ckpt")
    assert "x.ckpt" in mistake(use("fit"))
    assert not Path("imported").exists()


def test_a_checkpoint_says_nothing_of_where_to_write(own, in_tmp_dir):
    own("reverse", "--default_root_dir", "elsewhere", "--data_dir", "far_away")
    Path("elsewhere").rename("before")
    use("fit")()
    use("predict")()
    assert Path("lightning_logs/reverse/kv/version_0/result.json").is_file()
    assert Path("predictions.csv").is_file()
    assert not Path("elsewhere").exists()
    assert not Path("far_away").exists()


@pytest.mark.parametrize("kept", ["BestCheckpoint", "LastCheckpoint"])
@pytest.mark.parametrize("name", ["checkpoints/../../precious", "checkpoints/.."])
def test_a_run_that_goes_on_deletes_nothing_that_its_checkpoint_names(own, kept, name):
    """Lightning deletes what was best before, folders too, and takes a checkpoint's word for where that lies."""
    flags = ["--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "3"]
    run(lambda: CLI(["fit", *flags]))
    last = next(Path().rglob("last.ckpt"))
    run_folder = last.parent.parent
    (run_folder.parent / "precious").mkdir()
    (run_folder.parent / "precious" / "thesis.tex").touch()
    checkpoint = torch.load(last)
    state = next(value for key, value in checkpoint["callbacks"].items() if key.startswith(kept))
    path = str(run_folder / name)
    score = torch.tensor(-1.0)
    state |= {"best_model_path": path, "kth_best_model_path": path, "best_k_models": {path: score}}
    state |= {"best_model_score": score, "kth_value": score, "current_score": score, "dirpath": str(last.parent)}
    torch.save({**checkpoint, "config": checkpoint["config"].replace("max_epochs: 3", "max_epochs: 5")}, last)
    with suppress(SystemExit):
        run(lambda: CLI(["fit", "--ckpt_path", str(last), *QUIET]))
    assert (run_folder.parent / "precious" / "thesis.tex").is_file()
    assert (run_folder / "config.yaml").is_file()
