"""The folder of a run, such as lightning_logs/<task>/<attn>/version_N, and its lock."""

import shutil
from contextlib import nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
LAST = "checkpoints/last.ckpt"
"""Path, in a run's folder, of the checkpoint from which the run resumes; written by `callbacks.Last`."""
BEST = "checkpoints/best.ckpt"
"""Path, in a run's folder, of the best checkpoint by validation.

The file exists after the first validation, unless the run has diverged by then.
"""


def empty(folder: Path) -> None:
    """Delete everything in a run's folder except the lock."""
    for path in folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def locked(folder: Path) -> FileLock:
    """Create a run's folder if it does not exist, and return its lock, a context manager.

    A process may enter the lock several times. Entering raises `Timeout` while another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / LOCK, timeout=0, is_singleton=True, thread_local=False)


def is_in_use(folder: Path) -> bool:
    """Return whether a process holds the lock of a run's folder; False if this cannot be tested."""
    try:
        with FileLock(folder / LOCK, timeout=0) if (folder / LOCK).exists() else nullcontext():
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # a read-only folder, or a file system without locks
        return False


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """Return the folder RUN of a checkpoint RUN/checkpoints/FILE; None if RUN has no config.yaml."""
    folder = Path(checkpoint).resolve().parent.parent
    return folder if (folder / "config.yaml").is_file() else None
