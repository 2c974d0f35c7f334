"""A shell completes the words of kvt."""

import subprocess
from functools import cache

import pytest
from shtab import SUPPORTED_SHELLS

from kvt.attention.factory import ATTENTION
from kvt.cli import completion
from kvt.cli.main import COMMANDS, LIGHTNING
from tests.conftest import CONFIGS

ASK = """
source ./script
while IFS= read -r line; do
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _shtab_kvt
  echo "${COMPREPLY[@]}"
done
"""
TASKS = {path.stem for path in CONFIGS.glob("*.yaml")}
EXPECTED = {
    "kvt ": {*LIGHTNING, *(name.split()[0] for name in COMMANDS)},
    "kvt study ": {name.split()[1] for name in COMMANDS if name.startswith("study ")},
    "kvt run ": TASKS,
    "kvt fit --attn ": {*ATTENTION},
    "kvt maps --ckpt_path some.ckpt --attn kv+": {"kv+pos", "kv+phase"},
    "kvt predict --config ": TASKS,
    "kvt fit --attn kv --smooth": {"--smoothing"},
    "kvt test --ck": {"--ckpt_path"},
    "kvt study run table": {"table2", "table3"},
    "kvt reproduce table": {"table1", "table2", "table3"},
    "kvt generate --ckpt_path scr": {"script"},
}
"""What bash offers after some words."""


@pytest.fixture
def script(in_tmp_dir, says):
    (in_tmp_dir / "script").write_text("\n".join(says("completion")))


@pytest.mark.usefixtures("script")
def test_bash_offers_what_fits():
    asked = "".join(f"{words}\n" for words in EXPECTED)
    ended = subprocess.run(["bash", "-c", ASK], input=asked, capture_output=True, text=True)
    offered = [{*line.split()} for line in ended.stdout.splitlines()]
    assert dict(zip(EXPECTED, offered, strict=True)) == EXPECTED


def test_each_shell_has_a_script_with_the_settings_of_tasks(monkeypatch, says):
    monkeypatch.setattr(completion, "_all_words", cache(completion._all_words))
    for shell in SUPPORTED_SHELLS:
        assert "objective" in "\n".join(says("completion", "--shell", shell))
