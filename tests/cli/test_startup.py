"""What a command need not import, it does not: who asks for help does not wait for torch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

from kvt.commands import COMMANDS

HEAVY = ("torch", "lightning", "numpy", "pandas", "scipy", "matplotlib")
ONE_AFTER_THE_OTHER = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from kvt.commands import main

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


def test_help_and_a_mistake_in_the_first_words_need_no_torch():
    helps = [["--version"], ["--help"], *([*name.split(), "--help"] for name in COMMANDS if name != "bench")]
    mistakes: list[list[str]] = [[], ["fitt"], ["study"], ["generate"], ["translate", "--beams", "3"]]
    commands = [*helps, *mistakes]
    for words, (code, out, err, modules) in zip(commands, start_each(*commands), strict=True):
        assert not modules & {*HEAVY}, words
        if words in helps:
            assert code == 0
            assert out.startswith("usage: kvt ") or out == f"kvt {version('kvt')}\n"
        else:
            assert code == 2, words
            assert err.startswith("error: ")
            assert err.count("\n") == 1
