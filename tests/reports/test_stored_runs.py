"""Runs are listed, chosen, shown and removed by what their folders say, whoever made them."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from kvt.cli.main import main
from kvt.reports.names import declared
from kvt.reports.stored_runs import SCORES, read_run
from kvt.run.config import RunConfig
from kvt.run.folder import RunFolder
from kvt.system.files import CONFIGS, yaml_names
from kvt.tasks import ListTask
from tests.conftest import SMALL
from tests.helpers.drivers import HISTORY, METRICS, RESULT, hold, write_run
from tests.helpers.hostile import no_longer_than

LOGS = Path("lightning_logs")


def make(
    name: str = "version_0", task: str = "sort", history: str = HISTORY, result=RESULT | METRICS, **settings
) -> Path:
    """Write the files of a run that has finished, of kvt's own task."""
    config = RunConfig.from_name(task).changed(**settings)
    folder = LOGS / task / config.model["init_args"]["attn"].rpartition(".")[2] / name
    write_run(folder, result | {"config": config.as_dict(), "task": task}, history)
    RunFolder(folder).write_config(config)
    return folder


def test_the_list_has_every_run_with_what_it_is_known_by(says):
    finished, other = make(), make(task="reverse", attn="qkv", result=RESULT | {"val/loss": 0.25})
    begun = make("version_1")
    (begun / "result.json").unlink()
    lines = {line.split()[0]: line for line in says("runs")[1:]}
    assert {*lines} == {*map(str, (finished, other, begun))}
    assert "test/acc 0.7500" in lines[str(finished)]
    assert "val/loss 0.2500" in lines[str(other)]
    assert "stopped" in lines[str(begun)]
    assert says("runs", "lightning_logs", "lightning_logs/sort") == says("runs")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--task", "sort"], {"a", "b"}),
        (["--attn", "qkv"], {"b", "c"}),
        (["--where", "dim=32"], {"b"}),
        (["--where", "lr=1e-3", "attn=qkv"], {"b", "c"}),
        (["--where", "attn_kwargs=null", "--task", "reverse"], {"c"}),
    ],
)
def test_runs_are_chosen_by_task_attention_and_any_setting(says, words, kept):
    make("a", attn="kv", lr=0.01)
    make("b", attn="qkv", dim=32, lr=0.001)
    make("c", task="reverse", attn="qkv", lr=0.001)
    listed = [line for line in says("runs", *words)[1:] if not line.startswith(" ")]
    assert {Path(line.split()[0]).name for line in listed} == kept


@pytest.mark.parametrize(
    ("column", "order", "shown"),
    [
        ("score", ["a", "c", "b"], "test/acc 0.9000"),
        ("val/loss", ["b", "c", "a"], "val/loss 1.0000"),
        ("test/own", ["c", "b", "a"], "test/own 3.0000"),
        ("test/mae", ["a", "b", "c"], "test/mae 1.0000"),
        ("test/mae_4_back", ["a", "b", "c"], "test/mae_4_back 1.0000"),
    ],
)
@pytest.mark.parametrize("declared", [{"better": {"acc": "more", "loss": "less", "own": "more"}}, {}], ids=str)
def test_the_best_by_score_or_by_any_metric_is_last(says, column, order, shown, declared):
    """As the result says, which has it from the task; of one of an older version, as kvt's tasks say."""
    if "mae" in column:
        declared = {"better": {"mae": "less", "mae_{}_back": "less"}}
    for name, accuracy, loss, own in (("a", 0.5, 1.0, 3.0), ("b", 0.9, 3.0, 2.0), ("c", 0.7, 2.0, 1.0)):
        metrics = {
            "test/acc": accuracy,
            "val/loss": loss,
            **dict.fromkeys(("test/own", "test/mae", "test/mae_4_back"), own),
        }
        make(name, result=RESULT | metrics | declared)
    make("begun")
    (LOGS / "sort" / "kv" / "begun" / "result.json").unlink()
    first, *listed = says("runs", "--sort", column)[1:]
    assert "stopped" in first
    assert [Path(line.split()[0]).name for line in listed] == order
    assert shown in listed[-1]


def test_a_card_has_what_differs_from_the_task_and_what_was_measured(says):
    folder = make(attn="kv+pos", dim=32)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/best.ckpt").touch()
    card = "\n".join(says("show", str(folder)))
    settings = card.partition("settings that differ from the defaults:")[2].partition("\n\n")[0]
    assert {line.split()[0]: line.split()[1] for line in settings.split("\n")[1:]} == {"attn": "kv+pos", "dim": "32"}
    assert "test/acc" in card
    assert f"kvt maps --ckpt_path {folder}/checkpoints/best.ckpt" in card
    assert f"kvt fit --config {folder}/config.yaml --seed 1" in card
    assert f"kvt test --ckpt_path {folder}/checkpoints/best.ckpt" in card


def test_a_run_of_a_text_of_ones_own_is_compared_with_its_task_and_no_test_is_recommended(says):
    folder = make(task="language_model", result=RESULT | {"val/loss": 1.0}, text="my_text.txt", heads=2)
    result = json.loads((folder / "result.json").read_text()) | {"task": "language_model_my_text"}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/best.ckpt").touch()
    card = "\n".join(says("show", str(folder)))
    settings = card.partition("settings that differ from the defaults:")[2].partition("\n\n")[0]
    assert {line.split()[0] for line in settings.split("\n")[1:]} == {"text", "heads"}
    assert "kvt test" not in card
    assert f"kvt validate --ckpt_path {folder}/checkpoints/best.ckpt" in card


def test_a_card_names_callbacks_with_their_arguments(says):
    stopping = {"monitor": "val/loss", "patience": 12345, "min_delta": 0.001, "mode": "min"}
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.99}},
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": stopping},
    ]
    card = "\n".join(says("show", str(make(callbacks=callbacks))))
    assert "EMAWeightAveraging(decay=0.99), EarlyStopping(monitor=val/loss, patience=12345, min_delta=0.001" in card


@pytest.mark.parametrize("task", yaml_names(CONFIGS))
def test_a_run_of_a_task_as_it_is_has_no_settings_of_its_own(says, task):
    folder = make(task=task, result=RESULT)
    assert "settings that differ from the defaults" not in "\n".join(says("show", str(folder)))


def test_the_list_says_what_tells_runs_of_a_task_apart_within_80_columns(says):
    make("a", task="associative_recall", attn="kv+pos", heads=4)
    make("b", task="associative_recall", attn="kv+pos", heads=2, seed=3)
    make("c", task="reverse", attn="qkv", heads=2)
    lines = says("runs")
    assert max(map(len, lines)) <= 80
    assert {line.strip() for line in lines if line.startswith(" ")} == {"heads 2, seed 3"}
    assert "size" not in lines[0].split()
    assert "size" in says("runs", "--sort", "size")[0].split()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_long_path_is_shortened_and_never_the_score(says, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    make("a" * 70, task="associative_recall", attn="kv+pos")
    make("b", task="reverse", attn="kv")
    lines = says("runs")
    assert max(map(len, lines)) <= width
    assert all("test/acc 0.7500" in line for line in lines[1:])
    assert any(line.startswith("lightning_logs/reverse/kv/b ") for line in lines)
    (long,) = [line.split()[0] for line in lines if "aaaa" in line]
    assert long.startswith("lightning_logs/assoc"[: width // 8])
    assert ("…" in long) is (width < 160)


def test_scores_are_those_that_tasks_declare():
    declared_by_kvt = {metric.name: metric for metric in declared()}
    assert {*SCORES} <= declared_by_kvt.keys()
    assert all(declared_by_kvt[name].better for name in SCORES)


def test_a_language_model_is_listed_by_bits_per_byte(says):
    make(task="language_model", result=RESULT | {"val/loss": 1.0, "val/acc": 0.5, "val/bpb": 1.25})
    assert "val/bpb 1.2500" in says("runs")[1]


def test_tasks_of_one_metric_are_drawn_apart(says):
    runs = make("a"), make("b", task="reverse")
    says("runs", "--plot", "--out", "curves.svg")
    picture = Path("curves.svg").read_text()
    assert all(f"<!-- {run} -->" in picture for run in runs)
    assert [picture.count(f"<!-- {task} -->") for task in ("sort", "reverse")] == [1, 1]


def spoil_config(change):
    return lambda run: (run / "config.yaml").write_text(change((run / "config.yaml").read_text()))


def spoil_result(**strange):
    def spoil(run: Path) -> None:
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | strange))

    return spoil


def in_place(name: str, make):
    def spoil(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return spoil


SPOILED = {
    "half a result": lambda run: (run / "result.json").write_text('{"seed": '),
    "half a configuration": lambda run: (run / "config.yaml").write_text("model: ["),
    "optimizer": spoil_config(lambda text: text.replace("optimizer: null", "optimizer: x")),
    "unknown key": spoil_config(lambda text: f"driver: mysql\n{text}"),
    "huge seed": spoil_config(lambda text: text.replace("seed_everything: 0", f"seed_everything: {16**5000:#x}")),
    "huge metric": spoil_result(**{"test/acc": 10**400}),
    "year 1": spoil_result(finished="0001-01-01T00:00:00+14:00"),
    "task elsewhere": spoil_result(task="../../x"),
    **{f"FIFO {name}": in_place(name, os.mkfifo) for name in ("result.json", "history.csv")},
    **{f"folder {name}": in_place(name, Path.mkdir) for name in ("result.json", "history.csv")},
}


@pytest.mark.parametrize("how", SPOILED)
def test_one_spoiled_run_stops_neither_list_nor_card_nor_picture(says, how):
    sound, spoiled = make("a"), make("b")
    (spoiled / "checkpoints").mkdir()
    (spoiled / "checkpoints/best.ckpt").touch()
    SPOILED[how](spoiled)
    with no_longer_than(60):
        lines = {line.split()[0]: line for line in says("runs", "--plot", "--out", "curves.svg")[1:-1]}
        card = "\n".join(says("show", spoiled))
    assert {*lines} == {str(sound), str(spoiled)}
    assert "test/acc 0.7500" in lines[str(sound)]
    is_damaged = how not in ("task elsewhere", "FIFO history.csv", "folder history.csv")
    assert ("damaged" in lines[str(spoiled)]) == is_damaged
    assert ("damaged: " in card) == is_damaged


def test_a_run_is_removed_after_a_yes_and_no_other_is(says, monkeypatch):
    one, other = make("a"), make("b")
    for answer, left in {"": True, "n": True, "yes": False}.items():
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        says("runs", "rm", str(one), f"{one}/")  # twice the same
        assert one.exists() == left
    assert other.exists()


def test_only_what_kvt_has_made_is_removed_and_never_through_a_link(mistake, says, monkeypatch, in_tmp_dir):
    run = make("a")
    nested = make("a/inner")
    assert nested.is_relative_to(run)
    foreign = Path("hydra")
    foreign.mkdir()
    (foreign / "config.yaml").write_text("db: {driver: mysql}\n")
    link = Path("lightning_logs/version_0")
    link.symlink_to("..")
    (in_tmp_dir / "config.yaml").write_text((run / "config.yaml").read_text())
    (run / "half.tmp").write_text("of a killed process")
    for folder, told in ((foreign, "cannot tell that this is a run of kvt"), (link, "is a link")):
        monkeypatch.setattr("sys.argv", ["kvt", "runs", "rm", str(folder), "--yes"])
        assert told in mistake(main)
        assert folder.exists()
    before = times(run)
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "no")
    printed = "\n".join(says("runs", "rm", str(run)))
    assert str(run.resolve()) in printed
    assert str(nested.resolve()) in printed
    assert asked[0].startswith("remove 2 runs")
    assert times(run) == before


def times(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


MISTAKES = [
    (["show", "."], "not the folder of a run"),
    (["show"], "pass the folder of a run"),
    (["runs", "rm", "lightning_logs"], "not the folder of a run"),
    (["runs", "nowhere"], "nowhere"),
    (["runs", "--task", "copy"], "no such runs"),
    (["runs", "--where", "dmi=32"], "did you mean 'dim'"),
    (["runs", "--where", "dim"], "dim=64"),
    (["runs", "--where", "dim=["], "--where dim=["),
    (["runs", "--sort", "time"], "choose from run, score"),
    (["runs", "--plot", "--out", "curves.jpg"], ".png, .pdf, .svg"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=lambda part: " ".join(part) if isinstance(part, list) else "")
def test_mistakes(mistake, monkeypatch, words, told):
    make()
    monkeypatch.setattr("sys.argv", ["kvt", *words])
    assert told in mistake(main)


def test_a_run_that_is_being_made_is_not_removed(mistake, monkeypatch, in_tmp_dir):
    folder = make()
    (folder / "result.json").unlink()
    monkeypatch.setattr("sys.argv", ["kvt", "runs", "rm", str(folder), "--yes"])
    end = hold(folder)
    assert read_run(folder).state == "running"
    assert "locked by another process" in mistake(main)
    end()
    assert read_run(folder).state == "stopped"


def test_a_closed_standard_input_answers_no(says, monkeypatch):
    folder = make()
    monkeypatch.setattr(sys, "stdin", None)
    assert says("runs", "rm", folder)[-1].endswith("nothing was removed")
    assert folder.exists()


def test_a_lock_that_is_a_link_is_named(mistake, monkeypatch):
    folder = make()
    (folder / "result.json").unlink()
    (folder / ".lock").unlink(missing_ok=True)
    (folder / ".lock").symlink_to("elsewhere")
    monkeypatch.setattr(sys, "argv", ["kvt", "fit", "--resume", str(folder)])
    assert f"{folder}/.lock: Too many levels of symbolic links: remove the link" in mistake(main)


@pytest.mark.parametrize(
    "words",
    [
        ["characters", *SMALL["characters"]],
        ["reverse", *SMALL["reverse"], "--model", f"{__name__}.Own", "--max_epochs", "2"],
        pytest.param(["translation", *SMALL["translation"]], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_commands_of_cards_work_and_a_card_names_the_parent(says, words):
    """Of a run, and of the one that continues it."""
    quiet = ["--enable_progress_bar", "false"]
    says("run", *words, *quiet)
    (first,) = Path("lightning_logs").glob("*/*/*")
    own = ["--model", f"{__name__}.Own"] if "--model" in words else []
    parent = f"{first}/checkpoints/last.ckpt"
    longer = ["--max_steps", "12"] if "max_steps" in " ".join(words) else ["--max_epochs", "3"]
    says("fit", "--ckpt_path", parent, *longer, *own, *quiet)
    second = first.with_name("version_1")
    for folder in (first, second):
        card = says("show", folder)
        commands = [line for line in card if line.startswith("kvt ")]
        assert len(commands) >= 1
        for command in commands:
            says(*shlex.split(command)[1:], *([] if " maps " in command else quiet))
        assert (folder == second) == any(line.split()[:1] == ["ckpt_path"] for line in card)
    assert [Path(line.split()[0]) for line in says("runs", "--where", f"ckpt_path={parent}")[1:] if line[0] != " "] == [
        second
    ]
    assert any("ckpt_path" in line for line in says("runs"))


class Own(ListTask):
    """A task of the user's."""
