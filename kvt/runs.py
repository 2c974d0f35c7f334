"""Where a run lands: lightning_logs/<task>/<attn>/version_N."""

import shutil
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvt.errors import UserError


class RunLogger(TensorBoardLogger):
    """TensorBoard events in a folder of the run's own: two runs started in the same moment never share one.

    The folder is made when it is first asked for.

    Args:
        folder: lightning_logs/<task>/<attn>.
        run: the name of the run's own folder therein; default: a new version_N.
    """

    def __init__(self, folder: Path, run: str | None = None) -> None:
        super().__init__(str(folder), name="", default_hp_metric=False)
        self._run = run
        self._claimed = False

    @property
    def version(self) -> str:
        """The folder's name, claimed on the first call."""
        if self._run is None:
            self._claimed = rank_zero_only.rank == 0  # type: ignore[attr-defined]
            self._run = f"version_{claim_version(Path(self.root_dir), self._claimed)}"
        return self._run

    def discard(self) -> None:
        """Removes the folder that this process made, for a run that never came to train."""
        if self._claimed:
            self.finalize("failed")  # nobody writes there any more
            shutil.rmtree(self.log_dir, ignore_errors=True)
            attn = Path(self.root_dir)
            with suppress(OSError):  # not empty: other runs are there
                for folder in (attn, attn.parent, attn.parent.parent):
                    folder.rmdir()


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """The folder of the run whose checkpoint this is; None if it lies elsewhere."""
    run = Path(checkpoint).resolve().parent.parent
    return run if (run / "config.yaml").is_file() else None


def number_of_run(run: Path) -> int | None:
    """N of …/version_N; None for another name.

    >>> number_of_run(Path("lightning_logs/sort/kv/version_12"))
    12
    """
    prefix, _, number = run.name.partition("_")
    return int(number) if prefix == "version" and number.isdecimal() else None


def claim_version(folder: Path, claim: bool) -> int:
    """Makes the next free folder/version_N and returns N; without `claim`, the N that another process made last.

    Raises:
        UserError: the folder cannot be written.
    """
    taken = [number for path in folder.glob("version_*") if (number := number_of_run(path)) is not None]
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
