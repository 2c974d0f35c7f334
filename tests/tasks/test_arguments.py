"""Constructor arguments: each has a help text, and a task keeps the value of each; options of all tasks are shared."""

import inspect

import pytest
from jsonargparse import ArgumentParser

from kvt.tasks import ListTask
from kvt.tasks.base import known_classes
from kvt.tasks.options import BlockTask
from tests.helpers.small_tasks import LISTS, TASKS, small_task


@pytest.mark.parametrize("cls", known_classes().values())
def test_every_argument_has_a_help_text(cls):
    """Its own, or that of a base class."""
    parser = ArgumentParser()
    parser.add_class_arguments(cls)
    texts = {action.dest: action.help for action in parser._actions}
    assert texts.keys() >= inspect.signature(cls).parameters.keys()
    assert all(texts.values()), texts


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_the_shared_options_and_keeps_the_value_of_each_argument(name):
    shared = [*inspect.signature(BlockTask).parameters][:-1]
    arguments = inspect.signature(TASKS[name]).parameters
    assert [*arguments][: len(shared)] == shared
    hparams = small_task(name).hparams
    assert hparams.keys() == arguments.keys()
    given = {"spec", "dim", "depth", "heads"}
    assert {key: value for key, value in hparams.items() if key not in given} == {
        key: argument.default for key, argument in arguments.items() if key not in given
    }


class Wide(ListTask, dim=24, heads=3):
    """A task with other defaults."""


class Named(Wide):
    """A task with an argument more."""

    def make_model(self, spec, title: str = "wide", smoothing: float = 0.5):
        self.title = title
        return super().make_model(spec, smoothing=smoothing)


def test_keywords_of_a_class_are_defaults_and_arguments_of_its_model_are_its_own():
    for task, smoothing in ((Wide(LISTS), 0.0), (Named(LISTS, title="x"), 0.5)):
        kept = {name: task.hparams[name] for name in ("dim", "heads", "norm", "smoothing")}
        assert kept == {"dim": 24, "heads": 3, "norm": "post", "smoothing": smoothing}
    assert (task.title, task.hparams["title"]) == ("x", "x")
    with pytest.raises(TypeError, match="titel"):
        Named(LISTS, titel="x")
