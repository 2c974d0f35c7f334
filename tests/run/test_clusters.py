"""A run in the job of a cluster: it loads the checkpoint that kvt names, and stops on the signals of clusters."""

from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, SIGUSR1

import pytest
from lightning.pytorch.callbacks import Timer

import kvt
from kvt.commands import run_words
from kvt.run.cli import KvtCLI
from kvt.run.fit import make_trainer
from kvt.system import run
from tests.conftest import QUIET
from tests.helpers.runs import REVERSE
from tests.run.test_resumed_runs import Send

SLURM = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"), "1"),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    **{"SLURM_JOB_NAME": "mine", "SLURM_NODELIST": "localhost"},
}


@pytest.fixture
def slurm(in_tmp_dir, monkeypatch):
    """Set the variables of a job of SLURM."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


def test_no_command_loads_a_checkpoint_that_nobody_named(slurm):
    """In a job of SLURM, Lightning loads hpc_ckpt_1.ckpt from `default_root_dir`."""
    Path("hpc_ckpt_1.ckpt").write_text("another run's")
    result = kvt.train(REVERSE)
    for command in ("validate", "test", "predict"):
        run_words([command, "--ckpt_path", str(result.checkpoint), *QUIET])
    assert Path("hpc_ckpt_1.ckpt").read_text() == "another run's"


def test_a_second_signal_does_not_end_a_run_that_saves(slurm, capfd):
    """SLURM sends SIGTERM when the time is up."""
    send = Send("on_train_batch_end", SIGUSR1, SIGTERM, step=4)
    with pytest.raises(SystemExit, match=str(128 + SIGUSR1)):
        run(lambda: kvt.train(REVERSE, "mine", callbacks=[send]))
    assert capfd.readouterr().err.splitlines()[-1] == "stopped at step 4: resume with --resume mine"
    assert [path.name for path in Path().iterdir()] == ["mine"]
    assert "test/acc" in kvt.train(REVERSE, "mine", resume=True).metrics


def test_variables_of_lightning_change_no_setting(monkeypatch):
    """A configuration from a checkpoint or a grid lacks some of the Trainer's settings."""
    monkeypatch.setenv("PL_TRAINER_LIMIT_PREDICT_BATCHES", "1")
    monkeypatch.setenv("PL_TRAINER_FAST_DEV_RUN", "1")
    monkeypatch.setenv("PL_TRAINER_MAX_TIME", "00:00:00:01")
    trainer = make_trainer(KvtCLI(replace(REVERSE, trainer={"accelerator": "cpu"}).as_dict()))
    assert (trainer.limit_predict_batches, trainer.fast_dev_run) == (1.0, False)
    assert not any(isinstance(callback, Timer) for callback in trainer.callbacks)
