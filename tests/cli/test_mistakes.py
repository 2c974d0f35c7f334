"""A user's mistake: exit code 2, one line on stderr that names the culprit, nothing on stdout, nothing left behind."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from kvt.commands import main
from tests.conftest import QUIET, REPOSITORY, slow
from tests.study.test_command import TINY

OWN = """
import torch
from kvt.attention import KV
from kvt.tasks import ListTask

class Broken(KV):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = 1 / 0

class Narrow(KV):
    def forward(self, x, *args, **kwargs):
        return super().forward(x, *args, **kwargs)[..., :1]

class Modes(torch.optim.SGD):
    train = eval = lambda self: None

class Settled(ListTask):
    optimizer = torch.optim.Adam

    def configure_optimizers(self):
        return self.optimizer(self.parameters())

class OwnModes(Settled):
    optimizer = Modes
"""
FILES = {
    "broken.yaml": "model: [",
    "section.yaml": "modle: {attn: kv}",
    "setting.yaml": "model: {class_path: kvt.tasks.ListTask, init_args: {dims: 3}}",
    "class.yaml": "model: {class_path: kvt.tasks.ListTusk}",
    "linear.yaml": "model: {class_path: torch.nn.Linear}",
    "type.yaml": "trainer: {max_epochs: many}",
    "grids/key.yaml": "{tasks: [sort], axis: {dim: [16]}, seeds: [0]}",
    "grids/axis.yaml": "{tasks: [sort], axes: {dims: [16]}, seeds: [0]}",
    "grids/value.yaml": "{tasks: [sort], axes: {dim: [wide]}, seeds: [0]}",
    "grids/attn.yaml": "{tasks: [sort], axes: {attn: [qvk]}, seeds: [0]}",
    "grids/task.yaml": "{tasks: [srot], axes: {attn: [kv]}, seeds: [0]}",
    "tiny.yaml": yaml.safe_dump(TINY),
    "other/tiny.yaml": yaml.safe_dump(TINY | {"seeds": [1]}),
    "file": "",
    "junk.ckpt": "no checkpoint",
    "junk.pt": "no features",
    "blocked/reports": "no folder",
    "empty/nothing.txt": "",
    "attr.py": "x = 'it hides the package attr'",
    "my_own.py": OWN,
}
"""Files in the working directory, which a command line may name."""

ROWS = [
    # flags: the wrong one and the nearest
    ("run reverse --atn kv", "--atn", "--attn"),
    ("run reverse --model.dimm 3", "dimm", "dim"),
    ("run reverse --zzz=3", "--zzz"),
    ("run reverse --attn_kwargs.kv_head 2", "kv_head", "kv_heads"),
    ("test --ckpt_path reverse.ckpt --batchsize 8", "--batchsize", "--batch_size"),
    ("generate --ckpt_path characters.ckpt --promt x", "--promt", "--prompt"),
    ("study run table2 --worker 1", "--worker", "--workers"),
    # values: the setting and its value
    ("run reverse --lr fast", "lr", "fast"),
    ("run reverse --lr -1", "lr", "-1"),
    ("run reverse --lr nan", "lr", "nan"),
    ("run reverse --max_epochs -1", "max_epochs"),
    ("run reverse --max_steps 0", "max_steps"),
    ("run reverse --precision bf32", "precision", "bf32"),
    ("run reverse --seed -1", "seed", "-1"),
    ("run reverse --batch_size 60000", "batch_size=60000"),
    ("run reverse --heads 3", "heads=3", "dim=64"),
    ("run reverse --accelerator xyz", "xyz"),
    ("run reverse --devices 0", "devices"),
    ("run reverse --threads 0", "threads"),
    ("run reverse --strategy deepspeed", "deepspeed"),
    ("run cifar10 --patch 5", "patch=5", "32"),
    ("run characters --length 5000", "length=5000"),
    ("generate --ckpt_path characters.ckpt --temperature nan", "temperature"),
    ("generate --ckpt_path characters.ckpt --prompt €", "€"),
    ("maps --ckpt_path reverse.ckpt --example 20", "example"),
    ("maps --ckpt_path reverse.ckpt --prompt x", "ListTask"),
    ("maps --ckpt_path characters.ckpt --prompt t", "2"),
    ("maps --ckpt_path reverse.ckpt --out maps.gif", "maps.gif"),
    ("maps --ckpt_path reverse.ckpt --out reverse.ckpt/maps.png", "reverse.ckpt"),
    ("bench --d 0", "d=0"),
    ("bench --heads 3", "heads=3"),
    ("bench --device gpu", "gpu", "cpu"),
    ("bench --out reverse.ckpt/table", "reverse.ckpt"),
    ("bench --attn kvpos", "kvpos", "kv+pos"),
    ("bench --attn mla,ranks=3", "ranks", "rank"),
    # names: the wrong one and a right one
    ("trian reverse", "trian"),
    ("run revers", "revers", "reverse"),
    ("run reverse --attn kvpos", "kvpos", "kv+pos"),
    ("run reverse --attn_kwargs.score cosin", "cosin", "cosine"),
    ("run reverse --schedule noam", "noam", "constant"),
    ("run anomaly --backbone resnet43", "resnet43", "resnet34"),
    ("run anomaly --backbone squeezenet1_1", "squeezenet1_1", "resnet34"),
    ("convert characters.ckpt --attn q-kv --how keep", "keep", "keep_k"),
    ("convert characters.ckpt --attn mla", "mla", "qkv"),
    ("study run table9", "table9", "table2"),
    ("study run table2 --scale tiny", "tiny", "smoke"),
    # what is missing
    ("", "--help"),
    ("run", "task"),
    ("fit", "--config"),
    ("study", "run"),
    *((f"{command} --config reverse", "--ckpt_path") for command in ("validate", "test", "predict")),
    *((command, "ckpt_path") for command in ("maps", "generate", "translate")),
    ("study record table2 --from empty", "out"),
    # YAML files
    ("run reverse --config nowhere.yaml", "nowhere.yaml"),
    ("run broken.yaml", "broken.yaml"),
    ("run reverse --config section.yaml", "modle"),
    ("run reverse --config setting.yaml", "dims"),
    ("run reverse --config class.yaml", "ListTusk"),
    ("run reverse --config linear.yaml", "Linear"),
    ("run reverse --config type.yaml", "max_epochs", "many"),
    ("study run nowhere.yaml --dry_run", "nowhere.yaml"),
    ("study run grids/key.yaml --dry_run", "key.yaml", "axis"),
    ("study run grids/axis.yaml --dry_run", "axis.yaml", "dims"),
    ("study run grids/value.yaml --dry_run", "value.yaml", "dim", "wide"),
    ("study run grids/attn.yaml --dry_run", "attn.yaml", "qvk", "qkv"),
    ("study run grids/task.yaml --dry_run", "srot"),
    # studies
    ("study run", "grid"),
    ("study run tiny.yaml --workers 0", "workers"),
    ("study run tiny.yaml --only dims=16", "dim"),
    ("study run tiny.yaml --set dims=16", "dim"),
    ("study run tiny.yaml --set dim", "--set"),
    ("study run tiny.yaml --folder file/below --dry_run", "--folder"),
    ("study report tiny.yaml --format docx", "docx"),
    ("study report tiny.yaml other/tiny.yaml", "reports/tiny-all"),
    ("study report tiny.yaml tiny.yaml --out x", "x"),
    ("study report tiny.yaml --folder file --out there", "--folder"),
    ("study report tiny.yaml --out file/below", "--out"),
    ("reproduce", "--all"),
    ("reproduce figure4 --dry_run", "table3"),
    ("reproduce table2 --only task=srt", "sort"),
    # data
    ("run characters --text nowhere.txt", "nowhere.txt"),
    ("run anomaly --features nowhere.pt", "nowhere.pt"),
    ("run anomaly --features junk.pt", "junk.pt"),
    ("run cifar10 --root nowhere", "nowhere"),
    *((f"run {task} --data_dir empty", "empty", "--data_dir", "--root") for task in ("mnist", "cifar10", "anomaly")),
    *((f"run {task} --data_dir empty", "empty", "--data_dir") for task in ("characters", "translation")),
    # classes: absent, or of another kind
    ("run reverse --model nowhere.Task", "nowhere"),
    ("run reverse --attn my_own.Your", "my_own", "Your"),
    ("run reverse --optimizer torch.optim.Adamm", "Adamm"),
    ("run reverse --callbacks+=Nowhere", "Nowhere"),
    ("run reverse --model torch.nn.Linear", "Linear"),
    ("run reverse --model ImageTask", "multistep"),
    ("run reverse --attn my_own.ListTask", "ListTask"),
    ("run reverse --optimizer torch.nn.Linear", "Linear"),
    ("run reverse --attn my_own.Narrow --train_size 128", "Narrow.forward"),
    ("run reverse --optimizer SGD --optimizer.momentum -1", "momentum"),
    ("run reverse --optimizer SGD --optimizer.lr 1", "lr"),
    ("run reverse --optimizer torch.optim.Muon", "Muon"),
    ("run reverse --optimizer my_own.Modes", "Modes"),
    ("run reverse --model my_own.OwnModes", "Modes"),
    ("run reverse --model my_own.Settled --optimizer SGD", "Settled"),
    # checkpoints and runs
    ("fit --ckpt_path nowhere.ckpt", "nowhere.ckpt"),
    ("test --ckpt_path junk.ckpt", "junk.ckpt"),
    ("generate --ckpt_path reverse.ckpt", "reverse.ckpt"),
    ("test --ckpt_path characters.ckpt", "no test split"),
    ("test --config cifar10 --ckpt_path reverse.ckpt", "ImageTask"),
    ("test --config reverse --ckpt_path reverse.ckpt --attn qkv", "attn", "qkv"),
    ("fit --ckpt_path reverse.ckpt --lr 0.5", "lr", "0.5"),
    ("test --ckpt_path cifar10.ckpt --val_size 7", "val_size"),
    ("convert reverse.ckpt --attn kv+phase --attn_kwargs.phase learned", "angles"),
    ("convert reverse.ckpt --attn qkv --how keep_k", "keep_k"),
    ("convert reverse.ckpt --attn q-kv --attn_kwargs.heads 2", "heads"),
    ("convert reverse.ckpt --attn q-kv --out reverse.ckpt/new.ckpt", "reverse.ckpt"),
    ("convert kv+pos.ckpt --attn kv", "kv+pos"),
    ("fit --resume nowhere", "nowhere"),
    ("fit --resume run --lr 0.5", "lr"),
    ("fit --resume run", "run"),  # which another process uses
    ("fit --resume halved", "best.ckpt"),
    ("runs nowhere", "nowhere"),
    ("reproduce table2 --scale smoke --folder blocked", "reports"),
    ("study run table2 --only task", "task"),
    ("study record table2 --out record --from nowhere", "nowhere"),
]
NOTES = r"the published data|: [\d,]+ parameters"
"""A run that has begun may note these; a mistake in its settings may be found later."""


@pytest.fixture
def prepare(in_tmp_dir, offline, trained, monkeypatch):
    """Write what a command line names: `FILES`, checkpoints, a run in use, and one without its best checkpoint."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    lock = FileLock("run/.lock")

    def write(words: str) -> None:
        for name, text in FILES.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        for task in ("reverse", "characters", "translation", "cifar10"):
            if f"{task}.ckpt" in words:
                shutil.copy(trained(task), f"{task}.ckpt")
        if "kv+pos.ckpt" in words:
            shutil.copy(trained("reverse", "kv+pos"), "kv+pos.ckpt")
        for folder in ("run", "halved"):
            if f"--resume {folder}" in words:
                shutil.copytree(trained("reverse").parents[1], folder)
                Path(folder, "result.json").unlink()
        if "--resume run" in words:
            lock.acquire()
        if "--resume halved" in words:
            Path("halved/checkpoints/best.ckpt").unlink()

    yield write
    lock.release()
    sys.modules.pop("my_own", None)


def files() -> set[Path]:
    """Return all files and folders except locks of data in empty/, and files of runs that end before the first step."""
    return {path for path in Path().rglob("*") if path.parts[0] not in ("empty", "lightning_logs", "halved")}


def require_mistake(code: int, out: str, err: str, *named: str) -> None:
    (line,) = (line for line in err.splitlines() if line and not re.search(NOTES, line))
    assert (code, out, line[:7]) == (2, "", "error: ")
    assert [name for name in named if name not in line] == [], line


@pytest.mark.parametrize(("words", "named"), [pytest.param(words, named, id=words) for words, *named in ROWS])
def test_mistakes(prepare, monkeypatch, capfd, words, named):
    prepare(words)
    before = files()
    quiet = QUIET if words.startswith("run ") and "--accelerator" not in words else []
    monkeypatch.setattr(sys, "argv", ["kvt", *shlex.split(words), *quiet])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    require_mistake(ended.value.code, *capfd.readouterr(), *named)
    assert files() == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("-m kvt trian", "trian"),
        *slow(
            ("-m kvt run reverse --lr fast", "fast"),
            (f"{REPOSITORY}/experiments/synthetic.py --task revers", "revers"),
        ),
    ],
)
def test_mistakes_in_a_process_of_their_own(prepare, words, named):
    """The folder has a file with the name of a package that kvt needs."""
    prepare(words)
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, *words.split()], env=variables, capture_output=True, text=True)
    require_mistake(ended.returncode, ended.stdout, ended.stderr, named)


def test_a_mistake_in_the_code_of_a_class_keeps_its_traceback(prepare, monkeypatch):
    prepare("my_own.Broken")
    monkeypatch.setattr(sys, "argv", ["kvt", "run", "reverse", "--attn", "my_own.Broken", *QUIET])
    with pytest.raises(ZeroDivisionError):
        main()
