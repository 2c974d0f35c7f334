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
    ("reverse", ["--seed", "x"], ["seed", "int"]),
    ("reverse", ["--attn", "kv+pos", "--pos_dim", "2"], ["pos_dim=2", "at least 3"]),
    ("reverse", ["--attn_kwargs.kv_head", "2"], ["kv_head", "did you mean 'kv_heads'"]),
    ("reverse", ["--attn_kwargs.kv_heads", "3"], ["kv_heads=3", "heads=4"]),
    ("reverse", ["--attn_kwargs.score", "dots"], ["dots", "did you mean 'dot'"]),
    ("reverse", ["--attn", "kv+pos", "--attn_kwargs.pos", "learnt"], ["learnt", "did you mean 'learned'"]),
    ("reverse", ["--attn", "torch.nn.Linear"], ["torch.nn.Linear", "cannot be made"]),
    ("reverse", ["--attn_kwargs.kv_heads", "x"], ["kv_heads=x"]),
    ("reverse", ["--attn_kwargs.dropout", "x"], ["dropout=x"]),
    ("reverse", ["--attn_kwargs.score", "3"], ["score", "3"]),
    ("reverse", ["--attn_kwargs.heads", "2"], ["attn_kwargs", "heads"]),
    ("reverse", ["--attn", "kv+pos", "--attn_kwargs.max_len", "3"], ["attn_kwargs", "max_len"]),
    ("reverse", ["--lr"], ["--lr needs a value"]),
    ("reverse", ["--lr", "--dim", "16"], ["--lr needs a value"]),
    ("reverse", ["--lr", "1e400"], ["lr"]),
    ("reverse", ["--dim", "100000000000"], ["memory"]),
    ("reverse", ["--seed", "-1"], ["--seed -1"]),
    ("reverse", ["--devices", "-3"], ["devices"]),
    ("reverse", ["--devices", "2", "--strategy", "ddp", "--val_size", "10"], ["batch_size=128", "2 processes"]),
    ("reverse", ["--accumulate_grad_batches", "0"], ["accumulate_grad_batches=0"]),
    ("reverse", ["--check_val_every_n_epoch", "0"], ["check_val_every_n_epoch=0"]),
    ("reverse", ["--val_check_interval", "1000"], ["val_check_interval 1000", "2 batches"]),
    ("reverse", ["--limit_train_batches", "0"], ["limit_train_batches 0", "2 batches"]),
    ("reverse", ["--gradient_clip_val", "-1"], ["gradient_clip_val=-1"]),
    ("reverse", ["--overfit_batches", "1e308"], ["--overfit_batches 1e+308", "0.0 to 1.0"]),
    ("reverse", ["--max_steps", "0"], ["--max_steps 0", "nothing"]),
    ("reverse", ["--max_epochs", "0"], ["--max_epochs 0", "nothing"]),
    ("reverse", ["--max_time", "00:00:00:00"], ["--max_time 00:00:00:00", "nothing"]),
    ("reverse", ["--max_time.hours", "0"], ["--max_time", "nothing"]),
    ("characters", ["--max_steps", "0"], ["--max_steps 0", "nothing"]),
    ("reverse", ["--max_epochs", "-1"], ["--max_epochs"]),
    ("reverse", ["--trainer.logger", "WandbLogger"], ["pip install -U 'wandb"]),
    ("reverse", ["--trainer.logger", "CometLogger"], ["pip install -U 'comet-ml"]),
    (
        "characters",
        ["--attn", "tests.cli.test_mistakes.NoAttention"],
        ["NoAttention", "kvt.attention.Attention", "causal"],
    ),
    (
        "translation",
        ["--attn", "tests.cli.test_mistakes.NoAttention"],
        ["NoAttention", "kvt.attention.Attention", "mask"],
    ),
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
    ("cifar10", ["--val_size", "1000"], ["val_size"]),
    ("cifar10", ["--mean", "[0.1, 0.2]"], ["mean"]),
    ("characters", ["--text", "nowhere.txt"], ["nowhere.txt", "missing"]),
    ("characters", ["--text", "."], ["folder"]),
    ("characters", ["--text", "~nobody_here/x.txt"], ["~nobody_here", "no such home"]),
    ("translation", ["--root", "~nobody_here"], ["~nobody_here", "no such home"]),
    ("translation", ["--data_dir", "~nobody_here"], ["~nobody_here", "no such home"]),
    ("characters", ["--length", "0"], ["length=0"]),
    ("characters", ["--length", "5000"], ["516 characters", "length=5000"]),
    ("characters", ["--val_size", "0.001"], ["val_size=0.001"]),
    ("characters", ["--val_size", "7"], ["val_size=7"]),
    ("characters", ["--batch_size", "9999"], ["batch_size=9999"]),
    ("characters", ["--dropout", "1"], ["dropout=1"]),
    ("characters", ["--heads", "5"], ["heads=5", "dim=192"]),
    ("human_numbers", ["--length", "63095"], ["length=63095", "windows"]),
    ("human_numbers", ["--val_size", "1"], ["val_size=1", "windows"]),
    ("human_numbers", ["--dim", "65", "--heads", "5"], ["dim=65", "even"]),
    ("human_numbers", ["--feed_forward_dropout", "2"], ["feed_forward_dropout=2"]),
    ("human_numbers", ["--max_epochs", "-1"], ["--max_epochs"]),
    ("anomaly", ["--set_size", "2"], ["set_size=2", "at least 3"]),
    ("anomaly", ["--set_size", "12"], ["class 0", "10 images in the val split", "set_size=12"]),
    ("anomaly", ["--val_size", "0.01"], ["1 images in the val split", "val_size", "0.01"]),
    ("anomaly", ["--val_size", "1"], ["val_size=1"]),
    ("anomaly", ["--anomaly_position", "first"], ["'first'", "random, last"]),
    ("anomaly", ["--data.anomaly_position", "lst"], ["did you mean 'last'"]),
    ("anomaly", ["--backbone", "resnet43"], ["'resnet43'", "did you mean 'resnet34'"]),
    ("anomaly", ["--backbone", "squeezenet1_0"], ["squeezenet1_0", "no linear layer"]),
    ("anomaly", ["--data.dataset", "cifar"], ["'cifar'", "did you mean 'cifar10"]),
    ("anomaly", ["--root", "nowhere"], ["nowhere", "missing"]),
    ("anomaly", ["--weights", "nowhere.pth"], ["nowhere.pth is missing"]),
    ("anomaly", ["--weights", "."], [". is a folder"]),
    ("anomaly", ["--features", "nowhere.pt"], ["nowhere.pt is missing"]),
    ("anomaly", ["--features", "~nobody_here/x.pt"], ["~nobody_here", "no such home"]),
    ("anomaly", ["--features", "nowhere.pt", "--weights", "nowhere.pth"], ["leave root and weights out"]),
    ("anomaly", ["--batch_size", "0"], ["batch_size=0"]),
    ("anomaly", ["--dim", "0"], ["dim=0"]),
    ("anomaly", ["--depth", "0"], ["depth=0"]),
    ("anomaly", ["--heads", "3"], ["heads=3", "dim=256"]),
    ("anomaly", ["--dropout", "1"], ["dropout=1"]),
    ("anomaly", ["--warmup", "0"], ["warmup=0"]),
    ("anomaly", ["--max_epochs", "-1"], ["--max_epochs"]),
    ("anomaly", ["--model", "ImageTask"], ["ImageTask", "does not fit"]),
    ("translation", ["--source", "en"], ["'en'", "two languages"]),
    ("translation", ["--source", "it"], ["'it'", "de, en, fr, cs"]),
    ("translation", ["--root", "nowhere"], ["nowhere", "missing"]),
    ("translation", ["--max_len", "4"], ["line 1 of de", "--max_len", "4"]),
    ("translation", ["--max_len", "0"], ["max_len=0"]),
    ("translation", ["--min_freq", "0"], ["min_freq=0"]),
    ("translation", ["--smoothing", "1"], ["smoothing=1"]),
    ("translation", ["--warmup", "0"], ["warmup=0"]),
    ("translation", ["--dim", "33", "--heads", "3"], ["dim=33", "even"]),
    ("translation", ["--model", "CharacterTask"], ["CharacterTask", "does not fit"]),
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


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 broken zip"], ids=["empty", "junk", "zip"])
def test_broken_checkpoints(mistake, in_tmp_dir, content):
    Path("broken.ckpt").write_bytes(content)
    config = str(CONFIGS / "reverse.yaml")
    assert "broken.ckpt" in mistake(
        lambda: run(lambda: CLI(["test", "--config", config, "--ckpt_path", "broken.ckpt"]))
    )


def test_a_checkpoint_that_would_run_code_does_not(mistake, in_tmp_dir):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (Path("owned"),))

    torch.save({"state_dict": {}, "hyper_parameters": Evil()}, "evil.ckpt")
    config = str(CONFIGS / "reverse.yaml")
    assert "evil.ckpt" in mistake(lambda: run(lambda: CLI(["test", "--config", config, "--ckpt_path", "evil.ckpt"])))
    assert not Path("owned").exists()


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
    words = [
        "--config",
        str(CONFIGS / "characters.yaml"),
        *setting,
        "--text",
        "two.txt",
        "--ckpt_path",
        str(checkpoint),
    ]
    assert "made with content=" in mistake(fit, *words)


def test_features_may_move_but_not_change(mistake, experiment):
    write_features(Path("one.pt"), classes=3, width=6)
    setting = [*SMALL["anomaly"], *QUIET]
    checkpoint = experiment("anomaly", *setting, "--features", "one.pt")["path"].parent / "checkpoints" / "last.ckpt"
    shutil.copy("one.pt", "two.pt")
    resume = [*setting, "--max_epochs", "2", "--features", "two.pt", "--ckpt_path", str(checkpoint)]
    experiment("anomaly", *resume)
    write_features(Path("two.pt"), classes=3, width=6, seed=1)
    assert "made with content=" in mistake(fit, "--config", str(CONFIGS / "anomaly.yaml"), *resume)


def test_resuming_with_other_settings_is_refused(mistake, experiment):
    checkpoint = experiment("reverse", *SMALL_LISTS)["path"].parent / "checkpoints" / "last.ckpt"
    words = ["--config", str(CONFIGS / "reverse.yaml"), *SMALL_LISTS, "--ckpt_path", str(checkpoint), "--lr", "0.5"]
    assert "lr=0.001, not 0.5" in mistake(fit, *words)
    assert "task=reverse, not sort" in mistake(fit, *words[:-2], "--task", "sort")
    assert "seed=0, not 3" in mistake(fit, *words[:-2], "--seed", "3")


@pytest.fixture
def own_images(in_tmp_dir, small_data) -> Path:
    return Path(shutil.copytree(small_data / "cifar10", "own"))


def break_folder(root: Path, how: str) -> None:
    if how == "stranger":
        shutil.copytree(root / "test" / "class0", root / "test" / "stranger")
    elif how == "broken":
        (root / "train" / "class1" / "3.png").write_bytes(b"no picture")
    elif how == "empty":
        shutil.rmtree(root / "train" / "class2")
        (root / "train" / "class2").mkdir()
    elif how == "no test":
        shutil.rmtree(root / "test")


@pytest.mark.parametrize(
    ("how", "named"), [("stranger", "stranger"), ("broken", "3.png"), ("empty", "class2"), ("no test", "test")]
)
def test_folders_of_images(mistake, own_images, monkeypatch, tmp_path_factory, how, named):
    monkeypatch.setenv("KVT_DATA_DIR", str(tmp_path_factory.mktemp("cache")))
    break_folder(own_images, how)
    line = mistake(fit, "--config", str(CONFIGS / "cifar10.yaml"), *QUIET, "--root", "own")
    assert named in line


def break_corpus(root: Path, how: str) -> None:
    if how == "latin1":
        (root / "train.de").write_bytes("der Hund läuft.\n".encode("latin1") * 20)
    elif how == "longer":
        with (root / "val.en").open("a") as file:
            file.write("one more\n")
    elif how == "empty line":
        (root / "train.en").write_text((root / "train.en").read_text().replace("\n", "\n\n", 1))
        (root / "train.de").write_text((root / "train.de").read_text().replace("\n", "\n \n", 1))
    elif how == "no language":
        (root / "test.de").unlink()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("latin1", ["train.de", "not UTF-8 at byte 10"]),
        ("longer", ["val.de has 6 lines", "val.en has 7"]),
        ("empty line", ["train.de, line 2 is empty"]),
        ("no language", ["test.de is missing", "--root"]),
    ],
)
def test_parallel_corpora(mistake, in_tmp_dir, how, named):
    write_sentences(Path("own"), {"train": 20, "val": 6, "test": 5})
    break_corpus(Path("own"), how)
    line = mistake(fit, "--config", str(CONFIGS / "translation.yaml"), *QUIET, "--root", "own")
    for words in named:
        assert words in line


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


def test_names_that_are_too_long(ask, trained):
    assert "cannot write" in ask("maps", "--ckpt_path", trained["maps"], "--out", f"{'a' * 300}.png")
    assert "cannot write" in ask("maps", "--ckpt_path", trained["maps"], "--out", f"{'a' * 250}.png")
    assert "no such file" in ask("maps", "--ckpt_path", "a" * 300)


def test_figure_3_looks_before_it_trains(ask, trained):
    assert "example=1000" in ask("maps", "--figure3", "--example", "1000")
    assert "leave --ckpt_path out" in ask("maps", "--figure3", "--ckpt_path", trained["maps"])


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


def test_a_log_folder_that_cannot_be_made(mistake, in_tmp_dir):
    Path("taken").write_text("a file")
    words = ["--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--default_root_dir", "taken"]
    assert "taken" in mistake(fit, *words)


def test_the_scripts_choice(mistake, monkeypatch):
    def script(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["synthetic.py", *words])
        file = str(REPOSITORY / "experiments" / "synthetic.py")
        experiment_module.experiment(file, "", ["reverse", "sort"], option="task")

    assert "did you mean 'reverse'" in mistake(script, "--task", "revers")
    assert "--task needs a value" in mistake(script, "--task")


def test_a_real_process_ends_with_code_2_and_one_line(in_tmp_dir):
    script = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), "--attn", "kw"]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
