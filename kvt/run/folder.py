"""The folder of a run, lightning_logs/<task>/<attn>/version_N, with a lock, config.yaml and checkpoints."""

import shutil
from contextlib import nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from kvt.system import UserError, user_path

LOCK = ".lock"
LAST = "checkpoints/last.ckpt"
"""The checkpoint for resuming a run. The file exists after the first validation or stop."""
BEST = "checkpoints/best.ckpt"
"""The best checkpoint by validation. The file exists after the first validation."""


def empty(folder: Path) -> None:
    """Delete all files in a run's folder except the lock."""
    for path in folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_in_use(folder: Path) -> bool:
    """Return whether a process uses a run's folder."""
    path = folder / LOCK
    try:
        with FileLock(path, timeout=0) if path.exists() else nullcontext():
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # a read-only folder, or a file system without locks
        return False


def run_folder(named: str, flag: str = "") -> Path:
    """Return the path of a run's folder; raise a UserError that begins with `flag` if it has no config.yaml."""
    path = user_path(named)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{flag}{named}: not the folder of a run, such as lightning_logs/reverse/kv/version_0")
    return path


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """Return the folder of the run that contains a checkpoint. None if no run contains the checkpoint."""
    folder = Path(checkpoint).resolve().parent.parent
    return folder if (folder / "config.yaml").is_file() else None
