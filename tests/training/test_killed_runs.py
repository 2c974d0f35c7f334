"""A run that is killed at any moment, and gone on with, comes to the very numbers of one that never was."""

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from signal import SIGINT, SIGKILL, SIGTERM
from time import sleep

import pytest
import torch
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.training.load_checkpoint import read_checkpoint
from kvt.training.run_dir import last_checkpoint
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_LISTS
from tests.helpers.hostile import MAX_SECONDS
from tests.helpers.moments import forked

TRAINING = ("step", "validation", "checkpoint", "boundary")
LISTS = [*SMALL_LISTS, "--max_epochs", "3"]
REVERSE = [f"--config={CONFIGS / 'reverse.yaml'}", *QUIET, *LISTS]
TWO = ["--devices", "2", "--strategy", "ddp"]
RUNS = {
    **{task: (task, SMALL[task]) for task in ("mnist", "fashion_mnist", "cifar10", "cifar100", "anomaly")},
    **{task: (task, LISTS) for task in ("reverse", "sort", "sub", "copy")},
    "swap": ("swap", [*LISTS, "--lr", "0.05"]),  # which is best before it ends
    **{task: (task, SMALL[task]) for task in ("characters", "translation")},
    "human_numbers": ("human_numbers", [*SMALL["human_numbers"], "--batch_size", "48", "--val_check_interval", "1"]),
    "dropout": ("reverse", [*LISTS, "--dropout", "0.3", "--attn", "kv+pos", "--attn_kwargs.dropout", "0.2"]),
    "accumulation": ("sort", [*LISTS, "--accumulate_grad_batches", "4", "--val_check_interval", "5"]),
    "odd interval": ("copy", [*LISTS, "--val_check_interval", "4"]),
    "odd epochs": ("sort", [*LISTS, "--check_val_every_n_epoch", "2"]),
    "two processes": (
        "copy",
        [*LISTS, *TWO, "--val_check_interval", "2", "--accumulate_grad_batches", "2"],
    ),
}
"""Every task; dropout, steps of several batches, several processes. Validation in the middle of an epoch, too, and
where the last step falls between two.
"""
GONE_ON_AT: set[int] = set()
"""The steps of the checkpoints that a run was gone on with from."""


def start(words: list[str], signals: str = "") -> tuple[int, dict[str, int]]:
    """Makes a run in processes of its own, that get signals at their moments; its exit code, and its calls by phase."""
    calls = Path("calls.json").resolve()
    if any("strategy: ddp" in path.read_text() for path in Path().rglob("config.yaml")) or "ddp" in words:
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


def go_on(words: list[str], signals: str = "") -> int:
    """Goes on with the run, or begins it anew where it was killed before there was anything to go on with."""
    run = run_folder()
    if run and last_checkpoint(run).is_file():
        GONE_ON_AT.add(read_checkpoint(last_checkpoint(run))["global_step"])
    code, _ = start(["--resume", str(run)] if run else words, signals)
    return code


def run_folder() -> Path | None:
    """The run that can be gone on with."""
    return max((path.parent for path in Path("lightning_logs").rglob("config.yaml")), default=None)


def what_it_left(run: Path) -> dict:
    """All that a run leaves, but for times."""
    result = json.loads((run / "result.json").read_text())
    timed = ("seconds", "started", "finished")
    with (run / "history.csv").open() as file:
        history = [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]
    return {
        "result": {n: v for n, v in result.items() if n not in timed and not n.endswith("_per_second")},
        "history": history,
        "files": sorted({path.name for path in run.rglob("*") if "tfevents" not in path.name}),
    }


def events(run: Path) -> Counter[tuple[str, int, float]]:
    """What TensorBoard shows of a run, but for times."""
    found = EventAccumulator(str(run)).Reload()
    tags = [tag for tag in found.Tags()["scalars"] if not tag.endswith(("seconds", "_per_second"))]
    return Counter((tag, event.step, event.value) for tag in tags for event in found.Scalars(tag))


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Those of model and optimiser, of the last checkpoint and of the best."""
    found = {}
    for name in ("best", "last"):
        checkpoint = read_checkpoint(run / "checkpoints" / f"{name}.ckpt")
        found |= {f"{name} {key}": tensor for key, tensor in checkpoint["state_dict"].items()}
        for key, state in checkpoint["optimizer_states"][0]["state"].items():
            found |= {f"{name} {key} {moment}": tensor for moment, tensor in state.items()}
    return found


def require_same(killed: Path, whole: Path) -> None:
    """Makes sure that a run left, bit for bit, what another one did, and nothing more."""
    assert what_it_left(killed) == what_it_left(whole)
    assert not events(whole) - events(killed)
    # what a checkpoint is amid may be there again, and the numbers beside the hyperparameters, which stand at 0
    assert {step for _, step, _ in events(killed) - events(whole)} <= GONE_ON_AT | {0}
    expected = weights(whole)
    assert weights(killed).keys() == expected.keys()
    for key, tensor in weights(killed).items():
        assert torch.equal(tensor, expected[key]), key


def printed() -> str:
    return Path("printed.txt").read_text()


@pytest.fixture
def whole(in_tmp_dir, monkeypatch):
    """Makes a run that is never killed; returns its folder, and its calls by phase. What comes next lies elsewhere."""

    def make(words: list[str]) -> tuple[Path, dict[str, int]]:
        GONE_ON_AT.clear()
        for folder in ("killed", "whole"):
            (in_tmp_dir / folder).mkdir()
            monkeypatch.chdir(in_tmp_dir / folder)
        code, calls = start(words)
        assert code == 0, printed()
        folder = run_folder().resolve()
        monkeypatch.chdir(in_tmp_dir / "killed")
        return folder, calls

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_three_times_and_gone_on_with(name, whole, record_property):
    config, setting = RUNS[name]
    words = [f"--config={CONFIGS / f'{config}.yaml'}", *QUIET, *setting]
    expected, calls = whole(words)
    random = Random(name)
    moments = [
        (random.choice(TRAINING), random.uniform(0, 0.5)),
        (random.choice((*TRAINING, "start")), random.uniform(0, 0.3)),
        ("end", random.random()),
    ]
    for phase, part in moments:
        moment = f"{phase}:{1 + int(part * (calls[phase] - 1))}:{SIGKILL:d}"
        assert go_on(words, moment) == -SIGKILL, (moment, printed())
    assert go_on(words) == 0, printed()
    require_same(run_folder(), expected)
    record_property("kills", dict(Counter(phase for phase, _ in moments)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "accumulation"])
def test_asked_to_stop_and_gone_on_with(name, whole):
    """Ctrl-C, and what a cluster sends: exit code 128 + signal, and nothing is lost wherever it comes."""
    config, setting = RUNS[name]
    words = [f"--config={CONFIGS / f'{config}.yaml'}", *QUIET, *setting, "--max_epochs", "5"]  # one a stop, and more
    expected, calls = whole(words)
    random = Random(name)
    for phase, number in zip(TRAINING, (SIGINT, SIGINT, SIGTERM, SIGINT), strict=True):
        moment = f"{phase}:{1 + int(random.uniform(0, 0.2) * (calls[phase] - 1))}:{number:d}"
        assert go_on(words, moment) == 128 + number, (moment, printed())
        assert f"--resume {run_folder()} goes on" in printed()
    assert go_on(words, f"end:{calls['end'] // 2}:{SIGINT:d}") == 128 + SIGINT, printed()
    assert "Traceback" not in printed()
    assert go_on(words) == 0, printed()
    require_same(run_folder(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--train_size", "16"], ["--train_size", "32", *TWO]], ids=["one", "two"])
def test_asked_to_stop_in_the_step_before_a_validation(whole, words):
    """It is not left amid its batches, of which the first process may have more than the second one."""
    words = [*REVERSE, *words]  # each epoch is a step
    words += ["--val_size", "40", "--log_every_n_steps", "1"]
    expected, calls = whole(words)
    assert go_on(words, f"step:{int(0.6 * calls['step'])}:{SIGINT:d}") == 128 + SIGINT, printed()
    assert f"--resume {run_folder()} goes on" in printed()
    assert go_on(words) == 0, printed()
    require_same(run_folder(), expected)


@pytest.mark.slow
def test_asked_to_stop_in_its_last_step(whole):
    """It is validated first, as it would have been: there is nothing left to train."""
    words = [*REVERSE, "--val_check_interval", "4"]
    expected, calls = whole(words)
    assert go_on(words, f"step:{int(0.98 * calls['step'])}:{SIGINT:d}") == 128 + SIGINT, printed()
    assert f"stopped at step 18: --resume {run_folder()} goes on" in printed()
    assert go_on(words) == 0, printed()
    require_same(run_folder(), expected)


@pytest.mark.slow
def test_asked_while_the_processes_ask_each_other(whole):
    words = [*REVERSE, *TWO, "--log_every_n_steps", "1"]
    expected, calls = whole(words)
    seventh = calls["agreement"] * 13 // 24  # of twelve: after nine steps, and three validations
    assert go_on(words, f"agreement:{seventh}:{SIGINT:d}") == 128 + SIGINT, printed()
    assert go_on(words) == 0, printed()
    require_same(run_folder(), expected)


@pytest.mark.slow
def test_asked_twice_it_stops_at_once(whole):
    expected, calls = whole(REVERSE)
    middle = calls["step"] // 2
    assert go_on(REVERSE, f"step:{middle}:{SIGINT:d} step:{middle + 20}:{SIGINT:d}") == 128 + SIGINT, printed()
    assert "stopping after this step; once more stops at once" in printed()
    assert "goes on" not in printed()  # it had no time to save anything
    assert go_on(REVERSE) == 0, printed()
    require_same(run_folder(), expected)


@pytest.mark.slow
def test_asked_again_while_it_saves_it_stops_at_once(whole):
    expected, calls = whole(REVERSE)
    first = calls["checkpoint"] // 6  # at the least: each of three epochs writes the last, and maybe the best
    for call in range(1, first, first // 10):
        moments = f"step:{calls['step'] // 9}:{SIGINT:d} checkpoint:{call}:{SIGINT:d}"
        assert go_on(REVERSE, moments) == 128 + SIGINT, printed()
        assert not last_checkpoint(run_folder()).exists()
    assert "stopped" not in printed()  # it said, and did, nothing more: what writes the file fails in a way of its own
    assert "Traceback" not in printed()
    assert go_on(REVERSE) == 0, printed()
    require_same(run_folder(), expected)


@pytest.mark.slow
def test_a_run_is_one_process_at_a_time(whole):
    whole(REVERSE)
    assert go_on(REVERSE, f"end:10:{SIGKILL:d}") == -SIGKILL
    run = run_folder()
    lock = FileLock(run / ".lock")  # as the process has that is at it
    with lock:
        assert go_on(REVERSE) == 2
    assert "error: " in printed()
    assert "another process is at this run" in printed()
    assert "Traceback" not in printed()
    assert go_on(REVERSE) == 0, printed()
    assert go_on(REVERSE) == 0
    assert "has finished" in printed()


@pytest.mark.slow
def test_one_process_of_several_is_killed(in_tmp_dir):
    """As where memory runs out: the others end too, and say how the run goes on."""
    words = [*SMALL_LISTS, "--accelerator=cpu", "--max_epochs=100000", "--strategy=ddp", "--devices=2"]
    command = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not (found := next(Path().rglob("last.ckpt"), None)) and process.poll() is None:
            sleep(0.1)
        assert found, process.stderr.read()
        os.kill(int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()), SIGKILL)
        lines = process.stderr.read().splitlines()
    assert process.returncode == 2, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: another process of this run has died")
    assert lines[0].endswith(f"--resume {found.parent.parent} goes on")
