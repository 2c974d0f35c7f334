"""The head of a task's YAML says what to expect of a command: it is computed from a record, and a run comes to it."""

import re
from pathlib import Path
from statistics import mean, stdev

import pytest
import yaml

from kvt.run.config import RunConfig
from kvt.run.fit import train
from kvt.study.records import read_record
from kvt.system import CONFIGS
from tests.conftest import REPOSITORY

METRICS = {"test accuracy": "test/acc", "validation accuracy": "val/acc", "test BLEU": "test/bleu"}
METRICS |= {"validation loss": "val/loss"}
COMMAND = r"kvt run (\S+) --attn kv(.*?) \(.* on one core\)"
EXPECT = r" Expect a (.*) of (.*): mean ± standard deviation of (.*) seeds in ([^\s,]+)(?:, (.*))?\."
HEAD = re.compile(COMMAND + EXPECT)
VALUE = re.compile(r"(qkv|kv|kv\+pos) (\d+\.\d+) ± (\d+\.\d+)")
UNLIKE = {"trainer.val_check_interval": "validated four times an epoch", "data.features": "with features from a file"}
"""Settings in which the runs of a record may differ from the command, and what the head says of them."""


def head(task: str) -> str:
    lines = (CONFIGS / f"{task}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("# ")).replace(" \\ ", " ")


RECORDED = [path.stem for path in sorted(CONFIGS.glob("*.yaml")) if "Expect" in path.read_text()]


class Expected:
    """What a head says: the command's settings, the metric, and by attention the mean and the standard deviation."""

    def __init__(self, task: str) -> None:
        found = HEAD.fullmatch(head(task))
        assert found, head(task)
        name, flags, words, values, self.seeds, folder, unlike = found.groups()
        assert name == task
        self.metric, self.record = METRICS[words], REPOSITORY / Path(folder)
        self.values = {name: (float(mean), float(spread)) for name, mean, spread in VALUE.findall(values)}
        self.settings = {name: yaml.safe_load(value) for name, value in re.findall(r"--(\S+) (\S+)", flags)}
        self.unlike = [name for name, text in UNLIKE.items() if text == unlike]
        self.yaml = CONFIGS / f"{task}.yaml"

    def config(self, attn: str) -> RunConfig:
        return RunConfig.from_yaml(self.yaml).changed(attn=attn, **self.settings)


def recorded(expected: Expected, task: str, attn: str) -> dict[int, dict]:
    """Return the results of the record's runs that the command makes, by seed: of equal runs the first."""
    config, results = expected.config(attn), {}
    for row in read_record(expected.record).rows:
        if row.task == task and row.outcome.config.model["init_args"]["attn"] == attn:
            differ = {name for name, *_ in config.differences(row.outcome.config)}
            if differ <= {"seed", *expected.unlike}:
                results.setdefault(row.outcome.config.seed_everything, row.outcome.result)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("task", RECORDED)
def test_the_expected_result_is_that_of_the_record(task):
    expected = Expected(task)
    assert [*expected.values] == ["qkv", "kv", "kv+pos"]
    numbers = set()
    for attn, told in expected.values.items():
        values = [result[expected.metric] for result in recorded(expected, task, attn).values()]
        digits = 1 if "bleu" in expected.metric else 3
        assert told == (round(mean(values), digits), round(stdev(values), digits))
        numbers.add(len(values))
    assert expected.seeds == " or ".join(map(str, sorted(numbers)))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "sort", "human_numbers"])
def test_a_run_comes_to_the_expected_result(task, in_tmp_dir):
    expected = Expected(task)
    mean, spread = expected.values["kv"]
    assert abs(train(expected.config("kv")).metrics[expected.metric] - mean) <= 3 * spread + 0.005
