"""Constructor arguments: each has a help text, and all of them are the hyperparameters."""

import inspect

import pytest
from jsonargparse import ArgumentParser

from kvt.tasks import (
    AnomalyTask,
    Characters,
    CharacterTask,
    DigitLists,
    HumanNumbers,
    Images,
    ImageTask,
    ListTask,
    NumberTask,
    SentencePairs,
    SetAnomalies,
    TranslationTask,
)

TEXT = {"vocab": list("abc"), "length": 4}
WORDS = {"source_vocab": ["<unk>", "<pad>", "<bos>", "<eos>"], "target_vocab": ["<unk>", "<pad>", "<bos>", "<eos>"]}
IMAGES = {"channels": 1, "height": 4, "width": 4, "classes": ["a", "b"], "mean": [0.5], "std": [0.2]}
SPECS = {
    ListTask: {"vocab_size": 10, "length": 4},
    ImageTask: IMAGES,
    AnomalyTask: {"feature_dim": 3, "set_size": 4},
    CharacterTask: TEXT,
    NumberTask: TEXT,
    TranslationTask: {"source": "xx", "target": "xx", "detok_rules": [[], []], "max_len": 4, **WORDS},
}
DATA = (DigitLists, Images, SetAnomalies, Characters, HumanNumbers, SentencePairs)


@pytest.mark.parametrize("cls", [*SPECS, *DATA])
def test_every_argument_has_a_help_text(cls):
    """Its own, or that of a base class."""
    parser = ArgumentParser()
    parser.add_class_arguments(cls)
    texts = {action.dest: action.help for action in parser._actions}
    assert texts.keys() >= inspect.signature(cls).parameters.keys()
    assert all(texts.values()), texts


@pytest.mark.parametrize("cls", SPECS)
def test_the_hyperparameters_are_the_arguments_and_their_values(cls):
    task = cls(SPECS[cls], "k", dim=24, depth=1)
    parameters = inspect.signature(cls).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert dict(task.hparams) == defaults | {"spec": SPECS[cls], "attn": "k", "dim": 24, "depth": 1}
