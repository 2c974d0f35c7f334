"""`kvt convert`: a checkpoint that is measured and trained further as any other, and what cannot be one."""

import shutil

import pytest
import torch
from torch.testing import assert_close

import kvt as package
from kvt.cli.main import execute
from kvt.exchange.convert import SAMPLE
from kvt.system.console import run
from kvt.tasks import Characters
from tests.conftest import SMALL, slow


def convert(*words):
    run(lambda: execute("convert", [*map(str, words)]))


@pytest.fixture
def qkv(trained, in_tmp_dir):
    return shutil.copytree(trained("characters", "qkv").parents[1], in_tmp_dir / "qkv")


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.parametrize("how", ["keep_k", "least_squares"])
def test_it_is_measured_and_trained_further(kvt, qkv, in_tmp_dir, capsys, how):
    convert(qkv, "--attn", "kv", "--how", how, "--out", "new.ckpt")
    assert capsys.readouterr().out.splitlines()[-1] == "new.ckpt"
    old, new = weights(qkv / "checkpoints" / "best.ckpt"), weights("new.ckpt")
    same = {name for name in new if torch.equal(new[name], old[name])}
    projections = {name for name in new if "projection." in name}
    assert same == new.keys() - (projections if how == "least_squares" else set())
    assert not any("projection.q" in name for name in new)
    kvt("validate", "--ckpt_path", "new.ckpt")
    kvt("fit", "--ckpt_path", "new.ckpt", "--max_steps", "9")
    last = next(in_tmp_dir.glob("lightning_logs/characters/kv/version_0/checkpoints/last.ckpt"))
    content = torch.load(last, weights_only=True)
    assert content["global_step"] == 9
    steps = {int(state["step"]) for state in content["optimizer_states"][0]["state"].values()}
    kvt("fit", "--ckpt_path", "new.ckpt", "--max_steps", "9")
    taught = next(in_tmp_dir.glob("lightning_logs/characters/kv/version_1/checkpoints/last.ckpt"))
    assert any(not torch.equal(weight, content["state_dict"][name]) for name, weight in weights(taught).items())
    assert steps == ({7, 9} if how == "least_squares" else {9})  # of those that are new, and of those that stay


def test_least_squares_fits_all_training_examples_of_its_sample_and_reads_no_others(qkv, in_tmp_dir, monkeypatch):
    fitted, load = [], Characters.load

    def only_training(data):
        train = load(data)["train"]
        return {"train": train, "val": train}  # the examples that judge a checkpoint are none of the sample

    monkeypatch.setattr("kvt.exchange.convert.fit_layers", lambda sources, targets, calls: fitted.append(calls))
    convert(qkv, "--attn", "kv", "--how", "least_squares", "--out", "one.ckpt")
    monkeypatch.setattr(Characters, "load", only_training)
    convert(qkv, "--attn", "kv", "--how", "least_squares", "--out", "other.ckpt")
    assert sum(len(call["x"]) for call in fitted[0][0]) == SAMPLE
    first, second = (torch.cat([call["x"] for call in calls[0]]) for calls in fitted)
    assert_close(first, second)


def optimizers(names):
    """Return flags of each optimiser, with the settings by which it keeps most."""
    settings = {"SGD": ["--optimizer.momentum", "0.9"], "RMSprop": ["--optimizer.momentum", "0.9"]}
    return [["--optimizer", f"torch.optim.{name}", *settings.get(name, [])] for name in names]


KEEPING = ["SGD", "Adagrad", "LBFGS", "Muon"]
"""The optimisers of torch that do not begin the state of a single weight at its first step; Muon has groups."""
OTHERS = [
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in (*KEEPING, "Optimizer", "SparseAdam")
]


@pytest.mark.parametrize("flags", [*optimizers(KEEPING[2:]), *slow(*optimizers([*KEEPING[:2], *OTHERS]))], ids=str)
def test_training_goes_on_with_every_optimiser_of_torch(kvt, experiment, in_tmp_dir, flags):
    path = experiment("characters", *SMALL["characters"], "--attn", "qkv", *flags)["path"].parent
    convert(path, "--attn", "q-kv", "--out", "new.ckpt")
    kvt("fit", "--ckpt_path", "new.ckpt", "--max_steps", "9")
    last = next(in_tmp_dir.glob("lightning_logs/characters/q-kv/version_0/checkpoints/last.ckpt"))
    old, new = (torch.load(file, weights_only=True) for file in ("new.ckpt", last))
    assert new["global_step"] == 9
    assert any(not torch.equal(weight, old["state_dict"][name]) for name, weight in new["state_dict"].items())


def test_a_projection_for_each_role_computes_the_same_and_back(in_tmp_dir, trained):
    convert(trained("characters"), "--attn", "qkv", "--out", "qkv.ckpt")
    convert("qkv.ckpt", "--attn", "kv", "--how", "mean", "--out", "kv.ckpt")
    task, there, back = (package.load(path) for path in (trained("characters"), "qkv.ckpt", "kv.ckpt"))
    tokens = torch.arange(12)[None] % len(task.vocabulary.vocab)
    assert there.attn == "qkv"
    assert_close(there(tokens), task(tokens))
    assert_close(back(tokens), task(tokens))


def test_translations_keep_their_cross_attention(in_tmp_dir, trained):
    path = trained("translation")
    convert(path, "--attn", "q-kv", "--how", "keep_v", "--attn_kwargs.kv_heads", "1", "--out", "new.ckpt")
    old, new = weights(trained("translation")), weights("new.ckpt")
    for name in old:
        if "cross_attention" in name:
            assert torch.equal(old[name], new[name])
    assert package.load("new.ckpt").hparams["attn_kwargs"] == {"kv_heads": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attn", "mla"], "--attn 'mla': choose from qkv, kv, q-kv, k, kv+phase, k+phase"),
        (
            ["--attn", "q-kv", "--how", "keep"],
            "--how 'keep': did you mean 'keep_v'? choose from keep_k, keep_v",
        ),
        (["--attn", "qkv", "--how", "keep_k"], "--how keep_k: QKV does not share that projection"),
        (["--attn", "q-kv", "--attn_kwargs", "kv_heads"], "--attn_kwargs: Expected a <class 'dict'>"),
        (["--attn", "q-kv", "--attn_kwargs.heads", "2"], "attn_kwargs: heads is set by the model"),
        (["--attn", "kv+phase", "--attn_kwargs.phase", "learned"], "kv+phase: kv has no weight angles to copy"),
        (["--attn", "q-kv", "--out", "missing/new.ckpt"], "--out missing/new.ckpt: cannot write"),
    ],
)
def test_what_it_cannot_map_is_named(mistake, trained, words, message):
    path = trained("characters")
    assert message in mistake(convert, path, *words)


@pytest.mark.parametrize("flags", [["--share_layers", "2"], ["--match", "qkv", "--attn_kwargs.kv_heads", "1"]], ids=str)
def test_layers_that_share_and_models_that_were_made_wider_stay_so(kvt, experiment, in_tmp_dir, flags):
    sizes = ["--dim", "64", "--depth", "2", "--heads", "4"]
    path = experiment("language_model", *SMALL["language_model"], *sizes, "--attn", "qkv", *flags)["path"].parent
    old = weights(path / "checkpoints" / "best.ckpt")
    for how in ("keep_v", "least_squares"):
        convert(path, "--attn", "q-kv", "--how", how, "--out", f"{how}.ckpt")
        new = weights(f"{how}.ckpt")
        same = {name for name in new if torch.equal(new[name], old[name])}
        projections = {name for name in new if "projection." in name}
        assert new.keys() - projections <= same
        assert (how == "least_squares") == (not same & projections)
        kvt("validate", "--ckpt_path", f"{how}.ckpt")


def test_the_checkpoints_of_a_run_stay_its_own(mistake, trained):
    path = trained("characters")
    before = path.read_bytes()
    assert f"--out {path}: is inside the folder of the run" in mistake(convert, path, "--attn", "kv", "--out", path)
    assert path.read_bytes() == before


def test_a_run_with_more_than_projections_is_named(mistake, trained):
    told = mistake(convert, trained("characters", "kv+pos"), "--attn", "kv")
    assert "attn=kv+pos has weights that cannot be converted: convert runs of qkv, kv, q-kv, k" in told
