"""The benchmarks run, and what they compare with `kvt` computes the same function."""

import shutil

import decoding
import gpu
import loss
import nanogpt
import overhead
import pipeline
import pytest
import torch
import training
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION
from kvt.tasks import CharacterTask

LISTS = training.Lists(dim=16, depth=2, heads=2, length=6)
IMAGES = training.Images(dim=16, depth=2, heads=2, side=8, patch=4)


@pytest.fixture(params=["lists", "images"])
def kind(request):
    """Functions for our, the paper's and the other models, their size, and an input."""
    if request.param == "lists":
        digits = torch.randint(10, (3, LISTS.length))
        return training.our_lists, training.paper_lists, training.other_lists, LISTS, digits
    images = torch.randn(3, 3, IMAGES.side, IMAGES.side, dtype=torch.float64)
    return training.our_images, training.paper_images, training.other_images, IMAGES, images


@torch.no_grad()
def opinionated(model, seed=0):
    """Redraw every parameter, in float64: none is zero, and no map is uniform."""
    torch.manual_seed(seed)
    for parameter in model.double().eval().parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def gradients(model, x):
    model(x).logsumexp(-1).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attn", training.ATTENTIONS)
def test_the_papers_models_equal_ours_in_values_and_gradients(kind, attn):
    our, papers, _, size, x = kind
    ours, theirs = opinionated(our(attn, size)), papers(attn, size).double().eval()
    theirs.load_state_dict(ours.state_dict())
    assert_close(theirs(x), ours(x))
    of_theirs = gradients(theirs, x)
    for name, gradient in gradients(ours, x).items():
        # parameters that cancel in the softmax have a gradient of zero up to rounding, or, where they are omitted, none
        assert_close(of_theirs[name], torch.zeros_like(of_theirs[name]) if gradient is None else gradient)


def without_biases(attention):
    """Set the biases of an attention layer to zero: the libraries differ in which biases they have."""
    with torch.no_grad():
        for linear in [*attention.projection.values(), attention.output]:
            if linear.bias is not None:
                linear.bias.zero_()
    return attention


def stacked(attention):
    """Return query, key and value as one matrix, with the query scaled so that α becomes 1 / √head_dim."""
    weights = {role: linear.weight for role, linear in attention.projection.items()}
    return torch.cat([weights["q"] * attention.score.scale * attention.head_dim**0.5, weights["k"], weights["v"]])


@torch.no_grad()
def load_torch(theirs, ours):
    for layer, block in zip(theirs.layers, ours, strict=True):
        attend, forward = without_biases(block.attention.layer), block.feed_forward.layer
        layer.self_attn.in_proj_weight.copy_(stacked(attend))
        layer.self_attn.in_proj_bias.zero_()
        layer.self_attn.out_proj.load_state_dict(attend.output.state_dict())
        layer.linear1.load_state_dict(forward[0].state_dict())
        layer.linear2.load_state_dict(forward[3].state_dict())
        layer.norm1.load_state_dict(block.attention.norm.state_dict())
        layer.norm2.load_state_dict(block.feed_forward.norm.state_dict())


@torch.no_grad()
def load_x_transformers(theirs, ours):
    halves = [half for block in ours for half in (block.attention, block.feed_forward)]
    for (norms, layer, _), half in zip(theirs.layers, halves, strict=True):
        half.norm.bias.zero_()  # theirs has no bias
        (norm,) = [norm for norm in norms if norm is not None]
        (gamma,) = norm.parameters()
        gamma.copy_(half.norm.weight - float(norm.unit_offset))
        if hasattr(layer, "to_q"):
            query, key, value = stacked(without_biases(half.layer)).chunk(3)
            for linear, weight in ((layer.to_q, query), (layer.to_k, key), (layer.to_v, value)):
                linear.weight.copy_(weight)
            layer.to_out.weight.copy_(half.layer.output.weight)
        else:
            first, second = [module for module in layer.modules() if isinstance(module, nn.Linear)]
            first.load_state_dict(half.layer[0].state_dict())
            second.load_state_dict(half.layer[3].state_dict())


@pytest.mark.parametrize(("name", "load"), [("torch", load_torch), ("x-transformers", load_x_transformers)])
def test_the_other_encoders_equal_ours(kind, name, load):
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    pytest.importorskip("vit_pytorch")
    our, _, others, size, x = kind
    ours, theirs = opinionated(our("qkv", size)), others(size)[name].double().eval()
    load(theirs.encoder, ours.encoder)
    theirs.load_state_dict({k: v for k, v in ours.state_dict().items() if not k.startswith("encoder")}, strict=False)
    assert_close(theirs(x), ours(x))


@torch.no_grad()
def load_gpt2(theirs, ours):
    body = theirs.transformer
    body.wte.load_state_dict(ours.embedding.tokens.state_dict())
    body.wpe.load_state_dict(ours.embedding.positions.state_dict())
    for layer, block in zip(body.h, ours.encoder, strict=True):
        attend, forward = without_biases(block.attention.layer), block.feed_forward.layer
        products = [(layer.attn.c_proj, attend.output), (layer.mlp.c_fc, forward[0]), (layer.mlp.c_proj, forward[3])]
        for product, linear in products:
            product.weight.copy_(linear.weight.T)
            product.bias.copy_(linear.bias)
        layer.attn.c_attn.weight.copy_(stacked(attend).T)
        layer.attn.c_attn.bias.zero_()
        layer.ln_1.load_state_dict(block.attention.norm.state_dict())
        layer.ln_2.load_state_dict(block.feed_forward.norm.state_dict())
    body.ln_f.load_state_dict(ours.norm.state_dict())
    theirs.lm_head.weight.copy_(ours.head.weight)
    ours.head.bias.zero_()


@torch.no_grad()
def load_x_transformers_writer(theirs, ours):
    load_x_transformers(theirs.attn_layers, ours.encoder)
    theirs.token_emb.emb.load_state_dict(ours.embedding.tokens.state_dict())
    theirs.pos_emb.emb.weight.copy_(ours.embedding.positions.weight / theirs.pos_emb.scale)
    theirs.attn_layers.final_norm.gamma.copy_(ours.norm.weight - float(theirs.attn_layers.final_norm.unit_offset))
    ours.norm.bias.zero_()
    theirs.to_logits.weight.copy_(ours.head.weight)
    ours.head.bias.zero_()


@pytest.mark.parametrize(
    ("library", "name", "load"),
    [
        ("transformers", "GPT-2 of transformers", load_gpt2),
        ("x_transformers", "x-transformers", load_x_transformers_writer),
    ],
)
def test_the_other_language_models_write_what_ours_writes(library, name, load):
    pytest.importorskip(library)
    window = {"vocab": decoding.SYMBOLS[:7], "length": 12}
    ours = opinionated(CharacterTask(window, attn="qkv", dim=8, depth=2, heads=2).model)
    theirs, write = decoding.LIBRARIES[name](symbols=7, window=12, dim=8, depth=2, heads=2)
    load(theirs.double(), ours)
    prompt = torch.randint(7, (5, 3))
    assert len({*map(tuple, prompt.tolist())}) > 1
    assert torch.equal(write(prompt, 9), decoding.our_sample(ours, prompt, 9))


@pytest.mark.parametrize("losses", [loss.LOSSES, loss.PLAIN])
def test_the_other_losses_equal_ours(losses):
    torch.manual_seed(0)
    generator, hidden = nn.Linear(6, 12).double(), torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    target = torch.randint(12, (9,)).index_fill(0, torch.tensor([2, 5]), loss.PAD)
    wanted = [hidden, *generator.parameters()]
    ours, *others = (way(generator, hidden, target) for way in losses.values())
    gradients = torch.autograd.grad(ours, wanted)
    for other in others:
        assert_close(other, ours)
        assert_close(torch.autograd.grad(other, wanted), gradients)


@pytest.mark.parametrize("attn", decoding.PAPER)
@pytest.mark.parametrize("part", decoding.PARTS)
def test_both_ways_of_decoding_write_the_same(part, attn, monkeypatch):
    monkeypatch.setattr(decoding, "SENTENCES", 40)
    torch.manual_seed(0)
    case = next(decoding.PARTS[part](attn))
    ours, theirs = case.ours(), case.theirs()
    assert len(theirs)
    assert [*map(list, ours[: len(theirs)])] == [*map(list, theirs)]


@pytest.mark.slow  # compiles
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_compiled_step_writes_the_same():
    torch.manual_seed(0)
    (case,) = decoding.compiled("kv+pos")
    assert torch.equal(case.ours(), case.theirs())


def test_both_pipelines_normalise_alike(monkeypatch):
    monkeypatch.setattr(pipeline.transforms, "RandomResizedCrop", lambda *_, **__: nn.Identity())
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    served = [pipeline.AugmentedImages(images, torch.arange(5))[index] for index in range(5)]
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (pipeline.MEAN, pipeline.STD))
    for (image, label), pixels in zip(served, images, strict=True):
        plain = (pixels / 255 - mean) / std
        assert_close(image, plain if torch.allclose(image, plain) else plain.flip(-1))
        assert torch.equal(images[label], pixels)


SIZES = {
    decoding: {"SENTENCES": 20, "PARTS": {"translation": decoding.translation}},
    loss: {"TRANSLATION": (9, 12), "LANGUAGE": (8, 300), "DIM": 6, "BATCH": 2, "LENGTH": 4},
    pipeline: {"IMAGES": 6, "BATCH": 3, "WORKERS": (0, 1)},
    training: {
        "BATCH": 2,
        "MODELS": {
            "lists": lambda *how: training.compare_lists("lists", LISTS, *how),
            "images": lambda *how: training.compare_images("images", IMAGES, *how),
        },
    },
}


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=[pytest.mark.slow] * (script is not loss)) for script in SIZES],
    ids=lambda script: script.__name__,
)
def test_every_script_prints_whole_tables(script, monkeypatch, capsys):
    if script is training:
        pytest.importorskip("x_transformers")
        pytest.importorskip("vit_pytorch")
    for name, small in SIZES[script].items():
        monkeypatch.setattr(script, name, small)
    script.main(["--repeats", "1"])
    machine, *tables = capsys.readouterr().out.strip().split("\n\n")
    assert "medians of 1 rounds" in machine
    with_bf16 = 2 * (script is training and torch.cpu._is_avx512_bf16_supported())
    assert len(tables) == {training: 2, decoding: 3}.get(script, 1) + with_bf16
    for table in tables:
        lines = table.splitlines()
        assert len(lines) >= 3
        assert len({line.count("|") for line in lines}) == 1
        assert "nan" not in table


@pytest.mark.slow
def test_the_overhead_of_a_step_is_printed(capsys):
    overhead.main(["--steps", "60", "--dim", "8", "--batch_size", "4"])
    *_, bare, ours, _, _ = capsys.readouterr().out.splitlines()
    assert all(float(line.split(" | ")[1].split(" ")[0]) > 0 for line in (bare, ours))


@pytest.mark.slow
def test_kvt_trains_beside_another_program_that_prints_its_times(tmp_path, capsys):
    for name in nanogpt.FILES:
        (tmp_path / name).touch()
    (tmp_path / "train.py").write_text("for n in range(3):\n    print(f'iter {n}: loss 4.1, time 10.00ms, mfu 1.00%')")
    nanogpt.main([str(tmp_path), "--sizes", "small", "--attn", "kv", "--steps", "15", "--repeats", "1"])
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert [word.strip() for word in row[1:4]] == ["small", "kv", "76,800"]  # 12 texts of 64 symbols in 10 ms
    assert float(row[4].replace(",", "")) > 0


def test_the_script_for_a_gpu_measures_and_checks_every_attention(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "TASKS", {"lists": gpu.lists})
    monkeypatch.setattr(gpu, "N", 9)
    words = ["--device", "cpu", "--batch", "2", "--repeats", "1"]
    assert gpu.main(words) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    steps, checks = lines[2:5], lines[7:]
    assert all(float(cell.strip(" |")) > 0 for row in steps for cell in row[2:])
    assert {row[0].strip("| ") for row in checks} == {*ATTENTION}
    assert {row[-1] for row in checks} == {"right |"}
    monkeypatch.setattr(gpu, "TASKS", {})
    monkeypatch.setattr(gpu, "passes", lambda *_, **__: [torch.tensor([float("nan")])] * 3)
    assert gpu.main(words) == 1  # NaN is wrong, too
