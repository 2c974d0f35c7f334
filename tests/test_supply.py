"""Dependencies are declared, used, bounded, and have a reason."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions

import pytest

from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "pyproject.toml").read_text()
PROJECT = tomllib.loads(TEXT)["project"]
EXTRAS = PROJECT["optional-dependencies"]
USES = {
    "kvt": ["ray"],
    "experiments": ["features"],
    "benchmarks": ["bench"],
    "tests": ["test", "ray", "bench", "features"],
}
"""The extras from which a folder may import."""
NOT_IMPORTED = {"tensorboard", "pytest-xdist"}  # used by Lightning and by pytest
TOOLS = ("check", "dev")  # the extras with programs that CI calls
COMMANDS = {"import-linter": "lint-imports"}  # of tools that are not called by their own name
DISTRIBUTIONS = packages_distributions()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: Iterable[str]) -> set[str]:
    return {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def modules(folder: str) -> Iterator[str]:
    """Yield the top-level modules that the files of a folder import, wherever in them."""
    for path in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.partition(".")[0]


def imported(folder: str) -> set[str]:
    """Return the packages that a folder imports; one that is not installed counts by its module's name."""
    scripts = (path.stem for folder in ("benchmarks", "docs/results") for path in (REPOSITORY / folder).glob("*.py"))
    own = {"kvt", "tests", "nowhere_to_be_found", *scripts}
    foreign = {*modules(folder)} - own - sys.stdlib_module_names
    return {canonical(name) for module in foreign for name in DISTRIBUTIONS.get(module, [module])}


@pytest.mark.parametrize("folder", USES)
def test_what_is_imported_is_declared(folder):
    """A dependency of a dependency may go away."""
    assert imported(folder) <= names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in USES[folder]))


def test_what_every_user_gets_kvt_uses():
    assert names(PROJECT["dependencies"]) - NOT_IMPORTED <= imported("kvt")


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra not in TOOLS])
def test_what_an_extra_brings_is_used(extra):
    used = set().union(*(imported(folder) for folder, extras in USES.items() if extra in extras))
    assert names(EXTRAS[extra]) - NOT_IMPORTED <= used


def test_every_tool_of_a_developer_is_used_by_ci():
    ci = "".join(path.read_text() for path in (REPOSITORY / ".ci").iterdir())
    for tool in names([*EXTRAS["check"], *EXTRAS["dev"]]) - {"kvt"}:
        assert re.search(rf"""^[^#]*\b{COMMANDS.get(tool, tool)}[\s"]""", ci, re.MULTILINE), tool


REQUIREMENTS = [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra if "kvt[" not in one)]


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_versions_have_two_ends(requirement):
    assert re.search(r"(==[\d.]+|>=\d[\d.]*,<\d+)$", requirement)


@pytest.mark.parametrize("requirement", [*PROJECT["dependencies"], *EXTRAS["test"]])
def test_what_is_required_has_a_reason(requirement):
    assert re.search(rf'"{re.escape(requirement)}"[],]* +# \w', TEXT)


WITHOUT_EXTRAS = """
import pkgutil, runpy, sys
from importlib import import_module

missing, *scripts = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing.split()))  # None: an import fails as if it were not installed
import kvt
for module in pkgutil.walk_packages(kvt.__path__, "kvt."):
    import_module(module.name)
sys.path.append("benchmarks")
for script in scripts:
    runpy.run_path(script, run_name="imported")
"""


@pytest.mark.slow
def test_every_module_and_script_is_imported_without_the_extras():
    extras = {name for extra in EXTRAS.values() for name in names(extra)} - {"kvt"} - names(PROJECT["dependencies"])
    installed = {module for module, found in DISTRIBUTIONS.items() if extras & {canonical(name) for name in found}}
    scripts = [str(path) for folder in ("experiments", "benchmarks") for path in (REPOSITORY / folder).glob("*.py")]
    words = [sys.executable, "-c", WITHOUT_EXTRAS, " ".join(installed), *scripts]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr


def test_commands_are_imported_without_a_warning():
    subprocess.run([sys.executable, "-W", "error", "-c", "import kvt.cli.main"], check=True)


def test_tensorboard_starts():
    """Some of its versions do not, beside other packages that pip installs."""
    subprocess.run([sys.executable, "-m", "tensorboard.main", "--version"], check=True)
