"""A run that is killed at any moment and resumed is, bit for bit, one that was never killed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.run.config import RunConfig
from kvt.run.folder import LAST
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_LISTS
from tests.helpers.commands import MAX_SECONDS
from tests.helpers.drivers import alive, children, until, wait_for_training
from tests.helpers.moments import forked
from tests.helpers.runs import checkpoint, equal, read_history, read_result

pytestmark = pytest.mark.slow

TRAINING = ("step", "validation", "checkpoint", "boundary")
LISTS = [*SMALL_LISTS, "--max_epochs", "3"]
REVERSE = [f"--config={CONFIGS / 'reverse.yaml'}", *QUIET, *LISTS]
TWO = ["--devices", "2", "--strategy", "ddp"]
RUNS = {
    **{task: (task, SMALL[task]) for task in ("mnist", "fashion_mnist", "cifar10", "cifar100", "anomaly")},
    **{task: (task, LISTS) for task in ("reverse", "sort", "sub", "copy")},
    "swap": ("swap", [*LISTS, "--lr", "0.05"]),  # which is best before it ends
    **{task: (task, SMALL[task]) for task in ("characters", "language_model", "translation")},
    "human_numbers": ("human_numbers", [*SMALL["human_numbers"], "--batch_size", "48", "--val_check_interval", "1"]),
    "dropout": ("reverse", [*LISTS, "--dropout", "0.3", "--attn", "kv+pos", "--attn_kwargs.dropout", "0.2"]),
    "accumulation": ("sort", [*LISTS, "--accumulate_grad_batches", "4", "--val_check_interval", "5"]),
    "odd interval": ("copy", [*LISTS, "--val_check_interval", "4"]),
    "early end": ("mqar", [*SMALL["mqar"], "--max_epochs", "3", "--stop_at", "0.001"]),
    "odd epochs": ("sort", [*LISTS, "--check_val_every_n_epoch", "2"]),
    "two processes": ("copy", [*LISTS, *TWO, "--val_check_interval", "2", "--accumulate_grad_batches", "2"]),
}
"""Every task; dropout, accumulated gradients, two processes; validations
amid an epoch, or not after the last step."""
RESUMED_AT: set[int] = set()
"""The steps of the checkpoints that a run was resumed from."""


def words_of(name: str) -> list[str]:
    config, flags = RUNS[name]
    return [f"--config={CONFIGS / f'{config}.yaml'}", *QUIET, *flags]


def start(words: list[str], signals: str = "") -> tuple[int, dict[str, int]]:
    """Run `fit` in processes that get signals at some moments; return its exit code, and its calls by phase."""
    calls = Path("calls.json").resolve()
    several = any("devices: '2'" in path.read_text() for path in Path().rglob("config.yaml"))
    if several or "--devices" in words:
        command = [sys.executable, "-m", "tests.helpers.moments", signals, str(calls), *words]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        with open("printed.txt", "a") as file:
            process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=file, stderr=file)
            try:
                code = process.wait(MAX_SECONDS)  # they may wait for each other for ever
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, SIGKILL)
                raise
    else:
        code = forked(words, signals, calls)
    return code, json.loads(calls.read_text()) if code == 0 else {}


def resume(words: list[str], signals: str = "") -> int:
    """Resume the run, or start it if it was killed before it had a folder; return its exit code."""
    run = run_folder()
    if run and (run / LAST).is_file():
        RESUMED_AT.add(checkpoint(run, "last")["global_step"])
    return start(["--resume", str(run)] if run else words, signals)[0]


def run_folder() -> Path | None:
    return max((path.parent for path in Path("lightning_logs").rglob("config.yaml")), default=None)


def events(run: Path) -> Counter[tuple[str, int, float]]:
    """Return TensorBoard's scalars but for times and the state of the machine."""
    found = EventAccumulator(str(run)).Reload()
    own = [tag for tag in found.Tags()["scalars"] if not tag.startswith("DeviceStatsMonitor")]
    tags = [tag for tag in own if not tag.endswith(("seconds", "_per_second"))]
    return Counter((tag, event.step, event.value) for tag in tags for event in found.Scalars(tag))


def weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of the model and of the optimizer in a checkpoint."""
    content = checkpoint(run, name)
    states = content["optimizer_states"][0]["state"].items()
    moments = {f"{key} {moment}": tensor for key, state in states for moment, tensor in state.items()}
    return content["state_dict"] | moments


def require_same(killed: Path, whole: Path) -> None:
    """Make sure that a run left what another one did, bit for bit, and nothing more."""
    assert read_result(killed) == read_result(whole)
    assert read_history(killed) == read_history(whole)
    files = [{path.name for path in run.rglob("*") if "tfevents" not in path.name} for run in (killed, whole)]
    assert files[0] == files[1]
    assert not events(whole) - events(killed)
    # events at the step of a checkpoint may be there twice, as may those beside the hyperparameters, at step 0
    assert {step for _, step, _ in events(killed) - events(whole)} <= RESUMED_AT | {0}
    assert all(equal(weights(killed, name), weights(whole, name)) for name in ("best", "last"))


def printed() -> str:
    return Path("printed.txt").read_text()


@pytest.fixture
def whole(in_tmp_dir, monkeypatch):
    """Make a run that is never killed; return its folder and its calls by phase, and go to another folder."""

    def make(words: list[str]) -> tuple[Path, dict[str, int]]:
        RESUMED_AT.clear()
        for folder in ("killed", "whole"):
            (in_tmp_dir / folder).mkdir()
            monkeypatch.chdir(in_tmp_dir / folder)
        code, calls = start(words)
        assert code == 0, printed()
        folder = run_folder().resolve()
        monkeypatch.chdir(in_tmp_dir / "killed")
        return folder, calls

    return make


def test_every_family_of_tasks_is_killed():
    def families(names):
        return {RunConfig.from_name(name).model["class_path"] for name in names}

    assert families(task for task, _ in RUNS.values()) == families(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", RUNS)
def test_killed_three_times_and_resumed(name, whole, record_property):
    words = words_of(name)
    expected, calls = whole(words)
    random = Random(name)
    moments = [
        (random.choice(TRAINING), random.uniform(0, 0.5)),
        (random.choice((*TRAINING, "start")), random.uniform(0, 0.15)),  # a resumed run makes fewer calls
        ("end", random.random()),
    ]
    for phase, part in moments:
        moment = f"{phase}:{1 + int(part * (calls[phase] - 1))}:{SIGKILL:d}"
        assert resume(words, moment) == -SIGKILL, (moment, printed())
    assert resume(words) == 0, printed()
    require_same(run_folder(), expected)
    record_property("kills", dict(Counter(phase for phase, _ in moments)))


@pytest.mark.parametrize("name", ["dropout", "accumulation"])
def test_asked_to_stop_and_resumed(name, whole):
    """By Ctrl-C, and as a cluster does: exit code 128 + signal, and nothing is lost wherever it comes."""
    words = [*words_of(name), "--max_epochs", "5"]  # one for each stop, and one more
    expected, calls = whole(words)
    random = Random(name)
    for phase, number in zip(TRAINING, (SIGINT, SIGUSR1, SIGTERM, SIGUSR2), strict=True):
        moment = f"{phase}:{1 + int(random.uniform(0, 0.2) * (calls[phase] - 1))}:{number:d}"
        assert resume(words, moment) == 128 + number, (moment, printed())
        assert f"resume with --resume {run_folder()}" in printed()
    assert resume(words, f"end:{calls['end'] // 2}:{SIGINT:d}") == 128 + SIGINT, printed()
    assert "Traceback" not in printed()
    assert resume(words) == 0, printed()
    require_same(run_folder(), expected)


ONE_STEP = ["--val_size", "40", "--log_every_n_steps", "1", "--train_size"]  # an epoch
STOPS = {
    "in the step before a validation": ([*ONE_STEP, "16"], "step", 0.6, "resume with"),
    # a stop amid a validation would be worse: the first process may have more of its batches than the second one
    "in the step before a validation of two processes": ([*ONE_STEP, "32", *TWO], "step", 0.6, "resume with"),
    # which is validated first, as there is nothing left to train
    "in the last step": (["--val_check_interval", "4"], "step", 0.98, "stopped at step 18: resume with --resume"),
    # there are twelve agreements: after nine steps, and three validations; this is the seventh
    "while processes agree whether to stop": ([*TWO, "--log_every_n_steps", "1"], "agreement", 13 / 24, ""),
}
"""Flags, the phase, the part of its calls at which the signal comes, and what is printed."""


@pytest.mark.parametrize("name", STOPS)
def test_asked_to_stop(whole, name):
    flags, phase, part, said = STOPS[name]
    words = [*REVERSE, *flags]
    expected, calls = whole(words)
    assert resume(words, f"{phase}:{int(part * calls[phase])}:{SIGINT:d}") == 128 + SIGINT, printed()
    assert said in printed()
    assert resume(words) == 0, printed()
    require_same(run_folder(), expected)


def test_asked_twice_it_stops_at_once_even_while_it_saves(whole):
    expected, calls = whole(REVERSE)
    first = calls["checkpoint"] // 6  # at the least: each of three epochs writes the last, and maybe the best
    for call in range(1, first, first // 5):
        moments = f"step:{calls['step'] // 9}:{SIGINT:d} checkpoint:{call}:{SIGINT:d}"
        assert resume(REVERSE, moments) == -SIGINT, printed()
        assert not (run_folder() / LAST).exists()
    middle = calls["step"] // 2
    assert resume(REVERSE, f"step:{middle}:{SIGINT:d} step:{middle + 20}:{SIGINT:d}") == -SIGINT, printed()
    assert "stopping after this step; press Ctrl-C again to stop at once" in printed()
    assert "resume with" not in printed()
    assert "Traceback" not in printed()
    assert resume(REVERSE) == 0, printed()
    require_same(run_folder(), expected)


def started(*words: str) -> "subprocess.Popen[str]":
    """Start a run in a process of its own, which starts the others."""
    command, environment = [sys.executable, "-m", "kvt", "run", *words], os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_a_signal_to_the_first_process_of_two_stops_both_within_half_a_minute_and_they_resume(whole):
    words = [*REVERSE, *TWO, "--max_epochs=40", "--log_every_n_steps=1"]
    expected, _ = whole(words)
    with started(*words) as process:
        wait_for_training(process)
        (other,) = children(process.pid)
        process.send_signal(SIGTERM)
        until(lambda: process.poll() is not None and not alive(other), seconds=30)
    assert process.returncode == 128 + SIGTERM
    assert resume(words) == 0, printed()
    require_same(run_folder(), expected)


def test_one_process_of_two_is_killed(in_tmp_dir):
    """As happens where memory runs out: the other one ends, too, with an error."""
    with started(*REVERSE, *TWO, "--max_epochs=100000") as process:
        try:
            run = wait_for_training(process)
            (second,) = children(process.pid)
            os.kill(second, SIGKILL)
            lines = process.stderr.read().splitlines()
        finally:
            process.kill()
    assert process.returncode == 1, lines
    assert lines[0].startswith(f"{run}: ")
