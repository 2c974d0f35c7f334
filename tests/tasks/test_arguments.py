"""Constructor arguments: each has a help text, and a task keeps the value of each; options of all tasks are shared."""

import inspect

import pytest
from jsonargparse import ArgumentParser

from kvt.tasks import ListTask
from kvt.tasks.base import known_classes
from kvt.tasks.options import BlockTask
from tests.helpers.small_tasks import LISTS, TASKS, small_task


def parser(cls) -> ArgumentParser:
    made = ArgumentParser()
    made.add_class_arguments(cls)
    return made


@pytest.mark.parametrize("cls", known_classes().values())
def test_every_argument_has_a_help_text(cls):
    """Its own, or that of a base class."""
    assert [action.dest for action in parser(cls)._actions if not action.help] == []


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_the_shared_options_and_keeps_the_value_of_each_argument(name):
    defaults = vars(parser(TASKS[name]).get_defaults())
    hparams = small_task(name).hparams
    assert inspect.signature(BlockTask).parameters.keys() <= defaults.keys() == hparams.keys()
    given = {"spec": hparams["spec"], "dim": 8, "depth": 1, "heads": 2}
    assert dict(hparams) == defaults | given


class Wide(ListTask):
    """A task with other defaults."""

    def __init__(self, spec=None, dim: int = 24, heads: int = 3, **kwargs):
        super().__init__(spec, dim=dim, heads=heads, **kwargs)


class Named(Wide):
    """A task with an argument more, which its model needs."""

    def __init__(self, spec=None, title: str = "wide", smoothing: float = 0.5, **kwargs):
        super().__init__(smoothing=smoothing, **kwargs)
        self.title = title
        self.build(spec)

    def make_model(self, spec):
        model = super().make_model(spec)
        model.title = self.title
        return model


def test_a_subclass_passes_arguments_on_and_builds_its_model_at_the_end():
    for task, smoothing in ((Wide(LISTS), 0.0), (Named(LISTS, title="x"), 0.5)):
        kept = {name: task.hparams[name] for name in ("spec", "dim", "heads", "norm", "smoothing")}
        assert kept == {"spec": LISTS, "dim": 24, "heads": 3, "norm": "post", "smoothing": smoothing}
    assert (task.model.title, task.hparams["title"]) == ("x", "x")
    with pytest.raises(TypeError, match="titel"):
        Named(LISTS, titel="x")
