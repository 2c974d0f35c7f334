"""Attentions in models of transformers and of timm: the same numbers as theirs, the same text with any cache."""

import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import make_attention, register_with_transformers, timm_attention
from kvt.attention.hosts import TimmAttention
from kvt.system.errors import UserError

SHARED = ["qkv", "kv", "q-kv", "k"]


def language_model(family: str, attn: str, **settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=17, n_positions=32, n_embd=16, n_layer=2, n_head=4)
    else:
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=17, num_key_value_heads=2, max_position_embeddings=32, **shape)
    config.initializer_range = 0.5  # that texts depend on what is attended to
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = 0
    name = attn if attn in ("eager", "sdpa") else register_with_transformers(attn, **settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_qkv_computes_what_transformers_does(family):
    ours, theirs = language_model(family, "qkv"), language_model(family, "eager")
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(1, 17, (3, 9))
    padded = torch.arange(9) >= torch.tensor([[0], [3], [5]])
    assert_close(ours(tokens).logits, theirs(tokens).logits)
    assert_close(
        ours(tokens, attention_mask=padded).logits[padded], theirs(tokens, attention_mask=padded).logits[padded]
    )


@pytest.mark.parametrize("attn", SHARED)
def test_a_layer_is_that_of_this_package(attn):
    """GPT-2's own projections, with those that the attention does not use left out."""
    model = language_model("gpt2", attn)
    theirs = model.transformer.h[0].attn
    ours = make_attention(attn, dim=16, heads=4)
    weight, bias = theirs.c_attn.weight.T.chunk(3), theirs.c_attn.bias.chunk(3)
    with torch.no_grad():
        for role, projection in ours.projection.items():
            projection.weight.copy_(weight["qkv".index(role)])
            projection.bias.copy_(bias["qkv".index(role)])
        ours.output.weight.copy_(theirs.c_proj.weight.T)
        ours.output.bias.copy_(theirs.c_proj.bias)
    x = torch.randn(2, 7, 16)
    assert_close(theirs(x)[0], ours(x, causal=True))


@pytest.mark.parametrize("attend_self", [True, False])
@pytest.mark.parametrize("attn", SHARED)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_cache_writes_the_same_text(family, attn, attend_self):
    model = language_model(family, attn, attend_self=attend_self)
    prompts = torch.randint(1, 17, (2, 5))
    attended = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])  # the first is padded on the left
    settings = {"attention_mask": attended, "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(prompts, use_cache=False, **settings)
    assert torch.equal(model.generate(prompts, use_cache=True, **settings), plain)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(prompts, **static, **settings), plain)
    settings.pop("attention_mask")
    whole = model.generate(prompts, use_cache=False, **settings)
    assert torch.equal(model.generate(prompts, **static, **settings), whole)


def test_a_query_that_is_not_used_gets_no_gradient():
    model = language_model("llama", "kv")
    tokens = torch.randint(1, 17, (2, 6))
    model(tokens, labels=tokens).loss.backward()
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.grad is None
    assert attention.k_proj.weight.grad.abs().sum() > 0


def test_what_transformers_cannot_take_is_said():
    pytest.importorskip("transformers")
    for attn in ("kv+pos", "kv+phase", "mla", "identity", "q-kv-deepseek"):
        with pytest.raises(UserError, match="does more than share projections"):
            register_with_transformers(attn)


def test_a_vision_transformer_of_timm_takes_any_attention():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    images = torch.randn(2, 3, 16, 16)
    theirs = timm.models.VisionTransformer(**shape).eval()
    ours = timm.models.VisionTransformer(**shape, attn_layer=timm_attention("qkv")).eval()
    state = {}
    for name, value in theirs.state_dict().items():
        if ".attn.qkv." in name:
            for role, part in zip("qkv", value.chunk(3), strict=True):
                state[name.replace("attn.qkv", f"attn.attention.projection.{role}")] = part
        else:
            state[name.replace("attn.proj", "attn.attention.output")] = value
    ours.load_state_dict(state)
    assert_close(ours(images), theirs(images))
    for attn, settings in {"kv": {"attend_self": False}, "kv+pos": {"max_len": 17}}.items():
        model = timm.models.VisionTransformer(**shape, attn_layer=timm_attention(attn, **settings))
        model(images).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_timm_may_scale_the_initial_weights():
    timm = pytest.importorskip("timm")
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    plain, fixed = (
        timm.models.VisionTransformer(**shape, attn_layer=timm_attention("kv"), fix_init=fix) for fix in (False, True)
    )
    stds = [[block.attn.proj.weight.std().item() for block in model.blocks] for model in (plain, fixed)]
    assert stds[1][1] < stds[1][0] < 1.2 * stds[0][0]


def test_images_of_any_shape_in_one_batch_of_timm():
    timm = pytest.importorskip("timm")
    sizes = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    model = timm.create_model("naflexvit_base_patch16_gap", **sizes, attn_layer=timm_attention("kv")).eval()
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3)).expand(2, -1, -1)
    images = {"patches": torch.randn(2, 6, 768), "patch_coord": places}
    real = images | {"patch_valid": torch.tensor([[True] * 6, [True] * 4 + [False] * 2])}
    other = real | {"patches": torch.where(real["patch_valid"].unsqueeze(-1), images["patches"], 9.0)}
    assert_close(model(real), model(other))


def test_a_model_of_timm_can_be_pickled():
    timm = pytest.importorskip("timm")
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 4, "num_classes": 3}
    layer = timm_attention("kv", rope=1.0)
    model = timm.create_model("vit_tiny_patch16_224", **shape, attn_layer=layer).eval()
    assert pickle.loads(pickle.dumps(TimmAttention)) is TimmAttention
    images = torch.randn(2, 3, 16, 16)
    assert_close(pickle.loads(pickle.dumps(model))(images), model(images))


def test_a_block_of_timm_passes_its_settings_on():
    block_class = timm_attention("kv")
    layer = block_class(8, num_heads=2, qkv_bias=False, proj_bias=False, attn_drop=0.25, proj_drop=0.5)
    assert (layer.attention.heads, layer.attention.dropout, layer.proj_drop.p) == (2, 0.25, 0.5)
    assert not [name for name, _ in layer.named_parameters() if "bias" in name]
    assert isinstance(layer, nn.Module)
    x = torch.randn(2, 5, 8)
    layer.eval()
    masked = layer(x, attn_mask=torch.ones(5, 5).tril().bool())
    assert_close(masked, layer(x, is_causal=True))
    with pytest.raises(UserError, match="qk_norm"):
        block_class(8, num_heads=2, qk_norm=True)
