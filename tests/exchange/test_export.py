"""A trained model leaves the house as safetensors, JSON and a card, and as ONNX, and comes back bit for bit."""

import json
import os
import re
import shutil
from contextlib import suppress
from itertools import product
from pathlib import Path

import lightning as L
import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close

import kvt
from kvt.cli.main import main
from kvt.exchange.export import export
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.same import load_data
from kvt.system.errors import UserError
from tests.conftest import SMALL_LISTS
from tests.helpers.hostile import no_longer_than
from tests.run.test_kept_tests import spoil_last

TASKS = ["reverse", "cifar10", "anomaly", "characters", "human_numbers", "language_model", "translation"]


@pytest.mark.parametrize("task", TASKS)
def test_it_comes_back_bit_for_bit(trained, says, task):
    checkpoint = trained(task)
    paths = says("export", checkpoint, "--out", "house")
    assert {Path(path).name for path in paths} == {"model.safetensors", "config.json", "README.md"}
    before, after = kvt.load(checkpoint), kvt.load("house")
    assert type(after) is type(before)
    assert dict(after.hparams) == dict(before.hparams)
    weights = before.state_dict()
    assert weights.keys() == after.state_dict().keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in after.state_dict().items())
    again = json.loads(Path("house/config.json").read_text())["tied"]
    with safe_open("house/model.safetensors", "pt") as file:
        assert {*file.keys()} == {*Checkpoint(checkpoint).saved["state_dict"]} - again.keys()
    assert len(again) == len([*after.named_parameters(remove_duplicate=False)]) - len([*after.parameters()])
    says("export", "house", "--out", "second")
    assert Path("second/model.safetensors").read_bytes() == Path("house/model.safetensors").read_bytes()


@pytest.mark.parametrize("task", ["reverse", "language_model", "human_numbers", "translation"])
def test_the_card_counts_a_tied_weight_once(trained, says, task):
    says("export", trained(task), "--out", "house")
    assert f"parameters  {kvt.load('house').num_parameters:,}" in re.sub(
        " +", "  ", Path("house/README.md").read_text()
    )


def test_the_card_of_a_converted_model_counts_all_of_its_parameters(trained, says):
    """A projection that had two roles became two, with equal weights."""
    says("convert", trained("characters"), "--attn", "qkv", "--out", "new.ckpt")
    says("export", "new.ckpt", "--out", "house")
    count = kvt.load("new.ckpt").num_parameters
    assert count > kvt.load(trained("characters")).num_parameters
    assert re.search(rf"parameters +{count:,}\n", Path("house/README.md").read_text())


def test_the_card_names_the_folder_that_is_the_working_directory(trained, says, monkeypatch):
    path = trained("reverse")
    Path("house").mkdir()
    monkeypatch.chdir("house")
    says("export", path, "--out", ".")
    assert "kvt.load('house')" in Path("README.md").read_text()


def test_every_command_takes_the_folder(trained, says, small_data):
    says("export", trained("cifar10"), "--out", "house")
    for command in ("test", "validate", "predict"):
        says(command, "--ckpt_path", "house", "--enable_progress_bar", "false")
    assert says("maps", "--ckpt_path", "house")[-1] == "maps.png"
    assert Path("house/predictions.csv").exists()


def test_a_run_stands_for_its_best_checkpoint(trained, says):
    run = shutil.copytree(trained("reverse").parents[1], Path("run"))
    spoil_last(run)
    assert says("maps", "--ckpt_path", run)[-1] == "maps.png"
    best = kvt.load(run / "checkpoints" / "best.ckpt").state_dict()
    assert all(torch.equal(weight, best[name]) for name, weight in kvt.load(run).state_dict().items())


def test_a_card_shows_what_was_measured_with_its_weights_or_nothing(in_tmp_dir, says):
    """The metrics of best.ckpt are not those of last.ckpt; an export of an export keeps its own."""
    settings = {"train_size": 96, "val_size": 64, "test_size": 64, "batch_size": 16, "dim": 16, "max_epochs": 2}
    config = kvt.RunConfig.from_name("reverse").changed(**settings, enable_progress_bar=False)
    run = kvt.train(config).folder
    spoil_last(run)
    best, last = (Checkpoint(run / "checkpoints" / f"{name}.ckpt") for name in ("best", "last"))
    result = json.loads((run / "result.json").read_text())
    says("export", best.path, "--out", "first")
    says("export", "first", "--out", "second")
    says("export", last.path, "--out", "last")
    first, second, of_last = (Path(name, "README.md").read_text() for name in ("first", "second", "last"))
    for page in (first, second):
        assert f"test/acc    {result['test/acc']:.4f}" in page
        assert f"val/acc     {result['val/acc']:.4f}" in page
    assert "test/" not in of_last
    assert "val/acc     0.0312" in of_last


def test_a_checkpoint_between_two_validations_has_no_metrics(in_tmp_dir, says):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(f"{trainer.global_step}.ckpt")

    kvt.train(kvt.RunConfig.from_name("reverse").changed(**SHORT | {"max_epochs": 2, "dim": 16}), callbacks=[Saves()])
    says("export", "7.ckpt", "--out", "house")
    assert "val/" not in Path("house/README.md").read_text()


OWN = """
from kvt.attention import KV


class Own(KV):
    pass
"""


def test_a_class_of_ones_own_is_named_to_whoever_takes_the_model(says, in_tmp_dir, monkeypatch, experiment):
    (in_tmp_dir / "my_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(in_tmp_dir))
    experiment("reverse", "--attn", "my_own.Own", *SMALL_LISTS, "--max_epochs", "1")
    says("export", "lightning_logs/reverse/Own/version_0", "--out", "house")
    assert "kvt.load('house', attn='my_own.Own')" in Path("house/README.md").read_text()
    with pytest.raises(UserError, match=r"my_own\.Own"):
        kvt.load("house")
    assert kvt.load("house", attn="my_own.Own")


@pytest.mark.slow
def test_onnx_imports_a_class_of_ones_own_that_is_named(says, in_tmp_dir, monkeypatch, experiment):
    pytest.importorskip("onnxscript")
    (in_tmp_dir / "my_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(in_tmp_dir))
    experiment("reverse", "--attn", "my_own.Own", *SMALL_LISTS, "--max_epochs", "1")
    onnx = ["export", "lightning_logs/reverse/Own/version_0", "--out", "house", "--onnx"]
    with pytest.raises(SystemExit):
        says(*onnx)
    assert says(*onnx, "--attn", "my_own.Own")[-1] == "house/model.onnx"


@pytest.mark.slow
def test_the_weights_of_a_large_graph_are_a_file_that_is_listed(trained, says, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    program = pytest.importorskip("torch.onnx._internal.exporter._onnx_program")
    monkeypatch.setattr(program, "_LARGE_MODEL_THRESHOLD", 1000)
    listed = says("export", trained("reverse"), "--out", "house", "--onnx")
    assert listed[-2:] == ["house/model.onnx", "house/model.onnx.data"]
    assert {*listed} == {str(path) for path in Path("house").iterdir()}
    assert runtime.InferenceSession("house/model.onnx")
    says("export", trained("reverse"), "--out", "house")
    assert not [*Path("house").glob("*.onnx*")]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_onnx_takes_batches_of_any_size_and_texts_of_any_length(trained, says, task):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    checkpoint = trained(task)
    assert says("export", checkpoint, "--out", "house", "--onnx")[-1] == "house/model.onnx"
    session, model = runtime.InferenceSession("house/model.onnx"), kvt.load(checkpoint)
    inputs = model.inputs(next(iter(load_data(Checkpoint(checkpoint)).val_dataloader())))
    is_text = task in ("reverse", "characters", "human_numbers", "language_model", "translation")
    for size, length in product((1, 2, len(inputs[0])), (1, 3, 7) if is_text else (None,)):
        parts = [tensor[:size] if length is None else tensor[:size, :length] for tensor in inputs]
        names = [found.name for found in session.get_inputs()]
        lengths = {"translation": ["source_length", "target_length"]}.get(task, ["length"] * is_text)
        axes = {axis for found in session.get_inputs() for axis in found.shape if isinstance(axis, str)}
        assert axes == {"batch", *lengths}
        (found,) = session.run(None, {name: part.numpy() for name, part in zip(names, parts, strict=True)})
        with torch.no_grad():
            assert_close(torch.as_tensor(found), model(*parts), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("task", ["reverse", "translation"])
def test_the_card_runs_the_graph_without_kvt(trained, says, monkeypatch, capsys, task):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    says("export", trained(task), "--out", "house", "--onnx")
    model, page = kvt.load("house"), Path("house/README.md").read_text()
    monkeypatch.chdir("house")
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1], names := {})
    ones = [torch.ones(1, 8, dtype=torch.long)] * len(names["session"].get_inputs())
    assert names["logits"].shape[::2] == model(*ones).shape[::2]


def test_the_card_of_a_language_model_counts_its_tokens_and_has_no_tokenizer(in_tmp_dir, says):
    pytest.importorskip("tokenizers")
    Path("mine.txt").write_text("one two three " * 200)
    words = ["--text", "mine.txt", "--tokenizer", "bpe", "--data_dir", "."]
    words += ["--length", "8", "--dim", "16", "--depth", "1"]
    says("run", "language_model", *words, "--heads", "2", "--max_steps", "1", "--enable_progress_bar", "false")
    (run,) = Path("lightning_logs").glob("*/*/*")
    says("export", run, "--out", "house")
    page, model = Path("house/README.md").read_text(), kvt.load("house")
    assert f"| `vocab_size` | {len(model.vocabulary.pieces)} |" in page
    learned = model.hparams["spec"]["tokenizer"]
    Path("tokens.json").write_text(learned)
    checkpoint = torch.load(run / "checkpoints" / "best.ckpt", weights_only=False)
    checkpoint["datamodule_hyper_parameters"]["tokenizer"] = learned  # as in a model that was imported
    torch.save(checkpoint, "imported.ckpt")
    says("export", "imported.ckpt", "--out", "imported")
    assert max(map(len, Path("imported/README.md").read_text().splitlines())) < 500


def test_the_card_of_a_model_that_was_not_measured_says_so(trained, says):
    says("convert", trained("reverse"), "--attn", "qkv", "--out", "new.ckpt")
    says("export", "new.ckpt", "--out", "house")
    page = Path("house/README.md").read_text()
    assert "kvt validate --ckpt_path house" in page
    assert "Its results" not in page


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reverse", "cifar10", "characters"])
def test_torch_exports_it_with_a_dynamic_batch(trained, task):
    checkpoint = trained(task)
    model = kvt.load(checkpoint)
    (inputs,) = model.inputs(next(load_data(Checkpoint(checkpoint)).sample(16)))
    program = torch.export.export(
        model.model,
        (inputs.float() if task == "cifar10" else inputs,),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    few = inputs[:2].float() if task == "cifar10" else inputs[:2]
    with torch.no_grad():
        assert_close(program.module()(few), model.model(few), atol=1e-5, rtol=1e-4)


MISTAKES = [
    ([], "takes one run"),
    (["nowhere"], "no such file"),
    (["."], "no such file"),
    (["text.ckpt"], "not a kvt checkpoint"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_mistakes(mistake, monkeypatch, words, told):
    Path("text.ckpt").write_text("text")
    monkeypatch.setattr("sys.argv", ["kvt", "export", *words, "--out", "house"])
    assert told in mistake(main)


NOT_ITS_WEIGHTS = "model.safetensors does not match the SHA-256 in config.json"


@pytest.mark.parametrize("spoil", ["config.json", "model.safetensors"])
def test_a_damaged_folder_is_refused(trained, says, mistake, monkeypatch, spoil):
    says("export", trained("reverse"), "--out", "house")
    whole = Path("house", spoil).read_bytes()
    monkeypatch.setattr("sys.argv", ["kvt", "maps", "--ckpt_path", "house"])
    for make in (lambda path: path.write_bytes(whole[: len(whole) // 2]), os.mkfifo):
        Path("house", spoil).unlink()
        make(Path("house", spoil))
        with no_longer_than(60):
            assert "--ckpt_path house: " in mistake(main)


@pytest.mark.parametrize("name", ["unlink", "replace", "fsync"])
def test_an_export_over_another_is_one_model_or_refused_whenever_it_is_killed(in_tmp_dir, monkeypatch, name):
    """Before any deletion, rename or flush; it may be written again, and what another program keeps there stays."""
    configs = [kvt.RunConfig.from_name("reverse").changed(**SHORT, attn=attn, dim=16) for attn in ("qkv", "kv")]
    old, new = (Checkpoint(kvt.train(config, test=False).checkpoint) for config in configs)
    house, plain = Path("house"), getattr(os, name)
    for last in range(1, 30):
        shutil.rmtree(house, ignore_errors=True)
        export(old, None, house)
        (house / "model.onnx").write_text("of the old one")
        (house / "predictions.csv").write_text("mine")
        with monkeypatch.context() as patched:
            patched.setattr(os, name, killed_at(last, plain))
            try:
                export(new, None, house)
                break
            except Killed:
                pass
        with suppress(UserError):  # between settings and weights
            require_whole(house, old, new)
        export(new, None, house)
        require_whole(house, new)
    assert last > 1
    require_whole(house, new)
    assert {path.name for path in house.iterdir()} == {*FILES, "predictions.csv"}


FILES = {"model.safetensors", "config.json", "README.md"}
SHORT = {"train_size": 96, "val_size": 20, "test_size": 20, "batch_size": 16, "max_epochs": 1}
SHORT |= {"enable_progress_bar": False}


class Killed(BaseException):
    """Ends a process as SIGKILL does: here nothing is tidied up, since every later call fails, too."""


def killed_at(last, plain):
    calls = iter(range(1, 1000))

    def call(*args, **kwargs):
        if next(calls) >= last:
            raise Killed
        return plain(*args, **kwargs)

    return call


def require_whole(house: Path, *models: Checkpoint) -> None:
    """Require that a folder is one of these models, with its settings; its card and its graph are there, or are not."""
    assert (house / "predictions.csv").read_text() == "mine"
    found = Checkpoint(house)
    (model,) = [model for model in models if found.digest == model.digest]
    attn = model.saved["hyper_parameters"]["attn"]
    assert found.saved["hyper_parameters"]["attn"] == kvt.load(house).hparams["attn"] == attn
    if (house / "README.md").exists():
        assert f"| `attn` | {attn} |" in (house / "README.md").read_text()
    if (house / "model.onnx").exists():
        assert attn == "qkv"


def test_weights_of_one_model_are_not_measured_with_the_settings_of_another(trained, says, mistake, monkeypatch):
    for name in ("one", "other"):
        says("export", trained("reverse" if name == "one" else "sort"), "--out", name)
    shutil.copy("other/model.safetensors", "one/model.safetensors")
    monkeypatch.setattr("sys.argv", ["kvt", "test", "--ckpt_path", "one"])
    assert NOT_ITS_WEIGHTS in mistake(main)


def test_an_export_of_an_older_version_is_read_and_replaced(trained, says):
    says("export", trained("reverse"), "--out", "house")
    settings = json.loads(Path("house/config.json").read_text())
    del settings["weights_sha256"]
    Path("house/config.json").write_text(json.dumps(settings))
    assert kvt.load("house")
    says("export", trained("sort"), "--out", "house")
    assert Checkpoint("house").saved["datamodule_hyper_parameters"]["task"] == "sort"


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.onnx"])
@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_is_no_export_is_not_replaced(trained, mistake, monkeypatch, name, make):
    Path("house").mkdir()
    make(Path("house", name))
    monkeypatch.setattr("sys.argv", ["kvt", "export", str(trained("reverse")), "--out", "house"])
    assert f"--out house: its {name} was not written by kvt export" in mistake(main)
