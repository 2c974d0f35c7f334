"""Imports a GPT-2 model, saved by Hugging Face's transformers or nanoGPT, as a `LanguageModelTask` checkpoint."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvt.data.tensor_files import read_tensors
from kvt.data.tokens import BytePairs, read_tokenizer
from kvt.run.checkpoint_files import HPARAMS
from kvt.run.config import RunConfig
from kvt.system.console import say
from kvt.system.errors import UserError
from kvt.system.files import regular, require_file
from kvt.system.quoting import printable
from kvt.tasks import LanguageModelTask

NANOGPT = "ckpt.pt"
WEIGHTS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "model.safetensors": load_file,
    "pytorch_model.bin": read_tensors,
}
"""A dict from file name to the function that reads weights from it, and from shards that <name>.index.json lists."""
ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    **{"relu": "relu", "tanh": "tanh"},
}
USUAL = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}
"""Settings that config.json must have with these values, which are GPT-2's defaults."""
PARTS = {  # maps the name of a block's module in GPT-2 to the name in kvt
    "ln_1": ["attention.norm"],
    "attn.c_attn": [f"attention.layer.projection.{role}" for role in "qkv"],
    "attn.c_proj": ["attention.layer.output"],
    "ln_2": ["feed_forward.norm"],
    "mlp.c_fc": ["feed_forward.layer.0"],
    "mlp.c_proj": ["feed_forward.layer.3"],
}
MASK = re.compile(r"(_orig_mod\.)?(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # constant causal masks in older files
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def import_gpt2(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint with the weights and tokenizer in a folder.

    The new model has attn=qkv and the same logits as GPT-2. Embedding rows without a token, and added tokens without an
    embedding row, are left out. Training from the checkpoint uses the optimiser of the task language_model. GPT-2's
    dropout rate for residual branches, `resid_pdrop`, becomes the rate of all dropout.

    Args:
        folder: folder with tokenizer.json and a model. The model is the files of `save_pretrained`: config.json, and
            model.safetensors or pytorch_model.bin or shards of them. Or it is nanoGPT's ckpt.pt, with an exact GELU.

    Raises:
        UserError: a file is missing or damaged, the model is not a GPT-2, or the file has a tensor without a use.
    """
    config, weights, source = _read(folder)
    for name, value in USUAL.items():
        if (theirs := config.get(name, value)) != value:
            raise UserError(f"{source}: {name}={theirs!s:.100}, where GPT-2 has {value}: kvt has no such model")
    if (activation := ACTIVATIONS.get(config.get("activation_function", "gelu_new"))) is None:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{source}: activation_function={config['activation_function']!s:.100}: expected {known}")
    try:
        named = {"dim": "n_embd", "depth": "n_layer", "heads": "n_head", "length": "n_positions"}
        sizes = {ours: int(config[theirs]) for ours, theirs in named.items()}
        length, rows = sizes.pop("length"), len(weights["wte.weight"])
    except Exception as error:  # a damaged file may raise any exception
        raise _damaged(folder, error) from error
    require_file(folder / "tokenizer.json", "save the model's tokenizer there with save_pretrained")
    tokens = _tokens(folder / "tokenizer.json", rows, config.get("eos_token_id"))
    if (count := len(tokens.pieces)) > rows:
        raise UserError(f"{folder}: tokenizer.json has {count} tokens, the embedding {rows} rows: use the model's own")
    if count < rows:
        say(printable(f"{folder}: left out are rows {count} to {rows - 1} of the embedding, which no token has"))
    expansion = (config.get("n_inner") or 4 * sizes["dim"]) / sizes["dim"]
    settings: dict[str, Any] = {"attn": "qkv", **sizes, "activation": activation, "expansion": expansion}
    settings["dropout"] = config.get("resid_pdrop", 0.1)
    data = {"tokenizer": tokens.definition, "length": length}
    task = LanguageModelTask(data, **settings)
    try:
        state = _state(weights, folder, sizes["depth"], config.get("bias", True))
    except KeyError as error:
        raise UserError(f"{folder}: its weights do not fit {source.name}: {error} is missing") from error
    for name in ("model.embedding.tokens.weight", "model.head.weight", "model.head.bias"):
        state[name] = state[name][:count]
    for name, weight in task.state_dict().items():
        if state[name].shape != weight.shape:
            shapes = f"{name} would be {tuple(state[name].shape)}, not {tuple(weight.shape)}"
            raise UserError(f"{folder}: its weights do not fit {source.name}: {shapes}")
    task.load_state_dict(state)
    usual = RunConfig.from_name("language_model")
    return {
        **{"state_dict": task.state_dict(), "epoch": 0, "global_step": 0, "metrics": {}},
        **{"model_class": "LanguageModelTask", "data_class": "TextTokens"},
        **{HPARAMS["model"]: {**task.hparams}, HPARAMS["data"]: data},
        **{"optimizer": usual.optimizer, "trainer": dict(usual.trainer)},
    }


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """Return the settings, the weights with the names and shapes of transformers, and the path of the settings.

    Raises UserError if a file is missing or damaged, or if a weight is quantised.
    """
    is_nano = (folder / NANOGPT).is_file()
    source = folder / (NANOGPT if is_nano else "config.json")
    require_file(source, "save model and tokenizer with save_pretrained")
    try:
        if is_nano:
            saved = read_tensors(source)
            config = {"n_positions": saved["model_args"]["block_size"], "activation_function": "gelu"}
            config |= {"resid_pdrop": saved["model_args"].get("dropout", 0.0), **saved["model_args"]}
            weights = {name.removeprefix("_orig_mod."): part for name, part in saved["model"].items()}
        else:
            config, weights = {**json.loads(source.read_text(encoding="utf-8"))}, {}
            for path, read in _files(folder):
                require_file(path, "copy the whole folder")
                weights |= read(regular(path))
        for name, part in weights.items():
            if part.dtype not in DTYPES and not MASK.fullmatch(name):
                raise UserError(f"{folder}: {name} is {part.dtype}: save the model in float32, not quantised")
    except UserError:
        raise
    except Exception as error:  # a damaged file may raise any exception
        raise _damaged(folder, error) from error
    plain = {name.removeprefix("transformer."): part for name, part in weights.items()}
    if is_nano:  # linear weights are (out, in) in nanoGPT and (in, out) in transformers
        plain = {name: part.T if part.ndim == 2 and name.startswith("h.") else part for name, part in plain.items()}
    return config, plain, source


def _files(folder: Path) -> list[tuple[Path, Callable[[Path], dict[str, Tensor]]]]:
    """Return a pair (path, reader) for each file of weights; raise UserError if the folder has no such file."""
    for name, read in WEIGHTS.items():
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [(folder / name, read)]
        if index.is_file():
            shards = {*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            return [(folder / Path(shard).name, read) for shard in sorted(shards)]
    raise UserError(f"{folder} has no weights: expected {', '.join(WEIGHTS)}, shards of them, or nanoGPT's {NANOGPT}")


def _damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder}: not a GPT-2 of transformers or nanoGPT, or a damaged one ({error!r:.100})")


def _tokens(path: Path, rows: int, end: Any) -> BytePairs:
    """Return a tokenizer without added tokens that have no embedding row. `end` is the id of the end token."""
    tokens = read_tokenizer(path)
    content = json.loads(tokens.definition)
    added = content.get("added_tokens") or []
    kept = [token for token in added if token["id"] < rows]
    changed = json.dumps({**content, "added_tokens": kept}) if len(kept) < len(added) else tokens.definition
    return BytePairs(changed, str(path), tokens.tokenizer.id_to_token(end) if isinstance(end, int) else None)


def _state(theirs: dict[str, Tensor], folder: Path, layers: int, has_biases: bool) -> dict[str, Tensor]:
    """Return GPT-2's weights, `theirs`, under kvt's names; GPT-2's linear weights, (in, out), are transposed.

    Raises KeyError if a weight is missing, and UserError if a remaining weight is neither used nor redundant.
    """
    left = dict(theirs)
    table = left.pop("wte.weight")
    state = {"model.embedding.tokens.weight": table, "model.embedding.positions.weight": left.pop("wpe.weight")}
    state |= {"model.head.weight": table, "model.head.bias": torch.zeros(len(table))}
    modules = {"ln_f": ["model.norm"]}
    for layer in range(layers):
        for name, ours in PARTS.items():
            modules[f"h.{layer}.{name}"] = [f"model.encoder.{layer}.{part}" for part in ours]
    for name, ours in modules.items():
        weight = left.pop(f"{name}.weight")
        bias = left.pop(f"{name}.bias") if has_biases else torch.zeros(weight.shape[-1])
        for kind, whole in (("weight", weight), ("bias", bias)):
            for part, own in zip(whole.chunk(len(ours), -1), ours, strict=True):
                state[f"{own}.{kind}"] = part.T if part.ndim == 2 else part
    for name, part in left.items():
        if not MASK.fullmatch(name) and not (name == "lm_head.weight" and torch.equal(part, table)):
            own = "kvt's output layer is the embedding"
            remedy = own if name == "lm_head.weight" else "merge adapters, if it has any"
            raise UserError(f"{folder}: a GPT-2 of {layers} layers has no other tensor {name}: {remedy}")
    return {name: part.contiguous().float() for name, part in state.items()}
