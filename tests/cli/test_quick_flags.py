"""Short flags stand for full flags."""

from inspect import signature

import pytest
from lightning import Trainer

from kvt.run.config import read_configs
from kvt.run.parser import TRAINER_DEFAULTS, parse_config
from kvt.run.sections import TRAINER


def test_defaults_of_the_trainer_are_lightnings():
    usual = {name: parameter.default for name, parameter in signature(Trainer).parameters.items()} | TRAINER_DEFAULTS
    assert {name: usual[name.removeprefix("trainer.")] for name in TRAINER} == TRAINER


@pytest.mark.parametrize(
    ("config", "word", "more"),
    [
        ("reverse", "logger+=csv", []),
        ("reverse", "plugins+=AsyncCheckpointIO", []),
        ("reverse", "callbacks+=Timer", ["callbacks.duration=00:00:01:00", "callbacks.init_args.verbose=false"]),
        ("cifar10", "milestones+=5", []),
    ],
)
def test_a_bare_name_adds_to_a_list_as_its_full_name(config, word, more):
    section = "model" if word.startswith("milestones") else "trainer"
    argvs = [[f"--{full}{one}" for one in [word, *more]] for full in ("", f"{section}.")]
    bare, full = (parse_config(read_configs([config]), words) for words in argvs)
    name, _, added = word.partition("+=")
    assert added in str({**bare["trainer"], **bare["model"]["init_args"]}[name])
    assert bare == full
