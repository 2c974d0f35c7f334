"""The configuration of a task and of its runs: each setting by its bare name, typed."""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import ArgumentParser

from kvt.system.console import OneLineParser
from kvt.system.errors import UserError, unknown
from kvt.tasks.base import find_class
from kvt.training.flags import read_config
from kvt.training.load_checkpoint import SECTIONS

Config = dict[str, Any]  # seed_everything, model, data and trainer, as `kvt fit --config` reads them: plain data
Shape = frozenset[tuple[str, str]]  # settings by name, each as JSON

EXCLUDED = {  # arguments that no axis may set: the study sets them, or they only concern output and places of files
    "model": {"spec"},
    "data": {"seed", "data_dir"},
    "trainer": {
        *("logger", "callbacks", "default_root_dir", "enable_autolog_hparams", "model_registry"),
        *("devices", "num_nodes", "strategy", "plugins", "sync_batchnorm", "use_distributed_sampler"),
        *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"),
        *("fast_dev_run", "barebones", "profiler", "inference_mode", "limit_predict_batches"),
    },
}
TRAINER = {  # the Trainer's settings with their defaults
    name: parameter.default
    for name, parameter in inspect.signature(L.Trainer).parameters.items()
    if name not in EXCLUDED["trainer"]
} | {"log_every_n_steps": 20}  # the command line's default


class Configuration:
    """The YAML of a task, with the defaults of the classes that it names."""

    def __init__(self, path: Path) -> None:
        self._task = path.stem
        if not path.is_file():
            raise UserError(f"tasks: {path.stem}: no such file: {path}")
        content = read_config(str(path))
        try:
            self._classes = {section: content[section]["class_path"] for section in SECTIONS}
        except (TypeError, KeyError) as error:
            raise UserError(f"tasks: {path}: not a configuration with model: and data:") from error
        given = {section: content[section].get("init_args") or {} for section in SECTIONS}
        given["trainer"] = content.get("trainer", {})
        self._parser = _Parser(exit_on_error=False)
        for section, name in self._classes.items():
            self._parser.add_class_arguments(
                find_class(name, section, SECTIONS[section]), section, skip=EXCLUDED[section]
            )
        self._parser.add_class_arguments(L.Trainer, "trainer", skip=EXCLUDED["trainer"])
        self._defaults = {section: vars(values) for section, values in vars(self._parser.get_defaults()).items()}
        self.section_of = {name: section for section in EXCLUDED for name in self._defaults[section]}
        self._base = self._parse(given)
        for section in self._classes:  # the Trainer's defaults change with Lightning
            self._base[section] = {**self._defaults[section], **self._base[section]}

    def typed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name not in self.section_of:
                raise unknown(f"setting of {self._task}:", name, sorted(self.section_of))
            sections.setdefault(self.section_of[name], {})[name] = value
        parsed = self._parse(sections)
        return {name: parsed[self.section_of[name]][name] for name in settings}

    def resolve(self, settings: Mapping[str, Any], seed: int) -> Config:
        """Return the configuration of a run with these typed settings: the same if a default is written out."""
        sections = {section: {**base} for section, base in self._base.items()}
        for name, value in settings.items():
            sections[self.section_of[name]][name] = value
        config: Config = {"seed_everything": seed}
        for section, name in self._classes.items():
            config[section] = {"class_path": name, "init_args": sections[section]}
        return config | {"trainer": {k: v for k, v in sections["trainer"].items() if v != TRAINER[k]}}

    def name(self, config: Config) -> str:
        """Return a run's name: 12 hexadecimal digits of a hash of its settings that are not their classes' defaults.

        So a new argument with a default renames no run. Where a default has changed, the name stays and
        `differences` tells: the stored configuration has every value.
        """
        asked = dict(config)
        for section, path in self._classes.items():
            settings, defaults = config[section]["init_args"], self._defaults[section]
            asked[section] = {"class_path": path, "init_args": {k: v for k, v in settings.items() if v != defaults[k]}}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]

    def _parse(self, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        parsed = self._parser.parse_object(given, defaults=False).as_dict()
        sections = {section: dict(parsed.get(section, {})) for section in EXCLUDED}
        if sections["model"].get("attn_kwargs") == {}:
            sections["model"]["attn_kwargs"] = None
        return sections


def differences(stored: Config, config: Config) -> list[str]:
    """Return how a stored configuration differs from the current one, by setting: ["length is 8, now 16"].

    Any version of kvt may have stored it. A setting that is not stored is newer than the run, which was made as its
    default makes it.
    """
    ours, theirs = settings_of(config), _stored_settings(stored, config)
    return [
        f"{name.rpartition('.')[2]} is {theirs.get(name)}, now {ours.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def finder(configs: Mapping[str, Config]) -> Callable[[Config], str | None]:
    """Return a function from a stored configuration to the name of the one with equal settings, None without one."""
    like = {_classes(config): config for config in configs.values()}
    names = {json.dumps(settings_of(config), sort_keys=True): name for name, config in configs.items()}

    def find(stored: Config) -> str | None:
        if (config := like.get(_classes(stored))) is None:
            return None  # nor are its classes imported: a result may come from anywhere
        return names.get(json.dumps(_stored_settings(stored, config), sort_keys=True))

    return find


def _classes(config: Config) -> tuple[str, ...]:
    return tuple(config[section]["class_path"] for section in SECTIONS)


def _stored_settings(stored: Config, config: Config) -> dict[str, Any]:
    """Return a stored configuration's settings; those it lacks have the defaults of the classes in `config`."""
    found = settings_of(stored)
    for section in SECTIONS:
        if missing := config[section]["init_args"].keys() - stored[section]["init_args"].keys():
            defaults = _class_defaults(section, config[section]["class_path"])
            found |= {f"{section}.{name}": defaults[name] for name in missing}
    return found


def settings_of(config: Config) -> dict[str, Any]:
    """Return all settings of a run by section and name, such as "model.dim", with the Trainer's defaults."""
    found = {"seed": config["seed_everything"]}
    found |= {f"trainer.{name}": config["trainer"].get(name, default) for name, default in TRAINER.items()}
    for section in SECTIONS:
        found[f"{section}.class"] = config[section]["class_path"]
        settings = config[section]["init_args"].items()
        found |= {f"{section}.{name}": value for name, value in settings if name not in EXCLUDED[section]}
    return json.loads(json.dumps(found))  # as it is stored: a tuple is a list


def shape_of(config: Config) -> Shape:
    """Return the settings that determine a run's duration: runs of one shape take equally long."""
    settings = settings_of(config) | dict.fromkeys(("seed", "model.lr", "data.task"))
    return frozenset((name, json.dumps(value, sort_keys=True)) for name, value in settings.items())


class _Parser(OneLineParser, ArgumentParser):
    pass


@cache  # a study reads many runs of few classes
def _class_defaults(section: str, path: str) -> dict[str, Any]:
    parser = _Parser(exit_on_error=False)
    parser.add_class_arguments(find_class(path, section, SECTIONS[section]), skip=EXCLUDED[section])
    return vars(parser.get_defaults())
