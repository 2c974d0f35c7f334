"""What describes the project agrees with it."""

import yaml

import kvt
from kvt.attention import ATTENTION, SCORES
from kvt.tasks.language import spell
from tests.conftest import REPOSITORY


def test_the_version_is_one():
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == kvt.__version__
    assert f"version = {{{kvt.__version__}}}" in (REPOSITORY / "docs/citing.md").read_text()
    assert f"\n## {kvt.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_the_attentions_and_scores_are_as_many_as_the_pages_say():
    named = ("qkv", "kv", "kv+pos", "kv+phase")  # in the README's table
    assert f" {spell(len(ATTENTION))} attentions, {spell(len(SCORES))} scores;" in page("docs/comparison.md")
    assert f"[{spell(len(ATTENTION.keys() - named))} more](docs/idea.md)" in page("README.md")


def page(name: str) -> str:
    return (REPOSITORY / name).read_text()


def test_the_workflows_run_what_runs_anywhere():
    for name in ("ci", "nightly"):
        workflow = yaml.safe_load((REPOSITORY / f".github/workflows/{name}.yml").read_text())
        script = workflow["jobs"]["run"]["steps"][-1]["run"]
        assert (REPOSITORY / script).is_file()


def test_every_form_can_be_filled_in():
    forms = [path for path in (REPOSITORY / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description"} <= {*form}
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
