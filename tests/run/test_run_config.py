"""A configuration and its views: flat settings, a name, the words that ask for it, what differs from another."""

from dataclasses import replace

import pytest

from kvt import RunConfig
from kvt.cli.flags import split_flags
from kvt.cli.lightning_cli import read_words
from kvt.system.errors import UserError

DECAYING = {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}


@pytest.fixture(params=["reverse", "cifar10", "translation"])
def config(request):
    return RunConfig.from_name(request.param).changed(attn="k", attn_kwargs={"kv_heads": 1}, optimizer=DECAYING, seed=3)


def test_its_views_are_the_whole_of_it(config):
    for again in (RunConfig.from_flat(config.flat), read_words(*split_flags(["fit", *config.words])).config):
        assert again.flat == config.flat
        assert again.name == config.name
        assert config.differences(again) == []


def test_what_differs_is_named_with_both_values(config):
    other = config.changed(lr=0.5, seed=4, max_epochs=7)
    epochs = config.trainer["max_epochs"]
    found = [("model.lr", config.model["init_args"]["lr"], 0.5), ("seed", 3, 4), ("trainer.max_epochs", epochs, 7)]
    assert config.differences(other) == found
    assert other.name != config.name


def test_a_whole_number_is_the_same_setting_with_a_point(config):
    whole, pointed = (config.merged({"trainer": {"gradient_clip_val": clip}}) for clip in (5, 5.0))
    assert whole.name == pointed.name
    assert whole.name != config.merged({"trainer": {"gradient_clip_val": 5.5}}).name


@pytest.mark.parametrize(
    "setting", ["limit_train_batches", "limit_val_batches", "overfit_batches", "val_check_interval"]
)
def test_one_batch_is_another_setting_than_all_of_them(config, setting):
    one, all_of_them = (config.merged({"trainer": {setting: number}}) for number in (1, 1.0))
    assert one.name != all_of_them.name


def test_places_and_output_are_no_part_of_it(config):
    elsewhere = config.merged({"data": {"data_dir": "/elsewhere"}, "trainer": {"devices": 2, "logger": "csv"}})
    assert (elsewhere.name, elsewhere.flat) == (config.name, config.flat)


def test_a_setting_that_is_newer_than_another_has_its_default_there(config):
    """And nothing of the other is imported."""
    default = config.changed(pos_dim=config.defaults["model.pos_dim"])
    without = {name: value for name, value in default.model["init_args"].items() if name != "pos_dim"}
    assert default.differences(replace(default, model={**default.model, "init_args": without})) == []
    stranger = replace(config, model={**config.model, "class_path": "nowhere.Task"})
    assert config.differences(stranger) == [("model.class", config.model["class_path"], "nowhere.Task")]


@pytest.mark.parametrize(("setting", "said"), [({"lr": float("nan")}, "--lr=nan"), ({"dim": None}, "dim=None")])
def test_what_a_run_would_refuse_is_refused_at_once(config, setting, said):
    with pytest.raises(UserError, match=said):
        config.changed(**setting)
