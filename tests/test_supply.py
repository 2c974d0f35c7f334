"""Dependencies are bounded; what they are for works without the extras."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra if "kvt[" not in one)]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_versions_have_two_ends(requirement):
    assert re.search(r"(==[\d.]+|>=\d[\d.]*,<\d+)$", requirement)


WITHOUT_EXTRAS = """
import pkgutil, runpy, sys
from importlib import import_module

missing, *scripts = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing.split()))  # None: an import fails as if it were not installed
import kvt
for module in pkgutil.walk_packages(kvt.__path__, "kvt."):
    import_module(module.name)
sys.path += ["benchmarks", "experiments"]  # as each script finds those beside it
for script in scripts:
    runpy.run_path(script, run_name="imported")
"""


@pytest.mark.slow
def test_every_module_and_script_is_imported_without_the_extras():
    extras = names(REQUIREMENTS) - names(PROJECT["dependencies"])
    installed = {module for module, found in packages_distributions().items() if extras & {*found}}
    scripts = [str(path) for folder in ("experiments", "benchmarks") for path in (REPOSITORY / folder).glob("*.py")]
    words = [sys.executable, "-c", WITHOUT_EXTRAS, " ".join(installed), *scripts]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr


def test_commands_are_imported_without_a_warning():
    subprocess.run([sys.executable, "-W", "error", "-c", "import kvt.commands"], check=True)


def test_tensorboard_starts():
    """Some of its versions do not, beside other packages that pip installs."""
    subprocess.run([sys.executable, "-m", "tensorboard.main", "--version"], check=True)
