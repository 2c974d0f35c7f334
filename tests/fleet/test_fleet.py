"""Runs that are trained together come to what each comes to alone: in float64 up to rounding."""

import csv
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.cli.main import run_lightning
from kvt.fleet.member import FleetRun
from kvt.fleet.trainer import FleetTrainer
from kvt.system.console import run
from kvt.system.errors import UserError
from kvt.tasks import ListTask
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import Checkpoint, read_checkpoint
from tests.conftest import CONFIGS, QUIET, SMALL_LISTS

TASKS = ("reverse", "sort", "copy")
# in float64, for where a gradient is zero but for rounding, Adam makes a whole step of the rounding
EXACT = ("--precision=64-true", "--max_steps=50", "--max_epochs=9", "--val_check_interval=3", "--gradient_clip_val=0.1")
TAKES_ITS_OWN_TIME = ("seconds", "_per_second", "started", "finished")


class Odd(ListTask):
    """Trains some of its weights only, and keeps in buffers, one saved and one not, how it was trained."""

    def configure_model(self):
        if not hasattr(self, "seen"):
            next(self.model.parameters()).requires_grad_(False)
            self.register_buffer("seen", torch.zeros(()), persistent=False)
            self.register_buffer("mean", torch.zeros(()))

    def compute_metrics(self, batch):
        if self.training:
            self.seen += 1  # in place
            self.mean = self.mean.lerp(batch[0].to(self.mean).mean(), 0.1)  # and anew
        measured = super().compute_metrics(batch)
        return {**measured, "loss": measured["loss"] + self.seen + self.mean}


class Hooked(ListTask):
    """Looks at its gradients."""

    def on_after_backward(self):
        pass


def words(config: str, root: Path, *flags: str) -> list[str]:
    small = [*SMALL_LISTS, "--depth", "1", "--heads", "2"] if config in TASKS else []
    return ["fit", f"--config={CONFIGS / config}.yaml", *QUIET, *small, f"--default_root_dir={root}", *flags]


def runs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.rglob("result.json"))


@pytest.fixture
def both(in_tmp_dir) -> Callable[..., list[tuple[Path, Path]]]:
    """Makes runs alone, and once more together; returns the folders of each run."""

    def call(flags: Sequence[tuple[str, ...]], *common: str) -> list[tuple[Path, Path]]:
        for config, *own in flags:
            CLI(words(config, Path("alone"), *common, *own), test=True)
        begin = [partial(_begin, words(config, Path("together"), *common, *own)) for config, *own in flags]
        run(FleetTrainer(begin).run)
        pairs = [*zip(runs(Path("alone")), runs(Path("together")), strict=True)]
        assert len(pairs) == len(flags)
        return pairs

    return call


def _begin(argv: list[str], fleet: FleetTrainer) -> None:
    FleetRun(argv, test=True, fleet=fleet)


def same(alone: object, together: object, tolerance: float) -> bool:
    """Whether all numbers are the same, up to rounding, and everything else is."""
    if isinstance(alone, dict):
        assert alone.keys() == together.keys()
        return all(
            same(value, together[name], tolerance)
            for name, value in alone.items()
            if not str(name).endswith(TAKES_ITS_OWN_TIME)
        )
    if isinstance(alone, list | tuple):
        assert len(alone) == len(together)
        return all(same(*pair, tolerance) for pair in zip(alone, together, strict=True))
    if isinstance(alone, torch.Tensor):
        return torch.allclose(alone, together, rtol=tolerance, atol=tolerance)
    if isinstance(alone, float):
        return alone == pytest.approx(together, rel=tolerance, abs=tolerance, nan_ok=True)
    return alone == together


def history(run: Path) -> list[dict[str, float]]:
    with (run / "history.csv").open() as file:
        return [{name: float(cell or "nan") for name, cell in row.items()} for row in csv.DictReader(file)]


def result(run: Path) -> dict[str, object]:
    whole = json.loads((run / "result.json").read_text())
    whole.pop("fleet", None)
    del whole["config"]["trainer"]["default_root_dir"]
    return whole


def events(run: Path) -> dict[str, list[int]]:
    found = EventAccumulator(str(run))
    found.Reload()
    tags = [tag for tag in found.Tags()["scalars"] if not tag.endswith(TAKES_ITS_OWN_TIME)]
    return {tag: sorted({event.step for event in found.Scalars(tag)}) for tag in tags}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [("reverse", "--seed=0"), ("reverse", "--seed=1"), ("reverse", "--seed=2")],
        [("reverse", "--lr=1e-2"), ("sort", "--lr=1e-3"), ("copy", "--lr=3e-3", "--seed=5")],
    ],
    ids=["seeds", "tasks and rates"],
)
def test_together_as_alone(both, flags):
    """With dropout of residual branches and of attention weights, clipped: after 50 steps in everything they leave."""
    for alone, together in both(flags, *EXACT, "--attn=kv+pos", "--attn_kwargs.dropout=0.2"):
        assert same(history(alone), history(together), 1e-6)
        assert same(result(alone), result(together), 1e-6)
        assert events(alone) == events(together)
        for name in ("best", "last"):
            there, here = (read_checkpoint(run / "checkpoints" / f"{name}.ckpt") for run in (alone, together))
            assert same(there["state_dict"], here["state_dict"], 1e-9)
            for key in ("optimizer_states", "lr_schedulers", "loops", "DigitLists", "processes", "metrics"):
                assert same(there[key], here[key], 1e-6), key
            assert there["callbacks"].keys() == here["callbacks"].keys()
            assert same(*(callbacks["callbacks"]["History"] for callbacks in (there, here)), 1e-6)
            size = [(run / "checkpoints" / f"{name}.ckpt").stat().st_size for run in (alone, together)]
            assert size[1] < 1.1 * size[0]


@pytest.mark.slow
def test_frozen_weights_stay_buffers_follow_and_a_validation_follows_the_last_step(both):
    flags = ("--precision=64-true", "--max_epochs=2", "--val_check_interval=4", f"--model={__name__}.Odd")
    for alone, together in both([("reverse", "--seed=0"), ("reverse", "--seed=1")], *flags):
        assert events(alone) == events(together)
        assert same(history(alone), history(together), 1e-6)
        assert same(result(alone), result(together), 1e-6)
        there, here = (read_checkpoint(run / "checkpoints" / "last.ckpt") for run in (alone, together))
        assert there["state_dict"]["mean"] > 0
        assert there["loops"] == here["loops"]
        assert same(there["state_dict"], here["state_dict"], 1e-9)
        assert same(there["optimizer_states"], here["optimizer_states"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [(["--precision=32", "--dropout=0.3"], 1e-3), (["--precision=bf16-mixed", "--accumulate_grad_batches=2"], 0.02)],
)
def test_in_lower_precision_losses_are_alike_after_a_few_steps(both, flags, tolerance):
    """After more of them, Adam has made steps out of rounding."""
    for alone, together in both([("sort", f"--seed={seed}") for seed in range(2)], "--max_epochs=2", *flags):
        assert same(history(alone), history(together), tolerance)


@pytest.mark.slow
def test_augmented_images_with_a_schedule_that_follows_the_epochs(both):
    """Every member augments as alone, and validates on images as they are."""
    common = ("--batch_size=8", "--val_size=6", "--dim=16", "--depth=1", "--heads=2", "--max_epochs=2")
    flags = [("cifar10", f"--seed={seed}") for seed in range(2)]
    for alone, together in both(flags, *common, "--model.milestones=[1]", "--precision=64-true"):
        assert same(history(alone), history(together), 1e-5)
        assert same(result(alone)["test/acc"], result(together)["test/acc"], 1e-6)


def test_a_member_that_diverges_ends_and_disturbs_no_other(both):
    flags = [("sort", "--seed=0"), ("sort", "--seed=1", "--lr=1e300"), ("sort", "--seed=2")]
    pairs = both(flags, "--precision=64-true", "--max_epochs=2", "--log_every_n_steps=2")
    for alone, together in (pairs[0], pairs[2]):
        assert same(history(alone), history(together), 1e-6)
        assert same(result(alone), result(together), 1e-6)
    alone, together = pairs[1]
    assert result(together)["diverged"] == result(alone)["diverged"]
    assert "test/loss" not in result(together)
    assert events(together).keys() == events(alone).keys()
    trained = [row for row in history(together) if row["train/loss"] == row["train/loss"]]
    assert len(trained) == sum(row["train/loss"] == row["train/loss"] for row in history(alone))


@pytest.mark.slow
def test_a_fleet_whose_members_all_diverge_stops(in_tmp_dir):
    flags = ("--lr=1e30", "--max_epochs=9")
    run(FleetTrainer([partial(_begin, words("sort", Path(), f"--seed={n}", *flags)) for n in (0, 1)]).run)
    assert all(read_checkpoint(path)["epoch"] < 8 for path in Path().rglob("last.ckpt"))
    assert len([*Path().rglob("last.ckpt")]) == 2


class StopError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("step", [9, 14])  # its checkpoint is amid an epoch of 6 steps, and at the end of one
def test_what_was_killed_goes_on_together_and_alone(both, monkeypatch, step):
    flags = [("sort", f"--seed={seed}") for seed in range(3)]
    common = ("--precision=64-true", "--max_epochs=3", "--val_check_interval=0.5", "--log_every_n_steps=4")
    whole = [together for _, together in both(flags, *common)]
    step_of = ListTask.compute_metrics

    def killed(self, batch):
        if self.training and self.trainer.lightning_module.killed_in == 0:
            raise StopError
        self.trainer.lightning_module.killed_in -= self.training
        return step_of(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ListTask, "compute_metrics", killed)
        patch.setattr(ListTask, "killed_in", step, raising=False)
        with pytest.raises(StopError):
            FleetTrainer([partial(_begin, words("sort", Path("killed"), *common, *own)) for _, *own in flags]).run()
    lasts = sorted(Path("killed").rglob("last.ckpt"))
    assert len(lasts) == 3
    assert {read_checkpoint(last)["global_step"] for last in lasts} == {step // 3 * 3}
    (alone, *others) = [["fit", *QUIET, f"--ckpt_path={last}"] for last in lasts]
    CLI(alone, test=True)
    run(FleetTrainer([partial(_begin, argv) for argv in others]).run)
    for through, resumed in zip(whole, runs(Path("killed")), strict=True):
        assert same(history(through), history(resumed), 1e-6)
        assert result(through)["test/acc"] == pytest.approx(result(resumed)["test/acc"])


@pytest.mark.slow
def test_what_was_killed_after_its_last_step_is_tested_alone(both):
    pairs = both([("copy", "--seed=0"), ("copy", "--seed=1")], "--max_epochs=1")
    for _, together in pairs:
        (together / "result.json").unlink()
    argv = [["fit", *QUIET, f"--ckpt_path={together}/checkpoints/last.ckpt"] for _, together in pairs]
    run(FleetTrainer([partial(_begin, each) for each in argv]).run)
    for alone, together in pairs:
        there, here = result(alone), result(together)
        del there["config"], here["config"]  # this one names the checkpoint
        assert same(there, here, 1e-3)
        assert json.loads((together / "result.json").read_text()).get("fleet", 1) > 0


@pytest.mark.slow
def test_kvt_fit_does_not_test(in_tmp_dir):
    run(lambda: run_lightning([*words("copy", Path(), "--max_epochs=1"), "--fleet=2"]))
    for folder in runs(Path()):
        assert not any(tag.startswith("test/") for tag in [*events(folder), *result(folder)])


@pytest.mark.slow
def test_the_command_line(in_tmp_dir, capsys):
    run(lambda: run_lightning([*words("reverse", Path(), "--max_epochs=1", "--seed=3"), "--fleet", "2"], test=True))
    table = capsys.readouterr().out.splitlines()[-5:]
    assert table[0].split() == ["seed", "val/loss", "val/acc", "test/loss", "test/acc", "run"]
    assert [row.split()[0] for row in table[1:]] == ["3", "4", "mean", "std"]
    first, second = (float(row.split()[1]) for row in table[1:3])
    assert float(table[3].split()[1]) == pytest.approx((first + second) / 2, abs=1e-4)
    assert float(table[4].split()[1]) == pytest.approx(abs(first - second) / 2**0.5, abs=1e-4)
    for folder, seed in zip(runs(Path()), (3, 4), strict=True):
        assert result(folder)["seed"] == seed
        assert folder.name == f"version_{seed - 3}"
        assert json.loads((folder / "result.json").read_text())["fleet"] == 2
        Checkpoint(folder / "checkpoints" / "best.ckpt").load_task(ListTask)
        run(lambda folder=folder: CLI(["test", *QUIET, f"--ckpt_path={folder}/checkpoints/best.ckpt"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fleet=x"], "--fleet x: how many"),
        (["--fleet=2", "--devices=2"], "one device: --devices 1"),
        (["--fleet=2", "--ckpt_path=x"], "leave --fleet out"),
        (["--fleet=2", "--compile=true"], "leave out --compile or --fleet"),
        (["--fleet=2", "--callbacks=LearningRateMonitor"], "trainer.callbacks"),
    ],
)
def test_mistakes(mistake, flags, message):
    assert message in mistake(lambda: run(lambda: run_lightning([*words("reverse", Path(), *flags)])))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (("reverse", "--dropout=0.5"), "share --dropout: 0.1 and 0.5"),
        (("reverse", "--train_size=112"), "share the train data"),
        (("reverse", "--max_epochs=7"), "share --max_epochs"),
        (("cifar10", "--batch_size=8", "--val_size=6"), "share --model: ListTask and ImageTask"),
        (("translation",), "run it alone"),
        (("reverse", f"--model={__name__}.Hooked"), "on_after_backward.*run it alone"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_what_does_not_go_together_is_refused_and_leaves_nothing(in_tmp_dir, second, message):
    alike = [(*second, "--seed=1"), second] if message.endswith("run it alone") else [("reverse",), second]
    begin = [partial(_begin, words(config, Path("x"), *own)) for config, *own in alike]
    with pytest.raises(UserError, match=message):
        FleetTrainer(begin).run()
    assert not [path for path in Path("x").rglob("*") if path.is_file()]
