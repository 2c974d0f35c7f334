"""kvt as a library: a few names, and checkpoints of Lightning's own Trainer, which every command takes."""

import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

import kvt as package
from kvt.attention import AttentionFactory
from kvt.commands import execute
from kvt.models import ViT
from kvt.system import UserError
from kvt.tasks import DigitLists, ListTask


def test_every_name_is_there():
    assert all(callable(getattr(package, name)) for name in package.__all__)
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = package.nothing


def test_the_names_are_listed_before_their_first_use_which_imports_torch():
    listed = "assert {*kvt.__all__, '__version__'} <= {*dir(kvt)}; assert 'torch' not in sys.modules"
    code = f"import kvt, sys; {listed}; kvt.make_attention; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def plain(in_tmp_dir) -> Path:
    """A checkpoint of a task that Lightning's own Trainer trained."""
    data = DigitLists(length=6, train_size=64, val_size=16, test_size=16, batch_size=16)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(ListTask(data.spec, attn="kv+pos", dim=16, heads=2), data)
    trainer.save_checkpoint("plain.ckpt")
    return Path("plain.ckpt")


def test_every_command_takes_it(plain, kvt):
    for command in ("validate", "test", "predict"):
        kvt(command, "--ckpt_path", str(plain))
    execute("maps", ["--ckpt_path", str(plain)])
    assert Path("maps.png").exists()
    assert Path("predictions-plain.csv").exists()
    kvt("fit", "--ckpt_path", str(plain), "--max_epochs", "2")
    assert (Path("lightning_logs/reverse/kv+pos/version_0") / "checkpoints" / "last.ckpt").exists()


TRAINS = """
import kvt
config = kvt.RunConfig.from_name("reverse").changed(
    train_size=64, val_size=16, test_size=16, batch_size=16, dim=16, max_epochs=1, enable_progress_bar=False
)
result = kvt.train(config)
print(result)
"""


@pytest.mark.slow
def test_training_says_no_more_than_the_command(in_tmp_dir):
    ended = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("task ")
    assert "test/acc" in ended.stdout
    assert ended.stdout.splitlines()[-1].split() == ["run", "lightning_logs/reverse/kv/version_0"]
    (said,) = ended.stderr.splitlines()
    assert said.startswith("lightning_logs/reverse/kv/version_0: ")


def test_maps_show_themselves_in_a_notebook():
    task = ListTask(DigitLists(length=6).spec, dim=16, heads=2)
    with package.record_maps(task.model) as maps:
        task(torch.zeros(1, 6, dtype=torch.long))
    assert package.draw_maps(maps)._repr_png_().startswith(b"\x89PNG")


class Foreign(L.LightningModule):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, width)


def test_a_checkpoint_of_another_module_names_load_from_checkpoint(tmp_path):
    trainer = L.Trainer(logger=False, accelerator="cpu")
    trainer.strategy.connect(Foreign())
    trainer.save_checkpoint(tmp_path / "foreign.ckpt")
    with pytest.raises(UserError, match=r"foreign\.ckpt"):
        package.load(tmp_path / "foreign.ckpt")


def test_a_model_takes_the_name_of_an_attention_or_a_factory():
    sizes = {"channels": 1, "height": 4, "width": 4, "classes": 3, "patch": 2, "dim": 8, "depth": 1}
    weights = []
    for attention, heads in (("kv+pos", {"heads": 2}), (AttentionFactory("kv+pos", heads=2, max_len=5), {})):
        torch.manual_seed(0)
        weights.append(ViT(attention, **heads, **sizes)(torch.ones(1, 1, 4, 4)))
    assert torch.equal(*weights)
