"""What a command need not import, it does not: who asks for help does not wait for torch."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from kvt.cli.main import COMMANDS, LIGHTNING
from tests.reports.test_stored_runs import make

HEAVY = ("torch", "lightning", "numpy", "pandas", "scipy", "matplotlib")
AFTERWARDS = "import atexit, sys; atexit.register(lambda: print('\\nIMPORTED', *sys.modules)); "
KVT = "from kvt.cli.main import main; main()"


def start(code: str, *words: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A process that ended, and the modules it had imported by then."""
    process = subprocess.run([sys.executable, "-c", AFTERWARDS + code, *words], capture_output=True, text=True)
    output, _, modules = process.stdout.rpartition("\nIMPORTED ")
    return subprocess.CompletedProcess(process.args, process.returncode, output, process.stderr), {*modules.split()}


@pytest.mark.parametrize(
    "words",
    [["--version"], ["--help"], *([*name.split(), "--help"] for name in COMMANDS if name != "bench")],
    ids=" ".join,
)
def test_help_needs_no_torch(words):
    ended, modules = start(KVT, *words)
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: kvt ") or ended.stdout == f"kvt {version('kvt')}\n"
    assert not modules & {*HEAVY}


@pytest.mark.parametrize("words", [["--version"], ["fitt"]], ids=" ".join)
def test_as_a_module_it_is_the_same_command(words):
    module = subprocess.run([sys.executable, "-m", "kvt", *words], capture_output=True, text=True)
    command, _ = start(KVT, *words)
    assert (module.returncode, module.stdout, module.stderr) == (command.returncode, command.stdout, command.stderr)


@pytest.mark.parametrize("words", [[], ["fitt"], ["study"], ["generate"], ["translate", "--beams", "3"]], ids=" ".join)
def test_a_mistake_in_the_first_words_is_told_without_torch(words):
    ended, modules = start(KVT, *words)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert not modules & {*HEAVY}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["runs"], 0),
        (["show", "lightning_logs/sort/kv/version_0"], 0),
        (["fit", "--config", "reverse", "--atn", "kv"], 2),
        (["fit", "--config=language_model", "--model.dmi=3"], 2),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_reading_runs_and_a_mistyped_flag_need_no_torch(words, code, in_tmp_dir):
    make()
    ended, modules = start(KVT, *words)
    assert ended.returncode == code, ended.stderr
    assert not modules & {*HEAVY}


@pytest.mark.slow
def test_bench_needs_no_lightning():
    ended, modules = start(KVT, "bench", "--help")
    assert ended.returncode == 0
    assert "kv+pos" in ended.stdout
    assert not modules & {"lightning", "torchmetrics", "torchvision", "pandas", "scipy"}


@pytest.mark.slow
def test_training_needs_no_study():
    """Of what is imported for other commands nothing is there, apart from what Lightning itself imports."""
    _, modules = start("import kvt.cli.lightning_cli")
    assert "lightning" in modules
    assert not modules & {"spacy", "markdown", "ray", "datasets", "pandas", "kvt.study", "kvt.bench", "kvt.reports"}


def test_help_lists_every_command_with_its_own_words():
    text = start(KVT, "--help")[0].stdout
    for name, about in [*LIGHTNING.items(), *((name, about) for name, (_, about) in COMMANDS.items())]:
        assert re.search(rf"^  {name} +{about.split()[0]} ", text, re.MULTILINE), name
