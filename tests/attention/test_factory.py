"""Layers from a name or a class, and the errors where there is none."""

import pytest
import torch

from kvt.attention import QKV, AttentionFactory

SETTING = {"heads": 2, "max_len": 8, "pos_dim": 10, "bias": False}
MINE = """
from torch import nn


class Mean(nn.Module):
    def __init__(self, dim, heads, *, slope=1.0):
        super().__init__()
        self.heads, self.slope, self.value = heads, slope, nn.Linear(dim, dim)

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return self.slope * self.value(x).mean(1, keepdim=True).expand_as(x)


number = 1
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_users_settings_override_the_models():
    assert AttentionFactory("kv+pos", {"pos_dim": 20}, **SETTING)(8).to_logit.in_features == 20


def test_a_users_class_gets_the_settings_it_takes(modules):
    (modules / "users_mean.py").write_text(MINE)
    layer = AttentionFactory("users_mean.Mean", {"slope": 2.0}, **SETTING)(8)
    assert (layer.heads, layer.slope) == (2, 2.0)
    assert layer(torch.zeros(1, 3, 8)).shape == (1, 3, 8)


@pytest.mark.parametrize("line", ["import not_installed_here", "from users_broken import not_a_thing"])
def test_an_import_error_inside_the_users_module_keeps_its_traceback(modules, line):
    (modules / "users_broken.py").write_text(line)
    with pytest.raises(ImportError, match="not_"):
        AttentionFactory("users_broken.Mean")


def test_cross_attention_has_the_models_settings_but_not_the_users():
    cross = AttentionFactory("kv+pos", {"pos": "learned", "bias": True}, **SETTING).cross(8)
    assert type(cross) is QKV
    assert cross.heads == 2
    assert cross.projection["q"].bias is None
