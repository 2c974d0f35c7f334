"""Where there is nothing to learn, what was not seen is predicted by chance, while what was seen is learned by heart.

Bounds are five standard deviations of a guess. Of texts of symbols drawn alike, no predictor has a mean loss below
log V − δ with a probability above exp(−nδ), n being the number of predictions, whatever it was trained on.
"""

from math import log, sqrt

import lightning as L
import pytest
import torch

from kvt import tasks

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
UNLIKELY = log(1e6)  # of a test that fails by chance: once in a million seeds


def train(task, data, steps: int) -> tuple[L.Trainer, dict[str, float]]:
    """Train; return a Trainer that evaluates, and the last training metrics."""
    limits = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0}
    trainer = L.Trainer(**limits, log_every_n_steps=10, accelerator="cpu", **QUIET)
    trainer.fit(task, data)
    return L.Trainer(accelerator="cpu", **QUIET), trainer.callback_metrics


def random_words(count: int, symbols: str, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [symbols[i] for i in torch.randint(len(symbols), (count,), generator=generator).tolist()]


class Unrelated(tasks.DigitLists):
    """Lists, and others that have nothing to do with them."""

    def load(self):
        sizes = {f"{split}_size": number for split, number in self.sizes.items()}
        others = tasks.DigitLists(seed=self.seed + 1, length=self.length, **sizes)
        pairs = zip(super().load().items(), others.load().values(), strict=True)
        return {split: (digits, targets) for (split, (digits, _)), (targets, _) in pairs}


def test_guessing_is_right_once_in_as_many_times_as_there_are_answers(tmp_path):
    assert tasks.DigitLists.chance(length=8) == 1 / tasks.DigitLists(length=8).spec["vocab_size"]
    assert tasks.SetAnomalies.chance(set_size=5) == 1 / 5
    for dataset in ("cifar10", "cifar100"):
        images = tasks.Images(dataset, data_dir=str(tmp_path))
        assert tasks.Images.chance(dataset=dataset) == 1 / len(images.spec["classes"])
    assert tasks.Images.chance(root="mine") is None, "is known from the folder alone"
    assert tasks.Characters.chance() is None
    for length in (16, 32, 64, 128):
        data = tasks.HumanNumbers(length=length)
        data.setup("fit")
        words = torch.cat([targets for _, targets in data.val_dataloader()]).flatten()
        assert tasks.HumanNumbers.chance() == pytest.approx(words.bincount().max().item() / len(words), abs=5e-4)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.slow
def test_lists():
    data = Unrelated(length=8, train_size=32, val_size=4, test_size=500, batch_size=32)
    task = tasks.ListTask(data.spec, attn="kv+pos", dim=64, depth=1, heads=2, dropout=0.0, lr=5e-3)
    trainer, learned = train(task, data, 150)
    (tested,) = trainer.test(task, data, verbose=False)
    assert learned["train/acc"] > 0.5
    assert abs(tested["test/acc"] - 0.1) < 5 * sqrt(0.1 * 0.9 / (500 * 8))


@pytest.mark.slow
def test_characters(tmp_path):
    (tmp_path / "noise.txt").write_text("".join(random_words(800, "abcdefgh")))
    data = tasks.Characters(text=str(tmp_path / "noise.txt"), length=16, val_size=0.5, batch_size=32)
    task = tasks.CharacterTask(data.spec, attn="kv+pos", dim=64, depth=1, heads=2, dropout=0.0, lr=5e-3)
    trainer, learned = train(task, data, 150)
    (judged,) = trainer.validate(task, data, verbose=False)
    assert learned["train/loss"] < log(8) - 0.5
    assert judged["val/loss"] > log(8) - UNLIKELY / 399
    assert judged["val/acc"] < 1 / 8 + 5 * sqrt(7 / 64 / 399)


@pytest.mark.slow
def test_sentences(tmp_path):
    """Six words each: where a sentence ends is no secret, and costs next to nothing."""
    for number, (split, count) in enumerate({"train": 40, "val": 60, "test": 60}.items()):
        for side, language in enumerate(("de", "en")):
            words = iter(random_words(6 * count, ["uno", "due", "tre", "otto"], seed=2 * number + side))
            lines = [" ".join(next(words) for _ in range(6)) for _ in range(count)]
            (tmp_path / f"{split}.{language}").write_text("\n".join(lines))
    data = tasks.SentencePairs(root=str(tmp_path), batch_size=40, max_len=10)
    sizes = {"dim": 64, "depth": 1, "heads": 4}
    task = tasks.TranslationTask(data.spec, attn="kv+pos", dropout=0.0, smoothing=0.0, warmup=30, lr=1.0, **sizes)
    trainer, learned = train(task, data, 120)
    assert learned["train/loss"] < log(4) * 6 / 7 - 0.5
    (tested,) = trainer.test(task, data, verbose=False)
    assert log(tested["test/ppl"]) > (log(4) * 6 * 60 - UNLIKELY) / (7 * 60)
