"""Constructor arguments: each has a help text."""

import inspect

import pytest
from jsonargparse import ArgumentParser

from kvt.tasks.base import known_classes


@pytest.mark.parametrize("cls", known_classes().values())
def test_every_argument_has_a_help_text(cls):
    """Its own, or that of a base class."""
    parser = ArgumentParser()
    parser.add_class_arguments(cls)
    texts = {action.dest: action.help for action in parser._actions}
    assert texts.keys() >= inspect.signature(cls).parameters.keys()
    assert all(texts.values()), texts
