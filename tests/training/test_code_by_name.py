"""A checkpoint names classes. Those of kvt are looked for; any other only where the user names it too."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvt.cli.main import execute
from kvt.system.console import run
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, SMALL, SMALL_LISTS

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("command", ["validate", "fit", "maps", "generate"])
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
    named = ["--model", "own_code.MyTask"]
    for words in ([], ["--data", "own_code.MyLists"]):
        assert mistake(use(command, *words)).endswith("add --model own_code.MyTask")
        assert not Path("imported").exists()
    Path("imported").touch()
    assert mistake(use(command, *named)).endswith("add --data own_code.MyLists")
    forget()
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
    if section == "attn":
        checkpoint["hyper_parameters"]["attn"] = name
    else:
        checkpoint[f"{section}_class"] = name
    torch.save(checkpoint, "x.ckpt")


NO_CLASSES = [
    *("own_code", ".own_code", 5, ["own_code"], "kvt_evil.MyTask", "kvt", "kvt.", "kvt..own_code"),
    *("kvt.os", "kvt.tasks.os.system", "kvt.tasks.base.Metric", f"kvt.{'x' * 5000}"),
]


@pytest.mark.parametrize("section", ["model", "data", "attn"])
@pytest.mark.parametrize("command", ["validate", "maps", "generate"])
def test_what_is_no_class_of_ours_is_not_imported(own, mistake, command, section):
    own("characters" if command == "generate" else "reverse")
    bare = ["qkv"] if section != "attn" else []  # an attention, and a module for whoever imports it
    for module in ("5", "['own_code']", "kvt_evil", "qkv"):
        Path(f"{module}.py").write_text(OWN)
    for name in [*(NO_CLASSES if command == "maps" else NO_CLASSES[:3]), *bare]:  # all read names in one way
        rename(section, name)
        if (command, section) == ("generate", "data"):
            use(command)()  # it has no use for data
        else:
            assert "x.ckpt" in mistake(use(command)), name
        assert not Path("imported").exists(), name


def test_an_attention_that_a_checkpoint_has_not(own, mistake):
    own("reverse")
    for command in ("maps", "validate"):
        assert "made with attn=kv, not qkv" in mistake(use(command, "--attn", "qkv"))


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
    checkpoint["trainer"]["max_epochs"] = 5
    torch.save(checkpoint, last)
    with suppress(SystemExit):
        run(lambda: CLI(["fit", "--ckpt_path", str(last), *QUIET]))
    assert (run_folder.parent / "precious" / "thesis.tex").is_file()
    assert (run_folder / "config.yaml").is_file()
