"""Workers that train runs: processes that share the cores and GPUs of this machine, or tasks of a Ray cluster."""

import logging
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from socket import create_connection
from threading import Thread
from typing import Any, NamedTuple

import torch
from filelock import Timeout

from kvt.run.config import RunConfig
from kvt.run.fit import train
from kvt.run.folder import LAST, empty, locked
from kvt.study.outcomes import ERROR, TERMINAL, State, read_outcome
from kvt.system import UserError, arguments, mistake_in, signals_handled, write_atomically
from kvt.tune import cores


class Job(NamedTuple):
    config: RunConfig
    folder: Path  # <folder of the study>/<task>/<attn>/<name>
    data_dir: str

    @property
    def log(self) -> Path:
        return self.folder.parents[2] / ".logs" / f"{self.folder.name}.txt"


def execute(job: Job) -> None:
    """Train or resume a run, unless it has ended or another process trains it. If training fails, write error.txt."""
    with suppress(Timeout), locked(job.folder):
        if read_outcome(job.folder, job.config).state not in TERMINAL:
            try:
                train_job(job)
            except Exception as error:
                write_error(job.folder, reason(error), traceback.format_exc())


def forget(folder: Path, config: RunConfig) -> None:
    """Delete error.txt and, if the run is `FAILED` even without it, all files. Do nothing if the folder is in use."""
    with suppress(Timeout), locked(folder):
        (folder / ERROR).unlink(missing_ok=True)
        if read_outcome(folder, config).state == State.FAILED:
            empty(folder)


def train_job(job: Job) -> None:
    """Train a run, or resume it if it has a last.ckpt. Then delete last.ckpt."""
    data = {"data_dir": job.data_dir} if "data_dir" in arguments(job.config.classes["data"]) else {}
    config = job.config.merged({"data": data, "trainer": {"devices": 1, "enable_progress_bar": False}})
    resume = (job.folder / LAST).is_file()
    if not resume:
        empty(job.folder)  # deletes the files of a run whose process died before the first checkpoint
    # quiet=True: drawing pictures takes longer than training a small model
    train(config, job.folder, resume=resume, quiet=True)
    (job.folder / LAST).unlink(missing_ok=True)  # keeps only best.ckpt


def reason(error: Exception) -> str:
    """Return in one line the message of `mistake_in(error)`, or the type and message of any other error."""
    return " ".join(str(mistake_in(error) or f"{type(error).__name__}: {error}").split())


def write_error(folder: Path, message: str, trace: str = "") -> None:
    """Write error.txt, which makes a run `FAILED`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / ERROR, f"{message}\n\n{trace}")


class LocalWorkers:
    """Workers that train each run in a new process, forked from a server process that has imported kvt and torch.

    Each worker gets a share of the cores that this process may use, and one of the GPUs if there are any. The workers'
    processes ignore Ctrl-C, and end when the process that made this object ends or is killed.
    """

    def __init__(self, workers: int) -> None:
        self.workers, mine = workers, cores()
        numbers = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        gpus = numbers.split(",")
        self._places = [(mine[n::workers] or [mine[n % len(mine)]], gpus[n % len(gpus)]) for n in range(workers)]
        self._running: dict[Any, tuple[Job, ForkServerProcess, Any]] = {}
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del os.environ[name]  # Lightning would treat all processes of a SLURM job as one distributed run
        self._context = get_context("forkserver")
        # without the preload, each run would import torch.utils.tensorboard when it first logs
        self._context.set_forkserver_preload(["kvt.study.workers", "torch.utils.tensorboard"])
        with signals_handled(signal.SIG_IGN, [signal.SIGINT]):  # workers inherit SIG_IGN
            forkserver.ensure_running()

    @property
    def free(self) -> bool:
        """Whether `start` may be called."""
        return bool(self._places)

    def start(self, job: Job) -> None:
        place = self._places.pop()
        process = self._context.Process(target=_work, args=(job, *place), daemon=True)
        process.start()
        self._running[process.sentinel] = job, process, place

    def wait(self, seconds: float) -> Iterator[tuple[Job, str]]:
        """Wait up to `seconds` until a process ends. Yield (job, error) of each ended process; "" means exit code 0."""
        for sentinel in wait([*self._running], seconds):
            job, process, place = self._running.pop(sentinel)
            process.join()
            self._places.append(place)
            yield job, f"last with exit code {process.exitcode}; see {job.log}" if process.exitcode else ""

    def close(self) -> None:
        """End all processes. A run in training first saves a checkpoint."""
        for _, process, _ in self._running.values():
            process.terminate()
        for _, process, _ in self._running.values():
            process.join()


def _work(job: Job, mine: list[int], gpu: str) -> None:
    parent: Any = parent_process()
    Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # this process ends with its parent
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, mine)
    torch.set_num_threads(len(mine))
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    execute(job)


class RayCluster:
    """Workers that train each run as a Ray task with one core, and with a GPU if the cluster has GPUs."""

    free = True  # Ray queues tasks, and a cluster may grow

    def __init__(self, address: str) -> None:
        import ray  # the extra kvt[ray] installs this package

        self._ray, self._address = ray, address
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host:  # fails at once if nothing listens there; Ray would try for two minutes
                create_connection((host, int(port)), timeout=10).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError) as error:  # Ray raises ConnectionError, an OSError
            raise UserError(f"--ray {address}: cannot connect; `ray start --head` starts a cluster: {error}") from error
        gpus = int("GPU" in ray.cluster_resources())
        self._kind = "GPU" if gpus else "CPU"
        # max_calls=1 makes a new process for each run: torch's settings and CUDA errors of a run do not affect the next
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, max_calls=1)(_work_on_ray)
        self._running: dict[Any, Job] = {}

    @property
    def workers(self) -> int:
        return max(1, int(self._ray.cluster_resources().get(self._kind, 0)))

    def start(self, job: Job) -> None:
        self._running[self._task.remote(job)] = job

    def wait(self, seconds: float) -> Iterator[tuple[Job, str]]:
        """Do what `LocalWorkers.wait` does; raise UserError if the connection to Ray is lost."""
        for task in self._ray.wait([*self._running], timeout=seconds)[0]:
            job, died = self._running.pop(task), ""
            try:
                self._ray.get(task)
            except self._ray.exceptions.LocalRayletDiedError as error:
                raise UserError(f"--ray {self._address}: lost the cluster; rerun the same command") from error
            except self._ray.exceptions.RayError as error:
                died = f"or its machine: {reason(getattr(error, 'cause', error))}"
            yield job, died

    def close(self) -> None:
        self._ray.shutdown()


def _work_on_ray(job: Job) -> None:
    torch.set_num_threads(1)
    execute(job)
