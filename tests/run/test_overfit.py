"""--overfit_batches: a run learns its first batches by heart, and is validated on them."""

import pytest
from lightning.pytorch.callbacks import LambdaCallback

import kvt
from tests.conftest import SMALL
from tests.helpers.runs import read_result

QUIETLY = {"accelerator": "cpu", "enable_progress_bar": False}
LASTING = {"max_epochs": 3, "max_steps": -1, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}


def content(batch):
    return b"".join(part.contiguous().numpy().tobytes() for part in batch)


def small(task: str, **settings) -> kvt.RunConfig:
    words = " ".join(SMALL[task]).replace("=", " ").split()
    given = dict(zip((flag[2:] for flag in words[::2]), words[1::2], strict=True))
    return kvt.RunConfig.from_name(task).changed(**{**given, **QUIETLY, **LASTING, **settings})


@pytest.mark.parametrize(
    ("task", "overfit", "settings"),
    [
        ("reverse", 2, {}),
        ("reverse", 0.5, {}),
        ("mqar", 2, {}),
        ("cifar10", 2, {"augment": False}),
        ("anomaly", 2, {}),
        ("characters", 1, {}),
        ("language_model", 2, {}),
        ("translation", 2, {}),
    ],
)
def test_every_epoch_and_every_validation_has_the_same_first_batches(in_tmp_dir, task, settings, overfit):
    trained: list[list[bytes]] = []
    validated: list[list[bytes]] = []
    look = LambdaCallback(
        on_train_epoch_start=lambda *_: trained.append([]),
        on_validation_epoch_start=lambda *_: validated.append([]),
        on_train_batch_start=lambda trainer, task, batch, _: trained[-1].append(content(batch)),
        on_validation_batch_start=lambda trainer, task, batch, *_: validated[-1].append(content(batch)),
    )
    result = kvt.train(small(task, overfit_batches=overfit, **settings), callbacks=[look], test=False)
    assert len(trained) == len(validated) == 3
    first, *others = [*trained, *validated]
    assert all(batches == first for batches in others)
    assert len(first) == overfit if overfit >= 1 else first
    assert len(set(first)) == len(first)
    assert "batches of training" in read_result(result.folder)["notes"]["overfit_batches"]


def test_what_is_learned_by_heart_is_what_is_measured(in_tmp_dir):
    """A translator that has one sentence alone is right about it, in words too: its references are those it learned."""
    lasting = {"max_epochs": 120, "check_val_every_n_epoch": 120}
    config = small("translation", overfit_batches=1, batch_size=1, warmup=30, lr=2.0, dropout=0.0, **lasting)
    assert kvt.train(config, test=False).metrics["val/bleu"] == pytest.approx(100)


def test_a_checkpoint_is_validated_as_its_run_was_with_the_same_flag(in_tmp_dir, says):
    result = kvt.train(small("reverse", overfit_batches=1))
    lines = says("validate", "--ckpt_path", result.checkpoint, "--overfit_batches", "1")
    (accuracy,) = [float(line.split()[-2]) for line in lines if "val/acc" in line]
    assert accuracy == pytest.approx(result.metrics["val/acc"])
