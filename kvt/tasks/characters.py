"""Character generation: tiny Shakespeare, or any text (Borji 2023, §3.4)."""

from collections.abc import Mapping
from math import log
from typing import Any

import torch
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.texts import fingerprint, read_text, tiny_shakespeare
from kvt.data.vocabulary import Vocabulary, count_symbols
from kvt.models import CausalLM
from kvt.models.embedding import LearnedPositions
from kvt.system.errors import UserError, require_positive
from kvt.system.files import user_path
from kvt.tasks.base import adam
from kvt.tasks.datamodule import TaskData
from kvt.tasks.language import LanguageTask, windows


class Characters(TaskData):
    """Windows of a text, int64 (B, length), and the characters that follow each of theirs: "To be" and "o be,".

    The first part of the text trains, the rest validates; there is no test split. Training visits the windows that
    begin at every character, in random order. Validation predicts every character of its part once. The vocabulary is
    that of the whole text; training learns nothing else of the validation part.

    Args:
        text: your own UTF-8 file; default: tiny Shakespeare, 1,115,394 characters, 65 different ones.
        length: characters of a window: the longest context of the model.
        val_size: the fraction of the text to validate on.
    """

    drop_last = True
    path_settings = ("data_dir", "text")

    def __init__(
        self,
        text: str | None = None,
        length: int = 64,
        val_size: float = 0.1,
        batch_size: int = 64,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        require_positive(length=length, val_size=val_size)
        self.path, self.length, self.val_size = user_path(text) if text else None, length, val_size
        self.task_name = f"characters_{self.path.stem}" if self.path else "characters"
        self.text = read_text(self.path or tiny_shakespeare(self.data_dir))
        self.save_hyperparameters({"content": fingerprint(self.text)})  # identifies the data, wherever the file is
        train_size = len(self.text) - min(round(val_size * len(self.text)), len(self.text))
        self.parts = self.text[:train_size], self.text[train_size:]
        train, val = map(count_symbols, self.parts)  # most frequent first, those only in the validation part last
        self.spec = {"vocab": list(dict.fromkeys(train + val)), "length": length}

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        vocabulary = Vocabulary(self.spec["vocab"])
        train, val = (torch.tensor(vocabulary.encode(part)) for part in self.parts)
        if len(train) <= self.length or len(val) < 2:
            raise UserError(
                f"{self.path or 'the text'} has {len(self.text)} characters, too few for length={self.length} and "
                f"val_size={self.val_size}: choose a longer text or smaller ones"
            )
        return {
            "train": (train[:-1].unfold(0, self.length, 1), train[1:].unfold(0, self.length, 1)),  # overlapping views
            "val": windows(val, self.length),
        }


class CharacterTask(LanguageTask):
    """Predicts the next character: `CausalLM` with learned positions, Adam at a constant rate.

    Args:
        dropout: of attention weights, attention output and feed-forward networks.
    """

    metric_names = ("loss", "acc", "bpc")
    monitor = "val/loss"
    mode = "min"
    separator = ""
    configure_optimizers = adam

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 192,
        depth: int = 6,
        heads: int = 3,
        pos_dim: int = 20,
        dropout: float = 0.2,
        lr: float = 5e-4,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr)
        sizes = {"heads": heads, "pos_dim": pos_dim, "max_len": spec["length"]}
        style = {"bias": False, "dropout": dropout, "score": "model_scaled_dot", "per_head": True}
        make_attention = AttentionFactory(attn, attn_kwargs, called_with=("causal", "cache"), **sizes, **style)
        embedding = LearnedPositions(len(spec["vocab"]), dim, spec["length"])
        self.model = CausalLM(make_attention, embedding, depth=depth, dropout=dropout, feed_forward_dropout=dropout)

    def compute_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return loss in nats, accuracy, and bits per character."""
        metrics = super().compute_metrics(batch)
        return metrics | {"bpc": metrics["loss"] / log(2)}
