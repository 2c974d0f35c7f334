"""The arguments that all tasks of kvt have: attention, blocks of the model and learning rate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning as L
from torch import nn

from kvt.attention import ATTENTION, FORMULAS, AttentionFactory, AttentionSettings
from kvt.models.blocks import ACTIVATIONS, BlockStyle, Expansion
from kvt.models.embedding import attention_settings
from kvt.system import UserError, arguments, require_choice
from kvt.tasks.base import Spec, Task
from kvt.tasks.schedules import NEEDS, SCHEDULES
from kvt.tune import MetaParameters


class BlockTask(Task):
    __doc__ = f"""A task whose model is made of transformer blocks.

    A subclass implements `make_model`. Its constructor passes **kwargs to `super().__init__`, then calls `build`.

    Args:
        spec: `TaskData.spec`, plain values that the model needs from the data; default: `spec` of the Trainer's data.
        attn: {FORMULAS}; or the import path of your own class, my_package.my_module.MyAttention. In the formulas, α is
            the scale of the score, g a gain, c a bias of the keys, R a rotation, C latent vectors, U and W linear
            maps. A hat marks a normalised vector.
        attn_kwargs: arguments of the attention, such as kv_heads, score, rope, attend_self, pos, phase, rank, init.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        pos_dim: number of channels of the positional encoding of the attention map, for attentions such as kv+pos.
        norm: position of the layer norm: pre, x + f(LN(x)), or post, LN(x + f(x)).
        activation: activation of the feed-forward networks: {", ".join(ACTIVATIONS)}.
        expansion: width of the feed-forward networks in multiples of the model width; 0: no feed-forward networks.
        match: attention of kvt, such as qkv. kvt then sets expansion so that the task has as many parameters, to within
            0.5 %, as with the attention `match` and no attn_kwargs or shared layers. result.json notes the expansion.
        dropout: dropout probability in residual branches and feed-forward networks.
        smoothing: label smoothing in training: share of the target's probability that is spread over all classes.
        lr: learning rate.
        warmup: number of training steps of linear warm-up; must be 0 for one_cycle and multistep, and above 0 for
            inverse_sqrt and noam.
        schedule: learning-rate schedule: {", ".join(name for name in SCHEDULES if name not in NEEDS)};
            in some tasks also {" or ".join(NEEDS)}.
    """

    def __init__(
        self,
        spec: Spec | None = None,
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 64,
        depth: int = 2,
        heads: int = 4,
        pos_dim: int = 10,
        norm: str = "pre",
        activation: str = "relu",
        expansion: Expansion = 4,
        match: str | None = None,
        dropout: float = 0.1,
        lr: float = 1e-3,
        warmup: int = 0,
        schedule: str = "constant",
    ) -> None:
        super().__init__(lr=lr, warmup=warmup, schedule=schedule)
        sizes = {"dim": dim, "heads": heads, "pos_dim": pos_dim}
        self.options: dict[str, Any] = {"attn": attn, "attn_kwargs": attn_kwargs, **sizes, "dropout": dropout}
        style = BlockStyle(norm, activation, expansion)
        self.blocks: dict[str, Any] = {"depth": depth, "dropout": dropout, "style": style}
        self.match, self.expansion = match, expansion
        self.build(spec)

    def configure_callbacks(self) -> list[L.Callback]:
        """Make the model with `spec` of the Trainer's data, if the constructor got no `spec`.

        This hook runs before callbacks that copy the model. Raises UserError if the Trainer has no data with a `spec`.
        """
        if not hasattr(self, "model"):
            self.hparams["spec"] = getattr(getattr(self.trainer, "datamodule", None), "spec", None)
            if self.hparams["spec"] is None:
                raise UserError(f"{type(self).__name__} needs spec=data.spec, or a Trainer with the data module of kvt")
            self.build(self.hparams["spec"])
        return []

    def build(self, spec: Mapping[str, Any] | None) -> None:
        """Unless `spec` is None, make the model for data with this `spec`; with `match`, first set `expansion`."""
        if spec is None:
            return
        if self.match is not None:
            self.expansion = self.matched(self.match)
            self.blocks["style"] = replace(self.blocks["style"], expansion=self.expansion)
        self.model = self.make_model(spec)

    def make_model(self, spec: Mapping[str, Any]) -> nn.Module:
        """Return the model, made with `self.attention(…)`, `self.blocks` (depth, dropout, style) and `self.options`."""
        raise NotImplementedError

    def attention(self, max_len: int, positions: str = "none", **settings: Any) -> AttentionFactory:
        """Return a factory of attention layers with `settings`, which the user's `attn_kwargs` override.

        `attention_settings` explains `positions`.
        """
        own, given = self.options, attention_settings(self.options["attn"], positions, self.options["attn_kwargs"])
        sizes = {"heads": own["heads"], "pos_dim": own["pos_dim"], "max_len": max_len}
        return AttentionFactory(own["attn"], given, **{**sizes, **settings})

    def matched(self, match: str) -> float:
        """Return the expansion that gives as many parameters, ±0.5 %, as attention `match`; UserError if none does."""
        cls = type(self)
        own = {name: value for name, value in self.hparams.items() if name in arguments(cls)}

        def count(**settings: Any) -> int:
            with MetaParameters():
                return int(cls(**{**own, "match": None, **settings}).num_parameters)

        require_choice("match", match, ATTENTION)  # no import path, since kvt imports nothing that a checkpoint names
        whole = {"attn_kwargs": None, "share_layers": 1}  # default arguments of the attention, and no shared layers
        wanted = count(attn=match, **{name: value for name, value in whole.items() if name in own})
        one, two = count(expansion=1), count(expansion=2)
        if not self.expansion or one == two:
            raise UserError(f"match={match}: the model has no feed-forward network to widen: set expansion above 0")
        expansion = max(0, 1 + (wanted - one) / (two - one))
        found = count(expansion=expansion)
        numbers = f"{found:,} parameters, {wanted:,} with {match}"
        if abs(found / wanted - 1) > 0.005:
            raise UserError(f"match={match}: no width of the feed-forward networks fits; the nearest gives {numbers}")
        self.metric_notes["matched"] = f"expansion {expansion:.6g}: {numbers}"
        return expansion
