"""A configuration and its views: flat settings, a name, the words that ask for it, what differs from another."""

from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import yaml

from kvt import RunConfig
from kvt.system import UserError

DECAYING = {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}


@pytest.fixture
def config():
    return RunConfig.from_name("cifar10").changed(attn="k", attn_kwargs={"kv_heads": 1}, optimizer=DECAYING, seed=3)


def test_its_views_are_the_whole_of_it(config):
    again = RunConfig.from_flat(config.flat)
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


def optimizer(**settings):
    return {"optimizer": {**DECAYING, "init_args": settings}}


class Named(StrEnum):
    SHARED = "kv"


@pytest.mark.parametrize(
    ("strange", "same"),
    [
        ({"lr": np.float64(0.25), "heads": np.int64(2)}, {"lr": 0.25, "heads": 2}),
        ({"attn_kwargs": {"rope": np.float64(0.5)}}, {"attn_kwargs": {"rope": 0.5}}),
        ({"seed": np.int64(3), "threads": np.int32(1)}, {"seed": 3, "threads": 1}),
        ({"attn": Named.SHARED}, {"attn": "kv"}),
        (optimizer(betas=(np.float64(0.5), 0.9)), optimizer(betas=[0.5, 0.9])),
        ({"default_root_dir": Path("here")}, {"default_root_dir": "here"}),
    ],
    ids=str,
)
def test_settings_become_plain_data(config, strange, same):
    found = config.changed(**strange)
    assert found.as_dict() == config.changed(**same).as_dict()
    assert yaml.safe_load(yaml.safe_dump(found.as_dict())) == found.as_dict()


@pytest.mark.parametrize("setting", [{"lr": "fast"}, {"dims": 3}], ids=str)
def test_an_unknown_setting_and_a_wrong_type_are_refused(config, setting):
    (name,) = setting
    with pytest.raises(UserError, match=name):
        config.changed(**setting)
