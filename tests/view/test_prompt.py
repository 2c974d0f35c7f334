"""`kvt maps` draws what a model makes of a text of one's own, and says what an attention without a map needs."""

import sys

import pytest
import torch

from kvt.attention import QKV
from kvt.commands import main
from kvt.run.load_checkpoint import load
from kvt.tasks import TaskData
from kvt.view import maps
from tests.conftest import SMALL_LISTS


def drawn(monkeypatch, *words):
    """Return what the command draws, and its title."""
    found = []
    draw = maps.draw
    monkeypatch.setattr(maps, "draw", lambda *args: found.append(args) or draw(*args))
    monkeypatch.setattr(sys, "argv", ["kvt", "maps", *map(str, words)])
    main()
    return found[0]


@pytest.mark.parametrize(
    ("task", "prompt", "tokens"),
    [
        ("characters", "to be", ["t", "o", "␣", "b", "e"]),
        ("language_model", "to be", ["<|endoftext|>", "t", "o", "␣", "b", "e"]),
    ],
)
def test_a_text_of_ones_own_is_on_the_axes_and_needs_no_data(trained, in_tmp_dir, task, prompt, tokens, monkeypatch):
    last = trained(task)
    monkeypatch.setattr(TaskData, "setup", lambda *_: pytest.fail("data are read"))
    layers, _ = drawn(monkeypatch, "--ckpt_path", last, "--prompt", prompt)
    assert all(layer.labels == (tokens, tokens) for layer in layers)
    model = load(last)
    with maps.record_maps(model.model) as recorded, torch.no_grad():
        model(torch.tensor([model.vocabulary.begin(prompt)]))
    for layer, found in zip(layers, recorded, strict=True):
        assert layer.weights.equal(found.weights[0])


class Doubled(QKV):
    """Overrides `attend`, and says nothing of its map."""

    def attend(self, q, k, v, mask, causal, attend_self=True):
        return 2 * super().attend(q, k, v, mask, causal, attend_self)


class Mean(torch.nn.Module):
    """No attention of kvt's."""

    def __init__(self, dim, heads):
        super().__init__()
        self.values = torch.nn.Linear(dim, dim)

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return self.values(x).mean(1, keepdim=True).expand_as(x)


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("cls", [Doubled, Mean])
def test_an_attention_without_a_map_trains_and_kvt_maps_says_what_it_needs(experiment, says, mistake, cls):
    path = f"{__name__}.{cls.__name__}"
    best = experiment("reverse", *SMALL_LISTS, "--attn", path)["path"].parent / "checkpoints" / "best.ckpt"
    assert "attention_weights" in mistake(says, "maps", "--ckpt_path", str(best), "--attn", path)
