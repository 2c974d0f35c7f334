"""Hostile flags of what is no training: a correct run, or one line that names the flag or the file."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name

import yaml
from hypothesis import assume, example
from hypothesis import strategies as st

from kvt.cli.main import COMMANDS, execute
from kvt.system.quoting import one_line
from tests.cli.test_flags import LISTS, NUMBERS, TEXTS, WORDS
from tests.conftest import REPOSITORY
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import clear
from tests.study.test_command import TINY

PLACES = ["folder", "/dev/full", "nowhere/x", "file/x", "closed/x", "file", "link", "a" * 300]
PLACES += ["x.png", "folder/x.png", "nowhere/x.svg", "/dev/full.png", "x.PDF", ".png", "/proc/x.png", "x.html"]
PLACES += ["maps.ckpt"]
ANYTHING = st.sampled_from(TEXTS) | st.sampled_from(LISTS) | WORDS | st.sampled_from(PLACES)
FITTING = {"int": st.integers(-1, 9).map(str), "float": st.floats(0, 2).map(str), "str": st.sampled_from(PLACES)}
TINY_BENCH = {"n": "2", "d": "8", "heads": "2", "batch": "1", "repeats": "1", "attn": "kv", "pos_dim": "4"}
SOUND = {
    "generate": {"ckpt_path": "characters.ckpt", "tokens": "3"},
    "translate": {"ckpt_path": "translation.ckpt"},
    "maps": {"ckpt_path": "reverse.ckpt"},
    "bench": TINY_BENCH,
    "study run": {"scale": "all"},
    "study report": {"scale": "all"},
    "reproduce": {"scale": "smoke"},
}
UNNAMED = {
    "translate": [["Ein Hund läuft."]],
    "study run": [["tiny.yaml"]],
    "study report": [["tiny.yaml"]],
    "reproduce": [["figure5"]],
}
DRY = {"study run", "reproduce"}
LONG = {"tokens": 10**4, "repeats": 10**3, "beam": 10**3}
"""Above that a correct run takes long."""
CALLED = {
    "names": ["table", "pass tables or figures"],
    "prompt": ["vocabulary"],
    "grids": ["grid"],
    "sentences": ["sentence"],
    "dry_run": ["runs"],
    "list": ["runs"],
    **{flag: ["dim", "heads"] for flag in ("d", "heads", "pos_dim", "kv_heads")},
}
"""What else an error may name."""


@st.composite
def command_line(draw):
    """A command, its words, and what of them an error may name."""
    name = draw(st.sampled_from(sorted(SOUND)))
    parameters = signature(resolve_name(COMMANDS[name][0])).parameters
    given = {flag: [value] for flag, value in SOUND[name].items()}
    unnamed = draw(st.sampled_from(UNNAMED.get(name, [[]])))
    spoiled = draw(st.lists(st.sampled_from(sorted({*parameters} - {"all"})), min_size=1, max_size=2, unique=True))
    for flag in spoiled:
        kind = str(parameters[flag].annotation)
        values = [fitting for word, fitting in FITTING.items() if word in kind]
        one = st.one_of(*values, st.sampled_from(NUMBERS) if "str" not in kind else ANYTHING, ANYTHING)
        if str(parameters[flag].kind) == "VAR_POSITIONAL" or flag in ("grids", "names", "sentences"):
            unnamed = [word for word in draw(st.lists(one, min_size=1, max_size=2)) if not word.startswith("-")]
        elif kind == "<class 'bool'>":
            given[flag] = []
        else:
            given[flag] = draw(st.lists(one, min_size=1, max_size=2 if "list" in kind else 1))
    for flag, most in LONG.items():
        for value in given.get(flag, []):
            assume(not (value.isdecimal() and most < int(value[:30]) < 2**62))
    words = [word for flag, values in given.items() for word in flagged(flag, values, draw(st.booleans()))]
    dry = ["--dry_run"] if name in DRY and "dry_run" not in given else []
    return name, [*unnamed, *words, *dry], [*spoiled, *(one_line(word)[:30] for word in unnamed if word)]


def flagged(flag: str, values: list[str], together: bool) -> list[str]:
    return [f"--{flag}={values[0]}"] if together and len(values) == 1 else [f"--{flag}", *values]


def lay_out(place: Path, trained: Callable[[str], Path]) -> None:
    """Makes a working directory anew, with much that is no file."""
    clear(place)
    for name in ("reverse", "characters", "translation"):
        Path(f"{name}.ckpt").symlink_to(trained(name))
    Path("experiments").symlink_to(REPOSITORY / "experiments")
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    Path("folder").mkdir()
    Path("file").touch()
    Path("link").symlink_to("link")


@fuzz(0.06, given=command_line())
@example(given=("study run", ["tiny.yaml", "--folder", "a" * 300, "--dry_run"], ["folder"]))
@example(given=("study report", ["tiny.yaml", "--folder", "link"], ["folder"]))
@example(given=("study report", ["tiny.yaml", "--folder", "/proc/x"], ["folder"]))
def test_commands(held, in_tmp_dir, trained, given):
    name, words, spoiled = given
    lay_out(in_tmp_dir, trained)
    called = [word for flag in spoiled for word in CALLED.get(flag, [])]
    held(lambda: execute(name, words), *spoiled, *called, "memory")
    assert not (in_tmp_dir / "owned").exists()
