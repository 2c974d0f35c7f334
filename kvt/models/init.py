"""Initial weights: one function for each style. What is not named keeps torch's."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from kvt.attention import Attention
from kvt.models.blocks import FeedForward
from kvt.models.causal_lm import CausalLM

Fill = Callable[[Tensor], Tensor]  # in place


def xavier_attention(model: nn.Module) -> None:
    """Matrices of attention from U(±√(6 / (rows + columns))), its biases 0, as in the paper's notebook of lists."""
    for layer in _attentions(model):
        for linear in (*layer.projection.values(), layer.output):
            _fill(linear, nn.init.xavier_uniform_)
        layer.after_initialisation()


def xavier(model: nn.Module) -> None:
    """All matrices and embeddings from U(±√(6 / (rows + columns))), as in the paper's notebook of translation."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.xavier_uniform_(module.weight)
    for layer in _attentions(model):
        layer.after_initialisation()


def gpt2(model: CausalLM) -> None:
    """Matrices from N(0, 0.02²), those before a residual sum smaller by √(number of sums), and biases 0.

    That is GPT-2 (Radford et al. 2019, §2.3).
    """
    usual, last = (partial(nn.init.normal_, std=0.02 / by**0.5) for by in (1, 2 * len(model.encoder)))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            usual(module.weight)
        if isinstance(module, FeedForward):
            _fill(module[0], usual)
            _fill(module[-1], last)
        if isinstance(module, Attention):
            for projection in module.projection.values():
                _fill(projection, usual)
            _fill(module.output, last)
            module.after_initialisation()
    nn.init.zeros_(model.head.bias)


def _attentions(model: nn.Module) -> Iterator[Attention]:
    return (module for module in model.modules() if isinstance(module, Attention))


def _fill(linear: nn.Module, fill: Fill) -> None:
    assert isinstance(linear, nn.Linear)
    fill(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
