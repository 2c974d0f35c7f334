"""The scales at which all models are as large as that with QKV, and that with the follow-up's model."""

from pathlib import Path

import pytest
from torch.nn import GELU, Linear

import kvt
from kvt.attention.kernels import Dropout
from kvt.models.blocks import PreNorm, Residual
from kvt.run.load_checkpoint import read_checkpoint
from kvt.study.grid import read_grid
from kvt.tasks import Task
from tests.conftest import write_features

SHORT = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "enable_progress_bar": False}


def built(config: kvt.RunConfig) -> Task:
    classes, settings = config.classes, (config.model["init_args"], config.data["init_args"])
    data = classes["data"](**settings[1])
    return classes["model"](**{**settings[0], "spec": data.spec})


def test_all_lists_have_models_of_one_size():
    runs = read_grid("table2", "equal-parameters").runs
    assert {run.attention for run in runs} == {"qkv", "kv+pos", "kv"}
    sizes = {
        (run.task, run.value("heads"), run.attention): built(run.config).num_parameters for run in runs if run.seed == 0
    }
    for (task, heads, _), size in sizes.items():
        assert size == pytest.approx(sizes[task, heads, "qkv"], rel=0.005)


def test_the_model_of_the_follow_up_is_trained_as_there(in_tmp_dir):
    write_features(Path("features.pt"), classes=3, width=6)
    runs = read_grid("leak", "follow-up").runs
    assert len(runs) == 2 * 2 * 2 * 3 * 3  # positions, heads, widths, attentions, seeds
    config = runs[-1].config
    task = built(config)
    assert {type(module) for module in task.modules() if isinstance(module, Residual)} == {PreNorm}
    assert [type(layer) for layer in task.model.encoder[0].feed_forward.layer] == [Linear, GELU, Dropout, Linear]
    assert [block.feed_forward.layer[0].out_features for block in task.model.encoder] == [4 * 256] * 2
    assert {module.p for module in task.modules() if isinstance(module, Dropout)} == {0.0}
    kvt.train(config.changed(**SHORT), "run", test=False)
    saved = read_checkpoint("run/checkpoints/last.ckpt")
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-3
    assert saved["config"]["trainer"]["gradient_clip_val"] == 5
