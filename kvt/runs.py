"""Where a run lands: lightning_logs/<task>/<attn>/version_N."""

from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvt.errors import UserError


class RunLogger(TensorBoardLogger):
    """TensorBoard events in a folder of the run's own: two runs started in the same moment never share one.

    The folder is made when it is first asked for, so that a run which fails before it trains leaves none.

    Args:
        root: usually lightning_logs.
        task: names the first folder.
        attn: names the second.
        number: of a run to go on with; default: a new one.
    """

    def __init__(self, root: Path, task: str, attn: str, number: int | None = None) -> None:
        super().__init__(str(root), name=f"{task}/{attn}", default_hp_metric=False)
        self._number = number

    @property
    def version(self) -> int:
        """N of version_N, claimed on the first call."""
        if self._number is None:
            self._number = claim_version(Path(self.root_dir), claim=rank_zero_only.rank == 0)  # type: ignore[attr-defined]
        return self._number


def number_of_run(checkpoint: str | Path, folder: Path) -> int | None:
    """N, if the checkpoint is that of the run folder/version_N; else None."""
    run = Path(checkpoint).resolve().parent.parent
    inside = run.parent == folder.resolve() and run.name.startswith("version_") and (run / "config.yaml").is_file()
    return int(run.name[8:]) if inside and run.name[8:].isdecimal() else None


def claim_version(folder: Path, claim: bool = True) -> int:
    """Makes the next free folder/version_N and returns N; without `claim`, the N that another process made last.

    Raises:
        UserError: the folder cannot be written.
    """
    taken = [int(p.name[8:]) for p in folder.glob("version_*") if p.name[8:].isdecimal()]
    if not claim:
        return max(taken, default=0)
    number = max(taken, default=-1) + 1
    while True:
        try:
            (folder / f"version_{number}").mkdir(parents=True)
            return number
        except FileExistsError as error:
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder} is a file: runs need a folder there") from error
            number += 1  # another run took it in this very moment
        except OSError as error:
            raise UserError(
                f"cannot write runs under {folder} ({error.strerror}): choose --trainer.default_root_dir"
            ) from error
