"""What a command need not import, it does not: who asks for help does not wait for torch."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from kvt.cli.main import COMMANDS, LIGHTNING
from tests.cli.test_runs import make

HEAVY = ("torch", "lightning", "numpy", "pandas", "scipy", "matplotlib")
AFTERWARDS = "import atexit, sys; atexit.register(lambda: print('\\nIMPORTED', *sys.modules)); "
KVT = "from kvt.cli.main import main; main()"


def start(code: str, *words: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A process that ended, and the modules it had imported by then."""
    process = subprocess.run([sys.executable, "-c", AFTERWARDS + code, *words], capture_output=True, text=True)
    output, _, modules = process.stdout.rpartition("\nIMPORTED ")
    return subprocess.CompletedProcess(process.args, process.returncode, output, process.stderr), {*modules.split()}


ONE_AFTER_THE_OTHER = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from kvt.cli.main import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["kvt", *words]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            code = main() or 0
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([words, code, out.getvalue(), err.getvalue(), [*sys.modules]]))
"""


def start_each(*commands: list[str]) -> Iterator[tuple[int, str, str, set[str]]]:
    """Yield the exit code, the output, the errors and the modules imported so far, of commands in one process."""
    process = subprocess.run([sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(commands)], capture_output=True)
    ended = [json.loads(line) for line in process.stdout.splitlines()]
    assert [words for words, *_ in ended] == [*commands], process.stderr
    return ((code, out, err, {*modules}) for _, code, out, err, modules in ended)


def test_help_needs_no_torch():
    commands = [["--version"], ["--help"], *([*name.split(), "--help"] for name in COMMANDS if name != "bench")]
    for words, (code, out, _, modules) in zip(commands, start_each(*commands), strict=True):
        assert code == 0
        assert out.startswith("usage: kvt ") or out == f"kvt {version('kvt')}\n"
        assert not modules & {*HEAVY}, words


@pytest.mark.parametrize("words", [["--version"], ["fitt"]], ids=" ".join)
def test_as_a_module_it_is_the_same_command(words):
    module = subprocess.run([sys.executable, "-m", "kvt", *words], capture_output=True, text=True)
    command, _ = start(KVT, *words)
    assert (module.returncode, module.stdout, module.stderr) == (command.returncode, command.stdout, command.stderr)


def test_a_mistake_in_the_first_words_is_told_without_torch():
    commands: list[list[str]] = [[], ["fitt"], ["study"], ["generate"], ["translate", "--beams", "3"]]
    for words, (code, _, err, modules) in zip(commands, start_each(*commands), strict=True):
        assert code == 2, words
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert not modules & {*HEAVY}, words


def test_reading_runs_needs_no_torch(in_tmp_dir):
    make()
    [(code, _, err, modules)] = start_each(["runs"])
    assert code == 0, err
    assert not modules & {"torch", "lightning", "matplotlib"}


@pytest.mark.slow
def test_bench_needs_no_lightning():
    ended, modules = start(KVT, "bench", "--help")
    assert ended.returncode == 0
    assert "kv+pos" in ended.stdout
    assert not modules & {"lightning", "torchmetrics", "torchvision", "scipy"}


@pytest.mark.slow
def test_training_needs_no_study():
    """Of what is imported for other commands nothing is there, apart from what Lightning itself imports."""
    _, modules = start("import kvt.cli.lightning_cli")
    assert "lightning" in modules
    assert not modules & {"spacy", "markdown", "ray", "datasets", "pandas", "kvt.study", "kvt.bench", "kvt.reports"}


def test_a_progress_bar_starts_no_process():
    """tqdm's own lock starts one where the start method is "forkserver", the default since Python 3.14."""
    bar = "import multiprocessing, tqdm; multiprocessing.set_start_method('forkserver')"
    silent = "from kvt.system.console import silence_libraries; silence_libraries(); tqdm.tqdm(disable=True)"
    process, _ = start(f"{bar}; {silent}; print(open('/proc/thread-self/children').read())")
    assert (process.returncode, process.stdout.strip()) == (0, ""), process.stderr


def test_help_lists_every_command_with_its_own_words():
    text = start(KVT, "--help")[0].stdout
    for name, about in [*LIGHTNING.items(), *((name, about) for name, (_, about) in COMMANDS.items())]:
        assert re.search(rf"^  {name} +{about.split()[0]} ", text, re.MULTILINE), name
