"""Character generation: tiny Shakespeare, or any text (Borji 2023, §3.4)."""

from collections.abc import Mapping
from functools import cached_property
from math import log
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.texts import fingerprint, read_text, tiny_shakespeare
from kvt.data.vocabulary import Vocabulary, count_symbols
from kvt.models import CausalLM
from kvt.models.embedding import LearnedPositions
from kvt.system.errors import UserError, require_positive
from kvt.system.files import user_path
from kvt.tasks.base import adam
from kvt.tasks.datamodule import Spec, TaskData
from kvt.tasks.language import LanguageTask, windows


class Characters(TaskData):
    """The characters of a text: int64 (B, length), and those one further on.

    The first part of the text trains, the rest validates; there is no test split. Training visits the windows that
    begin at every character, in random order; validation the whole rest, each character once. So that there is a
    number for each of these, the alphabet is that of the whole text: it is all that training knows of the rest.

    Args:
        text: a UTF-8 file of your own; default: tiny Shakespeare, 1,115,394 characters, 65 different ones.
        length: characters of a window: the longest context that the model sees.
        val_size: the part of the text to validate on.
        batch_size: windows of a batch on one process.
        seed: of the order of windows and all randomness of training.
        data_dir: the folder where data sets lie; default: $KVT_DATA_DIR, else ./data.

    Raises:
        UserError: a file that is missing, not UTF-8, or too short for a window.
    """

    drop_last = True
    places = ("data_dir", "text")

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
        self.save_hyperparameters({"content": fingerprint(self._text)})  # wherever the file lies

    @property
    def task_name(self) -> str:
        """ "characters", and the name of the user's own file without its suffix."""
        return f"characters_{self.path.stem}" if self.path else "characters"

    @property
    def spec(self) -> Spec:
        """The characters, and the length of a window."""
        return {"vocab": self._vocab, "length": self.length}

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        """Cuts the text in two."""
        vocabulary = Vocabulary(self._vocab)
        train, val = (torch.tensor(vocabulary.encode(part)) for part in self._parts)
        if len(train) <= self.length or len(val) < 2:
            raise UserError(
                f"{self.path or 'the text'} has {len(self._text)} characters, too few for length={self.length} and "
                f"val_size={self.val_size}: choose a longer text or smaller ones"
            )
        return {
            "train": (train[:-1].unfold(0, self.length, 1), train[1:].unfold(0, self.length, 1)),  # no copies
            "val": windows(val, self.length),
        }

    @cached_property
    def _text(self) -> str:
        return read_text(self.path or tiny_shakespeare(self.data_dir))

    @property
    def _parts(self) -> tuple[str, str]:
        """What trains and what validates."""
        train = len(self._text) - min(round(self.val_size * len(self._text)), len(self._text))
        return self._text[:train], self._text[train:]

    @cached_property
    def _vocab(self) -> list[str]:
        """Numbered as training alone has it; what only the rest has comes behind."""
        train, rest = map(count_symbols, self._parts)
        return list(dict.fromkeys(train + rest))


class CharacterTask(LanguageTask):
    """Predicts the next character: `CausalLM` with learned positions, Adam at a constant rate.

    Args:
        spec: of the data; the command line fills it in.
        attn: qkv, kv, kv+pos, qkv+pos, q-kv, k, k+pos, identity, or the import path of a class of your own,
            my_package.my_module.MyAttention.
        attn_kwargs: settings of that attention, such as kv_heads, score, pos.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        pos_dim: channels of the map's positional encoding, for the attentions that have one: here one a head.
        dropout: of attention weights, attention output and feed-forward networks.
        lr: Adam's learning rate.
    """

    metric_names = ("loss", "acc", "bpc")
    monitor = "val/loss"
    mode = "min"
    separator = ""

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
        length = spec["length"]
        make_attention = AttentionFactory(
            attn,
            attn_kwargs,
            called_with=("causal", "cache"),
            heads=heads,
            bias=False,
            dropout=dropout,
            score="model_scaled_dot",
            pos_dim=pos_dim,
            per_head=True,
            max_len=length,
        )
        self.model = CausalLM(
            make_attention,
            LearnedPositions(len(spec["vocab"]), dim, length),
            depth=depth,
            dropout=dropout,
            feed_forward_dropout=dropout,
        )

    def compute_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss in nats, accuracy, and bits a character."""
        measured = super().compute_metrics(batch)
        return measured | {"bpc": measured["loss"] / log(2)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam."""
        return adam(self)
