"""`kvt convert` and `kvt import`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvt.system.console import quick_imports, tell
from kvt.system.errors import UserError
from kvt.system.files import atomically, require_writable, user_path
from kvt.system.quoting import printable

NOTHING: dict[str, Any] = {}


def convert(
    *runs: str,
    attn: str,
    how: str = "mean",
    attn_kwargs: dict[str, Any] = NOTHING,
    out: str | None = None,
    data_dir: str | None = None,
    text: str | None = None,
) -> None:
    """Give a trained model another attention: can it drop a projection that it was trained with?

    The new checkpoint is measured by kvt validate, and trained further by kvt fit, as any other; with --teacher
    and the old run it learns from that, too:

        kvt convert lightning_logs/characters/qkv/version_0 --attn q-kv --how keep_v
        kvt validate --ckpt_path q-kv.ckpt
        kvt fit --ckpt_path q-kv.ckpt --max_steps 1200

    Where the projections that become one were equal, or all are separated, the model computes the same as before.
    Steps go on from those of the run, so that --max_steps counts both, as do the moments of weights that stay.

    Args:
        runs: a run's folder, whose best checkpoint is taken, or a checkpoint.
        attn: the new attention: qkv, kv, kv+phase, q-kv, k or k+phase; the run's must be qkv, kv, q-kv or k.
        how: what a shared projection is. keep_k: that of the key. keep_v: that of the value. mean: the mean of those
            that become one. least_squares: a fit, from the mean on, of each layer's output for 64 training examples of
            the run, in 50 steps of L-BFGS.
        attn_kwargs: arguments of the new attention, as --attn_kwargs.kv_heads 1, a head of which is the mean of its
            group, or --attn_kwargs.attend_self false; others stay.
        out: the new checkpoint; default: the attention's name and .ckpt, here.
        data_dir: where the data of least_squares lie; default: where the run found them.
        text: where the text of least_squares lies; default: where the run found it.
    """
    with quick_imports():
        from kvt.exchange.convert import convert as converted
        from kvt.run.folder import run_of_checkpoint
        from kvt.run.load_checkpoint import Checkpoint

    if len(runs) != 1:
        raise UserError("kvt convert takes one run: pass its folder, or a checkpoint")
    path = require_writable(user_path(out or f"{attn}.ckpt"))
    if run := run_of_checkpoint(path):
        raise UserError(f"--out {path}: the checkpoints of {run} are its own: choose another folder")
    places = {name: place for name, place in {"data_dir": data_dir, "text": text}.items() if place is not None}
    saved = converted(Checkpoint(user_path(runs[0]), flag=""), attn, how, attn_kwargs, places)
    _save(saved, path)


def import_model(*folders: str, out: str | None = None) -> None:
    """Turn a GPT-2 of Hugging Face's transformers, or of nanoGPT, into a checkpoint of language_model with attn=qkv.

    It has the same logits, and its own tokens:

        kvt import my_gpt2 --out gpt2.ckpt
        kvt validate --ckpt_path gpt2.ckpt --text my_text.txt
        kvt generate --ckpt_path gpt2.ckpt --prompt "To be"
        kvt convert gpt2.ckpt --attn q-kv --how least_squares --text my_text.txt
        kvt fit --ckpt_path gpt2.ckpt --text my_text.txt --max_steps 1000 --lr 1e-4

    Args:
        folders: one, in which save_pretrained has put the model and its tokenizer; or with ckpt.pt, which nanoGPT's
            train.py has written (its GELU is exact, as since May 2023), and the tokenizer.json of its tokens.
        out: the checkpoint; default: the folder's name and .ckpt, here.
    """
    with quick_imports():
        from kvt.exchange.import_gpt2 import import_gpt2

    if len(folders) != 1:
        raise UserError("kvt import takes one folder, of a GPT-2 and its tokenizer.json")
    folder = user_path(folders[0])
    path = require_writable(user_path(out or f"{folder.resolve().name}.ckpt"))
    _save(import_gpt2(folder), path)


def _save(saved: Mapping[str, Any], path: Path) -> None:
    import torch

    with atomically(path) as part, part.open("wb") as file:
        torch.save(saved, file)
    tell(printable(path))
