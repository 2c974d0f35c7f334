"""A task in a folder of the Hugging Face hub's layout: the same outputs, and no code that the folder names."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import kvt
from kvt.system import UserError
from kvt.tasks import Classification, ImageTask, ListTask, Task
from tests.conftest import QUIET, SMALL_LISTS
from tests.helpers.commands import command
from tests.helpers.small_tasks import LISTS, TASKS, small_batch, small_task


@pytest.mark.parametrize("name", TASKS)
@torch.no_grad()
def test_it_comes_back_with_equal_outputs(in_tmp_dir, name):
    task = small_task(name, attn="kv+pos").eval()
    task.save_pretrained("house")
    assert {path.name for path in Path("house").iterdir()} == {"model.safetensors", "config.json"}
    for again in (TASKS[name].from_pretrained("house"), kvt.load("house")):
        assert type(again) is type(task)
        assert not again.training
        assert dict(again.hparams) == dict(task.hparams)
        inputs = task.inputs(small_batch(name))
        assert torch.equal(again(*inputs), task(*inputs))
    ties = len([*task.named_parameters(remove_duplicate=False)]) - len([*task.parameters()])
    assert len([*again.named_parameters(remove_duplicate=False)]) - len([*again.parameters()]) == ties
    with safe_open("house/model.safetensors", "pt") as file:
        assert len([*file.keys()]) == len(task.state_dict()) - ties
    assert ties == (name in ("LanguageModelTask", "NumberTask"))


def test_another_class_is_refused(in_tmp_dir):
    small_task("ListTask").save_pretrained("house")
    assert Task.from_pretrained("house")
    with pytest.raises(UserError, match="ListTask"):
        ImageTask.from_pretrained("house")


OWN = """
from pathlib import Path
from kvt.attention import KV
from kvt.tasks import ListTask

Path("imported").touch()


class NearKV(KV):
    pass


class Mine(ListTask):
    pass
"""


@pytest.fixture
def my_own(in_tmp_dir, monkeypatch):
    """A module of the user's that writes a file when it is imported."""
    (in_tmp_dir / "my_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(in_tmp_dir))
    yield
    sys.modules.pop("my_own", None)


@pytest.mark.parametrize("name", ["attn", "model"])
def test_code_that_is_not_kvts_is_imported_only_if_the_caller_names_it(my_own, name):
    small_task("ListTask", attn="kv").save_pretrained("house")
    config = json.loads(Path("house/config.json").read_text())
    model, own = config["config"]["model"], {"attn": "my_own.NearKV", "model": "my_own.Mine"}[name]
    if name == "attn":
        model["init_args"]["attn"] = own
    else:
        model["class_path"] = own
    Path("house/config.json").write_text(json.dumps(config))
    for load in (kvt.load, Task.from_pretrained, ListTask.from_pretrained):
        with pytest.raises(UserError, match=own):
            load("house")
    assert not Path("imported").exists()
    loaded, mine = kvt.load("house", **{name: own}), sys.modules["my_own"].Mine
    assert own in (loaded.attn, f"my_own.{type(loaded).__name__}")
    mine(LISTS, attn="kv", dim=8, heads=2).save_pretrained("own")
    assert type(mine.from_pretrained("own")) is mine


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors"])
def test_a_damaged_folder_is_refused_in_one_line(in_tmp_dir, spoil):
    small_task("ListTask").save_pretrained("house")
    path = Path("house", spoil)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="house"):
        kvt.load("house")


def test_a_folder_or_a_plain_checkpoint_is_measured_with_the_configuration_of_its_data(in_tmp_dir):
    task = ListTask(LISTS, attn_kwargs={"attend_self": False}, dim=8, depth=1, heads=2)
    task.save_pretrained("house")
    words = [*SMALL_LISTS, "--config=reverse", "--length=4", "--dim=8", "--depth=1", "--heads=2", *QUIET]
    said = command("validate", "--ckpt_path", "house", *words, "--attn_kwargs.attend_self=false")
    assert (said.code, "val/acc" in said.out) == (0, True), said


class Seeded(ListTask):
    """A task with an argument that has the name of the run's seed."""

    def __init__(self, spec=None, *, seed: int = 4, **kwargs):
        super().__init__(spec, **kwargs)
        self.mine = seed


class Unspecified(Classification):
    """A task without spec."""

    def __init__(self, width: int = 3):
        super().__init__()
        self.model = nn.Linear(1, width)


@pytest.mark.parametrize("task", [Seeded(LISTS, seed=9, dim=8, heads=2), Unspecified(width=5)], ids=["seed", "spec"])
def test_every_argument_of_a_users_task_comes_back(task, in_tmp_dir):
    task.save_pretrained("own")
    again = kvt.load("own", model=f"{__name__}.{type(task).__name__}")
    assert {**again.hparams} == {**task.hparams}
