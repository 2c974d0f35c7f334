"""What a stranger's run, study and checkpoint call themselves is text to every command.

Each command of kvt, of which none may be left out here, meets names that would clear a terminal, start a line of their
own, or run a program where they are copied to a shell.
"""

import ast
import builtins
import json
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from markdown import markdown

import kvt
from kvt.cli.main import COMMANDS, LIGHTNING, main
from kvt.study.grid import read_grid
from kvt.system.files import CONFIGS
from kvt.system.quoting import Markdown, shell_word
from tests.conftest import REPOSITORY
from tests.helpers.drivers import METRICS, RESULT, finish, write_run

NAME = "x.Y;touch PWNED #\n# owned\n``` \x1b[2J\x9b <img src=x> [a](javascript:b) `c` | *d* ' $(touch PWNED) \\ \u202e"
TABLE = {"table", "thead", "tbody", "tr", "th", "td"}
LOGS, STUDY = Path("logs"), Path("study")
RUN = LOGS / "task" / NAME / "version_0"
BEST = RUN / "checkpoints" / "best.ckpt"
GRID, TASK = f"grid {NAME}.yaml", f"task {NAME}.yaml"
HOUSE = f"house {NAME}"

WORDS = {
    **dict.fromkeys(("generate", "translate", "maps", "validate", "test", "predict"), ("--ckpt_path", BEST)),
    "run": [RUN / "config.yaml"],
    "fit": ["--config", RUN / "config.yaml"],
    "runs": [LOGS],
    "convert": [BEST, "--attn", "kv", "--out", HOUSE],
    "bench": ["--attn", NAME],
    "study run": [GRID, "--folder", STUDY, "--list"],
    "study report": [GRID, "--folder", STUDY, "--out", HOUSE],
    "study record": [GRID, "--from", STUDY, LOGS, "--out", HOUSE],
    "reproduce": (NAME,),
}


@pytest.fixture
def hostile(trained, in_tmp_dir, monkeypatch) -> None:
    """The working directory has a run, a study and a checkpoint whose names are hostile wherever they can be."""
    config = kvt.RunConfig.from_name("reverse").as_dict()
    for part in ("model", "data"):
        config[part] |= {"class_path": NAME}
    config["model"]["init_args"] |= {"attn": NAME, NAME: NAME}
    result = RESULT | METRICS | {f"test/{NAME}": 0.5, "notes": {NAME: NAME}, "task": NAME, "attn": NAME}
    write_run(RUN, result | {"config": config})
    (RUN / "config.yaml").write_text(yaml.safe_dump(config))
    (LOGS / "damaged" / NAME).mkdir(parents=True)
    (LOGS / "damaged" / NAME / "config.yaml").write_text(f"{json.dumps(NAME)}: [")
    content = torch.load(trained("reverse"), weights_only=True)
    content |= {"model_class": NAME, "data_class": NAME, "metrics": {f"val/{NAME}": 0.5}}
    content["hyper_parameters"] |= {"attn": NAME, NAME: NAME}
    BEST.parent.mkdir()
    torch.save(content, BEST)
    Path(TASK).write_text((CONFIGS / "reverse.yaml").read_text())
    grid = {
        "title": NAME,
        "tasks": [TASK],
        "axes": {"lr": [0.1, 0.2]},
        "seeds": [0],
        "scales": {"all": {"about": NAME}},
    }
    Path(GRID).write_text(yaml.safe_dump(grid | {"tables": [{"metric": "test/acc"}]}))
    failed, finished = read_grid(GRID, "all").runs[:2]
    failed.folder(STUDY).mkdir(parents=True)
    (failed.folder(STUDY) / "failure.json").write_text(json.dumps({"error": NAME}))
    finish(finished, STUDY, RESULT | METRICS | {"notes": {NAME: NAME}})
    monkeypatch.setattr(builtins, "input", lambda question: print(question) or "n")


def test_no_command_is_left_out():
    assert WORDS.keys() == COMMANDS.keys() | LIGHTNING.keys()


@pytest.mark.parametrize("command", WORDS)
def test_what_is_printed_is_text_and_what_is_copied_is_one_word(hostile, monkeypatch, capfd, command):
    monkeypatch.setattr("sys.argv", ["kvt", *command.split(), *map(str, WORDS[command])])
    capfd.readouterr()
    with suppress(SystemExit):
        main()
    told = "".join(capfd.readouterr())
    assert told
    assert all(char.isprintable() or char in "\n\t" for char in told), repr(told)
    assert not re.search(r"^\s*(#|touch|```)", told, re.MULTILINE), told
    for asked in re.findall(r"kvt (?:fit|test|maps) --.*|(?<=pass )--.*", told):
        words = in_a_shell(asked)
        assert not Path("PWNED").exists(), asked
        assert NAME[:100] in words or str(BEST) in words or str(RUN / "config.yaml") in words, asked


def in_a_shell(line: str) -> list[str]:
    """Return the words of a line that a user copies into bash."""
    script = f"kvt() {{ printf '%s\\0' \"$@\"; }}\n{line if line.startswith('kvt') else f'kvt {line}'}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")


def test_a_table_of_translations_has_no_markup():
    rows = Markdown("| {} | {} | {} |").format(NAME, NAME, NAME)
    html = markdown(f"| a | b | c |\n|---|---|---|\n{rows}", extensions=["tables"])
    assert {*re.findall(r"<(\w+)", html)} == TABLE
    assert html.count("<td>") == 3


@pytest.mark.parametrize("word", [NAME, "kv", "", "it's", "\n1", "\\", "é\u200b$"])
def test_a_word_for_a_shell_comes_back_from_it_in_one_line(word):
    quoted = shell_word(word)
    assert quoted.isprintable()
    script = ["bash", "-c", f"printf %s {quoted}"]
    assert subprocess.run(script, capture_output=True, check=True).stdout == word.encode()


def test_nothing_is_printed_but_through_the_functions_that_make_it_printable():
    """`tell` and `say` do, and are what commands print with."""
    for path in (REPOSITORY / "kvt").rglob("*.py"):
        if path.name == "console.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "tqdm.write", "sys.stdout.write"):
                made = ast.unparse(node.args[0]).partition("(")[0]
                assert made in ("printable", "one_line"), f"{path}:{node.lineno}: use kvt.system.console.tell"
        assert path.name == "quoting.py" or "shlex" not in path.read_text(), f"{path}: use kvt.system.quoting"
