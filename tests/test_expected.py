"""The head of a task's YAML says what to expect of its command: it is computed from a record, and a run comes to it."""

import re

import pytest
from claims import open_record

from kvt.run.config import RunConfig
from kvt.run.run import train
from kvt.system.files import CONFIGS

LISTS = {"dim": 64, "heads": 4, "length": 16}
RECORDED = dict.fromkeys(("reverse", "sort", "swap", "sub", "copy"), ("table2-laptop", "test/acc", LISTS))
RECORDED["human_numbers"] = ("figure6-paper", "val/acc", {"length": 16, "lr": 1e-3})
"""The record, the metric, and the settings of the runs of a task's defaults."""
EXPECTED = re.compile(r"(qkv|kv|kv\+pos) (\d\.\d{3}) ± (\d\.\d{3})")


def expected(task: str) -> dict[str, tuple[float, float]]:
    head = (CONFIGS / f"{task}.yaml").read_text().partition("model:")[0]
    assert head.startswith(f"# kvt run {task} --attn kv")
    return {name: (float(mean), float(spread)) for name, mean, spread in EXPECTED.findall(head)}


@pytest.mark.slow
@pytest.mark.parametrize("task", RECORDED)
def test_the_expected_result_is_that_of_the_record(task):
    record, metric, settings = RECORDED[task]
    rows = open_record(record).rows
    rows = rows[rows.task == task]
    for name, value in settings.items():
        rows = rows[rows[name].astype(float) == value]
    assert [*expected(task)] == ["qkv", "kv", "kv+pos"]
    for name, (mean, spread) in expected(task).items():
        values = rows[metric][rows.attention == name]
        assert (mean, spread) == (round(values.mean(), 3), round(values.std(), 3))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copy", "sort", "human_numbers"])
def test_a_run_comes_to_the_expected_result(task, in_tmp_dir):
    mean, spread = expected(task)["kv"]
    result = train(RunConfig.from_yaml(CONFIGS / f"{task}.yaml").changed(attn="kv"))
    assert abs(result.metrics[RECORDED[task][1]] - mean) <= 3 * spread + 0.005
