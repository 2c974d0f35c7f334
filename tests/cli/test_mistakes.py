"""A user's mistake: one line on stderr that names it, exit code 2, nothing left behind."""

import shutil
import socket
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

from kvt.cli import experiment as experiment_module
from kvt.cli.main import main
from kvt.system.console import run
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_LISTS, write_features, write_sentences

FLAGS = [
    ("reverse", ["--attn", "kvpos"], ["kvpos", "did you mean 'kv+pos'", "qkv, kv, kv+pos, qkv+pos, q-kv"]),
    ("reverse", ["--attn", "nowhere.to.be.Found"], ["attn", "nowhere"]),
    ("reverse", ["--attn", "torch.nn.functional"], ["attn", "torch.nn"]),
    ("reverse", ["--heads", "3"], ["heads=3", "dim=64", "1, 2, 4, 8"]),
    ("reverse", ["--heads", "0"], ["heads=0"]),
    ("reverse", ["--dim", "33", "--heads", "3"], ["dim=33", "even"]),
    ("reverse", ["--depth", "-1"], ["depth=-1"]),
    ("reverse", ["--length", "0"], ["length=0"]),
    ("reverse", ["--task", "swap", "--length", "15"], ["length=15", "even"]),
    ("reverse", ["--task", "revers"], ["revers", "did you mean 'reverse'"]),
    ("reverse", ["--train_size", "0"], ["train_size=0"]),
    ("reverse", ["--batch_size", "0"], ["batch_size=0"]),
    ("reverse", ["--batch_size", "60000"], ["batch_size=60000"]),
    ("reverse", ["--lr", "-1"], ["lr=-1.0"]),
    ("reverse", ["--lr", "nan"], ["lr", "nan"]),
    ("reverse", ["--lr", "fast"], ["lr fast", "float"]),
    ("reverse", ["--dropout", "1.5"], ["dropout"]),
    ("reverse", ["--warmup", "0"], ["warmup=0"]),
    ("reverse", ["--seed", "true"], ["--seed", "int"]),
    ("reverse", ["--attn", "kv+pos", "--pos_dim", "2"], ["pos_dim=2", "at least 3"]),
    ("reverse", ["--attn_kwargs.kv_head", "2"], ["kv_head", "did you mean 'kv_heads'"]),
    ("reverse", ["--attn_kwargs.kv_heads", "3"], ["kv_heads=3", "heads=4"]),
    ("reverse", ["--attn_kwargs.score", "dots"], ["dots", "did you mean 'dot'"]),
    ("reverse", ["--attn", "kv+pos", "--attn_kwargs.pos", "learnt"], ["learnt", "did you mean 'learned'"]),
    ("reverse", ["--attn", "torch.nn.Linear"], ["torch.nn.Linear", "cannot be made"]),
    ("reverse", ["--attn_kwargs.heads", "2"], ["attn_kwargs", "heads"]),
    ("reverse", ["--attn", "kv+pos", "--attn_kwargs.max_len", "3"], ["attn_kwargs", "max_len"]),
    ("reverse", ["--lr"], ["--lr needs a value"]),
    ("reverse", ["--lr", "--dim", "16"], ["--lr needs a value"]),
    ("reverse", ["--dim", "100000000000"], ["memory"]),
    ("reverse", ["--seed", "-1"], ["--seed -1"]),
    ("reverse", ["--devices", "-3"], ["devices"]),
    ("reverse", ["--devices", "2", "--strategy", "ddp", "--val_size", "10"], ["batch_size=128", "2 processes"]),
    ("reverse", ["--accumulate_grad_batches", "0"], ["accumulate_grad_batches=0"]),
    ("reverse", ["--check_val_every_n_epoch", "0"], ["check_val_every_n_epoch=0"]),
    ("reverse", ["--val_check_interval", "1000"], ["val_check_interval 1000", "2 batches"]),
    ("reverse", ["--limit_train_batches", "0"], ["number of steps above 0", "--limit_train_batches"]),
    ("reverse", ["--gradient_clip_val", "-1"], ["gradient_clip_val=-1"]),
    ("reverse", ["--overfit_batches", "1.5"], ["1.5 for overfit_batches"]),
    ("reverse", ["--max_steps", "0"], ["number of steps above 0", "--max_steps"]),
    ("reverse", ["--max_epochs", "0"], ["nothing was trained", "--max_epochs"]),
    ("reverse", ["--max_time", "00:00:00:00"], ["nothing was trained", "--max_time"]),
    ("reverse", ["--max_epochs", "-1"], ["--max_epochs"]),
    ("reverse", ["--trainer.logger", "WandbLogger"], ["pip install -U 'wandb"]),
    ("characters", ["--attn", "tests.cli.test_mistakes.NoAttention"], ["kvt.attention.Attention", "causal"]),
    ("translation", ["--attn", "tests.cli.test_mistakes.NoAttention"], ["kvt.attention.Attention", "mask"]),
    ("reverse", ["--trainer.max_epoch", "2"], ["max_epoch"]),
    ("reverse", ["--patch", "4"], ["--patch", "another task"]),
    ("reverse", ["--model", "ImageTask"], ["ImageTask", "does not fit"]),
    ("cifar10", ["--milestones", "[-5]"], ["milestones"]),
    ("cifar10", ["--val_size", "nan"], ["val_size"]),
    ("reverse", ["--max_epoch", "2"], ["--max_epoch", "did you mean --max_epochs"]),
    ("reverse", ["--model.dims", "2"], ["dims", "did you mean --dim"]),
    ("reverse", ["--accelerator", "gpu"], ["gpu"]),
    ("reverse", ["--precision", "bf32"], ["precision", "bf32", "bf16-mixed"]),
    ("reverse", ["--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
    ("reverse", ["--ckpt_path", "nowhere.ckpt"], ["--ckpt_path", "nowhere.ckpt"]),
    ("cifar10", ["--patch", "5"], ["patch=5", "32x32"]),
    ("cifar10", ["--patch", "0"], ["patch=0"]),
    ("cifar10", ["--data.dataset", "cifar1"], ["cifar1", "did you mean 'cifar10'"]),
    ("cifar10", ["--root", "nowhere"], ["nowhere", "missing"]),
    ("characters", ["--text", "nowhere.txt"], ["nowhere.txt", "missing"]),
    ("characters", ["--text", "."], ["folder"]),
    ("characters", ["--text", "~nobody_here/x.txt"], ["~nobody_here", "no such home"]),
    ("translation", ["--data_dir", "~nobody_here"], ["~nobody_here", "no such home"]),
    ("characters", ["--length", "0"], ["length=0"]),
    ("characters", ["--length", "5000"], ["516 characters", "length=5000"]),
    ("characters", ["--val_size", "0.001"], ["val_size=0.001"]),
    ("characters", ["--batch_size", "9999"], ["batch_size=9999"]),
    ("human_numbers", ["--feed_forward_dropout", "2"], ["feed_forward_dropout=2"]),
    ("anomaly", ["--set_size", "2"], ["set_size=2", "at least 3"]),
    ("anomaly", ["--val_size", "1"], ["val_size=1"]),
    ("anomaly", ["--anomaly_position", "first"], ["'first'", "random, last"]),
    ("anomaly", ["--data.anomaly_position", "lst"], ["did you mean 'last'"]),
    ("anomaly", ["--backbone", "resnet43"], ["'resnet43'", "did you mean 'resnet34'"]),
    ("anomaly", ["--weights", "nowhere.pth"], ["nowhere.pth is missing"]),
    ("anomaly", ["--features", "nowhere.pt"], ["nowhere.pt is missing"]),
    ("anomaly", ["--features", "nowhere.pt", "--weights", "nowhere.pth"], ["leave root and weights out"]),
    ("translation", ["--source", "it"], ["'it'", "de, en, fr, cs"]),
    ("translation", ["--root", "nowhere"], ["nowhere", "missing"]),
    ("translation", ["--max_len", "4"], ["line 1 of de", "--max_len", "4"]),
    ("translation", ["--max_len", "0"], ["max_len=0"]),
    ("translation", ["--smoothing", "1"], ["smoothing=1"]),
]


def fit(*words: str) -> None:
    run(lambda: CLI(["fit", *words]))


@pytest.mark.parametrize(("config", "flags", "named"), FLAGS, ids=lambda value: "".join(value)[:40])
def test_flags(mistake, config, flags, named):
    if "gpu" in flags and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    small = ["--train_size", "256", "--test_size", "130"] if config == "reverse" else []
    line = mistake(fit, "--config", str(CONFIGS / f"{config}.yaml"), *QUIET[:2], *small, *flags)
    for words in named:
        assert words in line


YAMLS = {
    "unknown key of the model": ("model: {class_path: kvt.tasks.ListTask, init_args: {dims: 3}}", "dims"),
    "unknown key of the trainer": ("trainer: {max_epoch: 3}", "max_epoch"),
    "unknown section": ("modle: {attn: kv}", "modle"),
    "unknown class": ("model: {class_path: kvt.tasks.ListTusk}", "ListTusk"),
    "not a model": ("model: {class_path: torch.nn.Linear}", "Linear"),
    "wrong type": ("trainer: {max_epochs: many}", "many"),
    "no class": ("model: {init_args: {dim: 3}}", "dim=3"),
    "broken": ("model: [", "mine.yaml"),
    "not a mapping": ("- 1\n- 2", "mine.yaml"),
    "empty": ("", "mine.yaml"),
    "not UTF-8": ("\udcff", "mine.yaml"),
}


@pytest.mark.parametrize("name", YAMLS)
def test_configurations(mistake, in_tmp_dir, name):
    text, named = YAMLS[name]
    Path("mine.yaml").write_bytes(text.encode(errors="surrogateescape"))
    line = mistake(fit, "--config", str(CONFIGS / "reverse.yaml"), "--config", "mine.yaml")
    assert named in line


def test_no_configuration_at_all(mistake):
    assert "--config" in mistake(fit)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_commands_that_need_a_checkpoint(mistake, command):
    config = str(CONFIGS / "reverse.yaml")
    assert "--ckpt_path" in mistake(lambda: run(lambda: CLI([command, "--config", config])))


def test_checkpoints_of_other_models(mistake, experiment):
    checkpoint = experiment("reverse", *SMALL_LISTS)["path"].parent / "checkpoints" / "best.ckpt"

    def test(config: str, *flags: str) -> None:
        words = ["test", "--config", str(CONFIGS / f"{config}.yaml"), "--ckpt_path", str(checkpoint), *flags]
        run(lambda: CLI(words))

    assert "attn=kv, not qkv" in mistake(test, "reverse", *SMALL_LISTS, "--attn", "qkv")
    assert "dim=16, not 64" in mistake(test, "reverse")
    assert "another task than ImageTask" in mistake(test, "cifar10")


def test_one_cycle_ends_where_it_was_going_to(mistake, experiment):
    checkpoint = experiment("human_numbers", *SMALL["human_numbers"])["path"].parent / "checkpoints" / "last.ckpt"
    shutil.copy(checkpoint, "mine.ckpt")
    words = ["--config", str(CONFIGS / "human_numbers.yaml"), *SMALL["human_numbers"], *QUIET]
    assert "leave --max_epochs" in mistake(fit, *words, "--ckpt_path", "mine.ckpt", "--max_epochs", "2")


def test_a_text_may_move_but_not_change(mistake, experiment, small_data):
    text = (small_data / "tinyshakespeare" / "input.txt").read_text()
    Path("one.txt").write_text(text)
    setting = [*SMALL["characters"], *QUIET]
    checkpoint = experiment("characters", *setting, "--text", "one.txt")["path"].parent / "checkpoints" / "last.ckpt"
    Path("two.txt").write_text(text)
    experiment("characters", *setting, "--max_steps", "9", "--text", "two.txt", "--ckpt_path", str(checkpoint))
    Path("two.txt").write_text(text[1] + text[0] + text[2:])
    words = ["--config", str(CONFIGS / "characters.yaml"), *setting, "--text", "two.txt"]
    assert "made with content=" in mistake(fit, *words, "--ckpt_path", str(checkpoint))


def test_resuming_with_other_settings_is_refused(mistake, experiment):
    checkpoint = experiment("reverse", *SMALL_LISTS)["path"].parent / "checkpoints" / "last.ckpt"
    words = ["--config", str(CONFIGS / "reverse.yaml"), *SMALL_LISTS, "--ckpt_path", str(checkpoint), "--lr", "0.5"]
    assert "lr=0.001, not 0.5" in mistake(fit, *words)
    assert "task=reverse, not sort" in mistake(fit, *words[:-2], "--task", "sort")
    assert "seed=0, not 3" in mistake(fit, *words[:-2], "--seed", "3")


def test_a_language_without_rules(mistake, in_tmp_dir):
    write_sentences(Path("own"), {"train": 20, "val": 6, "test": 5})
    for path in Path("own").glob("*.de"):
        path.rename(path.with_suffix(".klingon"))
    line = mistake(fit, "--config", str(CONFIGS / "translation.yaml"), *QUIET, "--root", "own", "--source", "klingon")
    assert "'klingon'" in line


ASKED = [
    ("generate", ["--prompt", "€"], "'€' is not in the vocabulary"),
    ("generate", ["--temp", "0.5"], "--temp"),
    ("generate", ["--tokens", "0"], "tokens=0"),
    ("generate", ["--tokens", "many"], "--tokens many: expected int"),
    ("generate", ["--temperature", "-1"], "temperature=-1"),
    ("generate", ["--temperature", "nan"], "--temperature nan"),
    ("generate", ["--top_k", "0"], "top_k=0"),
    ("generate", ["--seed", "-1"], "--seed -1"),
    ("generate", ["--promt", "x"], "--promt"),
    ("maps", ["--example", "-1"], "example=-1 must be from 0 to 19"),
    ("maps", ["--example", "20"], "example=20 must be from 0 to 19"),
    ("maps", ["--out", "maps.gif"], "--out maps.gif: the name must end in one of .png, .pdf, .svg"),
    ("maps", ["--out", "nowhere/maps.png"], "--out nowhere/maps.png: cannot write into the folder nowhere"),
    ("maps", ["--out", "~nobody_here/maps.png"], "no such home"),
    ("maps", ["--figure3", "yes"], "yes"),
    ("maps", ["--figure3"], "leave --ckpt_path out"),
    ("maps", ["--out", f"{'a' * 300}.png"], "cannot write"),
    ("translate", ["--beam", "0", "Hund"], "beam=0"),
    ("translate", [" ".join(["Hund"] * 11)], "sentence 1 has 11 words, this model reads 10"),
    ("translate", ["Hund", "Hund \udcff"], "sentence 2 is not UTF-8 at byte 5"),
    ("translate", [], "standard input is not UTF-8 at byte 1"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_data) -> dict[str, str]:
    """A checkpoint for each command; that of maps is for neither of the others."""
    folder = tmp_path_factory.mktemp("trained")
    places = ["--data_dir", str(small_data), "--default_root_dir", str(folder)]
    for config in ("characters", "translation", "reverse"):
        fit("--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *SMALL[config], *places)
    checkpoints = {path.parts[-5]: str(path) for path in folder.rglob("best.ckpt")}
    return {
        "generate": checkpoints["characters"],
        "maps": checkpoints["reverse"],
        "translate": checkpoints["translation_de_en"],
    }


@pytest.fixture
def ask(mistake, monkeypatch):
    """Runs a `kvt` command that must end with one line, which it returns."""

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"x\xff")))
        monkeypatch.setattr(sys, "argv", ["kvt", *words])
        return mistake(main)

    return call


@pytest.mark.parametrize(("command", "words", "named"), ASKED, ids=lambda value: "".join(value)[:30])
def test_what_is_asked_of_a_trained_model(ask, trained, command, words, named):
    assert named in ask(command, "--ckpt_path", trained[command], *words)


def test_standard_input_that_is_closed(mistake, trained, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of <&-
    monkeypatch.setattr(sys, "argv", ["kvt", "translate", "--ckpt_path", trained["translate"]])
    assert "standard input is closed" in mistake(main)


@pytest.mark.parametrize("command", ["generate", "maps", "translate"])
def test_a_command_without_its_model(ask, trained, command):
    assert "--ckpt_path is missing" in ask(command)
    assert "nowhere.ckpt" in ask(command, "--ckpt_path", "nowhere.ckpt")
    for other in trained.keys() - {command} if command != "maps" else ():
        assert "is needed" in ask(command, "--ckpt_path", trained[other])


def test_maps_of_a_checkpoint_that_is_not_ours(ask, trained):
    checkpoint = torch.load(trained["maps"], weights_only=True)
    torch.save({key: value for key, value in checkpoint.items() if key != "model_class"}, "mine.ckpt")
    assert "mine.ckpt: does not say of which task" in ask("maps", "--ckpt_path", "mine.ckpt")


def test_maps_where_the_data_are_not(ask, experiment, small_data, tmp_path_factory, monkeypatch):
    best = experiment("mnist", *SMALL["mnist"])["path"].parent / "checkpoints" / "best.ckpt"
    monkeypatch.setattr(socket, "getaddrinfo", _refuse)
    folder = str(tmp_path_factory.mktemp("empty"))
    assert folder in ask("maps", "--ckpt_path", str(best), "--data_dir", folder)


def test_maps_of_other_data(ask, experiment):
    write_features(Path("own.pt"), classes=3, width=6)
    flags = ["--features", "own.pt", *SMALL["anomaly"]]
    best = str(experiment("anomaly", *flags)["path"].parent / "checkpoints" / "best.ckpt")
    write_features(Path("own.pt"), classes=3, width=7)
    assert "made with content=" in ask("maps", "--ckpt_path", best)


def test_maps_of_an_attention_that_has_none(ask, experiment):
    flags = [*SMALL["reverse"], "--attn", "tests.cli.test_mistakes.NoAttention"]
    best = experiment("reverse", *flags)["path"].parent / "checkpoints" / "best.ckpt"
    assert "add --attn tests.cli.test_mistakes.NoAttention" in ask("maps", "--ckpt_path", str(best))
    assert "nothing to draw" in ask("maps", "--ckpt_path", str(best), "--attn", "tests.cli.test_mistakes.NoAttention")


class NoAttention(torch.nn.Linear):
    """What stands in an attention's place without being one."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)


def _refuse(*args, **kwargs):
    raise OSError("no network")


@pytest.mark.parametrize(
    "config", ["mnist", "fashion_mnist", "cifar10", "cifar100", "anomaly", "characters", "translation"]
)
def test_no_data_and_no_network(mistake, monkeypatch, tmp_path_factory, config):
    monkeypatch.setattr(socket.socket, "connect", _refuse)
    monkeypatch.setattr(socket, "getaddrinfo", _refuse)
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

    assert "did you mean 'reverse'" in mistake(script, "--task", "revers")
    assert "--task needs a value" in mistake(script, "--task")


@pytest.mark.slow
def test_a_real_process_ends_with_code_2_and_one_line(in_tmp_dir):
    script = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), "--attn", "kw"]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
