"""The runs of a grid, their names, and the mistakes in grids."""

from itertools import product
from pathlib import Path

import pytest
import yaml

from kvt.attention import ATTENTION
from kvt.reports.tables import tables_of
from kvt.run.config import RunConfig, _defaults
from kvt.study.grid import ATTENTIONS, TaskFile, read_grid
from kvt.system import CONFIGS, GRIDS, UserError, find_yaml
from kvt.tasks.base import known_classes

BASE = {
    "tasks": ["reverse", "sort"],
    "axes": {"dim": [16, 32], "heads": [2, 4], "attn": ["qkv", "kv"]},
    "seeds": [0, 1],
    "scales": {"paper": None, "smoke": {"axes": {"dim": 16}, "seeds": [0]}},
}


@pytest.fixture
def write(tmp_path):
    """Writes `BASE` with changes."""

    def call(**changes) -> Path:
        path = tmp_path / "grids" / "mine.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(BASE | changes, sort_keys=False))
        return path

    return call


def settings(runs):
    return {(run.task, *run.settings.values(), run.seed) for run in runs}


def test_runs_are_the_product_of_tasks_axes_and_seeds(write):
    runs = read_grid(write(), "paper").runs
    assert settings(runs) == set(product(["reverse", "sort"], [16, 32], [2, 4], ["qkv", "kv"], [0, 1]))
    assert len({run.name for run in runs}) == len(runs) == 32
    assert [run.seed for run in runs] == [0] * 16 + [1] * 16, "a study that is stopped has whole seeds"
    assert [run.task for run in runs] == ["reverse", "sort"] * 16


def test_a_scale_changes_axes_tasks_and_seeds(write):
    expected = set(product(["reverse", "sort"], [16], [2, 4], ["qkv", "kv"], [0]))
    assert settings(read_grid(write(), "smoke").runs) == expected
    path = write(scales={"small": {"tasks": {"sort": {"heads": 4, "length": [4, 8]}}}})
    expected = set(product(["sort"], [16, 32], [4], ["qkv", "kv"], [4, 8], [0, 1]))
    assert settings(read_grid(path, "small").runs) == expected
    assert read_grid(path).scale == "small", "the first, without a laptop scale"
    path = write(tasks={"sort": {"dim": [4]}}, scales={"small": {"axes": {"dim": [8]}}})
    assert {run.settings["dim"] for run in read_grid(path, "small").runs} == {8}
    assert read_grid(write(scales={"wide": None, "laptop": None})).scale == "laptop"


def test_what_a_scale_cuts_is_known(write):
    """Values that set several settings are compared setting by setting, and with the configuration's values."""
    dims = dict.fromkeys(["reverse: dim", "sort: dim"], ([16], [16, 32]))
    assert read_grid(write(), "smoke").scale_diff == {**dims, "study: seeds": ([0], [0, 1])}
    assert read_grid(write(), "paper").scale_diff == {}
    more = {"small": {"axes": {"attn": ["kv", "k"]}}, "paper": None}
    alone = dict.fromkeys([f"{task}: {ATTENTIONS}" for task in ("reverse", "sort")], (["k"], ["qkv"]))
    assert read_grid(write(scales=more), "small").scale_diff == alone
    sizes = [{"dim": 16, "depth": 1}, {"dim": 32, "depth": 1}]
    axes = {"max_epochs": 1, "limit_val_batches": 3, "heads": [4, 2], "size": sizes[:1]}
    scales = {"paper": None, "small": {"axes": axes, "seeds": [1, 0], "tasks": ["sort"]}}
    changes = {"axes": {"size": sizes, "heads": [2, 4], "attn": "kv"}, "seeds": [0, 1, 2], "scales": scales}
    assert read_grid(write(**changes), "small").scale_diff == {
        "study: tasks": (["sort"], ["reverse", "sort"]),
        "sort: dim": ([16], [16, 32]),
        "sort: max_epochs": ([1], [2]),
        "sort: limit_val_batches": ([3], [None]),
        "study: seeds": ([1, 0], [0, 1, 2]),
    }


def test_tasks_are_found_beside_the_grid_then_in_configs_then_in_the_package(write, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write(tasks=["reverse", "sort", "own.yaml"], axes={"attn": "kv"}, seeds=[0], scales={"all": None})
    (tmp_path / "configs").mkdir()
    for copy, width in (("configs/sort.yaml", 32), ("grids/own.yaml", 16)):
        (tmp_path / copy).write_text((CONFIGS / "sort.yaml").read_text().replace("dim: 64", f"dim: {width}"))
    for named in (path, Path("../grids/mine.yaml")):
        found = {run.task: run.value("dim") for run in read_grid(named).runs}
        assert found == {"reverse": 64, "sort": 32, "own": 16}


def test_a_grid_of_the_package_is_found_by_its_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_yaml("table2", GRIDS) == GRIDS / "table2.yaml"
    Path("table2").touch()
    assert find_yaml("table2", GRIDS) == Path("table2")


def test_attentions_of_one_name_are_told_apart(write, tmp_path, monkeypatch):
    for module in ("own", "other"):
        (tmp_path / f"{module}.py").write_text("from kvt.attention import KV as Base\nclass KV(Base): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    runs = read_grid(write(tasks=["sort"], axes={"attn": ["own.KV", "other.KV"]}, seeds=[0]), "paper").runs
    assert [run.attention for run in runs] == ["own.KV", "other.KV"]
    assert {run.folder(tmp_path).parent.name for run in runs} == {"KV"}


EMA = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.9}}
DECAYING = {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}
GROUPED = {"attn": "qkv", "attn_kwargs": {"kv_heads": 1}}


def test_an_attention_has_its_arguments_beside_its_name(write):
    runs = read_grid(write(axes={"attn": ["qkv", "qkv,kv_heads=1"]}), "paper").runs
    same = read_grid(write(axes={"variant": [{"attn": "qkv", "attn_kwargs": None}, GROUPED]}), "paper").runs
    assert [run.name for run in runs] == [run.name for run in same]
    assert {run.attention for run in runs} == {"qkv", "qkv, kv_heads 1"}


@pytest.mark.parametrize("axis", ["size", "length", "optimizer", "callbacks"])
def test_an_axis_of_several_settings_may_have_the_name_of_a_setting(write, axis):
    changes = {"axes": {axis: [{"dim": 16, "heads": 2}]}, "scales": {"paper": None}}
    runs = read_grid(write(tasks=["language_model"], **changes), "paper").runs
    assert {(run.value("dim"), run.value("heads")) for run in runs} == {(16, 2)}


@pytest.mark.parametrize(
    ("axis", "value", "text"),
    [
        ("optimizer", DECAYING, "AdamW(weight_decay=0.1)"),
        ("callbacks", EMA, "EMAWeightAveraging(decay=0.9)"),
        ("callbacks", [EMA, {"class_path": "DeviceStatsMonitor"}], "EMAWeightAveraging(decay=0.9), DeviceStatsMonitor"),
    ],
)
def test_optimisers_and_callbacks_are_axes(write, axis, value, text):
    """They are parts of a run's name, and columns of a report may name them as its text does."""
    axes = {"attn": "kv", axis: [None, value]}
    grid = read_grid(write(tasks=["sort"], axes=axes, columns={"usual": {axis: None}, "mine": {axis: text}}), "paper")
    assert [run.text([axis]) for run in grid.runs[:2]] == [f"{axis}=None", f"{axis}={text}"]
    usual, mine = grid.runs[:2]
    assert usual.name == TaskFile(CONFIGS / "sort.yaml").config({"attn": "kv"}, seed=0).name != mine.name
    assert mine.name == RunConfig.from_flat(mine.config.flat).name
    columns = tables_of(grid)[0].columns
    assert columns == {"usual": {run.name for run in grid.runs[::2]}, "mine": {run.name for run in grid.runs[1::2]}}


def test_a_run_is_named_by_what_it_does(write, monkeypatch):
    """Not by how that is written, whether a default is, or where data lie; each setting changes the name."""

    def name(**axes):
        return read_grid(write(tasks=["sort"], axes={"attn": "kv", **axes}), "paper").runs[0].name

    base = name()
    monkeypatch.setenv("KVT_DATA_DIR", "/elsewhere")
    defaults = {"accumulate_grad_batches": 1, "max_steps": -1, "limit_val_batches": None, "log_every_n_steps": 20}
    assert name(lr="1e-3", length=[16], dropout=0.1, attn_kwargs={}, **defaults) == base
    others = [{"lr": 0.01}, {"length": 8}, {"max_epochs": 3}, {"dropout": 0}, {"precision": "bf16-mixed"}]
    assert len({base, *(name(**other) for other in others)}) == 6


NAMES_THAT_LAST = {"qkv": "12e856d69994", "kv": "3fcfc58a3081"}


def test_a_new_argument_with_a_default_renames_no_run(write, monkeypatch):
    """One of the task, of its data and of an attention; finished runs would be made again."""

    def names():
        runs = read_grid(write(axes={"attn": ["qkv", "kv"], "dim": 32}, tasks=["reverse"], seeds=[0]), "paper").runs
        return {run.attention: run.name for run in runs}

    def wider(cls):
        class Wider(cls):
            def __init__(self, *args, unused: int = 3, **kwargs):
                super().__init__(*args, **kwargs)

        return Wider

    assert names() == NAMES_THAT_LAST
    classes = known_classes()
    newer = {name: wider(classes[name]) for name in ("ListTask", "DigitLists")}
    monkeypatch.setattr("kvt.tasks.base.known_classes", lambda: classes | newer)
    monkeypatch.setitem(ATTENTION, "kv", wider(ATTENTION["kv"]))
    monkeypatch.setattr("kvt.run.config._defaults", _defaults.__wrapped__)  # without its cache
    assert TaskFile(CONFIGS / "reverse.yaml").config({}, 0).model["init_args"]["unused"] == 3
    assert names() == NAMES_THAT_LAST


def test_a_configuration_is_what_the_command_line_makes_of_it(experiment):
    """A run is named by the settings that it is then made with."""
    task = TaskFile(CONFIGS / "sort.yaml")
    ours = task.config(task.value("", {"attn": "k", "train_size": 128, "lr": "1e-2", "max_steps": 1}), seed=3)
    small = ["--attn", "k", "--train_size", "128", "--lr", "1e-2", "--seed", "3"]
    made = RunConfig(**experiment("sort", *small, "--max_steps", "1")["config"]).changed(accelerator="auto")
    assert ours.flat == made.flat
    assert ours.differences(made) == []
    assert ours.name == made.name


def test_a_grid_without_scales_has_one(write):
    path = write()
    content = yaml.safe_load(path.read_text())
    del content["scales"]
    path.write_text(yaml.safe_dump(content))
    grid = read_grid(path)
    assert (grid.report, grid.about) == ("mine-full", "")
    assert len(grid.runs) > 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"axes": {"devices": 2}}, ["devices"]),
        ({"axes": {"callbacks": {"class_path": "EMAWeightAveraging", "init_args": {"dekay": 0.99}}}}, ["dekay"]),
        ({"axes": {"size": [{"dim": 16}, {"width": 3}]}}, ["width"]),
        ({"axes": {"dim": 16, "size": [{"dim": 16}]}}, ["dim", "two axes"]),
        ({"axes": {"task": ["reverse", "sort"]}}, ["task"]),
        ({"seeds": []}, ["seeds"]),
        ({"scales": {"paper": {"tasks": []}}}, ["tasks"]),
        ({"scales": {"paper": {"seeds": []}}}, ["seeds"]),
        ({"axes": {"attn": "nowhere.KV"}}, ["nowhere"]),
    ],
)
def test_mistakes_are_named_with_their_file(write, changes, named):
    """Others stand in `tests/cli/test_mistakes.py`."""
    with pytest.raises(UserError) as error:
        read_grid(write(**changes), "paper")
    assert [word for word in ["mine", *named] if word not in str(error.value)] == []


RUNS = {
    "table2": 5 * 3 * 2 * 2 * 3 * 3 * 3,
    "table3": 3 * 2 * (2 * 24 + 2 * 48 + 8),
    "figure3": 5 * 3,
    "figure5": 5 * 3 * 2,
    "figure6": 4 * 2 * 3 * 5,
    "figure7": 2 * 2 * 2 * 3 * 3 * 2,
}
"""Task × settings × attentions × repetitions in the paper, sections 3.1 to 3.3."""
GRIDS_AND_SCALES = [
    pytest.param(path.stem, scale, marks=() if scale == "laptop" else pytest.mark.slow)
    for path, scale in product(sorted(GRIDS.glob("*.yaml")), ("smoke", "laptop", "paper"))
]


@pytest.mark.parametrize(("name", "scale"), GRIDS_AND_SCALES)
def test_every_grid_has_runs_and_tables_at_every_scale(name, scale):
    grid = read_grid(name, scale)
    assert grid.about
    tables = tables_of(grid)
    in_tables = {name for table in tables for column in table.columns.values() for name in column}
    assert in_tables == {run.name for run in grid.runs}
    for table in tables:
        assert set(table.published) <= {run.attention for run in grid.runs}
        assert all(set(cells) <= set(table.columns) for cells in table.published.values())
    if scale != "paper":
        assert grid.scale_diff or name in ("figure3", "three-projections")


@pytest.mark.parametrize("name", RUNS)
def test_the_papers_grids_are_complete(name):
    grid = read_grid(name, "paper")
    assert len(grid.runs) == RUNS[name]
    assert {run.attention for run in grid.runs} == {"qkv", "kv+pos", "kv"}
