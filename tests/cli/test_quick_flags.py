"""Flags that are known from the source alone are those that the parser takes, and mistakes are told in its words."""

import pytest

from kvt.cli.flags import RUN_FLAGS, require_known_flags, split_flags
from kvt.cli.lightning_cli import read_words
from kvt.run.config import RunConfig
from kvt.run.sections import GIVEN, LIGHTNING
from kvt.run.settings import settings_parser
from kvt.system.errors import UserError
from kvt.system.files import CONFIGS, yaml_names
from kvt.system.signatures import defaults_of
from kvt.tasks import ListTask
from kvt.tasks.base import known_classes

SHTAB = "--print_shtab"  # a flag of jsonargparse's, in whose place there is kvt completion


@pytest.mark.parametrize("config", yaml_names(CONFIGS))
def test_no_flag_of_the_parser_is_refused(config):
    parser = settings_parser(**RunConfig.from_name(config).classes)
    nested = ("--attn_kwargs.rope", "--optimizer.weight_decay")
    require_known_flags(["fit", "--config", config, *{*parser._option_string_actions, *nested} - {*RUN_FLAGS, SHTAB}])


@pytest.mark.parametrize("name", known_classes())
def test_defaults_in_the_source_are_those_of_the_signature(name):
    parser = settings_parser(**{"model": known_classes()[name]})
    taken = {key.removeprefix("model."): value for key, value in parser.get_defaults().as_dict()["model"].items()}
    assert {key: value for key, value in defaults_of("kvt", "tasks", name).items() if key not in GIVEN} == taken


def test_lightnings_settings_are_found():
    parser = settings_parser(model=ListTask)
    assert {f"trainer.{name}" for name in LIGHTNING} == {
        action.dest
        for action in parser._actions
        if action.dest.startswith("trainer.") and not action.dest.endswith(".help")
    }


@pytest.mark.parametrize(
    "words", [["--atn", "kv"], ["--zzz=3"], ["--model.dmi", "3"], ["--data.sede", "1"]], ids=" ".join
)
def test_a_mistake_is_told_as_the_parser_tells_it(words):
    argv = ["fit", "--config", "reverse", *words]
    with pytest.raises(UserError) as quick:
        require_known_flags(argv)
    with pytest.raises(UserError) as slow:
        read_words(*split_flags(argv))
    assert str(quick.value) == str(slow.value).replace(" ".join(words), words[0])


def test_flags_of_classes_of_ones_own_are_left_to_the_parser():
    require_known_flags(["fit", "--config", "reverse", "--model", "my_task.MyTask", "--own", "1"])


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
    argvs = [["fit", "--config", config, *(f"--{full}{one}" for one in [word, *more])] for full in ("", f"{section}.")]
    bare, full = (read_words(*split_flags(argv)).config for argv in argvs)
    for argv in argvs:
        require_known_flags(argv)
    name, _, added = word.partition("+=")
    assert added in str(bare.sections[section][name])
    assert bare == full
