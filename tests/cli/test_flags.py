"""Hostile command lines: whatever a flag is given, a correct run, or one line that names it."""

import json
from inspect import signature
from itertools import chain
from pydoc import locate

import lightning as L
import pytest
import yaml
from hypothesis import assume
from hypothesis import strategies as st

from kvt.cli.lightning_cli import run_words
from kvt.tasks.base import known_classes
from tests.conftest import CONFIGS, QUIET, SMALL
from tests.helpers.hostile import fuzz

NUMBERS = ["0", "-0", "-1", "1", "2", "0.5", "1.0", "1e3", "1e308", "1e400", "-1e400", "5e-324", "nan", ".nan"]
NUMBERS += ["inf", "-inf", "0x10", "1_000", "0b_", "1:30", "١", "½", "2024-99-99"]
NUMBERS += map(str, (-(10**9), 2**63, 10**30, 10**300))  # those between could be meant, and fill the memory
TEXTS = ["", " ", "\n", "\x85", "\u2028", "\ufeff", "é" * 3000, "a" * 100_000, "%s %d", "a: b: c"]
TEXTS += ["x", "ä", "🙂", "\x1b[2J", "\udcff", "{0}", "$HOME", "null", "~", "true", "no", "-", "--", "=", "a=b", "@x"]
TEXTS += ["`", "'", '"', ":", "#", "?"]
TEXTS += ["..", "/", "/dev/null", "~nobody_here/x", "nowhere/x", "http://localhost:1/x.yaml"]
TEXTS += ["memory://x"]
TEXTS += ["os.system", "torch.nn.Linear", "kvt.tasks.ListTask", "tests", "a.b.c", ".", "kv", "KV"]
LISTS = ["[]", "[1]", "[null]", "[x", "]", "{}", "{:", "[[[[[[[[[[1]]]]]]]]]]"]
LISTS += ["[1, 2, 3]", "{a: 1}", "{a: 1, a: 2}", "{1: 2}", "{? [a] : b}", "- 1", "- - 1", "&a [*a]"]
LISTS += ["!!python/object/apply:os.mkdir [owned]", "!!binary aGk=", "!!set {a}", "!x y", "--- 1\n--- 2"]
LISTS += ['{"class_path": "os.mkdir", "init_args": {"path": "owned"}}', "{class_path: x}", "{init_args: {dim: 3}}"]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
WORDS = st.text(st.characters(blacklist_characters="\0"), max_size=20)  # no command line has a NUL in it
ANYTHING = st.sampled_from(TEXTS) | st.sampled_from(LISTS) | WORDS | PLAIN.map(json.dumps)
KINDS = {
    "int": st.integers(-2, 70).map(str),
    "float": st.floats(0, 2).map(str),
    "bool": st.sampled_from(["true", "false"]),
    "list": st.sampled_from(["[1]", "[0.5, 0.5, 0.5]", "[3, 2]", "[-1]", "[0]", "[nan]", "[1e400]"]),
}
"""Values that may be right, by words in a type."""

ENDS = {"fast_dev_run", "limit_train_batches", "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps"}
"""What ends a run, of which `SHORT` says the rest."""
ELSEWHERE = {"data_dir", "devices", "num_nodes", "spec", "strategy"}
"""What makes folders before a download, what may begin processes, and what no flag sets."""
CALLED = {
    "overfit_batches": "limit_train_batches",
    **{"dataset": "data set", "source": "language", "target": "language", "max_time": "duration"},
    **dict.fromkeys(("length", "train_size", "val_size"), "batch_size"),
    **dict.fromkeys(("features", "text", "weights"), "missing"),
    "root": "needs train/",
}
"""What else an error may name, where two settings do not fit each other."""
SHORT = ["--max_epochs", "1", "--max_steps", "1", "--limit_train_batches", "1", "--limit_val_batches", "1"]
SHORT += ["--limit_test_batches", "1"]


def settings_of(config: str) -> dict[str, str]:
    """The settings of a task and of the Trainer, with their types as they are written."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    classes = [L.Trainer, *(locate(content[section]["class_path"]) for section in ("model", "data"))]
    parameters = chain.from_iterable(signature(cls).parameters.items() for cls in classes)
    return {name: str(parameter.annotation) for name, parameter in parameters if name not in ELSEWHERE}


@st.composite
def command_line(draw):
    """A configuration, words of the command line, and the flag that an error may name."""
    config = draw(st.sampled_from(sorted(SMALL)))
    kinds = settings_of(config)
    others = {name for cls in known_classes().values() for name in signature(cls).parameters} - ELSEWHERE
    name = draw(st.sampled_from([*kinds, "seed"]) | st.sampled_from(sorted(others)))
    fitting = [values for word, values in KINDS.items() if word in kinds.get(name, "int")]
    value = draw(st.one_of(*fitting, *fitting, st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), ANYTHING))
    assume(name != "default_root_dir" or not value.startswith(("/", "~", "..")))
    short = SHORT if config == "reverse" else [*SHORT, "--logger", "false"]  # pictures take long
    ends = short if name in ENDS or draw(st.booleans()) else ["--fast_dev_run", "true"]
    return config, [*ends, f"--{name}={value}"], name


@fuzz(0.25, given=command_line())
@pytest.mark.usefixtures("offline")
def test_settings(held, in_tmp_dir, given):
    config, words, name = given
    command = ["run", "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *SMALL[config], *words]
    held(lambda: run_words(command), name, CALLED.get(name, name), "memory", "name too long")
    assert not (in_tmp_dir / "owned").exists()
