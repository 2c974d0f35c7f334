"""What a command need not import, it does not: who asks for help does not wait for torch."""

import gc
import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from types import FrameType

import pytest

from kvt.cli.main import COMMANDS, LIGHTNING
from kvt.system.console import quick_imports
from tests.conftest import QUIET, REPOSITORY, TINY
from tests.data.test_images import cifar_archives

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
    [["--help"], *([*name.split(), "--help"] for name in COMMANDS if name != "bench")],
    ids=" ".join,
)
def test_help_needs_no_torch(words):
    ended, modules = start(KVT, *words)
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: kvt ")
    assert not modules & {*HEAVY}


def test_the_version_needs_no_torch():
    ended, modules = start(KVT, "--version")
    assert (ended.returncode, ended.stdout) == (0, f"kvt {version('kvt')}\n")
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


@pytest.mark.slow
def test_bench_needs_no_lightning():
    ended, modules = start(KVT, "bench", "--help")
    assert ended.returncode == 0
    assert "kv+pos" in ended.stdout
    assert not modules & {"lightning", "torchmetrics", "torchvision", "pandas", "scipy"}


@pytest.mark.slow
def test_training_needs_no_study():
    """Of what is imported for other commands nothing is there, apart from what Lightning itself imports."""
    _, modules = start("import kvt.training.lightning_cli")
    assert "lightning" in modules
    assert not modules & {"spacy", "markdown", "ray", "pandas", "kvt.study", "kvt.bench", "kvt.reports"}


def test_help_lists_every_command_with_its_own_words():
    text = start(KVT, "--help")[0].stdout
    for name, about in [*LIGHTNING.items(), *((name, about) for name, (_, about) in COMMANDS.items())]:
        assert re.search(rf"^  {name} +{about.split()[0]} ", text, re.MULTILINE), name


def test_the_garbage_collector_rests_during_imports_only():
    with quick_imports():
        assert not gc.isenabled()
        with quick_imports():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import nowhere_to_be_found  # noqa: F401
    assert gc.isenabled()


@pytest.mark.slow
def test_lightning_is_quiet_wherever_it_was_imported():
    code = "import logging; from kvt.system.console import quick_imports, run\ndef command():\n with quick_imports():\n"
    code += "  import lightning\n print(logging.getLogger('lightning.pytorch').level)\nrun(command)"
    assert start(code)[0].stdout.split() == ["30"]


def test_a_run_reaches_its_first_step_through_twenty_files(tmp_path, monkeypatch):
    """Those of the rooms in which a function runs, from `experiments/cifar.py --attn kv` to its first step."""
    cifar_archives(tmp_path, monkeypatch)
    words = ["--attn", "kv", *TINY, "--data_dir", str(tmp_path / "data"), "--val_size", "2", "--batch_size", "2"]
    script = REPOSITORY / "experiments" / "cifar.py"
    monkeypatch.setattr(sys, "argv", [str(script), *words, "--max_steps", "1", *QUIET])
    monkeypatch.chdir(tmp_path)
    rooms = f"{REPOSITORY / 'kvt'}/"
    files = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if event == "call" and path.startswith(rooms):
            if name == "training_step":
                sys.setprofile(None)
            elif name != "<module>" and "/" in path.removeprefix(rooms):
                files.add(path.removeprefix(rooms))

    sys.setprofile(note)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.setprofile(None)
    assert "models/vit.py" in files
    assert len(files) <= 20, sorted(files)
