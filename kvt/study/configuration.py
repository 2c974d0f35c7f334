"""A task's configuration, every setting by its bare name and typed."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning as L
import yaml
from jsonargparse import ArgumentParser, Namespace

from kvt.errors import UserError, unknown
from kvt.flags import OneLineErrors

Config = dict[str, Any]
"""seed_everything, model, data and trainer, as `kvt fit --config` reads them: plain data."""

ELSEWHERE = {"model": {"spec"}, "data": {"seed", "data_dir"}, "trainer": {"logger", "callbacks", "default_root_dir"}}
"""What is no setting of a task: it comes from the data, from the study, or says where things lie."""


class Configuration:
    """The YAML of a task, resolved: with the defaults of the classes that it names.

    Args:
        path: experiments/configs/<task>.yaml.

    Raises:
        UserError: no such file, or not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            self.classes = {section: content[section]["class_path"] for section in ("model", "data")}
            given = {section: content[section].get("init_args", {}) for section in self.classes}
            given["trainer"] = content.get("trainer", {})
        except FileNotFoundError as error:
            raise UserError(f"tasks: {path.stem}: there is no {path}") from error
        except (OSError, UnicodeError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"tasks: {path}: not a configuration with model: and data:") from error
        self._parser = _Parser(exit_on_error=False)
        self._section_of: dict[str, str] = {}
        for section, cls in {
            **{s: _find(path, name) for s, name in self.classes.items()},
            "trainer": L.Trainer,
        }.items():
            self._parser.add_class_arguments(cls, section, skip=ELSEWHERE[section])
            names = inspect.signature(cls).parameters.keys() - ELSEWHERE[section]
            self._section_of |= dict.fromkeys(names, section)
        self._base = self._parse(given)
        defaults = self._parser.get_defaults()
        for section in self.classes:  # the Trainer's own are Lightning's, and change with it
            self._base[section] = {**vars(defaults[section]), **self._base[section]}

    def has(self, name: str) -> bool:
        """Whether this is a setting of the task's model, data or Trainer."""
        return name in self._section_of

    def require(self, where: str, name: str) -> None:
        """Makes sure that this is a setting.

        Raises:
            UserError: it is not; `where` says who asked for it.
        """
        if not self.has(name):
            raise unknown(f"setting in {where} for {self.path.stem}:", name, sorted(self._section_of))

    def resolve(self, settings: Mapping[str, Any], seed: int) -> Config:
        """The whole configuration of a run.

        Raises:
            UserError: a setting of a wrong type.
        """
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            sections.setdefault(self._section_of[name], {})[name] = value
        changed = self._parse(sections)
        whole: Config = {"seed_everything": seed}
        for section, name in self.classes.items():
            whole[section] = {"class_path": name, "init_args": {**self._base[section], **changed.get(section, {})}}
        return whole | {"trainer": {**self._base["trainer"], **changed.get("trainer", {})}}

    def _parse(self, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        try:
            parsed: Namespace = self._parser.parse_object(sections, defaults=False)
        except UserError as error:
            raise UserError(f"{self.path.stem}: {error}") from error
        return {section: dict(parsed.as_dict().get(section, {})) for section in (*self.classes, "trainer")}


def fingerprint(config: Config) -> str:
    """Twelve hexadecimal digits that two runs share only if they are the same: what a run is called."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


class _Parser(OneLineErrors, ArgumentParser):
    pass


def _find(path: Path, name: str) -> type:
    found = locate(name)
    if not isinstance(found, type):
        raise UserError(f"tasks: {path}: there is no class {name}")
    return found
