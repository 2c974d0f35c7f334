"""The models that come with the repository load, and do what their cards say."""

import json
import re
import runpy
from unicodedata import is_normalized

import pytest
import torch

import kvt
from kvt.tasks import DigitLists
from kvt.tasks.language import spell
from tests.conftest import REPOSITORY

ZOO = REPOSITORY / "zoo"
MODELS = sorted(path.stem for path in ZOO.glob("*.ckpt"))


def stated(name: str, metric: str) -> float:
    """A number of a card."""
    return float(re.search(rf"^{metric} +([\d.]+)$", (ZOO / f"{name}.md").read_text(), re.MULTILINE)[1])


def test_the_zoo_is_small_and_each_model_has_a_card_and_a_mention():
    assert sum(path.stat().st_size for path in ZOO.iterdir() if path.is_file()) < 10e6
    about = (ZOO / "README.md").read_text()
    assert {*re.findall(r"`([\w+-]+)\.ckpt`", about)} == {*MODELS} == {*re.findall(r"\(([\w+-]+)\.md\)", about)}


@pytest.mark.parametrize("name", MODELS)
def test_a_card_has_the_settings_of_its_model(name):
    task, card = kvt.load(ZOO / f"{name}.ckpt"), (ZOO / f"{name}.md").read_text()
    assert f"`{type(task).__name__}` with `--attn {task.hparams['attn']}`" in card
    for setting in ("dim", "depth", "heads"):
        assert f"| `{setting}` | {task.hparams[setting]} |" in card


def test_no_symbol_of_a_model_changes_in_unicodes_composed_form():
    specs = [kvt.load(ZOO / f"{name}.ckpt").hparams["spec"] for name in MODELS]
    assert is_normalized("NFC", json.dumps(specs, ensure_ascii=False))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("reverse")])
def test_lists_are_reversed_as_well_as_the_card_says(name):
    task, data = kvt.load(ZOO / f"{name}.ckpt"), DigitLists(task="reverse")
    digits, reversed_digits = (tensor[:2000] for tensor in data.load()["test"])
    accuracy = task.predict(digits).eq(reversed_digits).double().mean()
    assert accuracy == pytest.approx(stated(name, "test/acc"), abs=0.003)


def test_a_model_counts():
    task = kvt.load(ZOO / "human_numbers-kv.ckpt")
    words = set(" ".join(spell(number) for number in range(1, 10_000)).split()) | {"."}
    text = task.generate("seven thousand three hundred twelve .", 40, temperature=0)
    assert set(text.split()) <= words
    assert text.startswith("seven thousand three hundred twelve . seven thousand three hundred")


def test_a_model_writes_words():
    task = kvt.load(ZOO / "characters-kv.ckpt")
    text = task.generate("To be", 300, temperature=0.5)
    assert text.startswith("To be")
    assert len({*re.findall(r"[a-z]+", text.lower())} & {"the", "and", "of", "to", "that", "in", "you"}) >= 3
    assert all(weight.isfinite().all() and weight.dtype == torch.float32 for weight in task.parameters())


def test_a_run_is_packed_with_its_card(trained, in_tmp_dir):
    pack = runpy.run_path(str(ZOO / "pack.py"))["pack"]
    pack.__globals__["ZOO"] = in_tmp_dir
    pack("small", trained("reverse").parents[1])
    task, card = kvt.load("small.ckpt"), (in_tmp_dir / "small.md").read_text()
    assert f"| `dim` | {task.hparams['dim']} |" in card
    assert re.search(rf"^parameters +{task.num_parameters:,}$", card, re.MULTILINE)
