"""Short flags stand for full flags, and what --print_config prints is the configuration that it was printed for."""

from inspect import signature
from pathlib import Path

import pytest
from lightning import Trainer

from kvt.commands import run_words
from kvt.run.cli import TRAINER_DEFAULTS, parse_config
from kvt.run.config import RunConfig, read_configs
from kvt.run.sections import TRAINER
from kvt.system import CONFIGS, yaml_names


def test_defaults_of_the_trainer_are_lightnings():
    usual = {name: parameter.default for name, parameter in signature(Trainer).parameters.items()} | TRAINER_DEFAULTS
    assert {name: usual[name.removeprefix("trainer.")] for name in TRAINER} == TRAINER


@pytest.mark.parametrize("name", yaml_names(CONFIGS))
def test_the_printed_configuration_is_the_same_configuration(name, in_tmp_dir, capsys):
    flags = "--attn qkv --attn_kwargs.kv_heads 1 --lr 1e-05 --seed 3 --max_time 00:01:00:00 --logger [csv]"
    words = [*flags.split(), *["--optimizer", "AdamW", "--optimizer.weight_decay", ".1", "--callbacks+=Timer"]]
    run_words(["fit", "--config", name, *words, "--print_config"])
    Path("printed.yaml").write_text(printed := capsys.readouterr().out)
    run_words(["fit", "--config", "printed.yaml", "--print_config"])
    assert capsys.readouterr().out == printed
    made = RunConfig(**parse_config(read_configs([name]), words))
    assert RunConfig.from_yaml("printed.yaml") == made
    assert (made.model["init_args"]["lr"], made.seed_everything) == (1e-5, 3)
    assert made.optimizer["init_args"]["weight_decay"] == 0.1


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


def test_an_interval_between_validations_may_be_a_time():
    config = parse_config(read_configs(["reverse"]), ["--val_check_interval", "00:00:01:00"])
    assert config["trainer"]["val_check_interval"] == "00:00:01:00"


def test_a_later_file_changes_single_settings_but_replaces_an_optimiser(in_tmp_dir):
    Path("first.yaml").write_text(
        "optimizer: {class_path: AdamW, init_args: {amsgrad: true}}\ntrainer: {max_steps: 7}\n"
    )
    Path("second.yaml").write_text("optimizer: {class_path: SGD}\nmodel: {init_args: {dim: 8}}\n")
    config = RunConfig.from_yaml("reverse", "first.yaml", "second.yaml")
    assert config.optimizer == {"class_path": "torch.optim.SGD", "init_args": {}}
    assert (config.trainer["max_steps"], config.model["init_args"]["dim"]) == (7, 8)
    assert config.model["class_path"] == "kvt.tasks.ListTask"
