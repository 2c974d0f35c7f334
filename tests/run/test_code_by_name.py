"""A checkpoint names classes. kvt's own are used; others are imported only if the user names them, too."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvt.commands import execute, run_words
from kvt.system import run
from tests.conftest import CONFIGS, QUIET, SMALL

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


@pytest.fixture
def own(in_tmp_dir, monkeypatch) -> Callable[..., None]:
    """Train with classes of the user's own; only x.ckpt and its configuration then name them."""
    monkeypatch.syspath_prepend(in_tmp_dir)
    Path("own_code.py").write_text(OWN)

    def train(config: str, *flags: str) -> None:
        run(lambda: run_words(["fit", "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *SMALL[config], *flags]))
        forget()
        next(Path().rglob("last.ckpt")).rename("x.ckpt")

    yield train
    sys.modules.pop("own_code", None)


def forget() -> None:
    """Let the next import of the code leave a trace."""
    sys.modules.pop("own_code", None)
    Path("imported").unlink(missing_ok=True)


def use(command: str, *words: str) -> Callable[[], None]:
    """Return a command that uses the checkpoint."""
    words = ("--ckpt_path", "x.ckpt", *words)
    if command in ("maps", "generate"):
        return lambda: run(lambda: execute(command, [*words, *(["--tokens", "3"] if command == "generate" else [])]))
    further = ["--max_epochs", "3"] if command == "fit" else []
    return lambda: run(lambda: run_words([command, *words, *further, *QUIET]))


@pytest.mark.parametrize("command", ["validate", "fit", "maps", "generate"])
def test_an_attention_of_the_users_own_must_be_named(own, mistake, command):
    own("characters" if command == "generate" else "reverse", "--attn", "own_code.NearKV")
    line = mistake(use(command))
    assert "x.ckpt" in line
    assert "--attn own_code.NearKV" in line
    assert "--attn" in mistake(use(command, "--attn", "own_code.MyCallback"))
    assert not Path("imported").exists()
    use(command, "--attn", "own_code.NearKV")()
    assert Path("imported").exists()


@pytest.mark.parametrize("command", ["validate", "fit", "maps"])
def test_a_task_and_data_of_the_users_own_must_be_named(own, mistake, command):
    task, data = ["--model", "own_code.MyTask"], ["--data", "own_code.MyLists"]
    own("reverse", *task, *data)
    config = str(next(Path().rglob("config.yaml")))
    for words in ([], data):
        assert "--model own_code.MyTask" in mistake(use(command, *words))
        assert not Path("imported").exists()
    Path("imported").touch()
    assert "--data own_code.MyLists" in mistake(use(command, *task))
    forget()
    use(command, *(["--config", config] if command == "validate" else [*task, *data]))()
    assert Path("imported").exists()


NO_CLASSES = [
    *("own_code", ".own_code", 5, ["own_code"], "kvt_evil.MyTask", "kvt", "kvt.", "kvt..own_code"),
    *("kvt.os", "kvt.tasks.os.system", "kvt.tasks.base.Metric", f"kvt.{'x' * 5000}"),
]


@pytest.mark.parametrize("section", ["model", "data", "attn"])
def test_a_name_of_no_class_of_ours_is_not_imported(own, mistake, section):
    own("reverse")
    checkpoint = torch.load("x.ckpt")
    bare = ["qkv"] if section != "attn" else []  # an attention of kvt, and a module that could be imported
    for module in ("5", "['own_code']", "kvt_evil", "qkv"):
        Path(f"{module}.py").write_text(OWN)
    for name in [*NO_CLASSES, *bare]:
        if section == "attn":
            checkpoint["config"]["model"]["init_args"]["attn"] = name
        else:
            checkpoint["config"][section]["class_path"] = name
        torch.save(checkpoint, "x.ckpt")
        assert "x.ckpt" in mistake(use("validate")), name
        assert not Path("imported").exists(), name


def test_a_checkpoint_does_not_decide_where_to_write(own, in_tmp_dir):
    own("reverse", "--default_root_dir", "elsewhere", "--data_dir", "far_away")
    Path("elsewhere").rename("before")
    use("fit")()
    use("predict")()
    assert Path("lightning_logs/reverse/kv/version_0/result.json").is_file()
    assert len([*Path().glob("predictions-*.csv")]) == 1
    assert not Path("elsewhere").exists()
    assert not Path("far_away").exists()


@pytest.mark.parametrize("callback", ["best", "last"])
@pytest.mark.parametrize("name", ["checkpoints/../../precious", "checkpoints/.."])
def test_a_resumed_run_deletes_nothing_that_its_checkpoint_names(experiment, callback, name):
    """Lightning deletes the best checkpoint so far, a folder too, wherever the state of its callback says it is."""
    run_folder = experiment("reverse", *SMALL["reverse"], "--max_epochs", "2")["path"].parent
    last = run_folder / "checkpoints" / "last.ckpt"
    (run_folder.parent / "precious").mkdir()
    (run_folder.parent / "precious" / "thesis.tex").touch()
    checkpoint = torch.load(last)
    state = checkpoint["callbacks"][callback]
    path, score = str(run_folder / name), torch.tensor(-1.0)
    state |= {"best_model_path": path, "kth_best_model_path": path, "best_k_models": {path: score}}
    state |= {"best_model_score": score, "kth_value": score, "current_score": score, "dirpath": str(last.parent)}
    checkpoint["config"]["trainer"]["max_epochs"] = 4
    torch.save(checkpoint, last)
    with suppress(SystemExit):
        run(lambda: run_words(["fit", "--ckpt_path", str(last), *QUIET]))
    assert (run_folder.parent / "precious" / "thesis.tex").is_file()
    assert (run_folder / "config.yaml").is_file()
