"""`kvt fit --fleet N`: makes N runs and trains them as one; `kvt.fleet.fleet` explains how."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import Callback, TQDMProgressBar

from kvt.data.loader import Batches
from kvt.fleet.alike import require_alike
from kvt.fleet.fleet import Fleet
from kvt.fleet.loader import StackedLoader
from kvt.fleet.member import FleetRun, FleetState, PausingThread
from kvt.system.errors import UserError
from kvt.training.callbacks import FinalValidation
from kvt.training.flags import split_flags
from kvt.training.load_checkpoint import read_checkpoint


class FleetTrainer(FleetState):
    """Starts runs, trains them as one, and lets them end. Each starter makes one `FleetRun`, given this trainer."""

    def __init__(self, starters: "Iterable[Callable[[FleetTrainer], object]]") -> None:
        super().__init__()
        self._threads = [PausingThread(partial(start, self)) for start in starters]

    def run(self) -> None:
        """Make all runs. If one raises, or the training of all, the others end with the same error."""
        try:
            for thread in self._threads:
                thread.go_on()
            if self.members:
                self._train()
            for thread in self._threads:
                thread.go_on()
        except BaseException as error:
            for thread in self._threads:
                thread.cancel(error)
            raise

    def _train(self) -> None:
        require_alike(members := self.members)
        settings, fleet = members[0].trainer_settings, Fleet(members)
        own: list[Callback] = members[0].trainer.callbacks  # type: ignore[attr-defined]
        final = [FinalValidation(each.step) for each in own if isinstance(each, FinalValidation)]
        callbacks: list[Callback] = [self.throughput, *final]
        if settings["enable_progress_bar"] is not False:
            callbacks.append(TQDMProgressBar(refresh_rate=20))
        settings |= {"logger": False, "enable_checkpointing": False, "devices": 1, "callbacks": callbacks}
        trainer = L.Trainer(**settings)
        self._resume(trainer)
        training = StackedLoader([cast(Batches, member.trainer.train_dataloader) for member in members])
        validation = StackedLoader([member.datamodule.val_dataloader() for member in members])
        trainer.fit(fleet, training, validation)
        if any(member.to_test for member in members):
            fleet.load_weights([member.best_weights() for member in members])
            test = StackedLoader([member.datamodule.test_dataloader() for member in members])
            trainer.test(fleet, test, verbose=False)

    def _resume(self, trainer: L.Trainer) -> None:
        paths = [member.ckpt_path for member in self.members]
        loops = [read_checkpoint(path)["loops"]["fit_loop"] if path else {} for path in paths]
        for state in loops:
            state.get("state_dict", {}).pop("combined_loader", None)  # the members' own loaders have restored theirs
        if any(state != loops[0] for state in loops):
            raise UserError("--fleet: the checkpoints of the members are not of the same step: let each go on alone")
        if loops[0]:
            trainer.fit_loop.load_state_dict(loops[0])


def run_fleet(argv: Sequence[str], test: bool = False) -> None:
    """Train the N runs of a command line with --fleet N as one, with consecutive seeds, and print their results.

    With `test`, each run ends with a test of its best checkpoint.
    """
    flags, words = split_flags(argv)
    if not flags.fleet.isdecimal() or not int(flags.fleet):
        raise UserError(f"--fleet {flags.fleet}: how many runs? A number from 1")
    if words[:1] != ["fit"]:
        raise UserError(f"--fleet trains: it goes with fit, not with {' '.join(words[:1])}")
    if flags.ckpt_path is not None:
        raise UserError("--ckpt_path: each run of a fleet goes on alone, from its own last.ckpt: leave --fleet out")
    fleet = FleetTrainer([partial(_start, argv, test, number) for number in range(int(flags.fleet))])
    fleet.run()
    print(f"\n{summary(sorted(fleet.results, key=lambda rows: rows['seed']))}")


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each run, and the mean and standard deviation of those that have not diverged."""
    import pandas as pd  # imported here: it takes long

    frame = pd.DataFrame(results)
    metrics = [name for name in frame if "/" in name]
    kept = frame if "diverged" not in frame else frame[frame["diverged"].isna()]
    ends = [{"seed": name, **getattr(kept[metrics], name)()} for name in ("mean", "std")] if len(kept) > 1 else []
    columns = ["seed", *metrics, *(name for name in ("diverged", "run") if name in frame)]
    return str(pd.concat([frame, pd.DataFrame(ends)])[columns].to_string(index=False, na_rep="", float_format="%.4f"))


def _start(words: Sequence[str], test: bool, number: int, fleet: FleetTrainer) -> None:
    seed = [f"--seed={fleet.runs[0].config.seed_everything + number}"] if number else []
    FleetRun([*words, *seed], test=test, fleet=fleet)
