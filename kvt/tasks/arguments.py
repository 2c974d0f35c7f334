"""Help texts of the constructor arguments that all tasks share."""


class ModelArguments:
    """Documents the arguments that all tasks share; jsonargparse shows base classes' texts where a task has none.

    The signatures stay in the tasks, because each task has defaults of its own.

    Args:
        spec: what the model must know of the data, `TaskData.spec`; the command line passes it on.
        attn: qkv, kv, kv+pos, qkv+pos, q-kv, k, k+pos, identity, or the import path of your own class,
            my_package.my_module.MyAttention.
        attn_kwargs: further arguments of that attention, such as kv_heads, score, pos.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        pos_dim: channels of the positional encoding of the attention map, for attentions that have one.
        lr: Adam's learning rate.
        warmup: steps of linear warm-up.
    """
