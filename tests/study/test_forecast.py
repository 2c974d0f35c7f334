"""The timing of runs for a dry run."""

from pathlib import Path

import pytest
import yaml

from kvt.study.forecast import Times, time_runs
from kvt.study.grid import read_grid
from tests.study.test_command import TINY

OWN = """
from kvt.attention import KV

class Wrong(KV):
    def forward(self, *args, **kwargs):
        raise RuntimeError("this attention does not work")
"""


@pytest.fixture
def runs(in_tmp_dir, monkeypatch):
    """The runs of a grid with these tasks and attentions."""
    (in_tmp_dir / "timed.py").write_text(OWN)
    monkeypatch.syspath_prepend(in_tmp_dir)

    def read(*attentions: str, tasks=("sort",), **more):
        axes = {"dim": 16, "heads": 2, "depth": 1, "attn": [*attentions], **more}
        content = TINY | {"tasks": [*tasks], "axes": axes}
        Path("grid.yaml").write_text(yaml.safe_dump(content))
        return read_grid(Path("grid.yaml")).runs

    return read


@pytest.mark.slow
def test_an_estimate_for_what_can_be_timed_and_a_reason_for_what_cannot(runs, tmp_path, capsys):
    (closed := tmp_path / "closed").touch()  # a file, in which no data can lie
    times, all_runs = Times(), runs("kv", "timed.Wrong", tasks=("sort", "characters"))
    time_runs(all_runs, str(closed), 1, times)
    (fine,) = (run for run in all_runs if (run.task, run.attention) == ("sort", "kv"))
    assert [*times.known] == [fine.shape]
    wrong, *texts = sorted(capsys.readouterr().out.splitlines(), reverse=True)
    assert wrong == "sort timed.Wrong cannot be timed: RuntimeError: this attention does not work"
    assert len(texts) == 2
    assert all("cannot write to" in line for line in texts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "grid.yaml", "timed.py"]


@pytest.mark.slow
def test_an_estimate_grows_with_the_epochs_and_the_validations(runs):
    epochs = runs("kv", max_epochs=[1, 40])
    validations = runs("kv", max_epochs=1, val_size=100_000, val_check_interval=[1.0, 1])
    limited = runs("kv", max_epochs=1, val_size=100_000, val_check_interval=1, limit_val_batches=[1, 1.0])
    for pair, factor in ((epochs, 8), (validations, 2), (limited, 3)):
        times = Times()
        time_runs(pair, "data", 1, times)
        (short,), (long,) = (times.known[run.shape] for run in pair)
        assert long > factor * short


def seconds(text: str) -> int:
    hours, minutes, rest = map(int, text.removeprefix("about ").split(":"))
    return 3600 * hours + 60 * minutes + rest


def test_workers_share_the_runs_but_each_study_starts_once(runs):
    all_runs, times = runs("kv", "qkv", lr=[0.1, 0.2]), Times()
    for run in all_runs:
        times.add(run, 30.0)
    for workers in (1, 4):
        assert seconds(times.left(all_runs, workers)) == 120 / workers
        assert seconds(times.left(all_runs, workers, 7.0)) == 120 / workers + 7
