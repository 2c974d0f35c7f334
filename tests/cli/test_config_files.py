"""Hostile configurations beside a sound one: a correct run, or one line that names a file or a setting."""

import yaml
from hypothesis import strategies as st

from kvt.cli.lightning_cli import run_words
from tests.conftest import CONFIGS, QUIET
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import NUMBERS, TEXTS, spoiled

SMALL = {"train_size": 32, "val_size": 16, "test_size": 16, "batch_size": 16, "length": 4}
BASE = yaml.safe_load((CONFIGS / "reverse.yaml").read_text())
BASE["model"]["init_args"] |= {"dim": 16, "depth": 1, "heads": 2}
BASE["data"]["init_args"] |= SMALL
CLASSES = ["os.system", "os.mkdir", "torch.nn.Linear", "kvt.tasks.ListTask", "kvt.tasks.DigitLists", "kvt.tasks.Task"]
CLASSES += ["kvt.tasks.ImageTask", "kvt.tasks.AnomalyTask", "lightning.LightningModule", "ListTask", "nowhere.Task"]
CLASSES += ["Task", "kvt.attention.KV", "builtins.open", "kvt", "..", "kvt.tasks.", "é.x"]
NAMES = ["model", "data", "trainer", "init_args", "class_path", "dict_kwargs", "seed_everything", "ckpt_path"]
NAMES += ["attn", "attn_kwargs", "spec", "lr"]
NAMES += ["seed", "compile", "logger", "callbacks", "max_time", "optimizer", "fit", "config"]
INSIDE = [[], {}, [[]], [None], {"kv_heads": 1}, {"score": "os.system"}, {"a": {"b": [1]}}, {"class_path": "os.mkdir"}]
INSIDE += [{"class_path": name, "init_args": {"path": "made"}} for name in CLASSES[:4]]
VALUES = st.one_of(map(st.sampled_from, ([*NUMBERS, None], TEXTS, [*CLASSES, *NAMES], INSIDE)))


def names(content) -> set[str]:
    """Every key in plain data."""
    if isinstance(content, list):
        return set().union(*map(names, content))
    return set(content).union(*map(names, content.values())) if isinstance(content, dict) else set()


@fuzz(
    0.04, content=spoiled(BASE, VALUES), again=st.sampled_from([*[""] * 9, "model: {}\n", "data:\n", "x: 1\n", "- 1\n"])
)
def test_config_files(held, in_tmp_dir, content, again):
    base, hostile = in_tmp_dir / "base.yaml", in_tmp_dir / "hostile.yaml"
    base.write_text(yaml.dump(BASE))
    hostile.write_text(yaml.dump(content) + again)
    words = ["run", "--config", str(base), "--config", str(hostile), *QUIET, "--fast_dev_run", "1"]
    held(lambda: run_words(words), "hostile.yaml", "--", *filter(None, names(content)))
    assert sorted(path.name for path in in_tmp_dir.iterdir()) == ["base.yaml", "hostile.yaml"]
