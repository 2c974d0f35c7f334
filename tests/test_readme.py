"""Every command and every program in the README and in the pages of the site works."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from kvt.commands import COMMANDS as OTHER_COMMANDS
from kvt.commands import TRAINING, main, run_words
from kvt.study.grid import read_grid
from kvt.study.records import widen_record
from kvt.system import run
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, write_features, write_sentences
from tests.helpers.drivers import finish

PAGES = ("README.md", "docs/*.md", "docs/guides/*.md", "docs/reference/*.md")
BLOCKS = {
    path.relative_to(REPOSITORY): re.findall(r"```(\w+)\n(.*?)```", path.read_text(), re.DOTALL)
    for pages in PAGES
    for path in sorted(REPOSITORY.glob(pages))
}
"""Language and text of each block by page: the README, the site's pages, its guides and its reference."""


def blocks(language: str) -> list[str]:
    return [text for found in BLOCKS.values() for name, text in found if name == language]


TEXT = "\n".join(blocks("bash")).replace("\\\n", " ")
LINES = [line for line in TEXT.splitlines() if line.startswith(("python", "kvt"))]
COMMANDS = [[*words] for words in dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in LINES)]
SMALL_COMMANDS = {
    "bench": ["--n", "4", "8", "--d", "8", "--repeats", "1", "--batch", "2"],
    "study run": ["--dry_run"],  # those of tests/study are made
    "reproduce": ["--dry_run"],
}


def block(language: str, words: str) -> str:
    """Return the block that has some words; where several pages show it, they show the same."""
    [found] = {text for text in blocks(language) if words in text}
    return found


FILES = {  # of the user's own
    "my_attention.py": block("python", "class NearKV"),
    "my_model.py": block("python", "class Parallel(ListTask)"),
    "my_task.py": block("python", "class Largest"),
    "my_task.yaml": block("yaml", "my_task.Largest"),
    "my_sums.py": block("python", "class Sums"),
    "my_sharp.py": block("python", "class Sharp"),
    "my_table.py": block("python", "class Table"),
    "my_table.yaml": block("yaml", "my_table.Table"),
    "table.csv": "a,b,c\n" + "".join(f"{a},{b},{a * b}\n" for a in range(6) for b in range(6)),
    "my_grid.yaml": block("yaml", "my_attention.NearKV"),
    "query_as_value.py": block("python", "class QueryAsValue"),
    "query_grid.yaml": block("yaml", "query_as_value.QueryAsValue"),
}
OWN = {"NearKV": "my_attention.NearKV"}
"""The import path of an attention of the user's own by the name of its folder."""
PYTHON = {str(page): [text for name, text in found if name == "python"] for page, found in BLOCKS.items()}


def asked_for(command: list[str]) -> set[tuple[str, str]]:
    """Return task and attention of the runs whose files a command names."""
    runs = re.findall(r"lightning_logs/(\w+)/([\w+-]+)/version_0", " ".join(command))
    listed = [("reverse", "kv")] if command[:2] == ["kvt", "runs"] else []
    return {(task.removesuffix("_de_en"), attn) for task, attn in [*runs, *listed]}


@pytest.fixture
def as_after_the_first_run(command, experiment, in_tmp_dir, small_data, monkeypatch) -> None:
    """Make what a command needs: the runs that it names, data, a grid and an attention of the user's own."""
    for folder in ("experiments", "zoo"):
        (in_tmp_dir / folder).symlink_to(REPOSITORY / folder)
    for name, text in FILES.items():
        (in_tmp_dir / name).write_text(text)
    shutil.copytree(small_data / "cifar10", "my_images")
    shutil.copy(small_data / "tinyshakespeare" / "input.txt", "my_text.txt")
    write_sentences(Path("my_corpus"), {"train": 20, "val": 6, "test": 5})
    write_features(Path("my_features.pt"), classes=3, width=6)
    monkeypatch.syspath_prepend(str(in_tmp_dir))
    if "record" in command:
        grid = read_grid("my_grid.yaml", "quick")
        finish(grid.runs[0], Path("lightning_logs/study"))
        if "--from" in command:
            widen_record(grid, Path("record"), [Path("lightning_logs/study")])
    for task, attn in asked_for(command):
        experiment(task, "--attn", OWN.get(attn, attn), *SMALL[task])
    if "q-kv.ckpt" in command[2:4]:  # an earlier command of the page wrote it
        experiment("characters", "--attn", "qkv", *SMALL["characters"])
        words = ["convert", "lightning_logs/characters/qkv/version_0", "--attn", "q-kv", "--out", "q-kv.ckpt"]
        monkeypatch.setattr(sys, "argv", ["kvt", *words])
        main()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words)[:70])
@pytest.mark.usefixtures("as_after_the_first_run")
def test_commands(command, monkeypatch):
    script = command[0] == "python"
    name = next((name for name in (" ".join(command[1:3]), command[1]) if name in OTHER_COMMANDS), None)
    quickly = SMALL_COMMANDS.get(name, []) if name else QUIET
    quickly = [*quickly, "--fast_dev_run", "true"] if script or command[1] in TRAINING else quickly
    if "fit" in command and "--ckpt_path" in command:  # one step more would be less than it has
        quickly = QUIET
    if {"--help", "--resume"} & set(command):  # a run has its own settings
        quickly = []
    if re.search("mnist|cifar", " ".join(command[1:3])):  # the small data sets are too small for the default
        quickly += ["--val_size", "6"]
    if "<" in command:
        *command, _, file = command
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(Path(file).read_bytes())))
    monkeypatch.setattr(sys, "argv", [*(command[1:] if script else command), *quickly])
    if {"--help", "--print_config", "--resume"} & set(command):  # the run to go on with already finished
        try:
            runpy.run_path(command[1], run_name="__main__") if script else main()
        except SystemExit as ended:
            assert ended.code == 0  # noqa: PT017 (a parser may leave so, or return)
    elif "--strategy" in command:  # it would start further processes like this one
        subprocess.run([sys.executable, "-m", *command, *quickly], check=True)
    elif script:
        runpy.run_path(command[1], run_name="__main__")
    else:
        main()


WALK = """
import json, sys
from kvt.commands import main

for words in json.loads(sys.argv[1]):
    sys.argv = words
    main()
print(main.__code__.co_filename)
"""


@pytest.mark.slow
def test_the_first_steps_from_a_wheel_in_an_empty_folder(in_tmp_dir, tmp_path_factory):
    """All commands of the page in their order, at the size of tests; zoo/ lies beside, as the page says."""
    pytest.importorskip("setuptools", minversion="77")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(REPOSITORY / "kvt", source / "kvt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, source)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [wheel] = source.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    (in_tmp_dir / "zoo").symlink_to(REPOSITORY / "zoo")
    text = "".join(text for name, text in BLOCKS[Path("docs/first-steps.md")] if name == "bash")
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("kvt")]
    for command in commands:
        if command[1] in TRAINING and "--help" not in command:
            task = command[command.index("--config") + 1] if "--config" in command else command[2]
            command += [*SMALL[task], *QUIET]
    made = [command for command in commands if "--help" not in command]  # which ends the process
    words = [sys.executable, "-c", WALK, json.dumps(made)]
    ended = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert Path(ended.stdout.splitlines()[-1]).is_relative_to(site)
    tasks = {command[2] for command in made if command[1] == "run" and "--print_config" not in command}
    tested = {json.loads(path.read_text())["task"] for path in Path("lightning_logs").rglob("result.json")}
    assert all(any(name.startswith(task) for name in tested | {"reverse"}) for task in tasks)  # or language_model_email


@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if found])
def test_python(page, in_tmp_dir):
    names = {"__name__": "readme"}
    for block in PYTHON[page]:
        exec(compile(block, page, "exec"), names)


@pytest.fixture
def table(in_tmp_dir, monkeypatch) -> None:
    """The files of the task of the guide."""
    for file, text in FILES.items():
        (in_tmp_dir / file).write_text(text)
    monkeypatch.syspath_prepend(str(in_tmp_dir))
    sys.modules.pop("my_table", None)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_the_task_of_the_guide_learns_and_predicts():
    words = ["fit", "--config", "my_table.yaml", "--lr", "0.01", "--schedule", "cosine", "--warmup", "1", *QUIET]
    run(lambda: run_words(words))
    [path] = Path("lightning_logs").glob("*/kv/version_0/result.json")
    assert json.loads(path.read_text())["val/mae"] < 0.3
    assert "schedule: cosine" in (path.parent / "config.yaml").read_text()
    own = ["--model", "my_table.Regression", "--data", "my_table.Table"]
    run(lambda: run_words(["predict", "--ckpt_path", str(path.parent / "checkpoints/best.ckpt"), *own, *QUIET]))
    assert (path.parent / "predictions.csv").read_text().startswith("example,target,prediction\n")


@pytest.mark.slow
def test_a_search_calls_train(in_tmp_dir, monkeypatch):
    pytest.importorskip("optuna")
    program = block("py", "optuna.create_study").replace("20_000", "256").replace("n_trials=20", "n_trials=2")
    names = {"__name__": "guide"}
    exec(compile(program, "studies.md", "exec"), names)
    assert len(names["study"].trials) == 2
    assert len([*Path("lightning_logs/mqar/kv").glob("version_*/result.json")]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_the_task_of_the_guide_runs_in_a_study_and_its_metric_is_in_the_report(monkeypatch):
    axes = "{attn: [qkv, kv], heads: [1, 2], max_epochs: 2}"
    Path("mine.yaml").write_text(f"tasks: [my_table.yaml]\naxes: {axes}\nseeds: [0, 1]\ntables: [{{metric: test/mae}}]")
    for word in ("run", "report"):
        monkeypatch.setattr(sys, "argv", ["kvt", "study", word, "mine.yaml"])
        main()
    report = Path("lightning_logs/study/reports/mine-full/report.md").read_text()
    assert "8 runs: 8 finished" in report
    assert "## Test absolute error" in report


def test_the_penalty_of_the_guide_is_a_term_of_the_loss_and_lowers_the_entropy(in_tmp_dir):
    (in_tmp_dir / "my_sharp.py").write_text(FILES["my_sharp.py"])
    torch.manual_seed(0)
    task = runpy.run_path("my_sharp.py")["Sharp"]({"vocab_size": 10, "length": 8}, attn="kv", dim=16, dropout=0.0)
    digits = torch.randint(10, (4, 8))
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    entropies = []
    for _ in range(20):
        computed = task.compute_metrics((digits, digits.flip(1)))
        entropies.append(computed["entropy"])
        assert_close(computed["loss"], computed["found"].loss + 0.1 * computed["entropy"])
        optimizer.zero_grad()
        computed["entropy"].backward()
        optimizer.step()
    assert entropies[-1] < entropies[0]
    computed = task.eval().compute_metrics((digits, digits.flip(1)))
    assert computed["loss"] == computed["found"].loss


def test_every_configuration_is_offered_by_a_script():
    scripts = "".join(path.read_text() for path in (REPOSITORY / "experiments").glob("*.py"))
    for path in CONFIGS.glob("*.yaml"):
        assert re.search(rf"\b{path.stem}\b", scripts), path


def test_links_lead_somewhere():
    for page in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "zoo").glob("*.md")]:
        for target in re.findall(r"\]\((?!http|#)([^)]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
