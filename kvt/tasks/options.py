"""The arguments that all tasks of kvt have: attention, blocks of the model and learning rate."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any, ClassVar

from torch import nn

from kvt.attention import ATTENTION, FORMULAS, AttentionFactory, AttentionSettings
from kvt.models.blocks import ACTIVATIONS, BlockStyle, Expansion
from kvt.models.embedding import attention_settings
from kvt.system.errors import UserError, argument_names, choose
from kvt.system.hardware import MetaParameters
from kvt.tasks.base import Task
from kvt.tasks.schedules import NEEDS, SCHEDULES


class BlockTask(Task):
    __doc__ = f"""A task whose model is made of transformer blocks.

    A subclass implements `make_model(spec, …)`, which returns the model. Parameters of `make_model` with a default
    become further arguments of the constructor, such as `smoothing`. `make_model` reads all other arguments from
    `self.options`, and passes `self.blocks` to the model: depth, dropout and the style of its blocks. Keywords of the
    class statement replace the defaults of the arguments:

        class ListTask(BlockTask, Classification, norm="post", warmup=5):
            def make_model(self, spec, smoothing: float = 0.0): …

    Args:
        spec: `TaskData.spec`, plain values that the model needs from the data. Commands of kvt pass this argument.
        attn: {FORMULAS}; or the import path of your own class, my_package.my_module.MyAttention. In the formulas, α is
            the scale of the score, g a gain, c a bias of the keys, and R a rotation. A hat marks a normalised vector.
        attn_kwargs: further arguments of the attention, such as kv_heads, score, rope, attend_self, pos, phase, rank,
            init.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        pos_dim: channels of the positional encoding of the attention map, for attentions with such an encoding.
        norm: position of the layer norm: pre, x + f(LN(x)), or post, LN(x + f(x)).
        activation: activation of the feed-forward networks: {", ".join(ACTIVATIONS)}.
        expansion: width of the feed-forward networks in multiples of the model width; 0: no feed-forward networks.
        match: name of an attention of kvt, such as qkv. kvt sets expansion so that the task has as many parameters as
            a task with attention `match` and without attn_kwargs, to within half a percent. The result notes expansion.
        dropout: dropout probability in residual branches and feed-forward networks.
        smoothing: label smoothing in training: share of the target's probability that is spread over all classes.
        lr: learning rate.
        warmup: number of training steps of linear warm-up; must be 0 for one_cycle and multistep.
        schedule: learning-rate schedule: {", ".join(name for name in SCHEDULES if name not in NEEDS)};
            in some tasks also {" or ".join(NEEDS)}.
    """

    own: ClassVar[Mapping[str, Parameter]] = {}  # arguments of `make_model` and of the constructor
    make_model: Callable[..., nn.Module]

    def __init__(
        self,
        spec: Mapping[str, Any],
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
        **own: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "spec", "own", "__class__")}
        given = {**{name: one.default for name, one in self.own.items()}, **given, **own}
        own = {name: given[name] for name in {**self.own, **own}}  # the values also get into the hyperparameters
        super().__init__(spec)
        self.options = given
        style = BlockStyle(norm, activation, self.matched(match, expansion))
        self.blocks: dict[str, Any] = {"depth": depth, "dropout": dropout, "style": style}
        self.model = self.make_model(spec, **own)
        self.set_rate(lr, warmup, schedule)

    def __init_subclass__(cls, **usual: Any) -> None:
        """Give a subclass a copy of `BlockTask.__init__` with other defaults and with the arguments of `make_model`."""
        super().__init_subclass__()
        init: Any = cls.__init__
        if init.__code__ is not BlockTask.__init__.__code__:
            return  # the subclass has its own constructor
        *arguments, _ = signature(BlockTask.__init__).parameters.values()
        usual = dict(zip([one.name for one in arguments[2:]], init.__defaults__, strict=True)) | usual
        if "make_model" in vars(cls):
            parameters = signature(cls.make_model).parameters.items()
            cls.own = {name: one for name, one in parameters if one.default is not Parameter.empty}
        shared = {one.name: one.replace(default=usual.get(one.name, one.default)) for one in arguments}
        shared |= cls.own
        defaults = tuple(shared[name].default for name in usual)
        made: Any = FunctionType(init.__code__, init.__globals__, "__init__", defaults, init.__closure__)
        made.__signature__ = Signature([*shared.values()])
        cls.__init__ = made  # type: ignore[method-assign]

    def attention(self, max_len: int, positions: str = "none", **settings: Any) -> AttentionFactory:
        """Return an `AttentionFactory` from the options of the task and the `settings` of its model."""
        own, given = self.options, attention_settings(self.options["attn"], positions, self.options["attn_kwargs"])
        sizes = {"heads": own["heads"], "pos_dim": own["pos_dim"], "max_len": max_len}
        return AttentionFactory(own["attn"], given, **{**sizes, **settings})

    def matched(self, match: str | None, expansion: Expansion) -> Expansion:
        """Set and return an expansion with which the task has as many parameters as with the attention `match`.

        If `match` is None, `expansion` is returned unchanged. Raises UserError if no expansion gives the number of
        parameters to within half a percent.
        """
        self.expansion = expansion
        if match is None:
            return expansion
        cls = type(self)
        own = {name: value for name, value in self.hparams.items() if name in argument_names(cls)}

        def count(**settings: Any) -> int:
            with MetaParameters():
                return int(cls(**{**own, "match": None, **settings}).num_parameters)

        choose("match", match, ATTENTION)  # no import path, since kvt imports nothing that a checkpoint names
        whole = {"attn_kwargs": None, "share_layers": 1}  # nothing is shared, except by the attention `match`
        wanted = count(attn=match, **{name: value for name, value in whole.items() if name in own})
        one, two = count(expansion=1), count(expansion=2)
        if not expansion or one == two:
            raise UserError(f"match={match}: the model has no feed-forward network to widen: set --expansion above 0")
        expansion = max(0, 1 + (wanted - one) / (two - one))
        found = count(expansion=expansion)
        numbers = f"{found:,} parameters, {wanted:,} with {match}"
        if abs(found / wanted - 1) > 0.005:
            raise UserError(f"match={match}: no width of the feed-forward networks fits; the nearest gives {numbers}")
        self.metric_notes["matched"] = f"expansion {expansion:.6g}: {numbers}"
        self.expansion = expansion
        return expansion
