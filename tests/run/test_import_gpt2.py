"""A random GPT-2 of transformers becomes a checkpoint: the same logits, the same text, trained further as any."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import kvt
from kvt.cli.lightning_cli import run_words
from kvt.cli.main import execute
from kvt.data.tokens import learn_pairs
from kvt.system.console import run
from tests.conftest import QUIET

pytestmark = pytest.mark.usefixtures("in_tmp_dir")
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 30


@pytest.fixture
def gpt2(in_tmp_dir):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    (in_tmp_dir / "text.txt").write_text(TEXT)
    tokenizer = learn_pairs(iter([TEXT]), 280)
    torch.manual_seed(0)
    shape = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24}
    size = len(json.loads(tokenizer)["model"]["vocab"])
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=size, initializer_range=0.3, **shape)
    ).eval()
    model.config.eos_token_id = model.config.bos_token_id = None
    model.save_pretrained(in_tmp_dir / "theirs")
    (in_tmp_dir / "theirs/tokenizer.json").write_text(tokenizer)
    return model


def imported(*words):
    run(lambda: execute("import", ["theirs", *words]))
    return kvt.load("theirs.ckpt")


def test_it_has_the_same_logits_and_writes_the_same_text(gpt2):
    ours = imported()
    tokens = torch.randint(len(ours.vocabulary.pieces), (3, 16))
    with torch.no_grad():
        assert_close(ours(tokens), gpt2(tokens).logits, rtol=0, atol=1e-5)
    prompt = torch.tensor([ours.vocabulary.begin("To be")])
    theirs = gpt2.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)[0]
    assert ours.generate("To be", 8, temperature=0) == ours.vocabulary.text(theirs.tolist())


def test_it_is_converted_measured_and_trained_further(gpt2):
    imported()
    run(lambda: execute("convert", ["theirs.ckpt", "--attn", "q-kv"]))
    run(lambda: run_words(["validate", "--ckpt_path", "q-kv.ckpt", "--text", "text.txt", *QUIET]))
    words = ["fit", "--ckpt_path", "theirs.ckpt", "--text", "text.txt", "--lr", "1e-3", "--val_size", "0.3"]
    limits = ["--max_steps", "3", "--val_check_interval", "3", "--batch_size", "4", *QUIET]
    run(lambda: run_words([*words, *limits]))
    (path,) = Path("lightning_logs").glob("*/*/*/result.json")
    last = path.parent / "checkpoints/last.ckpt"
    before, after = (kvt.load(file).model.head.weight for file in ("theirs.ckpt", last))
    assert 0 < (after - before).abs().max() < 0.05  # three small steps from the weights
    assert json.loads(path.read_text())["attn"] == "qkv"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "llama"}, "model_type=llama"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"activation_function": "swish"}, "activation_function=swish"),
        ({"n_layer": 3}, "do not fit"),
        ({"n_embd": 8}, "do not fit"),
        ({"n_head": None}, "n_head|NoneType|heads"),
    ],
)
def test_what_is_no_gpt2_is_named(gpt2, mistake, change, told, in_tmp_dir):
    path = in_tmp_dir / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert re.search(told, mistake(lambda: run(lambda: execute("import", ["theirs"]))))
    assert not (in_tmp_dir / "theirs.ckpt").exists()
