"""`--resume RUN`: goes on with a run that was killed or stopped, to the same numbers as if it never had been."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvt.system.errors import UserError
from kvt.system.files import user_path
from kvt.training import results
from kvt.training.flags import CONFIG, take
from kvt.training.load_checkpoint import read_checkpoint
from kvt.training.run_dir import RunLogger, last_checkpoint

MOVABLE = {"data_dir", "root", "text", "features", "weights", "enable_progress_bar"}
"""Settings that a run may go on without: where its data lie, what is shown of it."""


class Resumed(NamedTuple):
    """A run to go on with.

    Attributes:
        folder: of the run.
        words: the command line that makes it.
    """

    folder: Path
    words: list[str]

    @property
    def checkpoint(self) -> Path | None:
        """Where it goes on; None if it was killed before its first checkpoint: it begins anew."""
        path = last_checkpoint(self.folder)
        return path if path.exists() else None

    @property
    def finished(self) -> bool:
        """Whether there is nothing to go on with."""
        return results.read_json(self.folder / "result.json") is not None

    def logger(self) -> RunLogger:
        """Goes on with its logs, but for what was logged after its checkpoint and will be logged again."""
        step = read_checkpoint(self.checkpoint)["global_step"] if self.checkpoint else -1
        return RunLogger(self.folder.parent, self.folder.name, purge_step=step + 1)

    def require_same(self, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """Makes sure that a command line changes nothing that a result depends on.

        Args:
            ours: the settings with all of the command line's words.
            theirs: those of the run.

        Raises:
            UserError: one differs.
        """
        mine, its = dict(_leaves(ours)), dict(_leaves(theirs))
        for name in sorted(mine.keys() | its.keys()):
            flag = name.rpartition(".")[2]
            if flag not in MOVABLE and mine.get(name) != its.get(name):
                raise UserError(
                    f"--resume {self.folder}: made with {flag}={its.get(name)!s:.60}, not {mine.get(name)!s:.60}: "
                    f"leave --{flag} out, or go on with other settings from --ckpt_path {last_checkpoint(self.folder)}"
                )


def take_resumed(argv: Sequence[str]) -> tuple[Resumed | None, list[str]]:
    """The run that --resume names, and the words that go on with it; those given if it is not among them.

    Raises:
        UserError: that is no run, or the other words do not go with it.
    """
    if not any(word.partition("=")[0] == "--resume" for word in argv):
        return None, [*argv]
    named, words = take(argv, "resume")
    for word in words:
        if (flag := word.partition("=")[0]) in (*CONFIG, "--ckpt_path", "--fleet"):
            raise UserError(f"--resume {named}: a run has its own configuration and checkpoint: leave {flag} out")
    if words[:1] != ["fit"]:
        raise UserError(f"--resume {named}: only training goes on; {words[0]} takes --ckpt_path")
    folder = user_path(named or "").resolve()
    config = folder / "config.yaml"
    if not config.is_file():
        raise UserError(f"--resume {named}: no folder of a run, such as lightning_logs/reverse/kv/version_0")
    resumed = Resumed(folder, ["fit", f"--config={config}"])
    last = [f"--ckpt_path={resumed.checkpoint}"] if resumed.checkpoint else []
    return resumed, [*resumed.words, *last, *words[1:]]


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif name != "ckpt_path":
            yield f"{prefix}{name}", value
