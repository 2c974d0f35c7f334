"""A random GPT-2 of transformers becomes a checkpoint: the same logits, the same text, trained further as any."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import kvt
from kvt.cli.lightning_cli import run_words
from kvt.cli.main import execute
from kvt.data.tokens import learn_pairs
from kvt.system.console import run
from kvt.tasks import TextTokens
from tests.conftest import QUIET

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("in_tmp_dir")
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 30


def make(folder: Path, tokenizer: str = learn_pairs(iter([TEXT]), 280), shards: str = "1GB", **config):
    """Save a random GPT-2 as transformers does, with a tokenizer; return the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = len(json.loads(tokenizer)["model"]["vocab"])
    shape = {"vocab_size": size, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24}
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(initializer_range=0.3, **shape | ends | config)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder, max_shard_size=shards)
    (folder / "tokenizer.json").write_text(tokenizer)
    return model


@pytest.fixture
def gpt2(in_tmp_dir):
    (in_tmp_dir / "text.txt").write_text(TEXT)
    return make(in_tmp_dir / "theirs")


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


def test_it_is_exported_to_onnx_without_data(gpt2, in_tmp_dir, monkeypatch):
    """The default text, Python's library, would take half a minute to tokenise."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ours = imported()
    monkeypatch.setattr(TextTokens, "load", None)
    run(lambda: execute("export", ["theirs.ckpt", "--out", "house", "--onnx"]))
    tokens = torch.randint(len(ours.vocabulary.pieces), (3, 9))
    session = runtime.InferenceSession("house/model.onnx")
    (logits,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
    assert_close(torch.tensor(logits), ours(tokens).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "llama"}, "model_type=llama"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"activation_function": "quick_gelu"}, "activation_function=quick_gelu"),
        ({"n_layer": 3}, "do not fit config.json: 'h.2.ln_1.weight' is missing$"),
        ({"n_layer": 1}, r"theirs: a GPT-2 of 1 layers has no other tensor h\.1\."),
        ({"n_embd": 8}, r"do not fit config.json: .* would be \(280, 16\), not \(280, 8\)$"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config="),
        ({"n_head": None}, "n_head|NoneType|heads"),
    ],
)
def test_what_is_no_gpt2_is_named(gpt2, mistake, change, told, in_tmp_dir):
    path = in_tmp_dir / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert re.search(told, mistake(lambda: run(lambda: execute("import", ["theirs"]))))
    assert not (in_tmp_dir / "theirs.ckpt").exists()


# ---- files as they are ---------------------------------------------------------------------------


def change(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Add tensors to a file, or replace those of the same name."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | weights, path, {"format": "pt"})


def as_bin(folder: Path, shards: int = 1) -> None:
    path = folder / "model.safetensors"
    weights = [*load_file(path).items()]
    path.unlink()
    if shards == 1:
        torch.save(dict(weights), folder / "pytorch_model.bin")
        return
    names = {}
    for number in range(shards):
        name = f"pytorch_model-{number}.bin"
        torch.save(dict(weights[number::shards]), folder / name)
        names |= {weight: name for weight, _ in weights[number::shards]}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


def add_tokens(folder: Path, **ids: int) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [{"id": i, "content": f"<{name}>", "special": True, **flags} for name, i in ids.items()]
    path.write_text(json.dumps(content))


def with_tensor(name: str, weight: torch.Tensor):
    return lambda folder: change(folder, {name: weight})


def with_masks(folder: Path) -> None:
    """As the files of older versions have them, and an output layer that equals the embedding."""
    table = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16).tril().to(torch.uint8)}
    change(folder, {"lm_head.weight": table.clone(), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4), **masks})


END_IS_S = learn_pairs(iter([TEXT]), 280).replace("<|endoftext|>", "</s>")
KEPT = {  # settings of the model, and what is done to its folder
    "shards": ({"shards": "10KB"}, None),
    "bin": ({}, as_bin),
    "bin in shards": ({}, lambda folder: as_bin(folder, 3)),
    "masks and output layer": ({}, with_masks),
    "padded vocabulary": ({"vocab_size": 300}, None),
    "added token without a row": ({}, lambda folder: add_tokens(folder, pad=280)),
    "end </s> by its id": ({"tokenizer": END_IS_S, "eos_token_id": 0}, None),
    "no dropout": ({"resid_pdrop": 0.0, "attn_pdrop": 0.0}, None),
    **{
        name: ({"activation_function": name}, None)
        for name in ("gelu", "gelu_python", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "relu", "silu", "tanh")
    },
}


@pytest.mark.parametrize("kind", KEPT)
def test_every_gpt2_has_the_logits_of_transformers(in_tmp_dir, kind):
    settings, spoil = KEPT[kind]
    theirs = make(in_tmp_dir / "theirs", **settings)
    if spoil:
        spoil(in_tmp_dir / "theirs")
    ours = imported()
    tokens = torch.randint(len(ours.vocabulary.pieces), (3, 16))
    with torch.no_grad():
        expected = theirs(tokens).logits[..., : len(ours.vocabulary.pieces)]
        assert_close(ours(tokens), expected, rtol=0, atol=1e-5)
    assert ours.hparams["dropout"] == settings.get("resid_pdrop", 0.1)
    assert ours.vocabulary.end == 0


REFUSED = {
    "another output layer": (with_tensor("lm_head.weight", torch.zeros(280, 16)), "lm_head.weight"),
    "adapter": (with_tensor("base_model.model.lora_A.weight", torch.zeros(4, 16)), "lora_A.weight"),
    "int8": (with_tensor("transformer.h.1.mlp.c_fc.weight", torch.zeros(16, 24, dtype=torch.int8)), "c_fc.weight is"),
    "fp8": (with_tensor("transformer.wte.weight", torch.zeros(280, 16).to(torch.float8_e4m3fn)), "wte.weight is"),
    "scales": (with_tensor("transformer.h.1.mlp.c_fc.SCB", torch.zeros(24)), "c_fc.SCB"),
    "more tokens than rows": (with_tensor("transformer.wte.weight", torch.zeros(270, 16)), "280 tokens, .* 270 rows"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "theirs has no weights: expected"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "is missing: save the model's"),
    "a shard less": (lambda folder: (as_bin(folder, 2), (folder / "pytorch_model-1.bin").unlink()), "is missing: copy"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_that_would_not_be_used_is_named(gpt2, mistake, in_tmp_dir, kind):
    spoil, told = REFUSED[kind]
    spoil(in_tmp_dir / "theirs")
    assert re.search(told, mistake(lambda: run(lambda: execute("import", ["theirs"]))))


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_has_its_logits(in_tmp_dir, bias):
    """Its linear layers are (out, in), its names begin with what torch.compile adds, its vocabulary is padded."""
    folder = in_tmp_dir / "theirs"
    theirs = make(folder, vocab_size=304, n_inner=64, activation_function="gelu")
    state = {}
    for name, weight in theirs.state_dict().items():
        if name.endswith("bias") and not bias:
            weight.zero_()
        elif weight.ndim == 2 and ".h." in name:
            state[f"_orig_mod.{name}"] = weight.T
        else:
            state[f"_orig_mod.{name}"] = weight
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 16, "bias": bias, "vocab_size": 304}
    saved = {"model": state, "model_args": arguments | {"dropout": 0.0}, "best_val_loss": torch.tensor(3.0)}
    torch.save(saved, folder / "ckpt.pt")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    ours = imported()
    tokens = torch.randint(280, (3, 16))
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits[..., :280], rtol=0, atol=1e-5)
