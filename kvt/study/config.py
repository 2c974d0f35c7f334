"""A task's configuration, every setting by its bare name and typed."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning as L
from jsonargparse import ArgumentParser, Namespace

from kvt.system.console import OneLineErrors
from kvt.system.errors import UserError, unknown
from kvt.system.yaml_io import read_yaml

Config = dict[str, Any]
"""seed_everything, model, data and trainer, as `kvt fit --config` reads them: plain data."""

Shape = frozenset[tuple[str, str]]
"""Settings by name, each as JSON."""

ELSEWHERE = {
    "model": {"spec"},
    "data": {"seed", "data_dir"},
    "trainer": {
        *("logger", "callbacks", "default_root_dir", "enable_autolog_hparams", "model_registry"),
        *("devices", "num_nodes", "strategy", "plugins", "sync_batchnorm", "use_distributed_sampler"),
        *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"),
        *("fast_dev_run", "barebones", "profiler", "inference_mode", "limit_predict_batches"),
    },
}
"""What is no setting of a task: it comes from the data, from the study, or says where things lie and what is shown."""

TRAINER = {
    name: parameter.default
    for name, parameter in inspect.signature(L.Trainer).parameters.items()
    if name not in ELSEWHERE["trainer"]
} | {"log_every_n_steps": 20}  # the command line's own
"""The Trainer's settings, each with what it is where nothing is said."""


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
            content = read_yaml(path, f"tasks: {path}")
            self.classes = {section: content[section]["class_path"] for section in ("model", "data")}
            given = {section: content[section].get("init_args", {}) for section in self.classes}
            given["trainer"] = content.get("trainer", {})
        except FileNotFoundError as error:
            raise UserError(f"tasks: {path.stem}: there is no {path}") from error
        except (TypeError, KeyError, AttributeError) as error:
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
        self._typed: dict[tuple[str, str], Any] = {}
        self._base = self._parse(given)
        defaults = self._parser.get_defaults()
        for section in self.classes:  # the Trainer's own are Lightning's, and change with it
            self._base[section] = {**vars(defaults[section]), **self._base[section]}

    def has(self, name: str) -> bool:
        """Whether this is a setting of the task's model, data or Trainer."""
        return name in self._section_of

    def require(self, name: str, axis: str | None = None) -> None:
        """Makes sure that this is a setting.

        Raises:
            UserError: it is not; the axis that sets it with others is named, if there is one.
        """
        if not self.has(name):
            raise unknown(
                f"setting of {self.path.stem}{f' in {axis}' if axis else ''}:", name, sorted(self._section_of)
            )

    def resolve(self, settings: Mapping[str, Any], seed: int) -> Config:
        """The whole configuration of a run. It is the same, however the defaults are written.

        Raises:
            UserError: a setting of a wrong type.
        """
        sections = {section: {**base} for section, base in self._base.items()}
        for name, value in settings.items():
            sections[self._section_of[name]][name] = self._value(name, value)
        if sections["model"].get("attn_kwargs") == {}:
            sections["model"]["attn_kwargs"] = None
        whole: Config = {"seed_everything": seed}
        for section, name in self.classes.items():
            whole[section] = {"class_path": name, "init_args": sections[section]}
        return whole | {"trainer": {k: v for k, v in sections["trainer"].items() if v != TRAINER[k]}}

    def _value(self, name: str, value: Any) -> Any:
        """A setting's value, typed; each is parsed once, for that takes a millisecond."""
        key = name, repr(value)
        if key not in self._typed:
            section = self._section_of[name]
            self._typed[key] = self._parse({section: {name: value}})[section][name]
        return self._typed[key]

    def _parse(self, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        try:
            parsed: Namespace = self._parser.parse_object(sections, defaults=False)
        except UserError as error:
            raise UserError(f"{self.path.stem}: {error}") from error
        return {section: dict(parsed.as_dict().get(section, {})) for section in (*self.classes, "trainer")}


def fingerprint(config: Config) -> str:
    """Twelve hexadecimal digits that two runs share only if they are the same: what a run is called."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def shape_of(config: Config) -> Shape:
    """What runs share that differ but in seed, learning rate, and the task where it only says what the data are.

    They take equally long, and a fleet can train them together.
    """
    model, data = ({"class_path": config[name]["class_path"]} | config[name]["init_args"] for name in ("model", "data"))
    kept = {"model": model | {"lr": None}, "data": data | {"task": None}, "trainer": config["trainer"]}
    return frozenset(
        (f"{section}.{name}", json.dumps(value, sort_keys=True))
        for section, settings in kept.items()
        for name, value in settings.items()
    )


class _Parser(OneLineErrors, ArgumentParser):
    pass


def _find(path: Path, name: str) -> type:
    found = locate(name)
    if not isinstance(found, type):
        raise UserError(f"tasks: {path}: there is no class {name}")
    return found
