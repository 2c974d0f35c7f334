"""A GPT-2 of Hugging Face's transformers as a checkpoint of `LanguageModelTask`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_weights
from torch import Tensor

from kvt.data.tokens import read_tokenizer
from kvt.run.checkpoint_files import HPARAMS
from kvt.run.config import RunConfig
from kvt.system.errors import UserError
from kvt.system.files import regular, require_file
from kvt.tasks import LanguageModelTask

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
USUAL = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""What must be as in GPT-2, by its name in config.json."""
PARTS = {  # of a block, by their names there
    "ln_1": "attention.norm",
    "attn.c_proj": "attention.layer.output",
    "ln_2": "feed_forward.norm",
    "mlp.c_fc": "feed_forward.layer.0",
    "mlp.c_proj": "feed_forward.layer.3",
}


def import_gpt2(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint saves, with weights and tokenizer of a folder that `save_pretrained` has written.

    The model, with attn=qkv, has the same logits. Training begins from its weights, with the optimiser of the task
    language_model.

    Args:
        folder: has config.json, model.safetensors and tokenizer.json.

    Raises:
        UserError: a file is missing or damaged, or the model differs from a GPT-2.
    """
    paths = [folder / name for name in ("config.json", "model.safetensors", "tokenizer.json")]
    for path in paths:
        require_file(path, "save model and tokenizer with save_pretrained")
    try:
        config = json.loads(paths[0].read_text(encoding="utf-8"))
        weights = load_weights(regular(paths[1]).read_bytes())
        named = {"dim": "n_embd", "depth": "n_layer", "heads": "n_head", "length": "n_positions"}
        sizes = {ours: int(config[theirs]) for ours, theirs in named.items()}
        length = sizes.pop("length")
    except Exception as error:  # a broken file raises nearly anything
        raise UserError(f"{folder}: not a GPT-2 of transformers, or a damaged one ({error!s:.100})") from error
    for name, value in USUAL.items():
        if (theirs := config.get(name, value)) != value:
            raise UserError(f"{paths[0]}: {name}={theirs!s:.100}, where GPT-2 has {value}: it has no equal here")
    if (activation := ACTIVATIONS.get(config.get("activation_function", "gelu_new"))) is None:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{paths[0]}: activation_function={config['activation_function']!s:.100}: expected {known}")
    expansion = (config.get("n_inner") or 4 * sizes["dim"]) / sizes["dim"]
    settings: dict[str, Any] = {"attn": "qkv", **sizes, "activation": activation, "expansion": expansion}
    data = {"tokenizer": read_tokenizer(paths[2]).definition, "length": length}
    task = LanguageModelTask(data, **settings)
    try:
        task.load_state_dict(_state({name.removeprefix("transformer."): part for name, part in weights.items()}, task))
    except (KeyError, RuntimeError) as error:
        reason = f"its weights do not fit {paths[0].name} and {paths[2].name} ({error!s:.200})"
        raise UserError(f"{paths[1]}: {reason}") from error
    usual = RunConfig.from_name("language_model")
    return {
        **{"state_dict": task.state_dict(), "epoch": 0, "global_step": 0, "metrics": {}},
        **{"model_class": "LanguageModelTask", "data_class": "TextTokens"},
        **{HPARAMS["model"]: {**task.hparams}, HPARAMS["data"]: data},
        **{"optimizer": usual.optimizer, "trainer": dict(usual.trainer)},
    }


def _state(theirs: Mapping[str, Tensor], task: LanguageModelTask) -> dict[str, Tensor]:
    """Return GPT-2's weights by our names; its linear layers are (in, out), and one has query, key and value."""
    state = {
        "model.embedding.tokens.weight": theirs["wte.weight"],
        "model.embedding.positions.weight": theirs["wpe.weight"],
        "model.head.weight": theirs["wte.weight"],
        "model.head.bias": torch.zeros(len(theirs["wte.weight"])),
    }
    for kind in ("weight", "bias"):
        state[f"model.norm.{kind}"] = theirs[f"ln_f.{kind}"]
        for layer in range(len(task.model.encoder)):
            parts = {ours: theirs[f"h.{layer}.{name}.{kind}"] for name, ours in PARTS.items()}
            roles = zip("qkv", theirs[f"h.{layer}.attn.c_attn.{kind}"].chunk(3, -1), strict=True)
            parts |= {f"attention.layer.projection.{role}": part for role, part in roles}
            for ours, part in parts.items():
                state[f"model.encoder.{layer}.{ours}.{kind}"] = part.T if part.ndim == 2 else part
    return {name: part.contiguous().float() for name, part in state.items()}
