"""Checkpoints from anywhere: broken in transit, of another version, or made to do harm."""

import copy
import functools
import io
import math
import operator
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from kvt.cli.main import execute
from kvt.system.console import run
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, SMALL
from tests.helpers.hostile import fuzz

NAME = "x.ckpt"
CANARY = "canary"
COMMANDS = {
    "fit": lambda: CLI(["fit", "--ckpt_path", NAME, *QUIET]),
    "validate": lambda: CLI(["validate", "--ckpt_path", NAME, *QUIET]),
    "test": lambda: CLI(["test", "--ckpt_path", NAME, *QUIET]),
    "predict": lambda: CLI(["predict", "--ckpt_path", NAME, *QUIET]),
    "generate": lambda: execute("generate", ["--ckpt_path", NAME, "--tokens", "3"]),
    "translate": lambda: execute("translate", ["--ckpt_path", NAME, "Ein Hund läuft."]),
    "maps": lambda: execute("maps", ["--ckpt_path", NAME]),
}
TASKS = {"reverse": "maps", "mnist": "maps", "characters": "generate", "translation": "translate"}
"""The configurations whose checkpoints are broken, and what only they can be asked for."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_data) -> dict[str, Path]:
    """A checkpoint of each task at the end of an epoch, with another one still to come."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVT_DATA_DIR", str(small_data))
        patch.chdir(folder)
        for config in TASKS:
            words = ["fit", "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *SMALL[config], "--max_epochs", "1"]
            run(lambda words=words: CLI([*words, "--max_steps", "4"]))
            run_folder = next(Path("lightning_logs").glob("*/*/version_0"))
            checkpoint = torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=True)
            checkpoint["trainer"] |= {"max_steps": 6, "max_epochs": 9}
            torch.save(checkpoint, folder / f"{config}.ckpt")
            Path("lightning_logs").rename(config)
    return {config: folder / f"{config}.ckpt" for config in TASKS}


@pytest.fixture
def use(held, trained, in_tmp_dir, monkeypatch) -> Callable[..., str | None]:
    """Has a command use a checkpoint; whatever the file says, no code but kvt's may run."""
    monkeypatch.syspath_prepend(in_tmp_dir)
    ran = in_tmp_dir / "ran"
    Path(f"{CANARY}.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom kvt.attention import KV\nfrom kvt.tasks import *\n"
        "from lightning.pytorch.callbacks import Callback\n"
    )

    def call(command: str) -> str | None:
        line = held(COMMANDS[command], NAME, "has no test split")
        assert not ran.exists(), "code of the checkpoint ran"
        for left in ("predictions.csv", "maps.png"):
            Path(left).unlink(missing_ok=True)
        return line

    return call


@pytest.mark.parametrize("config", TASKS)
def test_sound_checkpoints_are_taken(use, trained, config):
    Path(NAME).write_bytes(trained[config].read_bytes())
    for command in ("fit", "predict", "maps", TASKS[config]):
        assert use(command) is None


# ---- the file --------------------------------------------------------------------------------------------------------


def cut(raw: bytes, chance: random.Random) -> bytes:
    return raw[: chance.randrange(len(raw))]


def flip(raw: bytes, chance: random.Random) -> bytes:
    broken = bytearray(raw)
    for _ in range(chance.choice([1, 1, 1, 8, 1000])):
        broken[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(broken)


def blank(raw: bytes, chance: random.Random) -> bytes:
    """As a disk leaves a file whose end was never written."""
    start = chance.randrange(len(raw))
    end = min(len(raw), start + chance.choice([1, 512, 4096, len(raw)]))
    return raw[:start] + bytes(end - start) + raw[end:]


def shift(raw: bytes, chance: random.Random) -> bytes:
    place, more = chance.randrange(len(raw)), chance.randbytes(chance.randrange(1, 100))
    return raw[:place] + more + raw[place:]


def replace(raw: bytes, chance: random.Random) -> bytes:
    return chance.choice([b"", b"\0", b"PK\3\4", b"{}", b"\x80\x02}q\0.", raw[:4] * 1000, chance.randbytes(5000)])


def legacy(raw: bytes, chance: random.Random) -> bytes:
    file = io.BytesIO()
    torch.save(torch.load(io.BytesIO(raw), weights_only=True), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def repack(raw: bytes, chance: random.Random) -> bytes:
    """The same archive with other names, compressed, or with more in it than there is room for."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if chance.random() < 0.05:
                content = chance.choice([b"", content[:-1], bytes(2**22)])
            prefix = chance.choice([""] * 30 + ["../../", "/tmp/"])
            new.writestr(prefix + entry.filename, content, chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    return file.getvalue()


SPECIAL = {
    "nothing": lambda path: None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "hole": lambda path: path.symlink_to("nowhere"),
    "vast": lambda path: (path.touch(), os.truncate(path, 2**43)),
}


def key_of_years() -> bytes:
    """Pickled, a tuple of twice a tuple of twice a tuple …, as number 60 of the memo: 300 bytes, hashed for ever."""
    return b")q\0" + b"".join(bytes([ord("h"), i, ord("h"), i, 0x86, ord("q"), i + 1]) for i in range(60))


def archive(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
            new.writestr(f"archive/{name}", content)
    return file.getvalue()


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("command", ["fit", "test", "generate"])
def test_what_is_no_file_or_never_ends(use, what, command):
    SPECIAL[what](Path(NAME))
    assert use(command) is not None


@fuzz(
    0.06,
    config=st.sampled_from([*TASKS]),
    command=st.sampled_from([*COMMANDS]),
    spoil=st.sampled_from([cut, flip, flip, flip, blank, shift, replace, legacy, repack]),
    seed=st.integers(0, 2**32),
)
def test_broken_files(use, trained, config, command, spoil, seed):
    """What was not changed is not in the way, and what was changed is never used."""
    raw = trained[config].read_bytes()
    Path(NAME).write_bytes(broken := spoil(raw, random.Random(seed)))
    if use(command) is None:
        assert same(torch.load(io.BytesIO(broken), weights_only=True), torch.load(io.BytesIO(raw), weights_only=True))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


# ---- what is in it ---------------------------------------------------------------------------------------------------


def doubled(value: Any, times: int = 60) -> Any:
    """A few bytes that say it 2⁶⁰ times."""
    for _ in range(times):
        value = [value, value]
    return value


def looped() -> list:
    value: list = []
    value.append(value)
    return value


def nested(depth: int = 200) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


PLAIN = [
    *(None, True, False, -1, 0, 1, 2, 3, 10**5, 10**9, 2**31, 2**63, 10**30, -(10**18)),
    *(0.5, -1.0, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "kv", "../../x", "/", "a\nb", "\0", "\udcff", "x" * 5000, f"{CANARY}.KV", "os.system", "s3://x/y"),
    *([], {}, [0], ["x"], [[]], {"x": 1}, {1: 2}, {"class_path": f"{CANARY}.Callback", "init_args": {}}),
]
HARMFUL = [
    *(doubled, lambda: doubled(0, 22), looped, nested, lambda: b"x", lambda: {1, 2}, lambda: bytearray(10**6)),
    lambda: torch.tensor(math.nan),
    lambda: torch.tensor(3),
    lambda: torch.tensor(1j),
    lambda: torch.zeros(0),
    lambda: torch.zeros(2, 3),
    lambda: torch.zeros(1, 1).to_sparse(),
    lambda: torch.zeros(3, device="meta"),
    lambda: torch.zeros(1).expand(10**6, 10**6),
    lambda: torch.nn.Parameter(torch.zeros(2)),
]
values = st.one_of(
    st.sampled_from(PLAIN).map(copy.deepcopy),
    st.sampled_from(HARMFUL).map(lambda make: make()),
)


def places(value: Any, most: int = 6) -> list[tuple]:
    """The paths to all that can be changed, not too many of each kind of tensor."""
    found: list[tuple] = []
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys[:most] if all(isinstance(value[key], torch.Tensor) for key in keys) else keys:
            found += [(key,), *((key, *rest) for rest in places(value[key], most))]
    return found


def change(data: st.DataObject, value: Any, values: st.SearchStrategy, times: int = 1) -> None:
    """Changes plain data somewhere; each section at its top is as likely to be met as any other."""
    sections = {top: [(top,), *((top, *rest) for rest in places(value[top]))] for top in sorted(value)}
    for _ in range(times):
        path = data.draw(st.sampled_from(sections[data.draw(st.sampled_from([*sections]))]))
        how = data.draw(st.sampled_from(["like", "like", "like", "replace", "remove", "add", "rename", "form"]))
        *way, key = path
        with suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError):  # gone since the change before
            inner = functools.reduce(operator.getitem, way, value)
            if how == "remove":
                del inner[key]
            elif how == "add":
                inner["step"] = data.draw(values)
            elif how == "rename":
                inner[f"{key}_"] = inner.pop(key)
            elif isinstance(inner[key], torch.Tensor) and how in ("like", "form"):
                inner[key] = data.draw(st.sampled_from(FORMS))(inner[key])
            elif how == "like" and (alike := [other for other in PLAIN if type(other) is type(inner[key])]):
                inner[key] = copy.deepcopy(data.draw(st.sampled_from(alike)))
            else:
                inner[key] = data.draw(values)


FORMS = [
    lambda tensor: tensor[..., None],
    lambda tensor: tensor.flatten(),
    lambda tensor: tensor.double(),
    lambda tensor: tensor.to(torch.int8),
    lambda tensor: tensor.to_sparse() if tensor.ndim else tensor,
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor * math.nan,
    lambda tensor: torch.zeros(()).expand(tensor.shape),
    lambda tensor: torch.zeros(()).expand((10**6, *tensor.shape)),
]


@fuzz(
    0.08,
    config=st.sampled_from([*TASKS]),
    command=st.sampled_from(["fit", "fit", "fit", *COMMANDS]),
    changes=st.integers(1, 2),
    data=st.data(),
)
def test_changed_content(use, trained, config, command, changes, data):
    checkpoint = torch.load(trained[config], weights_only=True)
    change(data, checkpoint, values, changes)
    torch.save(checkpoint, NAME)
    use(command)


# ---- code ------------------------------------------------------------------------------------------------------------


class Gadget:
    """A pickle of it is a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


GADGETS = [
    lambda: Gadget(os.system, ("touch ran",)),
    lambda: Gadget(eval, ("open('ran', 'w')",)),
    lambda: Gadget(exec, ("open('ran', 'w')",)),
    lambda: Gadget(open, ("ran", "w")),
    lambda: Gadget(Path.touch, (Path("ran"),)),
    lambda: Gadget(__import__, (CANARY,)),
    lambda: Gadget(torch.load, ("nested.pt", None, None)),
    lambda: Gadget(torch.hub.load_state_dict_from_url, ("file:///dev/zero",)),
    lambda: Gadget(getattr, ("", "join")),
    lambda: Gadget(dict, (), {"ran": Gadget(open, ("ran", "w"))}),
]


@fuzz(
    0.02,
    config=st.sampled_from([*TASKS]),
    command=st.sampled_from([*COMMANDS]),
    gadget=st.sampled_from(GADGETS),
    form=st.sampled_from(["zip", "zip", "legacy", "pickle"]),
    data=st.data(),
)
def test_no_pickle_runs_code(use, trained, config, command, gadget, form, data):
    checkpoint = torch.load(trained[config], weights_only=True)
    section = data.draw(st.sampled_from([*checkpoint]))
    if isinstance(checkpoint[section], dict) and data.draw(st.booleans()):
        checkpoint[section]["more"] = gadget()
    else:
        checkpoint[section] = gadget()
    torch.save(Gadget(os.system, ("touch ran",)), "nested.pt")
    if form == "pickle":
        Path(NAME).write_bytes(pickle.dumps({"state_dict": {}, "hyper_parameters": gadget()}))
    else:
        torch.save(checkpoint, NAME, _use_new_zipfile_serialization=form == "zip")
    assert use(command) is not None
