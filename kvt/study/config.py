"""A task's configuration: every setting by its bare name, typed."""

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
from kvt.system.files import read_yaml

Config = dict[str, Any]
"""seed_everything, model, data and trainer, as `kvt fit --config` reads them: plain data."""

Shape = frozenset[tuple[str, str]]
"""Settings by name, each as JSON."""

EXCLUDED = {
    "model": {"spec"},
    "data": {"seed", "data_dir"},
    "trainer": {
        *("logger", "callbacks", "default_root_dir", "enable_autolog_hparams", "model_registry"),
        *("devices", "num_nodes", "strategy", "plugins", "sync_batchnorm", "use_distributed_sampler"),
        *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"),
        *("fast_dev_run", "barebones", "profiler", "inference_mode", "limit_predict_batches"),
    },
}
"""Arguments that are no settings: the data or the study sets them, or they only concern places of files and output."""

TRAINER = {
    name: parameter.default
    for name, parameter in inspect.signature(L.Trainer).parameters.items()
    if name not in EXCLUDED["trainer"]
} | {"log_every_n_steps": 20}  # the command line's own
"""The Trainer's settings with their defaults."""


class Configuration:
    """The YAML of a task, with the defaults of the classes that it names.

    Args:
        path: of the YAML, such as kvt/configs/sort.yaml.

    Raises:
        UserError: the file is missing or no configuration.
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
        for section, name in {**self.classes, "trainer": "lightning.Trainer"}.items():
            cls = locate(name)
            if not isinstance(cls, type):
                raise UserError(f"tasks: {path}: there is no class {name}")
            self._parser.add_class_arguments(cls, section, skip=EXCLUDED[section])
            names = inspect.signature(cls).parameters.keys() - EXCLUDED[section]
            self._section_of |= dict.fromkeys(names, section)
        self._typed: dict[tuple[str, str], Any] = {}
        self._base = self._parse(given)
        defaults = self._parser.get_defaults()
        for section in self.classes:  # the Trainer's defaults change with Lightning, and are no part of a run's name
            self._base[section] = {**vars(defaults[section]), **self._base[section]}

    def has(self, name: str) -> bool:
        """Whether this is a setting of the task's model, data or Trainer."""
        return name in self._section_of

    def require(self, name: str, axis: str | None = None) -> None:
        """Raise UserError if this is not a setting; `axis` is the one that sets it together with others."""
        if not self.has(name):
            inside = f" in {axis}" if axis else ""
            raise unknown(f"setting of {self.path.stem}{inside}:", name, sorted(self._section_of))

    def resolve(self, settings: Mapping[str, Any], seed: int) -> Config:
        """Return the whole configuration of a run: the same one whether a default is written out or not.

        Raises:
            UserError: a setting has the wrong type.
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
        """Return a setting's value, typed; cached, for parsing takes a millisecond."""
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
    """Return the name of a run: 12 hexadecimal digits of the hash of its configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def shape_of(config: Config) -> Shape:
    """Return the settings without the seed, the learning rate, and the task where it only selects the data.

    Runs of one shape take equally long, and can be trained as a fleet.
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
