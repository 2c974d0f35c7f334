"""NVIDIA's MPS, by which the kernels of several processes run side by side on one GPU."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

import torch

from kvt.system.console import say
from kvt.system.errors import UserError
from kvt.system.quoting import one_line

CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 20
"""Seconds in which it must start, answer or end."""


@contextmanager
def share_gpus() -> Iterator[None]:
    """Context manager: what processes compute on GPUs goes through MPS, which is started first and ends with it.

    One that runs already, such as that of a study that was killed, is used, and left as it is. Both are the one at
    CUDA_MPS_PIPE_DIRECTORY, or in NVIDIA's place for it.

    Raises:
        UserError: there is no GPU or no MPS, or it does not start.
    """
    if not torch.cuda.device_count():
        raise UserError("--mps: this machine has no GPU: drop the flag")
    try:
        _run(CONTROL, text="get_server_list")
    except FileNotFoundError as error:
        raise UserError(f"--mps: there is no {CONTROL} on PATH: drop the flag") from error
    except (OSError, subprocess.SubprocessError):  # none runs
        pass
    else:
        say("MPS runs already: it is used, and goes on afterwards")
        yield
        return
    with TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as logs:
        try:
            _run(CONTROL, "-d", CUDA_MPS_LOG_DIRECTORY=logs)  # where it would write by itself, only root may
        except (OSError, subprocess.SubprocessError) as error:
            hint = "some containers let only root start it"
            raise UserError(f"--mps: {one_line(str(error))} ({hint}): drop the flag") from error
        say("MPS is started, and ends with the study")
        try:
            yield
        finally:
            with suppress(OSError, subprocess.SubprocessError):
                _run(CONTROL, text="quit -t 5")


def _run(*words: str, text: str = "", **environment: str) -> None:
    # no pipes for its output: the daemon would keep them open
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment | os.environ}
    subprocess.run(words, input=text, text=True, check=True, timeout=PATIENCE, **how)  # type: ignore[call-overload]
