"""Checkpoints from anywhere: broken in transit, of another version, or made to do harm. What one says is data."""

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
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import strategies as st

from kvt.cli.lightning_cli import run_words
from kvt.cli.main import execute
from kvt.run.load_checkpoint import Checkpoint
from kvt.system.console import run
from kvt.system.errors import UserError
from kvt.tasks import Task
from tests.conftest import QUIET, SMALL
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, FLIP

NAME = "x.ckpt"
CANARY = """
open("imported", "w").close()
from kvt.attention import KV
from kvt.tasks import *
from lightning.pytorch.callbacks import Callback
"""
COMMANDS: dict[str, Callable[[], object]] = {
    "fit": lambda: run_words(["fit", "--ckpt_path", NAME, "--max_steps", "4", *QUIET]),
    **{
        name: lambda name=name: run_words([name, "--ckpt_path", NAME, *QUIET])
        for name in ("validate", "test", "predict")
    },
    "maps": lambda: execute("maps", ["--ckpt_path", NAME]),
    "generate": lambda: execute("generate", ["--ckpt_path", NAME, "--tokens", "3"]),
    "translate": lambda: execute("translate", ["--ckpt_path", NAME, "Ein Hund läuft."]),
}
TASKS = {"reverse": "maps", "mnist": "maps", "characters": "generate", "translation": "translate"}
"""A task of each family, and a command for its checkpoints."""
A_TASK, A_COMMAND = st.sampled_from([*TASKS]), st.sampled_from([*COMMANDS])
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
def use(held, harmless) -> Callable[..., str | None]:
    """Return what has a command use the checkpoint, harmlessly."""

    def call(command: str) -> str | None:
        line = held(COMMANDS[command], NAME, "has no test split")
        harmless()
        for left in (*Path().glob("predictions-*.csv"), Path("maps.png")):
            left.unlink(missing_ok=True)
        return line

    return call


def load(raw: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(raw), weights_only=True)


@pytest.mark.parametrize("config", TASKS)
def test_sound_checkpoints_are_taken(use, trained, config):
    Path(NAME).write_bytes(trained(config).read_bytes())
    for command in ("fit", "predict", TASKS[config]):
        assert use(command) is None


# ---- broken files ----------------------------------------------------------------------------------------------------


SPECIAL = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("command", ["fit", "generate"])
def test_what_is_no_file(use, what, command):
    SPECIAL[what](Path(NAME))
    assert use(command) is not None


def save_in_the_old_format(path: Path) -> None:
    torch.save(load(path.read_bytes()), path, _use_new_zipfile_serialization=False)


@fuzz(0.1, config=A_TASK, command=A_COMMAND, spoil=CUT | FLIP | FLIP | FILL | st.just(save_in_the_old_format))
def test_broken_files(use, trained, config, command, spoil):
    """A file that still loads is taken only if its contents are unchanged."""
    Path(NAME).write_bytes(raw := trained(config).read_bytes())
    spoil(Path(NAME))
    broken = Path(NAME).read_bytes()
    if use(command) is None:
        assert same(load(broken), load(raw))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# ---- pickles that run code -------------------------------------------------------------------------------------------


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


A_FORM = st.sampled_from(["zip", "zip", "legacy", "pickle"])


@fuzz(0.06, config=A_TASK, command=A_COMMAND, gadget=st.sampled_from(GADGETS), form=A_FORM, data=st.data())
def test_no_pickle_runs_code(use, trained, config, command, gadget, form, data):
    checkpoint = load(trained(config).read_bytes())
    section = data.draw(st.sampled_from([*checkpoint]))
    if isinstance(checkpoint[section], dict) and data.draw(st.booleans()):
        checkpoint[section]["more"] = Gadget(*gadget)
    else:
        checkpoint[section] = Gadget(*gadget)
    torch.save(Gadget(os.system, ("touch called",)), "nested.pt")
    if form == "pickle":
        Path(NAME).write_bytes(pickle.dumps({"state_dict": {}, "hyper_parameters": Gadget(*gadget)}))
    else:
        torch.save(checkpoint, NAME, _use_new_zipfile_serialization=form == "zip")
    assert use(command) is not None


# ---- settings that name code -----------------------------------------------------------------------------------------

CALL = {"class_path": "subprocess.Popen", "init_args": {"args": "touch called", "shell": True}}
IMPORT = {"class_path": "canary.Callback"}


def escaped(text: str) -> str:
    r"""Return a YAML text in which every character of a name is an escape: "\u0063lass_path"."""
    return "".join(rf"\u{ord(sign):04x}" for sign in text)


FORMS: dict[str, Callable[[dict], Any]] = {
    "mapping": lambda call: call,
    "JSON": json.dumps,
    "YAML": yaml.safe_dump,
    "escapes": lambda call: f'{{"{escaped("class_path")}": "{escaped(call["class_path"])}"}}',
    "name": lambda call: call["class_path"],
    "dots escaped": lambda call: call["class_path"].replace(".", r"\u002e"),
    "tag": lambda call: f"!!python/object/apply:{call['class_path']} [touch called]",
    "under a name": lambda call: {"bias": call},
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
    "a mapping": (("hyper_parameters", "attn_kwargs"), {"bias": CALL}),
    "a JSON text": (("hyper_parameters", "attn_kwargs"), {"bias": json.dumps(CALL)}),
    "an accelerator": (("trainer",), {"accelerator": r"canary\u002eCallback"}),
    "a logger": (("trainer",), {"logger": IMPORT}),
    "a precision": (("trainer",), {"precision": "canary.Callback"}),
    "an attention to match": (("hyper_parameters", "match"), "canary.KV"),
}


@pytest.mark.parametrize("known", KNOWN)
def test_payloads_that_lightnings_own_parser_would_run(trained, harmless, known):
    """Neither when a command reads them, nor from the configuration of a run that is trained on."""
    for command in ("validate", "fit", "maps"):
        save_with(load(trained("reverse").read_bytes()), *KNOWN[known])
        with suppress(SystemExit):
            run(COMMANDS[command])
        harmless()
    for config in Path("lightning_logs").rglob("config.yaml"):
        (config.parent / "result.json").unlink(missing_ok=True)
        with suppress(SystemExit):
            run(lambda config=config: run_words(["fit", "--resume", str(config.parent), *QUIET]))
    harmless()


@pytest.mark.slow
@pytest.mark.parametrize("config", SMALL)
def test_every_place_of_every_tasks_checkpoint(trained, harmless, config):
    checkpoint = load(trained(config).read_bytes())
    for number, path in enumerate(places(checkpoint)):
        form = [*FORMS][number % len(FORMS)]
        save_with(checkpoint, path, FORMS[form]((CALL, IMPORT)[number // len(FORMS) % 2]))
        for load_part in (lambda it: it.load_task(Task), load_data):
            with suppress(UserError):
                load_part(Checkpoint(NAME))
        harmless()
