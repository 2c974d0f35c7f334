"""Data without structure: models memorise the training split and stay at chance on the others.

Bounds are five standard deviations of a guess. On uniformly random symbols, whatever a predictor was trained on, the
probability of a mean loss below log V − δ is at most exp(−nδ), where n is the number of predictions.
"""

from math import log, sqrt

import lightning as L
import pytest
import torch

from kvt.tasks import (
    AnomalyTask,
    Characters,
    CharacterTask,
    DigitLists,
    HumanNumbers,
    Images,
    ImageTask,
    ListTask,
    NumberTask,
    SentencePairs,
    SetAnomalies,
    TranslationTask,
)
from tests.conftest import write_features, write_images

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
UNLIKELY = log(1e6)  # a test fails by chance for one seed in a million


def train(task, data, steps: int) -> L.Trainer:
    """Train for some steps; the last row of the task's history then holds the training metrics."""
    fit = L.Trainer(
        max_steps=steps, max_epochs=-1, limit_val_batches=0, log_every_n_steps=10, accelerator="cpu", **QUIET
    )
    fit.fit(task, data)
    return L.Trainer(accelerator="cpu", **QUIET)


def require_chance(measured: float, chance: float, predictions: int) -> None:
    assert abs(measured - chance) < 5 * sqrt(chance * (1 - chance) / predictions)


def random_words(count: int, symbols: str, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [symbols[i] for i in torch.randint(len(symbols), (count,), generator=generator).tolist()]


class Unrelated(DigitLists):
    """Lists, and targets that do not depend on them."""

    def load(self):
        others = DigitLists(seed=self.seed + 1, length=self.length, **{f"{k}_size": n for k, n in self.sizes.items()})
        pairs = zip(super().load().items(), others.load().values(), strict=True)
        return {split: (digits, targets) for (split, (digits, _)), (targets, _) in pairs}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_lists():
    data = Unrelated(length=8, train_size=32, val_size=4, test_size=500, batch_size=32)
    task = ListTask(data.spec, "kv+pos", dim=64, depth=1, heads=2, dropout=0.0, lr=5e-3)
    (tested,) = train(task, data, 150).test(task, data, verbose=False)
    assert task.history[-1]["train/acc"] > 0.5
    require_chance(tested["test/acc"], 0.1, 500 * 8)


def test_images(tmp_path):
    write_images(tmp_path / "noise", classes=3, size=28, mode="L", train=12, test=200)
    data = Images(
        root=str(tmp_path / "noise"), augment=False, val_size=6, mean=[0.5], std=[0.3], data_dir=str(tmp_path)
    )
    task = ImageTask(data.spec, patch=7, dim=32, depth=1, heads=2, lr=3e-3)
    (tested,) = train(task, data, 60).test(task, data, verbose=False)
    assert task.history[-1]["train/acc"] > 0.9
    require_chance(tested["test/acc"], 1 / 3, 600)


def test_sets(tmp_path):
    write_features(tmp_path / "noise.pt", classes=4, width=32, train=12, test=150)
    data = SetAnomalies(features=str(tmp_path / "noise.pt"), set_size=4, val_size=0.3, batch_size=32)
    task = AnomalyTask(data.spec, "kv", dim=64, depth=1, heads=4, dropout=0.0, lr=3e-3, warmup=10)
    (tested,) = train(task, data, 200).test(task, data, verbose=False)
    assert task.history[-1]["train/acc"] > 0.5
    require_chance(tested["test/acc"], 0.25, 600)


def test_characters(tmp_path):
    (tmp_path / "noise.txt").write_text("".join(random_words(800, "abcdefgh")))
    data = Characters(text=str(tmp_path / "noise.txt"), length=16, val_size=0.5, batch_size=32)
    task = CharacterTask(data.spec, "kv+pos", dim=64, depth=1, heads=2, dropout=0.0, lr=5e-3)
    (judged,) = train(task, data, 150).validate(task, data, verbose=False)
    assert task.history[-1]["train/loss"] < log(8) - 0.5
    assert judged["val/loss"] > log(8) - UNLIKELY / 399
    assert judged["val/acc"] < 1 / 8 + 5 * sqrt(7 / 64 / 399)


def test_words():
    data = HumanNumbers(length=16, val_size=0.5, batch_size=8)
    data.text = random_words(1025, data.vocab[:8])
    task = NumberTask(data.spec, "kv+pos", dim=64, depth=1, heads=2, dropout=0.0, feed_forward_dropout=0.0, lr=1e-2)
    (judged,) = train(task, data, 200).validate(task, data, verbose=False)
    assert task.history[-1]["train/loss"] < log(8) - 0.5
    assert judged["val/loss"] > log(8) - UNLIKELY / 512
    assert judged["val/acc"] < 1 / 8 + 5 * sqrt(7 / 64 / 512)


def test_sentences(tmp_path):
    """Six words each, so that <eos> is predictable."""
    for number, (split, count) in enumerate({"train": 40, "val": 60, "test": 60}.items()):
        for side, language in enumerate(("de", "en")):
            words = iter(random_words(6 * count, ["uno", "due", "tre", "otto"], seed=2 * number + side))
            lines = [" ".join(next(words) for _ in range(6)) for _ in range(count)]
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines))
    data = SentencePairs(root=str(tmp_path), batch_size=40, max_len=10)
    task = TranslationTask(data.spec, "kv+pos", dim=64, depth=1, heads=4, dropout=0.0, smoothing=0.0, warmup=30, lr=1.0)
    trainer = train(task, data, 120)
    assert task.history[-1]["train/loss"] < log(4) * 6 / 7 - 0.5
    (tested,) = trainer.test(task, data, verbose=False)
    assert log(tested["test/ppl"]) > (log(4) * 6 * 60 - UNLIKELY) / (7 * 60)
