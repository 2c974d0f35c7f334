"""What describes the project agrees with it."""

import argparse
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from _pytest.mark import KeywordMatcher, MarkMatcher
from _pytest.mark.expression import Expression

import kvt
from kvt.attention import ATTENTION, SCORES
from tests.conftest import COLLECTED, REPOSITORY, SKIPPED

PAGES = [path for pages in ("*.md", "docs/*.md", "docs/*/*.md") for path in sorted(REPOSITORY.glob(pages))]
NAMED_BY = [".ci/common", ".ci/nightly", ".ci/run", "pyproject.toml", *(str(p.relative_to(REPOSITORY)) for p in PAGES)]
ROOMS = r"tests|kvt|benchmarks|docs|experiments|zoo|findings|\.ci"
GONE = {
    "docs/performance.md": {"benchmarks/attention.py"},
    "docs/sharing.md": {"experiments/retrofit.py"},
    "docs/results/README.md": {"experiments/retrofit.py"},
}
"""Paths that a page names beside the commit that had them."""

CALL = argparse.ArgumentParser()
"""The arguments of pytest that the scripts use."""
CALL.add_argument("paths", nargs="*")
CALL.add_argument("-m", default="not real and not slow and not browser")
CALL.add_argument("-k", default="")
CALL.add_argument("--ignore", action="append", default=[])
for flag in ("-n", "--durations"):
    CALL.add_argument(flag)


def page(name: str) -> str:
    return (REPOSITORY / name).read_text()


@pytest.mark.parametrize("name", NAMED_BY)
def test_every_file_that_a_page_or_a_script_names_exists(name):
    named = {*re.findall(rf"(?<![\w/.-])(?:{ROOMS})/[\w./+-]*\w", page(name))} - GONE.get(name, set())
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []
    tests = {path.name for path in (REPOSITORY / "tests").rglob("*.py")}
    assert {*re.findall(r"\btest_\w+\.py", page(name))} <= tests


def calls_of_pytest(script: str) -> list[argparse.Namespace]:
    """Return the arguments of each call of pytest in a script."""
    text = page(script).replace("\\\n", " ")
    common = " ".join(re.findall(r"^common\+?=\((.*?)\)", text, re.MULTILINE))
    lines = re.findall(r"^[^#\n]*?\bpytest (.*)", text.replace('"${common[@]}"', common), re.MULTILINE)
    return [CALL.parse_args([*takewhile(lambda word: word not in ";)", words(line))]) for line in lines]


def words(line: str) -> shlex.shlex:
    """Return the words of a line of a shell's script, and its punctuation."""
    split = shlex.shlex(line, posix=True, punctuation_chars=True)
    split.whitespace_split = True
    return split


def test_every_call_of_pytest_in_the_scripts_selects_tests(request):
    calls = [*calls_of_pytest(".ci/run"), *calls_of_pytest(".ci/nightly")]
    assert len(calls) == 10
    assert f"-m '{CALL.get_default('m')}'" in page("pyproject.toml")
    if [Path(name).name for name in request.config.args] != request.config.getini("testpaths"):
        pytest.skip("only a run of all tests collects all tests")
    for call in calls:
        marks, words = Expression.compile(call.m), Expression.compile(call.k) if call.k else None
        for path in {*(call.paths or ["tests"])} - {*request.config.stash[SKIPPED]}:
            assert any(
                item.nodeid.startswith(path)
                and not item.nodeid.startswith(tuple(call.ignore))
                and marks.evaluate(MarkMatcher.from_markers(item.iter_markers()))
                and (words is None or words.evaluate(KeywordMatcher.from_item(item)))
                for item in request.config.stash[COLLECTED]
            ), f"pytest {path} -m {call.m!r} -k {call.k!r} selects no test"


def test_the_gate_runs_the_commands_of_the_readme():
    blocks = re.findall(r"^```bash\n(.*?)^```", page("README.md"), re.MULTILINE | re.DOTALL)
    asked = re.findall(r"^readme (\d+) \"?(.+?)\"?$", page(".ci/run"), re.MULTILINE)
    assert [number for number, _ in asked] == ["1", "2"]
    for number, word in asked:
        (command,) = blocks[int(number) - 1].splitlines()
        assert word in command


def test_the_changelog_begins_with_the_version_and_citations_name_the_last_release():
    unreleased, (released, date), *_ = re.findall(r"^## (\S+), (\S+)$", page("CHANGELOG.md"), re.MULTILINE)
    assert unreleased == (kvt.__version__.removesuffix(".dev0"), "unreleased")
    citation = yaml.safe_load(page("CITATION.cff"))
    assert (citation["version"], str(citation["date-released"])) == (released, date)


def test_a_table_has_every_attention_and_every_score():
    rows = re.findall(r"^\| (`.+?) \|", page("docs/idea.md"), re.MULTILINE)
    assert {*ATTENTION, *SCORES} <= {*re.findall(r"`(.+?)`", " ".join(rows))}


def test_the_workflows_run_what_runs_anywhere():
    for name in ("ci", "nightly"):
        workflow = yaml.safe_load((REPOSITORY / f".github/workflows/{name}.yml").read_text())
        script = workflow["jobs"]["run"]["steps"][-1]["run"]
        assert (REPOSITORY / script).is_file()
