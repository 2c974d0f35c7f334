"""Functions that initialise weights of a model. Weights that a function's docstring does not name are not changed."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from kvt.attention import Attention
from kvt.models.blocks import FeedForward
from kvt.models.causal_lm import CausalLM

Fill = Callable[[Tensor], Tensor]  # fills a tensor in place and returns it


def xavier_attention(model: nn.Module) -> None:
    """Initialise attention projections from U(±√(6 / (rows + columns))), their biases with 0, as Borji's code does."""
    for layer in _attentions(model):
        for linear in (*layer.projection.values(), layer.output):
            _fill(linear, nn.init.xavier_uniform_)
        layer.after_initialisation()


def xavier(model: nn.Module) -> None:
    """Initialise linear weights and embeddings from U(±√(6 / (rows + columns))), as Borji's code does."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.xavier_uniform_(module.weight)
    for layer in _attentions(model):
        layer.after_initialisation()


def gpt2(model: CausalLM) -> None:
    """As in GPT-2 (Radford et al. 2019, §2.3), initialise a `CausalLM` that has tied=True.

    Embeddings and the matrices of attention projections and feed-forward networks are drawn from N(0, 0.02²), but the
    last matrix of each residual branch from N(0, 0.02² / (2 · layers)). Biases of these layers and of the head are 0.
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
