"""Which runs a grid asks for, and what they are called."""

from itertools import product
from pathlib import Path

import pytest
import yaml

from kvt.reports.report import _merged
from kvt.reports.tables import tables_of
from kvt.study.config import TRAINER, Configuration, fingerprint
from kvt.study.grid import read_grid
from kvt.system.errors import UserError
from tests.conftest import CONFIGS, REPOSITORY

GRIDS = sorted((REPOSITORY / "experiments" / "grids").glob("*.yaml"))
SCALES = ("smoke", "laptop", "paper")


@pytest.fixture
def write(tmp_path):
    """Writes a grid of reverse and sort, changed."""

    def call(**changes) -> Path:
        (tmp_path / "grids").mkdir(exist_ok=True)
        if not (tmp_path / "configs").exists():
            (tmp_path / "configs").symlink_to(CONFIGS)
        content = {
            "tasks": ["reverse", "sort"],
            "axes": {"dim": [16, 32], "heads": [2, 4], "attn": ["qkv", "kv"]},
            "seeds": [0, 1],
            "scales": {"paper": None, "smoke": {"axes": {"dim": 16}, "seeds": [0]}},
        }
        path = tmp_path / "grids" / "mine.yaml"
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return path

    return call


def settings(runs):
    return {(run.task, *run.settings.values(), run.seed) for run in runs}


def test_runs_are_the_product_of_tasks_axes_and_seeds(write):
    runs = read_grid(write(), "paper").runs
    assert settings(runs) == set(product(["reverse", "sort"], [16, 32], [2, 4], ["qkv", "kv"], [0, 1]))
    assert len(runs) == 32
    assert [run.seed for run in runs] == [0] * 16 + [1] * 16, "a study that is stopped has whole seeds"
    assert len({run.name for run in runs}) == 32


def test_a_scale_changes_axes_tasks_and_seeds(write):
    assert settings(read_grid(write(), "smoke").runs) == set(
        product(["reverse", "sort"], [16], [2, 4], ["qkv", "kv"], [0])
    )
    path = write(scales={"small": {"tasks": {"sort": {"heads": 4, "length": [4, 8]}}}})
    assert settings(read_grid(path, "small").runs) == set(
        product(["sort"], [16, 32], [4], ["qkv", "kv"], [4, 8], [0, 1])
    )


def test_a_grid_has_a_scale_where_none_is_named(write):
    axes = {"axes": {"dim": 16}}
    assert read_grid(write(scales={"wide": None, "laptop": axes})).scale == "laptop"
    assert read_grid(write(scales={"wide": None, "narrow": axes})).scale == "wide"
    assert len(read_grid(write(scales={"narrow": axes})).runs) == 16


def test_what_a_scale_cuts_is_known(write):
    dims = dict.fromkeys(["reverse: dim", "sort: dim"], ([16], [16, 32]))
    assert read_grid(write(), "smoke").cut == {**dims, "study: seeds": ([0], [0, 1])}
    assert read_grid(write(), "paper").cut == {}


def test_what_a_scale_sets_beyond_the_full_one_is_cut_too(write):
    """Bundles are compared setting by setting, and what the full scale leaves to the configuration with that."""
    sizes = [{"dim": 16, "depth": 1}, {"dim": 32, "depth": 1}]
    axes = {"max_epochs": 1, "limit_val_batches": 3, "heads": [4, 2], "size": sizes[:1]}
    scales = {"paper": None, "small": {"axes": axes, "seeds": [1, 0], "tasks": ["sort"]}}
    changes = {"axes": {"size": sizes, "heads": [2, 4], "attn": "kv"}, "seeds": [0, 1, 2], "scales": scales}
    assert read_grid(write(**changes), "small").cut == {
        "study: tasks": (["sort"], ["reverse", "sort"]),
        "sort: dim": ([16], [16, 32]),
        "sort: max_epochs": ([1], [2]),
        "sort: limit_val_batches": ([3], [None]),
        "study: seeds": ([1, 0], [0, 1, 2]),
    }


def test_a_report_shows_each_cut_by_its_bare_name(write):
    scales = {"paper": None, "small": {"seeds": [0], "axes": {"dim": 16}, "tasks": ["sort"]}}
    assert _merged(read_grid(write(scales=scales), "small")).keys() == {"tasks", "dim", "seeds"}


def test_attentions_of_one_name_are_told_apart(write, tmp_path, monkeypatch):
    for module in ("own", "other"):
        (tmp_path / f"{module}.py").write_text("from kvt.attention import KV as Base\nclass KV(Base): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    runs = read_grid(write(tasks=["sort"], axes={"attn": ["own.KV", "other.KV"]}, seeds=[0]), "paper").runs
    assert [run.attention for run in runs] == ["own.KV", "other.KV"]
    assert {run.folder(tmp_path).parent.name for run in runs} == {"KV"}


def test_a_value_may_set_several_settings_together(write):
    pairs = [{"attn": "kv", "lr": 0.1}, {"attn": "k", "attn_kwargs": {"kv_heads": 1}}]
    runs = read_grid(write(tasks=["sort"], axes={"pair": pairs}, seeds=[0]), "paper").runs
    assert [(run.attention, run.value("lr")) for run in runs] == [("kv", 0.1), ("k, kv_heads 1", 0.001)]


def test_a_run_is_named_by_what_it_does(write):
    """Not by how it is written, nor by what is the default anyway; any setting and the seed make another run."""
    base = read_grid(write(axes={"attn": "kv"}), "paper").runs[0]
    written_out = {"attn": "kv", "lr": "1e-3", "length": [16], "dropout": 0.1}
    assert read_grid(write(axes=written_out), "paper").runs[0].name == base.name
    others = [{"lr": 0.01}, {"length": 8}, {"max_epochs": 3}, {"dropout": 0}, {"precision": "bf16-mixed"}]
    names = {read_grid(write(axes={"attn": "kv", **other}), "paper").runs[0].name for other in others}
    assert len(names | {base.name}) == 6
    assert len({run.name for run in read_grid(write(axes={"attn": "kv"}), "paper").runs}) == 4


@pytest.mark.parametrize(
    "default",
    [
        {"accumulate_grad_batches": 1},
        {"max_steps": -1},
        {"limit_val_batches": None},
        {"log_every_n_steps": 20},
        {"attn_kwargs": {}},
    ],
)
def test_names_do_not_depend_on_whether_a_default_is_written(write, default):
    base = read_grid(write(axes={"attn": "kv"}), "paper").runs[0]
    written = read_grid(write(axes={"attn": "kv", **default}), "paper").runs[0]
    assert written.name == base.name
    ((name, value),) = default.items()
    assert written.value(name) == written.settings[name] == base.value(name) == (value or None)


def test_names_do_not_depend_on_where_data_lie(write, monkeypatch):
    before = read_grid(write(), "paper").runs[0].name
    monkeypatch.setenv("KVT_DATA_DIR", "/elsewhere")
    assert read_grid(write(), "paper").runs[0].name == before


OF_THE_TEST = {"max_steps": -1, "accelerator": "auto"}


def test_a_configuration_is_what_the_command_line_makes_of_it(experiment):
    """What a run is named by are the settings that it is then made with."""
    resolved = Configuration(CONFIGS / "sort.yaml").resolve({"attn": "k", "train_size": 128, "lr": "1e-2"}, seed=3)
    small = ["--attn", "k", "--train_size", "128", "--lr", "1e-2", "--seed", "3"]
    made = experiment("sort", *small, "--max_steps", "1")["config"]
    for section in ("model", "data"):
        theirs = {k: v for k, v in made[section]["init_args"].items() if k not in ("spec", "seed", "data_dir")}
        assert resolved[section] == {"class_path": made[section]["class_path"], "init_args": theirs}
    assert TRAINER | resolved["trainer"] == {**{name: made["trainer"][name] for name in TRAINER}, **OF_THE_TEST}
    assert fingerprint(resolved) == fingerprint(dict(reversed(resolved.items())))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": {}}, "mine.yaml: unknown key 'axis': did you mean 'axes'?"),
        ({"axes": {"dims": [16]}}, "mine.yaml: unknown setting of reverse: 'dims': did you mean 'dim'?"),
        ({"axes": {"seed": [1]}}, "unknown setting"),
        ({"axes": {"dim": []}}, "the axis dim of reverse is empty"),
        ({"axes": {}}, "axes is missing or empty"),
        ({"tasks": []}, "tasks is missing or empty"),
        ({"tasks": ["revers"]}, "there is no"),
        ({"tasks": "reverse"}, "must be names"),
        ({"axes": {"dim": ["wide"]}}, "--model.dim wide: expected int"),
        ({"axes": {"max_epochs": ["many"]}}, "--trainer.max_epochs many"),
        ({"axes": {"size": [{"dim": 16}, {"width": 3}]}}, "mine.yaml: unknown setting of reverse in size: 'width'"),
        ({"axes": {"dim": 16, "size": [{"dim": 16}]}}, "dim of reverse is set by two axes"),
        ({"seeds": "0"}, "must be a list of numbers"),
        ({"seeds": [-1]}, "--seed -1"),
        ({"scales": {"smoke": {"axis": {}}}}, "did you mean 'axes'?"),
        ({"scales": {"smoke": 3}}, "scales: smoke: must hold"),
        ({"scales": ["paper"]}, "scales: ['paper']: must be names"),
        ({"scales": "paper"}, "scales: paper: must be names"),
        ({"scales": {"paper": {"tasks": []}}}, "scales: paper: tasks is empty"),
        ({"tasks": [{"sort": {"dim": 16}}]}, "tasks: [{'sort': {'dim': 16}}]: must be names"),
        ({"tasks": [["sort"]]}, "tasks: [['sort']]: must be names"),
        ({"tasks": ["a/sort.yaml", "b/sort.yaml"]}, "2 are called sort"),
        ({"tasks": ["...yaml"]}, "'..' is no name for a task"),
        ({"axes": ["dim"]}, "axes: ['dim']: must be names"),
        ({"axes": {"attn": None}}, "mine.yaml: attn None: unknown attn"),
        ({"axes": {"attn": ["qvk"]}}, "mine.yaml: attn qvk: unknown attn 'qvk': did you mean 'qkv'?"),
        ({"axes": {"attn": "nowhere.KV"}}, "there is no module 'nowhere'"),
        ({"axes": {"attn": "kv", "dim": 30}}, "mine.yaml: attn kv: heads=4 must divide dim=30"),
        ({"axes": {"attn": "kv", "dim": None}}, "mine.yaml: attn kv: dim=None"),
        ({"axes": {"attn": "kv", "attn_kwargs": {"kv_heads": 3}}}, "kv_heads=3 must divide heads=4"),
        ({"axes": {"attn": "kv", "attn_kwargs": {"kv_head": 1}}}, "did you mean 'kv_heads'?"),
        ({"axes": {str(n): [1, 2] for n in range(30)}}, "mine.yaml: asks for 4,294,967,296 runs, 10,000 are the most"),
        ({"seeds": [*range(5001)], "axes": {"dim": 16}}, "asks for 10,002 runs"),
        ({"axes": {str(n): [1, 2] for n in range(2000)}}, "asks for inf runs"),
        ({"seeds": [2**32]}, "mine.yaml: --seed"),
        ({"scales": {"tiny": None}}, "mine.yaml: unknown --scale 'paper': choose from tiny"),
    ],
)
def test_mistakes_are_named(write, changes, message):
    with pytest.raises(UserError) as error:
        read_grid(write(**changes), "paper")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_attention_that_imports_what_is_not_there_is_named(write, tmp_path, monkeypatch):
    (tmp_path / "incomplete.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"mine\.yaml: attn incomplete\.KV: No module named 'nowhere_at_all'"):
        read_grid(write(axes={"attn": "incomplete.KV"}), "paper")


@pytest.mark.parametrize("name", ["devices", "num_nodes", "strategy", "enable_progress_bar", "fast_dev_run", "plugins"])
def test_what_a_study_decides_itself_is_no_setting(write, name):
    with pytest.raises(UserError, match=f"unknown setting of reverse: '{name}'"):
        read_grid(write(axes={"attn": "kv", name: 1}), "paper")


@pytest.mark.parametrize("text", ["tasks: [", "- 1", ""])
def test_a_file_that_is_no_grid_is_named(tmp_path, text):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(UserError, match=r"grid\.yaml"):
        read_grid(tmp_path / "grid.yaml", "smoke")
    with pytest.raises(UserError, match="no such grid"):
        read_grid(tmp_path / "other.yaml", "smoke")


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
@pytest.mark.parametrize("scale", SCALES)
def test_every_grid_has_runs_and_tables_at_every_scale(path, scale):
    grid = read_grid(path, scale)
    assert grid.about
    names = {run.name for run in grid.runs}
    tables = tables_of(grid)
    assert names == {name for table in tables for column in table.columns.values() for name in column}
    attentions = {run.attention for run in grid.runs}
    for table in tables:
        assert set(table.published) <= attentions
        assert all(set(cells) <= set(table.columns) for cells in table.published.values())
    if scale != "paper":
        assert grid.cut or path.stem in ("figure3", "three-projections")


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("table2", 5 * 3 * 2 * 2 * 3 * 3 * 3),
        ("table3", 3 * 2 * (2 * 24 + 2 * 48 + 8)),
        ("figure5", 5 * 3 * 2),
        ("figure6", 4 * 2 * 3 * 5),
        ("figure7", 2 * 2 * 2 * 3 * 3 * 2),
    ],
)
def test_the_papers_grids_are_complete(name, runs):
    """The paper, sections 3.1 to 3.3: task × settings × attentions × repetitions."""
    grid = read_grid(REPOSITORY / "experiments" / "grids" / f"{name}.yaml", "paper")
    assert len(grid.runs) == runs
    assert list(dict.fromkeys(run.attention for run in grid.runs)) == ["qkv", "kv+pos", "kv"]
