"""Checkpoints from anywhere: broken in transit, or made to do harm. What one says is data."""

import copy
import functools
import io
import json
import operator
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from kvt.run.load_checkpoint import Checkpoint
from kvt.tasks import Task
from tests.conftest import QUIET, SMALL, slow
from tests.data.helpers import cut
from tests.helpers.commands import command

NAME = "x.ckpt"
CANARY = """
open("imported", "w").close()
from kvt.attention import KV
from kvt.tasks import *
from lightning.pytorch.callbacks import Callback
"""
COMMANDS = {
    "fit": ["--max_steps", "4", *QUIET],
    **dict.fromkeys(("validate", "test", "predict"), QUIET),
    "maps": [],
    "generate": ["--tokens", "3"],
    "translate": ["Ein Hund läuft."],
}
TASKS = {"reverse": "maps", "mnist": "maps", "characters": "generate", "translation": "translate"}
"""A task of each family, and a command for its checkpoints."""
CALLED: list[object] = []


def listen(event: str, args: tuple) -> None:
    if event == "subprocess.Popen" and "touch called" in str(args):
        CALLED.append(args)


sys.addaudithook(listen)


@pytest.fixture
def harmless(in_tmp_dir, monkeypatch) -> Iterator[Callable[[], None]]:
    """Return a check that no code of a checkpoint ran, none that it names was imported."""
    monkeypatch.syspath_prepend(in_tmp_dir)
    Path("canary.py").write_text(CANARY)
    CALLED.clear()

    def check() -> None:
        assert not CALLED, "a command of the checkpoint ran"
        assert not Path("called").exists(), "code of the checkpoint ran"
        assert not Path("imported").exists(), "a module that the checkpoint names was imported"

    yield check
    sys.modules.pop("canary", None)


@pytest.fixture
def use(harmless) -> Callable[[str], str | None]:
    """Return what lets a command use the checkpoint, harmlessly, and returns the command's error."""

    def call(name: str) -> str | None:
        ended = command(name, "--ckpt_path", NAME, *COMMANDS[name])
        harmless()
        return ended.refused(NAME) if ended.code else None

    return call


def load(raw: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(raw), weights_only=True)


@pytest.mark.parametrize("config", ["reverse", "characters", *slow("mnist", "translation")])
def test_sound_checkpoints_are_taken(use, trained, config):
    Path(NAME).write_bytes(trained(config).read_bytes())
    for name in ("fit", "predict", TASKS[config]):
        assert use(name) is None


@pytest.mark.parametrize("name", ["fit", "generate"])
def test_what_is_no_checkpoint_is_refused(use, trained, name):
    Path(NAME).mkdir()
    assert use(name)
    Path(NAME).rmdir()
    Path(NAME).write_bytes(trained("characters").read_bytes())
    cut(Path(NAME), 0.9)
    assert use(name)


class Gadget:
    """A pickle of it is a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


GADGETS = [
    (os.system, ("touch called",)),
    (eval, ("open('called', 'w')",)),
    (exec, ("open('called', 'w')",)),
    (open, ("called", "w")),
    (Path.touch, (Path("called"),)),
    (__import__, ("canary",)),
    (torch.load, ("nested.pt", None, None)),
    (torch.hub.load_state_dict_from_url, ("file:///dev/zero",)),
    (getattr, ("", "join")),
    (dict, (), {"called": Gadget(open, ("called", "w"))}),
]


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_no_pickle_runs_code(use, trained, form):
    """Wherever it stands in a checkpoint, and whichever command reads it."""
    sound = load(trained("characters").read_bytes())
    torch.save(Gadget(os.system, ("touch called",)), "nested.pt")
    for gadget, section, name in zip(GADGETS * 3, cycle(sound), cycle(COMMANDS), strict=False):
        value = sound[section]
        spoilt = {**value, "more": Gadget(*gadget)} if isinstance(value, dict) else Gadget(*gadget)
        if form == "pickle":
            Path(NAME).write_bytes(pickle.dumps({**sound, "state_dict": {}, section: spoilt}))
        else:
            torch.save({**sound, section: spoilt}, NAME, _use_new_zipfile_serialization=form == "zip")
        assert use(name), (gadget, section, name)


CALL = {"class_path": "subprocess.Popen", "init_args": {"args": "touch called", "shell": True}}
IMPORT = {"class_path": "canary.Callback"}


def escaped(text: str) -> str:
    r"""Return a YAML text in which every character of a name is an escape: "\u0063lass_path"."""
    return "".join(rf"\u{ord(sign):04x}" for sign in text)


FORMS: dict[str, Callable[[dict], Any]] = {
    "mapping": lambda call: call,
    "JSON": json.dumps,
    "escapes": lambda call: f'{{"{escaped("class_path")}": "{escaped(call["class_path"])}"}}',
    "name": lambda call: call["class_path"],
    "dots escaped": lambda call: call["class_path"].replace(".", r"\u002e"),
    "tag": lambda call: f"!!python/object/apply:{call['class_path']} [touch called]",
    "under a name, as JSON": lambda call: {"bias": json.dumps(call)},
    "in a list, as JSON": lambda call: [json.dumps(call)],
}


def places(value: Any) -> Iterator[tuple]:
    """Yield the paths to all strings and mappings, and to lists and None, which may stand for one."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if part is None or isinstance(part, str | dict | list):
                yield (key,)
                yield from ((key, *rest) for rest in places(part))


def save_with(checkpoint: dict[str, Any], path: tuple, payload: Any) -> None:
    """Save a checkpoint with a payload in one place."""
    changed = copy.deepcopy({key: value for key, value in checkpoint.items() if key != "state_dict"})
    changed["state_dict"] = dict(checkpoint["state_dict"])
    *way, key = path
    functools.reduce(operator.getitem, way, changed)[key] = payload
    torch.save(changed, NAME)


KNOWN = {
    "a mapping": ("model.init_args.attn_kwargs", {"bias": CALL}),
    "a JSON text": ("model.init_args.attn_kwargs", {"bias": json.dumps(CALL)}),
    "an attention to match": ("model.init_args.match", "canary.KV"),
    "an optimiser": ("optimizer", IMPORT),
    "an accelerator": ("trainer.accelerator", r"canary\u002eCallback"),
    "a logger": ("trainer.logger", IMPORT),
    "a callback": ("trainer.callbacks", [IMPORT]),
    "a plugin": ("trainer.plugins", [CALL]),
    "a precision": ("trainer.precision", "canary.Callback"),
}
"""A place in the configuration that a checkpoint carries, and a payload."""


@pytest.mark.parametrize("known", [*[*KNOWN][:2], *slow(*[*KNOWN][2:])])
def test_payloads_that_lightnings_own_parser_would_run(trained, harmless, known):
    """Neither when a command reads them, nor from the configuration of a run that is trained on."""
    for name in ("validate", "fit", "maps"):
        place, payload = KNOWN[known]
        save_with(load(trained("reverse").read_bytes()), ("config", *place.split(".")), payload)
        command(name, "--ckpt_path", NAME, *COMMANDS[name])
        harmless()
    for config in Path("lightning_logs").rglob("config.yaml"):
        (config.parent / "result.json").unlink(missing_ok=True)
        command("fit", "--resume", str(config.parent))
    harmless()


@pytest.mark.slow
@pytest.mark.parametrize("config", SMALL)
def test_every_place_of_every_tasks_checkpoint(trained, harmless, config):
    checkpoint = load(trained(config).read_bytes())
    for number, path in enumerate(places(checkpoint)):
        form = [*FORMS][number % len(FORMS)]
        save_with(checkpoint, path, FORMS[form]((CALL, IMPORT)[number // len(FORMS) % 2]))
        for load_part in (lambda it: it.load_task(Task), lambda it: it.load_data()):
            with suppress(Exception):  # any error will do
                load_part(Checkpoint(NAME))
        harmless()
