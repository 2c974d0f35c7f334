"""What a checkpoint says is data: wherever it names code or a place, nothing is called, imported or written."""

import copy
import functools
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import strategies as st

from kvt.cli.main import execute
from kvt.system.console import run
from kvt.system.errors import UserError
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import Checkpoint
from tests.conftest import CONFIGS, QUIET, SMALL
from tests.helpers.hostile import fuzz

NAME = "x.ckpt"
CANARY = """
open("imported", "w").close()
from lightning.pytorch.callbacks import Callback
"""
CALL = {"class_path": "subprocess.Popen", "init_args": {"args": "touch called", "shell": True}}
IMPORT = {"class_path": "canary.Callback"}
CALLED: list[object] = []


def listen(event: str, args: tuple) -> None:
    if event == "subprocess.Popen" and "touch called" in str(args):
        CALLED.append(args)


sys.addaudithook(listen)
COMMANDS: dict[str, Callable[[], object]] = {
    "fit": lambda: CLI(["fit", "--ckpt_path", NAME, "--max_steps", "3", *QUIET]),
    **{name: lambda name=name: CLI([name, "--ckpt_path", NAME, *QUIET]) for name in ("validate", "test", "predict")},
    "maps": lambda: execute("maps", ["--ckpt_path", NAME]),
    "generate": lambda: execute("generate", ["--ckpt_path", NAME, "--tokens", "3"]),
    "translate": lambda: execute("translate", ["--ckpt_path", NAME, "Ein Hund läuft."]),
}


def escaped(text: str) -> str:
    r"""A YAML text in which every sign of a name is spelt: "\u0063lass_path"."""
    return "".join(rf"\u{ord(sign):04x}" for sign in text)


FORMS: dict[str, Callable[[dict], Any]] = {
    "mapping": lambda call: call,
    "JSON": json.dumps,
    "YAML": yaml.safe_dump,
    "flow": lambda call: f"  {json.dumps(call)}\n",
    "escapes": lambda call: f'{{"{escaped("class_path")}": "{escaped(call["class_path"])}"}}',
    "name": lambda call: call["class_path"],
    "dots spelt": lambda call: call["class_path"].replace(".", r"\u002e"),
    "quoted": lambda call: json.dumps(call["class_path"]),
    "tag": lambda call: f"!!python/object/apply:{call['class_path']} [touch called]",
    "under a name": lambda call: {"bias": call},
    "under a name, as JSON": lambda call: {"bias": json.dumps(call)},
    "deeper": lambda call: {"bias": {"init_args": [call]}},
    "in a list": lambda call: [call],
    "in a list, as JSON": lambda call: [json.dumps(call)],
    "place": lambda call: os.path.abspath("precious"),
    "place in it": lambda call: os.path.abspath("precious/new"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_data) -> dict[str, dict[str, Any]]:
    """What the last checkpoint of a small run of every task holds."""
    folder = tmp_path_factory.mktemp("trained")
    held = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVT_DATA_DIR", str(small_data))
        patch.chdir(folder)
        for config, flags in SMALL.items():
            words = ["fit", "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *flags, "--max_steps", "2"]
            words += ["--default_root_dir", config]
            run(lambda words=words: CLI(words))
            held[config] = torch.load(next(Path(config).rglob("last.ckpt")), weights_only=True)
    return held


@pytest.fixture
def harmless(in_tmp_dir, monkeypatch) -> Iterator[None]:
    """A working directory with code to be found and a folder to be written; at the end nobody has."""
    monkeypatch.syspath_prepend(in_tmp_dir)
    Path("canary.py").write_text(CANARY)
    Path("precious").mkdir()
    CALLED.clear()
    yield
    sys.modules.pop("canary", None)


def require_harmless() -> None:
    assert not CALLED, "a command of the checkpoint ran"
    assert not Path("imported").exists(), "a module that the checkpoint names was imported"
    assert not os.listdir("precious"), "something was written where the checkpoint says"


def places(value: Any) -> Iterator[tuple]:
    """The paths to all strings and mappings, and to what may be one: lists and None."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if part is None or isinstance(part, str | dict | list):
                yield (key,)
                yield from ((key, *rest) for rest in places(part))


def put(checkpoint: dict[str, Any], path: tuple, payload: Any) -> dict[str, Any]:
    changed = copy.deepcopy({key: value for key, value in checkpoint.items() if key != "state_dict"})
    changed["state_dict"] = dict(checkpoint["state_dict"])
    *way, key = path
    functools.reduce(operator.getitem, way, changed)[key] = payload
    return changed


KNOWN = {
    "a mapping": (("hyper_parameters", "attn_kwargs"), {"bias": CALL}),
    "a JSON text": (("hyper_parameters", "attn_kwargs"), {"bias": json.dumps(CALL)}),
    "a YAML text": (("hyper_parameters", "attn_kwargs"), json.dumps({"bias": CALL})),
    "an accelerator": (("trainer",), {"accelerator": r"canary\u002eCallback"}),
    "a logger": (("trainer",), {"logger": IMPORT}),
    "a precision": (("trainer",), {"precision": "canary.Callback"}),
    "a data folder": (("datamodule_hyper_parameters", "data_dir"), "precious"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "fit", "maps"])
@pytest.mark.parametrize("known", KNOWN)
def test_payloads_that_once_did_harm(trained, harmless, known, command):
    path, payload = KNOWN[known]
    for config in ("reverse", "mnist"):
        torch.save(put(trained[config], path, payload), NAME)
        with suppress(SystemExit):
            run(COMMANDS[command])
        require_harmless()


@pytest.mark.slow
def test_a_configuration_made_from_a_checkpoint_is_as_harmless(trained, harmless):
    """What training writes of a checkpoint is read as the user's own when the run is resumed."""
    for path, payload in KNOWN.values():
        torch.save(put(trained["reverse"], path, payload), NAME)
        with suppress(SystemExit):
            run(COMMANDS["fit"])
    for config in Path("lightning_logs").rglob("config.yaml"):
        (config.parent / "result.json").unlink()
        with suppress(SystemExit):
            run(lambda config=config: CLI(["fit", "--resume", str(config.parent), *QUIET]))
    require_harmless()


def test_a_vocabulary_does_nothing_to_a_terminal(trained, harmless, capsys):
    checkpoint = copy.deepcopy(trained["characters"])
    symbols = checkpoint["hyper_parameters"]["spec"]["vocab"]
    symbols[:] = [chr(0x80 + number) if number % 2 else "\x1b" * (number + 1) for number in range(len(symbols))]
    torch.save(checkpoint, NAME)
    run(lambda: execute("generate", ["--ckpt_path", NAME, "--tokens", "50"]))
    assert capsys.readouterr().out.replace("\n", "").isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("config", SMALL)
def test_every_place_of_every_tasks_checkpoint(trained, harmless, config):
    for number, path in enumerate(places(trained[config])):
        form = [*FORMS][number % len(FORMS)]
        torch.save(put(trained[config], path, FORMS[form]((CALL, IMPORT)[number // len(FORMS) % 2])), NAME)
        for use in (Checkpoint.load_task, Checkpoint.load_data):
            with suppress(UserError):
                use(Checkpoint(NAME))
        require_harmless()


@fuzz(0.04, config=st.sampled_from([*SMALL]), command=st.sampled_from([*COMMANDS]), data=st.data())
def test_any_place_under_any_command(held, trained, harmless, config, command, data):
    checkpoint = trained[config]
    sections = {top: [(top,), *((top, *rest) for rest in places(checkpoint[top]))] for top in sorted(checkpoint)}
    path = data.draw(st.sampled_from(sections[data.draw(st.sampled_from([*sections]))]))
    payload = FORMS[data.draw(st.sampled_from([*FORMS]))](data.draw(st.sampled_from([CALL, IMPORT])))
    torch.save(put(checkpoint, path, payload), NAME)
    held(COMMANDS[command], NAME, "has no test split")
    for left in ("predictions.csv", "maps.png"):
        Path(left).unlink(missing_ok=True)
    require_harmless()
