"""`kvt convert`: a checkpoint that is measured and trained further as any other, and what cannot be one."""

import shutil

import pytest
import torch
from torch.testing import assert_close

import kvt as package
from kvt.commands import execute
from kvt.system import run
from tests.conftest import SMALL


def convert(*words):
    run(lambda: execute("convert", [*map(str, words)]))


@pytest.fixture
def qkv(trained, in_tmp_dir):
    return shutil.copytree(trained("characters", "qkv").parents[1], in_tmp_dir / "qkv")


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def test_it_is_measured_and_trained_further_from_step_0(kvt, qkv, in_tmp_dir, capsys):
    convert(qkv, "--attn", "kv", "--how", "keep_k", "--out", "new.ckpt")
    assert capsys.readouterr().out.splitlines()[-1] == "new.ckpt"
    old, new = weights(qkv / "checkpoints" / "best.ckpt"), weights("new.ckpt")
    assert all(torch.equal(new[name], old[name]) for name in new)
    assert {*old} - {*new} == {name for name in old if "projection.q" in name}
    kvt("validate", "--ckpt_path", "new.ckpt")
    kvt("fit", "--ckpt_path", "new.ckpt", "--max_steps", "3")
    last = next(in_tmp_dir.glob("lightning_logs/characters/kv/version_0/checkpoints/last.ckpt"))
    content = torch.load(last, weights_only=True)
    assert content["global_step"] == 3
    assert {int(state["step"]) for state in content["optimizer_states"][0]["state"].values()} == {3}


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


@pytest.mark.parametrize("flags", [["--share_layers", "2"], ["--match", "qkv", "--attn_kwargs.kv_heads", "1"]], ids=str)
def test_layers_that_share_and_models_that_were_made_wider_stay_so(kvt, experiment, in_tmp_dir, flags):
    sizes = ["--dim", "64", "--depth", "2", "--heads", "4"]
    path = experiment("language_model", *SMALL["language_model"], *sizes, "--attn", "qkv", *flags)["path"].parent
    old = weights(path / "checkpoints" / "best.ckpt")
    convert(path, "--attn", "q-kv", "--how", "keep_v", "--out", "new.ckpt")
    new = weights("new.ckpt")
    changed = {name for name in new if not torch.equal(new[name], old[name])}
    assert changed == {name for name in new if "projection.k" in name}
    kvt("validate", "--ckpt_path", "new.ckpt")


def test_the_checkpoints_of_a_run_stay_its_own(mistake, trained):
    path = trained("characters")
    before = path.read_bytes()
    assert f"--out {path}" in mistake(convert, path, "--attn", "kv", "--out", path)
    assert path.read_bytes() == before
